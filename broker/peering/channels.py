"""Streamed answers and conversations, as whoever called and whoever is called has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from broker.peering.answers import LinkBroken
from protocol.peering.frames import Frame

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from broker.peering.flow import Inflow, Outflow
    from broker.peering.link import Link
    from broker.peering.wire import Wire


class AnswerStream:
    """A body that comes in pieces; a ``BodyStream``."""

    def __init__(self, inflow: Inflow, link: Link, number: int) -> None:
        self._inflow = inflow
        self._link = link
        self._number = number

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        data = await self._inflow.receive()
        if data is None:
            raise StopAsyncIteration
        return data

    async def aclose(self) -> None:
        """Ends it there, too, unless it has ended."""
        self._link._over(self._number, cancel=not self._inflow.ended)
        self._inflow.end()


class Channel:
    """One conversation: messages both ways, each in order, and as fast as the other side uses them."""

    def __init__(self, inflow: Inflow, outflow: Outflow, link: Link, number: int) -> None:
        self._inflow = inflow
        self._outflow = outflow
        self._link = link
        self._number = number

    async def send(self, data: bytes) -> None:
        """Sends a message. Waits while the peer has not used what was sent. Raises LinkBroken, PlainsongError."""
        await self._outflow.send(data)

    async def receive(self) -> bytes | None:
        """The next message; None: the peer has finished. Raises LinkBroken, PlainsongError."""
        return await self._inflow.receive()

    def finish(self) -> None:
        """Says that no more will be sent; there may still be something to receive."""
        self._outflow.end()

    async def aclose(self) -> None:
        """``close``, for those who are asynchronous."""
        self.close()

    def close(self) -> None:
        """Ends it; there, whoever is at it is cancelled, unless both sides have finished."""
        both = self._inflow.ended and self._outflow.ended
        self._link._over(self._number, cancel=not both)
        self._inflow.end()
        self._outflow.broke(LinkBroken("the conversation was closed", sent=True))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class ServedChannel:
    """A conversation as whoever is called has it. The first use of it tells the caller that it has begun."""

    def __init__(self, wire: Wire, number: int, inflow: Inflow, outflow: Outflow) -> None:
        self._wire = wire
        self._number = number
        self._inflow = inflow
        self._outflow = outflow
        self._accepted = False

    def accept(self) -> None:
        """Tells the caller that it has begun; a second call does nothing."""
        if not self._accepted:
            self._accepted = True
            self._wire.put(Frame.OPENED, self._number)

    async def send(self, data: bytes) -> None:
        """Sends a message. Waits while the peer has not used what was sent."""
        self.accept()
        await self._outflow.send(data)

    async def receive(self) -> bytes | None:
        """The next message; None: the caller sends no more."""
        self.accept()
        return await self._inflow.receive()

    def finish(self) -> None:
        """Says that no more will be sent."""
        self.accept()
        self._outflow.end()
