"""The messages of a transaction: a member that buffers them in bounded memory and publishes them at the commit.

Messages beyond the bound are *stored* with the daemon under the transaction's pointer, invisible to readers, so a
transaction may have any number. Each store is a separate segment. A store without an answer is repeated as another
segment, and only acknowledged segments are published: a transaction of hours survives a restart of the daemon. The
commit sends one publish for each topic: of its messages, or, if some were stored, of its segments after storing the
rest, which is idempotent and may be repeated. The order is that of the calls. A rollback names only the pointer, so it
also covers segments without an answer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from plainsong import tracing
from plainsong.calls import waiting_for_service
from plainsong.errors import ConnectFailed, ConnectionLost, DeadlineExceeded, NoTransaction, TransactionFailed
from plainsong.messages import own_ttls
from plainsong.protocol.errors import PlainsongError, TopicNotFound
from plainsong.protocol.requests import PublishRequest
from plainsong.transactions import publish_under, rollback, store

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from plainsong._async.retry import AsyncChannel
    from plainsong.calls import Call
    from plainsong.messages import Receipt
    from plainsong.transactions import BufferBounds, Transaction

#: Memory of a buffered message in addition to its payload.
ITEM_BYTES = 100


#: Payload that one request carries, unless a single message is larger.
REQUEST_BYTES = 8 << 20


REQUEST_MESSAGES = 100_000


#: How long each request of a rollback is retried; if it fails, the transaction becomes invalid instead.
UNDO_S = 10.0


#: The minimum time of a request, however late: the daemon's own answer says more than a local time-out.
MIN_CALL_S = 1.0


@dataclass(slots=True)
class TopicBuffer:
    """The buffered messages of one topic, oldest first."""

    messages: deque[tuple[bytes, int | None, Mapping[str, str]]] = field(default_factory=deque)
    bytes: int = 0
    stored: int = 0
    """Messages stored with the daemon and not published yet."""
    segments: list[str] = field(default_factory=list)
    """The segments of the stored messages."""


class AsyncTransactionMessages:
    """The member that buffers, stores and publishes messages, for one transaction after the other."""

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
        #: Topics written to, by pointer: a rollback names them all.
        self._touched: dict[int, dict[str, None]] = {}
        self._in_doubt = False
        self._segment = 0
        self._broken: BaseException | None = None
        #: Receipts of what was published so far, by topic.
        self.receipts: dict[str, list[Receipt]] = {}

    @property
    def waiting_bytes(self) -> int:
        """Memory of the buffered messages."""
        return self._bytes

    # --- buffering ------------------------------------------------------------------------------

    def take(self, topic: str, request: PublishRequest) -> bool:
        """Buffers messages. Returns True if the caller must call ``spill``. Raises NoTransaction."""
        if self._transaction is None:
            raise NoTransaction("there is no transaction to publish under", hint="begin one first")
        tracing.stamp(request)
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
        """Stores messages of the largest topics until half of the buffer is free.

        Raises:
          the error of a store; the transaction can only be undone then.
        """
        bounds = self._bounds
        while self._bytes > bounds.buffer_bytes // 2 or self._messages > bounds.buffer_messages // 2:
            topic, waiting = max(self._topics.items(), key=lambda each: (each[1].bytes, len(each[1].messages)))
            await self._store(topic, waiting)

    async def _store(self, topic: str, waiting: TopicBuffer) -> None:
        """Stores the oldest buffered messages, as many as one request carries, as a segment."""
        assert self._transaction is not None
        request = self._taken(waiting)
        self.touch(topic)
        try:
            segment = await self._stored(topic, request, left_s(self._channel, self._transaction))
        except BaseException as error:
            # The messages have left the buffer and may not be stored: a commit would lose them.
            self._broken = error
            raise
        waiting.segments.append(segment)
        waiting.stored += len(request.messages)

    async def _stored(self, topic: str, request: PublishRequest, limit_s: float) -> str:
        """Stores a request and returns its segment; uses a new segment after each attempt of unknown outcome."""
        channel = self._channel

        def stored() -> Call[None]:
            self._segment += 1
            request.segment = str(self._segment)
            return store(channel.namespace, topic, request)

        def again(error: PlainsongError) -> Call[None] | None:
            return stored() if error.outcome == "unknown" else None

        # Repeating it is harmless: the commit publishes the segments that it names, and this names the last attempt's.
        call = waiting_for_service(stored())._replace(repeat="harmless", again=again)
        await channel.call(call, max(MIN_CALL_S, limit_s))
        assert request.segment is not None
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
        """Records a topic before something is sent to it, so that a rollback names it."""
        assert self._transaction is not None
        self._touched.setdefault(self._transaction.write_pointer, {})[topic] = None

    def doubt(self) -> None:
        """Records a publish of unknown outcome: the transaction can only become invalid."""
        self._in_doubt = True

    # --- the steps of a transaction --------------------------------------------------------------

    async def start_tx(self, transaction: Transaction) -> None:
        """Begins with an empty buffer."""
        self._forget()
        self._transaction = transaction

    async def update_tx(self, transaction: Transaction) -> None:
        """Continues under another pointer."""
        self._transaction = transaction

    async def tx_changes(self) -> Collection[bytes]:
        """None: appends never conflict."""
        return ()

    async def commit_tx(self) -> bool:
        """Publishes each topic once, in the order of their first messages.

        Raises:
          TransactionFailed: an earlier store failed. The error of a publish.
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
        """Publishes the stored segments or the buffered messages, never both."""
        assert self._transaction is not None
        request = self._taken(waiting)
        request.segments = waiting.segments or None
        self.touch(topic)
        try:
            call = waiting_for_service(publish_under(self._channel.namespace, topic, request))
            with tracing.sending(self._channel.namespace, topic, len(request.messages), request.attributes) as span:
                receipt = await self._channel.call(span.carried(call), left_s(self._channel, self._transaction))
                span.sent(receipt)
        except PlainsongError as error:
            self._in_doubt |= error.outcome != "not-applied"
            raise
        except BaseException:
            self._in_doubt = True
            raise
        # The answer has no ids of stored messages.
        receipt = replace(receipt, count=waiting.stored) if waiting.segments else receipt
        self.receipts.setdefault(topic, []).append(receipt)

    async def post_tx_commit(self) -> None:
        """Drops the state; keeps the receipts."""
        self._end()

    async def rollback_tx(self) -> bool:
        """Rolls back every topic written to; False if one may have kept something.

        Raises:
          PlainsongError: the first failure; the others were rolled back nevertheless, unless the daemon is unreachable.
        """
        first: PlainsongError | None = None
        for pointer, topic in [(pointer, topic) for pointer, topics in self._touched.items() for topic in topics]:
            try:
                await self._roll_back(topic, pointer)
            except TopicNotFound:
                continue  # nothing is stored there
            except PlainsongError as error:
                first = first or error
                if isinstance(error, (ConnectFailed, ConnectionLost, DeadlineExceeded)):
                    break  # the daemon is unreachable: the others would only time out too
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
    """True if the messages do not fit into one request; a single message always fits."""
    return (waiting.bytes > REQUEST_BYTES or len(waiting.messages) > REQUEST_MESSAGES) and len(waiting.messages) > 1


def left_s(channel: AsyncChannel, transaction: Transaction) -> float:
    """The deadline of a request inside a transaction: at most the transaction's remaining time."""
    return min(channel.settings.deadline_s, max(MIN_CALL_S, transaction.remaining_s))
