"""A standby's watch of the primary's lease: when to take over by itself, and its registration in the lease.

Once the standby has caught up, it registers, and renews the registration, so that the primary keeps the terms of the
lease. See ``actors.lease``.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

import trio

from storage.base import StoreError, StoreUnusable
from storage.replication.notices import LEASE, Registration, decode_lease, encode_lease
from storage.replication.protocol import Verdict
from storage.replication.segment import SYNC, DamagedLog

if TYPE_CHECKING:
    from collections.abc import Container

    from actors.followed_log import FollowedLog
    from actors.last_error import LastError
    from actors.standby_clock import StandbyClock
    from storage.replication.carry import Objects
    from storage.replication.notices import Lease

#: Reads of the lease within its time, and the longest time between two. A renewal counts from when it is read.
READS = 10
IDLE_S = 2.0
#: The time between two reads after a clean seal, after which the primary releases the lease.
RELEASED_EVERY_S = 0.1
#: The time between two registrations in the lease.
REGISTER_EVERY_S = 10.0


class LeaseWatch:
    """The primary's lease as one standby reads it."""

    def __init__(
        self,
        objects: Objects,
        log: FollowedLog,
        clock: StandbyClock,
        error: LastError,
        lease_s: float,
        holder: str = "",
    ) -> None:
        """Args:
        lease_s: wait at least this long after a renewal; 0: never take over by itself.
        holder: the name of this machine, for people.
        """
        self._objects = objects
        self._log = log
        self._clock = clock
        self._error = error
        self._lease_s = lease_s
        self.lease: Lease | None = None
        """The lease when it was last read; None if there is none, or after a take-over was lost."""
        self.registration = Registration(secrets.token_hex(4), 0, holder)
        """This standby's entry in the lease, until it ends or takes over."""
        self._registered_s = -1e9
        #: When this lease was first seen. A failed read begins the time again.
        self._since_s = 0.0
        self._read_s = -1e9

    @property
    def every_s(self) -> float:
        """The time between two reads."""
        return min((self._lease_s or IDLE_S * READS) / READS, IDLE_S)

    @property
    def due_s(self) -> float:
        """When to read the lease next: regularly, when its time is over, and often while the primary hands over."""
        read_s, every_s = self._read_s, self.every_s
        if self._clock.now_s() - self._log.handed_over_s < every_s:
            every_s = RELEASED_EVERY_S if read_s > self._log.handed_over_s else 0.0
        over_s = inf if self.lease is None else self._over_s(self.lease)
        return min(read_s + every_s, over_s) if read_s < over_s else read_s + every_s

    async def look(self) -> None:
        """Read the lease. Raises StoreUnusable: the primary allows no standby."""
        self._read_s = self._clock.now_s()
        if not self._objects.can_exchange:
            return
        try:
            found = await self._objects.get(LEASE)
            lease = None if found is None else decode_lease(found.data)
        except (StoreError, DamagedLog) as error:
            # Contents that are no lease may be those of one answer only, such as an error page with status 200.
            self._since_s = self._clock.now_s()
            self._error.failed(error.detail)
            return
        if lease is not None and not lease.allows_standby:
            raise StoreUnusable(
                "the primary allows no standby", hint='set replication.standby = "allowed" in its settings first'
            )
        # Standbys that register change the lease too.
        if lease is None or self.lease is None or lease.sign != self.lease.sign:
            self._since_s = self._clock.now_s()
        self.lease = lease
        if lease is not None and lease.clock_ms is not None:
            self._clock.note(lease.clock_ms)
        if found is not None and lease is not None:
            await self._register(lease, found.etag)

    async def _register(self, lease: Lease, etag: str) -> None:
        """Note in the lease that this standby can take over, so that the primary keeps its terms."""
        now_s = self._clock.now_s()
        if not self._log.caught_up or lease.released or now_s - self._registered_s < REGISTER_EVERY_S:
            return
        one = self.registration = replace(
            self.registration, beat=self.registration.beat + 1, commit=self._log.place.commit or 0
        )
        with trio.move_on_after(IDLE_S):
            try:
                # If the lease has changed since, the next look registers.
                if await self._objects.exchange(LEASE, encode_lease(lease.registered(one)), etag) is Verdict.DONE:
                    self._registered_s = self._clock.now_s()
            except StoreError as error:
                self._error.failed(error.detail)

    def reason(self, runs: Container[bytes]) -> str:
        """Return why to take over by itself now; empty if there is no reason.

        Args:
          runs: this directory's own, which may have released the lease.
        """
        lease = self.lease
        if lease is None or not self._lease_s:
            return ""
        if lease.released and lease.run not in runs:
            return "switch"
        # At the beginning of the last read: its answer may be older than it seems.
        return "lease" if self._read_s >= self._over_s(lease) else ""

    @property
    def is_automatic(self) -> bool:
        """True if the standby takes over by itself once the lease is over."""
        return self._log.caught_up and self.lease is not None and self._over_s(self.lease) < inf

    def _over_s(self, lease: Lease) -> float:
        """Return when to take over without a renewal; infinity if only by hand."""
        if not lease.guarded or not lease.period_ms or not self._lease_s:
            return inf  # the primary may acknowledge without a lease
        if lease.epoch < self._log.place.epoch and self._log.mode != SYNC:
            return inf  # the lease went back: it does not have the terms of the last primary
        return self._since_s + max(self._lease_s, lease.period_ms / 1000)
