"""Listening sockets for ``host:port`` and ``unix:/path``; and connected sockets handed over to another process."""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import trio
from trio.lowlevel import wait_readable, wait_writable

from broker.config.values import UNIX

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

BACKLOG = 1024
#: Out of file descriptors or memory: accepting again immediately would only spin.
_SHORT_OF = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
ACCEPT_PAUSE_S = 0.1


class BindFailed(OSError):
    """The daemon cannot listen on an address; the message gives the address and the reason."""

    def __init__(self, number: int, message: str, bind: str) -> None:
        super().__init__(number, message)
        self.bind = bind


def split_bind(bind: str) -> tuple[str, int]:
    """Return ``(host, port)`` of ``host:port`` or ``[v6 address]:port``.

    Raises:
      ValueError: it is malformed.
    """
    host, colon, port = bind.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 0xFFFF or (":" in host and not host.startswith("[")):
        raise ValueError(f"{bind!r} is not host:port (put an IPv6 address in brackets)")
    return host.strip("[]"), int(port)


def listen_on(bind: str, unix_mode: str = "0660") -> list[socket.socket]:
    """Return sockets that listen on every address of ``bind``; for port 0, all on the same free port.

    Args:
      unix_mode: the permissions of the socket file of ``unix:/path``; ``SocketFiles`` removes the file.
    Raises:
      ValueError: ``bind`` is neither host:port nor unix:/path.
      BindFailed: no address could be bound.
    """
    if bind.startswith(UNIX):
        sock = _unix_socket(bind, unix_mode)
        sock.listen(BACKLOG)
        return [sock]
    host, port = split_bind(bind)
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            if port == 0 and listeners:
                address = (address[0], listeners[0].getsockname()[1], *address[2:])
            # A name such as localhost may have addresses that this machine lacks; one working address is enough.
            with suppress(_Unavailable):
                listeners.append(_listener(family, address))
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise _explained(error, bind) from None
    if not listeners:
        raise _explained(OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL)), bind)
    return listeners


async def accepted(listener: socket.socket, cannot: Callable[[str], object]) -> AsyncIterator[socket.socket]:
    """Accept connections until cancelled; their sockets do not block. The caller must close them.

    Args:
      cannot: called with the reason when there are no file descriptors, or no memory, for another connection; accepting
        is retried after ``ACCEPT_PAUSE_S``.
    """
    while True:
        await wait_readable(listener)
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            continue
        except OSError as error:
            if error.errno not in _SHORT_OF:
                raise
            cannot(error.strerror or str(error))
            await trio.sleep(ACCEPT_PAUSE_S)
            continue
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield sock


def address_of(listener: socket.socket) -> str:
    """Return the address of a listening socket, as ``host:port`` or ``unix:/path``."""
    if listener.family == socket.AF_UNIX:
        return UNIX + str(listener.getsockname())
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind_shared(bind: str, count: int, unix_mode: str = "0660") -> list[list[socket.socket]]:
    """Return sockets for each of ``count`` processes, to share every address of ``bind``.

    The sockets reserve the address but do not listen: until ``start_listening`` connections are refused, and no other
    process can take the address.

    Raises:
      ValueError, BindFailed: as ``listen_on``; or the address would be shared with another process.
    """
    if bind.startswith(UNIX):
        sock = _unix_socket(bind, unix_mode)
        # The kernel does not balance Unix sockets: all processes accept from the same one.
        return [[sock], *([sock.dup()] for _ in range(count - 1))]
    found = listen_on(bind)  # fails if the address is taken
    addresses = [(sock.family, sock.getsockname()) for sock in found]
    for sock in found:
        sock.close()
    rows: list[list[socket.socket]] = []
    try:
        for _ in range(count):
            rows.append([])
            for family, address in addresses:
                rows[-1].append(_holder(family, address))
    except (OSError, _Unavailable) as error:
        for sock in (each for row in rows for each in row):
            sock.close()
        raise _explained(error if isinstance(error, OSError) else OSError(errno.EADDRNOTAVAIL, ""), bind) from None
    return rows


def start_listening(rows: list[list[socket.socket]]) -> None:
    """Make the sockets listen; the kernel distributes the connections. Raises OSError."""
    for sock in (each for row in rows for each in row):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.listen(BACKLOG)


