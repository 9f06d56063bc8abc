"""The second copy: ships the store's commits to an object store, and makes bases there.

One task ships (``log_writer``). Another makes a base if there is none, and one at intervals, and removes old bases and
segments (``copy_bases``). Both survive an outage of the object store: commits wait in the outbox, which is bounded. If it
overflows, the epoch ends with a gap, and later commits cannot be restored until a new base is complete. ``copy_start`` has
how an epoch begins.

``run`` ends with an error if another process has continued the log. The daemon then has to end too.
"""

from __future__ import annotations

import logging
import secrets
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import trio

from actors.copy_bases import CopyBases
from actors.copy_calls import CopyCalls
from actors.copy_start import CopyStart
from actors.lease import LeaseKeeper
from actors.log_writer import LogWriter
from storage.base import StoreError, StoreUnusable
from storage.replication.measured import MeasuredObjects, PutTimes
from storage.replication.protocol import OwnDirectory, take_over
from storage.replication.record import RecordFile
from storage.replication.segment import ASYNC, MODES, RUN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from actors.lease_hold import LeaseHold
    from actors.settings import ReplicationConfig
    from storage.leveldb.operations import SealedChange
    from storage.leveldb.store import LevelDBStore
    from storage.replication.bases import Base
    from storage.replication.carry import Objects
    from storage.replication.notices import Registration
    from storage.replication.outbox import Outbox
    from storage.replication.record import Record

log = logging.getLogger(__name__)
#: Pause after a base failed.
BASE_PAUSE_S = 30.0
#: How often the place in the log is recorded in the directory. A start reads the log from there.
NOTE_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class CopyStatus:
    """The state of a copy, for operators."""

    mode: int
    epoch: int
    last: int
    """The last commit of the store."""
    counted: int | None
    """The last commit that survives the loss of the directory; None while there is no complete base."""
    lag_commits: int
    lag_bytes: int
    lag_s: float
    uploaded_ms: int | None
    """When the last segment was stored."""
    error: str
    """Why the last request failed; empty if it succeeded."""
    base: int | None
    base_ms: int
    oldest_ms: int | None
    """The earliest moment that can be restored; None while that is unknown."""
    given_up: bool
    """True if commits were given up, so that those after them cannot be restored until a new base is complete."""
    standbys: tuple[Registration, ...]
    """The registered standbys."""
    automatic: bool
    """True if one of them takes over by itself once the lease is over."""
    alone_s: float
    """How long no standby has been registered."""
    has_lease: bool
    """False if the object store has no conditional replacement: then standbys cannot register."""


