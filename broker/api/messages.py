"""Shows messages without consuming them, damaged ones included, and the request each came with."""

from __future__ import annotations

import logging
from binascii import b2a_base64
from bisect import bisect_right
from codecs import utf_8_decode
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from actors.reading import walk_rows
from broker.api.poll import bytes_within, hold_gathered, page_bytes
from broker.api.route import in_steps, json_answer, off_loop
from broker.api.set_aside import entry, passed
from broker.http.messages import Answer, one_of, whole_number
from broker.security.guard import forbidden
from plainsong.protocol.codec import JSON, gathered
from plainsong.protocol.codec.json import text_pieces
from plainsong.protocol.codec.json_values import compact, parse_query_position
from plainsong.protocol.effects import Table
from plainsong.protocol.errors import InvalidParameter, NotFound, TransactionsUnavailable
from plainsong.protocol.ids import (
    FIRST_BOUND,
    NO_PAYLOAD_PART,
    POSITION_BYTES,
    SEQUENCES_PER_MS,
    after,
    bound_at,
    parse_id,
    shown_id,
    unpack_position,
)
from plainsong.protocol.keys import DamagedRow
from plainsong.protocol.page import items_in
from plainsong.protocol.rows import BATCH, HAS_EXTRAS, INDEX, Stamp, decode_row
from plainsong.protocol.topic.asks import Describe, Look
from plainsong.protocol.topic.chain import ordinal
from plainsong.protocol.topic.reading import Walk
from plainsong.protocol.transactions.view import Verdict
from storage.base import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from actors.directory import Directory
    from broker.authority import Transactions
    from broker.http.messages import Request
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.records import SetAside
    from plainsong.protocol.rows import MessageRow
    from plainsong.protocol.topic.asks import Span
    from storage.base import Row, Store

if TYPE_CHECKING:
    Rows = Sequence[Row]


log = logging.getLogger(__name__)
DEFAULT_LIMIT = 100
MAX_LIMIT = 1_000
#: Messages that one request looks at for a text, and for how long.
MAX_SCANNED = 50_000
MAX_SCAN_S = 2.0
#: After so many of them, or so many bytes of theirs, it looks at the clock.
CLOCK_EACH = 256
CLOCK_EACH_BYTES = 1 << 20
OCTETS = "application/octet-stream"
#: An aborted transaction's rows hold readers until they have been rolled back.
_STATES = {"in_progress": "open", "committed": "committed", "aborted": "open", "invalid": "invalid"}
_SEEN = {Verdict.DELIVER: "committed", Verdict.SKIP: "invalid", Verdict.HOLD: "open"}


@dataclass(frozen=True, slots=True)
class Messages:
    """The route that shows messages without consuming them."""

    directory: Directory
    store: Store
    transactions: Transactions
    max_bytes: int
    """Of an answer's payloads: ``poll.max_bytes``."""

    async def show(self, request: Request) -> Answer:
        """The messages with ``from <= id < to``, oldest first, each with all that is known of it.

        Raises:
          TopicNotFound, InvalidParameter, InvalidMessageId, StoreError: nothing happens by looking.
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
            raise forbidden(request.who, "poll", str(name))  # it would tell what payloads have in them
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
        """One message, whole; its bare payload, if that is what the client accepts.

        Raises:
          TopicNotFound, InvalidMessageId, StoreError; NotFound: there is no such message, or not any more.
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
        """Read what is to be shown, and find out how it is to be written."""
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
        """The topic's time to live and its span, of one and the same generation."""
        while True:
            metadata = (await self.directory.ask(name, Describe())).metadata
            span = await self.directory.ask(name, look)
            if span.generation == metadata.generation:
                return metadata.properties.ttl_ms, span

    async def _learn(self) -> None:
        """Learn what was decided before now, unless the transaction service cannot be asked."""
        try:
            await self.transactions.fresh()
        except TransactionsUnavailable:
            return

    def _state(self, pointer: int) -> str:
        """What became of the transaction a row belongs to, as far as this daemon knows."""
        if pointer == 0:
            return "plain"
        if pointer < 0:
            return "rolled-back"
        try:
            standing = self.transactions.standing(pointer)
            if standing != "unknown":
                return _STATES[standing]
            # Nobody here remembers it: what a committed reader makes of it now.
            return _SEEN[self.transactions.view().verdict(pointer)]
        except TransactionsUnavailable:
            return "open"


