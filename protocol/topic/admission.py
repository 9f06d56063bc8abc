"""What a publish or a store has to pass before anything of it happens, with and without a write pointer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import (
    GenerationChanged,
    InvalidParameter,
    LowSpace,
    MessageTooLarge,
    RequestTooLarge,
    RolledBack,
    TopicFull,
    TransactionExpired,
    TransactionNotInProgress,
    TransactionRefused,
    TransactionRequired,
)
from protocol.keys import DamagedRow
from protocol.topic.enlisted import standing_to_write
from protocol.transactions.transaction import issued_ms

if TYPE_CHECKING:
    from protocol.records import Metadata
    from protocol.requests import PublishRequest
    from protocol.topic.state import Now, TopicState


def admit_pointer(state: TopicState, metadata: Metadata, pointer: int | None) -> int:
    """The write pointer, if something may be written under it.

    Raises:
      TransactionRequired, TransactionRefused, InvalidParameter, TransactionExpired, RolledBack, NotEnlisted,
      TransactionNotInProgress, DamagedRow: nothing happened.
    """
    if pointer is None:
        raise TransactionRequired("there is no write pointer")
    if metadata.properties.transactional == "disabled":
        raise TransactionRefused(f"topic {state.name} takes no write pointers", hint="publish without a transaction")
    check_pointer(pointer)
    pending = state.pending.get(pointer)
    if too_old(state, pointer) or (pending is not None and pending.orphaned and not pending.rolled_back):
        raise TransactionExpired(
            f"write pointer {pointer} was issued at {issued_ms(pointer)} ms",
            hint=f"a transaction may live for {state.limits.max_lifetime_ms // 1000} s (transactions.max_lifetime_s)",
        )
    if pending is not None and pending.rolled_back:
        raise RolledBack(f"write pointer {pointer} was rolled back in topic {state.name}", hint="begin a new one")
    standing = standing_to_write(state, pointer)
    if standing not in ("in_progress", "unknown"):
        what = "being committed" if standing == "deciding" else standing
        raise TransactionNotInProgress(f"write pointer {pointer} is {what}", hint="begin a new transaction")
    if pending is not None and pending.damaged:
        raise DamagedRow(
            f"what topic {state.name} knows about write pointer {pointer} cannot be read",
            hint="roll it back, and begin a new transaction",
        )
    return pointer


def check_pointer(pointer: int) -> None:
    """Raise InvalidParameter for a number that is no write pointer."""
    if pointer <= 0:
        raise InvalidParameter(f"write pointer {pointer} is not above 0", hint="begin a transaction to get one")


def too_old(state: TopicState, pointer: int) -> bool:
    """Whether the pointer has outlived every transaction there may be."""
    lifetime_ms = state.limits.max_lifetime_ms
    return lifetime_ms > 0 and issued_ms(pointer) + lifetime_ms <= state.time_ms


def check_generation(metadata: Metadata, request: PublishRequest) -> None:
    """Raise GenerationChanged when the request is for another generation."""
    if request.generation is not None and request.generation != metadata.generation:
        raise GenerationChanged(f"the topic is in generation {metadata.generation}, not {request.generation}")


def check_messages(state: TopicState, metadata: Metadata, request: PublishRequest, now: Now) -> None:
    """See that the messages of a request, if it has any, are not too many or too large and that there is room.

    Raises:
      MessageTooLarge, RequestTooLarge, LowSpace, TopicFull: nothing happened.
    """
    messages, limits = request.messages, state.limits
    if len(messages) > limits.max_request_messages:
        raise RequestTooLarge(f"{len(messages)} messages in one request", hint=f"at most {limits.max_request_messages}")
    if messages and max(map(len, messages)) > limits.max_message_bytes:
        index = next(i for i, message in enumerate(messages) if len(message) > limits.max_message_bytes)
        raise MessageTooLarge(
            f"message {index} has {len(messages[index])} bytes; {limits.message_bound} lets it have {limits.max_message_bytes}"
        )
    if now.low_space:
        raise LowSpace("free space is below storage.min_free_bytes", hint="free some disk space; polls go on")
    if messages and metadata.properties.max_bytes is not None:
        _check_room(state, metadata.properties.max_bytes, sum(map(len, messages)))


def _check_room(state: TopicState, max_bytes: int, size: int) -> None:
    if size > max_bytes:
        raise RequestTooLarge(f"{size} bytes never fit into max_bytes {max_bytes}", hint="send less at a time")
    state.usage.drop_before(state.oldest_ms)
    held = state.usage.bytes + state.stored_bytes
    if held + size > max_bytes:
        raise TopicFull(
            f"topic {state.name} holds {held} of max_bytes {max_bytes}",
            hint="wait until messages expire, or raise max_bytes",
        )
