"""For every route, an instance that owns nothing returns the owner's answer: same status, headers and body."""

from __future__ import annotations

import gzip
import json
import re
from typing import NamedTuple

from broker.api.routes import ROUTES
from plainsong.protocol.codec import AVRO, AVRO_2
from plainsong.protocol.requests import PollRequest, PublishRequest
from tests.broker.cluster.in_process import TOPICS, cluster
from tests.waiting import until

T = TOPICS + "/{topic}"
JSON = {"Content-Type": "application/json"}
RECEIPT = {**JSON, "Prefer": "return=representation"}
V1, V2 = {"Content-Type": AVRO.content_type}, {"Content-Type": AVRO_2.content_type}
MANY = b"x" * 3000

#: Route, method, path, body and headers; requested in this order, on a topic that does not exist yet.
COURSE = [
    ("get_topic", "GET", T, None, {}),
    ("publish", "POST", T + "/publish", {"messages": ["early"]}, JSON),
    ("create_topic", "PUT", T, {"ttl": "a while"}, JSON),
    ("create_topic", "PUT", T, {"ttl": 86400}, JSON),
    ("create_topic", "PUT", T, {}, JSON),
    ("create_topic", "PUT", T + "?ifNotExists=true", {"ttl": 86400}, JSON),
    ("get_topic", "GET", T, None, {}),
    ("publish", "POST", T + "/publish", {"messages": ["one", "two"]}, JSON),
    ("publish", "POST", T + "/publish?ttl=60", {"messages": ["three"]}, RECEIPT),
    ("publish", "POST", T + "/publish", {"messages": []}, JSON),
    ("publish", "POST", T + "/publish", {"massages": []}, JSON),
    ("publish", "POST", T + "/publish", b"\xff\xff", V1),
    ("publish", "POST", T + "/publish", b"{}", {"Content-Type": "text/plain"}),
    ("publish", "POST", T + "/publish", AVRO.encode_publish(PublishRequest([MANY] * 5)), V1),
    (
        "publish",
        "POST",
        T + "/publish",
        gzip.compress(AVRO_2.encode_publish(PublishRequest([b"z"]))),
        V2 | {"Content-Encoding": "gzip"},
    ),
    ("publish", "POST", T + "/publish", b"no gzip", V2 | {"Content-Encoding": "gzip"}),
    ("poll", "POST", T + "/poll", {}, JSON),
    ("poll", "POST", T + "/poll?wait_ms=20", {"startFrom": 4000000000000}, JSON),
    ("poll", "POST", T + "/poll", {"limit": 0}, JSON),
    ("poll", "POST", T + "/poll?nonsense=1", {}, JSON),
    ("poll", "POST", T + "/poll", AVRO.encode_poll(PollRequest(None, False, 2)), V1),
    ("poll", "POST", T + "/poll", AVRO_2.encode_poll(PollRequest(None, False, 2)), V2),
    ("poll", "POST", T + "/poll", {}, JSON | {"Accept-Encoding": "gzip"}),
    ("poll", "POST", T + "/poll", {}, JSON | {"Accept": "application/vnd.plainsong.frames"}),
    ("poll", "POST", T + "/poll", {"isolation": "committed"}, JSON),
    ("store", "POST", T + "/store", {"transactionWritePointer": 77, "messages": ["kept"]}, JSON),
    ("publish", "POST", T + "/publish", {"transactionWritePointer": 77, "messages": []}, JSON),
    ("rollback", "POST", T + "/rollback", {"transactionWritePointer": 77}, JSON),
    ("rollback", "POST", T + "/rollback", {"transactionWritePointer": 77, "startTimestamp": -1}, JSON),
    ("get_messages", "GET", T + "/messages?limit=3", None, {}),
    ("get_messages", "GET", T + "/messages?limit=0", None, {}),
    ("get_message", "GET", T + "/messages/" + "0" * 40, None, {}),
    ("get_message", "GET", T + "/messages/nonsense", None, {}),
    ("get_history", "GET", T + "/history?nonsense=1", None, {}),
    ("get_stats", "GET", T + "/stats", None, {}),
    ("get_lag", "GET", T + "/lag", None, {}),
    ("offsets", "POST", T + "/offsets", {"splits": 2}, JSON),
    ("offsets", "POST", T + "/offsets", {"splits": 0}, JSON),
    ("maintain", "POST", T + "/maintenance", None, {}),
    ("stream", "GET", T + "/stream", None, {}),
    ("set_properties", "PUT", T + "/properties", {"ttl": 3600}, JSON),
    ("set_properties", "PUT", T + "/properties", {"title": 3600}, JSON),
    ("put_reader", "PUT", T + "/readers/r", {"position": "0" * 40, "expected": None}, JSON),
    ("put_reader", "PUT", T + "/readers/r", {"position": "0" * 40, "expected": None}, JSON),
    ("put_reader", "PUT", T + "/readers/r r", {"position": "0" * 40}, JSON),
    ("get_reader", "GET", T + "/readers/r", None, {}),
    ("get_reader", "GET", T + "/readers/nobody", None, {}),
    ("list_readers", "GET", T + "/readers", None, {}),
    ("delete_reader", "DELETE", T + "/readers/r", None, {}),
    ("open_producer", "POST", T + "/producers", {}, JSON),
    ("open_producer_by_name", "PUT", T + "/producers/p%2Fq", {}, JSON),
    (
        "publish",
        "POST",
        T + "/publish",
        {"messages": ["s"], "producer": "p/q", "producerEpoch": 1, "sequenceIds": [1]},
        JSON,
    ),
    (
        "publish",
        "POST",
        T + "/publish",
        {"messages": ["s"], "producer": "p/q", "producerEpoch": 1, "sequenceIds": [1]},
        JSON,
    ),
    (
        "publish",
        "POST",
        T + "/publish",
        {"messages": ["s"], "producer": "p/q", "producerEpoch": 0, "sequenceIds": [2]},
        JSON,
    ),
    ("list_producers", "GET", T + "/producers?limit=1", None, {}),
    ("get_producer", "GET", T + "/producers/p%2Fq", None, {}),
    ("get_producer", "GET", T + "/producers/nobody", None, {}),
    ("delete_producer", "DELETE", T + "/producers/p%2Fq", None, {}),
    ("poll_many", "POST", "/v1/namespaces/ns/poll", {"topics": {"{topic}": {}, "missing": {}}, "limit": 3}, JSON),
    ("poll_many", "POST", "/v1/namespaces/ns/poll", {"topics": {}}, JSON),
    ("poll_many", "POST", "/v1/namespaces/ns/poll", {"topics": {"{topic}": {"limit": -1}}}, JSON),
    ("poll_many", "POST", "/v1/namespaces/ns/poll", b"{", JSON),
    ("set_namespace", "PUT", "/v1/namespaces/ns/properties", {"deduplication": "perhaps"}, JSON),
    ("list_topics", "GET", TOPICS, None, {}),
    ("list_namespaces", "GET", "/v1/namespaces", None, {}),
    ("get_namespace", "GET", "/v1/namespaces/ns/properties", None, {}),
    ("begin", "POST", "/v1/transactions", None, {}),
    ("prepare", "POST", "/v1/transactions/7/prepare", None, {}),
    ("commit", "POST", "/v1/transactions/7/commit", None, {}),
    ("abort", "POST", "/v1/transactions/7/abort", None, {}),
    ("list_transactions", "GET", "/v1/transactions", None, {}),
    ("get_pruning", "GET", "/v1/transactions/pruning", None, {}),
    ("truncate", "POST", "/v1/transactions/truncate", {"ids": []}, JSON),
    ("get_transaction", "GET", "/v1/transactions/7", None, {}),
    ("invalidate", "POST", "/v1/transactions/7/invalidate", None, {}),
    ("checkpoint", "POST", "/v1/transactions/7/checkpoint", None, {}),
    ("get_topic", "GET", TOPICS + "/no%20name", None, {}),
    ("publish", "POST", TOPICS + "/no%20name/publish", {"messages": ["x"]}, JSON),
    ("get_topic", "OPTIONS", T, None, {}),
    ("get_topic", "PATCH", T, None, {}),
    ("get_topic", "HEAD", T, None, {}),
    ("delete_topic", "DELETE", T, None, {}),
    ("delete_topic", "DELETE", T, None, {}),
    ("get_chain", "GET", T + "/chain", None, {}),
    ("list_chain", "GET", T + "/chain/entries", None, {}),
    ("set_aside", "POST", T + "/set-aside", {"from": "0" * 40, "to": "0" * 40}, JSON),
    ("undelete_topic", "POST", T + "/undelete", None, {}),
    ("undelete_topic", "POST", T + "/undelete", None, {}),
    ("ping", "GET", "/ping", None, {}),
    ("livez", "GET", "/livez", None, {}),
    ("version", "GET", "/version", None, {}),
    ("whoami", "GET", "/v1/whoami", None, {}),
    ("openapi", "GET", "/openapi.json", None, {}),
    ("security_txt", "GET", "/.well-known/security.txt", None, {}),
    ("explain_error", "GET", "/errors/no_owner", None, {}),
    ("get_definitions", "GET", "/v1/definitions?nonsense=1", None, {}),
    ("put_definitions", "PUT", "/v1/definitions", {"format": 2}, JSON),
    ("get_backup_object", "GET", "/v1/backups/none/objects/" + "0" * 64, None, {}),
    ("list_backup_objects", "GET", "/v1/backups/none/objects", None, {}),
    ("end_backup", "DELETE", "/v1/backups/none", None, {}),
    ("root", "GET", "/", None, {"Accept": "text/html"}),
    ("console", "GET", "/console", None, {}),
    ("console_slash", "GET", "/console/", None, {}),
    ("console_file", "GET", "/console/main.js", None, {}),
]
#: Routes whose answers depend on the time or the instance.
OF_THE_INSTANCE = {
    *("readyz", "metrics", "topic_metrics", "asyncapi", "begin_backup", "start_scrub", "get_scrub", "get_replication"),
    *("take_over", "switch_primary"),
}
#: Routes with endless answers, and with answers that combine all instances; each is tested elsewhere.
OF_ALL = {"follow", "get_events", "get_attention", "list_all_topics"}
#: Routes that the owner answers. Each instance answers transaction routes itself, since this cluster has no service.
OF_TOPICS = {route.name for route in ROUTES if route.owner in ("topic", "namespaces")}


