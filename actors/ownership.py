"""This instance's view of which instance owns which topic, and pauses before it claims a lost topic back.

The router uses it to route requests, and the directory to close topics. Safety does not depend on it: a shared store
refuses the commits of a replaced owner.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from plainsong.protocol.backoff import Backoff
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
    """The latest view of the owners; used on the event loop, never waits."""

    @property
    def me(self) -> Instance:
        """This instance."""
        ...

    @property
    def instances(self) -> Sequence[Instance]:
        """All members, including this one, sorted by name, except those that have handed over everything to leave."""
        ...

    def owner(self, name: TopicName) -> Instance | None:
        """Return the owner of a topic, whether or not the topic exists; None if it has no owner at present."""
        ...

    def is_mine(self, name: TopicName) -> bool:
        """Return True if this instance owns a topic, and may claim it."""
        ...

    def slices_of(self, instance: str) -> int:
        """Return the number of an instance's slices (``plainsong/protocol/cluster.py``); 0 if it is not a member."""
        ...

    def deposed(self, name: TopicName) -> None:
        """Report that another instance has claimed a topic: if the view disagrees, it is out of date."""
        ...

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener``, on the event loop, after every change of the view."""
        ...


class Alone:
    """The ownership of a daemon without other instances: it owns everything."""

    def __init__(self) -> None:
        self._me = Instance("alone", "")

    @property
    def me(self) -> Instance:
        """This instance."""
        return self._me

    @property
    def instances(self) -> Sequence[Instance]:
        """Only this instance."""
        return (self._me,)

    def owner(self, name: TopicName) -> Instance | None:
        """Return this instance."""
        del name
        return self._me

    def is_mine(self, name: TopicName) -> bool:
        """Return True."""
        del name
        return True

    def slices_of(self, instance: str) -> int:
        """Return the number of all slices."""
        del instance
        return SLICES

    def deposed(self, name: TopicName) -> None:
        """Do nothing. Another daemon uses this store without ZooKeeper; the next request claims the topic again."""

    def on_change(self, listener: Callable[[], None]) -> None:
        """Do nothing: the view never changes."""


# --- pauses before a topic is claimed back ---------------------------------------------------------
#
# Without them, two instances that disagree about a topic's owner would take it from each other with every request.


#: The pauses; the last one repeats.
PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0)
#: Time without being deposed after which pauses start again with the first one.
FORGET_PAUSES_S = 60.0
#: Topics remembered at most; beyond that, the one deposed longest ago is forgotten.
MAX_TOPICS = 10_000


class _Pause(NamedTuple):
    """Consecutive losses of a topic, the time of the last one, and the end of the pause, in seconds of trio's clock."""

    losses: Backoff
    since_s: float
    until_s: float


class ClaimPauses:
    """Topics that other instances have recently claimed from this one."""

    def __init__(self) -> None:
        self._pauses: OrderedDict[TopicName, _Pause] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pauses)

    def begin(self, name: TopicName, now_s: float) -> float:
        """Begin a pause, as another instance has claimed the topic. Return its length in seconds."""
        before = self._pauses.pop(name, None)
        losses = Backoff(PAUSES_S)
        if before is not None and now_s - before.since_s <= FORGET_PAUSES_S:
            losses = before.losses
        pause_s = losses.failed()
        self._pauses[name] = _Pause(losses, now_s, now_s + pause_s)
        if len(self._pauses) > MAX_TOPICS:
            self._pauses.popitem(last=False)
        return pause_s

    def holds(self, name: TopicName, now_s: float) -> bool:
        """Return True if the topic must not be claimed yet."""
        pause = self._pauses.get(name)
        return pause is not None and now_s < pause.until_s

    def end(self) -> None:
        """End all pauses, so that a new owner may claim at once after the view has changed. The counts stay."""
        for name, pause in self._pauses.items():
            self._pauses[name] = pause._replace(until_s=pause.since_s)
