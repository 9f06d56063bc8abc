"""Simulated disks: committed rows survive kills and power cuts; outcomes of calls are random.

A ``Disk`` outlives the instances that use it. Each life of an instance has its own handle, which is unusable after that
life: calls in progress then end with or without effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import ClassVar

import trio
from outcome import Value

from plainsong.protocol.effects import Delete, Expect, Operation, Put, RollBack, Table, put_one
from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.names import TopicName
from storage.base import Claim, Deposed, NothingWritten, Row, StoreConflict, StoreError
from storage.memory import MemoryStore, MemoryView
from tests.simulation.clocks import time_now


@dataclass(slots=True)
class Weather:
    """Current behaviour of a disk, or of the connection to it."""

    write_s: float = 0.001
    """Mean duration of a commit."""
    read_s: float = 0.0
    """Mean duration of a read; 0: reads never wait."""
    fails: float = 0.0
    """Probability that a write fails, with or without effect."""
    reads_fail: float = 0.0
    passable: trio.Event | None = None
    """Set while the disk is unreachable: no call returns before this event."""

    def block(self) -> None:
        """Make the disk unreachable."""
        if self.passable is None:
            self.passable = trio.Event()

    def unblock(self) -> None:
        """Make the disk reachable again; blocked calls continue."""
        if self.passable is not None:
            self.passable.set()
        self.passable = None

    def clear(self) -> None:
        """Restore normal behaviour."""
        self.write_s, self.read_s, self.fails, self.reads_fail = 0.001, 0.0, 0.0, 0.0
        self.unblock()


class Disk:
    """The tables as a crash at this moment would leave them, and the claims."""

    def __init__(self, *, shared: bool) -> None:
        self.memory = MemoryStore()
        self.shared = shared
        self.epochs: dict[TopicName, int] = {}
        #: Rows removed without a sync since the last synced commit.
        self.unsynced: list[tuple[Table, bytes, bytes]] = []

    def open(self, rng: Random, weather: Weather) -> DiskStore:
        """Return a handle for one life of an instance."""
        return SharedDiskStore(self, rng, weather) if self.shared else OwnDiskStore(self, rng, weather)

    def lose_unsynced(self, keep: int) -> None:
        """Cut the power: undo all unsynced removals except the first ``keep``."""
        for table, key, value in reversed(self.unsynced[keep:]):
            self.memory.apply([put_one(table, key, value)])
        self.unsynced.clear()

    def tear(self, commit: Sequence[Operation], rng: Random) -> None:
        """Apply a prefix of a commit, as a failure may: its puts are complete or absent; the removals and rollbacks
        after them may be partial."""
        steps = list(_steps(self.memory, commit))
        for step in steps[: rng.randrange(len(steps) + 1)]:
            self.memory.apply(step)


def _steps(memory: MemoryStore, commit: Sequence[Operation]) -> Iterator[Sequence[Operation]]:
    """Yield the atomic steps of a commit: consecutive puts together, and each rolled back or removed row."""
    puts: list[Operation] = []
    for operation in commit:
        if isinstance(operation, Put):
            puts.append(operation)
            continue
        if puts:
            yield puts
            puts = []
        if isinstance(operation, RollBack):
            yield from ([put_one(Table.MESSAGE, key, value)] for key, value in memory.turned(operation))
        else:
            yield from ([Delete(operation.table, [key])] for key in operation.keys)
    if puts:
        yield puts


class DiskStore(MemoryStore):
    """The base of both kinds of handles: reads, and an end after which nothing changes."""

    def __init__(self, disk: Disk, rng: Random, weather: Weather) -> None:
        super().__init__()
        self.disk = disk
        self.tables = disk.memory.tables
        self.rng = rng
        self.weather = weather
        self.dead = False

    def kill(self) -> None:
        """End this life; later calls fail and change nothing."""
        self.dead = True
        self.weather.unblock()

    async def get(self, table: Table, key: bytes) -> bytes | None:
        await self._read()
        return await super().get(table, key)

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
        await self._read()
        await super().scan(table, start, stop, feed, reverse=reverse, first_chunk=first_chunk, values=values)

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()
        self._closed = True

    async def _read(self) -> None:
        await self._reach(self.weather.read_s)
        if self.weather.reads_fail and self.rng.random() < self.weather.reads_fail:
            raise StoreError("a simulated read failed")

    async def _reach(self, mean_s: float) -> None:
        """Wait as long as a call takes. Raises StoreError if this life has ended."""
        if mean_s:
            await time_now().sleep(self.rng.expovariate(1 / mean_s))
        if self.weather.passable is not None:
            await self.weather.passable.wait()
        if self.dead:
            raise StoreError("this process has ended")


#: A commit, its expectations, and the callback for its outcome.
Queued = tuple[Sequence[Operation], Sequence[Expect], Callable[[PlainsongError | None], object]]


class OwnDiskStore(DiskStore):
    """Like LevelDB: one writer, sequential commits, each complete or absent; broken after a failure."""

    traits = replace(MemoryStore.traits, kind="leveldb", whole_commits=True, ordered_commits=True)
    #: True if the event loop writes a commit itself while no other is in progress: ``--inline``.
    inline: ClassVar[bool] = False

    def __init__(self, disk: Disk, rng: Random, weather: Weather) -> None:
        super().__init__(disk, rng, weather)
        self._broken = False
        self._gathers = False
        self._gathered: list[Queued] = []
        self._beside: list[Callable[[], object]] = []
        self._queue: list[Queued] = []
        self._under_way: list[Queued] = []
        self._news = trio.Event()

    async def run(self) -> None:
        """Write queued commits, group by group, until cancelled."""
        while True:
            while not self._queue:
                self._news = trio.Event()
                await self._news.wait()
            group, self._queue = self._queue, []
            self._under_way = group
            failed = await self._write_group(group)
            self._under_way = []
            for (_, _, settled), error in zip(group, failed, strict=True):
                settled(error)

    def kill(self) -> None:
        """Also complete all waiting commits with an error, so that their tasks can end."""
        super().kill()
        waiting, self._queue, self._under_way = self._under_way + self._queue, [], []
        for _, _, settled in waiting:
            settled(StoreError("this process has ended"))

    async def _write_group(self, group: Sequence[Queued]) -> list[PlainsongError | None]:
        if self._broken:
            return [NothingWritten("a write failed before, and the store has not been reopened")] * len(group)
        # If the process dies, it dies either before or after the group is on the disk.
        await self._reach(self.weather.write_s / 2)
        failed = self._fail_or_apply(group)
        if not self._broken:
            await self._reach(self.weather.write_s / 2)
        return failed

    def _fail_or_apply(self, group: Sequence[Queued]) -> list[PlainsongError | None]:
        if self.rng.random() < self.weather.fails:
            self._broken = True
            for commit, _, _ in group[: self.rng.randrange(len(group) + 1)]:
                self.disk.tear(commit, self.rng)
            return [StoreError("a simulated write failed")] * len(group)
        return self._apply(group)

    def _apply(self, group: Sequence[Queued]) -> list[PlainsongError | None]:
        failed: list[PlainsongError | None] = []
        for commit, expect, _ in group:
            try:
                self.compare(expect)
            except StoreConflict as error:
                failed.append(error)
                continue
            self.apply(commit)
            failed.append(None)
        self.disk.unsynced.clear()
        return failed

    async def claim(self, name: TopicName) -> Claim:
        await self._reach(self.weather.write_s)
        self._broken = False
        return Claim(name, 0)

    async def check(self, claim: Claim) -> None:
        await self._reach(0)
        if self._broken:
            raise StoreError("a write failed before, and the topic was not claimed since")

    def begin(
        self,
        commit: Sequence[Operation],
        completed: Callable[[Exception | None], object],
        *,
        claim: Claim,
        while_syncing: Callable[[], object] | None = None,
    ) -> None:
        """See ``storage.base.Store.begin``."""
        settled = completed
        if self._gathers and self.writes_inline:
            self._gathered.append((commit, (), settled))
            if while_syncing is not None:
                self._beside.append(while_syncing)
        else:
            self._put(commit, (), settled)

    @property
    def is_idle(self) -> bool:
        """See ``storage.base.Store``."""
        return not (self._queue or self._under_way)

    @property
    def writes_inline(self) -> bool:
        """See ``storage.base.Store``."""
        can = not (self.dead or self._closed or self._broken) and self.weather.passable is None
        return self.inline and can and self.is_idle

    def gather_writes(self) -> None:
        """See ``storage.base.Store``."""
        self._gathers = True

    def write_gathered(self) -> None:
        """See ``storage.base.Store``."""
        self._gathers = False
        group, self._gathered = self._gathered, []
        if not group:
            return
        besides, self._beside = self._beside, []
        for beside in besides:
            beside()
        for (_, _, settled), error in zip(group, self._fail_or_apply(group), strict=True):
            settled(error)

    async def write(self, commit: Sequence[Operation], *, claim: Claim, expect: Sequence[Expect] = ()) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        self._put(commit, expect, partial(_told, trio.lowlevel.current_task()))
        error: PlainsongError | None = await trio.lowlevel.wait_task_rescheduled(_not_to_be_cancelled)
        if error is not None:
            raise error

    def _put(
        self,
        commit: Sequence[Operation],
        expect: Sequence[Expect],
        settled: Callable[[PlainsongError | None], object],
    ) -> None:
        if self.dead or self._closed:
            raise NothingWritten("the store is closed")
        self._queue.append((commit, expect, settled))
        self._news.set()

    async def discard(self, table: Table, keys: Sequence[bytes]) -> None:
        await self._reach(0)
        rows = self.tables[table].rows
        self.disk.unsynced += [(table, key, rows[key]) for key in keys if key in rows]
        self.apply([Delete(table, keys)])


def _told(task: trio.lowlevel.Task, error: PlainsongError | None) -> None:
    trio.lowlevel.reschedule(task, Value(error))


def _not_to_be_cancelled(_: object) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.FAILED


class SharedDiskStore(DiskStore):
    """Like HBase: several writers, where a claim replaces the previous owner."""

    traits = replace(MemoryStore.traits, kind="hbase", shared=True, whole_commits=True)

    async def run(self) -> None:
        """Do nothing: the calls do all the work."""
        await trio.sleep_forever()

    async def claim(self, name: TopicName) -> Claim:
        await self._reach(self.weather.write_s)
        epoch = self.disk.epochs[name] = self.disk.epochs.get(name, 0) + 1
        await self._reach(self.weather.write_s)
        return Claim(name, epoch)

    async def check(self, claim: Claim) -> None:
        await self._reach(self.weather.write_s / 2)
        self._refuse_if_deposed(claim)

    async def write(self, commit: Sequence[Operation], *, claim: Claim, expect: Sequence[Expect] = ()) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        with trio.CancelScope(shield=True):
            await self._reach(self.weather.write_s)
            self._refuse_if_deposed(claim)
            self.compare(expect)
            if self.rng.random() < self.weather.fails:
                self.disk.tear(commit, self.rng)
                raise StoreError("a simulated write failed")
            self.apply(commit)
            await self._reach(self.weather.write_s / 2)

    async def pin(self, max_s: float) -> MemoryView:
        """Return a view that, like HBase's, does not show a single moment."""
        await self._read()
        return ChangingView(self, trio.current_time() + max_s)

    async def discard(self, table: Table, keys: Sequence[bytes]) -> None:
        await self._reach(0)
        self.apply([Delete(table, keys)])

    def _refuse_if_deposed(self, claim: Claim) -> None:
        if self.disk.epochs.get(claim.name) != claim.epoch:
            raise Deposed(f"topic {claim.name} is no longer owned in epoch {claim.epoch}", happened=False)


class ChangingView(MemoryView):
    """A view that also shows later commits."""

    exact = False

    def __init__(self, store: SharedDiskStore, ends_at: float) -> None:
        self._store = store
        self._ends_at = ends_at

    async def aclose(self) -> None:
        """Do nothing: the view holds no resources."""
        await trio.lowlevel.checkpoint()
