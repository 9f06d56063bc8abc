"""The primary's log, as far as a standby's store has it: the base, the place after the applied segments, the next ones.

Segments are read several at a time, and applied as one batch. The place is written to the store with the next batch, so a
standby that was killed applies some segments again, which changes nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from actors.log_writer import LOOK_EVERY_S
from plainsong.protocol.effects import Put, Table, put_one
from storage.replication.bases import FORMAT_NAME, decode_format
from storage.replication.carry import read_all
from storage.replication.notices import log_name
from storage.replication.outbox import operations_of
from storage.replication.protocol import ROOT, ReadAhead, batches_after
from storage.replication.reading import CopyMoved, bases_of, is_removed, rows_of
from storage.replication.record import FOLLOWED_KEY, Followed
from storage.replication.segment import decode_segment, is_segment
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actors.last_error import LastError
    from actors.standby_clock import StandbyClock
    from storage.leveldb.store import LevelDBStore
    from storage.replication.bases import Base
    from storage.replication.carry import Objects
    from storage.replication.notices import Lease
    from storage.replication.protocol import Place
    from storage.replication.record import RecordFile
    from storage.replication.segment import Commit, Segment


class BuildAgain(Exception):
    """The log no longer continues the directory."""


class FollowedLog:
    """The log that one standby follows. Only its task calls the methods."""

    def __init__(self, objects: Objects, file: RecordFile, clock: StandbyClock, error: LastError) -> None:
        self._objects = objects
        self._file = file
        self._clock = clock
        self._error = error
        self.place = ROOT
        """The place after the last segment that was applied."""
        self.mode = 0
        """The mode of the last segment; 0 if it is not known."""
        self.time_ms = 0
        """The time of the last commit."""
        self.caught_up = False
        """True if the log had no further segment when it was last read, and nothing has failed since."""
        self.handed_over_s = -1e9
        """When a clean seal was applied."""
        #: The place in the store's own row.
        self._noted = ROOT
        self._ahead = ReadAhead()
        #: Bases of earlier epochs are before a gap.
        self._least_epoch = 0
        #: The time of the last search for a base after the end of the log.
        self._looked_s = -1e9

    async def store_id(self) -> str | None:
        """Return the store whose log this is; None if there is no log yet. Raises StoreError, DamagedLog."""
        found = await self._objects.get(FORMAT_NAME)
        return None if found is None else decode_format(found.data)

    async def newest_base(self) -> Base | None:
        """Return the newest base from which the log has no gap; None if there is none yet. Raises StoreError, DamagedLog."""
        found = [base for base in await bases_of(self._objects) if base.place.epoch >= self._least_epoch]
        return found[-1] if found else None

    async def build(self, store: LevelDBStore, base: Base) -> None:
        """Write a base into an empty store. Raises BuildAgain, StoreError, DamagedLog."""

        async def take(commit: Commit) -> None:
            await store.apply(operations_of(commit))

        try:
            await rows_of(self._objects, base, take)
        except CopyMoved:
            raise BuildAgain from None
        await self._file.change(
            lambda record: replace(
                record, place=base.place, base=base.commit, base_ms=base.until_ms, until=base.until, time_ms=0
            )
        )

    async def recover(self, store: LevelDBStore) -> int:
        """Find the place of a store that is or was open; return the mode there, 0 if it is not known. Raises StoreError."""
        await store.recover()
        found = Followed.of(self._file.record, await store.get(Table.METADATA, FOLLOWED_KEY))
        self.place = self._noted = found.place
        self.time_ms, self._clock.ahead_ms = found.time_ms, max(self._clock.ahead_ms, found.ahead_ms)
        return found.mode

    async def mode_before(self) -> int:
        """Return the mode of the segment before the place; 0 if it is not known. Raises StoreError, DamagedLog."""
        place = self.place
        # A primary whose base begins an epoch has not said its mode.
        found = await self._objects.get(log_name(place.epoch, place.number - 1)) if place.number > 1 else None
        return 0 if found is None or not is_segment(found.data) else (await in_thread(decode_segment, found.data)).mode

    async def apply_next(self, store: LevelDBStore, lease: Lease | None) -> bool:
        """Apply the next objects of the log; False if there are none. Raises StoreError, DamagedLog, BuildAgain."""
        place = self.place
        objects = await self._read_ahead(place)
        if objects[0] is None:
            lacking = self.lacking(lease)
            # Without a lease nothing but a later base shows that there was more.
            is_due = lease is None and self._clock.now_s() - self._looked_s >= LOOK_EVERY_S
            if lacking or is_due:
                self._looked_s = self._clock.now_s()
                if await is_removed(self._objects, place):
                    raise BuildAgain
            self.caught_up = (place.commit or 0) >= self._file.record.until
            if lacking:
                self._error.failed(lacking)
            else:
                self._error.clear()
            return False
        batches = batches_after(place, objects)
        while (batch := await in_thread(lambda: next(batches, None))) is not None:
            if batch.place.commit is None:
                self._least_epoch = batch.place.epoch
                raise BuildAgain  # commits are missing here; a base after the gap has them
            if batch.segments:
                await self.apply(store, batch.segments)
            self.place = batch.place
            if batch.place.clean:
                self.handed_over_s = self._clock.now_s()
        self._error.clear()
        return True

    async def _read_ahead(self, place: Place) -> Sequence[bytes | None]:
        """Read the next objects of an epoch, at least one; None for each that was missing. Raises StoreError."""
        ahead, self._ahead = self._ahead, ReadAhead()  # if this read fails, the next one reads a single object
        found = await read_all(self._objects.get, ahead.names(place))
        objects = [None if each is None else each.data for each in found]
        ahead.took(objects)
        self._ahead = ahead
        return objects

    def lacking(self, lease: Lease | None) -> str:
        """The error for a log that ends before a commit that a lease reported as counted; empty if it does not."""
        counted, last = 0 if lease is None else lease.counted or 0, self.place.commit or 0
        if counted <= last:
            return ""
        return f"objects are missing: the log ends at commit {last}, but commit {counted} was in it before"

    async def apply(self, store: LevelDBStore, segments: Sequence[Segment]) -> None:
        """Apply segments as one batch, and note the place before them.

        The place follows only with the next batch: what the store removes from sealed volumes is durable after the
        commit, and the place must not be ahead of it.
        """
        operations = [each for segment in segments for commit in segment.commits for each in operations_of(commit)]
        times = [segment.last_ms for segment in segments if segment.commits]
        # Stored with the segments: a segment that is read again later shows a smaller difference between the clocks.
        for time_ms in times:
            self._clock.note(time_ms)
        await store.apply([*operations, self._row()])
        self._noted = self.place
        self.mode = segments[-1].mode
        if times:
            self.time_ms = times[-1]

    async def note_place(self, store: LevelDBStore) -> None:
        """Write the place to the store, if it has another one. Raises StoreError."""
        if self._noted != self.place:
            await store.apply([self._row()])
            self._noted = self.place

    def _row(self) -> Put:
        followed = Followed(self.place, self.time_ms, self.mode, self._clock.ahead_ms)
        return put_one(Table.METADATA, FOLLOWED_KEY, followed.encode())
