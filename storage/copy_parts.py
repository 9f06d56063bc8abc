"""The parts of a copy between stores, their figures and digests, and the rows that record its progress.

A part is a topic with all rows about it, the transaction service, the namespaces, or the rest. On a store that several
instances share, each part has one owner. Parts are compared one by one. The rows about the copy's progress belong to no
part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from struct import Struct
from typing import TYPE_CHECKING, Any

from plainsong.protocol.effects import Table
from plainsong.protocol.keys import (
    COPYING,
    NAMESPACE,
    POINTER,
    SERVICE,
    SYSTEM,
    DamagedRow,
    metadata_key,
    parse_pointer_key,
    parse_system_key,
    stop_after,
    system_key,
    topic_of,
    topic_prefix,
)
from plainsong.protocol.names import TopicName
from plainsong.protocol.records import pack_record, unpack_record
from plainsong.protocol.rows import HAS_POINTER, decode_row
from plainsong.protocol.transactions.ledger_rows import SERVICE_RANGE
from storage.base import NAMESPACES_NAME, SERVICE_NAME, StoreUnusable, read_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from storage.base import Row, Store

#: The name to claim for the rows that remain; no topic has an empty namespace.
OTHERS_NAME = TopicName("", "copying")
#: Rows that belong to nothing known are damage; more of them than this mean a different problem.
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
    """Name for display: ``shop:orders``, ``transaction service``, ``namespaces``, ``rows of no topic``."""
    name: TopicName
    """The name to claim before writing them."""
    spans: tuple[Span, ...]
    """In writing order: the row that makes a topic exist comes last."""
    is_topic: bool = False


@dataclass(slots=True)
class Contents:
    """The contents of a store by topics and kinds of rows."""

    topics: set[bytes] = field(default_factory=set)
    """``ns:topic:`` of each topic that has any row."""
    kinds: set[bytes] = field(default_factory=set)
    """Kind bytes of system rows about topics."""
    others: set[tuple[Table, bytes]] = field(default_factory=set)
    """Rows that belong to nothing known."""

    def take(self, table: Table, key: bytes) -> None:
        """Add a row."""
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
            raise StoreUnusable(
                f"there are more than {MAX_OTHERS} rows that belong to no topic",
                hint=("check that it is a Plainsong store"),
            )


async def contents_of(store: Store) -> Contents:
    """Read the keys of the metadata, and skip from topic to topic through the other tables.

    On a store that several instances share, topics without metadata are not found: their rows are spread across 256
    places.

    Raises:
      StoreError, StoreUnusable: it cannot be read.
    """
    found = Contents()

    def take(rows: Sequence[Row]) -> bool:
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
    """Return a store's parts, or the ``chosen`` topics with the transaction service and their namespaces.

    Args:
      chosen: None: everything.
      kinds: kinds of system rows on both stores.
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


# --- survey: figures of a part, and a digest to compare with another store ------------------------


_LENGTHS = Struct(">BII")
_DIGEST_BYTES = 16


@dataclass(slots=True)
class Figures:
    """The figures of a part. Two parts are the same if their digests are."""

    rows: int = 0
    size: int = 0
    """Bytes of keys and values."""
    digest: str = ""
    """Digest of all rows in order, in hex."""
    largest_bytes: int = 0
    largest: tuple[Table, bytes] | None = None
    """The row with the largest value."""
    transactional: int = 0
    """Rows under write pointers, which a transaction service decides."""


async def survey(store: Store, part: Part, on_rows: Callable[[int], None] = lambda rows: None) -> Figures:
    """Read a part from start to end.

    Args:
      on_rows: called with the number of rows just read, possibly from other threads.
    Raises:
      StoreError: it could not be read.
    """
    found = Figures()
    hashed = blake2b(digest_size=_DIGEST_BYTES)
    for span in sorted(part.spans, key=lambda span: (span.table, span.start)):

        def take(rows: Sequence[Row], span: Span = span) -> bool:
            for row in rows:
                _count(found, span.table, row)
                hashed.update(_LENGTHS.pack(span.table, len(row[0]), len(row[1])) + row[0] + row[1])
            on_rows(len(rows))
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


# --- progress: rows in the target, so that an interrupted copy continues --------------------------
#
#     00 'c'                    the copy       f from  t topics (none: all)  x with the transaction
#                               service  s state  b begun (ms)  e ended (ms)
#     00 'c' standby             the place of a standby in the log that it follows
#     00 'c' ns:topic: 0        of a topic     t table  k the last key that was copied; d: it is complete
#
# A topic's row is in the same commit as the rows that it covers. The rows of topics are removed once everything was
# compared. The copy's row stays, so that a daemon refuses an incomplete store, and a second run of the same copy can
# tell that it is done.


