"""Servers with toy handlers, and clients that speak raw bytes."""

from __future__ import annotations

import gc
import json
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import trio
import trio.testing
from quart import Response
from quart.routing import QuartMap
from quart_trio import QuartTrio

from broker.api.routes import ROUTES
from broker.config.sections import HttpConfig
from broker.http.acceptance import Acceptance
from broker.http.budgets import AnswerBudget, BodyBudget
from broker.http.handlers import RequestTasks
from broker.http.messages import Answer, Request
from broker.http.quart_app import hot_view, install_errors, rule_of
from broker.http.reactor import open_reactor
from broker.http.route import Endpoint
from broker.http.server import serve_http
from broker.security.guard import OPEN
from plainsong.protocol.errors import Overloaded, TopicNotFound
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

    from broker.http.messages import Begin
    from broker.http.origin_check import OriginCheck
    from broker.security.guard import Guard
    from broker.security.peer import Peer

#: Time-outs too long to expire on a stalled machine; a test of a time-out sets its own.
SETTINGS = HttpConfig(
    max_body_bytes=1 << 20, max_inflight_bytes=4 << 20, keep_alive_s=1000, header_timeout_s=1000, body_timeout_s=1000
)
#: The longest step of a clock that jumps.
TICK_S = 0.05


@dataclass
class Toys:
    """The toy handlers, and a record of their calls."""

    tasks: RequestTasks
    release: trio.Event = field(default_factory=trio.Event)
    parked: int = 0
    cancelled: trio.Event = field(default_factory=trio.Event)
    closed: trio.Event = field(default_factory=trio.Event)
    built: int = 0
    """Number of times that the application was built."""
    built_under: tuple[float, bool] | None = None
    """The interpreter's switch interval at that time, and whether the garbage collector was enabled."""
    by_application: int = 0
    """Requests of hot routes that the application answered."""
    peers: list[Peer] = field(default_factory=list)
    """The sender of each request to ``store``."""

    async def publish(self, request: Request) -> Answer:
        if request.path["topic"] == "missing":
            raise TopicNotFound("no topic 'missing'", hint="create it")
        if request.path["topic"] == "bug":
            raise ZeroDivisionError("a secret")
        if request.path["topic"] == "full":
            raise Overloaded
        if request.path["topic"] == "injection":
            return Answer(200, b"", None, [("Plainsong-Last-Id", request.query + "\r\nX-Evil: 1")])
        return Answer(200)

    async def store(self, request: Request) -> Answer:
        """Echo the request."""
        self.peers.append(request.peer)
        seen = {
            "namespace": request.path["namespace"],
            "topic": request.path["topic"],
            "query": request.query,
            "headers": {name: request.headers[name] for name in sorted(request.headers) if name.startswith("x-echo")},
            "body": request.body.hex(),
        }
        return Answer(200, json.dumps(seen).encode(), "application/json", [("Plainsong-End", "end")])

    async def transact(self, route: str, request: Request) -> Answer:
        """Echo a request to a route of the transaction service."""
        seen = [route, dict(request.path), request.query, request.body.hex()]
        return Answer(200, json.dumps(seen).encode(), "application/json")

    @property
    def endpoints(self) -> list[Endpoint]:
        """The routes that are served without the application."""
        own = {"publish": self.publish, "store": self.store, "rollback": self.rollback, "poll": self.poll}
        return [
            Endpoint(each, self.tasks.adapt(own.get(each.name, partial(self.transact, each.name))))
            for each in ROUTES
            if each.is_direct
        ]

    async def rollback(self, request: Request) -> Answer:
        """Stream an answer; the topic says how many bytes are sent, and how many are announced."""
        topic = request.path["topic"]
        length = int(topic.removeprefix("length-")) if topic.startswith("length-") else None
        return Answer(200, self._stream(topic), "avro/binary", length=length)

    async def _stream(self, topic: str) -> AsyncGenerator[bytes, None]:
        try:
            if topic == "broken-at-once":
                raise TopicNotFound("gone before the first byte")
            for number in range(1_000_000 if topic == "endless" else 3):
                yield b"%d;" % number * (20_000 if topic == "endless" else 1)
                await trio.lowlevel.checkpoint()
                if topic == "broken":
                    raise ZeroDivisionError("in the middle")
                if topic == "refused":
                    raise Overloaded("no room in the middle")
        finally:
            self.closed.set()

    async def poll(self, request: Request) -> Answer:
        """Park until released, unless the wait is already over."""
        if request.waited_ms:
            return Answer(200, b"over", "avro/binary")
        self.parked += 1
        try:
            await self.release.wait()
        except trio.Cancelled:
            self.cancelled.set()
            raise
        finally:
            self.parked -= 1
        return Answer(200, b"\0", "avro/binary")


@dataclass
class Secured:
    """TLS for a listener, with a context that a test may change, and the results of handshakes."""

    serving: ssl.SSLContext
    results: list[str] = field(default_factory=list)

    def context(self) -> ssl.SSLContext:
        return self.serving

    def count(self, result: str) -> None:
        self.results.append(result)

    async def counted(self, results: int) -> list[str]:
        """Wait for that number of results and return them."""
        with trio.fail_after(PATIENCE_S):
            while len(self.results) < results:
                await trio.testing.wait_all_tasks_blocked()
        return self.results


@dataclass
class Listener:
    """A running server."""

    port: int
    toys: Toys
    budget: BodyBudget
    stop: trio.Event
    ended: trio.Event

    async def connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.port)


