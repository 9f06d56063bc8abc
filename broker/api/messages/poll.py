"""Polls: find a span, wait for messages if asked to, read a page within its memory budget, and report the end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

import trio

from broker.api.answers import JOINED_BYTES, LOOP_AVRO_BYTES, LOOP_BYTES, body_of, in_steps, off_loop
from broker.api.messages.kept_answers import KeptAnswer, KeptAnswers, question_of
from broker.api.messages.readers import READER_HEADER
from broker.api.messages.set_aside import passed
from broker.authority import SwitchedOff
from broker.http.messages import Answer, BodyPieces, one_of, parse_query, whole_number
from plainsong.protocol.codec import (
    AVRO_END,
    JSON,
    PageOptions,
    accept_frames,
    avro_block_pieces,
    codec_for,
    frames_pieces,
)
from plainsong.protocol.codec.cloud_events import BATCH_TYPE, BYTES_EACH, accepts_events, events_pieces
from plainsong.protocol.errors import (
    InvalidParameter,
    PlainsongError,
    RequestTooLarge,
    TopicNotFound,
    TransactionsUnavailable,
)
from plainsong.protocol.ids import ID_BYTES, after, unpack_position
from plainsong.protocol.names import reader_name
from plainsong.protocol.page import Page
from plainsong.protocol.requests import MAX_ATTRIBUTE_BYTES, check_poll
from plainsong.protocol.tephra.state import decode_transaction
from plainsong.protocol.topic.asks import Describe, Look
from plainsong.protocol.transactions.view import Verdict, View

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator

    from actors.decisions import AskTopic
    from actors.directory import Directory
    from actors.observe import Clock
    from actors.pages import Pages
    from broker.api.messages.holding import Holds
    from broker.api.messages.kept_answers import Question
    from broker.api.messages.readers import NamedReaders
    from broker.authority import Transactions
    from broker.config.sections import PollConfig
    from broker.http.budgets import AnswerReservation
    from broker.http.handlers import RequestTasks
    from broker.http.messages import Answered, Request
    from broker.metrics import Rates
    from plainsong.protocol.codec import Codec
    from plainsong.protocol.codec.media import FramesOptions
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.records import SetAside
    from plainsong.protocol.requests import Isolation, PollRequest
    from plainsong.protocol.topic.asks import Span

#: Longer pages are built by a task, in turn with others, once memory is reserved for the answer.
START_BYTES = 64 << 10
#: Estimated size of a message's attributes, for the decision where to encode a page; the limit is 4 KiB.
ATTRIBUTES_BYTES = 512
#: Bytes of a streamed answer held in memory at a time.
STREAM_PAGE_BYTES = 1 << 20
_PARAMETERS = ("wait_ms", "max_bytes", "isolation", "as_of_ms", "payload", "longs")


@dataclass(slots=True)
class Reading:
    """The limits of a poll's page, and the reservation that it is counted against."""

    limit: int
    max_bytes: int
    with_pointers: bool
    room: AnswerReservation | None


class Looked(NamedTuple):
    """The span of a poll, and the view that it is read with."""

    span: Span
    view: View | None
    mark: int
    """``Holds.mark``, read before span and view were taken."""


@dataclass(slots=True)
class Found:
    """The page that a poll found, and the span and view it was read with."""

    span: Span
    view: View | None
    page: Page
    looks: int = 1
    """Attempts until the page had messages."""
    asked_from: bytes | None = None
    """Start of the request. The span may start later: a waiting poll does not read the same rows twice."""

    def passed_set_aside(self) -> list[SetAside]:
        """Return the ranges that were set aside between the start of the request and the end of the page."""
        return self.span.passed_set_aside(self.page.last_id, self.asked_from)


@dataclass(slots=True)
class _Asked:
    """A decoded poll request."""

    name: TopicName
    codec: Codec
    body: PollRequest
    options: PageOptions | None
    frames: FramesOptions | None
    reading: Reading

    def is_streamed(self, page: Page) -> bool:
        """True if the answer continues after this page: version 1 has no other way to report that there is more."""
        return not self.codec.bounded and page.end == "more" and page.count != self.body.limit


