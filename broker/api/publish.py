"""Publish, store and rollback, plainly, under a write pointer, and by a producer."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import trio

from actors.mailbox import Future
from broker.api.deadlines import Deadlines
from broker.api.route import LOOP_BYTES, off_loop
from broker.http.handlers import answer_of
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
#: Refusals that are counted, by code.
_REFUSALS = (PartialDuplicate, ProducerExpired, ProducerFenced, SequenceConsumed, TooManyProducers)


class Given(NamedTuple):
    """A publish as it was read."""

    name: TopicName
    body: PublishRequest
    size: int
    """Bytes of its body."""
    codec: Codec
    options: PageOptions


async def nobodys(pointer: int) -> str | None:
    """Whose a pointer's transaction is, where there is nobody to ask."""
    del pointer
    return ""


@dataclass(frozen=True, slots=True)
class Publishing:
    """The routes publish, store and rollback; streams and front ends publish through it, too."""

    directory: Directory
    enlistments: Enlistments | None
    """What topics are enlisted in before they write under a pointer; None: nothing."""
    transactions: Transactions
    rates: Rates
    refused: Callable[[str], None]
    """Counts a producer's refusal, by its code."""
    answer_timeout_s: float
    """The longest wait of a producer."""
    tasks: RequestTasks
    owner_of: Callable[[int], Awaitable[str | None]] = nobodys
    """The name that began the transaction of a pointer; empty where nobody here remembers it."""
    deadlines: Deadlines = field(init=False)
    """Of producers' requests; the daemon runs them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "deadlines", Deadlines(self.answer_timeout_s))

    def publish(self, request: Request, answered: Answered) -> None:
        """Publish the messages of one request, and what was stored under its write pointer or staged; 200 means durable.

        An error says by its outcome whether nothing happened, or that it is not known.
        """
        if len(request.body) <= LOOP_BYTES and BINARY_MODE_HEADERS.isdisjoint(request.headers):
            try:
                codec = codec_for(request.headers.get("content-type"))
            except UnsupportedMediaType:  # it may be events, which are rarer than to be looked for here
                pass
            else:
                given = _given(request, request.name, codec, codec.decode_publish(request.body))
                self._publish(request, given, answered)
                return
        self.tasks.run(self._read_and_publish, request, answered)

    async def _read_and_publish(self, request: Request) -> Answer:
        """What takes long to decode is decoded by a thread."""
        given = await read_publish(request)
        return await answer_of(lambda request, answered: self._publish(request, given, answered), request)

    def _publish(self, request: Request, given: Given, answered: Answered) -> None:
        request.messages = len(given.body.messages)
        write = _Publish(self, request, given, answered)
        self.put(
            given.name,
            _ask_to_publish(given.body, given.size),
            write.settled,
            write.prepare,
            pointer=given.body.write_pointer,
            of_producer=given.body.producer is not None,
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
        """Ask a topic for a publish or store that was read and checked: the one door by which messages come.

        Args:
          settled: takes the topic's answer, or the error instead of it: OutcomeUnknown for a producer that got no answer
            in time, whose request may still happen. It neither waits nor raises.
          prepare: as ``Directory.put``.
          pointer: what it writes under, for which the topic is enlisted first.
          repeats: enlist the topic again, and ask again, if its owner has changed. A stream has enlisted it already, and gets
            NotEnlisted: of its requests, a later one could be repeated before an earlier one.
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
        """The topic's owner has changed, or its pointer was closed, before its turn: it is enlisted again, if it can be."""
        if isinstance(found, NotEnlisted):
            self.tasks.settle(enlisted, settled)
        else:
            settled(found)

    async def published(self, name: TopicName, body: PublishRequest, size: int) -> PublishResponse | Receipt:
        """Where the messages of a request went that was read and checked. Raises as ``publish`` answers."""
        answer: Future[PublishResponse | Receipt] = Future()
        self.put(
            name,
            _ask_to_publish(body, size),
            answer.settle,
            pointer=body.write_pointer,
            of_producer=body.producer is not None,
        )
        found = await answer.wait()
        self.count(name, body)
        return found

    def count(self, name: TopicName, body: PublishRequest) -> None:
        """Messages of a request were made durable."""
        self.rates.published(name, len(body.messages), trio.current_time(), body.lengths.total)

    def store(self, request: Request, answered: Answered) -> None:
        """Keep messages under a write pointer, or staged by a producer, until they are published; 200 means durable.

        An error says by its outcome whether nothing happened, or that it is not known.
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
        write = _Write(self, request, body, answered)
        self.put(
            name,
            _ask_to_store(body, len(request.body)),
            write.settled,
            write.prepare,
            pointer=body.write_pointer,
            of_producer=body.producer is not None,
        )

    def rollback(self, request: Request, answered: Answered) -> None:
        """Turn the rows of a write pointer into rolled-back ones; done again, it changes nothing.

        An error says by its outcome whether nothing happened, or that it is not known.
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
        """A rollback by a name that may not operate on the topic.

        Raises:
          Forbidden: the transaction is another's. TransactionsUnavailable, NoOwner: nobody can say whose it is just now.
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
        """The topic refuses what is committed, and only the transaction service knows what is still open.

        Raises:
          TransactionNotInProgress: it is committed, or about to be. TransactionsUnavailable: it is not known.
        """
        name, roll_back = request.name, partial(self.directory.ask, request.name, ask)
        enlistments = self.enlistments
        try:
            await (roll_back() if enlistments is None else enlistments.enlisted(name, ask.pointer, roll_back))
        except TransactionNotInProgress as refused:
            # It may have been aborted, or its time be over: then there is nothing to lose.
            await self.transactions.fresh()
            try:
                await roll_back()
            except NotEnlisted:
                raise refused from None
        return Answer(200)

    def late(self, name: TopicName) -> OutcomeUnknown:
        """The error for a producer that got no answer in time."""
        return OutcomeUnknown(
            f"topic {name} did not answer within {self.answer_timeout_s:g} s",
            hint="send it again with the same sequence ids, or open the producer again: it says how far it came",
        )

    async def enlist_first(self, name: TopicName, pointer: int | None) -> None:
        """Enlist a topic for what is put into its mailbox next; what cannot be done is said by the topic.

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
    """A producer's request: it is answered by its deadline, and its refusal is counted."""

    __slots__ = ("_name", "_publishing", "_settled")

    def __init__(self, publishing: Publishing, name: TopicName, settled: Callable[[Any], object]) -> None:
        self._publishing = publishing
        self._name = name
        self._settled: Callable[[Any], object] | None = settled
        publishing.deadlines.add(self)

    def __call__(self, found: object) -> None:
        """Give the answer, unless it is late."""
        settled, self._settled = self._settled, None
        if settled is None:
            return
        self._publishing.deadlines.drop(self)
        if isinstance(found, _REFUSALS):
            self._publishing.refused(found.code)
        settled(found)

    def expire(self) -> None:
        """See ``Waits.expire``."""
        self(self._publishing.late(self._name))


