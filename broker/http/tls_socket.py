"""TLS on a connection's own socket, over memory: what the lane reads and writes as if it were the socket itself.

A ``trio.SSLStream`` would cost the lane a good part of its speed: per request two locks, several checkpoints, and a task
that waits. Here the bytes of a request are decrypted where they are read, by the call that read them.
"""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import trio
from trio.lowlevel import checkpoint, wait_readable, wait_writable

if TYPE_CHECKING:
    from collections.abc import Callable

    from broker.http.peer import Peer

#: What is read off the socket, and encrypted, at once.
RAW_BYTES = 64 << 10
#: The first byte of a TLS handshake.
HANDSHAKE = 0x16


class TlsSocket:
    """A connected socket, not blocking, that speaks TLS; with those calls of a socket that the lane makes.

    ``recv`` raises BlockingIOError when there is no data, and returns less than was asked for only when nothing is left
    behind it. After ``send`` has taken less than all, the next call must begin with the rest: some of it is encrypted.
    """

    __slots__ = ("_incoming", "_outgoing", "_owed_bytes", "_sock", "_tls", "_unsent", "ended")

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server_side: bool = True) -> None:
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        #: The other side has said that it sends no more, or has gone.
        self.ended = False
        #: Encrypted and not sent, and how many bytes of the next ``send`` it stands for.
        self._unsent = memoryview(b"")
        self._owed_bytes = 0

    @property
    def binding(self) -> bytes:
        """Bytes that both ends of this connection know, and that no other connection has; empty before the handshake."""
        return self._tls.get_channel_binding("tls-unique") or b""

    # --- handshake --------------------------------------------------------------------------------

    async def shake_hands(self, progressed: Callable[[], None] = lambda: None) -> None:
        """Ends with the handshake; calls ``progressed`` whenever bytes have arrived.

        Raises OSError (SSLError among them): it failed, or the other side has gone.
        """
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await wait_readable(self._sock)
                with suppress(BlockingIOError):
                    raw = self._sock.recv(RAW_BYTES)
                    if not raw:
                        raise ConnectionResetError("the connection ended in its handshake") from None
                    self._incoming.write(raw)
                    progressed()
            except ssl.SSLError:
                self._push()  # says why
                raise
            else:
                await self._flush()
                return

    @property
    def alpn(self) -> str | None:
        """The protocol that was agreed on."""
        return self._tls.selected_alpn_protocol()

    @property
    def ssl_object(self) -> ssl.SSLObject:
        """For what it knows of the other side."""
        return self._tls

    def certificate(self) -> bytes | None:
        """The other side's certificate (DER), verified; None: it showed none."""
        return self._tls.getpeercert(binary_form=True)

    # --- reading ----------------------------------------------------------------------------------

    def recv(self, max_bytes: int) -> bytes:
        """What is there; ``b""`` at the end. Raises BlockingIOError, and OSError for what is no TLS."""
        parts: list[bytes] = []
        left_bytes = max_bytes
        # The socket may have got something since the last call, which has seen no end of it.
        more = True
        while left_bytes:
            if self._incoming.pending or self._tls.pending():
                try:
                    data = self._tls.read(left_bytes)
                except ssl.SSLWantReadError:
                    pass  # a record of which only a part has come
                except ssl.SSLZeroReturnError:
                    self.ended = True
                else:
                    self.ended = not data
                    parts.append(data)
                    left_bytes -= len(data)
                    if data:
                        continue
            if self.ended or (parts and not more):
                break
            try:
                raw = self._sock.recv(RAW_BYTES)
            except BlockingIOError:
                if parts:
                    break
                raise
            if not raw:
                self.ended = True
                break
            more = len(raw) == RAW_BYTES
            self._incoming.write(raw)
        if self._outgoing.pending:
            self._push()  # answers of the protocol itself
        return parts[0] if len(parts) == 1 else b"".join(parts)

    # --- writing ----------------------------------------------------------------------------------

    def send(self, data: bytes | memoryview) -> int:
        """Sends what the socket takes; how much of ``data`` that was. Raises OSError."""
        if self._unsent and not self._push():
            return 0
        sent_bytes, self._owed_bytes = self._owed_bytes, 0
        rest = memoryview(data)[sent_bytes:]
        while rest:
            piece = rest[:RAW_BYTES]
            self._tls.write(piece)
            if not self._push():
                self._owed_bytes = len(piece)
                return sent_bytes
            sent_bytes += len(piece)
            rest = rest[RAW_BYTES:]
        return sent_bytes

    def sendmsg(self, buffers: tuple[bytes, bytes]) -> int:
        """As ``send``, for one behind the other."""
        sent_bytes = 0
        for data in buffers:
            taken_bytes = self.send(data)
            sent_bytes += taken_bytes
            if taken_bytes < len(data):
                break
        return sent_bytes

    def _push(self) -> bool:
        """Sends what is encrypted; whether all of it has left. Raises OSError."""
        rest = self._unsent
        if self._outgoing.pending:
            rest = memoryview(bytes(rest) + self._outgoing.read() if rest else self._outgoing.read())
        if not rest:
            return True
        try:
            sent_bytes = self._sock.send(rest)
        except BlockingIOError:
            sent_bytes = 0
        self._unsent = rest[sent_bytes:]
        return not self._unsent

    async def _flush(self) -> None:
        while not self._push():
            await wait_writable(self._sock)

    # --- the socket -------------------------------------------------------------------------------

    @property
    def socket(self) -> socket.socket:
        """The socket below."""
        return self._sock

    def fileno(self) -> int:
        """Its descriptor; -1 once it is closed."""
        return self._sock.fileno()

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        """Sets an option of the socket."""
        self._sock.setsockopt(level, option, value)

    def shutdown(self, how: int) -> None:
        """Says that nothing more will be sent: in TLS, then below it. Raises OSError."""
        self.say_goodbye()
        self._sock.shutdown(how)

    def say_goodbye(self) -> None:
        """Ends our half of the conversation, if that can be sent at once; a cut would look like an attack."""
        with suppress(OSError):  # it waits for the other side's, or there was no handshake
            self._tls.unwrap()
        with suppress(OSError):
            self._push()

    def close(self) -> None:
        """Closes the socket."""
        self._sock.close()


