"""One step of a topic: the rows to write, and the answers to give once these are durable.

    operations   first, in this order, as one commit
    answers      after the commit, never before
    looks        also after the commit, with the new watermark

If the commit fails, the actor crashes, and requests that may have happened get OutcomeUnknown instead of these answers.

Message rows are collected in a ``RowBatch``, the hot path of publishing: each message costs one key suffix and one
value here, and many are put into wire form at once. Any other work per message is visible in the throughput of large
requests, which take about 0.1 µs per message.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from itertools import accumulate
from typing import TYPE_CHECKING

from plainsong.protocol.effects import Put, Table
from plainsong.protocol.ids import NO_PAYLOAD_PART, POSITION_BYTES, SEQUENCES_PER_MS, after, ordinal, pack_position
from plainsong.protocol.page import ITEM_HEAD_BYTES, ITEM_START, cut_rows, length_prefix
from plainsong.protocol.rows import (
    PLAIN_GAP,
    PLAIN_HEAD,
    PLAIN_OVERHEAD_BYTES,
    plain_wire,
)
from plainsong.protocol.topic.chain import MAX_BYTES, MAX_ROWS, record_of_wire
from plainsong.protocol.topic.row_extras import NO_EXTRAS

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from plainsong.protocol.effects import Operation
    from plainsong.protocol.errors import PlainsongError
    from plainsong.protocol.topic.asks import Look
    from plainsong.protocol.topic.chain import Chain
    from plainsong.protocol.topic.producer_state import Producer
    from plainsong.protocol.topic.row_extras import RowExtras
    from plainsong.protocol.topic.state import Run

#: Every sequence id as two bytes: packing them one by one took a third of the time of ``RowBatch.add``.
_SEQUENCE_BYTES = [sequence_id.to_bytes(2, "big") for sequence_id in range(SEQUENCES_PER_MS)]
#: From this many messages on, the scan cache gets a commit's messages as one ``bytes``.
MANY_ROWS = 256
#: Messages of equal length, up to this one, are put into wire form before their commit. For longer ones copying is most
#: of the work, and the wire form would take memory during the commit.
MAX_CUT_BYTES = 1 << 10


class Step:
    """The result of one step, in the order in which it must be carried out."""

    __slots__ = (
        "_links",
        "_payloads",
        "_prefix",
        "_row_batch",
        "answers",
        "dropped",
        "frees_readers",
        "looks",
        "messages",
        "open_entry",
        "operations",
        "pointers",
        "producer_outcomes",
        "producers",
        "renewed",
        "rolled_back",
        "row_batches",
        "since",
    )

    def __init__(self, since: bytes) -> None:
        #: From this bound on, the topic has only the messages of this commit.
        self.since = since
        self.operations: list[Operation] = []
        self.answers: list[tuple[Hashable, object | PlainsongError]] = []
        self.looks: list[tuple[Hashable, Look]] = []
        #: Messages of the commit in wire form, for the scan cache, with their generation's key prefix.
        self.row_batches: list[tuple[bytes, RowBatch]] = []
        #: The topic was created, deleted or restored: everything cached before is stale.
        self.renewed = False
        #: Readers that wait at an undecided message may continue: the topic was replaced, or has fewer messages.
        self.frees_readers = False
        #: Write pointers that this commit writes rows under, or about.
        self.pointers: set[int] = set()
        #: Ranges that it rolls back: pointer, first and last position (10 bytes each), inclusive.
        self.rolled_back: list[tuple[int, bytes, bytes]] = []
        #: The number of messages that it publishes.
        self.messages = 0
        #: Write pointers whose pointer rows it removes.
        self.dropped: list[int] = []
        #: Producers whose messages it publishes.
        self.producers: list[Producer] = []
        #: Outcomes of producers' requests and of producers, for metrics: ``duplicate``, ``partial``, ``unremembered``;
        #: ``expired``, ``evicted``, ``removed``.
        self.producer_outcomes: defaultdict[str, int] = defaultdict(int)
        #: The entry of the topic's chain that covers the last message rows, while more rows may be added to it.
        self.open_entry: OpenEntry | None = None
        self._payloads: list[Put] = []
        self._links: Put | None = None
        self._row_batch: RowBatch | None = None
        self._prefix = b""

    def row_batch(self, prefix: bytes) -> RowBatch:
        """Return the batch for message rows of one generation."""
        if self._row_batch is None or self._prefix != prefix:
            self.flush()
            self._row_batch, self._prefix = RowBatch(), prefix
        return self._row_batch

    def add_reference(self, prefix: bytes, suffix: bytes, value: bytes) -> None:
        """Add a message row of a generation whose messages are in the payload table."""
        self.write_entry()
        self.row_batch(prefix).add_reference(suffix, value)

    def add_payloads(self, payloads: Put) -> None:
        """Add rows of the payload table; they are written before the message rows that refer to them."""
        self._payloads.append(payloads)

    def add_link(self, prefix: bytes, suffix: bytes, value: bytes) -> None:
        """Add an entry of the topic's chain, to be written after the message rows that were added before."""
        links = self._links
        if links is None or links.prefix != prefix:
            self._links = Put(Table.PAYLOAD, prefix, [suffix], [value])
            if links is not None:
                self.operations.append(links)
            return
        links.suffixes.append(suffix)  # type: ignore[attr-defined]  # lists, as made above
        links.values.append(value)  # type: ignore[attr-defined]

    def write_entry(self) -> None:
        """Add the open entry of the topic's chain, if there is one; later rows are not covered by it."""
        if self.open_entry is not None:
            entry, self.open_entry = self.open_entry, None
            self.add_link(entry.prefix, *entry.row())

    def flush(self) -> None:
        if self.open_entry is not None:
            self.write_entry()
        self.operations += self._payloads
        self._payloads.clear()
        if self._row_batch is not None and len(self._row_batch):
            batch = self._row_batch
            size, may_expire = batch.value_bytes, batch.may_expire
            self.operations.append(Put(Table.MESSAGE, self._prefix, batch.suffixes, batch.values, size, may_expire))
            self.row_batches.append((self._prefix, batch))
        self._row_batch = None
        if self._links is not None:
            self.operations.append(self._links)
            self._links = None

    def write(self, operation: Operation) -> None:
        """Add an operation after all rows collected so far."""
        self.flush()
        self.operations.append(operation)


