"""What hypercorn lacks: bounds and request ids before the application, problems as refusals, streams that were begun.

A framework reads a body as fast as it comes, wherever it goes. So ``Gate`` counts and times bodies by the lane's rules,
and refuses them before the application sees them.
"""

from __future__ import annotations

import ssl
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import h11
import trio
from h11._readers import ChunkedReader
from hypercorn.events import Closed, RawData, Updated
from hypercorn.protocol.events import Request
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol, H11WSConnection

from broker.http.budgets import FEW_PARTS, BodyBudget, Pace, Reservation, body_deadline, too_large, too_slow
from broker.http.lane import MAX_HEAD_BYTES, MAX_LENGTH_DIGITS, WAITED_MS
from broker.http.messages import (
    EVENT_STREAM,
    answer_for,
    ends_connection,
    new_request_id,
    sane_request_id,
    status_of,
)
from broker.http.peer import NO_PEER
from broker.http.tls_socket import TlsStream
from broker.http.websocket import StreamSocket
from broker.http.wire import ChunkedBody, reason_phrase
from broker.security.guard import NO_ADMISSION, OPEN, OPEN_ADMISSION, RefusedRequest, refuse_query_token
from broker.security.identity import NOBODY
from plainsong.protocol.errors import BadRequest, MalformedBody, PlainsongError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping

    from hypercorn.config import Config
    from hypercorn.typing import AppWrapper, ASGIFramework, ASGIReceiveCallable, ASGISendCallable, Scope

    from broker.api.route import Route
    from broker.http.budgets import AnswerRoom, HttpSettings
    from broker.http.messages import Answer, BodyStream, Conversations
    from broker.http.messages import Request as Asked
    from broker.http.origin_check import OriginCheck
    from broker.http.peer import Peer
    from broker.security.guard import Admission, Guard

#: Chunks that are taken apart for one event: behind each other connections have their turns.
EVENT_CHUNKS = 128
#: What brings less than this of a body may be made of as many chunks. Behind the first few of a body each is counted as
#: so much long work: measured with chunks of one byte.
TINY_EVENT_BYTES = 1 << 10
TINY_EVENT_S = 0.0004
#: How long the rest of a body is read and dropped after its request has been answered.
LINGER_S = 2.0
#: How long the last answer of a connection over HTTP/2 has to leave before it is cut.
LAST_ANSWER_S = 0.1
#: The key of a scope's ``extensions`` for the request's ``Passage``.
PASSAGE = "plainsong.passage"
#: The key for a function that ends the request's connection.
CUT = "plainsong.cut"
#: The key for the connection's ``Peer``.
PEER = "plainsong.peer"
#: The key for the connection's ``SendingEnd``.
SENDING_END = "plainsong.sending-end"
#: What is sent within this time was not waited for.
AT_ONCE_S = 0.01
#: Answers are given to the server in pieces of this size.
PIECE_BYTES = 64 << 10


class Passage:
    """One request on its way through the gate."""

    def __init__(self, scope: Any, budget: BodyBudget, settings: HttpSettings) -> None:
        self.pace = Pace(settings)
        self.headers: dict[str, str] = {}
        for raw_name, raw_value in scope["headers"]:
            name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
            self.headers[name] = f"{self.headers[name]}, {value}" if name in self.headers else value
        #: The client's own if it is sane, else a new one.
        self.request_id = sane_request_id(self.headers.get("x-request-id")) or new_request_id()
        #: The body's share of the budget, until the application has answered.
        self.reservation: Reservation = budget.reserve()
        #: The answer's share of the budget, until it has left.
        self.room: AnswerRoom = budget.answers.room()
        self.received_bytes = 0
        #: Parts of the body that had hardly a byte.
        self.tiny_events = 0
        self.body_ended = trio.Event()
        #: Whether the application waits for more of the body.
        self.receiving = 0
        self.started = trio.current_time()
        self.refusal: PlainsongError | None = None
        self.answering = False
        #: Whether its connection ends behind its answer.
        self.is_last = False
        #: The answer's body, if it is made while it is sent.
        self.stream: BodyStream | None = None
        #: Who sent it, and what decides whether they may.
        self.guard: Guard = OPEN
        self.admission: Admission = OPEN_ADMISSION
        extensions = scope.setdefault("extensions", {})
        self.peer: Peer = extensions.get(PEER, NO_PEER)
        self.sending_end: SendingEnd = extensions.get(SENDING_END) or SendingEnd()
        extensions[PASSAGE] = self

    def enter(self, route: Route[Any], path: Mapping[str, str]) -> None:
        """Its route is known: whether its sender may ask it. Raises PlainsongError."""
        length = self.headers.get("content-length", "")
        size = int(length) if length.isascii() and length.isdigit() and len(length) <= MAX_LENGTH_DIGITS else 0
        try:
            self.guard.enter(self.admission, route, path, self.peer, self.request_id, size)
        except PlainsongError as error:
            self.is_last = ends_connection(error)
            raise

    async def answer_reader(self, answer: Callable[[Asked], Awaitable[Answer]], asked: Asked) -> Answer:
        """The answer to a request that may wait for something: as ``Lane._answer_reader``."""
        with trio.CancelScope() as waiting, self.sending_end.telling(waiting.cancel):
            self.reservation.may_give_way(waiting.cancel)
            try:
                return await answer(asked)
            finally:
                self.reservation.keeps()
        if self.reservation.gave_way:
            return answer_for(self.reservation.refusal())
        asked.waited_ms = WAITED_MS
        return await answer(asked)


