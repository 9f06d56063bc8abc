"""Listening sockets, from ``host:port`` to sockets that accept; and connected sockets handed to another process.

Listening sockets: from ``host:port`` to sockets that accept, or an error that says what to do.
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress
from typing import Any

import trio
from trio.lowlevel import wait_readable, wait_writable

BACKLOG = 1024


def split_bind(bind: str) -> tuple[str, int]:
    """``(host, port)`` of ``host:port`` or ``[v6 address]:port``.

    Raises:
      ValueError: it is neither.
    """
    host, colon, port = bind.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 0xFFFF or (":" in host and not host.startswith("[")):
        raise ValueError(f"{bind!r} is not host:port (an IPv6 address stands in brackets)")
    return host.strip("[]"), int(port)


def listen_on(bind: str) -> list[socket.socket]:
    """Sockets that listen on every address of ``bind``; port 0 takes a free one, the same on all of them.

    Raises:
      ValueError: ``bind`` is not host:port.
      OSError: no address could be bound; the message says which and why.
    """
    host, port = split_bind(bind)
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            if port == 0 and listeners:
                address = (address[0], listeners[0].getsockname()[1], *address[2:])
            # A name such as localhost may have addresses this machine lacks; one that works is enough.
            with suppress(_Unavailable):
                listeners.append(_listener(family, address))
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise _explained(error, bind) from None
    if not listeners:
        raise _explained(OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL)), bind)
    return listeners


def address_of(listener: socket.socket) -> str:
    """Where it listens, as ``host:port``."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind_shared(bind: str, count: int) -> list[list[socket.socket]]:
    """For each of ``count`` processes, sockets that are to share every address of ``bind``.

    They hold the address, and do not listen yet: clients are refused until ``start_listening``, nobody else gets it meanwhile.

    Raises:
      ValueError, OSError: as ``listen_on``, also when it is only others that would share the address.
    """
    found = listen_on(bind)  # whoever may not share it is refused here
    addresses = [(sock.family, sock.getsockname()) for sock in found]
    for sock in found:
        sock.close()
    together: list[list[socket.socket]] = []
    try:
        for _ in range(count):
            together.append([])
            for family, address in addresses:
                together[-1].append(_holder(family, address))
    except (OSError, _Unavailable) as error:
        for sock in (each for row in together for each in row):
            sock.close()
        raise _explained(error if isinstance(error, OSError) else OSError(errno.EADDRNOTAVAIL, ""), bind) from None
    return together


def start_listening(together: list[list[socket.socket]]) -> None:
    """Has them listen; the system shares the connections out. Raises OSError."""
    for sock in (each for row in together for each in row):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.listen(BACKLOG)


class _Unavailable(Exception):
    """The machine does not have this address."""


def _listener(family: int, address: tuple[Any, ...]) -> socket.socket:
    sock = _bound(family, address)
    try:
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _holder(family: int, address: tuple[Any, ...]) -> socket.socket:
    sock = _bound(family, address, shared=True)
    # To be bound beside what an earlier process left, it was set; left so, others could listen as long as we do not.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return sock


def _bound(family: int, address: tuple[Any, ...], *, shared: bool = False) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise _Unavailable from None
        raise
    return sock


def _explained(error: OSError, bind: str) -> OSError:
    if error.errno == errno.EADDRINUSE:
        return OSError(error.errno, f"{bind} is in use by another process; stop it, or choose another address")
    return OSError(error.errno, f"cannot listen on {bind}: {error.strerror}")


# --- descriptors -----------------------------------------------------------------------------------
#
# Connections handed from one process to another: a descriptor and what was read of it, over a Unix socket.


#: What may have been read ahead of a connection that is handed over: its preface and a little more.
MAX_READ_BYTES = 64 << 10


async def send_connection(door: socket.socket, connection: socket.socket, already_read: bytes) -> None:
    """Hands ``connection`` to whoever takes at the other end of ``door``, a socket of packets; ours is closed.

    Raises:
      OSError: nobody takes any more.
    """
    try:
        while True:
            try:
                socket.send_fds(door, [already_read], [connection.fileno()])
                return
            except BlockingIOError:
                await wait_writable(door)
    finally:
        connection.close()


async def receive_connection(door: socket.socket) -> tuple[socket.socket, bytes] | None:
    """The next connection that was handed over and what was read of it; None: nobody gives any more."""
    while True:
        await wait_readable(door)
        with suppress(BlockingIOError):
            data, descriptors, _, _ = socket.recv_fds(door, MAX_READ_BYTES, 1)
            if descriptors:
                return socket.socket(fileno=descriptors[0]), data
            if not data:
                return None


def handover_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a door."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(False)
    return ends


def stream_of(connection: socket.socket) -> trio.SocketStream:
    """A stream over a connected socket, which it owns from then on."""
    connection.setblocking(False)
    return trio.SocketStream(trio.socket.from_stdlib_socket(connection))
