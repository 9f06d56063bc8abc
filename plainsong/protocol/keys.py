"""Row keys, byte for byte; big-endian, so that byte order is message order.

    metadata key   ns ":" topic ":"
    message key    ns ":" topic ":" generation:i32  publish_ts:i64  seq:u16
    payload key    ns ":" topic ":" generation:i32  write_pointer:i64  write_ts:i64  seq:u16
    system key     00 kind:u8 ns ":" topic ":" generation:i32 [rest]        in the metadata table
    namespace key  00 6e ns ":"                                             there too: a namespace's properties
    service key    00 78 kind:u8 [pointer:i64]                              there too: the transaction service

Names have no colon and no byte 00, so keys of different topics never mix, and system rows sort before
every topic. ``docs/format.md`` shows a worked example of each, which a test decodes.
"""

from __future__ import annotations

import re
import struct
from functools import lru_cache
from typing import NamedTuple

from plainsong.protocol.errors import StorageFailed
from plainsong.protocol.names import TopicName

_TOPIC = re.compile(rb"[a-zA-Z0-9_]+:[a-zA-Z0-9_-]+:")
_GENERATION = struct.Struct(">i")
_PAYLOAD = struct.Struct(">qqH")
_POSITION = struct.Struct(">qH")
_POINTER = struct.Struct(">q")
#: The bytes after the topic in a message key, and in a payload key.
MESSAGE_TAIL_BYTES = _GENERATION.size + _POSITION.size
PAYLOAD_TAIL_BYTES = _GENERATION.size + _PAYLOAD.size
#: The pointer in the payload keys of a chain's entries: no transaction has it, and no staged message.
CHAIN_POINTER = 0
#: First byte of all rows of the metadata table other than topics' metadata.
SYSTEM = b"\x00"
#: Kinds of system rows. A letter is never given a second meaning.
HIGH_WATER = b"h"
READER = b"r"
POINTER = b"w"
PRODUCER = b"p"
PRODUCERS = b"e"
#: A namespace's properties: 00 'n' and the namespace, no topic.
NAMESPACE = b"n"
#: Progress of a copy from another store: of the whole copy (no topic), and of one topic.
COPYING = b"c"
#: The transaction service's rows: 00 'x' and another letter, no topic.
SERVICE = b"x"


class DamagedRow(StorageFailed):
    """A row that Plainsong did not write, or that has changed since. It is reported, and left unchanged."""

    title = "A row of the store cannot be read"


class MessageKey(NamedTuple):
    """The parts of a message key."""

    name: TopicName
    generation: int
    publish_ts_ms: int
    sequence_id: int


class PayloadKey(NamedTuple):
    """The parts of a payload key."""

    name: TopicName
    generation: int
    write_pointer: int
    write_ts_ms: int
    sequence_id: int


class SystemKey(NamedTuple):
    """The parts of a system key; ``rest`` is, for example, the name of a reader or producer."""

    kind: bytes
    name: TopicName
    generation: int
    rest: bytes


def metadata_key(name: TopicName) -> bytes:
    """The key of a topic's metadata row."""
    return f"{name.namespace}:{name.topic}:".encode("ascii")


def namespace_range(namespace: str) -> tuple[bytes, bytes]:
    """``[start, stop)`` of the metadata rows of a namespace."""
    start = f"{namespace}:".encode("ascii")
    return start, stop_after(start)


def topic_range() -> tuple[bytes, bytes]:
    """``[start, stop)`` of the metadata rows of all topics, without system rows."""
    return b"\x01", b"\xff"


@lru_cache(maxsize=4096)  # each commit and each page of a topic asks for the same one
def generation_prefix(name: TopicName, generation: int) -> bytes:
    """The prefix of the message and payload keys of one generation."""
    return metadata_key(name) + _GENERATION.pack(generation)


def generations_range(name: TopicName, first: int, last: int) -> tuple[bytes, bytes]:
    """``[start, stop)`` of the rows of generations ``first`` to ``last``, both included."""
    return generation_prefix(name, first), stop_after(generation_prefix(name, last))


def system_key(kind: bytes, name: TopicName, generation: int, rest: bytes = b"") -> bytes:
    """The key of a system row."""
    return SYSTEM + kind + metadata_key(name) + _GENERATION.pack(generation) + rest


