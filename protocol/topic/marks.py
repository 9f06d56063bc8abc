"""What rows say beside their payload: who sent them, which batch they are of, what attributes they have.

The first row of a request has its stamp and its batch, the others their index in it. Of rows whose extras differ by
nothing else the heads are the same for every request, so they are made once: publishing as a producer must not cost
a msgpack map for each message.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import msgpack

from protocol.errors import InvalidParameter, TransactionTooLarge
from protocol.page import length_prefix
from protocol.rows import ATTRIBUTES, BATCH, HAS_EXTRAS, HAS_POINTER, INDEX, STAMP, MessageRow, encode_row, row_head

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from protocol.requests import PublishRequest
    from protocol.rows import Stamp
    from protocol.topic.state import TopicState

#: What a request's routing key is called among attributes.
ROUTING_KEY = "routingKey"
#: Heads of so many rows are kept for the next request.
_KEPT_HEADS = 1024
_INDEX_KEY: bytes = msgpack.packb(INDEX)
_I64 = struct.Struct(">q")
_U32 = struct.Struct(">I")


@dataclass(slots=True)
class Marks:
    """The extras of one request's rows."""

    first: Mapping[str, object] = field(default_factory=dict)
    """Of the first row only."""
    every: Mapping[str, object] = field(default_factory=dict)
    """Of all rows."""
    indexed: bool = False
    """Whether the others have their index."""
    begin: int = 0
    """The index of the first message: 1 behind a reference row, which then has what ``first`` would say."""
    attributes: Sequence[Mapping[str, str]] | None = None
    """One for each message; None: they all have ``shared``."""
    shared: Mapping[str, str] = field(default_factory=dict)

    def attributes_of(self, index: int) -> Mapping[str, str]:
        """The attributes of a message."""
        return self.shared if self.attributes is None else self.attributes[index]

    def attributes_from(self, first: int, count: int) -> dict[int, Mapping[str, str]]:
        """The attributes of all messages that have any, counted from ``first``."""
        if self.attributes is None:
            return dict.fromkeys(range(first, first + count), self.shared) if self.shared else {}
        return {index: each for index, each in enumerate(self.attributes, first) if each}

    def extras_of(self, index: int) -> dict[str, object]:
        """The extras of a message's row."""
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
        """The rows of the request's messages."""
        if ttls_s is not None or self.attributes is not None:
            each_ttl_s = [None] * len(messages) if ttls_s is None else ttls_s
            return [
                encode_row(MessageRow(message, pointer, ttl_s, self.extras_of(index)))
                for index, (message, ttl_s) in enumerate(zip(messages, each_ttl_s, strict=True))
            ]
        if len(messages) == 1:
            head = row_head(pointer, self.extras_of(0))
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


def marks_of(request: PublishRequest) -> Marks | None:
    """What the rows of a request say beside their payload; None: nothing.

    Raises InvalidParameter: a message has a routing key of its own, and the request another; or an atomic request has
    messages with different ones.
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
    return Marks(first, indexed=bool(first), attributes=attributes, shared=shared)


def with_stamp(marks: Marks | None, stamp: Stamp, *, begin: int = 0) -> Marks:
    """The same, and who sent them; behind a reference row (``begin`` 1) that row has the stamp."""
    marks = Marks() if marks is None else marks
    marks.first = {STAMP: stamp.packed(), **marks.first}
    marks.indexed, marks.begin = True, begin
    return marks


def check_atomic(state: TopicState, request: PublishRequest) -> None:
    """See that an atomic request is one that can be stored as a whole. Raises TransactionTooLarge."""
    if not request.atomic:
        return
    limits, messages = state.limits, request.messages
    if len(messages) > limits.max_atomic_messages:
        raise TransactionTooLarge(
            f"{len(messages)} messages in one batch", hint=f"at most {limits.max_atomic_messages}"
        )
    size = sum(map(len, messages))
    if size > limits.max_atomic_bytes:
        raise TransactionTooLarge(f"{size} bytes in one batch", hint=f"at most {limits.max_atomic_bytes}")


def _packed_attributes(attributes: Mapping[str, str]) -> bytes:
    if not attributes:
        return b""
    packed: bytes = msgpack.packb(ATTRIBUTES) + msgpack.packb(dict(attributes))
    return packed


def _heads(pointer: int | None, tail: bytes, begin: int, count: int) -> list[bytes]:
    """The heads of rows with the indexes from ``begin`` on."""
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
    """Numbers as msgpack has them."""
    return [msgpack.packb(number) for number in range(_KEPT_HEADS + 1)]


def _made_heads(pointer: int | None, tail: bytes, begin: int, count: int) -> list[bytes]:
    """As ``encode_row`` makes them; ``tail`` is the rest of the extras, packed."""
    start = bytes([HAS_EXTRAS]) if pointer is None else bytes([HAS_EXTRAS | HAS_POINTER]) + _I64.pack(pointer)
    opening = (b"\x82" if tail else b"\x81") + _INDEX_KEY
    end = begin + count
    numbers = _kept_numbers()[begin:end]
    numbers += [msgpack.packb(number) for number in range(begin + len(numbers), end)]
    starts = {size: start + _U32.pack(len(opening) + size + len(tail)) + opening for size in set(map(len, numbers))}
    return [b"%b%b%b" % (starts[len(number)], number, tail) for number in numbers]
