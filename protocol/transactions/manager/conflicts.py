"""Who changed what: the change sets of open transactions, and of committed ones that these may still conflict with.

Two transactions conflict when one was committed after the other began, and they share a key. A set is dropped
when every short transaction that is open began after it; long ones do not hold it back, as in Tephra, so they are
checked against what is still here.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from protocol.transactions.manager.rows import ChangeSet


class PreparedSets(dict[int, "ChangeSet"]):
    """What open transactions have said they change, by their ids."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def keep(self, changes: ChangeSet) -> None:
        """Keep a change set in place of an earlier one."""
        self.leave(changes.transaction_id)
        self[changes.transaction_id] = changes
        self.bytes += changes.size

    def leave(self, transaction_id: int) -> ChangeSet | None:
        """Take a transaction's change set out; None when it has none."""
        changes = self.pop(transaction_id, None)
        if changes is not None:
            self.bytes -= changes.size
        return changes


class CommittedSets:
    """Committed change sets in the order of their commits."""

    def __init__(self) -> None:
        self._sets: deque[ChangeSet] = deque()
        self._latest: dict[bytes, ChangeSet] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._sets)

    def __iter__(self) -> Iterator[ChangeSet]:
        return iter(self._sets)

    def add(self, changes: ChangeSet) -> None:
        """Add the newest."""
        self._sets.append(changes)
        self.bytes += changes.size
        for key in changes.keys:
            self._latest[key] = changes

    def conflict(self, transaction_id: int, keys: Iterable[bytes]) -> tuple[bytes, str] | None:
        """A key that was changed by a commit after ``transaction_id`` began, and whose client did that."""
        for key in keys:
            latest = self._latest.get(key)
            if latest is not None and _pointer(latest) > transaction_id:
                return key, latest.client_id
        return None

    def drop_below(self, pointer: int) -> list[int]:
        """Forget the sets of commits before ``pointer``; the ids of their transactions."""
        gone: list[int] = []
        while self._sets and _pointer(self._sets[0]) < pointer:
            gone.append(self._drop().transaction_id)
        return gone

    def drop_over(self, max_bytes: int) -> list[ChangeSet]:
        """Forget the oldest sets until the rest is within ``max_bytes``; what was forgotten."""
        gone: list[ChangeSet] = []
        while self.bytes > max_bytes:
            gone.append(self._drop())
        return gone

    def _drop(self) -> ChangeSet:
        changes = self._sets.popleft()
        self.bytes -= changes.size
        for key in changes.keys:
            if self._latest[key] is changes:
                del self._latest[key]
        return changes


def _pointer(changes: ChangeSet) -> int:
    assert changes.commit_pointer is not None  # only committed ones come here
    return changes.commit_pointer