# --- the message rows of a step ---------------------------------------------------------------------


class RowBatch:
    """The message rows of one commit, in key order, and the same messages in wire form.

    The wire form of a message (id, length, payload) does not depend on the form of its row. So the bytes after its
    position are stored in two columns, which a commit joins at once. For plain rows these would be the gap and the
    value, and are not stored before the first row that is not plain.
    """

    __slots__ = (
        "_begin",
        "_joined",
        "_lengths",
        "_middles",
        "_tails",
        "_wires",
        "attributes",
        "expiries",
        "may_expire",
        "pointers",
        "restart",
        "suffixes",
        "value_bytes",
        "values",
    )

    def __init__(self) -> None:
        self.suffixes: list[bytes] = []
        self.values: list[bytes] = []
        #: The total bytes of all values.
        self.value_bytes = 0
        #: The row of the first item, after the last reference row.
        self._begin = 0
        #: The bytes after each item's position in wire form, in two parts; None if all rows are plain.
        self._middles: list[bytes] | None = None
        self._tails: list[bytes] = []
        #: Wire forms that were made when requests were added, and their number of items.
        self._wires: list[bytes] = []
        self._joined = 0
        #: The distinct lengths of the items' messages.
        self._lengths: set[int] = set()
        #: Index of an item → end of its own time to live (ms), for items that have one.
        self.expiries: dict[int, int] = {}
        #: True if any row may have its own time to live, including those before the last reference row.
        self.may_expire = False
        #: Index of an item → its attributes, for items that have any.
        self.attributes: dict[int, Mapping[str, str]] = {}
        #: Runs of items under a write pointer: index of the first, index after the last, pointer; ascending.
        self.pointers: list[tuple[int, int, int]] = []
        #: The bound after the last reference row, where the items begin.
        self.restart: bytes | None = None

    def __len__(self) -> int:
        return len(self.suffixes)

    @property
    def item_count(self) -> int:
        """The number of messages after the last reference row."""
        return len(self.suffixes) - self._begin

    @property
    def last_id(self) -> bytes:
        """The id of the last item."""
        return self.suffixes[-1] + NO_PAYLOAD_PART

    @property
    def items(self) -> list[bytes]:
        """The messages in wire form, one by one."""
        return self.items_from(0)

    def items_from(self, row: int) -> list[bytes]:
        """Return the items of the rows from index ``row`` on."""
        row = max(row, self._begin)
        suffixes = self.suffixes[row:] if row else self.suffixes
        if self._middles is None:
            values = self.values[row:] if row else self.values
            return [ITEM_START + suffix + PLAIN_GAP + value for suffix, value in zip(suffixes, values, strict=True)]
        at = row - self._begin
        middles, tails = (self._middles[at:], self._tails[at:]) if at else (self._middles, self._tails)
        return [
            ITEM_START + suffix + middle + tail for suffix, middle, tail in zip(suffixes, middles, tails, strict=True)
        ]

    def wire(self) -> tuple[bytes, array[int] | range]:
        """Return the wire form of all items, and the offset of each item followed by the total length.

        For messages of equal length the offsets are a range.
        """
        wire = self.wire_of(self._begin, len(self.suffixes))
        if len(self._lengths) == 1:
            (length,) = self._lengths
            return wire, range(0, len(wire) + 1, ITEM_HEAD_BYTES + len(length_prefix(length)) + length)
        if self._middles is None:
            each = [PLAIN_OVERHEAD_BYTES + len(value) for value in self.values[self._begin :]]
        else:
            beside = len(ITEM_START) + POSITION_BYTES
            each = [beside + len(middle) + len(tail) for middle, tail in zip(self._middles, self._tails, strict=True)]
        return wire, array("Q", accumulate(each, initial=0))

    def wire_of(self, first: int, stop: int) -> bytes:
        """Return the wire form of the messages of rows ``first`` to ``stop``, all after the last reference row."""
        if self._joined == self.item_count == stop - first:
            return b"".join(self._wires)
        suffixes = self.suffixes[first:stop]
        if self._middles is None:
            return plain_wire(suffixes, self.values[first:stop])
        at, end = first - self._begin, stop - self._begin
        parts = [ITEM_START, b"", b"", b""] * len(suffixes)
        parts[1::4], parts[2::4], parts[3::4] = suffixes, self._middles[at:end], self._tails[at:end]
        return b"".join(parts)

    def add(
        self,
        runs: Sequence[Run],
        messages: Sequence[bytes],
        ttls_s: Sequence[int | None] | None,
        pointer: int | None = None,
        row_extras: RowExtras | None = None,
        length: int | None = None,
    ) -> int:
        """Append one request's messages at the positions of ``runs``.

        Args:
          length: the common length of all messages, if known.

        Returns the time (ms) at which the first message with its own time to live expires, 0 if there is none.
        """
        plain = pointer is None and ttls_s is None and row_extras is None
        first_item = len(self.suffixes) - self._begin
        wire = None
        if length is not None and length <= MAX_CUT_BYTES and len(runs) == 1 and len(messages) >= MANY_ROWS:
            wire = _joined(runs[0], messages, length)
            self._wires.append(wire)
            self._joined += len(messages)
        heads = (row_extras or NO_EXTRAS).heads(pointer) if wire is not None and ttls_s is None else None
        if wire is not None and heads is not None and heads[1] == PLAIN_HEAD:
            suffixes, values, size = _cut_plain(wire, len(messages))
            size += _begin_with(heads, values)
        else:
            suffixes = positions(runs) if wire is None else _cut_positions(wire, len(messages))
            values = values_of(messages, ttls_s, pointer, row_extras)
            size = sum(map(len, values))
        if not plain and self._middles is None:
            self._middles, self._tails = [PLAIN_GAP] * first_item, self.values[self._begin :]
        if self._middles is not None:
            self._middles += [PLAIN_GAP] * len(values) if plain else _middles_of(messages, length)
            self._tails += values if plain else messages
        if length is None:
            self._lengths.update(map(len, messages))
        else:
            self._lengths.add(length)
        self.value_bytes += size
        if self.suffixes:
            self.suffixes += suffixes
            self.values += values
        else:
            self.suffixes, self.values = suffixes, values
        if pointer is not None:
            self._has_pointer(first_item, self.item_count, pointer)
        if row_extras is not None and row_extras.has_attributes:
            self.attributes |= row_extras.attributes_from(first_item, len(messages))
        return 0 if ttls_s is None else self._expire(first_item, runs, ttls_s)

    def add_one(self, run: Run, message: bytes, head: bytes, pointer: int | None = None) -> int:
        """Append one message without a time to live and attributes; return the bytes of its row's value. See ``add``.

        Args:
          head: the bytes of the value before the length.
        """
        length = len(message)
        prefix = length_prefix(length)
        value = head + prefix + message
        middles = self._middles
        if head != PLAIN_HEAD:
            if middles is None:
                middles = self._middles = [PLAIN_GAP] * self.item_count
                self._tails = self.values[self._begin :]
            middles.append(NO_PAYLOAD_PART + prefix)
            self._tails.append(message)
            if pointer is not None:
                self._has_pointer(self.item_count, self.item_count + 1, pointer)
        elif middles is not None:
            middles.append(PLAIN_GAP)
            self._tails.append(value)
        size = len(value)
        self._lengths.add(length)
        self.value_bytes += size
        self.suffixes.append(pack_position(run.ts_ms, run.first))
        self.values.append(value)
        return size

    def add_reference(self, suffix: bytes, value: bytes) -> None:
        """Append a row whose messages are in the payload table; items are counted from the next row on."""
        self.value_bytes += len(value)
        self.suffixes.append(suffix)
        self.values.append(value)
        self._begin = len(self.suffixes)
        self._middles, self._tails, self._wires, self._joined, self._lengths = None, [], [], 0, set()
        self.may_expire = True  # a reference row may expire as well
        self.pointers, self.expiries, self.attributes = [], {}, {}
        self.restart = after(suffix + b"\xff" * len(NO_PAYLOAD_PART))

    def _has_pointer(self, first_item: int, stop: int, pointer: int) -> None:
        """Record that the items from ``first_item`` to ``stop`` are under ``pointer``."""
        if self.pointers and self.pointers[-1][1:] == (first_item, pointer):
            first_item = self.pointers.pop()[0]
        self.pointers.append((first_item, stop, pointer))

    def _expire(self, first_item: int, runs: Iterable[Run], ttls_s: Sequence[int | None]) -> int:
        """Record the expiry times of the items from ``first_item`` on. Returns the earliest, or 0 if there is none."""
        stamps = (run.ts_ms for run in runs for _ in range(run.length))
        own = {
            index: ts_ms + ttl_s * 1000
            for index, (ts_ms, ttl_s) in enumerate(zip(stamps, ttls_s, strict=True), first_item)
            if ttl_s is not None
        }
        self.expiries |= own
        self.may_expire |= bool(own)
        return min(own.values(), default=0)


