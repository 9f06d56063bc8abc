"""A store's calls to HBase that a test holds and releases, or whose answers get lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from storage.base import StoreError
from storage.hbase.owners import HEAD
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from storage.hbase.store import HBaseStore


class Held:
    """Holds the calls of a store that ``wanted`` accepts until ``release``."""

    def __init__(self, store: HBaseStore, wanted: Callable[[str, tuple[object, ...]], bool]) -> None:
        self.waiting = 0
        self._arrived = trio.Event()
        self._released = trio.Event()
        call = store._pool.call_counting

        async def held(name: str, *args: object) -> Any:
            if not self._released.is_set() and wanted(name, args):
                self.waiting += 1
                self._arrived.set()
                await self._released.wait()
            return await call(name, *args)

        store._pool.call_counting = held  # type: ignore[method-assign]  # what the test is about

    async def arrived(self) -> None:
        """Wait until a call is held."""
        with trio.fail_after(PATIENCE_S):
            await self._arrived.wait()

    def release(self) -> None:
        """Release all held calls."""
        self._released.set()


class Lost:
    """Loses the answer to the next call that ``wanted`` accepts; the call is sent at once, or by ``land``."""

    def __init__(
        self, store: HBaseStore, wanted: Callable[[str, tuple[object, ...]], bool], *, happens: bool = True
    ) -> None:
        self._call = store._pool.call_counting
        self._args: tuple[Any, ...] | None = None

        async def lost(name: str, *args: object) -> Any:
            if self._args is None and wanted(name, args):
                self._args = (name, *args)
                if happens:
                    await self._call(name, *args)
                raise StoreError("no answer")
            return await self._call(name, *args)

        store._pool.call_counting = lost  # type: ignore[method-assign]  # what the test is about

    async def land(self) -> Any:
        """Send the lost call to HBase now."""
        assert self._args is not None
        return await self._call(*self._args)


def puts_to(table: str) -> Callable[[str, tuple[object, ...]], bool]:
    """Return a predicate of conditional puts to a table: ``messages``, ``payloads``, ``metadata``, or ``heads``."""

    def wanted(name: str, args: tuple[Any, ...]) -> bool:
        if name != "checkAndPut":
            return False
        if args[2] == HEAD:
            return table == "heads"
        return bool(args[0].endswith(table.encode()))

    return wanted
