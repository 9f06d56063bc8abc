"""The rows of the transaction service: their keys, a transaction's record, and the smaller rows.

A transaction has one row, from its begin until its outcome is forgotten:

    transaction row   y type  n client  u owner  s started  e expires  b visibility bound  r read pointer  c checkpoints
                      p a commit or prepare conflicted: prepare first   a being aborted   h begun over Thrift
                      o outcome  d when (ms)  w last pointer issued before  l pointers on the invalid list

A decision rewrites only this row, so it is durable or not, whichever other rows of the commit reached the disk.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from plainsong.protocol.effects import Put, Table
from plainsong.protocol.errors import InvalidName
from plainsong.protocol.keys import SERVICE, SYSTEM, DamagedRow, stop_after
from plainsong.protocol.names import TopicName, topic_name
from plainsong.protocol.records import pack_record, unpack_record
from plainsong.protocol.transactions.transaction import TransactionType, issued_ms

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from plainsong.protocol.transactions.asks import State

_MAX_POINTER = (1 << 63) - 1
#: More pointers than any version reserves for Tephra's clients: a load makes each without a row a transaction.
_MAX_TEPHRA = 65_536
_STATES: tuple[State, ...] = ("in_progress", "committed", "aborted", "invalid")
#: The client of a transaction whose begin may have been lost in a crash.
LOST_CLIENT = "lost-in-a-crash"


@dataclass(slots=True, eq=False)
class Record:
    """A transaction, open or decided."""

    transaction_id: int
    type: TransactionType
    client_id: str
    started_ms: int
    expires_ms: int
    bound: int
    """All pointers up to this one were decided when it began."""
    read_pointer: int
    """Its read pointer at the begin."""
    pointers: tuple[int, ...] = ()
    """Its id, then the pointers of its checkpoints; ascending."""
    must_prepare: bool = False
    """True after a conflict: a commit is refused until a prepare succeeds."""
    aborting: bool = False
    """True if its rows are being rolled back, so that it can no longer be committed."""
    state: State = "in_progress"
    decided_ms: int = 0
    """When it was decided, by ``Ledger.decide_ms``; decisions are ordered by these times."""
    decided_at: int = 0
    """The last pointer issued before the decision."""
    listed: tuple[int, ...] = ()
    """Its pointers on the invalid list."""
    tephra: bool = False
    """True if a client of Tephra's began it."""
    owner: str | None = None
    """The name that began it; None for Tephra's clients, those of version 0.1, and without authentication."""
    deadline_s: float = field(default=0.0, repr=False)
    """When it times out, on the service's monotonic clock; not in the row."""
    frozen: int = 0
    """Identifies the freeze while its commit waits for writes under way, else 0. Not in the row."""
    settling: bool = False
    """True while its decision is not durable yet. Not in the row."""
    is_written: bool = True
    """False until a commit has its row. Not in the row."""
    topics: set[TopicName] = field(default_factory=set)
    """Enlisted topics, which may have rows of it. Each enlistment has its own row."""

    def __post_init__(self) -> None:
        self.pointers = self.pointers or (self.transaction_id,)

    @property
    def may_lose_changes(self) -> bool:
        """True if a crash may lose its change set, after which its commit is refused.

        Long transactions are excluded: they may be committed without a change set.
        """
        return self.tephra and self.type is TransactionType.SHORT

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """The pointers of its checkpoints."""
        return self.pointers[1:]

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
        if len(self.pointers) > 1:
            record["c"] = self.checkpoints
        if self.must_prepare:
            record["p"] = True
        if self.aborting:
            record["a"] = True
        if self.tephra:
            record["h"] = True
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
                f"the row of transaction {transaction_id} has a missing or invalid field: {error!r}"
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
        pointers=(transaction_id, *map(number, record.get("c", ()))),
        must_prepare=record.get("p", False) is True,
        aborting=record.get("a", False) is True,
        tephra=record.get("h", False) is True,
        state=_STATES[number(record.get("o", 0))],
        decided_ms=number(record.get("d", 0)),
        decided_at=number(record.get("w", 0)),
        listed=tuple(map(number, record.get("l", ()))),
        owner=owner,
    )


