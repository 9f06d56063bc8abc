"""What a rollback makes of a row: the same bytes with the sign of the write pointer turned, for every store alike."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from protocol.rows import HAS_POINTER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from storage.base import Row

_I64 = struct.Struct(">q")
_AFTER_POINTER = 1 + _I64.size


def rolled_back(rows: Iterable[Row], pointer: int) -> Iterator[Row]:
    """Those of ``rows`` that carry ``pointer``, rolled back; others and those already rolled back are left out.

    Rows are told by their first nine bytes alone: also one that cannot be read otherwise must not become visible.

    Raises:
      ValueError: ``pointer`` is not above 0.
    """
    if pointer <= 0:
        raise ValueError(f"write pointer {pointer} cannot be rolled back")
    wanted, turned = _I64.pack(pointer), _I64.pack(-pointer)
    for key, value in rows:
        if value[1:_AFTER_POINTER] == wanted and value[0] & HAS_POINTER:
            yield key, value[:1] + turned + value[_AFTER_POINTER:]
