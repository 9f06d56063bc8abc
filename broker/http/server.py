"""The server: accepts connections, serves them over HTTP/1.1 or HTTP/2 or as links, and closes them gracefully."""

from __future__ import annotations

import gc
import logging
import socket
import sys
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import trio
from trio.lowlevel import wait_readable

from broker.http import wire
from broker.http.acceptance import Acceptance
from broker.http.descriptors import Descriptors
from broker.http.floods import CountedWarning
from broker.http.gate import Gate, ServerParts
from broker.http.heads import HotRoutes
from broker.http.http1 import HTTP_2, Http1, Http1Parts
from broker.http.messages import new_request_id
from broker.http.origin_check import OriginCheck
from broker.http.route import NO_ACCOUNTING
from broker.http.sockets import SocketFiles, accepted, address_of, listen_on, stream_of
from broker.http.tls_socket import HANDSHAKE, TlsSocket, TlsStream
from broker.security.guard import OPEN
from broker.security.peer import peer_of
from plainsong.protocol.errors import Overloaded, PlainsongError, TlsRequired
from plainsong.protocol.link import PREFACE
from storage.threaded import in_thread

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
    from typing import TypeAlias

    from hypercorn.typing import ASGIFramework

    from broker.config.sections import HttpConfig
    from broker.http.budgets import BodyBudget
    from broker.http.http2.server import Http2Server
    from broker.http.messages import Begin
    from broker.http.reactor import Reactor
    from broker.http.route import Accounting, Endpoint
    from broker.security.guard import Guard
    from broker.security.peer import Peer

if TYPE_CHECKING:
    PeerHandler: TypeAlias = Callable[[trio.SocketStream | TlsStream, bytes, trio.Event], Awaitable[None]]


class Listening(Protocol):
    """The TLS side of the listeners."""

    def context(self) -> ssl.SSLContext:
        """Return the context for the next handshake."""
        ...

    def count(self, result: str, /) -> None:
        """Count a finished handshake: ``ok``, ``failed``, ``timeout``, or ``plain`` if the client did not speak TLS."""


log = logging.getLogger("plainsong.http")
#: Maximum number of connections being refused at the same time, and the time that each gets to read the refusal.
MAX_REFUSING = 64
REFUSAL_S = 1.0
#: With ``max_connections`` open, a handshake that has received nothing for this long may be aborted to make room for a
#: new connection.
STALLED_S = 3.0
#: The interpreter's switch interval while hypercorn is loaded. Shorter intervals gained nothing.
LOOP_FIRST_S = 0.0001


