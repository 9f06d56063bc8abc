"""Heads of HTTP/1.1: the route of a request, and the framing of its body.

``hot_head`` parses, in a few microseconds, requests of hot routes that no two HTTP parsers could read differently. h11
parses all others strictly; a head that it refuses is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

import h11
import httptools

from broker.http.messages import sane_request_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from broker.http.route import Endpoint

#: Larger heads are refused.
MAX_HEAD_BYTES = 16 << 10
MAX_LENGTH_DIGITS = 18
#: ``Head.length`` of a chunked body.
CHUNKED = -1


class _Shape(NamedTuple):
    """A route's path, split at its slashes."""

    endpoint: Endpoint
    words: tuple[tuple[int, str], ...]
    places: tuple[tuple[str, int], ...]


class HotRoutes:
    """Finds the hot route of a method and path, in one or two look-ups by segment count and last segment."""

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self._shapes: dict[tuple[str, int, str], _Shape] = {}
        starts = set()
        for endpoint in endpoints:
            route = endpoint.route
            if not route.is_direct:
                continue
            segments = route.path.split("/")
            words = [(at, word) for at, word in enumerate(segments) if not word.startswith("{")]
            places = [(word[1:-1], at) for at, word in enumerate(segments) if word.startswith("{")]
            shape = _Shape(endpoint, tuple(words), tuple(places))
            last = "" if segments[-1].startswith("{") else segments[-1]
            # Two routes with the same key would need more look-ups.
            assert self._shapes.setdefault((route.method, len(segments), last), shape) is shape
            starts.add(f"{route.method} {route.path.partition('{')[0]}".encode())
        #: Every hot request starts with one of these.
        self.prefixes = tuple(sorted(starts))

    def find(self, method: str, path: str) -> tuple[Endpoint, Mapping[str, str]] | None:
        """Return the route and its path parameters, if none of them is empty."""
        segments = path.split("/")
        count = len(segments)
        shape = self._shapes.get((method, count, segments[-1])) or self._shapes.get((method, count, ""))
        if shape is None:
            return None
        for at, word in shape.words:
            if segments[at] != word:
                return None
        found = {place: segments[at] for place, at in shape.places}
        return (shape.endpoint, found) if all(found.values()) else None


@dataclass(slots=True, frozen=True)
class Head:
    """The head of a hot request."""

    endpoint: Endpoint
    #: Values of the route's path parameters: percent-decoded.
    path: Mapping[str, str]
    query: str
    headers: Mapping[str, str]
    #: Bytes of the body, or ``CHUNKED``.
    length: int
    #: True if the client wants the connection kept.
    keep_alive: bool
    #: True if the answer may be chunked (HTTP/1.0 has no chunks).
    chunks: bool
    expects_continue: bool
    #: The client's request id, if it sent a valid one.
    request_id: str | None


class _HeadParts:
    """Receives httptools' callbacks."""

    __slots__ = ("complete", "headers", "url")

    def __init__(self) -> None:
        self.url = b""
        self.headers: list[tuple[str, str]] = []
        self.complete = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.decode("latin-1").lower(), value.decode("latin-1").strip(" \t")))

    def on_headers_complete(self) -> None:
        self.complete = True


def hot_head(data: bytes, routes: HotRoutes) -> Head | None:
    """Return the head in ``data``, which ends with its empty line; None if no hot route serves the request.

    A head that two parsers could read differently (two lengths, a length and chunks, folded lines, no host or two) is
    not hot. No hot route can be upgraded, so an ``Upgrade`` header is ignored (RFC 9110, section 7.8). On a quick
    route, the application handles requests with an ``Upgrade`` header, a compressed body, or a body that is too large
    or of unknown length.
    """
    parts = _HeadParts()
    parser = httptools.HttpRequestParser(parts)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        pass  # raised at the end of the head
    except httptools.HttpParserError:
        return None
    route = _route(parser.get_method().decode("ascii"), parts.url, routes) if parts.complete else None
    if route is None or b"\r\n " in data or b"\r\n\t" in data:
        return None
    version = parser.get_http_version()
    headers = _joined(parts.headers)
    if headers is None or version not in ("1.0", "1.1"):
        return None
    length = _framing(headers, version)
    if length is None:
        return None
    tokens = [token.strip() for token in headers.get("connection", "").lower().split(",")]
    (endpoint, path), query = route
    if endpoint.route.quick and (
        not 0 <= length <= endpoint.route.body_bytes or "content-encoding" in headers or "upgrade" in headers
    ):
        return None
    return Head(
        endpoint,
        path,
        query,
        headers,
        length,
        keep_alive=version == "1.1" and "close" not in tokens,
        chunks=version == "1.1",
        expects_continue=version == "1.1" and headers.get("expect", "").lower() == "100-continue",
        request_id=sane_request_id(headers.get("x-request-id")),
    )


def _route(method: str, url: bytes, routes: HotRoutes) -> tuple[tuple[Endpoint, Mapping[str, str]], str] | None:
    """Return the route, its path parameters, and the query; None if no hot route serves the request."""
    if not url.isascii():
        return None
    path, _, query = url.decode("ascii").partition("?")
    if "%" in path:
        path = unquote(path)
        if not path.isascii() or not path.isprintable():
            return None
    found = routes.find(method, path)
    return None if found is None else (found, query)


