"""Calls of a store to HBase that are held on their way, to land when a test says, or whose answers are lost."""

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
    """The calls of a store that ``wanted`` says, each held until ``release``."""

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
        """Let them go."""
        self._released.set()


class Lost:
    """The next call of a store that ``wanted`` says has no answer; it happens, or does when ``land`` is called."""

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
        """The call that was lost comes to HBase now."""
        assert self._args is not None
        return await self._call(*self._args)


def puts_to(table: str) -> Callable[[str, tuple[object, ...]], bool]:
    """Conditional puts to a table: ``messages``, ``payloads``, ``metadata``; or to ``heads``."""

    def wanted(name: str, args: tuple[Any, ...]) -> bool:
        if name != "checkAndPut":
            return False
        if args[2] == HEAD:
            return table == "heads"
        return bool(args[0].endswith(table.encode()))

    return wanted