def toy_app(toys: Toys, settings: HttpConfig) -> QuartTrio:
    app = QuartTrio("toys")
    app.url_map = QuartMap(strict_slashes=False, merge_slashes=False)
    install_errors(app)
    for endpoint in toys.endpoints:
        route = endpoint.route
        view = counted(toys, hot_view(endpoint, settings, Acceptance(())))
        app.add_url_rule(rule_of(route.path), route.name, view, methods=[route.method])

    @app.get("/ping")
    async def ping() -> str:
        return "OK"

    @app.get("/events")
    async def events() -> Response:
        return Response("data: secret\n\n", content_type="text/event-stream")

    return app


def counted(toys: Toys, view: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def counting(**places: str) -> Any:
        toys.by_application += 1
        return await view(**places)

    return counting


@asynccontextmanager
async def running(
    settings: HttpConfig = SETTINGS,
    *,
    bind: str = "127.0.0.1:0",
    grace_s: float = 5,
    tls: Secured | None = None,
    begin: Begin | None = None,
    check: OriginCheck | None = None,
    guard: Guard = OPEN,
    hot: bool = True,
    app: Any = None,
    **changes: Any,
) -> AsyncIterator[Listener]:
    """Run a server with toy handlers.

    Args:
      hot: if False, the application answers every request.
      app: an application to use instead of the toy application.
    """
    settings = replace(settings, **changes)
    budget = BodyBudget(settings.max_inflight_bytes, AnswerBudget(settings.max_answer_bytes))
    stop, ended = trio.Event(), trio.Event()

    def build() -> Any:
        toys.built += 1
        toys.built_under = (sys.getswitchinterval(), gc.isenabled())
        return toy_app(toys, settings) if app is None else app

    async def serve(task_status: trio.TaskStatus[list[str]]) -> None:
        async with open_reactor(settings.keep_alive_s) as reactor:
            await serve_http(
                settings,
                toys.endpoints if hot else (),
                build,
                reactor=reactor,
                binds=[bind],
                budget=budget,
                stop=stop,
                grace_s=grace_s,
                tls=tls,
                begin=begin,
                check=check,
                guard=guard,
                task_status=task_status,
            )
        ended.set()

    async with trio.open_nursery() as ticking:
        if isinstance(trio.lowlevel.current_clock(), trio.testing.MockClock):
            ticking.start_soon(_tick)
        async with trio.open_nursery() as nursery:
            toys = Toys(RequestTasks(nursery))
            addresses = await nursery.start(serve)
            yield Listener(int(addresses[0].rpartition(":")[2]), toys, budget, stop, ended)
            toys.release.set()
            stop.set()
            with trio.fail_after(PATIENCE_S):
                await ended.wait()
        ticking.cancel_scope.cancel()


async def _tick() -> None:
    """Make a clock that jumps take small steps: it jumps while a thread works, for example to load the application."""
    while True:  # noqa: ASYNC110 - nothing is awaited
        await trio.sleep(TICK_S)


def post(path: str, body: bytes = b"", *headers: str) -> bytes:
    """Return the bytes of a POST; ``path`` is ``topic/verb`` under a namespace, or begins with a slash."""
    whole = path if path.startswith("/") else f"/v1/namespaces/ns/topics/{path}"
    lines = [f"POST {whole} HTTP/1.1", "Host: localhost", *headers]
    if not any(header.lower().startswith(("content-length", "transfer-encoding")) for header in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        return json.loads(self.body)["code"]


class Reader:
    """Reads answers from a stream, one after another."""

    def __init__(self, stream: trio.abc.ReceiveStream) -> None:
        self.stream = stream
        self.rest = b""

    async def reply(self) -> Reply:
        with trio.fail_after(PATIENCE_S):
            return await self._reply()

    async def _reply(self) -> Reply:
        head = await self._until(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")[:-2]
        headers = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            name, value = name.lower(), value.strip()
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        status = int(lines[0].split(" ")[1])
        if status == 100:
            return Reply(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            return Reply(status, headers, await self._chunks())
        if "content-length" in headers:
            return Reply(status, headers, await self._exactly(int(headers["content-length"])))
        return Reply(status, headers, await self._to_end())

    async def _chunks(self) -> bytes:
        body = b""
        while size := int(await self._until(b"\r\n"), 16):
            body += await self._exactly(size)
            await self._exactly(2)
        await self._exactly(2)
        return body

    async def _until(self, mark: bytes) -> bytes:
        while mark not in self.rest:
            await self._more()
        found, _, self.rest = self.rest.partition(mark)
        return found + mark

    async def _exactly(self, size: int) -> bytes:
        while len(self.rest) < size:
            await self._more()
        found, self.rest = self.rest[:size], self.rest[size:]
        return found

    async def _to_end(self) -> bytes:
        while data := await self.stream.receive_some():
            self.rest += data
        return self.rest

    async def _more(self) -> None:
        data = await self.stream.receive_some()
        if not data:
            raise EOFError(f"closed after {self.rest!r}")
        self.rest += data

    async def at_end(self) -> bool:
        """True if the server closes the connection without sending anything more."""
        with trio.fail_after(PATIENCE_S):
            try:
                return not self.rest and await self.stream.receive_some() == b""
            except trio.BrokenResourceError:
                return True


async def ask(listener: Listener, request: bytes) -> Reply:
    """Send one request on a new connection, and return the answer."""
    async with await listener.connect() as stream:
        await stream.send_all(request)
        return await Reader(stream).reply()
