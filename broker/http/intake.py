"""Reading the body of a lane request: bounded before it is read, counted and timed while it is."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import trio

from broker.http import wire
from broker.http.bodies import Holding, body_deadline, broke_off, too_large, too_slow
from broker.http.chunked import ChunkedBody
from broker.http.connection import Connection, PeerLeft
from broker.http.head import CHUNKED

if TYPE_CHECKING:
    from broker.http.head import Head
    from broker.http.settings import HttpSettings

#: A large body is read in pieces of this size.
BODY_RECEIVE_BYTES = 256 << 10


async def read_body(connection: Connection, head: Head, held: Holding, settings: HttpSettings) -> bytes:
    """The body as sent, taken off ``connection`` after its head. After an error what follows is not a request.

    Raises:
      BodyTooLarge, Overloaded: before a byte of it was read, where its length was told.
      MalformedBody: it breaks off, is too slow, or is not chunked as it says.
    """
    length = head.length
    if length > settings.max_body_bytes:
        raise too_large(settings.max_body_bytes)
    held.grow(max(length, 0))
    if head.expects_continue and not connection.pending:
        await connection.send_all(wire.CONTINUE)
    intake = _Intake(connection, settings.body_timeout_s)
    if length == CHUNKED:
        return await _read_chunks(connection, intake, held, settings.max_body_bytes)
    parts = [connection.pending]
    intake.received_bytes = len(connection.pending)
    connection.pending = b""
    while intake.received_bytes < length:
        parts.append(await intake.receive(min(length - intake.received_bytes, BODY_RECEIVE_BYTES)))
    return b"".join(parts)


async def _read_chunks(connection: Connection, intake: _Intake, held: Holding, max_body_bytes: int) -> bytes:
    chunked = ChunkedBody()
    data, connection.pending = connection.pending, b""
    intake.received_bytes = len(data)
    while True:
        rest = chunked.feed(data)
        if len(chunked.body) > max_body_bytes:
            raise too_large(max_body_bytes)
        held.grow(len(chunked.body) - held.held_bytes)
        if rest is not None:
            connection.pending = rest
            return bytes(chunked.body)
        data = await intake.receive(BODY_RECEIVE_BYTES)


class _Intake:
    """Receives a body in time."""

    def __init__(self, connection: Connection, body_timeout_s: float) -> None:
        self._connection = connection
        self._body_timeout_s = body_timeout_s
        self._started = trio.current_time()
        self.received_bytes = 0
        connection.scope.deadline = inf  # the deadline here is for the body, and has an answer

    async def receive(self, max_bytes: int) -> bytes:
        with trio.move_on_at(body_deadline(self._started, self.received_bytes, self._body_timeout_s)):
            try:
                data = await self._connection.receive(max_bytes)
            except PeerLeft:
                raise broke_off(self.received_bytes) from None
            self.received_bytes += len(data)
            return data
        raise too_slow(self.received_bytes)
