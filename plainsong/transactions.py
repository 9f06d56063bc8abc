"""Transactions of a client: values, calls of the transaction service, failures, and the current block."""

from __future__ import annotations

import os
import time
from base64 import b64decode, b64encode
from contextlib import suppress
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar
from urllib.parse import urlencode

from plainsong.calls import Call, Request, as_json, avro_of, effect_of, json_of, list_of, nothing, topic_path
from plainsong.errors import (
    CommittedWithErrors,
    DeadlineExceeded,
    TransactionFailed,
    TransactionInDoubt,
    TransactionInProgress,
    TransactionTimedOut,
)
from plainsong.messages import MessageId, Receipt
from plainsong.protocol.backoff import Backoff
from plainsong.protocol.errors import (
    InvalidParameter,
    MalformedBody,
    PlainsongError,
    RolledBack,
    TransactionConflict,
    TransactionExpired,
    TransactionNotInProgress,
)
from plainsong.protocol.ids import POSITION_BYTES, id_at, ordinal, pack_id, position_at
from plainsong.protocol.plurals import counted
from plainsong.protocol.transactions.transaction import issued_ms
from plainsong.retry import PAUSES_S, pause_after

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from plainsong.calls import Answer
    from plainsong.protocol.answers.topics import EndReport
    from plainsong.protocol.answers.transactions import BegunTransaction, PruningFields
    from plainsong.protocol.requests import PublishRequest


TransactionKind = Literal["short", "long"]


#: ``unknown``: never issued by this service, or its outcome is no longer kept.
TransactionState = Literal["in_progress", "committed", "aborted", "invalid", "unknown"]


#: Reading inside a transaction ends after this part of its time, to leave the rest for the commit.
READING_PART = 0.9


@dataclass(frozen=True, slots=True)
class Transaction:
    """One transaction: its id, write pointers, snapshot and time limit.

    A transaction of another service needs only ``id``, ``write_pointer`` and ``snapshot``.
    """

    id: int
    """Identifies it at the service for its whole life."""
    write_pointer: int
    """The pointer of messages published now: the id, until a checkpoint."""
    snapshot: bytes = b""
    """The snapshot of its polls, in Tephra's encoding."""
    read_pointer: int = 0
    expires_ms: int | None = None
    """When it times out, by the daemon's clock, in milliseconds since 1970."""
    timeout_s: float = float("inf")
    """Its time limit, from begin to end."""
    begun_s: float = 0.0
    """When the request was sent, by ``clock``: never later than the service's own start."""
    clock: Callable[[], float] = field(default=time.monotonic, repr=False, compare=False)
    pointers: tuple[int, ...] = ()
    """Every write pointer it has had, oldest first; empty: the id alone."""
    service: str = ""
    """Identifies the service, since another one may issue the same id; empty: unknown."""

    @property
    def age_s(self) -> float:
        """Seconds since ``begun_s``."""
        return self.clock() - self.begun_s

    @property
    def remaining_s(self) -> float:
        """Seconds until it times out, by this computer's clock; 0 afterwards; infinite if unknown."""
        return max(0.0, self.timeout_s - self.age_s)

    @property
    def reading_s(self) -> float:
        """Seconds left for reading inside it: until 90 % of its time has passed."""
        return max(0.0, READING_PART * self.timeout_s - self.age_s)


@dataclass(frozen=True, slots=True)
class TransactionStatus:
    """The service's record of a transaction."""

    id: int
    write_pointer: int
    state: TransactionState
    type: TransactionKind | None = None
    client_id: str | None = None
    started_ms: int | None = None
    expires_ms: int | None = None
    decided_ms: int | None = None
    """When it was committed, aborted or made invalid, by the daemon's clock; None: it is open, or the time is unknown."""
    topics: tuple[str, ...] = ()
    """The topics with undecided messages of it, as ``namespace:topic``."""
    hidden_messages: int | None = None
    """Number of messages that committed readers cannot see because of it."""
    name: str | None = None
    """The name that began it; None: authentication is off, or the caller may not see it."""
    kept_until_ms: int | None = None
    """Until when the service keeps this outcome."""
    service: str = ""
    """The answering service, as in ``Transaction``."""

    @property
    def issued_ms(self) -> int:
        """When its pointer was issued, by the daemon's clock, in milliseconds since 1970."""
        return issued_ms(self.id)


