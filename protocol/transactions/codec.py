"""A transaction's bytes: what Tephra's ``TransactionCodec`` writes, and reads from clients of any age.

A bare Thrift struct in the binary protocol, 83 bytes and 8 for every pointer in its lists:

     1 i64   transaction id               2 i64   read pointer
     3 list  invalid pointers             4 list  pointers in progress
     5 i64   first short in progress      6 i32   type: 1 short, 2 long
     7 i64   write pointer                8 list  checkpoints' pointers
     9 i32   visibility: 1 snapshot, 2 snapshot without the current pointer's writes, 3 snapshot, all versions

Fields that are absent, unknown or of another type count as Tephra counts them. Two things differ. Bytes without
an id or a read pointer are no transaction: Tephra would read zeros, and such a reader would see nothing. And a
write pointer that is missing, as in bytes older than checkpoints, is the id.
"""

from __future__ import annotations

from struct import Struct, pack
from typing import TYPE_CHECKING

from protocol.errors import MalformedTransaction
from protocol.transactions.thrift import I32, I64, LIST, STOP, MalformedThrift, Reader
from protocol.transactions.transaction import Transaction, TransactionType, VisibilityLevel

if TYPE_CHECKING:
    from collections.abc import Sequence

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
            _list(3, tx.invalids),
            _list(4, tx.in_progress),
            _MIDDLE.pack(I64, 5, tx.first_short_in_progress, I32, 6, tx.type, I64, 7, tx.write_pointer),
            _list(8, tx.checkpoint_write_pointers),
            _END.pack(I32, 9, tx.visibility_level, STOP),
        )
    )


def _list(field: int, pointers: Sequence[int]) -> bytes:
    return pack(f">BhBi{len(pointers)}q", LIST, field, I64, len(pointers), *pointers)


def decode_transaction(data: bytes) -> Transaction:
    """The transaction these bytes say; what follows it is ignored, as Tephra ignores it. Lists come sorted.

    Raises:
      MalformedTransaction: they are no transaction's; nothing was allocated beyond their own size.
    """
    numbers: dict[int, int] = {}
    lists: dict[int, tuple[int, ...]] = {}
    reader = Reader(data)
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
        raise _malformed(str(error)) from None
    if 1 not in numbers or 2 not in numbers:
        raise _malformed("it has no " + ("id" if 1 not in numbers else "read pointer"))
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


def _malformed(what: str) -> MalformedTransaction:
    return MalformedTransaction(
        f"the transaction does not decode: {what}",
        hint="send the bytes of Tephra's TransactionCodec, or the snapshot that begin answered",
    )