class TlsStream(trio.abc.HalfCloseableStream):
    """The same connection as a stream, for whoever gets it from the lane."""

    def __init__(self, tls: TlsSocket) -> None:
        self.tls = tls
        #: Hypercorn takes the addresses of both ends from it.
        self.socket = tls.socket

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """The next bytes; ``b""`` at the end."""
        while True:
            self._check_open()
            try:
                data = self.tls.recv(max_bytes or RAW_BYTES)
            except BlockingIOError:
                await self._wait(wait_readable)
                continue
            except OSError as error:
                raise trio.BrokenResourceError(str(error)) from error
            await checkpoint()
            return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Sends all of ``data``."""
        rest = memoryview(data)
        while True:
            self._check_open()
            try:
                rest = rest[self.tls.send(rest) :]
            except OSError as error:
                raise trio.BrokenResourceError(str(error)) from error
            if not rest:
                await checkpoint()
                return
            await self._wait(wait_writable)

    async def wait_send_all_might_not_block(self) -> None:
        """Waits until a send may succeed at once."""
        self._check_open()
        await self._wait(wait_writable)

    async def send_eof(self) -> None:
        """Sends no more."""
        self._check_open()
        try:
            self.tls.shutdown(socket.SHUT_WR)
        except OSError as error:
            raise trio.BrokenResourceError(str(error)) from error
        await checkpoint()

    async def aclose(self) -> None:
        """Closes the connection."""
        if self.tls.fileno() >= 0:
            self.tls.say_goodbye()
            trio.lowlevel.notify_closing(self.socket)
            self.tls.close()
        await checkpoint()

    def _check_open(self) -> None:
        if self.tls.fileno() < 0:
            raise trio.ClosedResourceError("this connection is closed")

    async def _wait(self, wait: Any) -> None:
        await wait(self.socket)


def secured(peer: Peer, tls: TlsSocket) -> Peer:
    """``peer`` with what its handshake has shown."""
    return replace(peer, tls=True, certificate=tls.certificate())
