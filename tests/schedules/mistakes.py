"""Mistakes that the exploration of schedules must find, each planted into the present store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from storage.base import StoreError
from storage.leveldb import group_commit
from storage.leveldb.commit import Committer
from storage.leveldb.group_commit import GroupCommit
from storage.leveldb.keeper import Keeper
from storage.leveldb.keeper_thread import KeeperThread
from storage.leveldb.listed_volumes import ListedVolumes
from storage.leveldb.metadata import Metadata, Waiting
from storage.leveldb.open_databases import OpenDatabases
from storage.leveldb.sealed_rows import SealedRows
from storage.leveldb.tables import LevelDBTables
from storage.leveldb.view import PinnedView
from storage.leveldb.volume_set import Sets, VolumeSet
from storage.replication.counted_store import CountedStore, CountingOutbox
from storage.replication.outbox import Outbox, Taken
from tests.schedules import scheduler as sched

Mistake = Callable[[], Any]
#: Mistakes by name, in one dictionary for each world that must find them.
MISTAKES: dict[str, Mistake] = {}
STORE_MISTAKES: dict[str, Mistake] = {}
COPY_MISTAKES: dict[str, Mistake] = {}


def mistake(planted: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
    """Register a mistake under its function's name."""
    MISTAKES[planted.__name__] = contextmanager(planted)
    return planted