COPY_KEY = SYSTEM + COPYING
#: States of a copy: rows are being written; all are written and compared; tidied up as well.
WRITING, COMPARED, DONE = "writing", "compared", "done"


#: Prefix of the origin of a restored store; its backup's id follows.
BACKUP_ORIGIN = "backup "


@dataclass(frozen=True, slots=True)
class CopyRow:
    """The target's row about the copy."""

    origin: str
    """The source's name as given."""
    topics: tuple[str, ...] | None
    """The chosen topics; None: all."""
    service: bool = True
    """True if the transaction service is copied. False if topics were chosen and the target has its own."""
    state: str = WRITING
    begun_ms: int = 0
    ended_ms: int = 0
    audited: bool = False
    """True if a daemon's audit has a record of it."""

    def is_same(self, other: CopyRow) -> bool:
        """True if it is the same copy, whatever its progress."""
        return (self.origin, self.topics) == (other.origin, other.topics)

    def encode(self) -> bytes:
        """Encode the row's value."""
        fields: dict[str, Any] = {"f": self.origin, "x": self.service, "s": self.state}
        fields |= {"b": self.begun_ms, "e": self.ended_ms, **({"a": True} if self.audited else {})}
        return pack_record(fields if self.topics is None else {**fields, "t": list(self.topics)})

    @classmethod
    def decode(cls, value: bytes) -> CopyRow:
        """Decode the row's value. Raises DamagedRow."""
        fields = unpack_record(value, "copy")
        try:
            topics = fields.get("t")
            chosen = None if topics is None else tuple(topics)
            times = int(fields["b"]), int(fields["e"])
            return cls(
                str(fields["f"]), chosen, bool(fields["x"]), str(fields["s"]), *times, audited=bool(fields.get("a"))
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedRow(f"a row of an earlier copy is incomplete: {error!r}") from error


@dataclass(frozen=True, slots=True)
class TopicRow:
    """Progress of a topic: copied up to ``key`` of ``table``, after all earlier tables."""

    table: Table = Table.PAYLOAD
    key: bytes = b""
    complete: bool = False

    def encode(self) -> bytes:
        """Encode the row's value."""
        return pack_record({"t": int(self.table), "k": self.key, **({"d": 1} if self.complete else {})})

    @classmethod
    def decode(cls, value: bytes) -> TopicRow:
        """Decode the row's value. Raises DamagedRow."""
        fields = unpack_record(value, "copied topic")
        try:
            return cls(Table(fields["t"]), bytes(fields["k"]), bool(fields.get("d")))
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedRow(f"the row of a copied topic is incomplete: {error!r}") from error


def topic_key(name: TopicName) -> bytes:
    """Return the key of a topic's row. On HBase the topic's head governs it."""
    return system_key(COPYING, name, 0)


def is_copying_key(key: bytes) -> bool:
    """True if a row of the metadata table is about a copy."""
    return key.startswith(COPY_KEY)


def copying_fields(key: bytes, value: bytes) -> dict[str, object]:
    """Return the fields of such a row, ready for JSON. Raises DamagedRow."""
    if key in (COPY_KEY + b"standby", COPY_KEY + b"settled"):
        return {key[len(COPY_KEY) :].decode(): value.decode("utf-8", "replace")}
    if key == COPY_KEY:
        row = CopyRow.decode(value)
        times = {"begun_ms": row.begun_ms, "ended_ms": row.ended_ms or None}
        topics = None if row.topics is None else list(row.topics)
        return {"from": row.origin, "topics": topics, "service": row.service, "state": row.state, **times}
    name, topic = parse_system_key(key).name, TopicRow.decode(value)
    return {"topic": str(name), "table": topic.table.name.lower(), "up_to": topic.key.hex(), "complete": topic.complete}


async def copy_row(store: Store) -> CopyRow | None:
    """Return the row about a copy into the store, None if there is none. Raises StoreError, DamagedRow."""
    value = await store.get(Table.METADATA, COPY_KEY)
    return None if value is None else CopyRow.decode(value)


async def topic_row(store: Store, name: TopicName) -> TopicRow | None:
    """Return the progress of a topic; None if it was not begun. Raises StoreError, DamagedRow."""
    value = await store.get(Table.METADATA, topic_key(name))
    return None if value is None else TopicRow.decode(value)


async def refuse_unfinished(store: Store) -> None:
    """Check, before a daemon serves, that no copy into the store is unfinished. Raises StoreUnusable."""
    row = await copy_row(store)
    if row is not None and row.state == WRITING:
        raise StoreUnusable(
            f"a copy of {row.origin} into this store is not complete",
            hint="run the same `plainsong copy` again: it continues where it stopped",
        )
