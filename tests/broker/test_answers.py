"""Answers of every JSON route have the declared shape, and change only with the golden ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import trio
from broker_in_process import in_process
from jsonschema import Draft202012Validator
from trio.testing import MockClock

from broker.api.description.openapi import description
from broker.api.routes import ROUTES
from broker.http.route import JSON_TYPE

#: Answers of the course below, one per line: route, query, status, body.
GOLDEN = Path(__file__).with_name("golden_bodies.jsonl")
DOCUMENT = json.loads(json.dumps(description(ROUTES, "1.2.3")))
ID, LAST = "0" * 40, "f" * 40
T = "/v1/namespaces/ns/topics/t"
#: Values that differ from run to run.
MASKS = (
    (r'"snapshot":"[^"]*"', '"snapshot":"…"'),
    (r'"service":"[0-9]+"', '"service":"…"'),
    (r"\b[0-9a-f]{32}\b", "…"),
    (r"\b[0-9]{8}T[0-9]{6}Z-[0-9a-f]{6}\b", "…"),
    (r'"sha256":"[0-9a-f]{64}"', '"sha256":"…"'),
)
#: JSON routes that the course leaves out, because they need a cluster or other tests compare the whole document.
LEFT_OUT = {"drain_instance", "undrain_instance", "pin_topic", "unpin_topic", "openapi", "asyncapi"}


def masked(text: str) -> str:
    for pattern, instead in MASKS:
        text = re.sub(pattern, instead, text)
    return text


class Course:
    """Calls to a daemon, and their answers."""

    def __init__(self, daemon) -> None:
        self.daemon = daemon
        self.answers: list[tuple[str, str, int, str]] = []

    async def __call__(self, name, query="", body=None, *, status=200, headers=None, **places):
        route = next(each for each in ROUTES if each.name == name)
        given = {"namespace": "ns", "topic": "t", **places}
        path = re.sub(r"{(\w+)}", lambda place: str(given[place[1]]), route.path)
        asked = path + (f"?{query}" if query else "")
        answer = await self.daemon.call(route.method, asked, json=body, headers=headers or {}, status=status)
        self.answers.append((name, query, status, answer.text))
        return answer.json() if answer.text else None


async def taken(daemon) -> list[tuple[str, str, int, str]]:
    """Return the answers of a course through every route."""
    ask = Course(daemon)
    receipt = {"Prefer": "return=representation"}
    await ask("create_topic", "dryRun=true", {"ttl": 3600})
    await ask("create_topic", "", {"ttl": 3600})
    await ask("create_topic", "", {"chain": "sha256"}, topic="linked")
    await ask("publish", "", {"messages": ["a", {"base64": "AP8="}], "attributes": [{"k": "v"}, {}]}, headers=receipt)
    await ask("publish", "", {"messages": ["x"], "ttlSeconds": 60}, topic="linked")
    await ask("open_producer_by_name", "", {}, producer="p")
    await ask("open_producer", "", {})
    numbered = {"producer": "p", "producerEpoch": 1, "atomic": True}
    await ask("publish", "", {"messages": ["b", "c"], "sequenceIds": [0, 1], **numbered})
    await ask("publish", "", {"messages": ["b"], "sequenceIds": [1], "producer": "p", "producerEpoch": 1})
    begun = await ask("begin", "", {"clientId": "test"})
    await ask("begin", "longs=string", {"type": "long"})
    pointer = begun["writePointer"]
    await ask("store", "", {"transactionWritePointer": pointer, "messages": ["s"]})
    written = await ask("publish", "", {"transactionWritePointer": pointer, "messages": ["u"]})
    for query in ("", "longs=string", "state=committed"):
        await ask("list_transactions", query)
    await ask("get_transaction", "", transaction=begun["id"])
    await ask("poll", "", {})
    await ask("poll", "isolation=committed&payload=base64", {"limit": 1})
    many = {"topics": {"t": {}, "linked": {"limit": 1}, "none": {}}}
    await ask("poll_many", "", {**many, "isolation": "committed"})
    await ask("get_messages", "")
    await ask("get_messages", "longs=string&payload=base64&payloadBytes=1&limit=1")
    page = json.loads(ask.answers[-1][3])
    await ask("get_message", "", message=page[0]["id"])
    await ask("put_reader", "dryRun=true", {"position": ID}, reader="r")
    await ask("put_reader", "", {"position": page[0]["id"]}, reader="r")
    await ask("poll", "", {"limit": 2}, headers={"Plainsong-Reader": "named"})
    await ask("list_readers")
    await ask("get_reader", reader="r")
    for query in ("", "limit=1", "reader=r"):
        await ask("get_lag", query)
    await ask("get_stats")
    await ask("get_stats", f"reader={ID}")
    await ask("offsets", "", {"splits": 2})
    await ask("get_history")
    await ask("list_topics")
    await ask("get_topic")
    await ask("list_all_topics")
    await ask("list_all_topics", "sort=messages&order=desc&limit=1")
    daemon.service.metrics.slow_commit = None  # otherwise a slow machine would be reported
    await ask("get_attention")
    await ask("get_replication")
    await ask("take_over", status=409)
    await ask("switch_primary", status=409)
    await ask("get_cluster")
    await ask("get_cluster", "topic=ns:t")
    await ask("list_producers", "limit=1")
    await ask("get_producer", "", producer="p")
    await ask("get_producer", "longs=string", producer="p")
    await ask("maintain")
    await ask("get_chain", topic="linked")
    await ask("list_chain", topic="linked")
    await ask("list_chain", "messages=false", topic="linked")
    await ask("prepare", "", {"changes": ["AA=="]}, transaction=begun["id"])
    await ask("checkpoint", "", {}, transaction=begun["id"])
    await ask("abort", "dryRun=true", transaction=begun["id"])
    await ask("commit", "", transaction=begun["id"])
    await ask("get_transaction", "longs=string", transaction=begun["id"])
    await ask("get_transaction", "", transaction=1)
    for how in ("abort", "invalidate"):
        opened = (await ask("begin"))["id"]
        await ask("publish", "", {"transactionWritePointer": opened, "messages": [how]})
        await ask(how, "dryRun=true", transaction=opened)
        await ask(how, "", transaction=opened, headers=receipt)
    opened = (await ask("begin"))["id"]
    await ask("invalidate", "", transaction=opened)
    await ask("rollback", "", written, status=409)
    await ask("get_pruning")
    await ask("truncate", "dryRun=true", {"ids": [opened]})
    await ask("truncate", "", {"ids": [opened]})
    await ask("delete_reader", "dryRun=true", reader="r")
    await ask("delete_reader", reader="r")
    await ask("delete_producer", "dryRun=true", producer="p")
    await ask("delete_producer", producer="p")
    await ask("set_properties", "dryRun=true", {"ttl": 60})
    await ask("set_properties", "", {"ttl": 60})
    await ask("set_aside", "dryRun=true", {"from": page[0]["id"], "to": LAST})
    await ask("set_aside", "", {"from": page[0]["id"], "to": page[0]["id"]})
    await ask("get_messages")
    await ask("delete_topic", "dryRun=true")
    await ask("delete_topic")
    await ask("list_topics", "deleted=true")
    await ask("list_all_topics", "deleted=true")
    await ask("undelete_topic", "dryRun=true")
    await ask("undelete_topic")
    await ask("list_namespaces")
    await ask("get_namespace")
    await ask("set_namespace", "dryRun=true", {"deduplication": "disabled"})
    await ask("set_namespace", "", {"deduplication": "disabled"})
    backup = (await ask("begin_backup"))["id"]
    for query in ("topic=ns:t", "topic=service", "topic=metadata"):
        await ask("list_backup_objects", query, backup=backup)
    await ask("end_backup", backup=backup)
    definitions = await ask("get_definitions")
    await ask("put_definitions", "dryRun=true", {**definitions, "topics": {"ns:new": {"ttl": 60}}})
    await ask("put_definitions", "", {**definitions, "topics": {"ns:new": {"ttl": 60}}})
    await ask("get_scrub")
    await ask("start_scrub")
    await ask("livez")
    await ask("readyz")
    await ask("version")
    await ask("whoami")
    await ask("explain_error", code="topic_not_found")
    await ask("get_stats", topic="none", status=404)
    return ask.answers


async def written() -> list[str]:
    """Return the answers, one per line, without values that differ from run to run."""
    async with in_process() as daemon:
        answers = await taken(daemon)
    return [json.dumps([*line, masked(text)], ensure_ascii=False) for *line, text in answers]


async def test_answers_are_byte_for_byte_the_golden_ones(mock_clock):
    """For an intended change, run this file as a module: ``python -m tests.broker.test_answers``."""
    assert await written() == GOLDEN.read_text(encoding="utf-8").splitlines()


async def test_every_answer_has_the_shape_that_its_route_declares(daemon):
    operations = {
        each["operationId"]: each
        for path in DOCUMENT["paths"].values()
        for each in path.values()
        if "operationId" in each
    }
    for name, query, status, text in await taken(daemon):
        response = operations[name]["responses"][str(status)]
        kind = JSON_TYPE if status == 200 else "application/problem+json"
        if not text:
            continue
        schema = {**response["content"][kind]["schema"], "components": DOCUMENT["components"]}
        errors = [error.message for error in Draft202012Validator(schema).iter_errors(json.loads(text))]
        assert not errors, (name, query, text, errors)


async def test_the_course_has_every_route_that_answers_with_json(daemon):
    with_json = {route.name for route in ROUTES if JSON_TYPE in route.answer_types and route.answer is not None}
    assert with_json == {name for name, *_ in await taken(daemon)} & with_json | LEFT_OUT


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(trio.run(written, clock=MockClock())) + "\n", encoding="utf-8")