class Answered(NamedTuple):
    name: str
    path: str
    meaning: tuple
    forwarded: bool
    method: str


def test_the_scenario_visits_every_route():
    every = {route.name for route in ROUTES if not route.path.startswith("/v1/cluster")}
    assert every - {name for name, *_ in COURSE} == OF_THE_INSTANCE | OF_ALL


def meaning(answer, topic):
    """Return the status, headers and body, without the parts that depend on the topic or the time."""
    ignored = {"date", "x-request-id", "plainsong-owner", "content-length"}
    headers = sorted((name, value) for name, value in answer.headers.items() if name not in ignored)
    return answer.status_code, blurred(repr(headers), topic), blurred(answer.content.decode("latin-1"), topic)


def blurred(text, topic):
    text = text.replace(topic, "TOPIC")
    text = re.sub(r"\b[0-9a-f]{40}\b|\b[0-9a-f]{32}\b", "ID", text)
    text = re.sub(r'(\\?)"1-[0-9a-f]{16}\1"', "ETAG", text)
    text = re.sub(r"\b1[0-9]{12}\b", "MS", text)
    text = re.sub(r'("(?:oldestAgeMs|ageMs|publishPerSecond|pollPerSecond|p50|p99|ms)":)[0-9.]+', r"\1N", text)
    return re.sub(r"[\x00-\x08\x0e-\x1f\x80-\xff]", "", text) if "Obj" not in text else text


