"""Slow Thrift gateways with a clock that jumps, for tests of the pool and of scans."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import trio

from storage.hbase.gateway import AnswerTooLarge
from storage.hbase.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    import pytest

    from storage.hbase.gateway import Address

COLUMN = b"d:v"


class Gateways:
    """Makes connections in place of ``Gateway``; ``answer(address, name, args)`` returns a result after any delay."""

    def __init__(self, answer: Callable[[Address, str, tuple[Any, ...]], Awaitable[object]]) -> None:
        self.answer = answer
        self.opened: list[Address] = []
        self.under_way = 0

    def pool(self, patched: pytest.MonkeyPatch, *, size: int = 4, timeout_s: float = 30.0, gateways: int = 1) -> Pool:
        """Return a pool of connections to a number of ``gateways``."""
        patched.setattr("storage.hbase.pool.Gateway", self)
        return Pool([(f"gateway{number}", 9090) for number in range(gateways)], size=size, timeout_s=timeout_s)

    async def open(self, address: Address, _: object = None) -> Connection:
        """See ``Gateway.open``."""
        self.opened.append(address)
        await trio.sleep(0.01)
        return Connection(self, address)


class Connection:
    """Replaces ``Gateway``."""

    def __init__(self, gateways: Gateways, address: Address) -> None:
        self._gateways = gateways
        self.address = address

    async def call(self, name: str, *args: Any) -> object:
        """See ``Gateway.call``."""
        self._gateways.under_way += 1
        try:
            return await self._gateways.answer(self.address, name, args)
        finally:
            self._gateways.under_way -= 1

    def call_later(self, name: str, *args: object) -> None:
        """Do nothing instead of ``Gateway.call_later``."""

    async def aclose(self) -> None:
        """See ``Gateway.aclose``."""
        await trio.lowlevel.checkpoint()


class Rows:
    """A table; responses have a maximum size, and take time in proportion to their size."""

    def __init__(self, sizes: Sequence[int], *, bytes_a_second: float = 1e9, max_bytes: int = 1 << 40) -> None:
        cells = {size: SimpleNamespace(value=bytes(size), timestamp=1) for size in set(sizes)}
        self._rows = [
            SimpleNamespace(row=b"%06d" % number, columns={COLUMN: cells[size]}) for number, size in enumerate(sizes)
        ]
        self._bytes_a_second, self._max_bytes = bytes_a_second, max_bytes
        self._scanners: list[list[Any]] = []
        self.asked: list[int] = []
        """Number of rows that each call requested."""

    @property
    def keys(self) -> list[bytes]:
        """All row keys."""
        return [row.row for row in self._rows]

    async def answer(self, _: Address, name: str, args: tuple[Any, ...]) -> object:
        """Answer a call as a gateway does."""
        if name == "scannerOpenWithScan":
            await trio.sleep(0.01)
            self._scanners.append(self._within(args[1]))
            return len(self._scanners) - 1
        assert name == "scannerGetList"
        number, count = args
        self.asked.append(count)
        found, self._scanners[number] = self._scanners[number][:count], self._scanners[number][count:]
        size = sum(len(cell.value) for row in found for cell in row.columns.values())
        if size > self._max_bytes:
            raise AnswerTooLarge(f"an answer of {size} bytes exceeds the limit")
        await trio.sleep(0.01 + size / self._bytes_a_second)
        return found

    def _within(self, asked: Any) -> list[Any]:
        if asked.reversed:
            return [row for row in reversed(self._rows) if asked.stopRow < row.row <= (asked.startRow or b"\xff")]
        return [row for row in self._rows if asked.startRow <= row.row < (asked.stopRow or b"\xff")]
