"""The lane: HTTP/1.1 requests of its routes on one connection, one after the other, until one is not for it."""

from __future__ import annotations

import io
import logging
import select
import socket
import struct
from contextlib import aclosing
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import unquote

import httptools
import trio
from trio.lowlevel import wait_readable, wait_writable

from broker.http import wire
from broker.http.budgets import (
    FEW_PARTS,
    FREE_BYTES,
    BodyBudget,
    Pace,
    Reservation,
    body_deadline,
    broke_off,
    decoded_body,
    needs_decoding,
    too_large,
    too_slow,
)
from broker.http.handlers import RequestCancelled
from broker.http.messages import (
    Answer,
    Request,
    answer_for,
    ends_connection,
    new_request_id,
    only_plain,
    sane_request_id,
    status_of,
)
from broker.http.tls_socket import TlsSocket
from broker.http.wire import ChunkedBody, admitted, checked, may_be_refused, ready, respond
from broker.security.guard import OPEN, OPEN_ADMISSION, RefusedRequest, refuse_query_token, writes_audit
from broker.security.identity import NOBODY
from plainsong.protocol.errors import Overloaded, PlainsongError, ShuttingDown
from plainsong.protocol.link import PREFACE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import NoReturn

    from broker.api.route import Accounting, Endpoint, Route
    from broker.http.acceptance import Acceptance
    from broker.http.budgets import HttpSettings
    from broker.http.messages import BodyStream
    from broker.http.origin_check import OriginCheck
    from broker.http.peer import Peer
    from broker.http.reactor import Reactor
    from broker.security.guard import Admission, Guard

#: A longer body is sent behind its head as it is; below it, one piece is cheaper than two.
COPIED_BYTES = 64 << 10
#: Answers of handlers that were started without the task are sent without it up to this size.
SENT_NOW_BYTES = 64 << 10
log = logging.getLogger("plainsong.http")


class CutShort(Exception):
    """An answer could not be finished: only the end of the connection can say so now."""


@dataclass(slots=True, frozen=True)
class LaneParts:
    """What all lanes of a server share."""

    settings: HttpSettings
    routes: LaneRoutes
    budget: BodyBudget
    watch: Watch
    reactor: Reactor
    check: OriginCheck
    acceptance: Acceptance
    guard: Guard = OPEN
    accounting: Accounting | None = None
    """Of quick routes, whose handlers count nothing; None: they are not counted."""

    def head_in(self, raw: bytes, peer: Peer) -> Head | None:
        """The head of a request for the lane; None: it is hypercorn's, or refused by it, such as a browser's."""
        head = parse_head(raw, self.routes) if raw.startswith(self.routes.prefixes) else None
        if head is None or not self.check.is_clear(head.headers, peer):
            return None
        if head.endpoint.route.quick and self.check.origins:
            return None  # what caches have to know of pages from elsewhere is written there
        if not self.guard.required and writes_audit(head.endpoint.route.name, head.path):
            return None  # the lane asks the guard only where names are needed; hypercorn's routes always do
        return head

    def takes(self, data: bytes, peer: Peer) -> bool:
        """Whether ``data`` begins with a request for the lane, as far as that can be seen by now."""
        end = data.find(b"\r\n\r\n") + 4
        if end < 4:
            return self.routes.is_first_of(data)
        return end <= MAX_HEAD_BYTES and self.head_in(data[:end], peer) is not None


