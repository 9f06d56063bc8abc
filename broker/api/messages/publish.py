"""Publish, store and rollback: plain, under a write pointer, or by a producer."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import trio

from actors.mailbox import Prepared
from broker.api.answers import LOOP_BYTES, off_loop
from broker.http.deadlines import Deadlines
from broker.http.handlers import answer_of, rendered
from broker.http.messages import Answer, one_of, parse_query, wants_representation, whole_number
from broker.security.guard import forbidden
from broker.security.identity import ANONYMOUS
from plainsong.protocol.codec import (
    DEFAULT_OPTIONS,
    JSON,
    PageOptions,
    codec_for,
    rolls_back_all,
)
from plainsong.protocol.codec.cloud_events import BINARY_MODE_HEADERS, TIMES_JSON, decode_events, event_mode
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
    UnsupportedMediaType,
)
from plainsong.protocol.ids import SEQUENCES_PER_MS, pack_position
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
from plainsong.protocol.trace import TRACEPARENT, carry_trace

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from actors.directory import Directory
    from actors.pointers import Enlistments
    from broker.authority import Transactions
    from broker.http.handlers import RequestTasks
    from broker.http.messages import Answered, Request
    from broker.metrics import Rates
    from plainsong.protocol.codec import Codec
    from plainsong.protocol.effects import Ask
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.requests import ProducerVerdict, PublishRequest, Receipt


A = TypeVar("A")
#: Refusals of producers that are counted by code.
_REFUSALS = (PartialDuplicate, ProducerExpired, ProducerFenced, SequenceConsumed, TooManyProducers)


class PublishCall(NamedTuple):
    """A decoded publish."""

    name: TopicName
    body: PublishRequest
    size: int
    """Bytes of the request's body."""
    codec: Codec
    options: PageOptions


async def no_owner(pointer: int) -> str | None:
    """Return no owner: used when no transaction service is configured."""
    del pointer
    return ""


