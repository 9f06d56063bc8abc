"""The policy of when the event loop writes small commits itself, instead of the commit thread.

On a disk that syncs in a fraction of a millisecond, a hand-over to a thread costs as much as the sync, so the loop
writes small commits itself while the thread is idle. Then a stall of the disk stalls the loop. Therefore, after a call
that took longer than ``max_s``, threads make all calls for ten times as long as that call took; each further slow call
among the next thousand doubles the factor, up to a thousand.

The policy has no clock, thread or disk: it gets times and commits. Only the event loop uses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plainsong.protocol.effects import Delete, Put, Table

if TYPE_CHECKING:
    from storage.leveldb.operations import PendingWrite

#: Maximum bytes that the event loop writes at once: up to here a sync takes hardly longer than for a single row.
MAX_INLINE_BYTES = 32 << 10
#: After a slow call of the event loop, threads make all calls for this many times as long as the call took: the first
#: factor, doubled up to the second one by each further slow call, unless more than QUICK_CALLS quick ones preceded it.
SLOW_FACTORS = (10, 1000)
QUICK_CALLS = 1000


class InlinePolicy:
    """Measures the event loop's calls to the disk, and decides if it may make the next one."""

    def __init__(self, max_s: float) -> None:
        """``max_s``: a call that takes longer turns inline calls off for a while; 0: they are always off."""
        self._max_s = max_s
        #: Inline calls are off until this time, because the disk was slow.
        self.off_until_s = 0.0
        #: These two determine for how long the next slow call turns them off.
        self._slow_factor, _ = SLOW_FACTORS
        self._quick_calls = QUICK_CALLS
        #: When the current call began, and how much of the time since then is not the disk's.
        self._began_s = 0.0
        self._excluded_s = 0.0

    def allows(self, now_s: float) -> bool:
        """True if the event loop may call the disk now."""
        return self._max_s > 0 and now_s >= self.off_until_s

    @staticmethod
    def is_small(work: PendingWrite, gathered_bytes: int) -> bool:
        """True if a commit, together with ``gathered_bytes`` of others, takes hardly longer than its sync."""
        if gathered_bytes + work.size > MAX_INLINE_BYTES or work.expect:
            return False
        for operation in work.operations:
            if type(operation) is not Put and not (type(operation) is Delete and operation.table is Table.METADATA):
                return False
        return True

    def begin(self, now_s: float) -> None:
        """Begin to measure a call."""
        self._began_s, self._excluded_s = now_s, 0.0

    def exclude(self, took_s: float) -> None:
        """Subtract time of the current call that was not spent on the disk."""
        self._excluded_s = took_s

    def end(self, now_s: float) -> None:
        """Count the call that ends now. A slow one turns inline calls off for a while."""
        took_s = now_s - self._began_s - self._excluded_s
        self._quick_calls += 1
        if took_s > self._max_s:
            least, most = SLOW_FACTORS
            self._slow_factor = least if self._quick_calls > QUICK_CALLS else min(2 * self._slow_factor, most)
            self._quick_calls = 0
            self.off_until_s = now_s + self._slow_factor * took_s
