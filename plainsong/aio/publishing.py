"""Publishing: now, as part of a transaction, under one that somebody else began, or gathered by a publisher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from plainsong.aio.publisher import AsyncPublisher
from plainsong.aio.transaction import AsyncTransactionContext, publish_in_one
from plainsong.core import options
from plainsong.messages import all_with_attributes
from plainsong.transactions import current, requests

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from plainsong.aio.client import AsyncClient
    from plainsong.aio.shell import AsyncShell
    from plainsong.core.gathering import Mode, Overflow
    from plainsong.core.operations import Operations
    from plainsong.core.outcomes import DroppedMessage
    from plainsong.messages import Receipt
    from plainsong.serializers import SerializerLike
    from plainsong.transactions.requests import Under
    from plainsong.transactions.values import Transaction
    from plainsong.transport.waiting import AsyncWire


class AsyncPublishing:
    """What ``AsyncClient`` sends."""

    _shell: AsyncShell
    _wire: AsyncWire
    _operations: Operations

    async def publish(
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
        """Publish, and return when it is durable. In a block of ``transaction()``: publish with its commit.

        Args:
          messages: one, or a list (or tuple) of several, which become visible together; each is what the
            serializer takes (bytes, without one), or an ``Outgoing`` around it. With a ``transaction`` there may be
            none: then what was stored under it is published.
          ttl_s: seconds they live, if that is shorter than the topic's ttl.
          attributes, routing_key: of all that have none themselves (``Outgoing``).
          retry_unknown: also try again when an attempt may have taken: at least once, perhaps twice. Not in a
            transaction, which is undone as a whole instead.
          deadline_s: for this call.
          transaction: ``"own"``: one that is begun and committed by this call; a ``Transaction`` or its write
            pointer: under that one, now, whose commit or rollback is then the caller's.
          direct: not as part of the transaction whose block this is in.
        Raises:
          TopicNotFound, MessageTooLarge, BodyTooLarge, NotEncodable, NoMessages, ConnectFailed: nothing happened.
          ConnectionLost, OutcomeUnknown: unknown. DeadlineExceeded: as its ``outcome`` says.
          TransactionRequired, TransactionRefused: the topic's ``transactional``; nothing happened.
          with ``"own"``: as the end of a transaction (TransactionFailed, TransactionInDoubt, …).
        """
        messages = all_with_attributes(messages, attributes, routing_key)
        if transaction == "own":
            return await publish_in_one(cast("AsyncClient", self), topic, messages, ttl_s=ttl_s, serializer=serializer)
        if transaction is not None:
            steps = requests.publish(
                self._operations,
                topic,
                messages,
                ttl_s=ttl_s,
                serializer=serializer,
                deadline_s=deadline_s,
                transaction=transaction,
            )
            return await self._shell.run(steps)
        block = None if direct else current.block_of(self, AsyncTransactionContext)
        if block is not None:
            return await block.publish(topic, messages, ttl_s=ttl_s, serializer=serializer)
        return await self._shell.run(
            self._operations.publish(
                topic, messages, ttl_s=ttl_s, serializer=serializer, retry_unknown=retry_unknown, deadline_s=deadline_s
            )
        )

    async def store(
        self,
        topic: str,
        messages: Any,
        transaction: Transaction | int,
        *,
        ttl_s: int | None = None,
        serializer: SerializerLike = None,
        deadline_s: float | None = None,
    ) -> None:
        """Put messages down under a transaction, to be published with it later: ``publish(topic, transaction=…)``.

        A transaction's own ``publish`` does this by itself when much comes together.

        Raises:
          as ``publish``; AlreadyPublished: what was stored there has been published, nothing happened.
        """
        steps = requests.store(
            self._operations,
            topic,
            messages,
            ttl_s=ttl_s,
            serializer=serializer,
            deadline_s=deadline_s,
            transaction=transaction,
        )
        await self._shell.run(steps)

    async def rollback(self, topic: str, transaction: Transaction | int) -> None:
        """Hide from committed readers all that a transaction published or stored in a topic. The same made twice.

        Of a ``Transaction`` every write pointer it has had is rolled back. The transaction itself goes on.

        Raises:
          TopicNotFound: nothing happened. ConnectionLost, DeadlineExceeded: unknown; repeat it.
        """
        await self._shell.run(requests.rollback(self._operations, topic, transaction))

    def publisher(
        self,
        topic: str | None = None,
        *,
        linger_ms: float = 0,
        max_batch_messages: int = options.DEFAULT_BATCH_MESSAGES,
        max_batch_bytes: int = options.DEFAULT_BATCH_BYTES,
        max_pending_bytes: int = options.DEFAULT_PENDING_BYTES,
        overflow: Overflow | None = None,
        mode: Mode = "reliable",
        delivery_timeout_s: float | None = None,
        retry_unknown: bool = False,
        on_drop: Callable[[DroppedMessage], object] | None = None,
        serializer: SerializerLike = None,
        connections: int = 4,
        exit_timeout_s: float = options.EXIT_TIMEOUT_S,
    ) -> AsyncPublisher:
        """A buffer for publishing without waiting; use it in an ``async with`` block.

        Args:
          topic: of messages that name none.
          linger_ms: how long a first message waits for company; with 0, what accumulates while a request is
            under way is gathered all the same.
          max_batch_messages, max_batch_bytes: of one request.
          max_pending_bytes: that the buffer may occupy, about 400 bytes for each message beside its payload.
          overflow: when the buffer is full: ``"wait"`` (the default), ``"raise"`` BufferFull, or ``"drop"`` the
            new message.
          mode: ``"reliable"``: every failure is told by the message's future, and by ``flush`` and ``close``.
            ``"best_effort"``: a message that cannot be delivered is dropped, counted and told to ``on_drop``;
            nothing waits, and nothing raises.
          delivery_timeout_s: after which a message that could not be delivered fails or is dropped; None: 120
            in reliable mode, 10 in best effort. A request under way is waited for no longer than that.
          retry_unknown: as for ``publish``.
          on_drop: called with a ``DroppedMessage``, on the event loop; it must not wait.
          connections: requests under way at once, for different topics; never two for one topic.
          exit_timeout_s: how long the end of the program, or of a block that an error left, may wait.
        Raises:
          InvalidParameter: an option makes no sense.
        """
        overflow = overflow or ("wait" if mode == "reliable" else "drop")
        bounds = options.publisher_bounds(
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
        return AsyncPublisher(
            self._operations,
            self._wire.carry,
            bounds,
            topic=topic,
            overflow=overflow,
            connections=connections,
            serializer=serializer,
            on_drop=on_drop,
            exit_timeout_s=exit_timeout_s,
        )
