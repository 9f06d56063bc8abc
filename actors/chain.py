"""Reads a chained topic for verification: its entries and the messages that they cover, part by part.

A part ends with an entry, or within the stored messages that one row publishes, since their number is unbounded.

Below the last entry only the signs of write pointers change and expired messages disappear, so the rows are read
outside the actor. The actor is asked twice: before the read, for the chain's end; and after the read, for the messages
that have expired.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plainsong.protocol.effects import Table
from plainsong.protocol.errors import GenerationChanged
from plainsong.protocol.ids import NO_PAYLOAD_PART, POSITION_BYTES, ordinal, pack_position, position_at
from plainsong.protocol.keys import DamagedRow
from plainsong.protocol.topic.asks import DescribeChain
from plainsong.protocol.topic.chain import (
    BEGIN,
    COVERING,
    END,
    ChainEntry,
    StoredRow,
    row_of,
)
from storage.base import read_rows
from storage.cleaning import is_message, is_reference, payloads_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actors.directory import Directory
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.topic.asks import ChainView
    from plainsong.protocol.topic.chain import ChainedRow
    from storage.base import Row, Store

#: A part ends with the entry that reaches one of these: entries, or bytes of entries or of messages.
MAX_ENTRIES = 1_000
MAX_BYTES = 1 << 20
#: Counted for a message in addition to its payload, so that short messages fill a part too.
_MESSAGE_BYTES = 64
#: A part names at most this many undecided write pointers.
_MAX_UNDECIDED = 1_000


@dataclass(slots=True)
class ChainPart:
    """Consecutive entries, and the messages up to the last of them."""

    view: ChainView
    """The chain after the rows were read."""
    entries: list[tuple[bytes, bytes]]
    """Position and value."""
    rows: list[ChainedRow | StoredRow]
    """In order of ids: stored messages follow the row that publishes them."""
    next: bytes | None
    """The next part begins after this id; None: this is the last part."""


async def read_part(
    store: Store,
    directory: Directory,
    name: TopicName,
    since: bytes | None,
    limit: int,
    *,
    messages: bool,
    max_bytes: int | None = None,
) -> ChainPart:
    """Return up to ``limit`` entries after the id ``since``, or from the first one stored if it is None.

    If ``since`` is the id of a stored message, the rest of the messages published with it comes first.

    Messages that were published while the topic was not chained have no entry, and are left out.

    Args:
      max_bytes: bytes of entries, or of messages, after which the part ends with an entry; None, or any larger value:
        ``MAX_BYTES``.
    Raises:
      TopicNotFound, NotFound (the topic has no chain), GenerationChanged (during the read), StoreError.
    """
    max_bytes = MAX_BYTES if max_bytes is None else min(max_bytes, MAX_BYTES)
    head = await directory.ask(name, DescribeChain())
    within, since = _split(since)
    # Start with the entry at ``since`` itself, which shows whether the topic was chained after it.
    start = head.entries + (since or bytes(POSITION_BYTES))
    stop = head.entries + head.position + b"\x00"
    entries, is_last = await _read_entries(store, start, stop, limit + 2, max_bytes)
    before = entries.pop(0) if since is not None and entries and entries[0][0] == since else None
    is_last &= len(entries) <= limit
    entries = entries[:limit]
    rows: list[ChainedRow | StoredRow] = []
    cut: bytes | None = None
    if messages and entries:
        reading = _Reading(head, entries, max_bytes)
        if since is None:
            await reading.look_before(store)
        if within is not None:
            await reading.read_rest(store, within)
        for low, high in _covered(entries, before, since):
            # The row that publishes the rest was in the previous part: continue after it.
            await reading.read(store, low if within is None else max(low, within[:POSITION_BYTES] + b"\x00"), high)
            if reading.is_full:
                break
        upto, cut = reading.upto, reading.cut
        is_last &= upto == entries[-1][0] and cut is None
        entries = [each for each in entries if each[0] <= upto and (cut is None or each[0] < cut[:POSITION_BYTES])]
        rows = reading.rows
    view = await directory.ask(name, DescribeChain(_MAX_UNDECIDED))
    if view.generation != head.generation:
        raise GenerationChanged(f"topic {name} has generation {view.generation} now", hint="verify that generation")
    behind = cut if cut is not None else entries[-1][0] + NO_PAYLOAD_PART if entries else None
    return ChainPart(view, entries, rows, None if is_last else behind)


def _split(since: bytes | None) -> tuple[bytes | None, bytes | None]:
    """Return ``since`` if it is the id of a stored message, else None; and the position after which to read entries."""
    if since is None or since.endswith(NO_PAYLOAD_PART):
        return None, None if since is None else since[:POSITION_BYTES]
    return since, position_at(max(ordinal(since[:POSITION_BYTES]) - 1, 0))


async def _read_entries(
    store: Store, start: bytes, stop: bytes, limit: int, max_bytes: int
) -> tuple[list[tuple[bytes, bytes]], bool]:
    """Return entries from ``start`` on, and True if no more follow.

    Returns at least two, if there are two, since the first may have been in the previous part.

    Entries can be large: they have a digest for each distinct time to live of their messages.
    """
    entries: list[tuple[bytes, bytes]] = []
    size, all_read = 0, True

    def take(found: Sequence[Row]) -> bool:
        nonlocal size, all_read
        for key, value in found:
            if len(entries) >= limit or (size > max_bytes and len(entries) > 1):
                all_read = False
                return False
            entries.append((key[-POSITION_BYTES:], value))
            size += len(value)
        return True

    await store.scan(Table.PAYLOAD, start, stop, take)
    return entries, all_read


class _Reading:
    """Reads the messages that some entries cover, up to the entry at which a part is full."""

    def __init__(self, head: ChainView, entries: list[tuple[bytes, bytes]], max_bytes: int) -> None:
        self._prefix = head.prefix
        self._oldest_ms = head.oldest_ms
        self._positions = [position for position, _ in entries]
        self._first = entries[0]
        self._bytes = 0
        self._max_bytes = max_bytes
        self.upto = self._positions[-1]
        self.rows: list[ChainedRow | StoredRow] = []
        self.is_full = False
        self.cut: bytes | None = None
        """The id of the last message, if the part became full within the stored messages of one row."""

    async def look_before(self, store: Store) -> None:
        """Take one message that precedes the first entry, if there is one: its own entry was removed."""
        entry = _decoded(*self._first)
        if entry is None or entry.kind == BEGIN:
            return
        stop = entry.first if entry.kind in COVERING else entry.position
        low = self._prefix + pack_position(self._oldest_ms, 0)
        for key, value in await read_rows(store, Table.MESSAGE, low, self._prefix + stop, limit=1):
            self.rows.append(row_of(key[-POSITION_BYTES:], value))

    async def read(self, store: Store, low: bytes, high: bytes) -> None:
        """Take the messages of ``[low, high]``; stored ones follow the row that publishes them."""
        start, stop = self._prefix + low, self._prefix + high + b"\x00"
        reference: Row | None = None

        def take(found: Sequence[Row]) -> bool:
            nonlocal reference
            for key, value in found:
                position = key[-POSITION_BYTES:]
                if position > self.upto:
                    self.is_full = True
                    return False
                self.rows.append(row_of(position, value))
                self._count(position, value)
                if is_reference((key, value)) and is_message((key, value)):
                    reference = key, value
                    return False
            return True

        while not self.is_full:
            await store.scan(Table.MESSAGE, start, stop, take)
            if reference is None:
                break
            start, published, reference = reference[0] + b"\x00", reference, None
            await self._read_stored(store, published, *payloads_of(published))
        self.is_full |= high >= self.upto != self._positions[-1]

    async def read_rest(self, store: Store, behind: bytes) -> None:
        """Take the rest of the messages that were published together with the stored message ``behind``."""
        key = self._prefix + behind[:POSITION_BYTES]
        value = await store.get(Table.MESSAGE, key)
        if value is not None and is_reference((key, value)) and is_message((key, value)):
            start, stop = payloads_of((key, value))
            rest = start[:-POSITION_BYTES] + behind[POSITION_BYTES:] + b"\x00"
            await self._read_stored(store, (key, value), max(start, rest), stop)

    async def _read_stored(self, store: Store, published: Row, start: bytes, stop: bytes) -> None:
        """Take the payload rows of a range, which the row ``published`` refers to."""
        position = published[0][-POSITION_BYTES:]

        def take(found: Sequence[Row]) -> bool:
            for key, value in found:
                last = self.rows[-1] if self.rows else None
                if self._bytes > self._max_bytes and isinstance(last, StoredRow):
                    self.is_full, self.cut = True, last.id
                    return False
                self.rows.append(StoredRow(position + key[-POSITION_BYTES:], value))
                self._count(position, value)
            return True

        await store.scan(Table.PAYLOAD, start, stop, take)

    def _count(self, position: bytes, value: bytes) -> None:
        """Count a row; once the part is full, reading ends with the entry that covers this row."""
        self._bytes += len(value) + _MESSAGE_BYTES
        if self._bytes > self._max_bytes:
            self.upto = min(self.upto, self._positions[bisect_left(self._positions, position)])


def _covered(
    entries: list[tuple[bytes, bytes]], before: tuple[bytes, bytes] | None, since: bytes | None
) -> list[tuple[bytes, bytes]]:
    """Return the ranges ``[first, last]`` of positions that may have chained messages, up to the last entry."""
    previous = None if before is None else _decoded(*before)
    stretches: list[tuple[bytes, bytes]] = []
    low = None if since is None or (previous is not None and previous.kind == END) else since + b"\x00"
    for position, value in entries:
        entry = _decoded(position, value)
        if entry is not None and entry.kind == BEGIN and (previous is None or previous.kind == END):
            low = position
        elif low is None:
            low = entry.first if entry is not None and entry.kind in COVERING else position
        if entry is not None and entry.kind == END:
            stretches.append((low, position))
            low = None
        previous = entry
    if low is not None:
        stretches.append((low, entries[-1][0]))
    return stretches


def _decoded(position: bytes, value: bytes) -> ChainEntry | None:
    """Decode an entry; None if it is damaged, which the verifier reports."""
    try:
        return ChainEntry.decode(position, value)
    except DamagedRow:
        return None
