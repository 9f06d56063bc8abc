"""The whole store on its event loop, under a schedule: group commit, reopening, views, backups, scrubs and merges.

Threads of a schedule:

    main          Trio's event loop with the tasks below, and the event loop's part of group commits
    commit        the group commit's thread
    keeper        the store's own
    workers       of reads, scans, backups and compactions, as many as are needed
    killer        copies the directory at any moment, as ``kill -9`` leaves it, and checks the copy's rows

Tasks: a writer per topic, which begins commits in every possible way; readers; one that tidies and begins files; one
that makes backups from a view; a scrub of everything; one that merges and checkpoints. After a failure a writer claims
its topic, which reopens the store while all other work continues; some lives end instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import trio

from actors.scrub import Scrub
from plainsong.protocol.effects import Delete, Put, Table, put_one
from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.keys import HIGH_WATER, metadata_key, stop_after, system_key
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.records import HighWater, Metadata
from storage.backup.cut import Cut, Page
from storage.backup.objects import decode_rows
from storage.base import Reads, Row, StoreError
from storage.config import StorageConfig
from storage.leveldb import LevelDBStore, group_commit, inline_policy, tables
from storage.leveldb import store as store_module
from storage.leveldb.options import LevelDBOptions
from storage.pace import Pace
from tests.schedules import event_loop
from tests.schedules import scheduler as sched
from tests.schedules.world import LINES, MESSAGE, METADATA, PREFIXES, Topic, World, Wrong, patched

NAMES = [TopicName("ns", name) for name in ("a", "b")]
OPTIONS = LevelDBOptions(StorageConfig(write_buffer_bytes=1 << 16, volume_bytes=500), max_open_volumes=2)
STORE_LINES = (
    *LINES,
    "storage/leveldb/group_commit.py",
    "storage/leveldb/inline_policy.py",
    "storage/leveldb/store.py",
    "storage/leveldb/open_tables.py",
    "storage/backup/cut.py",
)
#: A row, without a topic, that is written by commits that begin while another commit is being written.
_BESIDE = b"\x00nbeside:"
_ALL = b"\xff" * 64
#: Size limit for commits on the event loop: half of a volume of ``OPTIONS``.
_INLINE_BYTES = 250
#: Longer than any schedule: virtual time advances quickly while all tasks wait.
_VIEW_S = 1e9
#: A task's attempts to reopen the store after a failure before the disk is healed.
_TRIES = 4


class StoreTopic(Topic):
    """A topic whose head is a row in the format that backups and scrubs read."""

    def _head(self) -> Put:
        return head_of(PREFIXES.index(self._prefix), self._next)


def head_of(at: int, following: int) -> Put:
    """Return the row that stores the end of a topic."""
    return put_one(METADATA, system_key(HIGH_WATER, NAMES[at], 1), HighWater(0, following, 0).encode())


class StoreWorld(World):
    """The same topics and the same model, on ``LevelDBStore``."""

    store: LevelDBStore
    kinds = ("replace", "remove", "roll back", "drop", "drop")
    pause_s = 0.01
    #: Longest pause between two calls of a task that repeats a call.
    rest_s = 0.05

    def run(self) -> None:
        """Run lives until the writers have completed their steps."""
        self.left = [self.steps] * len(PREFIXES)
        self.beside = 0
        # The event loop itself writes commits only while the newest volume has room.
        self.options = replace(
            OPTIONS, settings=replace(OPTIONS.settings, volume_bytes=self.random.choice([500, 2000]))
        )
        while any(self.left):
            event_loop.run(self._life)
        tables = self.open(self.directory)
        self._compare(tables, "after a clean close")
        tables.close()

    async def _life(self) -> None:
        self.lives += 1
        self.store = await LevelDBStore.open(self.directory, self.options)
        for name in NAMES:
            claim = await self.store.claim(name)
            if await self.store.get(METADATA, metadata_key(name)) is None:
                row = put_one(METADATA, metadata_key(name), Metadata(1, TopicProperties(), 1, 1).encode())
                await self.store.write([row], claim=claim)
        for prefix in PREFIXES:
            await self._settle(prefix)
        self._check_beside(await self.store.get(METADATA, _BESIDE))
        self._may_fail, self.failed = True, False
        self.busy = sum(map(bool, self.left))
        killer = sched.Thread(target=self._kill, name="killer")
        killer.start()
        async with trio.open_nursery() as nursery:
            for at in range(len(PREFIXES)):
                if self.left[at]:
                    nursery.start_soon(self._writer, at)
            for task in (self._reader, self._reader, self._tidier, self._backup, self._scrub, self._merges):
                nursery.start_soon(task)
        await trio.to_thread.run_sync(killer.join)
        self._may_fail = self._may_fail and self.failed
        await self.store.aclose()
        self._may_fail = False

    @property
    def _is_over(self) -> bool:
        return not self.busy or self.failed

    # --- writers --------------------------------------------------------------------------------

    async def _writer(self, at: int) -> None:
        topic = StoreTopic(self, PREFIXES[at])
        while self.left[at] and not self.failed:
            await self._step(at, *topic.next())
            self.left[at] -= 1
        self.busy -= not self.failed

    async def _step(self, at: int, operations: list[Any], changes: dict[bytes, bytes | None]) -> None:
        before = {key: self.model.allowed.get(key, {None}) for key in changes}
        self.model.begin(changes, replaces=isinstance(operations[0], Delete))
        error = await self._performed(at, operations)
        self._ended(operations, changes, before, error)
        if error is None:
            return
        if self.random.random() < 0.3:
            self.failed = True  # the next life finds the outcome
            return
        await self._settle(PREFIXES[at])

    async def _performed(self, at: int, operations: list[Any]) -> PlainsongError | None:
        """Write the commit in one of the possible ways; return the error, if any."""
        claim = await self._claimed(NAMES[at])
        first = operations[0]
        try:
            if isinstance(first, self.MarkDead):
                await self.store.drop(first.table, first.ranges)
            elif isinstance(first, Delete) and len(operations) == 1:
                await self.store.discard(MESSAGE, first.keys)
            elif self.random.random() < 0.4:
                await self.store.write(operations, claim=claim)
            else:
                return await self._begun(operations, claim)
        except StoreError as error:
            return error
        return None

    async def _begun(self, operations: list[Any], claim: Any) -> PlainsongError | None:
        """Begin a commit as an actor does: with a callback, possibly gathered with others for the event loop."""
        found: list[PlainsongError | None] = []
        ended, synced = trio.Event(), 0

        def completed(error: PlainsongError | None) -> None:
            found.append(error)
            ended.set()

        def while_syncing() -> None:
            nonlocal synced
            synced += 1
            if found:
                raise Wrong("a commit was completed before its sync")
            if self.random.random() < 0.3:
                self._begin_beside(claim)

        is_gathered = self.random.random() < 0.7
        if is_gathered:
            self.store.gather_writes()
        try:
            self.store.begin(operations, completed, claim=claim, while_syncing=while_syncing)
        finally:
            if is_gathered:
                self.store.write_gathered()
        self._used("inline" if found else "in the thread")
        await ended.wait()
        if len(found) != 1 or synced > 1:
            raise Wrong(f"a commit was completed {len(found)} times, and synced {synced} times")
        return found[0]

    def _begin_beside(self, claim: Any) -> None:
        """Begin a commit while another one is being written."""
        self.beside += 1
        number = self.beside

        def completed(error: PlainsongError | None) -> None:
            if error is None:
                self._used("beside")

        self.store.begin([put_one(METADATA, _BESIDE, b"%d" % number)], completed, claim=claim)

    def _check_beside(self, found: bytes | None) -> None:
        if found is not None and int(found) > self.beside:
            raise Wrong(f"the store has commit {found!r} of {self.beside}")

    async def _claimed(self, name: TopicName) -> Any:
        """Return a claim, which reopens a failed store; after ``_TRIES`` attempts the disk is healed."""
        for attempt in range(_TRIES + 1):
            if attempt == _TRIES:
                self._may_fail = False
            try:
                return await self.store.claim(name)
            except StoreError as error:
                self._allow(error, "a claim")
        raise Wrong("the store cannot be reopened on a disk that works again")

    async def _settle(self, prefix: bytes) -> None:
        """Resolve unknown outcomes from the rows that exist: the topic is claimed and has no commit in progress."""
        for _ in range(_TRIES + 1):
            await self._claimed(NAMES[PREFIXES.index(prefix)])
            try:
                found = dict(await rows_in(self.store, prefix, stop_after(prefix)))
            except StoreError as error:
                self._allow(error, "a read")
                continue
            for key, values in self.model.allowed.items():
                if not key.startswith(prefix):
                    continue
                if found.get(key) not in values:
                    raise Wrong(f"row {key[-10:].hex()} is {found.get(key)!r} after a claim, and may be {values!r}")
                self.model._set(key, {found.get(key)})
            return
        self.failed = True

    # --- everything else ------------------------------------------------------------------------

    def _allow(self, error: StoreError, what: str) -> None:
        """Accept a failed call if the disk has failed; otherwise raise Wrong."""
        if not self.faults or not self.counts.get("faults"):
            raise Wrong(f"{what} failed: {error.detail}") from error
        self._used("refused")

    def _given_up(self, seen: Any) -> None:
        self.model.readers[:] = [each for each in self.model.readers if each is not seen]

    async def _reader(self) -> None:
        while not self._is_over:
            prefix = self.random.choice(PREFIXES)
            seen = self.model.reading()
            reverse = self.random.random() < 0.3
            try:
                rows = await rows_in(self.store, prefix, stop_after(prefix), reverse=reverse)
            except StoreError as error:
                self._given_up(seen)
                self._allow(error, "a scan")
                await self._claimed(NAMES[0])
                continue
            self.model.check(seen, sorted(rows), prefix, stop_after(prefix), "a scan")
            self._used("scans")

    async def _tidier(self) -> None:
        while not self._is_over:
            try:
                if await self.store.tidy():
                    self._used("gone")
                if self.random.random() < 0.3:
                    await self.store.begin_files()
            except StoreError as error:
                self._allow(error, "tidying")
            await trio.sleep(self.random.random() * self.pause_s)

    async def _backup(self) -> None:
        """Make backups as the daemon serves them: every object of every topic, from one view."""
        while not self._is_over:
            seen = self.model.reading()
            try:
                view = await self.store.pin(_VIEW_S)
            except StoreError as error:
                self._given_up(seen)
                self._allow(error, "a view")
                await self._claimed(NAMES[0])
                continue
            self._given_up(seen)  # the view does not contain later changes
            try:
                rows, heads = await self._backed_up(Cut(view, Pace(rest=0.0)))
            except StoreError as error:
                self._allow(error, "a backup")
                continue
            finally:
                await view.aclose()
            self.model.check(seen, rows, b"", _ALL, "a backup")
            self._check_heads(dict(rows), heads)
            self._used("backups")
            await trio.sleep(self.random.random() * self.rest_s)

    async def _backed_up(self, cut: Cut) -> tuple[list[Row], dict[bytes, bytes]]:
        await cut.look()
        if [each.name for each in await cut.topics()] != NAMES:
            raise Wrong("a backup does not list the topics")
        rows: list[Row] = []
        heads: list[Row] = []
        for name in NAMES:
            after = None
            while True:
                page: Page = await cut.page(name, after)
                for each in page.objects:
                    decoded = decode_rows(await cut.object(each.sha256))
                    (rows if each.table == "messages" else heads).extend(decoded)
                after = page.next
                if after is None:
                    break
        return rows, dict(heads)

    async def _scrub(self) -> None:
        """Run the daemon's scrub: every row must be readable."""
        ownership = SimpleNamespace(is_mine=lambda _: True)
        directory = SimpleNamespace(environment=SimpleNamespace(ownership=ownership))
        clock = SimpleNamespace(now_ms=lambda: int(sched.scheduler().now_s * 1000))
        scrub = Scrub(self.store, cast("Any", directory), cast("Any", clock), 0, 0)
        # Pauses are multiples of a step's duration, which may be long in virtual time.
        scrub._pace = Pace(rest=0.0)
        while not self._is_over:
            scrub.start_now()
            try:
                is_complete = await scrub.round()
            except StoreError as error:
                self._allow(error, "a scrub")
                await self._claimed(NAMES[0])
                continue
            report = scrub.report
            if report.findings or not is_complete:
                if not self.counts.get("faults"):
                    raise Wrong(f"a scrub found damage: {report.findings or report.unread}")
                await self._claimed(NAMES[0])
            else:
                self._used("scrubs")
            await trio.sleep(self.random.random() * self.rest_s)

    async def _merges(self) -> None:
        """Have LevelDB merge removed rows, and checkpoint the metadata."""
        while not self._is_over:
            prefix = self.random.choice(PREFIXES)
            try:
                if self.random.random() < 0.5:
                    await self.store.reclaim(METADATA, b"", _ALL)
                else:
                    await self.store.reclaim(MESSAGE, prefix, stop_after(prefix))
                self.store.statistics()
            except StoreError as error:
                self._allow(error, "a merge")
                await self._claimed(NAMES[0])
            else:
                self._used("merges")
            await trio.sleep(self.random.random() * self.rest_s)

    def _check_heads(self, rows: dict[bytes, bytes], heads: dict[bytes, bytes]) -> None:
        known = {}
        for name, prefix in zip(NAMES, PREFIXES, strict=True):
            value = heads.get(system_key(HIGH_WATER, name, 1))
            if value is not None:
                known[prefix] = b"%d" % HighWater.decode(value).last_ts_ms
        super()._check_heads(rows, known)


