"""What operators have said about who owns what: topics pinned to an instance, instances drained of all topics.

{"pins": {"<namespace>:<topic>": "<instance>"}, "drained": ["<instance>"]}
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from protocol.errors import Conflict, InvalidName, InvalidParameter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from protocol.names import TopicName

#: The largest text of all pins and drains: ZooKeeper keeps nodes of up to 1 MiB.
MAX_PLACEMENT_BYTES = 900_000

_INSTANCE = re.compile(r"[a-zA-Z0-9_.-]{1,100}\Z")


class UnreadablePlacement(ValueError):
    """The text is none of ours."""


class NameTaken(Conflict):
    """Another instance of the same name is there."""

    def __init__(self, instance: str, address: str) -> None:
        super().__init__(
            f"cluster.instance {instance} is taken by the instance at {address}",
            hint="give each instance a name of its own, or end that one",
        )
        self.address = address


@dataclass(frozen=True, slots=True)
class Placement:
    """Pins and drains; never changed, only replaced."""

    pins: Mapping[str, str] = field(default_factory=dict)
    """Instances by ``namespace:topic``."""
    drained: frozenset[str] = frozenset()
    """Instances that are to own nothing."""

    def encode(self) -> bytes:
        """As text. Raises InvalidParameter when that is over ``MAX_PLACEMENT_BYTES``."""
        value = {"pins": dict(sorted(self.pins.items())), "drained": sorted(self.drained)}
        text = json.dumps(value, separators=(",", ":")).encode()
        if len(text) > MAX_PLACEMENT_BYTES:
            raise InvalidParameter(f"{len(self.pins)} topics are pinned already", hint="unpin some of them first")
        return text

    @classmethod
    def decode(cls, text: bytes) -> Self:
        """The reverse; an empty text says nothing. Raises UnreadablePlacement."""
        if not text:
            return cls()
        try:
            value = json.loads(text)
            pins, drained = value["pins"], value["drained"]
            if all(isinstance(each, str) for each in (*pins.values(), *drained)):
                return cls(dict(pins), frozenset(drained))
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
        raise UnreadablePlacement(f"{text[:80]!r} is no placement")

    def pinned(self, name: TopicName, instance: str) -> Placement:
        """With a topic pinned to an instance."""
        return Placement({**self.pins, str(name): instance}, self.drained)

    def unpinned(self, name: TopicName) -> Placement:
        """With a topic where its hash says."""
        return Placement({key: to for key, to in self.pins.items() if key != str(name)}, self.drained)

    def with_drained(self, instance: str, *, drained: bool) -> Placement:
        """With an instance drained, or not."""
        names = self.drained | {instance} if drained else self.drained - {instance}
        return Placement(self.pins, names)


def instance_name(text: str) -> str:
    """``text`` if it may name an instance. Raises InvalidName."""
    if _INSTANCE.match(text):
        return text
    raise InvalidName(f"instance {text[:80]!r} is not allowed", hint="use 1 to 100 letters, digits, _, - and .")
