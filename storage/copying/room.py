"""Whether a target can take what is to be copied: nothing too large, and nothing there that it would mix with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.effects import Table
from protocol.keys import NAMESPACE, SYSTEM, metadata_key
from protocol.transactions.manager.rows import AUTHORITY, SERVICE_RANGE, service_key
from storage.base import StoreUnusable, read_rows
from storage.copying.parts import NAMESPACES_NAME, Part, contents_of
from storage.describe import describe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from storage.base import Store
    from storage.copying.surveying import Figures

#: What an error names of many.
MAX_NAMED = 5
#: There are not as many.
_MAX_NAMESPACES = 100_000
_AUTHORITY_KEY = service_key(AUTHORITY)


def refuse_rows_too_large(found: Mapping[Part, Figures], max_row_bytes: int | None) -> None:
    """Raise StoreUnusable for the largest row that the target cannot hold."""
    if max_row_bytes is None:
        return
    part, most = max(found.items(), key=lambda each: each[1].largest_bytes)
    if most.largest is not None and most.largest_bytes > max_row_bytes:
        table, key = most.largest
        row = describe(table, key, b"")
        where = row.fields.get("id") or key.hex()
        raise StoreUnusable(
            f"{part.label}: row {where} of the {table.name.lower()} table has {most.largest_bytes} bytes, and the "
            f"target takes at most {max_row_bytes}",
            hint="raise storage.hbase.max_cell_bytes, and hbase.client.keyvalue.maxsize with it",
        )


async def refuse_without_room(source: Store, target: Store, found: Mapping[Part, Figures]) -> None:
    """Raise StoreUnusable when the target has any of what is to come."""
    there = await contents_of(target)
    taken = [part.label for part in found if part.is_topic and metadata_key(part.name) in there.topics]
    if taken:
        shown = ", ".join(taken[:MAX_NAMED]) + (f" and {len(taken) - MAX_NAMED} more" if len(taken) > MAX_NAMED else "")
        raise StoreUnusable(
            f"the target has topics of the same names: {shown}",
            hint="name an empty target: another directory, or another prefix of tables",
        )
    for part in found:
        if part.name == NAMESPACES_NAME:
            await _refuse_other_namespaces(source, target, part)
    if await has_service(target):
        _refuse_other_service(found)


async def has_service(store: Store) -> bool:
    """Whether transactions have begun here; that somebody was chosen to decide about them is nothing yet."""
    rows = await read_rows(store, Table.METADATA, *SERVICE_RANGE, limit=2, values=False)
    return any(key != _AUTHORITY_KEY for key, _ in rows)


async def _refuse_other_namespaces(source: Store, target: Store, part: Part) -> None:
    for span in part.spans:
        for key, value in await read_rows(target, span.table, span.start, span.stop, limit=_MAX_NAMESPACES):
            if await source.get(span.table, key) != value:
                name = key.removeprefix(SYSTEM + NAMESPACE).decode("ascii", "replace").rstrip(":")
                raise StoreUnusable(
                    f"namespace {name} has other properties in the target", hint="set them alike on both sides"
                )


def _refuse_other_service(found: Mapping[Part, Figures]) -> None:
    """A transaction service has a state of its own: messages of another one's transactions would mean nothing to it."""
    told = [part.label for part, figures in found.items() if part.is_topic and figures.transactional]
    if told:
        raise StoreUnusable(
            f"the target has a transaction service of its own, and {told[0]} has messages of transactions that it "
            "does not know",
            hint="name an empty target, or wait until those messages have expired",
        )
