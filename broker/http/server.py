"""The server: accepts connections, gives each to the lane, to hypercorn or to a link, and ends them in good order."""

from __future__ import annotations

import errno
import logging
import socket
from contextlib import asynccontextmanager, suppress
from math import inf
from typing import TYPE_CHECKING, Any

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr
from trio.lowlevel import wait_readable

from broker.http import wire
from broker.http.hypercorn_patches import CUT, Gate, RefusingH11, ResumedStream, with_certificate, with_extension
from broker.http.lane import BRIEF_LINGER_S, HotRoutes, Lane, LaneParts, Watch
from broker.http.messages import Conversations, answer_for, new_request_id
from broker.http.reactor import Reactor
from broker.http.sockets import address_of, listen_on
from plainsong.protocol.errors import Overloaded
from plainsong.protocol.link import PREFACE

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from typing import TypeAlias

    from hypercorn.typing import ASGIFramework, LifespanState

    from actors.turns import Turns
    from broker.api.route import Endpoint
    from broker.http.budgets import BodyBudget, HttpSettings
    from broker.http.messages import Begin

if TYPE_CHECKING:
    PeerHandler: TypeAlias = Callable[[trio.SocketStream, bytes, trio.Event], Awaitable[None]]


log = logging.getLogger("plainsong.http")
#: Out of file descriptors or memory: accepting again at once would only spin.
_SHORT_OF = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
ACCEPT_PAUSE_S = 0.1
#: Connections that are being refused at a time, and how long each may take to read the refusal.
MAX_REFUSING = 64
REFUSAL_S = 1.0


