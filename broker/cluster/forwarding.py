"""Any instance answers any request: handlers and views that run at the owner of what they are about."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from broker.cluster.passing import heard_answer, told_hot, told_view
from broker.cluster.routing import TRANSACTIONS, only_looks, owned_name, owned_name_of_hot, place_of
from broker.handlers.poll import apply_query
from protocol.codec import codec_for
from protocol.errors import PlainsongError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from actors.ownership import Instance
    from broker.cluster.owners import Owners
    from broker.cluster.routing import Place
    from broker.cluster.spreading import Spreading
    from broker.http.exchange import HotHandler, HotRequest, HttpAnswer
    from broker.peering.link import Link
    from broker.service import Service
    from broker.views.route import Route, ViewRequest
    from protocol.names import TopicName

#: What one instance finds out for all, also where a Tephra decides.
_KNOWN_TO_ONE = frozenset(("get_pruning",))


class Forwarding:
    """Wraps what answers requests.

    Args:
      decides: whether the cluster decides transactions itself; else each instance says who does.
      max_wait_ms: ``poll.max_wait_ms``.
    """

    def __init__(self, owners: Owners, spreading: Spreading, *, decides: bool, max_wait_ms: int) -> None:
        self._owners = owners
        self._spreading = spreading
        self._decides = decides
        self._max_wait_s = max_wait_ms / 1000

    def hot(self, handler: HotHandler) -> HotHandler:
        """``handler``, run at the owner."""

        async def routed(request: HotRequest) -> HttpAnswer:
            name = owned_name_of_hot(request)
            if name is None or not self._is_owned(name):
                return await handler(request)

            async def here(waited_ms: int) -> HttpAnswer:
                return await handler(replace(request, waited_ms=waited_ms) if waited_ms else request)

            async def there(link: Link, owner: Instance, waited_ms: int) -> HttpAnswer:
                reply = await link.call("hot", told_hot(request, waited_ms), request.body)
                return await heard_answer(reply, owner)

            looks = request.verb == "poll"
            return await self._owners.do(name, here, there, only_looks=looks, patience_s=partial(self._wait_s, request))

        return routed

    def routes(self, routes: Iterable[Route]) -> tuple[Route, ...]:
        """The same routes, each with a view that runs at the owner."""
        return tuple(self._routed(route) for route in routes)

    def _routed(self, route: Route) -> Route:
        place = place_of(route)
        if place == "here":
            return route
        if place == "topics":
            return replace(route, view=self._spreading.poll_many)
        return replace(route, view=partial(self._view, route, place))

    async def _view(self, route: Route, place: Place, service: Service, request: ViewRequest) -> HttpAnswer:
        name = owned_name(place, request.path)
        one_knows = route.name in _KNOWN_TO_ONE and service.decider.has_list
        if name is None or not (self._is_owned(name) or one_knows):
            return await route.view(service, request)

        async def here(waited_ms: int) -> HttpAnswer:
            return await route.view(service, replace(request, waited_ms=waited_ms) if waited_ms else request)

        async def there(link: Link, owner: Instance, waited_ms: int) -> HttpAnswer:
            reply = await link.call("view", told_view(route.name, request, waited_ms), request.body)
            return await heard_answer(reply, owner)

        wait_s = partial(self._wait_s_of_view, route, request)
        return await self._owners.do(name, here, there, only_looks=only_looks(route), patience_s=wait_s)

    def _wait_s(self, request: HotRequest) -> float:
        """How long a poll is to be held; what cannot be read is refused by whoever serves it."""
        if request.verb != "poll":
            return 0.0
        try:
            body = codec_for(request.headers.get("content-type")).decode_poll(request.body)
            apply_query(body, request.query)
        except PlainsongError:
            return 0.0
        return min((body.wait_ms or 0) / 1000, self._max_wait_s)

    def _wait_s_of_view(self, route: Route, request: ViewRequest) -> float:
        if route.name != "offsets":
            return 0.0
        try:
            given: Any = request.json()
        except PlainsongError:
            return 0.0
        wait_ms = given.get("waitMs") if isinstance(given, dict) else None
        return min(wait_ms / 1000, self._max_wait_s) if isinstance(wait_ms, int) else 0.0

    def _is_owned(self, name: TopicName) -> bool:
        return self._decides or name != TRANSACTIONS
