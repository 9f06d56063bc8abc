"""Polls that wait for a message: found by position when one comes, by deadline when none does.

Two heaps over one dictionary. Whoever leaves is taken out of the dictionary at once; what the heaps still
hold of it is dropped when it comes up, or when it outnumbers the living.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from protocol.topic.asks import Look


@dataclass(slots=True)
class Parked:
    """One poll that waits."""

    ticket: Hashable
    look: Look
    number: int


class Parking:
    """The parked polls of one topic."""

    def __init__(self) -> None:
        self._parked: dict[Hashable, Parked] = {}
        self._by_since: list[tuple[bytes, int, Parked]] = []
        self._by_deadline: list[tuple[float, int, Parked]] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, ticket: Hashable, look: Look, deadline_s: float) -> None:
        """Keep ``ticket`` waiting until ``deadline_s`` at the latest."""
        self._number += 1
        parked = Parked(ticket, look, self._number)
        self._parked[ticket] = parked
        heappush(self._by_since, (look.since, parked.number, parked))
        heappush(self._by_deadline, (deadline_s, parked.number, parked))
        self._tidy()

    def leave(self, ticket: Hashable) -> bool:
        """Forget ``ticket``; whether it was parked."""
        left = self._parked.pop(ticket, None) is not None
        self._tidy()
        return left

    def reached(self, until: bytes) -> list[Parked]:
        """Take out those that start before the bound ``until``."""
        out = []
        while self._by_since and self._by_since[0][0] < until:
            parked = heappop(self._by_since)[2]
            if self._take(parked):
                out.append(parked)
        return out

    def overdue(self, now_s: float) -> list[Parked]:
        """Take out those whose deadline has come."""
        out = []
        while self._by_deadline and self._by_deadline[0][0] <= now_s:
            parked = heappop(self._by_deadline)[2]
            if self._take(parked):
                out.append(parked)
        return out

    def everyone(self) -> list[Parked]:
        """Take out all."""
        out = list(self._parked.values())
        self._parked.clear()
        self._by_since.clear()
        self._by_deadline.clear()
        return out

    def next_deadline_s(self) -> float | None:
        """When somebody's time is over; None when nobody waits."""
        heap = self._by_deadline
        while heap and self._parked.get(heap[0][2].ticket) is not heap[0][2]:
            heappop(heap)
        return heap[0][0] if heap else None

    def _take(self, parked: Parked) -> bool:
        if self._parked.get(parked.ticket) is not parked:
            return False
        del self._parked[parked.ticket]
        return True

    def _tidy(self) -> None:
        """Drop from the heaps those who are gone, once they outnumber the living."""
        if max(len(self._by_since), len(self._by_deadline)) <= 64 + 2 * len(self._parked):
            return
        self._by_since = [entry for entry in self._by_since if self._parked.get(entry[2].ticket) is entry[2]]
        self._by_deadline = [entry for entry in self._by_deadline if self._parked.get(entry[2].ticket) is entry[2]]
        heapify(self._by_since)
        heapify(self._by_deadline)
