"""Patch: h2 ends the connection for a malformed request, and hypercorn for one with bytes beyond ASCII.

On a load balancer's connection the streams belong to many clients, so only the stream is refused.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from h2.errors import ErrorCodes
from h2.events import RequestReceived
from h2.exceptions import ProtocolError
from h2.utilities import HeaderValidationFlags, validate_headers

from broker.http.http2.patch import Patch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from h2.events import Event

    from broker.http.http2.patch import Http2Bounds

_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VISIBLE = re.compile(rb"[\x21-\x7e]+")
_OF_REQUEST = HeaderValidationFlags(is_client=False, is_trailer=False, is_response_header=False, is_push_promise=False)


class MalformedRequests(Patch):
    """Resets the stream of a malformed request."""

    def __init__(self, *others: Any, bounds: Http2Bounds) -> None:
        super().__init__(*others, bounds=bounds)
        self.connection.config.validate_inbound_headers = False

    async def _handle_event(self, event: Event) -> None:
        if isinstance(event, RequestReceived) and (why := fault_of(event.headers or ())) is not None:
            self.bounds.refused(why)
            self.connection.reset_stream(event.stream_id, ErrorCodes.PROTOCOL_ERROR)
        else:
            await super()._handle_event(event)


def fault_of(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """Return why a request is malformed (RFC 9113, section 8.1.1), without quoting it; None if it is well-formed."""
    try:
        for _ in validate_headers(headers, _OF_REQUEST):
            pass
    except ProtocolError:
        return "a malformed, missing or forbidden header"
    for name, value in headers:
        if name == b":method":
            if not _TOKEN.fullmatch(value):
                return "the method is not a token"
        elif name in (b":path", b":authority", b":scheme"):
            if not _VISIBLE.fullmatch(value):
                return f"{name.decode()} has bytes beyond visible ASCII"
            if name == b":path" and not (value.startswith(b"/") or value == b"*"):
                return "the path does not begin with a slash"
        elif name != b":protocol" and not _TOKEN.fullmatch(name):
            return "the name of a header is not a token"
    return None
