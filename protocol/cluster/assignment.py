"""Which instance owns a topic: weighted rendezvous hashing, with topics pinned and instances drained by hand.

Each instance draws a number for each topic, and the least owns it; a larger weight makes its numbers smaller. An
instance that comes takes only the topics for which it draws the least, one that goes leaves only its own: nothing else
moves. Whoever has the same members and the same placement comes to the same owners, in any process, at any time.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from math import log
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from protocol.cluster.placement import Placement
    from protocol.names import TopicName

#: Owners that are remembered, since most topics are asked about again and again.
MAX_REMEMBERED = 100_000

_DRAWS = float(1 << 64)


@dataclass(frozen=True, slots=True)
class Member:
    """An instance that is there."""

    name: str
    address: str
    """``host:port`` where clients and other instances reach it."""
    weight: int = 100
    """Its share of the topics, as compared to the others'."""
    leaving: bool = False
    """Whether it is shutting down: its topics are the others' already."""


class Assignment:
    """The owners of all topics, as long as neither the members nor the placement change."""

    def __init__(self, members: Iterable[Member], placement: Placement) -> None:
        self.members = tuple(sorted(members, key=lambda member: member.name))
        self.placement = placement
        staying = [member for member in self.members if not member.leaving]
        # Drained altogether there would be nobody left: then it means nothing.
        self._candidates = [each for each in staying if each.name not in placement.drained] or staying
        self._by_name = {member.name: member for member in self._candidates}
        self._remembered: dict[TopicName, Member | None] = {}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Assignment):
            return NotImplemented
        return self.members == other.members and self.placement == other.placement

    def __hash__(self) -> int:
        return hash(self.members)

    def __repr__(self) -> str:
        return f"<Assignment to {', '.join(self._by_name) or 'nobody'}>"

    def owner(self, name: TopicName) -> Member | None:
        """Who owns a topic, whether it exists or not; None: nobody is there."""
        try:
            return self._remembered[name]
        except KeyError:
            pass
        owner = self._by_name.get(self.placement.pins.get(str(name), "")) or self._drawn(name)
        if len(self._remembered) >= MAX_REMEMBERED:
            self._remembered.clear()
        self._remembered[name] = owner
        return owner

    def _drawn(self, name: TopicName) -> Member | None:
        return min(self._candidates, key=lambda member: (draw(member, name), member.name), default=None)


def draw(member: Member, name: TopicName) -> float:
    """The number that an instance draws for a topic, above 0: exponentially distributed, its weight the rate."""
    digest = blake2b(f"{member.name}\0{name}".encode(), digest_size=8).digest()
    return -log((int.from_bytes(digest, "big") + 0.5) / _DRAWS) / member.weight
