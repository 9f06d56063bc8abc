"""Topics change hands in portions: each falls into one of 64 slices, and an instance says in how many it takes part.

0 … slices - 1      its share of these topics is its own           slices … 63     these are the others' topics

An instance that comes raises its figure step by step, one that leaves or is drained lowers it: whatever is not in the
slices of a step stays where it is, and is served meanwhile.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from protocol.cluster.assignment import Member
    from protocol.cluster.placement import Placement
    from protocol.names import TopicName

#: How many there are: a hand-over has at most so many steps.
SLICES = 64
#: Topics that change hands in one step, unless there are more than so many for each slice.
PORTION = 50


@lru_cache(100_000)
def slice_of(name: TopicName) -> int:
    """The slice of a topic, 0 to 63; the same in every process and for ever."""
    return blake2b(str(name).encode(), digest_size=1, person=b"slice").digest()[0] % SLICES


def wanted(members: Iterable[Member], placement: Placement, name: str) -> int:
    """In how many slices an instance that stays is to take part in the end: all; none if it is drained, as others are not."""
    drained = placement.drained
    others = (each for each in members if each.name != name and not each.leaving)
    return 0 if name in drained and any(each.name not in drained for each in others) else SLICES


def first(members: Iterable[Member], me: Member) -> int:
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


def lowered(slices: int, topics: Iterable[TopicName]) -> int:
    """The next figure of an instance that gives away what it has open: some ``PORTION`` of them less."""
    counts = [0] * SLICES
    for name in topics:
        counts[slice_of(name)] += 1
    given = 0
    while slices > 0 and (given == 0 or given + counts[slices - 1] <= PORTION):
        slices -= 1
        given += counts[slices]
    return slices


def raised(slices: int, *, begun_at: int, came: int) -> int:
    """The next figure of an instance that takes its share, of which it does not know how much it is.

    Args:
      begun_at: its figure when it began.
      came: topics that have become its own since then.
    """
    if slices == begun_at:
        return min(SLICES, slices + 1)
    return min(SLICES, slices + max(1, PORTION * (slices - begun_at) // (came + 1)))
