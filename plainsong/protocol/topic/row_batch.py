"""From messages and positions to rows and wire form, with the extras of rows: the inner loop of publishing.

Every message costs one key suffix and one value here; plain ones are put into wire form all at once, behind the commit.
Any other work per message shows in the throughput of large requests (measured: 0.08 µs a message for key and value, 0.06
for the wire form; one item after the other it took 0.15).
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgpack

from plainsong.protocol.errors import InvalidParameter
from plainsong.protocol.ids import ID_BYTES, NO_PAYLOAD_PART, SEQUENCES_PER_MS, after
from plainsong.protocol.page import ITEM_START, length_prefix
from plainsong.protocol.rows import (
    ATTRIBUTES,
    BATCH,
    HAS_EXTRAS,
    HAS_POINTER,
    INDEX,
    PLAIN_GAP,
    STAMP,
    MessageRow,
    encode_row,
    row_head,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from plainsong.protocol.requests import PublishRequest
    from plainsong.protocol.rows import Stamp
    from plainsong.protocol.topic.state import Run

#: Every sequence id as its two bytes: packing them one by one took a third of the time of ``RowBatch.add``.
_SEQUENCE_BYTES = [sequence_id.to_bytes(2, "big") for sequence_id in range(SEQUENCES_PER_MS)]
#: Of a plain message's wire form, what its row's value does not have.
_ITEM_BESIDE_BYTES = len(ITEM_START) + ID_BYTES - len(NO_PAYLOAD_PART) + len(PLAIN_GAP)
_I64 = struct.Struct(">q")
_U32 = struct.Struct(">I")


class RowBatch:
    """The message rows of one commit, in key order, and the same messages in wire form."""

    __slots__ = ("_items", "attributes", "expiries", "pointers", "restart", "suffixes", "values")

    def __init__(self) -> None:
        self.suffixes: list[bytes] = []
        self.values: list[bytes] = []
        #: None: all rows so far are plain, and their wire form follows from suffixes and values.
        self._items: list[bytes] | None = None
        #: Index of an item → end of its own time to live (ms), for items that have one.
        self.expiries: dict[int, int] = {}
        #: Index of an item → its attributes, for items that have some.
        self.attributes: dict[int, Mapping[str, str]] = {}
        #: Items under a write pointer: index of the first, index after the last, pointer; ascending.
        self.pointers: list[tuple[int, int, int]] = []
        #: The bound behind the last reference row, whose messages are in the payload table; ``items`` begin there.
        self.restart: bytes | None = None

    def __len__(self) -> int:
        return len(self.suffixes)

    @property
    def has_items(self) -> bool:
        """Whether there are messages behind the last reference row."""
        return bool(self.suffixes if self._items is None else self._items)

    @property
    def last_id(self) -> bytes:
        """The id of the last item."""
        if self._items is None:
            return self.suffixes[-1] + NO_PAYLOAD_PART
        return self._items[-1][1 : 1 + ID_BYTES]

    @property
    def items(self) -> list[bytes]:
        """The messages in wire form, one by one."""
        if self._items is None:
            self._items = [
                ITEM_START + suffix + PLAIN_GAP + value
                for suffix, value in zip(self.suffixes, self.values, strict=True)
            ]
        return self._items

    def plain_wire(self) -> tuple[bytes, array[int]] | None:
        """The wire form of all messages and where in it each begins, with its end; None: some are not plain."""
        if self._items is not None:
            return None
        parts = [ITEM_START, b"", PLAIN_GAP, b""] * len(self.values)
        parts[1::4], parts[3::4] = self.suffixes, self.values
        wire = b"".join(parts)
        sizes = set(map(len, self.values))
        if len(sizes) == 1:
            return wire, array("Q", range(0, len(wire) + 1, _ITEM_BESIDE_BYTES + sizes.pop()))
        each = [_ITEM_BESIDE_BYTES + len(value) for value in self.values]
        return wire, array("Q", accumulate(each, initial=0))

    def add(
        self,
        runs: Iterable[Run],
        messages: Sequence[bytes],
        ttls_s: Sequence[int | None] | None,
        pointer: int | None = None,
        row_extras: RowExtras | None = None,
    ) -> int:
        """Append one request's messages at the positions of ``runs``.

        Returns the time (ms) at which the first message with a time to live of its own expires, 0 without any.
        """
        suffixes = positions(runs)
        values = (
            values_of(messages, ttls_s, pointer) if row_extras is None else row_extras.values(messages, ttls_s, pointer)
        )
        plain = self._items is None and pointer is None and ttls_s is None and row_extras is None
        first_item = len(self.suffixes) if plain else len(self.items)
        if not plain:
            self.items.extend(_items(suffixes, messages))
        if self.suffixes:
            self.suffixes += suffixes
            self.values += values
        else:
            self.suffixes, self.values = suffixes, values
        if pointer is not None:
            self._has_pointer(first_item, pointer)
        if row_extras is not None and (row_extras.attributes is not None or row_extras.shared):
            self.attributes |= row_extras.attributes_from(first_item, len(messages))
        return 0 if ttls_s is None else self._expire(first_item, runs, ttls_s)

    def add_reference(self, suffix: bytes, value: bytes) -> None:
        """Append a row whose messages are in the payload table; ``items`` begin anew behind it."""
        self.suffixes.append(suffix)
        self.values.append(value)
        self._items, self.pointers, self.expiries, self.attributes = [], [], {}, {}
        self.restart = after(suffix + b"\xff" * len(NO_PAYLOAD_PART))

    def _has_pointer(self, first_item: int, pointer: int) -> None:
        """The items from ``first_item`` on are under ``pointer``."""
        if self.pointers and self.pointers[-1][1:] == (first_item, pointer):
            first_item = self.pointers.pop()[0]
        self.pointers.append((first_item, len(self.items), pointer))

    def _expire(self, first_item: int, runs: Iterable[Run], ttls_s: Sequence[int | None]) -> int:
        """Record the expiry times of the items from ``first_item`` on. Returns the first of them, 0 for none."""
        stamps = (run.ts_ms for run in runs for _ in range(run.length))
        own = {
            index: ts_ms + ttl_s * 1000
            for index, (ts_ms, ttl_s) in enumerate(zip(stamps, ttls_s, strict=True), first_item)
            if ttl_s is not None
        }
        self.expiries |= own
        return min(own.values(), default=0)


def positions(runs: Iterable[Run]) -> list[bytes]:
    """The ten bytes of each position."""
    out: list[bytes] = []
    for run in runs:
        ts = run.ts_ms.to_bytes(8, "big")
        out += [ts + sequence for sequence in _SEQUENCE_BYTES[run.first : run.first + run.length]]
    return out


def values_of(
    messages: Sequence[bytes],
    ttls_s: Sequence[int | None] | None,
    pointer: int | None = None,
    extras: Mapping[str, object] | None = None,
) -> list[bytes]:
    """The values of the rows of ``messages``; all of them have the same pointer and extras."""
    if ttls_s is not None:
        return [
            encode_row(MessageRow(message, pointer, ttl_s, extras or {}))
            for message, ttl_s in zip(messages, ttls_s, strict=True)
        ]
    return _after_heads(row_head(pointer, extras), messages)


def own_ttls(
    count: int, request_ttl_s: int | None, message_ttls_s: Sequence[int | None] | None
) -> Sequence[int | None] | None:
    """Each message's time to live in seconds, the shorter of the request's and its own; None: no message has one."""
    if message_ttls_s is None:
        return None if request_ttl_s is None else [request_ttl_s] * count
    if request_ttl_s is None:
        return message_ttls_s if any(ttl is not None for ttl in message_ttls_s) else None
    return [request_ttl_s if ttl is None else min(ttl, request_ttl_s) for ttl in message_ttls_s]


def _items(suffixes: Sequence[bytes], messages: Sequence[bytes]) -> list[bytes]:
    """The messages in wire form; it does not depend on the form of their rows."""
    if len(messages) == 1:
        (message,) = messages
        return [ITEM_START + suffixes[0] + NO_PAYLOAD_PART + length_prefix(len(message)) + message]
    sizes = set(map(len, messages))
    if len(sizes) == 1:
        head = NO_PAYLOAD_PART + length_prefix(sizes.pop())
        return [ITEM_START + suffix + head + message for suffix, message in zip(suffixes, messages, strict=True)]
    heads = {size: NO_PAYLOAD_PART + length_prefix(size) for size in sizes}
    return [
        ITEM_START + suffix + heads[len(message)] + message for suffix, message in zip(suffixes, messages, strict=True)
    ]


def _after_heads(head: bytes, messages: Sequence[bytes]) -> list[bytes]:
    """``head``, the length and the bytes of each message."""
    sizes = set(map(len, messages))
    if len(sizes) == 1:
        head += length_prefix(sizes.pop())
        return [head + message for message in messages]
    heads = {size: head + length_prefix(size) for size in sizes}
    return [heads[len(message)] + message for message in messages]


# --- extras of rows --------------------------------------------------------------------------------

NOTHING: Mapping[str, object] = MappingProxyType({})
NO_STRINGS: Mapping[str, str] = MappingProxyType({})
#: The attribute that holds a request's routing key.
ROUTING_KEY = "routingKey"
#: The number of row heads kept from request to request.
_KEPT_HEADS = 1024
_INDEX_KEY: bytes = msgpack.packb(INDEX)


@dataclass(slots=True)
class RowExtras:
    """The extras of one request's rows.

    The first row has the stamp and the batch, the others their index in the request. Rows whose extras hold nothing
    else have the same heads in every request, so these are encoded once: publishing as a producer must not cost a
    msgpack map for each message.
    """

    first: Mapping[str, object] = field(default_factory=dict)
    """Extras of the first row only."""
    every: Mapping[str, object] = field(default_factory=dict)
    """Extras of all rows."""
    indexed: bool = False
    """Whether the other rows have their index."""
    begin: int = 0
    """The index of the first message: 1 behind a reference row, which then has the extras of ``first``."""
    attributes: Sequence[Mapping[str, str]] | None = None
    """One for each message; None: they all have ``shared``."""
    shared: Mapping[str, str] = field(default_factory=dict)

    def attributes_of(self, index: int) -> Mapping[str, str]:
        return self.shared if self.attributes is None else self.attributes[index]

    def attributes_from(self, first: int, count: int) -> dict[int, Mapping[str, str]]:
        """The attributes of the messages that have any, by index, counted from ``first``."""
        if self.attributes is None:
            return dict.fromkeys(range(first, first + count), self.shared) if self.shared else {}
        return {index: each for index, each in enumerate(self.attributes, first) if each}

    def extras_of(self, index: int) -> dict[str, object]:
        at = index + self.begin
        extras: dict[str, object] = dict(self.first) if at == 0 else {INDEX: at} if self.indexed else {}
        extras |= self.every
        attributes = self.attributes_of(index)
        if attributes:
            extras[ATTRIBUTES] = dict(attributes)
        return extras

    def values(
        self, messages: Sequence[bytes], ttls_s: Sequence[int | None] | None, pointer: int | None
    ) -> list[bytes]:
        """The values of the rows of the request's messages."""
        if ttls_s is not None or self.attributes is not None:
            each_ttl_s = [None] * len(messages) if ttls_s is None else ttls_s
            return [
                encode_row(MessageRow(message, pointer, ttl_s, self.extras_of(index)))
                for index, (message, ttl_s) in enumerate(zip(messages, each_ttl_s, strict=True))
            ]
        if len(messages) == 1:
            alone = not (self.begin or self.every or self.shared)
            head = row_head(pointer, self.first if alone else self.extras_of(0))
            return [b"%b%b%b" % (head, length_prefix(len(messages[0])), messages[0])]
        tail = _packed_attributes(self.shared)
        if not self.indexed or self.every:
            heads = [
                row_head(pointer, self.extras_of(0)),
                *[row_head(pointer, self.extras_of(1))] * (len(messages) - 1),
            ]
        elif self.begin:
            heads = _heads(pointer, tail, self.begin, len(messages))
        else:
            heads = [row_head(pointer, self.extras_of(0)), *_heads(pointer, tail, 1, len(messages) - 1)]
        sizes = set(map(len, messages))
        lengths = {size: length_prefix(size) for size in sizes}
        if len(sizes) == 1:
            length = lengths[sizes.pop()]
            return [b"%b%b%b" % (head, length, message) for head, message in zip(heads, messages, strict=True)]
        return [
            b"%b%b%b" % (head, lengths[len(message)], message) for head, message in zip(heads, messages, strict=True)
        ]


