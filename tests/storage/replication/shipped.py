"""A model of a store, built from the commits that were handed over."""

from __future__ import annotations

from plainsong.protocol.effects import Put, Table
from storage.base import read_rows
from storage.replication.segment import RemovedRange

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
        for key, value in await read_rows(store, table, b"", AFTER_ALL, limit=1_000_000):
            found[table, key] = value
    return found
