"""Shows messages without consuming them, damaged ones included, and the request that each was published in."""

from __future__ import annotations

from binascii import b2a_base64
from codecs import utf_8_decode
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from actors.reading import walk_rows
from broker.api.answers import in_steps, json_answer, off_loop
from broker.api.messages.origins import NO_ORIGIN, Origins
from broker.api.messages.poll import bytes_within, hold_gathered, page_bytes
from broker.api.messages.set_aside import entry, passed
from broker.http.messages import Answer, one_of, whole_number
from broker.security.guard import forbidden
from plainsong.protocol.codec import JSON, gathered
from plainsong.protocol.codec.json import text_pieces
from plainsong.protocol.codec.json_values import compact, parse_query_position
from plainsong.protocol.errors import InvalidParameter, NotFound, TransactionsUnavailable
from plainsong.protocol.ids import (
    FIRST_BOUND,
    NO_PAYLOAD_PART,
    after,
    bound_at,
    parse_id,
    shown_id,
    unpack_position,
)
from plainsong.protocol.keys import DamagedRow
from plainsong.protocol.page import items_in
from plainsong.protocol.topic.asks import Describe, Look
from plainsong.protocol.topic.reading import Walk
from plainsong.protocol.transactions.view import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from actors.directory import Directory
    from broker.api.messages.origins import Origin
    from broker.authority import Transactions
    from broker.http.messages import Request
    from plainsong.protocol.answers.fields import Base64Payload
    from plainsong.protocol.answers.messages import MessageState, ShownMessage
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.records import SetAside
    from plainsong.protocol.rows import MessageRow
    from plainsong.protocol.topic.asks import Span
    from storage.base import Row, Store

if TYPE_CHECKING:
    Rows = Sequence[Row]


DEFAULT_LIMIT = 100
MAX_LIMIT = 1_000
#: How many messages one request searches for a text, and for how long.
MAX_SCANNED = 50_000
MAX_SCAN_S = 2.0
#: Messages, and bytes of them, between two checks of the clock.
CLOCK_EACH = 256
CLOCK_EACH_BYTES = 1 << 20
OCTETS = "application/octet-stream"
#: The rows of an aborted transaction hold readers until they are rolled back.
_STATES: Mapping[str, MessageState] = {
    "in_progress": "open",
    "committed": "committed",
    "aborted": "open",
    "invalid": "invalid",
}
_SEEN: Mapping[Verdict, MessageState] = {Verdict.DELIVER: "committed", Verdict.SKIP: "invalid", Verdict.HOLD: "open"}


