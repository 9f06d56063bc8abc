"""Reading a topic: walks of a reader through its rows, for pages, extents, counts and the newest message.

    message row                      its treatment, in this order
      expired by its own ttl           skipped
      rolled back, invalid             skipped by a reader with a view
      undecided                        holds a reader with a view: it gets no later message yet
      written after the moment         skipped by a reader as of a moment
      refers to stored messages        replaced by their payload rows, of winning segments only
      damaged                          ends the read before it

A walk takes lists of rows, since deciding row by row would cost more than reading them. ``scans`` yields the scans that
it needs next. It passes visible messages to ``_take``, from which pages, extents and counts make their results.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from plainsong.protocol.effects import Table
from plainsong.protocol.ids import ID_BYTES, NO_PAYLOAD_PART, POSITION_BYTES, after, before
from plainsong.protocol.keys import DamagedRow
from plainsong.protocol.page import HIDDEN_COUNTED, Page
from plainsong.protocol.rows import (
    HAS_POINTER,
    NO_PAYLOAD,
    PLAIN,
    PLAIN_OVERHEAD_BYTES,
    PlainRows,
    Stored,
    decode_row,
    expires_ms_of,
    plain_wire,
)
from plainsong.protocol.topic.visibility import STORED_OVERHEAD_BYTES, InlineDelivery, Reference
from plainsong.protocol.transactions.view import AsOfView, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from plainsong.protocol.topic.asks import Span
    from plainsong.protocol.transactions.view import View

    Rows = Sequence[tuple[bytes, bytes]]


#: Rows in the first list of a scan; later lists are longer.
_FIRST_CHUNK_ROWS = 256
_POINTER = struct.Struct(">q")
_PLAIN_ONLY = {PLAIN}
_KEY = itemgetter(0)
#: Message rows that a page as of a moment reads after that moment, for transactions that had been committed by then.
#: Such rows exist only if the topic's clock was ahead of the transaction service's.
MAX_ROWS_BEHIND_MOMENT = 100_000


class Scan(NamedTuple):
    """A request of a walk for rows with ``start <= key < stop``, in order, until ``feed`` returns False."""

    table: Table
    start: bytes
    stop: bytes
    feed: Callable[[Rows], bool]
    reverse: bool = False
    """From the last row to the first."""


def key_range(span: Span) -> tuple[bytes, bytes]:
    """Return ``[start, stop)`` of the message keys that may have, or refer to, messages of the span."""
    start, until = span.start, span.until
    # A bound inside a position is after the row's own message, and among the messages it refers to.
    upper = until[:POSITION_BYTES] + (b"" if until.endswith(NO_PAYLOAD_PART) else b"\x00")
    lower = start[:POSITION_BYTES]
    return span.prefix + lower, span.prefix + max(lower, upper)


class Walk(InlineDelivery):
    """A reader's walk through the rows of a span."""

    #: Walk from the newest message down. Such a walk is never held, hides no messages, and never starts inside stored
    #: ones.
    reverse = False

    def __init__(
        self, span: Span, view: View | None = None, *, with_pointers: bool = False, hidden_limit: int = 0
    ) -> None:
        super().__init__(span, view, with_pointers=with_pointers, hidden_limit=hidden_limit)
        #: True if all rows so far have only a payload, so that they cannot change.
        self.is_plain = True
        self._start = span.start
        self._starts_inside = not self._start.endswith(NO_PAYLOAD_PART)
        #: Rows of the last list after the reference, and the last key of that list.
        self._rows_behind: Rows = ()
        self._last_key = b""
        #: For a reader as of a moment: the first key after the moment, and the number of rows read from there on.
        self._as_of = view if isinstance(view, AsOfView) else None
        self._later_key = b"" if self._as_of is None else span.prefix + self._as_of.bound[:POSITION_BYTES]
        self._later_rows = 0
        #: True if no later row is visible: all were written after the moment.
        self._is_over = False

    @property
    def wanted(self) -> int:
        """Approximate number of rows that the first list of the next scan should have."""
        return _FIRST_CHUNK_ROWS

    def scans(self) -> Iterator[Scan]:
        """Yield the scans to make; the result of one decides the next."""
        start, stop = key_range(self.span)
        if self._start >= self.span.until:
            return
        while start < stop and not (self.done or self._is_over):
            yield Scan(Table.MESSAGE, start, stop, self.feed_rows, self.reverse)
            if self.reference is None:
                return
            while self.reference is not None and not self.done:
                yield Scan(Table.PAYLOAD, self.reference.start, self.reference.stop, self.feed_payloads, self.reverse)
                self._close_reference()
            if self.reverse:
                stop = self._last_key
            else:
                start = self._last_key + b"\x00"

    # --- message rows ---------------------------------------------------------------------------

    def feed_rows(self, rows: Rows) -> bool:
        """Take message rows, in order. Returns False when no more are needed, or payload rows have to be read first.

        Raises:
          DamagedRow: the first row that would be visible cannot be read. Plain rows are not checked, as the store
            verifies checksums.
        """
        if not rows:
            return not self.done
        self._last_key = rows[-1][0]
        if self._starts_inside and rows[0][0].endswith(self._start[:POSITION_BYTES]):
            own_payload = not _flags(rows[0][1]) & NO_PAYLOAD
            rows = rows[own_payload:]  # its own message is before the start
            if not rows:
                return not self.done
        if self._as_of is not None and rows and rows[-1][0] >= self._later_key:
            return self._feed_later(rows, self._as_of)
        return self._feed(rows)

    def _feed_later(self, rows: Rows, as_of: AsOfView) -> bool:
        """Take rows of which some were written after the moment; of those, only rows with a pointer may be visible.

        Once a row's pointer was issued after the moment, all later rows were written after it too, and are invisible.
        """
        at = bisect_left(rows, self._later_key, key=_KEY)
        self._later_rows += len(rows) - at
        kept = [*rows[:at], *(row for row in rows[at:] if _flags(row[1]) & HAS_POINTER)]
        first = next((index for index, row in enumerate(kept[at:], at) if as_of.is_later(_pointer_of(row[1]))), None)
        if first is not None:
            self._is_over = True
            del kept[first:]
        go_on = self._feed(kept) if kept else not self.done
        if self.reference is None and not self.done and self._later_rows >= self._most_later_rows:
            self._cut_later(rows[-1][0][-POSITION_BYTES:] + NO_PAYLOAD_PART)
            return False
        return go_on and not self._is_over

    #: The maximum number of rows to read after the moment.
    _most_later_rows: float = float("inf")

    def _cut_later(self, message_id: bytes) -> None:
        """End after a message, since enough rows after the moment have been read."""
        raise NotImplementedError

    def _feed(self, rows: Rows) -> bool:
        if isinstance(rows, PlainRows):
            return self._feed_inline(rows, _PLAIN_ONLY)
        flags = {value[0] if value else -1 for _, value in rows}
        if flags != _PLAIN_ONLY:
            self.is_plain = False
        if not any(each & NO_PAYLOAD for each in flags):
            return self._feed_inline(rows, flags)
        at = 0
        for index in [index for index, (_, value) in enumerate(rows) if _flags(value) & NO_PAYLOAD]:
            if at < index and not self._feed_inline(rows[at:index], flags):
                return False
            at = index + 1
            if not self._open_reference(*rows[index]):
                self._rows_behind = rows[at:]
                return False
        return self._feed_inline(rows[at:], flags) if at < len(rows) else True

    # --- stored messages ------------------------------------------------------------------------

    def _open_reference(self, key: bytes, value: bytes) -> bool:
        """Begin a reference. Returns True if it has no payload rows to read, so that the walk continues after it."""
        position = key[-POSITION_BYTES:]
        inside = self._starts_inside and self._start.startswith(position)
        try:
            row = decode_row(value)
            stored = Stored.of(row)
        except DamagedRow as damage:
            # A reader that starts inside has read the reference before, and needs the messages after it.
            return inside or self._damage(position + NO_PAYLOAD_PART, damage)
        first, stop = stored.first, stored.last + b"\x00"
        if inside:
            first = max(first, self._start[POSITION_BYTES:])
        if self.span.until.startswith(position):
            stop = min(stop, self.span.until[POSITION_BYTES:])
        if first >= stop:
            return True
        if 0 < expires_ms_of(position, row.ttl_s) < self.span.now_ms:
            self.expired += stored.messages
            return True
        verdict = self._verdict(row.pointer)
        if verdict is Verdict.SKIP:
            self.passed = True
            return True
        held_at = max(position + NO_PAYLOAD_PART, self._start) if verdict is Verdict.HOLD else None
        prefix = self.span.prefix + _POINTER.pack(stored.pointer_of_payloads(row))
        self.reference = Reference(
            position, row.pointer or 0, row.ttl_s, stored.segments, held_at, prefix + first, prefix + stop, row
        )
        return False

    def _close_reference(self) -> None:
        """After the payload rows of a reference, take the message rows that were read after it."""
        self.reference = None
        rest, self._rows_behind = self._rows_behind, ()
        if rest and not self.done:
            self._feed(rest)