@dataclass(frozen=True, slots=True)
class Polling:
    """The route of a poll."""

    directory: Directory
    pages: Pages
    transactions: Transactions
    holds: Holds
    rates: Rates
    blocked: Callable[[], None]
    """Counts a poll that was held by an undecided message."""
    ask_owner: AskTopic
    """Asks a topic at its current owner: a streamed answer continues when the topic changes hands."""
    bounds: PollConfig
    stopping: trio.Event
    clock: Clock
    delivered_after: Callable[[float], None]
    """Observes the seconds from publish to delivery, for polls that waited for the message."""
    named_readers: NamedReaders
    """Records the positions of readers that send their name."""
    tasks: RequestTasks
    kept: KeptAnswers = field(default_factory=KeptAnswers)
    """Recent answers from memory, for readers that send the same poll."""

    def poll(self, request: Request, answered: Answered) -> None:
        """Return the messages from a position on, oldest first.

        A small page that is in memory is answered at once. Everything else runs in a task.
        """
        question = question_of(request, page_bytes(self.bounds.max_bytes, request.page_bytes))
        kept = None if question is None else self._kept_for(question)
        if kept is not None:
            if READER_HEADER in request.headers:
                self.named_readers.polled(kept.name, request, kept.last_id, self.clock.now_ms())
            answered(kept.answer())
            self.rates.delivered(kept.name, kept.count, trio.current_time())
            return
        asked = self._asked(request)
        asked_ms = self.clock.now_ms()
        looked = self._look_now(request, asked)
        found = None if looked is None else self._find_now(asked, looked)
        if found is None:
            self.tasks.run(partial(self._poll, asked, looked=looked), request, answered)
            return
        if found.page.held is not None:
            self.blocked()
        self._note(request, asked, found, asked_ms)
        page, codec, frames = found.page, asked.codec, asked.frames
        pieces = _pieces(codec, asked.options, page) if frames is None else frames_pieces(page, frames)
        content, content_type = b"".join(pieces), codec.content_type if frames is None else frames.content_type
        answered(_answer(content, content_type, found))
        self.rates.delivered(asked.name, page.count, trio.current_time())
        if question is not None and not found.span.undecided and self.kept.is_asked_again(question):
            self._keep(question, asked, found, content, content_type)

    def _look_now(self, request: Request, asked: _Asked) -> Looked | None:
        """Return the span and the view that the poll is to be read with; None: only a task can get them.

        Both are taken in one step of the loop, so the span has all messages of the transactions that the view shows.
        """
        body = asked.body
        is_committed = body.isolation == "committed"
        if (
            body.transaction is not None
            or body.as_of_ms is not None
            or (is_committed and isinstance(self.transactions, SwitchedOff))
            or accepts_events(request.headers.get("accept"))
        ):
            return None
        mark = self.holds.mark
        # A committed reader waits in its task, which takes a new view after the wait.
        deadline_s = None if is_committed else self._deadline_s(body, request.waited_ms)
        look = Look(body.since, body.end_before, deadline_s, undecided=int(is_committed))
        span = self.directory.look_now(asked.name, look)
        if span is None or not is_committed:
            return None if span is None else Looked(span, None, mark)
        view = self.transactions.view_now() if span.undecided else View.without_service(span.undecided)
        return None if view is None else Looked(span, view, mark)

    def _find_now(self, asked: _Asked, looked: Looked) -> Found | None:
        """Return the page if it is small, in memory, and the poll need not wait; else None."""
        body, reading, (span, view, _) = asked.body, asked.reading, looked
        page = self.pages.read_now(
            asked.name,
            span,
            limit=reading.limit,
            max_bytes=reading.max_bytes,
            at_once_bytes=START_BYTES,
            view=view,
            with_pointers=reading.with_pointers,
        )
        if (
            page is None
            or (body.wait_ms and not page.count)
            or (asked.frames is None and asked.is_streamed(page))
            or len(page.attributes) * MAX_ATTRIBUTE_BYTES > START_BYTES
        ):
            return None
        return Found(span, view, page, asked_from=body.since)

    async def _poll(self, asked: _Asked, request: Request, looked: Looked | None = None) -> Answer:
        """Answer any poll.

        Args:
          looked: the result of ``_look_now``, if there was one.
        Raises:
          PlainsongError: a poll changes nothing, so nothing happened.
        """
        name, codec, body, frames, reading = asked.name, asked.codec, asked.body, asked.frames, asked.reading
        asked_ms = self.clock.now_ms()
        found = await self.look(name, body, reading, self._deadline_s(body, request.waited_ms), looked=looked)
        page = found.page
        self._note(request, asked, found, asked_ms)
        if frames is not None:
            self.rates.delivered(name, page.count, trio.current_time())
            content = body_of(await in_steps(page.payload_bytes, frames_pieces(page, frames)))
            return _answer(content, frames.content_type, found)
        if accepts_events(request.headers.get("accept")):
            content = await self._written(name, found, reading, _events_of(name, asked.options), BYTES_EACH)
            self.rates.delivered(name, found.page.count, trio.current_time())
            return _answer(content, BATCH_TYPE, found)
        if asked.is_streamed(page):
            self.rates.delivered(name, page.count, trio.current_time())
            return Answer(200, self._stream(name, found, body.limit, request.room), codec.content_type)
        at_once = LOOP_BYTES if codec.bounded else LOOP_AVRO_BYTES
        content = await self._written(
            name, found, reading, partial(_pieces, codec, asked.options), at_once_bytes=at_once
        )
        self.rates.delivered(name, found.page.count, trio.current_time())
        return _answer(content, codec.content_type, found)

    def _kept_for(self, question: Question) -> KeptAnswer | None:
        """Return the kept answer if it is still correct. It counts as a hit of the scan cache."""
        kept = self.kept.find(question)
        if kept is None:
            return None
        span, cache = self.directory.look_now(kept.name, kept.look), self.directory.cache(kept.name)
        if span is None or cache is None or not kept.answers(span, cache.revision):
            return None
        if kept.count:
            cache.budget.hits += 1
        return kept

    def _keep(self, question: Question, asked: _Asked, found: Found, content: bytes, content_type: str) -> None:
        """Keep an answer, unless a message in it has its own ttl."""
        name, span, page = asked.name, found.span, found.page
        cache = self.directory.cache(name)
        first = page.parts[0][1 : 1 + ID_BYTES] if page.count else None
        if cache is None or (first is not None and cache.has_expiries(first)):
            return
        kept = KeptAnswer(
            name=name,
            look=Look(asked.body.since, asked.body.end_before),
            span=span,
            revision=cache.revision,
            first=first,
            is_cut=page.end == "more",
            content=content,
            content_type=content_type,
            headers=headers_of(found),
            count=page.count,
            last_id=page.last_id,
        )
        self.kept.keep(question, kept)

    def _asked(self, request: Request) -> _Asked:
        """Decode and check a request. Raises PlainsongError."""
        codec = codec_for(request.headers.get("content-type"))
        body = decode_poll(request, codec)
        options = apply_query(body, request.query)
        check_poll(body)
        frames = accept_frames(request.headers.get("accept"))
        if READER_HEADER in request.headers:
            reader_name(request.headers[READER_HEADER])  # refuse a bad name before waiting
        reading = self._reading(body, request, with_pointers=frames is not None and frames.pointers)
        return _Asked(request.name, codec, body, options, frames, reading)

    def _note(self, request: Request, asked: _Asked, found: Found, asked_ms: int) -> None:
        """Record the delivery delay, and the reader's position."""
        page = found.page
        if asked.body.wait_ms and page.count:
            self._note_delivery(asked.name, found, asked_ms)
        if READER_HEADER in request.headers:
            self.named_readers.polled(asked.name, request, page.last_id, self.clock.now_ms())

    def _note_delivery(self, name: TopicName, found: Found, asked_ms: int) -> None:
        """Record the time since the publish of the page's first message, if the poll waited for it."""
        published_ms, _ = unpack_position(found.page.parts[0][1:11])
        if found.looks > 1 or published_ms >= asked_ms:
            delay_ms = max(0, self.clock.now_ms() - published_ms)
            self.delivered_after(delay_ms / 1000)
            self.rates.delivery.add(name, delay_ms)

    async def _written(
        self,
        name: TopicName,
        found: Found,
        reading: Reading,
        pieces: Callable[[Page], Iterator[bytes]],
        bytes_each: int = 0,
        at_once_bytes: int = LOOP_BYTES,
    ) -> bytes | BodyPieces:
        """Encode the page, and halve it until the encoding fits the answer's reservation: JSON escapes binary payloads.

        Args:
          pieces: encodes a page.
          bytes_each: the cost of encoding a message apart from its payload, as bytes of payload.
        """
        room = reading.room
        while True:
            page = found.page
            size = page.payload_bytes + bytes_each * page.count + ATTRIBUTES_BYTES * len(page.attributes)
            content = body_of(await in_steps(size, pieces(page), at_once_bytes=at_once_bytes))
            if room is None or room.has(len(content)) or page.count <= 1:
                return content
            del content  # release its memory before the shorter page is read
            read = partial(self.pages.read, name, found.span, limit=reading.limit, view=found.view)
            found.page = await read(max_bytes=page.payload_bytes // 2, with_pointers=reading.with_pointers)
            room.has(TIMES * found.page.payload_bytes)  # always succeeds: the reservation shrinks

    def _reading(self, body: PollRequest, request: Request, *, with_pointers: bool) -> Reading:
        poll_config = self.bounds
        limit = poll_config.max_messages if body.limit is None else min(body.limit, poll_config.max_messages)
        max_bytes = page_bytes(poll_config.max_bytes, body.max_bytes, request.page_bytes)
        return Reading(limit, max_bytes, with_pointers, request.room)

    def _deadline_s(self, body: PollRequest, waited_ms: int) -> float | None:
        if not body.wait_ms:
            return None
        return trio.current_time() + (min(body.wait_ms, self.bounds.max_wait_ms) - waited_ms) / 1000

    async def look(
        self,
        name: TopicName,
        body: PollRequest,
        reading: Reading,
        deadline_s: float | None,
        *,
        returns_held: bool = False,
        unless_held_by: int | None = None,
        looked: Looked | None = None,
    ) -> Found:
        """Return a page with messages; an empty one after the deadline, or when waiting cannot help.

        Args:
          looked: the first span and view to read; None: ask the topic.
          deadline_s: on trio's clock; None: do not wait.
          returns_held: also return an empty page that is held by a pointer other than ``unless_held_by``.
        """
        brought = None
        if body.transaction is not None:
            # Refuse before waiting. A large snapshot takes long to decode, hence off the loop.
            ask_view = partial(view_for, self.transactions, body.isolation, body.transaction)
            brought = await off_loop(len(body.transaction), JSON, ask_view)
        if body.as_of_ms is not None:
            return await self._look_as_of(name, body, body.as_of_ms, reading)
        reader = CommittedReader(self.transactions) if body.isolation == "committed" else None
        since = body.since
        was_held = False
        looks = 0
        while True:
            looks += 1
            # A committed reader parks in ``_comes`` instead: a view from before the wait would be stale after it.
            look = Look(since, body.end_before, deadline_s if reader is None else None)
            if looked is None:
                mark = self.holds.mark
                if reader is None:
                    looked = Looked(await self.directory.ask(name, look), brought, mark)
                else:
                    looked = await self._look_committed(name, look, reader, mark)
            span, view, mark = looked
            looked = None
            page = await self._page_of(name, span, view, reading)
            found = Found(span, view, page if reader is None else reader.admit(page), looks, body.since)
            page = found.page
            if page.held is not None and not was_held:
                self.blocked()
                was_held = True
            if page.count or deadline_s is None or self.stopping.is_set() or trio.current_time() >= deadline_s:
                return found
            if page.held is not None:
                if returns_held and page.held.write_pointer != unless_held_by:
                    return found
                if brought is not None:
                    return found  # a snapshot is fixed: the decision would not change it
                await self.holds.wait(name, page.held, page.held_until_ms, mark, deadline_s)
                if self.stopping.is_set():
                    return found
                since = bound_after(found)
                continue
            if look.deadline_s is not None and span.since >= span.until:
                return found  # the topic waited until the deadline, and had nothing
            since = bound_after(found)  # everything up to here is expired or rolled back
            if look.deadline_s is None and not await self._comes(name, Look(since, body.end_before, deadline_s)):
                return found

    async def _look_as_of(self, name: TopicName, body: PollRequest, at_ms: int, reading: Reading) -> Found:
        """Return a page as of a moment. It never waits: no message can be added to that moment.

        First the transaction service, then the topic, guarantees that no later commit or message gets a time up to the
        moment. Both are asked before the page is read, so everything committed by then lies before the span's end.
        """
        view = (await self.transactions.as_of(at_ms)).view()
        span = await self.directory.ask(name, Look(body.since, body.end_before, as_of_ms=at_ms))
        found = Found(span, view, await self._page_of(name, span, view, reading))
        found.asked_from = body.since
        return found

    async def _comes(self, name: TopicName, look: Look) -> bool:
        """Park until there is a message; False after the deadline, or if none can arrive."""
        span = await self.directory.ask(name, look)
        return span.since < span.until

    async def _look_committed(self, name: TopicName, look: Look, reader: CommittedReader, mark: int) -> Looked:
        """Take the span with all its undecided pointers, then the view, unless nothing is undecided.

        A transaction that was undecided in the span and is committed in the view may have written its last rows between
        the two, and would be shown in part: read again, after the view. A topic without undecided messages needs no
        view of the service, and without the service the pointers of the span serve instead.
        """
        span = await self.directory.ask(name, replace(look, undecided=EVERY_POINTER))
        view = await reader.view() if span.undecided else None
        if view is None:
            return Looked(span, View.without_service(span.undecided), mark)
        if any(view.verdict(pointer) is Verdict.DELIVER for pointer in span.undecided):
            span = await self.directory.ask(name, look)
        return Looked(span, view, mark)

    async def _page_of(self, name: TopicName, span: Span, view: View | None, reading: Reading) -> Page:
        def read(max_bytes: int) -> Awaitable[Page]:
            most, pointers = reading.limit, reading.with_pointers
            return self.pages.read(name, span, limit=most, max_bytes=max_bytes, view=view, with_pointers=pointers)

        return await read_within(reading.room, reading.limit, reading.max_bytes, read)

    async def _stream(
        self, name: TopicName, found: Found, limit: int | None, room: AnswerReservation | None
    ) -> AsyncGenerator[bytes, None]:
        """Stream a version 1 answer of any length, as of the watermark, view and clock of its start.

        It continues when the topic changes hands. After an error, or without memory for the next block, it stops
        without the end marker. The client then reports an error, never the end of the topic.
        """
        span, page = found.span, found.page
        found.page = Page()  # free the page once its block is sent
        sent = page.count
        for piece in avro_block_pieces(page):
            yield piece
        page.parts = ()
        while page.end == "more" and sent != limit and page.last_id is not None:
            if (await self.ask_owner(name, Describe())).metadata.generation != span.generation:
                raise TopicNotFound(f"topic {name} was re-created during the request")
            span = replace(span, since=after(page.last_id))
            left = self.bounds.max_messages if limit is None else limit - sent
            block = Reading(min(left, self.bounds.max_messages), STREAM_PAGE_BYTES, with_pointers=False, room=room)
            page = await self._page_of(name, span, found.view, block)
            sent += page.count
            self.rates.delivered(name, page.count, trio.current_time())
            for piece in avro_block_pieces(page):
                yield piece
        yield AVRO_END


def decode_poll(request: Request, codec: Codec) -> PollRequest:
    """Return the request in the body, decoded once. Raises PlainsongError."""
    if request.decoded is None:
        request.decoded = codec.decode_poll(request.body)
    body: PollRequest = request.decoded
    return body


def poll_wait_ms(request: Request) -> int:
    """Return the wait that a poll asks for, in ms; 0 if it cannot be decoded, which the handler refuses."""
    try:
        body = decode_poll(request, codec_for(request.headers.get("content-type")))
        apply_query(body, request.query)
    except PlainsongError:
        return 0
    return body.wait_ms or 0


def _answer(content: bytes | BodyPieces, content_type: str, found: Found) -> Answer:
    length = content.length if isinstance(content, BodyPieces) else None
    return Answer(200, content, content_type, headers_of(found), length)


def _events_of(name: TopicName, options: PageOptions | None) -> Callable[[Page], Iterator[bytes]]:
    """Return an encoder of pages as CloudEvents; messages that are not events get the topic as their source."""
    source = f"/v1/namespaces/{quote(name.namespace, safe='')}/topics/{quote(name.topic, safe='')}"
    return partial(events_pieces, source=source, payload_base64=options is not None and options.payload_base64)


def _pieces(codec: Codec, options: PageOptions | None, page: Page) -> Iterator[bytes]:
    if not codec.bounded and page.payload_bytes <= JOINED_BYTES:
        return iter((codec.encode_page(page),))  # joined here only: joining a single piece again copies nothing
    return codec.page_pieces(page) if options is None else codec.page_pieces(page, options)


def apply_query(body: PollRequest, query: str) -> PageOptions | None:
    """Copy the query's parameters into the request, and return its options for the page. Raises InvalidParameter."""
    if not query:
        return None
    parameters = parse_query(query, _PARAMETERS)
    wait_ms, max_bytes = whole_number(parameters, "wait_ms"), whole_number(parameters, "max_bytes")
    body.wait_ms = _once("wait_ms", wait_ms, body.wait_ms)
    body.max_bytes = _once("max_bytes", max_bytes, body.max_bytes)
    if "isolation" in parameters:
        isolation = one_of(parameters, "isolation", ("uncommitted", "committed"), "")
        body.isolation = "committed" if isolation == "committed" else "uncommitted"
    body.as_of_ms = _once("as_of_ms", whole_number(parameters, "as_of_ms"), body.as_of_ms)
    return PageOptions(
        payload_base64=one_of(parameters, "payload", ("text", "base64"), "text") == "base64",
        longs_as_strings=one_of(parameters, "longs", ("number", "string"), "number") == "string",
    )


def _once(name: str, in_query: int | None, in_body: int | None) -> int | None:
    if in_query is not None and in_body not in (None, in_query):
        raise InvalidParameter(f"{name} is {in_query} in the query and {in_body} in the body", hint="give it once")
    return in_body if in_query is None else in_query


def bound_after(found: Found) -> bytes:
    """Return the bound to continue from after a page without messages."""
    last_id = found.page.last_id
    return found.span.since if last_id is None else max(found.span.since, after(last_id))


# --- isolation -------------------------------------------------------------------------------------
#
# A request reads everything, what its own snapshot shows, or what is committed now.


#: Two million pointers: the largest snapshot that Tephra can send to its own clients.
MAX_SNAPSHOT_BYTES = 16 << 20


#: A value of ``Look.undecided`` that asks for all undecided pointers.
EVERY_POINTER = 1 << 62


class CommittedReader:
    """A reader of committed messages. It needs the transaction service only where something is undecided.

    While the service is unavailable, a topic serves what it has stored as committed, up to the first undecided message.
    """

    def __init__(self, transactions: Transactions) -> None:
        """Raises TransactionsUnavailable: the daemon has no transaction service."""
        if isinstance(transactions, SwitchedOff):
            transactions.view()
        self._transactions = transactions
        self._is_fresh = False
        self._away: TransactionsUnavailable | None = None

    async def view(self) -> View | None:
        """Return a view with every commit acknowledged before the request; None if the service is unavailable."""
        try:
            if not self._is_fresh:
                await self._transactions.fresh()
                self._is_fresh = True
            self._away = None
            return self._transactions.view()
        except TransactionsUnavailable as error:
            self._away = error
            return None

    def admit(self, page: Page) -> Page:
        """Return the page if it is correct without the service: it then ends before the first undecided message.

        Raises:
          TransactionsUnavailable: the first message is undecided, and the service is unavailable.
        """
        if self._away is None or page.held is None:
            return page
        if not page.count:
            self.refuse_if_away()
        return replace(page, end="more", held=None)

    def refuse_if_away(self) -> None:
        """Raises TransactionsUnavailable while the service is unavailable."""
        if self._away is not None:
            raise self._away


def view_for(transactions: Transactions, isolation: Isolation | None, transaction: bytes | None) -> View | None:
    """Return the reader's view; None: it reads everything, including undecided and rolled-back messages.

    Take a committed reader's view *before* its span: then all messages of the transactions it shows lie before the
    span's end. A view of ``transaction`` may be made at any time.

    Raises:
      InvalidParameter: both are given.
      RequestTooLarge: the transaction has more than ``MAX_SNAPSHOT_BYTES``.
      MalformedTransaction: the bytes are not a transaction.
      TransactionsUnavailable: isolation is ``committed``, and there is no transaction service, or it is down.
    """
    if transaction is not None and isolation is not None:
        raise InvalidParameter(
            "transaction and isolation exclude each other",
            hint="transaction supplies a snapshot; isolation=committed uses the daemon's",
        )
    if transaction is not None:
        if len(transaction) > MAX_SNAPSHOT_BYTES:
            raise RequestTooLarge(f"a transaction of {len(transaction)} bytes", hint=f"at most {MAX_SNAPSHOT_BYTES}")
        return View.of(decode_transaction(transaction))
    return transactions.view() if isolation == "committed" else None


# --- headers ---------------------------------------------------------------------------------------


def headers_of(found: Found) -> list[tuple[str, str]]:
    """Return the headers of its page, and the number of rows set aside that it passed."""
    return [*position_headers(found.page), *passed(found.passed_set_aside())]


def position_headers(page: Page) -> list[tuple[str, str]]:
    """Return headers with the end of the page, the reason for it, and where to resume."""
    headers: list[tuple[str, str]] = [("Plainsong-End", page.end)]
    if page.last_id is not None:
        headers.append(("Plainsong-Last-Id", page.last_id.hex()))
    if page.held is not None:
        headers.append(("Plainsong-Held-By", str(page.held.write_pointer)))
        headers.append(("Plainsong-Held-Since", str(page.held.since_ms)))
        headers.append(("Plainsong-Hidden-Messages", page.held.hidden_text))
    return headers


def page_bytes(*bounds: int | None) -> int:
    """Return the payload bytes that a page may have: the least of ``bounds``."""
    return min(each for each in bounds if each is not None)


# --- pages within the memory budget ----------------------------------------------------------------
#
# A page is full size while memory is plentiful, and shorter while it is not.


#: Memory reserved for a page, as a multiple of its payload: the page and its encoding.
TIMES = 2
#: Payload that is read before anything is reserved: most pages are smaller, and need not wait for memory.
FIRST_BYTES = 256 << 10


async def read_within(
    room: AnswerReservation | None, limit: int, max_bytes: int, read: Callable[[int], Awaitable[Page]]
) -> Page:
    """Read a page of at most ``max_bytes``, and reserve memory for it; it may be shorter than requested.

    Args:
      room: the reservation; None if none is made.
      limit: messages that ``read`` reads at most.
      read: reads a page of at most the given payload bytes, but at least one message.
    Raises:
      Overloaded: no memory became free in time, even for a short page; nothing is reserved.
    """
    if room is None:
        return await read(max_bytes)
    is_first = not room.takes_now(TIMES * max_bytes)
    size = min(max_bytes, FIRST_BYTES) if is_first else max_bytes
    while True:
        page = await read(size)
        needs = TIMES * page.payload_bytes
        if is_first and size < max_bytes and page.end == "more" and page.count < limit:
            most = max(needs, TIMES * max_bytes)
        elif room.has(needs):
            return page
        else:
            most = needs  # a page has at least one message, so it may exceed the size
        is_first = False
        del page  # free it before waiting
        size = await room.take(max(needs, TIMES), max(most, TIMES)) // TIMES


async def bytes_within(room: AnswerReservation | None, max_bytes: int) -> int:
    """Reserve memory for an answer that is gathered from several reads; return its payload bytes, up to ``max_bytes``.

    Raises:
      Overloaded: no memory became free in time; nothing is reserved.
    """
    if room is None or room.takes_now(TIMES * max_bytes):
        return max_bytes
    least = min(max_bytes, FIRST_BYTES)
    return await room.take(TIMES * least, TIMES * max_bytes) // TIMES


def hold_gathered(room: AnswerReservation | None, payload_bytes: int) -> None:
    """Set the reservation to the actual size. Raises Overloaded if a large message exceeds it and no memory is free."""
    if room is not None and not room.has(TIMES * payload_bytes):
        raise room.refusal()
