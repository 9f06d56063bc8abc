"""Server-sent events: the messages of one topic as they arrive, for browsers and ``curl -N``.

    retry: 2000                          first, with the id to resume from after a reconnect
    event: message   id: <message id>    data: {"id","publishTimeMs","payload","attributes"}
    event: set-aside id: <its last id>   data: {"from","to","rows"}
    event: held                          data: {"heldBy","heldSince","hiddenMessages"}
    event: error                         data: the problem that ended the stream
    event: end                           data: {"lastId"}; the daemon shuts down, or the topic's owner changes
    : ping                               after 15 s without an event

A stream is a repeated poll: while it waits, it counts as a parked poll of its topic.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trio

from broker.api.answers import in_steps
from broker.api.messages.poll import CommittedReader, Reading, bound_after
from broker.api.messages.set_aside import entry
from broker.api.messages.show import query_bound
from broker.http.messages import EVENT_STREAM, PING, PING_S, Answer, one_of, problem_of, whole_number
from plainsong.protocol.codec import gathered
from plainsong.protocol.codec.base import PIECE_BYTES
from plainsong.protocol.codec.json import payload_pieces, payload_writer
from plainsong.protocol.codec.json_values import compact
from plainsong.protocol.errors import InvalidParameter, NoOwner, Overloaded, PlainsongError, ShuttingDown
from plainsong.protocol.ids import FIRST_BOUND, after, before, parse_id, shown_id, unpack_position
from plainsong.protocol.page import messages_of
from plainsong.protocol.requests import PollRequest
from plainsong.protocol.topic.asks import Look

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence

    from broker.api.messages.poll import Found, Polling
    from broker.http.budgets import AnswerReservation
    from broker.http.messages import Request
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.page import Held, Page
    from plainsong.protocol.records import SetAside
    from plainsong.protocol.requests import Isolation

#: Keeps proxies from buffering events.
EVENT_HEADERS = [("Cache-Control", "no-store"), ("X-Accel-Buffering", "no")]
#: Concurrent streams of one instance.
MAX_STREAMS = 1_000
RETRY_MS = 2_000
#: Messages, and bytes of payload, read at a time.
PAGE_MESSAGES = 1_000
PAGE_BYTES = 1 << 20
#: Memory reserved for a stream while it waits.
IDLE_BYTES = 1 << 10


def event(kind: str, data: Any, event_id: str | None = None) -> bytes:
    """Encode one event. Its data is JSON on one line."""
    head = "" if event_id is None else f"id: {event_id}\n"
    text = compact(data)
    return f"{head}event: {kind}\ndata: {text}\n\n".encode("utf-8", "replace")


class EventStreams:
    """Counts the streams of this instance, and limits them."""

    def __init__(self, max_streams: int = MAX_STREAMS) -> None:
        self.max_streams = max_streams
        self.open = 0

    def answer(self, chunks: AsyncGenerator[bytes, None], room: AnswerReservation | None) -> Answer:
        """Return an answer that sends these events. Raises Overloaded: there are too many streams."""
        if self.open >= self.max_streams:
            raise Overloaded(f"{self.open} event streams are open", hint="retry later, or poll with waitMs")
        if room is not None:
            room.has(IDLE_BYTES)
        return Answer(200, _Counted(self, chunks), EVENT_STREAM, list(EVENT_HEADERS))


class _Counted:
    """A ``BodyStream`` that is counted from its creation until it is closed, sent or not."""

    def __init__(self, streams: EventStreams, chunks: AsyncGenerator[bytes, None]) -> None:
        self._streams = streams
        self._chunks = chunks
        self._closed = False
        streams.open += 1

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        return await anext(self._chunks)

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._streams.open -= 1
            await self._chunks.aclose()


@dataclass(slots=True)
class _Follow:
    """The state of one stream."""

    name: TopicName
    since: bytes
    isolation: Isolation | None
    payload_base64: bool
    left: int | None
    """Number of messages until the stream ends; None if it has no limit."""
    room: AnswerReservation | None


@dataclass(frozen=True, slots=True)
class MessageEvents:
    """The route that sends a topic's messages as events."""

    polling: Polling
    streams: EventStreams

    async def follow(self, request: Request) -> Answer:
        """Return the messages from a position on, then each new one.

        Raises:
          TopicNotFound, InvalidParameter, InvalidMessageId, TransactionsUnavailable, Overloaded.
        """
        name = request.name
        parameters = request.parameters("from", "isolation", "payload", "limit")
        limit = whole_number(parameters, "limit")
        if limit is not None and limit < 1:
            raise InvalidParameter(f"limit is {limit}", hint="use 1 or more")
        committed = one_of(parameters, "isolation", ("uncommitted", "committed"), "uncommitted") == "committed"
        as_base64 = one_of(parameters, "payload", ("text", "base64"), "text") == "base64"
        since = query_bound(parameters, "from")
        last_id = request.headers.get("last-event-id", "")
        if last_id:
            since = after(parse_id(last_id))
        if committed:
            CommittedReader(self.polling.transactions)  # fail now if the daemon has no transaction service
        span = await self.polling.directory.ask(name, Look(FIRST_BOUND))
        self._refuse_one_too_many(name)
        isolation: Isolation = "committed" if committed else "uncommitted"
        start = span.until if since is None else since
        following = _Follow(name, start, isolation, as_base64, limit, request.room)
        return self.streams.answer(self._events(following), request.room)

    def _refuse_one_too_many(self, name: TopicName) -> None:
        """Raises Overloaded: the topic has as many parked polls as it may."""
        core = self.polling.directory.entry(name).actor.core
        if core is not None and len(core.parking) >= core.state.limits.max_parked_polls:
            raise Overloaded(f"{len(core.parking)} polls wait on topic {name}", hint="retry later")

    async def _events(self, following: _Follow) -> AsyncGenerator[bytes, None]:
        polling = self.polling
        resume = before(following.since)
        first_id = "" if resume is None else f"id: {resume.hex()}\n"
        yield f"retry: {RETRY_MS}\n{first_id}\n".encode()
        announced: int | None = None
        try:
            while True:
                deadline_s = trio.current_time() + PING_S
                found = await self._next(following, deadline_s, announced)
                page, passed = found.page, found.passed_set_aside()
                if page.count or passed:
                    pieces = gathered(_pieces(page, passed, payload_base64=following.payload_base64))
                    chunk = b"".join(await in_steps(page.payload_bytes, pieces))
                    polling.rates.delivered(following.name, page.count, trio.current_time())
                    if following.left is not None:
                        following.left -= page.count
                    announced = None
                    page.parts = ()  # free the page while the reader takes the chunk
                    yield chunk
                    del chunk
                    if following.room is not None:
                        following.room.has(IDLE_BYTES)
                if page.held is not None and page.held.write_pointer != announced:
                    announced = page.held.write_pointer
                    yield _held(page.held)
                elif not (page.count or passed) and trio.current_time() >= deadline_s:
                    yield PING
                if polling.stopping.is_set() or following.left == 0:
                    break
                await trio.lowlevel.checkpoint()
        except (NoOwner, ShuttingDown):
            pass
        except PlainsongError as error:
            yield event("error", problem_of(error))
            return
        resume = before(following.since)
        yield event("end", {"lastId": None if resume is None else resume.hex()})

    async def _next(self, following: _Follow, deadline_s: float, announced: int | None) -> Found:
        """Return the next messages, or the pointer that holds them; an empty page at the deadline."""
        limit = PAGE_MESSAGES if following.left is None else min(PAGE_MESSAGES, following.left)
        reading = Reading(limit, PAGE_BYTES, with_pointers=False, room=following.room)
        body = PollRequest(following.since, isolation=following.isolation)
        found = await self.polling.look(
            following.name, body, reading, deadline_s, unless_held_by=announced, returns_held=True
        )
        following.since = bound_after(found)
        return found


