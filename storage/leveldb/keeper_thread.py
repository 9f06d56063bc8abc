"""The keeper's thread: handles messages in order, and long work between them.

Three kinds of callers send messages: the commit, the event loop and readers. None of them waits. Long work is a
generator that pauses: between two of its steps the thread handles the messages that have arrived. A step may hand an
operation to the commit, the only writer of the set of volumes. Three rules keep the threads from waiting for each other
in a cycle, and keep an operation from being applied to a state that it was not made for:

    the thread never blocks to wait for the commit: until the answer arrives it still handles urgent messages, those
    that the commit may wait for; all others stay in the backlog
    at most one operation is with the commit
    after the first failure nothing is begun; the store is reopened
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Generator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from storage.base import NothingWritten, StoreError, Unreadable
from storage.leveldb import threads
from storage.leveldb.engine.errors import without_folders
from storage.leveldb.operations import PendingWrite

if TYPE_CHECKING:
    from collections.abc import Callable

    from storage.leveldb.operations import SetChange

log = logging.getLogger(__name__)
T = TypeVar("T")

#: A pause as a multiple of the piece of work before it: rewriting takes a third of a core and of the disk at most.
PAUSE_FACTOR = 2.0
#: Long work. It yields a pause in seconds; an operation for the commit to apply; or None, to continue once every
#: message that has arrived by then is handled.
Work = Generator["float | SetChange | None", None, T]


class Stopped(StoreError):
    """The store is being closed or reopened; nothing failed."""


class NotChanged(Unreadable):
    """Rows of a sealed volume cannot be read, so they were not changed; nothing else failed."""


class Running:
    """Long work in progress."""

    def __init__(self, work: Work[object], done: Callable[[object], object]) -> None:
        self.work = work
        self.done = done
        self.resume_at_s = 0.0


class KeeperThread:
    """Runs the thread: takes messages and advances long work, both of which ``keeper`` and ``tidying`` define."""

    def __init__(self, hand_in: Callable[[PendingWrite], object]) -> None:
        """Start the thread; ``close`` ends it. ``hand_in``: see ``Keeper``."""
        self._hand_in = hand_in
        #: Set by the event loop before the store is closed: long work ends at its next step.
        self.leaving = False
        #: The first failure; the store must be reopened. Written once, by the thread.
        self.failed: StoreError | None = None
        #: Messages to handle; True if a message may be handled while an operation is with the commit.
        self._inbox: threads.Queue[tuple[Callable[[], object], bool]] = threads.Queue()

        # Owned by the thread.
        #: Messages that arrived while an operation was with the commit.
        self._backlog: deque[Callable[[], object]] = deque()
        self._running: list[Running] = []
        #: The work whose operation is with the commit.
        self._awaiting: Running | None = None
        #: True if a message was handled since long work last advanced.
        self._served = False
        self._stopping = False
        self._thread = threads.spawn("store keeper", self._run)

    # --- for any thread: never waits, except ``close`` -------------------------------------------------

    def put(self, message: Callable[[], object], *, urgent: bool = False) -> None:
        """Have the thread call ``message``; if it is urgent, even while an operation is with the commit."""
        self._inbox.put((message, urgent))

    def start(self, work: Callable[[], Work[T]], done: Callable[[T | StoreError], object]) -> None:
        """Run long work. ``done`` is called in the keeper's thread with its result or its error."""
        self.put(lambda: self.begin(Running(work(), done)))  # type: ignore[arg-type]  # T of one call

    def leave(self) -> None:
        """End long work at its next step, because the store is about to be closed. For the event loop."""
        self.leaving = True
        self.put(lambda: None)

    def close(self) -> None:
        """Handle the messages that have arrived, end long work at its next step, and end the thread. Idempotent."""
        self.leaving = True
        self.put(self._stop)
        self._thread.join()

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while (message := self._next()) is not None:
            try:
                message()
            except BaseException as raised:  # noqa: BLE001  # the thread continues; the store will be reopened
                self.failure(raised)

    def _stop(self) -> None:
        self._stopping = True

    def _next(self) -> Callable[[], object] | None:
        """Return the next message or step of long work; None once the keeper was closed and everything is done."""
        while True:
            if self._awaiting is not None:
                message, is_urgent = self._inbox.get()
                if is_urgent:
                    return message
                self._backlog.append(message)
                continue
            first = min(self._running, key=lambda each: each.resume_at_s, default=None)
            wait_s = None
            if first is not None and (self.leaving or first.resume_at_s < float("inf")):
                wait_s = 0.0 if self.leaving else max(0.0, first.resume_at_s - time.monotonic())
                if not wait_s and self._served:
                    # Alternate, so that a stream of messages does not starve long work.
                    self._served = False
                    return partial(self._advance, first)
            self._served = True
            if self._backlog:
                return self._backlog.popleft()
            if self._stopping and not self._running:
                if self._inbox.empty():
                    return None
                wait_s = 0.0
            with suppress(threads.Empty):
                return self._inbox.get(timeout=wait_s)[0]

    def begin(self, running: Running) -> None:
        if self.failed is not None:
            running.done(copy_of(self.failed))
            return
        self._running.append(running)
        self._advance(running)

    def _advance(self, running: Running, error: StoreError | None = None, *, resumed: bool = False) -> None:
        """Run long work up to its next pause, hand-over or end.

        Args:
          error: set if the commit did not apply the work's operation.
          resumed: True if the commit has applied the operation. The work must record that, even while leaving.
        """

        if running not in self._running:
            return  # the work ended while its message was queued

        def step() -> float | SetChange | None:
            if error is not None:
                return running.work.throw(error)
            if self.leaving and not resumed:
                return running.work.throw(Stopped("the store is being closed or reopened", hint="try again"))
            return next(running.work)

        try:
            found = step()
        except StopIteration as end:
            self._running.remove(running)
            running.done(end.value)
            return
        except BaseException as raised:  # noqa: BLE001  # the thread continues, and reports it
            self._running.remove(running)
            running.done(self.failure(raised))
            return
        if found is None:
            running.resume_at_s = float("inf")
            self.put(partial(self._advance, running))
            return
        if isinstance(found, float):
            running.resume_at_s = time.monotonic() + found
            return
        self._awaiting = running
        self._hand_in(PendingWrite([found], on_completed=self._applied))

    def _applied(self, work: PendingWrite) -> None:
        """Receive the outcome of an operation from the commit. Called on the event loop."""
        error = copy_of(work.error) if isinstance(work.error, StoreError) else None
        self._inbox.put((partial(self._resume, error), True))

    def _resume(self, error: StoreError | None) -> None:
        running, self._awaiting = self._awaiting, None
        assert running is not None  # the commit answers each operation once
        self._advance(running, error, resumed=True)

    def guarded(self, job: Callable[[], T]) -> T | StoreError:
        """Run a job. A failure means that the store must be reopened; later jobs are not run."""
        if self.failed is not None:
            return copy_of(self.failed)
        try:
            return job()
        except BaseException as raised:  # noqa: BLE001  # the thread continues, and reports it
            return self.failure(raised)

    def failure(self, raised: BaseException) -> StoreError:
        """Return the error to report. A real failure is recorded in ``failed``."""
        if isinstance(raised, (Stopped, NothingWritten, NotChanged)):
            return raised
        if not isinstance(raised, StoreError):
            log.error("the store's keeper failed", exc_info=raised)
            raised = StoreError(f"the store's upkeep: {without_folders(repr(raised))}")
        if self.failed is None:
            # A copy: the traceback of the raised object keeps its frames alive, and with them an open database.
            self.failed = copy_of(raised)
        return copy_of(raised)


class Pauses:
    """Computes the pause after each piece of work."""

    def __init__(self) -> None:
        self._begun_s = time.monotonic()
        self._paused_s = 0.0

    def next(self) -> float:
        """Return the pause after the piece that ends now: a multiple of its duration."""
        now_s = time.monotonic()
        took_s = max(0.0, now_s - self._begun_s - self._paused_s)
        self._begun_s, self._paused_s = now_s, took_s * PAUSE_FACTOR
        return self._paused_s


def copy_of(error: StoreError) -> StoreError:
    """Copy an error for one caller: raising one object in several threads mixes their tracebacks."""
    return type(error)(error.detail, hint=error.hint)
