"""Group commit across all topics: waiting commits become one synced batch.

One thread writes. It takes all waiting commits, writes them as one batch, and continues with those that arrived during
the write, without a turn of the event loop in between; one wake-up reports a group to the loop. LevelDB groups
concurrent writers too. This module does so itself because

* a failed write can leave a torn record at the end of LevelDB's log and the handle open: if a second writer succeeded
  after it, its commit would be acknowledged and then lost at the next opening. So no write begins before the outcome of
  the previous one is known;
* handing over a group to a thread costs as little as handing over one commit.

While the thread is idle and the disk is fast (``storage.leveldb.inline_policy``), the event loop writes small commits
itself, all commits of one turn as one group (``gather``, ``write_gathered``). While the disk syncs, the loop runs each
submitter's callback (``PendingWrite.while_syncing``), whose effects stay hidden until the sync succeeds.

Threads: only the loop queues commits, counts those in the thread, and completes them. The commit thread and the keeper
only append to ``_written`` and wake the loop.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from functools import partial
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

import outcome
import trio

from plainsong.protocol.effects import Delete, Put
from storage.base import StoreConflict, StoreError
from storage.leveldb import threads
from storage.leveldb.inline_policy import InlinePolicy
from storage.leveldb.operations import PendingWrite
from storage.loop import Waker
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn


T = TypeVar("T")
#: Bytes at which a group is full: more commits in it would save nothing and delay the first one.
MAX_GROUP_BYTES = 4 << 20
#: Added for each row to its value and key prefix: at least the cost that a volume counts.
_ROW_BYTES = 64


class GroupCommit(trio.abc.Instrument):
    """The queue in front of the database, with at most one commit per writing task, and the thread that empties it.

    It is an instrument of the event loop, so that completed commits are delivered when the loop returns from the
    kernel, before any task runs, and the thread wakes the loop only if it sleeps.
    """

    def __init__(
        self,
        write: Callable[[Sequence[PendingWrite], Callable[[], object] | None], None],
        *,
        is_hot: Callable[[], bool],
        max_inline_s: float,
    ) -> None:
        """Start the thread; ``close`` ends it. For the event loop.

        Args:
          write: makes a group durable; its StoreError is the answer to the whole group. Called in the thread, or on the
            event loop while the thread is idle; only then with a function to call while the disk syncs.
          is_hot: returns True if a small group would need only the write and its sync now.
          max_inline_s: see ``InlinePolicy``.
        """
        self._write = write
        self._is_hot = is_hot
        self._inline = InlinePolicy(max_inline_s)
        self._waiting: threads.Queue[PendingWrite | None] = threads.Queue()
        self._written: deque[tuple[Sequence[PendingWrite], StoreError | StoreConflict | None, int]] = deque()
        #: Commits that were handed to the commit thread, and that it has not reported yet.
        self._in_thread = 0
        #: Commits gathered for one inline write, and their bytes.
        self._gathers = False
        self._gathered: list[PendingWrite] = []
        self._gathered_bytes = 0
        #: True while the disk syncs an inline write. Commits that begin during the sync are handed to the thread afterwards.
        self._disk_works = False
        self._held_back: list[PendingWrite] = []
        self._loop = trio.lowlevel.current_trio_token()
        self.waker = Waker()
        trio.lowlevel.add_instrument(self)
        #: True if the event loop sleeps in the kernel, or is about to.
        self.is_asleep = True
        self._closed = False
        self._thread = threads.spawn("commit", self._run)

    def begin(self, work: PendingWrite) -> None:
        """Queue ``work``; its ``on_completed`` is called later, on the event loop.

        Raises:
          StoreError: the queue is closed; nothing happens.
        """
        if self._closed:
            raise StoreError("the store is closed")
        work.on_changed = self._changed
        work.size = _size(work)  # computed here so that an error reaches the submitter
        if self._gathers and self._may_write_inline(work):
            self._gathered.append(work)
            self._gathered_bytes += work.size
            return
        self._hand_over_gathered()
        self._hand_over(work)

    # --- inline commits ------------------------------------------------------------------------------

    @property
    def writes_inline(self) -> bool:
        """True if the event loop would write a small commit itself now."""
        return not self._in_thread and self._inline.allows(perf_counter())

    @property
    def is_idle(self) -> bool:
        """True if the thread has nothing to do."""
        return not self._in_thread

    def done_inline(self, read: Callable[[], T]) -> T:
        """Do a small read on the event loop, while ``writes_inline``. A slow one turns inline calls off for a while."""
        self._inline.begin(perf_counter())
        try:
            return read()
        finally:
            self._inline.end(perf_counter())

    def gather(self) -> None:
        """Collect small commits that begin from now on; ``write_gathered`` writes them.

        While the disk syncs an inline write, none are collected: the thread writes them after it.
        """
        self._gathers = not self._disk_works

    def write_gathered(self) -> None:
        """Write the gathered commits and complete them before this returns."""
        self._gathers = False
        group = self._gathered
        if not group:
            return
        self._gathered, self._gathered_bytes = [], 0
        self._inline.begin(perf_counter())
        error = self._attempt(group, partial(self._while_syncing, group))
        self._inline.end(perf_counter())
        held_back, self._held_back = self._held_back, []
        for work in held_back:
            self._hand_over(work)
        _complete(group, error)

    def _while_syncing(self, group: Sequence[PendingWrite]) -> None:
        """Run the submitters' callbacks while the disk syncs their commits."""
        began_s = perf_counter()
        self._disk_works = True
        try:
            for work in group:
                if work.while_syncing is not None:
                    work.while_syncing()
        finally:
            self._disk_works = False
            self._inline.exclude(perf_counter() - began_s)

    def _may_write_inline(self, work: PendingWrite) -> bool:
        return self._inline.is_small(work, self._gathered_bytes) and self.writes_inline and self._is_hot()

    def _hand_over_gathered(self) -> None:
        group, self._gathered, self._gathered_bytes = self._gathered, [], 0
        for work in group:
            self._hand_over(work)

    def _hand_over(self, work: PendingWrite) -> None:
        if self._disk_works:
            self._held_back.append(work)
            return
        self._in_thread += 1
        self._waiting.put(work)

    @staticmethod
    async def written(begin: Callable[[Callable[[T], None]], None]) -> T:
        """Call ``begin`` with a function, wait until that is called, and return its argument.

        Cancellation does not interrupt the wait.
        """
        task = trio.lowlevel.current_task()
        begin(lambda found: trio.lowlevel.reschedule(task, outcome.Value(found)))
        found: T = await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
        return found

    async def quiet(self) -> None:
        """Return once every commit begun before has been written or has failed."""

        def begin(completed: Callable[[PendingWrite], None]) -> None:
            self.begin(PendingWrite((), on_completed=completed))

        await self.written(begin)

    async def close(self) -> None:
        """Complete waiting commits, then end the thread. Idempotent."""
        self._closed = True
        self._waiting.put(None)
        with trio.CancelScope(shield=True):
            await in_thread(self._thread.join, max_wait_s=inf)
            self._deliver()
            with suppress(KeyError):
                trio.lowlevel.remove_instrument(self)
            self.waker.close()

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        first = self._waiting.get()
        while first is not None:
            group, following = self._group(first)
            error = self._attempt(group)
            # The keeper reports the commits that it was given.
            self._report([work for work in group if not work.is_with_keeper], error, len(group))
            first = self._waiting.get() if following is _NOTHING else following

    def _changed(self, work: PendingWrite) -> None:
        """Report a commit whose changes the keeper has made, or failed to make. Called in the keeper's thread."""
        self._report([work], None, 0)

    def _report(self, group: Sequence[PendingWrite], error: StoreError | StoreConflict | None, count: int) -> None:
        """Have the event loop complete some commits. For any thread.

        Args:
          count: how many commits leave the commit thread with this report.
        """
        self._written.append((group, error, count))
        if self.is_asleep:
            with suppress(trio.RunFinishedError):
                self._wake()

    def _attempt(
        self, group: Sequence[PendingWrite], while_syncing: Callable[[], object] | None = None
    ) -> StoreError | StoreConflict | None:
        """Make a group durable. Returns the error if it may not be."""
        try:
            self._write([work for work in group if work.operations], while_syncing)
        except (StoreError, StoreConflict) as failed:
            return failed
        except BaseException as bug:  # noqa: BLE001  # otherwise the caller would wait forever
            return StoreError(f"writing: {bug!r}")
        return None

    def _group(self, first: PendingWrite) -> tuple[list[PendingWrite], PendingWrite | None]:
        """Return ``first`` and the commits that wait after it, in order. A commit with expectations goes alone.

        The second value is the next commit if it was taken from the queue already, None if the queue was closed, else
        ``_NOTHING``.
        """
        group = [first]
        if first.expect:
            return group, _NOTHING
        size = first.size
        while True:
            try:
                work = self._waiting.get_nowait()
            except threads.Empty:
                return group, _NOTHING
            if work is None or work.expect or size + work.size > MAX_GROUP_BYTES:
                return group, work
            group.append(work)
            size += work.size

    # --- the event loop again ---------------------------------------------------------------------

    def before_io_wait(self, timeout: float) -> None:
        """Before the event loop sleeps: wake it for reports that arrived before ``is_asleep`` was set."""
        if timeout > 0:
            self.is_asleep = True
            if self._written:
                self._wake()

    def after_io_wait(self, timeout: float) -> None:
        """The event loop runs again: complete the reported commits."""
        del timeout
        self.is_asleep = False
        if self._written:
            try:
                self._deliver()
            except BaseException as bug:  # noqa: BLE001  # an instrument must not raise; there it ends the loop
                self._loop.run_sync_soon(_raise, bug)

    def _wake(self) -> None:
        if self.waker.is_watched:
            self.waker.wake()
        else:
            self._loop.run_sync_soon(self._deliver, idempotent=True)

    def _deliver(self) -> None:
        # Only as many as there are now: an answer may begin the next commit, which may end before all answers are
        # given. The rest of the event loop must run in between.
        for _ in range(len(self._written)):
            group, error, count = self._written.popleft()
            self._in_thread -= count
            _complete(group, error)


