"""Forwards a request to the owner of what it is about; a poll of many topics is scattered and gathered.

Any instance answers any request: handlers and views that run at the owner of what they are about.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from broker.api.poll import apply_query
from broker.api.poll_many import LocalTopics, poll_many
from broker.api.route import TRANSACTIONS, only_looks, owned_name, owned_name_of_hot, place_of
from broker.cluster.owners import PATIENCE_S
from broker.link.flow import LinkBroken
from broker.link.http_codec import decode_answer, decode_page, encode_hot, encode_view
from plainsong.protocol.codec import codec_for
from plainsong.protocol.errors import NoOwner, PlainsongError, ShuttingDown
from plainsong.protocol.names import TopicName, topic_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from actors.ownership import Instance
    from broker.api.poll_many import Since
    from broker.api.route import Place, Route
    from broker.cluster.owners import Owners
    from broker.http.messages import HotHandler, HotRequest, HttpAnswer, ViewRequest
    from broker.link.client import Link
    from broker.service import Service
    from plainsong.protocol.page import Page
    from plainsong.protocol.topic.asks import Span
    from plainsong.protocol.transactions.view import View

#: What one instance finds out for all, also where a Tephra decides.
_KNOWN_TO_ONE = frozenset(("get_pruning",))


class Forwarding:
    """Wraps what answers requests.

    Args:
      decides: whether the cluster decides transactions itself; else each instance says who does.
      max_wait_ms: ``poll.max_wait_ms``.
    """

    def __init__(self, owners: Owners, spreading: ScatterGather, *, decides: bool, max_wait_ms: int) -> None:
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
                reply = await link.call("hot", encode_hot(request, waited_ms), request.body)
                return await decode_answer(reply, owner)

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
            reply = await link.call("view", encode_view(route.name, request, waited_ms), request.body)
            return await decode_answer(reply, owner)

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


# --- spreading -------------------------------------------------------------------------------------
#
# A poll of many topics that several instances own: forwarded whole to the one that has them all, else read at each.


log = logging.getLogger(__name__)


class ScatterGather:
    """Polls of many."""

    def __init__(self, owners: Owners) -> None:
        self._owners = owners

    async def poll_many(self, service: Service, request: ViewRequest) -> HttpAnswer:
        """See ``many.poll_many``. It goes whole to the one instance that owns all topics, if there is one."""
        begun_s = trio.current_time()
        names = topics_in(request)
        owners = {self._owners.elsewhere(name) for name in names}
        if len(owners) == 1 and (owner := owners.pop()) is not None:
            try:
                return await self._owners.while_owner(names, owner, self._forwarded(owner, request))
            except (NoOwner, ShuttingDown, LinkBroken):
                waited_ms = round((trio.current_time() - begun_s) * 1000)
                request = replace(request, waited_ms=request.waited_ms + waited_ms)
        return await poll_many(service, request, _RoutedTopics(service, self._owners))

    async def _forwarded(self, owner: Instance, request: ViewRequest) -> HttpAnswer:
        link = await self._owners.links.to(owner.address)
        self._owners.counted.forwarded("out")
        return await decode_answer(await link.call("view", encode_view("poll_many", request, 0), request.body), owner)


def topics_in(request: ViewRequest) -> list[TopicName]:
    """The topics a poll of many names; none where it cannot be read, which whoever serves it says better."""
    try:
        given: Any = request.json()
        topics = given.get("topics") if isinstance(given, dict) else None
        return [topic_name(request.namespace, topic) for topic in topics] if isinstance(topics, dict) else []
    except PlainsongError:
        return []


class _RoutedTopics:
    """Topics wherever they are, those of one owner asked about at once; a ``Reach``."""

    def __init__(self, service: Service, owners: Owners) -> None:
        self._service = service
        self._here = LocalTopics(service)
        self._owners = owners

    async def look(self, wanted: Sequence[Since]) -> list[Span | PlainsongError]:
        """See ``Reach.look``. An owner that is not there is looked for as long as for a request about one topic."""
        search = self._owners.search()
        found: dict[int, Span | PlainsongError | None] = {}
        left = list(range(len(wanted)))
        while left:
            search.look()
            found.update(await self._ask([(index, wanted[index]) for index in left], None))
            left = [index for index in left if isinstance(found[index], NoOwner)]
            if search.until_s is None:
                search.until_s = trio.current_time() + PATIENCE_S
            if left and not await search.goes_on():
                break
        return [found[index] or NoOwner() for index in range(len(wanted))]

    async def wait(self, wanted: Sequence[Since], deadline_s: float) -> list[Span | PlainsongError | None]:
        """See ``Reach.wait``. A topic without an owner is waited for like one without messages."""
        search = self._owners.search(deadline_s)
        while True:
            search.look()
            found = await self._ask(list(enumerate(wanted)), deadline_s)
            told = [None if isinstance(found.get(index), NoOwner) else found.get(index) for index in range(len(wanted))]
            if any(each is not None for each in told) or not await search.goes_on():
                return told

    async def _ask(
        self, wanted: list[tuple[int, Since]], deadline_s: float | None
    ) -> dict[int, Span | PlainsongError | None]:
        """What each owner says of its topics; with a deadline, what the first says who has something to say."""
        by_owner: dict[Instance | None, list[tuple[int, Since]]] = {}
        for index, one in wanted:
            by_owner.setdefault(self._owners.elsewhere(one.name), []).append((index, one))
        found: dict[int, Span | PlainsongError | None] = {}

        async def ask(owner: Instance | None, some: list[tuple[int, Since]]) -> None:
            told = await self._ask_owner(owner, [one for _, one in some], deadline_s)
            found.update(zip([index for index, _ in some], told, strict=True))
            if deadline_s is not None and any(each is not None for each in told):
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for owner, some in by_owner.items():
                nursery.start_soon(ask, owner, some)
        return found

    async def _ask_owner(
        self, owner: Instance | None, some: list[Since], deadline_s: float | None
    ) -> Sequence[Span | PlainsongError | None]:
        if owner is None:
            return await (self._here.look(some) if deadline_s is None else self._here.wait(some, deadline_s))
        given = [[*one.name, one.since] for one in some]
        left_s = None if deadline_s is None else max(0.0, deadline_s - trio.current_time())
        try:
            link = await self._owners.links.to(owner.address)
            answering = link.call("look_many", [given, left_s])
            reply = await self._owners.while_owner([one.name for one in some], owner, answering)
        except (LinkBroken, ShuttingDown, NoOwner):
            return [NoOwner("its owner cannot be reached")] * len(some)
        except PlainsongError as error:
            return [error] * len(some)
        told: list[Span | PlainsongError | None] = reply.value
        return told

    async def page(self, name: TopicName, span: Span, limit: int, max_bytes: int, view: View | None) -> Page:
        """See ``Reach.page``. Its owner has it in memory, most likely; but what is stored, anybody can read."""
        owner = self._owners.elsewhere(name)
        if owner is not None:
            try:
                link = await self._owners.links.to(owner.address)
                answering = link.call("page", [name, span, limit, max_bytes, view])
                return await decode_page(await self._owners.while_owner((name,), owner, answering))
            except (LinkBroken, PlainsongError) as error:
                log.debug("a page is read here, since its owner did not give it", exc_info=error)
        return await self._service.read(name, span, limit=limit, max_bytes=max_bytes, view=view)
