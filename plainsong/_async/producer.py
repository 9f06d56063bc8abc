"""A producer: its messages are sent in order, one request at a time, and each of them is stored once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from plainsong import tracing
from plainsong._async._backend import BLOCK_HINT, let_others_run, now, shielded
from plainsong._async._futures import AsyncProduced, AsyncProducedWhole, Settling, settle
from plainsong._async.delivery import AsyncDelivery, begin
from plainsong._async.publisher import AsyncSender
from plainsong._async.transaction import AsyncTransactionContext
from plainsong._async.transaction_messages import left_s
from plainsong.errors import BufferFull, Closed, MessageDropped, NotSent
from plainsong.producer_queue import Ended, ProducerState, atomic_request, prepared, whole_request
from plainsong.protocol.errors import PlainsongError
from plainsong.publisher_queue import ITEM_BYTES, MESSAGES_PER_YIELD, client_bug
from plainsong.serializers import serializer_for
from plainsong.transactions import block_of, pointer_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

    from plainsong._async._futures import AsyncSettled
    from plainsong._async.retry import AsyncChannel
    from plainsong.lightweight import Lightweight, LightweightState
    from plainsong.messages import Counts, Receipt
    from plainsong.producer_queue import Prepared, ProducerBatch
    from plainsong.protocol.requests import PublishRequest
    from plainsong.publisher_queue import Bounds, Overflow
    from plainsong.serializers import Serializer, SerializerLike
    from plainsong.transactions import Transaction

log = logging.getLogger("plainsong.producer")

#: One delivers, the other watches the deadlines of the messages behind it.
WORKERS = 2


class AsyncProducer:
    """Sends messages under a name, each stored once; made by ``AsyncClient.producer``, which explains the options.

    Use it in an ``async with`` block, which opens it; one task may enter it and another leave it. The order of calls is
    the order in the topic, and that of automatic sequence ids.
    """

    def __init__(
        self,
        client: object,
        channel: AsyncChannel,
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
        self._client = client
        self._channel = channel
        self._topic_and_name = (topic, name)
        self._session_options = (initial_sequence_id, optional, retention_s, deadline_s)
        self._bounds = bounds
        self._serializer = serializer
        self._overflow = overflow
        self._transaction_timeout_s = transaction_timeout_s
        self.exit_timeout_s = exit_timeout_s
        self._settling = Settling()
        self._begun: ProducerState[AsyncSettled[Any]] | None = None
        self._is_taken = False

    async def _open(self) -> None:
        if self._is_taken:
            raise Closed("the producer was opened before", hint="ask the client for another one")
        self._is_taken = True
        topic, name = self._topic_and_name
        initial_sequence_id, optional, retention_s, deadline_s = self._session_options
        session = await begin(
            self._channel,
            topic,
            name,
            initial_sequence_id=initial_sequence_id,
            optional=optional,
            retention_s=retention_s,
            deadline_s=deadline_s,
        )
        self._begun = ProducerState(
            session, self._bounds, self._serializer, initial_sequence_id, self._transaction_timeout_s
        )
        self._make_sender(self._begun)
        await self._sender.open()

    def _make_sender(self, state: ProducerState[AsyncSettled[Any]]) -> None:
        self._sender: AsyncSender[ProducerBatch[AsyncSettled[Any]], Ended[AsyncSettled[Any]]] = AsyncSender(
            f"plainsong-producer-{state.session.name}", state, self._deliver, self._give_up, WORKERS
        )
        self._lock = self._sender.lock

    @property
    def _state(self) -> ProducerState[AsyncSettled[Any]]:
        """Raises Closed before ``_open``."""
        if self._begun is None:
            raise Closed("the producer is not open", hint=BLOCK_HINT)
        return self._begun

    @property
    def _is_open(self) -> bool:
        """Whether it takes messages."""
        return self._begun is not None and not self._begun.closed

    async def __aenter__(self) -> Self:
        await self._open()  # async only
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self._sender.leave(
            kind,
            self.aclose,
            self.exit_timeout_s,
            lambda detail: log.warning("a block with a producer was left by an error: %s", detail),
        )

    def __repr__(self) -> str:
        return f"<AsyncProducer {self.name!r} of {self.topic}>" if self._begun else "<AsyncProducer, not opened>"

    # --- its state ------------------------------------------------------------------------------

    @property
    def topic(self) -> str:
        """The topic of its messages."""
        return self._state.session.topic

    @property
    def name(self) -> str:
        """Its name, given or chosen by the daemon."""
        return self._state.session.name

    @property
    def epoch(self) -> int | None:
        """The number of its session; None where deduplication is switched off."""
        return self._state.session.epoch

    @property
    def generation(self) -> int:
        """The topic's generation; 0 where deduplication is switched off."""
        return self._state.session.generation

    @property
    def last_sequence_id(self) -> int:
        """The highest sequence id known to be durable; -1: none."""
        return self._state.session.last_sequence_id

    @property
    def deduplicated(self) -> bool:
        """Whether each message is stored once. False only with ``optional=True``."""
        return self._state.session.epoch is not None

    @property
    def counts(self) -> Counts:
        """Messages that wait, were delivered or failed so far."""
        return self._state.tally.counts(self._state.pending, self._state.waiting.pending_bytes)

    # --- sending -------------------------------------------------------------------------------

    async def send(
        self,
        message: Any,
        *,
        sequence_id: int | None = None,
        attributes: Mapping[str, str] | None = None,
        routing_key: str | None = None,
    ) -> AsyncProduced:
        """Takes a message and returns the awaitable future of its ``MessageReceipt``. Never part of a transaction's block.

        Args:
          message: an input of the serializer (bytes, without one), or an ``Outgoing``.
          sequence_id: its number; for every message of a producer, or for none.
        Raises:
          SequenceIdsMixed (a ValueError), InvalidSequenceIds, NotEncodable, BufferFull, Closed: nothing happened.
          ProducerFenced, ProducerExpired, GenerationChanged, ProducerStopped: an earlier error ended the
            producer; nothing happened to this message.
        """
        state = self._begun or self._state
        made = prepared(message, state.serializer, sequence_id, attributes, routing_key)
        future = AsyncProduced(self._settling)
        if self._sender.is_inside():
            self._put_late(state, made, future)
            return future
        with self._lock:
            await self._wait_for_room(state, len(made.payload), 1)
            if state.take(made, future, now()):
                self._sender.wake_worker()
        if not state.waiting.pending % MESSAGES_PER_YIELD:  # async only
            await let_others_run()  # else a caller's loop that never waits would starve the sender
        return future

    async def publish(
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
        """Publishes one message, or a list in one request, behind the waiting ones; returns when it is durable.

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
            found out, and it was not sent again. TopicNotFound, MessageTooLarge, DeadlineExceeded, …: nothing happened.
        """
        using = self._state.serializer if serializer is None else serializer_for(serializer)
        request, ids = whole_request(messages, using, ttl_s=ttl_s, attributes=attributes, routing_key=routing_key)
        tracing.stamp(request)
        given: Sequence[int | None] = ids if sequence_ids is None else list(sequence_ids)
        block = None if direct or transaction else block_of(self._client, AsyncTransactionContext)
        if block is None:
            request.write_pointer = None if transaction is None else pointer_of(transaction)
            return await self._sent(request, given, deadline_s)
        under_way = block._require("publishing")
        request.write_pointer = pointer_of(under_way)
        block._messages.touch(self.topic)
        try:
            return await self._sent(request, given, left_s(self._channel, under_way))
        except BaseException as error:
            if getattr(error, "outcome", "unknown") != "not-applied":
                block._messages.doubt()
            raise

    async def publish_atomic(
        self,
        routing_key: str,
        messages: Any,
        *,
        sequence_ids: Sequence[int] | None = None,
        ttl_s: int | None = None,
        serializer: SerializerLike = None,
        deadline_s: float | None = None,
    ) -> Receipt:
        """A lightweight transaction in one call: all messages in one piece, or none. Never part of a block.

        Raises:
          MaxTransactionSizeExceeded: over 16 MiB of serialized bytes, or 65 536 messages. PartialDuplicate: some
            messages were stored before. TransactionOutcomeUnknown; and as ``publish``.
        """
        using = self._state.serializer if serializer is None else serializer_for(serializer)
        request, ids = atomic_request(routing_key, messages, using, ttl_s=ttl_s)
        tracing.stamp(request)
        return await self._sent(request, ids if sequence_ids is None else list(sequence_ids), deadline_s)

    def begin(self, routing_key: str, *, timeout_s: float | None = None) -> AsyncLightweightTransaction:
        """Opens a lightweight transaction; sends no request.

        Args:
          timeout_s: seconds after which it is aborted unless committed; None: the producer's.
        Raises:
          TransactionInProgress: one is open. Closed, and the error that stopped the producer.
        """
        with self._lock:
            opened = self._state.begin(routing_key, timeout_s, now())
            self._sender.wake_worker()  # a worker also watches its time-out
        return AsyncLightweightTransaction(self, opened)

    async def _sent(self, request: PublishRequest, ids: Sequence[int | None], limit_s: float | None) -> Receipt:
        future = await self._hand_over(request, ids, limit_s)
        return await future._outcome()

    async def _hand_over(
        self, request: PublishRequest, ids: Sequence[int | None], limit_s: float | None
    ) -> AsyncProducedWhole:
        future = AsyncProducedWhole(self._settling)
        state = self._state
        if self._sender.is_inside():
            raise BufferFull(
                "a signal handler or a finalizer has interrupted the producer, which this call would wait for",
                hint="use send there, which does not wait",
            )
        with self._lock:
            await self._wait_for_room(state, sum(map(len, request.messages)), len(request.messages))
            state.take_whole(request, ids, future, now(), limit_s)
            self._sender.wake_worker()
        return future

    async def _wait_for_room(self, state: ProducerState[AsyncSettled[Any]], size: int, messages: int) -> None:
        """Waits for room, and makes sure that a worker runs. The caller holds the lock.

        Raises:
          BufferFull, and as ``check_usable``: nothing happened.
        """
        state.check_usable()
        if not self._sender.ready and (full := self._sender.make_ready("the producer is closed")) is not None:
            raise full
        while not state.waiting.has_room(size, messages):
            if self._overflow != "wait":
                raise state.waiting.full(size)
            await self._sender.room.wait()
            state.check_usable()

    def _put_late(self, state: ProducerState[AsyncSettled[Any]], made: Prepared, future: AsyncProduced) -> None:
        """``send`` of a signal handler or a finalizer, which has interrupted this producer: never waits for room."""

        def put() -> Ended[AsyncSettled[Any]] | None:
            try:
                state.check_usable()
                if not state.waiting.has_room(len(made.payload)):
                    raise state.waiting.full(len(made.payload))
                if state.take(made, future, now()):
                    self._sender.wake_worker()
            except PlainsongError as error:
                return Ended([future], error)
            return None

        state.check_usable()
        room = self._bounds.max_pending_bytes - state.waiting.pending_bytes
        self._sender.put_late("the producer is closed", put, len(made.payload) + ITEM_BYTES, room)

    # --- the end -------------------------------------------------------------------------------

    async def flush(self, timeout_s: float | None = None) -> None:
        """Waits until everything is durable, without lingering.

        Raises:
          NotSent: a message still waits after ``timeout_s`` (None: no limit), or failed since the last flush
            without its future being awaited. The flush gives up nothing.
        """
        tally = self._state.tally
        tally.raise_if_unretrieved(await self._sender.flush(timeout_s))

    async def aclose(self, timeout_s: float | None = None) -> None:
        """Aborts an open transaction, flushes, and gives up messages left after ``timeout_s``. Idempotent.

        The topic remembers the name, so that its next producer continues.

        Raises:
          NotSent: as ``flush`` does.
        """
        state = self._state
        with self._lock:
            state.close()
        under_way = await self._sender.aclose(timeout_s)
        if under_way is not None:
            state.tally.raise_if_unretrieved(0, under_way)

    # --- delivering ----------------------------------------------------------------------------

    async def _deliver(self, batch: ProducerBatch[AsyncSettled[Any]]) -> None:
        state = self._state
        delivered, error = None, None
        try:
            until_s, may_split = state.waiting.until_s(batch), len(batch.singles) > 1
            delivery = AsyncDelivery(self._channel, state.session, batch.request, until_s, may_split=may_split)
            delivered = await delivery.run()
        except PlainsongError as failed:
            error = failed
        except Exception as bug:  # an escaped exception would leave the futures pending forever
            log.exception("a request could not be made")
            error = client_bug(bug)
            error.outcome = "unknown"
        except BaseException:
            given_up = MessageDropped("the producer was cancelled under way", outcome="unknown")
            with self._lock:
                ended = state.failed(batch, given_up)
            self._give_up(ended)
            raise
        with self._lock:
            ended = state.delivered(batch) if error is None else state.failed(batch, error)
            ended += self._sender.settled()
        if delivered is not None:
            settle(self._settling, batch.futures, delivered)
        self._give_up(ended)

    def _give_up(self, ended: list[Ended[AsyncSettled[Any]]]) -> None:
        """Settles the futures and counts; without the lock."""
        for each in ended:
            settle(self._settling, each.futures, each.error)
            self._state.tally.failed(list(each.futures), each.error)

    # --- fork and exit hooks of the synchronous client -----------------------------------------

    async def _after_fork(self) -> None:
        """Closes it in a child: the parent keeps the session and the waiting messages."""
        state = self._state
        waiting = list(state.waiting.futures())
        self._settling.renew()
        state.close()
        self._make_sender(state)
        self._sender.stop()
        error = MessageDropped("the process forked: the parent sends this message", outcome="unknown")
        settle(self._settling, waiting, error)

    async def _at_exit(self) -> None:
        """Sends what it can within ``exit_timeout_s``, and logs the rest."""
        try:
            await self.aclose(self.exit_timeout_s)
        except NotSent as error:
            log.error("a producer was never closed, and the program ended: %s", error.detail)


class AsyncLightweightTransaction:
    """Messages of one routing key, published atomically; made by ``AsyncProducer.begin``.

    The client keeps them until ``commit``, which is one publish. An ``async with`` block aborts an open transaction at its
    end, and a commit under way is completed. For one task at a time.
    """

    def __init__(self, producer: AsyncProducer, transaction: Lightweight) -> None:
        self._producer = producer
        self._transaction = transaction
        self._sent: AsyncProducedWhole | None = None

    def __repr__(self) -> str:
        return f"<AsyncLightweightTransaction of {self.routing_key!r}, {self.state}>"

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

    async def commit(self) -> Receipt:
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
                self._sent = await self._producer._hand_over(request, transaction.sequence_ids, None)
            except BaseException:
                transaction.state = "open"  # nothing was handed over
                raise
        return await self._settle()

    async def _settle(self) -> Receipt:
        assert self._sent is not None
        try:
            receipt = await self._sent._outcome()
        except PlainsongError as error:
            self._transaction.failed(error, now())
            raise
        self._transaction.committed(receipt)
        return receipt

    def abort(self) -> None:
        """Drops it without sending; uses up no sequence id. Idempotent. Raises NoTransaction: it is committed."""
        self._transaction.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._transaction.state == "committing":
            try:
                with shielded():
                    await self._settle()
            except PlainsongError:
                if kind is None:
                    raise
        if self._transaction.state == "open":
            self._transaction.abort()