@dataclass(frozen=True, slots=True)
class Publishing:
    """The routes publish, store and rollback; streams and front ends publish through it too."""

    directory: Directory
    enlistments: Enlistments | None
    """Enlists topics before they write under a pointer; None if they need not be."""
    transactions: Transactions
    rates: Rates
    refused: Callable[[str], None]
    """Counts a producer's refusal, by its code."""
    answer_timeout_s: float
    """Maximum time that a producer waits for an answer."""
    tasks: RequestTasks
    owner_of: Callable[[int], Awaitable[str | None]] = no_owner
    """Returns the name that began a pointer's transaction; empty if it is not remembered."""
    deadlines: Deadlines[_InTime] = field(init=False)
    """Deadlines of producers' requests; the daemon runs them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "deadlines", Deadlines(self.answer_timeout_s, _InTime.expire))

    def publish(self, request: Request, answered: Answered) -> None:
        """Publish the request's messages, and those stored under its write pointer or staged; 200 means durable.

        The outcome of an error says that nothing happened, or that this is unknown.
        """
        if len(request.body) <= LOOP_BYTES and BINARY_MODE_HEADERS.isdisjoint(request.headers):
            try:
                codec = codec_for(request.headers.get("content-type"))
            except UnsupportedMediaType:  # perhaps events: too rare to check for on this path
                pass
            else:
                given = _given(request, request.name, codec, codec.decode_publish(request.body))
                self._publish(request, given, answered)
                return
        self.tasks.run(self._read_and_publish, request, answered)

    async def _read_and_publish(self, request: Request) -> Answer:
        """Decode a large body in a thread, then publish."""
        given = await read_publish(request)
        return await answer_of(lambda request, answered: self._publish(request, given, answered), request)

    def _publish(self, request: Request, given: PublishCall, answered: Answered) -> None:
        name, body = given.name, given.body
        request.messages = len(body.messages)
        write = Prepared(
            partial(rendered, request, partial(answer_publish, request, given)),
            partial(self._counted, name, body, answered),
        )
        self.put(
            name,
            ask_to_publish(body, given.size),
            write.settled,
            write.prepare,
            pointer=body.write_pointer,
            of_producer=body.producer is not None,
        )

    def put(
        self,
        name: TopicName,
        ask: Ask[A],
        settled: Callable[[A | Exception], object],
        prepare: Callable[[A | Exception], object] | None = None,
        *,
        pointer: int | None = None,
        of_producer: bool = False,
        repeats: bool = True,
    ) -> None:
        """Ask a topic to publish or store a checked request. All messages of clients enter through this method.

        Args:
          settled: receives the topic's answer or error. It is OutcomeUnknown for a producer that got no answer in time,
            whose request may still succeed. It must neither wait nor raise.
          prepare: as ``Directory.put``.
          pointer: the write pointer, in which the topic is enlisted first.
          repeats: enlist the topic, and ask again if its owner has changed. False for a stream, which has enlisted it
            and gets NotEnlisted: repeating could reorder its requests.
        """
        if of_producer:
            settled = _InTime(self, name, settled)
        enlistments = self.enlistments
        if pointer is not None and enlistments is not None and repeats:
            enlisted = partial(enlistments.enlisted, name, pointer, partial(self.directory.ask, name, ask))
            if not enlistments.is_enlisted(name, pointer):
                self.tasks.settle(enlisted, settled)
                return
            settled = partial(self._unless_closed, enlisted, settled)
        try:
            self.directory.put(name, ask, settled, prepare)
        except PlainsongError as error:
            settled(error)

    def _unless_closed(
        self, enlisted: Callable[[], Awaitable[A]], settled: Callable[[A | Exception], object], found: A | Exception
    ) -> None:
        """Enlist again, if possible, when the topic's owner changed or its pointer was closed before this request."""
        if isinstance(found, NotEnlisted):
            self.tasks.settle(enlisted, settled)
        else:
            settled(found)

    def put_body(
        self,
        name: TopicName,
        body: PublishRequest,
        size: int,
        settled: Callable[[PublishResponse | Receipt | Exception], object],
    ) -> None:
        """Publish a checked request; ``settled`` receives its messages' positions, or an error as in ``publish``."""
        self.put(
            name,
            ask_to_publish(body, size),
            partial(self._counted, name, body, settled),
            pointer=body.write_pointer,
            of_producer=body.producer is not None,
        )

    def _counted(
        self, name: TopicName, body: PublishRequest, settled: Callable[[Any], object], outcome: object
    ) -> None:
        """Give the outcome of a publish, then count its messages: the client does not wait for that."""
        settled(outcome)
        if not isinstance(outcome, Exception):
            self.rates.publishing.add(name, len(body.messages), trio.current_time(), body.lengths.total)

    def store(self, request: Request, answered: Answered) -> None:
        """Store messages under a write pointer, or staged by a producer, until they are published; 200 means durable.

        The outcome of an error says that nothing happened, or that this is unknown.
        """
        if len(request.body) <= LOOP_BYTES:
            codec = codec_for(request.headers.get("content-type"))
            self._store(request, codec.decode_publish(request.body), answered)
        else:
            self.tasks.run(self._read_and_store, request, answered)

    async def _read_and_store(self, request: Request) -> Answer:
        codec = codec_for(request.headers.get("content-type"))
        body = await off_loop(len(request.body), codec, partial(codec.decode_publish, request.body))
        return await answer_of(lambda request, answered: self._store(request, body, answered), request)

    def _store(self, request: Request, body: PublishRequest, answered: Answered) -> None:
        name = request.name
        _check_store(request, body)
        request.messages = len(body.messages)
        write = Prepared(partial(rendered, request, _stored), answered)
        self.put(
            name,
            _ask_to_store(body, len(request.body)),
            write.settled,
            write.prepare,
            pointer=body.write_pointer,
            of_producer=body.producer is not None,
        )

    def rollback(self, request: Request, answered: Answered) -> None:
        """Roll back the rows of a write pointer; idempotent.

        The outcome of an error says that nothing happened, or that this is unknown.
        """
        name = request.name
        codec = codec_for(request.headers.get("content-type"))
        response = codec.decode_rollback(request.body)
        parse_query(request.query, ())
        check_rollback(response)
        assert response.write_pointer is not None  # checked above
        ask = RollBackPointer(response.write_pointer, _within(response))
        if request.who == ANONYMOUS or request.rights.on_topic("operate", *name):
            self._roll_back(request, ask, answered)
        else:
            self.tasks.run(partial(self._roll_back_own, ask), request, answered)

    async def _roll_back_own(self, ask: RollBackPointer, request: Request) -> Answer:
        """Roll back for a name that may not operate on the topic.

        Raises:
          Forbidden: another name began the transaction. TransactionsUnavailable, NoOwner: its owner cannot be
          determined.
        """
        owner = await self.owner_of(ask.pointer)
        if owner not in ("", request.who.name):
            raise forbidden(request.who, "operate", str(request.name))
        return await answer_of(lambda request, answered: self._roll_back(request, ask, answered), request)

    def _roll_back(self, request: Request, ask: RollBackPointer, answered: Answered) -> None:
        def settled(found: object) -> None:
            if isinstance(found, NotEnlisted):
                self.tasks.run(partial(self._enlist_and_roll_back, ask), request, answered)
            else:
                answered(found if isinstance(found, Exception) else Answer(200))

        self.directory.put(request.name, ask, settled)

    async def _enlist_and_roll_back(self, ask: RollBackPointer, request: Request) -> Answer:
        """Ask the transaction service first, since the topic cannot tell whether the pointer is open.

        The topic refuses a committed one.

        Raises:
          TransactionNotInProgress: it is committed, or about to be. TransactionsUnavailable: unknown.
        """
        name, roll_back = request.name, partial(self.directory.ask, request.name, ask)
        enlistments = self.enlistments
        try:
            await (roll_back() if enlistments is None else enlistments.enlisted(name, ask.pointer, roll_back))
        except TransactionNotInProgress as refused:
            # If it was aborted or has timed out, a rollback cannot lose anything.
            await self.transactions.fresh()
            try:
                await roll_back()
            except NotEnlisted:
                raise refused from None
        return Answer(200)

    def late(self, name: TopicName) -> OutcomeUnknown:
        """Return the error for a producer that got no answer in time."""
        return OutcomeUnknown(
            f"topic {name} did not answer within {self.answer_timeout_s:g} s",
            hint="send it again with the same sequence ids, or open the producer again to get its last sequence id",
        )

    async def enlist_first(self, name: TopicName, pointer: int | None) -> None:
        """Enlist a topic for a request that follows. If the topic cannot be loaded, it returns the error itself.

        Raises:
          TransactionNotInProgress, TransactionsUnavailable, NoOwner, Overloaded: nothing happened.
        """
        enlistments = self.enlistments
        if pointer is None or enlistments is None:
            return
        if not enlistments.is_open(name):
            try:
                await self.directory.ask(name, Describe())
            except PlainsongError:
                return
        await enlistments.enlist(name, pointer)


