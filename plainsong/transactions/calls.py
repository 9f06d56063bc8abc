"""The requests of the transaction service, and of messages under a write pointer; and how their answers are read."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from plainsong.core.attempts import Call
from plainsong.core.calls import as_json, is_plain, json_of, nothing, topic_path
from plainsong.core.effects import Request
from plainsong.ids import MessageId
from plainsong.messages import Receipt
from plainsong.protocol.codec import AVRO, AVRO_2
from plainsong.protocol.errors import InvalidParameter, MalformedBody
from plainsong.protocol.ids import NO_PAYLOAD_PART, pack_id
from plainsong.transactions.values import Pruning, Transaction, TransactionStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from plainsong.core.effects import Answer
    from plainsong.protocol.requests import PublishRequest
    from plainsong.transactions.values import TransactionKind, TransactionState

_JSON = (("Content-Type", "application/json"),)
_PATH = "/v1/transactions"
_STATES = ("in_progress", "committed", "aborted", "invalid", "unknown")
_POINTER_MAX = (1 << 63) - 1
_NS_PER_S = 1_000_000_000


def checked_pointer(pointer: object) -> int:
    """Raises InvalidParameter unless ``pointer`` can be a transaction's."""
    if isinstance(pointer, bool) or not isinstance(pointer, int) or not 0 < pointer <= _POINTER_MAX:
        raise InvalidParameter(f"{pointer!r} is no transaction", hint="use a Transaction, or its id")
    return pointer


def id_of(transaction: Transaction | int) -> int:
    """The name the service knows a transaction by. Raises InvalidParameter."""
    return checked_pointer(transaction.id if isinstance(transaction, Transaction) else transaction)


def pointer_of(transaction: Transaction | int) -> int:
    """What messages of a transaction are stamped with now. Raises InvalidParameter."""
    return checked_pointer(transaction.write_pointer if isinstance(transaction, Transaction) else transaction)


# --- the service ---------------------------------------------------------------------------------


def begin(
    kind: TransactionKind, timeout_s: int | None, client_id: str | None, clock: Callable[[], float]
) -> Call[Transaction]:
    """``POST /v1/transactions``; ``begun_s`` is when the answer came, for the caller to better.

    A short one may be begun twice for a lost answer: the first is empty, and ends by itself at its time-out.
    """
    if kind not in ("short", "long"):
        raise InvalidParameter(f"the type is {kind!r}", hint="use short or long")
    if timeout_s is not None and (isinstance(timeout_s, bool) or not isinstance(timeout_s, int) or timeout_s < 1):
        raise InvalidParameter(f"timeout_s is {timeout_s!r}", hint="use a whole number of seconds above 0")
    given = {"type": kind, "timeoutSeconds": timeout_s, "clientId": client_id}
    body = as_json({name: value for name, value in given.items() if value is not None})

    def read(answer: Answer) -> Transaction:
        return _begun(json_of(answer), timeout_s, clock)

    return Call(Request("POST", _PATH, _JSON, body), read, "harmless" if kind == "short" else "twice")


def _begun(told: Mapping[str, Any], timeout_s: float | None, clock: Callable[[], float]) -> Transaction:
    transaction_id, expires_ms = int(told["id"]), int(told["expires"])
    if timeout_s is None:
        # The pointer says when it was issued, by the same clock that says when it ends.
        timeout_s = max(0.0, expires_ms / 1000 - transaction_id / _NS_PER_S)
    write_pointer = int(told["writePointer"])
    return Transaction(
        transaction_id,
        write_pointer,
        b64decode(told["snapshot"], validate=True),
        int(told["readPointer"]),
        expires_ms,
        timeout_s,
        clock(),
        clock,
        (write_pointer,),
        str(told.get("service", "")),
    )


def checkpoint(transaction: Transaction) -> Call[Transaction]:
    """``POST …/checkpoint``: the same transaction with another write pointer. Not repeated after a doubt."""

    def read(answer: Answer) -> Transaction:
        told = json_of(answer)
        write_pointer = int(told["writePointer"])
        return Transaction(
            transaction.id,
            write_pointer,
            b64decode(told["snapshot"], validate=True),
            int(told["readPointer"]),
            int(told["expires"]),
            transaction.timeout_s,
            transaction.begun_s,
            transaction.clock,
            (*(transaction.pointers or (transaction.id,)), write_pointer),
            transaction.service,
        )

    # The service keeps no snapshots: what the transaction sees goes along, and comes back with one pointer more.
    body = as_json({"snapshot": b64encode(transaction.snapshot).decode()}) if transaction.snapshot else b""
    return Call(Request("POST", _of(transaction.id, "/checkpoint"), _JSON, body), read, "twice")


def prepare(transaction_id: int, changes: Iterable[bytes]) -> Call[None]:
    """``POST …/prepare``: does any transaction that was committed meanwhile change the same? Replaces an earlier set."""
    body = as_json({"changes": [b64encode(change).decode() for change in changes]})
    return Call(Request("POST", _of(transaction_id, "/prepare"), _JSON, body), nothing, "harmless")


def commit(transaction_id: int) -> Call[TransactionState]:
    """``POST …/commit``; the same made twice, for as long as the service keeps the outcome."""
    return _decision(transaction_id, "/commit")


def abort(transaction_id: int) -> Call[TransactionState]:
    """``POST …/abort``: ``aborted``, or ``invalid`` where not all its messages could be reached, or it is a long one."""
    return _decision(transaction_id, "/abort")


def invalidate(transaction_id: int) -> Call[TransactionState]:
    """``POST …/invalidate``."""
    return _decision(transaction_id, "/invalidate")


