"""A connection of the lane: its socket, what was received ahead, and the one time-out that is moved along.

The socket is read and written directly, since a publish costs little more than its system calls: what a stream
object or a time-out scope per request would add is a good part of it. One cancel scope lasts as long as the
connection; its deadline is that of the present phase: resting, reading a head, handling (none), sending.
"""

from __future__ import annotations

import socket
import struct
from math import inf

import trio
from trio.lowlevel import wait_readable, wait_writable

RECEIVE_BYTES = 64 << 10
#: What a client may send ahead while its answer is awaited.
MAX_PIPELINED_BYTES = 64 << 10
#: How long the rest of a refused body is read and dropped, so that the client sees the answer before a reset.
LINGER_S = 2.0
#: The same for a client that may have sent ahead what nobody will answer.
BRIEF_LINGER_S = 0.1
_RESET = struct.pack("ii", 1, 0)


class PeerLeft(Exception):
    """The client has closed the connection."""


class Connection:
    """One accepted socket, not blocking."""

    __slots__ = ("_send_timeout_s", "_sock", "_watching", "pending", "scope")

    def __init__(self, sock: socket.socket, send_timeout_s: float) -> None:
        self._sock = sock
        self._send_timeout_s = send_timeout_s
        self._watching: trio.CancelScope | None = None
        #: Around everything; its end is the connection's.
        self.scope = trio.CancelScope()
        #: Received, and not yet part of a request.
        self.pending = b""

    async def receive(self, max_bytes: int = RECEIVE_BYTES) -> bytes:
        """At least one byte.

        Raises:
          PeerLeft: there will be no more.
          OSError: the connection is broken.
        """
        while True:
            await wait_readable(self._sock)
            try:
                data = self._sock.recv(max_bytes)
            except BlockingIOError:
                continue
            if not data:
                raise PeerLeft
            return data

    async def send_all(self, data: bytes, body: bytes = b"") -> None:
        """Sends ``data``, and ``body`` behind it, at once if the socket takes it; each wait for the reader has its time-out.

        Raises:
          OSError: the connection is broken.
        """
        try:
            sent = self._sock.sendmsg((data, body)) if body else self._sock.send(data)
        except BlockingIOError:
            sent = 0
        if sent == len(data) + len(body):
            return
        if sent < len(data):
            await self._send_rest(memoryview(data)[sent:])
        await self._send_rest(memoryview(body)[max(0, sent - len(data)) :])
        self.scope.deadline = inf

    async def _send_rest(self, rest: memoryview) -> None:
        while rest:
            self.scope.deadline = trio.current_time() + self._send_timeout_s
            await wait_writable(self._sock)
            try:
                rest = rest[self._sock.send(rest) :]
            except BlockingIOError:
                continue

    async def watch(self) -> None:
        """Keeps what the client sends ahead, and ends the connection when it leaves; until ``unwatch``."""
        if self._watching is not None:
            return
        with trio.CancelScope() as watching:
            self._watching = watching
            while len(self.pending) < MAX_PIPELINED_BYTES:
                await wait_readable(self._sock)
                if watching.cancel_called:
                    return  # the owner reads again; to wait here once more would be in its way
                try:
                    data = self._sock.recv(RECEIVE_BYTES)
                except BlockingIOError:
                    continue
                except OSError:
                    data = b""
                if not data:
                    self.scope.cancel()
                    return
                self.pending += data

    def unwatch(self) -> None:
        """Ends ``watch``; the socket is free for our own reading at once, before its task has ended."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    async def linger(self, linger_s: float) -> None:
        """Says that nothing more will be sent, and drops what still comes, until the client leaves or time is over.

        Raises:
          PeerLeft: the client has seen it all.
        """
        self._sock.shutdown(socket.SHUT_WR)
        with trio.move_on_after(linger_s):
            while True:
                await self.receive()

    def reset_on_close(self) -> None:
        """Lets closing break the connection at once, and free what the kernel holds for a reader that fell asleep."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
