"""Schedules on the store of version 0.1: the explorer must find the races in its real code (``then.zip``)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from plainsong.protocol import rows
from storage import loop
from storage.base import StoreError
from tests.schedules import scheduler as sched
from tests.schedules.world import World

sys.path.append(str(Path(__file__).with_name("then.zip")))


class _Bell(loop.Waker):
    """A waker with its former attribute; nothing listens to it here."""

    is_heard = False


loop.Bell = _Bell  # type: ignore[attr-defined]  # the packed code imports it by this name
#: The constant's name in version 0.1.
rows.PLAIN_BESIDE_BYTES = rows.PLAIN_OVERHEAD_BYTES  # type: ignore[attr-defined]

from storage_then import database, group_commit, metadata, packs, tables, tidying, view, volumes  # type: ignore[import-not-found]  # noqa: E402
from storage_then.options import LevelDBOptions  # type: ignore[import-not-found]  # noqa: E402

TINY = LevelDBOptions(write_buffer_bytes=1 << 16, volume_bytes=500, max_open_volumes=2, compression="none")
#: Files whose lines may be scheduling points.
LINES = tuple(f"storage_then/{name}.py" for name in ("volumes", "tables", "tidying", "group_commit", "upkeep"))


class ThenWorld(World):
    """The same threads on the old store, without views and without checks after a kill."""

    MarkDead = tables.MarkDead

    def create(self) -> None:
        """Create an empty store."""
        tables.LevelDBTables.create(self.directory, TINY)

    def open(self, directory: Path, **_: object) -> Any:
        """Open a store."""
        return tables.LevelDBTables(directory, TINY)

    def newest(self) -> Any:
        """Return the volume being written."""
        return self.tables.volumes.newest

    def seal(self, volume: Any) -> Any:
        """Return the operation that begins a new volume."""
        return tables.Seal(volume)

    def close(self) -> None:
        """Close the store as version 0.1 did."""
        self.tables.leaving = True
        self.tables.close()

    def write(self, works: list[Any]) -> None:
        """Write one group, including the rest of long rollbacks."""
        group = [group_commit.PendingWrite(work.operations) for work in works]
        group_commit.write_group(self.tables, group)
        for work, done in zip(works, group, strict=True):
            work.rest = done.rest

    def tidy_once(self) -> int | StoreError:
        """Tidy once, as version 0.1's tidying thread did."""
        tidy: Any = self.tables.tidy  # at that time without an argument
        removed = 0
        while True:
            try:
                done = tidy()
            except StoreError as error:
                return error
            removed += done.removed
            if done.operations and (error := self.submit(list(done.operations))) is not None:
                return StoreError(error.detail)
            if not done.more:
                return removed

    @property
    def has_failed(self) -> StoreError | None:
        """The reason why writes are refused; None if they are accepted."""
        return self.tables.upkeep.failed

    def extra_threads(self) -> list[sched.Thread]:
        """Return no threads: version 0.1's views have their own lock."""
        return []


class DroppingWorld(ThenWorld):
    """Writers drop more rows than they change, so that volumes are constantly removed from the list."""

    kinds = ("drop", "drop", "remove")
    pause_s = 1.0


@contextmanager
def patched_then(world: ThenWorld) -> Iterator[None]:
    """Run the old store under a schedule, with its calls into LevelDB and the file system as scheduling points."""

    def reaching(call: Any) -> Any:
        def reached(*arguments: Any, **options: Any) -> Any:
            sched.point()
            found = call(*arguments, **options)
            sched.point()
            return found

        return reached

    with ExitStack() as stack:
        for owner, name in (
            (database.Database, "get"),
            (database.Database, "flush_memory"),
            (volumes, "write_list"),
            (volumes, "sync_directory"),
        ):
            stack.enter_context(mock.patch.object(owner, name, reaching(getattr(owner, name))))
        clock = SimpleNamespace(monotonic=sched.monotonic, perf_counter=sched.monotonic)
        for module in (group_commit, metadata, tables, tidying, view, volumes):
            if hasattr(module, "time"):
                stack.enter_context(mock.patch.object(module, "time", clock))
        # Constant rewrites of volumes with single rows would hide everything else.
        stack.enter_context(mock.patch.object(tidying, "REWRITE_BELOW", 0.0))
        stack.enter_context(mock.patch.object(packs, "MIN_ROWS", world.random.choice([2, 32])))
        yield
