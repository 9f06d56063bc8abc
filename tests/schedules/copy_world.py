"""The store with a second copy, under a schedule: commits pass from the commit to the outbox, and from there to a log.

The store, its copy (``actors.second_copy``) and its outbox are the real ones. The object store is in memory: it loses
answers, is unavailable at times, and another process may end the log there (a fence). Threads of a schedule:

    main          Trio's event loop with the tasks below; the copy's task empties the outbox
    commit        the group commit's thread, which puts batches into the outbox
    keeper        the store's own, which makes the changes that a batch waits for
    workers       which read, encode segments, and write notes in the directory

Tasks: a writer per topic, a reader, one that tidies, one that cuts the object store off. A life ends once everything is
shipped, or at any moment; the next one continues the log. Checked at each write to the log:

    it has each commit once, in order, and as it was handed over
    it has no commit before that is durable here (mode ``async``) and the keeper has made its changes
    no commit is answered, and none of its metadata rows is visible, before it counts (mode ``sync``)
    after everything is shipped, a restore has the rows of the store
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import trio

from actors import copy_bases, copy_start, lease, second_copy
from actors.second_copy import SecondCopy
from actors.settings import ReplicationConfig
from plainsong.protocol.effects import Delete
from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.keys import HIGH_WATER, stop_after, system_key
from storage.base import Claim, StoreError
from storage.leveldb import LevelDBStore, commit
from storage.leveldb.metadata import ROW
from storage.leveldb.shipping import Handed
from storage.replication.bases import BASES, MANIFEST, Base
from storage.replication.counted_store import CountedStore, CountingOutbox
from storage.replication.notices import EpochSeal, encode_seal, log_name
from storage.replication.outbox import Outbox, commit_of
from storage.replication.protocol import ROOT, Foreign, ReignOver, after
from storage.replication.reading import bases_of, commits_after, rows_of
from storage.replication.segment import RUN_BYTES, Commit, Segment, encode_segment
from tests.schedules import event_loop
from tests.schedules import scheduler as sched
from tests.schedules.store_world import NAMES, OPTIONS, STORE_LINES, StoreTopic, StoreWorld, patched_store, rows_in
from tests.schedules.world import METADATA, PREFIXES, World, Wrong
from tests.storage.replication import shipped
from tests.storage.replication.objects import FaultyObjects

COPY_LINES = (
    *STORE_LINES,
    "storage/replication/outbox.py",
    "storage/replication/counted_store.py",
    "storage/replication/answers.py",
    "actors/second_copy.py",
    "actors/log_writer.py",
    "actors/copy_start.py",
    "actors/copy_bases.py",
    "actors/copy_calls.py",
)
#: Longer than a schedule.
_LONG_S = 1e9
#: The epoch of a process that ends the log.
_FENCE_EPOCH = 1000


class Objects(FaultyObjects):
    """The object store; each write is reported to the world at once."""

    def __init__(self, world: CopyWorld) -> None:
        super().__init__(world.random.randrange(1 << 30))
        self._world = world

    def _put(self, name: str, data: bytes) -> None:
        super()._put(name, data)
        self._world.logged()


class Log:
    """The log in the object store, read as a restore reads it."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.place = ROOT
        #: The commit after which the log has no gap.
        self._since = 0

    def read(self) -> Iterator[tuple[Segment, bytes]]:
        """Yield the segments that were written since the last call. Raises DamagedLog: one has a wrong number."""
        while (found := self._objects.found.get(log_name(self.place.epoch, self.place.number))) is not None:
            before, (self.place, segment) = self.place, after(self.place, found[0])
            if segment is not None:
                if before.commit is None:
                    self._since = segment.first - 1
                yield segment, found[0]

    def counts(self, number: int) -> bool:
        """True if a restore would have this commit."""
        last = self.place.commit
        return last is not None and number <= last and any(base.commit >= self._since for base in self._bases())

    def _bases(self) -> Iterator[Base]:
        for name, (data, _) in self._objects.found.items():
            folder, _, rest = name.rpartition("/")
            if name.startswith(f"{BASES}/") and rest == MANIFEST:
                yield Base.decode(folder, data)