class _InTime:
    """Answers a producer's request by its deadline, and counts its refusal."""

    __slots__ = ("_name", "_publishing", "_settled")

    def __init__(self, publishing: Publishing, name: TopicName, settled: Callable[[Any], object]) -> None:
        self._publishing = publishing
        self._name = name
        self._settled: Callable[[Any], object] | None = settled
        publishing.deadlines.add(self)

    def __call__(self, found: object) -> None:
        """Deliver the answer, unless the deadline has passed."""
        settled, self._settled = self._settled, None
        if settled is None:
            return
        self._publishing.deadlines.drop(self)
        if isinstance(found, _REFUSALS):
            self._publishing.refused(found.code)
        settled(found)

    def expire(self) -> None:
        """Answer that it took too long."""
        self(self._publishing.late(self._name))


def _stored(_: None) -> Answer:
    """Return the answer to a store request."""
    return Answer(200)


def ask_to_publish(body: PublishRequest, size: int) -> Ask[Any]:
    """Return the request to the topic. It returns a PublishResponse under a pointer, otherwise a Receipt."""
    if body.write_pointer is not None:
        return PublishUnder(body, size)
    return Publish(body, size) if body.segments is None else PublishStaged(body, size)


def _ask_to_store(body: PublishRequest, size: int) -> Ask[None]:
    return StoreStaged(body, size) if body.write_pointer is None else StoreUnder(body, size)


