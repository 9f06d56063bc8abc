"""How a scan is cut into lists: few rows first, then many, and never many MiB at once."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from storage.base import Row

#: Where lists stop growing: longer ones save nothing any more, and a cancelled reader waits for its list.
MAX_CHUNK_ROWS = 1000
#: Bytes of values in a list, unless it is a single row.
MAX_CHUNK_BYTES = 4 << 20
#: How many times as long as the list before the next one may be.
GROWTH = 4


def chunks(rows: Iterator[Row], first_chunk: int) -> Iterator[list[Row]]:
    """``rows`` as lists: ``first_chunk`` rows, then four times as many each, within the bounds above.

    Sizes are counted row by row: how large the next row is, nobody knows before it is read, and an
    average of the earlier ones would let a thousand large rows through after a thousand small ones.
    """
    wanted = max(1, min(first_chunk, MAX_CHUNK_ROWS))
    held: list[Row] = []
    while True:
        chunk = held
        held = []
        size = len(chunk[0][1]) if chunk else 0
        for row in islice(rows, wanted - len(chunk)):
            size += len(row[1])
            if size > MAX_CHUNK_BYTES and chunk:
                held = [row]
                break
            chunk.append(row)
        if not chunk:
            return
        yield chunk
        wanted = min(wanted * GROWTH, MAX_CHUNK_ROWS)
