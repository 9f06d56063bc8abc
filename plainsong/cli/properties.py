"""Topic properties as people write them: ``ttl=7d``, ``max_bytes=1GiB``, ``deduplication=default``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from plainsong.cli.times import parse_length_s, show_ttl
from protocol.errors import InvalidProperty, nearest
from protocol.properties import KNOWN, parse_properties

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

#: Stands for whatever the daemon takes when nobody says anything.
DEFAULT = "default"
_SIZE = re.compile(r"(\d{1,19})\s*(B|KiB|MiB|GiB|TiB)?\Z")
_SIZES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def parse_assignments(texts: Iterable[str]) -> dict[str, str]:
    """``NAME=VALUE`` of a command line. Raises InvalidProperty."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidProperty(f"{text[:80]!r} has no value", hint="write NAME=VALUE, for example ttl=7d")
        found[name.strip()] = value.strip()
    return checked(found)


def checked(given: Mapping[str, object]) -> dict[str, str]:
    """Properties with their values as the daemon shows them; ``default`` stays.

    Raises:
      InvalidProperty: an unknown name, or a value that is not allowed; the daemon would say the same.
    """
    found = {}
    for name, value in given.items():
        if name not in KNOWN:
            raise InvalidProperty(f"unknown property {name[:80]!r}", hint=nearest(name, KNOWN))
        found[name] = DEFAULT if value == DEFAULT else _normal(name, value)
    parse_properties({name: value for name, value in found.items() if value != DEFAULT})
    return found


def _normal(name: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InvalidProperty(f"{name} is {value!r}", hint="use a number or a string")
    text = str(value)
    if name == "ttl" and (seconds := parse_length_s(text)) is not None and seconds.is_integer():
        return str(int(seconds))
    if name == "max_bytes" and (size := _SIZE.match(text)):
        return str(int(size[1]) * _SIZES[size[2] or "B"])
    return text


def merged(current: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, Any]:
    """What to send so that only ``changes`` change: the daemon replaces all properties at once."""
    kept = {name: value for name, value in current.items() if name in KNOWN}
    return {name: value for name, value in {**kept, **changes}.items() if value != DEFAULT}


def differences(current: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, tuple[str | None, str]]:
    """What ``wanted`` would change: name → (what it is, what it will be)."""
    found = {}
    for name, value in wanted.items():
        has = current.get(name)
        # The daemon's defaults are its own: only a property that is not shown is known to be at its default.
        if has != value and not (value == DEFAULT and has in (None, *_KNOWN_DEFAULTS.get(name, ()))):
            found[name] = (has, value)
    return found


_KNOWN_DEFAULTS = {"transactional": ("optional",), "deduplication": ("inherit",)}


def show_property(name: str, value: str | None) -> str:
    """A value for people: seconds and bytes in words."""
    if value is None:
        return "none"
    if value.isdigit() and name == "ttl":
        return show_ttl(int(value))
    if value.isdigit() and name == "max_bytes":
        return show_exact_size(int(value))
    return value


def show_exact_size(count: int) -> str:
    """Bytes as ``max_bytes`` reads them again: ``1GiB``, ``1500B``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count and count % _SIZES[unit] == 0:
            return f"{count // _SIZES[unit]}{unit}"
    return f"{count}B"
