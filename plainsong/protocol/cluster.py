"""The owners of topics: weighted rendezvous hashing over slices, with pinned topics and drained instances.

For each topic every instance has a score, and the lowest one owns it; a larger weight makes scores smaller. An instance
that joins takes only the topics for which it scores lowest, one that leaves gives up only its own: no other topic
moves. Equal members and an equal placement give equal owners, in any process, at any time.

An instance competes for topics of the slices in which it takes part. For topics of a slice in which no instance takes
part, all that are not leaving compete.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from math import log
from typing import TYPE_CHECKING, NamedTuple, Self, TypeAlias

from plainsong.protocol.errors import Conflict, InvalidParameter

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from plainsong.protocol.names import TopicName

#: The header of a forwarded answer with the address of the instance that owns the topic.
OWNER_HEADER = "Plainsong-Owner"
#: The largest text of all pins and drains: ZooKeeper keeps nodes of up to 1 MiB.
MAX_PLACEMENT_BYTES = 900_000
#: The number of slices, and so the most steps of a handover.
SLICES = 64
#: Topics that change hands in one step, unless a single slice has more.
TOPICS_PER_STEP = 50
#: Owners kept in memory, since most topics are requested again and again.
MAX_REMEMBERED = 100_000
_HASHES = float(1 << 64)


@dataclass(frozen=True, slots=True)
class Member:
    """An instance of the cluster."""

    name: str
    address: str
    """``host:port`` where clients and other instances reach it."""
    weight: int = 100
    """Its share of the topics, relative to the other weights."""
    leaving: bool = False
    """True while it is shutting down: its remaining topics are moving to the others."""
    slices: int = SLICES
    """The number of slices in which it takes part."""
    proof: str | None = None
    """A fingerprint of its ``cluster.secret_file``; empty if it has none, None if it is of a version without this field."""
    since: int = field(default=0, compare=False)
    """Orders the nodes of instances by their creation; 0 if it has no node."""


#: The instances that compete for the topics of a slice, in order: name and weight.
_Candidates: TypeAlias = "tuple[tuple[str, int], ...]"


class _Remembered(NamedTuple):
    """The owner of a topic, and the candidates among which it was found."""

    owner: str
    candidates: _Candidates
    slice: int


class Assignment:
    """The owner of every topic, for fixed members and a fixed placement."""

    def __init__(self, members: Iterable[Member], placement: Placement, *, before: Assignment | None = None) -> None:
        """``before``: an earlier assignment; its results are reused if they are still valid."""
        self.members = tuple(sorted(members, key=lambda member: member.name))
        self.placement = placement
        self._by_name = {member.name: member for member in self.members}
        self._remembered: dict[TopicName, _Remembered] = {}
        known: dict[_Candidates, _Candidates] = {}
        if before is not None and before.placement.pins == placement.pins:
            self._remembered = before._remembered
            known = {candidates: candidates for candidates in before._candidates}
        #: By slice. Equal candidates are one object, so an identity check shows if a cached owner is still valid.
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
        return f"<Assignment to {', '.join(self._by_name) or 'no instance'}>"

    def _candidates_of(self, number: int) -> _Candidates:
        taking = [member for member in self.members if number < member.slices]
        # A slice in which no instance takes part falls to all that stay, drained or not.
        found = taking or [member for member in self.members if not member.leaving]
        return tuple((member.name, member.weight) for member in found)

    def owner(self, name: TopicName) -> Member | None:
        """The owner of a topic, whether or not the topic exists; None if there is no instance."""
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
    """An instance's score for a topic, above 0: exponentially distributed, with its weight as the rate."""
    digest = blake2b(f"{member}\0{name}".encode(), digest_size=8).digest()
    return -log((int.from_bytes(digest, "big") + 0.5) / _HASHES) / weight


# --- placement -------------------------------------------------------------------------------------
#
# The operators' decisions: topics pinned to an instance, instances drained of all topics.
#
#     {"pins": {"<namespace>:<topic>": "<instance>"}, "drained": ["<instance>"]}