def _check_store(request: Request, body: PublishRequest) -> None:
    """Apply the query and the trace to the request, and check it. Raises PlainsongError."""
    if request.query:
        apply_publish_query(body, request.query, "ttl")
    check_store(body)
    if TRACEPARENT in request.headers:
        carry_trace(body, request.headers)


async def read_publish(request: Request) -> PublishCall:
    """Decode and check a publish. Raises PlainsongError: nothing happened."""
    name = request.name
    mode = event_mode(request.headers)
    if mode is not None:
        decode = partial(decode_events, mode, request.headers, request.body)
        return _given(request, name, JSON, await off_loop(TIMES_JSON * len(request.body), JSON, decode))
    codec = codec_for(request.headers.get("content-type"))
    return _given(
        request, name, codec, await off_loop(len(request.body), codec, partial(codec.decode_publish, request.body))
    )


def _given(request: Request, name: TopicName, codec: Codec, body: PublishRequest) -> PublishCall:
    options = apply_publish_query(body, request.query, "ttl", "longs") if request.query else DEFAULT_OPTIONS
    check_publish(body)
    if TRACEPARENT in request.headers:
        carry_trace(body, request.headers)
    return PublishCall(name, body, len(request.body), codec, options)


def answer_publish(request: Request, given: PublishCall, found: PublishResponse | Receipt) -> Answer:
    """Render the answer to a publish, in the encoding of the request; JSON for events."""
    codec = given.codec
    if isinstance(found, PublishResponse):
        # Sent back unchanged, it is the request of a rollback.
        content = codec.encode_publish_response(found, given.options)
        headers = verdict_headers(found.verdict)
        if found.generation:
            headers.append(("Plainsong-Generation", str(found.generation)))
        return Answer(200, content, codec.content_type, headers)
    if given.body.producer is not None or (
        "prefer" in request.headers and wants_representation(request.headers["prefer"])
    ):
        return Answer(200, codec.encode_receipt(found), codec.content_type, verdict_headers(found.verdict))
    # The original service's clients take any other body for a rollback detail, so there is none.
    return Answer(200)


def apply_publish_query(body: PublishRequest, query: str, *known: str) -> PageOptions:
    """Apply ``ttl`` to a publish or store; return the format of its answer. Raises InvalidParameter."""
    parameters = parse_query(query, known)
    ttl_s = whole_number(parameters, "ttl")
    if ttl_s is not None and body.ttl_s not in (None, ttl_s):
        raise InvalidParameter(f"ttl is {ttl_s} in the query and {body.ttl_s} in the body", hint="give it once")
    if ttl_s is not None:
        body.ttl_s = ttl_s
    return PageOptions(longs_as_strings=one_of(parameters, "longs", ("number", "string"), "number") == "string")


def _within(response: PublishResponse) -> tuple[bytes, bytes] | None:
    """Return the first and last position; None for everything. Raises InvalidParameter for an impossible range."""
    if rolls_back_all(response):
        return None
    first = _position("start", response.start_timestamp_ms, response.start_sequence_id)
    last = _position("end", response.end_timestamp_ms, response.end_sequence_id)
    if first > last:
        raise InvalidParameter("the range ends before it starts", hint="send the publish response back unchanged")
    return first, last


def _position(which: str, timestamp_ms: int, sequence_id: int) -> bytes:
    if timestamp_ms < 0 or not 0 <= sequence_id < SEQUENCES_PER_MS:
        raise InvalidParameter(
            f"{which}Timestamp is {timestamp_ms} and {which}SequenceId {sequence_id}",
            hint="send the publish response back unchanged",
        )
    return pack_position(timestamp_ms, sequence_id)


def verdict_headers(verdict: ProducerVerdict | None) -> list[tuple[str, str]]:
    """Return the headers with the verdict on a producer's publish; none if it named no producer."""
    if verdict is None:
        return []
    duplicate, last = ("Plainsong-Duplicate", verdict.duplicate), verdict.last_sequence_id
    return [duplicate] if last is None else [duplicate, ("Plainsong-Last-Sequence-Id", str(last))]
