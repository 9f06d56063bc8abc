"""Clients' requests to a topic and the answers, in every encoding, and the checks that need no topic.

Codecs convert these to and from bytes; routes, the hot path and actors pass them on. They are plain data: the codec
checks their shape, the functions below check that they make sense.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from plainsong.protocol import ids
from plainsong.protocol.errors import InvalidParameter, InvalidSequenceIds, NoMessages, TransactionRequired
from plainsong.protocol.masking import holds_credential
from plainsong.protocol.plurals import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Isolation = Literal["uncommitted", "committed"]
#: The longest wait of a poll, as docs/http.md promises.
MAX_WAIT_MS = 60_000
#: The longest time to live, in seconds. Source: an Avro int, and the ttl property, which is one.
MAX_TTL_S = (1 << 31) - 1
#: The largest sequence id of a producer: the maximum of an Avro long.
MAX_SEQUENCE_ID = (1 << 63) - 1


class Lengths:
    """The lengths of some messages."""

    __slots__ = ("longest", "of_each", "total")

    def __init__(self, messages: Sequence[bytes]) -> None:
        if len(messages) == 1:
            self.longest = self.total = len(messages[0])
            self.of_each: int | None = self.longest
            return
        distinct = set(map(len, messages))
        self.longest = max(distinct, default=0)
        #: The length that every message has; None if they differ, or there are none.
        self.of_each = self.longest if len(distinct) == 1 else None
        self.total = sum(map(len, messages)) if self.of_each is None else self.of_each * len(messages)


@dataclass(slots=True)
class PublishRequest:
    """The body of publish and store; the fields after ``write_pointer`` are version 2."""

    messages: Sequence[bytes]
    write_pointer: int | None = None
    ttl_s: int | None = None
    producer: str | None = None
    producer_epoch: int | None = None
    generation: int | None = None
    sequence_ids: Sequence[int] | None = None
    atomic: bool = False
    routing_key: str | None = None
    segment: str | None = None
    segments: Sequence[str] | None = None
    message_ttls_s: Sequence[int | None] | None = None
    attributes: Sequence[Mapping[str, str]] | None = None
    _lengths: Lengths | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def lengths(self) -> Lengths:
        """The lengths of its messages, computed once: measuring a thousand takes 25 µs or more."""
        if self._lengths is None:
            self._lengths = Lengths(self.messages)
        return self._lengths


@dataclass(slots=True)
class PollRequest:
    """The body of poll; the fields after ``transaction`` are version 2.

    ``start_from`` is an id of 20 bytes, a timestamp in milliseconds, or None for the oldest.
    """

    start_from: bytes | int | None = None
    inclusive: bool = True
    limit: int | None = None
    transaction: bytes | None = None
    end_before: bytes | None = None
    wait_ms: int | None = None
    max_bytes: int | None = None
    isolation: Isolation | None = None
    as_of_ms: int | None = None
    """Show what had been committed by this time, in milliseconds since 1970. In JSON and the query only, not in Avro."""

    @property
    def since(self) -> bytes:
        """The inclusive lower bound this poll starts at.

        Raises:
          InvalidMessageId: the id is not 20 bytes long.
          InvalidParameter: the timestamp is below 0.
        """
        return bound_of(self.start_from, inclusive=self.inclusive)


def bound_of(start_from: bytes | int | None, *, inclusive: bool) -> bytes:
    """The inclusive lower bound of a start position: an id, a timestamp in ms, or None (the oldest).

    Raises:
      InvalidMessageId: the id is not 20 bytes long.
      InvalidParameter: the timestamp is below 0.
    """
    if start_from is None:
        return ids.FIRST_BOUND
    if isinstance(start_from, int):
        if start_from < 0:
            raise InvalidParameter(f"start time {start_from} is below 0", hint="use milliseconds since 1970")
        return ids.bound_at(start_from if inclusive else start_from + 1)
    ids.checked_id(start_from)
    return start_from if inclusive else ids.after(start_from)


@dataclass(slots=True)
class ProducerVerdict:
    """The outcome of a publish that had a producer; shown in headers, written by no codec."""

    duplicate: Literal["true", "false", "partial"]
    """The result of deduplication: all of the request was stored before, none of it, or a part."""
    last_sequence_id: int | None
    """The highest sequence id stored for the producer; None where deduplication is switched off."""


@dataclass(slots=True)
class PublishResponse:
    """The positions of a publish under a write pointer; a client returns it unchanged to roll the publish back."""

    write_pointer: int | None
    start_timestamp_ms: int
    start_sequence_id: int
    end_timestamp_ms: int
    end_sequence_id: int
    duplicate: bool = False
    verdict: ProducerVerdict | None = field(default=None, compare=False)
    """Set when the request had a producer."""
    generation: int = field(default=0, compare=False)
    """The topic's generation; 0 where the answer does not name it."""


@dataclass(slots=True)
class Receipt:
    """The outcome of a publish without a write pointer; ids are None when they are no longer known."""

    first_id: bytes | None
    last_id: bytes | None
    generation: int
    duplicate: bool = False
    deduplicated: bool = False
    last_sequence_id: int | None = None
    stored: Sequence[int] | None = None
    dropped: Sequence[int] | None = None
    verdict: ProducerVerdict | None = field(default=None, compare=False)
    """Set when the request had a producer."""


