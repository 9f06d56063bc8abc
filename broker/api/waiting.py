"""Wrappers of routes: long waits end when credentials or grants are revoked, and costs are charged to quotas."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

import trio

from broker.http.handlers import RequestCancelled
from broker.http.heads import content_length
from broker.http.messages import EVENT_STREAM, PING, PING_S, PassedStream, problem_of, status_of
from broker.http.route import Endpoint
from broker.security.guard import Hold, RefusedRequest, target_of
from broker.security.quotas import POLLS, PUBLISHES
from plainsong.protocol.errors import Forbidden, QuotaExceeded

if TYPE_CHECKING:
    from collections.abc import Callable

    from broker.http.messages import Answer, Answered, BodyStream, Request
    from broker.security.guard import Guard
    from plainsong.protocol.errors import PlainsongError

_FORBIDDEN = status_of(Forbidden())
#: The frequent routes, whose handlers never refuse a name.
_NEVER_REFUSE = PUBLISHES | {"poll"}


def reauthorized(endpoint: Endpoint, guard: Guard, *, counts: bool = True) -> Endpoint:
    """Wrap a route: if the client loses its rights while it waits, the request ends with the error within one reload.

    Args:
      counts: count waiting requests here; False: the process that answers counts them.
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
    """A waiting request, which ends when its client is no longer allowed to wait."""

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
        """Start waiting, unless the handler has answered before it returned."""
        if self._is_answered:
            return
        request, guard = self._request, self._guard
        allow = partial(setattr, request, "rights")
        hold = self._hold = Hold(
            guard, request.who, self._endpoint.route, request.path, lambda problem: request.cancel(), allow
        )
        guard.hold(hold)

    def answered(self, outcome: Answer | Exception) -> None:
        """Send the answer; for a request that was cancelled by the guard, the guard's error."""
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
    """End a wait that was not counted."""


def _parked(guard: Guard, endpoint: Endpoint, request: Request) -> Callable[[], None]:
    """Count a waiting request or an event stream as a parked poll of its name; return the function that ends it.

    Raises:
      QuotaExceeded: already recorded.
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


def refusals_recorded(endpoint: Endpoint, guard: Guard, *, recorded: bool = False) -> Endpoint:
    """Wrap a route: refusals made by its handler are recorded, whichever instance made them.

    Only the owner stores who began a transaction, and how many a name has open. Refusals that depend only on route and
    path were recorded by the guard.

    Args:
      recorded: the audit records the request itself, whatever its outcome.
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
    """Wrap a route: costs that are known only after a request are charged to its quotas.

    Pages are limited to the rest of ``poll_bytes_per_s``; an event stream waits until its debt is paid.
    """
    route, handler = endpoint
    if not guard.required or route.name not in PUBLISHES | POLLS:
        return endpoint
    quotas = guard.quotas

    def owe(request: Request) -> None:
        namespace, topic = _place(request)
        quotas.owe(request.who, namespace, topic, "publish_messages_per_s", request.messages)
        # Content-Length was charged when the request was admitted; a compressed body is larger.
        taken_bytes = content_length(request.headers.get("content-length", "")) or 0
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


class _Metered(PassedStream):
    """A stream whose bytes are charged as they are sent.

    Args:
      pause_s: charges a piece, and returns how long to wait before the next one.
      waits: delay the next piece; False for the answer to a poll, where the next poll waits instead.
    """

    def __init__(self, body: BodyStream, pause_s: Callable[[int], float], *, waits: bool) -> None:
        super().__init__(body)
        self._pause_s = pause_s
        self._waits = waits
        self._left_s = 0.0

    async def __anext__(self) -> bytes:
        if self._waits and self._left_s > 0:
            pause_s = min(self._left_s, PING_S)
            await trio.sleep(pause_s)
            self._left_s -= pause_s
            if self._left_s > 0:
                return PING  # so that the client does not mistake the pause for the end
        piece = await anext(self._pieces)
        self._left_s = self._pause_s(len(piece))
        return piece


class _Events(PassedStream):
    """A stream of events that ends with an event ``error`` when its client loses its rights."""

    def __init__(
        self, body: BodyStream, guard: Guard, request: Request, endpoint: Endpoint, unpark: Callable[[], None]
    ) -> None:
        super().__init__(body)
        self._unpark = unpark
        self._guard = guard
        self._waiting: trio.CancelScope | None = None
        self._told = False
        allow = partial(setattr, request, "rights")
        self._hold = Hold(guard, request.who, endpoint.route, request.path, self._end, allow)
        guard.hold(self._hold)

    def _end(self, problem: PlainsongError) -> None:
        del problem  # ``self._hold`` has it too
        if self._waiting is not None:
            self._waiting.cancel()

    async def __anext__(self) -> bytes:
        if self._told:
            raise StopAsyncIteration
        if self._hold.problem is None:
            with trio.CancelScope() as self._waiting:
                return await anext(self._pieces)
        problem = self._hold.problem
        assert problem is not None  # only a problem cancels the scope
        self._told = True
        return b"event: error\ndata: %b\n\n" % json.dumps(problem_of(problem), ensure_ascii=False).encode()

    async def aclose(self) -> None:
        """Close the stream and its source."""
        self._guard.release(self._hold)
        self._unpark()
        await super().aclose()