def _decision(transaction_id: int, rest: str) -> Call[TransactionState]:
    def read(answer: Answer) -> TransactionState:
        return _state(json_of(answer)["state"])

    return Call(Request("POST", _of(transaction_id, rest), _JSON), read, "harmless")


def get(transaction_id: int) -> Call[TransactionStatus]:
    """``GET /v1/transactions/{id}``; of one that is not known the state is ``unknown``."""

    def read(answer: Answer) -> TransactionStatus:
        return _status({"id": transaction_id, **json_of(answer)})

    return Call(Request("GET", _of(transaction_id)), read)


def list_all(state: TransactionState | None, limit: int | None) -> Call[list[TransactionStatus]]:
    """``GET /v1/transactions``."""
    query = {name: value for name, value in (("state", state), ("limit", limit)) if value is not None}

    def read(answer: Answer) -> list[TransactionStatus]:
        return [_status(each) for each in json_of(answer)]

    return Call(Request("GET", _PATH + ("?" + urlencode(query) if query else "")), read)


def truncate(ids: Collection[int] | None, before_ms: int | None) -> Call[int]:
    """``POST /v1/transactions/truncate``: how many were taken off the list of invalid ones."""
    if (ids is None) == (before_ms is None):
        raise InvalidParameter("truncate takes ids or before_ms", hint="give one of the two")
    body = {"beforeMs": before_ms} if ids is None else {"ids": [checked_pointer(each) for each in ids]}

    def read(answer: Answer) -> int:
        return int(json_of(answer)["removed"])

    return Call(Request("POST", _PATH + "/truncate", _JSON, as_json(body)), read, "harmless")


def pruning() -> Call[Pruning]:
    """``GET /v1/transactions/pruning``."""

    def read(answer: Answer) -> Pruning:
        told = json_of(answer)
        return Pruning(
            invalid=int(told["invalid"]),
            oldest_invalid=_number(told, "oldestInvalid"),
            safe_bound=_number(told, "safeBound"),
            last_pass_ms=_number(told, "lastPassMs"),
            max_lifetime_ms=int(told["maxLifetimeMs"]),
            oldest_by_topic={each["topic"]: int(each["oldestPointer"]) for each in told["oldestByTopic"]},
            topics=int(told["topics"]),
            kept_because=told.get("keptBecause"),
            figures=told,
        )

    return Call(Request("GET", _PATH + "/pruning"), read)


def _of(transaction_id: int, rest: str = "") -> str:
    return f"{_PATH}/{checked_pointer(transaction_id)}{rest}"


def _state(told: Any) -> TransactionState:
    if told not in _STATES:
        raise MalformedBody(f"a transaction in the state {told!r}")
    return told  # type: ignore[no-any-return] # checked


def _number(told: Mapping[str, Any], name: str) -> int | None:
    value = told.get(name)
    return None if value is None else int(value)


def _status(told: Mapping[str, Any]) -> TransactionStatus:
    return TransactionStatus(
        id=int(told["id"]),
        write_pointer=_number(told, "writePointer") or int(told["id"]),
        state=_state(told["state"]),
        type=told.get("type"),
        client_id=told.get("clientId"),
        started_ms=_number(told, "startedMs"),
        expires_ms=_number(told, "expiresMs"),
        decided_ms=_number(told, "decidedMs"),
        topics=tuple(told.get("topics") or ()),
        hidden_messages=_number(told, "hiddenMessages"),
        kept_until_ms=_number(told, "keptUntilMs"),
        service=str(told.get("service", "")),
    )


# --- messages under a pointer --------------------------------------------------------------------


def publish(namespace: str, topic: str, request: PublishRequest) -> Call[Receipt]:
    """``POST /{t}/publish`` under a pointer: what was stored under it, then these messages."""
    codec = AVRO if is_plain(request) else AVRO_2
    count = len(request.messages)

    def read(answer: Answer) -> Receipt:
        if not answer.body:
            raise MalformedBody("the response is missing")
        told = codec.decode_publish_response(answer.body)
        last_id = MessageId(pack_id(told.end_timestamp_ms, told.end_sequence_id))
        # What was stored earlier stands before the messages of this request, in a row of its own.
        return Receipt(earlier(last_id, count - 1), last_id, count, 0) if count else Receipt(None, None, 0, 0)

    # Without messages it is the same made twice: what was stored is published once.
    repeat = "twice" if count else "harmless"
    headers = (("Content-Type", codec.content_type),)
    path = topic_path(namespace, topic, "/publish")
    return Call(Request("POST", path, headers, codec.encode_publish(request)), read, repeat)  # type: ignore[arg-type]


def earlier(message_id: MessageId, positions: int) -> MessageId:
    """The id so many positions before; positions of one request follow each other, over milliseconds too."""
    return MessageId((int.from_bytes(message_id[:10], "big") - positions).to_bytes(10, "big") + NO_PAYLOAD_PART)


def store(namespace: str, topic: str, request: PublishRequest) -> Call[None]:
    """``POST /{t}/store``."""
    codec = AVRO if is_plain(request) else AVRO_2
    headers = (("Content-Type", codec.content_type),)
    path = topic_path(namespace, topic, "/store")
    return Call(Request("POST", path, headers, codec.encode_publish(request)), nothing, "twice")


def rollback(namespace: str, topic: str, pointer: int) -> Call[None]:
    """``POST /{t}/rollback`` of all that a pointer has in a topic, stored messages too."""
    body = as_json({"transactionWritePointer": pointer})
    return Call(Request("POST", topic_path(namespace, topic, "/rollback"), _JSON, body), nothing, "harmless")
