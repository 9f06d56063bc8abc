"""Tephra's encodings of a transaction and of a manager's whole state, and the pruning bounds derived from them.

A transaction is encoded as Tephra's ``TransactionCodec`` does, and decoded from clients of any version: a bare Thrift
struct in the binary protocol, 83 bytes and 8 for every pointer in its lists:

     1 i64   transaction id               2 i64   read pointer
     3 list  invalid pointers             4 list  pointers in progress
     5 i64   first short in progress      6 i32   type: 1 short, 2 long
     7 i64   write pointer                8 list  checkpoints' pointers
     9 i32   visibility: 1 snapshot, 2 snapshot without the current pointer's writes, 3 snapshot, all versions

Fields that are absent, unknown or of another type are treated as Tephra treats them, with two differences. Bytes
without an id or a read pointer are malformed: Tephra would read zeros, and such a reader would see nothing. And a
missing write pointer, as in bytes older than checkpoints, is the id.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from struct import Struct, pack
from typing import TYPE_CHECKING, TypeVar

from plainsong.protocol.codec.avro_cursor import Cursor
from plainsong.protocol.errors import MalformedBody, MalformedTransaction
from plainsong.protocol.tephra.thrift import I32, I64, LIST, STOP, MalformedThrift, ThriftReader
from plainsong.protocol.transactions.transaction import (
    NO_TRANSACTION,
    POINTERS_PER_MS,
    Transaction,
    TransactionType,
    VisibilityLevel,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from plainsong.protocol.transactions.ledger import Ledger
    from plainsong.protocol.transactions.view import Visible

_IDS = Struct(">BhqBhq")
_MIDDLE = Struct(">BhqBhiBhq")
_END = Struct(">BhiB")
_LONGS = frozenset((1, 2, 5, 7))
_LISTS = frozenset((3, 4, 8))
_ENUMS = frozenset((6, 9))
_LEVELS = {int(level): level for level in VisibilityLevel}


def encode_transaction(transaction: Transaction) -> bytes:
    """The bytes of a transaction, as Tephra's clients read them."""
    tx = transaction
    return b"".join(
        (
            _IDS.pack(I64, 1, tx.transaction_id, I64, 2, tx.read_pointer),
            _encode_pointers(3, tx.invalids),
            _encode_pointers(4, tx.in_progress),
            _MIDDLE.pack(I64, 5, tx.first_short_in_progress, I32, 6, tx.type, I64, 7, tx.write_pointer),
            _encode_pointers(8, tx.checkpoint_write_pointers),
            _END.pack(I32, 9, tx.visibility_level, STOP),
        )
    )


def _encode_pointers(field: int, pointers: Sequence[int]) -> bytes:
    return pack(f">BhBi{len(pointers)}q", LIST, field, I64, len(pointers), *pointers)


def decode_transaction(data: bytes) -> Transaction:
    """Decode a transaction; bytes after it are ignored, as in Tephra. Its lists are sorted.

    Raises:
      MalformedTransaction: the bytes are malformed; nothing was allocated beyond their own size.
    """
    numbers: dict[int, int] = {}
    lists: dict[int, tuple[int, ...]] = {}
    reader = ThriftReader(data)
    try:
        while (found := reader.field()) is not None:
            kind, field = found
            if kind == I64 and field in _LONGS:
                numbers[field] = reader.i64()
            elif kind == LIST and field in _LISTS:
                lists[field] = tuple(sorted(reader.longs()))
            elif kind == I32 and field in _ENUMS:
                numbers[field] = reader.i32()
            else:
                reader.skip(kind)
    except MalformedThrift as error:
        raise _malformed_transaction(str(error)) from None
    if 1 not in numbers or 2 not in numbers:
        raise _malformed_transaction("it has no " + ("id" if 1 not in numbers else "read pointer"))
    return Transaction(
        read_pointer=numbers[2],
        transaction_id=numbers[1],
        write_pointer=numbers.get(7) or numbers[1],
        invalids=lists.get(3, ()),
        in_progress=lists.get(4, ()),
        first_short_in_progress=numbers.get(5, 0),
        type=TransactionType.SHORT if numbers.get(6) == TransactionType.SHORT else TransactionType.LONG,
        checkpoint_write_pointers=lists.get(8, ()),
        visibility_level=_LEVELS.get(numbers.get(9, 0), VisibilityLevel.SNAPSHOT),
    )