def row_extras_of(request: PublishRequest) -> RowExtras | None:
    """The extras of a request's rows; None: they have none.

    Raises InvalidParameter: a message and its request have different routing keys, or the messages of an atomic
    request do.
    """
    first: dict[str, object] = {}
    if request.atomic and request.write_pointer is None:
        first[BATCH] = len(request.messages)
    key = request.routing_key
    attributes = request.attributes
    if attributes is not None and not any(attributes):
        attributes = None
    shared = {} if key is None else {ROUTING_KEY: key}
    if attributes is not None and key is not None:
        if any(each.get(ROUTING_KEY, key) != key for each in attributes):
            raise InvalidParameter("a message has another routingKey than its request", hint="give one of them")
        attributes = [{**each, **shared} for each in attributes]
    if request.atomic and attributes is not None and len({each.get(ROUTING_KEY) for each in attributes} - {None}) > 1:
        raise InvalidParameter("an atomic request has one routingKey", hint="give it as the request's routingKey")
    if not (first or shared or attributes is not None):
        return None
    return RowExtras(first, indexed=bool(first), attributes=attributes, shared=shared)


def with_stamp(row_extras: RowExtras | None, stamp: Stamp, *, begin: int = 0) -> RowExtras:
    """The extras with a producer's stamp; ``begin`` 1: a reference row comes first, and has the stamp."""
    if row_extras is None:
        return RowExtras({STAMP: stamp.packed()}, NOTHING, indexed=True, begin=begin, shared=NO_STRINGS)
    row_extras.first = {STAMP: stamp.packed(), **row_extras.first}
    row_extras.indexed, row_extras.begin = True, begin
    return row_extras


