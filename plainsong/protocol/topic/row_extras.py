"""The extras of a request's message rows: a producer's stamp, the batch, indexes, attributes, a routing key, a segment.

A plain publish has none; what they are called in a row, and when, ``plainsong.protocol.rows`` says.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from operator import add
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgpack

from plainsong.protocol.errors import InvalidParameter
from plainsong.protocol.page import length_prefix
from plainsong.protocol.rows import (
    ATTRIBUTES,
    BATCH,
    HAS_EXTRAS,
    HAS_POINTER,
    INDEX,
    STAMP,
    MessageRow,
    encode_row,
    row_head,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from plainsong.protocol.requests import PublishRequest
    from plainsong.protocol.rows import Stamp

_I64 = struct.Struct(">q")
_U32 = struct.Struct(">I")
NOTHING: Mapping[str, object] = MappingProxyType({})
NO_STRINGS: Mapping[str, str] = MappingProxyType({})
#: The attribute that holds a request's routing key.
ROUTING_KEY = "routingKey"
#: The number of row heads kept from request to request.
_KEPT_HEADS = 1024
#: Requests of so many messages of one length have their heads kept with that length.
_MANY = 64
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

    @property
    def has_attributes(self) -> bool:
        """Whether any message may have attributes."""
        return self.attributes is not None or bool(self.shared)

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
        self,
        messages: Sequence[bytes],
        ttls_s: Sequence[int | None] | None,
        pointer: int | None,
        length: int | None = None,
    ) -> tuple[list[bytes], int]:
        """The values of the rows of the request's messages, and the bytes of all of them together.

        Args:
          length: that of every message, where it is known that they have the same.
        """
        if ttls_s is not None or self.attributes is not None:
            each_ttl_s = [None] * len(messages) if ttls_s is None else ttls_s
            values = [
                encode_row(MessageRow(message, pointer, ttl_s, self.extras_of(index)))
                for index, (message, ttl_s) in enumerate(zip(messages, each_ttl_s, strict=True))
            ]
            return values, sum(map(len, values))
        if len(messages) == 1:
            value = self.head_of_one(pointer) + length_prefix(len(messages[0])) + messages[0]
            return [value], len(value)
        if length is None:
            prefixes = {size: length_prefix(size) for size in set(map(len, messages))}
            heads = [
                head + prefixes[len(message)]
                for head, message in zip(self._heads(pointer, len(messages)), messages, strict=True)
            ]
        elif _MANY <= len(messages) <= _KEPT_HEADS and self._only_indexed(pointer):
            prefix = length_prefix(length)
            heads = _heads_before(prefix)[: len(messages)]
            heads[0] = row_head(None, self.first) + prefix
            beside = len(heads[0]) + _kept_sizes()[len(messages) - 1] + (len(messages) - 1) * len(prefix)
            return list(map(add, heads, messages)), beside + len(messages) * length
        else:
            prefix = length_prefix(length)
            heads = [head + prefix for head in self._heads(pointer, len(messages))]
        values = list(map(add, heads, messages))
        return values, sum(map(len, values))

    def head_of_one(self, pointer: int | None) -> bytes:
        """What stands before the length in the row of a request's only message, which has no attributes of its own."""
        alone = not (self.begin or self.every or self.shared)
        return row_head(pointer, self.first if alone else self.extras_of(0))

    def _only_indexed(self, pointer: int | None) -> bool:
        """Whether the rows but the first have nothing beside their index, which is that of the message."""
        return pointer is None and self.indexed and not (self.begin or self.every or self.shared)

    def _heads(self, pointer: int | None, count: int) -> list[bytes]:
        """What stands before the lengths in the values of ``count`` rows that have no ttl, nor attributes of their own."""
        if not self.indexed or self.every:
            return [row_head(pointer, self.extras_of(0)), *[row_head(pointer, self.extras_of(1))] * (count - 1)]
        tail = _packed_attributes(self.shared)
        if self.begin:
            return _heads(pointer, tail, self.begin, count)
        return [row_head(pointer, self.extras_of(0)), *_heads(pointer, tail, 1, count - 1)]


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
        return RowExtras({STAMP: stamp.packed()}, NOTHING, True, begin, None, NO_STRINGS)
    row_extras.first = {STAMP: stamp.packed(), **row_extras.first}
    row_extras.indexed, row_extras.begin = True, begin
    return row_extras


def stamped_head(stamp: Stamp) -> bytes:
    """What stands before the length in the row of a request's only message that has a stamp and no other extras."""
    return row_head(None, {STAMP: stamp.packed()})


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


@lru_cache(maxsize=16)
def _heads_before(prefix: bytes) -> list[bytes]:
    """The kept heads before messages whose length is written as ``prefix``; an empty one for the first row."""
    return [b"", *[head + prefix for head in _kept_heads()]]


@lru_cache(maxsize=1)
def _kept_sizes() -> list[int]:
    """How many bytes so many of the kept heads have together."""
    return list(accumulate(map(len, _kept_heads()), initial=0))


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
