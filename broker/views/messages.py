"""Looking at messages without consuming them, damaged ones included."""

from __future__ import annotations

from binascii import b2a_base64
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from actors.reading import walk_rows
from broker.handlers.paged import bytes_within, gathered
from broker.handlers.publish import off_loop
from broker.handlers.query import one_of, whole_number
from broker.views.origins import NO_ORIGIN, Origin, Origins
from broker.views.route import json_answer
from protocol.codec import JSON
from protocol.codec.positions import parse_query_position
from protocol.errors import InvalidParameter, TransactionsUnavailable
from protocol.ids import FIRST_BOUND, bound_at, unpack_position
from protocol.page import items_in
from protocol.topic.asks import Describe, Look
from protocol.topic.walk import Walk
from protocol.transactions.view import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from broker.http.exchange import HttpAnswer
    from broker.service import Service
    from broker.views.route import ViewRequest
    from protocol.keys import DamagedRow
    from protocol.names import TopicName
    from protocol.rows import MessageRow
    from protocol.topic.asks import Span
    from storage.base import Row

    Rows = Sequence[Row]

DEFAULT_LIMIT = 100
MAX_LIMIT = 1_000

#: An aborted transaction's rows hold readers until they have been rolled back.
_STATES = {"in_progress": "open", "committed": "committed", "aborted": "open", "invalid": "invalid"}
_SEEN = {Verdict.DELIVER: "committed", Verdict.SKIP: "invalid", Verdict.HOLD: "open"}


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
    shown = _Shown(span, limit or DEFAULT_LIMIT, await bytes_within(request.room, service.config.poll.max_bytes))
    await walk_rows(service.store, shown)
    gathered(request.room, shown.bytes)
    if any(each.pointer > 0 for each in shown.messages):
        await _learn(service)
    states = {pointer: _state(service, pointer) for pointer in {each.pointer for each in shown.messages}}
    origins = await shown.origins.find(service.store, span.prefix)
    form = _Form(ttl_ms, states, origins, as_base64=as_base64, as_strings=as_strings)
    return await off_loop(shown.bytes, JSON, partial(_answer, shown, form))


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


class _Message(NamedTuple):
    """One message, or what is wrong with it."""

    message_id: bytes
    payload: bytes = b""
    pointer: int = 0
    """0: it has none; negative: rolled back."""
    expires_ms: int = 0
    """When its own time to live ends; 0: it has none."""
    attributes: Mapping[str, str] = {}
    damage: str | None = None


class _Shown(Walk):
    """The messages of an answer while they are gathered: row by row, since what is shown is checked."""

    with_attributes = True

    def __init__(self, span: Span, limit: int, max_bytes: int) -> None:
        super().__init__(span, with_pointers=True)
        self.messages: list[_Message] = []
        self.bytes = 0
        self.cut = False
        self.origins = Origins()
        self._limit = limit
        self._max_bytes = max_bytes

    @property
    def wanted(self) -> int:
        """One row more than are shown tells whether there are more."""
        return self._limit + 1

    def feed_payloads(self, rows: Rows) -> bool:
        """See ``StoredDelivery``."""
        self.attributes = {}
        return self._feed_stored_one_by_one(rows)

    def _feed_inline(self, rows: Rows, flags: set[int]) -> bool:
        self.attributes = {}
        return self._feed_one_by_one(rows)

    def _meet(self, message_id: bytes, row: MessageRow) -> None:
        super()._meet(message_id, row)
        self.origins.meet(message_id, row, None if self.reference is None else self.reference.row)

    def _take(self, items: Sequence[bytes], pointers: Sequence[int] | None, expiries: Sequence[int] | None) -> bool:
        assert pointers is not None  # both are there
        assert expiries is not None  # row by row
        for item, pointer, expires_ms in zip(items, pointers, expiries, strict=True):
            ((message_id, payload),) = items_in(item)
            message = _Message(message_id, payload, pointer, expires_ms, self.attributes.get(message_id, {}))
            if not self._add(message, len(payload)):
                return False
        return True

    def _damaged(self, message_id: bytes, damage: DamagedRow) -> bool:
        return self._add(_Message(message_id, damage=damage.detail), 0)

    def _add(self, message: _Message, size: int) -> bool:
        if len(self.messages) == self._limit or (self.messages and self.bytes + size > self._max_bytes):
            self.cut = True
            return False
        self.messages.append(message)
        self.bytes += size
        return True


@dataclass(frozen=True, slots=True)
class _Form:
    """How messages are written."""

    ttl_ms: int
    states: Mapping[int, str]
    origins: Mapping[bytes, Origin]
    as_base64: bool
    as_strings: bool

    def written(self, message: _Message) -> dict[str, Any]:
        """One message as JSON has it."""
        if message.damage is not None:
            return {"id": message.message_id.hex(), "state": "damaged", "detail": message.damage}
        published_ms = unpack_position(message.message_id[:10])[0]
        expires_ms = published_ms + self.ttl_ms
        pointer = abs(message.pointer) or None
        origin = self.origins.get(message.message_id, NO_ORIGIN)
        return {
            "id": message.message_id.hex(),
            "publishTimeMs": published_ms,
            "expiresMs": min(expires_ms, message.expires_ms or expires_ms),
            "state": self.states[message.pointer],
            "writePointer": str(pointer) if self.as_strings and pointer is not None else pointer,
            "size": len(message.payload),
            "payload": _payload(message.payload, as_base64=self.as_base64),
            "attributes": message.attributes,
            "producer": origin.producer,
            "sequenceId": origin.sequence_id,
            "batch": None if origin.batch is None else dict(zip(("index", "count"), origin.batch, strict=True)),
        }


def _answer(shown: _Shown, form: _Form) -> HttpAnswer:
    """What was gathered, with the headers a poll has."""
    headers = [("Plainsong-End", "more" if shown.cut else "end")]
    last_id = shown.messages[-1].message_id if shown.cut else shown.span.resume
    if last_id is not None:
        headers.append(("Plainsong-Last-Id", last_id.hex()))
    return json_answer([form.written(each) for each in shown.messages], headers=headers)


async def _learn(service: Service) -> None:
    """What was decided before this is known here afterwards, unless nobody can be asked."""
    try:
        await service.transactions.fresh()
    except TransactionsUnavailable:
        return


def _state(service: Service, pointer: int) -> str:
    """What became of the transaction a row belongs to, as far as this daemon knows."""
    if pointer == 0:
        return "plain"
    if pointer < 0:
        return "rolled-back"
    try:
        standing = service.transactions.standing(pointer)
        if standing != "unknown":
            return _STATES[standing]
        # Nobody here remembers it: what a committed reader makes of it now.
        return _SEEN[service.transactions.view().verdict(pointer)]
    except TransactionsUnavailable:
        return "open"


def _payload(payload: bytes, *, as_base64: bool) -> str | dict[str, str]:
    if not as_base64:
        try:
            return payload.decode()
        except UnicodeDecodeError:
            pass
    return {"base64": b2a_base64(payload, newline=False).decode()}
