"""A relay in front of an instance that a test can freeze: its connections stay open, and nothing passes.

async with ways(nodes, "b") as way:     new connections to b use this way
    way.freeze()
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial

import trio


class Way:
    """Relays connections to one address in both directions until it is frozen."""

    def __init__(self, address):
        self._host, port = address.rsplit(":", 1)
        self._port = int(port)
        self._open = trio.Event()
        self._open.set()

    def freeze(self):
        self._open = trio.Event()

    async def run(self, task_status):
        async with trio.open_nursery() as nursery:
            (listener,) = await nursery.start(partial(trio.serve_tcp, self._serve, 0, host="127.0.0.1"))
            task_status.started(f"127.0.0.1:{listener.socket.getsockname()[1]}")

    async def _serve(self, stream):
        await self._open.wait()
        there = await trio.open_tcp_stream(self._host, self._port)
        async with stream, there, trio.open_nursery() as nursery:
            nursery.start_soon(self._pump, stream, there, nursery.cancel_scope)
            nursery.start_soon(self._pump, there, stream, nursery.cancel_scope)

    async def _pump(self, from_, to, connection):
        try:
            while data := await from_.receive_some():
                await self._open.wait()
                await to.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        connection.cancel()


@asynccontextmanager
async def ways(nodes, name):
    """Relay an instance: the other instances connect through it instead of directly."""
    way = Way(nodes[name].address)
    async with trio.open_nursery() as nursery:
        nodes.addresses[name] = await nursery.start(way.run)
        yield way
        nursery.cancel_scope.cancel()
