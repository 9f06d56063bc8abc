"""Patch: hypercorn waits for the application to read each part of a body, forever, even after it has ended.

Meanwhile nothing would be read from the connection, so its other streams would stall.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import trio
from hypercorn.trio.task_group import TaskGroup, _handle

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from hypercorn.config import Config
    from hypercorn.typing import AppWrapper, ASGIReceiveCallable, ASGIReceiveEvent, ASGISendEvent, Scope


class UnreadBodies(TaskGroup):
    """Hypercorn's task group of a connection, for applications that do not read the whole body."""

    async def spawn_app(
        self, app: AppWrapper, config: Config, scope: Scope, send: Callable[[ASGISendEvent | None], Awaitable[None]]
    ) -> Callable[[ASGIReceiveEvent], Awaitable[None]]:
        """Start a request; return the function that passes events to it."""
        sending, receiving = trio.open_memory_channel[Any](config.max_app_queue_size)

        async def receive() -> Any:
            try:
                return await receiving.receive()
            except trio.EndOfChannel:
                return {"type": "http.disconnect"}

        async def put(message: ASGIReceiveEvent) -> None:
            if message["type"] == "http.disconnect":
                sending.close()
                return
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await sending.send(message)

        async def send_on(message: ASGISendEvent | None) -> None:
            if message is None:
                receiving.close()
            await send(message)

        asked: ASGIReceiveCallable = receive
        assert self._nursery is not None
        self._nursery.start_soon(
            _handle, app, config, scope, asked, send_on, trio.to_thread.run_sync, trio.from_thread.run
        )
        return put
