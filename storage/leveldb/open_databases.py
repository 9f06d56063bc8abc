"""The open databases of volumes: opened on demand, closed when too many are open.

A thread **leases** a volume's database while it uses it; leased databases are not closed. LevelDB opens a folder only
once at a time, so a thread that needs a database waits while another thread opens or closes it.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from storage.base import StoreDamaged, StoreError, StoreUnusable, Unreadable
from storage.leveldb import threads
from storage.leveldb.engine.database import Database

if TYPE_CHECKING:
    from collections.abc import Iterator

    from storage.leveldb.volume import Volume

log = logging.getLogger(__name__)


class VolumeDamaged(Unreadable):
    """A volume cannot be opened: its files are missing or damaged. Other volumes may be readable."""


class _Entry:
    __slots__ = ("database", "is_moving", "leases", "used")

    def __init__(self) -> None:
        self.database: Database | None = None
        self.leases = 0
        self.is_moving = False
        """True while a thread opens or closes the database."""
        self.used = 0
        """The value of the lease counter at its last lease."""


class OpenDatabases:
    """The open databases of a store's volumes, by folder. Thread-safe."""

    def __init__(self, max_open: int, *, check: bool = True) -> None:
        """Close databases that are not leased while more than ``max_open`` are open.

        Args:
          max_open: excludes the newest volume, which is always leased.
          check: check for missing files before opening, because LevelDB does not notice them.
        """
        self._max_open = max_open
        self._check = check
        self._entries: dict[str, _Entry] = {}
        self._uses = 0
        #: Guards the entries. Not held while a database is opened, closed or used; no other lock is taken while it is held.
        self._changed = threads.Condition()

    @property
    def open_count(self) -> int:
        """The number of open databases."""
        return sum(entry.database is not None for entry in list(self._entries.values()))

    @contextmanager
    def lease(self, volume: Volume) -> Iterator[Database]:
        """Lease a volume's database until the block ends. Raises StoreError: it cannot be opened."""
        try:
            database = self.acquire(volume)
        except StoreUnusable as error:
            log.error("a volume cannot be opened", extra={"volume": volume.name, "why": error.detail})
            kind = VolumeDamaged if isinstance(error, StoreDamaged) else StoreError
            raise kind(f"volume {volume.name} cannot be opened", hint=error.hint) from error
        try:
            yield database
        finally:
            self.release(volume)

    def acquire(self, volume: Volume, *, create: bool = False) -> Database:
        """Begin a lease; ``release`` ends it. Raises StoreUnusable: nothing was leased."""
        with self._changed:
            entry = self._entries.setdefault(volume.name, _Entry())
            while entry.is_moving:
                self._changed.wait()
                entry = self._entries.setdefault(volume.name, _Entry())
            entry.leases += 1
            self._uses += 1
            entry.used = self._uses
            if entry.database is not None:
                return entry.database
            entry.is_moving = True
        try:
            database = Database(volume.path, volume.shape, create=create, check=self._check)
        except BaseException:
            with self._changed:
                entry.leases -= 1
                entry.is_moving = False
                self._entries.pop(volume.name)
                self._changed.notify_all()
            raise
        with self._changed:
            entry.database = database
            entry.is_moving = False
            self._changed.notify_all()
        self.close_idle()
        return database

    def release(self, volume: Volume) -> None:
        """End a lease."""
        with self._changed:
            self._entries[volume.name].leases -= 1

    def close_idle(self) -> None:
        """Close databases that are not leased, least recently used first, until no more than ``max_open`` are open."""
        while True:
            with self._changed:
                is_open = [(name, entry) for name, entry in self._entries.items() if entry.database is not None]
                idle = [each for each in is_open if not each[1].leases and not each[1].is_moving]
                if len(is_open) <= self._max_open + 1 or not idle:
                    return
                name, entry = min(idle, key=lambda each: each[1].used)
                entry.is_moving = True
            self._close(name, entry)

    def discard(self, volume: Volume) -> bool:
        """Close a volume's database for good; return False, without effect, if it is leased. For the keeper."""
        with self._changed:
            entry = self._entries.get(volume.name)
            while entry is not None and entry.is_moving:
                self._changed.wait()
                entry = self._entries.get(volume.name)
            if entry is None:
                return True
            if entry.leases:
                return False
            entry.is_moving = True
        self._close(volume.name, entry)
        return True

    def _close(self, name: str, entry: _Entry) -> None:
        """Close the database of an entry that is marked as moving, and remove the entry."""
        try:
            if entry.database is not None:
                entry.database.close()
        finally:
            with self._changed:
                self._entries.pop(name)
                self._changed.notify_all()

    def close(self) -> None:
        """Close all databases; no other thread may use one. Idempotent."""
        entries, self._entries = self._entries, {}
        with ExitStack() as closing:
            for entry in entries.values():
                if entry.database is not None:
                    closing.callback(entry.database.close)