async def serve_http(
    settings: HttpSettings,
    endpoints: Sequence[Endpoint],
    app: ASGIFramework,
    *,
    binds: Sequence[str | socket.socket],
    budget: BodyBudget,
    stop: trio.Event,
    grace_s: float,
    tls: ssl.SSLContext | None = None,
    begin: Begin | None = None,
    peers: PeerHandler | None = None,
    turns: Turns | None = None,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves until ``stop`` is set and the connections have left, at most ``grace_s`` later.

    Args:
      binds: addresses to listen on, or sockets that listen already.
      tls: with it, hypercorn serves all connections.
      begin: begins the conversation behind a WebSocket; None: there are no WebSockets.
      peers: gets connections that begin with the preface of a link, and the bytes read so far; None: they are refused
        like any other that is not HTTP.
      turns: those of the actors that requests are started at without a task; None: there are no such routes.
      task_status: gets the addresses as ``host:port``.

    Raises:
      OSError: the server cannot listen on an address of ``binds``; nothing is left open.
    """
    listeners: list[socket.socket] = []
    reactor = Reactor(settings.keep_alive_s)
    if turns is not None:
        turns.attach(reactor.take_in)
        reactor.took_in = turns.run_due
    try:
        for bind in binds:
            listeners += [bind] if isinstance(bind, socket.socket) else await trio.to_thread.run_sync(listen_on, bind)
        hypercorn = HypercornServer(app, settings, budget, begin)
        # Without routes a lane only finds out how a connection begins.
        routes = HotRoutes(endpoints if settings.lane else ())
        parts = LaneParts(settings, routes, budget, Watch(), reactor)
        server = _Server(settings, parts, hypercorn, tls, peers)
        async with hypercorn.opened():
            await server.run(listeners, stop, grace_s, task_status)
    finally:
        for listener in listeners:
            listener.close()
        if turns is not None:
            turns.attach(None)
        reactor.close()


class _Server:
    def __init__(
        self,
        settings: HttpSettings,
        parts: LaneParts,
        hypercorn: HypercornServer,
        tls: ssl.SSLContext | None,
        peers: PeerHandler | None,
    ) -> None:
        self._settings = settings
        self._parts = parts
        self._hypercorn = hypercorn
        self._tls = tls
        self._peers = peers
        self._stop = trio.Event()
        self._lanes: set[Lane] = set()
        self._open = 0
        self._refusing = 0

    async def run(
        self, listeners: list[socket.socket], stop: trio.Event, grace_s: float, task_status: trio.TaskStatus[list[str]]
    ) -> None:
        async with trio.open_nursery() as watching:
            watching.start_soon(self._parts.watch.run)
            watching.start_soon(self._parts.reactor.run)
            watching.start_soon(self._parts.reactor.sweep)
            async with trio.open_nursery() as connections:
                async with trio.open_nursery() as accepting:
                    for listener in listeners:
                        accepting.start_soon(self._accept, listener, connections)
                    task_status.started([address_of(listener) for listener in listeners])
                    await stop.wait()
                    accepting.cancel_scope.cancel()
                self._stop.set()
                for listener in listeners:
                    listener.close()
                for lane in self._lanes:
                    lane.stop()
                await self._hypercorn.stop()
                watching.start_soon(self._cut_after, grace_s, connections)
            watching.cancel_scope.cancel()

    async def _cut_after(self, grace_s: float, connections: trio.Nursery) -> None:
        try:
            await trio.sleep(grace_s)
        finally:  # also when the caller cancels at the same moment
            self._hypercorn.cut()  # its sends are shielded
        connections.cancel_scope.cancel()

    async def _accept(self, listener: socket.socket, connections: trio.Nursery) -> None:
        while True:
            await wait_readable(listener)
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                continue
            except OSError as error:
                if error.errno not in _SHORT_OF:
                    raise
                log.warning("cannot accept connections for now: %s", error.strerror)
                await trio.sleep(ACCEPT_PAUSE_S)
                continue
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._open < self._settings.max_connections:
                self._open += 1
                connections.start_soon(self._serve, sock)
            elif self._refusing < MAX_REFUSING:
                self._refusing += 1
                connections.start_soon(self._refuse, sock)
            else:
                sock.close()

    async def _serve(self, sock: socket.socket) -> None:
        """Serves one connection; its errors end no other."""
        try:
            await self._dispatch(sock)
        except Exception:
            log.exception("a connection failed")
        finally:
            sock.close()
            self._open -= 1

    async def _dispatch(self, sock: socket.socket) -> None:
        already_read: bytes | None = b""
        is_link = False
        if self._tls is None and (self._settings.lane or self._peers is not None):
            lane = Lane(sock, self._parts)
            self._lanes.add(lane)
            try:
                already_read = await lane.run()
            finally:
                self._lanes.discard(lane)
            is_link = self._peers is not None and not lane.served and (already_read or b"").startswith(PREFACE)
        if already_read is None:
            return
        # From here on the descriptor is the stream's.
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(socket.socket(fileno=sock.detach())))
        if is_link and self._peers is not None:
            await self._peers(stream, already_read, self._stop)
        elif self._tls is None:
            await self._hypercorn.serve(stream, already_read)
        else:
            await self._hypercorn.serve(
                trio.SSLStream(stream, self._tls, server_side=True, https_compatible=True), already_read
            )

    async def _refuse(self, sock: socket.socket) -> None:
        """Answers a connection over the bound with 503, and waits a little for the client to read it."""
        answer = answer_for(
            Overloaded(f"{self._settings.max_connections} connections are open", hint="raise http.max_connections")
        )
        assert isinstance(answer.body, bytes)
        try:
            sock.send(wire.answer_head(answer, new_request_id(), chunks=False, close=True) + answer.body)
            sock.shutdown(socket.SHUT_WR)
            with trio.move_on_after(REFUSAL_S):
                await _drain(sock)
        except OSError:
            pass
        finally:
            sock.close()
            self._refusing -= 1


async def _drain(sock: socket.socket) -> None:
    while True:
        await wait_readable(sock)
        if not sock.recv(1 << 16):
            return


# --- hypercorn -------------------------------------------------------------------------------------
#
# Hypercorn's trio server for all that the lane does not serve, on connections whose first bytes may have been read.
#
# Three things differ from hypercorn's own ``TCPServer`` (0.18). Sends have a deadline and can be cut: its own are
# shielded for ever, so that a reader that stopped holds up the exit. A head has a time-out of its own. The refusals of
# its parser are problems like all others.


#: Answers are sent in pieces of this size, each with its deadline: a slow reader is served, one that stopped is cut.
SEND_BYTES = 64 << 10
#: Connections are long-lived here; hypercorn's default of 1000 requests would close them under publishers.
KEEP_ALIVE_MAX_REQUESTS = 1 << 62


class HypercornConnection(TCPServer):
    """One connection served by hypercorn."""

    def __init__(self, hypercorn: HypercornServer, stream: Any) -> None:
        super().__init__(hypercorn.app, hypercorn.config, hypercorn.context, hypercorn.state, stream)
        self._send_timeout_s = hypercorn.settings.send_timeout_s
        self._header_timeout_s = hypercorn.settings.header_timeout_s
        self._conversations = hypercorn.conversations
        self._idle = True
        self._life = trio.CancelScope()
        self._sending: trio.CancelScope | None = None
        #: Around each read; its deadline is that of a head, or of the close.
        self._reading = trio.CancelScope()
        self._closing = False
        #: The reader has gone or is given up: nothing more is sent, also by tasks that wait for the lock.
        self._cut = False

    async def run(self) -> None:
        """Serves the connection to its end."""
        with self._life:
            try:
                await self._serve(*await self._shake_hands())
            except (OSError, trio.BrokenResourceError, trio.TooSlowError):
                pass  # the client has gone, or never sent a handshake
            finally:
                await trio.aclose_forcefully(self.stream)

    def cut(self) -> None:
        """Ends the connection now, also in the middle of a send."""
        self._cut = True
        self._life.cancel()
        if self._sending is not None:
            self._sending.cancel()

    async def _shake_hands(self) -> tuple[str, Any, bool]:
        """The negotiated protocol, the socket, and whether it is TLS."""
        if not isinstance(self.stream, trio.SSLStream):
            return "http/1.1", self.stream.socket, False
        with trio.fail_after(self._header_timeout_s):
            await self.stream.do_handshake()
        self.app = with_certificate(self.app, self.stream)
        return self.stream.selected_alpn_protocol() or "http/1.1", self.stream.transport_stream.socket, True

    async def _serve(self, alpn_protocol: str, socket: Any, tls: bool) -> None:
        client = parse_socket_addr(socket.family, socket.getpeername())
        server = parse_socket_addr(socket.family, socket.getsockname())
        state = ConnectionState(self.state)
        self.app = with_extension(self.app, CUT, self.cut)
        async with TaskGroup() as tasks:
            self._task_group = tasks
            ends = (self.app, self.config, self.context, tasks, state, tls, client, server, self.protocol_send)
            self.protocol = ProtocolWrapper(*ends, alpn_protocol)
            if isinstance(self.protocol.protocol, H11Protocol):
                self.protocol.protocol = RefusingH11(*ends, conversations=self._conversations)
            await self.protocol.initiate()
            await self.idle_task.restart(tasks, self._idle_timeout)
            await self._read_data()
            await self.idle_task.stop()  # else it keeps a connection that is over until its time-out
        await self._close()

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
                    self._sending.deadline = trio.current_time() + self._send_timeout_s
                    try:
                        await self.stream.send_all(rest[:SEND_BYTES])
                    except (trio.BrokenResourceError, trio.ClosedResourceError):
                        return False
                if self._sending.cancelled_caught:
                    return False
                rest = rest[SEND_BYTES:]
        return True

    async def _close(self) -> None:
        """Half-closes; the reading task closes once the client has seen that, or the time is over.

        Closing at once would reset a connection that has unread bytes, and the client would lose its last answer.
        """
        if self._closing:
            return
        self._closing = True
        self._reading.deadline = min(self._reading.deadline, trio.current_time() + BRIEF_LINGER_S)
        async with self.send_lock:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError, AttributeError):  # TLS has no half close
                await self.stream.send_eof()

    async def _read_data(self) -> None:
        """Feeds the protocol until the client leaves, or takes too long for the head of a request."""
        deadline = inf
        while True:
            if not self._closing:
                self._reading.deadline = deadline
            with self._reading:
                try:
                    data = await self.stream.receive_some(MAX_RECV)
                except (trio.ClosedResourceError, trio.BrokenResourceError):
                    break
            if self._reading.cancelled_caught:
                break
            linger_until = self._reading.deadline
            self._reading = trio.CancelScope(deadline=linger_until if self._closing else inf)
            if not self._closing:  # else nothing would answer it
                await self.protocol.handle(RawData(bytes(data)))
            if not data:
                break
            if not (self._idle and isinstance(self.protocol.protocol, H11Protocol)):
                deadline = inf
            elif deadline == inf:
                deadline = trio.current_time() + self._header_timeout_s
        await self.protocol.handle(Closed())


class HypercornServer:
    """Hypercorn and the application behind it, for as long as the server lives."""

    def __init__(
        self, app: ASGIFramework, settings: HttpSettings, budget: BodyBudget, begin: Begin | None = None
    ) -> None:
        self.settings = settings
        self.conversations = None if begin is None else Conversations(begin, settings, budget)
        self.config = Config()
        self.config.errorlog = logging.getLogger("plainsong.http.hypercorn")
        self.config.accesslog = None
        self.config.include_server_header = False
        self.config.keep_alive_timeout = settings.keep_alive_s
        self.config.keep_alive_max_requests = KEEP_ALIVE_MAX_REQUESTS
        self.context = WorkerContext(None)
        self.app = ASGIWrapper(Gate(app, settings, budget, self.context.terminated.is_set))
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

    async def serve(self, stream: trio.SocketStream | trio.SSLStream[trio.SocketStream], already_read: bytes) -> None:
        """Serves one connection, whose first bytes have been read already, to its end."""
        whole = ResumedStream(stream, already_read) if isinstance(stream, trio.SocketStream) else stream
        connection = HypercornConnection(self, whole)
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)

    async def stop(self) -> None:
        """Closes idle connections, and the others after their current answer."""
        await self.context.terminated.set()

    def cut(self) -> None:
        """Ends all connections now."""
        for connection in self._connections:
            connection.cut()
