"""A stream's WebSocket without a socket: encodes messages to bytes and decodes received bytes to events."""

from __future__ import annotations

from typing import TYPE_CHECKING

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

from plainsong.calls import Answer
from plainsong.errors import ConnectionLost, UnexpectedAnswer
from plainsong.retry import error_of
from plainsong.stream_queue import close_error
from plainsong.transport.http import place_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from plainsong.credentials import Credentials
    from plainsong.protocol.errors import PlainsongError

#: Raised for bytes that are not valid WebSocket frames.
BROKEN_FRAMES = (LocalProtocolError, RemoteProtocolError)


def address_of(url: str) -> tuple[str, int, bool]:
    """Return host and port of a daemon's URL, and True if it uses TLS; for a Unix socket, its path and 0."""
    scheme, host, port, _, _ = place_of(url)
    if scheme == b"unix":
        return host.decode(), 0, False
    tls = scheme == b"https"
    return host.decode(), port or (443 if tls else 80), tls


class Handshake:
    """The handshake of a WebSocket with a daemon."""

    def __init__(self, url: str, path: str, credentials: Credentials) -> None:
        self.frames = WSConnection(ConnectionType.CLIENT)
        self._url = url
        self._path = path
        self._credentials = credentials
        self._rejected: RejectConnection | None = None
        self._body = b""

    def request(self) -> bytes:
        """The bytes of the handshake request."""
        _, _, _, prefix, netloc = place_of(self._url)
        headers = self._credentials.headers(self._url)
        return self.frames.send(
            Request(host=netloc.decode(), target=prefix.decode() + self._path, extra_headers=headers)
        )

    def answered(self, data: bytes) -> dict[str, str] | None:
        """Return the headers of the accepting answer, names in lower case; None while it is incomplete.

        Raises:
          the error of a refusal; UnexpectedAnswer: the server does not speak WebSocket.
        """
        try:
            self.frames.receive_data(data)
            for event in self.frames.events():
                if isinstance(event, AcceptConnection):
                    return _text(event.extra_headers)
                if isinstance(event, RejectConnection):
                    self._rejected = event
                elif isinstance(event, RejectData):
                    self._body += event.data
                rejected = self._rejected
                if rejected is not None and (not rejected.has_body or getattr(event, "body_finished", False)):
                    raise self._refusal(rejected)
        except RemoteProtocolError as error:
            raise UnexpectedAnswer(f"{self._url} does not speak WebSocket: {error}") from error
        return None

    def _refusal(self, rejected: RejectConnection) -> PlainsongError:
        error = error_of(Answer(rejected.status_code, _text(rejected.headers), self._body), self._url)
        if error is None:
            error = UnexpectedAnswer(f"{self._url} answered {rejected.status_code} to a handshake")
        error.outcome = "not-applied"
        return error


class Frames:
    """An open WebSocket."""

    def __init__(self, handshake: Handshake) -> None:
        self._frames = handshake.frames
        self._pieces: list[bytes] = []
        self.closed: tuple[PlainsongError, bool] | None = None
        """The error of the daemon's close frame, and whether the close was orderly: all executed requests were answered."""

    def message(self, message: bytes) -> bytes:
        """The bytes of a message. Raises BROKEN_FRAMES."""
        return self._frames.send(BytesMessage(message))

    def close(self) -> bytes:
        """The bytes of a close frame. Raises BROKEN_FRAMES."""
        return self._frames.send(CloseConnection(1000))

    def receive(self, data: bytes) -> None:
        """Takes received bytes; ``events`` decodes them. Raises BROKEN_FRAMES."""
        self._frames.receive_data(data)

    def events(self) -> Iterator[tuple[bytes | None, bytes]]:
        """Decodes received bytes: yields a message with no reply, or None with the bytes to reply. Raises BROKEN_FRAMES."""
        for event in self._frames.events():
            if isinstance(event, BytesMessage):
                self._pieces.append(bytes(event.data))
                if event.message_finished:
                    message = b"".join(self._pieces)
                    self._pieces.clear()
                    yield message, b""
            elif isinstance(event, Ping):
                yield None, self._frames.send(event.response())
            elif isinstance(event, CloseConnection):
                orderly = self._frames.state is not ConnectionState.OPEN  # otherwise the frames were invalid
                self.closed = close_error(int(event.code), event.reason or ""), orderly
                if self._frames.state is ConnectionState.REMOTE_CLOSING:
                    yield None, self._frames.send(event.response())


def connection_lost(error: BaseException) -> PlainsongError:
    """The error of a broken connection."""
    lost = ConnectionLost(str(error) or type(error).__name__)
    lost.__cause__ = error
    return lost


def _text(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}