class Lane:
    """A connection in the lane; ``run`` it once. ``already_read``: its first bytes, if others have read them.

    Its task sleeps while the connection rests. A request that has come whole, and whose handler can be started without
    waiting, is answered without waking it.
    """

    __slots__ = (
        "_admission",
        "_admitted_head",
        "_begun_s",
        "_busy",
        "_connection",
        "_gathering",
        "_head",
        "_head_bytes",
        "_head_due_s",
        "_held",
        "_in_step",
        "_is_metered",
        "_leaving",
        "_parts",
        "_prepared",
        "_request",
        "_request_id",
        "_room",
        "_started",
        "_stopping",
        "_unsent",
        "_waiting",
        "head_due_s",
        "served",
    )

    def __init__(
        self, sock: socket.socket | TlsSocket, parts: LaneParts, peer: Peer, already_read: bytes = b""
    ) -> None:
        self._parts = parts
        self._connection = Connection(sock, parts, self, peer)
        self._connection.pending = already_read
        #: The last head and its bytes: clients repeat theirs, and the same bytes say the same.
        self._head_bytes = b""
        self._head: Head | None = None
        #: Who was let in by the last head, and by which: it counts for as long as the guard's epoch stands.
        self._admission = OPEN_ADMISSION
        self._admitted_head: Head | None = None
        #: Whether its name has a quota.
        self._is_metered = False
        #: Until when its first head has to be whole: whoever has shown no credential yet holds no connection for long.
        self._head_due_s = trio.current_time() + parts.settings.header_timeout_s if parts.guard.required else inf
        #: In a handler of the task; whether one was started without it; after a request whose end we know.
        self._busy = False
        self._started = False
        self._gathering = False
        self._in_step = True
        self._stopping = False
        #: The last answer said so, or could not be sent.
        self._leaving = False
        self._request_id = ""
        #: The last request that was begun without the task, and when, if it is of a quick route.
        self._request: Request | None = None
        self._begun_s = 0.0
        #: An answer that is about to be given, whether the connection is kept behind it, and its bytes.
        self._prepared: tuple[Answer, bool, bytes | None] | None = None
        #: An answer that the task is to send, and whether the connection is kept behind it.
        self._unsent: tuple[Answer, bool] | None = None
        self._held = parts.budget.reserve()
        self._room = self._connection.room
        #: Around a handler that may wait for something.
        self._waiting: trio.CancelScope | None = None
        #: Whether it has answered anything.
        self.served = False
        #: When the head that is given to hypercorn has to be whole, if its first bytes came a while ago.
        self.head_due_s = inf

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
        finally:
            if self._started and self._request is not None:
                self._request.cancel()
            self._started = False  # an answer that still comes has no reader
            self._held.release()
            self._room.release()
            self._connection.leave()
        # An answer broke off, or a time-out, a client that left, or the end of a stop's grace: no time to be polite.
        self._connection.reset_on_close()
        return None

    def stop(self) -> None:
        """Lets the current request be the last; a connection that rests is closed if none comes right now.

        The client just answered may be sending its next request already: it gets an answer, not a cut.
        """
        self._stopping = True
        if self._gathering:
            self._connection.wake()
        elif self._connection.resting and not self._started:
            self._connection.scope.deadline = trio.current_time() + BRIEF_LINGER_S

    async def watch(self) -> None:
        """Notices when the client sends no more, or has gone, while the handler is at work."""
        if self._busy:
            await self._connection.watch()

    # --- without the task -------------------------------------------------------------------------

    @property
    def gathering(self) -> bool:
        """Whether the first part of a body has come, and the rest is waited for without the task."""
        return self._gathering

    @property
    def started(self) -> bool:
        """Whether a request is being answered without the task."""
        return self._started

    @property
    def reading(self) -> bool:
        """Whether a request is being answered without the task that changes nothing, and so may be cancelled."""
        return self._started and self._head is not None and self._head.endpoint.route.reads_only

    def data_arrived(self) -> bool:
        """Something has come while the connection rests. Returns whether its task is to see to it.

        Called in the reactor's task.
        """
        connection = self._connection
        pending = connection.pending
        head = self._head
        if head is None or not pending.startswith(self._head_bytes):
            head = self._cut_head(pending)
        if head is None or self._stopping or not pending:
            return True
        parts = self._parts
        begin = len(self._head_bytes)
        end = begin + head.length
        if not 0 <= head.length <= parts.settings.max_body_bytes or "content-encoding" in head.headers:
            return True
        if parts.guard.required and not self._is_admitted(head):
            return True
        if self._head_due_s < inf:
            self._head_due_s = connection.scope.deadline = inf
        is_whole = len(pending) >= end
        # Whoever is over its quota is refused by the task, before more of the body is read.
        if self._is_metered and not self._is_within(head, takes=is_whole):
            return True
        if not is_whole:
            return not self._gather(head, end - len(pending))
        if self._gathering:
            self._end_gathering()
        self._request_id = head.request_id or new_request_id()
        admission = self._admission
        request = self._request = Request(
            head.path,
            head.query,
            head.headers,
            pending[begin:end],
            self._request_id,
            room=self._room,
            who=admission.who,
            rights=admission.rights,
            peer=connection.peer,
            prepare=self._prepare,
        )
        connection.pending = pending[end:]
        self._started = True
        if head.endpoint.route.quick:
            self._begun_s = perf_counter()
        try:
            self._held.grow(head.length - self._held.reserved_bytes)
        except Overloaded as error:
            self._answered(error)
            return False
        head.endpoint.handler(request, self._answered)
        if self._started:
            parts.reactor.works(connection)
            if head.endpoint.route.reads_only:
                self._held.may_give_way(request.cancel)
                connection.read_ahead()
        return False  # an answer that needs the task has woken it

    def _is_admitted(self, head: Head) -> bool:
        """Whether its sender is let in, without waiting; False: its task answers why not, or waits for it."""
        guard = self._parts.guard
        if head is self._admitted_head and self._admission.epoch == guard.epoch:
            return True
        try:
            admission = guard.admit_now(head.headers, self._connection.peer)
            if admission is not None:
                guard.authorize(admission, head.endpoint.route, head.path)
        except PlainsongError:
            return False
        if admission is None or head.query:
            return False
        seat = self._connection.peer.seat
        self._is_metered = guard.quotas.concern(admission.who) or (seat is not None and bool(seat.name))
        self._admission, self._admitted_head = admission, head
        return True

    def _is_within(self, head: Head, *, takes: bool) -> bool:
        """Whether a request is within the quotas of its name, and then, if it ``takes``, has its cost taken."""
        peer, guard = self._connection.peer, self._parts.guard
        return guard.is_within(self._admission, head.endpoint.route, head.path, peer, head.length, takes=takes)

    def _gather(self, head: Head, missing_bytes: int) -> bool:
        """Waits for the rest of a body without the task; False: that is better left to it."""
        connection, reactor = self._connection, self._parts.reactor
        if connection.ended or head.expects_continue or len(connection.pending) + missing_bytes > GATHERED_BYTES:
            return False
        try:
            self._held.grow(len(connection.pending) - self._held.reserved_bytes)
        except Overloaded:
            return False
        if not self._gathering:
            self._gathering = True
            self._held.may_give_way(connection.wake)
            reactor.works(connection)
            reactor.expire(connection, GATHER_S, connection.wake)
        connection.wanted_bytes = max(missing_bytes, RECEIVE_BYTES)
        return True

    def _end_gathering(self) -> None:
        """What was gathered is counted until the request is answered."""
        self._gathering = False
        self._held.keeps()
        self._connection.wanted_bytes = RECEIVE_BYTES
        self._parts.reactor.answered(self._connection)

    def _cut_head(self, pending: bytes) -> Head | None:
        """The head that ``pending`` begins with, remembered; None: it is not whole, or not for the lane."""
        end = pending.find(b"\r\n\r\n") + 4
        if not 4 <= end <= MAX_HEAD_BYTES:
            return None
        raw = pending[:end]
        if raw != self._head_bytes:
            self._head = self._parts.head_in(raw, self._connection.peer)
            self._head_bytes = raw
        return self._head

    def _prepare(self, answer: Answer) -> None:
        """The handler that was started without the task is about to give this answer."""
        head = self._head
        if head is not None:
            keep = head.keep_alive and not self._stopping
            self._prepared = answer, keep, self._framed(answer, head, keep=keep)

    def _framed(self, answer: Answer, head: Head, *, keep: bool) -> bytes | None:
        """The bytes of an answer; None if the task is to send it."""
        body = answer.body
        if not isinstance(body, bytes) or len(body) > SENT_NOW_BYTES:
            return None
        if len(body) >= self._parts.settings.gzip_min_bytes:
            if "accept-encoding" in head.headers:
                return None
            if wire.VARY not in answer.headers:
                answer.headers = [*answer.headers, wire.VARY]
        return wire.answer_head(answer, self._request_id, chunks=head.chunks, close=not keep) + body

    def _answered(self, outcome: Answer | Exception) -> None:
        """The handler that was started without the task has answered. It neither waits nor raises."""
        head, request = self._head, self._request
        if not self._started or head is None or request is None:
            self._room.release()  # the connection has ended
            return
        if isinstance(outcome, RequestCancelled):
            if self._held.gave_way:
                outcome = self._held.refusal()
            elif request.waited_ms < WAITED_MS:  # the client sends no more: it is answered with what there is
                request.is_cancelled, request.waited_ms = False, WAITED_MS
                head.endpoint.handler(request, self._answered)
                return
            else:
                outcome = ShuttingDown("the daemon is shutting down")
        route, accounting = head.endpoint.route, self._parts.accounting
        if route.reads_only:
            self._held.keeps()
        answer = outcome if isinstance(outcome, Answer) and not outcome.headers else checked(outcome, self._request_id)
        if route.quick and accounting is not None:
            _account(accounting, head, answer, perf_counter() - self._begun_s, self._request_id)
        parts, connection = self._parts, self._connection
        self._started = False
        self.served = True
        keep = head.keep_alive and not self._stopping
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] is answer and prepared[1] is keep:
            data = prepared[2]
        else:
            data = self._framed(answer, head, keep=keep)
        if data is not None and len(data) > FREE_BYTES and not self._room.takes_now(len(data)):
            data = None
        whole = data is not None and connection.send_now(data)
        if whole:
            self._room.release()
        self._held.release()
        if data is None:
            self._unsent = (answer, keep)
            connection.wake()
            return
        self._request = None  # its body may be large, and the next may be long in coming
        self._leaving = not keep
        if self._leaving or not whole:
            connection.wake()
            return
        parts.reactor.rests(connection)
        if connection.pending or connection.edge:
            parts.reactor.again(connection)

    # --- with the task ----------------------------------------------------------------------------

    async def _serve(self) -> bytes | None:
        while True:
            head = await self._read_head()
            if head is None:
                if self._leaving:
                    return None
                self._connection.scope.deadline = inf
                return self._connection.pending
            if not await self._serve_one(head) or self._stopping:
                return None
            if self._connection.pending:
                await trio.lowlevel.checkpoint()  # pipelined requests must not keep the others waiting

    async def _read_head(self) -> Head | None:
        """The next head, taken off what is pending; None when the request there is not for the lane, or none is to come."""
        connection, settings = self._connection, self._parts.settings
        if not connection.pending:
            await self._rest()
            if self._leaving:
                return None
        waiting, self.head_due_s = False, inf
        while not 4 <= (end := connection.pending.find(b"\r\n\r\n") + 4) <= MAX_HEAD_BYTES:
            if self._is_foreign(connection.pending):
                return None
            if not waiting:
                waiting = True
                self.head_due_s = min(trio.current_time() + settings.header_timeout_s, self._head_due_s)
                connection.scope.deadline = self.head_due_s
            connection.pending += await connection.receive()
        self._head_due_s = inf
        head = self._cut_head(connection.pending)
        if head is None:
            return None
        connection.pending = connection.pending[end:]
        return head

    async def _rest(self) -> None:
        """Sleep until there is a request that needs the task; send what an answer without it could not."""
        connection = self._connection
        while True:
            connection.scope.deadline = trio.current_time() + BRIEF_LINGER_S if self._stopping else self._head_due_s
            if not connection.ended:
                await connection.rest()
            connection.scope.deadline = inf
            if self._gathering:
                self._end_gathering()
            if self._unsent is not None:
                (answer, keep), self._unsent = self._unsent, None
                await self._send_made(answer, keep=keep)
                self._request = None
                self._leaving = not keep
            await connection.send_rest()
            self._room.release()
            if self._leaving or connection.pending:
                return
            if connection.ended:
                raise PeerLeft

    async def _send_made(self, answer: Answer, *, keep: bool) -> None:
        head, request = self._head, self._request
        assert head is not None  # it has been answered
        assert request is not None
        try:
            answer = await ready(answer, request, self._parts.settings.gzip_min_bytes)
            answer = await admitted(answer, self._room, only_looks=_only_looks(head.endpoint.route, answer))
            await self._send(answer, self._request_id, chunks=head.chunks, keep=keep)
        finally:
            self._room.release()

    def _is_foreign(self, data: bytes) -> bool:
        """Whether bytes without the end of a head are certainly not the lane's."""
        if not any(data.startswith(prefix[: len(data)]) for prefix in (*self._parts.routes.prefixes, PREFACE)):
            return True
        return len(data) >= MAX_HEAD_BYTES or b"\n\n" in data or b"\n\r\n" in data

    async def _serve_one(self, head: Head) -> bool:
        """Answers one request; whether the connection is to be kept."""
        request_id = head.request_id or new_request_id()
        self.served = True
        accounting = self._parts.accounting if head.endpoint.route.quick else None
        begun_s = perf_counter()
        with self._held as held:  # it has what was gathered of the body
            try:
                answer = await self._answer_to(head, held, request_id)
                if accounting is not None:
                    _account(accounting, head, answer, perf_counter() - begun_s, request_id)
                keep = head.keep_alive and self._in_step and not self._stopping
                await self._send(answer, request_id, chunks=head.chunks, keep=keep)
            finally:
                self._room.release()
        return keep

    async def _answer_to(self, head: Head, held: Reservation, request_id: str) -> Answer:
        """The answer, whose body is held in the connection's room."""
        peer = self._connection.peer
        try:
            admission = await self._admitted(head, request_id)
            request = Request(
                head.path,
                head.query,
                head.headers,
                request_id=request_id,
                room=self._room,
                who=admission.who,
                rights=admission.rights,
                peer=peer,
            )
            request.body = await self._read_body(head, held)
        except PlainsongError as error:
            return answer_for(error)
        answer = await self._answer(head.endpoint, request, held)
        if not self._room.reserved_bytes and isinstance(answer.body, bytes) and len(answer.body) <= FREE_BYTES:
            return answer
        return await admitted(answer, self._room, only_looks=_only_looks(head.endpoint.route, answer))

    async def _admitted(self, head: Head, request_id: str) -> Admission:
        """Who sent it, before anything of its body is read. Raises PlainsongError: it is not let in."""
        guard, connection, route = self._parts.guard, self._connection, head.endpoint.route
        if not guard.required:
            return OPEN_ADMISSION
        try:
            try:
                refuse_query_token(head.query)
                admission = await guard.admit(head.headers, connection.peer)
            except PlainsongError as error:
                guard.refused(RefusedRequest(error, NOBODY, connection.peer, "service", request_id))
                raise
            guard.enter(admission, route, head.path, connection.peer, request_id, max(head.length, 0))
        except PlainsongError as error:
            if route.hot:  # others are counted and logged where they are answered
                guard.answered(route.name, route.path.format(**head.path), status_of(error), request_id)
            if 0 <= head.length <= len(connection.pending) and not ends_connection(error):
                connection.pending = connection.pending[head.length :]
            else:
                self._in_step = False  # nothing more of its body is read
            raise
        return admission

    async def _read_body(self, head: Head, held: Reservation) -> bytes:
        """The body as it was sent; ``_in_step`` is false after one whose end was not reached."""
        connection, settings = self._connection, self._parts.settings
        if 0 <= head.length <= len(connection.pending) and head.length <= settings.max_body_bytes:
            body = connection.pending[: head.length]
            connection.pending = connection.pending[head.length :]
            held.grow(head.length - held.reserved_bytes)
        else:
            self._in_step = False
            body = await read_body(connection, head, held, settings)
            self._in_step = True
        return body

    async def _answer(self, endpoint: Endpoint, request: Request, held: Reservation) -> Answer:
        parts = self._parts
        self._connection.scope.deadline = inf
        self._busy = True
        parts.watch.begin(self)
        try:
            if needs_decoding(request.headers):
                refusal = await self._decode(endpoint, request, held)
                if refusal is not None:
                    return refusal
            if endpoint.route.reads_only:
                return await self._answer_reader(endpoint, request, held)
            return await respond(endpoint.handler, request, parts.settings.gzip_min_bytes)
        finally:
            self._busy = False
            parts.watch.end(self)
            self._connection.unwatch()

    async def _decode(self, endpoint: Endpoint, request: Request, held: Reservation) -> Answer | None:
        """Decompresses the body of a request that can be accepted; the refusal of any other."""
        settings = self._parts.settings
        refusal = await self._parts.acceptance.refusal(endpoint.route, request)
        if refusal is not None:
            return refusal
        try:
            request.body = await decoded_body(
                request.body, request.headers, settings.max_body_bytes, held, settings.body_timeout_s
            )
        except PlainsongError as error:
            return answer_for(error)
        return None

    async def _answer_reader(self, endpoint: Endpoint, request: Request, held: Reservation) -> Answer:
        """The answer to a request that may wait for something.

        A client that has closed its sending half meanwhile is answered without further waiting. One whose body takes
        room that others need gives way to them.
        """
        gzip_min_bytes = self._parts.settings.gzip_min_bytes
        with trio.CancelScope() as waiting:
            self._waiting = waiting
            held.may_give_way(waiting.cancel)
            try:
                return await respond(endpoint.handler, request, gzip_min_bytes)
            finally:
                self._waiting = None
                held.keeps()
        if held.gave_way:
            return answer_for(held.refusal())
        request.waited_ms = WAITED_MS
        return await respond(endpoint.handler, request, gzip_min_bytes)

    def sending_ended(self) -> None:
        """The client has closed its sending half, which may be all of it: it is answered, but not waited for longer."""
        if self._waiting is not None:
            self._waiting.cancel()
        elif self._started and self._request is not None:
            self._request.cancel()

    async def _send(self, answer: Answer, request_id: str, *, chunks: bool, keep: bool) -> None:
        head = wire.answer_head(answer, request_id, chunks=chunks, close=not keep)
        self._connection.pace.restart()
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
                plain, about = only_plain(error), {"request_id": request_id}
                if plain is None:
                    log.exception("a streamed answer broke off", extra=about)
                else:  # no bug: such as no room for its next block
                    log.warning("a streamed answer broke off", extra={**about, "why": plain.detail})
                raise CutShort from error

    async def _send_stream(self, stream: BodyStream, *, chunks: bool) -> None:
        async for data in stream:
            if data:
                await self._connection.send_all(wire.chunk(data) if chunks else data)
                await trio.lowlevel.checkpoint()
        if chunks:
            await self._connection.send_all(wire.LAST_CHUNK)


