"""Connections to the Thrift gateways: a bounded pool, rotation over gateways, and the deadline of retries.

Connections to the gateways: bounded, each with one call under way, thrown away when their answer was not awaited.

A call that fails on the way is made again, on another connection and the next gateway, until its time is over. That is
right for every call the store makes, because none of them does something else the second time: rows are put if absent
or with the bytes that are there already, and what a first attempt did is recognised by the second. Nor does a first one
that lands long after: what it compares with is gone by then, and as stamps are never given again, it does not come back.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio

from plainsong.protocol.backoff import Backoff
from storage.base import StoreError
from storage.hbase.gateway import REFUSALS, Gateway, refusal_text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from storage.hbase.gateway import Address

#: How long one attempt to connect may take, so that a gateway that is cut off does not use up a call's time.
_CONNECT_S = 3.0
#: A call's time has room for so many gateways that do not answer, where there are others.
_GATEWAYS_A_CALL = 3


class GatewayRefused(StoreError):
    """HBase answered that it did not do it: no such table, a cell too large, a region that cannot be written."""


class Pool:
    """At most ``size`` connections, to gateways at ``addresses`` in turn."""

    def __init__(self, addresses: Sequence[Address], *, size: int, timeout_s: float) -> None:
        self._turns = GatewayRotation(addresses)
        self._slots = trio.Semaphore(size)
        #: Scans keep a connection while calls about their rows are made: one is left for those, or all wait for ever.
        self._scans = trio.Semaphore(max(1, size - 1))
        self._idle: list[Gateway] = []
        self.timeout_s = timeout_s
        """How long a call may take, with all its attempts."""
        self._closed = False

    async def call(self, name: str, *args: object) -> Any:
        """Call the service's function ``name``; attempts are repeated until there is an answer.

        Raises:
          GatewayRefused: the answer was no.
          StoreError: there was none in time; whether it happened is unknown.
        """
        return (await self.call_counting(name, *args))[0]

    async def call_counting(self, name: str, *args: object) -> tuple[Any, int]:
        """As ``call``; and how many attempts there were: from two on, an earlier one may have happened too."""
        patience = self.patience(name)
        while True:
            try:
                return await self._attempt(patience.attempt_s, name, args), patience.backoff.failures + 1
            except BROKEN_CONNECTION as error:
                await patience.after(error)

    def patience(self, doing: str, timeout_s: float | None = None) -> RetryDeadline:
        """With what is done in several attempts; ``timeout_s``: the pool's."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        attempt_s = timeout_s / (_GATEWAYS_A_CALL if len(self._turns.addresses) > 1 else 1)
        return RetryDeadline(f"{doing} through {self._turns}", timeout_s=timeout_s, attempt_s=attempt_s)

    async def _attempt(self, attempt_s: float, name: str, args: tuple[object, ...]) -> Any:
        asked: Gateway | None = None
        with trio.move_on_after(attempt_s):
            async with self.connection() as asked:
                return await asked.call(name, *args)
        if asked is None:
            raise OSError(f"no connection in {attempt_s:g} s")
        why = f"no answer in {attempt_s:g} s"
        await self.suspect(asked.address, why)
        raise OSError(why)

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
                self._idle.append(gateway)
                raise GatewayRefused(f"HBase refused: {refusal_text(error)}") from error
            except BaseException as error:
                with trio.CancelScope(shield=True):
                    await gateway.aclose()
                    if isinstance(error, BROKEN_CONNECTION):
                        await self.suspect(gateway.address, str(error) or repr(error))
                raise
            else:
                await self._give_back_or_close(gateway)

    @asynccontextmanager
    async def connection_to_scan(self, wait_s: float) -> AsyncIterator[Gateway]:
        """As ``connection``, where the block makes other calls of the pool; blocks of this kind are never nested.

        Raises:
          OSError: also when none was free in ``wait_s``.
        """
        try:
            with trio.fail_after(wait_s):
                await self._scans.acquire()
        except trio.TooSlowError:
            raise OSError(f"no connection in {wait_s:g} s") from None
        try:
            async with self.connection() as gateway:
                yield gateway
        finally:
            self._scans.release()

    async def suspect(self, address: Address, why: str) -> None:
        """The gateway broke a connection, or was asked and did not answer: those to it are not used again."""
        idle, self._idle = self._idle, []
        self._idle = [each for each in idle if each.address != address]
        self._turns.failed(address, why)
        for each in idle:
            if each.address == address:
                await each.aclose()

    async def aclose(self) -> None:
        """Close the connections; those in use go when their block is left."""
        self._closed = True
        idle, self._idle = self._idle, []
        for gateway in idle:
            await gateway.aclose()

    async def _give_back_or_close(self, gateway: Gateway) -> None:
        if self._closed:
            await gateway.aclose()
        else:
            self._idle.append(gateway)

    async def _connect(self) -> Gateway:
        address = self._turns.next()
        try:
            with trio.fail_after(_CONNECT_S):
                gateway = await Gateway.open(address)
        except (*BROKEN_CONNECTION, trio.TooSlowError) as error:
            why = str(error) or f"no answer in {_CONNECT_S:g} s"
            self._turns.failed(address, why)
            raise OSError(f"{self._turns.named(address)}: {why}") from error
        self._turns.answered(address)
        return gateway


