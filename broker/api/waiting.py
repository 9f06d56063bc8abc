"""Requests that wait for long, and streams of events, are looked at again when their name's credential or grants change."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

import trio

from broker.api.route import Endpoint
from broker.http.handlers import RequestCancelled
from broker.http.messages import EVENT_STREAM, PING, PING_S, problem_of, status_of
from broker.security.guard import Hold, RefusedRequest, target_of
from broker.security.quotas import POLLS, PUBLISHES
from plainsong.protocol.errors import Forbidden, QuotaExceeded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from broker.http.messages import Answer, Answered, BodyStream, Request
    from broker.security.guard import Guard
    from plainsong.protocol.errors import PlainsongError

_FORBIDDEN = status_of(Forbidden())
#: The frequent routes, whose handlers refuse no name.
_NEVER_REFUSE = PUBLISHES | {"poll"}


def looked_at_again(endpoint: Endpoint, guard: Guard, *, counts: bool = True) -> Endpoint:
    """The same route; when whoever waits at it may no more, the answer says so within the time of a reload.

    Args:
      counts: whether those that wait are counted here, and not by the process that answers.
    """
    route, handler = endpoint
    streams = EVENT_STREAM in route.answer_types
    if not guard.required or not (route.may_wait or streams):
        return endpoint

    def handle(request: Request, answered: Answered) -> None:
        unpark = _nothing
        if counts and guard.quotas.concern(request.who):
            try:
                unpark = _parked(guard, endpoint, request)
            except QuotaExceeded as error:
                answered(error)
                return
        waits = _Waits(guard, endpoint, request, answered, unpark, streams=streams)
        handler(request, waits.answered)
        waits.begin()

    return Endpoint(route, handle)


class _Waits:
    """A request that waits: it ends when its name may no more."""

    __slots__ = ("_answered", "_endpoint", "_guard", "_hold", "_is_answered", "_request", "_streams", "_unpark")

    def __init__(
        self,
        guard: Guard,
        endpoint: Endpoint,
        request: Request,
        answered: Answered,
        unpark: Callable[[], None],
        *,
        streams: bool,
    ) -> None:
        self._guard = guard
        self._endpoint = endpoint
        self._request = request
        self._answered = answered
        self._unpark = unpark
        self._streams = streams
        self._hold: Hold | None = None
        self._is_answered = False

    def begin(self) -> None:
        """The handler has returned: if it has not answered, the request waits from now on."""
        if self._is_answered:
            return
        request, guard = self._request, self._guard
        allow = partial(setattr, request, "rights")
        hold = self._hold = Hold(
            guard, request.who, self._endpoint.route, request.path, lambda problem: request.cancel(), allow
        )
        guard.hold(hold)

    def answered(self, outcome: Answer | Exception) -> None:
        """Give the answer, or the reason why the name may have none any more."""
        self._is_answered = True
        hold = self._hold
        if hold is not None:
            self._guard.release(hold)
            if hold.problem is not None and isinstance(outcome, RequestCancelled):
                outcome = hold.problem
        if isinstance(outcome, Exception):
            self._unpark()
            self._answered(outcome)
            return
        kind = outcome.content_type or ""
        if self._streams and kind.startswith(EVENT_STREAM) and not isinstance(outcome.body, bytes):
            outcome.body = _Events(outcome.body, self._guard, self._request, self._endpoint, self._unpark)
        else:
            self._unpark()
        self._answered(outcome)


def _nothing() -> None:
    """Ends what was not counted."""


def _parked(guard: Guard, endpoint: Endpoint, request: Request) -> Callable[[], None]:
    """Counts a request that waits, and a stream of events, among the polls of its name; the function that ends it.

    Raises:
      QuotaExceeded: noted already.
    """
    wait_ms = endpoint.route.wait_ms
    if wait_ms is not None and not wait_ms(request):
        return _nothing
    namespace, topic = _place(request)
    try:
        return guard.quotas.park(request.who, namespace, topic)
    except QuotaExceeded as error:
        _note(guard, request, error)
        raise


def refusals_noted(endpoint: Endpoint, guard: Guard, *, recorded: bool = False) -> Endpoint:
    """The same route; what its handler refuses a name is noted, wherever that was found out.

    Whose a transaction is, and how many a name has open, only its owner can say; what is refused for the route and the
    path alone, the guard has noted before.

    Args:
      recorded: the audit has a record of the request itself, whatever becomes of it.
    """
    route, handler = endpoint
    if not guard.required or route.name in _NEVER_REFUSE:
        return endpoint

    def handle(request: Request, answered: Answered) -> None:
        def note(outcome: Answer | Exception) -> None:
            if isinstance(outcome, QuotaExceeded):
                if route.name == "begin":
                    _note(guard, request, outcome)
            elif isinstance(outcome, Forbidden):
                if not recorded:
                    _note(guard, request, outcome)
            elif not isinstance(outcome, Exception) and outcome.status == _FORBIDDEN and not recorded:
                _note(guard, request, Forbidden())  # another instance's refusal
            answered(outcome)

        handler(request, note)

    return Endpoint(route, handle)


def _note(guard: Guard, request: Request, error: PlainsongError) -> None:
    guard.refused(RefusedRequest(error, request.who, request.peer, target_of(request.path), request.request_id))


def _place(request: Request) -> tuple[str, str]:
    return request.path.get("namespace", ""), request.path.get("topic", "")


def metered(endpoint: Endpoint, guard: Guard) -> Endpoint:
    """The same route; what its requests turn out to cost is owed to the quotas of whoever sent them.

    Pages are as short as what is left of ``poll_bytes_per_s``; a stream of events waits until it has paid for what it sent.
    """
    route, handler = endpoint
    if not guard.required or route.name not in PUBLISHES | POLLS:
        return endpoint
    quotas = guard.quotas

    def owe(request: Request) -> None:
        namespace, topic = _place(request)
        quotas.owe(request.who, namespace, topic, "publish_messages_per_s", request.messages)
        # Its Content-Length was taken when the request was let in; a compressed body has become more since.
        length = request.headers.get("content-length", "")
        taken_bytes = int(length) if length.isascii() and length.isdigit() else 0
        quotas.owe(request.who, namespace, topic, "publish_bytes_per_s", max(0, len(request.body) - taken_bytes))

    def publish(request: Request, answered: Answered) -> None:
        if not quotas.concern(request.who):
            handler(request, answered)
            return

        def paid(outcome: Answer | Exception) -> None:
            if not isinstance(outcome, Exception) and outcome.status < 400:
                owe(request)
            answered(outcome)

        handler(request, paid)

    def read(request: Request, answered: Answered) -> None:
        if not quotas.concern(request.who):
            handler(request, answered)
            return
        namespace, topic = _place(request)
        left = quotas.page_bytes(request.who, namespace, topic)
        if left is not None:
            request.page_bytes = left if request.page_bytes is None else min(left, request.page_bytes)

        def paid(outcome: Answer | Exception) -> None:
            if isinstance(outcome, Exception):
                pass
            elif isinstance(outcome.body, bytes):
                quotas.owe(request.who, namespace, topic, "poll_bytes_per_s", len(outcome.body))
            elif outcome.length is not None:
                quotas.owe(request.who, namespace, topic, "poll_bytes_per_s", outcome.length)
            else:
                waits = EVENT_STREAM in route.answer_types and outcome.status == 200
                pause_s = partial(quotas.read_pause_s, request.who, namespace, topic)
                outcome.body = _Metered(outcome.body, pause_s, waits=waits)
            answered(outcome)

        handler(request, paid)

    return Endpoint(route, publish if route.name in PUBLISHES else read)


class _Metered:
    """A stream whose bytes are owed as they leave; a ``BodyStream``.

    Args:
      pause_s: takes what a piece costs, and says how long the next has to wait.
      waits: whether it does; the answer to a poll is not held up, and the next poll waits.
    """

    def __init__(self, body: BodyStream, pause_s: Callable[[int], float], *, waits: bool) -> None:
        self._body = body
        self._chunks = aiter(body)
        self._pause_s = pause_s
        self._waits = waits
        self._left_s = 0.0

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._waits and self._left_s > 0:
            pause_s = min(self._left_s, PING_S)
            await trio.sleep(pause_s)
            self._left_s -= pause_s
            if self._left_s > 0:
                return PING  # its reader is not to take the pause for the end
        piece = await anext(self._chunks)
        self._left_s = self._pause_s(len(piece))
        return piece

    async def aclose(self) -> None:
        await self._body.aclose()


class _Events:
    """A stream of events that ends with an event ``error`` when its reader may no more; a ``BodyStream``."""

    def __init__(
        self, body: BodyStream, guard: Guard, request: Request, endpoint: Endpoint, unpark: Callable[[], None]
    ) -> None:
        self._body = body
        self._unpark = unpark
        self._chunks = aiter(body)
        self._guard = guard
        self._waiting: trio.CancelScope | None = None
        self._told = False
        allow = partial(setattr, request, "rights")
        self._hold = Hold(guard, request.who, endpoint.route, request.path, self._end, allow)
        guard.hold(self._hold)

    def _end(self, problem: PlainsongError) -> None:
        del problem  # the hold has it
        if self._waiting is not None:
            self._waiting.cancel()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._told:
            raise StopAsyncIteration
        if self._hold.problem is None:
            with trio.CancelScope() as self._waiting:
                return await anext(self._chunks)
        problem = self._hold.problem
        assert problem is not None  # nothing else cancels the scope
        self._told = True
        return b"event: error\ndata: %b\n\n" % json.dumps(problem_of(problem), ensure_ascii=False).encode()

    async def aclose(self) -> None:
        """Ends it, and what it reads from."""
        self._guard.release(self._hold)
        self._unpark()
        await self._body.aclose()
