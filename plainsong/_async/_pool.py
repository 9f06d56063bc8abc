"""The HTTP connections of a client on an event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import httpcore2

from plainsong.calls import Failure
from plainsong.errors import Closed
from plainsong.transport.async_http import BROKEN, NOTHING_SENT, TIME_OVER, answer_of, failure_of, http_request
from plainsong.transport.http import KEEP_ALIVE_S

if TYPE_CHECKING:
    from plainsong.calls import Answer, Send
    from plainsong.settings import Settings

#: Added to the total limit, so that httpcore's limits, which know whether anything was sent, expire first.
_GRACE_S = 0.05


class Pool:
    """Keep-alive connections to all daemons of a client, for one event loop."""

    def __init__(self, settings: Settings) -> None:
        self._token = settings.token
        self._max_connections = settings.max_connections
        self._pool: httpcore2.AsyncConnectionPool | None = None
        self._closed = False

    async def carry(self, send: Send) -> Answer | Failure:
        """Sends a request and returns its answer. Raises Closed."""
        if self._closed:
            raise Closed("the client is closed")
        if self._pool is None:
            self._pool = httpcore2.AsyncConnectionPool(
                max_connections=self._max_connections, keepalive_expiry=KEEP_ALIVE_S
            )
        try:
            with anyio.move_on_after(send.timeout_s + _GRACE_S):
                response = await self._pool.handle_async_request(http_request(send, self._token, send.timeout_s))
                try:
                    body = b"".join([chunk async for chunk in response.aiter_stream()])
                finally:
                    await response.aclose()
                return answer_of(response, body)
        except (*NOTHING_SENT, *TIME_OVER, *BROKEN) as error:
            return failure_of(error, send.timeout_s)
        return Failure("timeout", f"no answer within {send.timeout_s:g} s")

    async def aclose(self) -> None:
        """Close all connections. Idempotent."""
        self._closed = True
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.aclose()
