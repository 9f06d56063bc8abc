"""A store for tests: fails, stalls, loses unsynced rows and tears commits on demand.

    store = FaultyStore(MemoryStore())
    store.fail_next("write", applied=2)      the next write applies two rows and fails
    store.stall("write")                     writes stop before they do anything, until release("write")
    store.crash(keep_rows=3)                 a power cut: three rows of the writes in progress survive

Tests of the layers above also use it. ``crash`` and torn commits need a MemoryStore.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Literal

import trio

from plainsong.protocol.effects import Delete, Put, RollBack, Table, put_one
from storage.base import StoreError, drop_rows
from storage.memory import MemoryStore
from storage.spawned import SpawnsWrites

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from plainsong.protocol.effects import Expect, Operation
    from plainsong.protocol.names import TopicName
    from storage.base import Claim, RawRow, Row, Store, StoreStatistics, StoreView

Op = Literal["claim", "write", "discard", "get", "scan", "reclaim"]


@dataclass(slots=True)
class Fault:
    """One call that fails."""

    after: int
    """Number of calls that succeed first."""
    applied: bool | int
    """True if the call takes effect before it fails; if a number, that many rows of it do."""


@dataclass(slots=True)
class _Gate:
    opened: trio.Event = field(default_factory=trio.Event)
    reached: trio.Event = field(default_factory=trio.Event)


class Faults:
    """The faults of one store. Set without await, so that a hypothesis machine can do so between steps."""

    def __init__(self) -> None:
        #: Number of calls of each operation.
        self.calls: Counter[Op] = Counter()
        self._faults: defaultdict[Op, list[Fault]] = defaultdict(list)
        self._gates: dict[Op, _Gate] = {}

    def fail_next(self, op: Op, *, applied: bool | int = False, after: int = 0) -> None:
        """Make a call of ``op`` raise StoreError. After a failed write or discard, the store must also be claimed
        again.

        Args:
          op: the operation.
          applied: True if the call takes effect before it fails; if a number, that many rows of it do.
          after: the number of calls of ``op`` that succeed first.
        """
        self._faults[op].append(Fault(after, applied))

    def fail_no_more(self) -> None:
        """Remove all pending faults."""
        self._faults.clear()

    def stall(self, op: Op) -> None:
        """Block calls of ``op`` before they take effect, until ``release``."""
        self._gates.setdefault(op, _Gate())

    async def stalled(self, op: Op) -> None:
        """Return once a call of ``op`` is blocked. Call ``stall`` first."""
        await self._gates[op].reached.wait()

    def release(self, op: Op) -> None:
        """Unblock calls of ``op``."""
        gate = self._gates.pop(op, None)
        if gate is not None:
            gate.opened.set()

    def release_all(self) -> None:
        """Unblock all calls."""
        for op in list(self._gates):
            self.release(op)

    async def arrive(self, op: Op) -> Fault | None:
        """Count a call of ``op``, wait while it is stalled, and return the fault that is due."""
        self.calls[op] += 1
        fault = self._due(op)
        await trio.lowlevel.checkpoint()
        gate = self._gates.get(op)
        if gate is not None:
            gate.reached.set()
            await gate.opened.wait()
        return fault

    def _due(self, op: Op) -> Fault | None:
        due = None
        for fault in list(self._faults[op]):
            if fault.after == 0 and due is None:
                due = fault
                self._faults[op].remove(fault)
            elif fault.after > 0:
                fault.after -= 1
        return due


class FaultyStore(Faults, SpawnsWrites):
    """A ``storage.base.Store`` around another store, with this module's faults and power cuts on demand."""

    def __init__(self, inner: Store) -> None:
        super().__init__()
        self.traits = replace(inner.traits, whole_commits=False, ordered_commits=False, drops_ranges=False)
        self.waker = inner.waker
        self.inner = inner
        self._broken = False
        self._closed = False
        self._crashes = 0
        self._under_way: list[Sequence[Operation]] = []
        #: Discarded rows that no later write has made durable yet, oldest first.
        self._unsynced: list[tuple[Table, bytes, bytes]] = []

    # --- for tests ---

    def crash(self, *, keep_rows: int = 0, keep_discards: int = 0) -> None:
        """Cut the power: calls in progress raise StoreError, and the store must be claimed again.

        Args:
          keep_rows: number of rows of the writes in progress that reached the disk, in order.
          keep_discards: of the rows removed by ``discard`` since the last completed write, the number that stay
            removed. The disk keeps the order: if rows of a later write survive, all of them stay removed.
        Raises:
          TypeError: the inner store is not a MemoryStore.
        """
        memory = self._memory()
        self._crashes += 1
        self._broken = True
        if not keep_rows:
            for table, key, value in reversed(self._unsynced[keep_discards:]):
                memory.apply([put_one(table, key, value)])
        self._unsynced.clear()
        torn = [operation for commit in self._under_way for operation in commit]
        self._apply_rows(torn, keep_rows)
        self.release_all()

    # --- the store ---

    async def claim(self, name: TopicName) -> Claim:
        """See ``Store.claim``. Repairs a broken store."""
        fault = await self._begin("claim")
        if fault is not None and not fault.applied:
            raise _failed("claim")
        claim = await self.inner.claim(name)
        self._broken = False
        if fault is not None:
            raise _failed("claim")
        return claim

    async def check(self, claim: Claim) -> None:
        """See ``Store.check``."""
        self._refuse_if_broken()
        await self.inner.check(claim)

    async def write(self, commit: Sequence[Operation], *, claim: Claim, expect: Sequence[Expect] = ()) -> None:
        """See ``Store.write``."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self._under_way.append(commit)
        try:
            with trio.CancelScope(shield=True):
                fault = await self._begin("write")
                self._refuse_if_broken()
                if fault is not None:
                    self._tear(commit, fault)
                if isinstance(self.inner, MemoryStore):
                    # There is no checkpoint from here on, so a crash comes either before the commit or after it.
                    self.inner.compare(expect)
                    self.inner.apply(commit)
                else:
                    await self.inner.write(commit, claim=claim, expect=expect)
            self._unsynced.clear()
        finally:
            self._under_way = [other for other in self._under_way if other is not commit]

    async def discard(self, table: Table, keys: Sequence[bytes]) -> None:
        """See ``Store.discard``. A crash restores the rows, unless a write has completed since."""
        fault = await self._begin("discard")
        self._refuse_if_broken()
        if isinstance(self.inner, MemoryStore):
            rows = self.inner.tables[table].rows
            self._unsynced += [(table, key, rows[key]) for key in keys if key in rows]
        if fault is not None:
            self._tear([Delete(table, keys)], fault)
        await self.inner.discard(table, keys)

    async def drop(self, table: Table, ranges: Sequence[tuple[bytes, bytes]]) -> int:
        """See ``Store.drop``. Discards the rows one list at a time."""
        return await drop_rows(self, table, ranges)

    def may_have(self, table: Table, start: bytes, stop: bytes) -> bool:
        """See ``Store.may_have``."""
        return self.inner.may_have(table, start, stop)

    @property
    def topics_number(self) -> int | None:
        """See ``Store.topics_number``."""
        return None if self._broken else self.inner.topics_number

    async def file_of(self, table: Table, key: bytes) -> str | None:
        """See ``Store.file_of``."""
        return await self.inner.file_of(table, key)

    async def begin_files(self) -> None:
        """See ``Store.begin_files``."""
        self._refuse_if_broken()
        await self.inner.begin_files()

    async def scan_raw(self, table: Table, start: bytes, stop: bytes, take: Callable[[list[RawRow]], object]) -> None:
        """See ``Store.scan_raw``."""
        await self.inner.scan_raw(table, start, stop, take)

    async def get(self, table: Table, key: bytes) -> bytes | None:
        """See ``Store.get``."""
        if await self._begin("get") is not None:
            raise _failed("get")
        return await self.inner.get(table, key)

    async def scan(
        self,
        table: Table,
        start: bytes,
        stop: bytes,
        feed: Callable[[Sequence[Row]], bool],
        *,
        reverse: bool = False,
        first_chunk: int = 64,
        values: bool = True,
    ) -> None:
        """See ``Store.scan``. A fault with ``applied`` lets that number of rows through; with True, all of them."""
        fault = await self._begin("scan")
        left = -1 if fault is None or fault.applied is True else int(fault.applied)

        def counted(rows: Sequence[Row]) -> bool:
            nonlocal left
            if left < 0:
                return feed(rows)
            good, left = rows[:left], left - min(left, len(rows))
            return (not good or feed(good)) and left > 0

        if left != 0:
            await self.inner.scan(table, start, stop, counted, reverse=reverse, first_chunk=first_chunk, values=values)
        if fault is not None:
            raise _failed("scan")

    async def tidy(self) -> int:
        """See ``Store.tidy``."""
        return await self.inner.tidy()

    async def reclaim(self, table: Table, start: bytes, stop: bytes) -> None:
        """See ``Store.reclaim``."""
        if await self._begin("reclaim") is not None:
            raise _failed("reclaim")
        await self.inner.reclaim(table, start, stop)

    async def pin(self, max_s: float) -> StoreView:
        """See ``Store.pin``."""
        self._refuse_if_broken()
        return await self.inner.pin(max_s)

    def statistics(self) -> StoreStatistics:
        """See ``Store.statistics``."""
        return self.inner.statistics()

    async def aclose(self) -> None:
        """See ``Store.aclose``."""
        self._closed = True
        await self.inner.aclose()

    # --- inside ---

    async def _begin(self, op: Op) -> Fault | None:
        """Start a call. Raises StoreError if the power was cut while it was blocked."""
        crashes = self._crashes
        fault = await self.arrive(op)
        if crashes != self._crashes:
            raise StoreError(f"the power was cut during a {op}")
        return fault

    def _tear(self, commit: Sequence[Operation], fault: Fault) -> None:
        self._broken = True
        keep = None if fault.applied is True else int(fault.applied)
        if keep != 0:
            self._apply_rows(commit, keep)
            if any(not isinstance(operation, Delete) for operation in commit):
                # The discards before these rows reached the disk first.
                self._unsynced.clear()
        raise _failed("write")

    def _apply_rows(self, commit: Sequence[Operation], count: int | None) -> None:
        """Apply the first ``count`` rows of a commit one by one, because a rollback acts on the rows before it."""
        memory = self._memory()
        for row in islice(_single_rows(memory, commit), count):
            memory.apply([row])

    def _memory(self) -> MemoryStore:
        if not isinstance(self.inner, MemoryStore):
            raise TypeError("a crash and a torn commit need FaultyStore(MemoryStore())")
        return self.inner

    def _refuse_if_broken(self) -> None:
        if self._closed:
            raise StoreError("the store is closed")
        if self._broken:
            raise StoreError("a write failed before, and the topic was not claimed since")


def _single_rows(memory: MemoryStore, commit: Sequence[Operation]) -> Iterator[Operation]:
    for operation in commit:
        if isinstance(operation, Put):
            for suffix, value in zip(operation.suffixes, operation.values, strict=True):
                yield put_one(operation.table, operation.prefix + suffix, value)
        elif isinstance(operation, RollBack):
            for key, value in memory.turned(operation):
                yield put_one(Table.MESSAGE, key, value)
        else:
            for key in operation.keys:
                yield Delete(operation.table, [key])


def _failed(op: Op) -> StoreError:
    return StoreError(f"this {op} was set to fail")