@dataclass(frozen=True, slots=True)
class Placement:
    """Pins and drains; immutable."""

    pins: Mapping[str, str] = field(default_factory=dict)
    """Topic, as ``namespace:topic`` → instance."""
    drained: frozenset[str] = frozenset()
    """Instances that must own nothing."""

    def encode(self) -> bytes:
        """The JSON text. Raises InvalidParameter when it is over ``MAX_PLACEMENT_BYTES``."""
        value = {"pins": dict(sorted(self.pins.items())), "drained": sorted(self.drained)}
        text = json.dumps(value, separators=(",", ":")).encode()
        if len(text) > MAX_PLACEMENT_BYTES:
            raise InvalidParameter(f"{len(self.pins)} topics are pinned already", hint="unpin some of them first")
        return text

    @classmethod
    def decode(cls, text: bytes) -> Self:
        """The placement of a JSON text; an empty one has no pins and no drains. Raises UnreadablePlacement."""
        if not text:
            return cls()
        try:
            value = json.loads(text)
            pins, drained = value["pins"], value["drained"]
            if all(isinstance(each, str) for each in (*pins.values(), *drained)):
                return cls(dict(pins), frozenset(drained))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        raise UnreadablePlacement(f"{text[:80]!r} is not a placement")

    def pinned(self, name: TopicName, instance: str) -> Placement:
        """A copy with a topic pinned to an instance."""
        return Placement({**self.pins, str(name): instance}, self.drained)

    def unpinned(self, name: TopicName) -> Placement:
        """A copy without a topic's pin."""
        return Placement({key: to for key, to in self.pins.items() if key != str(name)}, self.drained)

    def with_drained(self, instance: str, *, drained: bool) -> Placement:
        """A copy with an instance drained, or not."""
        names = self.drained | {instance} if drained else self.drained - {instance}
        return Placement(self.pins, names)


class UnreadablePlacement(ValueError):
    """The text is not a placement."""


class NameTaken(Conflict):
    """Another instance has the same name."""

    def __init__(self, instance: str, address: str) -> None:
        super().__init__(
            f"cluster.instance {instance} is taken by the instance at {address}",
            hint="give each instance a name of its own, or stop that one",
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
# slices of a step stays where it is, and is served during the step.


@lru_cache(100_000)
def slice_of(name: TopicName) -> int:
    """The slice of a topic, 0 to 63; the same in every process and forever."""
    return blake2b(str(name).encode(), digest_size=1, person=b"slice").digest()[0] % SLICES


def wanted_slices(members: Iterable[Member], placement: Placement, name: str) -> int:
    """The final number of slices of an instance that stays: all; none if it is drained while another is not."""
    drained = placement.drained
    others = (each for each in members if each.name != name and not each.leaving)
    return 0 if name in drained and any(each.name not in drained for each in others) else SLICES


def first_slices(members: Iterable[Member], me: Member) -> int:
    """The number of slices in which an instance that joins these members takes part at first.

    It takes part in all slices if no other instance has topics, and in none if one has. If its own earlier process still
    counts as a member, it keeps that one's number: no other instance owns these topics.
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
    """The next number of slices of an instance that gives up open topics: about ``TOPICS_PER_STEP`` fewer topics."""
    counts = [0] * SLICES
    for name in topics:
        counts[slice_of(name)] += 1
    given = 0
    while slices > 0 and (given == 0 or given + counts[slices - 1] <= TOPICS_PER_STEP):
        slices -= 1
        given += counts[slices]
    return slices


def raised_slices(slices: int, *, begun_at: int, came: int) -> int:
    """The next number of slices of an instance that takes its share without knowing how many topics that is.

    Args:
      begun_at: its number of slices when it began.
      came: topics that it has taken over since then.
    """
    if slices == begun_at:
        return min(SLICES, slices + 1)
    return min(SLICES, slices + max(1, TOPICS_PER_STEP * (slices - begun_at) // (came + 1)))