def _unix_socket(bind: str, mode: str) -> socket.socket:
    """Return a socket bound to the path of ``bind``; connections are refused until it listens. Raises BindFailed."""
    path = bind.removeprefix(UNIX)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        _remove_stale(path)
        sock.bind(path)
        os.chmod(path, int(mode, 8))
    except OSError as error:
        sock.close()
        raise _explained(error, bind) from None
    return sock


def _remove_stale(path: str) -> None:
    """Remove the socket file of a process that did not exit cleanly. Raises OSError: another process listens there."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise OSError(errno.EEXIST, "a file with this name exists, and it is not a socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass  # its backlog is full, so it must be alive
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


class SocketFiles:
    """The socket files of the Unix sockets in ``listeners``; closing a socket does not remove its file."""

    def __init__(self, listeners: Iterable[socket.socket]) -> None:
        paths = [str(each.getsockname()) for each in listeners if each.family == socket.AF_UNIX]
        self._files = [(path, _identity(path)) for path in paths]

    def remove(self) -> None:
        """Remove the files that are unchanged: another daemon may have created its own since."""
        for path, identity in self._files:
            with suppress(OSError):
                if _identity(path) == identity:
                    os.unlink(path)


def _identity(path: str) -> tuple[int, int]:
    """Return device and inode: inodes are unique only within a device."""
    found = os.lstat(path)
    return found.st_dev, found.st_ino


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
    # SO_REUSEADDR allowed the bind despite old connections in TIME_WAIT. Left on, it would let others listen before we
    # do.
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


def _explained(error: OSError, bind: str) -> BindFailed:
    number = error.errno or 0
    if number == errno.EADDRINUSE:
        return BindFailed(number, f"{bind} is in use by another process; stop it, or choose another address", bind)
    return BindFailed(number, f"cannot listen on {bind}: {error.strerror}", bind)


# --- connections handed to another process ---------------------------------------------------------


#: Maximum number of bytes read from a connection before it is handed over: its preface and a little more.
MAX_READ_BYTES = 64 << 10
#: Maximum number of bytes that precede them: see ``broker.link.proof.with_binding``.
MAX_BINDING_BYTES = 256
#: Size of one read while relaying.
PASSED_BYTES = 64 << 10


async def send_connection(handover: socket.socket, connection: socket.socket, already_read: bytes) -> None:
    """Hand ``connection``, and the bytes read from it, to another process over a Unix SEQPACKET socket; close it here.

    Raises:
      OSError: the other end is closed.
    """
    try:
        while True:
            try:
                socket.send_fds(handover, [already_read], [connection.fileno()])
                return
            except BlockingIOError:
                await wait_writable(handover)
    finally:
        connection.close()


async def receive_connection(handover: socket.socket) -> tuple[socket.socket, bytes] | None:
    """Return the next connection handed over, and the bytes read from it; None if the other end is closed."""
    while True:
        await wait_readable(handover)
        with suppress(BlockingIOError):
            data, descriptors, _, _ = socket.recv_fds(handover, MAX_READ_BYTES + MAX_BINDING_BYTES, 1)
            if descriptors:
                return socket.socket(fileno=descriptors[0]), data
            if not data:
                return None


def handover_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a Unix SEQPACKET socket, for handing over connections."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(False)
    return ends


async def passed_on(one: trio.abc.HalfCloseableStream, other: trio.abc.HalfCloseableStream) -> None:
    """Relay bytes both ways until one side ends or breaks; close both."""

    async def pump(source: trio.abc.ReceiveStream, target: trio.abc.SendStream, nursery: trio.Nursery) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while data := await source.receive_some(PASSED_BYTES):
                await target.send_all(data)
        nursery.cancel_scope.cancel()

    async with one, other, trio.open_nursery() as nursery:
        nursery.start_soon(pump, one, other, nursery)
        nursery.start_soon(pump, other, one, nursery)


def stream_of(connection: socket.socket) -> trio.SocketStream:
    """Return a stream that owns the connected socket."""
    connection.setblocking(False)
    return trio.SocketStream(trio.socket.from_stdlib_socket(connection))