@dataclass(frozen=True, slots=True)
class Pruning:
    """The figures for pruning the list of invalid transactions by hand."""

    invalid: int
    """The number of transactions on it."""
    oldest_invalid: int | None
    safe_bound: int | None
    """No row is left of any invalid pointer up to this one; None before the first complete pass."""
    last_pass_ms: int | None
    """When the last complete pass over all topics ended, in milliseconds since 1970, by the daemon's clock."""
    max_lifetime_ms: int
    """The age beyond which a pointer is refused; 0: none."""
    oldest_by_topic: Mapping[str, int]
    """The oldest undecided pointer with rows in it, of the topics (``namespace:topic``) that have one, oldest first."""
    topics: int
    """Number of topics that have one; ``oldest_by_topic`` may show fewer."""
    kept_because: str | None
    """Why the daemon does not prune by itself; None: it does."""
    figures: Mapping[str, Any]
    """The daemon's whole answer."""


#: The ``transaction`` of ``publish``: none, a separate one, or one that the caller began (or its write pointer).
Under: TypeAlias = Transaction | int | Literal["own"] | None


def snapshot_of(transaction: Transaction | None) -> bytes | None:
    """The snapshot for its polls. Raises InvalidParameter: it has none."""
    if transaction is None:
        return None
    if not isinstance(transaction, Transaction) or not transaction.snapshot:
        raise InvalidParameter("the transaction has no snapshot to read with", hint="use one that was begun here")
    return transaction.snapshot


DEFAULT_BUFFER_BYTES = 8 << 20
DEFAULT_BUFFER_MESSAGES = 50_000


