"""A stream of publishes for event loops: each call waits only for room, and gives what stands for the answer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

import anyio
import anyio.lowlevel

from plainsong.core import calls
from plainsong.core.effects import Failure
from plainsong.core.operations import outgoing_request
from plainsong.core.outcomes import Tally
from plainsong.core.places import is_elsewhere
from plainsong.core.streaming import MESSAGE_BYTES, Streaming, receipt_of
from plainsong.errors import Closed, NotSent
from plainsong.protocol.errors import OutcomeUnknown, PlainsongError
from plainsong.serializers import BYTES, SerializerLike, serializer_for
from plainsong.transport.websocket import opened

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Self

    from anyio.abc import TaskGroup

    from plainsong.core.operations import Operations
    from plainsong.messages import Receipt
    from plainsong.protocol.requests import PublishRequest, PublishResponse
    from plainsong.transport.websocket import Socket

log = logging.getLogger("plainsong.stream")


class AsyncTicket:
    """What becomes of one request of a stream; await it for its receipt, once it is durable.

    It raises what went wrong, whose ``outcome`` says whether the request happened. May be awaited by several tasks,
    several times, or not at all.
    """

    __slots__ = ("_answer", "_event", "asked", "messages", "number", "size")

    number: int
    size: int

    def __init__(self, messages: int) -> None:
        self._answer: Any = None
        self._event: anyio.Event | None = None
        self.messages = messages
        #: Whether anybody has asked what became of it.
        self.asked = False

    def __repr__(self) -> str:
        return f"<AsyncTicket {'answered' if self.done() else 'pending'}>"

    def done(self) -> bool:
        """Whether its fate is known."""
        return self._answer is not None

    def told(self, status: int, fields: dict[str, Any]) -> None:
        """There is an answer; whoever reads it takes it apart."""
        self._answer = status, fields
        if self._event is not None:
            self._event.set()

    def failed(self, error: PlainsongError) -> None:
        """There will be none."""
        self._answer = error
        if self._event is not None:
            self._event.set()

    def __await__(self) -> Generator[Any, Any, Receipt | PublishResponse]:
        return self._wait().__await__()

    async def _wait(self) -> Receipt | PublishResponse:
        self.asked = True
        if self._answer is None:
            if self._event is None:
                self._event = anyio.Event()
            await self._event.wait()
        if isinstance(self._answer, tuple):
            status, fields = self._answer
            self._answer = receipt_of(status, fields, self.messages)
        if isinstance(self._answer, PlainsongError):
            raise self._answer
        return cast("Receipt | PublishResponse", self._answer)


class AsyncStream:
    """One WebSocket to a topic; made by ``AsyncClient.stream``, which explains the options. Use it in ``async with``.

    The order of calls is the order in the topic. Ends with its connection: what was not answered then is unknown,
    unless the daemon closed in good order, and nothing is sent again. Also the ``Talk`` of its socket.
    """

    def __init__(
        self, operations: Operations, topic: str, *, max_pending_bytes: int, serializer: SerializerLike
    ) -> None:
        self._topic = topic
        self._operations = operations
        self._path = calls.topic_path(operations.namespace, topic, "/stream")
        self._serializer = serializer_for(serializer)
        self._as_it_is = self._serializer is BYTES
        self._streaming: Streaming[AsyncTicket] = Streaming(max_pending_bytes)
        self._tally: Tally[AsyncTicket] = Tally()
        self._socket: Socket | None = None
        self._tasks: TaskGroup | None = None
        self._resting = False
        self._closing = False
        #: Something was answered, or the end has come.
        self._changed = anyio.Event()
        self._over = anyio.Event()

    def __repr__(self) -> str:
        return f"<AsyncStream to {self._topic}: {len(self._streaming)} without an answer>"

    async def __aenter__(self) -> Self:
        self._socket = await self._opened()
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._socket.carry, self)
        return self

    async def _opened(self) -> Socket:
        """Connected to the first daemon that can be reached."""
        places, settings = self._operations.places, self._operations.settings
        left = len(places.urls)
        while True:
            url = places.where(self._path)
            try:
                connect_s = places.connect_s(url, settings.connect_timeout_s)
                socket = await opened(url, self._path, settings, connect_s)
            except PlainsongError as error:
                goes_back = places.heard(self._path, url, Failure("connect", error.detail), error)
                left -= not goes_back
                if not left or not (goes_back or is_elsewhere(error)):
                    raise
            else:
                places.told(self._path, url, socket.headers)
                return socket

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        assert self._tasks is not None
        unheard: NotSent | None = None
        if kind is not None:
            self._tasks.cancel_scope.cancel()
        else:
            try:
                await self.aclose()
            except NotSent as not_sent:
                unheard = not_sent
        if kind is not None and not issubclass(kind, anyio.get_cancelled_exc_class()):
            kind = error = trace = None  # it goes on its way as it is, not in a group
        await self._tasks.__aexit__(kind, error, trace)
        if unheard is not None:
            raise unheard

    async def publish(self, messages: Any, *, ttl_s: int | None = None) -> AsyncTicket:
        """Hand over a request, and get what stands for its answer; waits only while the buffer is full.

        Args:
          messages: one, or a list of several, which are one request; as for ``AsyncClient.publish``.
          ttl_s: seconds they live, if that is shorter than the topic's ttl.
        Raises:
          Closed, NotEncodable, InvalidParameter: nothing happened.
        """
        if type(messages) is bytes and self._as_it_is and ttl_s is None:
            ticket = AsyncTicket(1)
            await self._hand_over(lambda: self._streaming.put_single(messages, ticket))
            return ticket
        many = messages if isinstance(messages, list | tuple) else [messages]
        return await self.send(outgoing_request(many, self._serializer, ttl_s))

    async def send(self, request: PublishRequest) -> AsyncTicket:
        """Hand over a request with any of a publish's fields; as ``publish``."""
        ticket = AsyncTicket(len(request.messages))
        await self._hand_over(lambda: self._streaming.put(request, ticket))
        return ticket

    async def _hand_over(self, put: Callable[[], bool]) -> None:
        if self._socket is None or self._closing:
            raise Closed("the stream is closed, or was never opened", hint="use it in an async with block")
        while not put():
            self._wake()
            await self._wait_for_change()
            if self._closing:
                raise Closed("the stream was closed while this request waited for room")
        self._wake()
        if self._streaming.unsent_bytes >= MESSAGE_BYTES:
            await anyio.lowlevel.checkpoint()  # a loop that never waits would never send

    def _wake(self) -> None:
        if self._resting and self._socket is not None:
            self._resting = False
            self._socket.wake()

    async def _wait_for_change(self) -> None:
        self._changed = anyio.Event()
        await self._changed.wait()

    async def flush(self) -> None:
        """Wait until everything is answered. Raises NotSent when something failed and nobody asked its ticket."""
        while len(self._streaming):
            await self._wait_for_change()
        self._tally.raise_if_unheard(0)

    async def aclose(self) -> None:
        """Flush, then close. Idempotent. Raises as ``flush`` does."""
        self._closing = True
        self._changed.set()
        if self._socket is not None:
            self._socket.wake()
            await self._over.wait()
        self._tally.raise_if_unheard(0)

    # --- as the socket sees it -----------------------------------------------------------------

    def take(self) -> bytes | None:
        """The next message to send."""
        message = self._streaming.take()
        self._resting = message is None
        return message

    def finished(self) -> bool:
        """Whether the stream is closed, and all is answered."""
        return self._closing and not len(self._streaming)

    def heard(self, message: bytes) -> None:
        """Answers."""
        wrong = self._streaming.take_answers(message)
        self._changed.set()
        if wrong:
            self._tally.failed(wrong, PlainsongError())

    def ended(self, error: PlainsongError, *, said: bool) -> None:
        """The connection is over."""
        lost = self._streaming.end(error, said=said)
        if lost:
            self._tally.failed(lost, OutcomeUnknown())
        self._changed.set()
        self._over.set()

    def answered(self) -> int | None:
        """How many were answered so far, if some are not."""
        return self._streaming.answered if self._streaming.sent else None
