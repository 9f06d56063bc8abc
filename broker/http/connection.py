"""A connection's socket: read and written directly, in the reactor's task or in the connection's own.

A publish costs little more than its system calls: a stream object, or a time-out scope per request, would be a large
part of that. One cancel scope lasts as long as the connection; its deadline is that of the current phase: resting,
reading a head, handling (no deadline), sending.
"""

from __future__ import annotations

import select
import socket
import struct
from contextlib import suppress
from enum import Enum, IntEnum
from math import inf
from typing import TYPE_CHECKING, Protocol

import trio
from trio.lowlevel import wait_writable

from broker.http.budgets import MinimumRate
from broker.http.tls_socket import TlsSocket

if TYPE_CHECKING:
    from broker.config.sections import HttpConfig
    from broker.http.budgets import BodyBudget
    from broker.http.reactor import Reactor
    from broker.security.peer import Peer

RECEIVE_BYTES = 64 << 10
#: The largest body that is awaited without a task.
GATHERED_BYTES = 256 << 10
#: Bytes that a client may send ahead while it waits for an answer.
MAX_PIPELINED_BYTES = 64 << 10
#: Time limit for discarding the rest of a refused body, or of a WebSocket, so that the client can read the answer.
LINGER_S = 2.0
#: The same for a client that may have pipelined requests that will not be answered.
BRIEF_LINGER_S = 0.1
#: Maximum of TCP_USER_TIMEOUT for data that is unsent when a connection ends.
MAX_USER_TIMEOUT_S = 3600.0
_RESET = struct.pack("ii", 1, 0)
#: A longer body is sent separately from its head; below this, one copy is cheaper than two buffers.
COPIED_BYTES = 64 << 10
#: epoll events of a socket whose peer sends no more.
_ENDS = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class PeerLeft(Exception):
    """The client has closed the connection."""


class State(IntEnum):
    """The state of a connection. In the first three its task sleeps."""

    RESTING = 0
    """It waits for a request."""
    GATHERING = 1
    """The start of a small body has arrived; the reactor reads the rest."""
    ANSWERING = 2
    """A request is being answered without the task."""
    AWAKE = 3
    """Its task has been woken."""
    READING = 4
    """Its task reads a head or a body."""
    HANDLING = 5
    """Its task waits for a handler, or for the application."""
    SENDING = 6
    """Its task sends an answer."""
    TALKING = 7
    """It is a WebSocket."""
    LEAVING = 8
    """Its last answer is decided: no further request is read."""
    CLOSED = 9


class Input(Enum):
    """The unread input of a connection, according to epoll and earlier reads."""

    NOTHING = "nothing"
    SOME = "some"
    THE_LAST = "the last"
    """Maybe data, and then the end."""
    ENDED = "ended"
    """The end of input has been read."""


class Owner(Protocol):
    """The protocol that reads requests from a connection."""

    def data_arrived(self) -> bool:
        """Handle data that arrived while the connection rests or gathers. Return True if the task must handle it."""

    @property
    def is_reading(self) -> bool:
        """True if a request whose body was read is being answered, and the answer depends on the client's presence."""

    def gathered(self) -> None:
        """Stop waiting for the rest of a body without the task."""

    def sending_ended(self) -> None:
        """The client has half-closed or closed the connection."""


