"""The gate before the application: authentication, bounds of bodies and answers, request ids, problems as refusals.

A framework reads a body as fast as it arrives. The gate therefore counts and times bodies, and refuses them before the
application sees them. Requests arrive over HTTP/1.1 (``broker.http.asgi``) or over HTTP/2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trio

from broker.http.budgets import FEW_PARTS, BodyBudget, MinimumRate, Reservation, too_large
from broker.http.connection import LINGER_S
from broker.http.handlers import SendingEnd
from broker.http.heads import content_length
from broker.http.intake import Intake
from broker.http.messages import (
    EVENT_STREAM,
    answer_for,
    ends_connection,
    joined,
    new_request_id,
    sane_request_id,
    status_of,
)
from broker.security.guard import NO_ADMISSION, OPEN_ADMISSION
from broker.security.peer import NO_PEER
from plainsong.protocol.errors import BadRequest, MalformedBody, PlainsongError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hypercorn.typing import ASGIFramework, ASGIReceiveCallable, ASGISendCallable

    from broker.config.sections import HttpConfig
    from broker.http.budgets import AnswerReservation
    from broker.http.messages import BodyStream
    from broker.http.origin_check import OriginCheck
    from broker.http.route import Route
    from broker.security.guard import Admission, Guard
    from broker.security.peer import Peer

#: An event with fewer bytes of body may consist of as many chunks. Once a body has had ``FEW_PARTS`` such events, each
#: further event is charged as this much long work, the cost of an event of one-byte chunks.
TINY_EVENT_BYTES = 1 << 10
TINY_EVENT_S = 0.0004
#: Time limit for sending the last answer of an HTTP/2 connection before the connection is cut.
LAST_ANSWER_S = 0.1
#: The key of a scope's ``extensions`` for the request's ``Exchange``.
EXCHANGE = "plainsong.exchange"
#: The key for a function that cuts the request's connection.
CUT = "plainsong.cut"
#: The key for the connection's ``Peer``.
PEER = "plainsong.peer"
#: The key for the connection's ``SendingEnd``.
SENDING_END = "plainsong.sending-end"
#: A send that took less did not wait for the reader.
AT_ONCE_S = 0.01
#: Answers are passed to the server in pieces of this size.
PIECE_BYTES = 64 << 10


@dataclass(slots=True, frozen=True)
class ServerParts:
    """State that all connections of a server share."""

    settings: HttpConfig
    budget: BodyBudget
    check: OriginCheck
    guard: Guard
    stopping: trio.Event
    """Set once the current request of each connection is its last."""


class Exchange:
    """The state of one request in the gate."""

    def __init__(self, scope: Any, shared: ServerParts) -> None:
        settings, budget = shared.settings, shared.budget
        self.minimum_rate = MinimumRate(settings)
        self.headers = joined(scope["headers"])
        #: The client's id if it is sane, otherwise a new one.
        self.request_id = sane_request_id(self.headers.get("x-request-id")) or new_request_id()
        #: The body's share of the budget, until the application has answered.
        self.reservation: Reservation = budget.reserve()
        #: The answer's share of the budget, until it is sent.
        self.room: AnswerReservation = budget.answers.room()
        self.intake = Intake(self.reservation, settings)
        #: Number of events with almost no body.
        self.tiny_events = 0
        self.body_ended = trio.Event()
        #: Set when a view reads the body.
        self.wants_body = trio.Event()
        #: Number of calls of the application that wait for more of the body.
        self.receiving = 0
        self.started = trio.current_time()
        self.refusal: PlainsongError | None = None
        self.answering = False
        #: True if its connection ends after the answer.
        self.is_last = False
        #: The answer's body, if it is a stream.
        self.stream: BodyStream | None = None
        #: Authenticates and authorizes the sender; the result of authentication.
        self.guard = shared.guard
        self.admission: Admission = OPEN_ADMISSION
        extensions = scope.setdefault("extensions", {})
        self.peer: Peer = extensions.get(PEER, NO_PEER)
        #: Cuts the request's connection.
        self.cut: Callable[[], object] = extensions.get(CUT, lambda: None)
        self.sending_end: SendingEnd = extensions.get(SENDING_END) or SendingEnd()
        extensions[EXCHANGE] = self

    def enter(self, route: Route[Any], path: Mapping[str, str]) -> None:
        """Authorize the sender for the request's route, and take its cost from the quotas. Raises PlainsongError."""
        length = content_length(self.headers.get("content-length", "")) or 0
        try:
            self.guard.enter(self.admission, route, path, self.peer, self.request_id, length)
        except PlainsongError as error:
            self.is_last = ends_connection(error)
            raise


