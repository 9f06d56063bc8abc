"""A daemon's URL as an address, and the head of a request, for both clients."""

from __future__ import annotations

import socket
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from plainsong.credentials import UNIX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plainsong.calls import Send

#: Closes idle connections well before the daemon does (75 s), so that no request meets a closing one.
KEEP_ALIVE_S = 30.0


@lru_cache(maxsize=64)
def place_of(url: str) -> tuple[bytes, bytes, int | None, bytes, bytes]:
    """Scheme, host, port, path prefix and Host header of a daemon's URL; of a Unix socket the host is its path."""
    if url.startswith(UNIX):
        return b"unix", url.removeprefix(UNIX).encode(), None, b"", b"localhost"
    parts = urlsplit(url)
    assert parts.hostname is not None  # checked with the settings
    return parts.scheme.encode(), parts.hostname.encode("idna"), parts.port, parts.path.encode(), parts.netloc.encode()


def head_of(send: Send, more_headers: Sequence[tuple[bytes, bytes]] = ()) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """The target and the headers of a request."""
    _, _, _, prefix, netloc = place_of(send.url)
    request = send.request
    headers = [(b"Host", netloc), (b"Content-Length", b"%d" % len(request.body))]
    headers += [(name.encode("ascii"), value.encode("latin-1")) for name, value in request.headers]
    headers += more_headers
    return prefix + request.path.encode("ascii"), headers


def connect_unix(path: str, timeout_s: float) -> socket.socket:
    """A connection to a Unix socket. Raises OSError."""
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        raw.settimeout(timeout_s)
        raw.connect(path)
    except BaseException:
        raw.close()
        raise
    return raw
