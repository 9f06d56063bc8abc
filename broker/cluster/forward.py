"""Forwards a request to the owner of its topic; a poll of many topics is scattered to the owners, and gathered.

Any instance can therefore answer any request.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from broker.cluster.owners import PATIENCE_S
from broker.http.handlers import answer_of
from broker.http.route import Endpoint, owned_name
from broker.link.flow import LinkBroken
from broker.link.http_codec import decode_answer, decode_page
from broker.link.version_0_1 import call_route, sender
from broker.security.identity import ANONYMOUS
from plainsong.protocol.errors import Forbidden, NoOwner, PlainsongError, Unauthenticated
from plainsong.protocol.names import topic_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Sequence

    from actors.ownership import Instance
    from broker.api.messages.poll_many import LocalTopics, PollingMany, Since
    from broker.cluster.owners import Owners
    from broker.http.handlers import RequestTasks
    from broker.http.messages import Answer, Answered, Handler, Request
    from broker.http.route import Route
    from broker.link.client import Link
    from broker.link.flow import Reply
    from broker.security.identity import Identity
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.page import Page
    from plainsong.protocol.topic.asks import Span
    from plainsong.protocol.transactions.view import View

log = logging.getLogger(__name__)


class Forwarding:
    """Wraps handlers, so that each request is answered by the owner that its route names.

    Args:
      decides: ``transactions.service``. With ``embedded`` the transaction service has an owner. So has the invalid list,
        except with ``off``.
      max_wait_ms: ``poll.max_wait_ms``.
    """

    def __init__(
        self, owners: Owners, scatter: ScatterGather, tasks: RequestTasks, *, decides: str, max_wait_ms: int
    ) -> None:
        self._owners = owners
        self._tasks = tasks
        self._scatter = scatter
        self._decides = decides
        self._max_wait_s = max_wait_ms / 1000

    def endpoints(self, endpoints: Iterable[Endpoint]) -> tuple[Endpoint, ...]:
        """Return the same routes, each answered at its owner."""
        return tuple(Endpoint(each.route, self._routed(each)) for each in endpoints)

    def _routed(self, endpoint: Endpoint) -> Handler:
        route, handler = endpoint
        if not self._has_owner(route):
            return handler
        if route.owner == "topics":
            return self._tasks.adapt(partial(self._scatter.poll, route.name))
        return self._forwarded(endpoint)

    def _forwarded(self, endpoint: Endpoint) -> Handler:
        route, handler = endpoint

        def forwarded(request: Request, answered: Answered) -> None:
            name = owned_name(route.owner, request.path)
            if name is None:
                handler(request, answered)
                return
            at_owner = partial(self._at_owner, endpoint, name)
            if not self._owners.ownership.is_mine(name):
                self._tasks.run(at_owner, request, answered)
                return

            def unless_moved(outcome: Answer | Exception) -> None:
                if isinstance(outcome, NoOwner):
                    self._tasks.run(at_owner, request, answered)
                else:
                    answered(outcome)

            handler(request, unless_moved)

        return forwarded

    async def _at_owner(self, endpoint: Endpoint, name: TopicName, request: Request) -> Answer:
        """Return the owner's answer, wherever the owner is. Raises the same as ``Owners.run_at_owner``."""
        route, handler = endpoint
        before_ms = request.waited_ms

        async def local(waited_ms: int) -> Answer:
            request.waited_ms = before_ms + waited_ms
            return await answer_of(handler, request)

        async def remote(link: Link, owner: Instance, waited_ms: int) -> Answer:
            request.waited_ms = before_ms + waited_ms
            reply = await call_route(link, route.name, request)
            return await decode_answer(reply, owner)

        wait_s = partial(self._wait_s, route, request)
        return await self._owners.run_at_owner(name, local, remote, repeatable=route.reads_only, patience_s=wait_s)

    def _wait_s(self, route: Route[Any], request: Request) -> float:
        """Return how long a request may wait, and therefore how long it may wait for an owner."""
        return 0.0 if route.wait_ms is None else min(route.wait_ms(request) / 1000, self._max_wait_s)

    def _has_owner(self, route: Route[Any]) -> bool:
        if route.owner == "transactions":
            return self._decides == "embedded"
        if route.owner == "invalid_list":
            return self._decides != "off"
        return route.owner is not None