async def taken(node, topic):
    """Run the course on a separate topic through one instance; return each answer, and True if it was forwarded."""
    told = []
    for name, method, path, body, headers in COURSE:
        content = body if isinstance(body, bytes | None) else json.dumps(body).replace("{topic}", topic).encode()
        answer = await node.http.request(method, path.replace("{topic}", topic), content=content, headers=headers)
        binary = answer.headers.get("content-type", "").startswith(("avro", "application/vnd"))
        seen = meaning(answer, topic)
        seen = (*seen[:2], len(answer.content)) if binary else seen
        told.append(Answered(name, path, seen, "plainsong-owner" in answer.headers, method))
    return told


async def test_every_route_answers_through_another_instance_as_its_owner_does():
    async with cluster("a", "b") as nodes:
        for name in ("ns:topic-1", "ns:topic-2", "ns:missing", ":transactions", ":namespaces"):
            nodes.move(name, "b")
        at_owner = await taken(nodes["b"], "topic-1")
        await nodes["b"].call("POST", f"{TOPICS}/topic-1/undelete", status=409)
        await nodes["b"].call("DELETE", f"{TOPICS}/topic-1")
        elsewhere = await taken(nodes["a"], "topic-2")
        for one, other in zip(at_owner, elsewhere, strict=True):
            assert one[:3] == other[:3]
            assert not one.forwarded
            assert other.forwarded == is_of_the_topic(other), other