class SendingEnd:
    """What the requests of a connection know of its client's sending half: whether it has been closed."""

    def __init__(self) -> None:
        self.has_come = False
        #: Whether an answer is under way that has no end, so that a client that sends no more is taken to have gone.
        self.is_endless = False
        self._told: dict[Callable[[], object], None] = {}

    def come(self) -> None:
        """The client has closed its sending half, which may be all of it."""
        self.has_come = True
        for tell in list(self._told):
            tell()

    @contextmanager
    def telling(self, tell: Callable[[], object]) -> Iterator[None]:
        """Calls ``tell`` once the client sends no more."""
        self._told[tell] = None
        if self.has_come:
            tell()
        try:
            yield
        finally:
            del self._told[tell]


class Gate:
    """An ASGI application around ``app``. ``is_stopping``: whether kept-alive connections should end."""

    def __init__(
        self,
        app: ASGIFramework,
        settings: HttpSettings,
        budget: BodyBudget,
        is_stopping: Callable[[], bool],
        check: OriginCheck,
        guard: Guard = OPEN,
    ) -> None:
        self._app = app
        self._guard = guard
        self._settings = settings
        self._budget = budget
        self._check = check
        self._is_stopping = is_stopping

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Passes one request to ``app``, or refuses it; only the application's life passes untouched."""
        if scope["type"] == "websocket":
            await _refuse_websocket(send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        passage = Passage(scope, self._budget, self._settings)
        try:
            with passage.reservation:
                await self._pass(passage, scope, receive, send)
            if passage.is_last and scope["http_version"] >= "2":  # where no header says so
                await trio.sleep(LAST_ANSWER_S)
                cut: Any = scope.get("extensions", {}).get(CUT)
                if cut is not None:
                    cut()
        finally:
            if passage.stream is not None:  # the framework closes only a stream that it has begun to send
                with trio.CancelScope(shield=True):
                    await passage.stream.aclose()
            passage.room.release()

    async def _pass(self, passage: Passage, scope: Any, receive: Any, send: Any) -> None:
        async def counted_receive() -> Any:
            passage.receiving += 1
            with trio.CancelScope(deadline=self._deadline(passage)) as wait:
                message = await receive()
            passage.receiving -= 1
            if wait.cancelled_caught:
                passage.refusal = too_slow(passage.received_bytes)
            elif message["type"] == "http.request":
                self._count(passage, message)
                passage.tiny_events += len(message["body"]) <= TINY_EVENT_BYTES
                if passage.tiny_events > FEW_PARTS:
                    await self._budget.long_work.charge(TINY_EVENT_S)
            else:
                passage.body_ended.set()  # the client has gone
            if passage.refusal is not None:
                attempt.cancel()
                await trio.sleep_forever()
            return message

        async def marked_send(message: Any) -> None:
            if message["type"] == "http.response.start":
                passage.refusal = passage.refusal or self._stream_refusal(message, passage, scope)
                if passage.refusal is not None:
                    attempt.cancel()
                    await trio.sleep_forever()
                passage.answering = True
                passage.sending_end.is_endless = _is_endless(message["headers"])
                message = self._preflight(message, passage)
                message = {**message, "headers": self._marked(message["headers"], passage, scope)}
            elif message["type"] == "http.response.body" and not (
                message.get("more_body") or passage.body_ended.is_set()
            ):
                await self._send(passage, {**message, "more_body": True}, scope, send)
                message = {"type": "http.response.body", "body": b"", "more_body": False}
                await self._linger(passage, receive)
            await self._send(passage, message, scope, send)

        def give_way() -> None:
            passage.refusal = passage.reservation.refusal()
            attempt.cancel()

        with trio.CancelScope() as attempt:
            passage.refusal = self._check.refusal(scope["method"], passage.headers, passage.peer) or self._refusal(
                passage
            )
            if passage.refusal is None:
                passage.refusal = await self._admit(passage, scope)
            if passage.refusal is None:
                passage.reservation.may_give_way(give_way)
                await self._app(scope, counted_receive, marked_send)
        if passage.refusal is not None and not passage.answering:
            await self._refuse(passage, scope, receive, send)

    async def _admit(self, passage: Passage, scope: Any) -> PlainsongError | None:
        """Finds out who sent a request; the refusal, if that cannot be said and a name is needed."""
        guard = passage.guard = self._guard
        if not guard.required:
            return None
        is_open = guard.asks_nobody(scope["path"]) or (
            scope["method"] == "OPTIONS" and "access-control-request-method" in passage.headers
        )
        try:
            if not is_open:
                refuse_query_token(scope["query_string"].decode("latin-1"))
            passage.admission = await guard.admit(passage.headers, passage.peer)
        except PlainsongError as error:
            passage.admission = NO_ADMISSION
            if is_open:
                return None
            guard.refused(RefusedRequest(error, NOBODY, passage.peer, "service", passage.request_id))
            guard.answered("unknown", scope["path"], status_of(error), passage.request_id)
            return error
        return None

    async def _send(self, passage: Passage, message: Any, scope: Any, send: Any) -> None:
        """Sends a message in pieces, since the server below buffers whatever it gets until it is sent."""
        rest = memoryview(message.get("body", b""))
        while len(rest) > PIECE_BYTES:
            piece = {"type": "http.response.body", "body": bytes(rest[:PIECE_BYTES]), "more_body": True}
            await self._send_piece(passage, piece, scope, send)
            rest = rest[PIECE_BYTES:]
            message = {**message, "body": bytes(rest)} if len(rest) <= PIECE_BYTES else message
        await self._send_piece(passage, message, scope, send)

    async def _send_piece(self, passage: Passage, message: Any, scope: Any, send: Any) -> None:
        """Sends one piece at the pace that its reader has to keep.

        Over HTTP/1.1 hypercorn shields what it sends, and ``HypercornConnection`` sees to the pace; over HTTP/2 a reader
        may stop while its connection lives.
        """
        cut = scope.get("extensions", {}).get(CUT)
        if cut is None:
            await send(message)
            return
        room, pace, begun_s = passage.room, passage.pace, trio.current_time()
        room.blocks(cut)
        try:
            with trio.move_on_after(pace.left_s()) as wait:
                await send(message)
        finally:
            room.moves()
        if wait.cancelled_caught:
            cut()
            await trio.sleep_forever()  # the end of the connection cancels this task
        waited_s = trio.current_time() - begun_s
        if waited_s > AT_ONCE_S:
            pace.waited(waited_s, len(message.get("body", b"")))

    def _refusal(self, passage: Passage) -> PlainsongError | None:
        """Why the request is refused by its head alone."""
        length = passage.headers.get("content-length")
        if length is None:
            return None
        if "transfer-encoding" in passage.headers:
            return MalformedBody("a body has a Content-Length or is chunked, never both")
        if not (length.isascii() and length.isdigit()):
            return MalformedBody("Content-Length is no number, or there are two of them")
        if len(length) > MAX_LENGTH_DIGITS or int(length) > self._settings.max_body_bytes:
            return too_large(self._settings.max_body_bytes)
        return None

    def _stream_refusal(self, message: Any, passage: Passage, scope: Any) -> PlainsongError | None:
        """Why an answer that is a stream of events is refused to a page, which could read one where it reads no other."""
        if scope["method"] != "GET" or not _is_endless(message["headers"]):
            return None
        return self._check.refusal("GET", passage.headers, passage.peer, streams=True)

    def _preflight(self, message: Any, passage: Passage) -> Any:
        """The answer to OPTIONS, which names the path's methods, as a browser wants it before it sends a request."""
        allow = dict(message["headers"]).get(b"allow", b"").decode("latin-1")
        added = self._check.preflight_headers(passage.headers, allow) if message["status"] == 200 and allow else []
        return {**message, "status": 204, "headers": [*message["headers"], *_encoded(added)]} if added else message

    def _count(self, passage: Passage, message: Any) -> None:
        passage.received_bytes += len(message.get("body", b""))
        if not message.get("more_body", False):
            passage.body_ended.set()
            passage.reservation.keeps()
        if passage.received_bytes > self._settings.max_body_bytes:
            passage.refusal = too_large(self._settings.max_body_bytes)
        try:
            passage.reservation.grow(max(0, passage.received_bytes - passage.reservation.reserved_bytes))
        except PlainsongError as error:
            passage.refusal = error

    def _deadline(self, passage: Passage) -> float:
        if passage.body_ended.is_set() or passage.answering:
            return float("inf")
        return body_deadline(passage.started, passage.received_bytes, self._settings)

    def _marked(self, headers: Any, passage: Passage, scope: Any) -> list[tuple[bytes, bytes]]:
        marked = [*headers, (b"x-request-id", passage.request_id.encode("ascii"))]
        marked += _encoded(self._check.cors_headers(passage.headers, (name.decode("latin-1") for name, _ in headers)))
        if scope["http_version"] < "2" and (self._is_stopping() or passage.refusal is not None or passage.is_last):
            marked.append((b"connection", b"close"))
        return marked

    async def _refuse(self, passage: Passage, scope: Any, receive: Any, send: Any) -> None:
        """Answers, then reads the rest of the body: with a reset, the client would lose the answer."""
        assert passage.refusal is not None
        answer = answer_for(passage.refusal)
        assert isinstance(answer.body, bytes)
        headers = [(b"content-type", str(answer.content_type).encode()), (b"content-length", b"%d" % len(answer.body))]
        headers += [(name.lower().encode(), value.encode()) for name, value in answer.headers]
        marked = self._marked(headers, passage, scope)
        await send({"type": "http.response.start", "status": answer.status, "headers": marked})
        await send({"type": "http.response.body", "body": answer.body, "more_body": True})
        await self._linger(passage, receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _linger(self, passage: Passage, receive: Any) -> None:
        """Reads the rest of the body for a while and drops it, unless the application still reads it."""
        with trio.move_on_after(LINGER_S):
            if passage.receiving:
                await passage.body_ended.wait()
            while not passage.body_ended.is_set():
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    passage.body_ended.set()


async def _refuse_websocket(send: Any) -> None:
    """Refuses what is no conversation of ours: over HTTP/2, where hypercorn takes WebSockets, nothing would check it."""
    answer = answer_for(BadRequest("there are no WebSockets over HTTP/2 here", hint="open it over HTTP/1.1"))
    headers = [
        *_encoded([("content-type", str(answer.content_type)), *answer.headers]),
        (b"x-request-id", new_request_id().encode("ascii")),
    ]
    await send({"type": "websocket.http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": answer.body, "more_body": False})


def _encoded(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]


def _is_endless(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether this is the head of an answer without an end."""
    return any(name.lower() == b"content-type" and value.startswith(EVENT_STREAM.encode()) for name, value in headers)


# --- HTTP/1.1 --------------------------------------------------------------------------------------


class _Chunks(ChunkedReader):
    """Reads a chunked body as the lane does.

    h11 takes lines that end in a bare LF, and makes an event of each chunk: bodies in chunks of one byte kept everybody
    else waiting for seconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self._body = ChunkedBody()
        #: What followed the body, once it has ended.
        self._rest: bytes | None = None

    def __call__(self, buf: Any) -> Any:
        """See h11's readers: the next of the body, and then its end. What followed that is in ``buf`` again."""
        if self._rest is None:
            self._feed(bytes(buf.maybe_extract_at_most(len(buf)) or b""))
            data = self._body.taken()
            if data:
                return h11.Data(data=data)
        if self._rest is None:
            return None
        later = buf.maybe_extract_at_most(len(buf)) or b""
        buf += self._rest
        buf += later
        return h11.EndOfMessage()

    def _feed(self, data: bytes) -> None:
        before = self._body.size
        try:
            self._rest = self._body.feed(data, EVENT_CHUNKS)
            while self._body.is_behind and self._body.size == before:
                self._rest = self._body.feed(b"", EVENT_CHUNKS)
        except MalformedBody as error:
            raise h11.LocalProtocolError(error.detail) from None


class _StrictConnection(h11.Connection):
    """Refuses heads that h11 takes, ignores an empty line before a request, and drops what follows the last request.

    The bound of h11 is for heads that are not whole yet. It takes any version and any method.

    h11 treats what follows the last request as an error, and hypercorn then closes the connection while the last answer is being sent: a client
    with pipelined requests behind our ``Connection: close`` would lose it.
    """

    def __init__(self, *others: Any, **named: Any) -> None:
        super().__init__(*others, **named)
        self._has_skipped = False

    def _get_io_object(self, role: Any, event: Any, io_dict: Any) -> Any:
        """What reads or writes in the present state."""
        found = super()._get_io_object(role, event, io_dict)
        return _Chunks() if type(found) is ChunkedReader else found

    def receive_data(self, data: bytes) -> None:
        """Feeds ``data``, unless no request can follow."""
        if self.their_state is not h11.MUST_CLOSE or not data:
            super().receive_data(data)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next event; none after the last request."""
        if self.their_state is h11.MUST_CLOSE and self.our_state is not h11.ERROR:
            return h11.NEED_DATA
        if self.their_state is h11.IDLE and not self._has_skipped and self.trailing_data[0].startswith(b"\r\n"):
            self._has_skipped = True  # RFC 9112, section 2.2, asks for patience with one
            self._receive_buffer.maybe_extract_at_most(2)
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._has_skipped = False
            self._check_head(event)
        return event

    def _check_head(self, request: h11.Request) -> None:
        """Raises h11.RemoteProtocolError for a head that is refused, with its status."""
        method, version = bytes(request.method), bytes(request.http_version)
        size = len(method) + len(request.target) + sum(len(name) + len(value) + 4 for name, value in request.headers)
        if version not in (b"1.0", b"1.1") and (method, version) != (b"PRI", b"2.0"):
            status = 505
        elif method != method.upper():  # methods are case-sensitive, and hypercorn would take this one for another
            status = 501
        elif size > MAX_HEAD_BYTES:
            status = 431
        else:
            return
        self._process_error(self.their_role)
        raise h11.RemoteProtocolError("the head is refused", error_status_hint=status)


class RefusingH11(H11Protocol):
    """Hypercorn's HTTP/1.1, with problem+json refusals, and with our WebSockets."""

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        *others: Any,
        conversations: Conversations | None = None,
        peer: Peer = NO_PEER,
    ) -> None:
        super().__init__(app, config, *others)
        self._conversations = conversations
        self._peer = peer
        self.connection = _StrictConnection(h11.SERVER, max_incomplete_event_size=config.h11_max_incomplete_size)

    async def _create_stream(self, request: h11.Request) -> None:
        """Begins a request's stream; a WebSocket is a conversation, if the server has conversations."""
        if self._conversations is None or not _wants_websocket(request):
            await super()._create_stream(request)
            return
        assert isinstance(self.connection, h11.Connection)
        socket = StreamSocket(
            self._conversations, self.context, self.task_group, self.stream_send, STREAM_ID, self._peer
        )
        self.stream = socket  # type: ignore[assignment]  # only what it implements is used
        self.connection = H11WSConnection(self.connection)
        begun = Request(
            stream_id=STREAM_ID,
            headers=list(request.headers),
            http_version=request.http_version.decode(),
            method="GET",
            raw_path=request.target,
            state=self.connection_state,
        )
        await socket.handle(begun)

    async def _send_h11_event(self, event: Any) -> None:
        """Sends an event; the head of an answer with the reason phrase that the lane's has."""
        if isinstance(event, h11.Response | h11.InformationalResponse) and not event.reason:
            event = type(event)(
                status_code=event.status_code,
                headers=event.headers,
                http_version=event.http_version,
                reason=reason_phrase(event.status_code).encode("ascii"),
            )
        await super()._send_h11_event(event)

    async def _check_protocol(self, event: h11.Request) -> None:
        """Finds HTTP/2 whose client knew of it; an upgrade to h2c is ignored, which HTTP allows.

        Hypercorn takes one of a request whose body it takes for absent, and is then cut off in the middle of it. It is
        obsolete (RFC 9113, section 3.1), and clients that offer it go on in HTTP/1.1.
        """
        if event.method == b"PRI":
            await self.send(Updated(idle=True))  # it is no request: without one the connection rests, and is not kept
            await super()._check_protocol(event)

    async def _maybe_recycle(self) -> None:
        """Gets ready for the next request after an answer, also when the server stops.

        Hypercorn closes then, and the task that has read the next request waits for ever: the stop takes its whole
        grace. Here the next request is answered, with ``Connection: close``; ``_idle_timeout`` closes idle connections.
        """
        await self._close_stream()
        if self.connection.our_state is h11.DONE and self.connection.their_state is h11.DONE:
            self.connection.start_next_cycle()
            await self.can_read.set()
            await self.send(Updated(idle=True))
        else:
            await self.can_read.set()
            await self.send(Closed())

    async def _send_error_response(self, status_code: int) -> None:
        """Refuses what cannot be parsed: 400, 431 for a head over the bound, 501 for an unknown coding or method, or 505."""
        if self.connection.their_state is h11.ERROR and self.stream is not None:
            error: BadRequest = MalformedBody("the body is not framed as its head says")
        else:
            error = BadRequest("this is no HTTP/1.1 request that we can read", hint="see the status for what is wrong")
        answer = answer_for(error)
        assert isinstance(answer.body, bytes)
        body = answer.body.replace(b'"status": 400', b'"status": %d' % status_code)
        own = [
            (b"content-type", str(answer.content_type).encode()),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", new_request_id().encode()),
            (b"connection", b"close"),
            *((name.lower().encode(), value.encode()) for name, value in answer.headers),
        ]
        headers = list(chain(own, self.config.response_headers("h11")))
        head = h11.Response(status_code=status_code, headers=headers, reason=reason_phrase(status_code).encode("ascii"))
        # In one piece: the application may be about to answer too, and after a head of its own the body could not follow.
        events = (head, h11.Data(data=body), h11.EndOfMessage())
        await self.send(RawData(data=b"".join(self.connection.send(event) or b"" for event in events)))


def _wants_websocket(request: h11.Request) -> bool:
    """Whether this is the GET that opens a WebSocket."""
    headers = {name.lower(): value.lower() for name, value in request.headers}
    tokens = [token.strip() for token in headers.get(b"connection", b"").split(b",")]
    return request.method == b"GET" and b"upgrade" in tokens and headers.get(b"upgrade") == b"websocket"


# --- connections -----------------------------------------------------------------------------------


#: The TLS versions as ASGI's ``tls`` extension numbers them.
_TLS_VERSIONS = {"TLSv1.2": 0x0303, "TLSv1.3": 0x0304}


class ResumedStream(trio.abc.HalfCloseableStream):
    """A socket stream whose first ``receive_some`` returns the bytes that were read before."""

    def __init__(self, stream: trio.SocketStream | TlsStream, already_read: bytes) -> None:
        self._stream = stream
        #: None: it is plain.
        self.tls = stream.tls if isinstance(stream, TlsStream) else None
        self._already_read = already_read
        #: Hypercorn takes the addresses of both ends from it.
        self.socket: Any = stream.socket

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """The next bytes; ``b""`` at the end."""
        if self._already_read:
            first, self._already_read = self._already_read, b""
            await trio.lowlevel.checkpoint()
            return first
        return await self._stream.receive_some(max_bytes)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Sends all of ``data``."""
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        """Waits until a send may succeed at once."""
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """Sends no more."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """Closes the connection."""
        await self._stream.aclose()


def with_certificate(app: AppWrapper, stream: ssl.SSLObject) -> AppWrapper:
    """``app`` with ASGI's ``tls`` extension in its scopes: the version, and the client's certificate if it sent one."""
    shown = stream.getpeercert(binary_form=True)
    tls = {
        "server_cert": None,
        "client_cert_chain": [ssl.DER_cert_to_PEM_cert(shown)] if shown else [],
        "client_cert_name": _subject(stream.getpeercert()) if shown else None,
        "client_cert_error": None,
        "tls_version": _TLS_VERSIONS.get(stream.version() or ""),
        "cipher_suite": None,
    }

    return with_extension(app, "tls", tls)


def with_extension(app: AppWrapper, name: str, value: object) -> AppWrapper:
    """``app`` with ``value`` under ``name`` in the extensions of its scopes."""

    async def extended(scope: Any, receive: Any, send: Any, sync_spawn: Any, call_soon: Any) -> None:
        scope.setdefault("extensions", {})[name] = value
        await app(scope, receive, send, sync_spawn, call_soon)

    return extended


_SHORT = {"commonName": "CN", "organizationName": "O", "organizationalUnitName": "OU", "countryName": "C"}


def _subject(certificate: Any) -> str:
    """The subject's name as text, the most specific part first (RFC 4514)."""
    parts = [
        f"{_SHORT.get(kind, kind)}={value.replace(chr(92), chr(92) * 2).replace(',', chr(92) + ',')}"
        for group in certificate.get("subject", ())
        for kind, value in group
    ]
    return ",".join(reversed(parts))
