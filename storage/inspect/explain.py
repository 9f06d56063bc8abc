"""Summarises a stopped store: walks over its rows, filtered, or counted by topic and generation.

It reads everything once, in key order, and keeps only numbers: memory grows with topics and with the invalid list, not
with messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

from plainsong.protocol.effects import Table
from storage.base import StoreError
from storage.inspect.describe import DescribedRow, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from plainsong.protocol.names import TopicName
    from plainsong.protocol.records import Metadata
    from storage.base import Row

#: Sorts after every key: names are ASCII, and system keys begin with 00.
_AFTER_ALL = b"\xff" * 8
#: Unreadable rows shown for each table; all are counted.
MAX_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class RowFilter:
    """The rows to show; None: any. Unreadable rows are shown unless they belong to another topic."""

    namespace: str | None = None
    topic: str | None = None
    generation: int | None = None
    first: bytes | None = None
    """The first position (ten bytes) of messages; compared with the time of payload rows. Other rows have none."""
    stop: bytes | None = None
    """The position before which to stop."""
    tables: frozenset[Table] = frozenset(Table)

    def takes(self, row: DescribedRow) -> bool:
        """True if ``row`` is selected."""
        if row.name is not None and (
            self.namespace not in (None, row.name.namespace) or self.topic not in (None, row.name.topic)
        ):
            return False
        if row.generation is not None and self.generation not in (None, row.generation):
            return False
        if row.kind == "namespace" and self.namespace in (None, row.fields["namespace"]):
            return self.topic is None and self.generation is None
        if row.name is None and not row.problem and (self.namespace, self.topic, self.generation) != (None, None, None):
            return False  # the transaction service's rows belong to no topic
        at = row.position
        if at is None and row.time_ms is not None:
            at = row.key[-10:]
        if at is None:
            return True
        return (self.first is None or at >= self.first) and (self.stop is None or at < self.stop)


class RowSource(Protocol):
    """A store whose rows can be scanned."""

    def scan(self, table: Table, start: bytes, stop: bytes, feed: Callable[[Sequence[Row]], bool]) -> None:
        """Scan in ascending order as ``Store.scan`` does; blocks. Raises StoreError."""
        ...


def walk(rows: RowSource, table: Table, take: Callable[[DescribedRow], bool]) -> str:
    """Pass every row of ``table`` to ``take`` until it returns False. Blocks.

    Returns the store's error if reading failed, else an empty string.
    """

    def feed(chunk: Sequence[Row]) -> bool:
        return all(take(describe(table, key, value)) for key, value in chunk)

    try:
        rows.scan(table, b"", _AFTER_ALL, feed)
    except StoreError as error:
        return error.detail
    return ""


@dataclass(slots=True)
class Pruning:
    """The state of the invalid list, according to the transaction service's rows."""

    authority: str | None = None
    """``transactions.service`` of the last daemon; None if no daemon has run yet."""
    transactions: int = 0
    """Transactions in progress when the daemon stopped."""
    invalid: set[int] = field(default_factory=set)
    """Pointers on the list."""
    safe_bound: int | None = None
    """The list may be pruned up to here, because no row has any of those pointers; None before a complete pass."""
    last_pass_ms: int | None = None
    """Start of the last complete pass."""

    def add(self, row: DescribedRow) -> None:
        """Count a row of the transaction service."""
        fields = row.fields
        if row.kind == "authority":
            self.authority = str(fields["service"])
        elif row.kind == "last-pass":
            self.safe_bound, self.last_pass_ms = _whole(fields["safe_bound"]), _whole(fields["begun_ms"])
        elif row.kind == "transaction":
            self.transactions += fields["state"] == "in_progress"
            listed = fields.get("invalid_pointers", ())
            assert isinstance(listed, list | tuple)
            self.invalid.update(listed)


