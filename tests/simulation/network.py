"""A simulated network: bytes arrive late, but in order in each direction; links can be cut or blocked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random

import trio

from tests.simulation.clocks import time_now


class Network:
    """All links between places; a place is the name of an instance, or ``client``."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.mean_s = 0.0005
        self.listening: dict[str, Callable[[End], None]] = {}
        #: Directed links that are blocked now.
        self.held: set[tuple[str, str]] = set()
        self.ends: dict[End, None] = {}
        self.changed = trio.Event()

    def delay_s(self) -> float:
        """Return a random transmission delay."""
        return self.rng.expovariate(1 / self.mean_s)

    def passes(self, sender: str, receiver: str) -> bool:
        return (sender, receiver) not in self.held

    def hold(self, sender: str, receiver: str) -> None:
        """Block a link in one direction."""
        self.held.add((sender, receiver))

    def heal(self) -> None:
        """Unblock all links; delayed bytes arrive."""
        self.held.clear()
        self.tell()

    def tell(self) -> None:
        """Wake everything that waits for a link."""
        self.changed.set()
        self.changed = trio.Event()
        for end in self.ends:
            end._tell()

    def break_all(self, place: str) -> None:
        """Break a place's connections."""
        for end in list(self.ends):
            if place in (end.here, end.there):
                end.cut()

    async def pass_on(self, sender: str, receiver: str) -> None:
        """Wait as long as a transmission between two places takes."""
        await time_now().sleep(self.delay_s())
        while not self.passes(sender, receiver):
            await self.changed.wait()

    async def connect(self, here: str, there: str) -> End:
        """Connect. Raises OSError if there is no listener."""
        await self.pass_on(here, there)
        await self.pass_on(there, here)
        accept = self.listening.get(there)
        if accept is None:
            raise ConnectionRefusedError(f"no listener at {there}")
        mine, theirs = End(self, here, there), End(self, there, here)
        mine.other, theirs.other = theirs, mine
        self.ends |= {mine: None, theirs: None}
        accept(theirs)
        return mine


class End(trio.abc.Stream):
    """One end of a connection."""

    other: End

    def __init__(self, network: Network, here: str, there: str) -> None:
        self.network, self.here, self.there = network, here, there
        self._in: deque[tuple[float, bytes]] = deque()
        self._last_s = 0.0
        self._finished = self._broken = self._closed = False
        self._news = trio.Event()

    def cut(self) -> None:
        """Break the connection at both ends."""
        for end in (self, self.other):
            end._broken = True
            end._tell()
            self.network.ends.pop(end, None)

    def _tell(self) -> None:
        self._news.set()
        self._news = trio.Event()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        if self._closed:
            raise trio.ClosedResourceError
        if self._broken or self.other._closed:
            raise trio.BrokenResourceError
        self.other._arrive(bytes(data))

    def _arrive(self, data: bytes) -> None:
        self._last_s = max(self._last_s, trio.current_time() + self.network.delay_s())
        self._in.append((self._last_s, data))
        time_now().at(self._last_s, self._tell)

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        while True:
            if self._closed:
                raise trio.ClosedResourceError
            if self._broken:
                raise trio.BrokenResourceError
            if not self.network.passes(self.there, self.here):
                await self._news.wait()
                continue
            if not self._in:
                if self._finished:
                    return b""
                await self._news.wait()
                continue
            due_s, data = self._in[0]
            if due_s > trio.current_time():
                await self._news.wait()
                continue
            self._in.popleft()
            if max_bytes is not None and len(data) > max_bytes:
                self._in.appendleft((due_s, data[max_bytes:]))
                data = data[:max_bytes]
            return data

    async def aclose(self) -> None:
        self._closed = True
        self.other._finished = True
        self._tell()
        self.other._tell()
        self.network.ends.pop(self, None)
        await trio.lowlevel.checkpoint()
