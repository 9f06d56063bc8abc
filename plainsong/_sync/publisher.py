# Written by scripts/unasync.py from plainsong/_async/publisher.py: change that, and run it (make sync).
"""Publishing without waiting: messages are gathered in a bounded buffer, and a sender delivers them.

``Sender`` is the loop of publishers, producers and streams alike.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from plainsong import calls, tracing
from plainsong._sync._backend import (
    BLOCK_HINT,
    Condition,
    Lock,
    Workers,
    gives_up_after,
    held_here,
    now,
)
from plainsong._sync._futures import Sent, Settling, settle
from plainsong.delivery_counts import Tally, report_drops
from plainsong.errors import BufferFull, Closed, MessageDropped, NotSent
from plainsong.messages import Counts, DroppedMessage
from plainsong.protocol.errors import InvalidParameter, PlainsongError
from plainsong.protocol.names import topic_name
from plainsong.publisher_queue import (
    ITEM_BYTES,
    Batch,
    Lost,
    PublisherQueue,
    client_bug,
    item_of,
    made,
)
from plainsong.serializers import SerializerLike, serializer_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from plainsong._sync._futures import Settled
    from plainsong._sync.retry import Channel
    from plainsong.messages import Receipt
    from plainsong.producer_queue import Delivered
    from plainsong.publisher_queue import Bounds, Entry, Item, Overflow

F = TypeVar("F", bound="Settled[Any]")
Q = TypeVar("Q", bound="PublisherQueue[Any]")
W = TypeVar("W")
P = TypeVar("P", covariant=True)
G = TypeVar("G")

#: An idle worker ends after this; the next message starts another.
IDLE_S = 10.0
NO_THREAD = "no thread could be started to send this message"
NO_THREAD_HINT = "try again later; the process has too many threads, or is exiting"


class Queue(Protocol[P, G]):
    """The queue that a sender drains; called with its lock. ``P`` is a piece of work, ``G`` given-up messages."""

    flushing: bool

    @property
    def pending(self) -> int:
        """The number of messages neither delivered nor given up, including those in flight."""
        ...

    def work(self, now_s: float) -> tuple[P | None, list[G]]:
        """Returns the next piece of work, and overdue messages."""
        ...

    def next_s(self) -> float | None:
        """Returns the next time ``work`` has a result without another message; None: never."""
        ...

    def wants_another(self, now_s: float) -> bool:
        """True to wake a second worker while the first delivers."""
        ...

    def clear(self) -> list[G]:
        """Gives up all messages that are not in flight."""
        ...


class Sender(Generic[W, G]):
    """Delivers the work of a queue, with as many workers as there is work for.

    Args:
      deliver: delivers and completes one piece of work; raises nothing.
      give_up: completes given-up messages; called without the lock.
      workers: the maximum.
    """

    def __init__(
        self,
        name: str,
        queue: Queue[W, G],
        deliver: Callable[[W], None],
        give_up: Callable[[list[G]], None],
        workers: int,
    ) -> None:
        self.lock = Lock()
        #: Returns True if the caller, a signal handler or a finalizer, has interrupted code that holds the lock.
        self.is_inside = held_here(self.lock)
        #: Notified when work is completed and at the close; waited for by callers that need room or an empty queue.
        self.room = Condition(self.lock)
        self.closed = True
        #: True while it is open and a worker runs: senders check only this. If it is False, ``make_ready`` says why.
        self.ready = False
        self.workers = Workers(name)
        self._work = Condition(self.lock)
        self._queue = queue
        self._deliver = deliver
        self._give_up = give_up
        self._most = workers
        self._count = 0
        self._starting = 0
        self._idle = 0
        self._stopping = False
        self._late: deque[Callable[[], G | None]] = deque()
        self._late_bytes = 0
        self._late_lost: list[G] = []
        self._is_admitting = False

    def open(self) -> None:
        """Opens the worker group."""
        self.workers.open()
        self.closed = False

    def make_ready(self, closed: str) -> BufferFull | None:
        """Takes late messages, and starts a worker if none runs. The caller holds the lock.

        Returns:
          the error if the system refuses a thread: nothing happened.
        Raises:
          Closed: ``closed`` is its detail.
        """
        if self.closed:
            raise Closed(closed, hint=BLOCK_HINT)
        self._admit()
        if not self._count and not self.wake_worker():
            return BufferFull(NO_THREAD, hint=NO_THREAD_HINT)
        self.ready = True
        return None

    def put_late(self, closed: str, put: Callable[[], G | None], size: int, room: int) -> None:
        """Takes a message from a signal handler or a finalizer that has interrupted a thread which holds the lock.

        That thread may be in the middle of a change. So another thread takes the message when the lock is free, and
        every later message is taken after it.

        Args:
          put: takes the message, and returns it if that fails, with its error; called with the lock.
          size: bytes of the message.
          room: maximum bytes of all late messages.
        Raises:
          Closed, BufferFull: nothing happened.
        """
        if self.closed:
            raise Closed(closed, hint=BLOCK_HINT)
        if self._late_bytes + size > room:
            raise BufferFull(f"a message of {size} bytes does not fit", hint="use a larger max_pending_bytes")
        if not self._is_admitting and not self.workers.start(self._admit_later):
            raise BufferFull(NO_THREAD, hint=NO_THREAD_HINT)
        self._is_admitting = True
        self._late.append(put)
        self._late_bytes += size
        self.ready = False

    def _admit_later(self) -> None:
        with self.lock:
            self._is_admitting = False
            self._admit()
            lost, self._late_lost = self._late_lost, []
        if lost:
            self._give_up(lost)

    def _admit(self) -> None:
        """Takes late messages. The caller holds the lock."""
        while self._late:
            lost = self._late.popleft()()
            if lost is not None:
                self._late_lost.append(lost)
        self._late_bytes = 0

    def wake_worker(self) -> bool:
        """Wakes an idle worker, or starts one. Returns False if none runs. The caller holds the lock."""
        if self._idle:
            self._work.notify()
        elif self._count < self._most and not self._starting and self.workers.start(self._run):
            self._count += 1
            self._starting += 1
            self.ready = not (self.closed or self._late)
        return self._count > 0

    def _run(self) -> None:
        with self.lock:
            self._starting -= 1
        try:
            while True:
                with self.lock:
                    work, given_up = self._next()
                if given_up:
                    self._give_up(given_up)
                if work is not None:
                    self._deliver(work)
                elif not given_up:
                    return
        except BaseException:
            with self.lock:
                self._ended()
            raise

    def _ended(self) -> None:
        """Records the end of a worker. The caller holds the lock."""
        self._count -= 1
        self.ready = self.ready and self._count > 0

    def _next(self) -> tuple[W | None, list[G]]:
        """Waits for work or overdue messages. If it returns neither, the worker must end. The caller holds the lock."""
        queue = self._queue
        while True:
            now_s = now()
            work, given_up = queue.work(now_s)
            if given_up:
                self.room.notify_all()
            if work is not None or given_up:
                if queue.wants_another(now_s):
                    self.wake_worker()
                return work, given_up
            until_s = queue.next_s()
            called = False
            if not self._stopping:
                self._idle += 1
                try:
                    called = self._work.wait(IDLE_S if until_s is None else max(0.0, until_s - now_s))
                finally:
                    self._idle -= 1
            if self._stopping or (until_s is None and not called and queue.next_s() is None):
                self._ended()
                return None, []

    def settled(self) -> list[G]:
        """Completes a piece of work. Returns messages given up because the sender stops. The caller holds the lock."""
        self.room.notify_all()
        return self._queue.clear() if self._stopping else []

    def flush(self, timeout_s: float | None) -> int:
        """Waits until the queue is empty, without lingering. Returns the number of messages left."""
        with self.lock:
            self._drain(timeout_s)
            return self._queue.pending

    def _drain(self, timeout_s: float | None) -> None:
        queue = self._queue
        queue.flushing = True
        self._admit()
        try:
            if queue.pending and not self.wake_worker():
                return  # no worker runs, and the system refuses one: waiting is useless
            self.room.wait_for(lambda: not queue.pending, timeout_s)
        finally:
            queue.flushing = self.closed

    def close(self, timeout_s: float | None) -> int | None:
        """Flushes, then gives up messages left after ``timeout_s``. Returns how many are still in flight; None: closed before."""
        with self.lock:
            if self._stopping:
                return None
            self.refuse()
            self.room.notify_all()
            self._drain(timeout_s)
            given_up = self._queue.clear()
            under_way = self._queue.pending
            self._stopping = True
            self._work.notify_all()
        self._give_up(given_up)
        if not under_way:
            self.workers.join()
        return under_way

    def refuse(self) -> None:
        """Takes no more messages."""
        self.closed, self.ready = True, False

    def stop(self) -> None:
        """Takes no more messages and starts no worker."""
        self.refuse()
        self._stopping = True

    def abandon(self) -> int:
        """Gives up waiting messages at once. Returns how many are in flight."""
        with self.lock:
            self.stop()
            self._admit()
            given_up = self._queue.clear()
            under_way = self._queue.pending
        self._give_up(given_up)
        return under_way

    def leave(
        self,
        kind: type[BaseException] | None,
        close: Callable[[float | None], None],
        exit_timeout_s: float,
        warn: Callable[[str], object],
    ) -> None:
        """Ends the block. Raises NotSent; after an exception in the block, calls ``warn`` instead."""
        unsent: NotSent | None = None
        under_way = 0
        try:
            if kind is None:
                close(None)
            elif not gives_up_after(kind):
                close(exit_timeout_s)
        except NotSent as not_sent:
            unsent = not_sent
        finally:
            under_way = self.workers.close(self.abandon)
        if kind is None and unsent is not None:
            raise unsent
        if kind is not None and (unsent is not None or under_way):
            warn((unsent or NotSent(0, under_way)).detail)


class Buffered(Generic[Q, F]):
    """A buffer and the tasks that empty it: the base of publishers and producers.

    Args:
      noun: its name in error messages and logs.
    """

    def __init__(self, noun: str, channel: Channel, bounds: Bounds, overflow: Overflow, exit_timeout_s: float) -> None:
        self._noun = noun
        self._channel = channel
        self._bounds = bounds
        self._overflow = overflow
        self.exit_timeout_s = exit_timeout_s
        self._settling = Settling()
        self._queue: Q | None = None
        self._log = logging.getLogger(f"plainsong.{noun}")

    def _use(self, queue: Q, name: str, workers: int) -> None:
        """Starts over with an empty queue."""
        self._queue = queue
        self._tally = Tally[F]()
        self._sender: Sender[Batch[F], Lost[F]] = Sender(name, queue, self._deliver, self._give_up, workers)
        self._lock = self._sender.lock
        self._is_inside = self._sender.is_inside

    @property
    def _opened(self) -> Q:
        """The queue. Raises Closed before it is opened."""
        if self._queue is None:
            raise Closed(f"the {self._noun} is not open", hint=BLOCK_HINT)
        return self._queue

    @property
    def _is_open(self) -> bool:
        """True if it accepts messages."""
        return self._queue is not None and not self._sender.closed

    def _open(self) -> None:
        self._sender.open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._sender.leave(
            kind,
            self.close,
            self.exit_timeout_s,
            lambda detail: self._log.warning("a block with a %s ended with an error: %s", self._noun, detail),
        )

    @property
    def counts(self) -> Counts:
        """The numbers of messages that wait, were delivered, failed or were dropped so far."""
        queue = self._opened
        return self._tally.counts(queue.pending, queue.pending_bytes)

    # --- taking --------------------------------------------------------------------------------

    def _take(self, topic: str, entry: Entry[F]) -> None:
        """Takes messages; waits for room if ``overflow="wait"``. Raises the same as ``_take_now``."""
        if not self._take_now(topic, entry):
            self._take_when_there_is_room(topic, entry)

    def _take_now(self, topic: str, entry: Entry[F]) -> bool:
        """Takes messages, or drops them if no thread can be started to send them. False: there is no room.

        Raises:
          BufferFull, Closed, and what the queue's ``put`` raises: nothing happened.
        """
        queue = self._queue or self._opened
        if self._is_inside():
            self._take_late(topic, entry)
            return True
        wakes = no_thread = None
        with self._lock:
            if not self._sender.ready:
                no_thread = self._sender.make_ready(f"the {self._noun} is closed")
            if no_thread is None:
                wakes = queue.put(topic, entry, now())
                if wakes:
                    self._sender.wake_worker()
        if no_thread is not None:
            self._without_room(topic, entry, no_thread)
            return True
        return wakes is not None

    def _take_when_there_is_room(self, topic: str, entry: Entry[F]) -> None:
        """Waits for room, if ``overflow`` says so and the buffer is large enough."""
        queue = self._opened
        with self._lock:
            while self._overflow == "wait" and queue.fits(entry):
                if self._sender.closed:
                    raise Closed(f"the {self._noun} was closed while this message waited for space")
                wakes = queue.put(topic, entry, now())
                if wakes is not None:
                    if wakes:
                        self._sender.wake_worker()
                    return
                self._sender.room.wait()
            full = queue.full(entry.size)
        self._without_room(topic, entry, full)

    def _take_late(self, topic: str, entry: Entry[F]) -> None:
        """Takes a message from a signal handler or a finalizer that has interrupted this sender: never waits for room."""
        queue = self._opened
        queue.check_usable()

        def put() -> Lost[F] | None:
            try:
                wakes = queue.put(topic, entry, now())
                if wakes is None:
                    return Lost(topic, [entry], queue.full(entry.size))
            except PlainsongError as error:
                return Lost(topic, [entry], error)
            if wakes:
                self._sender.wake_worker()
            return None

        room = self._bounds.max_pending_bytes - queue.pending_bytes
        try:
            self._sender.put_late(f"the {self._noun} is closed", put, entry.size + ITEM_BYTES, room)
        except BufferFull as full:
            self._without_room(topic, entry, full)

    def _without_room(self, topic: str, entry: Entry[F], full: BufferFull) -> None:
        """Drops a message if ``overflow`` asks for that; otherwise raises BufferFull."""
        raise full

    # --- the end -------------------------------------------------------------------------------

    def flush(self, timeout_s: float | None = None) -> None:
        """Waits until the buffer is empty, without lingering.

        Raises:
          NotSent: a message still waits after ``timeout_s`` (None: no limit), or failed since the last
            flush without a caller retrieving it. No message is given up. Never raised in best effort.
        """
        queue = self._opened
        left = self._sender.flush(timeout_s)
        if self._bounds.mode == "reliable":
            self._tally.raise_if_unretrieved(left, causes=queue.waiting_for())

    def close(self, timeout_s: float | None = None) -> None:
        """Flushes, then gives up messages left after ``timeout_s``. Idempotent.

        Args:
          timeout_s: None: as long as ``delivery_timeout_s`` allows; in best effort ``exit_timeout_s``.

        Raises:
          NotSent: as ``flush`` does; never in best effort.
        """
        if timeout_s is None and self._bounds.mode == "best_effort":
            timeout_s = self.exit_timeout_s
        under_way = self._sender.close(timeout_s)
        if under_way is not None and self._bounds.mode == "reliable":
            self._tally.raise_if_unretrieved(0, under_way)

    # --- delivering ----------------------------------------------------------------------------

    def _attempt(self, batch: Batch[F]) -> Receipt | Delivered:
        """Delivers a batch. Raises PlainsongError."""
        raise NotImplementedError

    def _deliver(self, batch: Batch[F]) -> None:
        queue = self._opened
        receipt, error = None, None
        try:
            receipt = self._attempt(batch)
        except PlainsongError as failed:
            error = failed
        except Exception as bug:  # noqa: BLE001 - one that escaped would leave the futures pending for ever
            self._log.exception("a request could not be built")
            error = client_bug(bug)
        except BaseException:
            given_up = MessageDropped(f"the {self._noun} was cancelled while it was sending", outcome="unknown")
            with self._lock:
                lost = queue.abandoned(batch, given_up)
            self._give_up(lost)
            raise
        with self._lock:
            lost = queue.settled(batch) if error is None else queue.failed(batch, error, now())
            lost += self._sender.settled()
        if receipt is not None:
            self._tally.delivered(batch.messages)
            settle(self._settling, batch.futures, receipt)
        self._give_up(lost)

    def _give_up(self, given_up: list[Lost[F]]) -> None:
        """Completes the futures, and counts them; called without the lock."""
        for lost in given_up:
            settle(self._settling, lost.futures, lost.error)
            self._count_lost(lost)

    def _count_lost(self, lost: Lost[F]) -> None:
        self._tally.failed(lost.futures, lost.error)

    # --- fork and exit hooks of the synchronous client -----------------------------------------

    def _after_fork(self) -> None:
        """Forgets the parent's messages in a child, and fails their futures."""
        waiting = list(self._opened.futures())
        self._settling.renew()
        self._start_in_child()
        error = MessageDropped("the process forked: the parent sends this message", outcome="unknown")
        settle(self._settling, waiting, error)

    def _start_in_child(self) -> None:
        raise NotImplementedError

    def _at_exit(self) -> None:
        """Flushes for at most ``exit_timeout_s``, and logs how many messages were not sent."""
        try:
            self.close(self.exit_timeout_s)
        except NotSent as error:
            self._log.error("a %s was never closed, and the program ended: %s", self._noun, error.detail)


