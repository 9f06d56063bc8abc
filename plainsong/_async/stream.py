"""A publish stream: each call waits only for space in the buffer, and returns a ticket for the answer."""

from __future__ import annotations

import logging
from collections import deque
from math import inf
from typing import TYPE_CHECKING, Any, cast

from plainsong import calls, tracing
from plainsong._async._backend import BROKEN_STREAM, ERRORS_END_STREAMS, SendLock, connect, let_others_run, now
from plainsong._async._futures import AsyncTicket, Settling
from plainsong._async.publisher import AsyncSender
from plainsong.calls import Failure
from plainsong.delivery_counts import Tally
from plainsong.errors import (
    BufferFull,
    Closed,
    ConnectFailed,
    ConnectionLost,
    DeadlineExceeded,
    NotSent,
    UnexpectedAnswer,
)
from plainsong.messages import as_list, outgoing_request
from plainsong.protocol.errors import MalformedBody, OutcomeUnknown, PlainsongError, Unauthenticated
from plainsong.publisher_queue import EXIT_TIMEOUT_S
from plainsong.retry import error_of, is_elsewhere, owned_part
from plainsong.serializers import BYTES, SerializerLike, serializer_for
from plainsong.settings import upload_s
from plainsong.stream_queue import MESSAGE_BYTES, REQUEST_BYTES, StreamQueue
from plainsong.transport.websocket import BROKEN_FRAMES, Frames, Handshake, address_of, connection_lost

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from plainsong._async._backend import Connection
    from plainsong._async.retry import AsyncChannel
    from plainsong.messages import Receipt
    from plainsong.protocol.requests import PublishRequest, PublishResponse

log = logging.getLogger("plainsong.stream")

#: The least time a daemon has to answer the close frame, whatever the caller's limit.
CLOSE_S = 0.1


CLOSED = "the stream is closed, or was never opened"


