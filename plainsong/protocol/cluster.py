"""Which instance owns a topic: weighted rendezvous hashing over slices, with topics pinned and instances drained by hand.

What operators have said about who owns what: topics pinned to an instance, instances drained of all topics.

{"pins": {"<namespace>:<topic>": "<instance>"}, "drained": ["<instance>"]}
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from math import log
from typing import TYPE_CHECKING, NamedTuple, Self, TypeAlias

from plainsong.protocol.errors import Conflict, InvalidName, InvalidParameter

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from plainsong.protocol.names import TopicName

#: The largest text of all pins and drains: ZooKeeper keeps nodes of up to 1 MiB.
MAX_PLACEMENT_BYTES = 900_000
_INSTANCE = re.compile(r"[a-zA-Z0-9_.-]{1,100}\Z")
#: How many there are: a hand-over has at most so many steps.
SLICES = 64
#: Topics that change hands in one step, unless there are more than so many for each slice.
TOPICS_PER_STEP = 50
#: Owners that are remembered, since most topics are asked about again and again.
MAX_REMEMBERED = 100_000
_HASHES = float(1 << 64)


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
_Candidates: TypeAlias = "tuple[tuple[str, int], ...]"


class _Remembered(NamedTuple):
    """Who owned a topic among whom."""

    owner: str
    candidates: _Candidates
    slice: int


class Assignment:
    """The owners of all topics, as long as neither the members nor the placement change."""

    def __init__(self, members: Iterable[Member], placement: Placement, *, before: Assignment | None = None) -> None:
        """``before``: one whose findings are used where they still hold, as in most slices after a step."""
        self.members = tuple(sorted(members, key=lambda member: member.name))
        self.placement = placement
        self._by_name = {member.name: member for member in self.members}
        self._remembered: dict[TopicName, _Remembered] = {}
        known: dict[_Candidates, _Candidates] = {}
        if before is not None and before.placement.pins == placement.pins:
            self._remembered = before._remembered
            known = {candidates: candidates for candidates in before._candidates}
        #: By slice. Equal ones are one object, by which is seen whether what is remembered still holds.
        self._candidates: list[_Candidates] = [
            known.setdefault(candidates, candidates) for candidates in map(self._candidates_of, range(SLICES))
        ]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Assignment):
            return NotImplemented
        return self.members == other.members and self.placement == other.placement

    def __hash__(self) -> int:
        return hash(self.members)

    def __repr__(self) -> str:
        return f"<Assignment to {', '.join(self._by_name) or 'nobody'}>"

    def _candidates_of(self, number: int) -> _Candidates:
        taking = [member for member in self.members if number < member.slices]
        # With none that takes part there would be nobody left: then those who stay do, drained or not.
        found = taking or [member for member in self.members if not member.leaving]
        return tuple((member.name, member.weight) for member in found)

    def owner(self, name: TopicName) -> Member | None:
        """Who owns a topic, whether it exists or not; None: nobody is there."""
        found = self._remembered.get(name)
        if found is None or found.candidates is not self._candidates[found.slice]:
            number = slice_of(name)
            candidates = self._candidates[number]
            if not candidates:
                return None
            found = _Remembered(self._lowest_score(name, candidates), candidates, number)
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[name] = found
        return self._by_name[found.owner]

    def _lowest_score(self, name: TopicName, candidates: _Candidates) -> str:
        pinned = self.placement.pins.get(str(name))
        if pinned is not None and any(pinned == candidate for candidate, _ in candidates):
            return pinned
        return min((rendezvous_score(candidate, weight, name), candidate) for candidate, weight in candidates)[1]


def rendezvous_score(member: str, weight: int, name: TopicName) -> float:
    """The number that an instance draws for a topic, above 0: exponentially distributed, its weight the rate."""
    digest = blake2b(f"{member}\0{name}".encode(), digest_size=8).digest()
    return -log((int.from_bytes(digest, "big") + 0.5) / _HASHES) / weight


# --- placement -------------------------------------------------------------------------------------
#
# What operators decide by hand: topics pinned to an instance, instances drained of all topics.
#
#     {"pins": {"<namespace>:<topic>": "<instance>"}, "drained": ["<instance>"]}


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


class UnreadablePlacement(ValueError):
    """The text is none of ours."""


def instance_name(text: str) -> str:
    """``text`` if it may name an instance. Raises InvalidName."""
    if _INSTANCE.match(text):
        return text
    raise InvalidName(f"instance {text[:80]!r} is not allowed", hint="use 1 to 100 letters, digits, _, - and .")


class NameTaken(Conflict):
    """Another instance of the same name is there."""

    def __init__(self, instance: str, address: str) -> None:
        super().__init__(
            f"cluster.instance {instance} is taken by the instance at {address}",
            hint="give each instance a name of its own, or end that one",
        )
        self.address = address


# --- slices ----------------------------------------------------------------------------------------
#
# Topics change hands step by step: each falls into one of 64 slices, and an instance announces in how many it takes
# part.
#
#     0 … slices - 1    the instance owns its share of these topics
#     slices … 63       these topics belong to the other instances
#
# An instance that joins raises its figure step by step; one that leaves or is drained lowers it. A topic outside the
# slices of a step stays where it is and is served meanwhile.


@lru_cache(100_000)
def slice_of(name: TopicName) -> int:
    """The slice of a topic, 0 to 63; the same in every process and for ever."""
    return blake2b(str(name).encode(), digest_size=1, person=b"slice").digest()[0] % SLICES


def wanted_slices(members: Iterable[Member], placement: Placement, name: str) -> int:
    """In how many slices an instance that stays is to take part in the end: all; none if it is drained, as others are not."""
    drained = placement.drained
    others = (each for each in members if each.name != name and not each.leaving)
    return 0 if name in drained and any(each.name not in drained for each in others) else SLICES


def first_slices(members: Iterable[Member], me: Member) -> int:
    """In how many slices an instance begins that comes to these members.

    All where nobody has topics; none where others do; and what it had where its own process of before is still thought
    to be there: these topics are nobody else's.
    """
    if me.leaving:
        return 0
    others = 0
    for each in members:
        if each.name == me.name:
            return each.slices if each.address == me.address else 0
        others += each.slices
    return 0 if others else SLICES


def lowered_slices(slices: int, topics: Iterable[TopicName]) -> int:
    """The next figure of an instance that gives away what it has open: some ``PORTION`` of them less."""
    counts = [0] * SLICES
    for name in topics:
        counts[slice_of(name)] += 1
    given = 0
    while slices > 0 and (given == 0 or given + counts[slices - 1] <= TOPICS_PER_STEP):
        slices -= 1
        given += counts[slices]
    return slices


def raised_slices(slices: int, *, begun_at: int, came: int) -> int:
    """The next figure of an instance that takes its share, of which it does not know how much it is.

    Args:
      begun_at: its figure when it began.
      came: topics that have become its own since then.
    """
    if slices == begun_at:
        return min(SLICES, slices + 1)
    return min(SLICES, slices + max(1, TOPICS_PER_STEP * (slices - begun_at) // (came + 1)))