class _Write:
    """A store that a topic was asked for, and what all requests to write have in common.

    Its methods are called in the actor's turn, where a bug must not be raised.
    """

    __slots__ = ("_answered", "_body", "_prepared", "_publishing", "_request")

    def __init__(self, publishing: Publishing, request: Request, body: PublishRequest, answered: Answered) -> None:
        self._publishing = publishing
        self._answered = answered
        self._prepared: Answer | None = None
        self._request = request
        self._body = body

    def prepare(self, found: object) -> None:
        """Make the answer that ``settled`` gives if the commit succeeds."""
        if isinstance(found, Exception):
            return
        request = self._request
        with suppress(Exception):  # met again, and answered, when it is given
            self._prepared = self._answer(found)
            if request.prepare is not None:
                request.prepare(self._prepared)

    def settled(self, found: object) -> None:
        """Give the answer."""
        if isinstance(found, Exception):
            self._answered(found)
            return
        try:
            answer = self._prepared or self._answer(found)
        except Exception as error:  # noqa: BLE001
            self._answered(error)
            return
        self._answered(answer)
        self._done()

    def _answer(self, found: Any) -> Answer:
        """The answer to what the topic has said."""
        del found
        return Answer(200)

    def _done(self) -> None:
        """Do the rest, for which the client need not wait."""


