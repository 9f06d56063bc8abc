"""Requests to servers other than a daemon: one at a time, bounded in time and size, and cancellable."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import httpcore2
from anyio.from_thread import start_blocking_portal

from plainsong.transport.async_http import Network, exchange

if TYPE_CHECKING:
    from concurrent.futures import Future
    from typing import Self

    from anyio.from_thread import BlockingPortal

    from plainsong.calls import Answer, Failure, Send

#: Other servers close idle connections early; a request that meets a closing one fails.
KEEP_ALIVE_S = 4.0
#: Bytes of an answer's body that are read; its beginning is enough.
MAX_ANSWER_BYTES = 1 << 16


class Outward:
    """Persistent connections to other servers, in a separate event loop. Use it in a ``with`` block.

    It checks certificates, follows no redirects, uses no proxies, and never sends the client's token.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._portal: BlockingPortal | None = None
        self._pool: httpcore2.AsyncConnectionPool | None = None

    def __enter__(self) -> Self:
        self._portal = self._stack.enter_context(start_blocking_portal("asyncio", name="plainsong-outward"))
        return self

    def __exit__(self, *_: object) -> None:
        if self._portal is not None:
            self._portal.call(self._forget)
            self._stack.close()

    def start(self, send: Send) -> Future[Answer | Failure]:
        """Send a request. The future completes within ``send.timeout_s``; cancelling it cancels the request."""
        assert self._portal is not None
        return self._portal.start_task_soon(self._carry, send)

    async def _carry(self, send: Send) -> Answer | Failure:
        if self._pool is None:
            self._pool = httpcore2.AsyncConnectionPool(
                max_connections=1, keepalive_expiry=KEEP_ALIVE_S, network_backend=Network()
            )
        return await exchange(self._pool, send, send.timeout_s, max_answer_bytes=MAX_ANSWER_BYTES)

    async def _forget(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.aclose()