class Connection:
    """One accepted, non-blocking socket, registered with the reactor."""

    __slots__ = (
        "_owner",
        "_reactor",
        "_sock",
        "_task",
        "_unsent",
        "input",
        "minimum_rate",
        "peer",
        "pending",
        "room",
        "scope",
        "state",
        "wanted_bytes",
        "was_resting",
    )

    def __init__(
        self,
        sock: socket.socket | TlsSocket,
        owner: Owner,
        reactor: Reactor,
        budget: BodyBudget,
        settings: HttpConfig,
        peer: Peer,
    ) -> None:
        self._sock = sock
        self.minimum_rate = MinimumRate(settings)
        #: The memory reservation of its answers until they are sent.
        self.room = budget.answers.room()
        self._reactor = reactor
        #: None after ``leave``, to break the reference cycle.
        self._owner: Owner | None = owner
        #: The task that sleeps in ``_sleep``.
        self._task: trio.lowlevel.Task | None = None
        self._unsent = memoryview(b"")
        #: A TLS connection begins with SOME: data that was read with the end of the handshake triggers no edge.
        self.input = Input.SOME if isinstance(sock, TlsSocket) else Input.NOTHING
        self.state = State.AWAKE
        #: True if its scope was cancelled while it rested: all its answers have been written to the socket.
        self.was_resting = False
        #: Encloses all work for the connection; cancelling it ends the connection.
        self.scope = trio.CancelScope()
        self.peer = peer
        #: Received bytes that are not part of a request yet.
        self.pending = b""
        #: Size of the next read while the connection rests or gathers.
        self.wanted_bytes = RECEIVE_BYTES
        reactor.add(sock, self)

    def __repr__(self) -> str:
        return f"<Connection of {self.peer.address or 'unknown'}: {self.state.name.lower()}, input {self.input.value}>"

    @property
    def has_input(self) -> bool:
        """True if there may be something to read."""
        return self.input is Input.SOME or self.input is Input.THE_LAST

    @property
    def has_unsent(self) -> bool:
        """True if ``send_rest`` has something to send."""
        return bool(self._unsent)

    @property
    def ended(self) -> bool:
        """True if the client sends no more, and everything it sent has been read."""
        return self.input is Input.ENDED

    def addresses(self) -> tuple[tuple[str, int] | None, tuple[str, int | None] | None]:
        """The addresses of both ends, as ASGI writes them; None for a client that has reset the connection."""
        sock = self._sock.socket if isinstance(self._sock, TlsSocket) else self._sock
        if sock.family == socket.AF_UNIX:
            return None, (sock.getsockname(), None)
        try:
            client = sock.getpeername()[:2]
        except OSError:
            client = None
        return client, sock.getsockname()[:2]

    def leave(self) -> None:
        """Detach the socket from the reactor and the owner. Idempotent."""
        self.state = State.CLOSED
        self._reactor.remove(self._sock, self)
        self._owner = None

    # --- in the reactor's task --------------------------------------------------------------------

    def readable(self, events: int = 0) -> None:
        """Handle arrived data, or the end of input."""
        if self.input is not Input.ENDED:
            if events & _ENDS:
                self.input = Input.THE_LAST
            elif self.input is Input.NOTHING:
                self.input = Input.SOME
        owner = self._owner
        if owner is None:
            return
        if self.state >= State.ANSWERING:
            if owner.is_reading:
                self.read_ahead()
            elif self.state is not State.ANSWERING:
                self.wake()
            return
        while self._read():
            if owner.data_arrived():
                self.wake()
                return
            if not (self.state is State.GATHERING and self.has_input):
                return

    def read_ahead(self) -> None:
        """Buffer what the client sends while it waits for an answer; notify the owner at the end of input.

        A half-closed client is indistinguishable from a dead one until we write to it.
        """
        while self._owner is not None and self.has_input and len(self.pending) < MAX_PIPELINED_BYTES:
            self._read()
        if self.ended and self._owner is not None:
            self._owner.sending_ended()

    def give_up(self) -> None:
        """End the connection: it was idle for ``keep_alive_s``, or has failed."""
        self.scope.cancel()

    def _read(self) -> bool:
        """Read without waiting. Return True if there is something to handle."""
        if len(self.pending) >= MAX_PIPELINED_BYTES and self.state is not State.GATHERING:
            return True  # enough is buffered; the rest is read once the buffered requests are answered
        try:
            data = self._sock.recv(self.wanted_bytes)
        except BlockingIOError:
            self.input = Input.NOTHING
            return bool(self.pending)
        except OSError:
            data = b""
            if self.state > State.ANSWERING:
                self.scope.cancel()  # the task does not read, and would not notice
        if not data:
            self.input = Input.ENDED
            return True
        self._have_read(len(data), self.wanted_bytes)
        self.pending = self.pending + data if self.pending else data
        return True

    def _have_read(self, size: int, wanted_bytes: int) -> None:
        """Note the size of a read: after a short one, the socket is empty.

        The end of input, if it follows, came with the same edge or triggers another one.
        """
        if self.input is not Input.THE_LAST:
            sock = self._sock
            is_more = size == wanted_bytes or (type(sock) is TlsSocket and sock.ended)
            self.input = Input.SOME if is_more else Input.NOTHING

    def wake(self) -> None:
        """Wake the task if it sleeps."""
        if self.state is State.GATHERING and self._owner is not None:
            self._owner.gathered()
        if self.state <= State.ANSWERING:
            self.state = State.AWAKE
        self._reactor.resting.drop(self)
        task, self._task = self._task, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    def send_now(self, data: bytes) -> bool:
        """Send ``data`` without waiting. Return False if some is left: ``send_rest`` then sends it, or raises."""
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            sent = 0  # the task gets the same error
        if sent < len(data):
            self._unsent = memoryview(data)[sent:]
            self.minimum_rate.restart()
            return False
        return True

    # --- in the connection's task -----------------------------------------------------------------

    async def rest(self) -> None:
        """Sleep until the task is needed."""
        self.state = State.RESTING
        if self.has_input or self.pending:
            self._reactor.again(self)  # the reactor's task starts a request that has arrived, and then runs the actors
        await self.sleep()

    async def send_rest(self) -> None:
        """Send what ``send_now`` left over. Raises OSError."""
        rest, self._unsent = self._unsent, memoryview(b"")
        if rest:
            await self._send_rest(rest)
            self.scope.deadline = inf

    async def sleep(self) -> None:
        """Sleep until ``wake``, or until input arrives that the task must handle."""
        self._task = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._task = None
            self.was_resting = self.state is State.RESTING
            if self.state < State.ANSWERING:
                self.state = State.LEAVING
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    async def receive(self, max_bytes: int = RECEIVE_BYTES) -> bytes:
        """Return at least one byte.

        Raises:
          PeerLeft: the client sends no more.
          OSError: the connection is broken.
        """
        while True:
            if self.ended:
                raise PeerLeft
            if not self.has_input:
                await self.sleep()
            try:
                data = self._sock.recv(max_bytes)
            except BlockingIOError:
                self.input = Input.NOTHING
                continue
            if not data:
                self.input = Input.ENDED
                raise PeerLeft
            self._have_read(len(data), max_bytes)
            return data

    async def send_all(self, data: bytes, body: bytes = b"") -> None:
        """Send ``data``, then ``body``, at once if the socket accepts them; each wait for the reader may time out.

        Raises:
          OSError: the connection is broken.
        """
        if len(body) <= COPIED_BYTES:
            data, body = data + body, b""
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
        minimum_rate = self.minimum_rate
        while rest:
            begun_s = trio.current_time()
            self.scope.deadline = begun_s + minimum_rate.left_s()
            self.room.blocks(self.scope.cancel)
            try:
                await wait_writable(self._sock)
            finally:
                self.room.moves()
            try:
                sent_bytes = self._sock.send(rest)
            except BlockingIOError:
                sent_bytes = 0
            rest = rest[sent_bytes:]
            minimum_rate.waited(trio.current_time() - begun_s, sent_bytes)

    async def linger(self, linger_s: float) -> None:
        """Send the end of output, then discard input until the client leaves or time is up.

        Raises:
          PeerLeft: the client has closed the connection.
        """
        self._sock.shutdown(socket.SHUT_WR)
        with trio.move_on_after(linger_s):
            while True:
                await self.receive()

    def end_on_close(self, send_timeout_s: float) -> None:
        """Let the kernel deliver its buffered data after the close, for ``send_timeout_s`` at most."""
        with suppress(OSError):  # such as ENOTCONN, or a Unix socket, which has no such option
            self._sock.shutdown(socket.SHUT_WR)
            sent_by_ms = struct.pack("I", max(1, int(min(send_timeout_s, MAX_USER_TIMEOUT_S) * 1000)))
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, sent_by_ms)

    def reset_on_close(self) -> None:
        """Make close send a reset and free the kernel's send buffer, for a reader that has stalled."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
