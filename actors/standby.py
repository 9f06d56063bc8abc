"""A standby: builds its directory from the newest base of a log, follows the log, and takes over.

    build     the newest base, into an empty directory
    follow    segments, as they are stored, several at a time; the place in the log is written with the next ones
    take over end the primary's epoch with a seal, read the log to that seal, and make the directory a primary's

Once it is able to take over, it registers in the primary's lease, and renews the registration, so that the primary keeps
the terms of the lease. If it is killed, the next start continues, or builds again if the base was not complete. If its
next segment was removed, it builds again. After a take-over the process starts as any primary does.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import inf
from typing import TYPE_CHECKING, TypeVar

import trio

from actors.lease import LeaseHold, boot_s, renews_every_s
from actors.second_copy import LOOK_EVERY_S
from actors.settling import settle
from plainsong.protocol.effects import Put, Table, put_one
from plainsong.protocol.errors import OutcomeUnknown
from storage.base import StoreError, StoreUnusable
from storage.directory import DataDirectory, empty_store, set_aside
from storage.replication.bases import FORMAT_NAME, decode_format
from storage.replication.carry import carry_out, read_all
from storage.replication.notices import LEASE, Registration, decode_lease, encode_lease, log_name
from storage.replication.outbox import operations_of
from storage.replication.protocol import (
    ROOT,
    Create,
    Exchange,
    Follower,
    ReadAhead,
    ReignOver,
    TakeOverLost,
    Verdict,
    batches_after,
    take_over,
)
from storage.replication.reading import CopyMoved, bases_of, has_base_after, is_removed, rows_of
from storage.replication.record import FOLLOWED_KEY, Followed, Record, Settle, read_record, write_record
from storage.replication.segment import RUN_BYTES, SYNC, DamagedLog, decode_segment, is_segment
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from actors.settings import ReplicationConfig
    from storage.leveldb.store import LevelDBStore
    from storage.replication.bases import Base
    from storage.replication.carry import Objects
    from storage.replication.notices import Lease
    from storage.replication.protocol import Place, Steps
    from storage.replication.segment import Commit, Segment

log = logging.getLogger(__name__)
T = TypeVar("T")
#: Reads of the lease within its time, and the longest time between two. A renewal counts from when it is read.
READS = 10
IDLE_S = 2.0
#: The time between two reads after a clean seal, after which the primary releases the lease.
RELEASED_EVERY_S = 0.1
#: The time between two registrations in the lease.
REGISTER_EVERY_S = 10.0
#: Pause after the object store or the store has failed.
PAUSE_S = 1.0
TIDY_EVERY_S = 60.0
#: After a take-over that may lack commits, ids begin later by this much. The standby learns the time of the primary's
#: clock from leases and segments, which it reads some time after they were written, so the primary's clock may be further
#: ahead than it seems: by a second or two, unless all reads were late.
LATE_S = 10.0


@dataclass(frozen=True, slots=True)
class StandbyStatus:
    """The state of a standby, for operators."""

    mode: int
    """The mode of the last segment; 0 while it is not known."""
    epoch: int
    last: int | None
    """The last commit that it has; None until its base is complete."""
    caught_up: bool
    """True if the log had no further segment when it was last read, and nothing has failed since."""
    lag_commits: int
    """Commits that the primary reported as counted, and the standby lacks."""
    read_ms: int | None
    """When the log was last read without an error."""
    error: str
    """Why the last request failed; empty if it succeeded."""
    urls: tuple[str, ...]
    """Where clients reach the primary; empty if that is not known."""
    holder: str
    """The primary's machine; empty if it is not known."""
    automatic: bool
    """True if it takes over by itself once the lease is over."""


class _BuildAgain(Exception):
    """The log no longer continues the directory."""


