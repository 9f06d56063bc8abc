"""The state of a transaction manager as Tephra's snapshots say it: version 4 is written, versions 1 to 4 are read.

    version  timestamp_ms  read pointer  last write pointer
    invalid[]      pointer
    in progress[]  pointer  expiration_ms  visibility bound  type (since 2)  checkpoints[] (since 4)
    committing[]   pointer  keys[]
    committed[]    pointer  keys[]

Numbers are zigzag varints, as Avro's. A list is its count, its items and a 0; an empty one is the 0 alone. Versions
2 and 3 differ in their number only. Types are 0 short, 1 long, 2 checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, TypeVar

from protocol.codec.cursor import Cursor
from protocol.errors import MalformedBody, MalformedTransaction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

T = TypeVar("T")

VERSION = 4


class EntryType(IntEnum):
    """What a pointer in progress is; the numbers are the snapshot's."""

    SHORT = 0
    LONG = 1
    CHECKPOINT = 2


@dataclass(frozen=True, slots=True)
class Entry:
    """One pointer in progress; a checkpoint's is an entry of its own, and listed by its transaction's as well."""

    expiration_ms: int
    """Negative in version 1 for a long transaction, which had no time-out then."""
    visibility_upper_bound: int
    type: EntryType = EntryType.SHORT
    checkpoints: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ManagerState:
    """Everything a transaction manager knows, at one moment."""

    timestamp_ms: int
    read_pointer: int
    last_write_pointer: int
    invalids: tuple[int, ...] = ()
    """In the order they became invalid, or sorted; one may be there twice."""
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


def decode_snapshot(data: bytes) -> ManagerState:
    """The state a snapshot of version 1 to 4 says.

    Raises:
      MalformedTransaction: it is no such snapshot, or ends early; nothing was allocated beyond its own size.
    """
    return _decode(data, change_sets=True)


def decode_visibility_state(data: bytes) -> ManagerState:
    """The same without the change sets, which are neither read nor there: all that readers and cleaning need."""
    return _decode(data, change_sets=False)


def _decode(data: bytes, *, change_sets: bool) -> ManagerState:
    cursor = Cursor(data)
    try:
        version = cursor.int32()
        if not 1 <= version <= VERSION:
            raise _malformed(f"its version is {version}, not one of 1 to {VERSION}")
        timestamp_ms, read_pointer, last_write_pointer = cursor.long(), cursor.long(), cursor.long()
        invalids = tuple(_list(cursor, cursor.long))
        in_progress = dict(_list(cursor, lambda: (cursor.long(), _entry(cursor, version))))
        if not change_sets:
            return ManagerState(timestamp_ms, read_pointer, last_write_pointer, invalids, in_progress)
        committing, committed = _change_sets(cursor), _change_sets(cursor)
    except MalformedBody as error:
        raise _malformed(error.detail) from None
    return ManagerState(timestamp_ms, read_pointer, last_write_pointer, invalids, in_progress, committing, committed)


def _entry(cursor: Cursor, version: int) -> Entry:
    expiration_ms, bound = cursor.long(), cursor.long()
    number = cursor.int32() if version > 1 else -1
    if number < 0:  # nobody said; a time-out is what told short ones from long ones before there were types
        kind = EntryType.LONG if expiration_ms < 0 else EntryType.SHORT
    elif number < len(EntryType):
        kind = EntryType(number)
    else:
        raise _malformed(f"a transaction has type {number}, before byte {cursor.at}")
    checkpoints = tuple(_list(cursor, cursor.long)) if version >= VERSION else ()
    return Entry(expiration_ms, bound, kind, checkpoints)


def _change_sets(cursor: Cursor) -> dict[int, tuple[bytes, ...]]:
    return dict(_list(cursor, lambda: (cursor.long(), tuple(_list(cursor, cursor.octets)))))


def _list(cursor: Cursor, read: Callable[[], T]) -> list[T]:
    found: list[T] = []
    while count := cursor.int32():
        left = len(cursor.data) - cursor.at
        if not 0 < count <= left:  # an item takes a byte at least
            raise _malformed(f"a list of {count} items with {left} bytes left, at byte {cursor.at}")
        found.extend(read() for _ in range(count))
    return found


def _malformed(what: str) -> MalformedTransaction:
    return MalformedTransaction(
        f"the snapshot of a transaction manager does not decode: {what}",
        hint="take it from Tephra's getSnapshot, or from a snapshot file, whole",
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