def _only_looks(route: Route[Any], answer: Answer) -> bool:
    """Whether an answer may be refused for lack of room: the request can be sent again, and nothing has happened by it."""
    return route.reads_only and (route.hot or may_be_refused(answer))


def _account(accounting: Accounting, head: Head, answer: Answer, seconds: float, request_id: str) -> None:
    """Count an answer of a quick route, and log it, as it is done where hypercorn's are read."""
    route = head.endpoint.route
    accounting.requested(route.name, answer.status, seconds)
    accounting.access.answered(
        route.name, route.path.format(**head.path), answer.status, seconds, answer.headers, request_id
    )


# --- head ------------------------------------------------------------------------------------------
#
# Whether a request belongs to the lane, and how its body is framed.


#: Larger heads are hypercorn's to refuse (its own bound is the same).
MAX_HEAD_BYTES = 16 << 10
MAX_LENGTH_DIGITS = 18
#: ``Head.length`` of a chunked body.
CHUNKED = -1


class _Shape(NamedTuple):
    """The path of a route, cut at its slashes."""

    endpoint: Endpoint
    words: tuple[tuple[int, str], ...]
    places: tuple[tuple[str, int], ...]


class LaneRoutes:
    """Finds the lane's route of a method and path: one look-up by the number of segments and the last one, or two."""

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self._shapes: dict[tuple[str, int, str], _Shape] = {}
        starts = set()
        for endpoint in endpoints:
            route = endpoint.route
            if not route.in_lane:
                continue
            segments = route.path.split("/")
            words = [(at, word) for at, word in enumerate(segments) if not word.startswith("{")]
            places = [(word[1:-1], at) for at, word in enumerate(segments) if word.startswith("{")]
            shape = _Shape(endpoint, tuple(words), tuple(places))
            last = "" if segments[-1].startswith("{") else segments[-1]
            # Else more looks are needed.
            assert self._shapes.setdefault((route.method, len(segments), last), shape) is shape
            starts.add(f"{route.method} {route.path.partition('{')[0]}".encode())
        #: Every request for the lane starts with one of these; what does not is handed over at once.
        self.prefixes = tuple(sorted(starts))

    def find(self, method: str, path: str) -> tuple[Endpoint, Mapping[str, str]] | None:
        """The route and what stands in its places, if none of them is empty."""
        segments = path.split("/")
        count = len(segments)
        shape = self._shapes.get((method, count, segments[-1])) or self._shapes.get((method, count, ""))
        if shape is None:
            return None
        for at, word in shape.words:
            if segments[at] != word:
                return None
        found = {place: segments[at] for place, at in shape.places}
        return (shape.endpoint, found) if all(found.values()) else None

    def is_first_of(self, data: bytes) -> bool:
        """Whether ``data`` begins with the request line of a route of the lane."""
        if not data.startswith(self.prefixes):
            return False
        words = data[:MAX_HEAD_BYTES].split(b" ", 2)
        return len(words) == 3 and _route(words[0].decode("ascii"), words[1], self) is not None