# --- scatter and gather ----------------------------------------------------------------------------


class ScatterGather:
    """Polls of many topics: forwarded whole if one other instance owns all of them, else read at each owner."""

    def __init__(self, owners: Owners, polling: PollingMany, topics: LocalTopics) -> None:
        self._owners = owners
        self._polling = polling
        self._topics = _RoutedTopics(topics, owners)

    async def poll(self, route: str, request: Request) -> Answer:
        begun_s = trio.current_time()
        names = topics_in(request)
        owners = {self._owners.remote_owner(name) for name in names}
        if len(owners) == 1 and (owner := owners.pop()) is not None:
            try:
                return await self._forward(route, names, owner, request)
            except (NoOwner, LinkBroken):
                waited_ms = round((trio.current_time() - begun_s) * 1000)
                request.waited_ms += waited_ms
        return await self._polling.poll(request, self._topics.asked_by(request.who))

    async def _forward(self, route: str, names: Sequence[TopicName], owner: Instance, request: Request) -> Answer:
        async def call(link: Link) -> Answer:
            self._owners.metrics.forwarded("out")
            reply = await call_route(link, route, request)
            return await decode_answer(reply, owner)

        return await self._owners.call_owner(names, owner, call, repeatable=True)


def topics_in(request: Request) -> list[TopicName]:
    """Return the topics of a poll of many; empty if the body is malformed, which its handler refuses."""
    try:
        given: Any = request.json()
        topics = given.get("topics") if isinstance(given, dict) else None
        return [topic_name(request.namespace, topic) for topic in topics] if isinstance(topics, dict) else []
    except PlainsongError:
        return []


class _RoutedTopics:
    """The topics of all instances, with one call per owner; a ``TopicsAccess``.

    Args:
      who: the sender of the request; each owner looks up its rights itself.
    """

    def __init__(self, local: LocalTopics, owners: Owners, who: Identity = ANONYMOUS) -> None:
        self._local = local
        self._owners = owners
        self._sender = sender(who)

    def asked_by(self, who: Identity) -> _RoutedTopics:
        """Return the same access on behalf of ``who``."""
        return _RoutedTopics(self._local, self._owners, who)

    async def look(self, wanted: Sequence[Since]) -> list[Span | PlainsongError]:
        """See ``TopicsAccess.look``. Waits for a missing owner as long as a request about one topic does."""
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
        """See ``TopicsAccess.wait``. A topic without an owner is treated like one without messages."""
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
        """Return the answers of all owners; with a deadline, those available when the first owner has something."""
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
        given = [[*one.name, one.since, *([one.undecided] if one.undecided else [])] for one in some]
        left_s = None if deadline_s is None else max(0.0, deadline_s - trio.current_time())

        def call(link: Link) -> Awaitable[Reply]:
            return link.call("look_many", [given, left_s, *self._sender])

        try:
            reply = await self._owners.call_owner([one.name for one in some], owner, call, repeatable=True)
        except (LinkBroken, NoOwner):
            return [NoOwner("its owner cannot be reached")] * len(some)
        except PlainsongError as error:
            return [error] * len(some)
        answers: list[Span | PlainsongError | None] = reply.value
        return answers

    async def page(self, name: TopicName, span: Span, limit: int, max_bytes: int, view: View | None) -> Page:
        """See ``TopicsAccess.page``. The owner probably has it in memory, but any instance can read stored messages."""
        owner = self._owners.remote_owner(name)
        if owner is not None:

            def call(link: Link) -> Awaitable[Reply]:
                return link.call("page", [name, span, limit, max_bytes, view, *self._sender])

            try:
                return await decode_page(await self._owners.call_owner((name,), owner, call, repeatable=True))
            except (Forbidden, Unauthenticated):
                raise  # the owner refused it: reading the store here would bypass that
            except (LinkBroken, PlainsongError) as error:
                log.debug("a page is read here, since the owner did not return it", exc_info=error)
        return await self._local.page(name, span, limit, max_bytes, view)
