"""One call of a link: its answer or error, and streams that are sent as far as their reader has granted credit."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import trio

from actors.mailbox import Future
from broker.link.wire import INLINE_BYTES, PIECE_BYTES, PIECE_OVERHEAD_BYTES
from plainsong.protocol.errors import MalformedBody, RequestTooLarge
from plainsong.protocol.link import FrameKind

if TYPE_CHECKING:
    from broker.http.messages import BodyStream
    from broker.link.wire import Wire


class LinkBroken(Exception):
    """There is no answer, and none will arrive on this link.

    ``sent``: True if the peer may have received the request; False if it certainly has not.
    """

    def __init__(self, why: str, *, sent: bool) -> None:
        super().__init__(why)
        self.why = why
        self.sent = sent


@dataclass(slots=True)
class Reply:
    """An answer: a value, and a body, whole or as a stream that its receiver must close."""

    value: Any = None
    body: bytes | BodyStream = b""


class PendingCall(Future[Any]):
    """One call of a link, and the part of its answer that has arrived."""

    __slots__ = ("inflow", "outflow", "pieces", "place", "size", "value")

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        #: Position of its last frame; once that is sent, the peer can act.
        self.place: float = inf
        #: An answer that arrives in pieces and is returned whole: its value, and the pieces so far.
        self.value: Any = None
        self.pieces: list[bytes] | None = None
        self.inflow: Inflow | None = None
        self.outflow: Outflow | None = None

    @property
    def is_over(self) -> bool:
        """True if the peer sends no more for this call, so that a cancellation need not be sent."""
        return self.is_settled and (self.inflow is None or self.inflow.ended)


# --- flow control ----------------------------------------------------------------------------------
#
# Pieces of a stream are sent while there is credit. The reader grants credit as it consumes them.


class Outflow:
    """The messages sent under one number."""

    def __init__(self, wire: Wire, number: int) -> None:
        self._wire = wire
        self._number = number
        self._credit = wire.bounds.window_bytes
        self._more = trio.Event()
        self._broken: Exception | None = None
        self.ended = False

    async def send(self, data: bytes) -> None:
        """Send one message, in pieces if it is long, as credit allows.

        Raises:
          LinkBroken, PlainsongError: the peer accepts no more.
        """
        last = max(len(data) - 1, 0) // PIECE_BYTES
        for index in range(last + 1):
            piece = data if last == 0 else data[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]
            while self._credit <= 0 and self._broken is None:
                self._more = trio.Event()
                await self._more.wait()
            await self._wire.drain()
            if self._broken is not None:
                raise self._broken
            self._credit -= len(piece) + PIECE_OVERHEAD_BYTES
            self._wire.put(FrameKind.PIECE, self._number, bytes(piece), index < last)
        await trio.lowlevel.checkpoint()

    def end(self) -> None:
        """Announce the end of the messages to the peer."""
        if not self.ended and self._broken is None:
            self.ended = True
            self._wire.put(FrameKind.END, self._number)

    def credit(self, more_bytes: int) -> None:
        """Add credit that the peer has granted."""
        self._credit += more_bytes
        self._more.set()

    def fail(self, error: Exception) -> None:
        """Make every further ``send`` raise ``error``."""
        if self._broken is None:
            self._broken = error
        self._more.set()


class Inflow:
    """The messages received under one number."""

    def __init__(self, wire: Wire, number: int) -> None:
        self._wire = wire
        self._number = number
        #: Messages, and the credit that receiving each one returns.
        self._messages: deque[tuple[bytes, int]] = deque()
        self._partial: list[bytes] = []
        self._partial_bytes = 0
        self._partial_cost = 0
        #: Bytes that have arrived and are not consumed; and bytes that are consumed but not granted again yet.
        self._unused = 0
        self._used = 0
        self._error: Exception | None = None
        self._arrived = trio.Event()
        #: True if nothing more will arrive; messages may still wait to be received.
        self.ended = False

    def take(self, piece: bytes, *, more: bool) -> None:
        """Store a piece, without waiting. Raises MalformedBody: the sender had no credit for it."""
        if self.ended:
            return
        bounds = self._wire.bounds
        cost = len(piece) + PIECE_OVERHEAD_BYTES
        self._unused += cost
        if self._unused > bounds.window_bytes + PIECE_BYTES + PIECE_OVERHEAD_BYTES:
            raise MalformedBody(f"more was sent under {self._number} than the credit allowed")
        if not more and not self._partial:
            self._messages.append((piece, cost))
            self._arrived.set()
            return
        self._partial.append(piece)
        self._partial_bytes += len(piece)
        self._partial_cost += cost
        if self._partial_bytes > bounds.message_bytes:
            self.end(RequestTooLarge(f"a message has more than {bounds.message_bytes} bytes"))
        elif more:
            self._admit_rest()
        else:
            self._messages.append((b"".join(self._partial), self._partial_cost))
            self._partial.clear()
            self._partial_bytes = self._partial_cost = 0
            self._arrived.set()

    def end(self, error: Exception | None = None) -> None:
        """Accept no more; ``error`` is the reason if the end was premature."""
        if not self.ended:
            self.ended = True
            self._error = error
            self._arrived.set()

    async def receive(self) -> bytes | None:
        """Return the next message; None if there are no more.

        Raises:
          LinkBroken, PlainsongError: the rest will not arrive; raised after all complete messages.
        """
        await trio.lowlevel.checkpoint()
        while not self._messages:
            if self.ended:
                if self._error is not None:
                    raise self._error
                return None
            self._arrived = trio.Event()
            await self._arrived.wait()
        message, cost = self._messages.popleft()
        self._grant(cost)
        self._admit_rest()
        return message

    def _admit_rest(self) -> None:
        """Grant credit for an incomplete message if no other waits: its reader could not consume it before."""
        if self._partial_cost and not self._messages:
            cost, self._partial_cost = self._partial_cost, 0
            self._grant(cost)

    def _grant(self, cost: int) -> None:
        self._unused -= cost
        self._used += cost
        if self._used >= self._wire.bounds.window_bytes // 4 and not self.ended:
            self._wire.put(FrameKind.CREDIT, self._number, self._used)
            self._used = 0


# --- replies ---------------------------------------------------------------------------------------


async def send_reply(wire: Wire, number: int, reply: Reply, outflow: Outflow) -> None:
    """Send a reply in one frame, in pieces, or as its stream is produced and its reader grants credit.

    The stream is always closed.

    Raises:
      Exception: as the stream raised it, or the reason why its reader accepts no more.
      TypeError: the value cannot be encoded.
    """
    body = reply.body
    if not isinstance(body, bytes):
        try:
            wire.put(FrameKind.HEAD, number, reply.value, False)
            async for data in body:
                if data:
                    await outflow.send(data)
        finally:
            with trio.CancelScope(shield=True):
                await body.aclose()
        outflow.end()
        return
    if wire.is_full:
        await wire.drain()  # the call still counts as in progress, which limits unread answers
    if len(body) <= INLINE_BYTES:
        wire.put(FrameKind.ANSWER, number, reply.value, body)
        return
    wire.put(FrameKind.HEAD, number, reply.value, True)
    for start in range(0, len(body), PIECE_BYTES):
        wire.put(FrameKind.PIECE, number, body[start : start + PIECE_BYTES], False)
        await wire.drain()
    wire.put(FrameKind.END, number)