def _packed_attributes(attributes: Mapping[str, str]) -> bytes:
    if not attributes:
        return b""
    packed: bytes = msgpack.packb(ATTRIBUTES) + msgpack.packb(dict(attributes))
    return packed


def _heads(pointer: int | None, tail: bytes, begin: int, count: int) -> list[bytes]:
    """The heads of ``count`` rows with indexes from ``begin`` on."""
    if pointer is None and not tail and begin == 1:
        kept = _kept_heads()
        if count <= len(kept):
            return kept[:count]
    return _made_heads(pointer, tail, begin, count)


@lru_cache(maxsize=1)
def _kept_heads() -> list[bytes]:
    return _made_heads(None, b"", 1, _KEPT_HEADS)


@lru_cache(maxsize=1)
def _kept_numbers() -> list[bytes]:
    """Small numbers, packed."""
    return [msgpack.packb(number) for number in range(_KEPT_HEADS + 1)]


def _made_heads(pointer: int | None, tail: bytes, begin: int, count: int) -> list[bytes]:
    """The heads that ``encode_row`` would write; ``tail`` is the rest of the extras, packed."""
    start = bytes([HAS_EXTRAS]) if pointer is None else bytes([HAS_EXTRAS | HAS_POINTER]) + _I64.pack(pointer)
    opening = (b"\x82" if tail else b"\x81") + _INDEX_KEY
    end = begin + count
    numbers = _kept_numbers()[begin:end]
    numbers += [msgpack.packb(number) for number in range(begin + len(numbers), end)]
    starts = {size: start + _U32.pack(len(opening) + size + len(tail)) + opening for size in set(map(len, numbers))}
    return [b"%b%b%b" % (starts[len(number)], number, tail) for number in numbers]
