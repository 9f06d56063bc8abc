"""The synchronous client's platform: time, locks, threads, connections. ``plainsong/_async/_backend.py`` is its twin.

Both are written by hand and define the same names; the script generates everything above them. No event loop is imported here.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from _thread import allocate_lock
from contextlib import contextmanager, suppress
from inspect import GEN_RUNNING, getgeneratorstate, iscoroutine
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakSet

from plainsong._sync._hooks import watch
from plainsong.errors import NotSent, not_sent_by_all
from plainsong.transport.dialing import MIN_TIMEOUT_S, Dialing, dial
from plainsong.transport.http import connect_unix

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Generator, Iterator, Sequence

    from plainsong.messages import Message

T = TypeVar("T")

#: No hint: objects are open from the start.
BLOCK_HINT = ""

now = monotonic
sleep = time.sleep
#: Reentrant: a signal handler or a finalizer runs between two lines of the thread that it interrupts.
Lock = threading.RLock
Condition = threading.Condition
TaskLock = threading.RLock


def held_here(lock: threading.RLock) -> Callable[[], bool]:
    """A function that returns True if the calling thread holds the lock."""
    return lock._is_owned  # type: ignore[attr-defined,no-any-return] # threading.Condition uses it too


class SendLock:
    """Serializes the sends of one connection. A caller waits for it within a limit, or not at all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def acquire(self, timeout_s: float | None = None) -> bool:
        """True if it was acquired within ``timeout_s``; None: no limit."""
        return self._lock.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))

    def acquire_nowait(self) -> bool:
        """True if it was free."""
        return self._lock.acquire(blocking=False)

    def release(self) -> None:
        """Lets the next caller send."""
        self._lock.release()


def run_blocking(work: Callable[..., T], *arguments: Any) -> T:
    """Calls a blocking function."""
    return work(*arguments)


run_from_worker = run_blocking


def let_others_run() -> None:
    """Nothing to do: threads are preemptive."""


@contextmanager
def shielded(seconds: float | None = None) -> Iterator[None]:
    """Threads are not cancelled."""
    yield


