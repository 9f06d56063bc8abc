"""Restores a second copy: its newest base and the log after it, by the rules of a restored backup.

    1  replay    the base and the commits into a scratch store, unchanged
    2  back up   that store into a scratch folder
    3  restore   the backup into the new store, as ``plainsong backup restore`` does

Going through a backup applies the same rules to both kinds of restore: decided transactions stay, open ones are rolled
back, and new ids come after all earlier ones.
"""

from __future__ import annotations

import hashlib
import shutil
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import trio

from actors.restoring import RestoredStore, RestoreRequest, RestoreRun
from plainsong.protocol.effects import Delete, Put, Table, put_one
from plainsong.protocol.names import TopicName
from storage.backup.cut import Cut, NotListed
from storage.backup.files import LocalFiles
from storage.backup.folder import BackupFolder
from storage.backup.objects import encode_row
from storage.base import AFTER_ALL, StoreError, StoreUnusable
from storage.copying import CopyRequest
from storage.leveldb import LevelDBStore
from storage.pace import Pace, paced_rows
from storage.replication.reading import (
    base_before,
    bases_of,
    commits_after,
    lacking,
    latest_ms,
    reported_commit,
    rows_of,
    store_of,
)
from storage.replication.segment import RemovedRange
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from plainsong.protocol.effects import Operation
    from storage.backup.cut import Page
    from storage.base import Row, StoreView
    from storage.copying import PartComparison
    from storage.replication.bases import Base
    from storage.replication.carry import Objects
    from storage.replication.reading import End
    from storage.replication.segment import Commit

#: How long the view of the scratch store lasts: nothing else uses that store.
_VIEW_S = 7 * 86_400.0
_REPLAYED = TopicName("", "replayed")


@dataclass(frozen=True, slots=True)
class Replayed:
    """A copy that was read into a store."""

    store: str
    base: Base
    end: End


async def replay(
    objects: Objects, into: LevelDBStore, *, to_commit: int | None = None, to_ms: int | None = None
) -> Replayed:
    """Write the newest base before a point, and the commits up to it, into an empty store.

    Raises:
      StoreUnusable: there is no base before that point.
      StoreError, DamagedLog: the copy cannot be read.
    """
    reported = await reported_commit(objects)
    name = await store_of(objects)
    base = base_before(await bases_of(objects), to_commit, to_ms)
    writing = _Writing(into)
    await rows_of(objects, base, writing.take_rows)
    end = await commits_after(objects, base, writing.take_commits, to_commit=to_commit, to_ms=to_ms)
    if end.commit < base.until:
        raise StoreError(f"the log ends at commit {end.commit}, before the base is consistent at {base.until}")
    if to_commit is None and to_ms is None and not end.gap and end.commit < reported:
        raise lacking(end.commit, reported)
    return Replayed(name, base, end)


@dataclass(slots=True)
class ComparedBases:
    """The result of comparing bases."""

    equal: list[int] = field(default_factory=list)
    """Commits of bases that equal the replay from the base before."""
    alone: list[int] = field(default_factory=list)
    """Commits of bases that no log without a gap connects with the base before."""
    problems: list[str] = field(default_factory=list)


async def compare_bases(objects: Objects, scratch: Path) -> ComparedBases:
    """Compare each base with the replay of the log from the base before it.

    Args:
      scratch: an empty folder with room for the store twice.
    Raises:
      StoreUnusable, StoreError, DamagedLog: the copy cannot be read.
    """
    found = ComparedBases()
    before: Base | None = None
    async with AsyncExitStack() as latest:
        replayed: LevelDBStore | None = None
        for number, base in enumerate(await bases_of(objects)):
            if before is not None and replayed is not None:
                # It has been replayed beyond `before` already: the same changes in the same order end in the same state.
                end = await commits_after(objects, before, _Writing(replayed).take_commits, to_commit=base.until)
                if end.commit < base.until:
                    found.alone.append(base.until)
                    replayed = None
            async with AsyncExitStack() as stack:
                own = await stack.enter_async_context(await LevelDBStore.open(scratch / f"{number}"))
                await rows_of(objects, base, _Writing(own).take_rows)
                end = await commits_after(objects, base, _Writing(own).take_commits, to_commit=base.until)
                if end.commit < base.until:
                    found.problems.append(
                        f"the log ends at commit {end.commit}, before base {base.until} is consistent"
                    )
                elif replayed is not None:
                    differing = [
                        table.name.lower()
                        for table in Table
                        if await _digest_of(replayed, table) != await _digest_of(own, table)
                    ]
                    if differing:
                        text = f"base {base.until} differs from the replay of the log before it: {', '.join(differing)}"
                        found.problems.append(text)
                    else:
                        found.equal.append(base.until)
                await latest.aclose()
                if number:
                    await in_thread(shutil.rmtree, scratch / f"{number - 1}")
                latest.push_async_exit(stack.pop_all())
            before, replayed = base, own
    return found


