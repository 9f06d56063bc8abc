"""Connections to the Thrift gateways: a bounded pool, rotation over gateways, and the deadline of retries.

Each connection serves one call at a time, and is closed if the caller did not wait for the answer.

A call waits for a free connection until its deadline, and the time of its attempt begins after that wait. If the wait
counted, then under overload every call that gets a connection would have no time left: it would be abandoned halfway,
its connection closed, and no call would complete until the load drops. So the calls that wait longest fail, and those
that get a connection are served. A call ends after its time-out, plus one attempt if it had to wait.

A failed call is retried, on another connection and the next gateway, until its deadline. Every call of the store can be
retried: rows are put if absent or with the same bytes, and a second attempt recognises the effect of the first. A first
attempt that arrives much later does no harm either: the value that it compares with has been replaced by then, and will
not occur again, since stamps are never reused.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import trio

from plainsong.protocol.backoff import Backoff
from storage.base import StoreError
from storage.hbase.gateway import REFUSALS, AnswerTooLarge, Gateway, refusal_text

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable, Sequence

    from storage.hbase.gateway import Address

log = logging.getLogger(__name__)
#: Time for one attempt to connect, so that an unreachable gateway does not use up a call's time.
_CONNECT_S = 3.0
#: With several gateways, a call has time for this many that do not answer.
_GATEWAYS_A_CALL = 3


class GatewayRefused(StoreError):
    """HBase refused the call: no such table, a cell too large, a region that cannot be written."""


class NoConnectionFree(StoreError):
    """All connections were in use for as long as a call may wait. The call was not sent, so nothing happened."""


class Pool:
    """Up to ``size`` connections, to gateways at ``addresses`` in turn."""

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        size: int,
        timeout_s: float,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._rotation = GatewayRotation(addresses)
        self.tls = tls
        """Returns the context of each new connection; None for no TLS."""
        self._slots = trio.Semaphore(size)
        #: A scan keeps its connection during calls about its rows. One is left for those calls, to avoid a deadlock.
        self._scans = trio.Semaphore(max(1, size - 1))
        self._idle: list[Gateway] = []
        self.timeout_s = timeout_s
        """Time limit for a call's wait for a connection; the same for all its attempts together."""
        self._closed = False

    async def call(self, name: str, *args: object) -> Any:
        """Call the service's function ``name``; retry until there is an answer.

        Raises:
          GatewayRefused: HBase refused it.
          NoConnectionFree: no connection was free in time; nothing happened.
          StoreError: no answer in time; the outcome is unknown.
        """
        return (await self.call_counting(name, *args))[0]

    async def call_counting(self, name: str, *args: object) -> tuple[Any, int]:
        """Like ``call``, but also return the number of attempts. With several, an earlier one may have happened too."""
        retry = self.retry_deadline(name)
        while True:
            attempt_s = retry.attempt_s  # computed before the wait, which may use up the rest of the time
            try:
                async with self._free(retry.left_s, self._slots):
                    return await self._attempt(attempt_s, name, args), retry.backoff.failures + 1
            except NoConnectionFree as error:
                if retry.backoff.failures:  # an earlier attempt may have happened
                    raise StoreError(error.detail, hint=error.hint) from error
                raise
            except AnswerTooLarge as error:  # the next attempt's answer would be as large
                raise StoreError(f"{name}: {error}") from error
            except BROKEN_CONNECTION as error:
                await retry.pause(error)

    def retry_deadline(self, doing: str, timeout_s: float | None = None) -> RetryDeadline:
        """Return the deadline of an operation with several attempts; ``timeout_s`` defaults to the pool's."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        attempt_s = timeout_s / (_GATEWAYS_A_CALL if len(self._rotation.addresses) > 1 else 1)
        return RetryDeadline(f"{doing} through {self._rotation}", timeout_s=timeout_s, attempt_s=attempt_s)

    async def _attempt(self, attempt_s: float, name: str, args: tuple[object, ...]) -> Any:
        asked: Gateway | None = None
        with trio.move_on_after(attempt_s):
            async with self.connected() as asked:
                return await asked.call(name, *args)
        if asked is None:
            raise OSError(f"no connection in {attempt_s:g} s")
        why = f"no answer in {attempt_s:g} s"
        await self.suspect(asked.address, why)
        raise OSError(why)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Gateway]:
        """Yield a connection. It returns to the pool if all calls of the block were answered.

        Put deadlines around the block, never inside: a cancellation that the block catches would return a connection
        with a pending answer.

        Raises:
          GatewayRefused: HBase refused a call.
          OSError: no gateway can be reached, or the connection broke.
        """
        async with self._slots, self.connected() as gateway:
            yield gateway

    @asynccontextmanager
    async def place_to_scan(self, wait_s: float) -> AsyncIterator[None]:
        """Reserve a connection, to be used by ``connected``, for a block that also makes calls. Never nest such blocks.

        Raises:
          NoConnectionFree: none was free in ``wait_s``.
        """
        async with self._free(wait_s, self._scans, self._slots):
            yield

    @asynccontextmanager
    async def _free(self, wait_s: float, *bounds: trio.Semaphore) -> AsyncIterator[None]:
        """Hold a slot of each semaphore during the block. Raises NoConnectionFree: not available in ``wait_s``."""
        entered: list[trio.Semaphore] = []
        try:
            try:
                with trio.fail_after(wait_s):
                    for bound in bounds:
                        await bound.acquire()
                        entered.append(bound)
            except trio.TooSlowError:
                raise NoConnectionFree(
                    f"no connection to HBase became free in {wait_s:g} s",
                    hint="raise storage.hbase.max_connections, or find out why HBase answers slowly",
                ) from None
            yield
        finally:
            for bound in entered:
                bound.release()

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Gateway]:
        """Like ``connection``, for a caller that holds a slot already, for example from ``place_to_scan``."""
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
                if isinstance(error, BROKEN_CONNECTION) and not isinstance(error, AnswerTooLarge):
                    await self.suspect(gateway.address, str(error) or repr(error))
            raise
        else:
            await self._give_back_or_close(gateway)

    async def suspect(self, address: Address, why: str) -> None:
        """Drop the idle connections to a gateway that broke a connection or did not answer a call."""
        idle, self._idle = self._idle, []
        self._idle = [each for each in idle if each.address != address]
        self._rotation.failed(address, why)
        for each in idle:
            if each.address == address:
                await each.aclose()

    async def aclose(self) -> None:
        """Close the connections. Those in use are closed when their block ends."""
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
        address = self._rotation.next()
        try:
            with trio.fail_after(_CONNECT_S):
                gateway = await Gateway.open(address, self.tls)
        except (*BROKEN_CONNECTION, trio.TooSlowError) as error:
            why = str(error) or f"no answer in {_CONNECT_S:g} s"
            self._rotation.failed(address, why)
            raise OSError(f"{self._rotation.named(address)}: {why}") from error
        self._rotation.answered(address)
        return gateway


# --- rotation: each gateway in turn; one that has just failed only if there is no other ------------


#: A failed gateway is avoided for this time if there are others.
_AVOIDED_S = 2.0


class GatewayRotation:
    """The gateways in turn, and those that have just failed."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self.addresses = tuple(addresses)
        self._next = 0
        #: Failed gateways, with the time until which to avoid each.
        self._failed: dict[Address, float] = {}

    def next(self) -> Address:
        """Return the gateway to connect to next."""
        order = [self.addresses[(self._next + step) % len(self.addresses)] for step in range(len(self.addresses))]
        now_s = trio.current_time()
        chosen = next((each for each in order if self._failed.get(each, now_s) <= now_s), order[0])
        self._next = self.addresses.index(chosen) + 1
        return chosen

    def failed(self, address: Address, why: str) -> None:
        """Record that a gateway refused or broke a connection or did not answer; logged once until it answers again."""
        if address not in self._failed:
            log.warning("an HBase gateway does not answer", extra={"gateway": self.named(address), "why": why})
        self._failed[address] = trio.current_time() + _AVOIDED_S

    def answered(self, address: Address) -> None:
        """Record that a gateway accepted a connection and answered."""
        if self._failed.pop(address, None) is not None:
            log.info("an HBase gateway answers again", extra={"gateway": self.named(address)})

    def named(self, address: Address) -> str:
        """Format the address as in the settings."""
        host, port = address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def __str__(self) -> str:
        return ", ".join(map(self.named, self.addresses))


