"""The front end's side: handlers, views and streams that forward each request to the owning process.

The front end's side: handlers, views and streams that pass on what they read to the owning process.

A publish is decoded and checked here, and travels as values; so the owning process spends on it what only it can do.
What is refused here is passed on whole instead, to be refused there: in the same words, and counted.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from actors.ownership import Instance
from broker.api.publish import answer_publish, read_publish
from broker.api.route import off_loop
from broker.api.routes import ROUTES
from broker.cluster.remote_stream import RemoteStream
from broker.http.messages import HOT_PATHS, HotHandler
from broker.link.flow import LinkBroken
from broker.link.http_codec import decode_answer, encode_hot, encode_view
from broker.link.wire import INLINE_BYTES
from plainsong.protocol.codec import JSON
from plainsong.protocol.errors import Internal, NoOwner, OutcomeUnknown, PlainsongError, ShuttingDown
from plainsong.protocol.link import VOCABULARY
from plainsong.protocol.names import topic_name
from plainsong.protocol.requests import PublishRequest, PublishResponse, Receipt

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from broker.api.publish import Given
    from broker.api.route import Route
    from broker.http.budgets import Holding
    from broker.http.messages import Conversation, HotHandlers, HotRequest, HttpAnswer, ViewRequest
    from broker.link.client import Channel, Link
    from broker.link.flow import Reply
    from broker.service import Service

_OWNER = Instance("the owning process", "")


class FrontForwarding:
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
        self._link.notify("counted", [route, status, seconds])

    async def _call(self, kind: str, value: Any, body: bytes = b"", *, at_once: bool = False) -> Reply:
        try:
            return await self._link.call(kind, value, body, at_once=at_once)
        except LinkBroken as broken:
            raise _plain(broken) from broken

    # --- whole ---------------------------------------------------------------------------------

    async def _hot(self, request: HotRequest) -> HttpAnswer:
        return await decode_answer(await self._call("hot", encode_hot(request, 0), request.body), None)

    async def _view(self, name: str, service: Service, request: ViewRequest) -> HttpAnswer:
        del service
        return await decode_answer(await self._call("view", encode_view(name, request, 0), request.body), None)

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


# --- streams ---------------------------------------------------------------------------------------


if TYPE_CHECKING:
    Opens = Callable[[], Awaitable[Channel]]


class FrontStream:
    """A client's stream at a front end; a ``Conversation``.

    Args:
      opens: begins the conversation with the owning process.
      owner: what stands for that process.
    """

    def __init__(self, opens: Opens, owner: Instance, namespace: str, topic: str, held: Holding) -> None:
        topic_name(namespace, topic)
        self.headers: Sequence[tuple[str, str]] = ()
        self._opens = opens
        self._owner = owner
        self._held = held
        self._opened: RemoteStream | None = None

    async def opened(self) -> None:
        """As ``Conversation.opened`` says. The first that the owning process says are its headers."""
        try:
            channel = await self._opens()
            self._opened = RemoteStream(channel, self._owner, self._held)
            said = await channel.receive()
        except LinkBroken as broken:
            raise ShuttingDown("the daemon is not there any more") from broken
        if said is None:
            raise Internal("a stream ended as it began")
        self.headers = [(name, value) for name, value in VOCABULARY.unpack(said)]

    @property
    def _leg(self) -> RemoteStream:
        assert self._opened is not None  # whoever holds it has opened it
        return self._opened

    @property
    def waiting(self) -> bool:
        """Whether there are requests that are not answered yet."""
        return self._leg.waiting

    @property
    def answered(self) -> int:
        """Requests that have been answered."""
        return self._leg.answered

    async def take(self, messages: Sequence[bytes]) -> None:
        """As ``Conversation.take`` says."""
        await self._leg.take(messages)

    async def answers(self) -> bytes | None:
        """As ``Conversation.answers`` says."""
        return await self._leg.answers()

    def finish(self) -> None:
        """As ``Conversation.finish`` says."""
        self._leg.finish()

    def close(self) -> None:
        """As ``Conversation.close`` says."""
        if self._opened is not None:
            self._opened.close()
        self._held.release()