class SecondCopy:
    """The copy of one store. ``begin``, then ``run``; ``finish`` once nothing more is committed."""

    def __init__(
        self,
        objects: Objects,
        store: LevelDBStore,
        outbox: Outbox,
        directory: Path,
        settings: ReplicationConfig,
        now_ms: Callable[[], int],
        *,
        base_bytes_per_s: int = 0,
        holder: str = "",
        hold: LeaseHold | None = None,
    ) -> None:
        """Args:
        directory: the store's directory.
        base_bytes_per_s: ``backup.bytes_per_s``; 0: no limit, except for the pauses.
        holder: the name of this machine, for people.
        hold: of the standby that has taken over in this process; None if there was none.
        """
        self.puts = PutTimes()
        """How long the object store takes for a write."""
        self.on_read: Callable[[], object] = lambda: None
        """Called for each segment that ``begin`` has read: it may be many after a kill."""
        measured = MeasuredObjects(objects, self.puts)
        self._store = store
        self._outbox = outbox
        self._file = RecordFile(directory)
        self._settings = settings
        self._holder = holder
        self._now_ms = now_ms
        self._run = b""
        #: Changes that must be made before a base of this epoch begins.
        self._unmade: Sequence[SealedChange] = ()
        self._finished = trio.Event()
        self._is_given_up = False
        self._note_at_s = 0.0
        #: The heartbeat for standbys. While the lease does not hold, commits must not be acknowledged.
        self.lease = LeaseKeeper(
            objects,
            period_s=settings.lease_s,
            allows_standby=settings.standby != "never",
            # With ``sync``, no commit is acknowledged before it counts.
            is_needed=MODES[settings.mode] == ASYNC,
            counted=lambda: self.log.reign.counted if self.log.has_begun else None,
            now_ms=self._latest_ms,
            hold=hold,
        )
        self._calls = CopyCalls(self.lease.hold.excluded(measured, settings.lease_s), self.lease.close)
        self.log = LogWriter(self._calls, outbox, settings, now_ms)
        self.lease.on_rival = self.log.yield_to_rival
        self.lease.check_log = self.log.check
        self._bases = CopyBases(measured, store, settings.keep_s, now_ms, self.log.put, bytes_per_s=base_bytes_per_s)

    def _latest_ms(self) -> int:
        """Return the latest time of ids that this primary, or the one before it, may have assigned."""
        settle = self._file.record.settle
        # Until the rules are applied, the topics do not show what the last primary may have assigned.
        return self._now_ms() if settle is None else settle.first_ms(self._now_ms())

    # --- for the daemon --------------------------------------------------------------------------

    async def begin(self) -> None:
        """End the log's last epoch and begin one.

        Raises:
          Foreign, ReignOver: the log belongs to another directory, or another process has continued it.
          DirectoryBehind: the log has commits that this directory lacks, and does not continue its last one.
          BucketWentBack: objects are missing that were there.
          Unconditional: the object store cannot fence.
          StoreUnusable, StoreError, DamagedLog: it cannot be read or written.
        """
        begun_s = self.lease.clock_s
        is_first = not self.log.has_begun
        start = CopyStart(self._calls, self._file, self._store, self._outbox, is_first=is_first, on_read=self.on_read)
        self._run = start.run
        await start.claim()
        async with self.lease.holding(start.run):
            begun = await start.take_over(self.lease.terms, self._holder)
            self.lease.began(begun.place.epoch, start.run, self._holder, begun_s)
            self._is_given_up = begun.place.commit is None and begun.had_base
            self._unmade = begun.restarted.unmade
            # Until the rules of a restore are applied, another process that takes over must apply them too.
            await self.log.begin(start, begun, self.log.mode if self._file.record.settle is None else ASYNC)
            await self._note_place()
            extra = {"epoch": begun.place.epoch, "commit": begun.restarted.last, "has_base": begun.has_base}
            log.info("the second copy begins", extra=extra)

    async def run(self) -> None:
        """Ship until ``finish``.

        Raises:
          ReignOver, Foreign, BucketWentBack: the daemon must end, since another process owns the log.
          StoreError: it must end, since the disk may have lost a commit that was sent.
        """
        try:
            while True:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._make_bases)
                    nursery.start_soon(self.lease.run, self.log.look, self.log.secure)
                    await self.log.ship(self._note_place_if_due)
                    if self.log.is_finishing:
                        await self._note_place()
                    nursery.cancel_scope.cancel()
                if self.log.is_finishing:
                    self._finished.set()
                    return
                log.warning("the second copy has a gap and begins with a new base", extra={"why": self._outbox.lost})
                await self._calls.patiently(self._begin_again)
        finally:
            # Nothing is acknowledged after the end of the reign.
            self._outbox.close("the daemon writes its second copy no longer")

    async def _begin_again(self) -> None:
        """Begin an epoch after a gap. Raises as ``begin``."""
        if self._outbox.is_torn:
            return  # ``ship`` raises
        try:
            await self.begin()
        except StoreError:
            # Not earlier: while a failed store can still be read, ``begin`` can seal the gap.
            await self._store.recover()
            raise

    async def finish(self) -> None:
        """Ship everything that waits. Returns once it is stored; cancel it to give up."""
        self.log.finish()
        await self._finished.wait()

    async def hand_over(self) -> None:
        """End the epoch by a clean seal, after ``finish``, and make the directory a standby's.

        Raises:
          Foreign, ReignOver: another process has taken over already.
          StoreError, StoreUnusable, DamagedLog: it is not known whether there is a seal.
        """
        self.lease.close()
        run = secrets.token_bytes(RUN_BYTES)
        # First, so that its own seal is recognized if the answer to it is lost.
        await self._file.change(lambda record: record.started(run))
        record, reign = self._file.record, self.log.reign
        own = OwnDirectory(self._outbox.last, frozenset(record.runs), self._outbox.last, writer=record.writer)
        known, leased, holder = record.known_epoch, self._calls.objects.can_exchange, self._holder
        ended = take_over(
            run, reign.place, known=known, leased=leased, directory=own, holder=holder, clean=reign.counted is not None
        )
        place = await self._calls.do(ended)
        await self.lease.release(place.epoch, run)
        time_ms = self._now_ms()
        await self._file.change(lambda record: replace(record.at(place, run), standby=True, shift=0, time_ms=time_ms))
        log.info("the log is handed over", extra={"epoch": reign.epoch, "commit": place.commit})

    @property
    def is_whole(self) -> bool:
        """True if everything that was committed can be restored."""
        return not self._outbox.lost and self.log.reign.counted == self._outbox.last

    async def settled(self) -> None:
        """Note that the rules of a restore have been applied. Raises StoreUnusable."""
        await self.log.until_logged(self._outbox.last)
        self.log.reign.mode = self.log.mode
        await self._file.change(lambda record: replace(record, settle=None))

    async def recorded(self) -> None:
        """Note that the directory's events are in the audit."""
        await self._note_if_possible(lambda record: replace(record, events=()))

    @property
    def record(self) -> Record:
        """The record of the copy in the directory."""
        return self._file.record

    @property
    def error(self) -> str:
        """Why the last request failed; empty if it did not."""
        return self._calls.error.why

    @property
    def status(self) -> CopyStatus:
        """The current state."""
        reign, record, under_way = self.log.reign, self._file.record, self.log.under_way
        last, counted = self._outbox.last, reign.counted
        logged = reign.logged if counted is None else counted
        oldest_ms = min((each.batches[0].time_ms for each in under_way), default=self._outbox.oldest_ms)
        return CopyStatus(
            mode=self.log.mode,
            epoch=reign.epoch,
            last=last,
            counted=counted,
            lag_commits=last - (logged or 0),
            lag_bytes=self._outbox.waiting_bytes + sum(each.size for each in under_way),
            lag_s=0.0 if oldest_ms is None else max(0.0, (self._now_ms() - oldest_ms) / 1000),
            uploaded_ms=self.log.uploaded_ms,
            error=self._calls.error.why,
            base=record.base,
            base_ms=record.base_ms,
            oldest_ms=self._bases.oldest_ms,
            given_up=self._is_given_up or bool(self._outbox.lost),
            standbys=self.lease.standbys,
            automatic=self.lease.is_automatic,
            alone_s=self.lease.alone_s,
            has_lease=self._calls.objects.can_exchange,
        )

    # --- the directory's record ------------------------------------------------------------------

    async def _note_if_possible(self, change: Callable[[Record], Record]) -> None:
        """Change the record. After a failure the next start reads more of the log, or makes a new base."""
        try:
            await self._file.change(change)
        except StoreUnusable as error:
            log.warning("the state of the second copy cannot be noted", extra={"why": error.detail})

    async def _note_place_if_due(self) -> None:
        if self._file.record.place != self.log.reign.logged_place and trio.current_time() >= self._note_at_s:
            await self._note_place()

    async def _note_place(self) -> None:
        """Note the place up to which the log is stored."""
        await self._note_if_possible(self._at_place)
        self._note_at_s = trio.current_time() + NOTE_EVERY_S

    def _at_place(self, record: Record) -> Record:
        """Return the record at the place up to which the log is stored, once the directory has everything before it."""
        place, here = self.log.reign.logged_place, self._store.number
        if place.commit is not None and (here is None or here + self._outbox.shift < place.commit):
            return record
        return record.at(place, self._run)

    # --- bases -----------------------------------------------------------------------------------

    async def _make_bases(self) -> None:
        with suppress(StoreError, StoreUnusable):
            await self._bases.find()
        while True:
            if self._file.record.base is not None:
                every_s = self._settings.base_every_h * 3600
                due_s = self._file.record.base_ms / 1000 + every_s - self._now_ms() / 1000
                # At most ``every_s``: a base that was made while the clock was ahead would delay the next one.
                await trio.sleep(min(max(0.0, due_s), every_s))
            if any(each.made is None for each in self._unmade):
                await trio.sleep(self._settings.interval_ms / 1000)
                continue
            try:
                base = await self._make_base()
                await self._bases.remove_old(base, partial(self._file.change, self._at_place))
            except (StoreError, StoreUnusable) as error:
                log.warning("a base of the second copy failed", extra={"why": error.detail})
                await trio.sleep(BASE_PAUSE_S)

    async def _make_base(self) -> Base:
        """Copy the whole store. Raises StoreError, StoreUnusable: it may be tried again."""
        # In mode ``sync``, all callers that would reopen a failed store may be waiting for the first base.
        await self._store.recover()
        # Every commit before the place is in the store, and so in the base.
        base = await self._bases.write(self.log.reign.place, self._run, self._outbox.shift)
        await self.log.until_logged(base.until)
        await self._bases.complete(base)
        self.log.reign.based()
        self._is_given_up = False
        self.log.progressed()
        await self._note_if_possible(
            lambda record: replace(self._at_place(record), base=base.commit, base_ms=base.until_ms)
        )
        log.info("a base of the second copy is complete", extra={"commit": base.until, "bytes": base.size})
        return base
