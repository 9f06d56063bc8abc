"""The asynchronous client's platform: time, locks, tasks, connections. ``plainsong/_sync/_backend.py`` is its twin.

Both are written by hand and define the same names; the script generates everything above them. Runs on asyncio and trio.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections import deque
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakSet

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread

from plainsong.errors import NotSent, not_sent_by_all
from plainsong.transport.async_http import first_connected, runs_in_trio

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence

    from anyio.abc import ByteStream

    from plainsong.messages import Message

T = TypeVar("T")

log = logging.getLogger("plainsong.client")

#: The hint of Closed for use outside an ``async with`` block.
BLOCK_HINT = "use it inside its async with block"

now = anyio.current_time
sleep = anyio.sleep
#: Positions that may wait for the daemon at the same time. Their threads are not those of anyio's default limiter: readers
#: that follow an absent daemon must not hold up the program's other work in threads.
MAX_BLOCKING = 1_000
_blocking: anyio.lowlevel.RunVar[anyio.CapacityLimiter] = anyio.lowlevel.RunVar("plainsong_blocking")


async def run_blocking(work: Callable[..., T], *arguments: Any) -> T:
    """Calls a blocking function, in a worker thread."""
    limiter = _blocking.get(None)
    if limiter is None:
        limiter = anyio.CapacityLimiter(MAX_BLOCKING)
        _blocking.set(limiter)
    return await anyio.to_thread.run_sync(work, *arguments, limiter=limiter)


run_from_worker = anyio.from_thread.run
"""Runs a coroutine function on the event loop, for a function that ``run_blocking`` called."""
let_others_run = anyio.lowlevel.checkpoint
Lock = threading.Lock  # never blocks: no task holds it over an await, and Condition releases it before waiting


def held_here(lock: threading.Lock) -> Callable[[], bool]:
    """A function that returns True if its caller runs inside a ``with`` of the lock, as finalizers can."""
    return lock.locked


class Condition:
    """Like ``threading.Condition``, for tasks that share a lock."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._waiters: deque[anyio.Event] = deque()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """True if it was notified in time. The caller holds the lock, which is released while waiting."""
        event = anyio.Event()
        self._waiters.append(event)
        self._lock.release()
        try:
            with anyio.move_on_after(timeout_s):
                await event.wait()
        finally:
            self._lock.acquire()
            if not event.is_set():
                self._waiters.remove(event)
        return event.is_set()

    async def wait_for(self, predicate: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """True if the predicate became true in time. The caller holds the lock, which is released while waiting."""
        with anyio.move_on_after(timeout_s):
            while not predicate():
                await self.wait()
        return predicate()

    def notify(self) -> None:
        """Wakes the longest waiting task. The caller holds the lock."""
        if self._waiters:
            self._waiters.popleft().set()

    def notify_all(self) -> None:
        """Wakes all tasks. The caller holds the lock."""
        while self._waiters:
            self._waiters.popleft().set()


class TaskLock:
    """A reentrant lock that a task may hold over awaits."""

    def __init__(self) -> None:
        self._lock = anyio.Lock()
        self._holder: int | None = None
        self._times = 0

    async def __aenter__(self) -> None:
        task = anyio.get_current_task().id
        if self._holder != task:
            await self._lock.acquire()
            self._holder = task
        self._times += 1

    async def __aexit__(self, *_: object) -> None:
        self._times -= 1
        if not self._times:
            self._holder = None
            self._lock.release()


class SendLock:
    """Serializes the sends of one connection. A caller waits for it within a limit, or not at all."""

    def __init__(self) -> None:
        self._lock = anyio.Lock()

    async def acquire(self, timeout_s: float | None = None) -> bool:
        """True if it was acquired within ``timeout_s``; None: no limit."""
        with anyio.move_on_after(timeout_s):
            await self._lock.acquire()
            return True
        return False

    def acquire_nowait(self) -> bool:
        """True if it was free, and is now acquired."""
        try:
            self._lock.acquire_nowait()
        except anyio.WouldBlock:
            return False
        return True

    def release(self) -> None:
        """Lets the next caller send."""
        self._lock.release()


@contextmanager
def shielded(seconds: float | None = None) -> Iterator[anyio.CancelScope]:
    """Shields a block from cancellation for up to ``seconds``."""
    with anyio.move_on_after(seconds, shield=True) as scope:
        yield scope


async def call_participant(method: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a participant's method, and awaits the result if it is awaitable."""
    result = method(*arguments)
    return await result if isawaitable(result) else result