class Standby:
    """One standby. ``run`` returns once the directory is a primary's."""

    def __init__(
        self,
        objects: Objects,
        directory: Path,
        settings: ReplicationConfig,
        open_store: Callable[[], Awaitable[LevelDBStore]],
        now_ms: Callable[[], int],
        *,
        holder: str = "",
        clock: Callable[[], float] = boot_s,
        hold: LeaseHold | None = None,
    ) -> None:
        """Args:
        open_store: opens the store in the directory.
        holder: the name of this machine, for people.
        clock: monotonic seconds.
        hold: of the process; also given to the primary that begins after this standby.
        """
        self._objects = objects
        self._hold = hold or LeaseHold()
        self._directory = directory
        self._settings = settings
        self._open_store = open_store
        self._now_ms = now_ms
        self._holder = holder
        self._clock = clock
        #: The time of day when ``clock`` was at 0, by this machine's time of day at the start.
        self._zero_ms = now_ms() - round(1000 * clock())
        self._record = Record("", standby=True)
        #: This standby's entry in the lease, until it ends or takes over.
        self._registration = Registration(secrets.token_hex(4), 0, holder)
        self._registered_s = -1e9
        self._place = ROOT
        #: The place in the store's own row.
        self._noted = ROOT
        self._time_ms = 0
        self._mode = 0
        #: A lower bound, from the lease and the segments, of how far the primary's clock is ahead of ``_steady_ms``.
        self._ahead_ms = 0
        self._ahead = ReadAhead()
        #: The run of the take-over under way, or of the one that has succeeded; empty if there is none.
        self._attempt = b""
        self._caught_up = False
        #: Bases of earlier epochs are before a gap.
        self._least_epoch = 0
        self._lease: Lease | None = None
        #: When this lease was first seen. A failed read begins the time again.
        self._lease_since_s = 0.0
        self._lease_read_s = -1e9
        #: When a clean seal was applied.
        self._handed_over_s = -1e9
        #: The time of the last search for a base after the end of the log.
        self._looked_s = -1e9
        self._tidied_s = clock()
        self._read_ms: int | None = None
        self._error = ""
        self._by_hand = False
        #: Callers of ``take_over`` that wait for the same attempt.
        self._askers = 0
        #: True if the attempt by hand, or the last one, has sent a seal.
        self._has_sealed = False
        self._wake = trio.Event()
        self._decided = trio.Event()
        self._refused = ""
        #: False once the attempt has sent a seal that may have taken effect.
        self._is_undone = True

    # --- for the daemon ---------------------------------------------------------------------------

    @property
    def status(self) -> StandbyStatus:
        """The current state."""
        lease, last = self._lease, self._place.commit if self._record.place != ROOT else None
        counted = 0 if lease is None else lease.counted or 0
        return StandbyStatus(
            mode=self._mode,
            epoch=self._place.epoch,
            last=last,
            caught_up=self._caught_up,
            lag_commits=max(0, counted - (last or 0)),
            read_ms=self._read_ms,
            error=self._error,
            urls=() if lease is None else lease.urls,
            holder="" if lease is None else lease.holder,
            automatic=self._caught_up and lease is not None and self._over_s(lease) < inf,
        )

    async def take_over(self, max_wait_s: float = inf) -> int:
        """Take over now, whether or not the primary is alive. Returns the epoch that has begun.

        Raises:
          TakeOverLost: it is not possible now, or not within ``max_wait_s``.
          OutcomeUnknown: after this time it is not known whether the log is sealed.
        """
        if not self._askers:
            self._by_hand, self._refused, self._decided = True, "", trio.Event()
            # An attempt whose clients have left may have sent its seal, and continues.
            self._has_sealed = self._has_sealed and bool(self._attempt)
            self._wake.set()
        self._askers += 1
        try:
            with trio.move_on_after(max_wait_s) as waiting:
                await self._decided.wait()
        finally:
            self._askers -= 1
            if not self._askers:
                self._by_hand = False  # clients that have given up must not depose the primary later
        if waiting.cancelled_caught:
            why = self._error or "it has not read the log to its end yet"
            if self._has_sealed:
                raise OutcomeUnknown(f"the log may be sealed: {why}", hint="ask the standby for its role")
            raise TakeOverLost(f"the standby cannot take over now: {why}", hint="nothing is taken over; try again")
        if self._refused and not self._is_undone:
            raise OutcomeUnknown(f"the log may be sealed: {self._refused}", hint="ask the standby for its role")
        if self._refused:
            raise TakeOverLost(self._refused, hint="plainsong replica status shows how far the standby is")
        return self._place.epoch

    async def run(self) -> None:
        """Follow the log until this process has taken over.

        Raises:
          StoreUnusable: the directory is not a standby's, or the primary allows none.
          DamagedLog: the log cannot be read.
        """
        await self._begin()
        while True:
            if self._record.place == ROOT:
                await self._clear()
            try:
                store = await self._open_store()
                try:
                    await self._follow(store)
                finally:
                    with trio.CancelScope(shield=True):
                        await store.aclose()
            except _BuildAgain:
                log.warning("the log does not continue this standby: it begins with a base")
                await self._note(replace(self._record, place=ROOT, base=None, until=0, ahead_ms=self._ahead_ms))
                self._caught_up = False
            except StoreError as error:
                await self._pause_after(error)
            else:
                break
        await self._note(self._record)
        self._decided.set()

    async def hold(self) -> None:
        """Renew the lease during a take-over, and after ``run`` until the primary on this directory has it.

        Otherwise a take-over or a start that lasts longer than the lease would be ended by another standby. Cancel it if
        ``run`` was cancelled.
        """
        for number in count(1):
            # Other standbys go by the time in the lease, which stays that of the last primary.
            period_s = self._settings.lease_s if self._lease is None else self._lease.period_ms / 1000
            await trio.sleep(min(self._lease_every_s, renews_every_s(period_s)))
            run = self._attempt
            if self._hold.has_begun:
                return
            has_lease = bool(run) and await self._hold.renew(self._objects, run, number, period_s)
            if not (has_lease or self._record.standby):
                return

    async def _begin(self) -> None:
        """Read the directory's record; note the log's store in a new one."""
        found = await in_thread(read_record, self._directory)
        if found is not None and not found.standby:
            raise StoreUnusable(f"{self._directory} is not a standby's")
        store = await self._patiently(self._store)
        if found is not None and found.store not in ("", store):
            raise StoreUnusable(
                f"{self._directory} follows a log other than that of replication.to", hint="name a new directory"
            )
        if found is None:
            await in_thread(_refuse_store, self._directory)
        await self._note(replace(found or self._record, store=store))
        self._ahead_ms = self._record.ahead_ms

    async def _clear(self) -> None:
        """Remove the store in the directory; finish a ``rejoin`` first, which keeps it. Raises StoreUnusable."""
        if self._record.aside:
            await in_thread(_keep_store, self._directory, self._record.aside)
            await self._note(replace(self._record, aside=""))
        await in_thread(empty_store, self._directory)

    async def _store(self) -> str | None:
        found = await self._objects.get(FORMAT_NAME)
        return None if found is None else decode_format(found.data)

    async def _note(self, record: Record) -> None:
        self._record = record
        with trio.CancelScope(shield=True):
            await in_thread(write_record, self._directory, record)

    # --- building ---------------------------------------------------------------------------------

    async def _build(self, store: LevelDBStore) -> None:
        """Write the newest base into an empty store."""
        base = await self._patiently(self._newest_base)

        async def take(commit: Commit) -> None:
            await store.apply(operations_of(commit))

        try:
            await rows_of(self._objects, base, take)
        except CopyMoved:
            raise _BuildAgain from None
        await self._note(
            replace(
                self._record, place=base.place, base=base.commit, base_ms=base.until_ms, until=base.until, time_ms=0
            )
        )
        log.info("the standby has a base", extra={"commit": base.commit, "bytes": base.size})

    async def _newest_base(self) -> Base | None:
        found = [base for base in await bases_of(self._objects) if base.place.epoch >= self._least_epoch]
        return found[-1] if found else None

    async def _patiently(self, read: Callable[[], Awaitable[T | None]]) -> T:
        """Read something until it exists."""
        while True:
            try:
                found = await read()
                self._error = "" if found is not None else "the primary has not started its copy yet"
                if found is not None:
                    return found
            except StoreError as error:
                self._failed(error.detail)
            await self._look_at_lease()
            await self._pause(PAUSE_S)

    async def _pause(self, seconds: float) -> None:
        with trio.move_on_after(seconds):
            await self._wake.wait()
        self._wake = trio.Event()
        if self._by_hand and self._record.place == ROOT:
            self._refuse("the standby has no complete base yet")

    async def _pause_after(self, error: StoreError) -> None:
        """Show that this standby applies nothing now, and pause. Raises as ``_look_at_lease``."""
        self._caught_up = False
        self._refuse(error.detail)
        if self._clock() >= self._lease_due_s:
            await self._look_at_lease()  # how far the primary is
        self._failed(error.detail)
        await self._pause(PAUSE_S)

    def _failed(self, why: str) -> None:
        if not self._error:
            log.warning("the log cannot be read", extra={"why": why})
        self._error = why

    # --- following --------------------------------------------------------------------------------

    async def _follow(self, store: LevelDBStore) -> None:
        """Apply the log; return once this process has taken over. Raises _BuildAgain."""
        if self._record.place == ROOT:
            await self._build(store)
        await self._continue(store)
        while True:
            try:
                if self._clock() >= self._lease_due_s:
                    await self._look_at_lease()
                if await self._apply_next(store):
                    continue
                if self._noted != self._place:
                    await store.apply([self._row()])
                    self._noted = self._place
                if await self._takes_over(store):
                    return
                if self._clock() - self._tidied_s >= TIDY_EVERY_S:
                    self._tidied_s = self._clock()
                    await store.tidy()
            except StoreError as error:
                # From the object store or the disk. Applying segments again changes nothing.
                await self._pause_after(error)
                await self._continue(store)
                continue
            until_due_s = max(0.0, self._lease_due_s - self._clock())
            await self._pause(min(self._settings.interval_ms / 1000, until_due_s))

    async def _continue(self, store: LevelDBStore) -> None:
        """Find the place of a store that is or was open."""
        while True:
            try:
                await store.recover()
                value = await store.get(Table.METADATA, FOLLOWED_KEY)
                break
            except StoreError as error:
                await self._pause_after(error)
        found = Followed.of(self._record, value)
        self._place = self._noted = found.place
        self._time_ms, self._ahead_ms = found.time_ms, max(self._ahead_ms, found.ahead_ms)
        self._mode = found.mode or await self._patiently(partial(self._mode_before, found.place))

    async def _mode_before(self, place: Place) -> int:
        """Return the mode of the last segment before a base; 0 if it is not known. Raises StoreError, DamagedLog."""
        # A primary whose base begins an epoch has not said its mode.
        found = await self._objects.get(log_name(place.epoch, place.number - 1)) if place.number > 1 else None
        return 0 if found is None or not is_segment(found.data) else (await in_thread(decode_segment, found.data)).mode

    def _row(self) -> Put:
        followed = Followed(self._place, self._time_ms, self._mode, self._ahead_ms)
        return put_one(Table.METADATA, FOLLOWED_KEY, followed.encode())

    async def _apply_next(self, store: LevelDBStore) -> bool:
        """Apply the next objects of the log; False if there are none. Raises StoreError, DamagedLog, _BuildAgain."""
        place = self._place
        objects = await self._read_ahead(place)
        self._read_ms = self._now_ms()
        if objects[0] is None:
            # Without a lease nothing but a later base shows that there was more.
            is_due = self._lease is None and self._clock() - self._looked_s >= LOOK_EVERY_S
            if self._lacking or is_due:
                self._looked_s = self._clock()
                if await is_removed(self._objects, place):
                    raise _BuildAgain
            self._caught_up = (place.commit or 0) >= self._record.until
            if self._lacking:
                self._failed(self._lacking)
            else:
                self._error = ""
            return False
        batches = batches_after(place, objects)
        while (batch := await in_thread(lambda: next(batches, None))) is not None:
            if batch.place.commit is None:
                self._least_epoch = batch.place.epoch
                raise _BuildAgain  # commits are missing here; a base after the gap has them
            if batch.segments:
                await self._apply(store, batch.segments)
            self._place = batch.place
            if batch.place.clean:
                self._handed_over_s = self._clock()
        self._error = ""
        return True

    async def _read_ahead(self, place: Place) -> Sequence[bytes | None]:
        """Read the next objects of an epoch, at least one; None for each that was missing. Raises StoreError."""
        ahead, self._ahead = self._ahead, ReadAhead()  # if this read fails, the next one reads a single object
        found = await read_all(self._objects.get, ahead.names(place))
        objects = [None if each is None else each.data for each in found]
        ahead.took(objects)
        self._ahead = ahead
        return objects

    @property
    def _lacking(self) -> str:
        """The error for a log that ends before a commit that an earlier lease reported as counted; empty if it does not."""
        counted, last = 0 if self._lease is None else self._lease.counted or 0, self._place.commit or 0
        if counted <= last:
            return ""
        return f"objects are missing: the log ends at commit {last}, but commit {counted} was in it before"

    async def _apply(self, store: LevelDBStore, segments: Sequence[Segment]) -> None:
        """Apply segments as one batch, and note the place before them.

        The place follows only with the next batch: what the store removes from sealed volumes is durable after the
        commit, and the place must not be ahead of it.
        """
        operations = [each for segment in segments for commit in segment.commits for each in operations_of(commit)]
        times = [segment.last_ms for segment in segments if segment.commits]
        # Stored with the segments: a segment that is read again later shows a smaller difference between the clocks.
        self._ahead_ms = max(self._ahead_ms, *(time_ms - self._steady_ms for time_ms in times), 0)
        await store.apply([*operations, self._row()])
        self._noted = self._place
        self._mode = segments[-1].mode
        if times:
            self._time_ms = times[-1]

    @property
    def _steady_ms(self) -> int:
        """The time of day, without the steps of this machine's clock since the start."""
        return self._zero_ms + round(1000 * self._clock())

    # --- the primary's lease ----------------------------------------------------------------------

    @property
    def _lease_every_s(self) -> float:
        return min((self._settings.lease_s or IDLE_S * READS) / READS, IDLE_S)

    @property
    def _lease_due_s(self) -> float:
        """When to read the lease next: regularly, when its time is over, and often while the primary hands over."""
        read_s, every_s = self._lease_read_s, self._lease_every_s
        if self._clock() - self._handed_over_s < every_s:
            every_s = RELEASED_EVERY_S if read_s > self._handed_over_s else 0.0
        over_s = inf if self._lease is None else self._over_s(self._lease)
        return min(read_s + every_s, over_s) if read_s < over_s else read_s + every_s

    async def _look_at_lease(self) -> None:
        """Read the lease. Raises StoreUnusable: the primary allows no standby."""
        self._lease_read_s = self._clock()
        if not self._objects.can_exchange:
            return
        try:
            found = await self._objects.get(LEASE)
            lease = None if found is None else decode_lease(found.data)
        except (StoreError, DamagedLog) as error:
            # Contents that are no lease may be those of one answer only, such as an error page with status 200.
            self._lease_since_s = self._clock()
            self._failed(error.detail)
            return
        if lease is not None and not lease.allows_standby:
            raise StoreUnusable(
                "the primary allows no standby", hint='set replication.standby = "allowed" in its settings first'
            )
        # Standbys that register change the lease too.
        if lease is None or self._lease is None or lease.sign != self._lease.sign:
            self._lease_since_s = self._clock()
        self._lease = lease
        if lease is not None and lease.clock_ms is not None:
            self._ahead_ms = max(self._ahead_ms, lease.clock_ms - self._steady_ms)
        if found is not None and lease is not None:
            await self._register(lease, found.etag)

    async def _register(self, lease: Lease, etag: str) -> None:
        """Note in the lease that this standby can take over, so that the primary keeps its terms."""
        if not self._caught_up or lease.released or self._clock() - self._registered_s < REGISTER_EVERY_S:
            return
        one = self._registration = replace(
            self._registration, beat=self._registration.beat + 1, commit=self._place.commit or 0
        )
        with trio.move_on_after(IDLE_S):
            try:
                # If the lease has changed since, the next look registers.
                if await self._objects.exchange(LEASE, encode_lease(lease.registered(one)), etag) is Verdict.DONE:
                    self._registered_s = self._clock()
            except StoreError as error:
                self._failed(error.detail)

    def _reason(self) -> str:
        """Return why to take over now; empty if there is no reason."""
        lease = self._lease
        if self._by_hand:
            return "by hand"
        if lease is None or not self._settings.lease_s:
            return ""
        if lease.released and lease.run not in self._record.runs:
            return "switch"
        # At the beginning of the last read: its answer may be older than it seems.
        return "lease" if self._lease_read_s >= self._over_s(lease) else ""

    def _over_s(self, lease: Lease) -> float:
        """Return when to take over without a renewal; infinity if only by hand."""
        if not lease.guarded or not lease.period_ms or not self._settings.lease_s:
            return inf  # the primary may acknowledge without a lease
        if lease.epoch < self._place.epoch and self._mode != SYNC:
            return inf  # the lease went back: it does not have the terms of the last primary
        return self._lease_since_s + max(self._settings.lease_s, lease.period_ms / 1000)

    # --- the take-over ----------------------------------------------------------------------------

    async def _takes_over(self, store: LevelDBStore) -> bool:
        """Take over if there is a reason. Raises _BuildAgain, StoreError."""
        reason = self._reason()
        if not reason:
            return False
        if not self._caught_up:
            self._refuse("the standby's store is not consistent yet")
            return False
        if lacking := self._lacking:
            self._refuse(lacking)
            return False
        if await is_removed(self._objects, self._place):
            raise _BuildAgain
        self._attempt = secrets.token_bytes(RUN_BYTES)
        try:
            return await self._try(store, self._attempt, reason)
        finally:
            if self._record.standby:
                self._attempt = b""

    async def _try(self, store: LevelDBStore, run: bytes, reason: str) -> bool:
        """Take over, if no other process does. Raises _BuildAgain, StoreError."""
        before = self._place
        log.warning("taking over", extra={"reason": reason, "epoch": before.epoch, "commit": before.commit})
        lease, reached = self._lease, before
        seen = None if reason == "by hand" else lease

        async def apply(segments: Sequence[Segment]) -> None:
            nonlocal reached
            await self._apply(store, segments)
            reached = replace(before, epoch=segments[-1].epoch, number=segments[-1].number + 1)

        attempt = take_over(
            run,
            before,
            known=before.epoch,
            leased=self._objects.can_exchange,
            holder=self._holder,
            follower=Follower(seen, self._registration.id),
        )
        try:
            steps = self._noting_seal(attempt, needs_client=seen is None)
            objects = self._hold.excluded(self._objects, self._settings.lease_s)
            place = await carry_out(objects, steps, apply, failed=self._failed)
        except (TakeOverLost, ReignOver) as error:
            log.warning("the take-over has failed", extra={"why": error.detail})
            self._lease, self._is_undone = None, True
            self._refuse(error.detail)
            await self._continue(store)
            return False
        except StoreError as error:
            # Each attempt keeps the primary from its lease, so the client decides whether there is another one.
            self._refuse(error.detail)
            raise
        if await has_base_after(self._objects, reached, below=place.epoch):
            # The number was free because retention had removed its segment: the seal there ends nothing.
            raise _BuildAgain
        is_whole = place.clean or self._mode == SYNC
        # By hand, a primary that still serves acknowledges until it next looks at the log.
        late_s = LATE_S + LOOK_EVERY_S if reason == "by hand" else LATE_S
        # After its last renewal a primary acknowledges for the time of its lease.
        late_ms = max(round(1000 * late_s), 0 if lease is None else lease.period_ms)
        # The rules are applied by the clock as it is now, or is after a restart.
        now_ms, cut_ms = self._now_ms(), self._time_ms
        ahead_ms = max(0, self._ahead_ms + self._steady_ms - now_ms)
        # The last segment shows more than ``ahead_ms`` if this clock has been set back while no standby ran.
        settle = None if is_whole else Settle(cut_ms, ahead_ms + late_ms, max(now_ms + ahead_ms, cut_ms) + late_ms)
        event = {"epoch": place.epoch, "commit": place.commit, "reason": reason, "whole": is_whole}
        self._place = place
        taken = replace(
            self._record.at(place, run), standby=False, until=0, shift=None, settle=settle, ahead_ms=0, time_ms=0
        )
        self._record = taken.noted(
            "replication.takeover", self._now_ms(), {**event, "from": self.status.holder or None}
        )
        return True

    def _noting_seal(self, attempt: Steps[Place], *, needs_client: bool) -> Steps[Place]:
        """Make a take-over; one by hand stops before its first seal if no client waits for it any more.

        The object store may have been unavailable for hours since the last client gave up.

        Raises:
          TakeOverLost: no client waits.
        """
        answer: object = None
        self._has_sealed, self._is_undone = False, True
        while True:
            try:
                request = attempt.send(answer)
            except StopIteration as done:
                place: Place = done.value
                return place
            if isinstance(request, Create | Exchange) and not self._has_sealed:
                if needs_client and not self._askers:
                    raise TakeOverLost("the client stopped waiting for the take-over")
                self._has_sealed = request.name != LEASE
            answer = yield request
            if self._has_sealed and answer in (Verdict.DONE, Verdict.UNKNOWN):
                self._is_undone = False

    def _refuse(self, why: str) -> None:
        if self._by_hand:
            self._by_hand, self._refused = False, why
            self._decided.set()