@dataclass(slots=True, frozen=True)
class Head:
    """The head of a request for the lane."""

    endpoint: Endpoint
    #: What stands in the places of the route's path: percent-decoded.
    path: Mapping[str, str]
    query: str
    headers: Mapping[str, str]
    #: Bytes of the body, or ``CHUNKED``.
    length: int
    #: Whether the client wants the connection kept.
    keep_alive: bool
    #: Whether the answer may be chunked (HTTP/1.0 knows no chunks).
    chunks: bool
    expects_continue: bool
    #: The client's own request id, if it sent a sane one.
    request_id: str | None


class _HeadParts:
    """What httptools calls back with."""

    __slots__ = ("complete", "headers", "url")

    def __init__(self) -> None:
        self.url = b""
        self.headers: list[tuple[str, str]] = []
        self.complete = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.decode("latin-1").lower(), value.decode("latin-1").strip(" \t")))

    def on_headers_complete(self) -> None:
        self.complete = True


def parse_head(data: bytes, routes: LaneRoutes) -> Head | None:
    """The head in ``data``, which ends with its empty line; None when the request is not for the lane.

    The lane takes what every reader of HTTP understands alike. Anything that two readers could take differently
    (two lengths, a length beside chunks, folded lines, no host or two) is left to hypercorn, whose answer is then
    the only one. No hot route can be upgraded, so that an ``Upgrade`` header is ignored (RFC 9110, section 7.8). Of a
    quick route, a request to upgrade, a body whose length is not told or is larger than it may be, and a compressed one
    are hypercorn's, too.
    """
    parts = _HeadParts()
    parser = httptools.HttpRequestParser(parts)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        pass  # raised behind the head
    except httptools.HttpParserError:
        return None
    route = _route(parser.get_method().decode("ascii"), parts.url, routes) if parts.complete else None
    if route is None or b"\r\n " in data or b"\r\n\t" in data:
        return None
    version = parser.get_http_version()
    headers = _joined(parts.headers)
    if headers is None or version not in ("1.0", "1.1"):
        return None
    length = _framing(headers, version)
    if length is None:
        return None
    tokens = [token.strip() for token in headers.get("connection", "").lower().split(",")]
    (endpoint, path), query = route
    if endpoint.route.quick and (
        not 0 <= length <= endpoint.route.body_bytes or "content-encoding" in headers or "upgrade" in headers
    ):
        return None
    return Head(
        endpoint,
        path,
        query,
        headers,
        length,
        keep_alive=version == "1.1" and "close" not in tokens,
        chunks=version == "1.1",
        expects_continue=version == "1.1" and headers.get("expect", "").lower() == "100-continue",
        request_id=sane_request_id(headers.get("x-request-id")),
    )


