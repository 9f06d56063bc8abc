"""Which instance owns which topic, and how long this one leaves a topic that another has claimed.

Which instance owns which topic, as far as this one knows: what the directory and the router ask.

It says where to send a request, and when to let a topic go. Safety does not rest on it: a store that several instances
share refuses the commits of whoever was replaced.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from plainsong.protocol.cluster import SLICES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from plainsong.protocol.names import TopicName


@dataclass(frozen=True, slots=True)
class Instance:
    """One daemon of a cluster."""

    name: str
    """``cluster.instance``: unique, and the same after a restart."""
    address: str
    """``cluster.advertise`` as ``host:port``: where clients and other instances reach it."""


class Ownership(Protocol):
    """The latest view of who owns what; asked on the event loop, never waits."""

    @property
    def me(self) -> Instance:
        """This instance."""
        ...

    @property
    def instances(self) -> Sequence[Instance]:
        """All that are there, this one included, those that have left all they had not; sorted by name."""
        ...

    def owner(self, name: TopicName) -> Instance | None:
        """Who owns a topic, whether it exists or not; None: nobody just now."""
        ...

    def is_mine(self, name: TopicName) -> bool:
        """Whether this instance owns it, and may claim it."""
        ...

    def slices_of(self, instance: str) -> int:
        """In how many slices an instance takes part (``plainsong/protocol/cluster.py``); 0: in none, or it is not there."""
        ...

    def deposed(self, name: TopicName) -> None:
        """The store said that another instance has claimed a topic: where the view is old, it is not ours any more."""
        ...

    def on_change(self, told: Callable[[], None]) -> None:
        """Have ``told`` called, on the event loop, after every change of the view."""
        ...


class Alone:
    """The ownership of a daemon without others: everything is its own, always."""

    def __init__(self, address: str = "") -> None:
        self._me = Instance("alone", address)

    @property
    def me(self) -> Instance:
        """This instance."""
        return self._me

    @property
    def instances(self) -> Sequence[Instance]:
        """This one."""
        return (self._me,)

    def owner(self, name: TopicName) -> Instance | None:
        """This one."""
        del name
        return self._me

    def is_mine(self, name: TopicName) -> bool:
        """Always."""
        del name
        return True

    def slices_of(self, instance: str) -> int:
        """All."""
        del instance
        return SLICES

    def deposed(self, name: TopicName) -> None:
        """Somebody else uses the same store without ZooKeeper: the next request claims the topic again."""

    def on_change(self, told: Callable[[], None]) -> None:
        """Nothing ever changes."""


# --- pausing ---------------------------------------------------------------------------------------
#
# How long a topic that another instance has claimed is left to it: a little at first, then longer and longer.
#
# Two instances whose views of who owns a topic disagree would otherwise take it from each other with every request.


#: The first pause, and the longest; each is twice the one before.
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
#: Time without being deposed after which the first pause is the next one again.
FORGET_PAUSES_S = 60.0
#: Topics remembered; beyond them the one deposed longest ago is forgotten.
MAX_TOPICS = 10_000


class _Pause(NamedTuple):
    """How often in a row, and when last; both clocks are trio's, in seconds."""

    times: int
    since_s: float
    until_s: float


class ClaimPauses:
    """The topics that were taken from this instance lately."""

    def __init__(self) -> None:
        self._pauses: OrderedDict[TopicName, _Pause] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pauses)

    def begin(self, name: TopicName, now_s: float) -> float:
        """The topic was taken just now; for how many seconds it is not to be claimed again."""
        before = self._pauses.pop(name, None)
        times = 1 if before is None or now_s - before.since_s > FORGET_PAUSES_S else before.times + 1
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(times - 1, 20), LONGEST_PAUSE_S)
        self._pauses[name] = _Pause(times, now_s, now_s + pause_s)
        if len(self._pauses) > MAX_TOPICS:
            self._pauses.popitem(last=False)
        return pause_s

    def holds(self, name: TopicName, now_s: float) -> bool:
        """Whether the topic is not to be claimed yet."""
        pause = self._pauses.get(name)
        return pause is not None and now_s < pause.until_s

    def end(self) -> None:
        """The view has changed: whoever owns a topic now may claim it at once. How often is not forgotten."""
        for name, pause in self._pauses.items():
            self._pauses[name] = pause._replace(until_s=pause.since_s)
