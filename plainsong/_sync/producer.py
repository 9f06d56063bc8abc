# Written by scripts/unasync.py from plainsong/_async/producer.py: change that, and run it (make sync).
"""A producer: its messages are sent in order, one request at a time, and each of them is stored once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plainsong import tracing
from plainsong._sync._backend import BLOCK_HINT, now, shielded
from plainsong._sync._futures import Produced, ProducedWhole
from plainsong._sync.delivery import Delivery, begin
from plainsong._sync.publisher import Buffered
from plainsong._sync.transaction import TransactionContext
from plainsong._sync.transaction_messages import left_s
from plainsong.errors import BufferFull, Closed
from plainsong.messages import with_attributes
from plainsong.producer_queue import ProducerQueue, atomic_request, whole_request
from plainsong.protocol.errors import PlainsongError
from plainsong.publisher_queue import Whole, client_bug, item_of
from plainsong.serializers import serializer_for
from plainsong.transactions import block_of, pointer_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

    from plainsong._sync._futures import Settled
    from plainsong._sync.retry import Channel
    from plainsong.lightweight import Lightweight, LightweightState
    from plainsong.messages import Receipt
    from plainsong.producer_queue import Delivered, Session
    from plainsong.protocol.requests import PublishRequest
    from plainsong.publisher_queue import Batch, Bounds, Overflow
    from plainsong.serializers import Serializer, SerializerLike
    from plainsong.transactions import Transaction

#: One worker delivers, and the other watches the deadlines of the waiting messages.
WORKERS = 2


class Producer(Buffered["ProducerQueue[Settled[Any]]", "Settled[Any]"]):
    """Sends messages under a name, each stored once; made by ``Client.producer``, which explains the options.

    Thread-safe: the order of calls is the order in the topic, and that of automatic sequence ids. Use it in a ``with``
    block, or close it. In a forked child it is closed: the parent keeps the name.
    """

    def __init__(
        self,
        client: object,
        channel: Channel,
        topic: str,
        name: str | None,
        bounds: Bounds,
        *,
        initial_sequence_id: int | None,
        optional: bool,
        retention_s: int | None,
        serializer: Serializer,
        overflow: Overflow,
        transaction_timeout_s: float,
        exit_timeout_s: float,
        deadline_s: float | None,
    ) -> None:
        super().__init__("producer", channel, bounds, overflow, exit_timeout_s)
        self._client = client
        self._topic_and_name = (topic, name)
        self._session_options = (initial_sequence_id, optional, retention_s, deadline_s)
        self._serializer = serializer
        self._transaction_timeout_s = transaction_timeout_s
        self._is_taken = False

    def _open(self) -> None:
        if self._is_taken:
            raise Closed("the producer was already opened", hint="create another one with the client")
        self._is_taken = True
        topic, name = self._topic_and_name
        initial_sequence_id, optional, retention_s, deadline_s = self._session_options
        session = begin(
            self._channel,
            topic,
            name,
            initial_sequence_id=initial_sequence_id,
            optional=optional,
            retention_s=retention_s,
            deadline_s=deadline_s,
        )
        self._start_with(session, initial_sequence_id)
        super()._open()

    def _start_with(self, session: Session, initial_sequence_id: int | None) -> None:
        queue: ProducerQueue[Settled[Any]] = ProducerQueue(
            session,
            self._bounds,
            self._serializer,
            initial_sequence_id,
            self._transaction_timeout_s,
            self._channel.random,
        )
        self._use(queue, f"plainsong-producer-{session.name}", WORKERS)

    def __repr__(self) -> str:
        return f"<Producer {self.name!r} of {self.topic}>" if self._queue else "<Producer, not opened>"

    # --- its state ------------------------------------------------------------------------------

    @property
    def topic(self) -> str:
        """The topic of its messages."""
        return self._opened.session.topic

    @property
    def name(self) -> str:
        """Its name, given or chosen by the daemon."""
        return self._opened.session.name

    @property
    def epoch(self) -> int | None:
        """The number of its session; None where deduplication is switched off."""
        return self._opened.session.epoch

    @property
    def generation(self) -> int:
        """The topic's generation; 0 where deduplication is switched off."""
        return self._opened.session.generation

    @property
    def last_sequence_id(self) -> int:
        """The highest sequence id known to be durable; -1: none."""
        return self._opened.session.last_sequence_id

    @property
    def deduplicated(self) -> bool:
        """True if each message is stored once; False only with ``optional=True``."""
        return self._opened.session.epoch is not None

    # --- sending -------------------------------------------------------------------------------

    def send(
        self,
        message: Any,
        *,
        sequence_id: int | None = None,
        attributes: Mapping[str, str] | None = None,
        routing_key: str | None = None,
    ) -> Produced:
        """Takes a message and returns the future of its ``MessageReceipt``. Never part of a transaction's block.

        Args:
          message: an input of the serializer (bytes, without one), or an ``Outgoing``.
          sequence_id: its number; for every message of a producer, or for none.
        Raises:
          SequenceIdsMixed (a ValueError), InvalidSequenceIds, NotEncodable, BufferFull, Closed: nothing happened.
          ProducerFenced, ProducerExpired, GenerationChanged, ProducerStopped: an earlier error ended the
            producer; nothing happened to this message.
        """
        queue = self._queue or self._opened
        message = with_attributes(message, attributes, routing_key)
        future = Produced(self._settling)
        self._take(queue.session.topic, item_of(message, queue.serializer, future, sequence_id))
        return future

    def publish(
        self,
        messages: Any,
        *,
        sequence_ids: Sequence[int] | None = None,
        ttl_s: int | None = None,
        attributes: Mapping[str, str] | None = None,
        routing_key: str | None = None,
        serializer: SerializerLike = None,
        deadline_s: float | None = None,
        transaction: Transaction | int | None = None,
        direct: bool = False,
    ) -> Receipt:
        """Publishes one message, or a list in one request, after the waiting ones; returns when it is durable.

        In a block of ``client.transaction()``, or with a ``transaction``, it publishes now, under its write pointer; so
        call it last.

        Args:
          sequence_ids: one for each message, increasing.
          deadline_s: instead of ``delivery_timeout_s``.
          direct: outside the transaction of the surrounding block.
        Returns:
          the receipt of the request; ``duplicate`` or ``dropped`` name messages stored by earlier attempts.
        Raises:
          as ``send``; SequenceConsumed: the ids were used in another transaction. OutcomeUnknown: it cannot be
            determined, and it was not sent again. TopicNotFound, MessageTooLarge, DeadlineExceeded, …: nothing happened.
        """
        using = self._opened.serializer if serializer is None else serializer_for(serializer)
        request, ids = whole_request(messages, using, ttl_s=ttl_s, attributes=attributes, routing_key=routing_key)
        tracing.stamp(request)
        given: Sequence[int | None] = ids if sequence_ids is None else list(sequence_ids)
        block = None if direct or transaction else block_of(self._client, TransactionContext)
        if block is None:
            request.write_pointer = None if transaction is None else pointer_of(transaction)
            return self._sent(request, given, deadline_s)
        under_way = block._require("publishing")
        request.write_pointer = pointer_of(under_way)
        block._messages.touch(self.topic)
        try:
            return self._sent(request, given, left_s(self._channel, under_way))
        except BaseException as error:
            if getattr(error, "outcome", "unknown") != "not-applied":
                block._messages.doubt()
            raise

    def publish_atomic(
        self,
        routing_key: str,
        messages: Any,
        *,
        sequence_ids: Sequence[int] | None = None,
        ttl_s: int | None = None,
        serializer: SerializerLike = None,
        deadline_s: float | None = None,
    ) -> Receipt:
        """A lightweight transaction in one call: all messages contiguously, or none. Never part of a block.

        Raises:
          MaxTransactionSizeExceeded: over 16 MiB of serialized bytes, or 65 536 messages. PartialDuplicate: some
            messages were stored before. TransactionOutcomeUnknown; and as ``publish``.
        """
        using = self._opened.serializer if serializer is None else serializer_for(serializer)
        request, ids = atomic_request(routing_key, messages, using, ttl_s=ttl_s)
        tracing.stamp(request)
        return self._sent(request, ids if sequence_ids is None else list(sequence_ids), deadline_s)

    def begin(self, routing_key: str, *, timeout_s: float | None = None) -> LightweightTransaction:
        """Opens a lightweight transaction; sends no request.

        Args:
          timeout_s: seconds after which it is aborted unless committed; None: the producer's.
        Raises:
          TransactionInProgress: one is open. Closed, and the error that stopped the producer.
        """
        queue = self._opened
        with self._lock:
            if self._sender.closed:
                raise Closed("the producer is closed", hint=BLOCK_HINT)
            opened = queue.begin(routing_key, timeout_s, now())
            self._sender.wake_worker()  # a worker also watches its time-out
        return LightweightTransaction(self, opened)

    def _sent(self, request: PublishRequest, ids: Sequence[int | None], limit_s: float | None) -> Receipt:
        future = self._hand_over(request, ids, limit_s)
        return future._outcome()

    def _hand_over(self, request: PublishRequest, ids: Sequence[int | None], limit_s: float | None) -> ProducedWhole:
        future = ProducedWhole(self._settling)
        queue = self._opened
        if self._is_inside():
            raise BufferFull(
                "this call would deadlock: a signal handler or a finalizer has interrupted this producer",
                hint="use send, which does not wait",
            )
        self._take(queue.session.topic, Whole(request, ids, future, limit_s))
        return future

    # --- the end -------------------------------------------------------------------------------

    def close(self, timeout_s: float | None = None) -> None:
        """Aborts an open transaction, flushes, and drops messages left after ``timeout_s``. Idempotent.

        The topic remembers the name, so that its next producer continues.

        Raises:
          NotSent: as ``flush`` does.
        """
        with self._lock:
            self._opened.close()
        super().close(timeout_s)

    # --- delivering ----------------------------------------------------------------------------

    def _attempt(self, batch: Batch[Settled[Any]]) -> Delivered:
        queue = self._opened
        until_s, may_split = queue.until_s(batch.items[0]), len(batch.items) > 1
        try:
            delivery = Delivery(self._channel, queue.session, batch.request(), until_s, may_split=may_split)
            return delivery.run()
        except PlainsongError:
            raise
        except Exception as bug:
            self._log.exception("a request could not be built")
            error = client_bug(bug)
            error.outcome = "unknown"  # it may have been sent
            raise error from bug

    def _start_in_child(self) -> None:
        """Closes the producer in the child: the parent keeps the session."""
        queue = self._opened
        queue.close()
        self._use(queue, f"plainsong-producer-{self.name}", WORKERS)
        self._sender.stop()