def _route(method: str, url: bytes, routes: LaneRoutes) -> tuple[tuple[Endpoint, Mapping[str, str]], str] | None:
    """The route, the places of its path, and the query; None for one that is not the lane's."""
    if not url.isascii():
        return None
    path, _, query = url.decode("ascii").partition("?")
    if "%" in path:
        path = unquote(path)
        if not path.isascii() or not path.isprintable():
            return None
    found = routes.find(method, path)
    return None if found is None else (found, query)


def _joined(pairs: list[tuple[str, str]]) -> dict[str, str] | None:
    """The headers by name, repeated ones joined; None when one is repeated that must not be."""
    headers: dict[str, str] = {}
    for name, value in pairs:
        if name not in headers:
            headers[name] = value
        elif name in ("content-length", "transfer-encoding", "host", "expect"):
            return None
        else:
            headers[name] = f"{headers[name]}, {value}"
    return headers


def _framing(headers: Mapping[str, str], version: str) -> int | None:
    """The length of the body, or ``CHUNKED``; None where readers could differ."""
    if version == "1.1" and "host" not in headers:
        return None
    length = headers.get("content-length")
    coding = headers.get("transfer-encoding")
    if coding is not None:
        return CHUNKED if coding.lower() == "chunked" and length is None and version == "1.1" else None
    if length is None:
        return 0
    return int(length) if length.isascii() and length.isdigit() and len(length) <= MAX_LENGTH_DIGITS else None