# --- retries of calls and scans --------------------------------------------------------------------


#: Errors of a broken connection; the next attempt uses another one.
BROKEN_CONNECTION = (OSError, trio.BrokenResourceError, trio.ClosedResourceError)
#: Pauses between attempts; the last one repeats.
_PAUSES_S = (0.0, 0.05, 0.2, 0.5, 1.0)


class RetryDeadline:
    """The deadline and the pauses of one operation with retries."""

    def __init__(self, doing: str, *, timeout_s: float, attempt_s: float) -> None:
        self.backoff = Backoff(_PAUSES_S)
        """Counts failed attempts since the start or the last progress."""
        self._doing = doing
        self._timeout_s = timeout_s
        self._attempt_s = attempt_s
        self._deadline_s = trio.current_time() + timeout_s

    @property
    def attempt_s(self) -> float:
        """Time limit of the next attempt once it has a connection."""
        return min(self._attempt_s, self.left_s)

    @property
    def left_s(self) -> float:
        """Time left for all further attempts; also the time limit for the next wait for a connection."""
        return max(0.0, self._deadline_s - trio.current_time())

    def progressed(self) -> None:
        """Restart the clock: part of the operation is done, and the next part has the whole time again."""
        self.backoff.reset()
        self._deadline_s = trio.current_time() + self._timeout_s

    async def pause(self, error: BaseException) -> None:
        """Pause after a failed attempt. Raises StoreError: there is no time for another one."""
        pause_s = self.backoff.failed()
        if trio.current_time() + pause_s >= self._deadline_s:
            raise StoreError(
                f"{self._doing} had no answer in {self._timeout_s:g} s: {str(error) or repr(error)}",
                hint="check that HBase and its Thrift gateways are running",
            ) from error
        await trio.sleep(pause_s)
