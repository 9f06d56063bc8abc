"""Publishing without a write pointer: what is refused, and what becomes of the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import NoMessages, TransactionRequired
from protocol.ids import pack_id
from protocol.requests import Receipt
from protocol.topic.admission import check_generation, check_messages
from protocol.topic.roll import own_ttls
from protocol.topic.usage import ROW_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.records import Metadata
    from protocol.requests import PublishRequest
    from protocol.topic.asks import Publish
    from protocol.topic.sequence import Run
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
    check_generation(metadata, request)
    if metadata.properties.transactional == "required":
        raise TransactionRequired(f"topic {state.name} takes messages only with a write pointer")
    if not request.messages:
        raise NoMessages("messages is empty", hint="send at least one message")
    check_messages(state, metadata, request, now)
    runs = state.sequence.take(state.time_ms, len(request.messages))
    add_messages(state, step, metadata, runs, request)
    head, last = runs[0], runs[-1]
    return Receipt(
        first_id=pack_id(head.ts_ms, head.first),
        last_id=pack_id(last.ts_ms, last.first + last.length - 1),
        generation=metadata.generation,
    )


def add_messages(
    state: TopicState,
    step: Step,
    metadata: Metadata,
    runs: Sequence[Run],
    request: PublishRequest,
    pointer: int | None = None,
) -> None:
    """Add the rows of a request's messages to the step, under the positions of ``runs``, and count them."""
    roll = step.roll(state.prefix)
    first, messages = len(roll), request.messages
    own_expiry_ms = roll.add(runs, messages, own_ttls(len(messages), request.ttl_s, request.message_ttls_s), pointer)
    for run in runs:
        values = roll.values[first : first + run.length]
        count(state, step, metadata, run.ts_ms, run.length, sum(map(len, values)), own_expiry_ms)
        first += run.length


def count(
    state: TopicState, step: Step, metadata: Metadata, ts_ms: int, messages: int, size: int, own_expiry_ms: int
) -> None:
    """Count messages published at ``ts_ms`` whose values take ``size`` bytes."""
    state.usage.add(ts_ms, messages, size + ROW_BYTES * messages, metadata.properties.ttl_ms, own_expiry_ms)
    state.rows_since_mark += messages
    state.appended += messages
    step.messages += messages
