"""The peer door: a connection on the ordinary port that begins as a link does is served as one."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from broker.peering.bounds import BETWEEN_INSTANCES, LinkBounds
from broker.peering.serving import Dispatch, serve_link

if TYPE_CHECKING:
    import trio

    from broker.http.listen import PeerDoor


def peer_door(dispatch: Dispatch, bounds: LinkBounds = BETWEEN_INSTANCES) -> PeerDoor:
    """What ``serve_http`` gives such connections to: each is a link that ``dispatch`` answers."""

    async def serve(stream: trio.SocketStream, already_read: bytes, stop: trio.Event) -> None:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        peer = shown_peer(stream.socket)
        await serve_link(stream, dispatch, bounds, already_read=already_read, stop=stop, peer=peer)

    return serve


def shown_peer(sock: trio.socket.SocketType) -> str:
    """Who is at the other end, as ``host:port``; empty when it has gone already."""
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return ""
    return f"{host}:{port}"
