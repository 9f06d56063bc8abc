"""Polling: find what there is, wait for it if asked to, read a page, and say where to go on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import trio

from broker.handlers.later import refuse_later_poll
from broker.handlers.publish import off_loop
from broker.handlers.query import one_of, parse_query, whole_number
from broker.http.exchange import HttpAnswer
from protocol.checks import check_poll
from protocol.codec import AVRO_END, PageOptions, accept_frames, avro_block, codec_for, encode_frames
from protocol.errors import InvalidParameter, TopicNotFound
from protocol.ids import after
from protocol.names import topic_name
from protocol.topic.asks import Describe, Look

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from broker.http.exchange import HotRequest
    from broker.service import Service
    from protocol.codec import Codec
    from protocol.names import TopicName
    from protocol.page import Page
    from protocol.requests import PollRequest
    from protocol.topic.asks import Span

#: Bytes of a streamed answer held in memory at a time.
STREAM_PAGE_BYTES = 1 << 20

_PARAMETERS = ("wait_ms", "max_bytes", "isolation", "payload", "longs")


@dataclass(slots=True)
class _Bounds:
    limit: int
    max_bytes: int


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
    refuse_later_poll(body)
    frames = accept_frames(request.headers.get("accept"))
    bounds = _bounds(service, body)
    span, page = await _look(service, name, body, bounds)
    service.rates.delivered(name, page.count, trio.current_time())
    if frames is not None:
        content = await off_loop(page.payload_bytes, codec, partial(encode_frames, page, frames))
        return HttpAnswer(200, content, frames.content_type, _position(page))
    if not codec.bounded and page.end == "more" and page.count != body.limit:
        return HttpAnswer(200, _stream(service, name, span, page, body.limit), codec.content_type)
    content = await off_loop(page.payload_bytes, codec, partial(_encoded, codec, page, options))
    return HttpAnswer(200, content, codec.content_type, _position(page))


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


def _bounds(service: Service, body: PollRequest) -> _Bounds:
    poll_config = service.config.poll
    limit = poll_config.max_messages if body.limit is None else min(body.limit, poll_config.max_messages)
    max_bytes = poll_config.max_bytes if body.max_bytes is None else min(body.max_bytes, poll_config.max_bytes)
    return _Bounds(limit, max_bytes)


async def _look(service: Service, name: TopicName, body: PollRequest, bounds: _Bounds) -> tuple[Span, Page]:
    """A page with messages, or an empty one when the time to wait is over."""
    since = body.since
    deadline_s = None
    if body.wait_ms:
        deadline_s = trio.current_time() + min(body.wait_ms, service.config.poll.max_wait_ms) / 1000
    while True:
        span = await service.directory.ask(name, Look(since, body.end_before, deadline_s))
        page = await service.read(name, span, limit=bounds.limit, max_bytes=bounds.max_bytes)
        waited = deadline_s is None or span.since >= span.until or trio.current_time() >= deadline_s
        if page.count or waited:
            return span, page
        # All there was has expired: wait for what comes after it.
        since = span.until


def _position(page: Page) -> list[tuple[str, str]]:
    headers: list[tuple[str, str]] = [("Plainsong-End", page.end)]
    if page.last_id is not None:
        headers.append(("Plainsong-Last-Id", page.last_id.hex()))
    return headers


async def _stream(
    service: Service, name: TopicName, span: Span, page: Page, limit: int | None
) -> AsyncGenerator[bytes, None]:
    """A version 1 answer of any length, block by block, from the watermark and the clock of its start.

    When something fails it breaks off without its end, which the client takes for an error, never for the
    end of the topic.
    """
    sent = page.count
    yield avro_block(page)
    while page.end == "more" and sent != limit and page.last_id is not None:
        if (await service.directory.ask(name, Describe())).metadata.generation != span.generation:
            raise TopicNotFound(f"topic {name} has been re-created meanwhile")
        span = replace(span, since=after(page.last_id))
        room = service.config.poll.max_messages if limit is None else limit - sent
        page = await service.read(
            name, span, limit=min(room, service.config.poll.max_messages), max_bytes=STREAM_PAGE_BYTES
        )
        sent += page.count
        service.rates.delivered(name, page.count, trio.current_time())
        if page.count:
            yield avro_block(page)
    yield AVRO_END
