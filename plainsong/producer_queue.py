"""A producer's sequence ids, session and queue, without threads or a clock.

A producer is a publisher of one topic that numbers its messages. Only one request is in flight at a time, since the
topic treats an out-of-order sequence id as a duplicate. Messages sent one by one are batched; messages published
together are one request.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from plainsong.errors import (
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
)
from plainsong.protocol.errors import (
    DeduplicationDisabled,
    GenerationChanged,
    InvalidParameter,
    InvalidSequenceIds,
    NoMessages,
    PlainsongError,
    ProducerExpired,
    ProducerFenced,
)
from plainsong.protocol.plurals import counted
from plainsong.protocol.requests import MAX_SEQUENCE_ID
from plainsong.publisher_queue import ITEM_BYTES, Lost, PublisherQueue, TooSlow, Whole, publisher_bounds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from plainsong.calls import Known
    from plainsong.messages import MessageId
    from plainsong.protocol.requests import PublishRequest
    from plainsong.publisher_queue import Batch, Bounds, Entry, Lane, Overflow
    from plainsong.serializers import Serializer

A = TypeVar("A")

#: Errors that end the session. Only the caller can decide whether to open another one.
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
    """Check the options of a producer. Raises InvalidParameter."""
    if overflow == "drop":
        raise InvalidParameter(
            "a producer never drops messages", hint='use wait or raise; "drop" is for client.publisher'
        )
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


# --- sequence ids --------------------------------------------------------------------------------


class Numbering:
    """Assigns sequence ids.

    Args:
      next_id: the first automatic one.
    """

    __slots__ = ("explicit", "next_id")

    def __init__(self, next_id: int) -> None:
        self.next_id = next_id
        self.explicit: bool | None = None
        """True if the caller gives the ids; None before the first message."""

    def take(self, given: int | None) -> int:
        """Assign the id of one message. Raises SequenceIdsMixed, InvalidSequenceIds: nothing happened."""
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
        """Assign the increasing ids of one request. Raises the same as ``take``, without using up an id."""
        if given is None:
            self._check_left(count)
            self._decide(False)
            start = self.next_id
            self.next_id += count
            return list(range(start, start + count))
        ids = list(given)
        if len(ids) != count:
            raise InvalidSequenceIds(
                f"{counted(len(ids), 'sequence id')} for {counted(count, 'message')}", hint="give one for each"
            )
        for each in ids:
            checked_sequence_id(each)
        if any(later <= earlier for earlier, later in pairwise(ids)):
            raise InvalidSequenceIds(
                "the sequence ids do not increase", hint="each must be larger than the previous one"
            )
        self._decide(True)
        return ids

    def _check_left(self, count: int) -> None:
        if self.next_id + count - 1 > MAX_SEQUENCE_ID:
            raise InvalidSequenceIds(
                f"{counted(count, 'message')}, but automatic sequence ids are left for {max(0, MAX_SEQUENCE_ID - self.next_id + 1)}",
                hint=f"the last one is {MAX_SEQUENCE_ID}; continue with a producer under another name",
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
    """Return ``given`` if it can be a sequence id. Raises InvalidSequenceIds."""
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= MAX_SEQUENCE_ID:
        raise InvalidSequenceIds(
            f"{given!r} is not a sequence id", hint=f"use a whole number from 0 to {MAX_SEQUENCE_ID}"
        )
    return given


# --- sessions and delivered requests -------------------------------------------------------------


@dataclass(slots=True)
class Session:
    """A producer's session with its topic. Changed only by the request in flight."""

    topic: str
    name: str
    epoch: int | None
    """None if there is no session because deduplication is off."""
    generation: int
    last_sequence_id: int
    """The highest id known to be durable; -1 if there is none."""
    optional: bool
    doubted: int = -1
    """The highest id of a request whose outcome is unknown; -1 if there is none."""
    over: PlainsongError | None = None
    """The error that ended the session; None while it may send."""

    def passed(self, sequence_id: int) -> None:
        """Record that everything up to this id is durable."""
        self.last_sequence_id = max(self.last_sequence_id, sequence_id)


def check_name(name: str) -> None:
    """Check that ``name`` can name a producer. Raises InvalidParameter."""
    if not name:
        raise InvalidParameter("the producer's name is empty", hint="omit it: the daemon generates one")
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
    """The number of leading messages that had been stored before."""
    deduplicated: bool
    generation: int
    last_sequence_id: int | None

    def of(self, index: int) -> MessageReceipt:
        """Return the receipt of one message."""
        duplicate = index < self.duplicates
        message_id = self._id_of_duplicate(index) if duplicate else self._id_of_stored(index - self.duplicates)
        return MessageReceipt(self.sequence_ids[index], message_id, duplicate, self.deduplicated, self.generation)

    def _id_of_stored(self, index: int) -> MessageId | None:
        """Compute the id; messages stored by one request have consecutive ids."""
        if self.first_id is None or self.last_id is None:
            return None
        return nth_id(self.first_id, self.last_id, index, len(self.sequence_ids) - self.duplicates)

    def _id_of_duplicate(self, index: int) -> MessageId | None:
        """Return the id if it is known: only for the first and last, since the originals may not be consecutive."""
        last = len(self.sequence_ids) - 1
        if self.duplicates <= last:
            return None
        return self.first_id if index == 0 else self.last_id if index == last else None

    def whole(self) -> Receipt:
        """Return the receipt of the request."""
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
    """Make the result of a request from the daemon's receipt."""
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
    """Make the result of a request that lost its response, from the producer's state.

    Args:
      before: the last durable id before the request was sent.
    """
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
    """Make the error for a request after the end of the session: nothing happened."""
    error = type(over)(f"the producer's session has ended: {over.detail}", hint=over.hint)
    error.outcome = "not-applied"
    error.__cause__ = over
    return error