class _Recorded(Outbox):
    """An outbox that records in the world every batch that is handed over."""

    world: CopyWorld

    def hand_over(self, batch: Handed) -> None:
        self.world.handed[batch.number] = batch
        super().hand_over(batch)


class _RecordedCounting(_Recorded, CountingOutbox):
    """The same for the mode ``sync``."""


class CopyWorld(StoreWorld):
    """The same topics and the same model, on a store with a second copy."""

    outbox: Outbox
    copy: SecondCopy
    # Without "replace": nothing overwrites a message, and the check for clones relies on that.
    kinds = ("remove", "roll back", "drop", "drop")

    def run(self) -> None:
        """Run lives until the writers have completed their steps, or another process has ended the log."""
        self.left = [self.steps] * len(PREFIXES)
        self.beside = 0
        self.options = replace(
            OPTIONS, settings=replace(OPTIONS.settings, volume_bytes=self.random.choice([500, 2000]))
        )
        self.syncs = self.random.random() < 0.5
        self.settings = ReplicationConfig(
            mode="sync" if self.syncs else "async",
            uploads=self.random.choice([1, 3]),
            interval_ms=self.random.choice([10, 1000]),
            # With 1, a batch is sent as soon as it arrives.
            segment_bytes=self.random.choice([1, 200, 2000]),
            base_every_h=24 * 365,
            lease_s=0,
            standby="allowed",
        )
        self.max_bytes = self.random.choice([1 << 30, 1 << 30, 2000])
        self.objects = Objects(self)
        self.log = Log(self.objects)
        #: Batches of this life, by number.
        self.handed: dict[int, Handed] = {}
        self.is_fenced = False
        self.may_fence = self.random.random() < 0.3
        while any(self.left) and not self.is_fenced:
            event_loop.run(self._life)
        tables = self.open(self.directory)
        self._compare(tables, "after a clean close")
        tables.close()

    async def _life(self) -> None:
        self.lives += 1
        self.handed = {}
        self.failed = False
        self.outbox = self._made_outbox()
        kind = CountedStore if self.syncs else LevelDBStore
        self.store = await kind.open(self.directory, self.options, shipper=self.outbox)
        try:
            self.copy = SecondCopy(self.objects, self.store, self.outbox, self.directory, self.settings, _now_ms)
            await self.copy.begin()
            for prefix in PREFIXES:
                await self._settle(prefix)
            #: The heads of earlier lives: commits of this one may write them again.
            self.heads = [await LevelDBStore.get(self.store, METADATA, _head_key(at)) for at in range(len(PREFIXES))]
            self.busy = sum(map(bool, self.left))
            self._may_fail = True
            await self._served()
        finally:
            self._may_fail = False
            await self.store.aclose()

    def _made_outbox(self) -> Outbox:
        outbox: _Recorded
        if self.syncs:
            outbox = _RecordedCounting(max_bytes=self.max_bytes, timeout_s=_LONG_S)
        else:
            outbox = _Recorded(max_bytes=self.max_bytes, full_bytes=self.settings.segment_bytes)
        outbox.world = self
        return outbox

    async def _served(self) -> None:
        self.finishing = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._ship)
            async with trio.open_nursery() as tasks:
                for at in range(len(PREFIXES)):
                    if self.left[at]:
                        tasks.start_soon(self._writer, at)
                for task in (self._reader, self._shown, self._tidier, self._outages, self._fence):
                    tasks.start_soon(task)
            if not self.failed and (not any(self.left) or self.random.random() < 0.7):
                self._may_fail = False
                with self.finishing:
                    await self.copy.finish()
                is_whole = not self.outbox.lost and self.copy.status.counted is not None
                if is_whole and not (self.finishing.cancelled_caught or self.is_fenced):
                    await self._check_copy()
            nursery.cancel_scope.cancel()

    async def _ship(self) -> None:
        """Run the copy, which ends when another process has ended the log, or the disk has lost what was sent."""
        try:
            await self.copy.run()
        except* (ReignOver, Foreign) as over:
            if not self.is_fenced:
                raise Wrong("the copy was deposed, but no process took over") from over
            self.failed = True
        except* StoreError as torn:
            if not self.outbox.is_torn:
                raise Wrong("the copy failed") from torn
            self.failed = True
        if self.failed:
            self.finishing.cancel()

    # --- writers --------------------------------------------------------------------------------

    async def _writer(self, at: int) -> None:
        topic = StoreTopic(self, PREFIXES[at])
        while self.left[at] and not self.failed:
            await self._step(at, *topic.next())
            self.left[at] -= 1
        self.busy -= not self.failed

    async def _claimed(self, name: Any) -> Any:
        """Return a claim without reading the store, which would first wait until all commits count."""
        await trio.lowlevel.checkpoint()
        return Claim(name, 0)

    async def _step(self, at: int, operations: list[Any], changes: dict[bytes, bytes | None]) -> None:
        before = {key: self.model.allowed.get(key, {None}) for key in changes}
        self.model.begin(changes, replaces=isinstance(operations[0], Delete))
        error = await self._performed(at, operations)
        if error is None and self.syncs:
            self._check_answer(at, operations)
        self._ended(operations, changes, before, error)
        if error is None or self.failed:
            return
        self._allow_refusal(error)
        try:
            await self.store.recover()
            await self._settle(PREFIXES[at])
        except StoreError as failed:
            self._allow_refusal(failed)
            self.failed = True  # the next life resolves it

    def _allow_refusal(self, error: PlainsongError) -> None:
        """Accept a failed call if the disk has failed, or the log was ended; otherwise raise Wrong."""
        if not (self.counts.get("faults") or self.is_fenced):
            raise Wrong(f"a call failed: {error.detail}") from error
        self._used("refused")

    def _check_answer(self, at: int, operations: list[Any]) -> None:
        """Check that the answered commit counts: the newest one with the head of its topic."""
        key = ROW + _head_key(at)
        if any(getattr(each, "table", None) is METADATA for each in operations):
            number = max((number for number, batch in self.handed.items() if key in batch.changes), default=None)
            if number is None or not self.log.counts(number):
                raise Wrong(f"commit {number} is acknowledged, but does not count")

    # --- everything else ------------------------------------------------------------------------

    async def _reader(self) -> None:
        while not self._is_over:
            prefix = self.random.choice(PREFIXES)
            seen = self.model.reading()
            try:
                rows = await rows_in(self.store, prefix, stop_after(prefix))
            except StoreError as error:
                self._given_up(seen)
                self._allow_refusal(error)
                self.failed = True
                return
            self.model.check(seen, sorted(rows), prefix, stop_after(prefix), "a scan")
            self._used("scans")
            await trio.sleep(self.random.random() * self.rest_s)

    async def _shown(self) -> None:
        """Read the heads: in the mode ``sync``, no commit is visible before it counts."""
        while self.syncs and not self._is_over:
            at = self.random.randrange(len(PREFIXES))
            assert isinstance(self.outbox, CountingOutbox)
            has_begun = self.outbox.answers.has_begun
            try:
                value = await self.store.get(METADATA, _head_key(at))
            except StoreError as error:
                self._allow_refusal(error)
                return
            key = ROW + _head_key(at)
            writers = [number for number, batch in self.handed.items() if batch.changes.get(key) == value]
            if has_begun and value != self.heads[at] and writers and not self.log.counts(min(writers)):
                raise Wrong(f"commit {min(writers)} is visible, but does not count")
            self._used("shown")
            await trio.sleep(self.random.random() * self.pause_s)

    async def _tidier(self) -> None:
        while not self._is_over:
            try:
                if await self.store.tidy():
                    self._used("gone")
            except StoreError as error:
                self._allow_refusal(error)
                self.failed = True
                return
            await trio.sleep(self.random.random() * self.pause_s)

    async def _outages(self) -> None:
        while not self._is_over:
            await trio.sleep(self.random.random())
            self.objects.away = self.random.random() < 0.3
        self.objects.away = False  # answers may still wait for it

    async def _fence(self) -> None:
        """Perhaps end the log, as a process that takes over does."""
        while self.may_fence and not self._is_over:
            await trio.sleep(self.random.random() * 5)
            if self.random.random() < 0.2:
                self.is_fenced = True
                self._used("fenced")
                place = self.log.place
                seal = encode_seal(EpochSeal(_FENCE_EPOCH, self.random.randbytes(RUN_BYTES)))
                self.objects._put(log_name(place.epoch, place.number), seal)
                return

    # --- the log --------------------------------------------------------------------------------

    def logged(self) -> None:
        """Check what was just written to the log."""
        for segment, data in self.log.read():
            self._used("segments")
            numbers = range(segment.first, segment.last + 1)
            # Commits of an earlier life are read from the journal, and several may be sent as one.
            if segment.run != self.copy._run or any(number not in self.handed for number in numbers):
                continue
            batches = [self.handed[number] for number in numbers]
            if data != encode_segment(replace(segment, commits=tuple(map(commit_of, batches)))):
                raise Wrong(f"commits {numbers} are in the log, but not as they were handed over")
            if not all(change.made for batch in batches for change in batch.sealed):
                raise Wrong(f"commits {numbers} are in the log before the keeper has made their changes")
            durable = self.store.number
            if not self.syncs and durable is not None and segment.last > durable:
                raise Wrong(f"commit {segment.last} is in the log, but {durable} is the last durable one")

    async def _check_copy(self) -> None:
        """Compare the rows of a restore with the store's."""
        self.objects.calm = True
        found: dict[Any, bytes] = {}

        async def add(commit: Commit) -> None:
            shipped.apply(found, commit)
            await trio.lowlevel.checkpoint()

        async def add_all(first: int, commits: list[Commit]) -> None:
            del first
            for each in commits:
                await add(each)

        base = (await bases_of(self.objects))[-1]
        await rows_of(self.objects, base, add)
        end = await commits_after(self.objects, base, add_all)
        if end.commit != self.outbox.last:
            raise Wrong(f"the log ends at commit {end.commit} instead of {self.outbox.last}")
        if found != await shipped.rows_of(self.store):
            raise Wrong("a restore would have different rows from the store")
        self.objects.calm = False
        self._used("finished")


