"""What hypercorn's HTTP/1.1 parser refuses, told as problem+json like every other error."""

from __future__ import annotations

from itertools import chain

import h11
from hypercorn.protocol.h11 import H11Protocol

from broker.http.request_ids import new_request_id
from broker.http.status import answer_for
from protocol.errors import BadRequest, MalformedBody


class RefusingH11(H11Protocol):
    """Hypercorn's HTTP/1.1, whose own refusals have a body."""

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
