"""A TCP proxy that injects faults: it loses, delays or cuts messages, stalls, or refuses connections.

It runs between a daemon and HBase's Thrift gateway, whose requests and answers are frames (``framed=True``: each
message is a complete frame), or between any two TCP peers, where each received chunk counts as a message.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Literal, get_args

import trio

Fault = Literal["none", "lost request", "late request", "cut request", "lost answer", "late answer", "cut answer"]
FAULTS: tuple[Fault, ...] = get_args(Fault)[1:]
Way = Literal["there", "back"]
"""Direction: from the connecting side, or to it."""
WAYS: tuple[Way, ...] = get_args(Way)


@dataclass(frozen=True, slots=True)
class Fate:
    """The fault of one request and its answer."""

    fault: Fault = "none"
    delay_s: float = 0.0
    """Delay of a late request or answer. A late request arrives even if its sender has timed out by then."""


GOOD = Fate()
Choose = Callable[[bytes], Fate]


def calm(_: bytes) -> Fate:
    """Choose no fault."""
    return GOOD


class Storm:
    """Random faults: a share of the requests gets one of ``faults``; the same seed gives the same faults."""

    def __init__(self, seed: int, share: float, delay_s: float, faults: Sequence[Fault] = FAULTS) -> None:
        self._rng, self._share, self._delay_s, self._faults = Random(seed), share, delay_s, tuple(faults)

    def __call__(self, _: bytes) -> Fate:
        chance, fault = self._rng.random(), self._rng.choice(self._faults)
        return Fate(fault, self._delay_s) if chance < self._share else GOOD


class Once:
    """One fate for the next request that contains a mark; other requests succeed."""

    def __init__(self, mark: bytes, fate: Fate) -> None:
        self._mark, self._fate = mark, fate
        self.met = trio.Event()

    def __call__(self, request: bytes) -> Fate:
        if self.met.is_set() or self._mark not in request:
            return GOOD
        self.met.set()
        return self._fate


def moving() -> trio.Event:
    """Return the event that is set while a direction is not stalled."""
    event = trio.Event()
    event.set()
    return event


@dataclass(slots=True, eq=False)
class _Pair:
    """A client's connection and the proxy's connection to the target."""

    near: trio.SocketStream
    far: trio.SocketStream
    cut: trio.CancelScope
    fates: deque[Fate] = field(default_factory=deque)


class Proxy:
    """Listens on its own port, which never changes; made by ``open_proxy``."""

    def __init__(
        self, target: tuple[str, int], listener: trio.SocketListener, nursery: trio.Nursery, *, framed: bool
    ) -> None:
        self.target = target
        self._nursery = nursery
        self.choose: Choose = calm
        self.faults: Counter[str] = Counter()
        """Number of faults injected so far."""
        self.landed = trio.Event()
        """Set when a late request has arrived and was answered."""
        self.requests = 0
        self._framed = framed
        self._listener = listener
        self._pairs: set[_Pair] = set()
        self._refuses = False
        self._flows = {way: moving() for way in WAYS}

    @property
    def address(self) -> tuple[str, int]:
        """The address that clients connect to."""
        host, port = self._listener.socket.getsockname()
        return host, port

    @property
    def text(self) -> str:
        """The address as ``host:port``."""
        host, port = self.address
        return f"{host}:{port}"

    def stall(self, *ways: Way) -> None:
        """Stop forwarding, in both directions or in those given; connections are still accepted, but wait."""
        if all(flow.is_set() for flow in self._flows.values()):
            self.faults[" ".join(["stall", *ways])] += 1
        for way in ways or WAYS:
            if self._flows[way].is_set():
                self._flows[way] = trio.Event()

    def refuse(self) -> None:
        """Cut every connection, including new ones."""
        self._refuses = True
        self.faults["refusal"] += 1
        self.cut_all()

    def heal(self) -> None:
        """Resume forwarding, accept connections, and choose no more faults."""
        self.choose, self._refuses = calm, False
        for flow in self._flows.values():
            flow.set()

    def cut_all(self) -> None:
        """Break every open connection."""
        for pair in list(self._pairs):
            pair.cut.cancel()

    async def serve(self, near: trio.SocketStream) -> None:
        """Serve one connection until either side ends it."""
        async with near:
            await self._flows["there"].wait()
            if self._refuses:
                return
            with suppress(OSError):
                async with await trio.open_tcp_stream(*self.target) as far:
                    await self._join(_Pair(near, far, trio.CancelScope()))

    async def _join(self, pair: _Pair) -> None:
        self._pairs.add(pair)
        try:
            with pair.cut:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._carry, pair, "there", pair.near, self._request)
                    nursery.start_soon(self._carry, pair, "back", pair.far, self._answer)
        finally:
            self._pairs.discard(pair)

    async def _carry(
        self, pair: _Pair, way: Way, source: trio.SocketStream, piece: Callable[[_Pair, bytes], Awaitable[None]]
    ) -> None:
        """Forward one direction; its end closes both."""
        reader = _Pieces(source, framed=self._framed)
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while data := await reader.next():
                await self._flows[way].wait()
                await piece(pair, data)
        pair.cut.cancel()

    async def _request(self, pair: _Pair, data: bytes) -> None:
        fate = self.choose(data)
        self.requests += 1
        if fate.fault != "none":
            self.faults[fate.fault] += 1
        if fate.fault == "cut request":
            await pair.far.send_all(data[: len(data) // 2])
            pair.cut.cancel()
            await trio.lowlevel.checkpoint()
        if fate.fault == "lost request":
            return
        if fate.fault == "late request":
            self._nursery.start_soon(self._deliver, data, fate.delay_s)
            return
        pair.fates.append(fate)
        await pair.far.send_all(data)

    async def _deliver(self, data: bytes, delay_s: float) -> None:
        """Send a late request over a separate connection, and discard the answer."""
        await trio.sleep(delay_s)
        with suppress(OSError, trio.BrokenResourceError):
            async with await trio.open_tcp_stream(*self.target) as far:
                await far.send_all(data)
                await _Pieces(far, framed=self._framed).next()
        self.landed.set()

    async def _answer(self, pair: _Pair, data: bytes) -> None:
        fate = self._fate_of_answer(pair.fates)
        if fate.fault == "lost answer":
            return
        if fate.fault == "late answer":
            await trio.sleep(fate.delay_s)
            await self._flows["back"].wait()
        if fate.fault == "cut answer":
            await pair.near.send_all(data[: len(data) // 2])
            pair.cut.cancel()
            await trio.lowlevel.checkpoint()
        await pair.near.send_all(data)

    def _fate_of_answer(self, fates: deque[Fate]) -> Fate:
        """Return an answer's fate: a frame has its request's; other bytes have the last request's."""
        if self._framed:
            return fates.popleft() if fates else GOOD
        while len(fates) > 1:
            fates.popleft()
        return fates[0] if fates else GOOD


class _Pieces:
    """The messages of a stream: complete length-prefixed frames, or chunks as received."""

    def __init__(self, stream: trio.SocketStream, *, framed: bool) -> None:
        self._stream, self._framed, self._buffer = stream, framed, bytearray()

    async def next(self) -> bytes:
        """Return the next message; empty at the end, even in the middle of a frame."""
        if not self._framed:
            return bytes(await self._stream.receive_some())
        while len(self._buffer) < 4 or len(self._buffer) < 4 + int.from_bytes(self._buffer[:4], "big"):
            more = await self._stream.receive_some()
            if not more:
                return b""
            self._buffer += more
        size = 4 + int.from_bytes(self._buffer[:4], "big")
        piece = bytes(self._buffer[:size])
        del self._buffer[:size]
        return piece


@asynccontextmanager
async def open_proxy(target: tuple[str, int], *, framed: bool = False) -> AsyncIterator[Proxy]:
    """Run a proxy in front of ``target`` while the block runs."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        proxy = Proxy(target, listener, nursery, framed=framed)
        nursery.start_soon(trio.serve_listeners, proxy.serve, [listener])
        yield proxy
        nursery.cancel_scope.cancel()