@dataclass(frozen=True, slots=True)
class Messages:
    """The route that shows messages without consuming them."""

    directory: Directory
    store: Store
    transactions: Transactions
    max_bytes: int
    """Limit on an answer's payloads: ``poll.max_bytes``."""

    async def show(self, request: Request) -> Answer:
        """Return the messages ``from <= id < to``, oldest first, with all their details.

        Raises:
          TopicNotFound, InvalidParameter, InvalidMessageId, StoreError: reading changes nothing.
        """
        name = request.name
        parameters = request.parameters("from", "to", "limit", "payload", "longs", "payloadBytes", "order", "filter")
        since = query_bound(parameters, "from") or FIRST_BOUND
        limit = whole_number(parameters, "limit")
        if limit is not None and not 1 <= limit <= MAX_LIMIT:
            raise InvalidParameter(f"limit is {limit}", hint=f"use 1 to {MAX_LIMIT}")
        payload_bytes = whole_number(parameters, "payloadBytes")
        if payload_bytes is not None and payload_bytes < 0:
            raise InvalidParameter(f"payloadBytes is {payload_bytes}", hint="use 0 or more")
        if parameters.get("filter") and not request.rights.on_topic("poll", *name):
            raise forbidden(request.who, "poll", str(name))  # a filter would reveal payloads
        ttl_ms, span = await self._look(name, Look(since, query_bound(parameters, "to")))
        shown = _Shown(
            span,
            limit or DEFAULT_LIMIT,
            await bytes_within(request.room, page_bytes(self.max_bytes, request.page_bytes)),
            payload_bytes=payload_bytes,
            newest_first=one_of(parameters, "order", ("asc", "desc"), "asc") == "desc",
            text=parameters.get("filter", "").encode(),
        )
        form = await self._gather(request, parameters, ttl_ms, shown)
        return await _answer(shown, form)

    async def show_one(self, request: Request) -> Answer:
        """Return one whole message; with its bare payload if the client accepts that.

        Raises:
          TopicNotFound, InvalidMessageId, StoreError; NotFound: the message does not exist, or no longer exists.
        """
        name = request.name
        parameters = request.parameters("payload", "longs")
        message_id = parse_id(request.path["message"])
        ttl_ms, span = await self._look(name, Look(message_id, after(message_id)))
        shown = _Shown(span, 1, await bytes_within(request.room, self.max_bytes))
        form = await self._gather(request, parameters, ttl_ms, shown)
        if not shown.messages:
            raise NotFound(f"topic {name} has no message {message_id.hex()}", hint="it may have expired")
        message = shown.messages[0]
        if OCTETS in request.headers.get("accept", ""):
            if not request.rights.on_topic("poll", *name):
                raise forbidden(request.who, "poll", str(name))
            if message.damage is not None:
                raise DamagedRow(message.damage)
            disposition = f'attachment; filename="{name.topic}-{message_id.hex()}"'
            return Answer(200, message.payload, OCTETS, [("Content-Disposition", disposition)])
        return await off_loop(shown.bytes, JSON, lambda: json_answer(form.written(message)))

    async def _gather(self, request: Request, parameters: dict[str, str], ttl_ms: int, shown: _Shown) -> _Form:
        """Read the messages, and the data needed to render them."""
        as_base64 = one_of(parameters, "payload", ("text", "base64"), "text") == "base64"
        as_strings = one_of(parameters, "longs", ("number", "string"), "number") == "string"
        await walk_rows(self.store, shown)
        hold_gathered(request.room, shown.bytes)
        if any(each.pointer > 0 for each in shown.messages):
            await self._learn()
        states = {pointer: self._state(pointer) for pointer in {each.pointer for each in shown.messages}}
        origins = await shown.origins.find(self.store, shown.span.prefix)
        return _Form(
            ttl_ms,
            states,
            origins,
            as_base64=as_base64,
            as_strings=as_strings,
            hides=not request.rights.on_topic("poll", *request.name),
        )

    async def _look(self, name: TopicName, look: Look) -> tuple[int, Span]:
        """Return the topic's ttl and its span, of the same generation."""
        while True:
            metadata = (await self.directory.ask(name, Describe())).metadata
            span = await self.directory.ask(name, look)
            if span.generation == metadata.generation:
                return metadata.properties.ttl_ms, span

    async def _learn(self) -> None:
        """Fetch decisions made before now, if the transaction service is available."""
        try:
            await self.transactions.fresh()
        except TransactionsUnavailable:
            return

    def _state(self, pointer: int) -> MessageState:
        """Return the state of a row's transaction, as far as this daemon knows."""
        if pointer == 0:
            return "plain"
        if pointer < 0:
            return "rolled-back"
        try:
            standing = self.transactions.standing(pointer)
            if standing != "unknown":
                return _STATES[standing]
            # The transaction is not remembered: use the verdict of a committed reader.
            return _SEEN[self.transactions.view().verdict(pointer)]
        except TransactionsUnavailable:
            return "open"


def query_bound(parameters: dict[str, str], key: str) -> bytes | None:
    """Return a position in the query as a bound. Raises InvalidMessageId."""
    if key not in parameters:
        return None
    position = parse_query_position(parameters[key], key)
    return bound_at(position) if isinstance(position, int) else position


class _Message(NamedTuple):
    """One message, or its damage."""

    message_id: bytes
    payload: bytes = b""
    pointer: int = 0
    """0: plain; negative: rolled back."""
    expires_ms: int = 0
    """When its own ttl ends; 0 if it has none."""
    attributes: Mapping[str, str] = {}
    damage: str | None = None
    cut_from: int | None = None
    """The size of the whole payload, if ``payload`` is only its beginning; else None."""


