"""The thread of a producer: one request at a time, in order, until each has come to its end."""

from __future__ import annotations

import logging
import threading
from time import monotonic
from typing import TYPE_CHECKING, Any

from plainsong.core.batches import bug_of
from plainsong.errors import MessageDropped, NotSent
from plainsong.protocol.errors import PlainsongError
from plainsong.sync.afterlife import watch
from plainsong.sync.sent import Settled, settle

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from plainsong.core.gathering import Overflow
    from plainsong.core.producing.producing import Producing
    from plainsong.core.producing.receipts import Delivered
    from plainsong.core.producing.waiting import Ended, Parcel

log = logging.getLogger("plainsong.producer")

#: A thread without work leaves after this; the next message starts another.
IDLE_S = 10.0


class Sending:
    """What a producer does behind the calls of its users: waiting for room, delivering, and coming to an end.

    Args:
      run: carries steps out.
    """

    def __init__(
        self,
        run: Callable[[Any], Any],
        producing: Producing[Settled[Any]],
        *,
        overflow: Overflow,
        exit_timeout_s: float,
    ) -> None:
        self._run_steps = run
        self._producing = producing
        self._waiting = producing.waiting
        self._overflow = overflow
        self.exit_timeout_s = exit_timeout_s
        self._make_locks()
        watch(self)

    def _make_locks(self) -> None:
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._settled = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._idle = False
        self._stopping = False

    def _wait_for_room(self, size: int, messages: int) -> None:
        """With the lock. Raises BufferFull, and why nothing is taken any more."""
        self._producing.check_usable()
        while not self._waiting.has_room(size, messages):
            if self._overflow != "wait":
                raise self._waiting.full(size)
            self._room.wait()
            self._producing.check_usable()

    # --- the end -------------------------------------------------------------------------------

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything is durable, without lingering.

        Raises:
          NotSent: something still waits after ``timeout_s`` (None: no limit), or failed since the last flush and
            nobody asked its future. Nothing is given up by it.
        """
        with self._lock:
            self._wait_until_empty(timeout_s)
            waiting = self._waiting.pending
        self._producing.tally.raise_if_unheard(waiting)

    def close(self, timeout_s: float | None = None) -> None:
        """Abort an open transaction, flush, and give up what is left after ``timeout_s``. Idempotent.

        The name stays known to the topic, so that the next producer of it goes on.

        Raises:
          NotSent: as ``flush`` does.
        """
        with self._lock:
            if self._stopping:
                return
            self._producing.abort_open()
            self._producing.closed = True
            self._room.notify_all()
            self._wait_until_empty(timeout_s)
            ended = self._waiting.clear()
            under_way = self._waiting.pending
            self._stopping = True
            self._work.notify_all()
            thread = self._thread
        self._give_up(ended)
        if thread is not None and not under_way and thread is not threading.current_thread():
            thread.join()
        self._producing.tally.raise_if_unheard(0, under_way)

    def _wait_until_empty(self, timeout_s: float | None) -> None:
        self._waiting.flushing = True
        if self._waiting.pending:
            self._call_sender()
        try:
            self._room.wait_for(lambda: not self._waiting.pending, timeout_s)
        finally:
            self._waiting.flushing = self._producing.closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        try:
            self.close(self.exit_timeout_s)
        except NotSent as error:
            log.warning("a block with a producer was left by an error: %s", error.detail)

    # --- the thread ----------------------------------------------------------------------------

    def _call_sender(self) -> None:
        """Wake the thread, or start one. With the lock."""
        if self._idle:
            self._work.notify()
        elif self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name=f"plainsong-producer-{self._producing.session.name}", daemon=True
            )
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                parcel, ended = self._wait_for_work()
            self._give_up(ended)
            if parcel is not None:
                self._deliver(parcel)
            elif not ended:
                return

    def _wait_for_work(self) -> tuple[Parcel[Settled[Any]] | None, list[Ended[Settled[Any]]]]:
        """The next request and what is overdue; neither: it is time to leave."""
        while True:
            now_s = monotonic()
            parcel, ended = self._producing.work(now_s)
            if ended:
                self._room.notify_all()
            if parcel is not None or ended:
                return parcel, ended
            until_s = self._producing.next_s()
            called = False
            if not self._stopping:
                self._idle = True
                called = self._work.wait(IDLE_S if until_s is None else max(0.0, until_s - now_s))
                self._idle = False
            if self._stopping or (until_s is None and not called and self._producing.next_s() is None):
                self._thread = None
                return None, []

    def _look_at_time(self) -> None:
        """Give up what has waited too long, also while the thread delivers something else."""
        with self._lock:
            ended = self._producing.overdue(monotonic())
            self._room.notify_all()
        self._give_up(ended)

    def _deliver(self, parcel: Parcel[Settled[Any]]) -> None:
        delivered: Delivered | None = None
        try:
            delivered = self._run_steps(self._producing.steps(parcel))
        except PlainsongError as failed:
            error = failed
        except Exception as bug:  # a thread that died would leave its futures waiting for ever
            log.exception("a request could not be made")
            error = bug_of(bug)
            error.outcome = "unknown"
        with self._lock:
            ended = self._producing.failed(parcel, error) if delivered is None else self._producing.delivered(parcel)
            if self._stopping:
                ended += self._waiting.clear()  # too late for another attempt
            self._room.notify_all()
        if delivered is not None:
            settle(self._settled, parcel.sents, delivered)
        self._give_up(ended)

    def _give_up(self, ended: list[Ended[Settled[Any]]]) -> None:
        """Tell the futures and the tally; without the lock."""
        for each in ended:
            settle(self._settled, each.sents, each.error)
            self._producing.tally.failed(list(each.sents), each.error)

    # --- beyond this process, and after it -----------------------------------------------------

    def after_fork(self) -> None:
        """In a child: the session is the parent's, and so is what waits."""
        waiting = list(self._waiting.sents())
        self._make_locks()
        self._producing.closed = self._stopping = True
        for sent in waiting:
            sent._condition = self._settled
        told = MessageDropped("the process forked: the parent sends this message", outcome="unknown")
        settle(self._settled, waiting, told)

    def at_exit(self) -> None:
        """The interpreter leaves: send what can be sent in time, and say what cannot."""
        try:
            self.close(self.exit_timeout_s)
        except NotSent as error:
            log.error("a producer was never closed, and the program ended: %s", error.detail)