async def rows_in(
    reads: Reads, start: bytes, stop: bytes, *, table: Table = MESSAGE, reverse: bool = False
) -> list[Row]:
    """Return the rows of a range."""
    found: list[Row] = []

    def feed(rows: Sequence[Row]) -> bool:
        found.extend(rows)
        return True

    await reads.scan(table, start, stop, feed, reverse=reverse, first_chunk=2)
    return found


@contextmanager
def patched_store(world: World) -> Iterator[None]:
    """Run the store and its event loop under a schedule."""
    clock = SimpleNamespace(monotonic=sched.monotonic, perf_counter=sched.monotonic)
    with ExitStack() as stack:
        stack.enter_context(patched(world))
        stack.enter_context(event_loop.patched_loop(world.random))
        stack.enter_context(mock.patch.object(group_commit, "perf_counter", sched.monotonic))
        stack.enter_context(mock.patch.object(store_module, "time", clock))
        stack.enter_context(mock.patch.object(tables, "nap", sched.nap))
        for module in (inline_policy, store_module):
            stack.enter_context(mock.patch.object(module, "MAX_INLINE_BYTES", _INLINE_BYTES))
        yield


#: Options for exploring schedules of the whole store.
WHOLE: dict[str, Any] = {"make": StoreWorld, "patches": patched_store, "files": STORE_LINES}
