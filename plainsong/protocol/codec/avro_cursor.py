"""A strict reader of raw Avro: a cursor over a body, with fast paths for arrays of payloads and runs of numbers.

fastavro reads this format too, but trusts its input: it reads union branch -1 as the last one, silently overflows
numbers of twelve bytes, and ignores bytes after a record. Bodies come from untrusted clients, so these functions
accept exactly what the format allows, report the position of a violation, and allocate nothing before the bytes for
it are known to exist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from plainsong.protocol.codec.base import MAX_MESSAGES, MAX_VALUES
from plainsong.protocol.errors import MalformedBody, RequestTooLarge
from plainsong.protocol.page import cut_rows, varint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
#: Shorter blocks are walked: looking for equal lengths would cost more.
_MIN_EQUAL = 16
#: The head of a block of one item, and the end of an array.
_ONE_ITEM, _NO_MORE = b"\x02", b"\x00"
#: The beginning of a publish that has no write pointer (the second branch of its union) and one message.
_NO_POINTER_ONE_ITEM = b"\x02" + _ONE_ITEM
#: Bytes of the shortest publish of one message: with these, its length can be read without checks.
_SHORTEST = 8


def malformed(what: str, at: int) -> MalformedBody:
    """The error for ``what`` at byte ``at`` of a body."""
    return MalformedBody(f"{what} at byte {at}", hint="compare the body with the schema of its content type")


class Cursor:
    """A position in a body; every method reads one value and advances past it, or raises ``MalformedBody``."""

    __slots__ = ("at", "data", "room")

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data = data
        self.at = at
        #: The items that arrays and maps may still have, all together.
        self.room = MAX_VALUES

    def long(self) -> int:
        """A zigzag varint of at most 64 bits."""
        data, at = self.data, self.at
        raw = shift = 0
        try:
            byte = data[at]
            if byte < 0x80:  # nearly all of a request's
                self.at = at + 1
                return byte >> 1 ^ -(byte & 1)
            while True:
                byte = data[at]
                at += 1
                raw |= (byte & 0x7F) << shift
                if byte < 0x80:
                    break
                shift += 7
                if shift > 63:
                    raise malformed("a number longer than ten bytes", self.at)
        except IndexError:
            raise malformed("the body ends inside a number", len(data)) from None
        if raw >> 64:
            raise malformed("a number beyond 64 bits", self.at)
        self.at = at
        return raw >> 1 ^ -(raw & 1)

    def int32(self) -> int:
        """A varint of at most 32 bits."""
        at = self.at
        number = self.long()
        if not -0x80000000 <= number <= 0x7FFFFFFF:
            raise malformed(f"{number}, where 32 bits are allowed,", at)
        return number

    def boolean(self) -> bool:
        byte = self.data[self.at : self.at + 1]
        if byte not in (b"\x00", b"\x01"):
            raise malformed("no boolean" if byte else "the body ends before a boolean", self.at)
        self.at += 1
        return byte == b"\x01"

    def octets(self) -> bytes:
        """A length and as many bytes."""
        at = self.at
        size = self.long()
        start = self.at
        if not 0 <= size <= len(self.data) - start:
            raise malformed(f"a length of {size}, with {len(self.data) - start} bytes left,", at)
        self.at = start + size
        return self.data[start : self.at]

    def string(self) -> str:
        """A length and as many bytes of UTF-8."""
        raw = self.octets()
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise malformed("invalid UTF-8", self.at - len(raw) + error.start) from None

    def branch(self, branches: int) -> int:
        """The index of a union's branch, or of an enum's symbol."""
        at = self.at
        index = self.long()
        if not 0 <= index < branches:
            raise malformed(f"branch {index} of {branches}", at)
        return index

    def or_null(self, read: Callable[[], T]) -> T | None:
        """A union ``[X, null]``, as in version 1."""
        return read() if self.branch(2) == 0 else None

    def null_or(self, read: Callable[[], T]) -> T | None:
        """A union ``[null, X]``, as in version 2."""
        if self.data[self.at : self.at + 1] == b"\x00":  # nearly all of a request's, in one byte
            self.at += 1
            return None
        return read() if self.branch(2) == 1 else None

    def block(self) -> tuple[int, int | None]:
        """The head of an array or map block: the number of its items, and its announced end (None: not announced).

        A negative count is legal: its absolute value counts the items, and the block's bytes follow.
        """
        at = self.at
        count = self.long()
        stop = None
        if count < 0:
            count = -count
            size = self.long()
            stop = self.at + size
        if count > len(self.data) - self.at:  # an item takes at least a byte
            raise malformed(f"a block of {count} items, with {len(self.data) - self.at} bytes left,", at)
        return count, stop

    def end_block(self, stop: int | None) -> None:
        """Check the announced end of a block."""
        if stop is not None and stop != self.at:
            raise malformed(f"a block that should end at {stop} ends", self.at)

    def array(self, read: Callable[[], T]) -> list[T]:
        """Blocks of items, each read by ``read``."""
        found: list[T] = []
        while True:
            count, stop = self.block()
            if not count:
                return found
            self.take_room(count)
            found.extend(read() for _ in range(count))
            self.end_block(stop)

    def only(self, read: Callable[[], T]) -> list[T] | None:
        """An array of one item in one block, as in most requests; None: it is another array, and nothing was read.

        Measured, the general way takes three times as long for it.
        """
        data, at = self.data, self.at
        if not data.startswith(_ONE_ITEM, at):
            return None
        self.at = at + len(_ONE_ITEM)
        item = read()
        if not data.startswith(_NO_MORE, self.at):
            self.at = at
            return None
        self.take_room(1)
        self.at += len(_NO_MORE)
        return [item]

    def strings(self) -> dict[str, str]:
        return dict(self.array(lambda: (self.string(), self.string())))

    def payloads(self) -> list[bytes]:
        """An array of bytes: most of what a broker reads."""
        only = self.only(self.octets)
        if only is not None:
            return only
        found: list[bytes] = []
        while True:
            count, stop = self.block()
            if not count:
                return found
            self.take_room(count)
            if len(found) + count > MAX_MESSAGES:
                raise RequestTooLarge(f"{len(found) + count} messages", hint=f"send at most {MAX_MESSAGES} at a time")
            self.at = _equal_items(self.data, self.at, count, found) or _walk(self.data, self.at, count, found)
            self.end_block(stop)

    def take_room(self, count: int) -> None:
        """Count the items of a block. Raises RequestTooLarge."""
        self.room -= count
        if self.room < 0:
            raise RequestTooLarge(f"more than {MAX_VALUES} values", hint="send less at a time")

    def finish(self) -> None:
        """Refuse further bytes."""
        if self.at != len(self.data):
            raise malformed(f"{len(self.data) - self.at} bytes too many", self.at)


def read_only_message(body: bytes) -> tuple[bytes | None, int]:
    """Return the message of a publish with one message and no write pointer, and where it ends; otherwise None.

    It validates nothing: a body for which it returns None may be malformed.
    """
    if not body.startswith(_NO_POINTER_ONE_ITEM) or len(body) < _SHORTEST:
        return None, 0
    start = len(_NO_POINTER_ONE_ITEM)
    size = body[start]
    start += 1
    if size >= 0x80:
        high = body[start]
        start += 1
        if high >= 0x80:
            return None, 0
        size = size & 0x7F | high << 7
    end = start + (size >> 1)
    if size & 1 or not body.startswith(_NO_MORE, end):
        return None, 0
    return body[start:end], end


def _equal_items(data: bytes, at: int, count: int, found: list[bytes]) -> int:
    """Take ``count`` payloads of one length at once. Returns where they end, or 0 if their lengths differ.

    Bulk publishers often send records of a fixed size. The bytes of the length prefixes are compared column
    by column; then the block is cut like a table. Five times as fast as the walk, and a wrong guess is cheap.
    """
    if count < _MIN_EQUAL:
        return 0
    head = 1 if data[at] < 0x80 else 2
    if at + 1 >= len(data) or (head == 2 and data[at + 1] >= 0x80) or data[at] & 1:
        return 0
    size = (data[at] if head == 1 else data[at] & 0x7F | data[at + 1] << 7) >> 1
    stop = at + (head + size) * count
    if stop > len(data):
        return 0
    for column in range(at, at + head):
        if data[column : stop : head + size] != data[column : column + 1] * count:
            return 0
    found += cut_rows(memoryview(data)[at:stop], f"{head}x{size}s")
    return stop


def _walk(data: bytes, at: int, count: int, found: list[bytes]) -> int:
    """Take ``count`` payloads one by one. Returns where they end."""
    append = found.append
    try:
        for _ in range(count):
            low = data[at]
            if low & 1:
                raise malformed("a negative length", at)
            if low < 0x80:
                start = at + 1
                at = start + (low >> 1)
            elif (high := data[at + 1]) < 0x80:
                start = at + 2
                at = start + (high << 6 | (low & 0x7F) >> 1)
            else:
                cursor = Cursor(data, at)
                append(cursor.octets())
                at = cursor.at
                continue
            append(data[start:at])
    except IndexError:
        at = len(data) + 1
    # A slice beyond the end is short and raises nothing, so the end is checked once, here.
    if at > len(data):
        raise malformed("the body ends inside a message", len(data))
    return at


# --- runs of consecutive numbers, as most lists of sequence ids are --------------------------------
#
# They are recognised by their bytes, column by column. A number's first byte has its lowest six bits, each further byte
# seven more, and all but the last have the high bit set. So 8192 numbers from a multiple of 8192 on have equal lengths,
# the same first two columns as any other such run, and a constant in each further column.


_COLUMNS_REPEAT = 1 << 13
#: Numbers below this have one byte, those from here to ``_COLUMNS_REPEAT`` two.
_TWO_BYTES = 1 << 6
_COLUMN_1 = bytes(0x80 | (number & 0x3F) << 1 for number in range(_COLUMNS_REPEAT))
#: The second byte where others follow, and where it is the last.
_COLUMN_2 = bytes(0x80 | number >> 6 for number in range(_COLUMNS_REPEAT))
_LAST_COLUMN_2 = bytes(number >> 6 for number in range(_COLUMNS_REPEAT))
#: Shorter lists are read number by number: recognising them would cost more.
_MIN_RUN = 8


def end_of_run(data: bytes, at: int, first: int, count: int) -> int | None:
    """Return the end of the varints of ``count`` numbers from ``first`` (0 or more) on; None if ``at`` has others."""
    number, stop = first, first + count
    while number < stop:
        low = number % _COLUMNS_REPEAT
        if number >= _COLUMNS_REPEAT:
            end = min(stop, number - low + _COLUMNS_REPEAT)
            rest = _unsigned(number // _COLUMNS_REPEAT)
            second = _COLUMN_2
        else:
            end = min(stop, _COLUMNS_REPEAT if number >= _TWO_BYTES else _TWO_BYTES)
            rest, second = b"", _LAST_COLUMN_2
        several = end - number
        if number < _TWO_BYTES:
            columns = [bytes(range(number << 1, end << 1, 2))]
        else:
            columns = [_COLUMN_1[low : low + several], second[low : low + several]]
            columns += [rest[index : index + 1] * several for index in range(len(rest))]
        width = len(columns)
        after = at + width * several
        for index, column in enumerate(columns):
            if data[at + index : after : width] != column:
                return None
        number, at = end, after
    return at


def _unsigned(number: int) -> bytes:
    """A varint without zigzag: the zigzag varint of its half, with the lowest bit added."""
    half = varint(number >> 1)
    return half if not number & 1 else bytes([half[0] | 1]) + half[1:]


def read_longs(cursor: Cursor) -> Sequence[int]:
    """An array of longs: nearly always one, or numbers that follow each other."""
    return cursor.only(cursor.long) or read_run(cursor) or cursor.array(cursor.long)


def read_run(cursor: Cursor) -> range | None:
    """The array of longs at the cursor, if its numbers are consecutive and in one block; else None, with nothing read.

    Raises MalformedBody as ``array`` would.
    """
    begin, data = cursor.at, cursor.data
    count, stop = cursor.block()
    if count >= _MIN_RUN and stop is None:
        at = cursor.at
        first = cursor.long()
        # The numbers that follow are no shorter, so the allocation is bounded by the body.
        if first >= 0 and first + count <= 1 << 63 and count * (cursor.at - at) <= len(data) - at:
            end = end_of_run(data, at, first, count)
            if end is not None and data.startswith(_NO_MORE, end):
                cursor.take_room(count)
                cursor.at = end + len(_NO_MORE)
                return range(first, first + count)
    cursor.at = begin
    return None
