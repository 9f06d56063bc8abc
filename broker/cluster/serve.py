"""This instance as one of several: its links, the way to any owner, and its answers to other instances."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from broker.api.poll import read_within
from broker.api.poll_many import LocalTopics, Since
from broker.api.route import owned_name, owned_name_of_hot, place_of
from broker.api.routes import ROUTES
from broker.cluster.forward import Forwarding, ScatterGather, topics_in
from broker.cluster.handover import Handover
from broker.cluster.owners import Owners, RoutedAsks, decode_ask
from broker.cluster.remote_stream import RoutedStream, serve_stream
from broker.http.budgets import BodyBudget
from broker.http.messages import only_plain
from broker.http.wire import answer_to
from broker.link.client import Links
from broker.link.flow import Reply
from broker.link.http_codec import decode_hot, decode_view, encode_admitted, encode_answer, encode_page
from broker.link.server import CallHandler, peer_handler
from broker.link.wire import LinkBounds
from plainsong.protocol.errors import BadRequest, NoOwner, ShuttingDown
from plainsong.protocol.names import TopicName

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable

    from actors.directory import Directory
    from actors.ownership import Ownership
    from broker.api.route import Route
    from broker.config import Config
    from broker.http.budgets import AnswerRoom, Reservation
    from broker.http.messages import Conversation, HotHandlers, HttpAnswer
    from broker.http.server import PeerHandler
    from broker.link.server import Call
    from broker.metrics import Metrics
    from broker.service import Service

#: Calls of a link that are not clients' requests.
OWN_CALLS = 1024


class Cluster:
    """This instance as one of several.

    Args:
      nursery: runs the links, which end after all that needs them.
    """

    def __init__(
        self, config: Config, ownership: Ownership, directory: Directory, metrics: Metrics, nursery: trio.Nursery
    ) -> None:
        self.ownership = ownership
        # Each connection may have one request under way, most often a poll that waits; and daemons call each other.
        self._bounds = LinkBounds(requests=config.http.max_connections + OWN_CALLS)
        self.links = Links(nursery, self._bounds)
        self.owners = Owners(ownership, self.links, metrics)
        self.asks = RoutedAsks(self.owners, directory)
        self.handover = Handover(directory, self.owners)
        directory.open_at_owners = self.handover.pass_on
        self.forwarding = Forwarding(
            self.owners,
            ScatterGather(self.owners),
            decides=config.transactions.service == "embedded",
            max_wait_ms=config.poll.max_wait_ms,
        )
        self._budget = BodyBudget(config.http.max_inflight_bytes)
        self._dispatcher: Dispatcher | None = None

    @property
    def dispatcher(self) -> Dispatcher:
        """Answers other instances; there once ``answer_with`` was called."""
        assert self._dispatcher is not None
        return self._dispatcher

    def answer_with(self, service: Service, handlers: HotHandlers) -> None:
        """Answers other instances with this service; ``handlers`` are the local ones, uncounted."""
        self._dispatcher = Dispatcher(service, self.owners, handlers, ROUTES, self._budget)
        self._dispatcher.kinds |= self.handover.kinds()

    def peer_handler(self) -> PeerHandler:
        """Serves the connections of other instances."""
        return peer_handler(self.dispatcher, self._bounds)

    def routes(self) -> tuple[Route, ...]:
        """All routes that are not hot, each answered at its owner."""
        return self.forwarding.routes(ROUTES)

    def begin(
        self, service: Service, namespace: str, topic: str, request_id: str, reservation: Reservation
    ) -> Conversation:
        """A client's stream to a topic of any instance. Raises InvalidName."""
        return RoutedStream(service, self.owners, namespace, topic, request_id, reservation)


# --- dispatch --------------------------------------------------------------------------------------