# --- checks ----------------------------------------------------------------------------------------
#
# They run after the query parameters (``ttl``, ``wait_ms``, ``isolation``, ``max_bytes``) have been applied. Nothing
# has happened if one of them raises.


#: Bytes of one message's attributes together, and of a routing key, in UTF-8, as docs/http.md promises.
MAX_ATTRIBUTE_BYTES = 4096
MAX_SEGMENT_BYTES = 64
#: Winning segments one publish may list: enough for the tasks of a very large job.
MAX_SEGMENTS = 1 << 16
MAX_PRODUCER_BYTES = 255


def check_publish(request: PublishRequest) -> None:
    """Check a publish.

    Raises:
      NoMessages: no messages, no write pointer, and no segment is listed.
      InvalidSequenceIds: negative, not increasing, or not one per message (exactly one without messages); or there
        are none, and the request publishes segments that a producer staged.
      InvalidParameter: another value that is not allowed; the detail names the field.
    """
    if request.segment is not None:
        raise InvalidParameter("segment is for store", hint="a publish lists the winning ones as segments")
    if request.write_pointer is None:
        if request.segments is not None:
            _check_staged(request, request.segments)
        elif not request.messages:
            raise NoMessages(hint="a publish without messages needs a write pointer or segments")
    _check_fields(request)


def _check_staged(request: PublishRequest, segments: Sequence[str]) -> None:
    """Check a publish of staged segments. Raises the same as ``check_publish``."""
    if request.messages:
        raise InvalidParameter(
            "a request without a write pointer has messages and segments",
            hint="publish the messages by themselves: staged segments become one batch of their own",
        )
    if not segments:
        raise NoMessages(hint="list the segments that are to be published")
    if request.producer is None:
        raise InvalidParameter(
            "segments without a write pointer are a producer's",
            hint="give the producer that staged them, or the write pointer they were stored under",
        )
    if request.sequence_ids is None:
        raise InvalidSequenceIds("staged segments are published once", hint="give one sequence id for all of them")
    if request.routing_key is not None:
        raise InvalidParameter("routingKey is for messages, and there are none", hint="give it with the store")


def check_store(request: PublishRequest) -> None:
    """Check a store.

    Raises:
      NoMessages: the request has none.
      TransactionRequired: no write pointer, and not both a producer and a segment.
      InvalidSequenceIds, InvalidParameter: as for ``check_publish``.
    """
    if request.segments is not None:
        raise InvalidParameter("segments is for publish", hint="a store gives its own one as segment")
    if request.atomic:
        raise InvalidParameter("atomic is for publish", hint="stored messages are published in one moment anyway")
    if not request.messages:
        raise NoMessages()
    if request.write_pointer is None and (request.producer is None or request.segment is None):
        raise TransactionRequired(hint="store needs transactionWritePointer, or producer and segment")
    _check_fields(request)


def check_rollback(response: PublishResponse) -> None:
    """Check a rollback.

    Raises:
      TransactionRequired: no write pointer.
      InvalidParameter: the write pointer is not above 0.
    """
    if response.write_pointer is None:
        raise TransactionRequired("a rollback needs a write pointer")
    _positive("transactionWritePointer", response.write_pointer)


def check_poll(request: PollRequest) -> None:
    """Check a poll.

    Raises:
      InvalidMessageId: ``startFrom`` or ``endBefore`` is not 20 bytes long.
      InvalidParameter: another value that is not allowed; the detail names the field.
    """
    bound_of(request.start_from, inclusive=request.inclusive)
    if request.end_before is not None:
        ids.checked_id(request.end_before)
    _positive("limit", request.limit)
    _positive("maxBytes", request.max_bytes)
    if request.wait_ms is not None and not 0 <= request.wait_ms <= MAX_WAIT_MS:
        raise InvalidParameter(f"waitMs is {request.wait_ms}", hint=f"use 0 to {MAX_WAIT_MS} milliseconds")
    if request.transaction is not None and request.isolation is not None:
        raise InvalidParameter(
            "transaction and isolation exclude each other",
            hint="transaction supplies a snapshot; isolation=committed uses the daemon's",
        )
    if request.as_of_ms is not None:
        _check_as_of(request)


def _check_as_of(request: PollRequest) -> None:
    if request.as_of_ms is not None and not 0 <= request.as_of_ms <= ids.MAX_TIMESTAMP_MS:
        raise InvalidParameter(f"asOfMs is {request.as_of_ms}", hint="use milliseconds since 1970")
    if request.transaction is not None or request.isolation == "uncommitted":
        what = "transaction" if request.transaction is not None else "isolation uncommitted"
        raise InvalidParameter(f"asOfMs and {what} exclude each other", hint="asOfMs reads what was committed by then")


def in_the_future(at_ms: int, now_ms: int) -> InvalidParameter:
    """Return the error for a read as of a time in the future."""
    return InvalidParameter(f"asOfMs is {at_ms}, and it is {now_ms}", hint="use a moment in the past")