def _malformed_transaction(what: str) -> MalformedTransaction:
    return MalformedTransaction(
        f"the transaction does not decode: {what}",
        hint="send the bytes of Tephra's TransactionCodec, or the snapshot that begin returned",
    )


T = TypeVar("T")


# --- snapshots of a transaction manager -------------------------------------------------------------
#
# Version 4 is written, versions 1 to 4 are read.
#
#     version  timestamp_ms  read pointer  last write pointer
#     invalid[]      pointer
#     in progress[]  pointer  expiration_ms  visibility bound  type (since 2)  checkpoints[] (since 4)
#     committing[]   pointer  keys[]
#     committed[]    pointer  keys[]
#
# Numbers are zigzag varints, as Avro's. A list is its count, its items and a 0; an empty one is the 0 alone.
# Versions 2 and 3 differ only in their number. Types are 0 short, 1 long, 2 checkpoint.


VERSION = 4


class EntryType(IntEnum):
    """The type of a pointer in progress; the numbers are those of a snapshot."""

    SHORT = 0
    LONG = 1
    CHECKPOINT = 2


@dataclass(frozen=True, slots=True)
class Entry:
    """One pointer in progress; a checkpoint has its own entry, and is also listed in that of its transaction."""

    expiration_ms: int
    """Negative for a long transaction in version 1, which had no time-out."""
    visibility_upper_bound: int
    type: EntryType = EntryType.SHORT
    checkpoints: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ManagerState:
    """The whole state of a transaction manager at one moment."""

    timestamp_ms: int
    read_pointer: int
    last_write_pointer: int
    invalids: tuple[int, ...] = ()
    """In the order of invalidation, or sorted; a pointer may occur twice."""
    in_progress: Mapping[int, Entry] = field(default_factory=dict)
    committing: Mapping[int, tuple[bytes, ...]] = field(default_factory=dict)
    """Change sets by transaction id."""
    committed: Mapping[int, tuple[bytes, ...]] = field(default_factory=dict)
    """Change sets by commit pointer."""


def encode_snapshot(state: ManagerState) -> bytes:
    """A snapshot of version 4."""
    out = bytearray()
    for number in (VERSION, state.timestamp_ms, state.read_pointer, state.last_write_pointer):
        _put(out, number)
    _put_list(out, state.invalids)
    _put_count(out, len(state.in_progress))
    for pointer, entry in state.in_progress.items():
        for number in (pointer, entry.expiration_ms, entry.visibility_upper_bound, entry.type):
            _put(out, number)
        _put_list(out, entry.checkpoints)
    _put(out, 0)
    for sets in (state.committing, state.committed):
        _put_count(out, len(sets))
        for pointer, keys in sets.items():
            _put(out, pointer)
            _put_keys(out, keys)
        _put(out, 0)
    return bytes(out)


def decode_visibility_state(data: bytes) -> ManagerState:
    """Decode a snapshot of version 1 to 4 without its change sets, which may be missing: enough for readers and cleaning.

    Raises:
      MalformedTransaction: the bytes are malformed or end early; nothing was allocated beyond their own size.
    """
    cursor = Cursor(data)
    try:
        version = cursor.int32()
        if not 1 <= version <= VERSION:
            raise _malformed_snapshot(f"its version is {version}, not one of 1 to {VERSION}")
        timestamp_ms, read_pointer, last_write_pointer = cursor.long(), cursor.long(), cursor.long()
        invalids = tuple(_read_list(cursor, cursor.long))
        in_progress = dict(_read_list(cursor, lambda: (cursor.long(), _entry(cursor, version))))
    except MalformedBody as error:
        raise _malformed_snapshot(error.detail) from None
    return ManagerState(timestamp_ms, read_pointer, last_write_pointer, invalids, in_progress)


def _entry(cursor: Cursor, version: int) -> Entry:
    expiration_ms, bound = cursor.long(), cursor.long()
    number = cursor.int32() if version > 1 else -1
    if number < 0:  # version 1 has no types: a transaction with a time-out was a short one
        kind = EntryType.LONG if expiration_ms < 0 else EntryType.SHORT
    elif number < len(EntryType):
        kind = EntryType(number)
    else:
        raise _malformed_snapshot(f"a transaction has type {number}, before byte {cursor.at}")
    checkpoints = tuple(_read_list(cursor, cursor.long)) if version >= VERSION else ()
    return Entry(expiration_ms, bound, kind, checkpoints)


