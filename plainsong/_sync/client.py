# Written by scripts/unasync.py from plainsong/_async/client.py: change that, and run it (make sync).
"""The client: topics, publishing, polling, reading and transactions of one namespace."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, overload

from plainsong import calls, publisher_queue, tracing
from plainsong._sync._backend import Owned, shielded
from plainsong._sync._pool import Pool
from plainsong._sync.producer import Producer
from plainsong._sync.publisher import Publisher
from plainsong._sync.read import Reader, reading_in
from plainsong._sync.retry import Channel
from plainsong._sync.transaction import TransactionContext, publish_in_one
from plainsong._sync.transactions import Transactions
from plainsong.bound import of_topic
from plainsong.errors import NotSent
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
from plainsong.protocol import ids
from plainsong.protocol.errors import InvalidParameter, NoMessages, PreconditionFailed, TransactionConflict
from plainsong.protocol.names import topic_name
from plainsong.protocol.requests import MAX_WAIT_MS, PollRequest
from plainsong.serializers import serializer_for
from plainsong.settings import DEFAULT_URL, WAIT_FOR_DAEMON_S, Settings, from_environment
from plainsong.stream_queue import DEFAULT_PENDING_BYTES
from plainsong.transactions import (
    DEFAULT_BUFFER_BYTES,
    DEFAULT_BUFFER_MESSAGES,
    DEFAULT_RETRIES,
    Retries,
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
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Self, Unpack

    from plainsong._sync.events import Events
    from plainsong._sync.stream import Stream
    from plainsong.calls import Call
    from plainsong.chains import ChainHead, ChainReport
    from plainsong.credentials import File
    from plainsong.messages import (
        Bodies,
        DroppedMessage,
        EventKind,
        MessageId,
        Outgoing,
        Page,
        Receipt,
        Seen,
        TopicOptions,
        TopicStats,
    )
    from plainsong.participants import TransactionAware
    from plainsong.positions import Moment, Position, Start
    from plainsong.protocol.requests import Isolation, PublishRequest
    from plainsong.publisher_queue import Mode, Overflow
    from plainsong.serializers import SerializerLike, SerializerOf
    from plainsong.transactions import TransactionKind, Under

#: What topics are sorted by.
TopicColumn = Literal["name", "messages", "bytes", "oldestAgeMs", "publishPerSecond", "pollPerSecond", "hiddenMessages"]
#: How often a change of some properties is tried while others change them too.
CHANGE_TRIES = 50
T = TypeVar("T")
V = TypeVar("V")

log = logging.getLogger("plainsong.client")


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


class Client:
    """Talks to a daemon: topics, publishing, polling, reading.

    Thread-safe: all threads may share one. After a fork the child opens its own connections, and both processes can
    use the client. It connects on first use, so creating it needs no daemon.

    Every failure of the daemon or the network is a ``PlainsongError``, whose ``outcome`` says whether the request
    happened. The client retries a call, with pauses, while that is safe and within ``deadline_s``.

    Args:
      url: of the daemon, or several (a list, or one string with commas): the client fails over to the next if one is
        unreachable or shutting down.
      namespace: of all topics.
      token, token_file: a bearer token, or a file whose one line is one, which is read again when the daemon refuses it.
      ca_file: the authorities that are trusted for https, PEM; the system's by default.
      certificate: the files of the client's own certificate and its key, PEM, for daemons that ask for one.
      insecure: send the token unencrypted to another machine; without it, that is an InvalidParameter.
      connect_timeout_s: for opening a connection, the resolution of its name included.
      request_timeout_s: for one request and its complete answer; with one daemon a large body has a second more for
        each 16 KiB, and the smallest pages of a reader may take longer.
      deadline_s: for a call with all its retries; methods take their own. A poll's ``wait_ms`` extends
        both limits.
      retry: False: one attempt at each URL, and no pauses.
      max_connections: open at once; further requests wait for one.
      follow_owners: with several instances, send requests to the topic's owner, which the first answer names; False:
        only to ``url``, as behind a load balancer.
      wait_for_daemon_s: how long a first connection that is refused is retried, until any daemon has answered once:
        retries are for what once worked. Longer for programs that start before their daemon.
    Raises:
      InvalidName, InvalidParameter: an argument is invalid.
    """

    def __init__(
        self,
        url: str | Sequence[str] = DEFAULT_URL,
        *,
        namespace: str = "default",
        token: str | None = None,
        token_file: File | None = None,
        ca_file: File | None = None,
        certificate: tuple[File, File] | None = None,
        insecure: bool = False,
        connect_timeout_s: float = 5.0,
        request_timeout_s: float = 30.0,
        deadline_s: float = 60.0,
        retry: bool = True,
        max_connections: int = 100,
        follow_owners: bool = True,
        wait_for_daemon_s: float = WAIT_FOR_DAEMON_S,
    ) -> None:
        self._settings = Settings.checked(
            url,
            namespace=namespace,
            token=token,
            token_file=token_file,
            ca_file=ca_file,
            certificate=certificate,
            insecure=insecure,
            connect_timeout_s=connect_timeout_s,
            request_timeout_s=request_timeout_s,
            deadline_s=deadline_s,
            retry=retry,
            max_connections=max_connections,
            follow_owners=follow_owners,
            wait_for_daemon_s=wait_for_daemon_s,
        )
        self._channel = Channel(self._settings, Pool(self._settings))
        self._owned = Owned()

    @classmethod
    def from_environment(cls, **options: Any) -> Self:
        """A client for ``PLAINSONG_URL``, ``PLAINSONG_NAMESPACE``, ``PLAINSONG_TOKEN_FILE``, ``PLAINSONG_CA_FILE``,
        ``PLAINSONG_CERTIFICATE`` and ``PLAINSONG_KEY``; ``options`` as above; they win.
        """
        return cls(**{**from_environment(), **options})

    def close(self) -> None:
        """Closes its publishers, each within its ``exit_timeout_s``, then all connections. Idempotent.

        Raises:
          NotSent: its publishers could not send everything; all is closed nevertheless.
        """
        try:
            self._owned.close()
        finally:
            self._channel.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with shielded():
                self.close()
        except NotSent as error:
            if kind is None:
                raise
            log.warning("a client was left by an error: %s", error.detail)

    def __repr__(self) -> str:
        return f"<Client of {self.namespace} at {self._channel.places.current}>"

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
          ttl_s: seconds they live, if shorter than the topic's ttl.
          attributes, routing_key: of all messages without their own (``Outgoing``).
          retry_unknown: also retry when an attempt may have succeeded: at least once, perhaps twice. Not in a
            transaction, which is undone as a whole instead.
          deadline_s: for this call.
          transaction: ``"own"``: this call begins and commits one; a ``Transaction`` or its write pointer: publish
            under it now; the caller commits it or rolls it back.
          direct: outside the transaction of the surrounding block.
        Raises:
          TopicNotFound, MessageTooLarge, BodyTooLarge, NotEncodable, NoMessages, ConnectFailed: nothing happened.
          ConnectionLost, OutcomeUnknown: unknown. DeadlineExceeded: as its ``outcome`` says.
          TransactionRequired, TransactionRefused: the topic's ``transactional``; nothing happened.
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
        # Most programs have no block: looking is cheaper than asking.
        block = block_of(self, TransactionContext) if blocks.get() and not direct else None
        if block is not None:
            return block.publish(topic, many, ttl_s=ttl_s, serializer=serializer)
        if not many:
            raise NoMessages("the list is empty")
        request = outgoing_request(many, serializer, ttl_s)
        call = calls.publish(channel.namespace, topic, request, retry_unknown=retry_unknown)
        return self._send(topic, request, call, deadline_s)

    def _send(self, topic: str, request: PublishRequest, call: Call[Receipt], deadline_s: float | None) -> Receipt:
        with tracing.sending(self._channel.namespace, topic, len(request.messages)) as span:
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
            self._channel.call(span.carried(store(self.namespace, topic, request)), deadline_s)

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
            self._channel.call(rollback(self.namespace, topic, pointer))

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
          linger_ms: how long the first message of a batch waits for more; even with 0, messages that arrive while a
            request is under way are gathered.
          max_batch_messages, max_batch_bytes: of one request.
          max_pending_bytes: memory of the buffer, counting about 400 bytes for each message beside its payload.
          overflow: when the buffer is full: ``"wait"`` (the default), ``"raise"`` BufferFull, or ``"drop"`` the
            new message.
          mode: ``"reliable"``: the message's future, ``flush`` and ``close`` raise every failure.
            ``"best_effort"``: an undeliverable message is dropped, counted and passed to ``on_drop``; nothing waits,
            and nothing raises.
          delivery_timeout_s: after which an undelivered message fails or is dropped, also under way; None: 120 in reliable
            mode, 10 in best effort.
          retry_unknown: as for ``publish``.
          on_drop: called with a ``DroppedMessage``, in a thread of the publisher or in ``send``.
          connections: requests under way at once, for different topics; never two for one topic.
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
          initial_sequence_id: the first automatic id. None: 0 for a new name, else the one after the last. If lower,
            each message up to the last id is reported as a duplicate.
          optional: also open where deduplication is switched off; then a message may be stored twice, and receipts say so.
          retention_s: how long the topic remembers a silent name, if longer than its default.
          serializer: of all its messages.
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
        """A lightweight transaction without a producer: all messages in one piece, or none. Never part of a block.

        Raises:
          as ``publish``: sent once, so a lost answer is ``ConnectionLost``, unknown; a producer would find out the outcome.
          MaxTransactionSizeExceeded: over 16 MiB of serialized bytes, or 65 536 messages; nothing happened.
        """
        request = unnumbered_atomic_request(routing_key, messages, serializer_for(serializer), ttl_s, attributes)
        call = calls.publish(self._channel.namespace, topic, request)
        return self._send(topic, request, call, deadline_s)

    # --- managing producers ----------------------------------------------------------------------

    def producers(self, topic: str, *, after: str | None = None, limit: int = 100) -> dict[str, Any]:
        """One page of a topic's ``producers``, by name, ``next`` for ``after``, and how the topic retains them.

        Raises TopicNotFound, InvalidParameter.
        """
        call = calls.list_producers(self._channel.namespace, topic, after, limit)
        return self._channel.call(call)

    def producer_state(self, topic: str, name: str, *, generation: int | None = None) -> dict[str, Any]:
        """``epoch``, ``lastSequenceId``, ``recent``, … of one producer; with a ``generation`` also of a deleted topic.

        Raises TopicNotFound, ProducerNotFound, GenerationChanged, ProducerExpired.
        """
        call = calls.show_producer(self._channel.namespace, topic, name, generation)
        return self._channel.call(call)

    def delete_producer(self, topic: str, name: str) -> None:
        """Forgets a producer: its session ends, and its sequence ids may be used again. Raises TopicNotFound, ProducerNotFound."""
        self._channel.call(calls.delete_producer(self._channel.namespace, topic, name))

    @property
    def namespaces(self) -> Namespaces:
        """The daemon's namespaces and their properties."""
        return Namespaces(self._channel)

    def stream(
        self, topic: str, *, max_pending_bytes: int = DEFAULT_PENDING_BYTES, serializer: SerializerLike = None
    ) -> Stream:
        """A connection that pipelines publishes; use it in a ``with`` block, or close it.

        For loops of single publishes, each with its own receipt. Unlike a ``publisher``, a stream ends with its connection
        and never retries: its tickets say how each request ended. It takes no part in transactions.

        Args:
          max_pending_bytes: memory of the requests without an answer, counting about 300 bytes for each beside its
            messages; ``publish`` waits when it is full. A larger request is sent alone.
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
          inclusive: whether to include a message at ``start``; None: at a time yes, at an id no.
          limit, max_bytes: upper bounds; None: the daemon's (100 000 messages, 16 MiB).
          wait_ms: how long to wait for a first message, 60 000 at most.
          until: end before it.
          isolation: ``"committed"``: up to the first undecided message (``page.held`` names its transaction), without the
            messages of aborted or invalid transactions. ``"uncommitted"``: everything, also what is rolled back later.
            None: committed; but where the daemon has no transaction service (``off``), or its Tephra is away,
            everything, and a warning is logged once.
          as_of: a moment (a datetime, milliseconds since 1970, ``"-10m"``): exactly what had been committed by then,
            whatever was undecided skipped. It waits for nothing.
          transaction: read its snapshot instead: what was committed before it began, and its own messages.
          direct: outside the transaction of the surrounding block.
        Raises:
          TopicNotFound, InvalidParameter, InvalidMessageId, ConnectFailed, DeadlineExceeded: reading
            changes nothing, and is retried until ``deadline_s``.
          TransactionsUnavailable: the daemon cannot tell what is committed; without an isolation, only after
            ``deadline_s``. NoTransaction: the block's has ended. AsOfTooOld: what had been committed by then is not
            known any more.
        """
        if transaction is None and not direct:
            block = block_of(self, TransactionContext)
            transaction = None if block is None else block._require("poll")
        snapshot = snapshot_of(transaction)
        checked_isolation(isolation)
        as_of_ms, isolation = checked_as_of(as_of, isolation, self._channel.wall_ms())
        if isolation is not None and snapshot is not None:
            raise InvalidParameter(
                "a transaction reads its own snapshot", hint="leave isolation and as_of out, or say direct=True"
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
          follow: wait for more at the end, across restarts of the daemon, until ``stop`` or ``idle_timeout_s``; else end
            there.
          until: stop before it (not with ``follow``).
          limit: stop after so many messages.
          position: a ``FilePosition`` or ``ServerPosition``; the next reader continues after the saved position.
          isolation: ``"committed"``: only messages that the daemon's own transaction service committed, in order; the
            reader stops at the first undecided message (``held`` names its transaction), and continues by itself
            while following. ``"uncommitted"``: everything, also messages that are rolled back later. None: as for
            ``poll``. In a block of ``transaction()`` it reads the transaction's snapshot instead, the position is part
            of the transaction, and reading ends when 90 % of its time are over.
          as_of: as for ``poll``, not with ``follow``: all topics as of the same moment.
          idle_timeout_s: a reader that follows ends when it has waited this long for a message.
          direct: outside the transaction of the surrounding block.
          page_messages: fetched at once.
          save_every, save_interval_s: the position is saved after so many messages or seconds, whichever is
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

    # --- transactions ------------------------------------------------------------------------------

    @property
    def transactions(self) -> Transactions:
        """The daemon's transaction service, to begin and end transactions by hand, and to manage all of them."""
        return Transactions(self._channel)

    def transaction(
        self,
        participants: Iterable[TransactionAware] = (),
        *,
        timeout_s: int | None = None,
        type: TransactionKind = "short",  # noqa: A002 - the service's word
        client_id: str | None = None,
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        buffer_messages: int = DEFAULT_BUFFER_MESSAGES,
    ) -> TransactionContext:
        """A transaction, to be used in a ``with`` block: committed at its end, undone when an exception leaves it.

        Args:
          participants: take part beside the messages (``TransactionAware``), and are called in this order;
            messages always come last.
          timeout_s: a whole number of seconds after which it is invalid; None: the daemon's default, 30.
          type: ``"short"``, or ``"long"`` for hours of work: its conflict check costs more, and a failed one stays on
            the list of invalid transactions.
          client_id: names the client in lists of transactions; None: this machine's name and the process.
          buffer_bytes, buffer_messages: the client buffers so much until the commit, and stores more with the daemon.
        Raises:
          InvalidParameter: at once. The block raises as ``TransactionContext.start`` and ``finish`` do.
        """
        return TransactionContext(
            self,
            participants,
            timeout_s=timeout_s,
            type=type,
            client_id=client_id,
            buffer_bytes=buffer_bytes,
            buffer_messages=buffer_messages,
        )

    def run_in_transaction(
        self,
        function: Callable[[TransactionContext], T],
        *,
        retries: int = DEFAULT_RETRIES,
        participants: Iterable[TransactionAware] = (),
        timeout_s: int | None = None,
        type: TransactionKind = "short",  # noqa: A002 - the service's word
        client_id: str | None = None,
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        buffer_messages: int = DEFAULT_BUFFER_MESSAGES,
    ) -> T:
        """Runs ``function(transaction)`` in a transaction and returns its result after the commit.

        After a conflict with another transaction it undoes this one, and calls the function again in a new one, after a
        pause that doubles and is shortened at random. The function reads the same messages again, since positions have
        not moved. Only a conflict is retried.

        Args:
          retries: attempts after the first.
        Raises:
          TransactionConflict: every attempt met one. Any exception of the function, and those of a transaction's block.
        """
        attempts = Retries(retries, self._channel.random)
        members = list(participants)
        while True:
            context = self.transaction(
                members,
                timeout_s=timeout_s,
                type=type,
                client_id=client_id,
                buffer_bytes=buffer_bytes,
                buffer_messages=buffer_messages,
            )
            try:
                with context as transaction:
                    result = function(transaction)
            except TransactionConflict as conflict:
                pause_s = attempts.pause_s(conflict)
            else:
                return result
            self._channel.sleep(pause_s)

    # --- topics ------------------------------------------------------------------------------------

    def topic(self, name: str) -> Topic:
        """The topic's methods; sends no request. Raises InvalidName."""
        return Topic(self, name)

    def topics(self) -> list[str]:
        """The names of all topics of the namespace, sorted."""
        return self._channel.call(calls.list_topics(self.namespace))

    def overview(
        self,
        *,
        namespace: str | None = None,
        containing: str | None = None,
        sort: TopicColumn = "name",
        descending: bool = False,
        limit: int | None = None,
        after: str | None = None,
    ) -> dict[str, Any]:
        """A page of topics with their figures, sorted by the daemon, which opens none of them for it.

        Args:
          namespace: of this one alone; None: of all.
          containing: a part of ``namespace:topic``, whatever its case.
          limit: 500 at most; None: 100.
          after: ``next`` of the page before.
        Returns:
          ``topics``, ``total`` and ``next``, which is None on the last page.
        Raises:
          InvalidParameter, InvalidName.
        """
        query = {"namespace": namespace, "q": containing, "sort": sort, "limit": limit, "after": after}
        return self._channel.call(calls.topics_page({**query, "order": "desc" if descending else None}))

    def deleted_topics(self) -> list[dict[str, Any]]:
        """The deleted topics of the namespace, with what they held and until when they can be restored."""
        return self._channel.call(calls.deleted_topics(self.namespace))

    def attention(self) -> list[dict[str, Any]]:
        """What an operator should look at, worst first: ``kind``, ``severity``, ``subject``, ``text``, ``sinceMs``."""
        return self._channel.call(calls.attention())

    def events(self, *topics: str, kinds: Iterable[EventKind] = ()) -> Events:
        """What changes at the service: first what there is, then each change, of each kind one a second at most.

        It goes on when the daemon comes back, or at another of the client's URLs; use it in a ``with`` block.

        Args:
          topics: whose figures are wanted, 200 at most: ``orders`` is of this namespace, ``shop:orders`` of that one.
          kinds: ``topics``, ``transactions``, ``attention``, ``cluster``; by default all, ``topics`` if some are named.
        Returns:
          an iterator of ``ServiceEvent``, which raises as a call does that cannot succeed.
        Raises:
          InvalidName.
        """
        load("plainsong._sync.events")
        from plainsong._sync.events import Events

        return Events(self._channel, calls.events_path(self.namespace, topics, kinds))

    def history(self, topic: str) -> dict[str, Any]:
        """Messages published and read, and bytes, in each of the last sixty minutes. Raises TopicNotFound."""
        return self._channel.call(calls.topic_history(self.namespace, topic))

    def create_topic(self, name: str, *, if_not_exists: bool = False, **properties: Unpack[TopicOptions]) -> Topic:
        """Creates a topic.

        Args:
          if_not_exists: accept an existing topic that has the properties given; then a lost answer is retried.
          properties: ``ttl_s`` (seconds a message lives, by default seven days), ``transactional``, ``deduplication``,
            ``max_bytes``; those not given, or None, have the daemon's defaults.
        Raises:
          TopicExists, InvalidName, InvalidProperty: nothing happened.
          ConnectionLost, DeadlineExceeded: unknown; check with ``topics``, or repeat with ``if_not_exists``.
        """
        given = calls.changed_properties({}, calls.checked_properties(properties))
        call = calls.create_topic(self.namespace, name, given, if_not_exists=if_not_exists)
        self._channel.call(call)
        return Topic(self, name)

    def properties(self, topic: str) -> dict[str, str]:
        """The topic's properties, including its generation, all values as strings. Raises TopicNotFound."""
        return self._channel.call(calls.describe_topic(self.namespace, topic))

    def set_properties(self, topic: str, **properties: Unpack[TopicOptions]) -> dict[str, Any]:
        """Changes the properties that are named, as for ``create_topic``; None returns one to its default.

        Of two changes at the same moment none is lost: each keeps what the other has set.

        Returns:
          what that came to, as the daemon says: ``before``, ``after``, and in ``effect`` what it ``hides``; empty when
          it had been done already.
        Raises:
          TopicNotFound, InvalidProperty. PreconditionFailed: others changed it again and again meanwhile.
        """
        changes = calls.checked_properties(properties)
        for tries in range(CHANGE_TRIES):
            current, etag = self._channel.call(calls.describe_topic_state(self.namespace, topic))
            given = calls.changed_properties(current, changes)
            if tries and not calls.is_changed(current, given):
                break  # its answer was lost, and the second attempt met what the first had done
            try:
                return self._channel.call(calls.set_properties(self.namespace, topic, given, etag))
            except PreconditionFailed:
                if tries == CHANGE_TRIES - 1:
                    raise
        return {}

    def replace_properties(self, topic: str, **properties: Unpack[TopicOptions]) -> dict[str, Any]:
        """Replaces all properties; those not given return to their defaults.

        Returns:
          what that came to, as of ``set_properties``.
        Raises:
          TopicNotFound, InvalidProperty.
        """
        given = calls.changed_properties({}, calls.checked_properties(properties))
        return self._channel.call(calls.set_properties(self.namespace, topic, given))

    def delete_topic(self, topic: str) -> dict[str, Any]:
        """Deletes the topic and its messages for every reader.

        Returns:
          what that came to, as the daemon says: in ``effect`` what it ``removes``, and ``undeleteUntilMs``.
        Raises:
          TopicNotFound: nothing happened. ConnectionLost, DeadlineExceeded: unknown.
        """
        return self._channel.call(calls.delete_topic(self.namespace, topic))

    def undelete_topic(self, topic: str) -> dict[str, Any]:
        """Restores a deleted topic.

        Returns:
          what that came to, as the daemon says: in ``effect`` what it ``returns``.
        Raises:
          TopicExists, TopicNotFound, PartlyCleaned: nothing happened.
        """
        return self._channel.call(calls.undelete_topic(self.namespace, topic))

    def set_aside(self, topic: str, first: str | bytes, last: str | bytes) -> dict[str, Any]:
        """Takes the rows from one id to another out of a topic, both included, so that readers pass damaged ones.

        The daemon copies them to a file as they are. Needs ``admin`` on the topic.

        Returns:
          what that came to, as the daemon says: in ``after`` the file, in ``effect`` what it ``removes``.
        Raises:
          TopicNotFound; NotFound: there are no rows between these ids; InvalidMessageId, LowSpace.
        """
        ids = [each if isinstance(each, str) else each.hex() for each in (first, last)]
        return self._channel.call(calls.set_aside(self.namespace, topic, ids[0], ids[1]))

    def chain_head(self, topic: str) -> ChainHead:
        """The head of a chained topic: whoever keeps it can prove later that nothing before it has changed.

        Raises:
          TopicNotFound; NotFound: the topic is not chained.
        """
        return self._channel.call(calls.chain_head(self.namespace, topic))

    def verify_chain(self, topic: str, *, known: ChainHead | None = None) -> ChainReport:
        """Reads all of a chained topic, and verifies here that it is what its entries say.

        What is published meanwhile is left to the next time.

        Args:
          known: a head that was kept: the chain must still have it, or its entry must have expired.
        Raises:
          TopicNotFound; NotFound: the topic is not chained; GenerationChanged: it was created anew meanwhile;
          InvalidParameter: ``known`` is of another topic.
        """
        load("plainsong.chains")
        from plainsong.chains import Verifying

        verifying = Verifying(self.chain_head(topic), known)
        while (page := verifying.page()) is not None:
            after, messages = page
            verifying.take(self._channel.call(calls.chain_entries(self.namespace, topic, after, messages=messages)))
        return verifying.report()

    def stats(self, topic: str, *, reader: str | bytes | None = None) -> TopicStats:
        """The daemon's figures of a topic (``messages``, ``bytes``, ``oldestId``, ``newestId``, …).

        Args:
          reader: an id; the figures then include the messages after it, as ``reader``.
        Raises:
          TopicNotFound.
        """
        at = reader.hex() if isinstance(reader, bytes) else reader
        return self._channel.call(calls.topic_stats(self.namespace, topic, at))

    def messages(
        self,
        topic: str,
        start: Start = OLDEST,
        *,
        until: Start = None,
        limit: int | None = None,
        newest_first: bool = False,
        payload_bytes: int | None = None,
        containing: str | None = None,
    ) -> Sequence[Seen]:
        """Lists messages, each with its state, without consuming them (``start <= id < until``).

        Args:
          limit: 1 000 at most; None: 100.
          payload_bytes: so much of each payload; ``size`` is that of the whole. None: all of it.
          containing: only messages whose payload contains this text; looks at some 50 000 of them.
        Raises:
          TopicNotFound, InvalidParameter.
        """
        since = self._channel.resolve(topic, start)
        end = self._channel.resolve(topic, until)
        call = calls.look(
            self.namespace,
            topic,
            since,
            end,
            limit,
            newest_first=newest_first,
            payload_bytes=payload_bytes,
            containing=containing,
        )
        return self._channel.call(call)

    def message(self, topic: str, message_id: str | bytes) -> Seen:
        """One message, whole, with its state, without consuming it. Raises TopicNotFound, NotFound, InvalidMessageId."""
        text = message_id.hex() if isinstance(message_id, bytes) else message_id
        return self._channel.call(calls.look_at_one(self.namespace, topic, text))

    def position_of_last(
        self, topic: str, count: int, *, isolation: Isolation | None = None, as_of: Moment | None = None
    ) -> MessageId | None:
        """The id before the last ``count`` messages of this isolation; None: start at the oldest.

        Raises TopicNotFound, AsOfTooOld.
        """
        checked_isolation(isolation)
        as_of_ms, isolation = checked_as_of(as_of, isolation, self._channel.wall_ms())
        return self._channel.position_of_last(topic, count, isolation, as_of_ms)

    # --- named readers -------------------------------------------------------------------------

    def readers(self, topic: str) -> list[dict[str, Any]]:
        """All saved positions of a topic: ``name``, ``position``, ``changedMs``, ``expiresMs``. Raises TopicNotFound."""
        return self._channel.call(calls.list_readers(self.namespace, topic))

    def reader(self, topic: str, name: str) -> dict[str, Any]:
        """The saved position of one reader. Raises NotFound, TopicNotFound."""
        return self._channel.call(calls.show_reader(self.namespace, topic, name))

    def set_reader(self, topic: str, name: str, position: Start) -> None:
        """Sets a reader's position unconditionally: it continues after that id, or as ``read`` starts at that place.

        Raises TopicNotFound, InvalidMessageId, InvalidParameter.
        """
        if isinstance(position, bytes):
            calls.checked_position(position)
        place = self._channel.resolve(topic, position)
        if not isinstance(place, bytes):  # a time, or None for the oldest: the position is before its first message
            place = ids.before(ids.bound_at(place or 0)) or ids.FIRST_BOUND
        self._channel.call(calls.set_reader(self.namespace, topic, name, place))

    def delete_reader(self, topic: str, name: str) -> None:
        """Deletes a reader's position. Raises NotFound, TopicNotFound: nothing happened."""
        self._channel.call(calls.delete_reader(self.namespace, topic, name))


class Topic:
    """A topic of a client. Every method calls the client's method of the same name, and raises the same errors."""

    def __init__(self, client: Client, name: str) -> None:
        topic_name(client.namespace, name)
        self._client = client
        self.name = name

    def __repr__(self) -> str:
        return f"<Topic {self._client.namespace}:{self.name}>"

    publish = of_topic(Client.publish)
    store = of_topic(Client.store)
    rollback = of_topic(Client.rollback)
    publisher = of_topic(Client.publisher)
    stream = of_topic(Client.stream)
    producer = of_topic(Client.producer)
    publish_atomic = of_topic(Client.publish_atomic)
    producers = of_topic(Client.producers)
    poll = of_topic(Client.poll)
    read = of_topic(Client.read)
    messages = of_topic(Client.messages)
    position_of_last = of_topic(Client.position_of_last)
    properties = of_topic(Client.properties)
    set_properties = of_topic(Client.set_properties)
    replace_properties = of_topic(Client.replace_properties)
    chain_head = of_topic(Client.chain_head)
    verify_chain = of_topic(Client.verify_chain)
    stats = of_topic(Client.stats)
    readers = of_topic(Client.readers)
    delete = of_topic(Client.delete_topic)
    undelete = of_topic(Client.undelete_topic)


class Namespaces:
    """Made by ``Client.namespaces``."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def list(self) -> list[str]:
        """The names of the namespaces with topics or properties, sorted."""
        return self._channel.call(calls.list_namespaces())

    def show(self, namespace: str | None = None) -> dict[str, Any]:
        """Its ``properties`` and their effective values; None: the client's own namespace. Raises InvalidName."""
        return self._channel.call(calls.show_namespace(self._named(namespace)))

    def set(self, namespace: str | None = None, /, **properties: Any) -> dict[str, Any]:
        """Replaces all its properties (``deduplication``), effective at once. Raises InvalidProperty, InvalidName."""
        call = calls.set_namespace(self._named(namespace), properties)
        return self._channel.call(call)

    def _named(self, namespace: str | None) -> str:
        return self._channel.namespace if namespace is None else namespace
