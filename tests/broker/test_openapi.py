"""The description of the API is valid, complete, and true."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TypedDict

import pytest

from broker.api.description.openapi import description
from broker.api.routes import ROUTES
from broker.api.schemas import REQUESTS, by_status, status_of_code
from broker.api.shapes import Shapes
from broker.http.messages import STATUS_OF
from broker.http.route import Route
from broker.security.identity import VERBS
from plainsong.protocol.answers.fields import component
from plainsong.protocol.errors import BY_CODE

DOCUMENT = description(ROUTES, "1.2.3")
GOLDEN = Path(__file__).with_name("golden_openapi.jsonl")
METHODS = {"get", "put", "post", "delete"}


def served(app):
    """Return ``(method, path, name)`` of every rule, in the notation of the description."""
    return {
        (method, re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule), rule.endpoint)
        for rule in app.url_map.iter_rules()
        for method in rule.methods - {"HEAD", "OPTIONS"}
    }


async def test_exactly_the_described_routes_are_served(daemon):
    described = {
        (method.upper(), path, operation["operationId"])
        for path, operations in DOCUMENT["paths"].items()
        for method, operation in operations.items()
        if method in METHODS
    }
    assert described == served(daemon.app)


async def test_the_daemon_serves_its_description(daemon):
    assert (await daemon.call("GET", "/openapi.json")).json() == json.loads(json.dumps(DOCUMENT))


def test_the_description_changes_only_with_the_golden_one():
    """Clients are generated from the description, so a change of a shape must show up in review.

    For an intended change, run this file as a module: ``python -m tests.broker.test_openapi``.
    """
    golden = GOLDEN.read_text(encoding="utf-8").splitlines()
    assert [line for line in written() if line not in golden] == []
    assert written() == golden


def written() -> list[str]:
    """Return the description, one operation or schema per line."""
    document = json.loads(json.dumps(DOCUMENT))
    parts = [
        *(
            (path, each, value)
            for path, operations in document.pop("paths").items()
            for each, value in operations.items()
        ),
        *(("schemas", name, value) for name, value in document["components"].pop("schemas").items()),
    ]
    return sorted(json.dumps(part, sort_keys=True, ensure_ascii=False) for part in (*parts, ("document", "", document)))


def test_the_document_is_valid_openapi():
    validator = pytest.importorskip("openapi_spec_validator")
    validator.validate(DOCUMENT)


def test_every_reference_resolves_and_every_schema_is_used():
    text = json.dumps(DOCUMENT)
    used = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert used == set(DOCUMENT["components"]["schemas"])


def test_an_answer_cannot_have_the_name_of_another_schema():
    position = component("Position")(TypedDict("position", {"id": str}))
    with pytest.raises(TypeError, match="Position is declared twice"):
        Shapes(REQUESTS).schema(position)


def test_every_path_declares_its_parameters():
    for path, operations in DOCUMENT["paths"].items():
        declared = [parameter["name"] for parameter in operations.get("parameters", [])]
        assert declared == re.findall(r"{(\w+)}", path)


def test_operation_ids_are_unique_and_every_operation_has_a_text_and_an_answer():
    found = [o for path in DOCUMENT["paths"].values() for method, o in path.items() if method in METHODS]
    assert len({operation["operationId"] for operation in found}) == len(found) == len(ROUTES)
    for operation in found:
        assert operation["summary"].endswith(".")
        assert operation["responses"]


def test_every_code_is_listed_under_its_status():
    assert by_status(["low_space", "topic_not_found"]) == {404: ["topic_not_found"], 503: ["low_space"]}
    for route in ROUTES:
        for code in route.errors:
            assert code in BY_CODE
    assert {status_of_code(code) for code in BY_CODE} <= set(STATUS_OF.values())
    assert set(DOCUMENT["components"]["schemas"]["Problem"]["properties"]["code"]["enum"]) == set(BY_CODE)


def test_every_route_is_declared_once():
    assert len({route.name for route in ROUTES}) == len({(route.method, route.path) for route in ROUTES}) == len(ROUTES)


EXAMPLES = [route for route in ROUTES if route.body is not None and route.body.example is not None]


@pytest.mark.parametrize("route", EXAMPLES, ids=lambda route: route.name)
async def test_every_example_is_accepted(daemon, route):
    if route.name != "create_topic":
        await daemon.call("PUT", "/v1/namespaces/ns/topics/x")
    path = re.sub(r"{(\w+)}", lambda name: {"namespace": "ns"}.get(name[1], "x"), route.path)
    example = json.loads(json.dumps(route.body.example))
    if "waitMs" in example:
        example["waitMs"] = 0
    if "transactionWritePointer" in example and route.name != "rollback":
        example["transactionWritePointer"] = (await daemon.call("POST", "/v1/transactions")).json()["writePointer"]
    await daemon.call(route.method, path, json=example)


def test_every_operation_names_the_verb_it_needs_and_on_what():
    for route in ROUTES:
        operation = DOCUMENT["paths"][route.path][route.method.lower()]
        named = operation["x-plainsong-verb"]
        assert ((named,) if isinstance(named, str) else tuple(named)) == route.verbs
        assert operation["x-plainsong-on"] == route.on
        assert set(route.verbs) <= set(VERBS)
        assert bool(route.verbs) is (route.on not in ("name", "nobody"))
        places = set(re.findall(r"{(\w+)}", route.path))
        assert {"topic": {"namespace", "topic"}, "topics": {"namespace"}}.get(route.on, set()) <= places


#: The complete list, so that adding a route is a decision: these require no authentication, or only a name. They show
#: what the name may see, and ``put_definitions`` checks the rights to each definition.
NO_NAME = {"root", "console", "console_file", "console_slash", "ping", "livez", "readyz", "security_txt"}
ANY_NAME = {
    "asyncapi",
    "explain_error",
    "get_attention",
    "get_events",
    "list_all_topics",
    "list_namespaces",
    "openapi",
    "put_definitions",
    "whoami",
}


def test_only_the_health_of_the_daemon_is_open_without_a_name():
    assert {route.name for route in ROUTES if route.on == "nobody"} == NO_NAME
    assert {route.name for route in ROUTES if route.on == "name"} == ANY_NAME
    for route in ROUTES:
        operation = DOCUMENT["paths"][route.path][route.method.lower()]
        assert (operation.get("security") == []) is (route.name in NO_NAME)


def test_changing_a_topic_requires_a_verb_that_reading_does_not_grant():
    for route in ROUTES:
        if not route.reads_only and route.on != "nobody":
            assert "inspect" not in route.verbs


def test_no_route_can_be_declared_without_its_verb():
    with pytest.raises(TypeError, match="verb"):
        Route("x", "GET", "/x", object, None, tag="x", doc="X.")  # type: ignore[call-arg]
    with pytest.raises(AssertionError):
        Route("x", "GET", "/x", object, None, verb=None, on="service", tag="x", doc="X.")


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(written()) + "\n", encoding="utf-8")
