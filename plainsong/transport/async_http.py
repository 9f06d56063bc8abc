"""HTTP on event loops, by httpcore: headers, time limits, and the failures that mean that nothing was sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpcore2

from plainsong.calls import Answer, Failure, Send
from plainsong.transport.http import place_of

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Raised before a byte of the request left.
NOTHING_SENT = (
    httpcore2.ConnectError,
    httpcore2.ConnectTimeout,
    httpcore2.PoolTimeout,
    httpcore2.UnsupportedProtocol,
    httpcore2.LocalProtocolError,
    httpcore2.ProxyError,
)
TIME_OVER = (httpcore2.ReadTimeout, httpcore2.WriteTimeout)
#: Raised when the daemon may have executed the request; includes a truncated answer.
BROKEN = (httpcore2.NetworkError, httpcore2.ProtocolError, OSError)


def http_request(send: Send, timeout_s: float, more_headers: Sequence[tuple[bytes, bytes]] = ()) -> httpcore2.Request:
    """The request for httpcore. httpcore limits each step; the callers limit the whole exchange."""
    scheme, host, port, prefix, netloc = place_of(send.url)
    request = send.request
    headers = [(b"Host", netloc), (b"Content-Length", b"%d" % len(request.body))]
    headers += [(name.encode("ascii"), value.encode("latin-1")) for name, value in request.headers]
    headers += more_headers
    if scheme == b"unix":  # the pool knows the socket
        scheme, host = b"http", netloc
    limits = {"connect": send.connect_timeout_s, "read": timeout_s, "write": timeout_s, "pool": timeout_s}
    return httpcore2.Request(
        request.method.encode("ascii"),
        httpcore2.URL(scheme=scheme, host=host, port=port, target=prefix + request.path.encode("ascii")),
        headers=headers,
        content=request.body,
        extensions={"timeout": limits},
    )


def answer_of(response: httpcore2.Response, body: bytes) -> Answer:
    """Converts a complete answer."""
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
    return Answer(response.status, headers, body)


def failure_of(error: Exception, timeout_s: float) -> Failure:
    """Classifies an exception of the library or the operating system."""
    text = str(error) or type(error).__name__
    if isinstance(error, NOTHING_SENT):
        return Failure("connect", text, error)
    if isinstance(error, TIME_OVER):
        return Failure("timeout", f"no answer within {timeout_s:g} s", error)
    return Failure("lost", text, error)
