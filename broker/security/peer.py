"""The other end of a connection, as far as the connection itself identifies it."""

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
    """The process at the other end of a Unix socket when it connected, from the kernel (SO_PEERCRED)."""

    pid: int
    uid: int
    gid: int


@dataclass(slots=True, eq=False)
class ConnectionSlot:
    """A connection's place in the connection quota of a name."""

    name: str = ""
    """The name whose connection quota this counts against; empty if none."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection; the same for all its requests."""

    address: str = ""
    """``host:port``; ``unix`` on a Unix socket; empty if unknown."""
    tls: bool = False
    certificate: bytes | None = None
    """The client's certificate (DER), verified against ``tls.client_ca``."""
    unix: UnixPeer | None = None
    """None if this is not a Unix socket."""
    slot: ConnectionSlot | None = field(default=None, compare=False, repr=False)
    """None if the connection is not one of this process."""

    @property
    def scheme(self) -> str:
        """The scheme of the URLs of this connection."""
        return "https" if self.tls else "http"


#: The peer of a request that did not arrive on a connection of this process.
NO_PEER = Peer()


def peer_of(connection: socket.socket | trio.socket.SocketType) -> Peer:
    """Return the other end of a connected socket, before any TLS."""
    if connection.family == socket.AF_UNIX:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return Peer("unix", unix=UnixPeer(*_CREDENTIALS.unpack(credentials)), slot=ConnectionSlot())
    try:
        host, port = connection.getpeername()[:2]
    except OSError:  # it has closed the connection already
        return NO_PEER
    return Peer(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", slot=ConnectionSlot())
