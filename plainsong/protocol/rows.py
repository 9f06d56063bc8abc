"""Values of the message and payload tables, byte for byte, and the references that represent stored messages.

    value    flags:u8  [pointer:i64]  [ttl_s:u32]  [extras: length:u32, msgpack map]  [payload]
    payload  length (zigzag varint)  bytes

    flag 01  pointer   the write pointer (column t); negative: rolled back
    flag 02  ttl       the message's own time to live, in seconds
    flag 04  extras    columns that few rows have, by short names
    flag 08  no payload: it is in the payload table, under the row's pointer or the one in its extras
    flag 10  batch row: many messages in one row; reserved for stores whose atom is a row
    80 40 20 must be 0: a reader that finds one set is older than the writer

The extras of message rows hold a producer's stamp (``Stamp``), the size of an atomic batch, and attributes.

A row with no payload is a *reference*: at its position messages were published that had been stored before; its extras
say which (``Stored``). Payload rows have the same form, without a pointer, since their key has it; their
extras may name a segment, ``{"s": index}``.

A plain publish is flags 00 and the payload: two or three bytes more than the message. Its value, from the
first byte on, is also the end of its wire form (the 00 is in the place where the id ends), which is why a poll of
plain rows joins bytes and decodes nothing.
"""

from __future__ import annotations

import itertools
import struct
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, overload

import msgpack

from plainsong.protocol.ids import NO_PAYLOAD_PART, POSITION_BYTES, SEQUENCES_PER_MS, published_ms
from plainsong.protocol.keys import DamagedRow
from plainsong.protocol.page import ITEM_START, length_prefix, read_varint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

PLAIN = 0x00
HAS_POINTER = 0x01
HAS_TTL = 0x02
HAS_EXTRAS = 0x04
_EXTRAS_ALONE = bytes([HAS_EXTRAS])
NO_PAYLOAD = 0x08
_KNOWN = HAS_POINTER | HAS_TTL | HAS_EXTRAS | NO_PAYLOAD
_I64 = struct.Struct(">q")
_U32 = struct.Struct(">I")
#: ``msgpack.packb`` makes a packer for each call, which takes half of its time.
_pack: Callable[[object], bytes] = msgpack.Packer().pack
#: The bytes between a plain row's position and its value in wire form: the id's last ten bytes are zero, and the
#: value supplies the tenth.
PLAIN_GAP = NO_PAYLOAD_PART[:9]
#: Where the value begins in a row that is joined: position, gap, value.
JOINED_VALUE = POSITION_BYTES + len(PLAIN_GAP)
#: Bytes in the wire form of a plain row before its value: the length of the id, the position, the gap.
PLAIN_OVERHEAD_BYTES = len(ITEM_START) + POSITION_BYTES + len(PLAIN_GAP)


def plain_wire(positions: Sequence[bytes], values: Sequence[bytes]) -> bytes:
    """Join plain rows into their wire form, without an object per row."""
    parts = [ITEM_START, b"", PLAIN_GAP, b""] * len(values)
    parts[1::4], parts[3::4] = positions, values
    return b"".join(parts)


class PlainRows(Sequence[tuple[bytes, bytes]]):
    """Rows of a topic with a payload and nothing else, in key order, from a store that keeps them together.

    A sequence of keys and values, and so are its slices. ``wire`` makes the wire form without an object per row.
    """

    __slots__ = ()

    @overload
    def __getitem__(self, index: int) -> tuple[bytes, bytes]: ...

    @overload
    def __getitem__(self, index: slice) -> PlainRows: ...

    @abstractmethod
    def __getitem__(self, index: int | slice) -> tuple[bytes, bytes] | PlainRows: ...

    @abstractmethod
    def within(self, most: int, most_bytes: int) -> int:
        """Return the number of leading rows within ``most`` rows and ``most_bytes`` of wire form."""

    @abstractmethod
    def sizes(self) -> list[int]:
        """Return the size of each row's wire form."""

    @abstractmethod
    def wire(self) -> bytes:
        """Return the wire form, as ``plain_wire`` does."""


