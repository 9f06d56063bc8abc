"""The rules of publishing without a write pointer: what is refused, and what becomes of the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import (
    GenerationChanged,
    LowSpace,
    MessageTooLarge,
    NoMessages,
    RequestTooLarge,
    TopicFull,
    TransactionRequired,
)
from protocol.ids import pack_id
from protocol.requests import Receipt
from protocol.topic.roll import own_ttls
from protocol.topic.usage import ROW_BYTES

if TYPE_CHECKING:
    from protocol.records import Metadata
    from protocol.requests import PublishRequest
    from protocol.topic.asks import Publish
    from protocol.topic.state import Now, TopicState
    from protocol.topic.step import Step


def publish(state: TopicState, step: Step, ask: Publish, now: Now) -> Receipt:
    """Give ids to the messages of one request and add their rows to the step.

    Raises:
      TopicNotFound, NoMessages, MessageTooLarge, RequestTooLarge, TransactionRequired, GenerationChanged,
      LowSpace, TopicFull: nothing happened.
    """
    metadata = state.living()
    request = ask.request
    messages = request.messages
    _check(state, metadata, request, now)
    runs = state.sequence.take(state.time_ms, len(messages))
    roll = step.roll(state.prefix)
    first = len(roll)
    own_expiry_ms = roll.add(runs, messages, own_ttls(len(messages), request.ttl_s, request.message_ttls_s))
    for run in runs:
        values = roll.values[first : first + run.length]
        _count(state, metadata, run.ts_ms, values, own_expiry_ms)
        first += run.length
    head, last = runs[0], runs[-1]
    return Receipt(
        first_id=pack_id(head.ts_ms, head.first),
        last_id=pack_id(last.ts_ms, last.first + last.length - 1),
        generation=metadata.generation,
    )


def _check(state: TopicState, metadata: Metadata, request: PublishRequest, now: Now) -> None:
    messages, limits = request.messages, state.limits
    if request.generation is not None and request.generation != metadata.generation:
        raise GenerationChanged(f"the topic is in generation {metadata.generation}, not {request.generation}")
    if metadata.properties.transactional == "required":
        raise TransactionRequired(f"topic {state.name} takes messages only with a write pointer")
    if not messages:
        raise NoMessages("messages is empty", hint="send at least one message")
    if len(messages) > limits.max_request_messages:
        raise RequestTooLarge(f"{len(messages)} messages in one request", hint=f"at most {limits.max_request_messages}")
    if max(map(len, messages)) > limits.max_message_bytes:
        index = next(i for i, message in enumerate(messages) if len(message) > limits.max_message_bytes)
        raise MessageTooLarge(
            f"message {index} has {len(messages[index])} bytes, topic.max_message_bytes is {limits.max_message_bytes}"
        )
    if now.low_space:
        raise LowSpace("free space is below storage.min_free_bytes", hint="free some disk space; polls go on")
    if metadata.properties.max_bytes is not None:
        _check_room(state, metadata.properties.max_bytes, sum(map(len, messages)))


def _check_room(state: TopicState, max_bytes: int, size: int) -> None:
    if size > max_bytes:
        raise RequestTooLarge(f"{size} bytes never fit into max_bytes {max_bytes}", hint="send less at a time")
    state.usage.drop_before(state.oldest_ms)
    if state.usage.bytes + size > max_bytes:
        raise TopicFull(
            f"topic {state.name} holds {state.usage.bytes} of max_bytes {max_bytes}",
            hint="wait until messages expire, or raise max_bytes",
        )


def _count(state: TopicState, metadata: Metadata, ts_ms: int, values: list[bytes], own_expiry_ms: int) -> None:
    size = sum(map(len, values)) + ROW_BYTES * len(values)
    state.usage.add(ts_ms, len(values), size, metadata.properties.ttl_ms, own_expiry_ms)
    state.rows_since_mark += len(values)
