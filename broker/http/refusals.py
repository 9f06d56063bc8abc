"""Hypercorn's HTTP/1.1 with better manners: refusals are problem+json, and a last answer is always finished."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import h11
from hypercorn.events import Closed, Updated
from hypercorn.protocol.events import Request
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol, H11WSConnection

from broker.http.request_ids import new_request_id
from broker.http.status import answer_for
from broker.http.websocket import StreamSocket
from protocol.errors import BadRequest, MalformedBody

if TYPE_CHECKING:
    from hypercorn.config import Config
    from hypercorn.typing import AppWrapper

    from broker.http.conversation import Conversations


class _LastAnswerFirst(h11.Connection):
    """Drops what a client sends after its last request.

    h11 calls that an error, at which hypercorn closes the connection, also while the last answer is being sent:
    pipelined requests behind a ``Connection: close`` of ours would lose it.
    """

    def receive_data(self, data: bytes) -> None:
        """Takes ``data``, unless no request can follow."""
        if self.their_state is not h11.MUST_CLOSE or not data:
            super().receive_data(data)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next event; none after the last request."""
        if self.their_state is h11.MUST_CLOSE and self.our_state is not h11.ERROR:
            return h11.NEED_DATA
        return super().next_event()


class RefusingH11(H11Protocol):
    """Hypercorn's HTTP/1.1, whose own refusals have a body, and whose WebSockets are ours."""

    def __init__(
        self, app: AppWrapper, config: Config, *others: Any, conversations: Conversations | None = None
    ) -> None:
        super().__init__(app, config, *others)
        self._conversations = conversations
        self.connection = _LastAnswerFirst(h11.SERVER, max_incomplete_event_size=config.h11_max_incomplete_size)

    async def _create_stream(self, request: h11.Request) -> None:
        """Begins what answers a request; one for a WebSocket is a conversation, if there are any."""
        if self._conversations is None or not _wants_websocket(request):
            await super()._create_stream(request)
            return
        assert isinstance(self.connection, h11.Connection)
        socket = StreamSocket(self._conversations, self.context, self.task_group, self.stream_send, STREAM_ID)
        self.stream = socket  # type: ignore[assignment]  # it is asked for nothing else
        self.connection = H11WSConnection(self.connection)
        begun = Request(
            stream_id=STREAM_ID,
            headers=list(request.headers),
            http_version=request.http_version.decode(),
            method="GET",
            raw_path=request.target,
            state=self.connection_state,
        )
        await socket.handle(begun)

    async def _maybe_recycle(self) -> None:
        """After an answer: ready for the next request, also when the server stops.

        Hypercorn closes then, and leaves a reader that has the next request in its hands waiting for ever: the
        stop's whole grace passes. The next one is answered instead, with ``Connection: close``; a connection at
        rest is closed by whoever looks after its rest.
        """
        await self._close_stream()
        if self.connection.our_state is h11.DONE and self.connection.their_state is h11.DONE:
            self.connection.start_next_cycle()
            await self.can_read.set()
            await self.send(Updated(idle=True))
        else:
            await self.can_read.set()
            await self.send(Closed())

    async def _send_error_response(self, status_code: int) -> None:
        """Refuses what cannot be parsed: 400, or 431 for a head over the bound, or 501 for a coding we do not know."""
        if self.connection.their_state is h11.ERROR and self.stream is not None:
            error: BadRequest = MalformedBody("the body is not framed as its head says")
        else:
            error = BadRequest("this is no HTTP/1.1 request that we can read", hint="see the status for what is wrong")
        answer = answer_for(error)
        assert isinstance(answer.body, bytes)
        body = answer.body.replace(b'"status": 400', b'"status": %d' % status_code)
        own = [
            (b"content-type", str(answer.content_type).encode()),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", new_request_id().encode()),
            (b"connection", b"close"),
        ]
        headers = list(chain(own, self.config.response_headers("h11")))
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())


def _wants_websocket(request: h11.Request) -> bool:
    """Whether this is the GET that would have the connection become a WebSocket."""
    headers = {name.lower(): value.lower() for name, value in request.headers}
    tokens = [token.strip() for token in headers.get(b"connection", b"").split(b",")]
    return request.method == b"GET" and b"upgrade" in tokens and headers.get(b"upgrade") == b"websocket"
