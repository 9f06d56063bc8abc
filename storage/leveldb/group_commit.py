"""Group commit over all topics: waiting commits become one synced batch; long rollbacks take bounded steps.

One thread writes. It takes all commits that wait, writes them as one batch, and goes on with those that have come
meanwhile, without a turn of the event loop in between; the loop learns of the outcomes of a group by one wake-up. LevelDB
joins concurrent writers by itself, but two things speak for doing it here:

* A failed write can leave a torn record at the end of LevelDB's log and the handle open. A second
  writer that succeeds behind it is acknowledged, and gone at the next opening (with a full disk that
  was freed in between: tried, and a test). So no write may begin before the last one is known to be good.
* One hand-over to a thread per group costs less than one per commit: single-row commits of 16 tasks went from
  9 000 to 26 000 a second, those of 64 tasks from 9 500 to 55 000.

On a disk that syncs in a fraction of a millisecond, handing a small commit to the thread and being woken by it costs as
much as the sync. So while nothing else is under way the event loop writes small commits itself, all that one of its turns
has begun as one group (``gather``, ``write_gathered``). A stall of the disk then stalls the loop. But after a write that
took longer than ``max_inline_s`` the thread writes them for ten times as long as it took; each further one that comes
within a thousand doubles that, up to a thousand times. So a disk that is quick but for a moment costs a moment, and of one
that is slow, or slow again and again, the loop waits for a thousandth of its time.

While the disk works on what the loop wrote, the loop does what the submitters have to do whatever comes of it
(``PendingWrite.beside``), which they hide until they are told.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

import outcome
import trio

from plainsong.protocol.effects import Delete, Put, RollBack, Table
from storage.base import StoreConflict, StoreError, rolled_back
from storage.leveldb.tables import Turned
from storage.loop import Bell

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn

    from plainsong.protocol.effects import Expect, Operation
    from storage.leveldb.tables import LevelDBTables, Stored

T = TypeVar("T")
#: Bytes after which a group takes no further commit: beyond, joining saves nothing and delays the first one.
MAX_GROUP_BYTES = 4 << 20
#: What a row costs besides its value and the prefix of its key: no less than a volume counts for it.
_ROW_BYTES = 64
#: What the event loop writes at once, at most: a sync takes hardly longer for so much than for a single row.
MAX_INLINE_BYTES = 32 << 10
#: After a write of the event loop that took longer than it may, the thread writes for this many times as long as it took:
#: the first number at first, then twice as many each time, unless so many quick ones came between.
SLOW_FACTORS = (10, 1000)
QUICK_CALLS = 1000


@dataclass(eq=False, slots=True)
class PendingWrite:
    """One commit on its way to the disk."""

    operations: Sequence[Operation | Stored]
    expect: Sequence[Expect] = ()
    size: int = 0
    """Bytes, roughly; set when it is begun."""
    on_settled: Callable[[PendingWrite], object] | None = None
    """Called on the event loop once it is written, or ``error`` says why not."""
    beside: Callable[[], object] | None = None
    """What may be done while the disk works, on the event loop, once at most; it does not raise."""
    error: StoreError | StoreConflict | None = None
    rest: Sequence[Operation | Stored] = ()
    """What a long rollback leaves to do once the work is settled; its submitter submits it again."""
    settled: Callable[[StoreError | StoreConflict | None], object] | None = None
    """The submitter's own: whom to tell what became of it."""
    is_rest: bool = False
    """The submitter's own: whether it is what another one left to do."""