@dataclass(slots=True)
class GenerationSummary:
    """The rows of one generation of a topic."""

    messages: int = 0
    payload_rows: int = 0
    bytes: int = 0
    """Size of keys and values, before compression."""
    first_ms: int | None = None
    last_ms: int | None = None
    rolled_back: int = 0
    expired: int = 0
    readers: int = 0
    references: int = 0
    """Message rows that refer to stored messages; included in ``messages``."""
    pointers: int = 0
    """Write pointers about which the topic still has a row."""
    oldest_pointer: int | None = None
    """The lowest of these pointers, rolled back or not."""
    stored: int = 0
    """Messages stored under these pointers and not published."""
    staged: int = 0
    """Messages staged by producers and not published."""
    producers: int = 0
    """Producers with a row."""
    invalid: int = 0
    """Messages under a pointer that is on the invalid list, and not rolled back yet."""

    def add(self, row: DescribedRow, metadata: Metadata | None, pruning: Pruning, now_ms: int) -> None:
        """Count a message, payload, reader or pointer row."""
        self.bytes += len(row.key) + len(row.value)
        if row.kind == "reader":
            self.readers += 1
        elif row.kind == "producer":
            self.producers += 1
        elif row.kind == "pointer":
            self._add_pointer(row)
        elif row.kind == "staged":
            self.staged += _whole(row.fields.get("stored", 0))
        elif row.kind == "payload":
            self.payload_rows += 1
        elif row.message is not None and row.kind in ("message", "reference"):
            self.references += row.kind == "reference"
            count = _count_of(row)
            self.messages += count
            self.rolled_back += count if row.fields.get("rolled_back") else 0
            self.invalid += count if row.message.pointer in pruning.invalid else 0
            self.expired += count if _expired(row, metadata, now_ms) else 0
        if row.time_ms is not None:
            self.first_ms = row.time_ms if self.first_ms is None else min(self.first_ms, row.time_ms)
            self.last_ms = row.time_ms if self.last_ms is None else max(self.last_ms, row.time_ms)

    def _add_pointer(self, row: DescribedRow) -> None:
        pointer = row.fields["write_pointer"]
        stored = row.fields.get("stored", 0)
        assert isinstance(pointer, int)
        assert isinstance(stored, int)
        self.pointers += 1
        self.oldest_pointer = pointer if self.oldest_pointer is None else min(self.oldest_pointer, pointer)
        self.stored += stored


@dataclass(slots=True)
class TopicSummary:
    """A topic: its metadata, and its rows by generation."""

    metadata: Metadata | None = None
    """None if there are rows, but no readable metadata row."""
    generations: dict[int, GenerationSummary] = field(default_factory=dict)

    def cleaned(self, generation: int) -> int:
        """Return the number of messages that the janitor would remove, now or after the grace period of a deletion."""
        summary = self.generations[generation]
        if self.metadata is None:
            return 0
        if generation < self.metadata.generation or self.metadata.deleted_ms is not None:
            return summary.messages
        return summary.expired


@dataclass(slots=True)
class TableSummary:
    """A table: counts of its rows and of unparseable ones, and the error that stopped reading."""

    rows: int = 0
    bytes: int = 0
    unparseable: int = 0
    examples: list[DescribedRow] = field(default_factory=list)
    stopped: str = ""
    """The store's error if reading failed; then there are more rows than were counted."""


@dataclass(slots=True)
class Summary:
    """The contents of a store."""

    topics: dict[TopicName, TopicSummary] = field(default_factory=dict)
    tables: dict[Table, TableSummary] = field(default_factory=dict)
    pruning: Pruning = field(default_factory=Pruning)

    @property
    def whole(self) -> bool:
        """True if every row could be read."""
        return not any(table.unparseable or table.stopped for table in self.tables.values())


def explain(looked_at: RowSource, *, now_ms: int) -> Summary:
    """Summarise a store. Blocks, and reads all of it.

    Args:
      now_ms: messages that expire before this time count as expired.
    """
    summary = Summary()
    # Metadata first: it has the messages' time to live, and the invalid pointers.
    for table in Table:
        counted = summary.tables[table] = TableSummary()
        counted.stopped = walk(looked_at, table, partial(_count, summary, counted, now_ms))
    return summary


def _count(summary: Summary, table: TableSummary, now_ms: int, row: DescribedRow) -> bool:
    table.rows += 1
    table.bytes += len(row.key) + len(row.value)
    if row.problem:
        table.unparseable += 1
        if len(table.examples) < MAX_EXAMPLES:
            table.examples.append(row)
    if row.name is None:
        summary.pruning.add(row)
        return True
    topic = summary.topics.setdefault(row.name, TopicSummary())
    if row.metadata is not None:
        topic.metadata = row.metadata
    if row.generation is not None:
        generation = topic.generations.setdefault(row.generation, GenerationSummary())
        if row.kind != "metadata":
            generation.add(row, topic.metadata, summary.pruning, now_ms)
    return True


def _count_of(row: DescribedRow) -> int:
    return _whole(row.fields["messages"]) if row.kind == "reference" else 1


def _whole(value: object) -> int:
    assert isinstance(value, int)  # ensured by describe
    return value


def _expired(row: DescribedRow, metadata: Metadata | None, now_ms: int) -> bool:
    if metadata is None or row.message is None or row.time_ms is None:
        return False
    ttl_ms = metadata.properties.ttl_ms
    if row.message.ttl_s is not None:
        ttl_ms = min(ttl_ms, row.message.ttl_s * 1000)
    return now_ms > row.time_ms + ttl_ms or row.time_ms < metadata.floor_ms
