"""The properties of a topic: their defaults, which values are allowed, and how they are shown and stored."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

from plainsong.protocol.errors import InvalidProperty, nearest
from plainsong.protocol.requests import MAX_TTL_S

T = TypeVar("T")
Transactional = Literal["optional", "required", "disabled"]
Deduplication = Literal["inherit", "enabled", "disabled"]
Chaining = Literal["none", "sha256"]
#: Seven days, as in the original service.
DEFAULT_TTL_S = 7 * 24 * 3600
_CHOICES: dict[str, tuple[str, ...]] = {
    "transactional": ("optional", "required", "disabled"),
    "deduplication": ("inherit", "enabled", "disabled"),
    "chain": ("none", "sha256"),
}
#: Longer numbers are not shown.
_SHOWN_BITS = 200
KNOWN = ("ttl", "transactional", "deduplication", "max_bytes", "chain")


@dataclass(frozen=True, slots=True)
class TopicProperties:
    """All properties of a topic, each with its default."""

    ttl_s: int = DEFAULT_TTL_S
    """Seconds a message lives, counted from its publish time."""
    transactional: Transactional = "optional"
    """Determines whether publishes may or must carry a write pointer."""
    deduplication: Deduplication = "inherit"
    """Determines whether producers' sequence ids are remembered; ``inherit``: the namespace or the service decides."""
    max_bytes: int | None = None
    """Bytes the topic may hold; None: bounded by the disk only."""
    chain: Chaining = "none"
    """Determines whether every request carries a hash of all earlier ones."""

    @property
    def ttl_ms(self) -> int:
        return self.ttl_s * 1000

    def shown(self, generation: int) -> dict[str, str]:
        """The answer to ``GET``: every value as a string, with the generation."""
        out = {
            "ttl": str(self.ttl_s),
            "generation": str(generation),
            "transactional": self.transactional,
            "deduplication": self.deduplication,
        }
        if self.max_bytes is not None:
            out["max_bytes"] = str(self.max_bytes)
        if self.chain != "none":
            out["chain"] = self.chain
        return out

    def agrees_with(self, other: TopicProperties, names: Collection[str] | None) -> bool:
        """True if ``other`` has the same values of these properties, as clients name them; of all for None."""
        if names is None:
            return self == other
        mine, others = self.shown(1), other.shown(1)
        return all(mine.get(name) == others.get(name) for name in names)

    def stored(self) -> dict[str, str | int]:
        """The form in the metadata row."""
        kept: dict[str, str | int] = {
            "ttl": self.ttl_s,
            "transactional": self.transactional,
            "deduplication": self.deduplication,
        }
        if self.max_bytes is not None:
            kept["max_bytes"] = self.max_bytes
        if self.chain != "none":
            # Left out otherwise: versions without chains refuse the metadata of a chained topic, and only of one.
            kept["chain"] = self.chain
        return kept


def parse_properties(given: object, *, default_ttl_s: int = DEFAULT_TTL_S) -> TopicProperties:
    """The properties from a client's body; absent ones get their default.

    Args:
      given: a decoded JSON object, or None for none. Its ``generation`` is ignored: ``GET`` shows one, and clients of
        the original service send one with each creation.
      default_ttl_s: the time to live when ``given`` names none.
    Raises:
      InvalidProperty: an unknown key (the nearest known one is named) or a value that is not allowed.
    """
    if given is None:
        return TopicProperties(ttl_s=default_ttl_s)
    if not isinstance(given, Mapping):
        raise InvalidProperty("properties are a JSON object", hint='for example {"ttl": 3600}')
    values = dict(given)
    values.pop("generation", None)
    for key in values:
        if key not in KNOWN:
            raise InvalidProperty(f"unknown property {str(key)[:80]!r}", hint=nearest(str(key), KNOWN))
    return TopicProperties(
        ttl_s=_number(values, "ttl", default_ttl_s, 1, MAX_TTL_S),
        transactional=cast("Transactional", _choice(values, "transactional")),
        deduplication=cast("Deduplication", _choice(values, "deduplication")),
        max_bytes=_number(values, "max_bytes", None, 1, (1 << 63) - 1),
        chain=cast("Chaining", _choice(values, "chain")),
    )


def stored_properties(stored: object) -> TopicProperties:
    """The properties in a metadata row.

    Where ``topic.default_ttl_s`` exceeded the longest time to live of a topic, earlier versions wrote it and then
    refused to read it: it counts as the longest.

    Raises:
      InvalidProperty: as ``parse_properties``.
    """
    if isinstance(stored, Mapping) and isinstance(ttl_s := stored.get("ttl"), int) and ttl_s > MAX_TTL_S:
        stored = {**stored, "ttl": MAX_TTL_S}
    return parse_properties(stored)


def _number(values: Mapping[str, object], key: str, default: T, low: int, high: int) -> int | T:
    value = values.get(key)
    if value is None and key not in values:
        return default
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return value
    raise InvalidProperty(f"{key} is {shown_value(value)}", hint=f"use a whole number from {low} to {high}")


def _choice(values: Mapping[str, object], key: str) -> str:
    allowed = _CHOICES[key]
    value = values.get(key, allowed[0])
    if isinstance(value, str) and value in allowed:
        return value
    raise InvalidProperty(f"{key} is {shown_value(value)}", hint="use one of: " + ", ".join(allowed))


def shown_value(value: object) -> str:
    """Return a refused value for an error. Python cannot format deeply nested values or very long numbers."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return "an array"
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return "a number with too many digits"
    return repr(str(value)[:80])
