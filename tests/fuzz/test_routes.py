"""Every route of a real daemon, with schemathesis's requests: some that openapi.json allows, and others.

No answer is a 500 or differs from the description, and no request hangs; afterwards the daemon has logged no error and
every row in its store is sound. The long run sends 2000 requests to each route.
"""

from __future__ import annotations

import json
import subprocess
from http.client import HTTPConnection
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from broker.api.description.openapi import description
from broker.api.routes import ROUTES
from plainsong.protocol.version import VERSION
from tests.daemon.harness import PLAINSONG, Daemon, clean_environ
from tests.patience import PATIENCE_S

DOCUMENT = description(ROUTES, VERSION)
METHODS = ("get", "put", "post", "delete")
#: Requests to each route in the ordinary run, some of them invalid.
USUAL = 5
LONG = 1_000
STATUSES = [not_a_server_error, status_code_conformance]
SHAPES = [*STATUSES, content_type_conformance, response_headers_conformance, response_schema_conformance]
SETS = (
    "poll.max_wait_ms=20",
    "retention.delete_grace_s=3600",
    "topic.max_open=200",
    "backup.hold_s=1",
    "storage.min_free_bytes=0",
    "console.enabled=true",
)
PRODUCER, READER = "press-1", "archive"
schemathesis.openapi.media_type("avro/binary", st.binary(max_size=200))
schemathesis.openapi.media_type("application/toml", st.text(max_size=100).map(str.encode))


class World:
    """A daemon with some content and known names, since with random names nearly every answer would be 404."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.url = "http://{}:{}".format(*daemon.address)
        self.schema = schemathesis.openapi.from_url(f"{self.url}/openapi.json")
        self.session = requests.Session()
        self.places: dict[str, list[str]] = {}

    def ask(self, method: str, path: str, body: object = None) -> Any:
        connection = HTTPConnection(*self.daemon.address, timeout=PATIENCE_S)
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        answer = connection.getresponse().read()
        connection.close()
        return json.loads(answer) if answer else None

    def furnish(self) -> None:
        """Create missing content, which earlier requests may have deleted."""
        for topic in ("orders", "bills"):
            where = f"/v1/namespaces/shop/topics/{topic}"
            self.ask("PUT", f"{where}?ifNotExists=true", {"ttl": "86400"})
            self.ask("POST", f"{where}/publish", {"messages": ["one", "two", {"base64": "/w=="}]})
            self.ask("PUT", f"{where}/producers/{PRODUCER}", {})
            self.ask("PUT", f"{where}/readers/{READER}", {"position": 0})
        messages = self.ask("GET", "/v1/namespaces/shop/topics/orders/messages?limit=5")
        begun = [self.ask("POST", "/v1/transactions", {"clientId": "fuzz"}) for _ in range(3)]
        self.places = {
            "namespace": ["shop", "system", "default"],
            "topic": ["orders", "bills"],
            "reader": [READER],
            "producer": [PRODUCER],
            "message": [each["id"] for each in messages],
            "transaction": [str(each["id"]) for each in begun],
            "code": ["topic_not_found"],
            "file": ["main.js"],
        }


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("fuzz") / "data", *SETS) as daemon:
        found = World(daemon)
        yield found
        assert [line for line in daemon.lines if json.loads(line)["level"] in ("error", "critical")] == []
        assert daemon.stop() == 0
        done = subprocess.run(
            [str(PLAINSONG), "store", "explain", "--data-dir", str(daemon.data_dir)],
            capture_output=True,
            text=True,
            env=clean_environ(),
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def ask_route(world: World, method: str, path: str, mode: GenerationMode, examples: int) -> None:
    operation = world.schema[path][method.upper()]
    if "{" in path:
        world.furnish()

    @settings(
        max_examples=examples,
        database=None,
        derandomize=examples == USUAL,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), data=st.data())
    def run(case: schemathesis.Case, data: st.DataObject) -> None:
        for name in case.path_parameters:
            there = world.places.get(name)
            if there and data.draw(st.integers(0, 9), label=f"made-up {name}") < 8:
                case.path_parameters[name] = data.draw(st.sampled_from(there), label=name)
        answers_with_events = "events" in path and method == "get"
        sent = {**case.as_transport_kwargs(world.url), "timeout": PATIENCE_S, "allow_redirects": False}
        with world.session.request(**sent, stream=True) as response:
            if answers_with_events and response.ok:
                # The event stream does not end by itself.
                assert response.headers["Content-Type"].startswith("text/event-stream")
                return
            # A JSON body may be empty, which OpenAPI cannot express.
            checks = SHAPES if response.content or not response.ok else STATUSES
            if not is_allowed(response):
                checks = [*checks, negative_data_rejection]
            case.validate_response(response, checks=checks)
            if not response.ok:
                assert response.json()["outcome"] in ("applied", "not-applied", "unknown")

    run()


def is_allowed(response: requests.Response) -> bool:
    """True if an invalid request may get this answer: a precondition failed first, or its blank body counts as none."""
    body = response.request.body or b""
    return response.status_code == 412 or not body.strip()


def can_be_wrong(path: str, operation: dict[str, Any]) -> bool:
    """True if a request can violate the description; any text is a valid file path or header."""
    places = [each["name"] for each in DOCUMENT["paths"][path].get("parameters", ()) if each["name"] != "file"]
    queries = [each for each in operation.get("parameters", ()) if each["in"] == "query"]
    return bool(places or queries or "requestBody" in operation)


CASES = [
    pytest.param(method, path, mode, id=f"{operation['operationId']}-{mode.value}")
    for path, operations in DOCUMENT["paths"].items()
    for method, operation in operations.items()
    if method in METHODS
    for mode in GenerationMode
    if mode is GenerationMode.POSITIVE or can_be_wrong(path, operation)
]


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_a_route_answers_as_described_whatever_the_request(world, method, path, mode):
    ask_route(world, method, path, mode, USUAL)


@pytest.mark.torture
@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_a_route_answers_as_described_for_a_long_time(world, method, path, mode):
    ask_route(world, method, path, mode, LONG)
