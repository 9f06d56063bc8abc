"""The wire for threads: safe to share between them, and its own in every process."""

from __future__ import annotations

import os
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING

import httpcore2

from plainsong.errors import Closed
from plainsong.transport.shared import (
    BROKEN,
    KEEP_ALIVE_S,
    NOTHING_SENT,
    TIME_OVER,
    answer_of,
    failure_of,
    http_request,
)

if TYPE_CHECKING:
    from plainsong.core.effects import Answer, Failure, Send
    from plainsong.settings import Settings


class Wire:
    """Kept connections to all daemons of a client.

    A forked child gets connections of its own; those of its parent are left alone, never closed from there.
    """

    def __init__(self, settings: Settings) -> None:
        self._token = settings.token
        self._max_connections = settings.max_connections
        self._pid = 0
        self._pool: httpcore2.ConnectionPool | None = None
        self._lock = Lock()
        self._closed = False
        #: Pools of the processes we were forked from: kept, so that nobody tidies them up from here.
        self._of_parents: list[httpcore2.ConnectionPool] = []

    def carry(self, send: Send) -> Answer | Failure:
        """One request and its answer. Raises Closed."""
        pool = self._pool if self._pid == os.getpid() else None
        if pool is None:
            pool = self._opened()
        over_s = monotonic() + send.timeout_s
        try:
            response = pool.handle_request(http_request(send, self._token, send.timeout_s))
            try:
                body = _whole_body(response, over_s)
            finally:
                response.close()
        except (*NOTHING_SENT, *TIME_OVER, *BROKEN) as error:
            return failure_of(error, send.timeout_s)
        return answer_of(response, body)

    def close(self) -> None:
        """Close all connections; what is under way on them fails. Idempotent."""
        self._closed = True
        pool, self._pool = self._pool, None
        if pool is not None and self._pid == os.getpid():
            pool.close()

    def _opened(self) -> httpcore2.ConnectionPool:
        pid = os.getpid()
        if self._pid not in (0, pid):
            self._lock = Lock()  # a thread of the parent may hold the old one
        with self._lock:
            if self._closed:
                raise Closed("the client is closed")
            if self._pid != pid or self._pool is None:
                if self._pool is not None:
                    self._of_parents.append(self._pool)
                self._pool = httpcore2.ConnectionPool(
                    max_connections=self._max_connections, keepalive_expiry=KEEP_ALIVE_S
                )
                self._pid = pid
            return self._pool


def _whole_body(response: httpcore2.Response, over_s: float) -> bytes:
    chunks = []
    for chunk in response.iter_stream():
        chunks.append(chunk)
        if monotonic() > over_s:
            raise httpcore2.ReadTimeout("the answer came too slowly")
    return b"".join(chunks)
