"""The lease of a primary: its sign of life in the object store, for standbys and for itself.

The lease decides nothing: the seal does. It tells a standby that the primary is alive, and it tells a primary that no
standby can have taken over yet: a standby waits for the time of the lease after it has seen a renewal, and the primary
counts that time from before the renewal. So a primary that was frozen, or cut off, stops acknowledging first.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from storage.base import StoreError
from storage.replication.carry import carry_out
from storage.replication.notices import Lease
from storage.replication.protocol import renew

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from storage.replication.carry import Objects

log = logging.getLogger(__name__)
#: Renewals within the time of the lease.
RENEWALS = 3
#: How often the lease is written if it has no time, for the addresses in it; and how long a rival may take to seal.
IDLE_S = 10.0


def boot_s() -> float:
    """Return the seconds since the machine was started, including those in which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class LeaseKeeper:
    """Renews the lease of one primary. ``began``, then ``run``."""

    def __init__(
        self,
        objects: Objects,
        *,
        period_s: float,
        allows_standby: bool,
        is_needed: bool = True,
        counted: Callable[[], int | None],
        clock: Callable[[], float] = boot_s,
    ) -> None:
        """Args:
        period_s: the time of the lease; 0: standbys take over by hand only.
        allows_standby: False: the primary serves without a valid lease.
        is_needed: False: each commit counts in the log before it is acknowledged, so for that the seal is enough.
        counted: returns the last commit that counts.
        """
        self._objects = objects
        self._period_s = period_s
        self._expires = objects.can_exchange and period_s > 0 and allows_standby
        self._is_needed = is_needed
        self._every_s = period_s / RENEWALS or IDLE_S
        self._counted = counted
        self._clock = clock
        #: Called while another process tries to take over.
        self.on_rival: Callable[[], object] = lambda: None
        #: URLs of the primary; set once it serves.
        self.urls: tuple[str, ...] = ()
        self._lease = Lease(0, b"", period_ms=round(1000 * period_s), allows_standby=allows_standby)
        #: ``renewed`` of the last attempt.
        self._number = 0
        self._valid_until_s = 0.0
        #: The lease of a process that tries to take over, and when it was first seen.
        self._rival: Lease | None = None
        self._rival_since_s = 0.0
        self._is_over = False
        self._error = ""
        self._wake = trio.Event()

    @property
    def clock_s(self) -> float:
        """The present time of the lease's clock."""
        return self._clock()

    @property
    def is_current(self) -> bool:
        """True if no other process can have taken over by itself: polls show what was acknowledged last."""
        return not self._is_over and (not self._expires or self._clock() < self._valid_until_s)

    @property
    def holds(self) -> bool:
        """True if a commit that is durable where the mode wants it may be acknowledged."""
        return self.is_current if self._is_needed else not self._is_over

    @property
    def terms(self) -> Lease:
        """The lease as this process last wrote it, or will write it."""
        return self._lease

    def close(self) -> None:
        """Note that another process has taken over: nothing is acknowledged any more."""
        self._is_over = True

    def began(self, epoch: int, run: bytes, holder: str, since_s: float) -> None:
        """Note a new epoch, whose lease was written after ``since_s``."""
        self._lease = replace(self._lease, epoch=epoch, run=run, holder=holder, renewed=0)
        self._number, self._rival = 0, None
        self._valid_until_s = since_s + self._period_s

    def serve(self, urls: tuple[str, ...]) -> None:
        """Write the primary's URLs into the lease."""
        self.urls = urls
        self._wake.set()

    async def run(self, look: Callable[[], Awaitable[object]]) -> None:
        """Renew, until cancelled.

        Args:
          look: raises if another process has ended the epoch.
        Raises:
          BucketWentBack: the lease is missing, or older than it was written.
        """
        while self._objects.can_exchange:
            await self._renew(look)
            with trio.move_on_after(self._every_s):
                await self._wake.wait()
            self._wake = trio.Event()

    async def _renew(self, look: Callable[[], Awaitable[object]]) -> None:
        begun_s, held = self._clock(), self._lease
        self._number += 1
        over = self._rival if begun_s - self._rival_since_s >= max(self._period_s, IDLE_S) else None
        epoch = held.epoch if over is None else max(held.epoch, over.epoch)
        wanted = replace(held, epoch=epoch, urls=self.urls, renewed=self._number, counted=self._counted())
        found: Lease | None = None
        with trio.move_on_after(self._every_s):
            try:
                found = await carry_out(self._objects, renew(wanted, held.renewed, over), failed=self._failed)
            except StoreError as error:
                self._failed(error.detail)
        if found == wanted:
            self._lease, self._rival, self._error = wanted, None, ""
            self._valid_until_s = begun_s + self._period_s
        elif found is not None:
            await look()
            self.on_rival()
            if found != self._rival:
                log.warning("another process tries to take over", extra={"holder": found.holder, "epoch": found.epoch})
                self._rival, self._rival_since_s = found, begun_s

    def _failed(self, why: str) -> None:
        if not self._error:
            log.warning("the lease cannot be renewed", extra={"why": why})
        self._error = why

    async def release(self, epoch: int, run: bytes) -> None:
        """Note in the object store that this process has ended its epoch, and serves no longer. Raises StoreError."""
        if not self._objects.can_exchange:
            return
        released = replace(
            self._lease, epoch=epoch, run=run, urls=(), renewed=1, counted=self._counted(), released=True
        )
        await carry_out(self._objects, renew(released, 0), failed=self._failed)
