"""A producer's sequence ids, session and queue, without threads or a clock.

One request is under way at a time, since the topic takes a late sequence id for a duplicate. Messages sent one by one
are gathered into batches; messages published together make a request of their own. Producers call this under their lock
and settle the futures it returns.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from plainsong import tracing
from plainsong.errors import (
    BufferFull,
    Closed,
    DeadlineExceeded,
    MessageDropped,
    ProducerStopped,
    SequenceIdsMixed,
    TransactionInProgress,
)
from plainsong.lightweight import TIMEOUT_S, Lightweight, check_routing_key, check_size
from plainsong.messages import (
    UTF8_HINT,
    MessageReceipt,
    Outgoing,
    Receipt,
    all_with_attributes,
    as_list,
    nth_id,
    outgoing_request,
    own_ttls,
    with_attributes,
)
from plainsong.protocol.errors import (
    BadRequest,
    DeduplicationDisabled,
    GenerationChanged,
    InvalidParameter,
    InvalidSequenceIds,
    NoMessages,
    PlainsongError,
    ProducerExpired,
    ProducerFenced,
    TooLarge,
)
from plainsong.protocol.requests import PublishRequest
from plainsong.publisher_queue import ITEM_BYTES, Portion, Tally, publisher_bounds
from plainsong.serializers import BYTES, Serializer, encoded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from plainsong.calls import Known
    from plainsong.messages import MessageId
    from plainsong.publisher_queue import Bounds, Overflow, Retrieved

S = TypeVar("S")
A = TypeVar("A", bound="Retrieved")

#: Errors that end the session. The caller must open another one, and decide whether that is right.
FINAL = (ProducerFenced, ProducerExpired, GenerationChanged)


#: How long a lightweight transaction stays open, unless the caller gives another limit.
TRANSACTION_TIMEOUT_S = TIMEOUT_S


def producer_bounds(
    *,
    linger_ms: float,
    max_batch_messages: int,
    max_batch_bytes: int,
    max_pending_bytes: int,
    overflow: Overflow,
    delivery_timeout_s: float | None,
) -> Bounds:
    """Checks the options of a producer. Raises InvalidParameter."""
    if overflow == "drop":
        raise InvalidParameter("a producer drops nothing", hint='use wait, or raise; client.publisher has "drop"')
    return publisher_bounds(
        linger_ms=linger_ms,
        max_batch_messages=max_batch_messages,
        max_batch_bytes=max_batch_bytes,
        max_pending_bytes=max_pending_bytes,
        delivery_timeout_s=delivery_timeout_s,
        mode="reliable",
        overflow=overflow,
        retry_unknown=False,
        connections=1,
    )


class Prepared(NamedTuple):
    """One encoded message, before it has a sequence id."""

    payload: bytes
    ttl_s: int | None
    attributes: Mapping[str, str] | None
    sequence_id: int | None


def prepared(
    value: Any,
    serializer: Serializer,
    sequence_id: int | None,
    attributes: Mapping[str, str] | None,
    routing_key: str | None,
) -> Prepared:
    """Encodes a value, or an ``Outgoing``. Raises NotEncodable, InvalidParameter: nothing happened."""
    ttl_s = None
    if attributes is not None or routing_key is not None:
        value = with_attributes(value, attributes, routing_key)
    strings = None
    if type(value) is Outgoing:
        ttl_s, strings = value.ttl_s, value.strings
        sequence_id = value.sequence_id if sequence_id is None else sequence_id
        value = value.value
    payload = value if type(value) is bytes and serializer is BYTES else encoded(serializer, value)
    return Prepared(payload, ttl_s, tracing.stamped(strings), sequence_id)


# --- sequence ids --------------------------------------------------------------------------------


MAX_SEQUENCE_ID = (1 << 63) - 1


class Numbering:
    """Assigns sequence ids.

    Args:
      next_id: the first automatic one.
    """

    __slots__ = ("explicit", "next_id")

    def __init__(self, next_id: int) -> None:
        self.next_id = next_id
        self.explicit: bool | None = None
        """Whether the caller gives the ids; None before the first message."""

    def take(self, given: int | None) -> int:
        """The id of one message. Raises SequenceIdsMixed, InvalidSequenceIds: nothing happened."""
        explicit = given is not None
        if not explicit:
            self._check_left(1)
        if self.explicit is not explicit:
            self._decide(explicit)
        if given is not None:
            return checked_sequence_id(given)
        taken = self.next_id
        self.next_id += 1
        return taken

    def take_many(self, given: Sequence[int] | None, count: int) -> Sequence[int]:
        """The increasing ids of one request. Raises as ``take``, and then uses up none."""
        if given is None:
            self._check_left(count)
            self._decide(False)
            start = self.next_id
            self.next_id += count
            return list(range(start, start + count))
        ids = list(given)
        if len(ids) != count:
            raise InvalidSequenceIds(f"{len(ids)} sequence ids for {count} messages", hint="give one for each")
        for each in ids:
            checked_sequence_id(each)
        if any(later <= earlier for earlier, later in pairwise(ids)):
            raise InvalidSequenceIds("the sequence ids do not increase", hint="each must be larger than the one before")
        self._decide(True)
        return ids

    def _check_left(self, count: int) -> None:
        if self.next_id + count - 1 > MAX_SEQUENCE_ID:
            raise InvalidSequenceIds(
                f"{max(0, MAX_SEQUENCE_ID - self.next_id + 1)} automatic sequence ids are left for {count} messages",
                hint=f"the last one is {MAX_SEQUENCE_ID}; go on with a producer of another name",
            )

    def _decide(self, explicit: bool) -> None:
        if self.explicit is None:
            self.explicit = explicit
        elif self.explicit is not explicit:
            raise SequenceIdsMixed(
                "some messages have sequence ids and some have none" + (", of one producer" if explicit else ""),
                hint="give one with every message of a producer, or with none",
            )


def checked_sequence_id(given: object) -> int:
    """Raises InvalidSequenceIds unless ``given`` can be a sequence id."""
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= MAX_SEQUENCE_ID:
        raise InvalidSequenceIds(f"{given!r} is no sequence id", hint=f"use a whole number from 0 to {MAX_SEQUENCE_ID}")
    return given


# --- sessions and delivered requests -------------------------------------------------------------


@dataclass(slots=True)
class Session:
    """A producer's session with its topic. Changed only by the one request under way."""

    topic: str
    name: str
    epoch: int | None
    """None: there is no session, since deduplication is switched off."""
    generation: int
    last_sequence_id: int
    """The highest id known to be durable; -1: none."""
    optional: bool
    doubted: int = -1
    """The highest id of a request whose outcome is unknown; -1: there is none."""
    over: PlainsongError | None = None
    """The error that ended the session; None while it may send."""

    def passed(self, sequence_id: int) -> None:
        """Everything up to this id is durable."""
        self.last_sequence_id = max(self.last_sequence_id, sequence_id)


