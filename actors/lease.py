"""The lease of a primary: its heartbeat in the object store, for standbys and for itself.

The lease does not decide who is the primary: the seal does. The lease shows a standby that the primary is alive, and
shows the primary that no standby can have taken over yet: a standby waits for the period of the lease after it has seen
a renewal, and the primary counts that time from before the renewal. So a primary that was frozen, or cut off, stops
acknowledging before a standby takes over.

A primary without a standby need not stop. A standby registers in the lease; the primary then keeps these terms, and
only after that writes a lease that is ``guarded``. A standby takes over by itself only from such a lease. The primary
gives up the terms once it has stored a lease that is not guarded, which it writes when no registration is left. Each of
these writes is conditional on the lease that was read, so no take-over falls in between.

A standby that has taken the lease may be frozen before it seals the log. After a time the primary takes the lease back.
It relies on that lease only once it has stored a segment that it began afterwards: if the standby has sealed before that
segment, the reign is over; later, the standby finds that it no longer has the lease. See ``protocol.take_over``.

Of two writes of the lease at the same moment some servers accept both, so another process's write may set it back to an
earlier one. Since the lease decides nothing, the primary then looks at the log: if that has everything that was stored
and no seal, the primary writes the lease again. ``lease_hold`` renews the lease of a process that does not serve yet.
"""

from __future__ import annotations

import logging
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from actors.last_error import LastError
from actors.lease_hold import IDLE_S, LeaseHold, renews_every_s
from storage.base import StoreError
from storage.replication.carry import carry_out
from storage.replication.notices import Lease
from storage.replication.protocol import LeaseWentBack, Terms, renew
from storage.replication.segment import DamagedLog

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from storage.replication.carry import Objects
    from storage.replication.notices import Registration

log = logging.getLogger(__name__)
#: The primary replaces the lease of a series of rivals after this many times the period that a single one gets. Otherwise
#: a standby that has no right to write the seal would keep the primary from its lease forever.
RIVALS = 3
#: A registration that has not changed for this time is removed; standbys renew theirs every ten seconds.
EXPIRES_S = 60.0


