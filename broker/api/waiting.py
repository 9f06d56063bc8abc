"""Requests that wait for long, and streams of events, are looked at again when their name's credential or grants change."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

import trio

from broker.api.route import Endpoint
from broker.http.messages import EVENT_STREAM, PING, PING_S, problem_of, status_of
from broker.security.guard import Hold, RefusedRequest, target_of
from broker.security.quotas import POLLS, PUBLISHES
from plainsong.protocol.errors import Forbidden, QuotaExceeded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from broker.api.route import Limit
    from broker.http.messages import Answer, BodyStream, Request
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
    route, handler, start = endpoint
    streams = EVENT_STREAM in route.answer_types
    if not guard.required or not (route.may_wait or streams):
        return endpoint

    async def held(request: Request) -> Answer:
        unpark = _parked(guard, endpoint, request) if counts else _nothing
        try:
            return await looked_at(request, unpark)
        except BaseException:
            unpark()
            raise

    async def looked_at(request: Request, unpark: Callable[[], None]) -> Answer:
        with trio.CancelScope() as scope:
            allow = partial(setattr, request, "rights")
            hold = Hold(guard, request.who, route, request.path, lambda problem: scope.cancel(), allow)
            with guard.holding(hold):
                answer = await handler(request)
        if scope.cancelled_caught and hold.problem is not None:
            raise hold.problem
        kind = answer.content_type or ""
        if streams and kind.startswith(EVENT_STREAM) and not isinstance(answer.body, bytes):
            answer.body = _Events(answer.body, guard, request, endpoint, unpark)
        else:
            unpark()
        return answer

    return Endpoint(route, held, start)


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
    route, handler, start = endpoint
    if not guard.required or route.name in _NEVER_REFUSE:
        return endpoint

    async def noted(request: Request) -> Answer:
        try:
            answer = await handler(request)
        except QuotaExceeded as error:
            if route.name == "begin":
                _note(guard, request, error)
            raise
        except Forbidden as error:
            if not recorded:
                _note(guard, request, error)
            raise
        if answer.status == _FORBIDDEN and not recorded:  # another instance's refusal
            _note(guard, request, Forbidden())
        return answer

    return Endpoint(route, noted, start)


def _note(guard: Guard, request: Request, error: PlainsongError) -> None:
    guard.refused(RefusedRequest(error, request.who, request.peer, target_of(request.path), request.request_id))


def _place(request: Request) -> tuple[str, str]:
    return request.path.get("namespace", ""), request.path.get("topic", "")


def metered(endpoint: Endpoint, guard: Guard) -> Endpoint:
    """The same route; what its requests turn out to cost is owed to the quotas of whoever sent them.

    Pages are as short as what is left of ``poll_bytes_per_s``; a stream of events waits until it has paid for what it sent.
    """
    route, handler, start = endpoint
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

    async def published(request: Request) -> Answer:
        answer = await handler(request)
        if quotas.concern(request.who):
            owe(request)
        return answer

    def started(request: Request, answered: Callable[[Answer], None]) -> Limit | None:
        assert start is not None  # else this is not used
        if not quotas.concern(request.who):
            return start(request, answered)

        def paid(answer: Answer) -> None:
            if answer.status < 400:
                owe(request)
            answered(answer)

        return start(request, paid)

    async def read(request: Request) -> Answer:
        if not quotas.concern(request.who):
            return await handler(request)
        namespace, topic = _place(request)
        left = quotas.page_bytes(request.who, namespace, topic)
        if left is not None:
            request.page_bytes = left if request.page_bytes is None else min(left, request.page_bytes)
        answer = await handler(request)
        if isinstance(answer.body, bytes):
            quotas.owe(request.who, namespace, topic, "poll_bytes_per_s", len(answer.body))
        elif answer.length is not None:
            quotas.owe(request.who, namespace, topic, "poll_bytes_per_s", answer.length)
        else:
            waits = EVENT_STREAM in route.answer_types and answer.status == 200
            pause_s = partial(quotas.read_pause_s, request.who, namespace, topic)
            answer.body = _Metered(answer.body, pause_s, waits=waits)
        return answer

    def started_to_read(request: Request, answered: Callable[[Answer], None]) -> Limit | None:
        assert start is not None  # else this is not used
        return None if quotas.concern(request.who) else start(request, answered)

    if route.name in PUBLISHES:
        return Endpoint(route, published, None if start is None else started)
    return Endpoint(route, read, None if start is None else started_to_read)


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
