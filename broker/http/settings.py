"""What the HTTP front end can be told: bounds and time-outs, under the names of the configuration's ``http`` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from broker.config import Config

KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Bounds of both doors. Bytes are bytes, times are seconds.

    Raises:
      ValueError: ``max_inflight_bytes`` could not hold one body and what it decompresses to.
    """

    #: Serve the hot routes without hypercorn.
    lane: bool = True
    #: Of one request, as sent and decompressed; beyond it 413 ``body_too_large``.
    max_body_bytes: int = 64 * MIB
    #: Open at a time; beyond it 503 ``overloaded``.
    max_connections: int = 10_000
    #: Bodies of all requests under way; beyond it 503 ``overloaded``.
    max_inflight_bytes: int = 256 * MIB
    #: Answers that wait for their readers, in bytes; beyond it pages are cut, then 503 ``overloaded``.
    max_answer_bytes: int = 256 * MIB
    #: How long a connection may rest between requests.
    keep_alive_s: float = 75.0
    #: From the first byte of a request to the end of its head.
    header_timeout_s: float = 10.0
    #: From the end of the head to the end of the body, and one second more per 16 KiB received.
    body_timeout_s: float = 30.0
    #: How long a reader may take nothing of its answer.
    send_timeout_s: float = 30.0
    #: Answers shorter than this are never compressed.
    gzip_min_bytes: int = 1 * KIB

    def __post_init__(self) -> None:
        if self.max_inflight_bytes < 2 * self.max_body_bytes:
            raise ValueError(
                f"http.max_inflight_bytes ({self.max_inflight_bytes}) must be at least twice "
                f"http.max_body_bytes ({self.max_body_bytes})"
            )


def http_settings(config: Config) -> HttpSettings:
    """What the configuration says of them."""
    http = config.http
    return HttpSettings(
        lane=http.lane,
        max_body_bytes=http.max_body_bytes,
        max_connections=http.max_connections,
        max_inflight_bytes=http.max_inflight_bytes,
        max_answer_bytes=http.max_answer_bytes,
        keep_alive_s=http.keep_alive_s,
        header_timeout_s=http.header_timeout_s,
        body_timeout_s=http.body_timeout_s,
        send_timeout_s=http.send_timeout_s,
        gzip_min_bytes=http.gzip_min_bytes,
    )
