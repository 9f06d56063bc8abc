"""A primary's requests to the object store of its second copy, repeated while it is unavailable."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

import trio

from actors.last_error import LastError
from storage.base import StoreError, StoreUnusable
from storage.replication.carry import PAUSES_S, ObjectStoreUnavailable, carry_out, ignore
from storage.replication.protocol import BucketWentBack, Foreign, ReignOver

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from storage.replication.carry import Objects
    from storage.replication.protocol import Steps
    from storage.replication.segment import Segment

log = logging.getLogger(__name__)
T = TypeVar("T")
#: Pause after the object store refused access.
REFUSED_PAUSE_S = 5.0


class CopyCalls:
    """The requests of one primary."""

    def __init__(self, objects: Objects, on_end: Callable[[], object]) -> None:
        """Args:
        on_end: called before the error that the log is no longer this process's: from then on it acknowledges nothing.
        """
        self.objects = objects
        self.error = LastError(log, "the second copy cannot be written", "the object store responds again")
        self._on_end = on_end

    async def do(self, steps: Steps[T], apply: Callable[[Sequence[Segment]], Awaitable[object]] = ignore) -> T:
        """Run a procedure of the protocol. Raises as ``carry_out``."""
        try:
            found = await carry_out(self.objects, steps, apply, failed=self.error.failed)
        except (ReignOver, Foreign, BucketWentBack):
            self._on_end()
            raise
        self.error.clear()
        return found

    async def read(self, read: Callable[[], Awaitable[T]]) -> T:
        """Repeat a read while the object store is unavailable."""
        while True:
            try:
                return await read()
            except ObjectStoreUnavailable as error:
                self.error.failed(error.detail)
                await trio.sleep(PAUSES_S[0])

    async def patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call while the object store refuses access or the disk fails: rights and space may return."""
        while True:
            try:
                return await call()
            except (StoreError, StoreUnusable) as error:
                self.error.failed(error.detail)
                await trio.sleep(REFUSED_PAUSE_S)

    def ended(self, error: ReignOver | BucketWentBack) -> ReignOver | BucketWentBack:
        """Return an error to raise, after ``on_end``."""
        self._on_end()
        return error
