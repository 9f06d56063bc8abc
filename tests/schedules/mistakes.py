"""Mistakes of the kind that schedules are explored for, each planted into the store as it is: exploring has to find them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from storage.base import StoreError
from storage.leveldb.commit import Committer, Replace
from storage.leveldb.keeper import Keeper
from storage.leveldb.metadata import Metadata, Waiting
from storage.leveldb.open_databases import OpenDatabases
from storage.leveldb.view import PinnedView
from storage.leveldb.volume_set import Sets, VolumeSet

Mistake = Callable[[], Any]
MISTAKES: dict[str, Mistake] = {}


def mistake(planted: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
    """Name a mistake by its function."""
    MISTAKES[planted.__name__] = contextmanager(planted)
    return planted


@mistake
def a_pin_that_is_released_early() -> Iterator[None]:
    """A reader lets go of its set before it reads."""
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
    """The next volume is not taken out of its place."""
    real = Committer._seal

    def seal(self: Committer) -> StoreError | None:
        error = real(self)
        self._spare = self._sets.current.newest
        return error

    with mock.patch.object(Committer, "_seal", seal):
        yield


@mistake
def a_list_that_is_written_from_an_old_set() -> Iterator[None]:
    """A volume that was struck off, or replaced, takes the list from when tidying began."""
    real = Keeper.replace

    def replace(self: Keeper, sources: Any, target: Any) -> Any:
        old = list(self._sets.current.all)
        yield 0.0
        self._listed = old
        yield from real(self, sources, target)

    with mock.patch.object(Keeper, "replace", replace):
        yield


@mistake
def a_set_that_is_replaced_from_an_old_one() -> Iterator[None]:
    """The keeper makes the new set by itself, from the one that it has read before."""

    def replaced(self: Keeper, sources: Any, target: Any) -> Any:
        current = self._sets.current
        yield 0.0
        following = current.replacing(sources, target)
        assert following is not None
        self._sets.put(following)
        for volume in sources:
            self._replaced[volume] = target
        return following.number

    with mock.patch.object(Keeper, "_replaced_in_set", replaced):
        yield


@mistake
def a_view_that_outlives_its_volume() -> Iterator[None]:
    """A view does not pin the set that it began with."""
    real = Committer._pinned

    def pinned(self: Committer, max_s: float) -> PinnedView:
        view = real(self, max_s)
        self._sets.unpin(view.volumes)
        self._sets._pins[view.volumes.number] += 0
        return view

    with mock.patch.object(Committer, "_pinned", pinned), mock.patch.object(Keeper, "_unpin", _unpin_without_pin):
        yield


def _unpin_without_pin(self: Keeper, view: PinnedView) -> Any:
    from storage.leveldb.commit import Unpin

    yield Unpin(view)
    for volume in view.close():
        self._databases.release(volume)


@mistake
def a_view_without_what_changes() -> Iterator[None]:
    """A sealed volume changes, and the view that has it does not keep it as it was."""
    with mock.patch.object(Keeper, "before_change", return_value=None):
        yield


@mistake
def a_close_during_a_rewrite() -> Iterator[None]:
    """Long work is not ended before the databases are closed: it is thrown away where it stands."""

    def close(self: Keeper) -> None:
        self.leaving = True

    with mock.patch.object(Keeper, "close", close):
        yield


@mistake
def a_change_of_what_is_being_replaced() -> Iterator[None]:
    """While the commit replaces volumes, the keeper goes on to change the old ones."""
    real = Keeper._replaced_in_set

    def replaced(self: Keeper, sources: Any, target: Any) -> Any:
        operation = Replace(sources, target)
        following = None
        yield 0.0  # between the list and the set others may change the sources
        found = real(self, sources, target)
        del operation, following
        return (yield from found)

    with mock.patch.object(Keeper, "_replaced_in_set", replaced):
        yield


@mistake
def a_rewrite_that_misses_changes() -> Iterator[None]:
    """Rows that change while their volume is copied are not changed again in the copy."""
    with mock.patch.object(Keeper, "_note_changed", return_value=None):
        yield


@mistake
def a_checkpoint_that_forgets() -> Iterator[None]:
    """What is applied to the metadata while it is checkpointed is forgotten."""
    real = Metadata.checkpoint

    def checkpoint(self: Metadata) -> None:
        real(self)
        self._waiting = Waiting()

    with mock.patch.object(Metadata, "checkpoint", checkpoint):
        yield


@mistake
def a_database_that_is_closed_while_it_is_leased() -> Iterator[None]:
    """Leases do not count."""

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
    """The work is completed before the keeper has changed the sealed volumes."""
    real = Keeper.change

    def change(self: Keeper, work: Any) -> None:
        real(self, work)
        work.is_with_keeper = False
        work.on_changed = lambda _: None

    with mock.patch.object(Keeper, "change", change):
        yield