def query_bound(parameters: dict[str, str], key: str) -> bytes | None:
    """A position in the query as a bound. Raises InvalidMessageId."""
    if key not in parameters:
        return None
    position = parse_query_position(parameters[key], key)
    return bound_at(position) if isinstance(position, int) else position


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
    cut_from: int | None = None
    """The size of the whole payload, of which this is the beginning; None: it is whole."""


class _Shown(Walk):
    """The messages of an answer while they are gathered: row by row, since what is shown is checked."""

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
          payload_bytes: how much of each payload is shown; None: all of it.
          text: what a payload has to contain.
        """
        super().__init__(span, with_pointers=True)
        self.reverse = newest_first
        self.messages: list[_Message] = []
        self.bytes = 0
        self.cut = False
        self.origins = Origins()
        #: With a text, the messages that were looked at, and the last of them.
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
        """One row more than are shown tells whether there are more."""
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
        assert pointers is not None  # both are there
        assert expiries is not None  # row by row
        for item, pointer, expires_ms in zip(items, pointers, expiries, strict=True):
            ((message_id, payload),) = items_in(item)
            if self.reverse and not self.span.start <= message_id < self.span.until:
                continue  # it stands in the row of a message that is wanted
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
            return True  # it is not looked at: the next answer begins with it
        self.scanned += 1
        self.last_scanned = message_id
        return self.text in payload

    def _is_tired(self, size: int) -> bool:
        """Whether so much was looked at, ``size`` bytes last, that the client should ask again for the rest."""
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
            return True  # nobody can say what is in it
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
    """How messages are written."""

    ttl_ms: int
    states: Mapping[int, str]
    origins: Mapping[bytes, Origin]
    as_base64: bool
    as_strings: bool
    hides: bool = False
    """Whether payloads and attributes are not for whoever asks."""

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
            "size": len(message.payload) if message.cut_from is None else message.cut_from,
            "payload": None
            if self.hides
            else _payload(message.payload, as_base64=self.as_base64, is_cut=message.cut_from is not None),
            **({} if message.cut_from is None else {"truncated": True}),
            "attributes": None if self.hides else message.attributes,
            "producer": origin.producer,
            "sequenceId": origin.sequence_id,
            "batch": None if origin.batch is None else dict(zip(("index", "count"), origin.batch, strict=True)),
        }


async def _answer(shown: _Shown, form: _Form) -> Answer:
    """What was gathered, with the headers a poll has."""
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


def _pieces(entries: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
    """A list as JSON has it, a field of an entry at a time."""
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
    """The stretches that were set aside, as far as the page has come."""
    span = shown.span
    if not shown.reverse:
        return span.passed_set_aside(last_id if shown.cut else None)
    every = span.passed_set_aside(None)
    return [each for each in every if not shown.cut or last_id is None or each.first + NO_PAYLOAD_PART >= last_id]


def _with_set_aside(shown: _Shown, form: _Form, stretches: Sequence[SetAside]) -> Iterator[dict[str, Any]]:
    """The messages, with an entry for each stretch at its place; each is written when it is asked for."""
    if not stretches:
        return map(form.written, shown.messages)
    every: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        (each.message_id.hex(), partial(form.written, each)) for each in shown.messages
    ]
    every += [(shown_id(each.first), partial(entry, each)) for each in stretches]
    every.sort(key=itemgetter(0), reverse=shown.reverse)
    return (write() for _, write in every)


def _payload(payload: bytes, *, as_base64: bool, is_cut: bool = False) -> str | dict[str, str]:
    if not as_base64:
        try:
            # A cut may go through a character, of which the beginning is left out.
            return utf_8_decode(payload, "strict", not is_cut)[0]
        except UnicodeDecodeError:
            pass
    return {"base64": b2a_base64(payload, newline=False).decode()}


# --- origins ---------------------------------------------------------------------------------------
#
# The request a message came with: its producer, its sequence id, its place in a batch.
#
# Only the first row of a request says so. Rows of a request have consecutive positions, so the others are its as far as
# it says that it goes: whose the messages shown are is known from the first rows among them, and for those before, from
# one look back. Some rows have their index in the request, which leads back to the first: those with attributes or times
# to live of their own, those in a store that instances share, and those that version 0.1 wrote. That is one look at the
# store, for each request once.
#
# A look back that fails, or would take too long, leaves messages without their origin.


class Origin(NamedTuple):
    """What is known of a message's request; None where there was none of it, or the first row is gone."""

    producer: str | None = None
    sequence_id: int | None = None
    """None too for a stored message: the ids of its stores are not kept."""
    batch: tuple[int, int] | None = None
    """Of an atomic batch: the message's index, and how many there are."""


