"""What other instances ask of this one: requests forwarded to it, asks for its topics, and what is registered besides."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import trio

from broker.cluster.asking import heard_ask
from broker.cluster.passing import answered, heard_hot, heard_view, told_answer, told_page
from broker.cluster.routing import owned_name, owned_name_of_hot, place_of
from broker.cluster.spreading import topics_in
from broker.cluster.streaming import serve_stream
from broker.handlers.paged import read_within
from broker.http.respond import answer_to
from broker.http.status import only_plain
from broker.peering.answers import Reply
from broker.views.reach import Here, Since
from protocol.errors import BadRequest, NoOwner, ShuttingDown
from protocol.names import TopicName

if TYPE_CHECKING:
    from collections.abc import Iterable

    from broker.cluster.owners import Owners
    from broker.http.answers import AnswerRoom
    from broker.http.bodies import BodyBudget
    from broker.http.exchange import HotHandlers, HttpAnswer
    from broker.peering.serving import Call
    from broker.service import Service
    from broker.views.route import Route

#: Answers one kind of call. It may raise ``PlainsongError``.
Handler: TypeAlias = Callable[["Call"], Awaitable[Reply]]


class Dispatcher:
    """The peer door's ``Dispatch``. What comes here is answered here, or refused with NoOwner: never passed on.

    But for a stream that was begun here: it goes on when its topic has gone (``streaming.serve_stream``).

    Args:
      handlers, routes: as they are without a cluster: they answer here.
      budget: what the streams of other instances' clients may hold.
    """

    def __init__(
        self, service: Service, owners: Owners, handlers: HotHandlers, routes: Iterable[Route], budget: BodyBudget
    ) -> None:
        self._service = service
        self._owners = owners
        self._handlers = handlers
        self._routes = {route.name: route for route in routes}
        self._budget = budget
        #: Who answers what; other parts of the daemon add kinds of their own, such as ``tx.begin``.
        self.kinds: dict[str, Handler] = {
            "hot": self._hot,
            "view": self._view,
            "ask": self._ask,
            "look_many": self._look_many,
            "page": self._page,
            "stream": self._stream,
        }

    async def __call__(self, call: Call) -> Reply:
        """The answer. Raises NoOwner: it is not this instance's to answer, and nothing happened."""
        handler = self.kinds.get(call.kind)
        if handler is None:
            raise BadRequest(f"{call.kind[:80]!r} is nothing this version answers", hint="are all of one version?")
        return await handler(call)

    def _refuse_unless_mine(self, name: TopicName | None) -> None:
        if name is not None and not self._owners.ownership.is_mine(name):
            raise NoOwner(f"{name} is not owned by {self._owners.ownership.me.name}")

    # --- requests ------------------------------------------------------------------------------

    async def _hot(self, call: Call) -> Reply:
        request = heard_hot(call.value, call.body)
        self._refuse_unless_mine(owned_name_of_hot(request))
        request.room = self._service.answers.room()
        return await self._answered(self._handlers[request.verb](request), request.request_id, request.room)

    async def _view(self, call: Call) -> Reply:
        name, request = heard_view(call.value, call.body)
        route = self._routes[name]
        place = place_of(route)
        for owned in topics_in(request) if place == "topics" else [owned_name(place, request.path)]:
            self._refuse_unless_mine(owned)
        room = self._service.answers.room()
        return await self._answered(route.view(self._service, replace(request, room=room)), request.request_id, room)

    async def _answered(self, answering: Awaitable[HttpAnswer], request_id: str, room: AnswerRoom) -> Reply:
        """The whole answer, problems too: the client is to see what it would see here. Raises NoOwner."""
        self._owners.counted.forwarded("in")
        self._service.access.begin(request_id)
        try:
            return await answered(answering, room, only_looks=False)
        except Exception as error:
            plain = only_plain(error)
            if isinstance(plain, NoOwner | ShuttingDown):
                raise plain from error
            return told_answer(answer_to(error, request_id))

    async def _stream(self, call: Call) -> Reply:
        assert call.channel is not None  # streams are conversations
        namespace, topic, request_id = call.value
        self._owners.counted.forwarded("in")
        with self._budget.hold() as held:
            await serve_stream(self._service, self._owners, call.channel, namespace, topic, request_id, held)
        return Reply()

    # --- what is no client's request -----------------------------------------------------------

    async def _ask(self, call: Call) -> Reply:
        name, ask = heard_ask(call.value)
        return Reply(await self._service.directory.ask(name, ask))

    async def _look_many(self, call: Call) -> Reply:
        given, left_s = call.value
        wanted = [Since(TopicName(namespace, topic), since) for namespace, topic, since in given]
        here = Here(self._service)
        found: Any
        if left_s is None:
            found = await here.look(wanted)
        else:
            found = await here.wait(wanted, trio.current_time() + left_s)
        return Reply(found)

    async def _page(self, call: Call) -> Reply:
        name, span, limit, max_bytes, view = call.value
        here, room = Here(self._service), self._service.answers.room()
        try:
            return told_page(
                await read_within(room, limit, max_bytes, partial(here.page, name, span, limit, view=view)), room
            )
        except BaseException:
            room.release()
            raise
