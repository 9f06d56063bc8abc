"""A page: the messages of one answer in wire form, and the reason why it ends.

Messages travel from the store and the scan cache to the socket as Avro *items*, as in an answer of version 1, many of
them in one ``bytes``:

    28 (length 20)   id:20   length of the payload (zigzag varint)   payload

So an answer of version 1 is a join, and every other encoding is a walk over the same bytes.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import chain
from struct import calcsize, iter_unpack
from typing import TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

#: Avro's length prefix of an id: 20, zigzag-encoded.
ITEM_START = b"\x28"
#: Bytes of an item before the payload's length.
ITEM_HEAD_BYTES = 21
#: Why a page ends: the topic does, a bound was reached, or a message is undecided.
End = Literal["end", "more", "held"]
_LENGTHS: dict[int, bytes] = {}
#: Rows of one length that are cut by one format: a call for each row takes three times as long.
_CUT_AT_ONCE = 50


def varint(number: int) -> bytes:
    """``number`` (not negative) as Avro writes a long: zigzag, seven bits per byte, lowest first."""
    rest = number << 1
    out = []
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)
    return bytes(out)


def length_prefix(size: int) -> bytes:
    """``varint`` for lengths that recur: remembered for payloads up to 64 KiB."""
    known = _LENGTHS.get(size)
    if known is None:
        known = varint(size)
        if size <= 0xFFFF:
            _LENGTHS[size] = known
    return known


def cut_rows(data: bytes | memoryview, row: str) -> list[bytes]:
    """The fields of rows that all have the same length, in order.

    Args:
      row: a format of ``struct`` with the fields (``100s``) and the gaps to skip (``2x``).
    """
    view = memoryview(data)
    found: list[bytes] = []
    at = 0
    if len(view) >= _CUT_AT_ONCE * calcsize(row):
        several = row * _CUT_AT_ONCE
        at = len(view) - len(view) % calcsize(several)
        found.extend(chain.from_iterable(iter_unpack(several, view[:at])))
    found.extend(chain.from_iterable(iter_unpack(row, view[at:])))
    return found


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode the non-negative number of a ``varint`` at ``at``; return it and the position after it.

    Raises:
      IndexError: the data ends inside the number.
    """
    byte = data[at]
    at += 1
    number = byte & 0x7F
    shift = 7
    while byte & 0x80:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        shift += 7
    return number >> 1, at


@dataclass(frozen=True, slots=True)
class Held:
    """The undecided transaction that blocks a committed reader: that of the first undecided message."""

    write_pointer: int
    """The transaction's; ``client.transactions`` and ``plainsong tx blame TOPIC`` show its client."""
    since_ms: int | None = None
    """When that message was published, in milliseconds since 1970, by the daemon's clock; None: an old daemon left it out."""
    hidden_messages: int | None = None
    """Number of messages from that one on, counted up to 1 000."""
    hidden_more: bool = False
    """True if there are more than ``hidden_messages``."""

    @property
    def hidden_text(self) -> str:
        """The count as HTTP says it: ``12``, or ``1000+`` if there are more."""
        return f"{self.hidden_messages}{'+' if self.hidden_more else ''}"


#: Hidden messages are counted up to here, and one more to detect that there are more.
HIDDEN_COUNTED = 1000


@dataclass(slots=True)
class Page:
    """Messages in topic order, and the reason why there are no more.

    ``attributes`` and ``pointers`` are sparse and keyed by a message's index in the page; a pointer is negative when
    it was rolled back.
    """

    parts: Sequence[bytes] = ()
    count: int = 0
    payload_bytes: int = 0
    last_id: bytes | None = None
    """The position to resume from, exclusively; None if the topic never had a message."""
    end: End = "end"
    attributes: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    pointers: Mapping[int, int] = field(default_factory=dict)
    held: Held | None = None
    """Set when ``end`` is ``held``."""
    held_until_ms: int = field(default=0, init=False)
    """When the message that holds the reader expires by its own time to live; 0: it has none.

    Other instances do not get it."""

    def messages(self) -> Iterator[tuple[bytes, bytes]]:
        """Each message's id (20 bytes) and payload."""
        for part in self.parts:
            yield from items_in(part)


def item(message_id: bytes, payload: bytes) -> bytes:
    """One message in wire form."""
    return b"%b%b%b%b" % (ITEM_START, message_id, length_prefix(len(payload)), payload)


def items_in(part: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The ``(id, payload)`` of each of the concatenated items."""
    at = 0
    end = len(part)
    while at < end:
        head = at + ITEM_HEAD_BYTES
        message_id = part[at + 1 : head]
        size = part[head]
        if size < 0x80:
            size >>= 1
            at = head + 1
        else:
            size, at = read_varint(part, head)
        yield message_id, part[at : at + size]
        at += size


# --- items of one length, which need not be walked one by one ------------------------------


#: Shorter parts are walked at once: looking for equal lengths would cost more.
_MIN_BYTES = 512


def messages_of(page: Page) -> Iterator[tuple[bytes, bytes]]:
    """Each message's id (20 bytes) and payload, as ``Page.messages`` gives them."""
    return chain.from_iterable(map(_messages_in, page.parts))


def offsets_in(part: bytes) -> array[int] | range:
    """Return where each of the concatenated items begins, and where the last one ends."""
    alike = _alike(part)
    if alike is not None:
        return range(0, len(part) + 1, sum(alike))
    offsets = array("Q", (0,))
    at, end = 0, len(part)
    while at < end:
        size, at = read_varint(part, at + ITEM_HEAD_BYTES)
        at += size
        offsets.append(at)
    return offsets


def _messages_in(part: bytes) -> Iterable[tuple[bytes, bytes]]:
    """The items of a part. Items of one length are cut like a table, three times as fast."""
    alike = _alike(part)
    if alike is None:
        return items_in(part)
    size, start = alike
    items = iter_unpack(f"x20s{start - ITEM_HEAD_BYTES}x{size}s", part)
    return cast("Iterable[tuple[bytes, bytes]]", items)


def _alike(part: bytes) -> tuple[int, int] | None:
    """Bytes of each payload, and before it, if all items have the first one's length prefix: compared column by column."""
    if len(part) < _MIN_BYTES:
        return None
    size, start = read_varint(part, ITEM_HEAD_BYTES)
    count, rest = divmod(len(part), start + size)
    columns = range(ITEM_HEAD_BYTES, start)
    if rest or any(part[column :: start + size] != part[column : column + 1] * count for column in columns):
        return None
    return size, start