async def settle_alone(store: LevelDBStore, record: Record, now_ms: Callable[[], int], lease_s: float) -> None:
    """Apply the rules of a restore to a store that continues without its log: commits after its last one may be missing.

    Args:
      store: a standby's, or one that took over and has not applied them yet.
      record: of its directory.
      lease_s: for how long the primary may have acknowledged after its last renewal.
    Raises:
      StoreUnusable: a standby that has not reached a consistent state.
      StoreError.
    """
    what = record.settle
    if record.standby:
        value = await store.get(Table.METADATA, FOLLOWED_KEY)
        found = Followed.of(record, value)
        commit = found.place.commit or 0
        if commit < record.until:
            raise StoreUnusable(
                f"the standby has commit {commit}, and its store is consistent only from commit {record.until} on",
                hint="start it as a standby until it has caught up, or restore the copy",
            )
        late_ms = round(1000 * max(LATE_S, lease_s))
        what = Settle(found.time_ms, max(found.ahead_ms, record.ahead_ms) + late_ms, found.time_ms + late_ms)
    if what is not None:
        await settle(store, what, now_ms())


def _keep_store(directory: Path, aside: str) -> None:
    home = DataDirectory.open(directory, address="a standby that keeps the store of a deposed primary")
    try:
        set_aside(directory, aside)
    finally:
        home.close()


def _refuse_store(directory: Path) -> None:
    """Raise StoreUnusable if a directory that is to become a standby's has a store already."""
    home = DataDirectory.open(directory, address="a standby")
    home.close()
    if not home.is_new:
        raise StoreUnusable(
            f"{directory} has a store without a copy: it cannot become a standby",
            hint="name a new directory, or remove replication.role",
        )
