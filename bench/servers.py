"""Servers for comparison, each in its own process: the listener with an empty handler, bare ASGI, waiting ASGI."""

from __future__ import annotations

import json
import multiprocessing
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trio
from hypercorn.config import Config
from hypercorn.trio import serve as hypercorn_serve

from bench.doors import live, serve_bare, serve_listener

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

__all__ = ["Server", "serve_bare", "serve_listener", "serve_waiting", "server"]


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    port: int
    pid: int


@contextmanager
def server(serve: Callable[[Connection], None]) -> Iterator[Server]:
    """Run ``serve`` in its own process until the end; it sends its port through the pipe."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # so that recv() fails if the server dies
    assert process.pid is not None  # it has been started
    try:
        yield Server(ours.recv(), process.pid)
    finally:
        process.terminate()
        process.join()


class _Waiting:
    """The minimal ASGI application in which polls wait for a publish: one event, no messages."""

    def __init__(self) -> None:
        self._published = trio.Event()
        self._waiting = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await live(receive, send)
            return
        while (await receive()).get("more_body"):
            pass
        body = b"[]"
        if scope["path"].endswith("/poll"):
            self._waiting += 1
            await self._published.wait()
            self._waiting -= 1
        elif scope["path"].endswith("/publish"):
            body = json.dumps({"lastId": "0" * 40}).encode()
            self._published.set()
            self._published = trio.Event()
        else:
            body = f"plainsong_parked_polls {self._waiting}\n".encode()
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def serve_waiting(told: Connection) -> None:
    """Serve an application of waiting polls on hypercorn's trio worker, on a free port, and send the port."""

    async def main() -> None:
        config = Config()
        config.bind = ["127.0.0.1:0"]
        config.backlog = 4096
        config.errorlog = None
        config.keep_alive_max_requests = 1 << 30
        config.keep_alive_timeout = 300
        async with trio.open_nursery() as nursery:

            async def started(task_status: trio.TaskStatus[list[str]]) -> None:
                await hypercorn_serve(_Waiting(), config, task_status=task_status)

            addresses = await nursery.start(started)
            told.send(int(addresses[0].rpartition(":")[2]))

    trio.run(main)