class _Publish(_Write):
    """A publish that a topic was asked for."""

    __slots__ = ("_given",)

    def __init__(self, publishing: Publishing, request: Request, given: Given, answered: Answered) -> None:
        super().__init__(publishing, request, given.body, answered)
        self._given = given

    def _answer(self, found: PublishResponse | Receipt) -> Answer:
        return answer_publish(self._request, self._given, found)

    def _done(self) -> None:
        self._publishing.count(self._given.name, self._body)


def _ask_to_publish(body: PublishRequest, size: int) -> Ask[Any]:
    """What the topic is asked; it answers a publish under a pointer with a PublishResponse, others with a Receipt."""
    if body.write_pointer is not None:
        return PublishUnder(body, size)
    return Publish(body, size) if body.segments is None else PublishStaged(body, size)


def _ask_to_store(body: PublishRequest, size: int) -> Ask[None]:
    return StoreStaged(body, size) if body.write_pointer is None else StoreUnder(body, size)


def _check_store(request: Request, body: PublishRequest) -> None:
    """Put the query and the trace into what is to be stored. Raises PlainsongError for what makes no sense."""
    if request.query:
        apply_publish_query(body, request.query, "ttl")
    check_store(body)
    if TRACEPARENT in request.headers:
        carry_trace(body, request.headers)


async def read_publish(request: Request) -> Given:
    """What a request wants to publish. Raises PlainsongError for one that makes no sense: nothing happened."""
    name = request.name
    mode = event_mode(request.headers)
    if mode is not None:
        decode = partial(decode_events, mode, request.headers, request.body)
        return _given(request, name, JSON, await off_loop(TIMES_JSON * len(request.body), JSON, decode))
    codec = codec_for(request.headers.get("content-type"))
    return _given(
        request, name, codec, await off_loop(len(request.body), codec, partial(codec.decode_publish, request.body))
    )


def _given(request: Request, name: TopicName, codec: Codec, body: PublishRequest) -> Given:
    options = apply_publish_query(body, request.query, "ttl", "longs") if request.query else DEFAULT_OPTIONS
    check_publish(body)
    if TRACEPARENT in request.headers:
        carry_trace(body, request.headers)
    return Given(name, body, len(request.body), codec, options)


def answer_publish(request: Request, given: Given, found: PublishResponse | Receipt) -> Answer:
    """What is said of a publish, in the encoding it came in; of events, in JSON."""
    codec = given.codec
    if isinstance(found, PublishResponse):
        # Unread, it is what rollback takes.
        content = codec.encode_publish_response(found, given.options)
        headers = verdict_headers(found.verdict)
        if found.generation:
            headers.append(("Plainsong-Generation", str(found.generation)))
        return Answer(200, content, codec.content_type, headers)
    if given.body.producer is not None or (
        "prefer" in request.headers and wants_representation(request.headers["prefer"])
    ):
        return Answer(200, codec.encode_receipt(found), codec.content_type, verdict_headers(found.verdict))
    # The seed's clients take any other body for a rollback detail, so there is none.
    return Answer(200)


def apply_publish_query(body: PublishRequest, query: str, *known: str) -> PageOptions:
    """Put ``ttl`` into a publish or store; how its answer is to be written. Raises InvalidParameter."""
    parameters = parse_query(query, known)
    ttl_s = whole_number(parameters, "ttl")
    if ttl_s is not None and body.ttl_s not in (None, ttl_s):
        raise InvalidParameter(f"ttl is {ttl_s} in the query and {body.ttl_s} in the body", hint="give it once")
    if ttl_s is not None:
        body.ttl_s = ttl_s
    return PageOptions(longs_as_strings=one_of(parameters, "longs", ("number", "string"), "number") == "string")


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


def verdict_headers(verdict: ProducerVerdict | None) -> list[tuple[str, str]]:
    """The headers that say what became of a producer's publish; none where it named no producer."""
    if verdict is None:
        return []
    duplicate, last = ("Plainsong-Duplicate", verdict.duplicate), verdict.last_sequence_id
    return [duplicate] if last is None else [duplicate, ("Plainsong-Last-Sequence-Id", str(last))]