def _pieces(page: Page, passed: Sequence[SetAside], *, payload_base64: bool) -> Iterator[bytes]:
    """Encode each message of a page as an event, and each range that was set aside, in order."""
    written = payload_writer(payload_base64=payload_base64)
    stretches = deque(passed)
    for index, (message_id, payload) in enumerate(messages_of(page)):
        while stretches and stretches[0].first < message_id[:10]:
            yield _set_aside(stretches.popleft())
        text_id = message_id.hex()
        published_ms = unpack_position(message_id[:10])[0]
        attributes = _attributes(page.attributes.get(index))
        head = f'id: {text_id}\nevent: message\ndata: {{"id":"{text_id}","publishTimeMs":{published_ms},"payload":'
        tail = f',"attributes":{attributes}}}\n\n'
        if len(payload) <= PIECE_BYTES:
            yield f"{head}{written(payload)}{tail}".encode()
        else:
            yield head.encode()
            yield from payload_pieces(payload, payload_base64=payload_base64)
            yield tail.encode()
    yield from map(_set_aside, stretches)


def _set_aside(stretch: SetAside) -> bytes:
    """Encode a range as an event. Its id is the range's last one, so that a client resumes after the range."""
    told = entry(stretch)
    data = {name: told[name] for name in ("from", "to", "rows")}
    return event("set-aside", data, shown_id(stretch.last))


def _attributes(attributes: Mapping[str, str] | None) -> str:
    return compact(dict(attributes)) if attributes else "{}"


def _held(held: Held) -> bytes:
    """Encode the fields of a poll's headers; the pointer is a string, since browsers lose precision above 2^53."""
    what = {"heldBy": str(held.write_pointer), "heldSince": held.since_ms, "hiddenMessages": held.hidden_text}
    return event("held", what)
