"""Publishing to a topic: rows and receipt of a request, and the admission of messages and write pointers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plainsong.protocol.errors import (
    GenerationChanged,
    InvalidParameter,
    LowSpace,
    MessageTooLarge,
    NoMessages,
    PlainsongError,
    RequestTooLarge,
    RolledBack,
    TooLarge,
    TopicFull,
    TransactionExpired,
    TransactionNotInProgress,
    TransactionRefused,
    TransactionRequired,
    TransactionsUnavailable,
    TransactionTooLarge,
)
from plainsong.protocol.ids import NO_PAYLOAD_PART, pack_position
from plainsong.protocol.keys import DamagedRow, generation_prefix
from plainsong.protocol.requests import ProducerVerdict, PublishRequest, Receipt
from plainsong.protocol.rows import PLAIN_HEAD, row_head
from plainsong.protocol.topic.asks import Publish
from plainsong.protocol.topic.chain_rules import chain_rows
from plainsong.protocol.topic.deduplication import deduplicate, ensure_producer, record_publish, without_duplicates
from plainsong.protocol.topic.row_extras import row_extras_of, stamped_head, with_stamp
from plainsong.protocol.topic.step import own_ttls
from plainsong.protocol.topic.usage import ROW_BYTES
from plainsong.protocol.transactions.transaction import issued_ms

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from plainsong.protocol.records import Metadata
    from plainsong.protocol.topic.asks import CheckPublish, ClosePointers, PublishEach
    from plainsong.protocol.topic.deduplication import DeduplicationVerdict
    from plainsong.protocol.topic.pending import Pending
    from plainsong.protocol.topic.row_extras import RowExtras
    from plainsong.protocol.topic.state import Now, Run, TopicState
    from plainsong.protocol.topic.step import Step
    from plainsong.protocol.transactions.transaction import Standing

#: The verdict on a producer's request if deduplication is off: stored unchecked.
NOT_DEDUPLICATED = ProducerVerdict("false", None)


def publish(state: TopicState, step: Step, ask: Publish, now: Now) -> Receipt:
    """Give the messages of one request their ids and add their rows to the step.

    Raises:
      TopicNotFound, NoMessages, MessageTooLarge, RequestTooLarge, TransactionRequired, GenerationChanged,
      LowSpace, TopicFull, TransactionTooLarge (an atomic one), InvalidParameter (two routing keys); with a producer
      InvalidSequenceIds, ProducerFenced, ProducerExpired, PartialDuplicate, SequenceConsumed, TooManyProducers,
      DamagedRow too: nothing happened.
    """
    metadata = state.living()
    request = ask.request
    if request.generation is not None:
        check_generation(metadata, request)
    if metadata.properties.transactional == "required":
        raise _transaction_required(state)
    if not request.messages:
        raise NoMessages("messages is empty", hint="send at least one message")
    if request.producer is not None and state.producers.enabled:
        return _publish_once(state, step, metadata, request, now)
    check_messages(state, metadata, request, now)
    row_extras = None
    if request.atomic or request.routing_key is not None or request.attributes is not None:
        check_atomic(state, request)
        row_extras = row_extras_of(request)
    if row_extras is None and _is_one(request):  # the common case of small requests
        (run,) = state.sequence.take(state.time_ms, 1)
        first = last = add_message(state, step, metadata, run, request.messages[0], PLAIN_HEAD)
    else:
        runs = state.sequence.take(state.time_ms, len(request.messages))
        first, last = ends_of(runs)
        add_messages(state, step, metadata, runs, request, row_extras=row_extras)
    verdict = None if request.producer is None else NOT_DEDUPLICATED
    return Receipt(first + NO_PAYLOAD_PART, last + NO_PAYLOAD_PART, metadata.generation, verdict=verdict)


def check_publish(state: TopicState, step: Step, ask: CheckPublish, now: Now) -> None:
    """Check that a plain message of this size would be stored. Raises what ``publish`` raises."""
    del step
    metadata = state.living()
    if metadata.properties.transactional == "required":
        raise _transaction_required(state)
    check_messages(state, metadata, PublishRequest([bytes(ask.size)]), now)


def _transaction_required(state: TopicState) -> TransactionRequired:
    return TransactionRequired(f"topic {state.name} accepts messages only with a write pointer")


def _publish_once(state: TopicState, step: Step, metadata: Metadata, request: PublishRequest, now: Now) -> Receipt:
    """Store the new messages of a producer's request."""
    dedup = deduplicate(state, step, request)
    if dedup.duplicate:
        return receipt_of(metadata, dedup, *dedup.ends())
    fresh = without_duplicates(request, dedup)
    check_messages(state, metadata, fresh, now)
    row_extras = None
    if fresh.atomic or fresh.routing_key is not None or fresh.attributes is not None:
        check_atomic(state, fresh)
        row_extras = row_extras_of(fresh)
    ensure_producer(state, step, dedup)
    stamp = dedup.stamp(len(fresh.messages))
    if row_extras is None and _is_one(fresh):
        (run,) = state.sequence.take(state.time_ms, 1)
        position = add_message(state, step, metadata, run, fresh.messages[0], stamped_head(stamp))
        record_publish(state, step, dedup, position, position)
        return receipt_of(metadata, dedup, position, position)
    row_extras = with_stamp(row_extras, stamp)
    runs = state.sequence.take(state.time_ms, len(fresh.messages))
    first, final = ends_of(runs)
    add_messages(state, step, metadata, runs, fresh, row_extras=row_extras)
    record_publish(state, step, dedup, first, final)
    return receipt_of(metadata, dedup, first, final)