def _head_key(at: int) -> bytes:
    return system_key(HIGH_WATER, NAMES[at], 1)


def _now_ms() -> int:
    return int(sched.scheduler().now_s * 1000)


class _Clock:
    """The part of ``time`` that the copy and the commit use."""

    CLOCK_BOOTTIME = 0
    monotonic = staticmethod(sched.monotonic)

    @staticmethod
    def clock_gettime(clock: int) -> float:
        del clock
        return sched.monotonic()

    @staticmethod
    def time_ns() -> int:
        return _now_ms() * 1_000_000


class _Secrets:
    """``secrets``, from the seed."""

    def __init__(self, world: World) -> None:
        self.token_bytes = world.random.randbytes

    def token_hex(self, count: int) -> str:
        return self.token_bytes(count).hex()


@contextmanager
def patched_copy(world: World) -> Iterator[None]:
    """Run the store, its event loop and its second copy under a schedule."""
    with ExitStack() as stack:
        stack.enter_context(patched_store(world))
        for module in (lease, commit):
            stack.enter_context(mock.patch.object(module, "time", _Clock))
        for module in (copy_start, copy_bases, second_copy):
            stack.enter_context(mock.patch.object(module, "secrets", _Secrets(world)))
        stack.enter_context(mock.patch.object(copy_bases, "VIEW_S", _LONG_S))
        yield


#: Options for exploring schedules of a store with a second copy.
COPY: dict[str, Any] = {"make": CopyWorld, "patches": patched_copy, "files": COPY_LINES}
