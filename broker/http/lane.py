"""The lane: HTTP/1.1 requests of the hot routes on one connection, one after the other, until one is not for it."""

from __future__ import annotations

import logging
from contextlib import aclosing
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import trio

from broker.http import wire
from broker.http.answers import FREE_BYTES, admitted
from broker.http.bodies import BodyBudget, Holding, decoded_body, needs_decoding
from broker.http.connection import BRIEF_LINGER_S, LINGER_S, Connection, PeerLeft
from broker.http.exchange import HotHandlers, HotRequest, HttpAnswer
from broker.http.head import MAX_HEAD_BYTES, PREFIXES, Head, parse_head
from broker.http.intake import read_body
from broker.http.request_ids import new_request_id
from broker.http.respond import respond
from broker.http.status import answer_for, only_plain
from protocol.errors import PlainsongError
from protocol.peering.frames import PREFACE

if TYPE_CHECKING:
    import socket

    from broker.http.exchange import BodyStream
    from broker.http.settings import HttpSettings
    from broker.http.watch import Watch

#: A longer body is sent behind its head as it is; below it, one piece is cheaper than two.
COPIED_BYTES = 64 << 10

log = logging.getLogger("plainsong.http")


class CutShort(Exception):
    """An answer could not be finished: only the end of the connection can say so now."""


@dataclass(slots=True, frozen=True)
class LaneParts:
    """What all lanes of a server share."""

    settings: HttpSettings
    handlers: HotHandlers
    budget: BodyBudget
    watch: Watch