def check_name(name: str) -> None:
    """Raises InvalidParameter unless ``name`` can name a producer."""
    if not name:
        raise InvalidParameter("the producer's name is empty", hint="leave it out: the daemon makes one")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameter(
            f"the producer's name {name!r} cannot be written as UTF-8",
            hint=UTF8_HINT,
        ) from error


@dataclass(frozen=True, slots=True)
class Delivered:
    """A durable request."""

    sequence_ids: Sequence[int]
    first_id: MessageId | None
    last_id: MessageId | None
    """The last id stored; if all were duplicates, the originals' last id."""
    duplicates: int
    """How many messages, from the first on, were stored before."""
    deduplicated: bool
    generation: int
    last_sequence_id: int | None

    def of(self, index: int) -> MessageReceipt:
        """The receipt of one message."""
        duplicate = index < self.duplicates
        message_id = self._id_of_duplicate(index) if duplicate else self._id_of_stored(index - self.duplicates)
        return MessageReceipt(self.sequence_ids[index], message_id, duplicate, self.deduplicated, self.generation)

    def _id_of_stored(self, index: int) -> MessageId | None:
        """Messages stored by one request have consecutive ids."""
        if self.first_id is None or self.last_id is None:
            return None
        return nth_id(self.first_id, self.last_id, index, len(self.sequence_ids) - self.duplicates)

    def _id_of_duplicate(self, index: int) -> MessageId | None:
        """Known for the first and last only: the originals may not be consecutive."""
        last = len(self.sequence_ids) - 1
        if self.duplicates <= last:
            return None
        return self.first_id if index == 0 else self.last_id if index == last else None

    def whole(self) -> Receipt:
        """The receipt of all of them."""
        count = len(self.sequence_ids)
        trimmed = 0 < self.duplicates < count
        return Receipt(
            self.first_id,
            self.last_id,
            count,
            self.generation,
            duplicate=bool(count) and self.duplicates == count,
            deduplicated=self.deduplicated,
            last_sequence_id=self.last_sequence_id,
            stored=list(self.sequence_ids[self.duplicates :]) if trimmed else None,
            dropped=list(self.sequence_ids[: self.duplicates]) if trimmed else None,
        )


