"""Publishing without waiting: messages are gathered in a bounded buffer and sent by threads of the publisher."""

from __future__ import annotations

import logging
import threading
from time import monotonic
from typing import TYPE_CHECKING, Any

from plainsong.core.gathering import Batch, Bounds, Gathering, Lane, Lost
from plainsong.core.outcomes import Counts, DroppedMessage, Tally, tell_of_drops
from plainsong.errors import Closed, MessageDropped, NotSent
from plainsong.messages import Outgoing, parts_of
from plainsong.protocol.errors import InvalidParameter
from plainsong.serializers import BYTES, SerializerLike, encoded, serializer_for
from plainsong.sync.afterlife import watch
from plainsong.sync.delivery import attempt
from plainsong.sync.sent import Sent, settle

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Self

    from plainsong.core.effects import Answer, Failure, Send
    from plainsong.core.gathering import Overflow
    from plainsong.core.operations import Operations

log = logging.getLogger("plainsong.publisher")

#: A thread without work leaves after this; the next message starts another.
IDLE_S = 10.0


class Publisher:
    """A buffer and the threads that empty it; made by ``Client.publisher``, which explains the options.

    Thread-safe. The order of calls of ``send`` is the order in the topic, for each topic, whatever is retried
    (calls from several threads are ordered as they get the lock). In a forked child it starts afresh: empty,
    with threads and connections of its own; what was waiting belongs to the parent, and its futures say so.
    When the interpreter exits, it is closed with a limit of ``exit_timeout_s``, and what was not sent is logged.
    """

    def __init__(
        self,
        operations: Operations,
        carry: Callable[[Send], Answer | Failure],
        bounds: Bounds,
        *,
        topic: str | None,
        overflow: Overflow,
        connections: int,
        serializer: SerializerLike,
        on_drop: Callable[[DroppedMessage], object] | None,
        exit_timeout_s: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._operations = operations
        self._carry = carry
        self._bounds = bounds
        self._topic = topic
        self._overflow = overflow
        self._connections = connections
        self._serializer = serializer_for(serializer)
        self._as_it_is = self._serializer is BYTES
        self._on_drop = on_drop
        self.exit_timeout_s = exit_timeout_s
        self._clock = clock
        self._tally = Tally[Sent]()
        self._start_afresh()
        watch(self)

    def _start_afresh(self) -> None:
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._settled = threading.Condition(threading.RLock())
        self._gathering: Gathering[Sent] = Gathering(self._bounds, self._operations.random)
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False
        self._stopping = False

    # --- sending -------------------------------------------------------------------------------

    def send(self, message: Any, *, topic: str | None = None) -> Sent:
        """Hand over a message, and get its future; waits only when the buffer is full and ``overflow="wait"``.

        Args:
          message: what the serializer takes (bytes, if there is none), or an ``Outgoing`` around it.
          topic: where it goes; may be left out when the publisher was made for one.
        Raises:
          NotEncodable, BufferFull, Closed, InvalidParameter: nothing happened. In best effort never BufferFull.
        """
        ttl_s = attributes = None
        if type(message) is Outgoing:
            message, ttl_s, attributes = parts_of(message)
        payload = message if self._as_it_is and type(message) is bytes else encoded(self._serializer, message)
        name = topic or self._topic
        if name is None:
            raise InvalidParameter("no topic is named", hint="name it here, or when making the publisher")
        sent = Sent(self._settled)
        with self._lock:
            if self._closed:
                raise Closed("the publisher is closed")
            lane = self._gathering.put(name, payload, ttl_s, sent, self._clock(), attributes)
            if lane is None and self._overflow == "wait":
                lane = self._wait_for_room(name, payload, ttl_s, attributes, sent)
            if lane is not None:
                if self._gathering.wants_sender(lane):
                    self._call_sender()
                return sent
        return self._without_room(name, payload, sent)

    def _wait_for_room(
        self, topic: str, payload: bytes, ttl_s: int | None, attributes: Mapping[str, str] | None, sent: Sent
    ) -> Lane[Sent] | None:
        while self._gathering.fits(payload):
            self._room.wait()
            if self._closed:
                raise Closed("the publisher was closed while this message waited for room")
            lane = self._gathering.put(topic, payload, ttl_s, sent, self._clock(), attributes)
            if lane is not None:
                return lane
        return None

    def _without_room(self, topic: str, payload: bytes, sent: Sent) -> Sent:
        full = self._gathering.full(payload)
        if self._overflow != "drop":
            raise full
        dropped = MessageDropped(full.detail, hint=full.hint)
        settle(self._settled, [sent], dropped)
        self._tally.dropped(1)
        tell_of_drops(self._on_drop, [DroppedMessage(topic, payload, dropped)])
        return sent

    # --- the end -------------------------------------------------------------------------------

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until the buffer is empty, without lingering.

        Raises:
          NotSent: something is still waiting after ``timeout_s`` (None: no limit), or failed since the last
            flush and nobody asked its future. Nothing is given up by it. Never in best effort.
        """
        with self._lock:
            self._gathering.flushing = True
            if self._gathering.pending:
                self._call_sender()
            try:
                self._room.wait_for(lambda: not self._gathering.pending, timeout_s)
            finally:
                self._gathering.flushing = self._closed
            waiting = self._gathering.pending
        if self._bounds.mode == "reliable":
            self._tally.raise_if_unheard(waiting)

    def close(self, timeout_s: float | None = None) -> None:
        """Flush, then give up what is left after ``timeout_s``. Idempotent.

        Args:
          timeout_s: None: as long as ``delivery_timeout_s`` allows; in best effort ``exit_timeout_s``.

        Raises:
          NotSent: as ``flush`` does; never in best effort.
        """
        if timeout_s is None and self._bounds.mode == "best_effort":
            timeout_s = self.exit_timeout_s
        with self._lock:
            if self._stopping:
                return
            self._closed = True
            self._gathering.flushing = True
            self._room.notify_all()
            if self._gathering.pending:
                self._call_sender()
            self._room.wait_for(lambda: not self._gathering.pending, timeout_s)
            given_up = self._gathering.clear()
            under_way = self._gathering.pending
            self._stopping = True
            self._work.notify_all()
            threads = list(self._threads)
        for lost in given_up:
            self._give_up(lost)
        if not under_way:
            for thread in threads:
                thread.join()
        if self._bounds.mode == "reliable":
            self._tally.raise_if_unheard(0, under_way)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        try:
            self.close(self.exit_timeout_s)
        except NotSent as error:
            log.warning("a block with a publisher was left by an error: %s", error.detail)

    @property
    def counts(self) -> Counts:
        """Messages that wait, were delivered, failed or were dropped so far."""
        return self._tally.counts(self._gathering.pending, self._gathering.pending_bytes)

    # --- the threads ---------------------------------------------------------------------------

    def _call_sender(self) -> None:
        """Wake one that sleeps, or start another. With the lock."""
        if self._idle:
            self._work.notify()
        elif len(self._threads) < self._connections:
            name = f"plainsong-publisher-{len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                batch, overdue = self._wait_for_work()
            for lost in overdue:
                self._give_up(lost)
            if batch is not None:
                self._deliver(batch)
            elif not overdue:
                return

    def _wait_for_work(self) -> tuple[Batch[Sent] | None, list[Lost[Sent]]]:
        """The next batch and what is overdue; neither: it is time to leave."""
        gathering = self._gathering
        while True:
            now_s = self._clock()
            overdue = gathering.overdue(now_s)
            batch = gathering.take(now_s)
            if overdue:
                self._room.notify_all()
            if batch is not None or overdue:
                if gathering.has_ready(now_s):
                    self._call_sender()
                return batch, overdue
            if self._stopping:
                return None, []
            until_s = gathering.next_s()
            self._idle += 1
            try:
                called = self._work.wait(IDLE_S if until_s is None else max(0.0, until_s - now_s))
            finally:
                self._idle -= 1
            if until_s is None and not called and gathering.next_s() is None:
                self._threads.remove(threading.current_thread())
                return None, []

    def _deliver(self, batch: Batch[Sent]) -> None:
        left_s = self._gathering.left_s(batch, self._clock())
        receipt, error = attempt(self._operations, self._carry, batch, left_s)
        given_up: list[Lost[Sent]] = []
        with self._lock:
            if error is None:
                self._gathering.settled(batch)
            else:
                lost = self._gathering.failed(batch, error, self._clock())
                given_up += [] if lost is None else [lost]
                if self._stopping:
                    given_up += self._gathering.clear()  # too late for another attempt
            self._room.notify_all()
        if receipt is not None:
            self._tally.delivered(len(batch.items))
            settle(self._settled, [item.sent for item in batch.items], receipt)
        for lost in given_up:
            self._give_up(lost)

    def _give_up(self, lost: Lost[Sent]) -> None:
        """Tell the futures, the tally and ``on_drop``; without the lock."""
        settle(self._settled, [item.sent for item in lost.items], lost.error)
        if self._bounds.mode == "best_effort":
            self._tally.dropped(len(lost.items))
            tell_of_drops(self._on_drop, [DroppedMessage(lost.topic, item.payload, lost.error) for item in lost.items])
        else:
            self._tally.failed([item.sent for item in lost.items], lost.error)

    # --- beyond this process, and after it -----------------------------------------------------

    def after_fork(self) -> None:
        """In a child: begin anew, and tell the futures that came along whose they are."""
        waiting = list(self._gathering.sents())
        self._tally = Tally()
        self._start_afresh()
        for sent in waiting:
            sent._condition = self._settled
        told = MessageDropped("the process forked: the parent sends this message", outcome="unknown")
        settle(self._settled, waiting, told)

    def at_exit(self) -> None:
        """The interpreter leaves: send what can be sent in time, and say what cannot."""
        try:
            self.close(self.exit_timeout_s)
        except NotSent as error:
            log.error("a publisher was never closed, and the program ended: %s", error.detail)
