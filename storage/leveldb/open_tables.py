"""The tables of a store: open, failed, or being opened again; and the calls inside them, for which closing waits."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager, contextmanager
from math import inf
from typing import TYPE_CHECKING, TypeVar

import trio

from storage.base import StoreError, StoreUnusable
from storage.leveldb.engine.errors import without_folders
from storage.threaded import NoThread, in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from storage.leveldb.tables import LevelDBTables

log = logging.getLogger(__name__)
T = TypeVar("T")


class OpenTables:
    """The tables that a store has open now. LevelDB must not be closed while a thread is inside.

    Args:
      open_again: opens the tables; called in a thread.
      quiet: waits until no commit is under way.
    """

    def __init__(self, open_again: Callable[[], LevelDBTables], quiet: Callable[[], Awaitable[None]]) -> None:
        self._open_again = open_again
        self._quiet = quiet
        #: The open tables; None while they are being reopened, and once they are closed.
        self.now: LevelDBTables | None = None
        #: A write has failed: nothing is written until the tables are reopened. Set by the writer of commits.
        self.is_broken = False
        #: A sync failed after its write: reads must wait until the tables are reopened. Set by the writer of commits.
        self.shows_undurable = False
        self.is_closed = False
        self.calls_inside = 0
        self._no_calls_inside: trio.Event | None = None
        self._reopening = trio.Lock()

    async def open(self) -> None:
        """Open the tables for the first time. Raises StoreUnusable."""
        self.now = await in_thread(self._open_again)

    @asynccontextmanager
    async def closing(self) -> AsyncIterator[None]:
        """Close the tables for good, then run the block."""
        self.is_closed = True
        async with self._reopening:
            await self._close()
            yield

    def refuse_if_closed(self) -> None:
        """Raise StoreError after ``closing``."""
        if self.is_closed:
            raise StoreError("the store is closed")

    async def reopen_if_failed(self) -> None:
        """Reopen the tables if a write has failed. Raises StoreError."""
        async with self._reopening:
            self.refuse_if_closed()
            if self.is_broken or self.now is None or self.now.failed is not None:
                await self._reopen()

    async def run(self, call: Callable[[LevelDBTables], T], limiter: trio.CapacityLimiter) -> T:
        """Run ``call`` in a thread, and keep the tables open until it returns. Raises StoreError."""
        tables = await self.present()
        with self.counted():
            try:
                return await in_thread(call, tables, limiter=limiter)
            except NoThread as error:
                raise StoreError(error.detail, hint=error.hint) from error

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Keep the tables that ``present`` has just returned open for the block."""
        self.calls_inside += 1
        try:
            yield
        finally:
            self.calls_inside -= 1
            if self.calls_inside == 0 and self._no_calls_inside is not None:
                self._no_calls_inside.set()

    async def present(self) -> LevelDBTables:
        """Return the tables, after any reopening under way. Raises StoreError."""
        if self.shows_undurable:
            await self.reopen_if_failed()
        if self.now is None:
            # A reopening is under way: wait for its end.
            async with self._reopening:
                pass
        self.refuse_if_closed()
        tables = self.now
        if tables is None:
            raise StoreError("the store could not be reopened", hint="claim the topic again")
        return tables

    async def _close(self) -> None:
        """Close the tables once no thread is inside; new calls wait until they are reopened."""
        tables, self.now = self.now, None
        if tables is None:
            return
        tables.keeper.thread.leave()
        # This is short: without tables, queued writes are refused.
        await self._quiet()
        if self.calls_inside:
            self._no_calls_inside = trio.Event()
            await self._no_calls_inside.wait()
            self._no_calls_inside = None
        await in_thread(tables.close, max_wait_s=inf)

    async def _reopen(self) -> None:
        with trio.CancelScope(shield=True):
            await self._close()
            try:
                await self.open()
            except (StoreUnusable, NoThread) as error:
                log.error("the store cannot be reopened", extra={"why": error.detail})
                detail = without_folders(error.detail)
                raise StoreError(f"the store cannot be reopened: {detail}", hint=error.hint) from error
            self.is_broken = self.shows_undurable = False