def store_mistake(planted: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
    """Register a mistake between the event loop and the threads."""
    STORE_MISTAKES[planted.__name__] = contextmanager(planted)
    return planted


def copy_mistake(planted: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
    """Register a mistake between the store and its second copy."""
    COPY_MISTAKES[planted.__name__] = contextmanager(planted)
    return planted


@mistake
def a_pin_that_is_released_early() -> Iterator[None]:
    """A reader unpins its set before it reads."""
    real = Sets.pin

    def pin(self: Sets) -> VolumeSet:
        found = real(self)
        real_unpin(self, found)
        return found

    real_unpin = Sets.unpin
    with mock.patch.object(Sets, "pin", pin), mock.patch.object(Sets, "unpin", return_value=False):
        yield


@mistake
def a_spare_that_is_used_twice() -> Iterator[None]:
    """The spare volume stays available after it has become the newest volume."""
    real = Committer._seal

    def seal(self: Committer) -> StoreError | None:
        error = real(self)
        self._next._volume = self._sets.current.newest
        return error

    with mock.patch.object(Committer, "_seal", seal):
        yield


@mistake
def a_list_that_is_written_from_an_old_set() -> Iterator[None]:
    """Removing or replacing a volume writes the list that was current when tidying began."""
    real = ListedVolumes.replace

    def replace(self: ListedVolumes, sources: Any, target: Any) -> Any:
        old = list(self._sets.current.all)
        yield 0.0
        self._listed = old
        yield from real(self, sources, target)

    with mock.patch.object(ListedVolumes, "replace", replace):
        yield


@mistake
def a_set_that_is_replaced_from_an_old_one() -> Iterator[None]:
    """The keeper itself replaces the set, based on one that it has read earlier."""

    def replaced(self: ListedVolumes, sources: Any, target: Any) -> Any:
        current = self._sets.current
        yield 0.0
        following = current.replacing(sources, target)
        assert following is not None
        self._sets.put(following)
        for volume in sources:
            self._replaced[volume] = target
        return following.number

    with mock.patch.object(ListedVolumes, "_replaced_in_set", replaced):
        yield


@mistake
def a_view_that_outlives_its_volume() -> Iterator[None]:
    """A view does not pin the set with which it begins."""
    real = Committer._pinned

    def pinned(self: Committer, max_s: float) -> PinnedView:
        view = real(self, max_s)
        self._sets.unpin(view.volumes)
        self._sets._pins[view.volumes.number] += 0
        return view

    with mock.patch.object(Committer, "_pinned", pinned), mock.patch.object(Keeper, "_unpin", _unpin_without_pin):
        yield


def _unpin_without_pin(self: Keeper, view: PinnedView) -> Any:
    from storage.leveldb.operations import Unpin

    yield Unpin(view)
    for volume in view.close():
        self._databases.release(volume)


@mistake
def a_view_without_what_changes() -> Iterator[None]:
    """A sealed volume changes, but views do not preserve its earlier state."""
    with mock.patch.object(SealedRows, "before_change", return_value=None):
        yield


@mistake
def a_close_during_a_rewrite() -> Iterator[None]:
    """Long work does not end before the databases are closed: it is dropped at any point."""

    def close(self: KeeperThread) -> None:
        self.leaving = True

    with mock.patch.object(KeeperThread, "close", close):
        yield


@mistake
def a_change_of_what_is_being_replaced() -> Iterator[None]:
    """The keeper continues to change the old volumes while the commit thread replaces them."""
    real = ListedVolumes._replaced_in_set

    def replaced(self: ListedVolumes, sources: Any, target: Any) -> Any:
        yield 0.5  # others may change the sources between the list's write and the set's replacement
        return (yield from real(self, sources, target))

    with mock.patch.object(ListedVolumes, "_replaced_in_set", replaced):
        yield


@mistake
def a_rewrite_that_misses_changes() -> Iterator[None]:
    """Rows that change while their volume is copied do not change in the copy."""
    with mock.patch.object(SealedRows, "_note_changed", return_value=None):
        yield


@mistake
def a_checkpoint_that_forgets() -> Iterator[None]:
    """Changes applied to the metadata during a checkpoint are forgotten."""
    real = Metadata.checkpoint

    def checkpoint(self: Metadata) -> None:
        real(self)
        self._waiting = Waiting()

    with mock.patch.object(Metadata, "checkpoint", checkpoint):
        yield


@mistake
def a_database_that_is_closed_while_it_is_leased() -> Iterator[None]:
    """Leases are not counted."""

    def release(self: OpenDatabases, volume: Any) -> None:
        del self, volume

    real = OpenDatabases.acquire

    def acquire(self: OpenDatabases, volume: Any, *, create: bool = False) -> Any:
        found = real(self, volume, create=create)
        entry = self._entries.get(volume.name)
        if entry is not None and volume is not None and not create:
            entry.leases = 0
        return found

    with mock.patch.object(OpenDatabases, "release", release), mock.patch.object(OpenDatabases, "acquire", acquire):
        yield


@mistake
def a_rollback_that_is_acknowledged_before_it_is_done() -> Iterator[None]:
    """The work is reported complete before the keeper has changed the sealed volumes."""
    real = Keeper.change

    def change(self: Keeper, work: Any) -> None:
        real(self, work)
        work.is_with_keeper = False
        work.on_changed = lambda _: None

    with mock.patch.object(Keeper, "change", change):
        yield


# --- between the event loop and the threads -------------------------------------------------------------


@store_mistake
def a_commit_that_is_reported_before_it_is_written() -> Iterator[None]:
    """The commit thread reports a group to the loop before writing it."""

    def run(self: GroupCommit) -> None:
        first = self._waiting.get()
        while first is not None:
            group, following = self._group(first)
            self._report([work for work in group if not work.operations or work.on_changed is None], None, 0)
            self._report([work for work in group if work.operations], None, len(group))
            self._attempt(group)
            first = self._waiting.get() if following is group_commit._NOTHING else following

    with mock.patch.object(GroupCommit, "_run", run):
        yield


@store_mistake
def a_wake_up_that_is_lost() -> Iterator[None]:
    """Before it sleeps, the loop does not check for reports that arrived while it was awake."""

    def before_io_wait(self: GroupCommit, timeout: float) -> None:
        self.is_asleep = timeout > 0

    with mock.patch.object(GroupCommit, "before_io_wait", before_io_wait):
        yield


@store_mistake
def a_work_of_the_keeper_that_the_commit_thread_completes() -> Iterator[None]:
    """The commit thread reports every work of a group, including those handed to the keeper."""
    real = GroupCommit._report

    def report(self: GroupCommit, group: Any, error: Any, count: int) -> None:
        for work in group:
            work.is_with_keeper = False
        real(self, group, error, count)

    def run(self: GroupCommit) -> None:
        first = self._waiting.get()
        while first is not None:
            group, following = self._group(first)
            self._report(group, self._attempt(group), len(group))
            first = self._waiting.get() if following is group_commit._NOTHING else following

    with mock.patch.object(GroupCommit, "_report", report), mock.patch.object(GroupCommit, "_run", run):
        yield


@store_mistake
def a_loop_that_writes_while_the_thread_does() -> Iterator[None]:
    """The loop does not check whether the thread is committing."""
    with mock.patch.object(GroupCommit, "writes_inline", True):
        yield


@store_mistake
def a_view_that_reads_the_store_as_it_is() -> Iterator[None]:
    """A backup reads the current rows instead of its view's."""
    real = LevelDBTables.scan

    def scan(self: LevelDBTables, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **{**options, "view": None})

    with mock.patch.object(LevelDBTables, "scan", scan):
        yield


# --- between the store and its second copy ---------------------------------------------------------------


@copy_mistake
def an_outbox_that_is_emptied_without_its_lock() -> Iterator[None]:
    """A batch that is handed over while others are taken out gets lost."""

    def take(self: Outbox, max_bytes: int) -> Taken | None:
        del max_bytes
        batches = list(self._waiting)
        if not batches or not all(change.made for batch in batches for change in batch.sealed):
            return None
        sched.point()
        self._waiting.clear()
        self._bytes = 0
        return Taken(batches[0].number, batches, sum(each.size for each in batches))

    with mock.patch.object(Outbox, "take", take):
        yield


@copy_mistake
def a_batch_that_is_sent_before_the_keeper_has_made_its_changes() -> Iterator[None]:
    """Batches are taken out even if their changes to sealed volumes have not been made."""

    def take(self: Outbox, max_bytes: int) -> Taken | None:
        del max_bytes
        with self._lock:
            batches = list(self._waiting)
            self._waiting.clear()
            self._bytes = 0
        return Taken(batches[0].number, batches, sum(each.size for each in batches)) if batches else None

    with mock.patch.object(Outbox, "take", take):
        yield


@copy_mistake
def a_batch_that_is_sent_before_it_is_durable() -> Iterator[None]:
    """Batches are handed over while a slow disk syncs them, although no answer waits for the log."""
    real = Outbox.hand_over

    def hand_over(self: Outbox, batch: Any) -> None:
        real(self, batch)
        sched.nap(0.1)

    with mock.patch.object(Outbox, "is_early", True), mock.patch.object(Outbox, "hand_over", hand_over):
        yield


@copy_mistake
def an_answer_once_its_commit_is_taken_out() -> Iterator[None]:
    """A commit is acknowledged when its batch has left the outbox, even if it is not stored."""

    def durable(self: CountedStore, completed: Any, failed: Exception | None) -> None:
        if failed is None and self._outbox.waiting_bytes:
            self._outbox.answer(self._outbox.last, completed)
        else:
            completed(failed)

    with mock.patch.object(CountedStore, "_durable", durable):
        yield


@copy_mistake
def an_answer_that_rests_on_the_commit_before() -> Iterator[None]:
    """An answer waits for one commit too few."""
    real = CountingOutbox.answer

    def answer(self: CountingOutbox, number: int, completed: Any) -> None:
        real(self, number - 1, completed)

    with mock.patch.object(CountingOutbox, "answer", answer):
        yield


@copy_mistake
def a_batch_that_is_visible_before_it_is_numbered() -> Iterator[None]:
    """The outbox is not notified of a batch that readers may see, so that they do not wait for its commits."""
    with mock.patch.object(Outbox, "numbered", return_value=None):
        yield