def number(value: object) -> int:
    """Return ``value`` if it can be a pointer or a time. Raises ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or not -1 <= value <= _MAX_POINTER:
        raise ValueError(f"{str(value)[:40]!r} is neither a pointer nor a time")
    return value


# --- rows ------------------------------------------------------------------------------------------
#
# The keys of the service's rows, and the values of the small ones:
#
#     00 'x' 'h'        head       l last pointer issued  r read pointer  f first one issued
#                                  g decisions up to this pointer may be forgotten  u change sets too
#                                  i the service's identity, if a restore has replaced f
#                                  t later decisions have no time before this one (ms)
#                                  n pointers up to this one may have been issued
#                                  k that many pointers after l are invalid if they have no row
#                                  c change sets of transactions up to this pointer may be lost
#                                  o the earliest moment as of which reads are possible (ms)
#     00 'x' 't' id     a transaction                  see above
#     00 'x' 's' id     a change set                   k keys  n client  c commit pointer (once committed)
#     00 'x' 'e' id n   an enlisted topic              m when (ms); n its name, namespace:topic in ASCII
#     00 'x' 'p'        the last complete pass         m begun (ms)  b bound
#     00 'x' 'a'        the authority                  a its name
#
# Pointers are i64. The rows of a commit are ordered so that every prefix of it is a consistent state: the head first, a
# change set before its transaction, removals last. Deferred begins are only possible if a store leaves no such prefix.


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
    """Return the key of a row of the service."""
    return _PREFIX + kind + (b"" if pointer is None else _POINTER.pack(pointer))


def put_service_rows(kind: bytes, rows: Mapping[int, bytes]) -> Put:
    """Return the operation that writes rows of one kind, by pointer."""
    pointers = sorted(rows)
    return Put(Table.METADATA, _PREFIX + kind, list(map(_POINTER.pack, pointers)), [rows[each] for each in pointers])


def parse_service_key(key: bytes) -> tuple[bytes, int]:
    """Return kind and pointer (0 if there is none). Raises DamagedRow."""
    kind, rest = key[len(_PREFIX) : len(_PREFIX) + 1], key[len(_PREFIX) + 1 :]
    if kind == ENLISTED:
        rest = rest[: _POINTER.size]
    if not key.startswith(_PREFIX) or len(rest) not in (0, _POINTER.size):
        raise DamagedRow(f"key {key.hex()} is not a key of the transaction service")
    return kind, _POINTER.unpack(rest)[0] if rest else 0


def enlisted_key(transaction_id: int, name: TopicName) -> bytes:
    """Return the key of the row that enlists a topic for a transaction."""
    return service_key(ENLISTED, transaction_id) + str(name).encode("ascii")


def enlisted_topic(key: bytes) -> TopicName:
    """Return the topic in a key from ``enlisted_key``. Raises DamagedRow."""
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
    """The first pointer ever issued here; 0 if none yet."""
    forgotten: int = 0
    """A pointer up to this one without a record was decided and forgotten."""
    unchecked: int = 0
    """Change sets of commits up to this pointer were dropped for lack of room."""
    restored: int = 0
    """The last pointer that may have been issued before a restore from a backup; 0 if there was none."""
    decided_ms: int = 0
    """Later decisions have no time before this one. 0: written by a version without this order."""
    oldest_ms: int = 0
    """The earliest moment as of which reads are possible; earlier commits may be forgotten."""
    reserved: int = 0
    """Pointers up to this one may have been issued since this row was written; 0 if none beyond ``last``."""
    tephra: int = 0
    """Number of pointers after ``last`` that Tephra's clients may have got since this row was written."""
    lacking: int = 0
    """Change sets of transactions of Tephra's clients up to this pointer may have been lost in a crash."""

    @property
    def is_ahead(self) -> bool:
        """True, in a stored head, if the service has not been stopped since: rows that were due may be missing."""
        return self.reserved > self.last

    @property
    def service(self) -> int:
        """Distinguishes this service from others that may have issued the same pointers; 0 until it has issued one."""
        return self.restored or self.first

    def encode(self) -> bytes:
        numbers = {"l": self.last, "r": self.read_pointer, "f": self.first, "g": self.forgotten, "u": self.unchecked}
        numbers |= {"i": self.restored, "t": self.decided_ms, "o": self.oldest_ms, "n": self.reserved}
        numbers |= {"k": self.tephra, "c": self.lacking}
        return pack_record({key: each for key, each in numbers.items() if each})

    @classmethod
    def decode(cls, value: bytes) -> Head:
        record = unpack_record(value, "head")
        try:
            head = cls(*(number(record.get(key, 0)) for key in "lrfguitonkc"))
            if not 0 <= head.tephra <= _MAX_TEPHRA:
                raise ValueError(f"{head.tephra} pointers are reserved for Tephra's clients")
            return head
        except (TypeError, ValueError) as error:
            raise DamagedRow(f"the transaction service's head has a missing or invalid field: {error!r}") from error


def lost_begins(head: Head, records: Mapping[int, Record], last: int) -> dict[int, Record]:
    """Return an invalid transaction, by id, for each pointer that a client of Tephra's may have received, and that has no row.

    Args:
      last: the last pointer that may have been issued.
    """
    found = {}
    known = {pointer for record in records.values() for pointer in record.pointers if pointer > head.last}
    for pointer in range(head.last + 1, head.last + 1 + head.tephra):
        if pointer not in known:
            at_ms = issued_ms(pointer)
            found[pointer] = Record(
                pointer,
                TransactionType.SHORT,
                LOST_CLIENT,
                started_ms=at_ms,
                expires_ms=at_ms,
                bound=head.read_pointer,
                read_pointer=head.read_pointer,
                state="invalid",
                decided_ms=max(head.decided_ms, at_ms),
                decided_at=last,
                listed=(pointer,),
                is_written=False,
            )
    return found


@dataclass(frozen=True, slots=True)
class ChangeSet:
    """The keys one transaction changed."""

    transaction_id: int
    client_id: str
    keys: frozenset[bytes]
    commit_pointer: int | None = None
    """The next pointer after the last one issued before its commit; None if it is only prepared."""
    is_written: bool = True
    """False while no commit has its row. Not in the row."""
    size: int = field(init=False, compare=False, repr=False)
    """Its approximate size in memory, in bytes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", sum(map(len, self.keys)) + 64 * len(self.keys) + 128)

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
            raise DamagedRow(f"the change set of {transaction_id} has a missing or invalid field: {error!r}") from error


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
            raise DamagedRow(f"the row of the last pass has a missing or invalid field: {error!r}") from error