def _given(sequence_ids: Sequence[int | None]) -> list[int] | None:
    """Return the caller's ids of one request; None if there are none. Raises SequenceIdsMixed."""
    given = [each for each in sequence_ids if each is not None]
    if given and len(given) != len(sequence_ids):
        raise SequenceIdsMixed("some messages have sequence ids and some have none", hint="all, or none")
    return given or None


# --- the queue -----------------------------------------------------------------------------------


def error_after_stop(stopped: PlainsongError) -> PlainsongError:
    """Make the error for the messages after the one that stopped the producer: they were not sent."""
    if isinstance(stopped, (*FINAL, DeduplicationDisabled)):
        return refusal(stopped)
    error = ProducerStopped(
        f"an earlier message was not delivered: {stopped.detail}",
        hint="open the producer again, and continue after its last_sequence_id",
    )
    error.__cause__ = stopped
    return error


class ProducerQueue(PublisherQueue[A]):
    """A publisher's queue for one topic that numbers its messages, so that each is stored once.

    The delivery retries and pauses on its own. If the caller gives the ids, a message that is given up stops the
    producer: if a later one were stored, a program that restarts after the last stored id would never send the missing
    one. A failed ``publish`` does not stop it, since its caller gets the error and decides.
    """

    closed_detail = "the producer was closed before this was sent"

    def __init__(
        self,
        session: Session,
        bounds: Bounds,
        serializer: Serializer,
        initial_sequence_id: int | None,
        transaction_timeout_s: float,
        random: Callable[[], float] = random.random,
    ) -> None:
        if not transaction_timeout_s > 0:
            raise InvalidParameter(f"transaction_timeout_s is {transaction_timeout_s}", hint="use a number above 0")
        super().__init__(bounds, random)
        self.session = session
        self.serializer = serializer
        self.transaction_timeout_s = transaction_timeout_s
        self.stopped: PlainsongError | None = None
        """The error that stopped the producer."""
        self._open: Lightweight | None = None
        self._numbering = Numbering(
            session.last_sequence_id + 1 if initial_sequence_id is None else initial_sequence_id
        )
        #: No waiting message becomes overdue before this time.
        self._late_s = inf

    # --- in ------------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Check that messages are accepted. Raises the error that stopped the producer: nothing happened."""
        if self.stopped is not None:
            raise error_after_stop(self.stopped)

    def fits(self, entry: Entry[A]) -> bool:
        """True: an empty buffer accepts a request of any size."""
        return True

    def put(self, topic: str, entry: Entry[A], now_s: float) -> bool | None:
        """Number messages, and queue them; as ``PublisherQueue.put``.

        Raises:
          as ``check_usable``; SequenceIdsMixed, InvalidSequenceIds: nothing happened.
        """
        self.check_usable()
        count = len(entry.request.messages) if isinstance(entry, Whole) else 1
        size = entry.size + ITEM_BYTES * count
        if self.pending and self.pending_bytes + size > self.bounds.max_pending_bytes:
            return None
        if isinstance(entry, Whole):
            entry.request.sequence_ids = self._numbering.take_many(_given(entry.sequence_ids), count)
            self._wholes += 1
        else:
            entry.sequence_id = self._numbering.take(entry.sequence_id)
        self._late_s = min(self._late_s, now_s + self._limit_s(entry))
        wakes = self._add(topic, entry, now_s, count, size)
        return wakes or isinstance(entry, Whole)  # the messages before it linger no longer

    def wants_sender(self, lane: Lane[A]) -> bool:
        """True if a worker must be woken: to send, or to watch deadlines while a request is in flight."""
        return len(lane.waiting) == 1 or super().wants_sender(lane)

    # --- out -----------------------------------------------------------------------------------

    def next_s(self) -> float | None:
        """Return the next time ``work`` has something to do: a delivery, an overdue message, a transaction's time-out."""
        times = [super().next_s(), self._open.until_s if self._open is not None else None]
        return min((each for each in times if each is not None), default=None)

    def work(self, now_s: float) -> tuple[Batch[A] | None, list[Lost[A]]]:
        """Return the request to deliver now, and the messages given up."""
        self.expire(now_s)
        return super().work(now_s)

    def wants_another(self, now_s: float) -> bool:
        """True if a second worker must watch deadlines while a request is in flight."""
        return self.next_s() is not None

    def settled(self, batch: Batch[A]) -> list[Lost[A]]:
        """Complete a durable batch. Returns messages given up: all others, if deduplication was switched off."""
        super().settled(batch)
        return self.stop(self.session.over) if self.session.over is not None else []

    def failed(self, batch: Batch[A], error: PlainsongError, now_s: float) -> list[Lost[A]]:
        """Handle a failed batch. Returns the messages given up: its own, and those after it if the producer stops."""
        lost = super().failed(batch, error, now_s)
        whole = isinstance(batch.items[0], Whole)
        if lost and (isinstance(error, FINAL) or (self.keeps_gaps_out and not whole)):
            lost += self.stop(error)
        elif lost and self.keeps_gaps_out:
            lost += self._ended_after(error)
        if self.session.over is not None:
            lost += self.stop(self.session.over)
        return lost

    def stop(self, error: PlainsongError) -> list[Lost[A]]:
        """Stop the producer and give up all waiting messages."""
        self.stopped = self.stopped or error
        return self._ended_after(error)

    def close(self) -> None:
        """Abort an open transaction."""
        if self._open is not None and self._open.state == "open":
            self._open.abort()

    # --- within --------------------------------------------------------------------------------

    @property
    def keeps_gaps_out(self) -> bool:
        """True if the caller gives the ids."""
        return bool(self._numbering.explicit)

    def _ended_after(self, error: PlainsongError) -> list[Lost[A]]:
        ended = error_after_stop(error)
        return self._clear(lambda lane, in_doubt: ended)

    def _may_repeat(self, batch: Batch[A], error: PlainsongError) -> bool:
        return isinstance(error, TooSlow)

    def _pause(self, lane: Lane[A], error: PlainsongError, now_s: float) -> None:
        """Do nothing: the delivery pauses itself."""

    def _overdue_s(self, lane: Lane[A]) -> float:
        again_s = self.until_s(lane.again[0].items[0]) if lane.again else inf
        if not lane.waiting:
            self._late_s = inf
        return min(again_s, self._late_s)

    def _taken_out(self, lane: Lane[A], now_s: float) -> list[tuple[Entry[A], bool]]:
        found = super()._taken_out(lane, now_s)
        self._late_s = min(map(self.until_s, lane.waiting), default=inf)
        return found

    def _given_up(self, lane: Lane[A], found: list[tuple[Entry[A], bool]]) -> list[Lost[A]]:
        if not self.keeps_gaps_out or not found:
            return super()._given_up(lane, found)
        lost = super()._given_up(lane, found[:1])
        if not isinstance(found[0][0], Whole):
            self.stopped = self.stopped or lost[0].error
        if found[1:]:
            lost.append(Lost(lane.topic, [entry for entry, _ in found[1:]], error_after_stop(lost[0].error)))
        return lost

    # --- lightweight transactions --------------------------------------------------------------

    def begin(self, routing_key: str, timeout_s: float | None, now_s: float) -> Lightweight:
        """Open a transaction. Raises TransactionInProgress, InvalidParameter, and what ``check_usable`` raises."""
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
        """Time out the open transaction if it is due, and drop it once it has ended."""
        if self._open is not None:
            self._open.expire(now_s)
            if self._open.state not in ("open", "committing"):
                self._open = None