# --- intake ----------------------------------------------------------------------------------------
#
# A body is bounded before it is read, and counted and timed while it is.


#: A large body is read in pieces of this size.
BODY_RECEIVE_BYTES = 256 << 10
#: Chunks that are taken apart in one slice of long work: under a millisecond.
SLICE_CHUNKS = 500


async def read_body(connection: Connection, head: Head, held: Reservation, settings: HttpSettings) -> bytes:
    """The body as sent, taken off ``connection`` after its head. After an error what follows is not a request.

    Raises:
      BodyTooLarge: before a byte of it was read, where its length was announced.
      Overloaded: there is no room for what has come, or this body is so slow that its room was needed for others.
      MalformedBody: it breaks off, is too slow, or is not chunked as it says.
    """
    length = head.length
    if length > settings.max_body_bytes:
        raise too_large(settings.max_body_bytes)
    if head.expects_continue and not connection.pending:
        await connection.send_all(wire.CONTINUE)
    intake = _Intake(connection, held, settings)
    held.may_give_way(intake.give_up)
    try:
        if length == CHUNKED:
            return await _read_chunks(connection, intake, held, settings.max_body_bytes)
        data, connection.pending = connection.pending, b""
        held.grow(len(data) - held.reserved_bytes)
        intake.received_bytes = len(data)
        body = io.BytesIO(data)
        body.seek(len(data))
        while intake.received_bytes < length:
            data = await intake.receive(min(length - intake.received_bytes, BODY_RECEIVE_BYTES))
            held.grow(len(data))  # not before it has come: what is announced costs nothing
            body.write(data)
        return body.getvalue()  # not a copy
    finally:
        held.keeps()


async def _read_chunks(connection: Connection, intake: _Intake, held: Reservation, max_body_bytes: int) -> bytes:
    chunked = ChunkedBody()
    data, connection.pending = connection.pending, b""
    intake.received_bytes = len(data)
    while True:
        rest = chunked.feed(data, FEW_PARTS)
        while chunked.is_behind and chunked.size <= max_body_bytes:
            async with held.long_work:
                intake.check()
                rest = chunked.feed(b"", SLICE_CHUNKS)
        if chunked.size > max_body_bytes:
            raise too_large(max_body_bytes)
        held.grow(chunked.size - held.reserved_bytes)
        if rest is not None:
            connection.pending = rest
            return chunked.taken()
        data = await intake.receive(BODY_RECEIVE_BYTES)
        await trio.lowlevel.checkpoint()


