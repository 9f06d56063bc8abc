"""Hypercorn's trio server for all that the lane does not serve, on connections whose first bytes may have been read.

A connection over HTTP/1.1 goes back to the lane with its next request for the lane.

Three things differ from hypercorn's own ``TCPServer`` (0.18). Sends have a deadline and can be cut: its own are shielded
for ever, so that a reader that stopped holds up the exit. A head has a time-out of its own. The refusals of its parser
are problems like all others.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager, suppress
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import h11
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

from broker.http.budgets import Pace
from broker.http.floods import CountedWarning
from broker.http.http2 import BoundedH2, Protocols, Tasks
from broker.http.hypercorn_patches import (
    AT_ONCE_S,
    CUT,
    PEER,
    SENDING_END,
    Gate,
    RefusingH11,
    ResumedStream,
    SendingEnd,
    with_certificate,
    with_extension,
)
from broker.http.lane import BRIEF_LINGER_S, LINGER_S
from broker.http.messages import Conversations
from broker.http.websocket import StreamSocket
from broker.security.guard import OPEN

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from hypercorn.typing import ASGIFramework, LifespanState

    from broker.http.budgets import BodyBudget, HttpSettings
    from broker.http.messages import Begin
    from broker.http.origin_check import OriginCheck
    from broker.http.peer import Peer
    from broker.http.tls_socket import TlsStream
    from broker.security.guard import Guard

#: Answers are sent in pieces of this size, each with its deadline: a slow reader is served, one that stopped is cut.
SEND_BYTES = 64 << 10
#: Connections are long-lived here; hypercorn's default of 1000 requests would close them under publishers.
KEEP_ALIVE_MAX_REQUESTS = 1 << 62


class HypercornConnection(TCPServer):
    """One connection served by hypercorn."""

    def __init__(
        self,
        hypercorn: HypercornServer,
        stream: Any,
        peer: Peer,
        is_for_the_lane: Callable[[bytes], bool],
        head_due_s: float,
    ) -> None:
        super().__init__(hypercorn.app, hypercorn.config, hypercorn.context, hypercorn.state, stream)
        self._settings, self._long_work = hypercorn.settings, hypercorn.long_work
        self._refused = hypercorn.refused_h2
        self._send_timeout_s = hypercorn.settings.send_timeout_s
        #: Of its readers: of one answer after the other, or of all streams together over HTTP/2.
        self._pace = Pace(hypercorn.settings)
        self._header_timeout_s = hypercorn.settings.header_timeout_s
        #: Until when its first request has to come: whoever has shown no credential yet holds no connection for long.
        self._unproven_until_s = trio.current_time() + self._header_timeout_s if hypercorn.asks_for_names else inf
        #: Whether what was read last had a request in it, which may be answered by now.
        self._was_asked = False
        self._conversations = hypercorn.conversations
        self._peer = peer
        self._is_for_the_lane = is_for_the_lane
        #: When its first head has to be whole: its first bytes came before the connection was given to hypercorn.
        self._first_head_due_s = head_due_s
        self._idle = True
        self._life = trio.CancelScope()
        self._sending: trio.CancelScope | None = None
        #: Around each read; its deadline is that of a head, or of the close.
        self._reading = trio.CancelScope()
        self._closing = False
        self._sending_end = SendingEnd()
        #: Set when all requests that have come are answered, for whoever waits for that.
        self._answered = trio.Event()
        #: The reader has gone or is given up: nothing more is sent, also by tasks that wait for the lock.
        self._cut = False

    async def serve(self) -> bytes | None:
        """Serves until the connection is closed (None), or is to go back to the lane with these bytes, just read."""
        next_bytes = None
        with self._life:
            try:
                next_bytes = await self._serve()
            except (OSError, trio.BrokenResourceError):
                pass  # the client has gone
            finally:
                if next_bytes is None:
                    await trio.aclose_forcefully(self.stream)
        return next_bytes

    def cut(self) -> None:
        """Ends the connection now, also in the middle of a send."""
        self._cut = True
        self._life.cancel()
        if self._sending is not None:
            self._sending.cancel()

    async def _serve(self) -> bytes | None:
        socket, tls = self.stream.socket, self.stream.tls
        if tls is not None:
            self.app = with_certificate(self.app, tls.ssl_object)
        client = parse_socket_addr(socket.family, socket.getpeername())
        server = parse_socket_addr(socket.family, socket.getsockname())
        state = ConnectionState(self.state)
        self.app = with_extension(self.app, CUT, self.cut)
        self.app = with_extension(self.app, PEER, self._peer)
        self.app = with_extension(self.app, SENDING_END, self._sending_end)
        async with Tasks() as tasks:
            self._task_group = tasks
            ends = (
                self.app,
                self.config,
                self.context,
                tasks,
                state,
                self._peer.tls,
                client,
                server,
                self.protocol_send,
            )
            make_h2 = partial(
                BoundedH2,
                *ends,
                settings=self._settings,
                long_work=self._long_work,
                refused=self._refused,
            )
            self.protocol = Protocols(*ends, make_h2=make_h2, alpn=(tls and tls.alpn) or "http/1.1")
            if isinstance(self.protocol.protocol, H11Protocol):
                self.protocol.protocol = RefusingH11(*ends, conversations=self._conversations, peer=self._peer)
            await self.protocol.initiate()
            await self.idle_task.restart(tasks, self._idle_timeout)
            next_bytes = await self._read()
            await self.idle_task.stop()  # else it keeps a connection that is over until its time-out
        if next_bytes is None:
            await self._close()
        return next_bytes

    async def protocol_send(self, event: Event) -> None:
        """Sends bytes, each piece with its deadline, or follows the connection's state.

        All of it is shielded: half a frame would spoil the connection, and hypercorn reports an idle connection from
        the very task that quart-trio cancels once it has answered (the time-out would never start again).
        """
        if isinstance(event, RawData):
            if not await self._send_pieces(event.data):
                self._cut = True
                self._life.cancel()
                await self.protocol.handle(Closed())
            return
        if isinstance(event, Updated):
            self._idle = event.idle
            self._pace.restart()
        # Over HTTP/2 more is sent than answers, and over HTTP/1.1 its preface looks like a request.
        is_h11 = isinstance(self.protocol.protocol, H11Protocol)
        if isinstance(event, RawData) if is_h11 else isinstance(event, Updated) and not event.idle:
            self._was_asked, self._unproven_until_s = True, inf
        if isinstance(event, Closed) or self._idle:
            self._answered.set()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + self._send_timeout_s):
            await super().protocol_send(event)

    async def _idle_timeout(self) -> None:
        """Closes the connection when it was idle too long, or when the server stops."""
        with trio.move_on_after(self.config.keep_alive_timeout):
            await self.context.terminated.wait()
            # A client that was just answered may be sending its next request already, which is answered too.
            await trio.sleep(BRIEF_LINGER_S)
        with trio.CancelScope(shield=True):
            await self._initiate_server_close()

    async def _send_pieces(self, data: bytes) -> bool:
        """Sends ``data``; False: the reader has gone, or has stopped reading."""
        rest = memoryview(data)
        async with self.send_lock:
            while rest:
                if self._cut:
                    return False
                with trio.CancelScope(shield=True) as self._sending:
                    begun_s = trio.current_time()
                    self._sending.deadline = begun_s + self._pace.left_s()
                    try:
                        await self.stream.send_all(rest[:SEND_BYTES])
                    except (trio.BrokenResourceError, trio.ClosedResourceError):
                        return False
                if self._sending.cancelled_caught:
                    return False
                waited_s = trio.current_time() - begun_s
                if waited_s > AT_ONCE_S:
                    self._pace.waited(waited_s, min(len(rest), SEND_BYTES))
                rest = rest[SEND_BYTES:]
        return True

    async def _close(self) -> None:
        """Half-closes; the reading task closes once the client has seen that, or the time is over.

        Closing at once would reset a connection that has unread bytes, and the client would lose its last answer. One
        that was refused in the middle of its request may have much to send yet.
        """
        if self._closing:
            return
        self._closing = True
        connection = getattr(self.protocol.protocol, "connection", None)
        in_step = not isinstance(connection, h11.Connection) or connection.their_state is not h11.ERROR
        linger_s = BRIEF_LINGER_S if in_step else LINGER_S
        self._reading.deadline = min(self._reading.deadline, trio.current_time() + linger_s)
        async with self.send_lock:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self.stream.send_eof()

    async def _read(self) -> bytes | None:
        """Feeds the protocol until the client leaves or takes too long for a head; or begins a request for the lane,
        whose bytes it returns."""
        deadline = self._unproven_until_s
        goes_back: bool | None = None
        while True:
            if not self._closing:
                self._reading.deadline = deadline
            with self._reading:
                try:
                    data = bytes(await self.stream.receive_some(MAX_RECV))
                except (trio.ClosedResourceError, trio.BrokenResourceError):
                    break
            if self._reading.cancelled_caught:
                break
            linger_until = self._reading.deadline
            self._reading = trio.CancelScope(deadline=linger_until if self._closing else inf)
            if goes_back is None:  # what the lane has just refused would be refused again
                goes_back = not self._is_for_the_lane(data)
            elif goes_back and self._is_for_the_lane(data) and await self._may_go_back():
                return data
            self._was_asked = False
            if not self._closing:  # else nothing would answer it
                await self.protocol.handle(RawData(data))
            if not data:
                await self._answer_the_last()
                break
            if not self._idle:
                self._unproven_until_s = inf
            if self._was_asked or not (self._idle and isinstance(self.protocol.protocol, H11Protocol)):
                deadline = self._unproven_until_s
            elif deadline == inf:
                deadline = min(trio.current_time() + self._header_timeout_s, self._first_head_due_s)
            self._first_head_due_s = inf
        await self.protocol.handle(Closed())
        return None

    async def _may_go_back(self) -> bool:
        """Whether all that has come is answered, over HTTP/1.1, and the connection is to be kept."""
        connection = getattr(self.protocol.protocol, "connection", None)
        if not isinstance(connection, h11.Connection) or connection.trailing_data != (b"", False):
            return False
        if connection.our_state is connection.their_state is h11.DONE:  # the application's task has yet to end
            self._answered = trio.Event()
            await self._answered.wait()
        is_kept = not (self._closing or self._cut or self.context.terminated.is_set())
        return is_kept and self._idle and connection.our_state is connection.their_state is h11.IDLE

    async def _answer_the_last(self) -> None:
        """The client has closed its sending half, and still gets its answers; there may be none for it to read."""
        end, protocol = self._sending_end, self.protocol.protocol
        is_websocket = isinstance(protocol, H11Protocol) and isinstance(protocol.stream, StreamSocket)
        if self._idle or self._closing or self._cut or end.is_endless or is_websocket:
            return
        self._answered = trio.Event()
        end.come()
        await self._answered.wait()


class HypercornServer:
    """Hypercorn and the application behind it, for as long as the server lives."""

    def __init__(
        self,
        app: ASGIFramework,
        settings: HttpSettings,
        budget: BodyBudget,
        check: OriginCheck,
        begin: Begin | None = None,
        guard: Guard = OPEN,
    ) -> None:
        self.settings = settings
        self.long_work = budget.long_work
        #: Counts what was refused over HTTP/2 before it was a request.
        self.refused_h2 = CountedWarning("malformed requests over HTTP/2 are refused")
        self.asks_for_names = guard.required
        self.conversations = None if begin is None else Conversations(begin, settings, budget, check, guard)
        self.config = Config()
        self.config.errorlog = logging.getLogger("plainsong.http.hypercorn")
        self.config.accesslog = None
        self.config.include_server_header = False
        self.config.keep_alive_timeout = settings.keep_alive_s
        self.config.keep_alive_max_requests = KEEP_ALIVE_MAX_REQUESTS
        self.context = WorkerContext(None)
        self.app = ASGIWrapper(Gate(app, settings, budget, self.context.terminated.is_set, check, guard))
        self.state: LifespanState = {}
        self._connections: set[HypercornConnection] = set()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """The application's lifespan: started on entry, shut down on exit."""
        lifespan = Lifespan(self.app, self.config, self.state)
        async with trio.open_nursery() as nursery:
            await nursery.start(lifespan.handle_lifespan)
            await lifespan.wait_for_startup()
            yield
            await lifespan.wait_for_shutdown()
            nursery.cancel_scope.cancel()

    async def serve(
        self,
        stream: trio.SocketStream | TlsStream,
        already_read: bytes,
        peer: Peer,
        is_for_the_lane: Callable[[bytes], bool],
        head_due_s: float = inf,
    ) -> bytes | None:
        """Serves one connection, whose first bytes have been read already.

        Args:
          is_for_the_lane: whether what has been read begins a request that the lane is to serve.
          head_due_s: when the head of which something has been read has to be whole.

        Returns:
          None: the connection has been closed; or what was read of such a request, with all before it answered.
        """
        connection = HypercornConnection(self, ResumedStream(stream, already_read), peer, is_for_the_lane, head_due_s)
        self._connections.add(connection)
        try:
            return await connection.serve()
        finally:
            self._connections.discard(connection)

    async def stop(self) -> None:
        """Closes idle connections, and the others after their current answer."""
        await self.context.terminated.set()

    def cut(self) -> None:
        """Ends all connections now."""
        for connection in self._connections:
            connection.cut()