# --- the entry of a chain that is open --------------------------------------------------------------


class OpenEntry:
    """An entry of the topic's chain that covers consecutive requests of a step.

    The requests have no write pointer, no attributes and no times to live of their own. So a commit of many small
    requests costs only one more row, and two hashes.
    """

    __slots__ = ("_batch", "_chain", "_first", "_size", "_stop", "prefix")

    def __init__(self, chain: Chain, prefix: bytes, batch: RowBatch, first: int, size: int) -> None:
        """Cover the rows of ``batch`` from ``first`` on, of ``size`` bytes; they must be within an entry's bounds."""
        self.prefix = prefix
        self._chain = chain
        self._batch = batch
        self._first, self._stop = first, len(batch)
        self._size = size

    def join(self, batch: RowBatch, size: int) -> bool:
        """Cover the new rows of ``batch``, of ``size`` bytes, too; return False if they need another entry."""
        stop, at = len(batch), self._stop
        if batch is not self._batch or stop - self._first > MAX_ROWS or self._size + size > MAX_BYTES:
            return False
        if ordinal(batch.suffixes[at - 1]) + 1 != ordinal(batch.suffixes[at]):
            return False
        self._stop, self._size = stop, self._size + size
        return True

    def row(self) -> tuple[bytes, bytes]:
        """Append this entry to the chain; return its position and value."""
        suffixes, first, stop = self._batch.suffixes, self._first, self._stop
        record = record_of_wire(suffixes[first], stop - first, self._batch.wire_of(first, stop))
        last = suffixes[stop - 1]
        return last, self._chain.next(last, record)


