"""Who is at the other end of a connection, as the connection itself shows it."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import trio

#: Linux's ``struct ucred``.
_CREDENTIALS = struct.Struct("3i")


class UnixPeer(NamedTuple):
    """The process at the other end of a Unix socket when it connected, as the kernel knows it (SO_PEERCRED)."""

    pid: int
    uid: int
    gid: int


@dataclass(slots=True, eq=False)
class Seat:
    """A connection's place among those of one name, whose number a quota may bound."""

    name: str = ""
    """For whom it is counted; empty: for nobody."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection; the same for all its requests."""

    address: str = ""
    """``host:port``; ``unix`` on a Unix socket; empty: unknown."""
    tls: bool = False
    certificate: bytes | None = None
    """The certificate (DER) that the client proved to hold, verified against ``tls.client_ca``."""
    unix: UnixPeer | None = None
    """None: this is not a Unix socket."""
    seat: Seat | None = field(default=None, compare=False, repr=False)
    """None: it is no connection of this process."""

    @property
    def scheme(self) -> str:
        """Of the URLs by which this connection is reached."""
        return "https" if self.tls else "http"


#: Of a request that came by no connection of this process.
NO_PEER = Peer()


def peer_of(connection: socket.socket | trio.socket.SocketType) -> Peer:
    """Who is at the other end of a connected socket, before any TLS."""
    if connection.family == socket.AF_UNIX:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return Peer("unix", unix=UnixPeer(*_CREDENTIALS.unpack(credentials)), seat=Seat())
    try:
        host, port = connection.getpeername()[:2]
    except OSError:  # it has gone already
        return NO_PEER
    return Peer(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", seat=Seat())
