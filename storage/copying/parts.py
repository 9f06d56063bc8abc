"""What a store is copied by: a topic with all that is known of it, the transaction service, the namespaces, the rest.

Each part has one owner on a store that several instances share, and is compared by itself. Rows of no part but this
copy's own (``progress.py``) are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocol.effects import Table
from protocol.keys import COPYING, NAMESPACE, SERVICE, SYSTEM, metadata_key, stop_after, topic_of, topic_prefix
from protocol.names import TopicName
from protocol.transactions.manager.rows import SERVICE_RANGE
from storage.base import StoreUnusable, read_rows

if TYPE_CHECKING:
    from collections.abc import Collection

    from storage.base import Row, Store

#: What is claimed to write what belongs to no topic, as the daemon does; no topic has an empty namespace.
SERVICE_NAME, NAMESPACES_NAME, OTHERS_NAME = (TopicName("", name) for name in ("transactions", "namespaces", "copying"))
#: Rows that belong to nothing are damage; more of them than this are some other trouble.
MAX_OTHERS = 10_000
_END = b"\xff" * 32


@dataclass(frozen=True, slots=True)
class Span:
    """``[start, stop)`` of a table."""

    table: Table
    start: bytes
    stop: bytes


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that are copied and compared together."""

    label: str
    """For people: ``shop:orders``, ``transaction service``, ``namespaces``, ``rows of no topic``."""
    name: TopicName
    """What is claimed to write them."""
    spans: tuple[Span, ...]
    """In the order in which they are written: what makes a topic exist comes last."""
    is_topic: bool = False


@dataclass(slots=True)
class Contents:
    """What there is in a store."""

    topics: set[bytes] = field(default_factory=set)
    """``ns:topic:`` of those with any row."""
    kinds: set[bytes] = field(default_factory=set)
    """Letters of system rows about topics."""
    others: set[tuple[Table, bytes]] = field(default_factory=set)
    """Rows that belong to nothing known."""

    def take(self, table: Table, key: bytes) -> None:
        """Sort a row in."""
        if table is Table.METADATA and key[:1] == SYSTEM:
            kind, prefix = key[1:2], topic_prefix(key[2:])
            if kind in (COPYING, SERVICE) or (kind == NAMESPACE and key.endswith(b":")):
                return
            if prefix:
                self.topics.add(prefix)
                self.kinds.add(kind)
                return
        elif (prefix := topic_prefix(key)) and (table is not Table.METADATA or key == prefix):
            self.topics.add(prefix)
            return
        self.others.add((table, key))
        if len(self.others) > MAX_OTHERS:
            raise StoreUnusable(f"there are more than {MAX_OTHERS} rows that belong to no topic", hint="is it a store?")


async def contents_of(store: Store) -> Contents:
    """Walk through the keys of the metadata, and from topic to topic through the other tables.

    Where several instances share a store, topics that its metadata say nothing of are not looked for: their rows
    stand in 256 places.

    Raises:
      StoreError, StoreUnusable: it cannot be read.
    """
    found = Contents()

    def take(rows: list[Row]) -> bool:
        for key, _ in rows:
            found.take(Table.METADATA, key)
        return True

    await store.scan(Table.METADATA, b"", _END, take, first_chunk=1000, values=False)
    if not store.traits.shared:
        for table in (Table.PAYLOAD, Table.MESSAGE):
            await _skip_through(store, table, found)
    return found


async def _skip_through(store: Store, table: Table, found: Contents) -> None:
    start = b""
    while rows := await read_rows(store, table, start, _END, limit=1, values=False):
        key = rows[0][0]
        found.take(table, key)
        prefix = topic_prefix(key)
        start = stop_after(prefix) if prefix else key + b"\x00"


def parts_of(contents: Contents, chosen: Collection[TopicName] | None, kinds: Collection[bytes]) -> list[Part]:
    """The parts of a store, or of the ``chosen`` topics in it, with the transaction service and their namespaces.

    Args:
      chosen: None: everything.
      kinds: of system rows, of both stores.
    """
    prefixes = sorted(contents.topics if chosen is None else map(metadata_key, chosen))
    parts = [_topic(prefix, sorted(kinds)) for prefix in prefixes]
    if chosen is None:
        start = SYSTEM + NAMESPACE
        spans: tuple[Span, ...] = (Span(Table.METADATA, start, stop_after(start)),)
    else:
        namespaces = sorted({name.namespace for name in chosen})
        spans = tuple(_row(Table.METADATA, SYSTEM + NAMESPACE + f"{each}:".encode()) for each in namespaces)
    parts.append(Part("namespaces", NAMESPACES_NAME, spans))
    parts.append(Part("transaction service", SERVICE_NAME, (Span(Table.METADATA, *SERVICE_RANGE),)))
    if chosen is None and contents.others:
        spans = tuple(_row(*each) for each in sorted(contents.others))
        parts.append(Part("rows of no topic", OTHERS_NAME, spans))
    return parts


def _topic(prefix: bytes, kinds: list[bytes]) -> Part:
    name, _ = topic_of(prefix)
    stop = stop_after(prefix)
    about = [Span(Table.METADATA, start, stop_after(start)) for kind in kinds for start in [SYSTEM + kind + prefix]]
    rows = [Span(table, prefix, stop) for table in (Table.PAYLOAD, Table.MESSAGE)]
    return Part(str(name), name, (*rows, *about, _row(Table.METADATA, prefix)), is_topic=True)


def _row(table: Table, key: bytes) -> Span:
    return Span(table, key, key + b"\x00")