def receipt_of(metadata: Metadata, dedup: DeduplicationVerdict, first: bytes | None, last: bytes | None) -> Receipt:
    """Return the receipt of a producer's request with rows at positions ``first`` to ``last``."""
    verdict = dedup.producer_verdict()
    if not dedup.new and first is not None and last is not None:  # the common case
        begin = first + NO_PAYLOAD_PART
        end = begin if last is first else last + NO_PAYLOAD_PART
        return Receipt(begin, end, metadata.generation, False, True, verdict.last_sequence_id, verdict=verdict)
    partial = verdict.duplicate == "partial"
    return Receipt(
        first_id=None if first is None else first + NO_PAYLOAD_PART,
        last_id=None if last is None else last + NO_PAYLOAD_PART,
        generation=metadata.generation,
        duplicate=dedup.duplicate,
        deduplicated=True,
        last_sequence_id=verdict.last_sequence_id,
        stored=list(dedup.ids[dedup.new :]) if partial else None,
        dropped=list(dedup.ids[: dedup.new]) if partial else None,
        verdict=verdict,
    )


def ends_of(runs: Sequence[Run]) -> tuple[bytes, bytes]:
    """Return the first and the last position of some runs."""
    head, last = runs[0], runs[-1]
    if last is head and head.length == 1:
        position = pack_position(head.ts_ms, head.first)
        return position, position
    return pack_position(head.ts_ms, head.first), pack_position(last.ts_ms, last.first + last.length - 1)


def add_messages(
    state: TopicState,
    step: Step,
    metadata: Metadata,
    runs: Sequence[Run],
    request: PublishRequest,
    pointer: int | None = None,
    row_extras: RowExtras | None = None,
) -> None:
    """Add the rows of a request's messages to the step, at the positions of ``runs``, and count them."""
    has_attributes = row_extras is not None and row_extras.has_attributes
    if not has_attributes and _is_one(request):
        head = row_head(pointer) if row_extras is None else row_extras.head_of_one(pointer)
        add_message(state, step, metadata, runs[0], request.messages[0], head, pointer)
        return
    if row_extras is not None and state.epoch:
        # The next owner may be an instance of version 0.1, which attributes only rows with extras to a request, and
        # would treat a request with a plain row as incomplete.
        row_extras.one_by_one = True
    batch = step.row_batch(state.prefix)
    first, messages, size_before = len(batch), request.messages, batch.value_bytes
    ttls_s = own_ttls(len(messages), request.ttl_s, request.message_ttls_s)
    own_expiry_ms = batch.add(runs, messages, ttls_s, pointer, row_extras, request.lengths.of_each)
    if state.chain is not None:
        chain_rows(state, step, batch, first, batch.value_bytes - size_before, ttls_s, pointer, row_extras)
    if len(runs) == 1:
        size = batch.value_bytes - size_before
        count_messages(state, step, metadata, runs[0], len(messages), size, own_expiry_ms)
        return
    for run in runs:
        values = batch.values[first : first + run.length]
        count_messages(state, step, metadata, run, run.length, sum(map(len, values)), own_expiry_ms)
        first += run.length


