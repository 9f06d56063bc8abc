"""Which instance owns a topic: weighted rendezvous hashing, with topics pinned and instances drained by hand.

Each instance draws a number for each topic, and the least owns it; a larger weight makes its numbers smaller. An
instance that comes takes only the topics for which it draws the least, one that goes leaves only its own: nothing else
moves. Whoever has the same members and the same placement comes to the same owners, in any process, at any time.

An instance draws for topics of the slices only in which it takes part (``slices.py``). Topics of a slice in which
nobody does are drawn for by all who are not leaving.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from math import log
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from protocol.cluster.slices import SLICES, slice_of

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
    """Whether it is shutting down: what is left of its topics is on its way to the others."""
    slices: int = SLICES
    """In how many slices it takes part: topics of the others are not its own."""


#: Those who draw for the topics of a slice, in order: name and weight.
_Drawing: TypeAlias = "tuple[tuple[str, int], ...]"


class _Remembered(NamedTuple):
    """Who owned a topic among whom."""

    owner: str
    drawing: _Drawing
    slice: int


class Assignment:
    """The owners of all topics, as long as neither the members nor the placement change."""

    def __init__(self, members: Iterable[Member], placement: Placement, *, before: Assignment | None = None) -> None:
        """``before``: one whose findings are used where they still hold, as in most slices after a step."""
        self.members = tuple(sorted(members, key=lambda member: member.name))
        self.placement = placement
        self._by_name = {member.name: member for member in self.members}
        self._remembered: dict[TopicName, _Remembered] = {}
        known: dict[_Drawing, _Drawing] = {}
        if before is not None and before.placement.pins == placement.pins:
            self._remembered = before._remembered
            known = {drawing: drawing for drawing in before._drawing}
        #: By slice. Equal ones are one object, by which is seen whether what is remembered still holds.
        self._drawing: list[_Drawing] = [
            known.setdefault(drawing, drawing) for drawing in map(self._draw_for, range(SLICES))
        ]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Assignment):
            return NotImplemented
        return self.members == other.members and self.placement == other.placement

    def __hash__(self) -> int:
        return hash(self.members)

    def __repr__(self) -> str:
        return f"<Assignment to {', '.join(self._by_name) or 'nobody'}>"

    def _draw_for(self, number: int) -> _Drawing:
        taking = [member for member in self.members if number < member.slices]
        # With none that takes part there would be nobody left: then those who stay do, drained or not.
        found = taking or [member for member in self.members if not member.leaving]
        return tuple((member.name, member.weight) for member in found)

    def owner(self, name: TopicName) -> Member | None:
        """Who owns a topic, whether it exists or not; None: nobody is there."""
        found = self._remembered.get(name)
        if found is None or found.drawing is not self._drawing[found.slice]:
            number = slice_of(name)
            drawing = self._drawing[number]
            if not drawing:
                return None
            found = _Remembered(self._least(name, drawing), drawing, number)
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[name] = found
        return self._by_name[found.owner]

    def _least(self, name: TopicName, drawing: _Drawing) -> str:
        pinned = self.placement.pins.get(str(name))
        if pinned is not None and any(pinned == drawer for drawer, _ in drawing):
            return pinned
        return min((draw(drawer, weight, name), drawer) for drawer, weight in drawing)[1]


def draw(member: str, weight: int, name: TopicName) -> float:
    """The number that an instance draws for a topic, above 0: exponentially distributed, its weight the rate."""
    digest = blake2b(f"{member}\0{name}".encode(), digest_size=8).digest()
    return -log((int.from_bytes(digest, "big") + 0.5) / _DRAWS) / weight
