"""Publishing, plainly, under a write pointer, and what was staged: body → codec → mailbox → what there is to say."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import trio

from broker.handlers.producing import asked, verdict_headers
from broker.handlers.query import one_of, parse_query, whole_number
from broker.http.exchange import HttpAnswer
from protocol.checks import check_publish
from protocol.codec import AVRO, DEFAULT_OPTIONS, PageOptions, codec_for
from protocol.errors import InvalidParameter
from protocol.names import topic_name
from protocol.requests import PublishResponse
from protocol.topic.asks import Publish
from protocol.topic.pointer_asks import PublishUnder
from protocol.topic.staging_asks import PublishStaged

if TYPE_CHECKING:
    from collections.abc import Callable

    from broker.http.exchange import HotRequest
    from broker.service import Service
    from protocol.codec import Codec
    from protocol.names import TopicName
    from protocol.requests import PublishRequest, Receipt

T = TypeVar("T")

#: Bodies longer than this are decoded off the event loop: everybody else would wait for them. Measured at
#: 10 ns a byte for JSON; version 1 of Avro is so much faster that only its very large bodies are worth a thread.
LOOP_BYTES = 256 * 1024
LOOP_AVRO_BYTES = 4 * 1024 * 1024


async def off_loop(size: int, codec: Codec, work: Callable[[], T]) -> T:
    """Do ``work`` here, or in a thread when it is about so many bytes that others would notice."""
    if size <= (LOOP_AVRO_BYTES if codec is AVRO else LOOP_BYTES):
        return work()
    return await trio.to_thread.run_sync(work)


class Given(NamedTuple):
    """A publish as it was read."""

    name: TopicName
    body: PublishRequest
    size: int
    """Bytes of its body."""
    codec: Codec
    options: PageOptions


async def publish(service: Service, request: HotRequest) -> HttpAnswer:
    """Publish the messages of one request, and what was stored under its write pointer or staged; 200 means durable.

    Raises:
      PlainsongError: with its outcome: nothing happened, or nobody knows.
    """
    given = await read_publish(request)
    return answer_publish(request, given, await published(service, given.name, given.body, given.size))


async def read_publish(request: HotRequest) -> Given:
    """What a request wants to publish. Raises PlainsongError for one that makes no sense: nothing happened."""
    name = topic_name(request.namespace, request.topic)
    codec = codec_for(request.headers.get("content-type"))
    body = await off_loop(len(request.body), codec, partial(codec.decode_publish, request.body))
    options = apply_publish_query(body, request.query, "ttl", "longs") if request.query else DEFAULT_OPTIONS
    check_publish(body)
    return Given(name, body, len(request.body), codec, options)


async def published(service: Service, name: TopicName, body: PublishRequest, size: int) -> PublishResponse | Receipt:
    """Where the messages of a request went that was read and checked. Raises as ``publish`` does."""
    told: PublishResponse | Receipt
    if body.write_pointer is not None:
        told = await asked(service, name, body, PublishUnder(body, size))
    else:
        told = await asked(service, name, body, (Publish if body.segments is None else PublishStaged)(body, size))
    service.rates.published(name, len(body.messages), trio.current_time())
    return told


def answer_publish(request: HotRequest, given: Given, told: PublishResponse | Receipt) -> HttpAnswer:
    """What is said of a publish, in the encoding it came in."""
    codec = given.codec
    if isinstance(told, PublishResponse):
        # Unread, it is what rollback takes.
        content = codec.encode_publish_response(told, given.options)
        return HttpAnswer(200, content, codec.content_type, verdict_headers(told.verdict))
    if given.body.producer is not None or ("prefer" in request.headers and _wants_receipt(request.headers["prefer"])):
        return HttpAnswer(200, codec.encode_receipt(told), codec.content_type, verdict_headers(told.verdict))
    # The seed's clients take any other body for a rollback detail, so there is none.
    return HttpAnswer(200)


def apply_publish_query(body: PublishRequest, query: str, *known: str) -> PageOptions:
    """Put ``ttl`` into a publish or store; how its answer is to be written. Raises InvalidParameter."""
    parameters = parse_query(query, known)
    ttl_s = whole_number(parameters, "ttl")
    if ttl_s is not None and body.ttl_s not in (None, ttl_s):
        raise InvalidParameter(f"ttl is {ttl_s} in the query and {body.ttl_s} in the body", hint="give it once")
    if ttl_s is not None:
        body.ttl_s = ttl_s
    return PageOptions(longs_as_strings=one_of(parameters, "longs", ("number", "string"), "number") == "string")


def _wants_receipt(prefer: str) -> bool:
    preferences = (part.split(";")[0].strip().lower() for part in prefer.split(","))
    return any(part.replace(" ", "").replace('"', "") == "return=representation" for part in preferences)
