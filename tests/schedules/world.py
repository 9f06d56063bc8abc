"""A store on tiny volumes, several threads that use it concurrently, and a model of the rows that each may see.

Threads of a schedule:

        commit      takes jobs from a queue, several at a time, and writes them as the commit thread does
        keeper      the store's own
        writers     one for each topic: publish, replace, remove, roll back, drop; each waits for its own job
        readers     scan, and compare the rows with what the model allowed at some time during the scan
        tidier      tidies repeatedly, and begins new volumes
        viewer      opens views, reads each twice, and closes it
        killer      copies the directory at any moment, as ``kill -9`` leaves it, and checks the copy's rows

    At the end the store is closed, possibly while tidying, and reopened; it must contain everything that was
    acknowledged.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

from plainsong.protocol.effects import Delete, Put, RollBack, Table, put_one
from plainsong.protocol.ids import pack_position
from plainsong.protocol.keys import generation_prefix, stop_after
from plainsong.protocol.names import TopicName
from storage.base import NothingWritten, StoreConflict, StoreError
from storage.config import StorageConfig
from storage.leveldb import keeper_thread, listed_volumes, next_volume, tidying, view, volume, volume_list
from storage.leveldb import tables as tables_module
from storage.leveldb import threads as seam
from storage.leveldb.engine import database, packs
from storage.leveldb.engine.errors import call_failed
from storage.leveldb.operations import MarkDead, PendingWrite, Seal
from storage.leveldb.options import LevelDBOptions
from storage.leveldb.tables import LevelDBTables
from tests.schedules import scheduler as sched
from tests.schedules.scheduler import Scheduler
from tests.storage.rolling_contract import under

MESSAGE, METADATA = Table.MESSAGE, Table.METADATA
TINY = LevelDBOptions(StorageConfig(write_buffer_bytes=1 << 16, volume_bytes=500), max_open_volumes=2)
PREFIXES = [generation_prefix(TopicName("ns", name), 1) for name in ("a", "b")]
POINTER = 7
#: Number of checks after simulated kills per schedule; each opens the store again.
MAX_KILLS = 4
#: Every file of the store whose lines may be scheduling points.
LINES = tuple(
    f"storage/leveldb/{name}.py"
    for name in (
        "commit",
        "next_volume",
        "row_writes",
        "sealed_rows",
        "keeper",
        "keeper_thread",
        "listed_volumes",
        "tidying",
        "volume_set",
        "open_databases",
        "reads",
        "view",
        "metadata",
        "tables",
        "index",
    )
)


class Wrong(AssertionError):
    """A thread saw a state that the store must never show."""


@dataclass
class Seen:
    """The values that a reader may find: for each key, those allowed at some time since the read began."""

    allowed: dict[bytes, set[bytes | None]]


@dataclass
class Model:
    """Possible values of each row: one, or several while a job's outcome is unknown."""

    allowed: dict[bytes, set[bytes | None]] = field(default_factory=dict)
    readers: list[Seen] = field(default_factory=list)
    hidden: dict[bytes, set[bytes | None]] = field(default_factory=dict)
    """Older versions of rows whose removal failed: newer ones hide them, but they may reappear while these are removed.

    The commit's batch removes the newest volume's row, and afterwards the keeper removes those of sealed volumes.
    Consumers see no such row: see "Durable discards" in ``docs/stores.md``.
    """

    def begin(self, changes: dict[bytes, bytes | None], *, replaces: bool) -> None:
        """Begin a job with these changes.

        Args:
          replaces: True if the job removes rows and puts others with their keys. This happens only to rows that no
            reader can see, since a concurrent scan may miss both.
        """
        for key, value in changes.items():
            removed = {None, *self.hidden.get(key, ())} if replaces else set()
            self._set(key, {*self.allowed.get(key, {None}), value, *removed})

    def succeeded(self, changes: dict[bytes, bytes | None]) -> None:
        """Record that the job was acknowledged."""
        for key, value in changes.items():
            self._set(key, {value})

    def removed(self, changes: dict[bytes, bytes | None], before: dict[bytes, set[bytes | None]] | None) -> None:
        """Record the end of a job that removes rows. ``before``: earlier allowed values, if its outcome is unknown."""
        for key in changes:
            if before is None:
                self.hidden.pop(key, None)
            else:
                self.hidden.setdefault(key, set()).update(before[key])

    def refused(self, changes: dict[bytes, bytes | None], before: dict[bytes, set[bytes | None]]) -> None:
        """Record that the job definitely did not happen."""
        for key in changes:
            self._set(key, before[key])

    def _set(self, key: bytes, values: set[bytes | None]) -> None:
        self.allowed[key] = values
        for reader in self.readers:
            reader.allowed.setdefault(key, {None}).update(values)

    def reading(self) -> Seen:
        """Begin a read."""
        seen = Seen({key: set(values) for key, values in self.allowed.items()})
        self.readers.append(seen)
        return seen

    def check(self, seen: Seen, rows: list[tuple[bytes, bytes]], start: bytes, stop: bytes, what: str) -> None:
        """End the read, and check the rows that it found."""
        self.readers[:] = [each for each in self.readers if each is not seen]
        found = dict(rows)
        if [key for key, _ in rows] != sorted(found):
            raise Wrong(f"{what}: rows are out of order, or occur twice")
        for key, values in seen.allowed.items():
            if start <= key < stop and found.get(key) not in values:
                raise Wrong(f"{what}: row {key[-10:].hex()} is {found.get(key)!r} and may be {values!r}")
        unknown = found.keys() - seen.allowed.keys()
        if unknown:
            raise Wrong(f"{what}: unknown rows {unknown}")


