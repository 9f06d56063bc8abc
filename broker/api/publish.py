"""Publish, store and rollback, plainly, under a write pointer, and by a producer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import trio

from broker.api.route import off_loop
from broker.http.messages import HttpAnswer, one_of, parse_query, whole_number
from plainsong.protocol.codec import DEFAULT_OPTIONS, PageOptions, codec_for, rolls_back_all
from plainsong.protocol.errors import (
    InvalidParameter,
    OutcomeUnknown,
    PartialDuplicate,
    PlainsongError,
    ProducerExpired,
    ProducerFenced,
    SequenceConsumed,
    TooManyProducers,
    TransactionNotInProgress,
)
from plainsong.protocol.ids import SEQUENCES_PER_MS, pack_position
from plainsong.protocol.names import topic_name
from plainsong.protocol.requests import PublishResponse, check_publish, check_rollback, check_store
from plainsong.protocol.topic.asks import (
    Describe,
    Publish,
    PublishStaged,
    PublishUnder,
    RollBackPointer,
    StoreStaged,
    StoreUnder,
)
from plainsong.protocol.topic.publish import NotEnlisted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from broker.http.messages import HotRequest
    from broker.service import Service
    from plainsong.protocol.codec import Codec
    from plainsong.protocol.effects import Ask
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.requests import ProducerVerdict, PublishRequest, Receipt


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
        told = await ask_topic(service, name, body, PublishUnder(body, size))
    else:
        told = await ask_topic(service, name, body, (Publish if body.segments is None else PublishStaged)(body, size))
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


# --- store -----------------------------------------------------------------------------------------
#
# Store and rollback: messages kept under a write pointer until they are published, and taken back.


async def store(service: Service, request: HotRequest) -> HttpAnswer:
    """Keep messages under a write pointer, or staged by a producer, until they are published; 200 means durable.

    Raises:
      PlainsongError: with its outcome: nothing happened, or nobody knows.
    """
    name = topic_name(request.namespace, request.topic)
    codec = codec_for(request.headers.get("content-type"))
    body = await off_loop(len(request.body), codec, partial(codec.decode_publish, request.body))
    if request.query:
        apply_publish_query(body, request.query, "ttl")
    check_store(body)
    keep = StoreStaged if body.write_pointer is None else StoreUnder
    await ask_topic(service, name, body, keep(body, len(request.body)))
    return HttpAnswer(200)


async def rollback(service: Service, request: HotRequest) -> HttpAnswer:
    """Turn the rows of a write pointer into rolled-back ones; done again, it changes nothing.

    Raises:
      PlainsongError: with its outcome: nothing happened, or nobody knows.
    """
    name = topic_name(request.namespace, request.topic)
    codec = codec_for(request.headers.get("content-type"))
    response = codec.decode_rollback(request.body)
    parse_query(request.query, ())
    check_rollback(response)
    assert response.write_pointer is not None  # checked above
    await roll_back_under(service, name, RollBackPointer(response.write_pointer, _within(response)))
    return HttpAnswer(200)


def _within(response: PublishResponse) -> tuple[bytes, bytes] | None:
    """First and last position; None: everything. Raises InvalidParameter for a range no publish answers with."""
    if rolls_back_all(response):
        return None
    first = _position("start", response.start_timestamp_ms, response.start_sequence_id)
    last = _position("end", response.end_timestamp_ms, response.end_sequence_id)
    if first > last:
        raise InvalidParameter("the range ends before it starts", hint="send what the publish answered, unread")
    return first, last


def _position(which: str, timestamp_ms: int, sequence_id: int) -> bytes:
    if timestamp_ms < 0 or not 0 <= sequence_id < SEQUENCES_PER_MS:
        raise InvalidParameter(
            f"{which}Timestamp is {timestamp_ms} and {which}SequenceId {sequence_id}",
            hint="send what the publish answered, unread",
        )
    return pack_position(timestamp_ms, sequence_id)


A = TypeVar("A")


# --- producing -------------------------------------------------------------------------------------
#
# What a publish or store of a producer has besides others: a bound on its wait, headers, and refusals that are
# counted.


#: Refusals that are counted, by code.
_REFUSALS = (PartialDuplicate, ProducerExpired, ProducerFenced, SequenceConsumed, TooManyProducers)


async def ask_topic(service: Service, name: TopicName, request: PublishRequest, ask: Ask[A]) -> A:
    """The topic's answer to a publish or store; a producer waits no longer than ``deduplication.answer_timeout_s``.

    Raises:
      OutcomeUnknown: there was no answer in that time; what was asked may still happen.
      PlainsongError: whatever the topic refuses.
    """
    answer = partial(ask_under, service, name, request.write_pointer, ask)
    return await (answer() if request.producer is None else within_answer_timeout(service, name, answer))


async def ask_to_open(service: Service, name: TopicName, ask: Ask[A]) -> A:
    """The topic's answer to one who opens a session; that there are too many is counted. Raises as the topic does."""
    try:
        return await service.directory.ask(name, ask)
    except TooManyProducers as error:
        service.metrics.producer_refused(error.code)
        raise


