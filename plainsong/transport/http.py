"""Where a daemon's URL leads, for both clients."""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import urlsplit

#: Closes idle connections well before the daemon does (75 s), so that no request meets a closing one.
KEEP_ALIVE_S = 30.0


@lru_cache(maxsize=64)
def place_of(url: str) -> tuple[bytes, bytes, int | None, bytes, bytes]:
    """Scheme, host, port, path prefix and Host header of a daemon's URL."""
    parts = urlsplit(url)
    assert parts.hostname is not None  # checked with the settings
    return parts.scheme.encode(), parts.hostname.encode("idna"), parts.port, parts.path.encode(), parts.netloc.encode()