class PlainItems(PlainRows):
    """Plain rows with a key and a value each, joined: position, ``PLAIN_GAP``, value.

    A store that iterates over rows joins each at once, which costs less than a tuple.
    """

    __slots__ = ("_items", "_prefix", "_size")

    def __init__(self, prefix: bytes, items: list[bytes], size: int | None = None) -> None:
        """``prefix``: the part of their keys before the position; ``size``: the bytes of all items, if known."""
        self._prefix, self._items, self._size = prefix, items, size

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        return map(self._row, self._items)

    @overload
    def __getitem__(self, index: int) -> tuple[bytes, bytes]: ...

    @overload
    def __getitem__(self, index: slice) -> PlainItems: ...

    def __getitem__(self, index: int | slice) -> tuple[bytes, bytes] | PlainItems:
        if isinstance(index, slice):
            return PlainItems(self._prefix, self._items[index])
        return self._row(self._items[index])

    def _row(self, item: bytes) -> tuple[bytes, bytes]:
        return self._prefix + item[:POSITION_BYTES], item[JOINED_VALUE:]

    def within(self, most: int, most_bytes: int) -> int:
        """See ``PlainRows``."""
        items, size, beside = self._items, self._size, len(ITEM_START)
        if size is None or most < len(items):
            items = items[:most]
            size = sum(map(len, items))
        if size + beside * len(items) <= most_bytes:
            return len(items)
        ends = itertools.accumulate(beside + len(item) for item in items)
        return sum(1 for _ in itertools.takewhile(most_bytes.__ge__, ends))

    def sizes(self) -> list[int]:
        """See ``PlainRows``."""
        return [len(ITEM_START) + size for size in map(len, self._items)]

    def wire(self) -> bytes:
        """See ``PlainRows``."""
        return ITEM_START.join([b"", *self._items])


@dataclass(slots=True)
class MessageRow:
    """The parts of a row of the message or payload table. ``payload`` None if it is in the payload table."""

    payload: bytes | None
    pointer: int | None = None
    ttl_s: int | None = None
    extras: Mapping[str, object] = field(default_factory=dict)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


#: The key under which the extras of a payload row name its segment.
SEGMENT = "s"
#: Extras of message rows. The first row of a producer's request has its stamp, the first row of an atomic request its
#: number of messages; some of the rows that follow in either have their index in the request (>= 1, counted by rows).
STAMP, BATCH, INDEX = "d", "b", "i"
#: Attributes of any message row: a map of strings.
ATTRIBUTES = "a"


@dataclass(slots=True)
class Stamp:
    """The producer of a request and the sequence ids of its messages, in the same row as its first message.

    So a message and the fact that it was stored become durable together.
    """

    producer: str
    epoch: int
    """The epoch of the producer's session; 0: it had none."""
    ids: Sequence[int]
    """One for each message, ascending; a publish of stored messages alone has one."""
    rows: int
    """Message rows of the request: one for each id, and one more where it also publishes stored messages."""

    def packed(self) -> list[object]:
        """The form in the row."""
        low, high, count = self.ids[0], self.ids[-1], len(self.ids)
        ids = low if high - low == count - 1 else list(self.ids)
        packed: list[object] = [self.producer, self.epoch, count, ids]
        return packed if self.rows == count else [*packed, self.rows]

    @classmethod
    def of(cls, row: MessageRow) -> Stamp | None:
        """The stamp of a row, None if it has none. Raises DamagedRow."""
        packed = row.extras.get(STAMP)
        if packed is None:
            return None
        if not isinstance(packed, list) or len(packed) not in (4, 5):
            raise DamagedRow("a row's stamp is not a list")
        producer, epoch, count, ids = packed[:4]
        if isinstance(ids, int) and _is_count(count):
            ids = range(ids, ids + count)
        rows = packed[4] if len(packed) == 5 else count
        if not (isinstance(producer, str) and _is_count(epoch) and _is_count(rows) and _is_ascending(ids)):
            raise DamagedRow("a row's stamp cannot be read")
        return cls(producer, epoch, ids, rows)