class GroupCommit(trio.abc.Instrument):
    """The queue in front of the database, no longer than the number of writing tasks, and the thread that empties it.

    It is an instrument of the event loop: when that returns from the kernel it learns what has been written before any
    task runs, and the thread wakes it only if it sleeps.
    """

    def __init__(
        self,
        write: Callable[[Sequence[PendingWrite], Callable[[], object] | None], None],
        *,
        is_quick: Callable[[], bool] = lambda: False,
        max_inline_s: float = 0.0,
    ) -> None:
        """Use it on the event loop; ``close`` ends its thread.

        Args:
          write: makes a group durable; its StoreError is the answer to the whole group. It is called in the thread, or on
            the event loop while the thread has nothing to do; then with a function to call while the disk works.
          is_quick: whether nothing but the write and its sync would be done for a small group now.
          max_inline_s: after one of its writes that took longer the event loop leaves them to the thread for a while; 0: it
            never writes one.
        """
        self._write = write
        self._is_quick = is_quick
        self._max_inline_s = max_inline_s
        self._waiting: SimpleQueue[PendingWrite | None] = SimpleQueue()
        self._written: deque[tuple[Sequence[PendingWrite], StoreError | StoreConflict | None]] = deque()
        #: How many commits the thread has that are not settled.
        self._in_thread = 0
        #: Commits that were gathered, and their bytes.
        self._gathers = False
        self._gathered: list[PendingWrite] = []
        self._gathered_bytes = 0
        #: Whether the disk works on what the event loop wrote, and what was begun meanwhile: the thread has it afterwards.
        self._disk_works = False
        self._held_back: list[PendingWrite] = []
        #: How long the submitters took for what they had to do meanwhile: that is no time of the disk.
        self._beside_s = 0.0
        #: Until then the thread writes, since the disk was slow; and what decides for how long it does the next time.
        self._slow_until_s = 0.0
        self._slow_factor, _ = SLOW_FACTORS
        self._quick_calls = QUICK_CALLS
        self._loop = trio.lowlevel.current_trio_token()
        self.bell = Bell()
        trio.lowlevel.add_instrument(self)
        #: Whether the event loop sleeps in the kernel, or is about to.
        self.is_asleep = True
        self._closed = False
        # A daemon's thread: where nothing closes the store any more, it must not hold up the exit.
        self._thread = threading.Thread(target=self._run, name="commit", daemon=True)
        self._thread.start()

    def begin(self, work: PendingWrite) -> None:
        """Put ``work`` into the queue; its ``on_settled`` is called later, on the event loop.

        Raises:
          StoreError: the queue is closed; nothing happens.
        """
        if self._closed:
            raise StoreError("the store is closed")
        work.size = _size(work)  # here, where an error has somebody to go to
        if self._gathers and self._may_write_inline(work):
            self._gathered.append(work)
            self._gathered_bytes += work.size
            return
        self._hand_over_gathered()
        self._hand_over(work)

    # --- commits that the event loop writes itself --------------------------------------------------

    @property
    def writes_inline(self) -> bool:
        """Whether the event loop would write a small commit itself now."""
        return not self._in_thread and self._max_inline_s > 0 and perf_counter() >= self._slow_until_s

    @property
    def is_idle(self) -> bool:
        """Whether the thread has nothing to do."""
        return not self._in_thread

    def done_inline(self, read: Callable[[], T]) -> T:
        """Read something small on the event loop, while ``writes_inline``; a disk that takes long is left to threads then."""
        began_s = perf_counter()
        try:
            return read()
        finally:
            ended_s = perf_counter()
            self._quick_calls += 1
            if ended_s - began_s > self._max_inline_s:
                self._was_slow(ended_s, ended_s - began_s)

    def gather(self) -> None:
        """Gather what is begun from now on, as far as it is small: ``write_gathered`` writes it.

        While the disk works on what was gathered before, nothing is: the thread writes it behind that.
        """
        self._gathers = not self._disk_works

    def write_gathered(self) -> None:
        """Write what was gathered, and settle it, before this returns."""
        self._gathers = False
        group = self._gathered
        if not group:
            return
        self._gathered, self._gathered_bytes = [], 0
        began_s, self._beside_s = perf_counter(), 0.0
        error = self._attempt(group, partial(self._beside, group))
        ended_s = perf_counter()
        took_s = ended_s - began_s - self._beside_s
        self._quick_calls += 1
        if took_s > self._max_inline_s:
            self._was_slow(ended_s, took_s)
        held_back, self._held_back = self._held_back, []
        for work in held_back:
            self._hand_over(work)
        _settle(group, error)

    def _was_slow(self, now_s: float, took_s: float) -> None:
        """Leave commits to the thread for a while."""
        least, most = SLOW_FACTORS
        self._slow_factor = least if self._quick_calls > QUICK_CALLS else min(2 * self._slow_factor, most)
        self._quick_calls = 0
        self._slow_until_s = now_s + self._slow_factor * took_s

    def _beside(self, group: Sequence[PendingWrite]) -> None:
        """What the submitters have to do while the disk works on their commits."""
        began_s = perf_counter()
        self._disk_works = True
        try:
            for work in group:
                if work.beside is not None:
                    work.beside()
        finally:
            self._disk_works = False
            self._beside_s = perf_counter() - began_s

    def _may_write_inline(self, work: PendingWrite) -> bool:
        if self._gathered_bytes + work.size > MAX_INLINE_BYTES or work.expect or not self.writes_inline:
            return False
        for operation in work.operations:
            if type(operation) is not Put:
                return False
        return self._is_quick()

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
        """Begin something, and wait until the function that ``begin`` is given is called; returns what it is called with.

        Cancellation does not interrupt it.
        """
        task = trio.lowlevel.current_task()
        begin(lambda found: trio.lowlevel.reschedule(task, outcome.Value(found)))
        found: T = await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
        return found

    async def quiet(self) -> None:
        """Return once everything begun before has been written, or has failed."""

        def begin(settled: Callable[[PendingWrite], None]) -> None:
            self.begin(PendingWrite((), on_settled=settled))

        await self.written(begin)

    async def close(self) -> None:
        """Settle what waits, then end the thread. Idempotent."""
        self._closed = True
        self._waiting.put(None)
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self._thread.join)
            self._deliver()
            with suppress(KeyError):
                trio.lowlevel.remove_instrument(self)
            self.bell.close()

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        first = self._waiting.get()
        while first is not None:
            group, following = self._group(first)
            self._written.append((group, self._attempt(group)))
            if self.is_asleep:
                try:
                    self._wake()
                except trio.RunFinishedError:
                    return
            first = self._waiting.get() if following is _NOTHING else following

    def _attempt(
        self, group: Sequence[PendingWrite], beside: Callable[[], object] | None = None
    ) -> StoreError | StoreConflict | None:
        """Make a group durable; returns why it may not be."""
        try:
            self._write([work for work in group if work.operations], beside)
        except (StoreError, StoreConflict) as failed:
            return failed
        except BaseException as bug:  # noqa: BLE001  # no caller may wait for ever
            return StoreError(f"writing: {bug!r}")
        return None

    def _group(self, first: PendingWrite) -> tuple[list[PendingWrite], PendingWrite | None]:
        """``first`` and the commits that wait behind it, in order; a commit with expectations goes alone.

        Also what follows, if that was taken out of the queue already; else ``_NOTHING``.
        """
        group = [first]
        if first.expect:
            return group, _NOTHING
        size = first.size
        while True:
            try:
                work = self._waiting.get_nowait()
            except Empty:
                return group, _NOTHING
            if work is None or work.expect or size + work.size > MAX_GROUP_BYTES:
                return group, work
            group.append(work)
            size += work.size

    # --- the event loop again ---------------------------------------------------------------------

    def before_io_wait(self, timeout: float) -> None:
        """The event loop is about to wait for the kernel: what has been written before it says so is not to wait."""
        if timeout > 0:
            self.is_asleep = True
            if self._written:
                self._wake()

    def after_io_wait(self, timeout: float) -> None:
        """The event loop goes on."""
        del timeout
        self.is_asleep = False
        if self._written:
            try:
                self._deliver()
            except BaseException as bug:  # noqa: BLE001  # an instrument must not raise; there it ends the loop
                self._loop.run_sync_soon(_raise, bug)

    def _wake(self) -> None:
        if self.bell.is_heard:
            self.bell.ring()
        else:
            self._loop.run_sync_soon(self._deliver, idempotent=True)

    def _deliver(self) -> None:
        # No more than there are by now: an answer may begin the next commit, and that may end before the answers do. The
        # rest of the event loop must have its turn in between.
        for _ in range(len(self._written)):
            group, error = self._written.popleft()
            self._in_thread -= len(group)
            _settle(group, error)


