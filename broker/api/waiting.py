"""Requests that wait for long, and streams of events, are looked at again when their name's credential or grants change."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

import trio

from broker.api.route import Endpoint
from broker.http.messages import problem_of
from broker.security.guard import Hold

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from broker.http.messages import Answer, BodyStream, Request
    from broker.security.guard import Guard
    from plainsong.protocol.errors import PlainsongError

EVENTS_TYPE = "text/event-stream"


def looked_at_again(endpoint: Endpoint, guard: Guard) -> Endpoint:
    """The same route; when whoever waits at it may no more, the answer says so within the time of a reload."""
    route, handler, start = endpoint
    streams = EVENTS_TYPE in route.answer_types
    if not guard.required or not (route.may_wait or streams):
        return endpoint

    async def held(request: Request) -> Answer:
        unpark = guard.quotas.park(request.who, request.path.get("namespace", ""), request.path.get("topic", ""))
        try:
            return await looked_at(request)
        finally:
            unpark()

    async def looked_at(request: Request) -> Answer:
        with trio.CancelScope() as scope:
            allow = partial(setattr, request, "rights")
            hold = Hold(guard, request.who, route, request.path, lambda problem: scope.cancel(), allow)
            with guard.holding(hold):
                answer = await handler(request)
        if scope.cancelled_caught and hold.problem is not None:
            raise hold.problem
        kind = answer.content_type or ""
        if streams and kind.startswith(EVENTS_TYPE) and not isinstance(answer.body, bytes):
            answer.body = _Events(answer.body, guard, request, endpoint)
        return answer

    return Endpoint(route, held, start)


def metered(endpoint: Endpoint, guard: Guard) -> Endpoint:
    """The same route; what its requests turn out to cost is owed to the quotas of whoever sent them."""
    route, handler, start = endpoint
    if not guard.required or route.name not in ("publish", "store", "poll", "poll_many", "get_messages", "get_message"):
        return endpoint

    async def counted(request: Request) -> Answer:
        answer = await handler(request)
        who, places = request.who, (request.path.get("namespace", ""), request.path.get("topic", ""))
        if not guard.quotas.concern(who):
            return answer
        if route.name in ("publish", "store"):
            guard.quotas.owe(who, *places, "publish_messages_per_s", request.messages)
            if "content-length" not in request.headers:  # else it was taken when the request was let in
                guard.quotas.owe(who, *places, "publish_bytes_per_s", len(request.body))
        else:
            size = len(answer.body) if isinstance(answer.body, bytes) else answer.length or 0
            guard.quotas.owe(who, *places, "poll_bytes_per_s", size)
        return answer

    return Endpoint(route, counted, start)


class _Events:
    """A stream of events that ends with an event ``error`` when its reader may no more; a ``BodyStream``."""

    def __init__(self, body: BodyStream, guard: Guard, request: Request, endpoint: Endpoint) -> None:
        self._body = body
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
        await self._body.aclose()
