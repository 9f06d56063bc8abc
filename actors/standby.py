"""A standby: builds its directory from the newest base of a log, follows the log, and takes over.

    build     the newest base, into an empty directory
    follow    segments, as they are stored (``actors.followed_log``)
    take over end the primary's epoch with a seal, read the log to that seal, and make the directory a primary's; by hand
              (``actors.take_over``), or by the primary's lease (``actors.lease_watch``)

If it is killed, the next start continues, or builds again if the base was not complete. If its next segment was removed,
it builds again. After a take-over the process starts as any primary does.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, replace
from itertools import count
from math import inf
from typing import TYPE_CHECKING, TypeVar

import trio

from actors.followed_log import BuildAgain, FollowedLog
from actors.last_error import LastError
from actors.lease import boot_s
from actors.lease_hold import LeaseHold, renews_every_s
from actors.lease_watch import LeaseWatch
from actors.log_writer import LOOK_EVERY_S
from actors.settling import LATE_S
from actors.standby_clock import StandbyClock
from actors.take_over import TakeOver
from storage.base import StoreError, StoreUnusable
from storage.directory import DataDirectory, empty_store, set_aside
from storage.replication.carry import carry_out
from storage.replication.protocol import ROOT, Follower, ReignOver, TakeOverLost, take_over
from storage.replication.reading import has_base_after, is_removed
from storage.replication.record import Record, RecordFile, Settle
from storage.replication.segment import RUN_BYTES, SYNC
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from actors.settings import ReplicationConfig
    from storage.leveldb.store import LevelDBStore
    from storage.replication.carry import Objects
    from storage.replication.notices import Lease
    from storage.replication.segment import Segment

log = logging.getLogger(__name__)
T = TypeVar("T")
#: Pause after the object store or the store has failed.
PAUSE_S = 1.0
TIDY_EVERY_S = 60.0


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
    error: str
    """Why the last request failed; empty if it succeeded."""
    urls: tuple[str, ...]
    """Where clients reach the primary; empty if that is not known."""
    holder: str
    """The primary's machine; empty if it is not known."""
    automatic: bool
    """True if it takes over by itself once the lease is over."""


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
        self._settings = settings
        self._open_store = open_store
        self._holder = holder
        self._file = RecordFile(directory)
        self._file.record = Record("", standby=True)
        self._clock = StandbyClock(now_ms, clock)
        self._error = LastError(log, "the log cannot be read")
        self._log = FollowedLog(objects, self._file, self._clock, self._error)
        self._watch = LeaseWatch(objects, self._log, self._clock, self._error, settings.lease_s, holder)
        self._take_over = TakeOver()
        self._tidied_s = clock()

    # --- for the daemon ---------------------------------------------------------------------------

    @property
    def status(self) -> StandbyStatus:
        """The current state."""
        lease, last = self._watch.lease, self._log.place.commit if self._file.record.place != ROOT else None
        counted = 0 if lease is None else lease.counted or 0
        return StandbyStatus(
            mode=self._log.mode,
            epoch=self._log.place.epoch,
            last=last,
            caught_up=self._log.caught_up,
            lag_commits=max(0, counted - (last or 0)),
            error=self._error.why,
            urls=() if lease is None else lease.urls,
            holder="" if lease is None else lease.holder,
            automatic=self._watch.is_automatic,
        )

    async def take_over(self, max_wait_s: float = inf) -> int:
        """Take over now, whether or not the primary is alive. Returns the epoch that has begun.

        Raises:
          TakeOverLost: it is not possible now, or not within ``max_wait_s``.
          OutcomeUnknown: after this time it is not known whether the log is sealed.
        """
        await self._take_over.ask(max_wait_s, self._error)
        return self._log.place.epoch

    async def run(self) -> None:
        """Follow the log until this process has taken over.

        Raises:
          StoreUnusable: the directory is not a standby's, or the primary allows none.
          DamagedLog: the log cannot be read.
        """
        await self._begin()
        taken: Record | None = None
        while taken is None:
            if self._file.record.place == ROOT:
                await self._clear()
            try:
                store = await self._open_store()
                try:
                    taken = await self._follow(store)
                finally:
                    with trio.CancelScope(shield=True):
                        await store.aclose()
            except BuildAgain:
                log.warning("the log does not continue this standby: it begins with a base")
                await self._file.change(
                    lambda record: replace(record, place=ROOT, base=None, until=0, ahead_ms=self._clock.ahead_ms)
                )
                self._log.caught_up = False
            except StoreError as error:
                await self._pause_after(error)
        record = taken
        await self._file.change(lambda _: record)
        self._take_over.succeeded()

    async def hold(self) -> None:
        """Renew the lease during a take-over, and after ``run`` until the primary on this directory has it.

        Otherwise a take-over or a start that lasts longer than the lease would be ended by another standby. Cancel it if
        ``run`` was cancelled.
        """
        for number in count(1):
            # Other standbys go by the time in the lease, which stays that of the last primary.
            lease = self._watch.lease
            period_s = self._settings.lease_s if lease is None else lease.period_ms / 1000
            await trio.sleep(min(self._watch.every_s, renews_every_s(period_s)))
            run = self._take_over.run
            if self._hold.has_begun:
                return
            has_lease = bool(run) and await self._hold.renew(self._objects, run, number, period_s)
            if not (has_lease or self._file.record.standby):
                return

    async def _begin(self) -> None:
        """Read the directory's record; note the log's store in a new one."""
        directory, found = self._file.directory, await self._file.read()
        if found is not None and not found.standby:
            raise StoreUnusable(f"{directory} is not a standby's")
        store = await self._patiently(self._log.store_id)
        if found is not None and found.store not in ("", store):
            raise StoreUnusable(
                f"{directory} follows a log other than that of replication.to", hint="name a new directory"
            )
        if found is None:
            await in_thread(_refuse_store, directory)
        await self._file.change(lambda new: replace(found or new, store=store))
        self._clock.ahead_ms = self._file.record.ahead_ms

    async def _clear(self) -> None:
        """Remove the store in the directory; finish a ``rejoin`` first, which keeps it. Raises StoreUnusable."""
        if aside := self._file.record.aside:
            await in_thread(_keep_store, self._file.directory, aside)
            await self._file.change(lambda record: replace(record, aside=""))
        await in_thread(empty_store, self._file.directory)

    # --- following --------------------------------------------------------------------------------

    async def _follow(self, store: LevelDBStore) -> Record:
        """Apply the log; return the directory's record as a primary's once this process has taken over.

        Raises:
          BuildAgain, StoreUnusable, DamagedLog.
        """
        if self._file.record.place == ROOT:
            base = await self._patiently(self._log.newest_base)
            await self._log.build(store, base)
            log.info("the standby has a base", extra={"commit": base.commit, "bytes": base.size})
        await self._continue(store)
        while True:
            try:
                if self._clock.now_s() >= self._watch.due_s:
                    await self._watch.look()
                if await self._log.apply_next(store, self._watch.lease):
                    continue
                await self._log.note_place(store)
                if (taken := await self._takes_over(store)) is not None:
                    return taken
                if self._clock.now_s() - self._tidied_s >= TIDY_EVERY_S:
                    self._tidied_s = self._clock.now_s()
                    await store.tidy()
            except StoreError as error:
                # From the object store or the disk. Applying segments again changes nothing.
                await self._pause_after(error)
                await self._continue(store)
                continue
            until_due_s = max(0.0, self._watch.due_s - self._clock.now_s())
            await self._pause(min(self._settings.interval_ms / 1000, until_due_s))

    async def _continue(self, store: LevelDBStore) -> None:
        """Find the place of a store that is or was open."""
        while True:
            try:
                mode = await self._log.recover(store)
                break
            except StoreError as error:
                await self._pause_after(error)
        self._log.mode = mode or await self._patiently(self._log.mode_before)

    async def _patiently(self, read: Callable[[], Awaitable[T | None]]) -> T:
        """Read something until it exists."""
        while True:
            try:
                found = await read()
                self._error.why = "" if found is not None else "the primary has not started its copy yet"
                if found is not None:
                    return found
            except StoreError as error:
                self._error.failed(error.detail)
            await self._watch.look()
            await self._pause(PAUSE_S)

    async def _pause_after(self, error: StoreError) -> None:
        """Show that this standby applies nothing now, and pause. Raises as ``LeaseWatch.look``."""
        self._log.caught_up = False
        self._take_over.refuse(error.detail)
        if self._clock.now_s() >= self._watch.due_s:
            await self._watch.look()  # how far the primary is
        self._error.failed(error.detail)
        await self._pause(PAUSE_S)

    async def _pause(self, seconds: float) -> None:
        await self._take_over.pause(seconds)
        if self._file.record.place == ROOT:
            self._take_over.refuse("the standby has no complete base yet")

    # --- the take-over ----------------------------------------------------------------------------

    async def _takes_over(self, store: LevelDBStore) -> Record | None:
        """Take over if there is a reason. Returns the directory's record as a primary's; None: it has not taken over.

        Raises:
          BuildAgain, StoreError.
        """
        reason = "by hand" if self._take_over.is_wanted else self._watch.reason(self._file.record.runs)
        if not reason:
            return None
        if not self._log.caught_up:
            self._take_over.refuse("the standby's store is not consistent yet")
            return None
        if lacking := self._log.lacking(self._watch.lease):
            self._take_over.refuse(lacking)
            return None
        if await is_removed(self._objects, self._log.place):
            raise BuildAgain
        taken: Record | None = None
        self._take_over.run = secrets.token_bytes(RUN_BYTES)
        try:
            taken = await self._try(store, self._take_over.run, reason)
        finally:
            if taken is None:
                self._take_over.run = b""
        return taken

    async def _try(self, store: LevelDBStore, run: bytes, reason: str) -> Record | None:
        """Take over, if no other process does. Returns and raises as ``_takes_over``."""
        before, lease = self._log.place, self._watch.lease
        log.warning("taking over", extra={"reason": reason, "epoch": before.epoch, "commit": before.commit})
        reached = before
        seen = None if reason == "by hand" else lease

        async def apply(segments: Sequence[Segment]) -> None:
            nonlocal reached
            await self._log.apply(store, segments)
            reached = replace(before, epoch=segments[-1].epoch, number=segments[-1].number + 1)

        attempt = take_over(
            run,
            before,
            known=before.epoch,
            leased=self._objects.can_exchange,
            holder=self._holder,
            follower=Follower(seen, self._watch.registration.id),
        )
        try:
            steps = self._take_over.noting_seal(attempt, needs_client=seen is None)
            objects = self._hold.excluded(self._objects, self._settings.lease_s)
            place = await carry_out(objects, steps, apply, failed=self._error.failed)
        except (TakeOverLost, ReignOver) as error:
            log.warning("the take-over has failed", extra={"why": error.detail})
            self._watch.lease = None
            self._take_over.lost(error.detail)
            await self._continue(store)
            return None
        except StoreError as error:
            # Each attempt keeps the primary from its lease, so the client decides whether there is another one.
            self._take_over.refuse(error.detail)
            raise
        if await has_base_after(self._objects, reached, below=place.epoch):
            # The number was free because retention had removed its segment: the seal there ends nothing.
            raise BuildAgain
        self._log.place = place
        settle = None if place.clean or self._log.mode == SYNC else self._settle(reason, lease)
        event = {"epoch": place.epoch, "commit": place.commit, "reason": reason, "whole": settle is None}
        taken = replace(
            self._file.record.at(place, run), standby=False, until=0, shift=None, settle=settle, ahead_ms=0, time_ms=0
        )
        holder = None if lease is None else lease.holder or None
        return taken.noted("replication.takeover", self._clock.now_ms(), {**event, "from": holder})

    def _settle(self, reason: str, lease: Lease | None) -> Settle:
        """Return the facts for the rules of a restore, after a take-over that may lack commits."""
        # By hand, a primary that still serves acknowledges until it next looks at the log.
        late_s = LATE_S + LOOK_EVERY_S if reason == "by hand" else LATE_S
        # After its last renewal a primary acknowledges for the time of its lease.
        late_ms = max(round(1000 * late_s), 0 if lease is None else lease.period_ms)
        # The rules are applied by the clock as it is now, or is after a restart.
        now_ms, cut_ms = self._clock.now_ms(), self._log.time_ms
        ahead_ms = max(0, self._clock.ahead_ms + self._clock.steady_ms - now_ms)
        # The last segment shows more than ``ahead_ms`` if this clock has been set back while no standby ran.
        return Settle(cut_ms, ahead_ms + late_ms, max(now_ms + ahead_ms, cut_ms) + late_ms)


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
