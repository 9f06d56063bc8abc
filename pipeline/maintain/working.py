"""One part of a plan carried out, in a task of Spark: by the janitor's own rules, beside the topic's living owner.

What is removed nobody can see, in any owner's eyes, for as long as the generation lives and after; so it needs no
claim, may be done twice, by two at once, or half. It runs where Spark runs it, so it knows nothing but its arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import trio

from pipeline.maintain.place import Place, count_rows
from protocol.effects import RollBack, Table
from storage.cleaning import Sweep, is_message, is_payload
from storage.hbase.cells import Slots
from storage.hbase.commit import RowRemover
from storage.hbase.owners import Owners
from storage.hbase.tables import Tables

if TYPE_CHECKING:
    from pipeline.maintain.ranges import KeyRange

#: Rows of a step: as many as HBase's rows have of ours, so that these go whole.
STEP_ROWS = 10_000


class Worked(NamedTuple):
    """What became of a part."""

    topic: str
    why: str
    table: str
    removed: int
    """Rows of the store that went, payloads of expired messages included."""
    before: int
    """HBase's rows in the range, before and after."""
    after: int


def work(place: Place, topic: str, part: KeyRange) -> Worked:
    """Carry a part out, from wherever an earlier attempt has come to. Raises StoreError: run it again."""
    return trio.run(_work, place, topic, part)


async def _work(place: Place, topic: str, part: KeyRange) -> Worked:
    before = await count_rows(place, [part])
    removed = 0
    if before and part.why == "invalid":
        await _roll_back(place, part)
    elif before:
        async with await place.store() as store:
            sweep = Sweep(store, STEP_ROWS, breath=0.0)
            if part.why == "expired":
                removed = await sweep.remove_messages(part.start, part.stop)
            else:
                is_ours = is_message if part.table is Table.MESSAGE else is_payload
                removed = await sweep.remove(part.table, part.start, part.stop, is_ours)
    after = await count_rows(place, [part])
    return Worked(topic, part.why, part.table.name.lower(), removed, before, after)


async def _roll_back(place: Place, part: KeyRange) -> None:
    """Turn the pointers' signs, for good: an invalid transaction never becomes another one.

    The topic does the same in its turn, and finds it done: only that tells the list of invalid transactions.
    """
    tables = Tables(place.table_prefix)
    async with place.pool() as pool:
        owners = Owners(pool, tables, Slots(pool, tables[Table.METADATA]))
        removing = RowRemover(pool, tables, owners, timeout_s=place.timeout_s)
        for pointer in part.pointers:
            await removing.roll_back(RollBack(part.start, part.stop, pointer))
