"""Requests to servers other than a daemon: one at a time, bounded in time and size, and cancellable."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import anyio
import httpcore2
from anyio.from_thread import start_blocking_portal

from plainsong.calls import Answer, Failure, Send
from plainsong.transport.async_http import BROKEN, NOTHING_SENT, TIME_OVER, Network, answer_of, failure_of, http_request

if TYPE_CHECKING:
    from concurrent.futures import Future
    from typing import Self

    from anyio.from_thread import BlockingPortal

#: Other servers close idle connections early; a request that meets a closing one fails.
KEEP_ALIVE_S = 4.0
#: How much of an answer's body is read; the beginning suffices.
MAX_ANSWER_BYTES = 1 << 16


class Outward:
    """Kept connections to other servers, in an event loop of their own. Use it in a ``with`` block.

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
        """Send a request. The future is settled within ``send.timeout_s``; cancelling it cancels the request."""
        assert self._portal is not None
        return self._portal.start_task_soon(self._carry, send)

    async def _carry(self, send: Send) -> Answer | Failure:
        if self._pool is None:
            self._pool = httpcore2.AsyncConnectionPool(
                max_connections=1, keepalive_expiry=KEEP_ALIVE_S, network_backend=Network()
            )
        try:
            with anyio.move_on_after(send.timeout_s):
                response = await self._pool.handle_async_request(http_request(send, send.timeout_s))
                try:
                    return answer_of(response, await _beginning(response))
                finally:
                    await response.aclose()
        except (*NOTHING_SENT, *TIME_OVER, *BROKEN) as error:
            return failure_of(error, send.timeout_s)
        return Failure("timeout", f"no answer within {send.timeout_s:g} s")

    async def _forget(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.aclose()


async def _beginning(response: httpcore2.Response) -> bytes:
    body = b""
    async for chunk in response.aiter_stream():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            break
    return body[:MAX_ANSWER_BYTES]