def _settle(group: Sequence[PendingWrite], error: StoreError | StoreConflict | None) -> None:
    """Tell every submitter, also where telling one of them raises: that is raised behind the last."""
    bug: BaseException | None = None
    for work in group:
        work.error = error
        if work.on_settled is not None:
            try:
                work.on_settled(work)
            except BaseException as raised:  # noqa: BLE001  # raised again below
                bug = bug or raised
    if bug is not None:
        raise bug


#: No commit was taken out of the queue.
_NOTHING = PendingWrite(())


def _raise(bug: BaseException) -> NoReturn:
    raise bug


def own_error(error: StoreError | StoreConflict) -> StoreError | StoreConflict:
    """An exception of its own for each caller: one object raised in several tasks mixes their tracebacks."""
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
            # The rollbacks of a group share a bound of their own: STEP_BYTES.
            size += _ROW_BYTES
    return size


# --- from a group to batches: rollbacks in bounded steps -------------------------------------------
#
# LevelDB has no update in place, so a rollback is a scan, then a batch of the rows that it changes. Both happen in the
# writer's thread: a row that another thread had read before could be discarded meanwhile, and would come back.
#
# A commit is one batch as long as its rollbacks are short. Otherwise the operations before, and each step, are durable
# by themselves, in order; ``PendingWrite.rest`` keeps the rest, to be submitted again behind the commits that wait.


