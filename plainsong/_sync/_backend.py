"""What the client for threads stands on: time, locks, threads, connections. ``plainsong/_async/_backend.py`` is its twin.

Both are written by hand and have the same names; everything above them is written once. No event loop is imported here.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from contextlib import contextmanager, suppress
from inspect import iscoroutine
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakSet

import httpcore2

from plainsong._sync._hooks import watch
from plainsong.errors import Closed, NotSent
from plainsong.transport.http import BROKEN, KEEP_ALIVE_S, NOTHING_SENT, TIME_OVER, answer_of, failure_of, http_request

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Generator, Iterator, Sequence

    from plainsong.calls import Answer, Failure, Send
    from plainsong.messages import Message
    from plainsong.settings import Settings

T = TypeVar("T")

#: Nothing is missing: whatever a client opens can be used at once.
BLOCK_HINT = ""

now = monotonic
sleep = time.sleep
Lock = threading.Lock
Condition = threading.Condition
TaskLock = threading.RLock


def run_blocking(work: Callable[..., T], *arguments: Any) -> T:
    """Calls a function that may wait."""
    return work(*arguments)


run_from_worker = run_blocking


def let_others_run() -> None:
    """Threads do that by themselves."""


@contextmanager
def shielded(seconds: float | None = None) -> Iterator[None]:
    """Threads are not cancelled."""
    yield


def call_participant(method: Callable[..., Any], *arguments: Any) -> Any:
    """What a participant's method returns. Raises TypeError where it is asynchronous."""
    result = method(*arguments)
    if iscoroutine(result):
        result.close()
        raise TypeError("an asynchronous participant takes part in transactions of an AsyncClient only")
    return result


#: Whether a stream whose block an error leaves waits for no more answers.
ERRORS_END_STREAMS = False


def gives_up_after(kind: type[BaseException]) -> bool:
    """Whether a block that was left by this sends nothing more: never."""
    return False


# --- threads -------------------------------------------------------------------------------------


