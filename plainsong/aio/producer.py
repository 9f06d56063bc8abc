"""A producer on an event loop: its messages are sent in order by a task of its own, each of them once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from plainsong.aio.lightweight import AsyncLightweightTransaction
from plainsong.aio.sending import BREATH, AsyncSending
from plainsong.aio.sent import AsyncProduced, AsyncProducedWhole
from plainsong.aio.transaction import AsyncTransactionContext
from plainsong.core.producing.options import prepared
from plainsong.core.producing.producing import atomic_request, whole_request
from plainsong.serializers import serializer_for
from plainsong.transactions import calls, current
from plainsong.transactions.messages import left_s

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from plainsong.aio.client import AsyncClient
    from plainsong.aio.sent import AsyncSettled
    from plainsong.core.effects import Steps
    from plainsong.core.gathering import Overflow
    from plainsong.core.outcomes import Counts
    from plainsong.core.producing.producing import Producing
    from plainsong.core.producing.session import Session
    from plainsong.messages import Receipt
    from plainsong.protocol.requests import PublishRequest
    from plainsong.serializers import SerializerLike
    from plainsong.transactions.values import Transaction


class AsyncProducer(AsyncSending):
    """Sends messages under a name, each stored once; made by ``AsyncClient.producer``, which explains the options.

    Only within ``async with``, which opens it: its task lives in that block. The order of calls is the order in the
    topic, and that of automatic sequence ids.
    """

    def __init__(
        self,
        client: AsyncClient,
        opening: Steps[Session],
        begun: Callable[[Session], Producing[AsyncSettled[Any]]],
        *,
        overflow: Overflow,
        exit_timeout_s: float,
    ) -> None:
        super().__init__(client._shell.run, opening, begun, overflow=overflow, exit_timeout_s=exit_timeout_s)
        self._client = client

    def __repr__(self) -> str:
        return f"<AsyncProducer {self.name!r} of {self.topic}>" if self._opened else "<AsyncProducer, not opened>"

    # --- what is known of it ---------------------------------------------------------------------

    @property
    def topic(self) -> str:
        """Where its messages go."""
        return self._producing.session.topic

    @property
    def name(self) -> str:
        """Its name, given or made by the daemon."""
        return self._producing.session.name

    @property
    def epoch(self) -> int | None:
        """The number of its session; None where deduplication is switched off."""
        return self._producing.session.epoch

    @property
    def generation(self) -> int:
        """Which life of the topic's name it writes to; 0 where deduplication is switched off."""
        return self._producing.session.generation

    @property
    def last_sequence_id(self) -> int:
        """The highest sequence id that is durable, as far as is known here; -1: none."""
        return self._producing.session.last_sequence_id

    @property
    def deduplicated(self) -> bool:
        """Whether each message is stored once. False only with ``optional=True``."""
        return self._producing.session.epoch is not None

    @property
    def counts(self) -> Counts:
        """Messages that wait, were delivered or failed so far."""
        return self._producing.tally.counts(self._waiting.pending, self._waiting.pending_bytes)

    # --- sending -------------------------------------------------------------------------------

    async def send(
        self,
        message: Any,
        *,
        sequence_id: int | None = None,
        attributes: Mapping[str, str] | None = None,
        routing_key: str | None = None,
    ) -> AsyncProduced:
        """Hand over a message, and get what may be awaited for its ``MessageReceipt``. Not part of a transaction's block.

        Args:
          message: what the serializer takes (bytes, if there is none), or an ``Outgoing`` around it.
          sequence_id: its number; with every message of a producer, or with none.
        Raises:
          SequenceIdsMixed (a ValueError), InvalidSequenceIds, NotEncodable, BufferFull, Closed: nothing happened.
          ProducerFenced, ProducerExpired, GenerationChanged, ProducerStopped: what the producer stopped for earlier;
            nothing happened to this message.
        """
        self._breath += 1
        if self._breath % BREATH == 0:
            await anyio.lowlevel.checkpoint()
        made = prepared(message, self._producing.serializer, sequence_id, attributes, routing_key)
        sent = AsyncProduced()
        await self._wait_for_room(len(made.payload), 1)
        if self._producing.take(made, sent, anyio.current_time()):
            self._call_sender()
        return sent

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
        """Send one message, or a list in one request, after what waits already; returns when it is durable.

        In a block of ``client.transaction()``, or with a ``transaction``: now, under its write pointer; so call it last.

        Args:
          sequence_ids: one for each message, increasing.
          deadline_s: instead of ``delivery_timeout_s``.
          direct: not as part of the transaction whose block this is in.
        Returns:
          the receipt of all; of messages that were there before it says ``duplicate``, or which (``dropped``).
        Raises:
          as ``send``; SequenceConsumed: the ids were used in another transaction. OutcomeUnknown: nobody can know, and
            it was not sent again. TopicNotFound, MessageTooLarge, DeadlineExceeded, …: nothing happened.
        """
        using = self._producing.serializer if serializer is None else serializer_for(serializer)
        request, ids = whole_request(messages, using, ttl_s=ttl_s, attributes=attributes, routing_key=routing_key)
        given: Sequence[int | None] = ids if sequence_ids is None else list(sequence_ids)
        block = None if direct or transaction else current.block_of(self._client, AsyncTransactionContext)
        if block is None:
            request.write_pointer = None if transaction is None else calls.pointer_of(transaction)
            return await self._sent(request, given, deadline_s)
        under_way = block.course.needed("publishing")
        request.write_pointer = calls.pointer_of(under_way)
        block.course.messages.touch(self.topic)
        try:
            return await self._sent(request, given, left_s(self._producing.operations, under_way))
        except BaseException as error:
            if getattr(error, "outcome", "unknown") != "not-applied":
                block.course.messages.doubt()
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
          MaxTransactionSizeExceeded: over 16 MiB of serialized bytes, or 65 536 messages. PartialDuplicate: some of it
            was there before. TransactionOutcomeUnknown; and as ``publish``.
        """
        using = self._producing.serializer if serializer is None else serializer_for(serializer)
        request, ids = atomic_request(routing_key, messages, using, ttl_s=ttl_s)
        return await self._sent(request, ids if sequence_ids is None else list(sequence_ids), deadline_s)

    def begin(self, routing_key: str, *, timeout_s: float | None = None) -> AsyncLightweightTransaction:
        """Open a lightweight transaction; see there. Nothing is asked of the daemon.

        Args:
          timeout_s: seconds after which it is aborted unless it was committed; None: the producer's.
        Raises:
          TransactionInProgress: one is open. Closed, and what the producer stopped for.
        """
        opened = self._producing.begin(routing_key, timeout_s, anyio.current_time())
        self._call_sender()  # who also looks at the time
        return AsyncLightweightTransaction(self, opened)

    async def _sent(self, request: PublishRequest, ids: Sequence[int | None], limit_s: float | None) -> Receipt:
        sent = await self._hand_over(request, ids, limit_s)
        return await sent

    async def _hand_over(
        self, request: PublishRequest, ids: Sequence[int | None], limit_s: float | None
    ) -> AsyncProducedWhole:
        sent = AsyncProducedWhole()
        await self._wait_for_room(sum(map(len, request.messages)), len(request.messages))
        self._producing.take_whole(request, ids, sent, anyio.current_time(), limit_s)
        self._call_sender()
        return sent