class AsyncStream:
    """One WebSocket to a topic; made by ``AsyncClient.stream``, which explains the options. Use it in ``async with``.

    The order of calls is the order in the topic. The stream ends with its connection and sends nothing again: requests
    without an answer are unknown, unless the daemon closed in good order.
    """

    def __init__(
        self, channel: AsyncChannel, topic: str, *, max_pending_bytes: int, serializer: SerializerLike
    ) -> None:
        self._channel = channel
        self._topic = topic
        self._path = calls.topic_path(channel.namespace, topic, "/stream")
        self.exit_timeout_s = EXIT_TIMEOUT_S
        self._serializer = serializer_for(serializer)
        self._as_it_is = self._serializer is BYTES
        self._queue: StreamQueue[AsyncTicket[Any]] = StreamQueue(max_pending_bytes)
        self._tally: Tally[AsyncTicket[Any]] = Tally()
        self._settling = Settling()
        self._sending = SendLock()
        #: Pongs and the answer to a close frame, sent by the holder of ``_sending``. The receiver never waits for that
        #: lock: the daemon may not read on before its answers are received.
        self._replies: deque[bytes] = deque()
        self._closing = False
        self._broken: PlainsongError | None = None
        self._make_sender()

    def _make_sender(self) -> None:
        self._sender: AsyncSender[bytes, AsyncTicket[Any]] = AsyncSender(
            "plainsong-stream", self._queue, self._deliver, self._lose, 1
        )
        self._lock = self._sender.lock

    async def _open(self) -> None:
        self._connection, self._frames = await self._connected()
        await self._sender.open()
        if not self._sender.workers.start(self._receive):
            await self._connection.aclose()
            raise ConnectFailed("no thread could be started to receive the answers")

    @property
    def _is_open(self) -> bool:
        """True if it accepts requests."""
        return not self._sender.closed

    async def __aenter__(self) -> Self:
        await self._open()  # async only
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        unreported: NotSent | None = None
        try:
            if kind is None or not ERRORS_END_STREAMS:
                await self.aclose()
        except NotSent as not_sent:
            unreported = not_sent
        finally:
            await self._sender.workers.aclose(self._abandon)
        if unreported is not None:
            if kind is None:
                raise unreported
            log.warning("a block with a stream ended with an error: %s", unreported.detail)

    def __repr__(self) -> str:
        return f"<AsyncStream to {self._topic}: {len(self._queue)} without an answer>"

    # --- the connection ------------------------------------------------------------------------

    async def _connected(self) -> tuple[Connection, Frames]:
        """Connects to the first reachable daemon."""
        places, part = self._channel.places, owned_part(self._path)
        left = len(places.urls)
        credentials = self._channel.settings.credentials
        token, again = credentials.token, False
        while True:
            url = places.where(part)
            try:
                connection, frames, headers = await self._connected_to(url, part)
            except Unauthenticated:
                if again or not credentials.read_again(token):
                    raise
                again = True
            except PlainsongError as error:
                owner_failed = places.note_answer(part, url, Failure("connect", error.detail), error)
                left -= not owner_failed
                if not left or not (owner_failed or is_elsewhere(error)):
                    raise
            else:
                places.remember_owner(part, url, headers)
                return connection, frames

    async def _connected_to(self, url: str, part: str) -> tuple[Connection, Frames, dict[str, str]]:
        """Opens a WebSocket: connects within the connect timeout, and completes the handshake within the request timeout.

        Raises:
          ConnectFailed, InvalidName, ShuttingDown, UnexpectedAnswer: nothing happened.
        """
        settings = self._channel.settings
        connect_s = self._channel.places.connect_s(url, settings.connect_timeout_s)
        host, port, tls = address_of(url)
        connection: Connection | None = None
        try:
            context = settings.credentials.tls_context() if tls else None
            connection = await connect(host, port, tls=context, timeout_s=connect_s)
            until_s = now() + settings.request_timeout_s
            handshake = Handshake(url, self._path, settings.credentials)
            await connection.send(handshake.request(), until_s - now())
            headers: dict[str, str] | None = None
            while headers is None:
                data = await connection.receive(until_s - now())
                if not data:
                    raise TimeoutError(f"no answer within {settings.request_timeout_s:g} s")
                headers = handshake.answered(data)
        except (TimeoutError, *BROKEN_STREAM) as error:
            if connection is not None:
                await connection.aclose()
            failed = error_of(Failure("connect", str(error) or type(error).__name__, error), url)
            assert failed is not None
            raise failed from error
        except BaseException:
            if connection is not None:
                await connection.aclose()
            raise
        return connection, Frames(handshake), headers

    async def _deliver(self, message: bytes) -> None:
        """Sends a WebSocket message of requests."""
        limit_s = self._channel.settings.request_timeout_s + upload_s(len(message))
        try:
            await self._sending.acquire()
            try:
                await self._connection.send(self._frames.message(message), limit_s)
            finally:
                self._sending.release()
            await self._send_replies()
        except (*BROKEN_STREAM, *BROKEN_FRAMES) as error:
            # The receiver may still read the daemon's reason. Unsent requests stay in the queue.
            with self._lock:
                self._queue.halted = True
                self._broken = self._broken or connection_lost(error)

    async def _send_replies(self) -> None:
        """Sends the queued replies, unless a send is under way: then its sender sends them next. Raises BROKEN_STREAM."""
        while self._replies and self._sending.acquire_nowait():
            try:
                while self._replies:
                    await self._connection.send(self._replies.popleft(), self._channel.settings.request_timeout_s)
            finally:
                self._sending.release()

    async def _receive(self) -> None:
        """Receives answers until the connection ends."""
        error: PlainsongError = ConnectionLost("the stream was closed")
        orderly = False
        try:
            error, orderly = await self._received()
        finally:
            await self._end(error, orderly=orderly)

    async def _received(self) -> tuple[PlainsongError, bool]:
        """Receives answers; returns the error that ended the connection, and True if the daemon closed it normally."""
        answer_s = self._answer_s()
        look_s, before = now() + answer_s, self._unanswered_after()
        try:
            while True:
                for message, reply in self._frames.events():  # frames may have come with the handshake
                    if message is not None:
                        self._take_answers(message)
                    else:
                        self._replies.append(reply)
                await self._send_replies()
                if self._frames.closed is not None and self._frames.closed[1]:
                    return self._frames.closed
                data = await self._connection.receive(look_s - now())
                if data:
                    self._frames.receive(data)
                elif now() >= look_s:
                    answered = self._unanswered_after()
                    if answered is not None and answered == before:
                        late = f"no answer within {answer_s:g} s"
                        hint = "request_timeout_s is its limit"
                        return DeadlineExceeded(late, outcome="unknown", hint=hint), False
                    answer_s = self._answer_s()
                    look_s, before = now() + answer_s, answered
        except MalformedBody as error:
            broken = UnexpectedAnswer(error.detail)
            broken.__cause__ = error
            return broken, False
        except (*BROKEN_STREAM, *BROKEN_FRAMES) as error:
            return self._frames.closed or (self._broken or connection_lost(error), False)

    def _take_answers(self, message: bytes) -> None:
        with self._lock:
            wrong = self._queue.take_answers(message)
            self._sender.room.notify_all()
        self._settling.wake_all()
        if wrong:
            self._count_as_failed(wrong)

    def _answer_s(self) -> float:
        """Seconds that the next answer may take, including the upload of its request if that is large."""
        return self._channel.settings.request_timeout_s + upload_s(self._queue.oldest_bytes)

    def _unanswered_after(self) -> int | None:
        """The number of answers so far, if sent requests still wait for one; else None."""
        return self._queue.answered if self._queue.sent else None

    async def _end(self, error: PlainsongError, *, orderly: bool) -> None:
        """Fails all open requests and closes the connection."""
        with self._lock:
            lost = self._queue.end(error, orderly=orderly)
            self._sender.room.notify_all()
        self._lose(lost)
        await self._connection.aclose()

    def _lose(self, lost: list[AsyncTicket[Any]]) -> None:
        self._count_as_failed(lost)
        self._settling.wake_all()

    def _count_as_failed(self, tickets: list[AsyncTicket[Any]]) -> None:
        for ticket in tickets:
            self._tally.failed([ticket], ticket._failure())

    def _abandon(self) -> int:
        """Ends without waiting, because the block raised an exception."""
        with self._lock:
            self._closing = True
            self._sender.stop()
            lost = self._queue.end(ConnectionLost("the stream was closed"), orderly=False)
        self._lose(lost)
        return 0

    # --- sending -------------------------------------------------------------------------------

    async def publish(self, messages: Any, *, ttl_s: int | None = None) -> AsyncTicket[Receipt]:
        """Takes a request and returns its ticket; waits only while the buffer is full.

        Args:
          messages: one, or a list of several, which are one request; as for ``AsyncClient.publish``.
          ttl_s: their time to live in seconds, if shorter than the topic's.
        Raises:
          Closed, NotEncodable, InvalidParameter: nothing happened.
        """
        if type(messages) is not bytes or not self._as_it_is or ttl_s is not None or tracing.is_on():
            many = as_list(messages)
            # It has no write pointer, so its answer is a receipt.
            sent = await self.send(outgoing_request(many, self._serializer, ttl_s))
            return cast("AsyncTicket[Receipt]", sent)
        ticket: AsyncTicket[Receipt] = AsyncTicket(self._settling, 1)
        queue = self._queue
        if self._sender.is_inside():
            self._put_late(lambda: queue.put_single(messages, ticket), ticket, len(messages))
            return ticket
        with self._lock:
            if not self._sender.ready:
                self._make_ready()
            if not queue.put_single(messages, ticket):
                await self._put_when_there_is_room(lambda: queue.put_single(messages, ticket))
            if queue.unsent == 1:
                self._sender.wake_worker()
        if queue.unsent_bytes >= MESSAGE_BYTES:  # async only
            await let_others_run()  # otherwise a caller's loop that never waits would starve the sender
        return ticket

    async def send(self, request: PublishRequest) -> AsyncTicket[Receipt | PublishResponse]:
        """Like ``publish``, for a request with any fields. Under a write pointer it returns a ``PublishResponse``."""
        tracing.stamp(request)
        ticket: AsyncTicket[Receipt | PublishResponse] = AsyncTicket(self._settling, len(request.messages))
        queue = self._queue
        if self._sender.is_inside():
            self._put_late(lambda: queue.put(request, ticket), ticket, sum(map(len, request.messages)))
            return ticket
        with self._lock:
            if not self._sender.ready:
                self._make_ready()
            if not queue.put(request, ticket):
                await self._put_when_there_is_room(lambda: queue.put(request, ticket))
            if queue.unsent == 1:
                self._sender.wake_worker()
        if queue.unsent_bytes >= MESSAGE_BYTES:  # async only
            await let_others_run()
        return ticket

    def _make_ready(self) -> None:
        """The caller holds the lock. Raises Closed, BufferFull: nothing happened."""
        full = self._sender.make_ready(CLOSED)
        if full is not None:
            raise full

    def _put_late(self, put: Callable[[], bool], ticket: AsyncTicket[Any], size: int) -> None:
        """``publish`` called by a signal handler or a finalizer that has interrupted this stream: never waits for room."""
        queue = self._queue

        def put_or_fail() -> AsyncTicket[Any] | None:
            try:
                if not put():
                    raise BufferFull("the buffer is full", hint="use a larger max_pending_bytes")
                if queue.unsent == 1:
                    self._sender.wake_worker()
            except PlainsongError as error:
                ticket.failed(error)
                return ticket
            return None

        room = queue.max_pending_bytes - queue.pending_bytes
        self._sender.put_late(CLOSED, put_or_fail, size + REQUEST_BYTES, room)

    async def _put_when_there_is_room(self, put: Callable[[], bool]) -> None:
        """The caller holds the lock."""
        while True:
            await self._sender.room.wait()
            if self._closing:
                raise Closed("the stream was closed while this request waited for space")
            if put():
                return

    # --- the end -------------------------------------------------------------------------------

    async def flush(self, timeout_s: float | None = None) -> None:
        """Waits until every request is answered.

        Raises:
          NotSent: a request is not answered after ``timeout_s``, or failed since the last flush without a caller
            retrieving it. No request is abandoned.
        """
        with self._lock:
            await self._sender.room.wait_for(lambda: not len(self._queue), timeout_s)
            waiting = len(self._queue)
        self._tally.raise_if_unretrieved(0, waiting)

    async def aclose(self, timeout_s: float | None = None) -> None:
        """Flushes, then closes; gives up unanswered requests after ``timeout_s``. Idempotent. Raises like ``flush``."""
        until_s = inf if timeout_s is None else now() + timeout_s
        with self._lock:
            self._closing = True
            self._sender.refuse()
            self._sender.room.notify_all()
            await self._sender.room.wait_for(lambda: not len(self._queue), timeout_s)
            is_over = self._queue.ended is not None
        if not is_over:
            await self._close_in_order(min(self.exit_timeout_s, max(CLOSE_S, until_s - now())))
        await self._end(OutcomeUnknown("the stream was closed before the answer arrived"), orderly=False)
        await self._sender.aclose(0)
        self._tally.raise_if_unretrieved(0)

    async def _close_in_order(self, limit_s: float) -> None:
        """Sends a close frame and waits for the daemon's, ``limit_s`` at most."""
        until_s = now() + limit_s
        if not await self._sending.acquire(limit_s):
            return
        try:
            try:
                await self._connection.send(self._frames.close(), max(0.0, until_s - now()))
            finally:
                self._sending.release()
            with self._lock:  # wait for the daemon's close frame
                await self._sender.room.wait_for(lambda: self._queue.ended is not None, max(0.0, until_s - now()))
        except (*BROKEN_STREAM, *BROKEN_FRAMES) as error:
            log.debug("a stream ended before it was closed: %s", error)

    # --- fork and exit hooks of the synchronous client -----------------------------------------

    async def _after_fork(self) -> None:
        """Ends the stream in a child process: the parent keeps the connection."""
        self._connection.forget()
        self._settling.renew()
        self._make_sender()
        self._sender.stop()
        self._closing = True
        self._queue.end(OutcomeUnknown("the process forked: the parent has this stream"), orderly=False)

    async def _at_exit(self) -> None:
        """Waits up to ``exit_timeout_s`` for the answers to open requests."""
        try:
            await self.aclose(self.exit_timeout_s)
        except NotSent as error:
            log.error("a stream was never closed, and the program ended: %s", error.detail)
