"""The rows of the transaction service: their keys, a transaction's record, and the small ones.

A transaction has one row, from its begin until its outcome is forgotten:

    transaction row   y type  n client  u owner  s started  e expires  b visibility bound  r read pointer  c checkpoints
                      p a commit or prepare conflicted: prepare first   a being aborted
                      o outcome  d when (ms)  w last pointer issued before  l pointers on the invalid list

A decision rewrites this one row, so it is either durable or not, whatever else of a commit reached the disk.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from plainsong.protocol.errors import InvalidName
from plainsong.protocol.keys import SERVICE, SYSTEM, DamagedRow, stop_after
from plainsong.protocol.names import TopicName, topic_name
from plainsong.protocol.records import pack_record, unpack_record
from plainsong.protocol.transactions.transaction import TransactionType

if TYPE_CHECKING:
    from typing import Any

    from plainsong.protocol.transactions.asks import State

_MAX_POINTER = (1 << 63) - 1
_STATES: tuple[State, ...] = ("in_progress", "committed", "aborted", "invalid")


@dataclass(slots=True, eq=False)
class Record:
    """A transaction, open or decided."""

    transaction_id: int
    type: TransactionType
    client_id: str
    started_ms: int
    expires_ms: int
    bound: int
    """Everything up to this pointer was decided when it began."""
    read_pointer: int
    """Its read pointer at the begin."""
    checkpoints: tuple[int, ...] = ()
    must_prepare: bool = False
    """It had a conflict: a commit is refused until a prepare succeeds."""
    aborting: bool = False
    """Its rows are being rolled back: it can't be committed any more."""
    state: State = "in_progress"
    decided_ms: int = 0
    """When it was decided, by ``Ledger.decide_ms``: decisions are in the order of these times."""
    decided_at: int = 0
    """The last pointer issued before the decision."""
    listed: tuple[int, ...] = ()
    """Its pointers on the invalid list."""
    owner: str | None = None
    """The name that began it; None: it had none, as those of Tephra's clients and of 0.1."""
    deadline_s: float = field(default=0.0, repr=False)
    """When it times out, on the service's monotonic clock; not in the row."""
    frozen: int = 0
    """Not 0 while its commit waits for writes under way; the number identifies this wait. Not in the row."""
    settling: bool = False
    """It is decided, but not durably yet; not in the row."""
    is_written: bool = True
    """False while no commit has its row: it was begun, and nothing was published under it. Not in the row."""
    topics: set[TopicName] = field(default_factory=set)
    """Enlisted topics, which have or may have rows of it. Each has a row of its own."""

    @property
    def pointers(self) -> tuple[int, ...]:
        """Its id, then the pointers of its checkpoints; ascending."""
        return (self.transaction_id, *self.checkpoints)

    @property
    def write_pointer(self) -> int:
        return self.checkpoints[-1] if self.checkpoints else self.transaction_id

    def encode(self) -> bytes:
        record: dict[str, object] = {
            "y": int(self.type),
            "n": self.client_id,
            "s": self.started_ms,
            "e": self.expires_ms,
            "b": self.bound,
            "r": self.read_pointer,
        }
        if self.owner is not None:
            record["u"] = self.owner
        if self.checkpoints:
            record["c"] = self.checkpoints
        if self.must_prepare:
            record["p"] = True
        if self.aborting:
            record["a"] = True
        if self.state != "in_progress":
            record |= {"o": _STATES.index(self.state), "d": self.decided_ms, "w": self.decided_at}
        if self.listed:
            record["l"] = self.listed
        return pack_record(record)

    @classmethod
    def decode(cls, transaction_id: int, value: bytes) -> Record:
        record = unpack_record(value, "transaction")
        try:
            return _decoded(transaction_id, record)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise DamagedRow(
                f"the row of transaction {transaction_id} lacks a field or has a wrong one: {error!r}"
            ) from error


def _decoded(transaction_id: int, record: dict[str, Any]) -> Record:
    client_id = record["n"]
    if not isinstance(client_id, str):
        raise TypeError("a client id is text")
    owner = record.get("u")
    if owner is not None and not isinstance(owner, str):
        raise TypeError("an owner is text")
    return Record(
        transaction_id,
        TransactionType(record["y"]),
        client_id,
        started_ms=number(record["s"]),
        expires_ms=number(record["e"]),
        bound=number(record["b"]),
        read_pointer=number(record["r"]),
        checkpoints=tuple(map(number, record.get("c", ()))),
        must_prepare=record.get("p", False) is True,
        aborting=record.get("a", False) is True,
        state=_STATES[number(record.get("o", 0))],
        decided_ms=number(record.get("d", 0)),
        decided_at=number(record.get("w", 0)),
        listed=tuple(map(number, record.get("l", ()))),
        owner=owner,
    )


