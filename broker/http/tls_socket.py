"""TLS over a connection's own socket and memory buffers, with the interface of a non-blocking socket.

A ``trio.SSLStream`` would slow down the hot path: two locks, several checkpoints and a waiting task per request. Here
the call that reads a request also decrypts it.
"""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import trio
from trio.lowlevel import checkpoint, wait_readable, wait_writable

if TYPE_CHECKING:
    from collections.abc import Callable


#: Size of one read from the socket, and of one piece to encrypt.
RAW_BYTES = 64 << 10
#: The first byte of a TLS handshake.
HANDSHAKE = 0x16


class TlsSocket:
    """A connected, non-blocking socket that speaks TLS, with the socket methods that ``Connection`` uses.

    ``recv`` raises BlockingIOError when there is no data, and returns less than requested only when no more is
    available. If ``send`` accepts only part of the data, the next call must begin with the rest: some of it is already
    encrypted.

    Args:
      connected_to: the host of the server that this end has connected to; None: this end is the server.
    """

    __slots__ = ("_incoming", "_outgoing", "_owed_bytes", "_sock", "_tls", "_unsent", "ended")

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, connected_to: str | None = None) -> None:
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=connected_to is None, server_hostname=connected_to
        )
        #: The peer has sent the end of its data, or has closed the connection.
        self.ended = False
        #: Encrypted bytes that are not sent yet, and how many bytes of the next ``send`` they represent.
        self._unsent = memoryview(b"")
        self._owed_bytes = 0

    @property
    def binding(self) -> bytes:
        """The channel binding: bytes that only the two ends of this connection know; empty before the handshake.

        RFC 9266 asks for tls-exporter with TLS 1.3, which Python's ssl does not offer. There, tls-unique is the
        Finished message, a MAC over the whole handshake with its secret: with a relay in between, it differs between
        the two connections.
        """
        return self._tls.get_channel_binding("tls-unique") or b""

    # --- handshake --------------------------------------------------------------------------------

    async def shake_hands(self, progressed: Callable[[], None] = lambda: None) -> None:
        """Complete the handshake; call ``progressed`` whenever bytes have arrived.

        Raises OSError (including SSLError): it failed, or the peer has left.
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
                self._push()  # sends the alert
                raise
            else:
                await self._flush()
                return

    @property
    def alpn(self) -> str | None:
        """The negotiated protocol."""
        return self._tls.selected_alpn_protocol()

    def certificate(self) -> bytes | None:
        """Return the peer's verified certificate (DER); None if it sent none."""
        return self._tls.getpeercert(binary_form=True)

    # --- reading ----------------------------------------------------------------------------------

    def recv(self, max_bytes: int) -> bytes:
        """Return the available data; ``b""`` at the end. Raises BlockingIOError, and OSError if the data is not TLS."""
        parts: list[bytes] = []
        left_bytes = max_bytes
        # The last call may not have emptied the socket, and data may have arrived since.
        more = True
        while left_bytes:
            if self._incoming.pending or self._tls.pending():
                try:
                    data = self._tls.read(left_bytes)
                except ssl.SSLWantReadError:
                    pass  # an incomplete record
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
            self._push()  # messages of the protocol itself, such as a key update
        return parts[0] if len(parts) == 1 else b"".join(parts)

    # --- writing ----------------------------------------------------------------------------------

    def send(self, data: bytes | memoryview) -> int:
        """Send without waiting; return how many bytes of ``data`` were accepted. Raises OSError."""
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
        """Send the two buffers in order; see ``send``."""
        sent_bytes = 0
        for data in buffers:
            taken_bytes = self.send(data)
            sent_bytes += taken_bytes
            if taken_bytes < len(data):
                break
        return sent_bytes

    def _push(self) -> bool:
        """Send pending encrypted bytes. Return True if none are left. Raises OSError."""
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
        """The underlying socket."""
        return self._sock

    def fileno(self) -> int:
        """Return the descriptor; -1 once closed."""
        return self._sock.fileno()

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        """Set an option of the underlying socket."""
        self._sock.setsockopt(level, option, value)

    def shutdown(self, how: int) -> None:
        """Send the end of output: first TLS's close_notify, then the socket's. Raises OSError."""
        self.say_goodbye()
        self._sock.shutdown(how)

    def say_goodbye(self) -> None:
        """Send close_notify if possible without waiting; an end without it would look like a truncation attack."""
        with suppress(OSError):  # the peer's close_notify has not arrived, or there was no handshake
            self._tls.unwrap()
        with suppress(OSError):
            self._push()

    def close(self) -> None:
        self._sock.close()


class TlsStream(trio.abc.HalfCloseableStream):
    """The connection as a trio stream, for HTTP/2 and links."""

    def __init__(self, tls: TlsSocket) -> None:
        self.tls = tls
        #: Hypercorn reads the addresses of both ends from it.
        self.socket = tls.socket

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Return the next bytes; ``b""`` at the end."""
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
        """Send all of ``data``."""
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
        """Wait until a send may succeed without waiting."""
        self._check_open()
        await self._wait(wait_writable)

    async def send_eof(self) -> None:
        """Send the end of output."""
        self._check_open()
        try:
            self.tls.shutdown(socket.SHUT_WR)
        except OSError as error:
            raise trio.BrokenResourceError(str(error)) from error
        await checkpoint()

    async def aclose(self) -> None:
        """Close the connection, after close_notify."""
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
