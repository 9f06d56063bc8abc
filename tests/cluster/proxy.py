"""A TCP proxy that, as told, loses answers, delays them, cuts in the middle, stalls, and refuses connections.

It stands between a daemon and HBase's Thrift gateway, whose requests and answers are frames (``framed=True``: each is a
whole one), or between any two that speak TCP, where whatever arrives together counts as one.
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
"""What who connects sends, and what comes back."""
WAYS: tuple[Way, ...] = get_args(Way)


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a request and its answer."""

    fault: Fault = "none"
    delay_s: float = 0.0
    """How late a late request or answer is. A late request arrives also when its sender has given it up by then."""


GOOD = Fate()
Choose = Callable[[bytes], Fate]


def calm(_: bytes) -> Fate:
    """Nothing happens to anything."""
    return GOOD


class Storm:
    """Faults by chance: every so many requests one of ``faults``, the same ones for the same seed."""

    def __init__(self, seed: int, share: float, delay_s: float, faults: Sequence[Fault] = FAULTS) -> None:
        self._rng, self._share, self._delay_s, self._faults = Random(seed), share, delay_s, tuple(faults)

    def __call__(self, _: bytes) -> Fate:
        chance, fault = self._rng.random(), self._rng.choice(self._faults)
        return Fate(fault, self._delay_s) if chance < self._share else GOOD


class Once:
    """One fate for the next request that has a mark in it; all others are good."""

    def __init__(self, mark: bytes, fate: Fate) -> None:
        self._mark, self._fate = mark, fate
        self.met = trio.Event()

    def __call__(self, request: bytes) -> Fate:
        if self.met.is_set() or self._mark not in request:
            return GOOD
        self.met.set()
        return self._fate


def moving() -> trio.Event:
    """A flow that moves."""
    event = trio.Event()
    event.set()
    return event


@dataclass(slots=True, eq=False)
class _Pair:
    """A connection and the one behind it."""

    near: trio.SocketStream
    far: trio.SocketStream
    cut: trio.CancelScope
    fates: deque[Fate] = field(default_factory=deque)


class Proxy:
    """Listens on a port of its own, which stays the same; ``open_proxy`` makes one."""

    def __init__(
        self, target: tuple[str, int], listener: trio.SocketListener, nursery: trio.Nursery, *, framed: bool
    ) -> None:
        self.target = target
        self._nursery = nursery
        self.choose: Choose = calm
        self.faults: Counter[str] = Counter()
        """Those that were made."""
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
        """Where to connect to."""
        host, port = self._listener.socket.getsockname()
        return host, port

    @property
    def text(self) -> str:
        """``host:port`` of it."""
        host, port = self.address
        return f"{host}:{port}"

    def stall(self, *ways: Way) -> None:
        """Nothing moves any more, in either direction or in those that are named; connections are taken, and wait."""
        if all(flow.is_set() for flow in self._flows.values()):
            self.faults[" ".join(["stall", *ways])] += 1
        for way in ways or WAYS:
            if self._flows[way].is_set():
                self._flows[way] = trio.Event()

    def refuse(self) -> None:
        """Cut every connection, and any that comes."""
        self._refuses = True
        self.faults["refusal"] += 1
        self.cut_all()

    def heal(self) -> None:
        """What stood still moves, what comes is let through, and no fault is chosen any more."""
        self.choose, self._refuses = calm, False
        for flow in self._flows.values():
            flow.set()

    def cut_all(self) -> None:
        """Break every connection there is."""
        for pair in list(self._pairs):
            pair.cut.cancel()

    async def serve(self, near: trio.SocketStream) -> None:
        """One connection, until either side ends it."""
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
        """Pieces of one direction; the end of one is the end of both."""
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
        """A request that arrives by itself, and whose answer nobody waits for."""
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
        """Frames answer one request each; of other bytes nobody knows, so they share the last request's fate."""
        if self._framed:
            return fates.popleft() if fates else GOOD
        while len(fates) > 1:
            fates.popleft()
        return fates[0] if fates else GOOD


class _Pieces:
    """What comes from a stream: frames, whole, with their length before them; or whatever arrives together."""

    def __init__(self, stream: trio.SocketStream, *, framed: bool) -> None:
        self._stream, self._framed, self._buffer = stream, framed, bytearray()

    async def next(self) -> bytes:
        """The next one; empty at the end, also when that comes in the middle of a frame."""
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
    """A proxy before ``target`` until the block is left."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        proxy = Proxy(target, listener, nursery, framed=framed)
        nursery.start_soon(trio.serve_listeners, proxy.serve, [listener])
        yield proxy
        nursery.cancel_scope.cancel()