def _is_one(request: PublishRequest) -> bool:
    """Return True if it has one message, without its own time to live."""
    return len(request.messages) == 1 and request.ttl_s is None and request.message_ttls_s is None


def add_message(
    state: TopicState, step: Step, metadata: Metadata, run: Run, message: bytes, head: bytes, pointer: int | None = None
) -> bytes:
    """Add the only message of a request, without a time to live and attributes, twice as fast as ``add_messages``.

    Args:
      head: the bytes before the length in its row.
    Returns its position.
    """
    batch = step.row_batch(generation_prefix(state.name, metadata.generation))
    first = len(batch)
    size = batch.add_one(run, message, head, pointer)
    if state.chain is not None:
        chain_rows(state, step, batch, first, size, None, pointer, None)
    count_messages(state, step, metadata, run, 1, size, 0)
    return batch.suffixes[-1]


def count_messages(
    state: TopicState, step: Step, metadata: Metadata, run: Run, messages: int, size: int, own_expiry_ms: int
) -> None:
    """Count messages published at the positions of ``run``, with values of ``size`` bytes."""
    size += ROW_BYTES * messages
    last = run.first + run.length - 1
    state.usage.add(run.ts_ms, messages, size, metadata.properties.ttl_s * 1000, own_expiry_ms, last)
    state.rows_since_mark += messages
    state.appended += messages
    step.messages += messages


# --- many small requests at once -------------------------------------------------------------------
#
# Each has its own verdict, at the cost of a single request.

#: Maximum of a plain message's row beyond its payload, as counted: position, flags and length.
_ROW_EXTRA_BYTES = ROW_BYTES + 6


def publish_each(state: TopicState, step: Step, ask: PublishEach, now: Now) -> Receipt | list[Receipt | PlainsongError]:
    """Store every message that can be stored, as one request if the result is the same.

    Raises:
      PlainsongError: every message has this error; nothing happened.
    """
    if _may_fill(state, ask):
        return [_publish_one(state, step, message, now) for message in ask.messages]
    try:
        return publish(state, step, Publish(PublishRequest(ask.messages), ask.size), now)
    except (TooLarge, TopicFull):
        # Some may still fit. The refused request had no effect.
        return [_publish_one(state, step, message, now) for message in ask.messages]


def _may_fill(state: TopicState, ask: PublishEach) -> bool:
    """Return True if the messages may not all fit: admission counts payloads, but usage counts the larger rows."""
    max_bytes = None if state.metadata is None else state.metadata.properties.max_bytes
    if max_bytes is None:
        return False
    size = sum(map(len, ask.messages)) + _ROW_EXTRA_BYTES * len(ask.messages)
    return state.usage.bytes + state.stored_bytes + size > max_bytes


def _publish_one(state: TopicState, step: Step, message: bytes, now: Now) -> Receipt | PlainsongError:
    try:
        return publish(state, step, Publish(PublishRequest([message]), len(message)), now)
    except PlainsongError as error:
        return error


# --- admission -------------------------------------------------------------------------------------
#
# The checks of a publish or a store, before it has any effect.


def check_generation(metadata: Metadata, request: PublishRequest) -> None:
    """Raise GenerationChanged when the request is for another generation."""
    if request.generation is not None and request.generation != metadata.generation:
        raise GenerationChanged(f"the topic is in generation {metadata.generation}, not {request.generation}")