def positions(runs: Iterable[Run]) -> list[bytes]:
    """Return the ten bytes of each position."""
    out: list[bytes] = []
    for run in runs:
        ts = run.ts_ms.to_bytes(8, "big")
        out += [ts + sequence for sequence in _SEQUENCE_BYTES[run.first : run.first + run.length]]
    return out


def values_of(
    messages: Sequence[bytes],
    ttls_s: Sequence[int | None] | None,
    pointer: int | None = None,
    row_extras: RowExtras | None = None,
) -> list[bytes]:
    """Return the values of the rows of one request's messages."""
    extras = row_extras or NO_EXTRAS
    heads = None if ttls_s is not None else extras.heads(pointer)
    if heads is None:
        return extras.values(messages, ttls_s, pointer)
    values = _after_heads(heads[1], messages)
    _begin_with(heads, values)
    return values


def _begin_with(heads: tuple[bytes, bytes], values: list[bytes]) -> int:
    """Replace the head of the first value, which is ``heads[1]``, with ``heads[0]``; return how much longer that is."""
    first, others = heads
    if first == others:
        return 0
    values[0] = first + values[0][len(others) :]
    return len(first) - len(others)


def own_ttls(
    count: int, request_ttl_s: int | None, message_ttls_s: Sequence[int | None] | None
) -> Sequence[int | None] | None:
    """Return each message's time to live in seconds, the shorter of the request's and its own; None if none has one."""
    if message_ttls_s is None:
        return None if request_ttl_s is None else [request_ttl_s] * count
    if request_ttl_s is None:
        return message_ttls_s if any(ttl is not None for ttl in message_ttls_s) else None
    return [request_ttl_s if ttl is None else min(ttl, request_ttl_s) for ttl in message_ttls_s]