def as_answered(receipt: Receipt, sequence_ids: Sequence[int]) -> Delivered:
    """A request whose receipt the daemon answered."""
    dropped = len(receipt.dropped or ())
    return Delivered(
        sequence_ids,
        receipt.first_id,
        receipt.last_id,
        len(sequence_ids) if receipt.duplicate else dropped,
        receipt.deduplicated,
        receipt.generation,
        receipt.last_sequence_id,
    )


def as_found(known: Known, sequence_ids: Sequence[int], before: int) -> Delivered:
    """A request whose answer was lost, from the producer's state. ``before``: the last durable id before it was sent."""
    duplicates = bisect_right(sequence_ids, before)
    first = sequence_ids[duplicates if duplicates < len(sequence_ids) else 0]
    last = sequence_ids[-1]
    ids = next((each for each in known.recent if (each.first, each.last) == (first, last)), None)
    return Delivered(
        sequence_ids,
        ids.first_id if ids else None,
        ids.last_id if ids else None,
        duplicates,
        True,
        known.generation,
        known.last_sequence_id,
    )


def refusal(over: PlainsongError) -> PlainsongError:
    """The error for a request after the end of the session: nothing happened."""
    error = type(over)(f"the producer's session is over: {over.detail}", hint=over.hint)
    error.outcome = "not-applied"
    error.__cause__ = over
    return error


class TooSlow(DeadlineExceeded):
    """A request got no answer in time, nothing of it is stored, and its messages may go in smaller ones; never raised to callers."""


def is_refused_itself(error: PlainsongError) -> bool:
    """Whether the daemon refused one message of a request, so that the others may succeed without it."""
    return error.outcome == "not-applied" and isinstance(error, (BadRequest, TooLarge))


# --- the queue -----------------------------------------------------------------------------------


class Single(NamedTuple, Generic[S]):
    """One message and its future."""

    payload: bytes
    ttl_s: int | None
    attributes: Mapping[str, str] | None
    sequence_id: int
    future: S
    at_s: float


@dataclass(slots=True, eq=False)
class ProducerBatch(Generic[S]):
    """One request and its futures: one for each message, or one for all."""

    request: PublishRequest
    futures: Sequence[S]
    at_s: float
    bytes: int
    whole: bool
    """The caller published it as one request: it is never split, and has one future."""
    singles: Sequence[Single[S]] = ()
    limit_s: float | None = None
    """Its own time limit, instead of ``delivery_timeout_s``."""


class Ended(NamedTuple, Generic[S]):
    """Messages that were given up, and the error."""

    futures: Sequence[S]
    error: PlainsongError