#: True if a stream gives up its open requests when an exception leaves its block.
ERRORS_END_STREAMS = True


def gives_up_after(kind: type[BaseException]) -> bool:
    """True if a block left by this exception must send nothing more, because its task is cancelled."""
    return not issubclass(kind, Exception)


# --- tasks ---------------------------------------------------------------------------------------


def _start_task(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    """Starts a task of the event loop itself. It and the task that starts it end independently of each other."""
    if runs_in_trio():
        sys.modules["trio"].lowlevel.spawn_system_task(work, name=name, context=copy_context())
        return
    task = asyncio.get_running_loop().create_task(work(), name=name)
    _tasks.add(task)  # the event loop itself has weak references only
    task.add_done_callback(_tasks.discard)


_tasks: set[asyncio.Task[None]] = set()


class Workers:
    """The tasks of a publisher, a producer or a stream.

    They belong to no task of the program: one task may enter the block, and another may leave it. Fixtures and exit
    stacks do that.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_open = False
        self._scopes: set[anyio.CancelScope] = set()
        self._all_ended: anyio.Event | None = None

    async def open(self) -> None:
        """Allows ``start``."""
        self._is_open = True

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Starts a task. Returns False if it is not open."""
        if not self._is_open:
            return False
        scope = anyio.CancelScope()
        self._scopes.add(scope)
        _start_task(partial(self._run, work, scope), self._name)
        return True

    async def _run(self, work: Callable[[], Coroutine[Any, Any, None]], scope: anyio.CancelScope) -> None:
        try:
            with scope:
                await work()
        except Exception:  # raised here, it would end trio
            log.exception("a task of a client failed")
        finally:
            self._scopes.discard(scope)
            if self._all_ended is not None and not self._scopes:
                self._all_ended.set()

    async def join(self, timeout_s: float | None = None) -> None:
        """Nothing to do: ``aclose`` ends the tasks."""

    async def aclose(self, abandon: Callable[[], int]) -> int:
        """Abandons waiting messages and ends the tasks. Returns how many messages were under way."""
        under_way = abandon()
        self._is_open = False
        for scope in self._scopes:
            scope.cancel()
        if self._scopes:
            self._all_ended = anyio.Event()
            with shielded():
                await self._all_ended.wait()
        return under_way


class Opened(Protocol):
    """A publisher, a producer or a stream."""

    exit_timeout_s: float

    @property
    def _is_open(self) -> bool:
        """True if its block was entered and accepts messages."""
        ...

    async def aclose(self, timeout_s: float | None = None) -> None:
        """Flushes within ``timeout_s``, then closes."""
        ...


E = TypeVar("E", bound=Opened)


class Owned:
    """Publishers, producers and streams of a client: opened by their blocks, and closed with the client at the latest."""

    def __init__(self) -> None:
        self._each: WeakSet[Opened] = WeakSet()

    def add(self, each: E) -> E:
        """Registers it."""
        self._each.add(each)
        return each

    async def aclose(self) -> None:
        """Closes each that is open within its ``exit_timeout_s``. Raises one NotSent for all, after all are closed."""
        left: list[NotSent] = []
        for each in [each for each in self._each if each._is_open]:
            try:
                await each.aclose(each.exit_timeout_s)
            except NotSent as not_sent:
                left.append(not_sent)
        if left:
            raise not_sent_by_all(left)


class ReaderStop:
    """Ends the waits of one reader. ``set`` is called by any task of its event loop."""

    def __init__(self) -> None:
        self.is_set = False
        self._scopes: set[anyio.CancelScope] = set()

    def set(self) -> None:
        """Ends the present wait, and every later one at once. Idempotent."""
        self.is_set = True
        for scope in list(self._scopes):
            scope.cancel()

    async def during(self, work: Callable[..., Awaitable[T]], *arguments: Any) -> T | None:
        """Calls ``work``, which ``set`` cancels; then returns None."""
        if self.is_set:
            return None
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                return await work(*arguments)
            finally:
                self._scopes.discard(scope)
        return None

    async def sleep(self, seconds: float) -> None:
        """Sleeps until ``set`` at the latest."""
        await self.during(sleep, seconds)

    def watch(self, connection: object) -> None:
        """Nothing to do: ``during`` cancels requests."""


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
        """Marks the message at hand as finished. Returns True if it is time to save."""
        ...

    async def next_page(self) -> Sequence[Message[Any]] | None:
        """The next messages; None at the end."""
        ...

    async def save(self, *, patiently: bool = False) -> None:
        """Saves the position of the finished messages."""
        ...


class Messages:
    """The messages of a reading, one by one.

    Not an asynchronous generator: one left early warns, and cannot be closed by garbage collection.
    """

    def __init__(self, reading: Pages) -> None:
        self._reading = reading
        self._page: Iterator[Message[Any]] = iter(())

    def __aiter__(self) -> Messages:
        return self

    async def __anext__(self) -> Message[Any]:
        reading = self._reading
        if reading.keeps_position and reading.done_with_message_at_hand(now()):
            await reading.save(patiently=True)
        while True:
            if reading.is_inside and reading.is_time_up():
                raise StopAsyncIteration
            for message in self._page:
                if reading.keeps_position:
                    reading.at_hand = message
                return message
            page = None if reading.closed else await reading.next_page()
            if page is None:
                await reading.save()
                raise StopAsyncIteration
            self._page = iter(page)

    async def aclose(self) -> None:
        """Ends the loop; the message at hand stays unfinished."""
        self._reading.at_hand = None
        self._page = iter(())


def is_running(messages: Messages) -> bool:
    """True if a task is waiting within the loop; if False, it can still be closed."""
    return False


# --- connections ---------------------------------------------------------------------------------

RECEIVE_BYTES = 1 << 16
#: Errors of a connection that breaks or cannot be opened.
BROKEN_STREAM = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError)