def _complete(group: Sequence[PendingWrite], error: StoreError | StoreConflict | None) -> None:
    """Complete every commit of a group. If a callback raises, the others are still called; then its error is raised."""
    bug: BaseException | None = None
    for work in group:
        work.error = work.error or error
        if work.on_completed is not None:
            try:
                work.on_completed(work)
            except BaseException as raised:  # noqa: BLE001  # raised again below
                bug = bug or raised
    if bug is not None:
        raise bug


#: No commit was taken out of the queue.
_NOTHING = PendingWrite(())


def _raise(bug: BaseException) -> NoReturn:
    raise bug


def own_error(error: StoreError | StoreConflict) -> StoreError | StoreConflict:
    """Copy an error for one caller: raising one object in several tasks mixes their tracebacks."""
    made = type(error)(error.detail, hint=error.hint)
    made.__cause__ = error
    return made


def _size(work: PendingWrite) -> int:
    size = 0
    for operation in work.operations:
        if isinstance(operation, Put):
            value_bytes = operation.value_bytes if operation.size is None else operation.size
            size += len(operation.values) * (_ROW_BYTES + len(operation.prefix)) + value_bytes
        elif isinstance(operation, Delete):
            size += len(operation.keys) * _ROW_BYTES
        else:
            # All rollbacks of a group share a separate bound, STEP_BYTES.
            size += _ROW_BYTES
    return size