class Lane:
    """A connection in the lane; ``run`` it once."""

    __slots__ = (
        "_busy",
        "_connection",
        "_head",
        "_head_bytes",
        "_in_step",
        "_parts",
        "_resting",
        "_room",
        "_stopping",
        "served",
    )

    def __init__(self, sock: socket.socket, parts: LaneParts) -> None:
        self._parts = parts
        self._connection = Connection(sock, parts.settings.send_timeout_s)
        #: The last head and its bytes: clients repeat theirs, and the same bytes say the same.
        self._head_bytes = b""
        self._head: Head | None = None
        #: Between requests; in a handler; after a request whose end we know.
        self._resting = True
        self._busy = False
        self._in_step = True
        self._stopping = False
        self._room = parts.budget.answers.room()
        #: Whether it has answered anything.
        self.served = False

    async def run(self) -> bytes | None:
        """Serves until the connection is to be closed (None), or given to hypercorn with these bytes, already read."""
        try:
            with self._connection.scope:
                handed_over = await self._serve()
                if handed_over is None:
                    await self._connection.linger(BRIEF_LINGER_S if self._in_step else LINGER_S)
                return handed_over
        except (PeerLeft, OSError):
            return None
        except CutShort:
            pass
        # An answer broke off, or a time-out, a client that left, or the end of a stop's grace: no time to be polite.
        self._connection.reset_on_close()
        return None

    def stop(self) -> None:
        """Lets the current request be the last; a connection that rests is closed if none comes right now.

        Whoever was just answered may be sending its next request already: it gets an answer, not a cut.
        """
        self._stopping = True
        if self._resting:
            self._connection.scope.deadline = trio.current_time() + BRIEF_LINGER_S

    async def watch(self) -> None:
        """Ends the connection when its client leaves while the handler is at work."""
        if self._busy:
            await self._connection.watch()

    async def _serve(self) -> bytes | None:
        while True:
            head = await self._read_head()
            if head is None:
                self._connection.scope.deadline = inf
                return self._connection.pending
            if not await self._serve_one(head) or self._stopping:
                return None
            if self._connection.pending:
                await trio.lowlevel.checkpoint()  # pipelined requests must not keep the others waiting

    async def _read_head(self) -> Head | None:
        """The next head, taken off what is pending; None when the request there is not for the lane."""
        connection, settings = self._connection, self._parts.settings
        if not connection.pending:
            self._resting = True
            connection.scope.deadline = trio.current_time() + settings.keep_alive_s
            connection.pending = await connection.receive()
            self._resting = False
        waiting = False
        while not 4 <= (end := connection.pending.find(b"\r\n\r\n") + 4) <= MAX_HEAD_BYTES:
            if _is_foreign(connection.pending):
                return None
            if not waiting:
                waiting = True
                connection.scope.deadline = trio.current_time() + settings.header_timeout_s
            connection.pending += await connection.receive()
        raw = connection.pending[:end]
        if raw != self._head_bytes:
            self._head = parse_head(raw) if raw.startswith(PREFIXES) else None
            self._head_bytes = raw
        head = self._head
        if head is None or head.path.verb not in self._parts.handlers:
            return None
        connection.pending = connection.pending[end:]
        return head

    async def _serve_one(self, head: Head) -> bool:
        """Answers one request; whether the connection is to be kept."""
        request_id = head.request_id or new_request_id()
        self.served = True
        with self._parts.budget.hold() as held:
            try:
                answer = await self._answer_to(head, held, request_id)
                keep = head.keep_alive and self._in_step and not self._stopping
                await self._send(answer, request_id, chunks=head.chunks, keep=keep)
            finally:
                self._room.release()
        return keep

    async def _answer_to(self, head: Head, held: Holding, request_id: str) -> HttpAnswer:
        """The answer, whose body is held in the connection's room."""
        try:
            body = await self._read_body(head, held)
        except PlainsongError as error:
            return answer_for(error)
        verb, namespace, topic, transaction = head.path
        request = HotRequest(
            verb, namespace, topic, head.query, head.headers, body, request_id, transaction, room=self._room
        )
        answer = await self._answer(request)
        if not self._room.held_bytes and isinstance(answer.body, bytes) and len(answer.body) <= FREE_BYTES:
            return answer
        return await admitted(answer, self._room, only_looks=verb == "poll")

    async def _read_body(self, head: Head, held: Holding) -> bytes:
        """The body, decompressed; ``_in_step`` is false after one whose end was not reached."""
        connection, settings = self._connection, self._parts.settings
        if 0 <= head.length <= len(connection.pending) and head.length <= settings.max_body_bytes:
            body = connection.pending[: head.length]
            connection.pending = connection.pending[head.length :]
            held.grow(head.length)
        else:
            self._in_step = False
            body = await read_body(connection, head, held, settings)
            self._in_step = True
        if needs_decoding(head.headers):
            return await decoded_body(body, head.headers, settings.max_body_bytes, held)
        return body

    async def _answer(self, request: HotRequest) -> HttpAnswer:
        parts = self._parts
        self._connection.scope.deadline = inf
        self._busy = True
        parts.watch.begin(self)
        try:
            return await respond(parts.handlers[request.verb], request, parts.settings.gzip_min_bytes)
        finally:
            self._busy = False
            parts.watch.end(self)
            self._connection.unwatch()

    async def _send(self, answer: HttpAnswer, request_id: str, *, chunks: bool, keep: bool) -> None:
        head = wire.answer_head(answer, request_id, chunks=chunks, close=not keep)
        if isinstance(answer.body, bytes):
            if len(answer.body) > COPIED_BYTES:
                await self._connection.send_all(head, answer.body)
            else:
                await self._connection.send_all(head + answer.body)
            return
        chunks = chunks and answer.length is None
        async with aclosing(answer.body):
            await self._connection.send_all(head)
            try:
                await self._send_stream(answer.body, chunks=chunks)
            except OSError:
                raise  # the reader has gone
            except Exception as error:
                plain, told = only_plain(error), {"request_id": request_id}
                if plain is None:
                    log.exception("a streamed answer broke off", extra=told)
                else:  # no bug: such as no room for its next block
                    log.warning("a streamed answer broke off", extra={**told, "why": plain.detail})
                raise CutShort from error

    async def _send_stream(self, stream: BodyStream, *, chunks: bool) -> None:
        async for data in stream:
            if data:
                await self._connection.send_all(wire.chunk(data) if chunks else data)
                await trio.lowlevel.checkpoint()
        if chunks:
            await self._connection.send_all(wire.LAST_CHUNK)


def _is_foreign(data: bytes) -> bool:
    """Whether bytes without the end of a head can already be told not to be the lane's."""
    if not any(data.startswith(prefix[: len(data)]) for prefix in (*PREFIXES, PREFACE)):
        return True
    return len(data) >= MAX_HEAD_BYTES or b"\n\n" in data or b"\n\r\n" in data