def check_messages(state: TopicState, metadata: Metadata, request: PublishRequest, now: Now) -> None:
    """Check that the messages of a request are not too many or too large, and that there is room for them.

    Raises:
      MessageTooLarge, RequestTooLarge, LowSpace, TopicFull: nothing happened.
    """
    messages, limits = request.messages, state.limits
    if len(messages) > limits.max_request_messages:
        raise RequestTooLarge(f"{len(messages)} messages in one request", hint=f"at most {limits.max_request_messages}")
    longest = len(messages[0]) if len(messages) == 1 else request.lengths.longest
    if longest > limits.max_message_bytes:
        index = next(i for i, message in enumerate(messages) if len(message) > limits.max_message_bytes)
        raise MessageTooLarge(
            f"message {index} has {len(messages[index])} bytes; {limits.message_bound} allows {limits.max_message_bytes}"
        )
    if now.low_space:
        raise LowSpace("free space is below storage.min_free_bytes", hint="free some disk space; polls still work")
    if messages and metadata.properties.max_bytes is not None:
        _check_room(state, metadata.properties.max_bytes, request.lengths.total)


def _check_room(state: TopicState, max_bytes: int, size: int) -> None:
    if size > max_bytes:
        raise RequestTooLarge(f"{size} bytes never fit into max_bytes {max_bytes}", hint="send less at a time")
    state.usage.drop_before(state.oldest_ms)
    used = state.usage.bytes + state.stored_bytes
    if used + size > max_bytes:
        raise TopicFull(
            f"topic {state.name} holds {used} of max_bytes {max_bytes}",
            hint="wait until messages expire, or raise max_bytes",
        )


def check_atomic(state: TopicState, request: PublishRequest) -> None:
    """Check that an atomic request can be stored as a whole. Raises TransactionTooLarge."""
    if not request.atomic:
        return
    limits, messages = state.limits, request.messages
    if len(messages) > limits.max_atomic_messages:
        raise TransactionTooLarge(
            f"{len(messages)} messages in one batch", hint=f"at most {limits.max_atomic_messages}"
        )
    size = request.lengths.total
    if size > limits.max_atomic_bytes:
        raise TransactionTooLarge(f"{size} bytes in one batch", hint=f"at most {limits.max_atomic_bytes}")


def admit_pointer(state: TopicState, metadata: Metadata, pointer: int | None) -> int:
    """Return the write pointer, if messages may be written under it.

    Raises:
      TransactionRequired, TransactionRefused, InvalidParameter, TransactionExpired, RolledBack, NotEnlisted,
      TransactionNotInProgress, DamagedRow, GenerationChanged (an earlier generation has messages of the pointer):
      nothing happened.
    """
    if pointer is None:
        raise TransactionRequired("there is no write pointer")
    if metadata.properties.transactional == "disabled":
        raise TransactionRefused(f"topic {state.name} accepts no write pointers", hint="publish without a transaction")
    check_pointer(pointer)
    pending = state.pending.get(pointer)
    if too_old(state, pointer) or (pending is not None and pending.orphaned and not pending.rolled_back):
        raise TransactionExpired(
            f"write pointer {pointer} was issued at {issued_ms(pointer)} ms",
            hint=f"a transaction may live for {state.limits.max_lifetime_ms // 1000} s (transactions.max_lifetime_s)",
        )
    if pending is not None and pending.rolled_back:
        _check_generation(state, metadata, pending)
        raise RolledBack(f"write pointer {pointer} was rolled back in topic {state.name}", hint="begin a new one")
    standing = standing_to_write(state, pointer)
    if standing == "unknown":
        _check_issued(state, pointer)
    if standing not in ("in_progress", "unknown"):
        what = "being committed" if standing == "deciding" else standing
        raise TransactionNotInProgress(f"write pointer {pointer} is {what}", hint="begin a new transaction")
    if pending is not None and pending.damaged:
        raise DamagedRow(
            f"the row of write pointer {pointer} in topic {state.name} cannot be read",
            hint="roll it back, and begin a new transaction",
        )
    if pending is None and metadata.generation > 1:
        for other in (state.enlistment or state.authority).pointers_of(pointer):
            found = state.pending.get(other)
            if found is not None and found.rolled_back:
                _check_generation(state, metadata, found)
    return pointer


