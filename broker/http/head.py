"""The head of a request: whether it belongs to the lane, and how its body is framed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast
from urllib.parse import unquote

import httptools

from broker.http.exchange import TOPIC_VERBS, TRANSACTION_VERBS, Verb
from broker.http.request_ids import sane_request_id

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Every hot request starts with one of these; what does not is handed over at once.
PREFIXES = (b"POST /v1/namespaces/", b"POST /v1/transactions")
#: Larger heads are hypercorn's to refuse (its own bound is the same).
MAX_HEAD_BYTES = 16 << 10
MAX_LENGTH_DIGITS = 18
#: ``Head.length`` of a chunked body.
CHUNKED = -1


class HotPath(NamedTuple):
    """The path of a hot request, taken apart and percent-decoded."""

    verb: Verb
    namespace: str = ""
    topic: str = ""
    transaction: str = ""


@dataclass(slots=True, frozen=True)
class Head:
    """The head of a hot request."""

    path: HotPath
    query: str
    headers: Mapping[str, str]
    #: Bytes of the body, or ``CHUNKED``.
    length: int
    #: Whether the client wants the connection kept.
    keep_alive: bool
    #: Whether the answer may be chunked (HTTP/1.0 knows no chunks).
    chunks: bool
    expects_continue: bool
    #: The client's own request id, if it sent a sane one.
    request_id: str | None


class _Parts:
    """What httptools calls back with."""

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


def parse_head(data: bytes) -> Head | None:
    """The head in ``data``, which ends with its empty line; None when the request is not for the lane.

    The lane takes what every reader of HTTP understands alike. Anything that two readers could take differently
    (two lengths, a length beside chunks, folded lines, no host or two) is left to hypercorn, whose answer is then
    the only one.
    """
    parts = _Parts()
    parser = httptools.HttpRequestParser(parts)
    try:
        parser.feed_data(data)
    except httptools.HttpParserError:  # also an upgrade
        return None
    route = _route(parts.url)
    if route is None or not parts.complete or b"\r\n " in data or b"\r\n\t" in data:
        return None
    version = parser.get_http_version()
    headers = _joined(parts.headers)
    if headers is None or "upgrade" in headers or version not in ("1.0", "1.1"):
        return None
    length = _framing(headers, version)
    if length is None:
        return None
    tokens = [token.strip() for token in headers.get("connection", "").lower().split(",")]
    path, query = route
    return Head(
        path,
        query,
        headers,
        length,
        keep_alive=version == "1.1" and "close" not in tokens,
        chunks=version == "1.1",
        expects_continue=version == "1.1" and headers.get("expect", "").lower() == "100-continue",
        request_id=sane_request_id(headers.get("x-request-id")),
    )


def _route(url: bytes) -> tuple[HotPath, str] | None:
    """Path and query of a hot route (``exchange.HOT_PATHS``); None for any other path."""
    if not url.isascii():
        return None
    path, _, query = url.decode("ascii").partition("?")
    if "%" in path:
        path = unquote(path)
        if not path.isascii() or not path.isprintable():
            return None
    match path.split("/"):
        case ["", "v1", "namespaces", namespace, "topics", topic, verb] if verb in TOPIC_VERBS and namespace and topic:
            return HotPath(cast("Verb", verb), namespace, topic), query
        case ["", "v1", "transactions"]:
            return HotPath("begin"), query
        case ["", "v1", "transactions", transaction, verb] if verb in TRANSACTION_VERBS and transaction:
            return HotPath(cast("Verb", verb), transaction=transaction), query
    return None


def _joined(pairs: list[tuple[str, str]]) -> dict[str, str] | None:
    """The headers by name, repeated ones joined; None when one is repeated that must not be."""
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
    """The length of the body, or ``CHUNKED``; None where readers could differ."""
    if version == "1.1" and "host" not in headers:
        return None
    length = headers.get("content-length")
    coding = headers.get("transfer-encoding")
    if coding is not None:
        return CHUNKED if coding.lower() == "chunked" and length is None and version == "1.1" else None
    if length is None:
        return 0
    return int(length) if length.isascii() and length.isdigit() and len(length) <= MAX_LENGTH_DIGITS else None
