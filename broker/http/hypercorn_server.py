"""Hypercorn's trio server for HTTP/2, with the same application as our HTTP/1.1; it also runs the lifespan.

Two things differ from hypercorn's own ``TCPServer`` (0.18). Sends have a deadline and can be cut: hypercorn shields
them forever, so that a stalled reader blocks the exit. An unauthenticated client has a time-out for its first request.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager, suppress
from math import inf
from typing import TYPE_CHECKING, Any

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

from broker.http.asgi import tls_extension
from broker.http.budgets import Pace
from broker.http.connection import BRIEF_LINGER_S
from broker.http.floods import CountedWarning
from broker.http.gate import AT_ONCE_S, CUT, PEER, SENDING_END, SendingEnd
from broker.http.http2 import BoundedH2, Tasks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from hypercorn.typing import AppWrapper, LifespanState

    from broker.http.budgets import BodyBudget, HttpSettings
    from broker.http.tls_socket import TlsStream
    from broker.security.peer import Peer

#: Answers are sent in pieces of this size, each with a deadline: a slow reader is served, a stalled one is cut.
SEND_BYTES = 64 << 10
#: Connections are long-lived: hypercorn's default of 1000 requests would close them while publishers use them.
KEEP_ALIVE_MAX_REQUESTS = 1 << 62


class Http2Connection(TCPServer):
    """One HTTP/2 connection."""

    def __init__(self, server: HypercornServer, stream: trio.SocketStream | TlsStream, peer: Peer) -> None:
        channel: Any = stream  # TCPServer uses only what both types have
        super().__init__(server.wrapped, server.config, server.context, server.state, channel)
        self._server = server
        self._peer = peer
        #: For the readers of all streams together.
        self._pace = Pace(server.settings)
        self._idle = True
        self._life = trio.CancelScope()
        self._sending: trio.CancelScope | None = None
        #: Covers each read. An unauthenticated client may hold a connection for ``header_timeout_s`` at most.
        self._reading = trio.CancelScope()
        if server.asks_for_names:
            self._reading.deadline = trio.current_time() + server.settings.header_timeout_s
        self._closing = False
        self._sending_end = SendingEnd()
        #: Set when all requests received so far are answered.
        self._answered = trio.Event()
        #: True once the reader has left or is given up: nothing more is sent, even by tasks that wait for the lock.
        self._cut = False

    async def serve(self, already_read: bytes) -> None:
        """Serve until the connection is closed; ``already_read`` are its first bytes."""
        with self._life:
            try:
                await self._serve(already_read)
            except (OSError, trio.BrokenResourceError):
                pass  # the client has left
            finally:
                await trio.aclose_forcefully(self.stream)

    def cut(self) -> None:
        """End the connection now, even during a send."""
        self._cut = True
        self._life.cancel()
        if self._sending is not None:
            self._sending.cancel()

    async def _serve(self, already_read: bytes) -> None:
        stream: Any = self.stream
        socket, server = stream.socket, self._server
        extensions = {CUT: self.cut, PEER: self._peer, SENDING_END: self._sending_end}
        if self._peer.tls:
            extensions["tls"] = tls_extension(stream.tls.ssl_object)
        async with Tasks() as tasks:
            self._task_group = tasks
            self.protocol: Any = BoundedH2(
                with_extensions(self.app, extensions),
                self.config,
                self.context,
                tasks,
                ConnectionState(self.state),
                self._peer.tls,
                parse_socket_addr(socket.family, socket.getpeername()),
                parse_socket_addr(socket.family, socket.getsockname()),
                self.protocol_send,
                settings=server.settings,
                long_work=server.long_work,
                refused=server.refused_h2,
            )
            await self.protocol.initiate()
            await self.idle_task.restart(tasks, self._idle_timeout)
            await self._read(already_read)
            await self.idle_task.stop()  # otherwise it would keep an ended connection until its time-out
        await self._close()

    async def protocol_send(self, event: Event) -> None:
        """Send bytes, each piece with a deadline, or follow the connection's state.

        All of it is shielded from cancellation: half a frame would corrupt the connection, and hypercorn reports an
        idle connection from the task that quart-trio cancels after its answer, so that the idle time-out would not
        start again.
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
            if not event.idle and not self._closing:
                self._reading.deadline = inf
        if isinstance(event, Closed) or self._idle:
            self._answered.set()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + self._server.settings.send_timeout_s):
            await super().protocol_send(event)

    async def _idle_timeout(self) -> None:
        """Close the connection when it was idle for too long, or when the server stops."""
        with trio.move_on_after(self.config.keep_alive_timeout):
            await self.context.terminated.wait()
            # A client that was just answered may already be sending its next request, which is answered too.
            await trio.sleep(BRIEF_LINGER_S)
        with trio.CancelScope(shield=True):
            await self._initiate_server_close()

    async def _send_pieces(self, data: bytes) -> bool:
        """Send ``data``. Return False if the reader has left or stalled."""
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
        """Half-close; the reading task closes the connection once the client has seen that, or time is up.

        Closing immediately would reset a connection with unread bytes, and the client would lose its last answer.
        """
        if self._closing:
            return
        self._closing = True
        self._reading.deadline = min(self._reading.deadline, trio.current_time() + BRIEF_LINGER_S)
        async with self.send_lock:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self.stream.send_eof()

    async def _read(self, already_read: bytes) -> None:
        """Pass input to the protocol until the client leaves, or is given up."""
        data = already_read or await self._received()
        while data is not None:
            if not self._closing:  # nothing would be answered any more
                await self.protocol.handle(RawData(data))
            if not data:
                await self._answer_the_last()
                break
            data = await self._received()
        await self.protocol.handle(Closed())

    async def _received(self) -> bytes | None:
        """Return what arrives next, empty at the end; None: time is up, or the connection is broken."""
        with self._reading:
            try:
                return bytes(await self.stream.receive_some(MAX_RECV))
            except (trio.ClosedResourceError, trio.BrokenResourceError):
                return None
            finally:
                self._reading = trio.CancelScope(deadline=self._reading.deadline)
        return None

    async def _answer_the_last(self) -> None:
        """Complete the answers to a half-closed client, unless one of them never ends."""
        if not (self._idle or self._closing or self._cut or self._sending_end.is_endless):
            self._answered = trio.Event()
            self._sending_end.come()
            await self._answered.wait()


