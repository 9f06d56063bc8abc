"""The WebSocket of a conversation, on a connection that was HTTP/1.1 until then.

A framework's WebSocket passes each message through two queues and four tasks: 8 500 small messages a second instead of
100 000. It also buffers input without a bound, and accepts compression, which would need protection from bombs. This
one stops reading while too much is in progress.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

import trio
from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Ping, TextMessage
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import generate_accept_token

from broker.http import wire
from broker.http.budgets import FEW_PARTS, body_deadline
from broker.http.connection import PeerLeft
from broker.http.floods import FrameAllowance
from broker.http.messages import joined, new_request_id, sane_request_id, status_of
from broker.security.guard import Hold
from plainsong.protocol.errors import BadRequest, MalformedBody, NotFound, PlainsongError, ShuttingDown, Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wsproto.events import Event as WsEvent

    from broker.http.connection import Connection as HttpConnection
    from broker.http.gate import ServerParts
    from broker.http.heads import PlainHead
    from broker.http.messages import Begin, Conversation
    from broker.security.identity import On, Verb

_PATH = re.compile(r"/v1/namespaces/([^/]+)/topics/([^/]+)/stream\Z")
_VERSION = "13"
#: Frames with a smaller average size are handled as long work: the smallest request is larger.
TINY_FRAME_BYTES = 12


class StreamSocket:
    """One WebSocket, from its handshake to its end."""

    def __init__(self, begin: Begin, shared: ServerParts, connection: HttpConnection) -> None:
        self._begin = begin
        self._shared = shared
        self._connection = connection
        self._peer = connection.peer
        #: Keeps frames whole: half a frame would corrupt the connection.
        self._sending = trio.Lock()
        self._socket = Connection(ConnectionType.SERVER)
        self._conversation: Conversation | None = None
        self._hold: Hold | None = None
        #: The received part of an incomplete message, which counts against the budget.
        self._message = bytearray()
        #: True while a message is incomplete.
        self._is_begun = False
        self._allowance = FrameAllowance()
        self._reservation = shared.budget.reserve()
        self._since_s = 0.0
        self._received_s = trio.current_time()
        self._pinged = False
        #: Expires when input is overdue; ``_watch`` then checks whether it is.
        self._silence = trio.CancelScope()
        self._taking = False
        #: Number of answered requests that were charged to the quotas of its name.
        self._paid_for = 0
        #: The code and reason of the coming close; no more messages are accepted.
        self._ending: tuple[int, str] | None = None
        self._leaving = False
        self._closed = False
        self._life = trio.CancelScope()

    async def run(self, head: PlainHead) -> None:
        """Serve until the WebSocket ends.

        Raises:
          PeerLeft: the client has left.
          OSError: the connection is broken.
        """
        if not await self._open(head):
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read, nursery)
            await self._serve()
            nursery.cancel_scope.cancel()

    async def _read(self, nursery: trio.Nursery) -> None:
        """Handle what arrives; end the WebSocket when the client leaves."""
        connection = self._connection
        data, connection.pending = connection.pending, b""
        try:
            while True:
                if data:
                    await self._receive(data)
                data = await connection.receive()
                await trio.lowlevel.checkpoint()
        except (PeerLeft, OSError):
            self._closed = True
            if not self._leaving:
                self._life.cancel()

    # --- the handshake -------------------------------------------------------------------------

    async def _open(self, head: PlainHead) -> bool:
        """Accept the handshake, or refuse it (False)."""
        headers = joined(head.pairs)
        request_id = sane_request_id(headers.get("x-request-id")) or new_request_id()
        path, _, query = head.target.decode("latin-1").partition("?")
        try:
            key = self._checked(headers, head.length)
            try:
                admission = await self._shared.guard.identify(headers, query, self._peer, request_id)
            except PlainsongError as error:
                self._shared.guard.answered(_ROUTE.name, path, status_of(error), request_id)
                raise
            found = _PATH.match(unquote(path))
            if found is None:
                raise NotFound(
                    "this path has no WebSocket", hint=("the stream of a topic is at …/topics/{topic}/stream")
                )
            places = {"namespace": found[1], "topic": found[2]}
            self._shared.guard.enter(admission, _ROUTE, places, self._peer, request_id, 0)
            self._hold = Hold(self._shared.guard, admission.who, _ROUTE, places, self._end_for)
            conversation = self._begin(found[1], found[2], request_id, self._shared.budget.reserve(), admission.who)
            await _open_or_close(conversation)
        except PlainsongError as error:
            await self._refuse(error, request_id)
            return False
        self._conversation = conversation
        accepted = [
            ("Upgrade", "websocket"),
            ("Connection", "Upgrade"),
            ("Sec-WebSocket-Accept", generate_accept_token(key).decode("ascii")),
            ("X-Request-Id", request_id),
            *conversation.headers,
        ]
        try:
            await self._connection.send_all(wire.head_of(101, accepted, chunks=False))
        except BaseException:
            conversation.close()
            raise
        return True

    def _end_for(self, problem: PlainsongError) -> None:
        """Accept no more messages, since the rights of its name have ended; accepted ones are still answered."""
        may_return = isinstance(problem, Unavailable)  # for example while the provider's keys are unavailable
        self._end(CloseReason.TRY_AGAIN_LATER if may_return else CloseReason.POLICY_VIOLATION, problem.code)

    def _checked(self, headers: dict[str, str], length: int) -> bytes:
        """Return the key of an acceptable handshake. Raises PlainsongError."""
        refusal = self._shared.check.refusal("GET", headers, self._peer, streams=True)
        if refusal is not None:
            raise refusal
        if self._shared.stopping.is_set():
            raise ShuttingDown("the daemon is shutting down")
        if length:  # otherwise its bytes would be read as frames
            raise BadRequest("a request that opens a WebSocket must have no body")
        key = headers.get("sec-websocket-key", "")
        if headers.get("sec-websocket-version") != _VERSION or not key:
            raise BadRequest("this is not a valid WebSocket handshake", hint="Sec-WebSocket-Version: 13")
        return key.encode("latin-1")

    async def _refuse(self, error: PlainsongError, request_id: str) -> None:
        self._closed = True
        await self._connection.send_all(wire.refusal(error, request_id))

    # --- in ------------------------------------------------------------------------------------

    async def _receive(self, data: bytes) -> None:
        """Handle all complete messages; return when there is room for more."""
        if self._ending is not None:
            return  # the connection is closing: nothing more is answered
        self._received_s, self._pinged = trio.current_time(), False
        self._socket.receive_data(data)
        messages, ending = await self._whole_messages()
        if messages:
            assert self._conversation is not None
            self._taking = True
            try:
                await self._conversation.take(messages)
                await self._slow_down(sum(map(len, messages)))
            except MalformedBody as fault:
                ending = CloseReason.INVALID_FRAME_PAYLOAD_DATA, fault.detail
            finally:
                self._taking = False
                self._reservation.shrink(sum(map(len, messages)))
        if ending is not None:
            self._end(*ending)

    async def _slow_down(self, size: int) -> None:
        """Sleep for as long as the quotas require; accepted messages are answered during that time."""
        hold, conversation = self._hold, self._conversation
        if hold is not None and conversation is not None and self._shared.guard.required:
            answered, self._paid_for = conversation.answered - self._paid_for, conversation.answered
            quotas, path = self._shared.guard.quotas, hold.path
            await trio.sleep(quotas.pause_s(hold.who, path["namespace"], path["topic"], size, answered))

    async def _whole_messages(self) -> tuple[list[bytes], tuple[int, str] | None]:
        """Return the complete messages; and the code and reason of the close, if no more may follow."""
        taken = _TakenFrames()
        events = self._socket.events()
        is_more = self._take_frames(events, taken)
        while is_more and taken.ending is None and not self._closed:
            if not taken.is_tiny:
                await trio.lowlevel.checkpoint()
                is_more = self._take_frames(events, taken)
                continue
            async with self._reservation.long_work:
                is_more = self._take_frames(events, taken)
        for pong in taken.pongs:
            await self._send_data(pong)
        return taken.messages, taken.ending

    def _take_frames(self, events: Iterator[WsEvent], taken: _TakenFrames) -> bool:
        """Decode a few frames, each of which costs as much as thousands of bytes. Return True if there may be more."""
        frames = controls = content_bytes = 0
        for event in islice(events, FEW_PARTS):
            frames += 1
            if isinstance(event, BytesMessage) and event.data:
                content_bytes += len(event.data)
            else:
                controls += 1
            taken.ending = self._take_frame(event, taken)
            if taken.ending is not None:
                return False
        self._allowance.content(content_bytes)
        if controls and not self._allowance.control(controls):
            taken.ending = CloseReason.POLICY_VIOLATION, "too many frames without content"
        taken.is_tiny = content_bytes < frames * TINY_FRAME_BYTES
        return frames == FEW_PARTS

    def _take_frame(self, event: WsEvent, taken: _TakenFrames) -> tuple[int, str] | None:
        """Decode a frame. Return the code and reason of the close, if no more may follow."""
        if isinstance(event, BytesMessage):
            if not self._is_begun:
                self._since_s, self._is_begun = trio.current_time(), True
                self._silence.deadline = min(self._silence.deadline, self._due_s())
            refused = self._keep(event.data)
            if refused is not None:
                return refused
            if event.message_finished:
                if self._message:  # an empty message has no requests
                    taken.messages.append(bytes(self._message))
                    self._message.clear()
                self._is_begun = False
        elif isinstance(event, TextMessage):
            return CloseReason.UNSUPPORTED_DATA, "a stream uses msgpack, in binary messages"
        elif isinstance(event, Ping):
            taken.pongs.append(self._socket.send(event.response()))
        elif isinstance(event, CloseConnection):
            is_theirs = self._socket.state is ConnectionState.REMOTE_CLOSING  # otherwise wsproto found a protocol error
            return int(event.code), "" if is_theirs else event.reason or ""
        return None

    def _keep(self, piece: bytes | bytearray) -> tuple[int, str] | None:
        """Store a piece of a message. Return the code and reason of the close if that is not possible."""
        max_bytes = self._shared.settings.max_body_bytes
        if len(self._message) + len(piece) > max_bytes:
            return CloseReason.MESSAGE_TOO_BIG, f"a message is limited to {max_bytes} bytes"
        try:
            self._reservation.grow(len(piece))
        except PlainsongError as error:
            return CloseReason.TRY_AGAIN_LATER, error.detail
        self._message += piece
        return None

    def _end(self, code: int, reason: str) -> None:
        """Accept no more messages; close once all accepted ones are answered."""
        if self._ending is None and self._conversation is not None:
            self._ending = code, reason
            self._conversation.finish()

    # --- out -----------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Send answers until the end, then close."""
        assert self._conversation is not None
        assert self._hold is not None
        try:
            with self._life, self._shared.guard.holding(self._hold):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch)
                    while (data := await self._conversation.answers()) is not None:
                        # Also after the client has sent its close: it waits for them.
                        await self._send_data(_binary_head(len(data)) + data)
                    async with self._sending:  # do not cancel a ping halfway
                        nursery.cancel_scope.cancel()
                self._leaving = True
                code, reason = self._ending or (CloseReason.NORMAL_CLOSURE, "")
                await self._send_data(self._socket.send(CloseConnection(code, reason)))
        finally:
            self._closed = True
            self._conversation.close()
            self._reservation.release()

    async def _send_data(self, data: bytes) -> None:
        async with self._sending:
            if self._closed:
                return
            try:
                await self._connection.send_all(data)
            except OSError:  # the client has left
                self._closed = True
                self._life.cancel()

    async def _watch(self) -> None:
        """End the WebSocket when the daemon stops, or when the client is silent."""
        while self._ending is None:
            with trio.CancelScope(deadline=self._due_s()) as self._silence:
                await self._shared.stopping.wait()
                self._end(CloseReason.GOING_AWAY, "the daemon is shutting down")
                return
            await self._on_silence()

    def _due_s(self) -> float:
        """Return the time by which something must arrive."""
        settings = self._shared.settings
        if self._is_begun:
            return body_deadline(self._since_s, len(self._message), settings)
        return self._received_s + settings.keep_alive_s

    async def _on_silence(self) -> None:
        """Act on a deadline: extend it for a client that waits for answers, otherwise close or ping."""
        assert self._conversation is not None
        if self._taking or self._conversation.waiting:
            self._received_s = self._since_s = trio.current_time()
        elif self._due_s() > trio.current_time():
            return  # something has arrived since
        elif self._is_begun:
            self._end(CloseReason.POLICY_VIOLATION, "the message did not arrive in time")
        elif self._pinged:
            self._end(CloseReason.GOING_AWAY, "nothing was received, not even a pong")
        else:
            self._pinged, self._received_s = True, trio.current_time()
            await self._send_data(self._socket.send(Ping()))


@dataclass(slots=True)
class _TakenFrames:
    """The content of one read."""

    messages: list[bytes] = field(default_factory=list)
    pongs: list[bytes] = field(default_factory=list)
    ending: tuple[int, str] | None = None
    """The code and reason of the close, if no more may follow."""
    is_tiny: bool = False
    """True if the last frames were smaller than any request."""


class _StreamRoute(NamedTuple):
    """The attributes of the stream's route that the guard reads. A test compares them with the route itself."""

    name: str = "stream"
    verbs: tuple[Verb, ...] = ("publish",)
    on: On = "topic"


_ROUTE = _StreamRoute()


async def _open_or_close(conversation: Conversation) -> None:
    try:
        await conversation.opened()
    except BaseException:
        conversation.close()
        raise


def _binary_head(length: int) -> bytes:
    """Return the frame header of a complete binary message from a server."""
    if length < 126:
        return struct.pack(">BB", 0x82, length)
    return struct.pack(">BBH", 0x82, 126, length) if length < 65536 else struct.pack(">BBQ", 0x82, 127, length)
