"""Server-sent events over HTTP/1.1 without a socket: the request, the head of the answer, and events of received bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import h11

from plainsong.calls import Answer
from plainsong.errors import UnexpectedAnswer
from plainsong.retry import error_of
from plainsong.transport.http import place_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from plainsong.credentials import Credentials

#: Raised for bytes that are not HTTP, and for a body that ends early.
BROKEN_BODY = h11.RemoteProtocolError
EVENT_STREAM = "text/event-stream"
#: Maximum size of an answer's head, in bytes.
MAX_HEAD_BYTES = 100 << 10
#: Maximum size of one event, and of the body of a refusal, in bytes.
MAX_EVENT_BYTES = 16 << 20


class RawEvent(NamedTuple):
    """One event as received."""

    kind: str
    data: str
    event_id: str
    """The id of this event or of an earlier one; a client that reconnects sends it to resume after it."""


class EventSource:
    """One answer of a daemon that sends events.

    Args:
      last_event_id: the id of the last event of an earlier answer; empty if there is none.
    """

    def __init__(self, url: str, path: str, credentials: Credentials, last_event_id: str = "") -> None:
        self._url = url
        self._path = path
        self._credentials = credentials
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._response: h11.Response | None = None
        self._rest = b""
        self._event_id = last_event_id
        self._kind = ""
        self._data: list[str] = []
        self._data_chars = 0
        #: The headers of the answer, names in lower case, once it has begun.
        self.headers: dict[str, str] | None = None
        #: True once the answer has ended properly.
        self.has_ended = False

    def request(self) -> bytes:
        """The bytes of the request."""
        _, _, _, prefix, netloc = place_of(self._url)
        headers = [(b"Host", netloc), (b"Accept", EVENT_STREAM.encode()), *self._credentials.headers(self._url)]
        if self._event_id:
            headers.append((b"Last-Event-ID", self._event_id.encode()))
        target = prefix + self._path.encode("ascii")
        request = self._http.send(h11.Request(method="GET", target=target, headers=headers))
        return (request or b"") + (self._http.send(h11.EndOfMessage()) or b"")

    def receive(self, data: bytes) -> list[RawEvent]:
        """The events that received bytes complete; empty bytes are the end of the connection.

        Raises:
          the error of a refusal; UnexpectedAnswer: these are not events; BROKEN_BODY.
        """
        found: list[RawEvent] = []
        self._http.receive_data(data)
        while (event := self._http.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.Response):
                self._response = event
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
                if event.status_code == 200:
                    self._check_type(headers)
                    self.headers = headers
            elif isinstance(event, h11.Data):
                self._rest += bytes(event.data)
                if self.headers is not None:
                    found += self._taken()
                if len(self._rest) + self._data_chars > MAX_EVENT_BYTES:
                    raise UnexpectedAnswer(f"{self._url} sent an event of more than {MAX_EVENT_BYTES >> 20} MiB")
            elif isinstance(event, h11.EndOfMessage):
                self._raise_refusal()
                self.has_ended = True
            elif isinstance(event, h11.ConnectionClosed):
                if not self.has_ended:
                    raise h11.RemoteProtocolError("the connection was closed before an answer")
                break
        return found

    def _check_type(self, headers: dict[str, str]) -> None:
        if headers.get("content-type", "").partition(";")[0].strip().lower() != EVENT_STREAM:
            raise UnexpectedAnswer(
                f"{self._url} sends no events", hint="check that the URL is one of a Plainsong daemon"
            )

    def _raise_refusal(self) -> None:
        """Raises the error of an answer that does not consist of events."""
        if self.headers is not None or self._response is None:
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in self._response.headers}
        error = error_of(Answer(self._response.status_code, headers, self._rest), self._url)
        raise error or UnexpectedAnswer(f"{self._url} answered {self._response.status_code}")

    def _taken(self) -> Iterator[RawEvent]:
        """Parse the complete lines received: WHATWG HTML, section 9.2.6, with the line ends that daemons send."""
        *lines, self._rest = self._rest.split(b"\n")
        for each in lines:
            line = each.removesuffix(b"\r")
            if not line:
                if self._data:
                    yield RawEvent(self._kind or "message", "\n".join(self._data), self._event_id)
                self._kind, self._data, self._data_chars = "", [], 0
                continue
            name, _, value = line.decode("utf-8", "replace").partition(":")
            value = value.removeprefix(" ")
            if name == "event":
                self._kind = value
            elif name == "data":
                self._data.append(value)
                self._data_chars += len(value)
            elif name == "id" and value.isprintable():
                self._event_id = value