def _flags(value: bytes) -> int:
    return value[0] if value else -1


def _pointer_of(value: bytes) -> int:
    """Return the pointer in a row that has one; 0 if the row is too short, which is reported when it is decoded."""
    pointer: int = _POINTER.unpack_from(value, 1)[0] if len(value) > _POINTER.size else 0
    return pointer


# --- pages -----------------------------------------------------------------------------------------
#
# A page is made from rows, or from items of the scan cache, and ends in the same place for both: at the span's end, at
# the first undecided message, at its limit of messages, or where the next message would exceed its limit of bytes. It
# has at least one message if there is one.


class Paging(Walk):
    """A walk that collects a page."""

    with_attributes = True
    _most_later_rows = MAX_ROWS_BEHIND_MOMENT

    def __init__(
        self, span: Span, limit: int, max_bytes: int, view: View | None = None, *, with_pointers: bool = False
    ) -> None:
        super().__init__(span, view, with_pointers=with_pointers, hidden_limit=HIDDEN_COUNTED + 1)
        self._room = limit
        self._bytes_room = max_bytes
        self._parts: list[bytes] = []
        self._pointers: dict[int, int] = {}
        self._attributes: dict[int, Mapping[str, str]] = {}
        self._count = 0
        self._bytes = 0
        self._last_id: bytes | None = None
        self._cut = False
        #: The item that did not fit; empty before one was read.
        self.following = b""
        #: The message after which the page ends although there may be more; everything up to it has been read.
        self._read_to: bytes | None = None

    @property
    def room(self) -> int:
        """The number of further messages that fit."""
        return self._room

    @property
    def wanted(self) -> int:
        """See ``Walk.wanted``: one row more than fits, to find out whether there are more.

        A page that begins after a message also reads the row of that message.
        """
        return self._room + 1 + self._starts_inside

    def cut_by_damage(self) -> bool:
        """End the page early, since the next row cannot be read; return False if the page would be empty."""
        self._cut = self.held_by is None
        return self._count > 0 or self.held_by is not None

    def feed_items(
        self,
        items: Sequence[bytes],
        pointers: Sequence[int] | None = None,
        attributes: Mapping[int, Mapping[str, str]] | None = None,
    ) -> bool:
        """Take visible messages in wire form, in order. Returns False when the page is full.

        Args:
          attributes: the attributes of messages that have any, by index of the item.
        """
        self.attributes = (
            {items[index][1 : 1 + ID_BYTES]: each for index, each in attributes.items()} if attributes else {}
        )
        return self._deliver(items, pointers)

    def feed_part(
        self,
        part: bytes,
        count: int,
        last_id: bytes,
        pointers: Sequence[int] | None = None,
        attributes: Mapping[int, Mapping[str, str]] | None = None,
    ) -> bool:
        """Take many visible messages as one part that fits. Always returns True, as the page is not full."""
        self.passed = False
        if attributes:
            self._attributes.update((self._count + index, each) for index, each in attributes.items())
        self._add(part, count, last_id, pointers)
        return True

    def fits(self, count: int, size: int) -> bool:
        """Return True if ``count`` more messages with a total of ``size`` bytes are within the bounds."""
        return count <= self._room and size <= self._bytes_room

    def end_before(self, message_id: bytes, size: int) -> None:
        """End the page if the next visible message, which has ``size`` bytes, is in the span and does not fit."""
        if message_id < self.span.until and not self.fits(1, size):
            self._cut = self.done = True

    def page(self) -> Page:
        """Return the page. It ends with the span, unless a limit or an undecided message ended it earlier."""
        page = Page(self._parts, self._count, self._bytes, self._last_id)
        page.attributes, page.pointers = self._attributes, self._pointers
        if self._cut:
            page.end = "more"
        elif self._read_to is not None:
            page.end, page.last_id = "more", self._read_to
        elif self.held_by is not None:
            page.end, page.held, page.held_until_ms = "held", self.held, self.held_until_ms
            page.last_id = before(self.held_at)
        elif self._last_id is None or self.passed:
            # Skipped messages never become visible, so the reader need not read them again.
            page.last_id = self.span.resume
        return page

    def _deliver_plain(self, rows: Rows) -> bool:
        """Deliver plain rows; those that fit become one part, without making an item for each."""
        if isinstance(rows, PlainRows):
            return self._deliver_together(rows)
        values = [value for _, value in rows]
        size = sum(map(len, values)) + PLAIN_OVERHEAD_BYTES * len(values)
        if not rows or self.held_by is not None or not self.fits(len(values), size):
            return super()._deliver_plain(rows)
        positions = [key[-POSITION_BYTES:] for key, _ in rows]
        return self.feed_part(plain_wire(positions, values), len(values), positions[-1] + NO_PAYLOAD_PART)

    def _deliver_together(self, rows: PlainRows) -> bool:
        """Deliver rows that the store keeps together. Those that fit become one part; if some do not, the page ends."""
        taken = rows.within(self._room, self._bytes_room)
        if self.held_by is not None or not (taken or self._count):
            return super()._deliver_plain(rows)
        if taken:
            some = rows if taken == len(rows) else rows[:taken]
            self.feed_part(some.wire(), taken, some[-1][0][-POSITION_BYTES:] + NO_PAYLOAD_PART)
        if taken < len(rows):
            self.following = rows[taken : taken + 1].wire()
            self._cut = self.done = True
        return not self.done

    def _take(self, items: Sequence[bytes], pointers: Sequence[int] | None, expiries: Sequence[int] | None) -> bool:
        taken = self._fitting(items)
        if taken < len(items):
            self.following = items[taken]
            self._cut = True
            items = items[:taken]
        if items:
            if self.attributes:
                self._name(items)
            self._add(b"".join(items), len(items), items[-1][1 : 1 + ID_BYTES], pointers)
        return not self._cut

    def _damaged(self, message_id: bytes, damage: DamagedRow) -> bool:
        if not self._count:
            raise damage
        # End before it; the next page reports the damage.
        self._cut = True
        return False

    def _name(self, items: Sequence[bytes]) -> None:
        known = self.attributes
        for index, item in enumerate(items, self._count):
            strings = known.get(item[1 : 1 + ID_BYTES])
            if strings is not None:
                self._attributes[index] = strings

    def _add(self, part: bytes, count: int, last_id: bytes, pointers: Sequence[int] | None) -> None:
        if pointers is not None:
            numbered = zip(range(self._count, self._count + count), pointers, strict=False)
            self._pointers.update((index, pointer) for index, pointer in numbered if pointer)
        self._parts.append(part)
        self._count += count
        self._bytes += len(part)
        self._room -= count
        self._bytes_room -= len(part)
        self._last_id = last_id

    def _cut_later(self, message_id: bytes) -> None:
        self._read_to, self._is_over = message_id, True

    def _fitting(self, items: Sequence[bytes]) -> int:
        taken = min(len(items), self._room)
        if sum(map(len, items)) <= self._bytes_room:
            return taken
        sizes = accumulate(map(len, items[:taken]))
        taken = next((index for index, size in enumerate(sizes) if size > self._bytes_room), taken)
        return taken if taken or self._count else min(1, self._room)


