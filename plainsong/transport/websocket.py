"""A stream's WebSocket, on asyncio and trio alike: messages out and answers in, until one side closes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import anyio
from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Ping,
    RejectConnection,
    RejectData,
    Request,
)
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from plainsong.core.answers import error_of
from plainsong.core.effects import Answer, Failure
from plainsong.core.streaming import closed_by
from plainsong.errors import ConnectionLost, DeadlineExceeded, UnexpectedAnswer
from plainsong.protocol.errors import MalformedBody, PlainsongError
from plainsong.transport.shared import place_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from anyio.abc import ByteStream
    from wsproto.events import Event

    from plainsong.settings import Settings

RECEIVE_BYTES = 1 << 16
_BROKEN = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError)


class Talk(Protocol):
    """What is said over a WebSocket. Nothing here waits."""

    def take(self) -> bytes | None:
        """The next message to send; None: nothing now, and ``Socket.wake`` will be called when there is."""
        ...

    def finished(self) -> bool:
        """Whether there will be nothing more to send, and all is answered."""
        ...

    def heard(self, message: bytes) -> None:
        """Answers. Raises MalformedBody for what is none."""
        ...

    def ended(self, error: PlainsongError, *, said: bool) -> None:
        """The connection is over; ``said``: the daemon closed, having answered all it took."""
        ...

    def answered(self) -> int | None:
        """How many requests were answered so far, if some that have left are not; None: there are none such."""
        ...


class Socket:
    """An open WebSocket; ``opened`` makes it."""

    def __init__(
        self, stream: ByteStream, frames: WSConnection, answer_timeout_s: float, headers: Mapping[str, str]
    ) -> None:
        self.headers = headers
        """What the handshake was answered with; names in lower case."""
        self._stream = stream
        self._frames = frames
        self._answer_timeout_s = answer_timeout_s
        self._sending = anyio.Lock()
        self._wanted = anyio.Event()
        self._pieces: list[bytes] = []
        #: Why the connection is over, and whether the daemon said so.
        self._over: tuple[PlainsongError, bool] | None = None

    def wake(self) -> None:
        """There is something to take, or an end to be made. From the socket's own event loop."""
        self._wanted.set()

    async def carry(self, talk: Talk) -> None:
        """Carry a talk to its end, and close. Never raises on account of the daemon or the network."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._send_all, talk)
                tasks.start_soon(self._watch, talk, tasks.cancel_scope)
                await self._receive(talk)
                tasks.cancel_scope.cancel()
        finally:
            error, said = self._over or (ConnectionLost("the stream was left"), False)
            talk.ended(error, said=said)
            with anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(self._stream)

    async def _send_all(self, talk: Talk) -> None:
        try:
            while True:
                self._wanted = anyio.Event()
                message = talk.take()
                if message is not None:
                    await self._say(BytesMessage(message))
                elif talk.finished():
                    await self._say(CloseConnection(1000))
                    return
                else:
                    await self._wanted.wait()
        except (*_BROKEN, LocalProtocolError) as error:
            self._ends(ConnectionLost(str(error) or type(error).__name__), error)

    async def _say(self, event: Event) -> None:
        async with self._sending:
            await self._stream.send(self._frames.send(event))

    async def _receive(self, talk: Talk) -> None:
        """Until the end, whose reason then stands in ``_over``."""
        try:
            while True:
                await self._take(talk)  # what came with the handshake first
                if self._over is not None and self._over[1]:
                    return
                self._frames.receive_data(await self._stream.receive(RECEIVE_BYTES))
        except MalformedBody as error:
            self._ends(UnexpectedAnswer(error.detail), error)
        except (*_BROKEN, LocalProtocolError, RemoteProtocolError) as error:
            self._ends(ConnectionLost(str(error) or type(error).__name__), error)

    async def _take(self, talk: Talk) -> None:
        for event in self._frames.events():
            if isinstance(event, BytesMessage):
                self._pieces.append(bytes(event.data))
                if event.message_finished:
                    message = b"".join(self._pieces)
                    self._pieces.clear()
                    talk.heard(message)
                    if talk.finished():
                        self.wake()
            elif isinstance(event, Ping):
                await self._say(event.response())
            elif isinstance(event, CloseConnection):
                said = self._frames.state is not ConnectionState.OPEN  # else these were no frames
                self._over = closed_by(int(event.code), event.reason or ""), said
                if self._frames.state is ConnectionState.REMOTE_CLOSING:
                    await self._say(event.response())

    async def _watch(self, talk: Talk, scope: anyio.CancelScope) -> None:
        """Gives up a connection on which nothing was answered for so long."""
        before = None
        while True:
            await anyio.sleep(self._answer_timeout_s)
            answered = talk.answered()
            if answered is not None and answered == before:
                late = f"no answer within {self._answer_timeout_s:g} s"
                self._ends(DeadlineExceeded(late, outcome="unknown", hint="request_timeout_s is its limit"), None)
                scope.cancel()
            before = answered

    def _ends(self, error: PlainsongError, cause: BaseException | None) -> None:
        if self._over is None:
            error.__cause__ = cause
            self._over = error, False


async def opened(url: str, path: str, settings: Settings, connect_s: float) -> Socket:
    """A WebSocket at a daemon, its handshake done within ``connect_s``.

    Raises:
      ConnectFailed, DeadlineExceeded, InvalidName, ShuttingDown, UnexpectedAnswer: nothing happened.
    """
    scheme, host, port, prefix, netloc = place_of(url)
    stream: ByteStream | None = None
    try:
        with anyio.fail_after(connect_s):
            if scheme == b"https":
                stream = await anyio.connect_tcp(host.decode(), port or 443, tls=True)
            else:
                stream = await anyio.connect_tcp(host.decode(), port or 80)
            frames = WSConnection(ConnectionType.CLIENT)
            token = [] if settings.token is None else [(b"Authorization", b"Bearer " + settings.token.encode("ascii"))]
            target = prefix.decode() + path
            await stream.send(frames.send(Request(host=netloc.decode(), target=target, extra_headers=token)))
            headers = await _accepted(stream, frames, url)
            return Socket(stream, frames, settings.request_timeout_s, headers)
    except (TimeoutError, *_BROKEN) as error:
        await _forget(stream)
        failed = error_of(Failure("connect", str(error) or type(error).__name__, error), url)
        assert failed is not None
        raise failed from error
    except BaseException:
        await _forget(stream)
        raise


async def _accepted(stream: ByteStream, frames: WSConnection, url: str) -> dict[str, str]:
    """The headers with which the daemon has accepted, names in lower case. Raises what it refused with."""
    rejected: RejectConnection | None = None
    body = b""
    while True:
        try:
            frames.receive_data(await stream.receive(RECEIVE_BYTES))
            for event in frames.events():
                if isinstance(event, AcceptConnection):
                    return _text(event.extra_headers)
                if isinstance(event, RejectConnection):
                    rejected = event
                elif isinstance(event, RejectData):
                    body += event.data
                if rejected is not None and (not rejected.has_body or getattr(event, "body_finished", False)):
                    raise _refusal(rejected, body, url)
        except RemoteProtocolError as error:
            raise UnexpectedAnswer(f"{url} does not speak WebSocket: {error}") from error


def _refusal(rejected: RejectConnection, body: bytes, url: str) -> PlainsongError:
    error = error_of(Answer(rejected.status_code, _text(rejected.headers), body), url)
    if error is None:
        error = UnexpectedAnswer(f"{url} answered {rejected.status_code} to a handshake")
    error.outcome = "not-applied"
    return error


def _text(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}


async def _forget(stream: ByteStream | None) -> None:
    if stream is not None:
        with anyio.CancelScope(shield=True):
            await anyio.aclose_forcefully(stream)