# --- requests ------------------------------------------------------------------------------------


def whole_request(
    messages: Any,
    serializer: Serializer,
    *,
    ttl_s: int | None = None,
    attributes: Mapping[str, str] | None = None,
    routing_key: str | None = None,
) -> tuple[PublishRequest, list[int | None]]:
    """Encode messages as one request, and return it with the sequence ids they carry.

    Raises NoMessages, NotEncodable, InvalidParameter.
    """
    many = as_list(messages)
    if not many:
        raise NoMessages("the list is empty")
    many = all_with_attributes(many, attributes, routing_key)
    request = outgoing_request(many, serializer, ttl_s, numbered=True)
    return request, [each.sequence_id if isinstance(each, Outgoing) else None for each in many]


def atomic_request(
    routing_key: str, messages: Any, serializer: Serializer, *, ttl_s: int | None = None
) -> tuple[PublishRequest, list[int | None]]:
    """Encode an atomic request. Raises MaxTransactionSizeExceeded, and what ``whole_request`` raises."""
    request, ids = whole_request(messages, serializer, ttl_s=ttl_s)
    request.atomic = True
    request.routing_key = check_routing_key(routing_key)
    for each in request.attributes or ():
        if each.get("routingKey", routing_key) != routing_key:
            raise InvalidParameter("a message has another routing key", hint="use one request per routing key")
    check_size(len(request.messages), sum(map(len, request.messages)))
    return request, ids


def unnumbered_atomic_request(
    routing_key: str,
    messages: Any,
    serializer: Serializer,
    ttl_s: int | None,
    attributes: Mapping[str, str] | None,
) -> PublishRequest:
    """Encode an atomic request without a producer. Raises InvalidParameter if a message has a sequence id."""
    request, ids = atomic_request(routing_key, all_with_attributes(messages, attributes, None), serializer, ttl_s=ttl_s)
    if any(each is not None for each in ids):
        raise InvalidParameter("a sequence id belongs to a producer", hint="use client.producer")
    return request
