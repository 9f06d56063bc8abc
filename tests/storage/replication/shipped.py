"""A model of a store, built from the commits that were handed over; and everything that can be written to a store."""

from __future__ import annotations

from plainsong.protocol.effects import Delete, Put, RollBack, Table, put_one
from plainsong.protocol.ids import pack_position
from plainsong.protocol.keys import generation_prefix, stop_after
from plainsong.protocol.names import TopicName
from storage.base import read_rows
from storage.replication.segment import RemovedRange
from tests.storage.contract import MESSAGE, METADATA, NAME, PAYLOAD
from tests.storage.rolling_contract import under
from tests.storage.tiny_volumes import PREFIX, key, message, settled

AFTER_ALL = b"\xff" * 64


def apply(model, commit):
    """Apply a commit of the log to ``{(table, key): value}``."""
    for change in commit.changes:
        if isinstance(change, Put):
            for suffix, value in zip(change.suffixes, change.values, strict=True):
                model[change.table, change.prefix + suffix] = value
        elif isinstance(change, RemovedRange):
            for table, key in list(model):
                if table is change.table and change.start <= key < change.stop:
                    del model[table, key]
        elif change.value is None:
            model.pop((change.table, change.key), None)
        else:
            model[change.table, change.key] = change.value


async def rows_of(store):
    """Return all rows of a store."""
    found = {}
    for table in Table:
        rows = await read_rows(store, table, b"", AFTER_ALL, limit=1_000_000)
        found |= {(table, row_key): value for row_key, value in rows}
    return found


async def write_anything(store, random, at):
    """Make a random change to a store. ``at`` is the number of the next message; return its value after the change."""
    claim, kind = await store.claim(NAME), random.randrange(10)
    if kind < 5 or not at:
        count = random.choice([1, 1, 1, 2, 40])
        values = [random.choice([under(None), under(7), under(9)]) for _ in range(count)]
        rows = Put(MESSAGE, PREFIX, [pack_position(at + n, 0) for n in range(count)], values)
        at += count
        await store.write([rows, put_one(METADATA, b"last", b"%d" % at)], claim=claim)
    elif kind == 5:
        await store.write([put_one(PAYLOAD, PREFIX + b"%08d" % random.randrange(50), b"p" * 50)], claim=claim)
    elif kind == 6:
        await store.discard(MESSAGE, [key(random.randrange(at)) for _ in range(5)])
    elif kind == 7:
        low = random.randrange(at)
        await store.write([RollBack(key(low), key(low + random.randrange(60)), random.choice([7, 9]))], claim=claim)
    elif kind == 8:
        await store.write([Delete(METADATA, [b"last"]), put_one(METADATA, b"k", b"%d" % at)], claim=claim)
    else:
        prefix = generation_prefix(TopicName("shop", f"gone-{random.randrange(5)}"), random.randrange(1 << 20))
        await store.write([message(1, prefix=prefix)], claim=claim)
        await store.drop(MESSAGE, [(prefix, stop_after(prefix))])
    await settled(store)
    if random.random() < 0.1:
        await store.tidy()
    return at