def _is_ascending(ids: object) -> bool:
    if isinstance(ids, range):
        return len(ids) > 0 and ids[0] >= 0
    return (
        isinstance(ids, list)
        and len(ids) > 0
        and all(map(_is_count, ids))
        and all(low < high for low, high in itertools.pairwise(ids))
    )


def plain_head(size: int) -> bytes:
    """The bytes before a payload of ``size`` bytes in the value of a plain publish."""
    return b"\x00" + length_prefix(size)


def row_head(pointer: int | None = None, extras: Mapping[str, object] | None = None) -> bytes:
    """The bytes before the payload's length in the value of a row without its own time to live."""
    if not extras:
        return b"\x00" if pointer is None else b"\x01" + _I64.pack(pointer)
    if pointer is None:
        packed = _pack(extras if type(extras) is dict else dict(extras))
        return _EXTRAS_ALONE + _U32.pack(len(packed)) + packed
    head = encode_row(MessageRow(b"", pointer, extras=extras))
    return head[: -len(length_prefix(0))]


#: The head of a plain publish.
PLAIN_HEAD = row_head()


def encode_row(row: MessageRow) -> bytes:
    flags = 0
    parts = [b""]
    if row.pointer is not None:
        flags |= HAS_POINTER
        parts.append(_I64.pack(row.pointer))
    if row.ttl_s is not None:
        flags |= HAS_TTL
        parts.append(_U32.pack(row.ttl_s))
    if row.extras:
        flags |= HAS_EXTRAS
        packed = msgpack.packb(dict(row.extras))
        parts += (_U32.pack(len(packed)), packed)
    if row.payload is None:
        flags |= NO_PAYLOAD
    else:
        parts += (length_prefix(len(row.payload)), row.payload)
    parts[0] = bytes([flags])
    return b"".join(parts)


def decode_row(value: bytes) -> MessageRow:
    """Decode the value of a row.

    Raises:
      DamagedRow: the value has another format, or a later version of this one.
    """
    try:
        return _decoded(value)
    except (IndexError, struct.error, ValueError, msgpack.UnpackException) as error:
        raise DamagedRow(f"a row's value ends early or is garbled: {value[:24].hex()}…") from error


def _decoded(value: bytes) -> MessageRow:
    flags = value[0]
    if flags & ~_KNOWN:
        raise DamagedRow(f"a row has flags {flags:#04x}, which this version does not know")
    row = MessageRow(payload=None)
    at = 1
    if flags & HAS_POINTER:
        (row.pointer,) = _I64.unpack_from(value, at)
        at += 8
    if flags & HAS_TTL:
        (row.ttl_s,) = _U32.unpack_from(value, at)
        at += 4
    if flags & HAS_EXTRAS:
        (size,) = _U32.unpack_from(value, at)
        extras = msgpack.unpackb(value[at + 4 : at + 4 + size], strict_map_key=True)
        if not isinstance(extras, dict):
            raise DamagedRow("a row's extras are not a map")
        row.extras = extras
        at += 4 + size
    if not flags & NO_PAYLOAD:
        size, at = read_varint(value, at)
        row.payload = value[at : at + size]
        at += size
    if at != len(value):
        raise DamagedRow(f"a row's value has {len(value)} bytes, its parts say {at}")
    return row


def is_intact(value: bytes) -> bool:
    """True if ``decode_row`` would succeed; cheap for plain rows."""
    try:
        if value[0] == PLAIN:
            size, at = read_varint(value, 1)
            return at + size == len(value)
        decode_row(value)
    except (IndexError, DamagedRow):
        return False
    return True


def attributes_in(extras: Mapping[str, object]) -> dict[str, str] | None:
    """The attributes in a row's extras; None when there are none. Raises DamagedRow."""
    strings = extras.get(ATTRIBUTES)
    if strings is None:
        return None
    if not isinstance(strings, dict) or not all(
        isinstance(name, str) and isinstance(text, str) for name, text in strings.items()
    ):
        raise DamagedRow("a row's attributes are not a map of strings")
    return strings


