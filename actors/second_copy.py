"""The second copy: ships the store's commits to an object store, and makes bases there.

One task ships: it takes the batches in the outbox as one segment, every ``interval_ms`` or, with the mode ``sync``, at
once. Up to ``uploads`` segments are under way; one counts once it and all before it are stored. Another task makes a base
if there is none, and one at intervals, and removes old bases and segments (``copy_bases``). Both survive an outage of the
object store: commits wait in the outbox, which is bounded. If it overflows, the epoch ends with a gap, and later commits
cannot be restored until a new base is complete. ``copy_start`` has how an epoch begins.

``run`` ends with an error if another process has continued the log. The daemon then has to end too.
"""

from __future__ import annotations

import logging
import secrets
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING

import trio

from actors.copy_bases import CopyBases
from actors.copy_calls import CopyCalls
from actors.copy_start import CopyStart
from actors.lease import LeaseHold, LeaseKeeper
from storage.base import StoreError, StoreUnusable
from storage.replication.counted_store import TORN, TORN_HINT
from storage.replication.measured import MeasuredObjects, PutTimes
from storage.replication.notices import log_name
from storage.replication.outbox import commit_of
from storage.replication.protocol import (
    OwnDirectory,
    Reign,
    ReignOver,
    Upload,
    check_place,
    store,
    take_over,
)
from storage.replication.record import RecordFile
from storage.replication.segment import ASYNC, MODES, RUN_BYTES, SYNC, encode_segment
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from actors.copy_start import Begun
    from actors.settings import ReplicationConfig
    from storage.leveldb.operations import SealedChange
    from storage.leveldb.store import LevelDBStore
    from storage.replication.bases import Base
    from storage.replication.carry import Objects
    from storage.replication.notices import Registration
    from storage.replication.outbox import Outbox, Taken
    from storage.replication.record import Record
    from storage.replication.segment import Segment

