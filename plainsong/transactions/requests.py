"""What topics are asked under a transaction by hand: publish, store, roll back, and a transaction for one publish."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from plainsong.core.operations import outgoing_request
from plainsong.protocol.errors import InvalidParameter, NoMessages
from plainsong.transactions import calls
from plainsong.transactions.values import Transaction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plainsong.core.effects import Steps
    from plainsong.core.operations import Operations
    from plainsong.messages import Receipt
    from plainsong.serializers import SerializerLike

#: What ``publish`` takes: none, one of its own, one that somebody began (or its write pointer alone).
Under: TypeAlias = Transaction | int | Literal["own"] | None


def publish(
    operations: Operations,
    topic: str,
    messages: Any,
    *,
    ttl_s: int | None,
    serializer: SerializerLike,
    deadline_s: float | None,
    transaction: Transaction | int,
) -> Steps[Receipt]:
    """Publish under a transaction, now: what was stored under it, then these, of which there may be none."""
    request = outgoing_request(as_list(messages), serializer, ttl_s)
    if not isinstance(transaction, (Transaction, int)):
        raise InvalidParameter(f"transaction is {transaction!r}", hint='use a Transaction, its write pointer, or "own"')
    request.write_pointer = calls.pointer_of(transaction)
    return (yield from operations.call(calls.publish(operations.namespace, topic, request), deadline_s))


def store(
    operations: Operations,
    topic: str,
    messages: Any,
    *,
    ttl_s: int | None,
    serializer: SerializerLike,
    deadline_s: float | None,
    transaction: Transaction | int,
) -> Steps[None]:
    """Put messages down under a transaction; nobody sees them before they are published."""
    request = outgoing_request(as_list(messages), serializer, ttl_s)
    if not request.messages:
        raise NoMessages("the list is empty")
    request.write_pointer = calls.pointer_of(transaction)
    yield from operations.call(calls.store(operations.namespace, topic, request), deadline_s)


def rollback(operations: Operations, topic: str, transaction: Transaction | int) -> Steps[None]:
    """Make all that a transaction has in a topic invisible to committed readers, under all of its pointers."""
    pointers: Sequence[int] = (calls.pointer_of(transaction),)
    if isinstance(transaction, Transaction) and transaction.pointers:
        pointers = transaction.pointers
    for pointer in pointers:
        yield from operations.call(calls.rollback(operations.namespace, topic, pointer))


def snapshot_of(transaction: Transaction | None) -> bytes | None:
    """What polls of it see. Raises InvalidParameter: it has none."""
    if transaction is None:
        return None
    if not isinstance(transaction, Transaction) or not transaction.snapshot:
        raise InvalidParameter("the transaction has no snapshot to read with", hint="use one that was begun here")
    return transaction.snapshot


def as_list(messages: Any) -> Sequence[Any]:
    """A list or tuple is many messages, anything else is one."""
    return messages if isinstance(messages, (list, tuple)) else [messages]