class Gate:
    """An ASGI application around ``app``."""

    def __init__(self, app: ASGIFramework, shared: ServerParts) -> None:
        self._app = app
        self._shared = shared
        self._check = shared.check

    async def __call__(self, scope: Any, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        """Pass one request to ``app``, or refuse it."""
        if scope["type"] == "websocket":
            await _refuse_websocket(send)
            return
        exchange = Exchange(scope, self._shared)
        try:
            with exchange.reservation:
                await self._pass(exchange, scope, receive, send)
            if exchange.is_last and scope["http_version"] >= "2":  # HTTP/2 has no header that announces the last answer
                await trio.sleep(LAST_ANSWER_S)
                exchange.cut()
        finally:
            if exchange.stream is not None:  # the framework closes only streams it has started to send
                with trio.CancelScope(shield=True):
                    await exchange.stream.aclose()
            exchange.room.release()

    async def _pass(self, exchange: Exchange, scope: Any, receive: Any, send: Any) -> None:
        async def counted_receive() -> Any:
            exchange.receiving += 1
            try:
                is_over = exchange.body_ended.is_set() or exchange.answering
                message = await (receive() if is_over else exchange.intake.within(receive))
                if message["type"] == "http.request":
                    self._count(exchange, message)
                    exchange.tiny_events += len(message["body"]) <= TINY_EVENT_BYTES
                    if exchange.tiny_events > FEW_PARTS:
                        await self._shared.budget.long_work.charge(TINY_EVENT_S)
                else:
                    exchange.body_ended.set()  # the client has gone
            except PlainsongError as error:
                exchange.refusal = exchange.refusal or error
            finally:
                exchange.receiving -= 1  # even if the application gave up waiting: ``_linger`` then reads the rest
            if exchange.refusal is not None:
                attempt.cancel()
                await trio.sleep_forever()
            return message

        async def marked_send(message: Any) -> None:
            if message["type"] == "http.response.start":
                exchange.refusal = exchange.refusal or self._stream_refusal(message, exchange, scope)
                if exchange.refusal is not None:
                    attempt.cancel()
                    await trio.sleep_forever()
                exchange.answering = True
                exchange.sending_end.is_endless = _is_endless(message["headers"])
                message = self._preflight(message, exchange)
                message = {**message, "headers": self._marked(message["headers"], exchange, scope)}
            elif (
                message["type"] == "http.response.body"
                and not (message.get("more_body") or exchange.body_ended.is_set())
                and scope["http_version"] >= "2"
            ):
                await self._send(exchange, {**message, "more_body": True}, send)
                message = {"type": "http.response.body", "body": b"", "more_body": False}
                await self._linger(exchange, receive)
            await self._send(exchange, message, send)

        def give_way() -> None:
            exchange.refusal = exchange.reservation.refusal()
            attempt.cancel()

        with trio.CancelScope() as attempt:
            exchange.refusal = self._check.refusal(scope["method"], exchange.headers, exchange.peer) or self._refusal(
                exchange
            )
            if exchange.refusal is None:
                exchange.refusal = await self._admit(exchange, scope)
            if exchange.refusal is None:
                exchange.reservation.may_give_way(give_way)
                await self._app(scope, counted_receive, marked_send)
        if exchange.refusal is not None and not exchange.answering:
            await self._refuse(exchange, scope, receive, send)

    async def _admit(self, exchange: Exchange, scope: Any) -> PlainsongError | None:
        """Authenticate the sender; return the refusal if that fails and the request needs a name."""
        guard = exchange.guard
        if not guard.required:
            return None
        is_open = guard.needs_no_name(scope["path"]) or (
            scope["method"] == "OPTIONS" and "access-control-request-method" in exchange.headers
        )
        try:
            if is_open:
                exchange.admission = await guard.admit(exchange.headers, exchange.peer)
            else:
                query = scope["query_string"].decode("latin-1")
                exchange.admission = await guard.identify(exchange.headers, query, exchange.peer, exchange.request_id)
        except PlainsongError as error:
            exchange.admission = NO_ADMISSION
            if is_open:
                return None
            guard.answered("unknown", scope["path"], status_of(error), exchange.request_id)
            return error
        return None

    async def _send(self, exchange: Exchange, message: Any, send: Any) -> None:
        """Send a message in pieces, since the server below buffers a message until it is sent."""
        rest = memoryview(message.get("body", b""))
        while len(rest) > PIECE_BYTES:
            piece = {"type": "http.response.body", "body": bytes(rest[:PIECE_BYTES]), "more_body": True}
            await self._send_piece(exchange, piece, send)
            rest = rest[PIECE_BYTES:]
            message = {**message, "body": bytes(rest)} if len(rest) <= PIECE_BYTES else message
        await self._send_piece(exchange, message, send)

    async def _send_piece(self, exchange: Exchange, message: Any, send: Any) -> None:
        """Send one piece within the time that the minimum rate allows its reader.

        Over HTTP/2 a reader may stall while its connection stays alive.
        """
        room, minimum_rate, begun_s = exchange.room, exchange.minimum_rate, trio.current_time()
        room.blocks(exchange.cut)
        try:
            with trio.move_on_after(minimum_rate.left_s()) as wait:
                await send(message)
        finally:
            room.moves()
        if wait.cancelled_caught:
            exchange.cut()
            await trio.sleep_forever()  # the end of the connection cancels this task
        waited_s = trio.current_time() - begun_s
        if waited_s > AT_ONCE_S:
            minimum_rate.waited(waited_s, len(message.get("body", b"")))

    def _refusal(self, exchange: Exchange) -> PlainsongError | None:
        """Return the refusal if the head alone is enough to refuse the request."""
        length = exchange.headers.get("content-length")
        if length is None:
            return None
        if "transfer-encoding" in exchange.headers:
            return MalformedBody("the request has both Content-Length and Transfer-Encoding")
        if not (length.isascii() and length.isdigit()):
            return MalformedBody("Content-Length is not a number, or was sent twice")
        size, max_body_bytes = content_length(length), self._shared.settings.max_body_bytes
        if size is None or size > max_body_bytes:
            return too_large(max_body_bytes)
        return None

    def _stream_refusal(self, message: Any, exchange: Exchange, scope: Any) -> PlainsongError | None:
        """Return the refusal of an event stream to a foreign page, which could read it, unlike other answers."""
        if scope["method"] != "GET" or not _is_endless(message["headers"]):
            return None
        return self._check.refusal("GET", exchange.headers, exchange.peer, streams=True)

    def _preflight(self, message: Any, exchange: Exchange) -> Any:
        """Return the answer to OPTIONS, with CORS headers if it is a preflight."""
        allow = dict(message["headers"]).get(b"allow", b"").decode("latin-1")
        added = self._check.preflight_headers(exchange.headers, allow) if message["status"] == 200 and allow else []
        if not added:
            return message
        headers = [pair for pair in message["headers"] if pair[0].lower() != b"content-length"]  # a 204 has none
        return {**message, "status": 204, "headers": [*headers, *_encoded(added)]}

    @staticmethod
    def _count(exchange: Exchange, message: Any) -> None:
        is_last = not message.get("more_body", False)
        if is_last:
            exchange.body_ended.set()
            exchange.reservation.keeps()
        intake = exchange.intake
        intake.count(len(message.get("body", b"")))
        announced = exchange.headers.get("content-length")  # over HTTP/2 a frame marks the end of the body
        if (
            announced is not None
            and (intake.received_bytes > int(announced) or is_last)
            and (intake.received_bytes != int(announced))
        ):
            raise MalformedBody(f"the body has fewer or more bytes than its Content-Length of {announced}")

    def _marked(self, headers: Any, exchange: Exchange, scope: Any) -> list[tuple[bytes, bytes]]:
        marked = [*headers, (b"x-request-id", exchange.request_id.encode("ascii"))]
        marked += _encoded(self._check.cors_headers(exchange.headers, (name.decode("latin-1") for name, _ in headers)))
        is_stopping = self._shared.stopping.is_set()
        if scope["http_version"] < "2" and (is_stopping or exchange.refusal is not None or exchange.is_last):
            marked.append((b"connection", b"close"))
        return marked

    async def _refuse(self, exchange: Exchange, scope: Any, receive: Any, send: Any) -> None:
        """Send the refusal, then read the rest of the body: after a reset the client would lose the answer."""
        assert exchange.refusal is not None
        answer = answer_for(exchange.refusal)
        assert isinstance(answer.body, bytes)
        length = ("content-length", str(len(answer.body)))
        headers = _encoded([("content-type", str(answer.content_type)), length, *answer.headers])
        marked = self._marked(headers, exchange, scope)
        await send({"type": "http.response.start", "status": answer.status, "headers": marked})
        await send({"type": "http.response.body", "body": answer.body, "more_body": True})
        if scope["http_version"] >= "2":
            await self._linger(exchange, receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _linger(self, exchange: Exchange, receive: Any) -> None:
        """Read and discard the rest of the body for a while, unless the application still reads it.

        Over HTTP/1.1 the connection does that.
        """
        with trio.move_on_after(LINGER_S):
            if exchange.receiving:
                await exchange.body_ended.wait()
            while not exchange.body_ended.is_set():
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    exchange.body_ended.set()


async def _refuse_websocket(send: Any) -> None:
    """Refuse a WebSocket over HTTP/2, which hypercorn accepts and which would bypass all checks."""
    answer = answer_for(BadRequest("WebSockets are not supported over HTTP/2", hint="open it over HTTP/1.1"))
    headers = [
        *_encoded([("content-type", str(answer.content_type)), *answer.headers]),
        (b"x-request-id", new_request_id().encode("ascii")),
    ]
    await send({"type": "websocket.http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": answer.body, "more_body": False})


def _encoded(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]


def _is_endless(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """True if these are the headers of an answer that never ends."""
    return any(name.lower() == b"content-type" and value.startswith(EVENT_STREAM.encode()) for name, value in headers)