def number(value: object) -> int:
    """``value`` if it can be a pointer or a time. Raises ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or not -1 <= value <= _MAX_POINTER:
        raise ValueError(f"{str(value)[:40]!r} is no pointer and no time")
    return value


# --- rows ------------------------------------------------------------------------------------------
#
# The keys of the service's rows, and the values of the small ones:
#
#     00 'x' 'h'        head       l last pointer issued  r read pointer  f first one issued
#                                  g decisions up to this pointer may be forgotten  u change sets too
#                                  i the service's name, where a restore gave it another one than f
#                                  t no later decision has a time before this one (ms)
#                                  n pointers up to this one may have been issued
#                                  o reading as of a moment before this one is not possible any more (ms)
#     00 'x' 't' id     a transaction                  see above
#     00 'x' 's' id     a change set                   k keys  n client  c commit pointer (once committed)
#     00 'x' 'e' id n   an enlisted topic              m when (ms); n its name, namespace:topic in ASCII
#     00 'x' 'p'        the last complete pass         m begun (ms)  b bound
#     00 'x' 'a'        the authority                  a its name
#
# Pointers are i64. The rows of a commit are ordered so that any prefix of it leaves a consistent state: the head
# first, a change set before its transaction, removals last.


_POINTER = struct.Struct(">q")
_PREFIX = SYSTEM + SERVICE
HEAD = b"h"
TRANSACTION = b"t"
CHANGES = b"s"
ENLISTED = b"e"
PASS = b"p"
AUTHORITY = b"a"
#: ``[start, stop)`` of all these rows, in the metadata table.
SERVICE_RANGE = (_PREFIX, stop_after(_PREFIX))


def service_key(kind: bytes, pointer: int | None = None) -> bytes:
    """The key of a row of the service."""
    return _PREFIX + kind + (b"" if pointer is None else _POINTER.pack(pointer))


def parse_service_key(key: bytes) -> tuple[bytes, int]:
    """Kind and pointer (0 when there is none). Raises DamagedRow."""
    kind, rest = key[len(_PREFIX) : len(_PREFIX) + 1], key[len(_PREFIX) + 1 :]
    if kind == ENLISTED:
        rest = rest[: _POINTER.size]
    if not key.startswith(_PREFIX) or len(rest) not in (0, _POINTER.size):
        raise DamagedRow(f"key {key.hex()} is none of the transaction service")
    return kind, _POINTER.unpack(rest)[0] if rest else 0


def enlisted_key(transaction_id: int, name: TopicName) -> bytes:
    """The key of the row that enlists a topic for a transaction."""
    return service_key(ENLISTED, transaction_id) + str(name).encode("ascii")


def enlisted_topic(key: bytes) -> TopicName:
    """The topic in a key from ``enlisted_key``. Raises DamagedRow."""
    try:
        return topic_name(*key[len(_PREFIX) + 1 + _POINTER.size :].decode("ascii").split(":", 1))
    except (InvalidName, TypeError, UnicodeDecodeError) as error:
        raise DamagedRow(f"key {key.hex()} enlists no topic") from error


@dataclass(slots=True)
class Head:
    """The progress of the service."""

    last: int = 0
    """The last pointer issued."""
    read_pointer: int = 0
    first: int = 0
    """The first pointer ever issued here; 0: none yet."""
    forgotten: int = 0
    """A pointer issued up to this one that is not known any more was decided and forgotten."""
    unchecked: int = 0
    """Change sets of commits up to this pointer were forgotten for lack of room."""
    restored: int = 0
    """The last pointer that may have been issued before the store was restored from a backup; 0: it never was."""
    decided_ms: int = 0
    """No decision from now on has a time before this one. 0: written by a version that kept no such order."""
    oldest_ms: int = 0
    """The earliest moment as of which one can read: what was committed up to it may be forgotten."""
    reserved: int = 0
    """Pointers up to this one may have been issued since this row was written; 0: none beyond ``last``."""

    @property
    def service(self) -> int:
        """What tells this service from others, which may have issued the same pointers; 0: it has issued none."""
        return self.restored or self.first

    def encode(self) -> bytes:
        numbers = {"l": self.last, "r": self.read_pointer, "f": self.first, "g": self.forgotten, "u": self.unchecked}
        numbers |= {"i": self.restored, "t": self.decided_ms, "o": self.oldest_ms, "n": self.reserved}
        return pack_record({key: each for key, each in numbers.items() if each})

    @classmethod
    def decode(cls, value: bytes) -> Head:
        record = unpack_record(value, "head")
        try:
            return cls(*(number(record.get(key, 0)) for key in "lrfguiton"))
        except (TypeError, ValueError) as error:
            raise DamagedRow(f"the transaction service's head lacks a field or has a wrong one: {error!r}") from error


@dataclass(frozen=True, slots=True)
class ChangeSet:
    """The keys one transaction changed."""

    transaction_id: int
    client_id: str
    keys: frozenset[bytes]
    commit_pointer: int | None = None
    """The pointer behind the last one issued before its commit; None: it is only prepared."""

    @property
    def size(self) -> int:
        """Its approximate size in memory, in bytes."""
        return sum(map(len, self.keys)) + 64 * len(self.keys) + 128

    def encode(self) -> bytes:
        record: dict[str, object] = {"k": list(self.keys), "n": self.client_id}
        if self.commit_pointer is not None:
            record["c"] = self.commit_pointer
        return pack_record(record)

    @classmethod
    def decode(cls, transaction_id: int, value: bytes) -> ChangeSet:
        record = unpack_record(value, "change set")
        try:
            keys, client_id, commit_pointer = record["k"], record["n"], record.get("c")
            if not isinstance(client_id, str) or not all(isinstance(key, bytes) for key in keys):
                raise TypeError("keys are bytes, and a client id is text")
            pointer = None if commit_pointer is None else number(commit_pointer)
            return cls(transaction_id, client_id, frozenset(keys), pointer)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedRow(
                f"the change set of {transaction_id} lacks a field or has a wrong one: {error!r}"
            ) from error


@dataclass(frozen=True, slots=True)
class LastPass:
    """The janitor's last pass that reached every topic."""

    begun_ms: int
    bound: int

    def encode(self) -> bytes:
        return pack_record({"m": self.begun_ms, "b": self.bound})

    @classmethod
    def decode(cls, value: bytes) -> LastPass:
        record = unpack_record(value, "pass")
        try:
            return cls(number(record["m"]), number(record["b"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedRow(f"the row of the last pass lacks a field or has a wrong one: {error!r}") from error