@dataclass(slots=True)
class ProducerQueue(Generic[S]):
    """Messages and batches not settled yet, in order. ``S`` is the type of the futures."""

    bounds: Bounds
    pending: int = 0
    """Messages not settled yet, including those under way."""
    pending_bytes: int = 0
    flushing: bool = False
    under_way: ProducerBatch[S] | None = None
    stopped: PlainsongError | None = None
    """The error that stopped the producer."""
    _queue: deque[Single[S] | ProducerBatch[S]] = field(default_factory=deque)
    _again: deque[ProducerBatch[S]] = field(default_factory=deque)
    _waiting_bytes: int = 0
    _whole_batches: int = 0
    """How many requests of ``publish`` are queued; while there are any, nothing lingers."""
    _late_s: float = inf
    """A lower bound for the time at which a queued message becomes overdue."""
    _portion: Portion = field(init=False)
    """How much is gathered into one request."""

    def __post_init__(self) -> None:
        self._portion = Portion.whole(self.bounds.max_batch_messages, self.bounds.max_batch_bytes)

    # --- in ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises the error that stopped the producer, as ``not-applied``."""
        if self.stopped is not None:
            raise error_after_stop(self.stopped)

    def has_room(self, size: int, messages: int = 1) -> bool:
        """Whether the buffer has room. An empty buffer takes a request of any size."""
        size += ITEM_BYTES * messages
        return not self.pending or self.pending_bytes + size <= self.bounds.max_pending_bytes

    def full(self, size: int) -> BufferFull:
        """The error for a message without room."""
        detail = f"{self.pending_bytes} of {self.bounds.max_pending_bytes} bytes wait already, this has {size}"
        return BufferFull(detail, hint="wait for messages to be delivered, or give a larger max_pending_bytes")

    def put(self, single: Single[S]) -> None:
        """Queues a message."""
        size = len(single.payload) + ITEM_BYTES
        self._add(single)
        self.pending += 1
        self.pending_bytes += size

    def put_whole(self, request: PublishRequest, future: S, at_s: float, limit_s: float | None = None) -> None:
        """Queues messages as one request."""
        size = sum(map(len, request.messages)) + ITEM_BYTES * len(request.messages)
        batch = ProducerBatch(request, [future], at_s, size, whole=True, limit_s=limit_s)
        self._add(batch)
        self.pending += len(request.messages)
        self.pending_bytes += size

    def _add(self, each: Single[S] | ProducerBatch[S]) -> None:
        self._queue.append(each)
        self._waiting_bytes += each.bytes if isinstance(each, ProducerBatch) else len(each.payload) + ITEM_BYTES
        self._whole_batches += isinstance(each, ProducerBatch)
        self._late_s = min(self._late_s, self.until_s(each))

    # --- out -----------------------------------------------------------------------------------

    def take(self, now_s: float) -> ProducerBatch[S] | None:
        """The next request to deliver; None until ``delivered`` or ``failed`` ends the one before."""
        ready_s = self._ready_s()
        if ready_s is None or ready_s > now_s:
            return None
        if self._again:
            self.under_way = self._first_again()
        elif isinstance(self._queue[0], ProducerBatch):
            self.under_way = self._queue.popleft()  # type: ignore[assignment] # just looked
            self._whole_batches -= 1
            self._waiting_bytes -= self.under_way.bytes  # type: ignore[union-attr]
        else:
            self.under_way = self._gathered()
            self._waiting_bytes -= self.under_way.bytes
        if not self._queue:
            self._late_s = inf
        return self.under_way

    def _first_again(self) -> ProducerBatch[S]:
        """The first batch to send again, or as much of it as goes at once by now: nothing of it is stored."""
        batch, most = self._again.popleft(), self._portion.messages
        if len(batch.singles) <= most:
            return batch
        self._again.appendleft(gathered(batch.singles[most:]))
        return gathered(batch.singles[:most])

    def next_s(self) -> float | None:
        """When ``take`` or ``overdue`` next returns something; None: not before another ``put``, or the end of a request."""
        ready_s = self._ready_s()
        until_s = self._late_s if ready_s is None else min(ready_s, self._late_s)
        return None if until_s == inf else until_s

    def _ready_s(self) -> float | None:
        """When ``take`` has a request to deliver."""
        if self.under_way is not None or not (self._again or self._queue):
            return None
        if self._again or self.flushing or self._whole_batches:
            return 0.0
        full = len(self._queue) >= self.bounds.max_batch_messages or self._waiting_bytes >= self.bounds.max_batch_bytes
        return 0.0 if full else self._queue[0].at_s + self.bounds.linger_s

    def until_s(self, each: Single[S] | ProducerBatch[S]) -> float:
        """Its deadline."""
        own_s = each.limit_s if isinstance(each, ProducerBatch) else None
        return each.at_s + (self.bounds.delivery_timeout_s if own_s is None else own_s)

    def _gathered(self) -> ProducerBatch[S]:
        """The first messages of the queue, as long as their ids increase and one request carries them."""
        queue = self._queue
        singles: list[Single[S]] = []
        room, last = self._portion.bytes, -1
        while queue and len(singles) < self._portion.messages:
            head = queue[0]
            if isinstance(head, ProducerBatch) or head.sequence_id <= last:
                break
            room -= len(head.payload)
            if room < 0 and singles:
                break
            singles.append(head)
            last = head.sequence_id
            queue.popleft()
        return gathered(singles)

    # --- the end of a request ------------------------------------------------------------------

    def delivered(self, batch: ProducerBatch[S]) -> None:
        """It is durable."""
        self.under_way = None
        self._portion.passed()
        self._release(batch)

    def failed(self, batch: ProducerBatch[S], error: PlainsongError, *, explicit: bool) -> list[Ended[S]]:
        """The batch failed. Returns the messages that end with it: its own, and all behind it if the producer stops.

        A message that the daemon refuses fails alone, unless the caller gives the ids: then nothing behind it may be
        stored, because a program that restarts after the last id would never send it again. A failed ``publish`` does not
        stop the producer, since its caller learns of the failure and decides.
        """
        self.under_way = None
        if isinstance(error, TooSlow):
            self._portion.timed_out(len(batch.singles), sum(map(len, batch.request.messages)))
            self._again.appendleft(batch)
            return []
        if is_refused_itself(error) and len(batch.singles) > 1:
            middle = len(batch.singles) // 2
            self._again.extendleft([gathered(batch.singles[middle:]), gathered(batch.singles[:middle])])
            return []
        self._release(batch)
        ended = [Ended(batch.futures, error)]
        if isinstance(error, FINAL) or (explicit and not batch.whole):
            ended += self.stop(error)
        elif explicit:
            ended += self._clear(error_after_stop(error))
        return ended

    def stop(self, error: PlainsongError) -> list[Ended[S]]:
        """Stops the producer and gives up all queued messages."""
        self.stopped = self.stopped or error
        return self._clear(error_after_stop(error))

    def clear(self) -> list[Ended[S]]:
        """Gives up all messages that are not under way: the producer is closed."""
        return self._clear(MessageDropped("the producer was closed before this was sent"))

    def overdue(self, now_s: float, *, explicit: bool) -> list[Ended[S]]:
        """Gives up overdue messages and those that end with them; the request under way limits itself.

        Messages queued earlier with a later deadline stay.
        """
        ended: list[Ended[S]] = []
        if now_s < self._late_s and not any(self.until_s(batch) <= now_s for batch in self._again):
            return ended
        stopped: PlainsongError | None = None
        again, queued = list(self._again), list(self._queue)
        self._again.clear()
        self._forget_queue()
        for place, each in enumerate([*again, *queued]):
            if stopped is None and self.until_s(each) > now_s:
                if place < len(again):
                    self._again.append(again[place])
                else:
                    self._add(each)
                continue
            batch = each if isinstance(each, ProducerBatch) else gathered([each])
            self._release(batch)
            error: PlainsongError = self._late(batch) if stopped is None else error_after_stop(stopped)
            ended.append(Ended(batch.futures, error))
            if explicit and stopped is None:
                stopped = error
                self.stopped = self.stopped or (None if batch.whole else error)
        return ended

    def _late(self, batch: ProducerBatch[S]) -> DeadlineExceeded:
        own, limit_s = batch.limit_s is not None, self.until_s(batch) - batch.at_s
        return DeadlineExceeded(
            f"not delivered within {limit_s:g} s", hint=f"{'deadline_s' if own else 'delivery_timeout_s'} is the limit"
        )

    def futures(self) -> Iterator[S]:
        """The futures of all messages not settled yet."""
        if self.under_way is not None:
            yield from self.under_way.futures
        for batch in self._again:
            yield from batch.futures
        for each in self._queue:
            yield from each.futures if isinstance(each, ProducerBatch) else [each.future]

    def _clear(self, error: PlainsongError) -> list[Ended[S]]:
        left = [*self._again, *(each if isinstance(each, ProducerBatch) else gathered([each]) for each in self._queue)]
        self._again.clear()
        self._forget_queue()
        for batch in left:
            self._release(batch)
        return [Ended([future for batch in left for future in batch.futures], error)] if left else []

    def _forget_queue(self) -> None:
        self._queue.clear()
        self._waiting_bytes = self._whole_batches = 0
        self._late_s = inf

    def _release(self, batch: ProducerBatch[S]) -> None:
        self.pending -= len(batch.request.messages)
        self.pending_bytes -= batch.bytes


