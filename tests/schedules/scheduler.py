"""Runs the threads of a program one at a time, in an order that a seed chooses.

A controlled thread runs until it reaches a **point**: an operation on a lock, queue or thread of this module, a call
into LevelDB or the file system, or optionally any line of the modules under test. At a point the scheduler picks the
next thread. Waits are predicates, and time is virtual: it advances when all threads wait. So the same seed gives the
same schedule, and a deadlock is detected at once.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty
from random import Random
from types import FrameType
from typing import Any

from tests.patience import PATIENCE_S

#: Probability that choosing a thread advances the time to the next deadline.
_PASSING = 0.03
#: A schedule with more points than this is considered endless; most have one or two thousand.
MAX_POINTS = 100_000


class Deadlock(AssertionError):
    """Every thread waits for a condition that no thread will make true."""


class Stuck(BaseException):
    """A thread waits for something that the scheduler does not know; the schedule says nothing about the code."""


class Abandoned(BaseException):
    """The schedule has ended, and the thread unwinds."""


class _Controlled:
    """A thread, the condition that it waits for, and its deadline."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.go = threading.Semaphore(0)
        self.ready: Callable[[], bool] | None = None
        self.deadline_s: float | None = None
        self.ended = False


class Scheduler:
    """One schedule. ``run`` runs a function as its first thread."""

    def __init__(
        self, seed: int, *, switch: float = 1.0, lines: tuple[str, ...] = (), line_switch: float = 0.0
    ) -> None:
        """Choose by ``seed``.

        Args:
          switch: probability that another thread runs after a point.
          lines: endings of file names; the lines of these files are also points.
          line_switch: probability that another thread runs after such a line.
        """
        self.random = Random(seed)
        self.now_s = 1000.0
        self.points = 0
        self._switch, self._lines, self._line_switch = switch, lines, line_switch
        self._threads: list[_Controlled] = []
        self._current: _Controlled | None = None
        self._local = threading.local()
        self.error: BaseException | None = None
        #: True while no other thread may run.
        self.is_frozen = False
        self._is_over = False
        self._done = threading.Event()

    def run(self, main: Callable[[], None]) -> None:
        """Run ``main`` and all threads that it starts to completion. Raises the first exception in any of them."""
        with _no_collection():
            first = self.start("main", main)
            self._current = first
            first.go.release()
            is_stuck = not self._done.wait(PATIENCE_S)
            self._is_over = True
            for thread in self._threads:
                thread.go.release()
        if is_stuck:
            raise Stuck("a thread waits outside the scheduler") from self.error
        if self.error is not None:
            raise self.error

    def start(self, name: str, target: Callable[[], None]) -> _Controlled:
        """Start a thread; it runs when it is chosen."""
        controlled = _Controlled(name)
        self._threads.append(controlled)

        def body() -> None:
            controlled.go.acquire()
            self._local.thread = controlled
            if self._lines:
                sys.settrace(self._trace)
            try:
                if not self._is_over:
                    target()
            except Abandoned:
                pass
            except BaseException as error:  # noqa: BLE001  # ``run`` raises it
                self.error = self.error or error
                self._is_over = True
            finally:
                sys.settrace(None)
                controlled.ended = True
                self._leave()

        threading.Thread(target=body, name=name, daemon=True).start()
        return controlled

    @property
    def is_inside(self) -> bool:
        """True if the calling thread belongs to the schedule and may be switched now."""
        return getattr(self._local, "thread", None) is not None and not (self.is_frozen or self._is_over)

    def name_of_thread(self) -> str | None:
        """Return the calling thread's name; None if it does not belong to the schedule."""
        thread = getattr(self._local, "thread", None)
        return None if thread is None else thread.name

    def point(self) -> None:
        """Let another thread run if the seed says so."""
        self.points += 1
        if self.points > MAX_POINTS:
            raise Deadlock(f"no end after {MAX_POINTS} points")
        if self.random.random() < self._switch:
            self._yield()

    def wait_until(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait for a condition that another thread makes true; return False on a time-out."""
        me = getattr(self._local, "thread", None)
        if me is None:
            assert ready(), "a thread outside the schedule would wait"
            return True
        me.ready = ready
        me.deadline_s = None if timeout_s is None else self.now_s + timeout_s
        self._yield()
        me.ready = me.deadline_s = None
        return ready()

    # --- choosing -------------------------------------------------------------------------------

    def _yield(self) -> None:
        me = self._local.thread
        if self._is_over:
            raise Abandoned
        following = self._choose()
        if following is not me:
            self._current = following
            following.go.release()
            me.go.acquire()
        if self._is_over:
            raise Abandoned

    def _leave(self) -> None:
        """After a thread's end, run another one, or end the schedule."""
        if self._is_over or all(thread.ended for thread in self._threads):
            self._done.set()
            return
        try:
            following = self._choose()
        except Deadlock as error:
            self.error = self.error or error
            self._done.set()
            return
        self._current = following
        following.go.release()

    def _choose(self) -> _Controlled:
        waiting = [thread for thread in self._threads if not thread.ended]
        runnable = [each for each in waiting if each.ready is None or each.ready() or self._is_late(each)]
        sleeping = [each for each in waiting if each.deadline_s is not None and each not in runnable]
        if sleeping and self.random.random() < _PASSING:
            # Time passes: the thread with the earliest deadline runs.
            first = min(sleeping, key=lambda each: each.deadline_s or 0.0)
            self.now_s = max(self.now_s, first.deadline_s or 0.0)
            return first
        if not runnable:
            deadlines = [each.deadline_s for each in waiting if each.deadline_s is not None]
            if not deadlines:
                names = ", ".join(each.name for each in waiting)
                self._is_over = True
                self.error = self.error or Deadlock(f"all wait: {names}")
                raise Deadlock(f"all wait: {names}")
            self.now_s = min(deadlines)
            runnable = [each for each in waiting if self._is_late(each)]
        return self.random.choice(runnable)

    def _is_late(self, thread: _Controlled) -> bool:
        return thread.deadline_s is not None and thread.deadline_s <= self.now_s

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "call":
            return self._trace if frame.f_code.co_filename.endswith(self._lines) else None
        if event == "line" and not self.is_frozen and self.random.random() < self._line_switch:
            self._yield()
        return self._trace


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage within the block.

    The collector may run anywhere, even while this module wakes a thread. Finalizers of earlier schedules' garbage
    release locks, which are points: a switch there let two threads run at once, until no thread ran any more.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# --- replacements of threading and queue for the code under test -------------------------------------------

_current: Scheduler | None = None


def scheduler() -> Scheduler:
    """Return the running schedule."""
    assert _current is not None, "outside a schedule"
    return _current


def point() -> None:
    """Reach a point of the running schedule. Does nothing after the schedule, when abandoned generators are closed."""
    if _current is not None and _current.is_inside:
        _current.point()


def name_of_thread() -> str | None:
    """Return the calling thread's name in its schedule; None outside a schedule."""
    return _current.name_of_thread() if _current is not None else None


@contextmanager
def running(chosen: Scheduler) -> Iterator[Scheduler]:
    """Use ``chosen`` as the schedule of this module's locks, queues and threads."""
    global _current  # noqa: PLW0603  # one schedule at a time
    before, _current = _current, chosen
    try:
        yield chosen
    finally:
        _current = before


class Lock:
    """Replaces ``threading.Lock``."""

    def __init__(self) -> None:
        self._held = False

    def acquire(self, blocking: bool = True) -> bool:  # the name in threading
        point()
        if self._held and not blocking:
            return False
        while self._held and _current is not None:
            _current.wait_until(lambda: not self._held)
        self._held = True
        return True

    def release(self) -> None:
        self._held = False
        point()

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self._held = False
        point()


class Condition:
    """Replaces ``threading.Condition``."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._notified = 0

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(*error)

    def wait(self) -> None:
        seen = self._notified
        self._lock._held = False
        scheduler().wait_until(lambda: self._notified > seen)
        self._lock.acquire()

    def notify_all(self) -> None:
        self._notified += 1


class Queue:
    """Replaces ``queue.SimpleQueue``."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        point()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:  # the names in queue
        point()
        if not self._items and block:
            scheduler().wait_until(lambda: bool(self._items), timeout)
        if not self._items:
            raise Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items


class Event:
    """Replaces ``threading.Event``."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True
        point()

    def is_set(self) -> bool:
        return self._is_set

    def wait(self) -> None:
        scheduler().wait_until(lambda: self._is_set)


class Thread:
    """Replaces ``threading.Thread``."""

    def __init__(self, *, target: Callable[[], None], name: str = "", daemon: bool = True) -> None:
        del daemon
        self._target, self._name = target, name
        self._controlled: _Controlled | None = None

    def start(self) -> None:
        self._controlled = scheduler().start(self._name, self._target)
        point()

    def join(self) -> None:
        controlled = self._controlled
        assert controlled is not None
        scheduler().wait_until(lambda: controlled.ended)


def monotonic() -> float:
    """Replaces ``time.monotonic``; each call advances the time a little, so that no loop waits forever."""
    scheduler().now_s += 1e-6
    return scheduler().now_s


def nap(seconds: float) -> None:
    """Replaces ``storage.loop.nap``."""
    scheduler().wait_until(lambda: False, seconds)