# --- turns -----------------------------------------------------------------------------------------
#
# Which gateway is connected to next: each in its turn, those that failed a moment ago only when there is no other.


log = logging.getLogger(__name__)
#: How long a gateway that failed is left alone, where there are others.
_AVOIDED_S = 2.0


class GatewayRotation:
    """The gateways, and which of them do not answer."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self.addresses = tuple(addresses)
        self._next = 0
        #: Until when those that failed are avoided.
        self._failed: dict[Address, float] = {}

    def next(self) -> Address:
        """The next one."""
        order = [self.addresses[(self._next + step) % len(self.addresses)] for step in range(len(self.addresses))]
        now_s = trio.current_time()
        chosen = next((each for each in order if self._failed.get(each, now_s) <= now_s), order[0])
        self._next = self.addresses.index(chosen) + 1
        return chosen

    def failed(self, address: Address, why: str) -> None:
        """It cannot be connected to, broke a connection, or did not answer. Said once, until it answers."""
        if address not in self._failed:
            log.warning("an HBase gateway does not answer", extra={"gateway": self.named(address), "why": why})
        self._failed[address] = trio.current_time() + _AVOIDED_S

    def answered(self, address: Address) -> None:
        """It was connected to, and said something."""
        if self._failed.pop(address, None) is not None:
            log.info("an HBase gateway answers again", extra={"gateway": self.named(address)})

    def named(self, address: Address) -> str:
        """As it is written in a setting."""
        host, port = address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def __str__(self) -> str:
        return ", ".join(map(self.named, self.addresses))


# --- patience --------------------------------------------------------------------------------------
#
# How long attempts at one thing go on, and how they pause: for calls and for scans alike.


#: What breaks a connection: another attempt may find another one.
BROKEN_CONNECTION = (OSError, trio.BrokenResourceError, trio.ClosedResourceError)
#: Pauses between attempts; the last one repeats.
_PAUSES_S = (0.0, 0.05, 0.2, 0.5, 1.0)


class RetryDeadline:
    """With one thing that is attempted until it is done, or its time is over."""

    def __init__(self, doing: str, *, timeout_s: float, attempt_s: float) -> None:
        self.backoff = Backoff(_PAUSES_S)
        self._doing = doing
        self._timeout_s = timeout_s
        self._attempt_s = attempt_s
        self._deadline_s = trio.current_time() + timeout_s

    @property
    def attempt_s(self) -> float:
        """How long the next attempt may take."""
        return min(self._attempt_s, self.left_s)

    @property
    def left_s(self) -> float:
        """How long all further attempts may take."""
        return max(0.0, self._deadline_s - trio.current_time())

    def went_on(self) -> None:
        """A part of it is done: the next has all the time again."""
        self.backoff.reset()
        self._deadline_s = trio.current_time() + self._timeout_s

    async def after(self, error: BaseException) -> None:
        """Pause after an attempt that failed. Raises StoreError: there is no time for another one."""
        pause_s = self.backoff.failed()
        if trio.current_time() + pause_s >= self._deadline_s:
            raise StoreError(
                f"{self._doing} had no answer in {self._timeout_s:g} s: {str(error) or repr(error)}",
                hint="are HBase and its Thrift gateways there?",
            ) from error
        await trio.sleep(pause_s)