#: Of messages without any.
NO_ORIGIN = Origin()


class _First(NamedTuple):
    """The first row of a request."""

    stamp: Stamp | None = None
    batch: int | None = None
    is_reference: bool = False
    """It stands for stored messages; the request's own follow, and theirs are the sequence ids."""

    def origin(self, index: int) -> Origin:
        """Of the message in the row ``index``."""
        number = index - self.is_reference
        stamp = self.stamp
        if stamp is not None and (index >= stamp.rows or number >= len(stamp.ids)):
            stamp = None
        batch = (number, self.batch) if self.batch is not None and number < self.batch else None
        if stamp is None:
            return Origin(batch=batch)
        return Origin(stamp.producer, stamp.ids[number], batch)


class Origins:
    """What the rows of some messages say of their requests."""

    def __init__(self) -> None:
        #: Message id → the row's index in its request, 0 for first rows; None: it does not say.
        self._indexes: dict[bytes, int | None] = {}
        #: Position (10 bytes) → what stands in a first row; None: it is gone, or says nothing.
        self._firsts: dict[bytes, _First | None] = {}
        #: The lowest position that was met, and whether its row says whose it is.
        self._lowest = b"\xff" * POSITION_BYTES
        self._lowest_says = True

    def meet(self, message_id: bytes, row: MessageRow, reference: MessageRow | None) -> None:
        """A message is visible; ``reference``: the row that refers to it, when it was stored."""
        row = row if reference is None else reference
        position = message_id[:POSITION_BYTES]
        says, index = reference is not None, None
        if row.extras:
            try:
                index = _number_in(row, INDEX)
                first = None if index else self._firsts.get(position) or _first(row)
            except DamagedRow:
                first, says = None, True  # the message itself is whole
            if first is not None:
                self._firsts[position], index = first, 0
        if position < self._lowest:
            self._lowest, self._lowest_says = position, says or index is not None
        if index is not None or not says:
            self._indexes[message_id] = index

    def forget(self, message_id: bytes) -> None:
        """The message is not shown after all."""
        self._indexes.pop(message_id, None)

    async def find(self, store: Store, prefix: bytes) -> dict[bytes, Origin]:
        """Message id → origin, of all that have one.

        Raises:
          StoreError: a first row could not be read.
        """
        await self._look_back(store, prefix)
        firsts = sorted(self._firsts)
        found = {}
        for message_id, index in self._indexes.items():
            at = message_id[:POSITION_BYTES]
            if index is None:
                before = bisect_right(firsts, at)
                if not before:
                    continue
                position: bytes | None = firsts[before - 1]
                index = ordinal(at) - ordinal(firsts[before - 1])
            else:
                position = _position_before(at, index)
            if position is None:
                continue
            if position not in self._firsts:
                self._firsts[position] = await _looked_up(store, prefix + position)
            first = self._firsts[position]
            if first is None:
                continue
            if first.is_reference and index == 0:
                found[message_id] = Origin(None if first.stamp is None else first.stamp.producer)
            else:
                found[message_id] = first.origin(index)
        return found

    async def _look_back(self, store: Store, prefix: bytes) -> None:
        """Find the first row of the request that the first messages may belong to, if it was not met."""
        unknown = [message_id[:POSITION_BYTES] for message_id, index in self._indexes.items() if index is None]
        if self._lowest_says or not unknown or min(self._firsts, default=_NONE) <= min(unknown):
            return
        look = _LookBack(ordinal(self._lowest))
        start, stop = prefix + bytes(POSITION_BYTES), prefix + self._lowest
        try:
            await store.scan(Table.MESSAGE, start, stop, look.feed, reverse=True, first_chunk=_FIRST_ROWS)
        except StoreError as error:
            log.warning("messages are shown without their producers", extra={"why": str(error)})
            return
        if look.found is not None:
            self._firsts[look.position] = look.found