@dataclass(slots=True)
class BufferBounds:
    """Limits on the messages that a transaction buffers in the client. Raises InvalidParameter."""

    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    buffer_messages: int = DEFAULT_BUFFER_MESSAGES

    def __post_init__(self) -> None:
        for name, number in (("buffer_bytes", self.buffer_bytes), ("buffer_messages", self.buffer_messages)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise InvalidParameter(f"{name} is {number!r}", hint="use a whole number above 0")


# --- the service ---------------------------------------------------------------------------------


_JSON = (("Content-Type", "application/json"),)


_PATH = "/v1/transactions"


_STATES = ("in_progress", "committed", "aborted", "invalid", "unknown")


_POINTER_MAX = (1 << 63) - 1


_NS_PER_S = 1_000_000_000


def checked_pointer(pointer: object) -> int:
    """Raises InvalidParameter unless ``pointer`` can be a write pointer."""
    if isinstance(pointer, bool) or not isinstance(pointer, int) or not 0 < pointer <= _POINTER_MAX:
        raise InvalidParameter(f"{pointer!r} is not a transaction", hint="use a Transaction, or its id")
    return pointer


def id_of(transaction: Transaction | int) -> int:
    """The id of a transaction. Raises InvalidParameter."""
    return checked_pointer(transaction.id if isinstance(transaction, Transaction) else transaction)


def pointer_of(transaction: Transaction | int) -> int:
    """The current write pointer of a transaction. Raises InvalidParameter."""
    return checked_pointer(transaction.write_pointer if isinstance(transaction, Transaction) else transaction)


def begin(
    kind: TransactionKind, timeout_s: int | None, client_id: str | None, clock: Callable[[], float]
) -> Call[Transaction]:
    """``POST /v1/transactions``; ``begun_s`` is the time of the answer; the caller corrects it.

    A lost answer may begin a second short transaction: the first is empty and ends at its time-out.
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


def _begun(fields: BegunTransaction, timeout_s: float | None, clock: Callable[[], float]) -> Transaction:
    transaction_id, expires_ms = int(fields["id"]), int(fields["expires"])
    if timeout_s is None:
        # The pointer encodes its time of issue, by the same clock as ``expires``.
        timeout_s = max(0.0, expires_ms / 1000 - transaction_id / _NS_PER_S)
    write_pointer = int(fields["writePointer"])
    return Transaction(
        transaction_id,
        write_pointer,
        b64decode(fields["snapshot"], validate=True),
        int(fields["readPointer"]),
        expires_ms,
        timeout_s,
        clock(),
        clock,
        (write_pointer,),
        str(fields.get("service", "")),
    )


def checkpoint(transaction: Transaction) -> Call[Transaction]:
    """``POST …/checkpoint``: the same transaction with another write pointer. Not repeated after an unknown outcome."""

    def read(answer: Answer) -> Transaction:
        fields: BegunTransaction = json_of(answer)
        write_pointer = int(fields["writePointer"])
        return Transaction(
            transaction.id,
            write_pointer,
            b64decode(fields["snapshot"], validate=True),
            int(fields["readPointer"]),
            int(fields["expires"]),
            transaction.timeout_s,
            transaction.begun_s,
            transaction.clock,
            (*(transaction.pointers or (transaction.id,)), write_pointer),
            transaction.service,
        )

    # The service keeps no snapshots: the request carries it, and the answer returns it with the new pointer.
    body = as_json({"snapshot": b64encode(transaction.snapshot).decode()}) if transaction.snapshot else b""
    return Call(Request("POST", _path_of(transaction.id, "/checkpoint"), _JSON, body), read, "twice")


def prepare(transaction_id: int, changes: Iterable[bytes]) -> Call[None]:
    """``POST …/prepare``: checks the changed keys against transactions committed since its begin. Replaces an earlier set."""
    body = as_json({"changes": [b64encode(change).decode() for change in changes]})
    return Call(Request("POST", _path_of(transaction_id, "/prepare"), _JSON, body), nothing, "harmless")


def commit(transaction_id: int) -> Call[TransactionState]:
    """``POST …/commit``. Idempotent while the service keeps the outcome."""
    return _decision(transaction_id, "/commit")


def abort(transaction_id: int) -> Call[TransactionState]:
    """``POST …/abort``: ``aborted``, or ``invalid`` if not all messages could be rolled back, or it is long."""
    return _decision(transaction_id, "/abort")


def invalidate(transaction_id: int) -> Call[TransactionState]:
    """``POST …/invalidate``."""
    return _decision(transaction_id, "/invalidate")


def ended(call: Call[TransactionState]) -> Call[EndReport]:
    """The same abort or invalidation, whose answer reports its effect."""
    request = call.request
    headers = (*request.headers, ("Prefer", "return=representation"))
    return Call(request._replace(headers=headers), effect_of, call.repeat)


def _decision(transaction_id: int, rest: str) -> Call[TransactionState]:
    def read(answer: Answer) -> TransactionState:
        return _state(json_of(answer)["state"])

    return Call(Request("POST", _path_of(transaction_id, rest), _JSON), read, "harmless")


def get(transaction_id: int) -> Call[TransactionStatus]:
    """``GET /v1/transactions/{id}``; an unknown id has the state ``unknown``."""

    def read(answer: Answer) -> TransactionStatus:
        return _status({"id": transaction_id, **json_of(answer)})

    return Call(Request("GET", _path_of(transaction_id)), read)


def list_all(state: TransactionState | None, limit: int | None, after: int | None) -> Call[list[TransactionStatus]]:
    """``GET /v1/transactions``: one page of them."""
    given = (("state", state), ("limit", limit), ("after", after))
    query = {name: value for name, value in given if value is not None}
    return Call(Request("GET", _PATH + ("?" + urlencode(query) if query else "")), list_of(_status))


def truncate(ids: Collection[int] | None, before_ms: int | None) -> Call[int]:
    """``POST /v1/transactions/truncate``: how many it removed from the list of invalid ones."""
    if (ids is None) == (before_ms is None):
        raise InvalidParameter("truncate takes ids or before_ms", hint="give one of the two")
    body = {"beforeMs": before_ms} if ids is None else {"ids": [checked_pointer(each) for each in ids]}

    def read(answer: Answer) -> int:
        return int(json_of(answer)["removed"])

    return Call(Request("POST", _PATH + "/truncate", _JSON, as_json(body)), read, "harmless")


def pruning() -> Call[Pruning]:
    """``GET /v1/transactions/pruning``."""

    def read(answer: Answer) -> Pruning:
        fields: PruningFields = json_of(answer)
        return Pruning(
            invalid=int(fields["invalid"]),
            oldest_invalid=_number(fields, "oldestInvalid"),
            safe_bound=_number(fields, "safeBound"),
            last_pass_ms=_number(fields, "lastPassMs"),
            max_lifetime_ms=int(fields["maxLifetimeMs"]),
            oldest_by_topic={each["topic"]: int(each["oldestPointer"]) for each in fields["oldestByTopic"]},
            topics=int(fields["topics"]),
            kept_because=fields.get("keptBecause"),
            figures=fields,
        )

    return Call(Request("GET", _PATH + "/pruning"), read)


def _path_of(transaction_id: int, rest: str = "") -> str:
    return f"{_PATH}/{checked_pointer(transaction_id)}{rest}"


def _state(state: Any) -> TransactionState:
    if state not in _STATES:
        raise MalformedBody(f"a transaction in the state {state!r}")
    return state  # type: ignore[no-any-return] # checked


def _number(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    return None if value is None else int(value)


def _status(fields: Mapping[str, Any]) -> TransactionStatus:
    return TransactionStatus(
        id=int(fields["id"]),
        write_pointer=_number(fields, "writePointer") or int(fields["id"]),
        state=_state(fields["state"]),
        type=fields.get("type"),
        client_id=fields.get("clientId"),
        started_ms=_number(fields, "startedMs"),
        expires_ms=_number(fields, "expiresMs"),
        decided_ms=_number(fields, "decidedMs"),
        topics=tuple(fields.get("topics") or ()),
        hidden_messages=_number(fields, "hiddenMessages"),
        name=fields.get("name"),
        kept_until_ms=_number(fields, "keptUntilMs"),
        service=str(fields.get("service", "")),
    )


# --- messages under a pointer --------------------------------------------------------------------


def publish_under(namespace: str, topic: str, request: PublishRequest) -> Call[Receipt]:
    """``POST /{t}/publish`` under a pointer: publishes the messages stored under it, then these."""
    codec = avro_of(request)
    count = len(request.messages)

    def read(answer: Answer) -> Receipt:
        if not answer.body:
            raise MalformedBody("the response is missing")
        fields = codec.decode_publish_response(answer.body)
        last_id = MessageId(pack_id(fields.end_timestamp_ms, fields.end_sequence_id))
        # Messages stored earlier precede those of this request, in a separate row.
        said = answer.headers.get("plainsong-generation", "")
        generation = int(said) if said.isascii() and said.isdigit() else 0  # an older daemon does not send it
        if not count:
            return Receipt(None, None, 0, generation)
        return Receipt(earlier(last_id, count - 1), last_id, count, generation)

    # Without messages it is idempotent: stored messages are published once.
    repeat = "twice" if count else "harmless"
    headers = (("Content-Type", codec.content_type),)
    path = topic_path(namespace, topic, "/publish")
    return Call(Request("POST", path, headers, codec.encode_publish(request)), read, repeat)  # type: ignore[arg-type]


def earlier(message_id: MessageId, positions: int) -> MessageId:
    """The id ``positions`` earlier in one request, whose positions are consecutive, across milliseconds too."""
    return MessageId(id_at(position_at(ordinal(message_id[:POSITION_BYTES]) - positions)))


def store(namespace: str, topic: str, request: PublishRequest) -> Call[None]:
    """``POST /{t}/store``."""
    codec = avro_of(request)
    headers = (("Content-Type", codec.content_type),)
    path = topic_path(namespace, topic, "/store")
    return Call(Request("POST", path, headers, codec.encode_publish(request)), nothing, "twice")


def rollback(namespace: str, topic: str, pointer: int) -> Call[None]:
    """``POST /{t}/rollback`` of all messages of a pointer in a topic, including stored ones."""
    body = as_json({"transactionWritePointer": pointer})
    return Call(Request("POST", topic_path(namespace, topic, "/rollback"), _JSON, body), nothing, "harmless")


def default_client_id() -> str:
    """The default name of this client in lists of transactions: machine and process."""
    import platform  # needed only to begin a transaction

    return f"{platform.node() or 'unknown'}:{os.getpid()}"


# --- failures ------------------------------------------------------------------------------------


_ENDS = {
    "aborted": "the transaction was undone",
    "invalid": "the transaction is invalid: no committed reader will see anything of it, but not everything was undone",
}


@dataclass(slots=True)
class Failures:
    """The errors of one transaction, in order."""

    doing: str = ""
    """The current step, for the text of the next failure."""
    errors: list[Exception] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, doing: str, error: Exception) -> None:
        """Adds an error and its note."""
        if not self.errors:
            self.doing = doing
        self.errors.append(error)
        self.notes.append(_failure_text(doing, error))

    def without_first(self) -> Failures:
        """All but the first error, which the caller raises."""
        text = _failure_text(self.doing, self.errors[0])
        return Failures(self.doing, self.errors[1:], [note for note in self.notes if note != text])

    def add_notes_to(self, error: BaseException, state: str | None) -> None:
        """Adds the final state and all failures to the notes of the raised error."""
        error.add_note(_ENDS.get(state or "", f"the transaction is {state}"))
        for note in self.notes:
            error.add_note(note)
        if isinstance(error, TransactionFailed):
            error.others = tuple(self.errors)

    def after_commit(self, transaction: Transaction) -> CommittedWithErrors:
        """The error for failures after the commit."""
        raised = CommittedWithErrors(f"transaction {transaction.id} is committed; then {self.notes[0]}")
        raised.others = tuple(self.errors[1:])
        raised.__cause__ = self.errors[0]
        for note in self.notes[1:]:
            raised.add_note(note)
        return raised


def _failure_text(doing: str, error: Exception) -> str:
    return f"{doing}: {type(error).__name__}: {error}"


def failure_of(transaction: Transaction, doing: str, error: Exception) -> PlainsongError:
    """The error to raise for the first failure: ``error`` itself, or one with it as its cause."""
    late = timed_out(transaction, error)
    if late is not None:
        return late
    if isinstance(error, PlainsongError) and error.outcome == "not-applied":
        return error
    failed = TransactionFailed(f"transaction {transaction.id}: {doing}: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


def timed_out(transaction: Transaction, error: Exception) -> TransactionTimedOut | None:
    """TransactionTimedOut if the transaction's age caused ``error``, else None."""
    refused = isinstance(error, (TransactionNotInProgress, RolledBack, TransactionExpired))
    late = isinstance(error, DeadlineExceeded) and error.outcome == "not-applied"
    if isinstance(error, TransactionTimedOut) or not (refused or late) or transaction.remaining_s > 0:
        return None
    raised = TransactionTimedOut(
        f"transaction {transaction.id} is {transaction.age_s:.1f} s old, and its limit is {transaction.timeout_s:g} s",
        hint="do less in it, give it a longer timeout_s (the daemon's transactions.timeout_s is the default, "
        'transactions.max_timeout_s the maximum), or type="long" (transactions.long_timeout_s)',
    )
    raised.__cause__ = error
    return raised


def in_doubt(transaction: Transaction, why: str) -> TransactionInDoubt:
    """The error for a commit with an unknown outcome."""
    return TransactionInDoubt(
        f"the commit of transaction {transaction.id} was sent, its answer was lost, and {why}",
        hint=f"check later with client.transactions.get({transaction.id}), or plainsong tx show {transaction.id}",
        transaction_id=transaction.id,
    )


#: Attempts after the first.
DEFAULT_RETRIES = 20


class Retries:
    """Counts the attempts of ``run_in_transaction``. Raises InvalidParameter."""

    def __init__(self, retries: int, random: Callable[[], float]) -> None:
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise InvalidParameter(f"retries is {retries!r}", hint="use 0 or more")
        self._left = retries
        self._attempts = 1
        self._backoff = Backoff(PAUSES_S, random)

    def pause_s(self, conflict: TransactionConflict) -> float:
        """Return the pause after a conflict: from 50 ms, doubling, shortened at random.

        Raises:
          TransactionConflict: this was the last attempt.
        """
        if not self._left:
            conflict.add_note(
                "this was the only attempt" if self._attempts == 1 else f"after {counted(self._attempts, 'attempt')}"
            )
            raise conflict
        self._left -= 1
        self._attempts += 1
        return pause_after(conflict, self._backoff)


# --- the current block ---------------------------------------------------------------------------


class Block(Protocol):
    """A transaction as a block of code."""

    @property
    def client(self) -> object:
        """Its client."""
        ...

    @property
    def _under_way(self) -> Transaction | None:
        """The open transaction; None after its end."""
        ...


B = TypeVar("B", bound=Block)


Entered = Token[tuple[Block, ...]]


#: From the outermost to the innermost.
blocks: ContextVar[tuple[Block, ...]] = ContextVar("plainsong_transactions", default=())


def block_of(client: object, kind: type[B]) -> B | None:
    """The innermost block of ``client`` around the running code, even if its transaction has ended."""
    for block in reversed(blocks.get()):
        if block.client is client and isinstance(block, kind):
            return block
    return None


def check_free(block: Block) -> None:
    """Raises TransactionInProgress inside another block of the same client: transactions do not nest."""
    for outer in blocks.get():
        if outer.client is block.client and outer._under_way is not None:
            raise TransactionInProgress(
                f"transaction {outer._under_way.id} is under way here, and transactions do not nest",
                hint="take part in it (add, publish), or begin the other one in another thread or before this block",
            )


def enter(block: Block) -> Entered:
    """Makes ``block`` the current block of the running code."""
    return blocks.set((*blocks.get(), block))


def leave(entered: Entered) -> None:
    """Restores the block before ``enter``."""
    with suppress(ValueError):  # the block was entered in another context, which has its own list
        blocks.reset(entered)
