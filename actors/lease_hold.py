"""Renews the lease of a process that takes over, until it serves.

Otherwise another standby would end a start that lasts longer than the lease.

Of two writes of the lease at the same moment the object store must refuse one, and some servers accept both. So a
process does not renew the lease while it replaces it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from storage.base import StoreError
from storage.replication.carry import WrappedObjects, carry_out
from storage.replication.notices import LEASE
from storage.replication.protocol import Verdict, hold
from storage.replication.segment import DamagedLog

if TYPE_CHECKING:
    from storage.replication.carry import Objects

#: Renewals within the period of the lease.
RENEWALS = 3
#: The longest time between two renewals; and how long a rival may take to seal.
IDLE_S = 10.0


def renews_every_s(period_s: float) -> float:
    """Return the time between two renewals of a lease with this period."""
    return min(period_s / RENEWALS or IDLE_S, IDLE_S)


class LeaseHold:
    """Renews the lease of a process until it serves, but never while a take-over of this process replaces the lease.

    A process has one: for its time as a standby, and for its start as the primary after that.
    """

    def __init__(self) -> None:
        self._writing = trio.Lock()
        self.has_begun = False
        """True once the primary has the lease: the standby before it renews it no longer."""

    async def renew(self, objects: Objects, run: bytes, number: int, period_s: float) -> bool:
        """Renew the lease of a run that does not serve yet, if it has the lease; False if it certainly has none."""
        # As for the renewals of a primary, two slow requests must fit in.
        with trio.move_on_after(2 * renews_every_s(period_s)), suppress(StoreError, DamagedLog):
            # The read too: while the lease is replaced, a server may return the former contents as the new version.
            async with self._writing:
                return await carry_out(objects, hold(run, number))
        return True

    def excluded(self, objects: Objects, period_s: float) -> Objects:
        """Return the objects for a take-over of this process: the lease is not renewed while it is replaced."""
        return _Excluding(objects, self._writing, 2 * renews_every_s(period_s))


class _Excluding(WrappedObjects):
    """``storage.replication.carry.Objects`` whose lease is replaced while a lock is held."""

    def __init__(self, objects: Objects, writing: trio.Lock, timeout_s: float) -> None:
        super().__init__(objects)
        self._writing = writing
        self._timeout_s = timeout_s

    async def exchange(self, name: str, data: bytes, etag: str) -> Verdict:
        """See ``Objects``."""
        if name != LEASE:
            return await super().exchange(name, data, etag)
        async with self._writing:
            # If the request hangs, the lease of the run so far must be renewed before its time is over.
            with trio.move_on_after(self._timeout_s):
                return await super().exchange(name, data, etag)
        return Verdict.UNKNOWN
