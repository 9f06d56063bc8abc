"""One call of a link: its reply or error, and streams that go out as far as the reader has given credit.

One call of a link: its answer, the error instead of one, and whoever waits for either.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import trio

from actors.future import Future
from broker.link.wire import INLINE_BYTES, PIECE_BYTES, PIECE_COSTS
from plainsong.protocol.errors import MalformedBody, RequestTooLarge
from plainsong.protocol.link import FrameKind

if TYPE_CHECKING:
    from broker.http.messages import BodyStream
    from broker.link.wire import Wire


class LinkBroken(Exception):
    """There is no answer, and will be none over this link.

    ``sent``: whether the peer may have got the request; False means that it certainly has not.
    """

    def __init__(self, why: str, *, sent: bool) -> None:
        super().__init__(why)
        self.why = why
        self.sent = sent


@dataclass(slots=True)
class Reply:
    """An answer: a value, and a body, whole or to be read as it comes. Whoever gets a stream closes it."""

    value: Any = None
    body: bytes | BodyStream = b""


class PendingCall(Future[Any]):
    """One call of a link, and what has come of its answer."""

    __slots__ = ("inflow", "outflow", "pieces", "place", "size", "value")

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        #: Of its last frame, after which the peer has all it needs to act.
        self.place: float = inf
        #: Of an answer that comes in pieces and is returned whole.
        self.value: Any = None
        self.pieces: list[bytes] | None = None
        self.inflow: Inflow | None = None
        self.outflow: Outflow | None = None


# --- flow ------------------------------------------------------------------------------------------
#
# Streams within a link: pieces go out as far as there is credit, and credit is given as they are used.


class Outflow:
    """What is sent under one number."""

    def __init__(self, wire: Wire, number: int) -> None:
        self._wire = wire
        self._number = number
        self._credit = wire.bounds.window_bytes
        self._more = trio.Event()
        self._broken: Exception | None = None
        self.ended = False

    async def send(self, data: bytes) -> None:
        """Sends one message, in pieces if it is long, as far as the other side takes it.

        Raises:
          LinkBroken, PlainsongError: why the other side takes no more.
        """
        last = max(len(data) - 1, 0) // PIECE_BYTES
        for index in range(last + 1):
            piece = data if last == 0 else data[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]
            while self._credit <= 0 and self._broken is None:
                self._more = trio.Event()
                await self._more.wait()
            await self._wire.room()
            if self._broken is not None:
                raise self._broken
            self._credit -= len(piece) + PIECE_COSTS
            self._wire.put(FrameKind.PIECE, self._number, bytes(piece), index < last)
        await trio.lowlevel.checkpoint()

    def end(self) -> None:
        """Says that there is no more."""
        if not self.ended and self._broken is None:
            self.ended = True
            self._wire.put(FrameKind.END, self._number)

    def credit(self, more_bytes: int) -> None:
        """The other side has used so much."""
        self._credit += more_bytes
        self._more.set()

    def broke(self, error: Exception) -> None:
        """Nothing more will be taken; whoever sends is told ``error``."""
        if self._broken is None:
            self._broken = error
        self._more.set()


class Inflow:
    """What is received under one number: messages, until there are no more."""

    def __init__(self, wire: Wire, number: int) -> None:
        self._wire = wire
        self._number = number
        #: Messages, and what each counts for when it is received.
        self._messages: deque[tuple[bytes, int]] = deque()
        self._partial: list[bytes] = []
        self._partial_bytes = 0
        self._partial_cost = 0
        #: Received, and not used; used, and not given back as credit.
        self._held = 0
        self._used = 0
        self._error: Exception | None = None
        self._arrived = trio.Event()
        #: Whether nothing more will come; there may be messages that wait to be received.
        self.ended = False

    def take(self, piece: bytes, *, more: bool) -> None:
        """Takes a piece; never waits. Raises MalformedBody: more was sent than there was credit for."""
        if self.ended:
            return
        bounds = self._wire.bounds
        cost = len(piece) + PIECE_COSTS
        self._held += cost
        if self._held > bounds.window_bytes + PIECE_BYTES + PIECE_COSTS:
            raise MalformedBody(f"more was sent under {self._number} than there was credit for")
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
            self._make_way()
        else:
            self._messages.append((b"".join(self._partial), self._partial_cost))
            self._partial.clear()
            self._partial_bytes = self._partial_cost = 0
            self._arrived.set()

    def end(self, error: Exception | None = None) -> None:
        """No more will come; ``error`` says why, where that was too early."""
        if not self.ended:
            self.ended = True
            self._error = error
            self._arrived.set()

    async def receive(self) -> bytes | None:
        """The next message; None: there are no more.

        Raises:
          LinkBroken, PlainsongError: the rest will not come, after all that did.
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
        self._give_back(cost)
        self._make_way()
        return message

    def _make_way(self) -> None:
        """Nobody can use a message before it is whole: where it is the only one, the rest of it is let in."""
        if self._partial_cost and not self._messages:
            cost, self._partial_cost = self._partial_cost, 0
            self._give_back(cost)

    def _give_back(self, cost: int) -> None:
        self._held -= cost
        self._used += cost
        if self._used >= self._wire.bounds.window_bytes // 4 and not self.ended:
            self._wire.put(FrameKind.CREDIT, self._number, self._used)
            self._used = 0


# --- replying --------------------------------------------------------------------------------------
#
# A reply on its way out: in one frame, in pieces, or as its stream is made and its reader takes it.


async def send_reply(wire: Wire, number: int, reply: Reply, outflow: Outflow) -> None:
    """Sends all of it under ``number``, a stream as far as ``outflow`` has credit; the stream is closed in any case.

    Raises:
      Exception: what the stream raised, or why its reader takes no more. TypeError: the value cannot travel.
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
        await wire.room()  # until then it counts as under way: so answers that nobody reads are bounded, too
    if len(body) <= INLINE_BYTES:
        wire.put(FrameKind.ANSWER, number, reply.value, body)
        return
    wire.put(FrameKind.HEAD, number, reply.value, True)
    for start in range(0, len(body), PIECE_BYTES):
        wire.put(FrameKind.PIECE, number, body[start : start + PIECE_BYTES], False)
        await wire.room()
    wire.put(FrameKind.END, number)
