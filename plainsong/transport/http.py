"""Parses a daemon's URL into an address, for both clients."""

from __future__ import annotations

import socket
from functools import lru_cache
from urllib.parse import urlsplit

from plainsong.credentials import UNIX

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