def _joined(run: Run, messages: Sequence[bytes], length: int) -> bytes:
    """Return the wire form of messages of equal length at the positions of ``run``.

    It is then cut like a table into the parts of the rows, which is half the work of making an object for each message,
    and the scan cache uses it unchanged.
    """
    middle = NO_PAYLOAD_PART + length_prefix(length)
    parts = [ITEM_START + run.ts_ms.to_bytes(8, "big"), b"", middle, b""] * len(messages)
    parts[1::4] = _SEQUENCE_BYTES[run.first : run.first + run.length]
    parts[3::4] = messages
    return b"".join(parts)


def _cut_plain(wire: bytes, count: int) -> tuple[list[bytes], list[bytes], int]:
    """Cut the wire form of ``count`` messages into suffixes and values of plain rows; also return the values' bytes."""
    value_length = len(wire) // count - PLAIN_OVERHEAD_BYTES
    fields = cut_rows(wire, f"{len(ITEM_START)}x{POSITION_BYTES}s{len(PLAIN_GAP)}x{value_length}s")
    return fields[::2], fields[1::2], count * value_length


def _cut_positions(wire: bytes, count: int) -> list[bytes]:
    """Cut the suffixes of ``count`` rows from the wire form of their messages."""
    behind = len(wire) // count - len(ITEM_START) - POSITION_BYTES
    return cut_rows(wire, f"{len(ITEM_START)}x{POSITION_BYTES}s{behind}x")


def _middles_of(messages: Sequence[bytes], length: int | None) -> list[bytes]:
    """Return the bytes between position and payload of each message in wire form."""
    if length is not None:
        middle = NO_PAYLOAD_PART + length_prefix(length)
        return [middle] if len(messages) == 1 else [middle] * len(messages)
    middles = {size: NO_PAYLOAD_PART + length_prefix(size) for size in set(map(len, messages))}
    return [middles[len(message)] for message in messages]


def _after_heads(head: bytes, messages: Sequence[bytes]) -> list[bytes]:
    """Return ``head``, the length and the bytes of each message."""
    sizes = set(map(len, messages))
    if len(sizes) == 1:
        head += length_prefix(sizes.pop())
        return [head + message for message in messages]
    heads = {size: head + length_prefix(size) for size in sizes}
    return [heads[len(message)] + message for message in messages]