async def within_answer_timeout(service: Service, name: TopicName, answer: Callable[[], Awaitable[A]]) -> A:
    """The answer to something that a producer asked; raises as ``asked`` does."""
    timeout_s = service.config.deduplication.answer_timeout_s
    try:
        with trio.move_on_after(timeout_s):
            return await answer()
    except _REFUSALS as error:
        service.metrics.producer_refused(error.code)
        raise
    raise OutcomeUnknown(
        f"topic {name} did not answer within {timeout_s:g} s",
        hint="send it again with the same sequence ids, or open the producer again: it says how far it came",
    )


def verdict_headers(verdict: ProducerVerdict | None) -> list[tuple[str, str]]:
    """The headers that say what became of a producer's publish; none where it named no producer."""
    if verdict is None:
        return []
    headers: list[tuple[str, str]] = [("Plainsong-Duplicate", verdict.duplicate)]
    if verdict.last_sequence_id is not None:
        headers.append(("Plainsong-Last-Sequence-Id", str(verdict.last_sequence_id)))
    return headers


# --- under -----------------------------------------------------------------------------------------
#
# Asking a topic for what is written, or rolled back, under a write pointer: it may have to be enlisted first.


async def ask_under(service: Service, name: TopicName, pointer: int | None, ask: Ask[A]) -> A:
    """The topic's answer; ``pointer`` None: nothing is written under one. Raises as the topic and the service do."""
    enlistments = service.directory.environment.enlistments
    if pointer is None or enlistments is None:
        return await service.directory.ask(name, ask)
    return await enlistments.enlisted(name, pointer, partial(service.directory.ask, name, ask))


async def enlist_first(service: Service, name: TopicName, pointer: int | None) -> None:
    """Enlist a topic for what is put into its mailbox next; what cannot be done is said by the topic.

    Raises:
      TransactionNotInProgress, TransactionsUnavailable, NoOwner, Overloaded: nothing happened.
    """
    enlistments = service.directory.environment.enlistments
    if pointer is None or enlistments is None:
        return
    if not enlistments.is_open(name):
        try:
            await service.directory.ask(name, Describe())
        except PlainsongError:
            return
    await enlistments.enlist(name, pointer)


async def roll_back_under(service: Service, name: TopicName, ask: RollBackPointer) -> None:
    """A client's rollback; the topic refuses what is committed, and only who decides knows what is still open.

    Raises:
      TransactionNotInProgress: it is committed, or about to be. TransactionsUnavailable: nobody can say.
    """
    try:
        await service.directory.ask(name, ask)
        return
    except NotEnlisted:
        pass
    try:
        await ask_under(service, name, ask.pointer, ask)
    except TransactionNotInProgress as refused:
        await (
            service.transactions.fresh()
        )  # it may have been aborted, or its time be over: then there is nothing to lose
        try:
            await service.directory.ask(name, ask)
        except NotEnlisted:
            raise refused from None
