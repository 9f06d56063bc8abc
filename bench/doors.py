"""Cost of the HTTP layer alone: an empty response from the listener, and from a bare ASGI application on hypercorn.

    python -m bench.doors [--requests 20000] [--connections 1,16,64]

Prints one JSON object per line and a ratio per number of connections. Each server runs in its own process, as does the
load generator (``bench/load.py``).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio
from hypercorn.config import Config
from hypercorn.trio import serve as hypercorn_serve

from broker.api.routes import ROUTES
from broker.config.sections import HttpConfig
from broker.http.budgets import BodyBudget
from broker.http.messages import Answer, Answered, Request
from broker.http.reactor import open_reactor
from broker.http.route import Endpoint
from broker.http.server import serve_http

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

LOAD = Path(__file__).with_name("load.py")


async def live(receive: Any, send: Any) -> None:
    """Handle the lifespan protocol without doing anything: hypercorn sometimes fails if this simply returns."""
    while (message := await receive())["type"] != "lifespan.shutdown":
        await send({"type": f"{message['type']}.complete"})
    await send({"type": "lifespan.shutdown.complete"})


async def bare(scope: Any, receive: Any, send: Any) -> None:
    """The minimal ASGI application: read the body, answer 200 without a body."""
    if scope["type"] == "lifespan":
        for step in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{step}.complete"})
        return
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def empty(request: Request, answered: Answered) -> None:
    """The listener's handler: answer 200 without a body."""
    del request
    answered(Answer(200))


def serve_listener(reports: Connection) -> None:
    """Serve the listener with the handler ``empty`` on a free port, and send the port."""

    async def main() -> None:
        settings = HttpConfig()
        budget = BodyBudget(settings.max_inflight_bytes)
        async with trio.open_nursery() as nursery:

            async def server(task_status: trio.TaskStatus[list[str]]) -> None:
                async with open_reactor(settings.keep_alive_s) as reactor:
                    await serve_http(
                        settings,
                        [Endpoint(each, empty) for each in ROUTES if each.name == "publish"],
                        lambda: bare,
                        reactor=reactor,
                        binds=["127.0.0.1:0"],
                        budget=budget,
                        stop=trio.Event(),
                        grace_s=1,
                        task_status=task_status,
                    )

            addresses = await nursery.start(server)
            reports.send(int(addresses[0].rpartition(":")[2]))

    trio.run(main)


def serve_bare(reports: Connection) -> None:
    """Serve ``bare`` on hypercorn's unmodified trio worker on a free port, and send the port."""

    async def main() -> None:
        config = Config()
        config.bind = ["127.0.0.1:0"]
        config.errorlog = None
        config.keep_alive_max_requests = 1 << 30
        async with trio.open_nursery() as nursery:

            async def server(task_status: trio.TaskStatus[list[str]]) -> None:
                await hypercorn_serve(bare, config, task_status=task_status)

            addresses = await nursery.start(server)
            reports.send(int(addresses[0].rpartition(":")[2]))

    trio.run(main)


def measure(port: int, connections: int, requests: int, *more: str) -> dict[str, Any]:
    """Run the load generator once."""
    command = [sys.executable, str(LOAD), "--port", str(port), "--connections", str(connections)]
    command += ["--requests", str(requests), "--warm-up", str(max(100, requests // 10)), *more]
    result: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The listener's empty answer compared with that of a bare ASGI application."
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--connections", default="1,16,64")
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    ports = {}
    processes = []
    for name, target in (("listener", serve_listener), ("bare", serve_bare)):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=target, args=(theirs,), daemon=True)
        process.start()
        theirs.close()  # so that recv() fails if the server does not start
        processes.append(process)
        ports[name] = ours.recv()
    for connections in map(int, args.connections.split(",")):
        listener = measure(ports["listener"], connections, args.requests, "--body-size", "100")
        bare_rate = measure(ports["bare"], connections, max(1000, args.requests // 8), "--body-size", "100")
        ratio = listener["requests_per_s"] / bare_rate["requests_per_s"]
        for name, result in (("listener", listener), ("bare", bare_rate)):
            print(json.dumps({"server": name, **result}))
        print(json.dumps({"connections": connections, "listener_over_bare": round(ratio, 2)}))
    for process in processes:
        process.terminate()
        process.join()


if __name__ == "__main__":
    main()
