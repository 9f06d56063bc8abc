"""The watch: notices at once when a client leaves while its answer is pending."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import trio

if TYPE_CHECKING:
    from typing import NoReturn

#: Requests answered sooner are never watched: a task for each would cost more than the request.
PATIENCE_S = 0.01


class Watched(Protocol):
    """A connection whose request is being answered."""

    async def watch(self) -> None:
        """Wait for the client to leave, and cancel its request then; end when the request is answered."""


class Watch:
    """Starts a watcher for each request that is still unanswered after one to two rounds of ``PATIENCE_S``.

    It sleeps while there are no new requests: a thousand parked polls cost nothing.
    """

    __slots__ = ("_grown", "_wake", "_young")

    def __init__(self) -> None:
        self._young: dict[Watched, None] = {}
        self._grown: dict[Watched, None] = {}
        self._wake = trio.Event()

    def begin(self, connection: Watched) -> None:
        """Add a connection whose request was passed to its handler."""
        self._young[connection] = None
        if not self._wake.is_set():
            self._wake.set()

    def end(self, connection: Watched) -> None:
        """Remove a connection: its handler has answered, or failed."""
        if connection in self._young:
            del self._young[connection]
        elif connection in self._grown:
            del self._grown[connection]

    async def run(self) -> NoReturn:
        """Run until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                if not self._young and not self._grown:
                    self._wake = trio.Event()
                    await self._wake.wait()
                await trio.sleep(PATIENCE_S)
                for connection in self._grown:
                    nursery.start_soon(connection.watch)
                self._grown = self._young
                self._young = {}
        raise AssertionError("the loop ends only by cancellation")
