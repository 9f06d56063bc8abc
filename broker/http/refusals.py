"""Hypercorn's HTTP/1.1 with better manners: refusals are problem+json, and a last answer is always finished."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import h11
from hypercorn.events import Closed, Updated
from hypercorn.protocol.h11 import H11Protocol

from broker.http.request_ids import new_request_id
from broker.http.status import answer_for
from protocol.errors import BadRequest, MalformedBody

if TYPE_CHECKING:
    from hypercorn.config import Config
    from hypercorn.typing import AppWrapper


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
    """Hypercorn's HTTP/1.1, whose own refusals have a body."""

    def __init__(self, app: AppWrapper, config: Config, *others: Any) -> None:
        super().__init__(app, config, *others)
        self.connection = _LastAnswerFirst(h11.SERVER, max_incomplete_event_size=config.h11_max_incomplete_size)

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
