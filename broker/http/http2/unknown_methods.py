"""Patch: hypercorn drops the connection on a CONNECT, and treats a lower-case method like the upper-case one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from h2.events import RequestReceived

from broker.http.http2.patch import Patch
from broker.http.http2.unfinished_uploads import stop_sender
from broker.http.messages import new_request_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from h2.events import Event


class UnknownMethods(Patch):
    """Answers CONNECT and lower-case methods with 501."""

    async def _handle_event(self, event: Event) -> None:
        if not isinstance(event, RequestReceived) or not _is_unknown(event.headers or ()):
            await super()._handle_event(event)
            return
        self.bounds.refused("CONNECT, or a method in lower case")
        headers = [
            (b":status", b"501"),
            (b"content-length", b"0"),
            (b"x-request-id", new_request_id().encode()),
            *self.config.response_headers("h2"),
        ]
        self.connection.send_headers(event.stream_id, headers, end_stream=True)
        stop_sender(self.connection, event.stream_id)


def _is_unknown(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """True if no route has the method.

    The CONNECT of a WebSocket over HTTP/2 (RFC 8441) is excluded: its answer says to open it over HTTP/1.1.
    """
    found = dict(headers)
    method = found.get(b":method", b"")
    return method != method.upper() or (method == b"CONNECT" and b":protocol" not in found)
