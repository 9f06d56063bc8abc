"""A part of a store looked at: how many rows, the largest of them, and a digest that another store's can be compared with."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct
from typing import TYPE_CHECKING

from protocol.effects import Table
from protocol.keys import POINTER, SYSTEM, DamagedRow, parse_pointer_key
from protocol.rows import HAS_POINTER, decode_row

if TYPE_CHECKING:
    from collections.abc import Callable

    from storage.base import Row, Store
    from storage.copying.parts import Part, Span

_LENGTHS = Struct(">BII")
_DIGEST_BYTES = 16


@dataclass(slots=True)
class Figures:
    """What a part has. Two parts are the same when their ``digest`` is."""

    rows: int = 0
    size: int = 0
    """Bytes of keys and values."""
    digest: str = ""
    """Of all rows in their order, in hex."""
    largest_bytes: int = 0
    largest: tuple[Table, bytes] | None = None
    """The row with the largest value."""
    transactional: int = 0
    """Rows of write pointers, about which a transaction service decides."""


async def survey(store: Store, part: Part, tell: Callable[[int], None] = lambda rows: None) -> Figures:
    """Read a part from end to end.

    Args:
      tell: how many more rows were read; called from other threads.
    Raises:
      StoreError: it could not be read.
    """
    found = Figures()
    hashed = blake2b(digest_size=_DIGEST_BYTES)
    for span in sorted(part.spans, key=lambda span: (span.table, span.start)):

        def take(rows: list[Row], span: Span = span) -> bool:
            for row in rows:
                _count(found, span.table, row)
                hashed.update(_LENGTHS.pack(span.table, len(row[0]), len(row[1])) + row[0] + row[1])
            tell(len(rows))
            return True

        await store.scan(span.table, span.start, span.stop, take, first_chunk=1000)
    found.digest = hashed.hexdigest()
    return found


def _count(found: Figures, table: Table, row: Row) -> None:
    key, value = row
    found.rows += 1
    found.size += len(key) + len(value)
    if len(value) > found.largest_bytes:
        found.largest_bytes, found.largest = len(value), (table, key)
    if _is_transactional(table, key, value):
        found.transactional += 1


def _is_transactional(table: Table, key: bytes, value: bytes) -> bool:
    try:
        if table is Table.METADATA:
            return key.startswith(SYSTEM + POINTER) and parse_pointer_key(key)[2] > 0
        if table is Table.MESSAGE and value and value[0] & HAS_POINTER:
            return (decode_row(value).pointer or 0) > 0
    except DamagedRow:
        pass
    return False