class World:
    """One schedule over one store."""

    def __init__(self, directory: Path, chosen: Scheduler, *, steps: int, faults: float = 0.0) -> None:
        self.directory = directory
        self.scheduler = chosen
        self.random: Random = chosen.random
        self.steps = steps
        self.faults = faults
        self.model = Model()
        self.queue = sched.Queue()
        self.writing = len(PREFIXES)
        self.lives = 0
        self.kills = 0
        #: How often each event occurred, so that schedules without any work are detected.
        self.counts: dict[str, int] = {}
        self._may_fail = False

    # --- the store ------------------------------------------------------------------------------

    MarkDead: Any = MarkDead
    kinds = ("replace", "remove", "roll back", "drop")
    """The writers' operations in addition to publishing."""
    pause_s = 0.1
    """The tidier's longest pause."""

    def create(self) -> None:
        """Create an empty store."""
        LevelDBTables.create(self.directory, TINY)

    def newest(self) -> Any:
        """Return the volume being written."""
        return self.tables.sets.current.newest

    def seal(self, volume: Any) -> Any:
        """Return the operation that begins another volume."""
        return Seal(volume)

    def close(self) -> None:
        """Close like the store: first refuse commits, then end the keeper, which may wait for an answer."""
        self.tables.keeper.thread.leave()
        self.submit([])
        self.tables.close()

    def write(self, works: list[Any]) -> None:
        """Write one group of the commit thread."""
        self.tables.committer.write(works)

    def tidy_once(self) -> int | StoreError:
        """Tidy once."""
        done = sched.Queue()
        self.tables.tidy(done.put)
        found: int | StoreError = done.get()
        return found

    @property
    def has_failed(self) -> StoreError | None:
        """The reason why writes are refused; None if they are accepted."""
        return self.tables.keeper.thread.failed

    def extra_threads(self) -> list[sched.Thread]:
        """Return the threads that only this store has."""
        return [sched.Thread(target=self._view, name="viewer"), sched.Thread(target=self._kill, name="killer")]

    def open(self, directory: Path, **options: object) -> LevelDBTables:
        """Open a store."""
        return LevelDBTables(directory, TINY, **options)

    def run(self) -> None:
        """Run as the first thread: start the others, and check the final rows."""
        self.create()
        while True:
            self._live()
            if not self.writing:
                break
        tables = self.open(self.directory)
        self._compare(tables, "after a clean close")
        tables.close()

    def _live(self) -> None:
        """Open the store and run until the last step or a failure, after which the store is closed."""
        self.lives += 1
        self.tables = self.open(self.directory, hand_in=self.queue.put)
        self._resolve()
        self._may_fail = True
        threads = [
            sched.Thread(target=self._commit, name="commit"),
            *(sched.Thread(target=lambda at=at: self._write(at), name=f"writer {at}") for at in range(self.writing)),
            *(sched.Thread(target=self._read, name="reader") for _ in range(2)),
            sched.Thread(target=self._tidy, name="tidier"),
            *self.extra_threads(),
        ]
        self.busy = self.writing
        self.failed = self.refuses = False
        for thread in threads:
            thread.start()
        for thread in threads[1:]:
            thread.join()
        self._may_fail = self._may_fail and self.failed
        self.refuses = True
        self.close()
        self.queue.put(None)
        threads[0].join()
        self._may_fail = False

    def _resolve(self) -> None:
        """After an opening, resolve unknown outcomes from the rows that exist."""
        found = dict(rows_of(self.tables))
        for key, values in self.model.allowed.items():
            if found.get(key) not in values:
                raise Wrong(f"after an opening row {key[-10:].hex()} is {found.get(key)!r} and may be {values!r}")
            self.model.allowed[key] = {found.get(key)}
        if found.keys() - self.model.allowed.keys():
            raise Wrong("unknown rows after an opening")

    def _compare(self, tables: LevelDBTables, what: str) -> None:
        seen = self.model.reading()
        self.model.check(seen, rows_of(tables), b"", b"\xff" * 64, what)

    # --- the commit ---------------------------------------------------------------------------------

    def _commit(self) -> None:
        """Run the commit thread, which writes groups of waiting jobs."""
        while True:
            group = [self.queue.get()]
            while group[-1] is not None and not self.queue.empty() and self.random.random() < 0.8:
                group.append(self.queue.get())
            last = group[-1] is None
            works = [work for work in group if work is not None]
            for work in works:
                work.on_changed = self._completed
            error: StoreError | None = None
            try:
                if self.refuses:
                    raise NothingWritten("the store is closed")
                if self.has_failed is not None:
                    raise NothingWritten(self.has_failed.detail)
                self.write(works)
            except StoreError as failed:
                error = failed
            for work in works:
                if not work.is_with_keeper:
                    work.error = work.error or error
                    self._completed(work)
            if last:
                return

    def _completed(self, work: PendingWrite) -> None:
        if work.error is None and work.rest:
            rest = PendingWrite(work.rest, on_completed=work.on_completed, is_rest=True)
            self.queue.put(rest)
            return
        if isinstance(work.error, NothingWritten) and work.is_rest:
            work.error = StoreError("in the middle of a rollback")
        work.on_completed(work)

    def submit(self, operations: list[Any]) -> StoreError | StoreConflict | None:
        """Submit a job and wait for it; return its error, if any."""
        done = sched.Queue()
        self.queue.put(PendingWrite(operations, on_completed=done.put))
        return done.get().error

    # --- threads that use the store -------------------------------------------------------------------

    def _used(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def _write(self, at: int) -> None:
        topic = Topic(self, PREFIXES[at])
        for _ in range(self.steps):
            if self.failed:
                return
            operations, changes = topic.next()
            self._perform(operations, changes)
        self.busy -= 1
        self.writing -= 1

    def _perform(self, operations: list[Any], changes: dict[bytes, bytes | None]) -> None:
        before = {key: self.model.allowed.get(key, {None}) for key in changes}
        self.model.begin(changes, replaces=isinstance(operations[0], Delete))
        error = self.submit(operations)
        self._ended(operations, changes, before, error)
        if error is not None and "cannot be made" not in error.detail:
            self.failed = True

    def _ended(
        self,
        operations: list[Any],
        changes: dict[bytes, bytes | None],
        before: dict[bytes, set[bytes | None]],
        error: object,
    ) -> None:
        """Record the outcome of a job."""
        if error is None:
            self.model.succeeded(changes)
        elif isinstance(error, NothingWritten):
            self.model.refused(changes, before)
        if isinstance(operations[0], Delete) and not isinstance(error, NothingWritten):
            self.model.removed(changes, None if error is None else before)
        self._used("acknowledged" if error is None else "failed")

    def _read(self) -> None:
        while self.busy and not self.failed:
            prefix = self.random.choice(PREFIXES)
            seen = self.model.reading()
            try:
                rows = rows_of(self.tables, prefix, stop_after(prefix), reverse=self.random.random() < 0.3)
            except StoreError as error:
                self._forgive(error, "a scan")
                return
            self.model.check(seen, sorted(rows), prefix, stop_after(prefix), "a scan")
            self._used("scans")

    def _forgive(self, error: StoreError, what: str) -> None:
        """Accept a failed read if the disk may fail; otherwise raise Wrong."""
        if not self.faults:
            raise Wrong(f"{what} failed: {error.detail}") from error
        self.failed = True

    def _tidy(self) -> None:
        while self.busy and not self.failed:
            found = self.tidy_once()
            if isinstance(found, StoreError):
                self._forgive(found, "tidying")
                return
            self._used("tidied")
            if found:
                self._used("gone")
            if self.random.random() < 0.3:
                self.submit([self.seal(self.newest())])
            sched.nap(self.random.random() * self.pause_s)

    def _view(self) -> None:
        while self.busy and not self.failed:
            done = sched.Queue()
            seen = self.model.reading()
            self.tables.keeper.pin(100.0, done.put)
            opened = done.get()
            if isinstance(opened, StoreError):
                self._forgive(opened, "a view")
                return
            # The view does not contain later changes.
            self.model.readers[:] = [each for each in self.model.readers if each is not seen]
            try:
                first = rows_of(self.tables, view=opened)
                again = rows_of(self.tables, view=opened)
            except StoreError as error:
                self._forgive(error, "a view")
                return
            if first != again:
                raise Wrong(f"a view changed: {len(first)} rows, then {len(again)}")
            self.model.check(seen, first, b"", b"\xff" * 64, "a view")
            self._check_heads(dict(first), dict(metadata_of(self.tables, opened)))
            assert opened.end()
            self.tables.keeper.close_view(opened, done.put)
            done.get()
            self._used("views")
            sched.nap(self.random.random())

    def _check_heads(self, rows: dict[bytes, bytes], heads: dict[bytes, bytes]) -> None:
        """Check that commits are complete: the metadata stores each topic's end, and no row is after it."""
        for prefix in PREFIXES:
            head = int(heads.get(prefix, b"0"))
            beyond = [key for key in rows if key.startswith(prefix) and key >= prefix + pack_position(head, 0)]
            if beyond:
                raise Wrong(f"{len(beyond)} rows are beyond what the metadata of their commit says")

    def _kill(self) -> None:
        while self.busy and not self.failed and self.kills < MAX_KILLS:
            sched.nap(self.random.random() * 10)
            if self.random.random() < 0.8:
                continue
            copy = self.directory.with_name(f"killed{self.kills}")
            self.kills += 1
            seen = self.model.reading()
            with outside():  # no other thread runs in this block
                is_copied = copied(self.directory, copy)
            if not is_copied:
                self.model.readers[:] = [each for each in self.model.readers if each is not seen]
                continue
            with outside():
                tables = self.open(copy)
                rows, heads = rows_of(tables), dict(metadata_of(tables))
                tables.close()
                shutil.rmtree(copy)
            self.model.check(seen, rows, b"", b"\xff" * 64, "after kill -9")
            self._check_heads(dict(rows), heads)
            self._used("kills")

    # --- faults ---------------------------------------------------------------------------------------

    def fails(self) -> bool:
        """Reach a scheduling point before a call into LevelDB or the file system; return True if the call must fail."""
        sched.point()
        if self._may_fail and self.faults and self.random.random() < self.faults:
            self._used("faults")
            return True
        return False


class Topic:
    """Operations of one writer on its topic; it never writes to a dropped range."""

    def __init__(self, world: World, prefix: bytes) -> None:
        self._world, self._prefix = world, prefix
        known = [key for key in world.model.allowed if key.startswith(prefix)]
        self._next = 1 + max((int.from_bytes(key[len(prefix) :][:8], "big") for key in known), default=0)
        self._dropped = b""

    def next(self) -> tuple[list[Any], dict[bytes, bytes | None]]:
        """Return operations, and their changes."""
        alive = [key for key, values in self._world.model.allowed.items() if self._is_alive(key, values)]
        kind = self._world.random.choice(["publish"] * 4 + list(self._world.kinds if alive else ()))
        return getattr(self, f"_{kind.replace(' ', '_')}")(alive)

    def _is_alive(self, key: bytes, values: set[bytes | None]) -> bool:
        return key.startswith(self._prefix) and values != {None}

    def _head(self) -> Put:
        return put_one(METADATA, self._prefix, b"%d" % self._next)

    def _publish(self, _: list[bytes]) -> tuple[list[Any], dict[bytes, bytes | None]]:
        count = self._world.random.randint(1, 4)
        positions = range(self._next, self._next + count)
        self._next += count
        value = under(self._world.random.choice([None, POINTER]), b"m" * 40)
        put = Put(MESSAGE, self._prefix, [pack_position(each, 0) for each in positions], [value] * count)
        return [put, self._head()], {self._prefix + suffix: value for suffix in put.suffixes}

    def _replace(self, alive: list[bytes]) -> tuple[list[Any], dict[bytes, bytes | None]]:
        key = self._world.random.choice(alive)
        value = under(None, b"again" * 3)
        return [Delete(MESSAGE, [key]), put_one(MESSAGE, key, value), self._head()], {key: value}

    def _remove(self, alive: list[bytes]) -> tuple[list[Any], dict[bytes, bytes | None]]:
        keys = self._world.random.sample(alive, min(len(alive), self._world.random.randint(1, 6)))
        return [Delete(MESSAGE, keys)], dict.fromkeys(keys)

    def _roll_back(self, alive: list[bytes]) -> tuple[list[Any], dict[bytes, bytes | None]]:
        positive, negative = under(POINTER, b"m" * 40), under(-POINTER, b"m" * 40)
        allowed = self._world.model.allowed
        changes: dict[bytes, bytes | None] = {key: negative for key in alive if positive in allowed[key]}
        return [RollBack(self._prefix, stop_after(self._prefix), POINTER), self._head()], changes

    def _drop(self, alive: list[bytes]) -> tuple[list[Any], dict[bytes, bytes | None]]:
        # Keep the newest rows, since nothing may be written to a dropped range.
        alive = sorted(alive)
        at = alive[len(alive) * self._world.random.randint(1, 3) // 4 - 1] if len(alive) > 1 else alive[0]
        stop = at + b"\x00"
        gone = [key for key in alive if key < stop]
        return [self._world.MarkDead(MESSAGE, [(self._prefix, stop)])], dict.fromkeys(gone)


# --- reads, outside and inside a schedule ----------------------------------------------------------------------


def rows_of(
    tables: LevelDBTables, start: bytes = b"", stop: bytes = b"\xff" * 64, *, reverse: bool = False, view: Any = None
) -> list[tuple[bytes, bytes]]:
    """Return rows of the message table."""
    return _scan(tables, MESSAGE, start, stop, reverse=reverse, view=view)


def metadata_of(tables: LevelDBTables, view: Any = None) -> list[tuple[bytes, bytes]]:
    """Return the metadata's rows."""
    return _scan(tables, METADATA, b"", b"\xff" * 64, reverse=False, view=view)


def _scan(tables: LevelDBTables, table: Table, start: bytes, stop: bytes, *, reverse: bool, view: Any) -> list[Any]:
    found: list[tuple[bytes, bytes]] = []

    def feed(chunk: Any) -> bool:
        found.extend(chunk)
        return True

    tables.scan(table, start, stop, feed, reverse=reverse, first_chunk=2, view=view)
    return found


def copied(source: Path, copy: Path) -> bool:
    """Copy a directory; return False if LevelDB's own thread changed it in the meantime."""
    try:
        shutil.copytree(source, copy)
    except (shutil.Error, OSError):
        shutil.rmtree(copy, ignore_errors=True)
        return False
    return True


@contextmanager
def outside() -> Iterator[None]:
    """Within the block, use the store without a schedule, to check a copy."""
    originals = {"Lock": _LOCK, "Condition": _CONDITION, "Queue": _QUEUE, "Thread": _THREAD}
    with mock.patch.multiple(seam, **originals), mock.patch.object(_Reached, "world", None):
        chosen = sched.scheduler()
        chosen.is_frozen = True
        try:
            with ExitStack() as stack:
                for module in _CLOCKED:
                    stack.enter_context(mock.patch.object(module, "time", time))
                yield
        finally:
            chosen.is_frozen = False


_LOCK, _CONDITION, _QUEUE, _THREAD = seam.Lock, seam.Condition, seam.Queue, seam.Thread
_CLOCKED = (keeper_thread, next_volume, tidying, view, tables_module)


class _Reached:
    """A world in which calls into LevelDB and the file system are scheduling points."""

    world: World | None = None


def _reaching(call: Callable[..., Any], *, is_file: bool) -> Callable[..., Any]:
    """Wrap a call so that there is a point before and after it, and so that it may fail."""

    def reached(*arguments: Any, **options: Any) -> Any:
        world = _Reached.world
        if world is None or not world.scheduler.is_inside:
            return call(*arguments, **options)
        if world.fails():
            code = world.random.choice([errno.EIO, errno.ENOSPC])
            error = OSError(code, os.strerror(code))
            raise error if is_file else call_failed(error, "a call")
        found = call(*arguments, **options)
        sched.point()
        return found

    return reached


_real_exit = database._GuardedBatch.__exit__


def _exit_of_batch(batch: Any, kind: Any, error: Any, tb: Any) -> None:
    """End a batch; if it fails, chance decides whether it was written."""
    world = _Reached.world
    if world is not None and error is None and world.fails():
        if world.random.random() < 0.5:
            batch._real.__exit__(None, None, None)
        batch._database.write_failed(OSError(errno.EIO, "Input/output error"))
    _real_exit(batch, kind, error, tb)
    if world is not None:
        world.scheduler.point()


#: The store's calls into the file system. LevelDB's own calls are left to ``tests/torture``, which makes each of them
#: fail.
_FILE_CALLS = (
    *("open", "fsync", "fdatasync", "replace", "rename", "unlink", "rmdir", "mkdir", "ftruncate", "listdir", "scandir"),
    *("pread", "pwrite"),
)
#: Calls that are scheduling points and may fail; those of the file system fail with an OSError.
_CALLS: tuple[tuple[Any, str, bool], ...] = (
    (database.Readable, "get", False),
    (database.Readable, "first_from", False),
    (database.Database, "own_rows", False),
    (database.Database, "outermost_own_key", False),
    (database.Database, "snapshot", False),
    (database.Database, "flush_memory", False),
    (database.Database, "compact", False),
    *((os, name, True) for name in _FILE_CALLS),
    (volume.Volume, "write_index", True),
    (listed_volumes, "write_list", True),
    (listed_volumes, "sync_directory", True),
    (tidying, "sync_directory", True),
    (volume_list, "sync_directory", True),
)


@contextmanager
def patched(world: World) -> Iterator[None]:
    """Run the store under a schedule."""
    clock = SimpleNamespace(monotonic=sched.monotonic, perf_counter=sched.monotonic)
    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.multiple(
                seam, Lock=sched.Lock, Condition=sched.Condition, Queue=sched.Queue, Thread=sched.Thread
            )
        )
        for module in _CLOCKED:
            stack.enter_context(mock.patch.object(module, "time", clock))
        for owner, name, is_file in _CALLS:
            stack.enter_context(mock.patch.object(owner, name, _reaching(getattr(owner, name), is_file=is_file)))
        stack.enter_context(mock.patch.object(database._GuardedBatch, "__exit__", _exit_of_batch))
        stack.enter_context(mock.patch.object(tables_module, "background_thread", mock.Mock()))
        stack.enter_context(mock.patch.object(packs, "MIN_ROWS", world.random.choice([2, 32])))
        stack.enter_context(mock.patch.object(_Reached, "world", world))
        yield


def explore(
    directory: Path,
    seed: int,
    *,
    steps: int = 12,
    make: Callable[..., World] = World,
    patches: Callable[[Any], AbstractContextManager[None]] = patched,
    files: tuple[str, ...] = LINES,
) -> World:
    """Run one schedule. Raises the failure."""
    random = Random(seed)
    fine = random.random() < 0.5
    chosen = Scheduler(
        seed,
        switch=random.choice([1.0, 0.5, 0.1]),
        lines=files if fine else (),
        line_switch=random.choice([0.02, 0.2]) if fine else 0.0,
    )
    faults = random.choice([0.0, 0.0, 0.0, 0.01])
    world = make(directory / "data", chosen, steps=steps, faults=faults)
    (directory / "data").mkdir(parents=True)
    try:
        with sched.running(chosen), patches(world):
            chosen.run(world.run)
    finally:
        with suppress(OSError):
            shutil.rmtree(directory)
    return world