def gathered(singles: Sequence[Single[S]]) -> ProducerBatch[S]:
    """One request of messages that were sent one by one."""
    attributes = [dict(single.attributes or {}) for single in singles]
    request = PublishRequest(
        [single.payload for single in singles],
        sequence_ids=[single.sequence_id for single in singles],
        message_ttls_s=own_ttls([single.ttl_s for single in singles]),
        attributes=attributes if any(attributes) else None,
    )
    size = sum(map(len, request.messages)) + ITEM_BYTES * len(singles)
    return ProducerBatch(
        request, [single.future for single in singles], singles[0].at_s, size, whole=False, singles=singles
    )


def error_after_stop(stopped: PlainsongError) -> PlainsongError:
    """The error for messages behind the one that stopped the producer: nothing happened to them."""
    if isinstance(stopped, (*FINAL, DeduplicationDisabled)):
        return refusal(stopped)
    error = ProducerStopped(
        f"an earlier message was not delivered: {stopped.detail}",
        hint="open the producer again and go on after its last_sequence_id",
    )
    error.__cause__ = stopped
    return error


# --- the producer --------------------------------------------------------------------------------


class ProducerState(Generic[A]):
    """The rules of a producer, for both clients. Callers hold the producer's lock."""

    def __init__(
        self,
        session: Session,
        bounds: Bounds,
        serializer: Serializer,
        initial_sequence_id: int | None,
        transaction_timeout_s: float,
    ) -> None:
        if not transaction_timeout_s > 0:
            raise InvalidParameter(f"transaction_timeout_s is {transaction_timeout_s}", hint="use a number above 0")
        self.session = session
        self.serializer = serializer
        self.waiting: ProducerQueue[A] = ProducerQueue(bounds)
        self.tally = Tally[A]()
        self.transaction_timeout_s = transaction_timeout_s
        self.closed = False
        self._open: Lightweight | None = None
        first = session.last_sequence_id + 1 if initial_sequence_id is None else initial_sequence_id
        self._numbering = Numbering(first)

    @property
    def pending(self) -> int:
        """Messages not settled yet."""
        return self.waiting.pending

    @property
    def flushing(self) -> bool:
        """Whether messages are sent without lingering."""
        return self.waiting.flushing

    @flushing.setter
    def flushing(self, flushing: bool) -> None:
        self.waiting.flushing = flushing

    # --- in ------------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raises Closed, or the error that stopped the producer: nothing happened."""
        if self.closed:
            raise Closed("the producer is closed")
        self.waiting.check()

    def take(self, message: Prepared, future: A, now_s: float) -> bool:
        """Takes one message; whether the caller must wake a worker. Raises SequenceIdsMixed, InvalidSequenceIds."""
        sequence_id = self._numbering.take(message.sequence_id)
        waiting = self.waiting
        no_worker_due = waiting.next_s() is None
        waiting.put(Single(message.payload, message.ttl_s, message.attributes, sequence_id, future, now_s))
        return waiting.under_way is None or no_worker_due

    def take_whole(
        self,
        request: PublishRequest,
        sequence_ids: Sequence[int | None] | None,
        future: A,
        now_s: float,
        limit_s: float | None = None,
    ) -> None:
        """Takes messages that make one request. Raises as ``take``."""
        given = None
        if sequence_ids is not None and any(each is not None for each in sequence_ids):
            given = [each for each in sequence_ids if each is not None]
            if len(given) != len(sequence_ids):
                raise SequenceIdsMixed("some messages have sequence ids and some have none", hint="all, or none")
        request.sequence_ids = self._numbering.take_many(given, len(request.messages))
        self.waiting.put_whole(request, future, now_s, limit_s)

    @property
    def explicit(self) -> bool:
        """Whether the caller gives the ids."""
        return bool(self._numbering.explicit)

    # --- out -----------------------------------------------------------------------------------

    def next_s(self) -> float | None:
        """When ``work`` next has something to do: a delivery, an overdue message, or a transaction to time out."""
        times = [self.waiting.next_s(), self._open.until_s if self._open is not None else None]
        return min((each for each in times if each is not None), default=None)

    def work(self, now_s: float) -> tuple[ProducerBatch[A] | None, list[Ended[A]]]:
        """The request to deliver now, and the messages given up."""
        self.expire(now_s)
        ended = self.overdue(now_s)
        return self.waiting.take(now_s), ended

    def wants_another(self, now_s: float) -> bool:
        """Whether a second worker must watch deadlines while a request is under way."""
        return self.next_s() is not None

    def clear(self) -> list[Ended[A]]:
        """Gives up all messages that are not under way."""
        return self.waiting.clear()

    def close(self) -> None:
        """Refuses further messages and aborts an open transaction."""
        self.abort_open()
        self.closed = True

    def overdue(self, now_s: float) -> list[Ended[A]]:
        """Gives up overdue messages and those that end with them; also while a request is under way."""
        return self.waiting.overdue(now_s, explicit=self.explicit)

    def delivered(self, batch: ProducerBatch[A]) -> list[Ended[A]]:
        """The batch is durable. Returns messages given up nevertheless: all others, if deduplication was switched off."""
        self.waiting.delivered(batch)
        self.tally.delivered(len(batch.request.messages))
        return self.waiting.stop(self.session.over) if self.session.over is not None else []

    def failed(self, batch: ProducerBatch[A], error: PlainsongError) -> list[Ended[A]]:
        """The batch failed. Returns the messages that end with it."""
        ended = self.waiting.failed(batch, error, explicit=self.explicit)
        if self.session.over is not None:
            ended += self.waiting.stop(self.session.over)
        return ended

    # --- lightweight transactions --------------------------------------------------------------

    def begin(self, routing_key: str, timeout_s: float | None, now_s: float) -> Lightweight:
        """Opens a transaction. Raises TransactionInProgress, InvalidParameter, and as ``check_usable``."""
        self.check_usable()
        self.expire(now_s)
        if self._open is not None and self._open.state in ("open", "committing"):
            raise TransactionInProgress(
                f"a transaction of {self._open.routing_key!r} is {self._open.state} on this producer",
                hint="commit or abort it first: one at a time",
            )
        limit_s = self.transaction_timeout_s if timeout_s is None else timeout_s
        if not limit_s > 0:
            raise InvalidParameter(f"timeout_s is {limit_s}", hint="use a number above 0")
        self._open = Lightweight(routing_key, self.serializer, limit_s, now_s + limit_s)
        return self._open

    def expire(self, now_s: float) -> None:
        """Forgets a transaction that has ended or timed out."""
        if self._open is not None:
            self._open.expire(now_s)
            if self._open.state not in ("open", "committing"):
                self._open = None

    def abort_open(self) -> None:
        """Aborts the open transaction: the producer ends."""
        if self._open is not None and self._open.state == "open":
            self._open.abort()