# --- extents ---------------------------------------------------------------------------------------
#
# An extent measures a bounded read, and finds where to split it, without keeping its messages. It ends exactly where a
# poll with the same bounds and the same view would, and counts the bytes of the wire form. To split it into equal parts
# it remembers the ids of messages at a stride of bytes; when there are too many, it drops every other one. It measures
# lists of rows by their sizes, without making an item of each, which would cost more than reading them.


#: The maximum number of ids stored. With a thousand parts, each part's size is then exact to a sixteenth.
MAX_SPLIT_POINTS = 16_384


class Extent(Walk):
    """A walk that measures a bounded read."""

    def __init__(
        self, span: Span, limit: int | None = None, max_bytes: int | None = None, view: View | None = None
    ) -> None:
        super().__init__(span, view)
        self._limit = limit
        self._max_bytes = max_bytes
        self.count = 0
        self.bytes = 0
        self._end: bytes | None = None
        self._last_id = b""
        #: ``(bytes before, id)`` of messages, at least ``_stride`` bytes apart.
        self._split_points: list[tuple[int, bytes]] = []
        self._stride = 1

    @property
    def end(self) -> bytes:
        """The exclusive bound of the extent: where a limit or an undecided message ended it, else the span's end."""
        if self._end is not None:
            return self._end
        return max(self.span.since, self.span.until if self.held_by is None else self.held_at)

    def splits(self, parts: int) -> list[bytes]:
        """Return at most ``parts - 1`` bounds, ascending, that split the extent into parts of about equal bytes.

        A bound may be inside the stored messages of a transaction, which two parts then share.
        """
        bounds: list[bytes] = []
        at = 0
        for part in range(1, parts):
            target = self.bytes * part / parts
            while at < len(self._split_points) and self._split_points[at][0] < target:
                at += 1
            if at == len(self._split_points):
                break
            before, bound = self._split_points[at]
            if bound > self.span.since and (not bounds or bound > bounds[-1]) and before > 0:
                bounds.append(bound)
        return bounds

    def _deliver_plain(self, rows: Rows) -> bool:
        """Measure rows that have only a payload."""
        if not rows:
            return not self.done
        if isinstance(rows, PlainRows):
            sizes = rows.sizes()
        else:
            sizes = [PLAIN_OVERHEAD_BYTES + len(value) for _, value in rows]
        return self._measure(sizes, lambda index: rows[index][0][-POSITION_BYTES:] + NO_PAYLOAD_PART)

    def _deliver_stored(self, rows: Rows, payloads: Sequence[bytes]) -> bool:
        """Measure payload rows, unless they may hold the reader or are damaged."""
        assert self.reference is not None  # while payload rows are read
        if not rows or self.reference.held_at is not None or not all(payloads):
            return super()._deliver_stored(rows, payloads)
        position = self.reference.position
        sizes = [STORED_OVERHEAD_BYTES + size for size in map(len, payloads)]
        return self._measure(sizes, lambda index: position + rows[index][0][-POSITION_BYTES:])

    def _take(self, items: Sequence[bytes], pointers: Sequence[int] | None, expiries: Sequence[int] | None) -> bool:
        return self._measure(list(map(len, items)), lambda index: items[index][1 : 1 + ID_BYTES])

    def _damaged(self, message_id: bytes, damage: DamagedRow) -> bool:
        """Raise if there is no message before the damaged row; otherwise end before it, like a page."""
        if not self.count:
            raise damage
        return self._cut()

    def _measure(self, sizes: Sequence[int], id_at: Callable[[int], bytes]) -> bool:
        """Add messages, given the sizes of their items. Returns False when the extent is full.

        Args:
          id_at: returns the id of one of them by its index.
        """
        self.passed = False
        #: The bytes before each of them, and after the last.
        ends = list(accumulate(sizes, initial=self.bytes))
        taken = self._fitting(ends)
        if taken:
            self._add_split_points(ends, taken, id_at)
            self._last_id = id_at(taken - 1)
            self.count += taken
            self.bytes = ends[taken]
        self.done = taken < len(sizes) and not self._cut()
        return not self.done

    def _fitting(self, ends: Sequence[int]) -> int:
        taken = len(ends) - 1
        if self._limit is not None:
            taken = min(taken, self._limit - self.count)
        if self._max_bytes is not None:
            # The first message of an extent fits, however large it is.
            least = 0 if self.count else 1
            taken = min(taken, max(least, bisect_right(ends, self._max_bytes) - 1))
        return taken

    def _cut(self) -> bool:
        self._end = after(self._last_id)
        return False

    def _add_split_points(self, ends: Sequence[int], taken: int, id_at: Callable[[int], bytes]) -> None:
        index = 0
        while True:
            if self._split_points:
                index = bisect_left(ends, self._split_points[-1][0] + self._stride, index, taken)
            if index == taken:
                return
            self._split_points.append((ends[index], id_at(index)))
            if len(self._split_points) > MAX_SPLIT_POINTS:
                self._split_points = self._split_points[::2]
                self._stride = max(2 * self._stride, 2 * ends[index] // MAX_SPLIT_POINTS)
            index += 1


# --- counts, and the newest message: both read a bounded number of rows -----------------------------


#: An item has this many bytes more than a plain row's value and position, which are what usage counts.
_ITEM_EXTRA_BYTES = 10


class BoundedWalk(Walk):
    """A walk that gives up after ``max_rows`` rows."""

    def __init__(self, span: Span, view: View | None, max_rows: int) -> None:
        super().__init__(span, view, hidden_limit=max_rows)
        self._rows_left = max_rows
        #: True if it gave up before the end.
        self.gave_up = False

    def feed_rows(self, rows: Rows) -> bool:
        return super().feed_rows(self._within_bound(rows)) and self._may_read_on()

    def feed_payloads(self, rows: Rows) -> bool:
        return super().feed_payloads(self._within_bound(rows)) and self._may_read_on()

    def _within_bound(self, rows: Rows) -> Rows:
        left = self._rows_left
        self._rows_left -= len(rows)
        return rows[:left] if left < len(rows) else rows

    def _may_read_on(self) -> bool:
        if self._rows_left < 0:
            self.gave_up = self.done = True
        return not self.done


class Tally(BoundedWalk):
    """Counts the messages that a reader would get; ``hidden`` and ``expired`` count others."""

    def __init__(self, span: Span, view: View | None, max_rows: int) -> None:
        super().__init__(span, view, max_rows)
        self.messages = 0
        self.bytes = 0

    def _take(self, items: Sequence[bytes], pointers: Sequence[int] | None, expiries: Sequence[int] | None) -> bool:
        self.messages += len(items)
        self.bytes += sum(map(len, items)) - _ITEM_EXTRA_BYTES * len(items)
        return True

    def _damaged(self, message_id: bytes, damage: DamagedRow) -> bool:
        self.messages += 1  # a message, even if it cannot be read
        return True


class Newest(BoundedWalk):
    """The newest living message."""

    reverse = True

    def __init__(self, span: Span, max_rows: int) -> None:
        super().__init__(span, None, max_rows)
        self.message_id: bytes | None = None

    @property
    def wanted(self) -> int:
        """One row is usually enough."""
        return 1

    def _take(self, items: Sequence[bytes], pointers: Sequence[int] | None, expiries: Sequence[int] | None) -> bool:
        self.message_id = items[0][1 : 1 + ID_BYTES]
        return False

    def _damaged(self, message_id: bytes, damage: DamagedRow) -> bool:
        self.message_id = message_id
        return False