class _Shown(Walk):
    """Collects the messages of an answer, row by row, so that each row is checked."""

    with_attributes = True

    def __init__(
        self,
        span: Span,
        limit: int,
        max_bytes: int,
        *,
        payload_bytes: int | None = None,
        newest_first: bool = False,
        text: bytes = b"",
    ) -> None:
        """
        Args:
          payload_bytes: bytes of each payload to show; None: all of it.
          text: required in a payload.
        """
        super().__init__(span, with_pointers=True)
        self.reverse = newest_first
        self.messages: list[_Message] = []
        self.bytes = 0
        self.cut = False
        self.origins = Origins()
        #: When searching for a text: the number of messages searched, and the last of them.
        self.scanned = 0
        self.last_scanned: bytes | None = None
        self.text = text
        self._payload_bytes = payload_bytes
        self._until_s = perf_counter() + MAX_SCAN_S
        self._bytes_unclocked = 0
        self._limit = limit
        self._max_bytes = max_bytes

    @property
    def wanted(self) -> int:
        """One row more than shown, to detect if there are more."""
        return self._limit + 1

    def feed_payloads(self, rows: Rows) -> bool:
        """See ``StoredDelivery``."""
        self.attributes = {}
        return self._feed_stored_one_by_one(rows)

    def _feed_inline(self, rows: Rows, flags: set[int]) -> bool:
        self.attributes = {}
        return self._feed_one_by_one(rows)

    def _on_message(self, message_id: bytes, row: MessageRow) -> None:
        super()._on_message(message_id, row)
        self.origins.meet(message_id, row, None if self.reference is None else self.reference.row)

    def _take(self, items: Sequence[bytes], pointers: Sequence[int] | None, expiries: Sequence[int] | None) -> bool:
        assert pointers is not None  # requested with ``with_pointers``
        assert expiries is not None  # present when rows are read one by one
        for item, pointer, expires_ms in zip(items, pointers, expiries, strict=True):
            ((message_id, payload),) = items_in(item)
            if self.reverse and not self.span.start <= message_id < self.span.until:
                continue  # in the same row as a wanted message
            size = len(payload)
            if self.text and not self._has_text(message_id, payload):
                self.origins.forget(message_id)
            else:
                shown = payload if self._payload_bytes is None else payload[: self._payload_bytes]
                cut_from = size if len(shown) < size else None
                attributes = self.attributes.get(message_id, {})
                if not self._add(
                    _Message(message_id, shown, pointer, expires_ms, attributes, cut_from=cut_from), len(shown)
                ):
                    return False
            if self.text and self._is_tired(size):
                self.cut = True
                return False
        return True

    def _has_text(self, message_id: bytes, payload: bytes) -> bool:
        if self._is_full:
            return True  # not searched: the next page begins with it
        self.scanned += 1
        self.last_scanned = message_id
        return self.text in payload

    def _is_tired(self, size: int) -> bool:
        """Count ``size`` bytes as searched. Return True once the answer should end, so that the client asks for the rest."""
        self._bytes_unclocked += size
        if self.scanned >= MAX_SCANNED:
            return True
        if self.scanned % CLOCK_EACH and self._bytes_unclocked < CLOCK_EACH_BYTES:
            return False
        self._bytes_unclocked = 0
        return perf_counter() > self._until_s

    @property
    def _is_full(self) -> bool:
        return len(self.messages) == self._limit

    def _damaged(self, message_id: bytes, damage: DamagedRow) -> bool:
        if self.text:
            return True  # its text is unknown
        return self._add(_Message(message_id, damage=damage.detail), 0)

    def _add(self, message: _Message, size: int) -> bool:
        if self._is_full or (self.messages and self.bytes + size > self._max_bytes):
            self.cut = True
            return False
        self.messages.append(message)
        self.bytes += size
        return True