#: Behind all positions.
_NONE = b"\xff" * (POSITION_BYTES + 1)
#: A look back reads so many rows at first: mostly one says that there is nothing to find.
_FIRST_ROWS = 4
#: It passes so many rows at most, and so many bytes of theirs.
MOST_PASSED = 1 << 17
MOST_PASSED_BYTES = 16 << 20


class _LookBack:
    """Looks for the first row of a request in the rows before one of its others, from the last one down."""

    def __init__(self, behind: int) -> None:
        """``behind``: the position that the search begins before, as a number."""
        self._behind = behind
        self._rows, self._bytes = MOST_PASSED, MOST_PASSED_BYTES
        self.found: _First | None = None
        self.position = b""
        """Of the row that was found."""

    def feed(self, rows: Sequence[Row]) -> bool:
        """Take rows, in descending order; False: that is enough."""
        return all(map(self._passes, rows))

    def _passes(self, row: Row) -> bool:
        """Whether the first row may stand before this one."""
        position, value = row[0][-POSITION_BYTES:], row[1]
        at, behind = ordinal(position), self._behind
        if at + 1 != behind and at // SEQUENCES_PER_MS != behind // SEQUENCES_PER_MS:
            return False  # no request goes on in a millisecond before the one before is full
        self._behind = at
        self._rows, self._bytes = self._rows - 1, self._bytes - len(value)
        if not value or not value[0] & HAS_EXTRAS:
            return self._rows > 0 and self._bytes > 0
        try:
            decoded = decode_row(value)
            if decoded.payload is not None and INDEX in decoded.extras:
                return False
            self.found, self.position = _first(decoded), position
        except DamagedRow:
            return False
        return self.found is None and self._rows > 0 and self._bytes > 0


async def _looked_up(store: Store, key: bytes) -> _First | None:
    value = await store.get(Table.MESSAGE, key)
    # A list of ids may be long: as many as one request may have messages.
    return None if value is None else await off_loop(len(value), JSON, partial(_read, value))


def _read(value: bytes) -> _First | None:
    try:
        return _first(decode_row(value))
    except DamagedRow:
        return None


def _first(row: MessageRow) -> _First | None:
    """What a row says, if it is a first one. Raises DamagedRow."""
    is_reference = row.payload is None
    # On a reference the same letter counts bytes.
    first = _First(Stamp.of(row), None if is_reference else _number_in(row, BATCH), is_reference)
    return None if first.stamp is None and first.batch is None else first


def _number_in(row: MessageRow, key: str) -> int | None:
    """A number from 1 on among a row's extras; None where there is none. Raises DamagedRow."""
    number = row.extras.get(key)
    if number is None:
        return None
    if type(number) is not int or number < 1:
        raise DamagedRow(f"a row's {key!r} is no number from 1 on")
    return number


def _position_before(position: bytes, count: int) -> bytes | None:
    """So many positions before; None: there are not so many.

    Those of a request have no holes, and the one after the last of a millisecond is the first of the next.
    """
    at = ordinal(position) - count
    return None if at < 0 else at.to_bytes(POSITION_BYTES, "big")
