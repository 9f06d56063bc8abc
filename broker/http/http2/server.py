"""HTTP/2 connections: hypercorn's protocol between a stream and the application, which HTTP/1.1 shares.

Hypercorn's own server of connections is not used: it shields sends from cancellation without a time-out, so that a
stalled reader would block the exit, and drops the answers to a client that half-closes.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any

import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

from broker.http.budgets import MinimumRate
from broker.http.connection import BRIEF_LINGER_S
from broker.http.floods import CountedWarning
from broker.http.gate import AT_ONCE_S, CUT, PEER, SENDING_END
from broker.http.handlers import SendingEnd
from broker.http.http2.patch import Http2Bounds
from broker.http.http2.protocol import Http2Protocol
from broker.http.http2.unread_bodies import UnreadBodies

if TYPE_CHECKING:
    from broker.http.gate import Gate, ServerParts
    from broker.http.tls_socket import TlsStream
    from broker.security.peer import Peer

RECEIVE_BYTES = 64 << 10
#: Answers are sent in pieces of this size, each with a deadline: a slow reader is served, a stalled one is cut.
SEND_BYTES = 64 << 10
#: Connections are long-lived: hypercorn's default of 1000 requests would close them while publishers use them.
KEEP_ALIVE_MAX_REQUESTS = 1 << 62


class Http2Server:
    """The HTTP/2 connections of a server."""

    def __init__(self, app: Gate, shared: ServerParts) -> None:
        self.app = app
        self.settings = settings = shared.settings
        self.guard = shared.guard
        refused = CountedWarning("malformed requests over HTTP/2 are refused")
        self.bounds = Http2Bounds(settings.max_inflight_bytes, shared.budget.long_work, refused)
        self.config = Config()
        self.config.errorlog = logging.getLogger("plainsong.http.hypercorn")
        self.config.accesslog = None
        self.config.include_server_header = False
        self.config.keep_alive_max_requests = KEEP_ALIVE_MAX_REQUESTS
        self.context = WorkerContext(None)
        self._connections: set[Http2Connection] = set()

    async def serve(self, stream: trio.SocketStream | TlsStream, already_read: bytes, peer: Peer) -> None:
        """Serve one connection until it is closed; ``already_read`` are its first bytes."""
        connection = Http2Connection(self, stream, peer)
        self._connections.add(connection)
        try:
            await connection.serve(already_read)
        finally:
            self._connections.discard(connection)

    async def stop(self) -> None:
        """Close idle connections, and the others after their current answer."""
        await self.context.terminated.set()
        for connection in self._connections:
            connection.stop()

    def cut(self) -> None:
        """End all connections now."""
        for connection in self._connections:
            connection.cut()


class Http2Connection:
    """One connection."""

    def __init__(self, server: Http2Server, stream: trio.SocketStream | TlsStream, peer: Peer) -> None:
        self._server = server
        self._stream = stream
        self._peer = peer
        #: For the readers of all streams together.
        self._minimum_rate = MinimumRate(server.settings)
        self._send_lock = trio.Lock()
        self._life = trio.CancelScope()
        self._sending: trio.CancelScope | None = None
        #: The deadline for the first request: an unauthenticated client may not hold a connection for longer.
        self._head_due_s = trio.current_time() + server.settings.header_timeout_s if server.guard.required else inf
        #: Covers each read.
        self._reading = trio.CancelScope()
        #: True while no request is unanswered.
        self._idle = True
        #: Set when the last request of a half-closed client is answered.
        self._answered = trio.Event()
        self._closing = False
        self._sending_end = SendingEnd()
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
                await trio.aclose_forcefully(self._stream)

    def stop(self) -> None:
        """Close the connection once it is idle, unless a request arrives right now."""
        self._set_deadline()

    def cut(self) -> None:
        """End the connection now, even during a send."""
        self._cut = True
        self._life.cancel()
        if self._sending is not None:
            self._sending.cancel()

    async def _serve(self, already_read: bytes) -> None:
        stream: Any = self._stream
        sock, server = stream.socket, self._server
        extensions = {CUT: self.cut, PEER: self._peer, SENDING_END: self._sending_end}

        async def app(scope: Any, receive: Any, send: Any, *_: object) -> None:
            scope["extensions"].update(extensions)
            await server.app(scope, receive, send)

        async with UnreadBodies() as tasks:
            self._protocol: Any = Http2Protocol(
                app,
                server.config,
                server.context,
                tasks,
                ConnectionState({}),
                self._peer.tls,
                parse_socket_addr(sock.family, sock.getpeername()),
                parse_socket_addr(sock.family, sock.getsockname()),
                self._on_event,
                bounds=server.bounds,
            )
            self._set_deadline()
            await self._protocol.initiate()
            await self._read(already_read)
        await self._close()

    # --- in ---------------------------------------------------------------------------------------

    async def _read(self, already_read: bytes) -> None:
        """Pass input to the protocol until the client leaves, or is given up."""
        data = already_read or await self._received()
        while data:
            if not self._closing:  # a closing connection answers no further request
                await self._protocol.handle(RawData(data))
            data = await self._received()
        if data is not None:
            await self._answer_the_last()
        await self._protocol.handle(Closed())

    async def _received(self) -> bytes | None:
        """Return the next input, empty at its end; None if the read timed out or the connection is broken."""
        with self._reading:
            try:
                return bytes(await self._stream.receive_some(RECEIVE_BYTES))
            except (trio.ClosedResourceError, trio.BrokenResourceError):
                return None
            finally:
                self._reading = trio.CancelScope(deadline=self._reading.deadline)
        return None

    def _set_deadline(self) -> None:
        """Set the time-out of reads. Without requests in progress it is the idle time-out; otherwise there is none."""
        if not self._closing:
            idle_s = BRIEF_LINGER_S if self._server.context.terminated.is_set() else self._server.settings.keep_alive_s
            due_s = min(trio.current_time() + idle_s, self._head_due_s)
            self._reading.deadline = due_s if self._idle else inf

    async def _answer_the_last(self) -> None:
        """Complete the answers to a half-closed client, unless one of them never ends."""
        if not (self._idle or self._closing or self._cut or self._sending_end.is_endless):
            self._answered = trio.Event()
            self._sending_end.come()
            await self._answered.wait()

    # --- out --------------------------------------------------------------------------------------

    async def _on_event(self, event: Event) -> None:
        """Handle an event of the protocol, called in the reading task or in that of a request."""
        if isinstance(event, RawData):
            if not await self._send(event.data):
                self.cut()
                await self._protocol.handle(Closed())
        elif isinstance(event, Closed):
            self._answered.set()
            await self._close()
            await self._protocol.handle(Closed())
        elif isinstance(event, Updated):
            self._idle = event.idle
            self._minimum_rate.restart()
            if event.idle:
                self._answered.set()
            else:
                self._head_due_s = inf
            self._set_deadline()

    async def _send(self, data: bytes) -> bool:
        """Send ``data``, each piece with a deadline. Return False if the reader has left or stalled.

        Shielded from cancellation: the protocol counts these bytes as sent, so the connection is corrupt without them.
        """
        rest = memoryview(data)
        with trio.CancelScope(shield=True):
            async with self._send_lock:
                while rest and not self._cut:
                    begun_s = trio.current_time()
                    with trio.CancelScope(deadline=begun_s + self._minimum_rate.left_s()) as self._sending:
                        try:
                            await self._stream.send_all(rest[:SEND_BYTES])
                        except (trio.BrokenResourceError, trio.ClosedResourceError):
                            return False
                    if self._sending.cancelled_caught:
                        return False
                    waited_s = trio.current_time() - begun_s
                    if waited_s > AT_ONCE_S:
                        self._minimum_rate.waited(waited_s, min(len(rest), SEND_BYTES))
                    rest = rest[SEND_BYTES:]
        return not rest

    async def _close(self) -> None:
        """Half-close; the reading task closes the connection once the client has seen that, or time is up.

        Closing immediately would reset a connection with unread bytes, and the client would lose its last answer.
        """
        if self._closing:
            return
        self._closing = True
        self._reading.deadline = min(self._reading.deadline, trio.current_time() + BRIEF_LINGER_S)
        with trio.CancelScope(shield=True, deadline=trio.current_time() + self._server.settings.send_timeout_s):
            async with self._send_lock:
                with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    await self._stream.send_eof()
