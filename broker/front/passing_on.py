"""The front end's side: handlers, views and streams that pass on what they read to the owning process.

A publish is decoded and checked here, and travels as values; so the owning process spends on it what only it can do.
What is refused here is passed on whole instead, to be refused there: in the same words, and counted.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from actors.ownership import Instance
from broker.cluster.passing import heard_answer, told_hot, told_view
from broker.front.streams import FrontStream
from broker.handlers.publish import answer_publish, off_loop, read_publish
from broker.http.exchange import HOT_PATHS, HotHandler
from broker.peering.answers import LinkBroken
from broker.peering.bounds import INLINE_BYTES
from broker.views.table import ROUTES
from protocol.codec import JSON
from protocol.errors import Internal, NoOwner, OutcomeUnknown, PlainsongError, ShuttingDown
from protocol.peering.vocabulary import VOCABULARY
from protocol.requests import PublishRequest, PublishResponse, Receipt

if TYPE_CHECKING:
    from broker.handlers.publish import Given
    from broker.http.bodies import Holding
    from broker.http.conversation import Conversation
    from broker.http.exchange import HotHandlers, HotRequest, HttpAnswer
    from broker.peering.answers import Reply
    from broker.peering.link import Link
    from broker.service import Service
    from broker.views.route import Route, ViewRequest

_OWNER = Instance("the owning process", "")


class PassingOn:
    """What a front end's doors answer with; all of it over one link."""

    def __init__(self, link: Link) -> None:
        self._link = link
        #: Publishes that are under way: one that is alone has no others to share a write with.
        self._publishing = 0

    def handlers(self) -> HotHandlers:
        """Those of the hot routes."""
        found: dict[Any, HotHandler] = dict.fromkeys(HOT_PATHS, self._hot)
        return found | {"publish": self._publish}

    def routes(self) -> tuple[Route, ...]:
        """All others."""
        return tuple(replace(route, view=partial(self._view, route.name)) for route in ROUTES)

    def begin(self, namespace: str, topic: str, request_id: str, held: Holding) -> Conversation:
        """A client's stream. Raises InvalidName."""
        opens = partial(self._link.converse, "stream", [namespace, topic, request_id])
        return FrontStream(opens, _OWNER, namespace, topic, held)

    def counted(self, route: str, status: int, seconds: float) -> None:
        """Has the owning process count what was answered here."""
        self._link.tell("counted", [route, status, seconds])

    async def _call(self, kind: str, value: Any, body: bytes = b"", *, at_once: bool = False) -> Reply:
        try:
            return await self._link.call(kind, value, body, at_once=at_once)
        except LinkBroken as broken:
            raise _plain(broken) from broken

    # --- whole ---------------------------------------------------------------------------------

    async def _hot(self, request: HotRequest) -> HttpAnswer:
        return await heard_answer(await self._call("hot", told_hot(request, 0), request.body), None)

    async def _view(self, name: str, service: Service, request: ViewRequest) -> HttpAnswer:
        del service
        return await heard_answer(await self._call("view", told_view(name, request, 0), request.body), None)

    # --- publishes -----------------------------------------------------------------------------

    async def _publish(self, request: HotRequest) -> HttpAnswer:
        try:
            given = await read_publish(request)
        except PlainsongError:
            return await self._hot(request)
        try:
            told = await self._published(given, request.request_id)
        except NoOwner:  # of another instance; whole requests find their way there
            return await self._hot(request)
        return answer_publish(request, given, told)

    async def _published(self, given: Given, request_id: str) -> PublishResponse | Receipt:
        (namespace, topic), body, size = given.name, given.body, given.size
        if size <= INLINE_BYTES and _is_plain(body):
            self._publishing += 1
            try:
                value = [namespace, topic, list(body.messages), size, request_id]
                reply = await self._call("publish", value, at_once=self._publishing == 1)
            finally:
                self._publishing -= 1
            if isinstance(reply.value, list):
                return Receipt(*reply.value)
        else:
            packing = partial(VOCABULARY.pack, [namespace, topic, body, size, request_id])
            packed = await off_loop(size, JSON, packing)
            reply = await self._call("publish_packed", None, packed)
        if not isinstance(reply.value, PublishResponse | Receipt):
            raise Internal("the owning process answered with something else")
        return reply.value


def _is_plain(body: PublishRequest) -> bool:
    """Whether it has messages and nothing else."""
    return PublishRequest(body.messages) == body


def _plain(broken: LinkBroken) -> PlainsongError:
    """What a client is told when the owning process has ended."""
    if broken.sent:
        return OutcomeUnknown("the daemon ended before it answered", hint="read to see whether it happened")
    return ShuttingDown("the daemon is not there any more")
