"""One HTTP/1.1 request that the application answers: scope, body and answer."""

from __future__ import annotations

import logging
from contextlib import contextmanager, suppress
from enum import Enum
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import trio

from broker.http import wire
from broker.http.connection import LINGER_S, Connection, State
from broker.http.gate import CUT, EXCHANGE, PEER, SENDING_END
from broker.http.handlers import SendingEnd
from broker.http.messages import new_request_id
from plainsong.protocol.errors import Internal, PlainsongError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from broker.http.heads import PlainHead
    from broker.http.intake import BodyReader

log = logging.getLogger("plainsong.http")
#: Statuses of answers without a body.
_BODILESS = (204, 304)


class Framing(Enum):
    """The framing of an answer's body."""

    WHOLE = "whole"
    """Unchanged: its length is known, or the end of the connection ends it."""
    CHUNKED = "chunked"
    NONE = "none"
    """No body, as for HEAD."""


class CutShort(Exception):
    """An answer could not be completed: only the end of the connection can tell the client."""


class ApplicationCall:
    """A request that the application handles.

    Args:
      keeps: returns True if the connection may be kept after the answer that is about to be sent.
      watch: called when the application starts to wait for the client to disconnect, with the callback for that event.
    """

    __slots__ = (
        "_body",
        "_connection",
        "_framing",
        "_head",
        "_keeps",
        "_left_bytes",
        "_sending_end",
        "_start",
        "_watch",
        "has_ended",
        "is_kept",
    )

    def __init__(
        self,
        connection: Connection,
        head: PlainHead,
        body: BodyReader,
        keeps: Callable[[], bool],
        watch: Callable[[Callable[[], object]], None],
    ) -> None:
        self._connection = connection
        self._head = head
        self._body = body
        self._keeps = keeps
        self._watch = watch
        self._sending_end = SendingEnd()
        #: The head of the answer, until the body begins.
        self._start: Any = None
        self._framing = Framing.WHOLE
        #: Announced bytes of the body that are still missing; None if the head announced no length.
        self._left_bytes: int | None = None
        #: None until the answer has begun.
        self.is_kept: bool | None = None
        self.has_ended = False

    async def answer(self, app: Any) -> bool:
        """Run ``app`` for the request. Return True if the connection is kept.

        Raises:
          CutShort: the answer broke off.
          OSError: the connection is broken.
        """
        scope = self._scope()
        try:
            await app(scope, self._receive, self._send)
        except Exception as error:
            if self.is_kept is None:
                log.exception("a request failed", extra={"request_id": _request_id(scope)})
            else:
                wire.log_cut_off(error, _request_id(scope))
        if not self.has_ended:
            if self.is_kept is not None:
                raise CutShort
            await self._fail(_request_id(scope))
        if self.is_kept:
            await self._drop_rest()
        return bool(self.is_kept) and self._body.has_ended

    async def _drop_rest(self) -> None:
        """Discard the rest of a body that the application did not read, since the next request follows it.

        Gives up after LINGER_S, or if the body is malformed: then ``has_ended`` stays False, and the connection ends.
        """
        with trio.move_on_after(LINGER_S), suppress(PlainsongError):
            while not self._body.has_ended:
                await self._body.next()

    def _sending_ended(self) -> None:
        """Handle a half-close: the client still gets its answer, unless the answer is endless."""
        self._sending_end.come()
        if self._sending_end.is_endless:
            self._connection.scope.cancel()

    def _scope(self) -> dict[str, Any]:
        head, connection = self._head, self._connection
        path, _, query = head.target.partition(b"?")
        client, server = connection.addresses()
        return {
            "type": "http",
            "asgi": {"spec_version": "2.1", "version": "3.0"},
            "http_version": head.version,
            "method": head.method,
            "scheme": connection.peer.scheme,
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": head.pairs,
            "client": client,
            "server": server,
            "state": {},
            "extensions": {
                CUT: connection.scope.cancel,
                PEER: connection.peer,
                SENDING_END: self._sending_end,
            },
        }

    async def _receive(self) -> Any:
        """See ASGI. Raises PlainsongError: the body breaks off, or contradicts the framing in its head."""
        if self._body.is_taken:
            self._watch(self._sending_ended)
            await trio.sleep_forever()  # the end of the connection cancels the request
        with self._ending_with_connection():
            piece = await self._body.next()
            return {"type": "http.request", "body": piece, "more_body": not self._body.has_ended}
        await trio.sleep_forever()
        return None

    async def _send(self, message: Any) -> None:
        """See ASGI."""
        if message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body" and not self.has_ended:
            await self._send_body(message.get("body", b""), is_last=not message.get("more_body", False))

    async def _send_body(self, body: bytes, *, is_last: bool) -> None:
        start, self._start = self._start, None
        head = b"" if start is None else self._begin(start)
        if self._framing is Framing.NONE:
            body = b""
        elif self._framing is Framing.CHUNKED:
            body = (wire.chunk(body) if body else b"") + (wire.LAST_CHUNK if is_last else b"")
        elif self._left_bytes is not None:
            self._left_bytes -= len(body)
            if self._left_bytes < 0 or (is_last and self._left_bytes):  # the answer never ends: see ``answer``
                raise ValueError(f"the body of an answer is off by {-self._left_bytes:+} bytes from its Content-Length")
        if head or body:
            with self._ending_with_connection():
                await self._connection.send_all(head, body)
                self.has_ended = is_last
                return
            await trio.sleep_forever()
        self.has_ended = is_last

    @contextmanager
    def _ending_with_connection(self) -> Iterator[None]:
        """On an error of the connection, cancel the application instead of raising the error in it."""
        try:
            yield
        except OSError:
            self._connection.scope.cancel()

    def _begin(self, start: Any) -> bytes:
        """Make the head of the answer, and decide whether to keep the connection. If this raises, no answer has
        begun."""
        status = start["status"]
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in start["headers"]]
        if status == 204:  # it must have no Content-Length: RFC 9110, section 8.6
            headers = [pair for pair in headers if pair[0].lower() != "content-length"]
        names = {name.lower() for name, _ in headers}
        framing, left_bytes = Framing.WHOLE, None
        if self._head.method == "HEAD" or status in _BODILESS:
            framing = Framing.NONE
        elif "content-length" in names:
            left_bytes = next(int(value) for name, value in headers if name.lower() == "content-length")
        elif self._head.chunks:
            framing = Framing.CHUNKED
        ends = framing is Framing.WHOLE and left_bytes is None
        is_awaited = self._body.takes_continue()
        is_kept = self._keeps() and not (ends or "connection" in names or (is_awaited and self._body.is_long))
        if not is_kept and "connection" not in names:
            headers.append(("Connection", "close"))
        head = wire.head_of(status, headers, chunks=framing is Framing.CHUNKED)
        self._framing, self._left_bytes, self.is_kept = framing, left_bytes, is_kept
        # On a kept connection the next request follows the body, so the client has to send the body.
        go_on = wire.CONTINUE if is_awaited and is_kept else b""
        self._connection.state = State.SENDING
        self._connection.minimum_rate.restart()
        if self._sending_end.is_endless and self._sending_end.has_come:
            self._connection.scope.cancel()  # the client is gone
        return go_on + head

    async def _fail(self, request_id: str) -> None:
        error = Internal(hint="the log has more under this answer's X-Request-Id")
        self.is_kept = False
        await self._connection.send_all(wire.refusal(error, request_id, head_only=self._head.method == "HEAD"))
        self.has_ended = True


def _request_id(scope: dict[str, Any]) -> str:
    """Return the id of the request, for its answer and for the log."""
    exchange = scope["extensions"].get(EXCHANGE)
    return new_request_id() if exchange is None else str(exchange.request_id)