def _read_list(cursor: Cursor, read: Callable[[], T]) -> list[T]:
    found: list[T] = []
    while count := cursor.int32():
        left = len(cursor.data) - cursor.at
        if not 0 < count <= left:  # an item takes a byte at least
            raise _malformed_snapshot(f"a list of {count} items with {left} bytes left, at byte {cursor.at}")
        found.extend(read() for _ in range(count))
    return found


def _malformed_snapshot(what: str) -> MalformedTransaction:
    return MalformedTransaction(
        f"the snapshot of a transaction manager does not decode: {what}",
        hint="use the complete bytes of Tephra's getSnapshot, or of a snapshot file",
    )


def _put(out: bytearray, number: int) -> None:
    rest = number << 1 ^ number >> 63
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)


def _put_count(out: bytearray, count: int) -> None:
    if count:
        _put(out, count)


def _put_list(out: bytearray, numbers: Sequence[int]) -> None:
    _put_count(out, len(numbers))
    for number in numbers:
        _put(out, number)
    _put(out, 0)


def _put_keys(out: bytearray, keys: Iterable[bytes]) -> None:
    keys = tuple(keys)
    _put_count(out, len(keys))
    for key in keys:
        _put(out, len(key))
        out += key
    _put(out, 0)


def manager_state(ledger: Ledger, visible: Visible, now_ms: int) -> ManagerState:
    """The state of this service in Tephra's terms.

    Other programs rely on it, so it has only decisions that are durable; begins and change sets may still wait for a
    commit.
    """
    entries: dict[int, Entry] = {}
    for pointer in visible.in_progress():
        record = ledger.by_pointer[pointer]
        if pointer != record.transaction_id:
            entries[pointer] = Entry(record.expires_ms, record.bound, EntryType.CHECKPOINT)
            continue
        kind = EntryType.LONG if record.type is TransactionType.LONG else EntryType.SHORT
        entries[pointer] = Entry(record.expires_ms, record.bound, kind, record.checkpoints)
    committed: dict[int, frozenset[bytes]] = {}
    for changes in ledger.committed:
        pointer = changes.commit_pointer or 0
        committed[pointer] = committed.get(pointer, frozenset()) | changes.keys
    return ManagerState(
        now_ms,
        visible.read_pointer,
        ledger.head.last,
        visible.invalids(),
        entries,
        {pointer: tuple(sorted(changes.keys)) for pointer, changes in ledger.prepared.items()},
        {pointer: tuple(sorted(keys)) for pointer, keys in committed.items()},
    )


# --- bounds: how far the invalid list may be pruned -------------------------------------------------


def prune_upper_bound(transaction: Transaction) -> int:
    """The highest pointer that may be pruned once all rows with this snapshot's invalid pointers are rewritten.

    No transaction begun before the snapshot can add rows at or below it.
    """
    if not transaction.invalids and not transaction.in_progress:
        return transaction.read_pointer - 1
    last_invalid = transaction.invalids[-1] if transaction.invalids else NO_TRANSACTION
    first_in_progress = transaction.in_progress[0] if transaction.in_progress else NO_TRANSACTION
    return min(last_invalid, first_in_progress - 1)


def inactive_bound(now_ms: int, lifetime_ms: int) -> int:
    """The pointer up to which all pointers are older than the longest lifetime of a transaction."""
    return (now_ms - lifetime_ms) * POINTERS_PER_MS - 1


def first_short_in_progress(types: Mapping[int, EntryType]) -> int:
    """The first pointer that is not a long transaction's id; checkpoints of a long one count as short, as in Tephra."""
    return min((pointer for pointer, kind in types.items() if kind is not EntryType.LONG), default=NO_TRANSACTION)


def reader_of(state: ManagerState) -> Transaction:
    """A read-only transaction that sees what was committed when the state was taken."""
    return Transaction(
        read_pointer=state.read_pointer,
        transaction_id=NO_TRANSACTION,
        write_pointer=NO_TRANSACTION,
        invalids=tuple(sorted(set(state.invalids))),
        in_progress=tuple(sorted(state.in_progress)),
        first_short_in_progress=first_short_in_progress(
            {pointer: entry.type for pointer, entry in state.in_progress.items()}
        ),
    )
