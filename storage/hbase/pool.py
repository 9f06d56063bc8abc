"""Connections to the gateways: bounded, each with one call under way, thrown away when their answer was not awaited.

A call that fails on the way is made again, on another connection and the next gateway, until its time is over. That is
right for every call the store makes, because none of them does something else the second time: rows are put if absent
or with the bytes that are there already, and what a first attempt did is recognised by the second. Nor does a first one
that lands long after: what it compares with is gone by then, and as stamps are never given again, it does not come back.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio

from storage.base import StoreError
from storage.hbase.gateway import REFUSALS, Gateway, refusal_text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

#: Pauses between attempts; the last one repeats.
_PAUSES_S = (0.0, 0.05, 0.2, 0.5, 1.0)
#: How long one attempt to connect may take, so that a gateway that is cut off does not use up a call's time.
_CONNECT_S = 3.0


class GatewayRefused(StoreError):
    """HBase answered that it did not do it: no such table, a cell too large, a region that cannot be written."""


class Pool:
    """At most ``size`` connections, to gateways at ``addresses`` in turn."""

    def __init__(self, addresses: Sequence[tuple[str, int]], *, size: int, timeout_s: float) -> None:
        self._addresses = tuple(addresses)
        self._next = 0
        self._slots = trio.Semaphore(size)
        self._idle: list[Gateway] = []
        self._timeout_s = timeout_s
        self._closed = False

    async def call(self, name: str, *args: object) -> Any:
        """Call the service's function ``name``; attempts are repeated until there is an answer.

        Raises:
          GatewayRefused: the answer was no.
          StoreError: there was none in time; whether it happened is unknown.
        """
        failures = 0
        why = "no gateway answered"
        with trio.move_on_after(self._timeout_s):
            while True:
                try:
                    async with self.connection() as gateway:
                        return await gateway.call(name, *args)
                except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
                    why = str(error) or repr(error)
                await trio.sleep(_PAUSES_S[min(failures, len(_PAUSES_S) - 1)])
                failures += 1
        raise StoreError(
            f"{name} through {self._named()} had no answer in {self._timeout_s:g} s: {why}",
            hint="are HBase and its Thrift gateways there?",
        )

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Gateway]:
        """A connection for the block, which goes back when every call of it was answered.

        Put deadlines around the block, never into it: a cancellation that the block keeps to itself would hand on a
        connection with an answer still to come.

        Raises:
          GatewayRefused: a call's answer was no.
          OSError: no gateway can be connected to, or the connection broke.
        """
        async with self._slots:
            if self._closed:
                raise StoreError("the store is closed")
            gateway = self._idle.pop() if self._idle else await self._connect()
            try:
                yield gateway
            except REFUSALS as error:
                self._give_back(gateway)
                raise GatewayRefused(f"HBase refused: {refusal_text(error)}") from error
            except BaseException:
                with trio.CancelScope(shield=True):
                    await gateway.aclose()
                raise
            else:
                await self._give_back_or_close(gateway)

    async def aclose(self) -> None:
        """Close the connections; those in use go when their block is left."""
        self._closed = True
        idle, self._idle = self._idle, []
        for gateway in idle:
            await gateway.aclose()

    def _give_back(self, gateway: Gateway) -> None:
        self._idle.append(gateway)

    async def _give_back_or_close(self, gateway: Gateway) -> None:
        if self._closed:
            await gateway.aclose()
        else:
            self._give_back(gateway)

    async def _connect(self) -> Gateway:
        host, port = self._addresses[self._next % len(self._addresses)]
        try:
            with trio.fail_after(_CONNECT_S):
                return await Gateway.open(host, port)
        except (OSError, trio.TooSlowError) as error:
            # The next attempt goes elsewhere; and what is idle was connected to a gateway that may be gone too.
            self._next += 1
            raise OSError(f"{host}:{port}: {error or 'no connection in time'}") from error

    def _named(self) -> str:
        return ", ".join(f"{host}:{port}" for host, port in self._addresses)