class LightweightTransaction:
    """Messages of one routing key, published atomically; made by ``Producer.begin``.

    The client keeps them until ``commit``, which is one publish. A ``with`` block aborts an open transaction at its
    end, and a commit under way is completed. For one thread at a time.
    """

    def __init__(self, producer: Producer, transaction: Lightweight) -> None:
        self._producer = producer
        self._transaction = transaction
        self._sent: ProducedWhole | None = None

    def __repr__(self) -> str:
        return f"<LightweightTransaction of {self.routing_key!r}, {self.state}>"

    @property
    def routing_key(self) -> str:
        """The routing key of its messages."""
        return self._transaction.routing_key

    @property
    def state(self) -> LightweightState:
        """``open``, ``committing``, ``committed``, ``aborted``; ``unknown`` if the outcome of the commit is unknown."""
        self._transaction.expire(now())
        return self._transaction.state

    @property
    def size(self) -> int:
        """Serialized bytes written so far."""
        return self._transaction.size

    def __len__(self) -> int:
        return len(self._transaction)

    def write(self, message: Any, *, sequence_id: int | None = None, ttl_s: int | None = None) -> None:
        """Adds a message; sends nothing.

        Raises:
          MaxTransactionSizeExceeded: more than 16 MiB of serialized bytes. NotEncodable, InvalidParameter. The
            transaction stays open without the message.
          NoTransaction, TransactionTimedOut: it has ended.
        """
        self._transaction.write(message, sequence_id=sequence_id, ttl_s=ttl_s, now_s=now())

    def commit(self) -> Receipt:
        """Publishes all messages atomically and durably. Idempotent: returns the same receipt again.

        Raises:
          NoMessages: it is empty. NoTransaction, TransactionTimedOut: it has ended before.
          TransactionOutcomeUnknown: it may have been stored. Every other error: it was not; it is open again.
        """
        transaction = self._transaction
        if transaction.state == "committed":
            assert transaction.receipt is not None
            return transaction.receipt
        if transaction.state != "committing":
            request = transaction.committing(now())
            try:
                self._sent = self._producer._hand_over(request, transaction.sequence_ids, None)
            except BaseException:
                transaction.state = "open"  # nothing was handed over
                raise
        return self._settle()

    def _settle(self) -> Receipt:
        assert self._sent is not None
        try:
            receipt = self._sent._outcome()
        except PlainsongError as error:
            self._transaction.failed(error, now())
            raise
        self._transaction.committed(receipt)
        return receipt

    def abort(self) -> None:
        """Drops it without sending; uses up no sequence id. Idempotent. Raises NoTransaction: it is committed."""
        self._transaction.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._transaction.state == "committing":
            try:
                with shielded():
                    self._settle()
            except PlainsongError:
                if kind is None:
                    raise
        if self._transaction.state == "open":
            self._transaction.abort()