def _check_generation(state: TopicState, metadata: Metadata, rolled_back: Pending) -> None:
    """Check that a rolled back pointer was used in this generation: see ``carry_pointers``. Raises GenerationChanged."""
    if rolled_back.since_ms < metadata.created_ms:
        raise GenerationChanged(
            f"topic {state.name} was created again since messages were written under write pointer {rolled_back.pointer}",
            hint="abort the transaction: those messages are gone; then begin a new one",
        )


def _check_issued(state: TopicState, pointer: int) -> None:
    """Check that an unknown write pointer may belong to a transaction.

    It would hold committed readers until the service's read pointer passes it: forever, if it is far ahead.

    Raises TransactionNotInProgress.
    """
    if state.limits.issues_pointers:
        raise TransactionNotInProgress(
            f"write pointer {pointer} was not issued by this service",
            hint="POST /v1/transactions begins a transaction and returns its write pointer",
        )
    ahead_ms = issued_ms(pointer) - state.time_ms
    if 0 < state.limits.max_ahead_ms < ahead_ms:
        raise TransactionNotInProgress(
            f"write pointer {pointer} would be issued in {ahead_ms // 1000} s",
            hint="use the write pointer of a transaction in progress",
        )


def check_pointer(pointer: int) -> None:
    """Raise InvalidParameter for a number that is not a write pointer."""
    if pointer <= 0:
        raise InvalidParameter(f"write pointer {pointer} is not above 0", hint="begin a transaction to get one")


def too_old(state: TopicState, pointer: int) -> bool:
    """Return True if the pointer is older than the longest lifetime of a transaction."""
    lifetime_ms = state.limits.max_lifetime_ms
    return lifetime_ms > 0 and issued_ms(pointer) + lifetime_ms <= state.time_ms


# --- enlistment ------------------------------------------------------------------------------------
#
# If another instance decides transactions, a topic must be enlisted for a pointer before it writes under it.

#: Standings that may still change; only the instance that decides the pointer has the current one.
_OPEN = ("in_progress", "unknown", "deciding")


class NotEnlisted(TransactionsUnavailable):
    """The topic must be enlisted for the pointer first; nothing happened, and the request can be repeated then."""

    title = "The topic is not enlisted for this write pointer"


def standing_to_write(state: TopicState, pointer: int) -> Standing:
    """Return the standing of a pointer for a publish or store.

    Raises:
      NotEnlisted, TransactionsUnavailable: the standing is not known here; nothing happened.
    """
    if state.enlistment is None:
        return state.authority.standing(pointer)
    if not state.enlistment.holds(pointer):
        raise _not_enlisted(state, pointer)
    return "invalid" if _is_known_invalid(state, pointer) else "in_progress"


def standing_to_roll_back(state: TopicState, pointer: int) -> Standing:
    """Return the standing of a pointer for a client's rollback, which is allowed once it is aborted or invalid.

    Raises what ``standing_to_write`` raises.
    """
    if state.enlistment is None:
        return state.authority.standing(pointer)
    if state.enlistment.holds(pointer):
        return "in_progress"
    standing = state.authority.standing(pointer)
    if standing in _OPEN:
        raise _not_enlisted(state, pointer)
    return standing


def _is_known_invalid(state: TopicState, pointer: int) -> bool:
    """Return True if the transaction timed out, according to the authority: a time-out does not end enlistments."""
    try:
        return state.authority.standing(pointer) == "invalid"
    except TransactionsUnavailable:
        return False


def _not_enlisted(state: TopicState, pointer: int) -> NotEnlisted:
    return NotEnlisted(
        f"topic {state.name} is not enlisted for write pointer {pointer}", hint="nothing happened; send it again"
    )


def close_pointers(state: TopicState, step: Step, ask: ClosePointers, now: Now) -> None:
    """Close pointers. Earlier requests of the same step are durable before this is answered."""
    del step, now
    close_enlistment(state, ask.pointers)


def close_enlistment(state: TopicState, pointers: Iterable[int]) -> None:
    """End enlistments: nothing more is written under these pointers unless the topic is enlisted again."""
    if state.enlistment is not None:
        state.enlistment.close(pointers)