log = logging.getLogger(__name__)
#: Pause after a base failed.
BASE_PAUSE_S = 30.0
#: How often an idle primary checks that no other process has ended its epoch.
LOOK_EVERY_S = 10.0
#: How long to store no segment while another process tries to take over, so that its seal gets the next number.
YIELD_S = 2.0
#: How often the place in the log is recorded in the directory. A start reads the log from there.
NOTE_EVERY_S = 5.0
#: During a clean end, how often to check if the last batch is complete.
FINISHING_S = 0.1


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
        self._bases = CopyBases(measured, store, settings.keep_s, now_ms, self._put, bytes_per_s=base_bytes_per_s)
        self._outbox = outbox
        self._file = RecordFile(directory)
        self._settings = settings
        self._holder = holder
        self._interval_s = settings.interval_ms / 1000
        self._mode = MODES[settings.mode]
        self._now_ms = now_ms
        self._run = b""
        self._reign: Reign | None = None
        #: Changes that must be made before a base of this epoch begins.
        self._unmade: Sequence[SealedChange] = ()
        #: Batches of the segments that are not stored yet, by number.
        self._under_way: dict[int, Taken] = {}
        #: Set when the shipping task has something to do.
        self._woken = trio.Event()
        self._progress = trio.Event()
        self._is_finishing = False
        self._finished = trio.Event()
        self._is_given_up = False
        self._uploaded_ms: int | None = None
        self._yields_until_s = 0.0
        #: Segments up to this number must be begun, though there may be no commits for them.
        self._least_number = 0
        self._look_at_s = 0.0
        self._note_at_s = 0.0
        self._loop = trio.lowlevel.current_trio_token()
        outbox.on_full = self._wake_from_thread
        #: The heartbeat for standbys. While the lease does not hold, commits must not be acknowledged.
        self.lease = LeaseKeeper(
            objects,
            period_s=settings.lease_s,
            allows_standby=settings.standby != "never",
            # With ``sync``, no commit is acknowledged before it counts.
            is_needed=self._mode == ASYNC,
            counted=lambda: None if self._reign is None else self._reign.counted,
            now_ms=self._latest_ms,
            hold=hold,
        )

        self.lease.on_rival = self._yield_to_rival
        self.lease.check_log = self._check_log
        self._calls = CopyCalls(self.lease.hold.excluded(measured, settings.lease_s), self.lease.close)

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
        is_first = self._reign is None
        start = CopyStart(self._calls, self._file, self._store, self._outbox, is_first=is_first, on_read=self.on_read)
        self._run = start.run
        await start.claim()
        async with self.lease.holding(start.run):
            begun = await start.take_over(self.lease.terms, self._holder)
            self.lease.began(begun.place.epoch, start.run, self._holder, begun_s)
            await self._reign_from(start, begun)

    async def _reign_from(self, start: CopyStart, begun: Begun) -> None:
        """Send everything that the directory has and the log lacks. Raises as ``begin`` does."""
        place, restarted = begun.place, begun.restarted
        self._is_given_up = place.commit is None and begun.had_base
        # Until the rules of a restore are applied, another process that takes over must apply them too.
        mode = self._mode if self._file.record.settle is None else ASYNC
        self._reign, self._least_number = Reign(place, self._run, mode, has_base=begun.has_base), 0
        reign = self._reign
        self._outbox.progressed(reign.logged, None)
        self._unmade = restarted.unmade
        if place.commit is None:
            await self._upload(reign.open(restarted.last, self._now_ms()))
        elif place.commit < restarted.last:
            await self._upload(reign.cut(place.commit + 1, await start.lacking(place.commit, self._now_ms())))
        if not reign.says_mode:
            # A process that takes over goes by the mode in the log, so the log must have it before the first answer.
            await self._upload(reign.announce(self._now_ms()))
        self._outbox.progressed(reign.logged, reign.counted)
        await self._note_place()
        extra = {"epoch": reign.epoch, "commit": restarted.last, "has_base": begun.has_base}
        log.info("the second copy begins", extra=extra)

    async def run(self) -> None:
        """Ship until ``finish``.

        Raises:
          ReignOver, Foreign, BucketWentBack: the daemon must end, since another process owns the log.
        """
        try:
            while True:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._make_bases)
                    nursery.start_soon(self.lease.run, self._look, self._secure)
                    await self._ship()
                    nursery.cancel_scope.cancel()
                if self._is_finishing:
                    self._finished.set()
                    return
                log.warning("the second copy has a gap and begins with a new base", extra={"why": self._outbox.lost})
                await self._calls.patiently(self.begin)
        finally:
            # Nothing is acknowledged after the end of the reign.
            self._outbox.close("the daemon writes its second copy no longer")

    async def finish(self) -> None:
        """Ship everything that waits. Returns once it is stored; cancel it to give up."""
        self._is_finishing = True
        self._woken.set()
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
        record, reign = self._file.record, self._now
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
        return not self._outbox.lost and self._now.counted == self._outbox.last

    async def until_room(self) -> None:
        """Return once at most half of ``backlog_bytes`` waits, or commits are given up already."""
        while self._outbox.waiting_bytes > self._settings.backlog_bytes // 2 and not self._outbox.lost:
            await self._progress.wait()

    async def settled(self) -> None:
        """Note that the rules of a restore have been applied. Raises StoreUnusable."""
        last = self._outbox.last
        while (self._now.logged or 0) < last:
            await self._progress.wait()
        self._now.mode = self._mode
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
        reign, record, under_way = self._reign, self._file.record, list(self._under_way.values())
        assert reign is not None  # the copy has begun
        last, counted = self._outbox.last, reign.counted
        logged = reign.logged if counted is None else counted
        oldest_ms = min((each.batches[0].time_ms for each in under_way), default=self._outbox.oldest_ms)
        return CopyStatus(
            mode=self._mode,
            epoch=reign.epoch,
            last=last,
            counted=counted,
            lag_commits=last - (logged or 0),
            lag_bytes=self._outbox.waiting_bytes + sum(each.size for each in under_way),
            lag_s=0.0 if oldest_ms is None else max(0.0, (self._now_ms() - oldest_ms) / 1000),
            uploaded_ms=self._uploaded_ms,
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

    # --- shipping --------------------------------------------------------------------------------

    def _wake_from_thread(self) -> None:
        with suppress(trio.RunFinishedError):
            self._loop.run_sync_soon(self._wake, idempotent=True)

    def _wake(self) -> None:
        self._woken.set()

    def _yield_to_rival(self) -> None:
        """Begin no segment for a moment. Otherwise a busy primary's next segment would take each number first."""
        self._yields_until_s = trio.current_time() + YIELD_S

    async def _secure(self) -> None:
        """Return once a segment is stored, with all before it, that begins no earlier than this call."""
        number = self._least_number = self._now.place.number
        self._woken.set()
        while self._now.logged_place.number <= number:
            await self._progress.wait()

    @property
    def yields(self) -> bool:
        """True while another process may seal the log."""
        return trio.current_time() < self._yields_until_s

    async def _ship(self) -> None:
        """Ship until the outbox has lost commits, or until the end."""
        self._look_at_s = trio.current_time() + LOOK_EVERY_S
        async with trio.open_nursery() as uploads:
            while True:
                if self._outbox.is_torn:
                    raise StoreError(TORN, hint=TORN_HINT)
                await self._close_segments(uploads)
                if not self._under_way:
                    if self._outbox.lost:
                        return
                    if self._is_finishing and self._outbox.oldest_ms is None:
                        await self._note_place()
                        return
                if trio.current_time() >= self._look_at_s:
                    await self._look()
                if self._file.record.place != self._now.logged_place and trio.current_time() >= self._note_at_s:
                    await self._note_place()
                due_s = self._due_in_s()
                idle_s = min(self._interval_s, FINISHING_S) if self._is_finishing else self._interval_s
                with trio.move_on_after(due_s if due_s > 0 else idle_s):
                    await self._woken.wait()
                self._woken = trio.Event()

    async def _close_segments(self, uploads: trio.Nursery) -> None:
        """Begin the uploads that are due."""
        while len(self._under_way) < self._settings.uploads and self._due_in_s() <= 0 and not self.yields:
            taken = self._outbox.take(self._settings.segment_bytes)
            if taken is None:
                break
            reign = self._now
            self._under_way[reign.place.number] = taken
            segment, data = await in_thread(_encoded, reign, taken, max_wait_s=inf)
            uploads.start_soon(self._upload, reign.drafted(segment, data))
        if self._now.place.number <= self._least_number:
            uploads.start_soon(self._upload, self._now.announce(self._now_ms()))

    def _due_in_s(self) -> float:
        """Return how long the oldest batch may wait for others; ``interval_s`` if there is none."""
        oldest_ms = self._outbox.oldest_ms
        if oldest_ms is None:
            return self._interval_s
        if self._mode == SYNC or self._is_finishing or self._outbox.lost:
            return 0.0
        age_s = (self._now_ms() - oldest_ms) / 1000
        is_full = self._outbox.waiting_bytes >= self._settings.segment_bytes
        # A clock that was set back makes no batch wait for longer.
        return 0.0 if is_full or age_s < 0 else self._interval_s - age_s

    async def _upload(self, upload: Upload) -> None:
        """Store an object of the log."""
        await self._put(upload)
        self._now.stored(upload.number)
        self._under_way.pop(upload.number, None)
        self._uploaded_ms = self._now_ms()
        self._look_at_s = trio.current_time() + LOOK_EVERY_S
        progress, self._progress = self._progress, trio.Event()
        progress.set()
        self._woken.set()
        self._outbox.progressed(self._now.logged, self._now.counted)

    async def _put(self, upload: Upload) -> None:
        await self._calls.patiently(lambda: self._calls.do(store(upload)))

    async def _look(self) -> None:
        """Check that no other process has ended the epoch, if the object store answers. Raises ReignOver."""
        self._look_at_s = trio.current_time() + LOOK_EVERY_S
        try:
            await self._check_next()
        except StoreError as error:
            self._calls.error.failed(error.detail)
        else:
            self._calls.error.clear()

    async def _check_next(self) -> None:
        """Check that no other process has written at the next number. Raises ReignOver, StoreError."""
        place = self._now.place
        found = await self._calls.objects.get(log_name(place.epoch, place.number))
        # Otherwise this process may have begun a segment with the number since the request.
        if found is not None and self._now.place == place:
            raise self._calls.ended(ReignOver(f"another process has ended epoch {place.epoch}"))

    async def _check_log(self) -> None:
        """Check that the log has the last object that was stored, and none of another process after that.

        Raises:
          BucketWentBack, ReignOver: it does not.
          StoreError: the object store does not answer.
        """
        await self._calls.do(check_place(self._now.logged_place))
        await self._check_next()

    @property
    def _now(self) -> Reign:
        assert self._reign is not None  # the copy has begun
        return self._reign

    # --- the directory's record ------------------------------------------------------------------

    async def _note_if_possible(self, change: Callable[[Record], Record]) -> None:
        """Change the record. After a failure the next start reads more of the log, or makes a new base."""
        try:
            await self._file.change(change)
        except StoreUnusable as error:
            log.warning("the state of the second copy cannot be noted", extra={"why": error.detail})

    async def _note_place(self) -> None:
        """Note the place up to which the log is stored."""
        await self._note_if_possible(self._at_place)
        self._note_at_s = trio.current_time() + NOTE_EVERY_S

    def _at_place(self, record: Record) -> Record:
        """Return the record at the place up to which the log is stored, once the directory has everything before it."""
        place, here = self._now.logged_place, self._store.number
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
                await trio.sleep(self._interval_s)
                continue
            try:
                base = await self._make_base()
                await self._bases.remove_old(base, partial(self._file.change, self._at_place))
            except (StoreError, StoreUnusable) as error:
                log.warning("a base of the second copy failed", extra={"why": error.detail})
                await trio.sleep(BASE_PAUSE_S)

    async def _make_base(self) -> Base:
        """Copy the whole store. Raises StoreError: it may be tried again."""
        # Every commit before the place is in the store, and so in the base.
        base = await self._bases.write(self._now.place, self._run, self._outbox.shift)
        while (self._now.logged or 0) < base.until:
            await self._progress.wait()
        await self._bases.complete(base)
        self._now.based()
        self._is_given_up = False
        self._outbox.progressed(self._now.logged, self._now.counted)
        await self._note_if_possible(
            lambda record: replace(self._at_place(record), base=base.commit, base_ms=base.until_ms)
        )
        log.info("a base of the second copy is complete", extra={"commit": base.until, "bytes": base.size})
        return base


def _encoded(reign: Reign, taken: Taken) -> tuple[Segment, bytes]:
    """Return the next segment. For a thread; the reign must not change before ``drafted``."""
    segment = reign.draft(taken.first, [commit_of(batch) for batch in taken.batches])
    return segment, encode_segment(segment)
