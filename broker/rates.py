"""How many messages a topic takes and gives a second, over about the last minute, for a few words of memory.

Two counters for each topic and direction: of the minute under way and of the one before it. The rate is the
older one, less the part of it that is more than a minute ago, and the newer one. Topics nobody touched for
longest are forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from protocol.names import TopicName

WINDOW_S = 60.0
#: Topics whose rates are remembered, in each direction.
MAX_TOPICS = 10_000


@dataclass(slots=True)
class _Window:
    number: int
    count: int = 0
    before: int = 0

    def move_to(self, number: int) -> None:
        self.before = self.count if number == self.number + 1 else 0
        self.count = 0
        self.number = number


class Rate:
    """Things that happen to topics, a second."""

    def __init__(self, max_topics: int = MAX_TOPICS) -> None:
        self._max_topics = max_topics
        self._windows: OrderedDict[TopicName, _Window] = OrderedDict()

    def __len__(self) -> int:
        return len(self._windows)

    def add(self, name: TopicName, count: int, now_s: float) -> None:
        """``count`` more happened at ``now_s``, on any clock that goes forward."""
        number = int(now_s // WINDOW_S)
        window = self._windows.get(name)
        if window is None:
            window = self._windows[name] = _Window(number)
            if len(self._windows) > self._max_topics:
                self._windows.popitem(last=False)
        elif window.number != number:
            window.move_to(number)
            self._windows.move_to_end(name)
        window.count += count

    def per_second(self, name: TopicName, now_s: float) -> float:
        """The rate over about the last minute; 0 for a topic nobody remembers."""
        window = self._windows.get(name)
        if window is None:
            return 0.0
        number = int(now_s // WINDOW_S)
        if window.number != number:
            window.move_to(number)
        passed = now_s % WINDOW_S / WINDOW_S
        return (window.count + window.before * (1 - passed)) / WINDOW_S


class Rates:
    """Both directions, for all topics of the daemon."""

    def __init__(self) -> None:
        self.publishing = Rate()
        self.polling = Rate()

    def published(self, name: TopicName, messages: int, now_s: float) -> None:
        """Messages were made durable."""
        self.publishing.add(name, messages, now_s)

    def delivered(self, name: TopicName, messages: int, now_s: float) -> None:
        """Messages were read for a client."""
        if messages:
            self.polling.add(name, messages, now_s)