class Publisher(Buffered["PublisherQueue[Sent]", Sent]):
    """A buffer and the threads that empty it; made by ``Client.publisher``, which explains the options.

    Thread-safe. The order of ``send`` calls is the order in each topic, also across retries; a lock orders calls of
    several threads. In a forked child it starts afresh: empty, with its own threads and connections; the parent sends
    the waiting messages, and their futures in the child say so. The exit of the interpreter closes it within
    ``exit_timeout_s``, and logs unsent messages.
    """

    def __init__(
        self,
        channel: Channel,
        bounds: Bounds,
        *,
        topic: str | None,
        overflow: Overflow,
        connections: int,
        serializer: SerializerLike,
        on_drop: Callable[[DroppedMessage], object] | None,
        exit_timeout_s: float,
    ) -> None:
        if topic is not None:
            topic_name(channel.namespace, topic)
        super().__init__("publisher", channel, bounds, overflow, exit_timeout_s)
        self._topic = topic
        self._connections = connections
        self._serializer = serializer_for(serializer)
        self._on_drop = on_drop
        self._start_afresh()

    def _start_afresh(self) -> None:
        queue = PublisherQueue[Sent](self._bounds, self._channel.random)
        self._use(queue, "plainsong-publisher", self._connections)

    # --- sending -------------------------------------------------------------------------------

    def send(self, message: Any, *, topic: str | None = None) -> Sent:
        """Takes a message and returns its future. Waits only when the buffer is full and ``overflow="wait"``.

        Args:
          message: an input of the serializer (bytes, without one), or an ``Outgoing``.
          topic: optional if the publisher has a topic.
        Raises:
          NotEncodable, BufferFull, Closed, InvalidName, InvalidParameter: nothing happened. BufferFull is never raised
            in best effort.
        """
        name, item = self._item(message, topic)
        if not self._take_now(name, item):
            self._take_when_there_is_room(name, item)
        return item.future

    def _item(self, message: Any, topic: str | None) -> tuple[str, Item[Sent]]:
        """The topic of a message, and the message encoded."""
        item = item_of(message, self._serializer, Sent(self._settling))
        if item.sequence_id is not None:
            raise InvalidParameter("a sequence id belongs to a producer", hint="use client.producer")
        name = topic or self._topic
        if name is None:
            raise InvalidParameter("no topic is named", hint="name it here, or when creating the publisher")
        if topic is not None:
            topic_name(self._channel.namespace, topic)
        return name, item

    def _without_room(self, topic: str, entry: Entry[Sent], full: BufferFull) -> None:
        if self._overflow != "drop":
            raise full
        dropped = MessageDropped(full.detail, hint=full.hint)
        settle(self._settling, [entry.future], dropped)
        self._tally.dropped(1)
        report_drops(self._on_drop, [DroppedMessage(topic, cast("Item[Sent]", entry).payload, dropped)])

    # --- delivering ----------------------------------------------------------------------------

    def _attempt(self, batch: Batch[Sent]) -> Receipt:
        topic, request = batch.lane.topic, batch.request()
        call = made(lambda: calls.publish(self._channel.namespace, topic, request))
        left_s = self._opened.left_s(batch, now())
        with tracing.sending(self._channel.namespace, topic, len(request.messages), request.attributes) as span:
            receipt, error = self._channel.attempt(span.carried(call), left_s)
            span.sent(receipt)
        if error is not None:
            raise error
        assert receipt is not None
        return receipt

    def _count_lost(self, lost: Lost[Sent]) -> None:
        if self._bounds.mode == "reliable":
            super()._count_lost(lost)
            return
        self._tally.dropped(len(lost.items))
        items = cast("list[Item[Sent]]", lost.items)
        report_drops(self._on_drop, [DroppedMessage(lost.topic, item.payload, lost.error) for item in items])

    def _start_in_child(self) -> None:
        self._start_afresh()
        self._open()