#: Bytes that the rollbacks of a group may read together: one step of the writer, and the memory that it takes.
STEP_BYTES = 2 << 20
#: What a row counts besides its value, so that a step has 2048 rows at most: a hundredth of a second.
STEP_ROW_BYTES = 1024


def write_group(tables: LevelDBTables, group: Sequence[PendingWrite]) -> None:
    """Make a group durable, except for each ``PendingWrite.rest``. For whoever writes just now."""
    batch = _Batch(tables)
    for work in group:
        work.rest = batch.take(work.operations)
    batch.write()
    tables.end_group()


_OF_TABLES = (Put, Delete)


class _Batch:
    """Operations that gather for one batch."""

    def __init__(self, tables: LevelDBTables) -> None:
        self._tables = tables
        self._left = STEP_BYTES
        self._operations: list[Stored] = []
        #: The operations among them on message rows: a rollback does not see these before they are written.
        self._unseen: list[Put | Delete] = []

    def take(self, operations: Sequence[Operation | Stored]) -> Sequence[Operation | Stored]:
        """Add a commit's operations; returns those that have to wait for a later batch."""
        for index, operation in enumerate(operations):
            if isinstance(operation, RollBack):
                again = self._roll_back(operation)
                if again is not None:
                    return [again, *operations[index + 1 :]]
            else:
                self._operations.append(operation)
                if isinstance(operation, _OF_TABLES) and operation.table is Table.MESSAGE:
                    self._unseen.append(operation)
        return ()

    def write(self) -> None:
        """Write the operations added so far."""
        if self._operations:
            self._tables.write(self._operations)
        self._operations, self._unseen = [], []

    def _roll_back(self, operation: RollBack) -> RollBack | None:
        """Roll back rows of the range; returns the rest of the operation, None if there is none."""
        if self._left <= 0:
            return operation
        if any(_touches(unseen, operation) for unseen in self._unseen):
            self.write()
        rows = self._tables.first_rows(Table.MESSAGE, operation.start, operation.stop, self._left, STEP_ROW_BYTES)
        turned = list(rolled_back(rows, operation.pointer))
        here, sealed = self._tables.parted(turned)
        if sealed:
            # What stands before the rollback is durable before it. It may seal the newest volume: look again then.
            self.write()
            here, sealed = self._tables.parted(turned)
            self._tables.roll_back_sealed(sealed, operation.pointer)
        if here:
            # Not among the unseen: another rollback finds nothing to change in these rows.
            keys, values = [key for key, _ in here], [value for _, value in here]
            self._operations.append(Turned(Table.MESSAGE, b"", keys, values))
        self._left -= sum(len(value) + STEP_ROW_BYTES for _, value in rows)
        if self._left > 0:
            return None
        return RollBack(rows[-1][0] + b"\x00", operation.stop, operation.pointer)


def _touches(unseen: Put | Delete, operation: RollBack) -> bool:
    """Whether a put or delete of message rows may change what a rollback finds."""
    if isinstance(unseen, Delete):
        return any(operation.start <= key < operation.stop for key in unseen.keys)
    if not unseen.suffixes:
        return False
    first, last = unseen.prefix + unseen.suffixes[0], unseen.prefix + unseen.suffixes[-1]
    return first < operation.stop and last >= operation.start
