"""Forwards a request to the owner of its topic; a poll of many topics is scattered to their owners and gathered.

So any instance answers any request.
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
from plainsong.protocol.errors import NoOwner, PlainsongError
from plainsong.protocol.names import TopicName, topic_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Sequence

    from actors.ownership import Instance
    from broker.api.poll_many import Since
    from broker.api.route import Place, Route
    from broker.cluster.owners import Owners
    from broker.http.messages import HotHandler, HotRequest, HttpAnswer, ViewRequest
    from broker.link.client import Link
    from broker.link.flow import Reply
    from broker.service import Service
    from plainsong.protocol.page import Page
    from plainsong.protocol.topic.asks import Span
    from plainsong.protocol.transactions.view import View

#: Routes that one instance answers for all, also where a Tephra decides.
_ANSWERED_BY_ONE = frozenset(("get_pruning",))


class Forwarding:
    """Wraps handlers and views, so that they run at the owner.

    Args:
      decides: whether the cluster decides transactions itself; else each instance answers what it knows of them.
      max_wait_ms: ``poll.max_wait_ms``.
    """

    def __init__(self, owners: Owners, scatter: ScatterGather, *, decides: bool, max_wait_ms: int) -> None:
        self._owners = owners
        self._scatter = scatter
        self._decides = decides
        self._max_wait_s = max_wait_ms / 1000

    def hot(self, handler: HotHandler) -> HotHandler:
        """``handler``, run at the owner."""

        async def routed(request: HotRequest) -> HttpAnswer:
            name = owned_name_of_hot(request)
            if name is None or not self._is_owned(name):
                return await handler(request)

            async def local(waited_ms: int) -> HttpAnswer:
                return await handler(replace(request, waited_ms=waited_ms) if waited_ms else request)

            async def remote(link: Link, owner: Instance, waited_ms: int) -> HttpAnswer:
                reply = await link.call("hot", encode_hot(request, waited_ms), request.body)
                return await decode_answer(reply, owner)

            return await self._owners.run_at_owner(
                name, local, remote, repeatable=request.verb == "poll", patience_s=partial(self._wait_s, request)
            )

        return routed

    def routes(self, routes: Iterable[Route]) -> tuple[Route, ...]:
        """The same routes, each with a view that runs at the owner."""
        return tuple(self._routed(route) for route in routes)

    def _routed(self, route: Route) -> Route:
        place = place_of(route)
        if place == "here":
            return route
        if place == "topics":
            return replace(route, view=self._scatter.poll_many)
        return replace(route, view=partial(self._view, route, place))

    async def _view(self, route: Route, place: Place, service: Service, request: ViewRequest) -> HttpAnswer:
        name = owned_name(place, request.path)
        answered_by_one = route.name in _ANSWERED_BY_ONE and service.decider.has_list
        if name is None or not (self._is_owned(name) or answered_by_one):
            return await route.view(service, request)

        async def local(waited_ms: int) -> HttpAnswer:
            return await route.view(service, replace(request, waited_ms=waited_ms) if waited_ms else request)

        async def remote(link: Link, owner: Instance, waited_ms: int) -> HttpAnswer:
            reply = await link.call("view", encode_view(route.name, request, waited_ms), request.body)
            return await decode_answer(reply, owner)

        wait_s = partial(self._wait_s_of_view, route, request)
        return await self._owners.run_at_owner(name, local, remote, repeatable=only_looks(route), patience_s=wait_s)

    def _wait_s(self, request: HotRequest) -> float:
        """How long a poll may wait; one that cannot be read is refused where it is served."""
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


# --- scatter and gather ----------------------------------------------------------------------------


log = logging.getLogger(__name__)


class ScatterGather:
    """Polls of many topics: forwarded whole to the instance that owns them all, else read at each owner."""

    def __init__(self, owners: Owners) -> None:
        self._owners = owners

    async def poll_many(self, service: Service, request: ViewRequest) -> HttpAnswer:
        """As ``broker.api.poll_many.poll_many``."""
        begun_s = trio.current_time()
        names = topics_in(request)
        owners = {self._owners.remote_owner(name) for name in names}
        if len(owners) == 1 and (owner := owners.pop()) is not None:
            try:
                return await self._forward(names, owner, request)
            except (NoOwner, LinkBroken):
                waited_ms = round((trio.current_time() - begun_s) * 1000)
                request = replace(request, waited_ms=request.waited_ms + waited_ms)
        return await poll_many(service, request, _RoutedTopics(service, self._owners))

    async def _forward(self, names: Sequence[TopicName], owner: Instance, request: ViewRequest) -> HttpAnswer:
        async def call(link: Link) -> HttpAnswer:
            self._owners.metrics.forwarded("out")
            reply = await link.call("view", encode_view("poll_many", request, 0), request.body)
            return await decode_answer(reply, owner)

        return await self._owners.call_owner(names, owner, call, repeatable=True)


def topics_in(request: ViewRequest) -> list[TopicName]:
    """The topics of a poll of many; none where it cannot be read, which is refused where it is served."""
    try:
        given: Any = request.json()
        topics = given.get("topics") if isinstance(given, dict) else None
        return [topic_name(request.namespace, topic) for topic in topics] if isinstance(topics, dict) else []
    except PlainsongError:
        return []


class _RoutedTopics:
    """Topics of all instances, those of one owner in one call; a ``Reach``."""

    def __init__(self, service: Service, owners: Owners) -> None:
        self._service = service
        self._local = LocalTopics(service)
        self._owners = owners

    async def look(self, wanted: Sequence[Since]) -> list[Span | PlainsongError]:
        """See ``Reach.look``. A missing owner is looked for as long as for a request about one topic."""
        found: dict[int, Span | PlainsongError | None] = {}
        left = list(range(len(wanted)))
        attempts = self._owners.attempts()
        async for _ in attempts:
            found.update(await self._ask([(index, wanted[index]) for index in left], None))
            left = [index for index in left if isinstance(found[index], NoOwner)]
            if not left:
                break
            if attempts.until_s is None:
                attempts.until_s = trio.current_time() + PATIENCE_S
        return [found[index] or NoOwner() for index in range(len(wanted))]

    async def wait(self, wanted: Sequence[Since], deadline_s: float) -> list[Span | PlainsongError | None]:
        """See ``Reach.wait``. A topic without an owner is waited for like one without messages."""
        answers: list[Span | PlainsongError | None] = []
        async for _ in self._owners.attempts(deadline_s):
            found = await self._ask(list(enumerate(wanted)), deadline_s)
            each_found = [found.get(index) for index in range(len(wanted))]
            answers = [None if isinstance(each, NoOwner) else each for each in each_found]
            if any(each is not None for each in answers):
                break
        return answers

    async def _ask(
        self, wanted: list[tuple[int, Since]], deadline_s: float | None
    ) -> dict[int, Span | PlainsongError | None]:
        """The answers of all owners; with a deadline, those that are there when the first owner has something."""
        by_owner: dict[Instance | None, list[tuple[int, Since]]] = {}
        for index, one in wanted:
            by_owner.setdefault(self._owners.remote_owner(one.name), []).append((index, one))
        found: dict[int, Span | PlainsongError | None] = {}

        async def ask(owner: Instance | None, some: list[tuple[int, Since]]) -> None:
            answers = await self._ask_owner(owner, [one for _, one in some], deadline_s)
            found.update(zip([index for index, _ in some], answers, strict=True))
            if deadline_s is not None and any(each is not None for each in answers):
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for owner, some in by_owner.items():
                nursery.start_soon(ask, owner, some)
        return found

    async def _ask_owner(
        self, owner: Instance | None, some: list[Since], deadline_s: float | None
    ) -> Sequence[Span | PlainsongError | None]:
        if owner is None:
            return await (self._local.look(some) if deadline_s is None else self._local.wait(some, deadline_s))
        given = [[*one.name, one.since] for one in some]
        left_s = None if deadline_s is None else max(0.0, deadline_s - trio.current_time())

        def call(link: Link) -> Awaitable[Reply]:
            return link.call("look_many", [given, left_s])

        try:
            reply = await self._owners.call_owner([one.name for one in some], owner, call, repeatable=True)
        except (LinkBroken, NoOwner):
            return [NoOwner("its owner cannot be reached")] * len(some)
        except PlainsongError as error:
            return [error] * len(some)
        answers: list[Span | PlainsongError | None] = reply.value
        return answers

    async def page(self, name: TopicName, span: Span, limit: int, max_bytes: int, view: View | None) -> Page:
        """See ``Reach.page``. Its owner most likely has it in memory; but any instance can read what is stored."""
        owner = self._owners.remote_owner(name)
        if owner is not None:

            def call(link: Link) -> Awaitable[Reply]:
                return link.call("page", [name, span, limit, max_bytes, view])

            try:
                return await decode_page(await self._owners.call_owner((name,), owner, call, repeatable=True))
            except (LinkBroken, PlainsongError) as error:
                log.debug("a page is read here, since its owner did not give it", exc_info=error)
        return await self._service.read(name, span, limit=limit, max_bytes=max_bytes, view=view)