@dataclass(frozen=True, slots=True)
class _Form:
    """Everything needed to render messages."""

    ttl_ms: int
    states: Mapping[int, MessageState]
    origins: Mapping[bytes, Origin]
    as_base64: bool
    as_strings: bool
    hides: bool = False
    """True if the client may not see payloads and attributes."""

    def written(self, message: _Message) -> ShownMessage:
        """Return a message for JSON."""
        if message.damage is not None:
            return {"id": message.message_id.hex(), "state": "damaged", "detail": message.damage}
        published_ms = unpack_position(message.message_id[:10])[0]
        expires_ms = published_ms + self.ttl_ms
        pointer = abs(message.pointer) or None
        origin = self.origins.get(message.message_id, NO_ORIGIN)
        shown: ShownMessage = {
            "id": message.message_id.hex(),
            "publishTimeMs": published_ms,
            "expiresMs": min(expires_ms, message.expires_ms or expires_ms),
            "state": self.states[message.pointer],
            "writePointer": str(pointer) if self.as_strings and pointer is not None else pointer,
            "size": len(message.payload) if message.cut_from is None else message.cut_from,
            "payload": None
            if self.hides
            else _payload(message.payload, as_base64=self.as_base64, is_cut=message.cut_from is not None),
        }
        if message.cut_from is not None:
            shown["truncated"] = True
        shown["attributes"] = None if self.hides else dict(message.attributes)
        shown["producer"] = origin.producer
        shown["sequenceId"] = origin.sequence_id
        shown["batch"] = None if origin.batch is None else {"index": origin.batch[0], "count": origin.batch[1]}
        return shown


async def _answer(shown: _Shown, form: _Form) -> Answer:
    """Render the messages, with the headers of a poll."""
    headers = [("Plainsong-End", "more" if shown.cut else "end")]
    last_id = shown.messages[-1].message_id if shown.cut and shown.messages else shown.span.resume
    if shown.text:
        headers.append(("Plainsong-Scanned", str(shown.scanned)))
        last_id = shown.last_scanned if shown.cut and shown.last_scanned is not None else last_id
    if last_id is not None and (shown.cut or not shown.reverse):
        headers.append(("Plainsong-Last-Id", last_id.hex()))
    cut_at = shown.messages[-1].message_id if shown.cut and shown.messages else None
    stretches = _passed(shown, last_id if cut_at is None or shown.text else cut_at)
    headers += passed(stretches)
    pieces = gathered(_pieces(_with_set_aside(shown, form, stretches)))
    body = b"".join(await in_steps(shown.bytes, pieces))
    return Answer(200, body, JSON.content_type, headers)


def _pieces(entries: Iterable[Mapping[str, object]]) -> Iterator[bytes]:
    """Yield a JSON list, one field of an entry at a time."""
    before = b"["
    for each in entries:
        separator = before + b"{"
        for name, value in each.items():
            yield b'%b"%b":' % (separator, name.encode())
            separator = b","
            if isinstance(value, str):
                yield from text_pieces(value)
            else:
                yield compact(value).encode()
        yield b"}"
        before = b","
    yield b"]" if before == b"," else b"[]"


def _passed(shown: _Shown, last_id: bytes | None) -> list[SetAside]:
    """Return the ranges that were set aside within the page."""
    span = shown.span
    if not shown.reverse:
        return span.passed_set_aside(last_id if shown.cut else None)
    every = span.passed_set_aside(None)
    return [each for each in every if not shown.cut or last_id is None or each.first + NO_PAYLOAD_PART >= last_id]


def _with_set_aside(shown: _Shown, form: _Form, stretches: Sequence[SetAside]) -> Iterator[ShownMessage]:
    """Yield the messages, and an entry for each range set aside, in order; each is rendered on demand."""
    if not stretches:
        return map(form.written, shown.messages)
    every: list[tuple[str, Callable[[], ShownMessage]]] = [
        (each.message_id.hex(), partial(form.written, each)) for each in shown.messages
    ]
    every += [(shown_id(each.first), partial(entry, each)) for each in stretches]
    every.sort(key=itemgetter(0), reverse=shown.reverse)
    return (write() for _, write in every)


def _payload(payload: bytes, *, as_base64: bool, is_cut: bool = False) -> str | Base64Payload:
    if not as_base64:
        try:
            # The cut may be inside a character, which is then left out.
            return utf_8_decode(payload, "strict", not is_cut)[0]
        except UnicodeDecodeError:
            pass
    return {"base64": b2a_base64(payload, newline=False).decode()}