def call_participant(method: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a participant's method. Raises TypeError if it is asynchronous."""
    result = method(*arguments)
    if iscoroutine(result):
        result.close()
        raise TypeError("an asynchronous participant takes part in transactions of an AsyncClient only")
    return result


#: True if a stream gives up its open requests when an exception leaves its block.
ERRORS_END_STREAMS = False


def gives_up_after(kind: type[BaseException]) -> bool:
    """True if a block left by this exception sends nothing more: never."""
    return False


# --- threads -------------------------------------------------------------------------------------


class _StartedAtOnce(threading.Event):
    """Lets ``Thread.start`` return before the thread runs.

    ``start`` is called with the lock of a sender. A finalizer can run in the new thread before anything else does, and
    wait for that lock.
    """

    def wait(self, timeout: float | None = None) -> bool:
        return True


class _Worker(threading.Thread):
    def __init__(self, work: Callable[[], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._started = _StartedAtOnce()
        self._work = work
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            self._work()
        finally:
            self.ended.set()


class Workers:
    """The threads of a publisher, a producer or a stream. They are daemon threads: an exit does not wait for them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: list[_Worker] = []

    def open(self) -> None:
        """Nothing to do: threads need no block."""

    def start(self, work: Callable[[], None]) -> bool:
        """Starts a thread. Returns False if the system refuses one. The caller holds the sender's lock."""
        self._threads = [thread for thread in self._threads if not thread.ended.is_set()]
        thread = _Worker(work, f"{self._name}-{len(self._threads)}")
        try:
            thread.start()
        except RuntimeError:  # the limit on threads; and from 3.12 on the end of the interpreter
            return False
        self._threads.append(thread)
        return True

    def join(self, timeout_s: float | None = None) -> None:
        """Waits for all threads except the current one."""
        for thread in list(self._threads):
            if thread is not threading.current_thread() and thread.ended.wait(timeout_s):
                thread.join(timeout_s)

    def close(self, abandon: Callable[[], int]) -> int:
        """Nothing to do: threads end by themselves."""
        return 0


class Opened(Protocol):
    """A publisher, a producer or a stream."""

    exit_timeout_s: float

    def _open(self) -> None: ...

    def _after_fork(self) -> None: ...

    def _at_exit(self) -> None: ...

    def close(self, timeout_s: float | None = None) -> None:
        """Flushes within ``timeout_s``, then closes."""
        ...


class Closable(Protocol):
    """A connection."""

    def close(self) -> None:
        """Ends the request on it."""
        ...


E = TypeVar("E", bound=Opened)


class Owned:
    """Publishers, producers and streams of a client: opened at once, and closed with the client at the latest."""

    def __init__(self) -> None:
        self._each: WeakSet[Opened] = WeakSet()

    def add(self, each: E) -> E:
        """Opens and registers it. Raises the errors of opening."""
        each._open()
        self._each.add(each)
        watch(each)
        return each

    def close(self) -> None:
        """Closes each within its ``exit_timeout_s``. Raises one NotSent for all, after all are closed."""
        left: list[NotSent] = []
        for each in list(self._each):
            try:
                each.close(each.exit_timeout_s)
            except NotSent as not_sent:
                left.append(not_sent)
        if left:
            raise not_sent_by_all(left)


class ReaderStop:
    """Ends the waits of one reader. ``set`` is called by any thread, and by signal handlers."""

    def __init__(self) -> None:
        self.is_set = False
        """True once ``set`` was called."""
        # Free once it is set. An Event has a lock inside, which a signal handler would wait for.
        self._ended = allocate_lock()
        self._ended.acquire()
        # Reentrant: a signal handler runs between two lines of the thread that it interrupts.
        self._lock = threading.RLock()
        self._connection: Closable | None = None

    def set(self) -> None:
        """Ends the present wait, and every later one at once. Idempotent."""
        self.is_set = True
        with suppress(RuntimeError):  # it is free
            self._ended.release()
        with self._lock:
            if self._connection is not None:
                self._connection.close()

    def during(self, work: Callable[..., T], *arguments: Any) -> T | None:
        """Calls ``work``, whose requests ``set`` ends."""
        return None if self.is_set else work(*arguments)

    def sleep(self, seconds: float) -> None:
        """Sleeps until ``set`` at the latest."""
        if self._ended.acquire(timeout=max(0.0, seconds)):
            self._ended.release()

    def watch(self, connection: Closable | None) -> None:
        """The connection that ``set`` closes; None: there is no request under way."""
        with self._lock:
            self._connection = connection
        if connection is not None and self.is_set:
            connection.close()


# --- loops over messages -------------------------------------------------------------------------


class Pages(Protocol):
    """A reading, for the loop over its messages."""

    closed: bool
    at_hand: Message[Any] | None
    keeps_position: bool
    is_inside: bool

    def is_time_up(self) -> bool:
        """True if its transaction has no time left for reading."""
        ...

    def done_with_message_at_hand(self, now_s: float) -> bool:
        """Marks the message at hand as finished; whether it is time to save."""
        ...

    def next_page(self) -> Sequence[Message[Any]] | None:
        """The next messages; None at the end."""
        ...

    def save(self, *, patiently: bool = False) -> None:
        """Saves the position of the finished messages."""
        ...

    def save_or_log(self) -> None:
        """Saves after the loop was left; logs errors instead of raising."""
        ...


# The generators hold no reference to the reader, so leaving a loop frees, and thereby closes, its generator.


def Messages(reading: Pages) -> Generator[Message[Any], None, None]:  # noqa: N802 - as its twin is called
    """The messages of a reading, one by one."""
    if reading.is_inside:
        return _all_inside(reading)
    return _all(reading) if reading.keeps_position else _all_without_position(reading)


def _all(reading: Pages) -> Generator[Message[Any], None, None]:
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


def _all_without_position(reading: Pages) -> Generator[Message[Any], None, None]:
    next_page = reading.next_page
    while (page := next_page()) is not None:
        yield from page


def _all_inside(reading: Pages) -> Generator[Message[Any], None, None]:
    """Yields inside a transaction, which saves the position; stops when its time for reading is over."""
    while (page := reading.next_page()) is not None:
        for message in page:
            if reading.is_time_up():
                return
            reading.at_hand = message
            yield message
            reading.done_with_message_at_hand(monotonic())


def is_running(messages: Generator[Message[Any], None, None]) -> bool:
    """True if a thread is within the generator, so that it cannot be closed."""
    return getgeneratorstate(messages) == GEN_RUNNING


# --- connections ---------------------------------------------------------------------------------


RECEIVE_BYTES = 1 << 16
#: Errors of a connection that breaks or cannot be opened.
BROKEN_STREAM = (EOFError, OSError)


class Connection:
    """A connection for a stream, on which one thread sends while another receives; ``connect`` makes it."""

    def __init__(self, raw: socket.socket, tls: Tls | None = None) -> None:
        self._raw = raw
        self._tls = tls

    def send(self, data: bytes, timeout_s: float) -> None:
        """Raises BROKEN_STREAM, which includes TimeoutError: the connection cannot be used after it."""
        # The receiving thread is not affected: it polls before it reads.
        self._raw.settimeout(max(timeout_s, MIN_TIMEOUT_S))
        self._raw.sendall(data if self._tls is None else self._tls.encrypted(data))

    def receive(self, timeout_s: float) -> bytes:
        """The next bytes; empty after ``timeout_s``. Raises BROKEN_STREAM, also at the end of the connection."""
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
        """For a forked child: closes its copy only; the parent's connection goes on."""
        self._raw.close()

    def close(self) -> None:
        """Closes at once: threads that send or receive get an error. Idempotent."""
        with suppress(OSError):
            self._raw.shutdown(socket.SHUT_RDWR)
        self._raw.close()


class Tls:
    """One side of a TLS connection, in memory: a TLS object must not be used by two threads at once."""

    def __init__(self, raw: socket.socket, host: str, context: ssl.SSLContext) -> None:
        import ssl  # imported here, since most programs connect without TLS

        self._lock = Lock()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._want_read = ssl.SSLWantReadError
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
        """Encrypts ``data``."""
        with self._lock:
            self._object.write(data)
            return self._outgoing.read()

    def decrypted(self, data: bytes) -> bytes:
        """Decrypts received ``data``, as far as complete. Raises EOFError at the end, OSError if it is not TLS."""
        with self._lock:
            self._incoming.write(data)
            try:
                plain = self._object.read(RECEIVE_BYTES)
            except self._want_read:
                return b""
        if not plain:
            raise EOFError("the connection has ended")
        return plain


def connect(
    host: str, port: int, *, tls: ssl.SSLContext | None, timeout_s: float, stop: ReaderStop | None = None
) -> Connection:
    """A new connection; of a Unix socket ``host`` is its path and ``port`` 0. Raises TimeoutError, BROKEN_STREAM.

    Args:
      stop: ends the opening too.
    """
    dialing = Dialing()
    if stop is not None:
        stop.watch(dialing)
    if not port:
        raw = connect_unix(host, timeout_s)
        raw.settimeout(None)
        return Connection(raw, None)
    raw = dial(host, port, timeout_s, dialing)
    try:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wrapped = Tls(raw, host, tls) if tls is not None else None
        raw.settimeout(None)
    except BaseException:
        raw.close()
        raise
    return Connection(raw, wrapped)