def _check_fields(request: PublishRequest) -> None:
    if request.write_pointer is not None:
        _positive("transactionWritePointer", request.write_pointer)
    if request.ttl_s is not None:
        _check_ttl("ttlSeconds", request.ttl_s)
    if request.generation is not None:
        _positive("generation", request.generation)
    if request.producer is not None or request.producer_epoch is not None or request.sequence_ids is not None:
        _check_producer(request)
    if request.message_ttls_s is not None:
        _check_count("messageTtlsSeconds", request.message_ttls_s, request.messages)
        for index, ttl_s in enumerate(request.message_ttls_s):
            _check_ttl(f"messageTtlsSeconds[{index}]", ttl_s)
    if request.attributes is not None:
        _check_count("attributes", request.attributes, request.messages)
        for index, attributes in enumerate(request.attributes):
            _check_attributes(index, attributes)
    if request.routing_key is not None:
        _check_bytes("routingKey", request.routing_key, 0, MAX_ATTRIBUTE_BYTES)
    if request.segment is not None:
        _check_bytes("segment", request.segment, 1, MAX_SEGMENT_BYTES)
    if request.segments is not None:
        if len(request.segments) > MAX_SEGMENTS:
            raise InvalidParameter(f"{len(request.segments)} segments", hint=f"at most {MAX_SEGMENTS}")
        for index, segment in enumerate(request.segments):
            _check_bytes(f"segments[{index}]", segment, 1, MAX_SEGMENT_BYTES)


@lru_cache(maxsize=1024)  # called for every request of a producer
def check_producer_name(text: str) -> None:
    """Raise InvalidParameter unless ``text`` may name a producer: 1 to 255 bytes of UTF-8, and no credential."""
    _check_bytes("producer", text, 1, MAX_PRODUCER_BYTES)
    if holds_credential(text):
        raise InvalidParameter(
            "the producer's name looks like a token, and names are not secret", hint="make a new one"
        )


def _check_producer(request: PublishRequest) -> None:
    if request.producer is not None:
        check_producer_name(request.producer)
    elif request.producer_epoch is not None or request.sequence_ids is not None:
        # Ignoring them would break a promise that the client relies on.
        raise InvalidParameter("producerEpoch and sequenceIds belong to a producer", hint="give its name as producer")
    if request.producer_epoch is not None and request.producer_epoch < 0:
        raise InvalidParameter(f"producerEpoch is {request.producer_epoch}", hint="use the session's own")
    if request.sequence_ids is not None:
        check_sequence_ids(request.sequence_ids, len(request.messages))


def check_sequence_ids(sequence_ids: Sequence[int], messages: int) -> None:
    """Check the sequence ids of a request with ``messages`` messages.

    Raises:
      InvalidSequenceIds: negative, not strictly increasing, or not one per message (one without messages).
    """
    wanted = messages or 1
    if len(sequence_ids) != wanted:
        raise InvalidSequenceIds(
            f"{counted(len(sequence_ids), 'sequence id')} for {counted(messages, 'message')}", hint=f"give {wanted}"
        )
    if type(sequence_ids) is range and sequence_ids.step == 1 and sequence_ids.start >= 0:
        return
    if wanted == 1 and sequence_ids[0] >= 0:
        return
    last = -1
    for index, sequence_id in enumerate(sequence_ids):
        if sequence_id < 0:
            raise InvalidSequenceIds(f"sequence id {index} is {sequence_id}", hint="use 0 or more")
        if sequence_id <= last:
            raise InvalidSequenceIds(f"sequence id {index} is {sequence_id} after {last}", hint="they must increase")
        last = sequence_id


def _positive(name: str, value: int | None) -> None:
    if value is not None and value <= 0:
        raise InvalidParameter(f"{name} is {value}", hint="use a number above 0")


def _check_ttl(name: str, ttl_s: int | None) -> None:
    if ttl_s is not None and not 0 < ttl_s <= MAX_TTL_S:
        raise InvalidParameter(f"{name} is {ttl_s}", hint=f"use 1 to {MAX_TTL_S} seconds")


def _check_count(name: str, given: Sequence[object], messages: Sequence[bytes]) -> None:
    if len(given) != len(messages):
        raise InvalidParameter(
            f"{name} has {counted(len(given), 'entry')} for {counted(len(messages), 'message')}", hint="one per message"
        )


def _check_attributes(index: int, attributes: Mapping[str, str]) -> None:
    size = sum(len(key.encode()) + len(value.encode()) for key, value in attributes.items())
    if size > MAX_ATTRIBUTE_BYTES:
        raise InvalidParameter(
            f"the attributes of message {index} are {size} bytes",
            hint=f"at most {MAX_ATTRIBUTE_BYTES}; use the payload",
        )


def _check_bytes(name: str, text: str, low: int, high: int) -> None:
    size = len(text.encode())
    if not low <= size <= high:
        raise InvalidParameter(f"{name} is {size} bytes long", hint=f"use {low} to {high} bytes of UTF-8")
