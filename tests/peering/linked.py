"""Both sides of a link in one process, over an in-memory connection that a test can cut, stall and inspect."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio
from trio.testing import memory_stream_pair

from broker.link.client import Link
from broker.link.flow import Reply
from broker.link.server import Call, in_task, serve_link
from broker.link.wire import BETWEEN_INSTANCES, LinkBounds

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Linked:
    """A link, the streams of both sides, and the calls that reached the served side."""

    def __init__(self, bounds: LinkBounds) -> None:
        self.mine, self.theirs = memory_stream_pair()
        self.link = Link(self.mine, bounds, peer="theirs")
        self.stop = trio.Event()
        self.served_ended = trio.Event()


def linked(dispatch, bounds: LinkBounds = BETWEEN_INSTANCES, served: LinkBounds | None = None, **more):
    """Run both sides, each call in a task; cut the connection on exit."""
    return linked_callbacks(in_task(dispatch), bounds, served, **more)


@asynccontextmanager
async def linked_callbacks(
    handler, bounds: LinkBounds = BETWEEN_INSTANCES, served: LinkBounds | None = None, **more
) -> AsyncIterator[Linked]:
    """Run both sides, with a handler that is called without a task; cut the connection on exit."""
    pair = Linked(bounds)

    async def serve() -> None:
        await serve_link(pair.theirs, handler, served or bounds, stop=pair.stop, peer="mine", **more)
        pair.served_ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(pair.link.run)
        nursery.start_soon(serve)
        yield pair
        nursery.cancel_scope.cancel()


async def echo(call: Call) -> Reply:
    """Answer with the request's value and body."""
    return Reply(call.value, call.body)


class Caught:
    """Runs a call in a task, and stores its error."""

    error: BaseException | None = None

    async def run(self, awaitable) -> None:
        """Await the call, and store its error."""
        try:
            await awaitable
        except Exception as error:  # noqa: BLE001 - the call records every error
            self.error = error
