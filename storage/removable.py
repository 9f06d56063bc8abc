"""What whoever cleans must know of a row before it is removed: whether it can be read, and what goes with it.

A row that cannot be read is kept for somebody to look at: nobody knows what it was.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from protocol.keys import (
    MESSAGE_TAIL_BYTES,
    PAYLOAD_TAIL_BYTES,
    PRODUCER,
    PRODUCERS,
    DamagedRow,
    parse_pointer_key,
    parse_system_key,
    topic_of,
)
from protocol.records import Reader
from protocol.references import Stored
from protocol.rows import NO_PAYLOAD, decode_row, is_intact
from protocol.topic.usage import ROW_BYTES

if TYPE_CHECKING:
    from storage.base import Row

_POSITION_BYTES = 10


def is_message(row: Row) -> bool:
    """Whether a row of the message table can be read, and says where its payloads are if it has none."""
    if not _is_topic(row[0][:-MESSAGE_TAIL_BYTES]) or not is_intact(row[1]):
        return False
    if refers(row):
        try:
            Stored.of(decode_row(row[1]))
        except DamagedRow:
            return False
    return True


def refers(row: Row) -> bool:
    """Whether a message row stands for stored messages. Anything may be in it otherwise."""
    return bool(row[1]) and bool(row[1][0] & NO_PAYLOAD)


def payloads_of(row: Row) -> tuple[bytes, bytes]:
    """``[start, stop)`` of the payload keys that a message row refers to. Raises DamagedRow when it does not say."""
    key, value = row
    message = decode_row(value)
    stored = Stored.of(message)
    prefix = key[:-_POSITION_BYTES] + stored.pointer_of_payloads(message).to_bytes(8, "big", signed=True)
    return prefix + stored.first, prefix + stored.last + b"\x00"


def is_payload(row: Row) -> bool:
    """Whether a row of the payload table can be read."""
    return _is_topic(row[0][:-PAYLOAD_TAIL_BYTES]) and is_intact(row[1])


def counted(row: Row) -> tuple[int, int]:
    """The messages and bytes that the topic counted for a row when it was published."""
    if not refers(row):
        return 1, len(row[1]) + ROW_BYTES
    stored = Stored.of(decode_row(row[1]))
    return stored.messages, stored.payload_bytes + ROW_BYTES * stored.messages


def is_reader(row: Row) -> bool:
    """Whether a reader's row can be read."""
    try:
        Reader.decode(row[1])
    except DamagedRow:
        return False
    return True


def is_pointer(row: Row) -> bool:
    """Whether a row is one about a write pointer; in a generation that is gone its value means nothing any more."""
    try:
        parse_pointer_key(row[0])
    except DamagedRow:
        return False
    return True


def is_producer(row: Row) -> bool:
    """Whether a row is one about producers; in a generation that is gone its value means nothing any more."""
    try:
        return parse_system_key(row[0]).kind in (PRODUCER, PRODUCERS)
    except DamagedRow:
        return False


@lru_cache(maxsize=64)
def _is_topic(start: bytes) -> bool:
    """Whether a key's start is ``ns:topic:`` and no more; asked of every row, and the same for most."""
    try:
        return topic_of(start)[1] == b""
    except DamagedRow:
        return False