class Connection:
    """A connection for a stream; ``connect`` makes it."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream

    async def send(self, data: bytes, timeout_s: float) -> None:
        """Raises BROKEN_STREAM, which includes TimeoutError: the connection cannot be used afterwards."""
        with anyio.fail_after(timeout_s):
            await self._stream.send(data)

    async def receive(self, timeout_s: float) -> bytes:
        """The next bytes; empty after ``timeout_s``. Raises BROKEN_STREAM, also at the end of the connection."""
        with anyio.move_on_after(timeout_s):
            return await self._stream.receive(RECEIVE_BYTES)
        return b""

    def forget(self) -> None:
        """For forked children of the synchronous client."""

    async def aclose(self) -> None:
        """Closes at once, also in a cancelled task. Idempotent."""
        with anyio.CancelScope(shield=True):
            await anyio.aclose_forcefully(self._stream)


async def connect(
    host: str, port: int, *, tls: ssl.SSLContext | None, timeout_s: float, stop: ReaderStop | None = None
) -> Connection:
    """A new connection; of a Unix socket ``host`` is its path and ``port`` 0. Raises TimeoutError, BROKEN_STREAM.

    Args:
      stop: for threads; here ``during`` interrupts connecting.
    """
    if not port:
        with anyio.fail_after(timeout_s):
            return Connection(await anyio.connect_unix(host))

    async def connect_to(address: str, _: float) -> ByteStream:
        if tls is None:
            return await anyio.connect_tcp(address, port)
        return await anyio.connect_tcp(address, port, ssl_context=tls, tls_hostname=host, tls_standard_compatible=False)

    return Connection(await first_connected(host, port, timeout_s, connect_to))
