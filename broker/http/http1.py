"""HTTP/1.1 on one connection: requests in sequence, answered by handlers or by the application, and upgrades.

A hot request that has arrived completely is started in the reactor's task, and answered by whichever task has its
outcome, while the connection's own task sleeps: waking that task takes as long as serving the request. The connection's
task reads large and compressed bodies, before it starts the request in the same way; it sends answers that are large,
compressed or streamed; and it passes everything else to the application.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any

import trio

from broker.http import wire
from broker.http.asgi import ApplicationCall, CutShort
from broker.http.budgets import FREE_BYTES
from broker.http.connection import (
    BRIEF_LINGER_S,
    GATHERED_BYTES,
    LINGER_S,
    RECEIVE_BYTES,
    Connection,
    Input,
    PeerLeft,
    State,
)
from broker.http.gate import ServerParts
from broker.http.handlers import WAITED_MS, RequestCancelled
from broker.http.heads import MAX_HEAD_BYTES, Head, HeadRefused, PlainHead, end_of_head, hot_head, plain_head
from broker.http.intake import BodyReader, read_body
from broker.http.messages import (
    Answer,
    Request,
    answer_for,
    ends_connection,
    new_request_id,
    status_of,
)
from broker.http.wire import GZIP_MIN_BYTES, admitted, checked, may_be_refused, ready
from broker.security.guard import OPEN_ADMISSION, writes_audit
from plainsong.protocol.errors import BadRequest, Overloaded, PlainsongError, ShuttingDown

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable

    from broker.http.acceptance import Acceptance
    from broker.http.heads import HotRoutes
    from broker.http.messages import Begin, BodyStream
    from broker.http.reactor import Reactor
    from broker.http.route import Accounting, Route
    from broker.http.tls_socket import TlsSocket
    from broker.security.guard import Admission
    from broker.security.peer import Peer

#: Larger answers are sent by the connection's task.
SENT_NOW_BYTES = 64 << 10
#: The preface of HTTP/2 with prior knowledge.
HTTP_2 = b"PRI * HTTP/2.0\r\n\r\n"


@dataclass(slots=True, frozen=True)
class Http1Parts(ServerParts):
    """State that all connections over HTTP/1.1 share."""

    routes: HotRoutes
    reactor: Reactor
    acceptance: Acceptance
    application: Callable[[], Awaitable[Any]]
    """Return the application that answers all but hot requests. Raises Overloaded: it cannot be loaded now."""
    begin: Begin | None
    """Begins the conversation of a WebSocket; None: there are no WebSockets."""
    others: tuple[bytes, ...]
    """The first bytes of other protocols on the same port."""
    accounting: Accounting
    """For quick routes, whose handlers do not count."""

    def hot_head_in(self, raw: bytes, peer: Peer) -> Head | None:
        """Return the head of a hot request; None if the application answers it, or refuses it (a browser's)."""
        head = hot_head(raw, self.routes) if raw.startswith(self.routes.prefixes) else None
        if head is None or not self.check.is_clear(head.headers, peer):
            return None
        if head.endpoint.route.quick and self.check.origins:
            return None  # the application adds the headers for caches and CORS
        if not self.guard.required and writes_audit(head.endpoint.route.name, head.path):
            return None  # here the guard runs only if names are required; in the application it always does
        return head


class _LastHead:
    """The last hot head and its admission: clients repeat their heads, and equal bytes have equal meaning."""

    __slots__ = ("admission", "head", "is_admitted", "is_metered", "raw")

    def __init__(self, raw: bytes, head: Head | None) -> None:
        self.raw = raw
        #: None if it is not hot.
        self.head = head
        #: Valid while the guard's epoch is unchanged.
        self.admission = OPEN_ADMISSION
        self.is_admitted = False
        #: True if its name has a quota.
        self.is_metered = False


_NO_HEAD = _LastHead(b"\n", None)


class Http1:
    """Serves one connection; ``run`` it once."""

    __slots__ = (
        "_begun_s",
        "_connection",
        "_has_skipped",
        "_head_due_s",
        "_held",
        "_is_new",
        "_last",
        "_made",
        "_on_end",
        "_parts",
        "_request",
    )

    def __init__(self, sock: socket.socket | TlsSocket, parts: Http1Parts, peer: Peer) -> None:
        self._parts = parts
        self._connection = Connection(sock, self, parts.reactor, parts.budget, parts.settings, peer)
        self._last = _NO_HEAD
        #: The deadline for the first head: an unauthenticated client may not hold a connection for longer.
        self._head_due_s = trio.current_time() + parts.settings.header_timeout_s if parts.guard.required else inf
        #: True if an empty line before the next head was skipped: RFC 9112, section 2.2, asks servers to ignore one.
        self._has_skipped = False
        #: True until the first request: then a connection may still turn out to speak something else.
        self._is_new = True
        #: The memory reservation of the current request's body.
        self._held = parts.budget.reserve()
        #: The hot request that was started last; and its start time, if its route is quick.
        self._request: Request | None = None
        self._begun_s = 0.0
        #: An answer prepared in advance, or left to the task; whether the connection is kept; the encoded bytes.
        self._made: tuple[Answer, bool, bytes | None] | None = None
        #: Called when the client stops sending while its request is handled.
        self._on_end: Callable[[], object] | None = None

    def __repr__(self) -> str:
        return f"<Http1 {self._connection!r}>"

    async def run(self) -> bytes | None:
        """Serve until the connection must be closed (None), or return the first bytes of another protocol."""
        connection = self._connection
        linger_s = BRIEF_LINGER_S
        try:
            with connection.scope:
                try:
                    while (head := await self._read_head()) is not None:
                        if isinstance(head, bytes):
                            return head
                        linger_s = await self._serve_one(head)
                        if linger_s:
                            break
                        if connection.pending:
                            await trio.lowlevel.checkpoint()  # pipelined requests must not starve other connections
                except HeadRefused as refused:
                    await self._refuse(refused.status)
                    linger_s = LINGER_S
                connection.state = State.LEAVING
                await connection.linger(linger_s or BRIEF_LINGER_S)
                return None
        except (PeerLeft, OSError):
            return None
        except CutShort:
            pass
        finally:
            is_answering = connection.state is State.ANSWERING
            connection.leave()
            if is_answering and self._request is not None:
                self._request.cancel()
            self._held.release()
            connection.room.release()
            if self._made is not None and not isinstance(self._made[0].body, bytes):
                with trio.CancelScope(shield=True):
                    await self._made[0].body.aclose()
        if connection.was_resting:
            connection.end_on_close(self._parts.settings.send_timeout_s)
        else:  # an answer was cut off, a time-out passed, the client left, or a stop's grace period ended
            connection.reset_on_close()
        return None

    def stop(self) -> None:
        """Let the current request be the last; close a resting connection unless a request arrives right now.

        A client that was just answered may already be sending its next request: it gets an answer, not a reset.
        """
        connection = self._connection
        if connection.state is State.GATHERING:
            connection.wake()
        elif connection.state is State.RESTING:
            connection.scope.deadline = trio.current_time() + BRIEF_LINGER_S

    # --- without the task -------------------------------------------------------------------------

    @property
    def is_reading(self) -> bool:
        """True while a wait ends if the client leaves: of a hot request that reads only, or of ``_watch``."""
        if self._connection.state is not State.ANSWERING:
            return self._on_end is not None
        head = self._last.head
        return head is not None and head.endpoint.route.reads_only

    def data_arrived(self) -> bool:
        """Handle data that arrived while the connection rests or gathers. Return True if the task must handle it.

        Called in the reactor's task.
        """
        connection, last = self._connection, self._last
        pending = connection.pending
        head = last.head
        if head is None or not pending.startswith(last.raw):
            head = self._cut_head(pending)
            last = self._last
        parts = self._parts
        if head is None and self._skips_line():
            if connection.has_input:
                parts.reactor.again(connection)
            return False
        if head is None or not pending or parts.stopping.is_set():
            return True
        begin = len(last.raw)
        end = begin + head.length
        if not 0 <= head.length <= parts.settings.max_body_bytes or "content-encoding" in head.headers:
            return True
        if parts.guard.required and not self._is_admitted(last, head):
            return True
        if self._head_due_s < inf:
            self._head_due_s = connection.scope.deadline = inf
        is_whole = len(pending) >= end
        if is_whole:
            try:
                self._held.grow(head.length - self._held.reserved_bytes)
            except Overloaded:
                return True
        # The task refuses a request that is over its quota, before more of the body is read.
        if last.is_metered and not self._is_within(head, takes=is_whole):
            return True
        if not is_whole:
            return not self._gather(head, end - len(pending))
        if connection.state is State.GATHERING:
            self.gathered()
        connection.pending = pending[end:]
        self._is_new = self._has_skipped = False
        self._start(head, self._request_of(head, last.admission, pending[begin:end]))
        return False  # an answer that needs the task has already woken it

    def _request_of(self, head: Head, admission: Admission, body: bytes) -> Request:
        connection = self._connection
        return Request(
            head.path,
            head.query,
            head.headers,
            body,
            head.request_id or new_request_id(),
            room=connection.room,
            who=admission.who,
            rights=admission.rights,
            peer=connection.peer,
            prepare=self._prepare,
        )

    def _start(self, head: Head, request: Request) -> None:
        """Call the handler of a request whose body is complete; ``_answered`` sends its outcome."""
        connection, route = self._connection, head.endpoint.route
        self._request = request
        connection.state = State.ANSWERING
        if route.quick:
            self._begun_s = perf_counter()
        head.endpoint.handler(request, self._answered)
        if connection.state is State.ANSWERING:
            self._parts.reactor.resting.drop(connection)
            if route.reads_only:
                self._held.may_give_way(request.cancel)
                connection.read_ahead()

    def _is_admitted(self, last: _LastHead, head: Head) -> bool:
        """True if the sender is admitted. If False, the task refuses the request, or waits for the guard's decision."""
        guard = self._parts.guard
        if last.is_admitted and last.admission.epoch == guard.epoch:
            return True
        try:
            admission = guard.admit_now(head.headers, self._connection.peer)
            if admission is not None:
                guard.authorize(admission, head.endpoint.route, head.path)
        except PlainsongError:
            return False
        if admission is None or head.query:
            return False
        slot = self._connection.peer.slot
        last.is_metered = guard.quotas.concern(admission.who) or (slot is not None and bool(slot.name))
        last.admission, last.is_admitted = admission, True
        return True

    def _is_within(self, head: Head, *, takes: bool) -> bool:
        """True if a request is within the quotas of its name; with ``takes``, its cost is then charged."""
        peer, guard = self._connection.peer, self._parts.guard
        return guard.is_within(self._last.admission, head.endpoint.route, head.path, peer, head.length, takes=takes)

    def _gather(self, head: Head, missing_bytes: int) -> bool:
        """Wait for the rest of a body without the task. Return False if the task must do it."""
        connection, reactor = self._connection, self._parts.reactor
        if connection.ended or head.expects_continue or len(connection.pending) + missing_bytes > GATHERED_BYTES:
            return False
        try:
            self._held.grow(len(connection.pending) - self._held.reserved_bytes)
        except Overloaded:
            return False
        if connection.state is not State.GATHERING:
            connection.state = State.GATHERING
            self._held.may_give_way(connection.wake)
            reactor.resting.drop(connection)
            reactor.gathering.add(connection)
        connection.wanted_bytes = max(missing_bytes, RECEIVE_BYTES)
        return True

    def gathered(self) -> None:
        """Stop waiting for the rest of a body without the task; its gathered bytes stay reserved until the answer."""
        self._connection.state = State.RESTING
        self._held.keeps()
        self._connection.wanted_bytes = RECEIVE_BYTES
        self._parts.reactor.gathering.drop(self._connection)

    def _cut_head(self, pending: bytes) -> Head | None:
        """Return the head at the start of ``pending``, and cache it; None if it is incomplete, or not hot."""
        end = pending.find(b"\r\n\r\n") + 4
        if not 4 <= end <= MAX_HEAD_BYTES:
            return None
        raw = pending[:end]
        if raw != self._last.raw:
            self._last = _LastHead(raw, self._parts.hot_head_in(raw, self._connection.peer))
        return self._last.head

    def _prepare(self, answer: Answer) -> None:
        """Encode the answer that the handler is about to give.

        It may belong to an earlier request, which was answered at its time limit.
        """
        head, request = self._last.head, self._request
        if head is not None and request is not None and self._connection.state is State.ANSWERING:
            keep = head.keep_alive and not self._parts.stopping.is_set()
            self._made = answer, keep, self._framed(answer, head, request.request_id, keep=keep)

    def _framed(self, answer: Answer, head: Head, request_id: str, *, keep: bool) -> bytes | None:
        """Return the encoded answer; None if the task must send it."""
        body = answer.body
        if not isinstance(body, bytes) or len(body) > SENT_NOW_BYTES:
            return None
        if len(body) >= GZIP_MIN_BYTES:
            if "accept-encoding" in head.headers:
                return None
            if wire.VARY not in answer.headers:
                answer.headers = [*answer.headers, wire.VARY]
        return wire.answer_head(answer, request_id, chunks=head.chunks, close=not keep) + body

    def _answered(self, outcome: Answer | Exception) -> None:
        """Send the outcome of a handler. It neither waits nor raises."""
        connection, head, request = self._connection, self._last.head, self._request
        if connection.state is not State.ANSWERING or head is None or request is None:
            connection.room.release()  # the connection has ended
            return
        if isinstance(outcome, RequestCancelled):
            if self._held.gave_way:
                outcome = self._held.refusal()
            elif request.waited_ms < WAITED_MS:  # the client sends no more: answer with what there is now
                request.is_cancelled, request.waited_ms = False, WAITED_MS
                head.endpoint.handler(request, self._answered)
                return
            else:
                outcome = ShuttingDown("the daemon is shutting down")
        route, parts = head.endpoint.route, self._parts
        if route.reads_only:
            self._held.keeps()
        answer = (
            outcome if isinstance(outcome, Answer) and not outcome.headers else checked(outcome, request.request_id)
        )
        if route.quick:
            self._account(head, request, answer)
        connection.state = State.RESTING
        keep = head.keep_alive and not parts.stopping.is_set()
        made, self._made = self._made, None
        if made is not None and made[0] is answer and made[1] is keep:
            data = made[2]
        else:
            data = self._framed(answer, head, request.request_id, keep=keep)
        room = connection.room
        if data is not None and len(data) > FREE_BYTES and not room.takes_now(len(data)):
            data = None
        whole = data is not None and connection.send_now(data)
        if whole and room.reserved_bytes:
            room.release()
        self._held.release()
        if data is None:
            self._made = (answer, keep, None)
        else:
            self._request = None  # its body may be large, and the connection idle for a long time
        if not keep:
            connection.wake()
            connection.state = State.LEAVING
            return
        if not whole:
            connection.wake()
            return
        parts.reactor.resting.add(connection)
        if connection.pending or connection.input is not Input.NOTHING:
            parts.reactor.again(connection)

    def _account(self, head: Head, request: Request, answer: Answer) -> None:
        """Count and log the answer of a quick route."""
        route = head.endpoint.route
        seconds = perf_counter() - self._begun_s
        self._parts.accounting.answered(route, route.path.format(**head.path), answer, seconds, request.request_id)

    # --- heads ------------------------------------------------------------------------------------

    async def _read_head(self) -> Head | PlainHead | bytes | None:
        """Return the next head, removed from ``pending``; None if there is none; bytes for another protocol.

        Raises:
          HeadRefused: it is not a valid head.
        """
        connection, parts = self._connection, self._parts
        self._skips_line()
        await self._rest()
        if connection.state is State.LEAVING:
            return None
        connection.state = State.READING
        head_due_s = 0.0
        while True:
            if not self._has_skipped and connection.pending.startswith(b"\r\n"):
                connection.pending, self._has_skipped = connection.pending[2:], True
            pending = connection.pending
            if self._is_new and pending.startswith(parts.others):
                connection.scope.deadline = inf
                return pending
            end = end_of_head(pending)
            if end:
                break
            if not head_due_s:
                head_due_s = min(trio.current_time() + parts.settings.header_timeout_s, self._head_due_s)
                connection.scope.deadline = head_due_s
            connection.pending += await connection.receive()
        self._is_new = self._has_skipped = False
        self._head_due_s = connection.scope.deadline = inf
        head = self._cut_head(pending)
        if head is not None:
            end = len(self._last.raw)
        connection.pending = pending[end:]
        return head or plain_head(pending[:end])

    def _skips_line(self) -> bool:
        """True if all that is pending is an empty line, which begins no head: the connection rests as before."""
        if self._has_skipped or self._connection.pending != b"\r\n":
            return False
        self._connection.pending, self._has_skipped = b"", True
        return True

    async def _rest(self) -> None:
        """Sleep until a request needs the task; send what could not be sent without it."""
        connection = self._connection
        while True:
            if connection.state <= State.ANSWERING:  # the task started a request, which may be answered already
                await connection.sleep()
            elif not (self._has_unsent or connection.ended or connection.state is State.LEAVING):
                stops_s = trio.current_time() + BRIEF_LINGER_S if self._parts.stopping.is_set() else inf
                connection.scope.deadline = min(stops_s, self._head_due_s)
                self._parts.reactor.resting.add(connection)
                await connection.rest()
            connection.scope.deadline = inf
            was_sent = not self._has_unsent
            if self._made is not None:
                (answer, keep, _), self._made = self._made, None
                await self._send_made(answer, keep=keep)
                self._request = None
            await connection.send_rest()
            connection.room.release()
            if connection.state is State.LEAVING or (was_sent and connection.pending):
                return
            if connection.ended and not connection.pending:
                raise PeerLeft

    @property
    def _has_unsent(self) -> bool:
        return self._made is not None or self._connection.has_unsent

    async def _send_made(self, answer: Answer, *, keep: bool) -> None:
        head, request, room = self._last.head, self._request, self._connection.room
        assert head is not None  # the request has been answered
        assert request is not None
        try:
            answer = await ready(answer, request)
            answer = await admitted(answer, room, only_looks=_only_looks(head.endpoint.route, answer))
            await self._send(answer, request.request_id, chunks=head.chunks, keep=keep)
        finally:
            room.release()

    async def _refuse(self, status: int) -> None:
        """Refuse a head that cannot be parsed: 400; 431 if too long; 501 for an unknown coding or method; or 505."""
        error = BadRequest("this is not a valid HTTP/1.1 request", hint="the status code says what is wrong")
        answer = answer_for(error)
        assert isinstance(answer.body, bytes)
        answer.status, answer.body = status, answer.body.replace(b'"status": 400', b'"status": %d' % status)
        await self._send(answer, new_request_id(), chunks=False, keep=False)

    # --- one request ------------------------------------------------------------------------------

    async def _serve_one(self, head: Head | PlainHead) -> float:
        """Answer one request. Return how long to linger before the connection is closed; 0 if it is kept."""
        if isinstance(head, Head):
            return await self._serve_hot(head)
        if head.opens_websocket and self._parts.begin is not None:
            return await self._converse(head, self._parts.begin)
        return await self._serve_application(head)

    async def _serve_application(self, head: PlainHead) -> float:
        connection, parts = self._connection, self._parts
        try:
            app = await parts.application()
        except PlainsongError as error:
            await connection.send_all(wire.refusal(error, new_request_id(), head_only=head.method == "HEAD"))
            return LINGER_S
        with self._held as held:
            body = BodyReader(connection, head.length, held, expects_continue=head.expects_continue)
            call = ApplicationCall(
                connection, head, body, lambda: head.keep_alive and not parts.stopping.is_set(), self._watch
            )
            connection.state = State.HANDLING
            try:
                is_kept = await call.answer(app)
            finally:
                self._on_end = None
        if is_kept:
            return 0.0
        return BRIEF_LINGER_S if body.has_ended else LINGER_S

    def _watch(self, on_end: Callable[[], object]) -> None:
        """Call ``on_end`` if the client sends no more, now or while its request is handled; its body must be read."""
        self._on_end = on_end
        self._connection.read_ahead()

    async def _converse(self, head: PlainHead, begin: Begin) -> float:
        """Serve a WebSocket until its end."""
        from broker.http.websocket import StreamSocket

        self._connection.state = State.TALKING
        await StreamSocket(begin, self._parts, self._connection).run(head)
        # The client may still be sending. If its input were left unread, the kernel would reset the connection, and the
        # client would lose the close and the last answers.
        return LINGER_S

    async def _serve_hot(self, head: Head) -> float:
        """Read a request, and start it. Return how long to linger if it was refused and ends the connection, else 0."""
        parts, connection, held = self._parts, self._connection, self._held
        settings, route = parts.settings, head.endpoint.route
        body = BodyReader(connection, head.length, held, expects_continue=head.expects_continue)
        request = self._request_of(head, OPEN_ADMISSION, b"")
        self._begun_s = perf_counter()
        try:
            admission = await self._admitted(head, body, request.request_id)
            request.who, request.rights = admission.who, admission.rights
            request.body = await self._read_body(head, body)
            connection.state = State.HANDLING
            self._watch(_answer_anyway)
            refusal = await parts.acceptance.decode(
                route, request, held, settings.max_body_bytes, settings.body_timeout_s
            )
        except PlainsongError as error:
            refusal = answer_for(error)
        finally:
            self._on_end = None
        if refusal is None:
            self._start(head, request)
            return 0.0
        held.release()
        connection.room.release()
        if route.quick:
            self._account(head, request, refusal)
        keep = head.keep_alive and body.has_ended and not parts.stopping.is_set()
        await self._send(refusal, request.request_id, chunks=head.chunks, keep=keep)
        if keep:
            return 0.0
        return BRIEF_LINGER_S if body.has_ended else LINGER_S

    async def _admitted(self, head: Head, body: BodyReader, request_id: str) -> Admission:
        """Authenticate and authorize the sender, before the body is read. Raises PlainsongError: it is refused."""
        guard, connection, route = self._parts.guard, self._connection, head.endpoint.route
        if not guard.required:
            return OPEN_ADMISSION
        try:
            admission = await guard.identify(head.headers, head.query, connection.peer, request_id)
            guard.enter(admission, route, head.path, connection.peer, request_id, max(head.length, 0))
        except PlainsongError as error:
            if route.hot:  # the others are counted and logged with their answers
                guard.answered(route.name, route.path.format(**head.path), status_of(error), request_id)
            if ends_connection(error):
                body.give_up()
            else:
                body.drop_pending()  # the rest of the body is not read
            raise
        return admission

    async def _read_body(self, head: Head, reader: BodyReader) -> bytes:
        """Return the body as sent."""
        connection, held, settings = self._connection, self._held, self._parts.settings
        if 0 <= head.length <= len(connection.pending) and head.length <= settings.max_body_bytes:
            body = reader.take_pending()
            held.grow(head.length - held.reserved_bytes)  # it already covers the gathered part
            return body
        connection.state = State.READING
        return await read_body(reader, head.length, held, settings)

    def sending_ended(self) -> None:
        """Handle a half-close: the client is still answered, but without further waiting."""
        if self._on_end is not None:
            self._on_end()
        elif self._connection.state is State.ANSWERING and self._request is not None:
            self._request.cancel()

    # --- sending ----------------------------------------------------------------------------------

    async def _send(self, answer: Answer, request_id: str, *, chunks: bool, keep: bool) -> None:
        connection = self._connection
        head = wire.answer_head(answer, request_id, chunks=chunks, close=not keep)
        if connection.state is not State.LEAVING:
            connection.state = State.SENDING
        connection.minimum_rate.restart()
        if isinstance(answer.body, bytes):
            await connection.send_all(head, answer.body)
            return
        length = answer.length
        chunks = chunks and length is None
        async with aclosing(answer.body):
            await connection.send_all(head)
            try:
                await self._send_stream(answer.body, length, chunks=chunks)
            except OSError:
                raise  # the reader has left
            except Exception as error:
                wire.log_cut_off(error, request_id)
                raise CutShort from error

    async def _send_stream(self, stream: BodyStream, length: int | None, *, chunks: bool) -> None:
        sent_bytes = 0
        async for data in stream:
            if data:
                sent_bytes += len(data)
                if length is not None and sent_bytes > length:
                    break
                await self._connection.send_all(wire.chunk(data) if chunks else data)
                await trio.lowlevel.checkpoint()
        if length is not None and sent_bytes != length:
            raise ValueError(f"the body of an answer is off by {sent_bytes - length:+} bytes from its Content-Length")
        if chunks:
            await self._connection.send_all(wire.LAST_CHUNK)


def _only_looks(route: Route[Any], answer: Answer) -> bool:
    """True if an answer may be refused for lack of room: nothing has happened, and the request can be sent again."""
    return route.reads_only and (route.hot or may_be_refused(answer))


def _answer_anyway() -> None:
    """A client that has half-closed the connection is still answered."""
