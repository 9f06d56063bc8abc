"""Polling: find what there is, wait for it if asked to, read a page, and say where to go on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import trio

from broker.handlers.held import position_headers, wait_for_decision
from broker.handlers.paged import TIMES, read_within
from broker.handlers.publish import off_loop
from broker.handlers.query import one_of, parse_query, whole_number
from broker.handlers.views_of_readers import fresh_for, view_for
from broker.http.exchange import HttpAnswer
from protocol.checks import check_poll
from protocol.codec import AVRO_END, JSON, PageOptions, accept_frames, avro_block, codec_for, encode_frames
from protocol.errors import InvalidParameter, TopicNotFound
from protocol.ids import after
from protocol.names import topic_name
from protocol.page import Page
from protocol.topic.asks import Describe, Look

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable

    from broker.http.answers import AnswerRoom
    from broker.http.exchange import HotRequest
    from broker.service import Service
    from protocol.codec import Codec
    from protocol.names import TopicName
    from protocol.requests import Isolation, PollRequest
    from protocol.topic.asks import Span
    from protocol.transactions.view import View

#: Bytes of a streamed answer held in memory at a time.
STREAM_PAGE_BYTES = 1 << 20

_PARAMETERS = ("wait_ms", "max_bytes", "isolation", "payload", "longs")


@dataclass(slots=True)
class _Reading:
    """How much a poll may have, and how it reads."""

    limit: int
    max_bytes: int
    with_pointers: bool
    room: AnswerRoom | None


@dataclass(slots=True)
class _Found:
    """What a poll found: a page of a span, and the view it was read with."""

    span: Span
    view: View | None
    page: Page


async def poll(service: Service, request: HotRequest) -> HttpAnswer:
    """The messages from a position on, oldest first.

    Raises:
      PlainsongError: nothing happened, as nothing ever does by reading.
    """
    name = topic_name(request.namespace, request.topic)
    codec = codec_for(request.headers.get("content-type"))
    body = codec.decode_poll(request.body)
    options = apply_query(body, request.query)
    check_poll(body)
    frames = accept_frames(request.headers.get("accept"))
    reading = _reading(service, body, request.room, with_pointers=frames is not None and frames.pointers)
    found = await _look(service, name, body, reading, request.waited_ms)
    page = found.page
    if frames is not None:
        service.rates.delivered(name, page.count, trio.current_time())
        content = await off_loop(page.payload_bytes, codec, partial(encode_frames, page, frames))
        return HttpAnswer(200, content, frames.content_type, position_headers(page))
    if not codec.bounded and page.end == "more" and page.count != body.limit:
        service.rates.delivered(name, page.count, trio.current_time())
        return HttpAnswer(200, _stream(service, name, found, body.limit, request.room), codec.content_type)
    content = await _written(service, name, found, reading, codec, options)
    service.rates.delivered(name, found.page.count, trio.current_time())
    return HttpAnswer(200, content, codec.content_type, position_headers(found.page))


async def _written(
    service: Service, name: TopicName, found: _Found, reading: _Reading, codec: Codec, options: PageOptions | None
) -> bytes:
    """The page, encoded; a shorter one instead, if that is more than there is room for: JSON escapes what is no text."""
    room = reading.room
    while True:
        page = found.page
        content = await off_loop(page.payload_bytes, codec, partial(_encoded, codec, page, options))
        if room is None or page.count <= 1 or len(content) <= room.held_bytes or room.has(len(content)):
            return content
        del content  # while a shorter one is made it must not be held
        read = partial(service.read, name, found.span, limit=reading.limit, view=found.view)
        found.page = await read(max_bytes=page.payload_bytes // 2, with_pointers=reading.with_pointers)
        room.has(TIMES * found.page.payload_bytes)  # which is less than it was


def _encoded(codec: Codec, page: Page, options: PageOptions | None) -> bytes:
    return codec.encode_page(page) if options is None else codec.encode_page(page, options)


def apply_query(body: PollRequest, query: str) -> PageOptions | None:
    """Put what the query says into the request; how its page is to be written. Raises InvalidParameter."""
    if not query:
        return None
    parameters = parse_query(query, _PARAMETERS)
    wait_ms, max_bytes = whole_number(parameters, "wait_ms"), whole_number(parameters, "max_bytes")
    body.wait_ms = _once("wait_ms", wait_ms, body.wait_ms)
    body.max_bytes = _once("max_bytes", max_bytes, body.max_bytes)
    if "isolation" in parameters:
        isolation = one_of(parameters, "isolation", ("uncommitted", "committed"), "")
        body.isolation = "committed" if isolation == "committed" else "uncommitted"
    return PageOptions(
        payload_base64=one_of(parameters, "payload", ("text", "base64"), "text") == "base64",
        longs_as_strings=one_of(parameters, "longs", ("number", "string"), "number") == "string",
    )


def _once(name: str, in_query: int | None, in_body: int | None) -> int | None:
    if in_query is not None and in_body not in (None, in_query):
        raise InvalidParameter(f"{name} is {in_query} in the query and {in_body} in the body", hint="give it once")
    return in_body if in_query is None else in_query


def _reading(service: Service, body: PollRequest, room: AnswerRoom | None, *, with_pointers: bool) -> _Reading:
    poll_config = service.config.poll
    limit = poll_config.max_messages if body.limit is None else min(body.limit, poll_config.max_messages)
    max_bytes = poll_config.max_bytes if body.max_bytes is None else min(body.max_bytes, poll_config.max_bytes)
    return _Reading(limit, max_bytes, with_pointers, room)


async def _look(service: Service, name: TopicName, body: PollRequest, reading: _Reading, waited_ms: int = 0) -> _Found:
    """A page with messages, or one without when the time to wait is over or waiting is of no use."""
    await fresh_for(service, body.isolation, body.transaction)
    # What is refused is refused before anything is waited for; a large snapshot is many numbers.
    ask_view = partial(view_for, service, body.isolation, body.transaction)
    view = await off_loop(len(body.transaction or b""), JSON, ask_view)
    brought = view if body.transaction is not None else None
    since = body.since
    deadline_s = None
    if body.wait_ms:
        wait_ms = min(body.wait_ms, service.config.poll.max_wait_ms) - waited_ms
        deadline_s = trio.current_time() + wait_ms / 1000
    was_held = False
    while True:
        # A view of ours comes before its span, and would grow old while the poll is parked: it looks at once first.
        look = Look(since, body.end_before, deadline_s if body.isolation != "committed" else None)
        found, mark = await _read(service, name, look, brought, body.isolation, reading)
        span, page = found.span, found.page
        if page.held is not None and not was_held:
            service.metrics.held()
            was_held = True
        if page.count or deadline_s is None or service.stopping or trio.current_time() >= deadline_s:
            return found
        if page.held is not None:
            if brought is not None:
                return found  # the snapshot never learns what becomes of the pointer
            await wait_for_decision(service, page.held, mark, deadline_s)
            if service.stopping:
                return found
            since = _behind(found)
            continue
        if look.deadline_s is not None and span.since >= span.until:
            return found  # the topic had nothing for as long
        since = _behind(found)  # all there was is expired or rolled back: wait for what comes after it
        if look.deadline_s is None and not await _comes(service, name, Look(since, body.end_before, deadline_s)):
            return found


async def _comes(service: Service, name: TopicName, look: Look) -> bool:
    """Park until there is something; False when the time is over, or there can be nothing."""
    span = await service.directory.ask(name, look)
    return span.since < span.until


def _behind(found: _Found) -> bytes:
    """Where to look on after a page without messages."""
    last_id = found.page.last_id
    return found.span.since if last_id is None else max(found.span.since, after(last_id))


async def _read(
    service: Service, name: TopicName, look: Look, brought: View | None, isolation: Isolation | None, reading: _Reading
) -> tuple[_Found, int]:
    """View, span and page, in this order: of what the view shows nothing stands behind the span.

    The other way round, a transaction whose last rows came between the two, and that was committed there, would be
    shown in part. What began after the view holds the page at worst, and the next one knows better. The mark stands
    before all three, so that a wait misses nothing of what becomes of a pointer meanwhile.
    """
    mark = service.pointers.mark
    view = view_for(service, isolation, None) if brought is None else brought
    span = await service.directory.ask(name, look)
    return _Found(span, view, await _page_of(service, name, span, view, reading)), mark


async def _page_of(service: Service, name: TopicName, span: Span, view: View | None, reading: _Reading) -> Page:
    def read(max_bytes: int) -> Awaitable[Page]:
        most, pointers = reading.limit, reading.with_pointers
        return service.read(name, span, limit=most, max_bytes=max_bytes, view=view, with_pointers=pointers)

    return await read_within(reading.room, reading.limit, reading.max_bytes, read)


async def _stream(
    service: Service, name: TopicName, found: _Found, limit: int | None, room: AnswerRoom | None
) -> AsyncGenerator[bytes, None]:
    """A version 1 answer of any length, block by block, from the watermark, the view and the clock of its start.

    It goes on while the topic changes hands. When something fails, or no room is left for its next block, it breaks
    off without its end, which the client takes for an error, never for the end of the topic.
    """
    span, page = found.span, found.page
    found.page = Page()  # nobody needs it behind its block
    sent = page.count
    yield avro_block(page)
    while page.end == "more" and sent != limit and page.last_id is not None:
        if (await service.ask(name, Describe())).metadata.generation != span.generation:
            raise TopicNotFound(f"topic {name} has been re-created meanwhile")
        span = replace(span, since=after(page.last_id))
        left = service.config.poll.max_messages if limit is None else limit - sent
        block = _Reading(min(left, service.config.poll.max_messages), STREAM_PAGE_BYTES, with_pointers=False, room=room)
        page = await _page_of(service, name, span, found.view, block)
        sent += page.count
        service.rates.delivered(name, page.count, trio.current_time())
        if page.count:
            yield avro_block(page)
    yield AVRO_END