class HypercornServer:
    """The HTTP/2 server of ``app``, for the life of the daemon's server."""

    def __init__(self, app: Any, settings: HttpSettings, budget: BodyBudget, *, asks_for_names: bool) -> None:
        self.settings = settings
        self.long_work = budget.long_work
        #: Counts HTTP/2 requests and connections refused before they reach the application.
        self.refused_h2 = CountedWarning("malformed requests over HTTP/2 are refused")
        self.asks_for_names = asks_for_names
        self.config = Config()
        self.config.errorlog = logging.getLogger("plainsong.http.hypercorn")
        self.config.accesslog = None
        self.config.include_server_header = False
        self.config.keep_alive_timeout = settings.keep_alive_s
        self.config.keep_alive_max_requests = KEEP_ALIVE_MAX_REQUESTS
        self.context = WorkerContext(None)
        self.app = app
        self.wrapped = ASGIWrapper(app)
        self.state: LifespanState = {}
        self._connections: set[Http2Connection] = set()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Run the application's lifespan: startup on entry, shutdown on exit."""
        lifespan = Lifespan(self.wrapped, self.config, self.state)
        async with trio.open_nursery() as nursery:
            await nursery.start(lifespan.handle_lifespan)
            await lifespan.wait_for_startup()
            yield
            await lifespan.wait_for_shutdown()
            nursery.cancel_scope.cancel()

    async def serve(self, stream: trio.SocketStream | TlsStream, already_read: bytes, peer: Peer) -> None:
        """Serve one HTTP/2 connection until it is closed; ``already_read`` are its first bytes."""
        connection = Http2Connection(self, stream, peer)
        self._connections.add(connection)
        try:
            await connection.serve(already_read)
        finally:
            self._connections.discard(connection)

    async def stop(self) -> None:
        """Close idle connections, and the others after their current answer."""
        await self.context.terminated.set()

    def cut(self) -> None:
        """End all connections now."""
        for connection in self._connections:
            connection.cut()


def with_extensions(app: AppWrapper, extensions: dict[str, Any]) -> AppWrapper:
    """Return ``app`` with ``extensions`` added to its scopes."""

    async def extended(scope: Any, receive: Any, send: Any, sync_spawn: Any, call_soon: Any) -> None:
        scope.setdefault("extensions", {}).update(extensions)
        await app(scope, receive, send, sync_spawn, call_soon)

    return extended