async def _digest_of(store: LevelDBStore, table: Table) -> bytes:
    """Return a digest of all rows of a table."""
    digest = hashlib.sha256()

    def take(rows: Sequence[Row]) -> None:
        digest.update(b"".join(map(encode_row, rows)))

    view = await store.pin(_VIEW_S)
    try:
        async with aclosing(paced_rows(view, table, b"", AFTER_ALL, Pace(rest=0.0), take)) as steps:
            async for _ in steps:
                pass
    finally:
        with trio.CancelScope(shield=True):
            await view.aclose()
    return digest.digest()


#: Tolerated difference between the clocks of two machines.
SKEW_MS = 60_000


async def refuse_late_clock(objects: Objects, now_ms: int, *, is_given: bool) -> int:
    """Return the current time; new ids are above it. Raises StoreUnusable: it is before the last commit of the copy.

    A clock that is behind by ``SKEW_MS`` at most is corrected by that, unless the time was given.
    """
    last_ms = await latest_ms(objects)
    if now_ms >= last_ms:
        return now_ms
    if not is_given and last_ms - now_ms <= SKEW_MS:
        return last_ms + SKEW_MS
    raise StoreUnusable(
        "the current time is before the last commit of the copy, so new ids could repeat existing ones",
        hint="set the clock, or give the time: --now TIME",
    )


class _Writing:
    """Writes the rows and commits that are read."""

    def __init__(self, into: LevelDBStore) -> None:
        self._into = into

    async def take_rows(self, commit: Commit) -> None:
        await self._write([commit])

    async def take_commits(self, first: int, commits: list[Commit]) -> None:
        del first
        await self._write(commits)

    async def _write(self, commits: Sequence[Commit]) -> None:
        """Write commits in order; ranges are removed by separate calls."""
        claim = await self._into.claim(_REPLAYED)
        operations: list[Operation] = []
        for commit in commits:
            for change in commit.changes:
                if isinstance(change, RemovedRange):
                    if operations:
                        await self._into.write(operations, claim=claim)
                        operations = []
                    await self._into.drop(change.table, [(change.start, change.stop)])
                elif isinstance(change, Put):
                    operations.append(change)
                elif change.value is None:
                    operations.append(Delete(change.table, [change.key]))
                else:
                    operations.append(put_one(change.table, change.key, change.value))
        if operations:
            await self._into.write(operations, claim=claim)


async def restore_copy(
    objects: Objects,
    target: Path,
    scratch: Path,
    now_ms: int,
    *,
    to_commit: int | None = None,
    to_ms: int | None = None,
    report: Callable[[str], object] = lambda _: None,
) -> tuple[Replayed, list[PartComparison] | None]:
    """Restore into a new store at ``target``.

    Args:
      scratch: an empty folder with room for the store twice.
      now_ms: the current time; new ids are above it.
      report: called with a text before each step.
    Raises:
      StoreUnusable, StoreError, DamagedLog, StoresDiffer.
    """
    async with await LevelDBStore.open(scratch / "replayed") as store:
        report("reading the copy")
        found = await replay(objects, store, to_commit=to_commit, to_ms=to_ms)
        report(f"read up to commit {found.end.commit}; making the new store")
        folder = await in_thread(BackupFolder.make, LocalFiles(scratch / "backup"))
        view = await store.pin(_VIEW_S)
        try:
            manifest = await _back_up(view, folder, found.end.time_ms or found.base.until_ms)
        finally:
            with trio.CancelScope(shield=True):
                await view.aclose()
    source = await RestoredStore.open(folder, manifest, RestoreRequest(), now_ms)
    async with await LevelDBStore.open(target) as restored:
        run = RestoreRun(source, restored, CopyRequest(f"copy of {found.store} at {found.end.commit}"))
        return found, await run.run(lambda: now_ms)


async def _back_up(view: StoreView, folder: BackupFolder, cut_ms: int) -> dict[str, Any]:
    """Back up a view; return the manifest."""
    cut = Cut(view, Pace(rest=0.0))
    await cut.look()
    topics: list[dict[str, Any]] = []
    service, _ = await _pages(cut, folder, lambda _: cut.service())
    metadata, _ = await _pages(cut, folder, lambda _: cut.metadata())
    for topic in await cut.topics():
        name = topic.name

        async def page(after: str | None, name: TopicName = name) -> Page:
            return await cut.page(name, after)

        objects, line = await _pages(cut, folder, page)
        topics.append({**topic.shown(), "line": line, "objects": objects})
    manifest = {"format": 1, "id": "copy", "createdMs": cut_ms, "cutMs": cut_ms, "store": "leveldb", "exact": True}
    return {**manifest, "topics": topics, "service": service, "metadata": metadata}


async def _pages(
    cut: Cut, folder: BackupFolder, page_from: Callable[[str | None], Awaitable[Page]]
) -> tuple[list[dict[str, Any]], str | None]:
    """Write all objects that ``page_from`` lists into the folder; return them and the last position of a topic."""
    found: list[dict[str, Any]] = []
    after: str | None = None
    while True:
        page = await page_from(after)
        for each in page.objects:
            try:
                data = await cut.object(each.sha256)
            except NotListed as error:
                raise StoreError("a row of the replayed store has changed") from error
            kept = await in_thread(folder.put, each.sha256, data)
            found.append({**each.shown(), "kept": kept})
        after = page.next
        if after is None:
            return found, page.line
