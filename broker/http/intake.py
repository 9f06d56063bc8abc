"""The intake of request bodies: their size and time are bounded before and while they are read."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, TypeVar

import trio

from broker.http import wire
from broker.http.budgets import FEW_PARTS, Reservation, body_deadline, broke_off, too_large, too_slow
from broker.http.connection import Connection, PeerLeft
from broker.http.heads import CHUNKED
from broker.http.wire import ChunkedBody
from plainsong.protocol.errors import PlainsongError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from broker.config.sections import HttpConfig

T = TypeVar("T")
#: Size of one read of a large body.
BODY_RECEIVE_BYTES = 256 << 10
#: A client that waits for 100 Continue with a body larger than this is not asked to send it just to keep the
#: connection.
MAX_DROPPED_BYTES = 64 << 10
#: Chunks that are parsed in one slice of long work: under a millisecond.
SLICE_CHUNKS = 500


class Intake:
    """Counts and times the body of one request, over HTTP/1.1 or HTTP/2."""

    __slots__ = ("_held", "_settings", "_started_s", "_waiting", "received_bytes")

    def __init__(self, held: Reservation, settings: HttpConfig) -> None:
        self._held = held
        self._settings = settings
        self._started_s = trio.current_time()
        self._waiting: trio.CancelScope | None = None
        self.received_bytes = 0

    async def within(self, receive: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``receive``, if it arrives in time.

        Raises:
          MalformedBody: the body is late.
          Overloaded: the request had to give way to others.
        """
        deadline_s = body_deadline(self._started_s, self.received_bytes, self._settings)
        if self._held.gave_way:
            raise self._held.refusal()
        if trio.current_time() > deadline_s:
            raise too_slow(self.received_bytes)
        with trio.CancelScope(deadline=deadline_s) as self._waiting:
            return await receive()
        raise self._held.refusal() if self._held.gave_way else too_slow(self.received_bytes)

    def count(self, size: int) -> None:
        """Count ``size`` bytes that have arrived; a body that is only announced takes no room.

        Raises:
          BodyTooLarge: the body is over the bound.
          Overloaded: there is no room for it, or the request had to give way.
        """
        self.received_bytes += size
        if self.received_bytes > self._settings.max_body_bytes:
            raise too_large(self._settings.max_body_bytes)
        self._held.grow(max(0, self.received_bytes - self._held.reserved_bytes))

    def give_way(self) -> None:
        """Make ``within`` raise Overloaded: others need the room of the body."""
        if self._waiting is not None:
            self._waiting.cancel()


class BodyReader:
    """Reads the body of one request from its connection, piece by piece; what follows it stays ``pending``."""

    __slots__ = (
        "_chunked",
        "_connection",
        "_expects_continue",
        "_failure",
        "_held",
        "_left_bytes",
        "has_ended",
        "is_taken",
        "received_bytes",
    )

    def __init__(self, connection: Connection, length: int, held: Reservation, *, expects_continue: bool) -> None:
        self._connection = connection
        self._held = held
        self._left_bytes = length
        self._chunked = ChunkedBody() if length == CHUNKED else None
        #: True until the client has been asked to send the body, or needs no asking.
        self._expects_continue = expects_continue
        #: Once set, the body has no known end, so that no request can follow it.
        self._failure: PlainsongError | None = None
        #: True when all of it has been read off the connection, and when its last piece has been taken.
        self.has_ended = length == 0
        self.is_taken = False
        self.received_bytes = 0

    def takes_continue(self) -> bool:
        """Return True, once, if the client may be waiting for 100 Continue before it sends the body."""
        expects, self._expects_continue = self._expects_continue, False
        return expects and not (self.has_ended or self._connection.pending)

    @property
    def is_long(self) -> bool:
        """True if reading the rest would cost more than ending the connection."""
        return not self.has_ended and (self._chunked is not None or self._left_bytes > MAX_DROPPED_BYTES)

    def take_pending(self) -> bytes:
        """Return the whole body; it must have a Content-Length and have arrived."""
        connection, length = self._connection, self._left_bytes
        body = connection.pending[:length]
        connection.pending = connection.pending[length:]
        self.has_ended = self.is_taken = True
        return body

    def drop_pending(self) -> None:
        """Skip the body if it has a Content-Length and has arrived."""
        if 0 <= self._left_bytes <= len(self._connection.pending):
            self.take_pending()

    def give_up(self) -> None:
        """Mark the body as unread, whatever has arrived, so that the connection ends after the answer."""
        self.has_ended = False

    async def next(self) -> bytes:
        """Return the next piece; it is empty only at the end of the body.

        Raises:
          MalformedBody: it is truncated, or its chunks are malformed; each later call raises it again.
          OSError: the connection is broken.
        """
        if self._failure is not None:
            raise self._failure
        if self._expects_continue and self.takes_continue():
            await self._connection.send_all(wire.CONTINUE)
        try:
            piece = await (self._next() if self._chunked is None else self._next_of_chunks(self._chunked))
        except PlainsongError as failure:
            self._failure = failure
            raise
        self.is_taken = self.has_ended
        return piece

    async def _next(self) -> bytes:
        data = await self._received(self._left_bytes)
        if len(data) > self._left_bytes:
            data, self._connection.pending = data[: self._left_bytes], data[self._left_bytes :]
        self._left_bytes -= len(data)
        self.received_bytes += len(data)
        self.has_ended = not self._left_bytes
        return data

    async def _received(self, most_bytes: int) -> bytes:
        """Return all pending bytes, or else what arrives next, up to ``most_bytes``."""
        connection = self._connection
        data, connection.pending = connection.pending, b""
        if data or self.has_ended:
            return data
        try:
            return await connection.receive(min(most_bytes, BODY_RECEIVE_BYTES))
        except PeerLeft:
            raise broke_off(self.received_bytes) from None

    async def _next_of_chunks(self, chunked: ChunkedBody) -> bytes:
        while not self.has_ended:
            if chunked.is_behind:
                async with self._held.long_work:
                    rest = chunked.feed(b"", SLICE_CHUNKS)
            else:
                data = await self._received(BODY_RECEIVE_BYTES)
                self.received_bytes += len(data)
                rest = chunked.feed(data, FEW_PARTS)
            if rest is not None:
                self.has_ended, self._connection.pending = True, rest
            piece = chunked.taken()
            if piece:
                return piece
            await trio.lowlevel.checkpoint()  # only after the decoded bytes are stored: it may be cancelled
        return b""


async def read_body(reader: BodyReader, length: int, held: Reservation, settings: HttpConfig) -> bytes:
    """Return the whole body, as sent. After an error, the connection's next bytes are not a request.

    Raises:
      BodyTooLarge: raised before anything is read, if the announced length is over the bound.
      Overloaded: there is no room for what has arrived, or the body was slow and its room was needed for others.
      MalformedBody: it is truncated or too slow, or its chunks are malformed.
    """
    if length > settings.max_body_bytes:
        raise too_large(settings.max_body_bytes)
    intake = Intake(held, settings)
    held.may_give_way(intake.give_way)
    body = io.BytesIO()
    try:
        while not reader.has_ended:
            piece = await intake.within(reader.next)
            intake.count(len(piece))
            body.write(piece)
    finally:
        held.keeps()
    return body.getvalue()  # not a copy