def is_of_the_topic(answered):
    """True if the owner must answer: the request was not refused earlier."""
    status = answered.meaning[0]
    if answered.name == "poll_many":
        return status == 200 or "topics.TOPIC" in answered.meaning[2] or "limit is" in answered.meaning[2]
    refused_by_the_door = status == 405 or (answered.name == "get_topic" and "OPTIONS" in answered.method)
    refused_by_the_door |= status == 400 and b"gzip" in repr(answered.meaning).encode()
    name_that_cannot_be = "%20name" in answered.path
    return answered.name in OF_TOPICS and not refused_by_the_door and not name_that_cannot_be


#: ``{id}`` is the id that begin returned; sent in this order, once through each instance.
TRANSACTIONS = [
    ("POST", "/v1/transactions", {"type": "short", "timeoutSeconds": 30, "clientId": "me"}),
    ("GET", "/v1/transactions/{id}", None),
    ("POST", "/v1/transactions/{id}/prepare", {"changes": []}),
    ("POST", "/v1/transactions/{id}/checkpoint", None),
    ("POST", "/v1/transactions/{id}/commit", None),
    ("POST", "/v1/transactions/{id}/commit", None),
    ("POST", "/v1/transactions/{id}/abort", None),
    ("GET", "/v1/transactions/{id}", None),
    ("POST", "/v1/transactions", {"type": "long"}),
    ("POST", "/v1/transactions/{id}/invalidate", None),
    ("POST", "/v1/transactions/{id}/commit", None),
    ("GET", "/v1/transactions?state=in_progress", None),
    ("GET", "/v1/transactions/pruning", None),
    ("POST", "/v1/transactions/truncate", {"ids": ["{id}"]}),
    ("POST", "/v1/transactions", {"type": "medium"}),
    ("POST", "/v1/transactions/x/commit", None),
    ("POST", "/v1/transactions/12/commit", None),
]


async def decided(node):
    """Run ``TRANSACTIONS`` through one instance; return each answer, and True if it was forwarded."""
    told, current = [], ""
    for method, path, body in TRANSACTIONS:
        content = None if body is None else json.dumps(body).replace('"{id}"', current)
        answer = await node.http.request(method, path.replace("{id}", current), content=content)
        if path == "/v1/transactions" and answer.status_code == 200:
            current = str(answer.json()["id"])
        text = re.sub(r"\b1[0-9]{12}\b|\b1[0-9]{18}\b", "N", re.sub(r'"snapshot":"[^"]*"', "", answer.text))
        told.append(((path, answer.status_code, text), "plainsong-owner" in answer.headers))
    return told


async def test_transactions_are_decided_through_another_instance_as_at_their_owner():
    async with cluster("a", "b", transactions__service="embedded") as nodes:
        nodes.move(":transactions", "b")
        await until(lambda: nodes["b"].is_deciding)
        at_owner, elsewhere = await decided(nodes["b"]), await decided(nodes["a"])
    for (one, is_forwarded), (other, other_is) in zip(at_owner, elsewhere, strict=True):
        assert one == other
        assert (is_forwarded, other_is) == (False, True)
