"""The front end's side: handlers and streams that forward each request to the owning process.

A publish is decoded and validated here and travels as values, so that the owning process does as little as possible. A
request that would be refused here is forwarded whole: the owning process refuses it with the usual error, and counts
it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from actors.ownership import Instance
from broker.api.answers import off_loop
from broker.api.messages.publish import answer_publish, read_publish
from broker.api.routes import ROUTES
from broker.cluster.remote_stream import RemoteStream
from broker.http.route import Endpoint
from broker.link.flow import LinkBroken
from broker.link.http_codec import decode_answer, encode_identity, encode_request
from broker.link.wire import INLINE_BYTES
from broker.security.identity import ANONYMOUS, Identity
from plainsong.protocol.codec import JSON
from plainsong.protocol.errors import Internal, NoOwner, OutcomeUnknown, PlainsongError, ShuttingDown
from plainsong.protocol.link import VOCABULARY
from plainsong.protocol.names import topic_name
from plainsong.protocol.requests import PublishRequest, PublishResponse, Receipt

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from broker.api.messages.publish import PublishCall
    from broker.http.budgets import Reservation
    from broker.http.handlers import RequestTasks
    from broker.http.messages import Answer, AsyncHandler, Conversation, Request
    from broker.http.route import Route
    from broker.link.client import Channel, Link
    from broker.link.flow import Reply

_OWNER = Instance("the owning process", "")


class FrontForwarding:
    """Answers the requests of a front end over its link to the owning process."""

    def __init__(self, link: Link) -> None:
        self._link = link
        #: Number of publishes in progress. A single one is sent at once, since no other can share its write.
        self._publishing = 0

    def endpoints(self, tasks: RequestTasks) -> tuple[Endpoint, ...]:
        """Return endpoints for all routes."""
        return tuple(Endpoint(route, tasks.adapt(self._handler(route))) for route in ROUTES)

    def _handler(self, route: Route[Any]) -> AsyncHandler:
        whole = partial(self._whole, route.name)
        return partial(self._publish, whole) if route.name == "publish" else whole

    def begin(
        self, namespace: str, topic: str, request_id: str, reservation: Reservation, who: Identity = ANONYMOUS
    ) -> Conversation:
        """Begin a client's stream. Raises InvalidName."""
        open_channel = partial(self._link.converse, "stream", [namespace, topic, request_id, encode_identity(who)])
        return FrontStream(open_channel, _OWNER, namespace, topic, reservation)

    def count(self, route: str, status: int, seconds: float, requests: int = 1, /) -> None:
        """Have the owning process count one answer of this process."""
        del requests
        self._link.notify("counted", [route, status, seconds])

    def count_handshake(self, result: str) -> None:
        """Have the owning process count a TLS handshake of this process."""
        self._link.notify("handshake", result)

    def authenticated(self, via: str, result: str) -> None:
        """Have the owning process count a credential that was checked here."""
        self._link.notify("authenticated", [via, result])

    def forbidden(self, verb: str) -> None:
        """Have the owning process count a request that was refused here for lack of a verb."""
        self._link.notify("forbidden", verb)

    async def _call(self, kind: str, value: Any, body: bytes = b"", *, at_once: bool = False) -> Reply:
        try:
            return await self._link.call(kind, value, body, at_once=at_once)
        except LinkBroken as broken:
            raise _error_of(broken) from broken

    # --- whole requests ------------------------------------------------------------------------

    async def _whole(self, route: str, request: Request) -> Answer:
        return await decode_answer(await self._call("request", encode_request(route, request), request.body), None)

    # --- publishes -----------------------------------------------------------------------------

    async def _publish(self, whole: AsyncHandler, request: Request) -> Answer:
        try:
            given = await read_publish(request)
            request.messages = len(given.body.messages)
        except PlainsongError:
            return await whole(request)
        try:
            response = await self._published(given, request.request_id)
        except NoOwner:  # another instance owns the topic: whole requests are routed to it
            return await whole(request)
        return answer_publish(request, given, response)

    async def _published(self, given: PublishCall, request_id: str) -> PublishResponse | Receipt:
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
            raise Internal("the owning process sent an unexpected answer")
        return reply.value


def _is_plain(body: PublishRequest) -> bool:
    """True if it has messages and nothing else."""
    return PublishRequest(body.messages) == body


def _error_of(broken: LinkBroken) -> PlainsongError:
    """Return the client's error for the end of the owning process."""
    if broken.sent:
        return OutcomeUnknown(
            "the daemon ended before it answered", hint=("read the topic to check whether it happened")
        )
    return ShuttingDown("the daemon has ended")


# --- streams ---------------------------------------------------------------------------------------


if TYPE_CHECKING:
    OpenChannel = Callable[[], Awaitable[Channel]]


class FrontStream:
    """A client's stream at a front end; a ``Conversation``.

    Args:
      open_channel: begins the conversation with the owning process.
      owner: represents that process.
    """

    def __init__(
        self, open_channel: OpenChannel, owner: Instance, namespace: str, topic: str, reservation: Reservation
    ) -> None:
        topic_name(namespace, topic)
        self.headers: Sequence[tuple[str, str]] = ()
        self._open_channel = open_channel
        self._owner = owner
        self._reservation = reservation
        self._remote: RemoteStream | None = None

    async def opened(self) -> None:
        """See ``Conversation``. The owning process sends the headers first."""
        try:
            channel = await self._open_channel()
            self._remote = RemoteStream(channel, self._owner, self._reservation)
            headers = await channel.receive()
        except LinkBroken as broken:
            raise ShuttingDown("the daemon has ended") from broken
        if headers is None:
            raise Internal("a stream ended as it began")
        self.headers = [(name, value) for name, value in VOCABULARY.unpack(headers)]

    @property
    def _stream(self) -> RemoteStream:
        assert self._remote is not None  # ``opened`` is called before anything else
        return self._remote

    @property
    def waiting(self) -> bool:
        return self._stream.waiting

    @property
    def answered(self) -> int:
        return self._stream.answered

    async def take(self, messages: Sequence[bytes]) -> None:
        await self._stream.take(messages)

    async def answers(self) -> bytes | None:
        return await self._stream.answers()

    def finish(self) -> None:
        self._stream.finish()

    def close(self) -> None:
        if self._remote is not None:
            self._remote.close()
        self._reservation.release()
