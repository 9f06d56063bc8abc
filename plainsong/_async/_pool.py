"""The HTTP connections of a client on an event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpcore2

from plainsong.calls import Answer
from plainsong.errors import Closed
from plainsong.transport.async_http import Network, exchange, running_loop
from plainsong.transport.http import KEEP_ALIVE_S, place_of

if TYPE_CHECKING:
    import ssl

    from plainsong.calls import Failure, Send
    from plainsong.settings import Settings


class Pool:
    """Keep-alive connections to all daemons of a client, for one event loop."""

    def __init__(self, settings: Settings) -> None:
        self._credentials = settings.credentials
        self._max_connections = settings.max_connections
        #: By scheme; for Unix sockets by path.
        self._pools: dict[str, httpcore2.AsyncConnectionPool] = {}
        #: The TLS context of new connections, and the pools with older ones, from before the files changed.
        self._context: ssl.SSLContext | None = None
        self._replaced: list[httpcore2.AsyncConnectionPool] = []
        self._closed = False
        #: The event loop of the connections.
        self._loop: object = None

    async def carry(self, send: Send) -> Answer | Failure:
        """Sends a request and returns its answer; sends it again if its token has been replaced. Raises Closed."""
        token = self._credentials.token
        answer = await self._carry(send)
        if isinstance(answer, Answer) and answer.status == 401 and self._credentials.read_again(token):
            return await self._carry(send)
        return answer

    def _pool_for(self, url: str) -> httpcore2.AsyncConnectionPool:
        if self._closed:
            raise Closed("the client is closed")
        if self._loop is not (loop := running_loop()):
            # The connections' event loop has ended, so they can no longer be closed.
            self._loop, self._pools, self._replaced = loop, {}, []
        scheme, path, *_ = place_of(url)
        # Made only for https, since it takes a moment.
        kind = path.decode() if scheme == b"unix" else scheme.decode()
        if scheme == b"https" and self._context is not (context := self._credentials.tls_context()):
            self._context = context
            if kind in self._pools:
                self._replaced.append(self._pools.pop(kind))
        pool = self._pools.get(kind)
        if pool is None:
            pool = self._pools[kind] = httpcore2.AsyncConnectionPool(
                max_connections=self._max_connections,
                keepalive_expiry=KEEP_ALIVE_S,
                ssl_context=self._context if scheme == b"https" else None,
                network_backend=Network(),
                uds=kind if scheme == b"unix" else None,
            )
        return pool

    async def _carry(self, send: Send) -> Answer | Failure:
        if self._replaced and self._loop is running_loop():
            await self._close_replaced()
        # No await before its use: a pool that is replaced in between would be closed.
        pool = self._pool_for(send.url)
        # httpcore's time-out applies to each piece of a response, so limit the whole here.
        longest_s = send.timeout_s if send.longest_s is None else send.longest_s
        return await exchange(pool, send, longest_s, self._credentials.headers(send.url))

    async def _close_replaced(self) -> None:
        """Close the pools that were replaced and have no request under way."""
        for pool in list(self._replaced):
            if all(connection.is_idle() for connection in pool.connections):
                self._replaced.remove(pool)
                await pool.aclose()

    async def aclose(self) -> None:
        """Close all connections. Idempotent."""
        self._closed = True
        pools, self._pools, self._replaced = [*self._pools.values(), *self._replaced], {}, []
        if self._loop is running_loop():
            for pool in pools:
                await pool.aclose()