def whole_request(
    messages: Any,
    serializer: Serializer,
    *,
    ttl_s: int | None = None,
    attributes: Mapping[str, str] | None = None,
    routing_key: str | None = None,
) -> tuple[PublishRequest, list[int | None]]:
    """Encodes messages as one request, and returns the sequence ids they carry. Raises NoMessages, NotEncodable, InvalidParameter."""
    many = as_list(messages)
    if not many:
        raise NoMessages("the list is empty")
    many = all_with_attributes(many, attributes, routing_key)
    request = outgoing_request(many, serializer, ttl_s, numbered=True)
    return request, [each.sequence_id if isinstance(each, Outgoing) else None for each in many]


def atomic_request(
    routing_key: str, messages: Any, serializer: Serializer, *, ttl_s: int | None = None
) -> tuple[PublishRequest, list[int | None]]:
    """Encodes an atomic request. Raises as ``whole_request``; MaxTransactionSizeExceeded."""
    request, ids = whole_request(messages, serializer, ttl_s=ttl_s)
    request.atomic = True
    request.routing_key = check_routing_key(routing_key)
    for each in request.attributes or ():
        if each.get("routingKey", routing_key) != routing_key:
            raise InvalidParameter("a message has another routing key", hint="one request, one routing key")
    check_size(len(request.messages), sum(map(len, request.messages)))
    return request, ids


def unnumbered_atomic_request(
    routing_key: str,
    messages: Any,
    serializer: Serializer,
    ttl_s: int | None,
    attributes: Mapping[str, str] | None,
) -> PublishRequest:
    """Encodes an atomic request without a producer. Raises InvalidParameter: a message has a sequence id."""
    request, ids = atomic_request(routing_key, all_with_attributes(messages, attributes, None), serializer, ttl_s=ttl_s)
    if any(each is not None for each in ids):
        raise InvalidParameter("a sequence id belongs to a producer", hint="use client.producer")
    return request