def namespace_key(namespace: str) -> bytes:
    """The key of a namespace's properties."""
    return SYSTEM + NAMESPACE + f"{namespace}:".encode("ascii")


def namespace_of(key: bytes) -> str:
    """The namespace of a key from ``namespace_key``. Raises DamagedRow."""
    head, name, colon = key[:2], key[2:-1], key[-1:]
    if head != SYSTEM + NAMESPACE or colon != b":" or not name or not name.isascii():
        raise DamagedRow(f"key {key.hex()} is not that of a namespace")
    return name.decode("ascii")


def pointer_key(name: TopicName, generation: int, pointer: int) -> bytes:
    """The key of a topic's row about a write pointer."""
    return system_key(POINTER, name, generation, pointer_suffix(pointer))


def pointer_suffix(pointer: int) -> bytes:
    """The end of a key from ``pointer_key``."""
    return _POINTER.pack(pointer)


def parse_pointer_key(key: bytes) -> tuple[TopicName, int, int]:
    """Topic, generation and write pointer of a key from ``pointer_key``. Raises DamagedRow."""
    parsed = parse_system_key(key)
    if parsed.kind != POINTER or len(parsed.rest) != _POINTER.size:
        raise DamagedRow(f"key {key.hex()} is not that of a pointer")
    return parsed.name, parsed.generation, _POINTER.unpack(parsed.rest)[0]


def payload_prefix(name: TopicName, generation: int, pointer: int) -> bytes:
    """The prefix of the payload keys of one write pointer."""
    return generation_prefix(name, generation) + _POINTER.pack(pointer)


def stop_after(prefix: bytes) -> bytes:
    """The first key after every key that starts with ``prefix`` (which is not all ff)."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1])


def topic_prefix(key: bytes) -> bytes:
    """The ``ns:topic:`` that a message or payload key begins with; empty when it begins with no topic."""
    found = _TOPIC.match(key)
    return b"" if found is None else found.group()


def topic_of(key: bytes) -> tuple[TopicName, bytes]:
    """Split a key into the topic that it starts with, and the bytes after it.

    Raises:
      DamagedRow: the key does not start with ``ns:topic:``.
    """
    namespace, first, tail = key.partition(b":")
    topic, second, rest = tail.partition(b":")
    if not (first and second and namespace and topic):
        raise DamagedRow(f"key {key.hex()} names no topic")
    try:
        return TopicName(namespace.decode("ascii"), topic.decode("ascii")), rest
    except UnicodeDecodeError:
        raise DamagedRow(f"key {key.hex()} names no topic") from None


def parse_message_key(key: bytes) -> MessageKey:
    """The parts of a message key. Raises DamagedRow."""
    name, rest = topic_of(key)
    if len(rest) != MESSAGE_TAIL_BYTES:
        raise DamagedRow(f"message key {key.hex()} has {len(rest)} bytes after the topic, not {MESSAGE_TAIL_BYTES}")
    (generation,) = _GENERATION.unpack_from(rest)
    ts, seq = _POSITION.unpack_from(rest, 4)
    return MessageKey(name, generation, ts, seq)


def parse_payload_key(key: bytes) -> PayloadKey:
    """The parts of a payload key. Raises DamagedRow."""
    name, rest = topic_of(key)
    if len(rest) != PAYLOAD_TAIL_BYTES:
        raise DamagedRow(f"payload key {key.hex()} has {len(rest)} bytes after the topic, not {PAYLOAD_TAIL_BYTES}")
    (generation,) = _GENERATION.unpack_from(rest)
    return PayloadKey(name, generation, *_PAYLOAD.unpack_from(rest, 4))


def parse_system_key(key: bytes) -> SystemKey:
    """The parts of a system key. Raises DamagedRow."""
    if key[:1] != SYSTEM or len(key) < 2:
        raise DamagedRow(f"key {key.hex()} is not a system key")
    name, rest = topic_of(key[2:])
    if len(rest) < 4:
        raise DamagedRow(f"system key {key.hex()} has no generation")
    (generation,) = _GENERATION.unpack_from(rest)
    return SystemKey(key[1:2], name, generation, rest[4:])