def _joined(pairs: list[tuple[str, str]]) -> dict[str, str] | None:
    """Return the headers by name, with repeated ones joined; None if one is repeated that must be unique."""
    headers: dict[str, str] = {}
    for name, value in pairs:
        if name not in headers:
            headers[name] = value
        elif name in ("content-length", "transfer-encoding", "host", "expect"):
            return None
        else:
            headers[name] = f"{headers[name]}, {value}"
    return headers


def _framing(headers: Mapping[str, str], version: str) -> int | None:
    """Return the length of the body, or ``CHUNKED``; None if parsers could differ."""
    if version == "1.1" and "host" not in headers:
        return None
    length = headers.get("content-length")
    coding = headers.get("transfer-encoding")
    if coding is not None:
        return CHUNKED if coding.lower() == "chunked" and length is None and version == "1.1" else None
    if length is None:
        return 0
    return content_length(length)


def content_length(text: str) -> int | None:
    """Parse a Content-Length; None if it is not a number, or has more than ``MAX_LENGTH_DIGITS`` digits."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MAX_LENGTH_DIGITS else None


# --- other heads -----------------------------------------------------------------------------------


_END_OF_HEAD = re.compile(rb"\n\r?\n")
#: A target as clients send it to a proxy: the authority, and the rest.
_ABSOLUTE = re.compile(rb"(?i:https?)://((?:[0-9A-Za-z._~-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?)([/?].*)?", re.DOTALL)


class HeadRefused(Exception):
    """The head is not valid HTTP/1.1: it is answered with ``status``, and the connection ends."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass(slots=True, frozen=True)
class PlainHead:
    """The head of a request that the application answers."""

    method: str
    target: bytes
    """It begins with a slash, or is ``*``: a scheme and host before it, as sent to proxies, are removed."""
    version: str
    pairs: list[tuple[bytes, bytes]]
    """The headers as they were sent, with lower-case names; ``host`` is the target's where that names one."""
    length: int
    """Bytes of the body, or ``CHUNKED``."""
    keep_alive: bool
    """True if the client wants the connection kept."""
    chunks: bool
    """True if the answer may be chunked (HTTP/1.0 has no chunks)."""
    expects_continue: bool
    opens_websocket: bool
    """True if this is the GET that opens a WebSocket."""


def end_of_head(data: bytes) -> int:
    """Return the end of the head at the start of ``data``; 0 if it is incomplete.

    Raises:
      HeadRefused: it is over the bound, or is not the start of a head.
    """
    found = _END_OF_HEAD.search(data, 0, MAX_HEAD_BYTES + 1)
    if found is not None:
        return found.end()
    if len(data) > MAX_HEAD_BYTES:
        raise HeadRefused(431)
    if data and data[:1] < b"!" and data != b"\r":  # such as a TLS handshake; "\r" may start an empty line
        raise HeadRefused(400)
    return 0


def _parts_of_target(target: bytes, method: str) -> tuple[bytes, bytes | None]:
    """Return the path with its query, and the authority of an absolute target, else None. Raises HeadRefused."""
    if target.startswith(b"/") or (target == b"*" and method == "OPTIONS"):
        return target, None
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None:
        raise HeadRefused(400)
    authority, rest = absolute[1], absolute[2] or b"/"
    return rest if rest.startswith(b"/") else b"/" + rest, authority


def plain_head(data: bytes) -> PlainHead:
    """Return the head in ``data``, which ends with its empty line. Raises HeadRefused."""
    parser = h11.Connection(h11.SERVER)
    parser.receive_data(data)
    try:
        request = parser.next_event()
    except h11.RemoteProtocolError as error:
        raise HeadRefused(error.error_status_hint) from None
    if not isinstance(request, h11.Request):
        raise HeadRefused(400)
    method, version = request.method.decode("ascii"), request.http_version.decode("ascii")
    if version not in ("1.0", "1.1"):
        raise HeadRefused(505)
    if method != method.upper():  # methods are case-sensitive
        raise HeadRefused(501)
    target, authority = _parts_of_target(bytes(request.target), method)
    pairs = [(bytes(name), bytes(value)) for name, value in request.headers]
    if authority is not None:  # the target's authority replaces Host (RFC 9112, section 3.2.2)
        pairs = [(b"host", authority), *(pair for pair in pairs if pair[0] != b"host")]
    headers = dict(pairs)
    length = CHUNKED if b"transfer-encoding" in headers else int(headers.get(b"content-length", b"0"))
    tokens = _tokens(pairs, b"connection")
    upgrades = version == "1.1" and method == "GET" and b"upgrade" in tokens  # HTTP/1.0 has no upgrades
    return PlainHead(
        method,
        target,
        version,
        pairs,
        length,
        keep_alive=version == "1.1" and b"close" not in tokens,
        chunks=version == "1.1",
        expects_continue=parser.they_are_waiting_for_100_continue,
        opens_websocket=upgrades and b"websocket" in _tokens(pairs, b"upgrade"),
    )


def _tokens(pairs: list[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    """Return the members of a list that is spread across all headers of this name, in lower case."""
    return [token.strip() for each, value in pairs if each == name for token in value.lower().split(b",")]
