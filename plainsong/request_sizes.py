"""The sizes of requests, adapted to the link: a time-out halves them, and successes double them up to the maximum."""

from __future__ import annotations

from dataclasses import dataclass

#: This many successful requests double the size again. So a link that stays slow causes one time-out per this many.
ANSWERS_UNTIL_LARGER = 8


@dataclass(slots=True)
class _Reduced:
    messages: int
    bytes: int
    answered: int = 0
    """Successful requests of this size."""


class RequestSizes:
    """The current size of a request for each topic, as numbers of messages and bytes."""

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._whole = max_messages, max_bytes
        #: The sizes for topics whose requests have timed out.
        self._reduced: dict[str, _Reduced] = {}

    def of(self, topic: str) -> tuple[int, int]:
        """Return the maximum number of messages, and of payload bytes, for the topic's next request."""
        reduced = self._reduced.get(topic)
        return self._whole if reduced is None else (reduced.messages, reduced.bytes)

    def is_reduced(self, topic: str) -> bool:
        """True if the topic's requests are smaller than the maximum."""
        return topic in self._reduced

    def timed_out(self, topic: str, messages: int, size: int) -> None:
        """Halve the size after a request of this size timed out; at least one message remains."""
        self._reduced[topic] = _Reduced(max(1, messages // 2), max(1, size // 2))

    def passed(self, topic: str) -> None:
        """Count a successful request, and double the size after ``ANSWERS_UNTIL_LARGER`` of them."""
        reduced = self._reduced.get(topic)
        if reduced is None:
            return
        reduced.answered += 1
        if reduced.answered >= ANSWERS_UNTIL_LARGER:
            max_messages, max_bytes = self._whole
            reduced.messages = min(2 * reduced.messages, max_messages)
            reduced.bytes = min(2 * reduced.bytes, max_bytes)
            reduced.answered = 0
            if (reduced.messages, reduced.bytes) == self._whole:
                del self._reduced[topic]