async def serve_http(
    settings: HttpConfig,
    endpoints: Sequence[Endpoint],
    build: Callable[[], ASGIFramework] | None = None,
    *,
    reactor: Reactor,
    binds: Sequence[str | socket.socket] = (),
    budget: BodyBudget,
    stop: trio.Event,
    grace_s: float,
    tls: Listening | None = None,
    check: OriginCheck | None = None,
    guard: Guard = OPEN,
    begin: Begin | None = None,
    peers: PeerHandler | None = None,
    accounting: Accounting = NO_ACCOUNTING,
    descriptors: Descriptors | None = None,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until ``stop`` is set and the connections have ended, at most ``grace_s`` later.

    Args:
      build: makes the application, in a thread, when the first request needs it; None: all of ``endpoints``.
      reactor: waits for the sockets of connections over HTTP/1.1.
      binds: addresses and Unix sockets to listen on, or sockets that already listen; empty: those of ``settings``.
      tls: if given, connections to addresses use TLS; those to Unix sockets do not.
      check: of Host and Origin; None: only addresses, ``localhost`` and the daemon's own pages are allowed.
      guard: authenticates and authorizes requests.
      begin: begins the conversation of a WebSocket; None if there are no WebSockets.
      peers: receives connections that begin with the preface of a link, and the bytes read so far; None: they are
        refused like any other that is not HTTP.
      accounting: counts and logs answers of quick routes; the application does so for the others.
      descriptors: limits connections by the limit on open files, and records refusals because of it.
      task_status: receives the addresses as ``host:port`` or ``unix:/path``.

    Raises:
      OSError: the server cannot listen on an address of ``binds``; nothing is left open.
    """
    listeners: list[socket.socket] = []
    files: list[SocketFiles] = []
    try:
        for bind in binds or map(str, settings.binds):
            if isinstance(bind, socket.socket):
                listeners.append(bind)
            else:
                opened = await in_thread(listen_on, bind, settings.unix_mode)
                listeners += opened
                files.append(SocketFiles(opened))
        shared = settings, budget, check or OriginCheck(), guard, trio.Event()
        async with trio.open_nursery() as nursery:
            make = build or partial(_application_of, endpoints, settings, accounting)
            application = _Application(make, ServerParts(*shared), nursery)
            parts = Http1Parts(
                *shared,
                HotRoutes(endpoints),
                reactor,
                Acceptance(endpoints),
                application.loaded,
                begin,
                (HTTP_2,) if peers is None else (HTTP_2, PREFACE),
                accounting,
            )
            server = _Server(settings, parts, application, tls, peers, descriptors or Descriptors())
            await server.run(listeners, stop, grace_s, task_status)
            nursery.cancel_scope.cancel()
    finally:
        for listener in listeners:
            listener.close()
        for each in files:
            each.remove()


def _application_of(endpoints: Iterable[Endpoint], settings: HttpConfig, accounting: Accounting) -> ASGIFramework:
    from broker.http.quart_app import build_application

    return build_application(endpoints, settings, accounting)


class _Server:
    def __init__(
        self,
        settings: HttpConfig,
        parts: Http1Parts,
        application: _Application,
        tls: Listening | None,
        peers: PeerHandler | None,
        descriptors: Descriptors,
    ) -> None:
        self._settings = settings
        self._descriptors = descriptors
        self._cannot_accept = CountedWarning("cannot accept connections at the moment")
        self._parts = parts
        self._application = application
        self._tls = tls
        #: Handshakes in progress → when each last received bytes; the longest ago first.
        self._shaking: OrderedDict[trio.CancelScope, float] = OrderedDict()
        self._peers = peers
        self._connections: set[Http1] = set()
        self._open = 0
        self._refusing = 0

    async def run(
        self, listeners: list[socket.socket], stop: trio.Event, grace_s: float, task_status: trio.TaskStatus[list[str]]
    ) -> None:
        async with trio.open_nursery() as cutting:
            async with trio.open_nursery() as connections:
                async with trio.open_nursery() as accepting:
                    for listener in listeners:
                        accepting.start_soon(self._accept, listener, connections)
                    task_status.started([address_of(listener) for listener in listeners])
                    await stop.wait()
                    accepting.cancel_scope.cancel()
                self._parts.stopping.set()
                for listener in listeners:
                    listener.close()
                for connection in self._connections:
                    connection.stop()
                await self._application.stop()
                cutting.start_soon(self._cut_after, grace_s, connections)
            cutting.cancel_scope.cancel()

    async def _cut_after(self, grace_s: float, connections: trio.Nursery) -> None:
        try:
            await trio.sleep(grace_s)
        finally:  # even when the caller cancels at the same time
            self._application.cut()  # its sends are shielded from cancellation
        connections.cancel_scope.cancel()

    async def _accept(self, listener: socket.socket, connections: trio.Nursery) -> None:
        async for sock in accepted(listener, self._short):
            refusal = self._refusal(sock)
            if refusal is None:
                self._open += 1
                connections.start_soon(self._serve, sock)
            elif self._refusing < min(MAX_REFUSING, self._descriptors.spare // 2):
                self._refusing += 1
                connections.start_soon(self._refuse, sock, refusal)
            else:
                sock.close()

    def _short(self, why: str) -> None:
        self._cannot_accept(why)
        self._descriptors.refused()

    def _refusal(self, sock: socket.socket) -> PlainsongError | None:
        """Return the error for a connection that must be refused, or None."""
        wanted = self._settings.max_connections
        allowed = self._descriptors.connections(wanted)
        has_room = self._descriptors.has_room_for(sock.fileno())
        if has_room and (self._open < allowed or self._cut_stalled()):
            return None
        if has_room and allowed == wanted:
            return Overloaded(f"all {wanted} allowed connections are in use", hint="raise http.max_connections")
        self._cannot_accept(f"{self._open} connections are open, and few file descriptors are left")
        self._descriptors.refused()
        return Overloaded(
            f"{self._open} connections are open, and few file descriptors are left",
            hint="raise the limit on open files: LimitNOFILE of the unit, or ulimit -n",
        )

    async def _serve(self, sock: socket.socket) -> None:
        """Serve one connection; an error ends only this one."""
        peer = peer_of(sock)
        try:
            await self._dispatch(sock, peer)
        except Exception:
            log.exception("a connection failed")
        finally:
            if peer.slot is not None:
                self._parts.guard.quotas.disconnect(peer.slot)
            sock.close()
            self._open -= 1

    async def _dispatch(self, sock: socket.socket, peer: Peer) -> None:
        if self._tls is None or peer.unix is not None:
            await self._talk(sock, peer)
            return
        tls = await self._secure(sock, self._tls)
        if tls is not None:
            await self._talk(tls, replace(peer, tls=True, certificate=tls.certificate()))

    async def _talk(self, sock: socket.socket | TlsSocket, peer: Peer) -> None:
        """Serve a connection after its TLS handshake, if there is one."""
        is_http_2 = isinstance(sock, TlsSocket) and sock.alpn == "h2"
        already_read = b"" if is_http_2 else await self._serve_http_1(sock, peer)
        if already_read is None:
            return
        stream = TlsStream(sock) if isinstance(sock, TlsSocket) else stream_of(sock)
        if is_http_2 or already_read.startswith(HTTP_2):
            await self._serve_http_2(stream, already_read, peer)
        elif self._peers is not None:
            await self._peers(stream, already_read, self._parts.stopping)

    async def _serve_http_1(self, sock: socket.socket | TlsSocket, peer: Peer) -> bytes | None:
        """Serve HTTP/1.1; return the bytes read if the connection uses another protocol."""
        connection = Http1(sock, self._parts, peer)
        self._connections.add(connection)
        try:
            return await connection.run()
        finally:
            self._connections.discard(connection)

    async def _serve_http_2(self, stream: trio.SocketStream | TlsStream, already_read: bytes, peer: Peer) -> None:
        try:
            server = await self._application.http2()
        except BaseException as error:
            await trio.aclose_forcefully(stream)
            if isinstance(error, Overloaded):
                return  # the error is logged already
            raise
        await server.serve(stream, already_read, peer)

    async def _secure(self, sock: socket.socket, listening: Listening) -> TlsSocket | None:
        """Complete the handshake; return None if it failed, or did not happen: the connection must be closed."""
        result, tls = "timeout", None
        with trio.move_on_after(self._settings.header_timeout_s) as scope:
            self._shaking[scope] = trio.current_time()
            try:
                await wait_readable(sock)
                result, tls = await self._shake_hands(sock, listening, partial(self._progressed, scope))
            except OSError as error:
                result = "failed"
                log.debug("a handshake failed", extra={"why": str(error)})
        self._shaking.pop(scope, None)
        listening.count(result)
        return tls

    def _progressed(self, scope: trio.CancelScope) -> None:
        """Record that a handshake has received bytes."""
        if scope in self._shaking:
            self._shaking[scope] = trio.current_time()
            self._shaking.move_to_end(scope)

    def _cut_stalled(self) -> bool:
        """Cancel the handshake that has stalled longest, to make room. Return False if none has stalled."""
        scope, moved_s = next(iter(self._shaking.items()), (None, 0.0))
        if scope is None or trio.current_time() - moved_s < STALLED_S:
            return False
        del self._shaking[scope]
        scope.cancel()
        return True

    async def _shake_hands(
        self, sock: socket.socket, listening: Listening, progressed: Callable[[], None]
    ) -> tuple[str, TlsSocket | None]:
        """Return the result of the handshake, and the connection if it succeeded. Raises OSError."""
        first = sock.recv(len(PREFACE), socket.MSG_PEEK)
        if first and first[0] != HANDSHAKE:
            await self._refuse_plain(sock, first)
            return "plain", None
        tls = TlsSocket(sock, listening.context())
        await tls.shake_hands(progressed)
        return "ok", tls

    async def _refuse_plain(self, sock: socket.socket, first: bytes) -> None:
        """Answer plain HTTP with an explanation; close other connections, including links."""
        if first.isascii() and first[:1].isalpha() and first != PREFACE:
            await _answer_and_leave(sock, TlsRequired("this port speaks TLS", hint="use https:// in the URL"))

    async def _refuse(self, sock: socket.socket, refusal: PlainsongError) -> None:
        """Answer a connection over the limit with 503, and give the client time to read it."""
        try:
            if self._tls is None or sock.family == socket.AF_UNIX:  # with TLS, an answer would need a handshake
                await _answer_and_leave(sock, refusal)
        finally:
            sock.close()
            self._refusing -= 1


async def _answer_and_leave(sock: socket.socket, error: PlainsongError) -> None:
    """Answer a connection from which nothing was read, and give the client time to read the answer."""
    try:
        sock.send(wire.refusal(error, new_request_id()))
        sock.shutdown(socket.SHUT_WR)
        with trio.move_on_after(REFUSAL_S):
            await _drain(sock)
    except OSError:
        pass


async def _drain(sock: socket.socket) -> None:
    while True:
        await wait_readable(sock)
        if not sock.recv(1 << 16):
            return


@contextmanager
def _loop_first() -> Iterator[None]:
    """Give the event loop priority over a thread that runs Python for a good part of a second.

    With the interpreter's default of 5 ms, the loop waits that long for the lock after each of its system calls:
    publishes then had a p99 of 79 ms or more, instead of at most 21 ms.
    """
    interval_s, collects = sys.getswitchinterval(), gc.isenabled()
    sys.setswitchinterval(LOOP_FIRST_S)
    gc.disable()  # modules stay in memory, and a collection would stop all threads
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)
        if collects:
            gc.enable()


class _Application:
    """The application and hypercorn, loaded at the first request that needs them.

    Loading both takes as much processor time as the rest of the daemon's start, and a quarter of its memory. A daemon
    that serves only hot routes never loads them; otherwise a thread loads them while hot requests are answered. The
    wait for that is in a task that no client can cancel.
    """

    def __init__(self, build: Callable[[], ASGIFramework], shared: ServerParts, nursery: trio.Nursery) -> None:
        self._build = build
        self._shared = shared
        self._nursery = nursery
        self._server: Http2Server | None = None
        #: Set once the loading in progress has succeeded or failed; None if it is not being loaded.
        self._tried: trio.Event | None = None

    async def loaded(self) -> Any:
        """Return the application. Raises Overloaded: it cannot be loaded now."""
        return (await self.http2()).app

    async def http2(self) -> Http2Server:
        """Return the HTTP/2 server. Raises the same as ``loaded``."""
        if self._server is None:
            if self._tried is None:
                self._tried = trio.Event()
                self._nursery.start_soon(self._load, self._tried)
            await self._tried.wait()
        if self._server is None:
            raise Overloaded("a part of the daemon cannot be loaded; its log says why")
        return self._server

    async def stop(self) -> None:
        """Close idle HTTP/2 connections, and the others after their current answer."""
        if self._server is not None:
            await self._server.stop()

    def cut(self) -> None:
        """End all HTTP/2 connections now."""
        if self._server is not None:
            self._server.cut()

    async def _load(self, tried: trio.Event) -> None:
        try:
            with _loop_first():
                self._server = await in_thread(self._made)
        except Exception as error:  # such as no free file descriptor: the next request tries again
            log.exception("a part of the server cannot be loaded", extra={"why": str(error)[:300]})
        if self._shared.stopping.is_set():
            await self.stop()
        self._tried = None
        tried.set()

    def _made(self) -> Http2Server:
        from broker.http.http2.server import Http2Server

        gate = Gate(self._build(), self._shared)
        gc.freeze()  # as after the start: modules stay in memory
        return Http2Server(gate, self._shared)
