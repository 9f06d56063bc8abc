"""The owning process's side of its front ends: what they pass on is answered by the very handlers of one process.

What there is most of, small plain publishes, is answered in ``quick.py``, unless each is to have a line in the log.
"""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from broker.cluster.passing import answered, heard_hot, heard_view
from broker.front.streams import serve_conversation
from broker.handlers.publish import off_loop, published
from broker.http.status import only_plain, status_of
from broker.peering.answers import Reply
from protocol.codec import JSON
from protocol.errors import BadRequest, NoOwner
from protocol.names import TopicName
from protocol.peering.vocabulary import VOCABULARY
from protocol.requests import PublishRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from broker.http.bodies import BodyBudget
    from broker.http.conversation import Begin
    from broker.http.exchange import HotHandlers
    from broker.peering.serving import Call
    from broker.service import Service
    from broker.views.route import Route


class Answering:
    """The ``Dispatch`` of the links to front ends.

    Args:
      handlers, routes, begin: what a door of this process would have, counted and forwarded as there.
      budget: what the streams of all clients may hold.
    """

    def __init__(
        self, service: Service, handlers: HotHandlers, routes: Iterable[Route], begin: Begin, budget: BodyBudget
    ) -> None:
        self.service = service
        self._handlers = handlers
        self._routes = {route.name: route for route in routes}
        self._begin = begin
        self._budget = budget
        self._kinds = {
            "hot": self._hot,
            "view": self._view,
            "publish": self._publish_one,
            "publish_packed": self._publish_packed,
            "stream": self._stream,
            "counted": self._counted,
        }

    async def dispatch(self, call: Call) -> Reply:
        """Answers one call of a front end."""
        handler = self._kinds.get(call.kind)
        if handler is None:
            raise BadRequest(f"{call.kind[:80]!r} is nothing that front ends ask for")
        return await handler(call)

    # --- whole requests ------------------------------------------------------------------------

    async def _hot(self, call: Call) -> Reply:
        request, room = heard_hot(call.value, call.body), self.service.answers.room()
        request.room = room
        return await answered(self._handlers[request.verb](request), room, only_looks=request.verb == "poll")

    async def _view(self, call: Call) -> Reply:
        name, request = heard_view(call.value, call.body)
        self.service.access.begin(request.request_id)
        room = self.service.answers.room()
        return await answered(
            self._routes[name].view(self.service, replace(request, room=room)), room, only_looks=False
        )

    async def _stream(self, call: Call) -> Reply:
        assert call.channel is not None  # streams are conversations
        namespace, topic, request_id = call.value
        with self._budget.hold() as held:
            await serve_conversation(self._begin(namespace, topic, request_id, held), call.channel)
        return Reply()

    async def _counted(self, call: Call) -> Reply:
        """A front end answered something itself."""
        route, status, seconds = call.value
        self.service.metrics.requested(route, status, seconds)
        return Reply()

    # --- publishes that a front end has read and checked -----------------------------------------

    async def _publish_one(self, call: Call) -> Reply:
        namespace, topic, messages, size, request_id = call.value
        return await self._published(TopicName(namespace, topic), PublishRequest(messages), size, request_id)

    async def _publish_packed(self, call: Call) -> Reply:
        def unpacked() -> Any:
            return VOCABULARY.unpack(call.body)

        namespace, topic, body, size, request_id = await off_loop(len(call.body), JSON, unpacked)
        return await self._published(TopicName(namespace, topic), body, size, request_id)

    async def _published(self, name: TopicName, body: PublishRequest, size: int, request_id: str) -> Reply:
        begun_s = perf_counter()
        self.service.access.begin(request_id)
        try:
            told = await published(self.service, name, body, size)
        except NoOwner:
            raise
        except Exception as error:
            plain = only_plain(error)
            self._account(name, 500 if plain is None else status_of(plain), begun_s)
            raise
        self._account(name, 200, begun_s)
        return Reply(told)

    def _account(self, name: TopicName, status: int, begun_s: float) -> None:
        seconds = perf_counter() - begun_s
        self.service.metrics.requested("publish", status, seconds)
        self.service.access.answered("publish", str(name), status, seconds)
