"""Producers of a client: opened, looked after, and lightweight transactions without one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from plainsong.aio.namespaces import AsyncNamespaces
from plainsong.aio.producer import AsyncProducer
from plainsong.core import calls, options, producer_calls
from plainsong.core.producing import session
from plainsong.core.producing.options import TRANSACTION_TIMEOUT_S, producer_bounds
from plainsong.core.producing.producing import Producing, unnumbered_atomic_request
from plainsong.serializers import serializer_for

if TYPE_CHECKING:
    from collections.abc import Mapping

    from plainsong.aio.client import AsyncClient
    from plainsong.aio.sent import AsyncSettled
    from plainsong.aio.shell import AsyncShell
    from plainsong.core.gathering import Overflow
    from plainsong.core.operations import Operations
    from plainsong.core.producing.session import Session
    from plainsong.messages import Receipt
    from plainsong.serializers import SerializerLike


class AsyncProducers:
    """What ``AsyncClient`` does about producers, and namespaces."""

    _shell: AsyncShell
    _operations: Operations

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
        max_batch_messages: int = options.DEFAULT_BATCH_MESSAGES,
        max_batch_bytes: int = options.DEFAULT_BATCH_BYTES,
        max_pending_bytes: int = options.DEFAULT_PENDING_BYTES,
        overflow: Overflow = "wait",
        delivery_timeout_s: float | None = None,
        transaction_timeout_s: float = TRANSACTION_TIMEOUT_S,
        exit_timeout_s: float = options.EXIT_TIMEOUT_S,
        deadline_s: float | None = None,
    ) -> AsyncProducer:
        """A producer: it sends in order, and each message is stored once, whatever breaks in between.

        It is opened by its ``async with`` block. Whoever held the name before is fenced off: what he still sends is
        refused.

        Args:
          name: who it is, over restarts; None: the daemon makes a name that nobody ever had.
          initial_sequence_id: the first automatic id. None: 0 for a new name, else the one after the last. At or below
            the last, each message up to that is reported as a duplicate.
          optional: also where deduplication is switched off; then a message may be stored twice, and receipts say so.
          retention_s: how long the topic remembers the name without hearing of it, if that is longer than its default.
          serializer: of all its messages.
          linger_ms, max_batch_messages, max_batch_bytes, max_pending_bytes: as for ``publisher``.
          overflow: when the buffer is full: ``"wait"``, or ``"raise"`` BufferFull.
          delivery_timeout_s: for how long a message is tried; None: 120.
          transaction_timeout_s: how long a lightweight transaction may be open.
          exit_timeout_s: how long the end of the program, or of a block that an error left, may wait.
          deadline_s: for the opening.
        Raises:
          InvalidParameter: an option makes no sense. The block raises DeduplicationDisabled, TopicNotFound,
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
        using = serializer_for(serializer)
        opening = session.begin(
            self._operations,
            topic,
            name,
            initial_sequence_id=initial_sequence_id,
            optional=optional,
            retention_s=retention_s,
            deadline_s=deadline_s,
        )

        def begun(known: Session) -> Producing[AsyncSettled[Any]]:
            return Producing(self._operations, known, bounds, using, initial_sequence_id, transaction_timeout_s)

        client = cast("AsyncClient", self)
        return AsyncProducer(client, opening, begun, overflow=overflow, exit_timeout_s=exit_timeout_s)

    async def publish_atomic(
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
          as ``publish``: sent once, so that a lost answer is ``ConnectionLost``, unknown; a producer's finds out.
          MaxTransactionSizeExceeded: over 16 MiB of serialized bytes, or 65 536 messages; nothing happened.
        """
        request = unnumbered_atomic_request(routing_key, messages, serializer_for(serializer), ttl_s, attributes)
        call = calls.publish(self._operations.namespace, topic, request)
        return await self._shell.run(self._operations.call(call, deadline_s))

    # --- looking after them ----------------------------------------------------------------------

    async def producers(self, topic: str, *, after: str | None = None, limit: int = 100) -> dict[str, Any]:
        """One page of a topic's ``producers``, by name, ``next`` for ``after``, and how the topic keeps them.

        Raises TopicNotFound, InvalidParameter.
        """
        call = producer_calls.list_producers(self._operations.namespace, topic, after, limit)
        return await self._shell.run(self._operations.call(call))

    async def producer_state(self, topic: str, name: str, *, generation: int | None = None) -> dict[str, Any]:
        """``epoch``, ``lastSequenceId``, ``recent``, … of one; with a ``generation`` also of a topic that is deleted.

        Raises TopicNotFound, ProducerNotFound, GenerationChanged, ProducerExpired.
        """
        call = producer_calls.show_producer(self._operations.namespace, topic, name, generation)
        return await self._shell.run(self._operations.call(call))

    async def delete_producer(self, topic: str, name: str) -> None:
        """Forget one: its sequence ids may be used again, its session is over. Raises TopicNotFound, ProducerNotFound."""
        await self._shell.run(
            self._operations.call(producer_calls.delete_producer(self._operations.namespace, topic, name))
        )

    @property
    def namespaces(self) -> AsyncNamespaces:
        """The daemon's namespaces, and what they say for their topics."""
        return AsyncNamespaces(self._operations, self._shell)
