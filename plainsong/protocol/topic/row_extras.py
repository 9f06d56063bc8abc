"""The extras of a request's message rows: a producer's stamp, the batch, indexes, attributes, a routing key, a segment.

A plain publish has none. See ``plainsong.protocol.rows`` for their names in a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from plainsong.protocol.errors import InvalidParameter
from plainsong.protocol.page import length_prefix
from plainsong.protocol.rows import ATTRIBUTES, BATCH, INDEX, STAMP, MessageRow, encode_row, row_head

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from plainsong.protocol.requests import PublishRequest
    from plainsong.protocol.rows import Stamp

NOTHING: Mapping[str, object] = MappingProxyType({})
NO_STRINGS: Mapping[str, str] = MappingProxyType({})
#: The attribute that holds a request's routing key.
ROUTING_KEY = "routingKey"
#: Number of row heads that are cached.
_KEPT_HEADS = 1024


@dataclass(slots=True)
class RowExtras:
    """The extras of one request's rows.

    The first row has the stamp and the batch. The other rows are usually like those of a plain publish, so that they
    are made, stored and read as fast; their request is found by going back to the first row. Rows that are encoded one
    by one, for attributes or their own times to live, also have their index in the request. So does every row if
    version 0.1 may own the topic next.
    """

    first: Mapping[str, object] = field(default_factory=dict)
    """Extras of the first row only."""
    every: Mapping[str, object] = field(default_factory=dict)
    """Extras of all rows."""
    indexed: bool = False
    """True if the other rows have their index when rows are encoded one by one."""
    one_by_one: bool = False
    """True to encode rows one by one although they are alike."""
    begin: int = 0
    """The index of the first message: 1 after a reference row, which then has the extras of ``first``."""
    attributes: Sequence[Mapping[str, str]] | None = None
    """One for each message; None if all have ``shared``."""
    shared: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_attributes(self) -> bool:
        """True if any message may have attributes."""
        return self.attributes is not None or bool(self.shared)

    def attributes_of(self, index: int) -> Mapping[str, str]:
        return self.shared if self.attributes is None else self.attributes[index]

    def attributes_from(self, first: int, count: int) -> dict[int, Mapping[str, str]]:
        """Return the attributes of the messages that have any, by index, counted from ``first``."""
        if self.attributes is None:
            return dict.fromkeys(range(first, first + count), self.shared) if self.shared else {}
        return {index: each for index, each in enumerate(self.attributes, first) if each}

    def heads(self, pointer: int | None) -> tuple[bytes, bytes] | None:
        """Return the bytes before the length in the first row's value, and in those of the others, if these are alike.

        For messages without their own times to live. None if they must be encoded one by one.
        """
        if self.attributes is not None or (self.one_by_one and self.indexed):
            return None
        same: dict[str, object] = dict(self.every)
        if self.shared:
            same[ATTRIBUTES] = dict(self.shared)
        others = row_head(pointer, same)
        return others if self.begin or not self.first else row_head(pointer, {**self.first, **same}), others

    def head_of_one(self, pointer: int | None) -> bytes:
        """Return the bytes before the length in the row of a request's only message, without its own attributes."""
        if not (self.begin or self.every or self.shared):
            return row_head(pointer, self.first)
        return row_head(pointer, self._extras_of(0))

    def values(
        self, messages: Sequence[bytes], ttls_s: Sequence[int | None] | None, pointer: int | None
    ) -> list[bytes]:
        """Encode the values of rows, one by one."""
        if ttls_s is None:
            heads = self._heads(pointer, len(messages))
            prefixes = {size: length_prefix(size) for size in set(map(len, messages))}
            return [head + prefixes[len(message)] + message for head, message in zip(heads, messages, strict=True)]
        return [
            encode_row(MessageRow(message, pointer, ttl_s, self._extras_of(index)))
            for index, (message, ttl_s) in enumerate(zip(messages, ttls_s, strict=True))
        ]

    def _heads(self, pointer: int | None, count: int) -> list[bytes]:
        """Return the bytes before the lengths in the values of the first ``count`` rows, without times to live."""
        stop = self.begin + count
        if pointer is not None or not self.indexed or self.every or self.has_attributes or stop > _KEPT_HEADS:
            return [row_head(pointer, self._extras_of(index)) for index in range(count)]
        heads = _kept_heads()[self.begin : stop]
        if not self.begin:
            heads[0] = row_head(None, self.first)
        return heads

    def _extras_of(self, index: int) -> dict[str, object]:
        at = index + self.begin
        extras: dict[str, object] = dict(self.first) if at == 0 else {INDEX: at} if self.indexed else {}
        extras |= self.every
        attributes = self.attributes_of(index)
        if attributes:
            extras[ATTRIBUTES] = dict(attributes)
        return extras


#: For rows without extras.
NO_EXTRAS = RowExtras()


@lru_cache(maxsize=1)
def _kept_heads() -> list[bytes]:
    """Return the heads of rows that have only their index; made once, since each is a packed map."""
    return [row_head(None, {INDEX: index}) for index in range(_KEPT_HEADS)]


def row_extras_of(request: PublishRequest) -> RowExtras | None:
    """Return the extras of a request's rows; None if they have none.

    Raises InvalidParameter: a message and its request, or the messages of an atomic request, have different routing
    keys.
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
            raise InvalidParameter("a message's routingKey differs from its request's", hint="give one of them")
        attributes = [{**each, **shared} for each in attributes]
    if request.atomic and attributes is not None and len({each.get(ROUTING_KEY) for each in attributes} - {None}) > 1:
        raise InvalidParameter("an atomic request has one routingKey", hint="give it as the request's routingKey")
    if not (first or shared or attributes is not None):
        return None
    return RowExtras(first, indexed=bool(first), attributes=attributes, shared=shared)


def with_stamp(row_extras: RowExtras | None, stamp: Stamp, *, begin: int = 0) -> RowExtras:
    """Return the extras with a producer's stamp; ``begin`` 1: a reference row comes first, and has the stamp."""
    if row_extras is None:
        return RowExtras({STAMP: stamp.packed()}, NOTHING, True, False, begin, None, NO_STRINGS)
    row_extras.first = {STAMP: stamp.packed(), **row_extras.first}
    row_extras.indexed, row_extras.begin = True, begin
    return row_extras


def stamped_head(stamp: Stamp) -> bytes:
    """Return the bytes before the length in the row of a request's only message, with a stamp as its only extra."""
    return row_head(None, {STAMP: stamp.packed()})
