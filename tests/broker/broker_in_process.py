"""The whole application in one process: an in-memory store, real actors, HTTP without sockets, a settable clock."""

from __future__ import annotations

import json
import re
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import httpx
import trio

from actors.authority import keep_authority
from broker.assemble import assemble
from broker.config.config import config_of
from broker.daemon import Daemon
from broker.gauges import add_transaction_gauges
from broker.http.budgets import BodyBudget
from broker.http.gate import Gate, ServerParts
from broker.http.quart_app import build_application
from broker.http.reactor import Reactor, open_reactor
from broker.http.server import serve_http
from broker.metrics import Metrics
from storage.memory import MemoryStore
from tests.patience import PATIENCE_S
from tests.storage.faulty import FaultyStore

#: 2023-11-14, the time of the golden bytes.
START_MS = 1_700_000_000_000
TOPICS = "/v1/namespaces/ns/topics"
#: A path and query that need no encoding.
_PLAIN = re.compile(r"(?!.*/[./])/[\w/.~-]*(\?[\w.~=&-]*)?", re.ASCII)


def asgi_scope(method, path, query="", headers=MappingProxyType({})):
    """Return the scope that a server passes to the application for a request."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "server": ("localhost", None),
        "client": ("127.0.0.1", 123),
        "root_path": "",
    }


class SetClock:
    """A clock that advances only when it is set."""

    regressions = 0

    def __init__(self) -> None:
        self.ms = START_MS

    def now_ms(self) -> int:
        return self.ms


@dataclass
class InProcess:
    """The application, for requests, and its parts, for inspection."""

    service: Daemon
    clock: SetClock
    store: FaultyStore
    app: object
    asgi: Gate
    http: httpx.AsyncClient
    reactor: Reactor | None = None
    """The server's port, if ``http`` uses a socket."""

    @property
    def has_server(self) -> bool:
        return self.reactor is not None

    async def ask(self, method, path, body=None, headers=None):
        """Call the application as ``http`` would without a server; ``http`` would double the time of a request."""
        content = b"" if body is None else json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        given = {"host": "localhost", **self.http.headers}
        if body is not None or method in ("POST", "PUT", "PATCH"):
            given["content-length"] = str(len(content))
        if body is not None:
            given["content-type"] = "application/json"
        given |= {name.lower(): value for name, value in (headers or {}).items()}
        place, _, query = path.partition("?")
        scope = asgi_scope(method, place, query, given)
        waiting, answered = [{"type": "http.request", "body": content, "more_body": False}], trio.Event()
        begun, pieces = [], []

        async def receive():
            if waiting:
                return waiting.pop()
            await answered.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            if message["type"] == "http.response.start":
                begun.append(message)
                return
            pieces.append(message.get("body", b""))
            if not message.get("more_body", False):
                answered.set()

        await self.asgi(scope, receive, send)
        assert answered.is_set(), "the answer has no end"
        return httpx.Response(begun[0]["status"], headers=begun[0]["headers"], content=b"".join(pieces))

    async def call(self, method, path, *, status=200, code=None, **more):
        """Send a request, check the status and, if given, the problem's code, and return the answer."""
        whole = f"{path}?{httpx.QueryParams(more['params'])}" if more.get("params") else path
        if not self.has_server and more.keys() <= {"json", "headers", "params"} and _PLAIN.fullmatch(whole):
            answer = await self.ask(method, whole, more.get("json"), more.get("headers"))
        else:
            answer = await self.http.request(method, path, **more)
        assert answer.status_code == status, (method, path, answer.status_code, answer.text)
        if code is not None:
            assert answer.headers["content-type"] == "application/problem+json", (method, path)
            assert answer.json()["code"] == code, (method, path, answer.text)
        assert "html" not in answer.headers.get("content-type", ""), (method, path)
        return answer

    async def create(self, topic="t", **properties):
        await self.call("PUT", f"{TOPICS}/{topic}", json=properties)

    async def publish(self, *payloads, topic="t", ms=None, **more):
        """Return the ids of the first and the last message."""
        if ms is not None:
            self.clock.ms = ms
        answer = await self.call(
            "POST",
            f"{TOPICS}/{topic}/publish",
            json={"messages": list(payloads), **more},
            headers={"Prefer": "return=representation"},
        )
        return answer.json()["firstId"], answer.json()["lastId"]

    async def poll(self, topic="t", **body):
        return (await self.call("POST", f"{TOPICS}/{topic}/poll", json=body)).json()


@asynccontextmanager
async def in_process(*, store=None, clock=None, listener=None, copy=None, **values):
    """Run the application with settings named ``section__key``, on a new store or on ``store``.

    ``listener`` adds a server on a socket. ``hot``: as in the daemon; ``application``: every request goes to the
    application.
    """
    with TemporaryDirectory() as scratch:
        given = {
            "storage.data_dir": Path(scratch),
            **{name.replace("__", ".", 1): value for name, value in values.items()},
        }
        async with _in_process(config_of(given), store, clock, listener, copy) as running:
            yield running


@asynccontextmanager
async def _in_process(config, store, clock, listener, copy):
    store = FaultyStore(MemoryStore()) if store is None else store
    clock = SetClock() if clock is None else clock
    metrics = Metrics("1.2.3")
    await keep_authority(store, config.transactions.service)
    async with trio.open_nursery() as actors:
        service = await assemble(config, store, metrics, actors, clock=clock, copy=copy)
        await service.authority.start(actors)
        actors.start_soon(service.publishing.deadlines.run)
        add_transaction_gauges(metrics, service.authority, service.directory, service.pointers, clock)
        settings = config.http
        app = build_application(service.endpoints, settings, service.accounting)
        budget, stop = BodyBudget(settings.max_inflight_bytes, service.answers), trio.Event()
        check = service.origin_check()
        asgi = Gate(app, ServerParts(settings, budget, check, service.security.guard, service.stopping))
        serving = {"transport": httpx.ASGITransport(asgi), "base_url": "http://localhost"}
        reactor = None
        if listener is not None:

            async def serve(task_status):
                nonlocal reactor
                async with open_reactor(settings.keep_alive_s, service.directory.environment.run_queue) as reactor:
                    await serve_http(
                        settings,
                        service.endpoints if listener == "hot" else (),
                        lambda: app,
                        reactor=reactor,
                        binds=["127.0.0.1:0"],
                        budget=budget,
                        stop=stop,
                        grace_s=1,
                        check=check,
                        guard=service.security.guard,
                        begin=service.begin,
                        accounting=service.accounting,
                        task_status=task_status,
                    )

            (address,) = await actors.start(serve)
            serving = {"base_url": f"http://{address}"}
        # ``verify=False``: there is no TLS here, and loading the system's certificates takes tens of milliseconds.
        async with httpx.AsyncClient(**serving, verify=False, timeout=2 * PATIENCE_S) as http:
            yield InProcess(service, clock, store, app, asgi, http, reactor)
        service.stop()
        stop.set()
        await service.drained()
        actors.cancel_scope.cancel()