class _Intake:
    """Receives a body in time."""

    def __init__(self, connection: Connection, held: Reservation, settings: HttpSettings) -> None:
        self._connection = connection
        self._held = held
        self._settings = settings
        self._waiting = trio.CancelScope()
        self._started = trio.current_time()
        self.received_bytes = 0
        connection.scope.deadline = inf  # the deadline here is for the body, and has an answer

    def check(self) -> float:
        """When the body has to be there, with what has come of it. Raises PlainsongError: that was, or it gave way."""
        if self._held.gave_way:
            raise self._held.refusal()
        deadline_s = body_deadline(self._started, self.received_bytes, self._settings)
        if trio.current_time() > deadline_s:
            raise too_slow(self.received_bytes)
        return deadline_s

    async def receive(self, max_bytes: int) -> bytes:
        with trio.CancelScope(deadline=self.check()) as self._waiting:
            try:
                data = await self._connection.receive(max_bytes)
            except PeerLeft:
                raise broke_off(self.received_bytes) from None
            self.received_bytes += len(data)
            return data
        raise self._held.refusal() if self._held.gave_way else too_slow(self.received_bytes)

    def give_up(self) -> None:
        """The room of the body is needed for others: ``receive`` raises Overloaded."""
        self._waiting.cancel()


# --- connection ------------------------------------------------------------------------------------
#
# The socket is read and written directly, since a publish costs little more than its system calls: what a stream
# object or a time-out scope per request would add is a good part of it. One cancel scope lasts as long as the
# connection; its deadline is that of the present phase: resting, reading a head, handling (none), sending.


RECEIVE_BYTES = 64 << 10
#: Bodies up to this size are waited for without a task, for so long.
GATHERED_BYTES = 256 << 10
GATHER_S = 1.0
#: What was waited for somebody who sends no more: longer than any request may.
WAITED_MS = 1 << 40
#: What a client may send ahead while its answer is awaited.
MAX_PIPELINED_BYTES = 64 << 10
#: How long the rest of a refused body is read and dropped, so that the client sees the answer before a reset.
LINGER_S = 2.0
#: The same for a client that may have sent ahead what will have no answer.
BRIEF_LINGER_S = 0.1
_RESET = struct.pack("ii", 1, 0)
#: Events of a socket whose other side sends no more.
_ENDS = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class PeerLeft(Exception):
    """The client has closed the connection."""


