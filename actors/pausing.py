"""How long a topic that another instance has claimed is left to it: a little at first, then longer and longer.

Two instances whose views of who owns a topic disagree would otherwise take it from each other with every request.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from protocol.names import TopicName

#: The first pause, and the longest; each is twice the one before.
FIRST_S = 0.1
LONGEST_S = 10.0
#: Time without being deposed after which the first pause is the next one again.
FORGET_S = 60.0
#: Topics remembered; beyond them the one deposed longest ago is forgotten.
MAX_TOPICS = 10_000


class _Pause(NamedTuple):
    """How often in a row, and when last; both clocks are trio's, in seconds."""

    times: int
    since_s: float
    until_s: float


class Pauses:
    """The topics that were taken from this instance lately."""

    def __init__(self) -> None:
        self._pauses: OrderedDict[TopicName, _Pause] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pauses)

    def begin(self, name: TopicName, now_s: float) -> float:
        """The topic was taken just now; for how many seconds it is not to be claimed again."""
        before = self._pauses.pop(name, None)
        times = 1 if before is None or now_s - before.since_s > FORGET_S else before.times + 1
        pause_s = min(FIRST_S * 2.0 ** min(times - 1, 20), LONGEST_S)
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
