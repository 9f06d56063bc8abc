"""The participant that publishes: it keeps messages until the commit, in bounded memory, and publishes them last.

What does not fit is *stored* with the daemon under the transaction's pointer, where nobody sees it: so a
transaction may have any number of messages. Each store is a segment of its own. One whose answer got lost is sent
again under another name, and only the segments that were answered for are published: a transaction of hours
outlives a restart of the daemon. At the commit there is one publish for each topic: of its messages, or, where some
were stored, of its segments after the rest has been stored too (which is the same made twice, so that it can be
repeated). The order is that of the calls. Rolling back names the pointer alone, so that it also reaches what nobody
answered for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from plainsong.calls import waiting_for_service
from plainsong.errors import ConnectFailed, ConnectionLost, DeadlineExceeded, NoTransaction, TransactionFailed
from plainsong.messages import own_ttls
from plainsong.protocol.errors import OutcomeUnknown, PlainsongError, TopicNotFound
from plainsong.protocol.requests import PublishRequest
from plainsong.retry import Backoff
from plainsong.transactions import publish_under, rollback, store

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from plainsong._async.retry import AsyncChannel
    from plainsong.messages import Receipt
    from plainsong.transactions import BufferBounds, Transaction

#: What a message costs in the buffer besides its payload.
ITEM_BYTES = 100


#: Payload that one request carries, unless a single message is larger.
REQUEST_BYTES = 8 << 20


REQUEST_MESSAGES = 100_000


#: How long each request of an undoing is tried: what cannot be reached is made invalid instead.
UNDO_S = 10.0


#: What a request gets at least, however late it is: the daemon shall say so itself.
MIN_CALL_S = 1.0


@dataclass(slots=True)
class TopicBuffer:
    """The messages of one topic that are here, oldest first."""

    messages: deque[tuple[bytes, int | None, Mapping[str, str]]] = field(default_factory=deque)
    bytes: int = 0
    stored: int = 0
    """Messages that are with the daemon, not published yet."""
    segments: list[str] = field(default_factory=list)
    """Where they are there."""


class AsyncTransactionMessages:
    """The messages of one transaction after the other; a member of its course."""

    name = "messages"

    def __init__(self, channel: AsyncChannel, bounds: BufferBounds) -> None:
        self._channel = channel
        self._bounds = bounds
        self._forget()

    def _forget(self) -> None:
        self._transaction: Transaction | None = None
        self._topics: dict[str, TopicBuffer] = {}
        self._bytes = 0
        self._messages = 0
        #: Topics that something was sent to, by pointer: what a rollback has to name.
        self._touched: dict[int, dict[str, None]] = {}
        self._in_doubt = False
        self._segment = 0
        self._broken: BaseException | None = None
        #: What was published so far, by topic: where the messages that came inline stand.
        self.receipts: dict[str, list[Receipt]] = {}

    @property
    def waiting_bytes(self) -> int:
        """What is here, payloads and what they cost."""
        return self._bytes

    # --- messages come in ------------------------------------------------------------------------

    def take(self, topic: str, request: PublishRequest) -> bool:
        """Take messages; whether there are too many here now, and ``spill`` has to follow. Raises NoTransaction."""
        if self._transaction is None:
            raise NoTransaction("there is no transaction to publish in", hint="begin one first")
        waiting = self._topics.get(topic)
        if waiting is None:
            waiting = self._topics[topic] = TopicBuffer()
        taken = 0
        ttls_s = request.message_ttls_s or [None] * len(request.messages)
        attributes = request.attributes or [{}] * len(request.messages)
        for payload, own_s, strings in zip(request.messages, ttls_s, attributes, strict=True):
            ttl_s = own_s if request.ttl_s is None else request.ttl_s if own_s is None else min(own_s, request.ttl_s)
            waiting.messages.append((payload, ttl_s, strings))
            taken += len(payload) + ITEM_BYTES
        waiting.bytes += taken
        self._bytes += taken
        self._messages += len(request.messages)
        return self._bytes > self._bounds.buffer_bytes or self._messages > self._bounds.buffer_messages

    async def spill(self) -> None:
        """Store the largest topics' messages, until half of the bound is free.

        Raises:
          what the daemon says to a store: the transaction can only be undone then.
        """
        bounds = self._bounds
        while self._bytes > bounds.buffer_bytes // 2 or self._messages > bounds.buffer_messages // 2:
            topic, waiting = max(self._topics.items(), key=lambda each: (each[1].bytes, len(each[1].messages)))
            await self._store(topic, waiting)

    async def _store(self, topic: str, waiting: TopicBuffer) -> None:
        """The oldest messages here, as many as one request carries, into a segment that answers for them."""
        assert self._transaction is not None
        request = self._taken(waiting)
        self.touch(topic)
        try:
            segment = await self._stored(topic, request, left_s(self._channel, self._transaction))
        except BaseException as error:
            # The messages are neither here nor certainly there: a commit would lose them.
            self._broken = error
            raise
        waiting.segments.append(segment)
        waiting.stored += len(request.messages)

    async def _stored(self, topic: str, request: PublishRequest, limit_s: float) -> str:
        """The name of the segment they are in; another one for each attempt of which nobody knows whether it took."""
        channel = self._channel
        backoff = Backoff(channel.random)
        until_s = channel.clock() + limit_s
        while True:
            self._segment += 1
            request.segment = str(self._segment)
            call = waiting_for_service(store(channel.namespace, topic, request))
            try:
                await channel.call(call, max(MIN_CALL_S, until_s - channel.clock()))
            except (ConnectionLost, DeadlineExceeded, OutcomeUnknown) as error:
                pause_s = backoff.next_s(error)
                if error.outcome != "unknown" or not channel.settings.retry or channel.clock() + pause_s >= until_s:
                    raise
                await channel.sleep(pause_s)
            else:
                return request.segment

    def _taken(self, waiting: TopicBuffer) -> PublishRequest:
        """The oldest messages, as many as one request carries."""
        assert self._transaction is not None
        payloads: list[bytes] = []
        ttls_s: list[int | None] = []
        attributes: list[Mapping[str, str]] = []
        taken = 0
        while waiting.messages and len(payloads) < REQUEST_MESSAGES:
            size = len(waiting.messages[0][0]) + ITEM_BYTES
            if payloads and taken + size > REQUEST_BYTES:
                break
            payload, ttl_s, strings = waiting.messages.popleft()
            payloads.append(payload)
            ttls_s.append(ttl_s)
            attributes.append(strings)
            taken += size
        waiting.bytes -= taken
        self._bytes -= taken
        self._messages -= len(payloads)
        request = PublishRequest(payloads, self._transaction.write_pointer, message_ttls_s=own_ttls(ttls_s))
        request.attributes = attributes if any(attributes) else None
        return request

    def touch(self, topic: str) -> None:
        """Something is about to be sent there, by a producer perhaps: a rollback has to name the topic."""
        assert self._transaction is not None
        self._touched.setdefault(self._transaction.write_pointer, {})[topic] = None

    def doubt(self) -> None:
        """Nobody knows whether something that was sent took: the transaction can only be made invalid."""
        self._in_doubt = True

    # --- the steps of a transaction --------------------------------------------------------------

    async def start_tx(self, transaction: Transaction) -> None:
        """Empty."""
        self._forget()
        self._transaction = transaction

    async def update_tx(self, transaction: Transaction) -> None:
        """The same transaction, another pointer."""
        self._transaction = transaction

    async def tx_changes(self) -> Collection[bytes]:
        """Nothing: to append is never in conflict."""
        return ()

    async def commit_tx(self) -> bool:
        """One publish for each topic, in the order of their first messages.

        Raises:
          TransactionFailed: a message was lost before. What the daemon says to a publish.
        """
        if self._broken is not None:
            raise TransactionFailed("messages could not be stored earlier in this transaction") from self._broken
        for topic, waiting in self._topics.items():
            while _is_too_much(waiting) or (waiting.segments and waiting.messages):
                await self._store(topic, waiting)
            await self._publish(topic, waiting)
        self._topics = {}
        return True

    async def _publish(self, topic: str, waiting: TopicBuffer) -> None:
        """What is stored, or what is here; never both."""
        assert self._transaction is not None
        request = self._taken(waiting)
        request.segments = waiting.segments or None
        self.touch(topic)
        try:
            call = waiting_for_service(publish_under(self._channel.namespace, topic, request))
            receipt = await self._channel.call(call, left_s(self._channel, self._transaction))
        except PlainsongError as error:
            self._in_doubt |= error.outcome != "not-applied"
            raise
        except BaseException:
            self._in_doubt = True
            raise
        # The ids of stored messages are not in the answer.
        receipt = replace(receipt, count=waiting.stored) if waiting.segments else receipt
        self.receipts.setdefault(topic, []).append(receipt)

    async def post_tx_commit(self) -> None:
        """Nothing is left to do."""
        self._end()

    async def rollback_tx(self) -> bool:
        """Roll back every topic that something was sent to; False when one may have kept something.

        Raises:
          PlainsongError: the first failure; the other topics were tried all the same, as long as somebody answers.
        """
        first: PlainsongError | None = None
        for pointer, topic in [(pointer, topic) for pointer, topics in self._touched.items() for topic in topics]:
            try:
                await self._roll_back(topic, pointer)
            except TopicNotFound:
                continue  # nothing is there
            except PlainsongError as error:
                first = first or error
                if isinstance(error, (ConnectFailed, ConnectionLost, DeadlineExceeded)):
                    break  # nobody is there: the others would only wait as long
        undone = not self._in_doubt
        self._end()
        if first is not None:
            raise first
        return undone

    async def _roll_back(self, topic: str, pointer: int) -> None:
        call = rollback(self._channel.namespace, topic, pointer)
        await self._channel.call(call, min(self._channel.settings.deadline_s, UNDO_S))

    def _end(self) -> None:
        receipts = self.receipts
        self._forget()
        self.receipts = receipts


def _is_too_much(waiting: TopicBuffer) -> bool:
    """Whether one request cannot carry all of it; a single message has to fit."""
    return (waiting.bytes > REQUEST_BYTES or len(waiting.messages) > REQUEST_MESSAGES) and len(waiting.messages) > 1


def left_s(channel: AsyncChannel, transaction: Transaction) -> float:
    """How long a request inside a transaction is tried: no longer than there is any use in it."""
    return min(channel.settings.deadline_s, max(MIN_CALL_S, transaction.remaining_s))