class Connection:
    """One accepted socket, not blocking, and its place in the reactor."""

    __slots__ = (
        "_ends",
        "_lane",
        "_reactor",
        "_receiver",
        "_sock",
        "_tls",
        "_unsent",
        "_watching",
        "edge",
        "ended",
        "pace",
        "peer",
        "pending",
        "resting",
        "room",
        "scope",
        "wanted_bytes",
    )

    def __init__(self, sock: socket.socket | TlsSocket, parts: LaneParts, lane: Lane, peer: Peer) -> None:
        self._sock = sock
        self._tls = sock if isinstance(sock, TlsSocket) else None
        self.pace = Pace(parts.settings)
        #: What its answers hold until they have left.
        self.room = parts.budget.answers.room()
        self._reactor = parts.reactor
        #: Whose requests come here; None once it has left, so that neither keeps the other.
        self._lane: Lane | None = lane
        self._receiver: trio.lowlevel.Task | None = None
        self._watching: trio.CancelScope | None = None
        self._unsent = memoryview(b"")
        #: Whether there may be something to read; whether the end has come with it; and whether it was read.
        self.edge = self._tls is not None  # what came with the end of the handshake makes no edge
        self._ends = False
        self.ended = False
        #: Whether the connection waits for its next request, or for the answer to one without its task.
        self.resting = False
        #: Around everything; its end is the connection's.
        self.scope = trio.CancelScope()
        self.peer = peer
        #: Received, and not yet part of a request.
        self.pending = b""
        #: How much is read at once while the connection rests.
        self.wanted_bytes = RECEIVE_BYTES
        parts.reactor.add(sock, self)

    def leave(self) -> None:
        """Neither the reactor nor the lane has anything more to do with the socket. Idempotent."""
        self._reactor.remove(self._sock, self)
        self._lane = None

    # --- in the reactor's task --------------------------------------------------------------------

    def readable(self, events: int = 0) -> None:
        """Something has come, or the other side has gone."""
        self.edge = True
        if events & _ENDS:
            self._ends = True
        if not self.resting:
            self.wake()
            return
        lane = self._lane
        if lane is not None and lane.reading:
            self.read_ahead()
            return
        while lane is not None and not lane.started and self._read(lane):
            if lane.data_arrived():
                self.wake()
                return
            if not (lane.gathering and self.edge):
                return

    def read_ahead(self) -> None:
        """Keeps what the client sends while it waits for an answer, and tells the lane when it sends no more."""
        lane = self._lane
        while lane is not None and self.edge and not self.ended and len(self.pending) < MAX_PIPELINED_BYTES:
            self._read(lane)
        if lane is not None and self.ended:
            lane.sending_ended()

    def give_up(self) -> None:
        """Ends the connection: nothing came for ``keep_alive_s``, or it has failed."""
        self.scope.cancel()

    def _read(self, lane: Lane) -> bool:
        """Reads what is there, without waiting; whether there is something to see to."""
        if len(self.pending) >= MAX_PIPELINED_BYTES and not lane.gathering:
            return True  # what was sent ahead is enough; the rest is read when that has been answered
        try:
            data = self._sock.recv(self.wanted_bytes)
        except BlockingIOError:
            self.edge = False
            return bool(self.pending)
        except OSError:
            data = b""
        if not data:
            self.ended = True
            return True
        # Behind a short read nothing is left, but for the end: that came with the same edge, or has one of its own.
        self.edge = self._ends or len(data) == self.wanted_bytes or (self._tls is not None and self._tls.ended)
        self.pending = self.pending + data if self.pending else data
        return True

    def wake(self) -> None:
        """Wakes the task, if it sleeps."""
        self.resting = False
        self._reactor.works(self)
        task, self._receiver = self._receiver, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    def send_now(self, data: bytes) -> bool:
        """Sends ``data`` without waiting; False: not all of it, and ``send_rest`` sends the rest, or raises."""
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            sent = 0  # the task meets it again
        if sent < len(data):
            self._unsent = memoryview(data)[sent:]
            return False
        return True

    # --- in the connection's task -----------------------------------------------------------------

    async def rest(self) -> None:
        """Sleeps until the task is needed."""
        self.resting = True
        self._reactor.rests(self)
        if self.edge:
            self._reactor.again(self)  # not here: what is started has its turn behind the reactor's
        await self._sleep()

    async def send_rest(self) -> None:
        """Sends what ``send_now`` left. Raises OSError."""
        rest, self._unsent = self._unsent, memoryview(b"")
        if rest:
            await self._send_rest(rest)
            self.scope.deadline = inf

    async def _sleep(self) -> None:
        self._receiver = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._receiver = None
            self.resting = False
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    async def receive(self, max_bytes: int = RECEIVE_BYTES) -> bytes:
        """At least one byte.

        Raises:
          PeerLeft: there will be no more.
          OSError: the connection is broken.
        """
        while True:
            if self.ended:
                raise PeerLeft
            if not self.edge:
                await self._sleep()
            try:
                data = self._sock.recv(max_bytes)
            except BlockingIOError:
                self.edge = False
                continue
            self.edge = self._ends or len(data) == max_bytes or (self._tls is not None and self._tls.ended)
            if not data:
                raise PeerLeft
            return data

    async def send_all(self, data: bytes, body: bytes = b"") -> None:
        """Sends ``data``, and ``body`` behind it, at once if the socket takes it; each wait for the reader has its time-out.

        Raises:
          OSError: the connection is broken.
        """
        try:
            sent = self._sock.sendmsg((data, body)) if body else self._sock.send(data)
        except BlockingIOError:
            sent = 0
        if sent == len(data) + len(body):
            return
        if sent < len(data):
            await self._send_rest(memoryview(data)[sent:])
        await self._send_rest(memoryview(body)[max(0, sent - len(data)) :])
        self.scope.deadline = inf

    async def _send_rest(self, rest: memoryview) -> None:
        pace = self.pace
        while rest:
            begun_s = trio.current_time()
            self.scope.deadline = begun_s + pace.left_s()
            self.room.blocks(self.scope.cancel)
            try:
                await wait_writable(self._sock)
            finally:
                self.room.moves()
            try:
                sent_bytes = self._sock.send(rest)
            except BlockingIOError:
                sent_bytes = 0
            rest = rest[sent_bytes:]
            pace.waited(trio.current_time() - begun_s, sent_bytes)

    async def watch(self) -> None:
        """Keeps what the client sends ahead, and tells the lane when it sends no more; until ``unwatch``.

        Nobody can tell a client that has closed its sending half from one that has gone, but by sending it something.
        """
        if self._watching is not None or self.ended:
            return
        with trio.CancelScope() as watching:
            self._watching = watching
            while len(self.pending) < MAX_PIPELINED_BYTES:
                await wait_readable(self._sock)
                if watching.cancel_called:
                    return  # the owner reads again; to wait here once more would be in its way
                try:
                    data = self._sock.recv(RECEIVE_BYTES)
                except BlockingIOError:
                    continue
                except OSError:
                    self.scope.cancel()
                    return
                if not data:
                    self.ended = True
                    if self._lane is not None:
                        self._lane.sending_ended()
                    return
                self.pending += data

    def unwatch(self) -> None:
        """Ends ``watch``; the socket is free for our own reading at once, before its task has ended."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    async def linger(self, linger_s: float) -> None:
        """Says that nothing more will be sent, and drops what still comes, until the client leaves or time is over.

        Raises:
          PeerLeft: the client has seen it all.
        """
        self._sock.shutdown(socket.SHUT_WR)
        with trio.move_on_after(linger_s):
            while True:
                await self.receive()

    def reset_on_close(self) -> None:
        """Lets closing break the connection at once, and free what the kernel holds for a reader that fell asleep."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


# --- watch -----------------------------------------------------------------------------------------
#
# A client that leaves while its answer is awaited is noticed at once.


#: Requests answered sooner than this are never watched: a task for each would cost more than they do.
PATIENCE_S = 0.01


class Watched(Protocol):
    """A connection whose request is being answered."""

    async def watch(self) -> None:
        """Waits for the client to go away, and cancels the request when it does; ends with the answer at the latest."""


class Watch:
    """Starts a watcher for each request that is still there after one to two rounds of ``PATIENCE_S``.

    It rests while no request is young: a thousand parked polls cost it nothing.
    """

    __slots__ = ("_grown", "_wake", "_young")

    def __init__(self) -> None:
        self._young: dict[Watched, None] = {}
        self._grown: dict[Watched, None] = {}
        self._wake = trio.Event()

    def begin(self, connection: Watched) -> None:
        """The connection's request is handed to its handler."""
        self._young[connection] = None
        if not self._wake.is_set():
            self._wake.set()

    def end(self, connection: Watched) -> None:
        """The handler has answered, or failed."""
        if connection in self._young:
            del self._young[connection]
        elif connection in self._grown:
            del self._grown[connection]

    async def run(self) -> NoReturn:
        """Watches until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                if not self._young and not self._grown:
                    self._wake = trio.Event()
                    await self._wake.wait()
                await trio.sleep(PATIENCE_S)
                for connection in self._grown:
                    nursery.start_soon(connection.watch)
                self._grown = self._young
                self._young = {}
        raise AssertionError("the loop ends by cancellation only")
