"""The server: accepts connections, gives each to its door, and ends them in good order."""

from __future__ import annotations

import errno
import logging
import socket
from typing import TYPE_CHECKING

import trio
from trio.lowlevel import wait_readable

from broker.http import wire
from broker.http.handover import HypercornDoor
from broker.http.lane import Lane, LaneParts
from broker.http.request_ids import new_request_id
from broker.http.sockets import listen_on, shown
from broker.http.status import answer_for
from broker.http.watch import Watch
from protocol.errors import Overloaded
from protocol.peering.frames import PREFACE

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Sequence
    from typing import TypeAlias

    from hypercorn.typing import ASGIFramework

    from broker.http.bodies import BodyBudget
    from broker.http.conversation import Begin
    from broker.http.exchange import HotHandlers
    from broker.http.settings import HttpSettings

    #: Serves a connection that begins as a link does: gets what was read of it, and what is set when the server stops.
    PeerDoor: TypeAlias = Callable[[trio.SocketStream, bytes, trio.Event], Awaitable[None]]

log = logging.getLogger("plainsong.http")

#: Out of file descriptors or memory: accepting again at once would only spin.
_SHORT_OF = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
ACCEPT_PAUSE_S = 0.1
#: Connections that are being refused at a time, and how long each may take to read why.
MAX_REFUSING = 64
REFUSAL_S = 1.0


async def serve_http(
    settings: HttpSettings,
    handlers: HotHandlers,
    app: ASGIFramework,
    *,
    binds: Sequence[str | socket.socket],
    budget: BodyBudget,
    stop: trio.Event,
    grace_s: float,
    tls: ssl.SSLContext | None = None,
    begin: Begin | None = None,
    peers: PeerDoor | None = None,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves until ``stop`` is set and the connections have left, at most ``grace_s`` later.

    ``binds`` are addresses to listen on, or sockets that listen already. ``task_status`` is given the addresses as ``host:port``. With ``tls`` all connections are hypercorn's.
    ``begin`` begins what stands behind a WebSocket; None: there are none. ``peers`` gets connections that begin as
    links do, with the bytes that were read; None: they are refused like any other that is no HTTP.

    Raises:
      OSError: an address of ``binds`` cannot be listened on; nothing is left open.
    """
    listeners: list[socket.socket] = []
    try:
        for bind in binds:
            listeners += [bind] if isinstance(bind, socket.socket) else await trio.to_thread.run_sync(listen_on, bind)
        door = HypercornDoor(app, settings, budget, begin)
        # Without its handlers a lane only looks how a connection begins.
        parts = LaneParts(settings, handlers if settings.lane else {}, budget, Watch())
        server = _Server(settings, parts, door, tls, peers)
        async with door.opened():
            await server.run(listeners, stop, grace_s, task_status)
    finally:
        for listener in listeners:
            listener.close()


class _Server:
    def __init__(
        self,
        settings: HttpSettings,
        parts: LaneParts,
        door: HypercornDoor,
        tls: ssl.SSLContext | None,
        peers: PeerDoor | None,
    ) -> None:
        self._settings = settings
        self._parts = parts
        self._door = door
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
            async with trio.open_nursery() as connections:
                async with trio.open_nursery() as accepting:
                    for listener in listeners:
                        accepting.start_soon(self._accept, listener, connections)
                    task_status.started([shown(listener) for listener in listeners])
                    await stop.wait()
                    accepting.cancel_scope.cancel()
                self._stop.set()
                for listener in listeners:
                    listener.close()
                for lane in self._lanes:
                    lane.stop()
                await self._door.stop()
                watching.start_soon(self._cut_after, grace_s, connections)
            watching.cancel_scope.cancel()

    async def _cut_after(self, grace_s: float, connections: trio.Nursery) -> None:
        try:
            await trio.sleep(grace_s)
        finally:  # whoever runs us may lose patience at the same moment
            self._door.cut()  # its sends are shielded
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
        """Serves one connection; whatever goes wrong in it stays in it."""
        try:
            await self._serve_by_its_door(sock)
        except Exception:
            log.exception("a connection failed")
        finally:
            sock.close()
            self._open -= 1

    async def _serve_by_its_door(self, sock: socket.socket) -> None:
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
            await self._door.serve(stream, already_read)
        else:
            await self._door.serve(
                trio.SSLStream(stream, self._tls, server_side=True, https_compatible=True), already_read
            )

    async def _refuse(self, sock: socket.socket) -> None:
        """Tells a connection over the bound to come back later, and waits a little for it to read that."""
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
