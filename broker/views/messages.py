"""Looking at messages without consuming them, damaged ones included."""

from __future__ import annotations

from binascii import b2a_base64
from functools import partial
from typing import TYPE_CHECKING, Any

from broker.handlers.publish import off_loop
from broker.handlers.query import one_of, whole_number
from broker.views.route import json_answer
from protocol.codec import JSON
from protocol.codec.positions import parse_query_position
from protocol.effects import Table
from protocol.errors import InvalidParameter
from protocol.ids import FIRST_BOUND, NO_PAYLOAD_PART, bound_at, unpack_position
from protocol.keys import DamagedRow
from protocol.rows import decode_row
from protocol.topic.asks import Describe, Look
from protocol.topic.paging import key_range

if TYPE_CHECKING:
    from broker.http.exchange import HttpAnswer
    from broker.service import Service
    from broker.views.route import ViewRequest
    from protocol.names import TopicName
    from protocol.rows import MessageRow
    from protocol.topic.asks import Span
    from storage.base import Row

DEFAULT_LIMIT = 100
MAX_LIMIT = 1_000
_POSITION_BYTES = 10


async def messages(service: Service, request: ViewRequest) -> HttpAnswer:
    """The messages with ``from <= id < to``, oldest first, each with all that is known of it.

    Raises:
      TopicNotFound, InvalidParameter, InvalidMessageId, StoreError: nothing happens by looking.
    """
    name = request.name
    parameters = request.parameters("from", "to", "limit", "payload", "longs")
    since = _bound(parameters, "from") or FIRST_BOUND
    limit = whole_number(parameters, "limit")
    if limit is not None and not 1 <= limit <= MAX_LIMIT:
        raise InvalidParameter(f"limit is {limit}", hint=f"use 1 to {MAX_LIMIT}")
    as_base64 = one_of(parameters, "payload", ("text", "base64"), "text") == "base64"
    as_strings = one_of(parameters, "longs", ("number", "string"), "number") == "string"
    ttl_ms, span = await _look(service, name, Look(since, _bound(parameters, "to")))
    shown = _Shown(span, ttl_ms, limit or DEFAULT_LIMIT, service.config.poll.max_bytes)
    if span.start < span.until:
        start, stop = key_range(span)
        await service.store.scan(Table.MESSAGE, start, stop, shown.take, first_chunk=min(shown.limit + 1, MAX_LIMIT))
    return await off_loop(shown.bytes, JSON, partial(shown.answer, as_base64=as_base64, as_strings=as_strings))


def _bound(parameters: dict[str, str], key: str) -> bytes | None:
    if key not in parameters:
        return None
    position = parse_query_position(parameters[key], key)
    return bound_at(position) if isinstance(position, int) else position


async def _look(service: Service, name: TopicName, look: Look) -> tuple[int, Span]:
    """The topic's time to live and its span, of one and the same generation."""
    while True:
        metadata = (await service.directory.ask(name, Describe())).metadata
        span = await service.directory.ask(name, look)
        if span.generation == metadata.generation:
            return metadata.properties.ttl_ms, span


class _Shown:
    """The rows of an answer while they are gathered, and how they are shown."""

    def __init__(self, span: Span, ttl_ms: int, limit: int, max_bytes: int) -> None:
        self.limit = limit
        self.bytes = 0
        self._span = span
        self._ttl_ms = ttl_ms
        self._max_bytes = max_bytes
        self._rows: list[tuple[bytes, MessageRow | DamagedRow]] = []
        self._cut = False

    def take(self, rows: list[Row]) -> bool:
        """Rows from the store, in order; False when the answer is full."""
        for key, value in rows:
            row = _decoded(value)
            if self._has_expired(key, row):
                continue
            if len(self._rows) == self.limit or (self._rows and self.bytes + len(value) > self._max_bytes):
                self._cut = True
                return False
            self._rows.append((key, row))
            self.bytes += len(value)
        return True

    def answer(self, *, as_base64: bool, as_strings: bool) -> HttpAnswer:
        """What was gathered, with the headers a poll has."""
        shown = []
        for key, row in self._rows:
            if isinstance(row, DamagedRow):
                shown.append({"id": _id(key).hex(), "state": "damaged", "detail": row.detail})
            else:
                shown.append(self._message(_id(key), row, as_base64=as_base64, as_strings=as_strings))
        headers = [("Plainsong-End", "more" if self._cut else "end")]
        last_id = _id(self._rows[-1][0]) if self._cut else self._span.resume
        if last_id is not None:
            headers.append(("Plainsong-Last-Id", last_id.hex()))
        return json_answer(shown, headers=headers)

    def _message(self, message_id: bytes, row: MessageRow, *, as_base64: bool, as_strings: bool) -> dict[str, Any]:
        published_ms = unpack_position(message_id[:_POSITION_BYTES])[0]
        payload = row.payload or b""
        pointer = row.pointer
        return {
            "id": message_id.hex(),
            "publishTimeMs": published_ms,
            "expiresMs": published_ms + min(self._ttl_ms, self._ttl_ms if row.ttl_s is None else row.ttl_s * 1000),
            "state": "plain",
            "writePointer": str(pointer) if as_strings and pointer is not None else pointer,
            "size": len(payload),
            "payload": _payload(payload, as_base64=as_base64),
            "attributes": {},
            "producer": None,
            "sequenceId": None,
        }

    def _has_expired(self, key: bytes, row: MessageRow | DamagedRow) -> bool:
        if isinstance(row, DamagedRow) or row.ttl_s is None:
            return False
        return self._span.now_ms > int.from_bytes(key[-10:-2], "big") + row.ttl_s * 1000


def _decoded(value: bytes) -> MessageRow | DamagedRow:
    """The row, or what is wrong with it. What this version never writes it cannot vouch for either."""
    try:
        row = decode_row(value)
    except DamagedRow as damage:
        return damage
    if row.payload is None or row.pointer is not None or row.extras:
        return DamagedRow("the row is of a later version: it has more than a payload and a time to live")
    return row


def _id(key: bytes) -> bytes:
    return key[-_POSITION_BYTES:] + NO_PAYLOAD_PART


def _payload(payload: bytes, *, as_base64: bool) -> str | dict[str, str]:
    if not as_base64:
        try:
            return payload.decode()
        except UnicodeDecodeError:
            pass
    return {"base64": b2a_base64(payload, newline=False).decode()}
