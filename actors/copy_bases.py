"""The bases of a second copy: makes them from a view of the store, and removes old ones with the log before them."""

from __future__ import annotations

import secrets
from contextlib import aclosing
from functools import partial
from math import inf
from typing import TYPE_CHECKING

import trio

from plainsong.protocol.effects import Table
from storage.base import AFTER_ALL
from storage.pace import Pace, paced_rows
from storage.replication.bases import BASES, MANIFEST, PART_BYTES, Parts, epoch_folder
from storage.replication.notices import log_name
from storage.replication.protocol import Upload
from storage.replication.reading import bases_of, rows_of
from storage.replication.segment import is_segment
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from storage.base import Row
    from storage.leveldb.store import LevelDBStore, LevelDBView
    from storage.replication.bases import Base
    from storage.replication.carry import Objects
    from storage.replication.protocol import Place
    from storage.replication.segment import Commit

#: A view for a base expires this long after its last use.
VIEW_S = 300.0
#: Consecutive segments below a seal, after which no earlier seal is searched for: uploads under way are fewer.
MAX_UPLOADS = 16


class CopyBases:
    """The bases of one store. Only the task that makes them calls it."""

    def __init__(
        self,
        objects: Objects,
        store: LevelDBStore,
        keep_s: float,
        now_ms: Callable[[], int],
        put: Callable[[Upload], Awaitable[object]],
        *,
        bytes_per_s: int = 0,
    ) -> None:
        """Args:
        keep_s: every moment of this time before now can be restored.
        put: stores an object, however long the object store is away.
        bytes_per_s: ``backup.bytes_per_s``; 0: no limit, except for the pauses.
        """
        self.oldest_ms: int | None = None
        """The earliest moment that can be restored; None while that is unknown."""
        self._objects = objects
        self._store = store
        self._keep_s = keep_s
        self._now_ms = now_ms
        self._put = put
        self._bytes_per_s = bytes_per_s

    async def find(self) -> list[Base]:
        """Return the complete bases, oldest first, and note the earliest moment of any. Raises StoreError."""
        bases = await bases_of(self._objects)
        self.oldest_ms = min((base.until_ms for base in bases), default=None)
        return bases

    async def write(self, place: Place, run: bytes, shift: int) -> Base:
        """Store the parts of a new base, which is void until ``complete``. Raises StoreError: it may be tried again.

        Args:
          place: the store has every commit before it.
          shift: of the outbox.
        """
        parts = Parts(place, run, self._now_ms(), secrets.token_bytes(4))
        view = await self._store.pin_now(VIEW_S)
        try:
            for table in Table:
                await self._copy_table(view, table, parts)
        finally:
            with trio.CancelScope(shield=True):
                await view.aclose()
        return parts.manifest(view.number + shift, self._now_ms())

    async def complete(self, base: Base) -> None:
        """Store the manifest of a base, once the log has every commit up to ``base.until``."""
        await self._put(Upload(0, f"{base.folder}/{MANIFEST}", base.encode()))

    async def _copy_table(self, view: LevelDBView, table: Table, parts: Parts) -> None:
        rows: list[Row] = []
        size = 0
        pace = Pace(self._bytes_per_s, on_pause=partial(view.renew, VIEW_S))
        async with aclosing(paced_rows(view, table, b"", AFTER_ALL, pace, rows.extend)) as steps:
            async for step in steps:
                size += step
                if size >= PART_BYTES:
                    await self._put_part(parts, table, rows)
                    rows.clear()
                    size = 0
                    view.renew(VIEW_S)
        if rows:
            await self._put_part(parts, table, rows)

    async def _put_part(self, parts: Parts, table: Table, rows: Sequence[Row]) -> None:
        name, data = await in_thread(parts.part, table, rows, max_wait_s=inf)
        await self._put(Upload(0, name, data))

    async def remove_old(self, newest: Base, note_place: Callable[[], Awaitable[object]]) -> None:
        """Remove bases and segments that no moment of the last ``keep_s`` needs. Raises StoreError, StoreUnusable.

        Args:
          newest: read back as a whole before anything is removed.
          note_place: notes the end of the log, from which a start reads it.
        """
        # A process that has taken over may be making bases already.
        bases = [base for base in await self.find() if base.place.epoch <= newest.place.epoch]
        oldest_ms = self._now_ms() - self._keep_s * 1000
        before = [base for base in bases if base.until_ms <= oldest_ms]
        if len(before) < 2:
            return
        await note_place()
        await rows_of(self._objects, newest, _look_at)
        oldest = before[-1]
        for base in before[:-1]:
            await self._objects.remove([f"{base.folder}/{MANIFEST}"])
        self.oldest_ms = oldest.until_ms
        kept = {base.folder for base in bases[bases.index(oldest) :]}
        later = epoch_folder(newest.place.epoch + 1)
        names = [name for name in await self._objects.names(BASES) if name < later]
        await self._objects.remove([name for name in names if name.rpartition("/")[0] not in kept])
        await _remove_log(self._objects, oldest.place)


async def _remove_log(objects: Objects, place: Place) -> None:
    """Remove the segments before a place, and no seal."""
    first = log_name(place.epoch, max(1, place.number - 1))  # a start checks the object before its place
    names = [name for name in await objects.names("log") if name < first]
    by_epoch: dict[str, list[str]] = {}
    for name in names:
        by_epoch.setdefault(name.rpartition("/")[0], []).append(name)
    current = first.rpartition("/")[0]
    for epoch, found in by_epoch.items():
        await objects.remove(found if epoch == current else await _before_seal(objects, found))


async def _before_seal(objects: Objects, names: list[str]) -> list[str]:
    """Return the objects of a sealed epoch before its first seal."""
    seal, segments = len(names), 0
    for at in range(len(names) - 1, -1, -1):
        found = await objects.get(names[at])
        if found is None or is_segment(found.data):
            segments += 1
        else:
            seal, segments = at, 0
        if seal < len(names) and segments >= MAX_UPLOADS:
            break
    return names[:seal] if seal < len(names) else []


async def _look_at(commit: Commit) -> None:
    del commit
    await trio.lowlevel.checkpoint()
