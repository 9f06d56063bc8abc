# Written by scripts/unasync.py from plainsong/_async/messages.py: change that, and run it (make sync).
"""Calls on the messages of topics: publish, poll, read, and what buffers or numbers messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, overload

from plainsong import calls, publisher_queue, tracing
from plainsong._sync.producer import Producer
from plainsong._sync.publisher import Publisher
from plainsong._sync.read import Reader
from plainsong._sync.reading import reading_in
from plainsong._sync.transaction import TransactionContext, publish_in_one
from plainsong.loading import load
from plainsong.messages import Origin, all_with_attributes, as_list, outgoing_request
from plainsong.positions import (
    DEFAULT_PAGE_MESSAGES,
    OLDEST,
    checked_as_of,
    checked_isolation,
    checked_keeper,
    is_inclusive,
    read_plan,
)
from plainsong.producer_queue import TRANSACTION_TIMEOUT_S, producer_bounds, unnumbered_atomic_request
from plainsong.protocol.errors import InvalidParameter, NoMessages
from plainsong.protocol.requests import MAX_WAIT_MS, PollRequest
from plainsong.serializers import serializer_for
from plainsong.stream_queue import DEFAULT_PENDING_BYTES
from plainsong.transactions import (
    Transaction,
    block_of,
    blocks,
    pointer_of,
    publish_under,
    rollback,
    snapshot_of,
    store,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Unpack

    from plainsong._sync._backend import Owned
    from plainsong._sync.retry import Channel
    from plainsong._sync.stream import Stream
    from plainsong.calls import Call
    from plainsong.messages import (
        Bodies,
        DroppedMessage,
        MessageId,
        Outgoing,
        Page,
        Receipt,
    )
    from plainsong.positions import Moment, Position, Start
    from plainsong.protocol.requests import Isolation, PublishRequest
    from plainsong.publisher_queue import Mode, Overflow
    from plainsong.serializers import SerializerLike, SerializerOf
    from plainsong.transactions import Under


V = TypeVar("V")


class PublishOptions(TypedDict, total=False):
    """Keyword arguments of ``publish``, which explains them."""

    ttl_s: int | None
    attributes: Mapping[str, str] | None
    routing_key: str | None
    retry_unknown: bool
    deadline_s: float | None
    transaction: Under
    direct: bool


class PollOptions(TypedDict, total=False):
    """Keyword arguments of ``poll``, which explains them."""

    inclusive: bool | None
    limit: int | None
    max_bytes: int | None
    wait_ms: int | None
    until: Start
    deadline_s: float | None
    isolation: Isolation | None
    as_of: Moment | None
    transaction: Transaction | None
    direct: bool


class ReadOptions(TypedDict, total=False):
    """Keyword arguments of ``read``, which explains them."""

    follow: bool
    until: Start
    limit: int | None
    position: Position | None
    isolation: Isolation | None
    as_of: Moment | None
    idle_timeout_s: float | None
    direct: bool
    page_messages: int
    save_every: int
    save_interval_s: float


class Messages:
    """The calls of an ``Client`` on the messages of topics."""

    _channel: Channel
    _owned: Owned

    @property
    def namespace(self) -> str:
        """The namespace of all topics of this client."""
        return self._channel.namespace

    # --- publishing ------------------------------------------------------------------------------

    @overload
    def publish(
        self, topic: str, messages: Bodies = (), *, serializer: None = None, **options: Unpack[PublishOptions]
    ) -> Receipt: ...
    @overload
    def publish(
        self,
        topic: str,
        messages: V | Outgoing | Iterable[V | Outgoing],
        *,
        serializer: SerializerOf[V],
        **options: Unpack[PublishOptions],
    ) -> Receipt: ...
    def publish(
        self,
        topic: str,
        messages: Any = (),
        *,
        ttl_s: int | None = None,
        attributes: Mapping[str, str] | None = None,
        routing_key: str | None = None,
        serializer: SerializerLike = None,
        retry_unknown: bool = False,
        deadline_s: float | None = None,
        transaction: Under = None,
        direct: bool = False,
    ) -> Receipt:
        """Publishes, and returns when the messages are durable. In a block of ``transaction()``: publishes with its commit.

        Args:
          messages: one, or several (a list, a tuple, a generator or another iterator), which become visible together; each
            is an input of the serializer (bytes, without one), or an ``Outgoing``. With a ``transaction`` there may be none:
            then the messages stored under it are published.
          ttl_s: their time to live in seconds, if shorter than the topic's.
          attributes, routing_key: for all messages without their own (``Outgoing``).
          retry_unknown: also retry when an attempt may have succeeded: at least once, perhaps twice. Not in a
            transaction, which is undone as a whole instead.
          deadline_s: for this call.
          transaction: ``"own"``: this call begins and commits one; a ``Transaction`` or its write pointer: publish
            under it now; the caller commits it or rolls it back.
          direct: outside the transaction of the surrounding block.
        Raises:
          TopicNotFound, MessageTooLarge, BodyTooLarge, NotEncodable, NoMessages, ConnectFailed: nothing happened.
          ConnectionLost, OutcomeUnknown: unknown. DeadlineExceeded: as its ``outcome`` says.
          TransactionRequired, TransactionRefused: because of the topic's property ``transactional``; nothing happened.
          with ``"own"``: as a commit (TransactionFailed, TransactionInDoubt, …).
        """
        if attributes is not None or routing_key is not None:
            messages = all_with_attributes(messages, attributes, routing_key)
        if transaction == "own":
            return publish_in_one(self, topic, messages, ttl_s=ttl_s, serializer=serializer)
        many = as_list(messages)
        channel = self._channel
        if transaction is not None:
            request = outgoing_request(many, serializer, ttl_s)
            if not isinstance(transaction, (Transaction, int)):
                raise InvalidParameter(
                    f"transaction is {transaction!r}", hint='use a Transaction, its write pointer, or "own"'
                )
            request.write_pointer = pointer_of(transaction)
            return self._send(topic, request, publish_under(channel.namespace, topic, request), deadline_s)
        # Most programs have no block: reading the variable is cheaper than calling the function.
        block = block_of(self, TransactionContext) if blocks.get() and not direct else None
        if block is not None:
            return block.publish(topic, many, ttl_s=ttl_s, serializer=serializer)
        if not many:
            raise NoMessages("the list is empty")
        request = outgoing_request(many, serializer, ttl_s)
        call = calls.publish(channel.namespace, topic, request, retry_unknown=retry_unknown)
        return self._send(topic, request, call, deadline_s)

    def _send(self, topic: str, request: PublishRequest, call: Call[Receipt], deadline_s: float | None) -> Receipt:
        with tracing.sending(self.namespace, topic, len(request.messages)) as span:
            receipt = self._channel.call(span.carried(call), deadline_s)
            span.sent(receipt)
        return receipt

    def store(
        self,
        topic: str,
        messages: Any,
        transaction: Transaction | int,
        *,
        ttl_s: int | None = None,
        serializer: SerializerLike = None,
        deadline_s: float | None = None,
    ) -> None:
        """Stores messages under a transaction, for a later ``publish(topic, transaction=…)``.

        A transaction's own ``publish`` does this when its buffer is full.

        Raises:
          as ``publish``; AlreadyPublished: the stored messages have been published, nothing happened.
        """
        request = outgoing_request(as_list(messages), serializer, ttl_s)
        if not request.messages:
            raise NoMessages("the list is empty")
        request.write_pointer = pointer_of(transaction)
        with tracing.sending(self.namespace, topic, len(request.messages)) as span:
            self._channel.call(span.carried(store(self._channel.namespace, topic, request)), deadline_s)

    def rollback(self, topic: str, transaction: Transaction | int) -> None:
        """Hides from committed readers everything that a transaction published or stored in a topic. Idempotent.

        Rolls back every write pointer of a ``Transaction``. The transaction itself stays open.

        Raises:
          TopicNotFound: nothing happened. ConnectionLost, DeadlineExceeded: unknown; repeat it.
        """
        pointers: tuple[int, ...] = (pointer_of(transaction),)
        if isinstance(transaction, Transaction) and transaction.pointers:
            pointers = transaction.pointers
        for pointer in pointers:
            self._channel.call(rollback(self._channel.namespace, topic, pointer))

    def publisher(
        self,
        topic: str | None = None,
        *,
        linger_ms: float = 0,
        max_batch_messages: int = publisher_queue.DEFAULT_BATCH_MESSAGES,
        max_batch_bytes: int = publisher_queue.DEFAULT_BATCH_BYTES,
        max_pending_bytes: int = publisher_queue.DEFAULT_PENDING_BYTES,
        overflow: Overflow | None = None,
        mode: Mode = "reliable",
        delivery_timeout_s: float | None = None,
        retry_unknown: bool = False,
        on_drop: Callable[[DroppedMessage], object] | None = None,
        serializer: SerializerLike = None,
        connections: int = 4,
        exit_timeout_s: float = publisher_queue.EXIT_TIMEOUT_S,
    ) -> Publisher:
        """A buffered publisher, which does not wait for answers; use it in a ``with`` block, or close it.

        Args:
          topic: for ``send`` without a topic.
          linger_ms: how long the first message of a batch waits for more; even with 0, messages that arrive during a
            request are batched.
          max_batch_messages, max_batch_bytes: for one request.
          max_pending_bytes: memory of the buffer, counting about 400 bytes per message in addition to its payload.
          overflow: when the buffer is full: ``"wait"`` (the default), ``"raise"`` BufferFull, or ``"drop"`` the
            new message.
          mode: ``"reliable"``: the message's future, ``flush`` and ``close`` raise every failure.
            ``"best_effort"``: an undeliverable message is dropped, counted and passed to ``on_drop``; nothing waits,
            and nothing raises.
          delivery_timeout_s: after which an undelivered message fails or is dropped, even while it is being sent; None: 120 in reliable
            mode, 10 in best effort.
          retry_unknown: as for ``publish``.
          on_drop: called with a ``DroppedMessage``, in a thread of the publisher or in ``send``.
          connections: concurrent requests, for different topics; never two for one topic.
          exit_timeout_s: how long the end of the program, or of a block left by an exception, may wait.
        Raises:
          InvalidParameter: an option is invalid.
        """
        overflow = overflow or ("wait" if mode == "reliable" else "drop")
        bounds = publisher_queue.publisher_bounds(
            linger_ms=linger_ms,
            max_batch_messages=max_batch_messages,
            max_batch_bytes=max_batch_bytes,
            max_pending_bytes=max_pending_bytes,
            delivery_timeout_s=delivery_timeout_s,
            mode=mode,
            overflow=overflow,
            retry_unknown=retry_unknown,
            connections=connections,
        )
        return self._owned.add(
            Publisher(
                self._channel,
                bounds,
                topic=topic,
                overflow=overflow,
                connections=connections,
                serializer=serializer,
                on_drop=on_drop,
                exit_timeout_s=exit_timeout_s,
            )
        )

    # --- producers ---------------------------------------------------------------------------------

    def producer(
        self,
        topic: str,
        name: str | None = None,
        *,
        initial_sequence_id: int | None = None,
        optional: bool = False,
        retention_s: int | None = None,
        serializer: SerializerLike = None,
        linger_ms: float = 0,
        max_batch_messages: int = publisher_queue.DEFAULT_BATCH_MESSAGES,
        max_batch_bytes: int = publisher_queue.DEFAULT_BATCH_BYTES,
        max_pending_bytes: int = publisher_queue.DEFAULT_PENDING_BYTES,
        overflow: Overflow = "wait",
        delivery_timeout_s: float | None = None,
        transaction_timeout_s: float = TRANSACTION_TIMEOUT_S,
        exit_timeout_s: float = publisher_queue.EXIT_TIMEOUT_S,
        deadline_s: float | None = None,
    ) -> Producer:
        """A producer sends in order, and each of its messages is stored once, across broken connections and restarts.

        Its ``with`` block opens it. That fences off the previous producer of the name: the daemon refuses its
        requests from then on.

        Args:
          name: identifies it across restarts; None: the daemon chooses a new, unique name.
          initial_sequence_id: the first automatic id. None: 0 for a new name, otherwise the last id + 1. If lower,
            each message up to the last id is reported as a duplicate.
          optional: open even if deduplication is switched off; then a message may be stored twice, and receipts say so.
          retention_s: how long the topic remembers an idle producer, if longer than its default.
          serializer: for all its messages.
          linger_ms, max_batch_messages, max_batch_bytes, max_pending_bytes: as for ``publisher``.
          overflow: when the buffer is full: ``"wait"``, or ``"raise"`` BufferFull.
          delivery_timeout_s: after which an undelivered message fails; None: 120.
          transaction_timeout_s: how long a lightweight transaction may be open.
          exit_timeout_s: how long the end of the program, or of a block left by an exception, may wait.
          deadline_s: for the opening.
        Raises:
          InvalidParameter: an option is invalid. The block raises DeduplicationDisabled, TopicNotFound,
            TooManyProducers, InvalidSequenceIds.
        """
        bounds = producer_bounds(
            linger_ms=linger_ms,
            max_batch_messages=max_batch_messages,
            max_batch_bytes=max_batch_bytes,
            max_pending_bytes=max_pending_bytes,
            overflow=overflow,
            delivery_timeout_s=delivery_timeout_s,
        )
        return self._owned.add(
            Producer(
                self,
                self._channel,
                topic,
                name,
                bounds,
                initial_sequence_id=initial_sequence_id,
                optional=optional,
                retention_s=retention_s,
                serializer=serializer_for(serializer),
                overflow=overflow,
                transaction_timeout_s=transaction_timeout_s,
                exit_timeout_s=exit_timeout_s,
                deadline_s=deadline_s,
            )
        )

    def publish_atomic(
        self,
        topic: str,
        routing_key: str,
        messages: Any,
        *,
        ttl_s: int | None = None,
        attributes: Mapping[str, str] | None = None,
        serializer: SerializerLike = None,
        deadline_s: float | None = None,
    ) -> Receipt:
        """A lightweight transaction without a producer: all messages contiguously, or none. Never part of a block.

        Raises:
          as ``publish``: sent once, so after ``ConnectionLost`` the outcome is unknown; a producer would determine it.
          MaxTransactionSizeExceeded: over 16 MiB of serialized bytes, or 65 536 messages; nothing happened.
        """
        request = unnumbered_atomic_request(routing_key, messages, serializer_for(serializer), ttl_s, attributes)
        call = calls.publish(self._channel.namespace, topic, request)
        return self._send(topic, request, call, deadline_s)

    def stream(
        self, topic: str, *, max_pending_bytes: int = DEFAULT_PENDING_BYTES, serializer: SerializerLike = None
    ) -> Stream:
        """A connection that pipelines publishes; use it in a ``with`` block, or close it.

        For loops of single publishes, each with its own receipt. Unlike a ``publisher``, a stream ends with its connection
        and never retries: its tickets say how each request ended. It takes no part in transactions.

        Args:
          max_pending_bytes: memory of the requests without an answer, counting about 300 bytes for each in addition to
            its messages; ``publish`` waits when it is full. A larger request is sent alone.
        Raises:
          ConnectFailed, InvalidName, ShuttingDown: nothing happened.
        """
        load("plainsong._sync.stream")
        from plainsong._sync.stream import (
            Stream,
        )  # imports the WebSocket library, which most programs do not need

        return self._owned.add(Stream(self._channel, topic, max_pending_bytes=max_pending_bytes, serializer=serializer))

    # --- reading -----------------------------------------------------------------------------------

    @overload
    def poll(
        self, topic: str, start: Start = OLDEST, *, serializer: None = None, **options: Unpack[PollOptions]
    ) -> Page[bytes]: ...
    @overload
    def poll(
        self, topic: str, start: Start = OLDEST, *, serializer: SerializerOf[V], **options: Unpack[PollOptions]
    ) -> Page[V]: ...
    def poll(
        self,
        topic: str,
        start: Start = OLDEST,
        *,
        inclusive: bool | None = None,
        limit: int | None = None,
        max_bytes: int | None = None,
        wait_ms: int | None = None,
        until: Start = None,
        serializer: SerializerLike = None,
        deadline_s: float | None = None,
        isolation: Isolation | None = None,
        as_of: Moment | None = None,
        transaction: Transaction | None = None,
        direct: bool = False,
    ) -> Page[Any]:
        """One page of messages, oldest first.

        Args:
          start: see ``plainsong.positions``; continue after a page with its ``last_id``.
          inclusive: include a message at ``start``; None: include it if ``start`` is a time, not if it is an id.
          limit, max_bytes: upper bounds; None: the daemon's (100 000 messages, 16 MiB).
          wait_ms: how long to wait for a first message, 60 000 at most.
          until: end before this place.
          isolation: ``"committed"``: up to the first undecided message (``page.held`` names its transaction), without the
            messages of aborted or invalid transactions. ``"uncommitted"``: everything, even if it is rolled back later.
            None: committed; but where the daemon has no transaction service (``off``), or its Tephra does not answer,
            everything, and a warning is logged once.
          as_of: a moment (a datetime, milliseconds since 1970, ``"-10m"``): exactly what had been committed by then,
            without waiting; messages undecided at that moment are skipped.
          transaction: read its snapshot instead: what was committed before it began, and its own messages.
          direct: outside the transaction of the surrounding block.
        Raises:
          TopicNotFound, InvalidParameter, InvalidMessageId, ConnectFailed, DeadlineExceeded: reading
            changes nothing, and is retried until ``deadline_s``.
          TransactionsUnavailable: the daemon cannot tell what is committed; without an isolation, only after
            ``deadline_s``. NoTransaction: the block's transaction has ended. AsOfTooOld: what had been committed
            by then is no longer known.
        """
        if transaction is None and not direct:
            block = block_of(self, TransactionContext)
            transaction = None if block is None else block._require("poll")
        snapshot = snapshot_of(transaction)
        checked_isolation(isolation)
        as_of_ms, isolation = checked_as_of(as_of, isolation, self._channel.wall_ms())
        if isolation is not None and snapshot is not None:
            raise InvalidParameter(
                "a transaction reads its own snapshot", hint="omit isolation and as_of, or use direct=True"
            )
        if wait_ms is not None and not 0 <= wait_ms <= MAX_WAIT_MS:
            raise InvalidParameter(f"wait_ms is {wait_ms}", hint=f"use 0 to {MAX_WAIT_MS}")
        for name, number in (("limit", limit), ("max_bytes", max_bytes)):
            if number is not None and not (isinstance(number, int) and 0 < number < 1 << 31):
                raise InvalidParameter(f"{name} is {number!r}", hint="use a whole number above 0")
        channel = self._channel
        origin = Origin(topic, serializer_for(serializer))
        position = channel.resolve(topic, start, deadline_s)
        request = PollRequest(position, is_inclusive(position, inclusive), limit)
        request.max_bytes = max_bytes
        request.wait_ms = wait_ms
        request.as_of_ms = as_of_ms
        request.transaction = snapshot
        if until is not None:
            request.end_before = channel.resolve_end(topic, until, deadline_s)

        def asked(isolation: Isolation) -> Call[Page[Any]]:
            request.isolation = isolation
            return calls.poll(channel.namespace, origin, request)

        begun = tracing.begun_ns()
        if snapshot is not None:
            page = channel.call(calls.poll(channel.namespace, origin, request), deadline_s)
        else:
            page = channel.read(asked, isolation, deadline_s)
        tracing.received(channel.namespace, topic, page, begun)
        return page

    @overload
    def read(
        self,
        topics: str | Iterable[str],
        start: Start = OLDEST,
        *,
        serializer: None = None,
        **options: Unpack[ReadOptions],
    ) -> Reader[bytes]: ...
    @overload
    def read(
        self,
        topics: str | Iterable[str],
        start: Start = OLDEST,
        *,
        serializer: SerializerOf[V],
        **options: Unpack[ReadOptions],
    ) -> Reader[V]: ...
    def read(
        self,
        topics: str | Iterable[str],
        start: Start = OLDEST,
        *,
        follow: bool = False,
        until: Start = None,
        limit: int | None = None,
        position: Position | None = None,
        serializer: SerializerLike = None,
        isolation: Isolation | None = None,
        as_of: Moment | None = None,
        idle_timeout_s: float | None = None,
        direct: bool = False,
        page_messages: int = DEFAULT_PAGE_MESSAGES,
        save_every: int = 1_000,
        save_interval_s: float = 5.0,
    ) -> Reader[Any]:
        """An iterator over messages, in the order of each topic, fair between several.

        Args:
          topics: a name, a pattern (``orders-*``), or several of them. While following, a pattern
            includes new topics within ten seconds.
          start: where to begin in topics without a saved ``position``.
          follow: wait for more at the end, across restarts of the daemon, until ``stop`` or ``idle_timeout_s``. False:
            end there.
          until: stop before this place (not with ``follow``).
          limit: stop after this many messages.
          position: a ``FilePosition`` or ``ServerPosition``; the next reader continues after the saved position.
          isolation: ``"committed"``: only messages that the daemon's own transaction service committed, in order; the
            reader stops at the first undecided message (``held`` names its transaction), and continues by itself
            while following. ``"uncommitted"``: everything, including messages that are rolled back later. None: as for
            ``poll``. In a block of ``transaction()`` it reads the transaction's snapshot instead, the position is part
            of the transaction, and reading ends when 90 % of its time has passed.
          as_of: as for ``poll``, not with ``follow``: all topics as of the same moment.
          idle_timeout_s: a reader that follows ends when it has waited this long for a message.
          direct: outside the transaction of the surrounding block.
          page_messages: messages per request.
          save_every, save_interval_s: the position is saved after this many messages or seconds, whichever is
            first, before waiting at the end, and at the end. After a crash, messages read since the last save are
            delivered again; none is skipped.
        Raises:
          InvalidParameter, InvalidName, NoTransaction: at once. The iterator raises as ``poll`` does (while
            following only lasting errors, such as TopicNotFound), PositionNotSaved, and PositionChanged.
        """
        checked_isolation(isolation)
        checked_keeper(position)
        as_of_ms, isolation = checked_as_of(as_of, isolation, self._channel.wall_ms())
        plan = read_plan(
            topics,
            start,
            until=until,
            follow=follow,
            limit=limit,
            serializer=serializer,
            page_messages=page_messages,
            save_every=save_every,
            save_interval_s=save_interval_s,
            isolation=isolation,
            idle_timeout_s=idle_timeout_s,
            as_of_ms=as_of_ms,
        )
        block = None if direct else block_of(self, TransactionContext)
        return Reader(reading_in(block, self._channel, plan, position))

    def position_of_last(
        self, topic: str, count: int, *, isolation: Isolation | None = None, as_of: Moment | None = None
    ) -> MessageId | None:
        """The id before the last ``count`` messages of this isolation; None: start at the oldest.

        Raises TopicNotFound, AsOfTooOld.
        """
        checked_isolation(isolation)
        as_of_ms, isolation = checked_as_of(as_of, isolation, self._channel.wall_ms())
        return self._channel.position_of_last(topic, count, isolation, as_of_ms)