class Workers:
    """The threads of a publisher, a producer or a stream. They are daemons: an exit need not wait for them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: list[threading.Thread] = []

    def open(self) -> None:
        """Nothing to do: threads need no block."""

    def start(self, work: Callable[[], None]) -> None:
        """One more. With the lock."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=work, name=f"{self._name}-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the end of all, but the one that asks."""
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(timeout_s)

    def close(self, abandon: Callable[[], int]) -> int:
        """Nothing to do: threads leave by themselves."""
        return 0


class Opened(Protocol):
    """A publisher, a producer or a stream."""

    exit_timeout_s: float

    def _open(self) -> None: ...

    def _after_fork(self) -> None: ...

    def _at_exit(self) -> None: ...

    def close(self, timeout_s: float | None = None) -> None:
        """Flush, for so long at most."""
        ...


E = TypeVar("E", bound=Opened)


class Owned:
    """Publishers, producers and streams of a client: opened at once, and closed with the client at the latest."""

    def __init__(self) -> None:
        self._each: WeakSet[Opened] = WeakSet()

    def add(self, each: E) -> E:
        """One more. Raises what opening it raises."""
        each._open()
        self._each.add(each)
        watch(each)
        return each

    def close(self) -> None:
        """Close each with a limit of its ``exit_timeout_s``. Raises NotSent for all together, when all are closed."""
        left: list[NotSent] = []
        for each in list(self._each):
            try:
                each.close(each.exit_timeout_s)
            except NotSent as not_sent:
                left.append(not_sent)
        if left:
            raise NotSent(sum(each.unsent for each in left), sum(each.unknown for each in left))


# --- loops over messages -------------------------------------------------------------------------


class Pages(Protocol):
    """A reading, as a loop over its messages sees it."""

    closed: bool
    at_hand: Message | None
    keeps_position: bool
    is_inside: bool

    def is_time_up(self) -> bool:
        """Whether its transaction leaves no time to go on."""
        ...

    def done_with_message_at_hand(self, now_s: float) -> bool:
        """The loop asks for the next; whether it is time to save."""
        ...

    def next_page(self) -> Sequence[Message] | None:
        """None: the end."""
        ...

    def save(self, *, patiently: bool = False) -> None:
        """Keep what the loop is done with."""
        ...

    def save_or_log(self) -> None:
        """The loop was left: keep what it was done with before, and raise nothing."""
        ...


# The generators know nothing of the reader, so that a loop that is left frees, and thereby ends, its generator.


def Messages(reading: Pages) -> Generator[Message, None, None]:  # noqa: N802 - as its twin is called
    """The messages of a reading, one by one."""
    if reading.is_inside:
        return _all_inside(reading)
    return _all(reading) if reading.keeps_position else _all_without_position(reading)


def _all(reading: Pages) -> Generator[Message, None, None]:
    try:
        while (page := reading.next_page()) is not None:
            for message in page:
                reading.at_hand = message
                yield message
                if reading.done_with_message_at_hand(monotonic()):
                    reading.save(patiently=True)
        reading.save()
    except BaseException:
        if not reading.closed:
            reading.save_or_log()
        raise


def _all_without_position(reading: Pages) -> Generator[Message, None, None]:
    next_page = reading.next_page
    while (page := next_page()) is not None:
        yield from page


def _all_inside(reading: Pages) -> Generator[Message, None, None]:
    """Part of a transaction, which saves; no message is handed out for which there is no time left."""
    while (page := reading.next_page()) is not None:
        for message in page:
            if reading.is_time_up():
                return
            reading.at_hand = message
            yield message
            reading.done_with_message_at_hand(monotonic())


# --- connections ---------------------------------------------------------------------------------


class Pool:
    """Kept connections to all daemons of a client, shared by its threads.

    A forked child gets connections of its own; those of its parent are left alone, never closed from there.
    """

    def __init__(self, settings: Settings) -> None:
        self._token = settings.token
        self._max_connections = settings.max_connections
        self._pid = 0
        self._pool: httpcore2.ConnectionPool | None = None
        self._lock = Lock()
        self._closed = False
        #: Pools of the processes we were forked from: kept, so that nobody tidies them up from here.
        self._of_parents: list[httpcore2.ConnectionPool] = []

    def carry(self, send: Send) -> Answer | Failure:
        """One request and its answer. Raises Closed."""
        pool = self._pool if self._pid == os.getpid() else None
        if pool is None:
            pool = self._opened()
        over_s = monotonic() + send.timeout_s
        try:
            response = pool.handle_request(http_request(send, self._token, send.timeout_s))
            try:
                chunks = []
                for chunk in response.iter_stream():
                    chunks.append(chunk)
                    if monotonic() > over_s:
                        raise httpcore2.ReadTimeout("the answer came too slowly")
            finally:
                response.close()
        except (*NOTHING_SENT, *TIME_OVER, *BROKEN) as error:
            return failure_of(error, send.timeout_s)
        return answer_of(response, b"".join(chunks))

    def close(self) -> None:
        """Close all connections; what is under way on them fails. Idempotent."""
        self._closed = True
        pool, self._pool = self._pool, None
        if pool is not None and self._pid == os.getpid():
            pool.close()

    def _opened(self) -> httpcore2.ConnectionPool:
        pid = os.getpid()
        if self._pid not in (0, pid):
            self._lock = Lock()  # a thread of the parent may hold the old one
        with self._lock:
            if self._closed:
                raise Closed("the client is closed")
            if self._pid != pid or self._pool is None:
                if self._pool is not None:
                    self._of_parents.append(self._pool)
                self._pool = httpcore2.ConnectionPool(
                    max_connections=self._max_connections, keepalive_expiry=KEEP_ALIVE_S
                )
                self._pid = pid
            return self._pool


RECEIVE_BYTES = 1 << 16
#: What a broken connection raises, and one that does not come about.
BROKEN_STREAM = (EOFError, OSError)


class Connection:
    """A connection for a stream, on which one thread sends while another receives; ``connect`` makes it."""

    def __init__(self, raw: socket.socket, tls: Tls | None = None) -> None:
        self._raw = raw
        self._tls = tls

    def send(self, data: bytes) -> None:
        """Raises BROKEN_STREAM."""
        self._raw.sendall(data if self._tls is None else self._tls.encrypted(data))

    def receive(self, timeout_s: float) -> bytes:
        """What comes next; nothing when the time is over. Raises BROKEN_STREAM, also at its end."""
        if self._tls is not None and (plain := self._tls.decrypted(b"")):
            return plain
        if not self._has_come(timeout_s):
            return b""
        data = self._raw.recv(RECEIVE_BYTES)
        if not data:
            raise EOFError("the connection has ended")
        if self._tls is None:
            return data
        plain = self._tls.decrypted(data)
        return plain or self.receive(timeout_s)

    def _has_come(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._raw, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))

    def forget(self) -> None:
        """In a forked child: the connection is the parent's, and goes on there."""
        self._raw.close()

    def close(self) -> None:
        """At once: whoever sends or receives is told. Idempotent."""
        with suppress(OSError):
            self._raw.shutdown(socket.SHUT_RDWR)
        self._raw.close()


class Tls:
    """One side of a TLS connection, in memory: a TLS object must not be used by two threads at once."""

    def __init__(self, raw: socket.socket, host: str) -> None:
        import ssl  # here, since most programs talk to a daemon without it

        self._lock = Lock()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._want_read = ssl.SSLWantReadError
        context = ssl.create_default_context()
        self._object: ssl.SSLObject = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        while True:
            try:
                self._object.do_handshake()
            except ssl.SSLWantReadError:
                raw.sendall(self._outgoing.read())
                data = raw.recv(RECEIVE_BYTES)
                if not data:
                    raise EOFError("the connection has ended") from None
                self._incoming.write(data)
            else:
                raw.sendall(self._outgoing.read())
                return

    def encrypted(self, data: bytes) -> bytes:
        """What to send for ``data``."""
        with self._lock:
            self._object.write(data)
            return self._outgoing.read()

    def decrypted(self, data: bytes) -> bytes:
        """What can be read, now that ``data`` has come. Raises EOFError at the end, OSError for what is no TLS."""
        with self._lock:
            self._incoming.write(data)
            try:
                plain = self._object.read(RECEIVE_BYTES)
            except self._want_read:
                return b""
        if not plain:
            raise EOFError("the connection has ended")
        return plain


def connect(host: str, port: int, *, tls: bool, timeout_s: float) -> Connection:
    """A new connection. Raises TimeoutError, BROKEN_STREAM."""
    raw = socket.create_connection((host, port), timeout_s)
    try:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wrapped = Tls(raw, host) if tls else None
        raw.settimeout(None)
    except BaseException:
        raw.close()
        raise
    return Connection(raw, wrapped)
