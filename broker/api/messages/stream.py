"""A stream of publishes: requests are pipelined, and small ones are stored together.

Each request has the same authorization, limits and errors as ``POST …/publish``. Requests enter the topic's mailbox in
the order of arrival, and are answered in that order. A run of single messages is one request to the topic.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import trio

from actors.mailbox import Future
from broker.api.answers import LOOP_BYTES
from broker.api.messages.publish import ask_to_publish
from broker.http.messages import only_plain, problem_of, status_of
from broker.security.identity import ANONYMOUS, Identity
from plainsong.protocol.codec import stream as codec
from plainsong.protocol.errors import Internal, InvalidParameter, PlainsongError
from plainsong.protocol.names import topic_name
from plainsong.protocol.requests import PublishResponse, Receipt, check_publish
from plainsong.protocol.topic.asks import PublishEach
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actors.ownership import Instance
    from broker.api.messages.publish import Publishing
    from broker.http.budgets import Reservation
    from broker.http.messages import Answer, Request
    from broker.http.route import Accounting
    from plainsong.protocol.effects import Ask

log = logging.getLogger("plainsong.http")
#: Memory of a request in addition to its payload: its number, its entries in lists, its answer.
REQUEST_BYTES = 128
#: Answers are sent in batches of this size; one run may exceed it.
ANSWER_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class StreamBounds:
    """Limits on pending requests of one stream; at the limit, reading stops. A larger request is processed alone."""

    requests: int = 1 << 16
    bytes: int = 8 << 20


@dataclass(slots=True)
class _Taken:
    """Requests that were sent to the topic as one."""

    numbers: Sequence[int]
    messages: int
    size: int
    """Bytes reserved for it."""
    put: Future[Any] | PlainsongError
    """Receives the topic's answer; or an error, if the request was refused before it reached the topic."""
    begun_s: float

    @property
    def payload_bytes(self) -> int:
        return max(0, self.size - REQUEST_BYTES * len(self.numbers))


