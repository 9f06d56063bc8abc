"""Connections handed from one process to another: a descriptor and what was read of it, over a Unix socket."""

from __future__ import annotations

import socket
from contextlib import suppress

import trio
from trio.lowlevel import wait_readable, wait_writable

#: What may have been read ahead of a connection that is handed over: its preface and a little more.
MAX_READ_BYTES = 64 << 10


async def give(door: socket.socket, connection: socket.socket, already_read: bytes) -> None:
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


async def take(door: socket.socket) -> tuple[socket.socket, bytes] | None:
    """The next connection that was handed over and what was read of it; None: nobody gives any more."""
    while True:
        await wait_readable(door)
        with suppress(BlockingIOError):
            data, descriptors, _, _ = socket.recv_fds(door, MAX_READ_BYTES, 1)
            if descriptors:
                return socket.socket(fileno=descriptors[0]), data
            if not data:
                return None


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a door."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(False)
    return ends


def stream_of(connection: socket.socket) -> trio.SocketStream:
    """A stream over a connected socket, which it owns from then on."""
    connection.setblocking(False)
    return trio.SocketStream(trio.socket.from_stdlib_socket(connection))
