"""Answers that wait until their commit counts in the object store: ``replication.mode = "sync"``.

    handed over ──► durable here ──► in the log ──► counts, with all commits before it ──► answered

``PendingAnswers`` is the register, without any input or output. The second copy advances it; the store adds to it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from storage.base import NothingWritten, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from plainsong.protocol.errors import Outcome


class NotCounted(StoreError):
    """A commit is durable in this directory, and does not count in the object store yet. It may count later."""

    code = "outcome_unknown"
    title = "The commit is not in the object store"
    outcome: Outcome = "unknown"


class CopyUnavailable(NothingWritten):
    """The object store does not answer, so nothing was begun; or a read would show a commit that does not count yet."""

    code = "replication_unavailable"
    title = "The second copy is not available"
    retry_after_s = 5


class _Waiting(NamedTuple):
    number: int
    begun_s: float
    completed: Callable[[Exception | None], object]


class PendingAnswers:
    """Answers in the order of the commits on which they depend."""

    def __init__(self) -> None:
        self._waiting: deque[_Waiting] = deque()
        #: The last commit that counts; None while there is no base.
        self._counted: int | None = None
        self._closed = ""
        #: True once everything had counted at one moment. Until then nothing is acknowledged, and reads show what was
        #: acknowledged before the mode was in force.
        self.has_begun = False

    @property
    def oldest_s(self) -> float | None:
        """When the oldest answer began to wait; None if none waits."""
        return self._waiting[0].begun_s if self._waiting else None

    @property
    def counted(self) -> int | None:
        """The last commit that counts; None while there is no base."""
        return self._counted

    def counts(self, number: int) -> bool:
        """True if this commit and all before it count."""
        return self._counted is not None and number <= self._counted

    def may_show(self, number: int) -> bool:
        """True if a read that may have seen this commit may be answered."""
        return self.counts(number) or not self.has_begun

    def when(self, number: int, now_s: float, completed: Callable[[Exception | None], object]) -> None:
        """Call ``completed`` with None once a commit counts; with an error if that will not be known here."""
        if self._closed:
            completed(NotCounted(self._closed))
        elif self.counts(number) and not self._waiting:
            completed(None)
        else:
            self._waiting.append(_Waiting(number, now_s, completed))

    def advance(self, counted: int | None, last: int) -> None:
        """Complete the answers up to the last commit that counts.

        Args:
          last: the last commit of the store.
        """
        self._counted = counted
        if self.counts(last):
            self.has_begun = True
        bug: BaseException | None = None
        while self._waiting and self.counts(self._waiting[0].number):
            try:
                self._waiting.popleft().completed(None)
            except BaseException as raised:  # noqa: BLE001  # raised again below, once all are completed
                bug = bug or raised
        if bug is not None:
            raise bug

    def withdraw(self, completed: Callable[[Exception | None], object], last: int) -> None:
        """Forget an answer that waits, and complete those that only waited behind it. Idempotent."""
        if any(each.completed is completed for each in self._waiting):
            self._waiting = deque(each for each in self._waiting if each.completed is not completed)
            self.advance(self._counted, last)

    def close(self, why: str) -> None:
        """Complete all answers, and all later ones, with NotCounted: their commits may count later. Idempotent."""
        self._closed = self._closed or why
        while self._waiting:
            self._waiting.popleft().completed(NotCounted(self._closed))