class LocalStream:
    """A ``Conversation`` about a topic that this instance owns.

    It does not depend on other instances; ``broker.cluster.remote_stream`` builds on it.
    """

    #: The other instance that owns the topic; None here.
    owner: Instance | None = None

    def __init__(
        self,
        publishing: Publishing,
        accounting: Accounting,
        namespace: str,
        topic: str,
        request_id: str,
        held: Reservation,
        bounds: StreamBounds = StreamBounds(),
    ) -> None:
        self._publishing = publishing
        self._accounting = accounting
        self._name = topic_name(namespace, topic)
        self._request_id = request_id
        self._held = held
        self._bounds = bounds
        self._reader = codec.RequestReader()
        self._taken: deque[_Taken] = deque()
        self._requests = 0
        #: Number of answered requests.
        self.answered = 0
        self._finished = False
        self._begun_s = perf_counter()
        #: Set when a request was taken or the stream has ended; and when a request was answered.
        self._arrived = trio.Event()
        self._settled = trio.Event()

    @property
    def headers(self) -> list[tuple[str, str]]:
        """See ``Conversation.headers``."""
        return []

    async def opened(self) -> None:
        """See ``Conversation.opened``: there is nothing to wait for."""

    @property
    def waiting(self) -> bool:
        """True if there are unanswered requests."""
        return bool(self._taken)

    @property
    def is_usable(self) -> bool:
        """True if it takes more requests."""
        return not self._finished

    # --- in ------------------------------------------------------------------------------------

    async def take(self, messages: Sequence[bytes]) -> None:
        """See ``Conversation.take``. Single messages are batched across all of ``messages``."""
        run = codec.Singles([], [])
        for message in messages:
            read = partial(self._reader.read, message)
            parts, fault = read() if len(message) <= LOOP_BYTES else await in_thread(read)
            for part in parts:
                if isinstance(part, codec.Singles):
                    if len(run.numbers) + len(part.numbers) > codec.MAX_RUN:
                        await self._take(run)
                        run = part
                    else:
                        run.numbers.extend(part.numbers)
                        run.payloads.extend(part.payloads)
                    continue
                await self._take(run)
                run = codec.Singles([], [])
                await self._take(part)
            if fault is not None:
                await self._take(run)
                raise fault
        await self._take(run)

    async def _take(self, part: codec.Part) -> None:
        payloads: Sequence[bytes] = ()
        if isinstance(part, codec.Singles):
            payloads = part.payloads
        elif isinstance(part, codec.Whole):
            payloads = part.request.messages
        numbers = part.numbers if isinstance(part, codec.Singles) else [part.number]
        if not numbers:
            return
        size = sum(map(len, payloads)) + REQUEST_BYTES * len(numbers)
        await self._room(len(numbers), size)
        if self._finished:
            return
        refusal = await self._enlisted(part)
        if self._finished:
            return
        reserved_bytes = self._held.reserved_bytes
        put = refusal or self._put(part, size)
        if isinstance(put, PlainsongError):
            self._held.shrink(self._held.reserved_bytes - reserved_bytes)
            size = 0
        self._taken.append(_Taken(numbers, len(payloads), size, put, perf_counter()))
        self._requests += len(numbers)
        self._arrived.set()

    async def _room(self, requests: int, size: int) -> None:
        bounds = self._bounds
        while not self._finished and self._taken:
            if self._requests + requests <= bounds.requests and self._held.reserved_bytes + size <= bounds.bytes:
                return
            self._settled = trio.Event()
            await self._settled.wait()

    async def _enlisted(self, part: codec.Part) -> PlainsongError | None:
        """Enlist the topic for a request with a write pointer; return the error if that fails."""
        if isinstance(part, codec.Whole) and part.request.write_pointer is not None:
            try:
                await self._publishing.enlist_first(self._name, part.request.write_pointer)
            except PlainsongError as error:
                return error
        return None

    def _put(self, part: codec.Part, size: int) -> Future[Any] | PlainsongError:
        if isinstance(part, codec.Refused):
            return part.error
        answer: Future[Any] = Future()
        pointer, of_producer = None, False
        ask: Ask[Any]
        try:
            if isinstance(part, codec.Singles):
                ask = PublishEach(part.payloads, size)
            else:
                check_publish(part.request)
                ask = ask_to_publish(part.request, size)
                pointer, of_producer = part.request.write_pointer, part.request.producer is not None
            self._held.grow(size)
        except PlainsongError as error:
            return error
        self._publishing.put(self._name, ask, answer.settle, pointer=pointer, of_producer=of_producer, repeats=False)
        return answer

    def finish(self) -> None:
        """See ``Conversation.finish``."""
        self._finished = True
        self._arrived.set()
        self._settled.set()

    def close(self) -> None:
        """See ``Conversation.close``."""
        self.finish()
        self._held.release()
        seconds = perf_counter() - self._begun_s
        self._accounting.access.begin(self._request_id)
        self._accounting.access.answered("stream", str(self._name), 101, seconds)

    # --- out -----------------------------------------------------------------------------------

    async def answers(self) -> bytes | None:
        """See ``Conversation.answers``."""
        while not self._taken:
            if self._finished:
                return None
            self._arrived = trio.Event()
            await self._arrived.wait()
        out = [await self._answer()]
        size = len(out[0])
        while self._taken and size < ANSWER_BYTES and _is_ready(self._taken[0].put):
            out.append(await self._answer())
            size += len(out[-1])
        return b"".join(out)

    async def _answer(self) -> bytes:
        """Return the answers of the oldest batch."""
        taken = self._taken[0]
        outcome: Any = taken.put
        if not isinstance(outcome, PlainsongError):
            try:
                outcome = await outcome.wait()
            except Exception as error:  # noqa: BLE001 - a bug is logged, and answered as an internal error
                outcome = self._plain(error)
        self._taken.popleft()
        self._requests -= len(taken.numbers)
        self.answered += len(taken.numbers)
        self._held.shrink(taken.size)
        self._settled.set()
        return self._told(taken, outcome)

    def _told(self, taken: _Taken, outcome: Any) -> bytes:
        numbers = taken.numbers
        each = outcome if isinstance(outcome, list) else [outcome] * len(numbers)
        seconds = perf_counter() - taken.begun_s
        if isinstance(outcome, Receipt):
            self._count(200, len(numbers), taken.messages, seconds, taken.payload_bytes)
            if len(numbers) > 1:
                return codec.encode_receipts(numbers, outcome)
        else:
            for one in each:
                if isinstance(one, PlainsongError):
                    self._count(status_of(one), 1, 0, seconds)
                else:
                    messages, size = taken.messages // len(numbers), taken.payload_bytes // len(numbers)
                    self._count(200, 1, messages, seconds, size)
        return b"".join([encoded_answer(number, one) for number, one in zip(numbers, each, strict=True)])

    def _count(self, status: int, requests: int, messages: int, seconds: float, size: int = 0) -> None:
        self._accounting.requested("stream", status, seconds, requests)
        if messages:
            self._publishing.rates.publishing.add(self._name, messages, trio.current_time(), size)

    def _plain(self, error: Exception) -> PlainsongError:
        plain = only_plain(error)
        if plain is None:
            log.error("a request failed", exc_info=error, extra={"request_id": self._request_id})
            plain = Internal(hint="the log has more under this stream's X-Request-Id")
        return plain


def encoded_answer(number: int, outcome: Any) -> bytes:
    """Encode one answer: a receipt, a response, or a problem."""
    if isinstance(outcome, PlainsongError):
        problem = problem_of(outcome)
        if outcome.retry_after_s is not None:
            problem["retryAfter"] = outcome.retry_after_s
        return codec.encode_problem(number, status_of(outcome), problem)
    if isinstance(outcome, PublishResponse):
        return codec.encode_response(number, outcome)
    return codec.encode_receipt(number, outcome)


def _is_ready(put: Future[Any] | PlainsongError) -> bool:
    return isinstance(put, PlainsongError) or put.is_settled


@dataclass(frozen=True, slots=True)
class Streams:
    """Opens the streams of topics that this instance owns."""

    publishing: Publishing
    accounting: Accounting

    def begin(
        self, namespace: str, topic: str, request_id: str, held: Reservation, who: Identity = ANONYMOUS
    ) -> LocalStream:
        """Open a stream for an authenticated client. Raises InvalidName."""
        del who
        return LocalStream(self.publishing, self.accounting, namespace, topic, request_id, held)

    async def refuse(self, request: Request) -> Answer:
        """Refuse a request that is not a WebSocket upgrade. Raises InvalidParameter, InvalidName."""
        raise InvalidParameter(
            f"the stream of {request.name} is a WebSocket",
            hint="send Connection: Upgrade and Upgrade: websocket, over HTTP/1.1",
        )