def boot_s() -> float:
    """Return the seconds since the machine was started, including those in which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class _Rivals:
    """The processes that have tried to take over from a primary since its last renewal, as the lease shows them."""

    def __init__(self) -> None:
        self.last: Lease | None = None
        """The lease of the last one; None if there was none."""
        #: When that lease was first seen, and when the first rival was.
        self._since_s = 0.0
        self._first_s = 0.0

    def note(self, found: Lease, now_s: float) -> None:
        """Note the lease of a rival."""
        # Standbys that register change its lease too.
        if self.last is not None and found.sign == self.last.sign:
            return
        if self.last is None or found.run != self.last.run:
            log.warning("another process tries to take over", extra={"holder": found.holder, "epoch": found.epoch})
        if self.last is None:
            self._first_s = now_s
        self.last, self._since_s = found, now_s

    def is_silent(self, now_s: float, wait_s: float) -> bool:
        """True if the lease has not changed for ``wait_s``."""
        return now_s - self._since_s >= wait_s

    def over(self, now_s: float, wait_s: float) -> Lease | None:
        """Return the lease that may be replaced, because the time of the rivals is over; None if there is none."""
        is_over = self.is_silent(now_s, wait_s) or now_s - self._first_s >= RIVALS * wait_s
        return self.last if is_over else None


class _Standbys:
    """The standbys in the lease of a primary, and the terms that it keeps for them."""

    def __init__(self, now_s: float, *, is_costly: bool) -> None:
        """Args:
        is_costly: a guarded lease can bind this primary, which then stops when the lease is over.
        """
        self.is_costly = is_costly
        self.is_guarded = is_costly
        """True while this primary keeps the terms. That begins before it writes a guarded lease, and ends once it has stored
        an unguarded one."""
        #: How long each registration has been unchanged, counting only the time in which the lease could be read.
        self._unchanged_s: dict[Registration, float] = {}
        #: When the last renewal began; None if it failed.
        self._renewed_s: float | None = None
        #: The time since which no standby has been registered; None while one is.
        self._alone_since_s: float | None = now_s

    def renewed(self, lease: Lease, now_s: float) -> bool:
        """Note a renewal that began at ``now_s``. True if the lease may be guarded from now on: renew it at once."""
        passed_s = 0.0 if self._renewed_s is None else now_s - self._renewed_s
        self._renewed_s = now_s
        before = self._unchanged_s
        self._unchanged_s = {each: before[each] + passed_s if each in before else 0.0 for each in lease.standbys}
        if lease.standbys:
            self._alone_since_s = None
        elif self._alone_since_s is None:
            self._alone_since_s = now_s
        self.is_guarded = self.is_costly and (lease.guarded or bool(lease.standbys))
        return self.is_guarded and not lease.guarded

    def missed(self) -> None:
        """Note that a renewal has failed."""
        self._renewed_s = None

    @property
    def gone(self) -> frozenset[Registration]:
        """The registrations of standbys that have ended."""
        return frozenset(each for each, unchanged_s in self._unchanged_s.items() if unchanged_s >= EXPIRES_S)

    def alone_s(self, now_s: float) -> float:
        """Return for how long no standby has been registered."""
        return 0.0 if self._alone_since_s is None else now_s - self._alone_since_s


class LeaseKeeper:
    """Renews the lease of one primary. ``holding`` while it begins, then ``began``, then ``run``."""

    def __init__(
        self,
        objects: Objects,
        *,
        period_s: float,
        allows_standby: bool,
        is_needed: bool = True,
        counted: Callable[[], int | None],
        now_ms: Callable[[], int],
        clock: Callable[[], float] = boot_s,
        hold: LeaseHold | None = None,
    ) -> None:
        """Args:
        period_s: the period of the lease; 0: standbys take over only by hand.
        allows_standby: False: no standby registers, and the primary serves without a valid lease.
        is_needed: False: each commit counts in the log before it is acknowledged, so the seal alone protects commits.
        counted: returns the last commit that counts.
        now_ms: the wall clock, from which ids come.
        hold: of the standby that has taken over in this process; None if there was none.
        """
        self._objects = objects
        self.hold = hold or LeaseHold()
        """Renews the lease while this primary begins."""
        self._period_s = period_s
        self._is_needed = is_needed
        self._standbys = _Standbys(clock(), is_costly=objects.can_exchange and period_s > 0 and allows_standby)
        self._every_s = renews_every_s(period_s)
        self._counted = counted
        self._now_ms = now_ms
        self._clock = clock
        #: Called while another process tries to take over.
        self.on_rival: Callable[[], object] = lambda: None
        #: Raises BucketWentBack if the log lacks the last object that was stored, ReignOver if it has another one after
        #: that, StoreError if it does not answer. None: a lease that went back ends this primary.
        self.check_log: Callable[[], Awaitable[object]] | None = None
        #: URLs of the primary; set once it serves.
        self.urls: tuple[str, ...] = ()
        self._lease = Lease(0, b"", period_ms=round(1000 * period_s), allows_standby=allows_standby)
        #: ``renewed`` of the last attempt; it only grows, so that standbys see each renewal.
        self._number = 0
        self._valid_until_s = 0.0
        self._rivals = _Rivals()
        self._is_over = False
        #: True from when the lease in the object store is older than this process wrote it, until it is written again.
        self._went_back = False
        #: True after that if the log was checked, for one renewal.
        self._is_in_log = False
        self._error = LastError(log, "the lease cannot be renewed")
        self._wake = trio.Event()

    @property
    def clock_s(self) -> float:
        """The current time of the lease's clock."""
        return self._clock()

    @property
    def is_current(self) -> bool:
        """True if no other process can have taken over by itself: polls show what was acknowledged last."""
        is_open = not (self._is_over or self._went_back)
        return is_open and (not self._standbys.is_guarded or self._clock() < self._valid_until_s)

    @property
    def holds(self) -> bool:
        """True if a durable commit may be acknowledged (with ``sync``, one that counts)."""
        return self.is_current if self._is_needed else not (self._is_over or self._went_back)

    @property
    def terms(self) -> Terms:
        """The terms that the next lease states for standbys."""
        return Terms(
            self._lease.period_ms,
            self._lease.allows_standby,
            is_free=not self._standbys.is_costly,
            is_kept=self._standbys.is_guarded,
            gone=self._standbys.gone,
            clock_ms=self._now_ms(),
        )

    @property
    def standbys(self) -> tuple[Registration, ...]:
        """The registered standbys."""
        return self._lease.standbys

    @property
    def is_automatic(self) -> bool:
        """True if a standby takes over by itself once the lease is over."""
        return bool(self._lease.standbys) and self._lease.guarded and self._period_s > 0

    @property
    def alone_s(self) -> float:
        """Seconds for which no standby has been registered."""
        return self._standbys.alone_s(self._clock())

    def close(self) -> None:
        """Note that another process has taken over: nothing more is acknowledged."""
        self._is_over = True

    def began(self, epoch: int, run: bytes, holder: str, since_s: float) -> None:
        """Note a new epoch, whose lease was written after ``since_s``."""
        self._lease = replace(self._lease, epoch=epoch, run=run, holder=holder, renewed=0)
        self._rivals.last = None
        self._valid_until_s = since_s + self._period_s
        self.hold.has_begun = True

    def serve(self, urls: tuple[str, ...]) -> None:
        """Write the primary's URLs into the lease."""
        self.urls = urls
        self._wake.set()

    @asynccontextmanager
    async def holding(self, run: bytes) -> AsyncIterator[None]:
        """Renew the lease of a run from when it has taken it: within this block it takes over, and begins."""
        failed: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._hold, run)
            try:
                yield
            except Exception as error:  # noqa: BLE001  # raised again, outside of the nursery's group
                failed = error
            nursery.cancel_scope.cancel()
        if failed is not None:
            raise failed

    async def _hold(self, run: bytes) -> None:
        while self._objects.can_exchange:
            await trio.sleep(self._every_s)
            self._number += 1
            await self.hold.renew(self._objects, run, self._number, self._period_s)

    async def run(self, look: Callable[[], Awaitable[object]], secure: Callable[[], Awaitable[object]]) -> None:
        """Renew, until cancelled.

        Args:
          look: raises if another process has ended the epoch.
          secure: stores a segment that begins now, and returns once it and all before it are stored; raises if another
            process has ended the epoch.
        Raises:
          BucketWentBack: the lease is missing; or it is older than the one last written, and the log is not whole.
        """
        while self._objects.can_exchange:
            await self._renew(look, secure)
            with trio.move_on_after(self._every_s):
                await self._wake.wait()
            self._wake = trio.Event()

    async def _renew(self, look: Callable[[], Awaitable[object]], secure: Callable[[], Awaitable[object]]) -> None:
        begun_s, held = self._clock(), self._lease
        self._number += 1
        wait_s = max(self._period_s, IDLE_S)
        is_silent, over = self._rivals.is_silent(begun_s, wait_s), self._rivals.over(begun_s, wait_s)
        if over is not None:
            await look()  # the rival may have sealed the log since the last look, and then the lease stays its own
        epoch = held.epoch if over is None else max(held.epoch, over.epoch)
        wanted = replace(held, epoch=epoch, urls=self.urls, renewed=self._number, counted=self._counted())
        # A rival that hangs in its take-over renews the lease all the time.
        is_in_log, self._is_in_log = self._is_in_log, False
        steps = renew(wanted, held.renewed, self.terms, over, is_silent=is_silent, is_in_log=is_in_log)
        found: Lease | None = None
        # Leave time for two slow requests: otherwise a standby would see each renewal, but this process no answer.
        with trio.move_on_after(2 * self._every_s):
            try:
                found = await carry_out(self._objects, steps, failed=self._error.failed)
            except (StoreError, DamagedLog) as error:
                # Contents that are no lease may be those of one answer only, such as an error page with status 200.
                self._error.failed(error.detail)
            except LeaseWentBack as error:
                await self._check(error)
                return
        if found is not None and found.run == held.run:
            self._lease = found
            self._error.clear()
            if self._rivals.last is not None or self._went_back:
                # The rival may be frozen, and seal later. A lease that went back may have hidden one.
                await secure()
                self._rivals.last, self._went_back = None, False
            self._valid_until_s = begun_s + self._period_s
            if self._standbys.renewed(found, begun_s):
                self._wake.set()
            return
        self._standbys.missed()
        if found is not None:
            await look()
            self.on_rival()
            self._rivals.note(found, begun_s)

    async def _check(self, error: LeaseWentBack) -> None:
        """Check the log, and let the next renewal write the lease again. Raises ReignOver, BucketWentBack."""
        if self.check_log is None:
            raise error
        if not self._went_back:
            log.warning("the lease went back", extra={"why": error.detail})
        # A standby may take over by the earlier lease, so nothing is acknowledged until the lease is written again.
        self._went_back = True
        self._standbys.missed()
        try:
            await self.check_log()
        except StoreError as failed:
            self._error.failed(failed.detail)
            return
        self._is_in_log = True
        self._wake.set()

    async def release(self, epoch: int, run: bytes) -> None:
        """Note in the object store that this process has ended its epoch and no longer serves. Raises StoreError."""
        if not self._objects.can_exchange:
            return
        released = replace(
            self._lease, epoch=epoch, run=run, urls=(), renewed=1, counted=self._counted(), released=True
        )
        await carry_out(self._objects, renew(released, 0, self.terms), failed=self._error.failed)
