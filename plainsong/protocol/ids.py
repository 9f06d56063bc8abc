"""Message ids: 20 bytes that sort in the topic's order.

    publish timestamp   8 bytes   milliseconds, i64 big-endian, never negative
    sequence id         2 bytes   u16, counts within the millisecond
    write timestamp     8 bytes   0 unless the payload is in the payload table
    payload sequence    2 bytes   0 unless the payload is in the payload table, or in a batch row

Ids are kept as ``bytes``: comparing bytes compares positions. The text form is 40 lower-case hex digits. A
*bound* is an id used as a position; every start of a poll is converted to one inclusive lower bound
(``since``), so that no later code has to handle exclusive starts. The layout is that of the original service.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from plainsong.protocol.errors import InvalidMessageId

ID_BYTES = 20
#: Publish timestamp and sequence id, which order the messages of a topic.
POSITION_BYTES = 10
#: Before every message.
FIRST_BOUND = bytes(ID_BYTES)
#: After every message: no timestamp has its sign bit set.
LAST_BOUND = b"\xff" * ID_BYTES
#: Sequence ids of one millisecond: 0 to 65535.
SEQUENCES_PER_MS = 1 << 16
MAX_TIMESTAMP_MS = (1 << 63) - 1
_ID = struct.Struct(">qHqH")
_POSITION = struct.Struct(">qH")
#: The last ten bytes of the id of a message in the message table.
NO_PAYLOAD_PART = bytes(ID_BYTES - POSITION_BYTES)


class MessageId(NamedTuple):
    """The four numbers of an id."""

    publish_ts_ms: int
    sequence_id: int
    write_ts_ms: int = 0
    payload_sequence_id: int = 0


def pack_id(publish_ts_ms: int, sequence_id: int, write_ts_ms: int = 0, payload_sequence_id: int = 0) -> bytes:
    return _ID.pack(publish_ts_ms, sequence_id, write_ts_ms, payload_sequence_id)


def unpack_id(message_id: bytes) -> MessageId:
    return MessageId._make(_ID.unpack(message_id))


#: ``pack_position(publish_ts_ms, sequence_id)``: the first ten bytes of an id, which end a message key.
pack_position = _POSITION.pack


def unpack_position(position: bytes) -> tuple[int, int]:
    """``(publish_ts_ms, sequence_id)`` of the first ten bytes of an id."""
    ts, seq = _POSITION.unpack(position)
    return ts, seq


def ordinal(position: bytes) -> int:
    """A position as a number, which increases by one with each row of a request."""
    return int.from_bytes(position, "big")


def position_at(number: int) -> bytes:
    """The position with this ordinal."""
    return number.to_bytes(POSITION_BYTES, "big")


def checked_position(value: object) -> bytes:
    """Return ``value``, decoded from a row, if it is a position. Raises ValueError."""
    if not isinstance(value, bytes) or len(value) != POSITION_BYTES:
        raise ValueError(f"{str(value)[:40]!r} is not a position")
    return value


def published_ms(message_id: bytes) -> int:
    """The publish timestamp of an id, or of a position."""
    return int.from_bytes(message_id[:8], "big")


def id_at(position: bytes) -> bytes:
    """The id of the message at a position of the message table."""
    return position + NO_PAYLOAD_PART


def shown_id(position: bytes) -> str:
    """A position as the id of its message, in hex."""
    return id_at(position).hex()


def checked_id(raw: bytes) -> bytes:
    """``raw`` if it has the length of an id.

    Raises:
      InvalidMessageId: its length is wrong.
    """
    if len(raw) != ID_BYTES:
        raise InvalidMessageId(f"an id is {ID_BYTES} bytes, this is {len(raw)}")
    return raw


def parse_id(text: str) -> bytes:
    """The id written as 40 hex digits.

    Raises:
      InvalidMessageId: the text is anything else.
    """
    try:
        raw = bytes.fromhex(text) if len(text) == 2 * ID_BYTES and text.isalnum() else b""
    except ValueError:
        raw = b""
    if len(raw) != ID_BYTES:
        shown = text if len(text) <= 60 else text[:57] + "..."
        raise InvalidMessageId(f"{shown!r} is not {2 * ID_BYTES} hex digits")
    return raw


def bound_at(timestamp_ms: int) -> bytes:
    """The bound before the first message that can be published at ``timestamp_ms``."""
    if timestamp_ms <= 0:
        return FIRST_BOUND
    if timestamp_ms > MAX_TIMESTAMP_MS:
        return LAST_BOUND
    return pack_id(timestamp_ms, 0)


def after(message_id: bytes) -> bytes:
    """The bound just after ``message_id``: excludes exactly that id, and nothing else."""
    if message_id >= LAST_BOUND:
        return LAST_BOUND
    return (int.from_bytes(message_id, "big") + 1).to_bytes(ID_BYTES, "big")


def before(bound: bytes) -> bytes | None:
    """The id to resume from, exclusively, in order to start at ``bound``; None before the first."""
    number = int.from_bytes(bound, "big")
    return (number - 1).to_bytes(ID_BYTES, "big") if number else None


def consecutive_ids(first_id: bytes, count: int) -> list[bytes]:
    """The ids of the ``count`` messages of one request in the message table, from ``first_id`` on.

    Positions are consecutive; when a millisecond's sequence ids run out, the next millisecond's follow.
    """
    first = ordinal(first_id[:POSITION_BYTES])
    return [id_at(position_at(number)) for number in range(first, first + count)]


def behind_position(position: bytes | None) -> str | None:
    """Return the first id after a position of 10 bytes, in hex: the start for reading the messages after it."""
    return None if position is None else after(position + b"\xff" * (ID_BYTES - len(position))).hex()