class Dispatcher:
    """Answers the calls of other instances: at once, or with NoOwner, but never by a third instance.

    A stream that was begun here is the exception: it goes on when its topic has gone (``serve_stream``).

    Args:
      handlers, routes: the local ones, as without a cluster.
      budget: bounds the memory of other instances' streams.
    """

    def __init__(
        self, service: Service, owners: Owners, handlers: HotHandlers, routes: Iterable[Route], budget: BodyBudget
    ) -> None:
        self._service = service
        self._owners = owners
        self._handlers = handlers
        self._routes = {route.name: route for route in routes}
        self._budget = budget
        #: The handlers by kind of call; other parts of the daemon add their own, such as ``tx.sync``.
        self.kinds: dict[str, CallHandler] = {
            "hot": self._hot,
            "view": self._view,
            "ask": self._ask,
            "look_many": self._look_many,
            "page": self._page,
            "stream": self._stream,
        }

    async def __call__(self, call: Call) -> Reply:
        """The answer. Raises NoOwner: this instance does not own what the call is about, and nothing happened."""
        handler = self.kinds.get(call.kind)
        if handler is None:
            raise BadRequest(f"{call.kind[:80]!r} is nothing this version answers", hint="are all of one version?")
        return await handler(call)

    def _refuse_unless_mine(self, name: TopicName | None) -> None:
        if name is not None and not self._owners.ownership.is_mine(name):
            raise NoOwner(f"{name} is not owned by {self._owners.ownership.me.name}")

    # --- requests ------------------------------------------------------------------------------

    async def _hot(self, call: Call) -> Reply:
        request = decode_hot(call.value, call.body)
        self._refuse_unless_mine(owned_name_of_hot(request))
        request.room = self._service.answers.room()
        return await self._answered(self._handlers[request.verb](request), request.request_id, request.room)

    async def _view(self, call: Call) -> Reply:
        name, request = decode_view(call.value, call.body)
        route = self._routes[name]
        place = place_of(route)
        for owned in topics_in(request) if place == "topics" else [owned_name(place, request.path)]:
            self._refuse_unless_mine(owned)
        room = self._service.answers.room()
        return await self._answered(route.view(self._service, replace(request, room=room)), request.request_id, room)

    async def _answered(self, answering: Awaitable[HttpAnswer], request_id: str, room: AnswerRoom) -> Reply:
        """The whole answer, also a problem, so that the client sees what it would see here. Raises NoOwner."""
        self._owners.metrics.forwarded("in")
        self._service.access.begin(request_id)
        try:
            return await encode_admitted(answering, room, only_looks=False)
        except Exception as error:
            plain = only_plain(error)
            if isinstance(plain, NoOwner | ShuttingDown):
                raise plain from error
            return encode_answer(answer_to(error, request_id))

    async def _stream(self, call: Call) -> Reply:
        assert call.channel is not None  # streams are conversations
        namespace, topic, request_id = call.value
        self._owners.metrics.forwarded("in")
        with self._budget.reserve() as reservation:
            await serve_stream(self._service, self._owners, call.channel, namespace, topic, request_id, reservation)
        return Reply()

    # --- calls of the daemons themselves -------------------------------------------------------

    async def _ask(self, call: Call) -> Reply:
        name, ask = decode_ask(call.value)
        return Reply(await self._service.directory.ask(name, ask))

    async def _look_many(self, call: Call) -> Reply:
        given, left_s = call.value
        wanted = [Since(TopicName(namespace, topic), since) for namespace, topic, since in given]
        here = LocalTopics(self._service)
        found: Any
        if left_s is None:
            found = await here.look(wanted)
        else:
            found = await here.wait(wanted, trio.current_time() + left_s)
        return Reply(found)

    async def _page(self, call: Call) -> Reply:
        name, span, limit, max_bytes, view = call.value
        here, room = LocalTopics(self._service), self._service.answers.room()
        try:
            return encode_page(
                await read_within(room, limit, max_bytes, partial(here.page, name, span, limit, view=view)), room
            )
        except BaseException:
            room.release()
            raise