def own_ttl_s(value: bytes) -> int | None:
    """The message's own time to live, without decoding the row; None when it has none, or cannot be read."""
    flags = value[0] if value else 0
    at = 9 if flags & HAS_POINTER else 1
    if not flags & HAS_TTL or flags & ~_KNOWN or len(value) < at + 4:
        return None
    return int.from_bytes(value[at : at + 4], "big")


def expires_ms_of(position: bytes, ttl_s: int | None) -> int:
    """The end of a message's own time to live; 0: it has none."""
    return 0 if ttl_s is None else published_ms(position) + ttl_s * 1000


# --- references ------------------------------------------------------------------------------------
#
# Message rows without a payload, at the position where messages were published that had been stored before.
#
#     n messages  b bytes of their payloads  f first  l last payload position (10 bytes each)
#     g indexes of the winning segments  w the staged pointer
#
# A transaction's payload rows are stored under the write pointer that the reference carries. Staged ones are stored
# under a negative pointer that belongs to no transaction, and their reference carries none: every reader sees it.


#: The key under which a reference names the pointer that its messages were staged under.
STAGED = "w"
_LOWEST_POINTER = -(1 << 63)


@dataclass(frozen=True, slots=True)
class Stored:
    """The extras of a reference: which payload rows it publishes, and the pointer they are stored under."""

    messages: int
    payload_bytes: int
    first: bytes
    """Position (10 bytes: write timestamp, sequence id) of the first payload row; it may be in a losing segment."""
    last: bytes
    """Position of the last one, included."""
    segments: frozenset[int] | None = None
    """The winning segments by index; None: the publish listed none, and every row counts."""
    staged: int | None = None
    """The pointer they were staged under, below 0; None if they are under the row's own write pointer."""

    def extras(self) -> dict[str, object]:
        """The form in the row."""
        extras: dict[str, object] = {"n": self.messages, "b": self.payload_bytes, "f": self.first, "l": self.last}
        if self.segments is not None:
            extras["g"] = sorted(self.segments)
        if self.staged is not None:
            extras[STAGED] = self.staged
        return extras

    def pointer_of_payloads(self, row: MessageRow) -> int:
        """The pointer in the keys of the payload rows that ``row``, which has these extras, refers to."""
        return abs(row.pointer or 0) if self.staged is None else self.staged

    @classmethod
    def of(cls, row: MessageRow) -> Stored:
        """The extras of a reference row. Raises DamagedRow."""
        extras = row.extras
        count, size, first, last = (extras.get(key) for key in "nbfl")
        segments, staged = extras.get("g"), extras.get(STAGED)
        if (
            not (_is_pointer(staged) if row.pointer is None else row.pointer and staged is None)
            or not (_is_position(first) and _is_position(last) and _is_count(count) and _is_count(size))
            or not (segments is None or (isinstance(segments, list) and all(map(_is_count, segments))))
        ):
            raise DamagedRow("a row has no payload and no readable reference to one")
        winners = None if segments is None else frozenset(segments)
        return cls(count, size, first, last, winners, staged)  # type: ignore[arg-type]


def staged_pointer(ts_ms: int, sequence_id: int) -> int:
    """The unique pointer for staged messages that a position of the topic determines."""
    return -(ts_ms * SEQUENCES_PER_MS + sequence_id)


def position_of_staged(pointer: int) -> tuple[int, int]:
    """The position ``(ts_ms, sequence_id)`` that determined a staged pointer; no message has it."""
    return divmod(-pointer, SEQUENCES_PER_MS)


def _is_pointer(value: object) -> bool:
    return type(value) is int and _LOWEST_POINTER <= value < 0


def _is_position(value: object) -> bool:
    return isinstance(value, bytes) and len(value) == len(NO_PAYLOAD_PART)
