"""Topic requests in the hot listener: answered, counted and logged as by hypercorn, which handles the unusual ones."""

from __future__ import annotations

import gzip
import json
import logging
import random
from types import SimpleNamespace

import pytest
import trio
import trio.testing
from broker_in_process import TOPICS, in_process
from prometheus_client.parser import text_string_to_metric_families
from started_polls import endpoint

from broker.api.topics.topics import KeptNames
from broker.http.handlers import RequestTasks
from broker.http.messages import Request
from broker.http.wire import checked
from plainsong.protocol.effects import Table, put_one
from plainsong.protocol.keys import metadata_key
from plainsong.protocol.names import TopicName
from plainsong.protocol.records import pack_record
from storage.memory import MemoryStore
from tests.broker.differential import meaning
from tests.broker.listeners import Reader, post, running
from tests.patience import PATIENCE_S


def asked(method, path, body=None, *headers):
    lines = [f"{method} {TOPICS}{path} HTTP/1.1", "Host: localhost", *headers]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + (body or b"")


UPGRADE = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: " + "a" * 24)
ZIPPED = "Content-Encoding: gzip"
CONVERSATION = [
    asked("PUT", "/t", b'{"ttl": 60}'),
    asked("PUT", "/t", b"{}"),
    asked("PUT", "/t?ifNotExists=true", b"{}"),
    asked("PUT", "/u"),
    asked("PUT", "/x?dryRun=true", b"{}"),
    asked("PUT", "/x?ifNotExists=maybe", b"{"),
    asked("PUT", "/x?dryRun=maybe", b"{"),
    asked("PUT", "/x?dryRun=maybe", b"{}"),
    asked("PUT", "/z", gzip.compress(b"{}"), ZIPPED),
    asked("GET", "/t"),
    asked("GET", "/t", b"{}"),
    asked("GET", ""),
    asked("GET", "", b"{}"),
    asked("GET", "?deleted=true"),
    asked("GET", "?unknown=1"),
    asked("GET", "/%74"),
    asked("GET", "/nope"),
    asked("GET", "/t", None, *UPGRADE),
    asked("PUT", "/t/properties", b'{"ttl": 70}'),
    asked("PUT", "/t/properties", b"no JSON"),
    asked("PUT", "/t/properties", b'{"ttl": 80}', 'If-Match: "old"'),
    asked("PUT", "/nope/properties", gzip.compress(b"{}"), ZIPPED),
    asked("PUT", "/v", b"x" * 65537),
    asked("PUT", "/v", gzip.compress(b" " * 65537 + b"{}"), ZIPPED),
    asked("PUT", "/v", gzip.compress(b"{}")[:-4], ZIPPED),
    asked("PUT", "/v", b"{}", "Content-Encoding: br"),
    asked("PUT", "/no%20name", b"{}"),
    asked("PATCH", "/t", b"{}"),
    post("t/publish", gzip.compress(b'{"messages": ["m"]}'), ZIPPED, "Content-Type: application/json"),
    asked("DELETE", "/u", b"{}"),
    asked("DELETE", "/t?dryRun=true"),
    asked("DELETE", "/t"),
    asked("DELETE", "/t"),
]


async def exchanged(daemon, requests):
    """Return the answers to requests that are each sent on a new connection."""
    url, said = daemon.http.base_url, []
    for request in requests:
        async with await trio.open_tcp_stream(url.host, url.port) as stream:
            await stream.send_all(request)
            said.append(meaning(await Reader(stream).reply()))
    return said


async def counts(daemon):
    text = (await daemon.http.get("/metrics")).text
    (family,) = [each for each in text_string_to_metric_families(text) if each.name == "plainsong_requests"]
    return {(each.labels["route"], each.labels["status"]): each.value for each in family.samples if each.value}


async def test_both_listeners_answer_count_and_log_requests_about_topics_in_the_same_way(caplog):
    caplog.set_level(logging.INFO, logger="plainsong.access")
    found = {}
    for listener in ("hot", "application"):
        caplog.clear()
        async with in_process(listener=listener, log__access=True) as daemon:
            said = await exchanged(daemon, CONVERSATION)
            lines = [
                (each.route, each.target, each.status) for each in caplog.records if each.name == "plainsong.access"
            ]
            found[listener] = list(zip(CONVERSATION, said, strict=True)), lines, await counts(daemon)
    hot, application = found["hot"], found["application"]
    for one, other in zip(hot[0], application[0], strict=True):
        assert one == other
    assert hot[1] == application[1]
    assert hot[2] == application[2]
    assert {status for (_, (status, *_)) in hot[0]} >= {200, 400, 404, 405, 409, 412, 413, 415}


async def test_answers_to_other_origins_say_so_to_caches():
    async with in_process(listener="hot", security__allowed_origins="https://page.example") as daemon:
        await daemon.create()
        answer = await daemon.http.get(f"{TOPICS}/t")
        assert answer.status_code == 200
        assert "Origin" in answer.headers["vary"]


async def test_answers_without_a_task_say_so_as_well(caplog):
    found = {}
    repeated = [each for each in CONVERSATION for _ in range(1 + each.startswith(b"GET"))]
    for listener in ("hot", "application"):
        async with in_process(listener=listener) as daemon:
            found[listener] = await exchanged(daemon, repeated), await counts(daemon)
    assert found["hot"] == found["application"]


async def test_topics_are_created_shown_and_listed_without_a_task(monkeypatch):
    async with in_process(listener="hot") as daemon:
        answers, tasks = [], []

        def begun(name, path, body=b"", query=""):
            asked = Request({"namespace": "ns", **path}, query, {}, body)
            with monkeypatch.context() as patched:
                patched.setattr(RequestTasks, "run", lambda *given: tasks.append(given))
                endpoint(daemon, name).handler(asked, lambda outcome: answers.append(checked(outcome, "")))
            needed, tasks[:] = bool(tasks), []
            return not needed

        assert begun("create_topic", {"topic": "t"}, b'{"ttl": 60}')
        assert begun("create_topic", {"topic": "t"})
        assert begun("get_topic", {"topic": "t"})
        assert begun("get_topic", {"topic": "u"})
        with trio.fail_after(PATIENCE_S):
            while len(answers) < 4:
                await trio.testing.wait_all_tasks_blocked()
        found = {(each.status, json.loads(each.body or b"{}").get("code")) for each in answers}
        assert found == {(200, None), (409, "topic_exists"), (404, "topic_not_found")}
        assert not begun("list_topics", {}), "there was no earlier request"
        first = await daemon.http.get(TOPICS)
        assert begun("list_topics", {})
        assert (answers[-1].status, answers[-1].body) == (200, first.content) == (200, b'["t"]')
        assert not begun("list_topics", {}, query="deleted=true")
        assert not begun("create_topic", {"topic": "u"}, query="dryRun=true")


@pytest.mark.parametrize("seed", range(20))
async def test_a_kept_list_is_current(seed):
    chosen = random.Random(seed)
    async with in_process(listener="hot") as daemon:
        living = {namespace: set() for namespace in ("a", "b", "c")}
        deleted = {namespace: set() for namespace in living}
        lists, scans = 0, 0
        for _ in range(120):
            namespace, topic = chosen.choice(list(living)), f"t{chosen.randrange(3)}"
            topics = f"/v1/namespaces/{namespace}/topics"
            done = chosen.choice(["list"] * 6 + ["create", "delete", "undelete", "publish", "properties"])
            if done == "list":
                lists += 1
                before = daemon.store.calls["scan"]
                assert (await daemon.http.get(topics)).json() == sorted(living[namespace])
                scans += daemon.store.calls["scan"] > before
            elif done == "create":
                answer = await daemon.http.put(f"{topics}/{topic}")
                assert answer.status_code == (409 if topic in living[namespace] else 200)
                living[namespace].add(topic)
                deleted[namespace].discard(topic)
            elif done == "delete" and topic in living[namespace]:
                assert (await daemon.http.delete(f"{topics}/{topic}")).status_code == 200
                living[namespace].remove(topic)
                deleted[namespace].add(topic)
            elif done == "undelete" and topic in deleted[namespace]:
                assert (await daemon.http.post(f"{topics}/{topic}/undelete")).status_code == 200
                deleted[namespace].remove(topic)
                living[namespace].add(topic)
            elif done == "publish" and topic in living[namespace]:
                await daemon.http.post(f"{topics}/{topic}/publish", json={"messages": ["m"]})
            elif done == "properties" and topic in living[namespace]:
                await daemon.http.put(f"{topics}/{topic}/properties", json={"ttl": chosen.randrange(60, 90)})
        assert 0 < scans < lists


async def test_a_list_is_read_again_only_when_a_topic_has_changed():
    async with in_process(listener="hot") as daemon:
        await daemon.create()
        await daemon.http.get(TOPICS)
        scans = daemon.store.calls["scan"]
        for _ in range(3):
            assert (await daemon.http.get(TOPICS)).json() == ["t"]
        assert daemon.store.calls["scan"] == scans
        await daemon.create("u")
        scans = daemon.store.calls["scan"]
        assert (await daemon.http.get(TOPICS)).json() == ["t", "u"]
        assert daemon.store.calls["scan"] == scans + 1


async def test_a_topic_that_is_created_while_a_list_is_read_is_in_the_next_one(monkeypatch):
    async with in_process(listener="hot") as daemon:
        await daemon.create()
        scan = daemon.store.scan

        async def while_answering(*asked, **more):
            await scan(*asked, **more)
            monkeypatch.undo()
            await daemon.create("u")

        monkeypatch.setattr(daemon.store, "scan", while_answering)
        assert (await daemon.http.get(TOPICS)).json() == ["t"]
        assert (await daemon.http.get(TOPICS)).json() == ["t", "u"]


def test_kept_lists_are_bounded():
    kept = KeptNames(MemoryStore())
    kept.put("long", b"x" * (KeptNames.MAX_LIST_BYTES + 1), kept.number)
    assert kept.get("long") is None
    for size in (KeptNames.MAX_LIST_BYTES, 2):
        body, most = b"x" * size, KeptNames.MAX_BYTES // (size + KeptNames.LIST_BYTES)
        names = [f"{size}-{number}" for number in range(2 * most)]
        for name in [*names, *names[:3], names[0], names[0]]:
            kept.put(name, body, kept.number)
            assert kept.get(name) == body
        assert 0.9 * most - 1 <= sum(kept.get(each) is not None for each in names) <= most
    shared = KeptNames(SimpleNamespace(topics_number=None))
    shared.put("n", b"x", shared.number)
    assert shared.get("n") is None, "other processes may write to such a store"


async def test_a_topic_whose_row_is_damaged_is_listed_even_if_it_seems_deleted():
    async with in_process() as daemon:
        await daemon.create()
        row = metadata_key(TopicName("ns", "damaged"))
        claim = await daemon.store.claim(TopicName("ns", "damaged"))
        await daemon.store.write([put_one(Table.METADATA, row, pack_record({"d": 1}))], claim=claim)
        assert (await daemon.http.get(TOPICS)).json() == ["damaged", "t"]


@pytest.mark.parametrize("listener", ["hot", "application"])
async def test_a_list_is_answered_while_the_answer_budget_is_exhausted(listener):
    async with in_process(listener=listener) as daemon:
        for number in range(500):
            await daemon.create(f"topic-with-a-long-name-{number}")
        await daemon.http.get(TOPICS)
        taken = daemon.service.answers.room()
        taken.must_have(daemon.service.answers.max_bytes)
        with trio.fail_after(PATIENCE_S):
            answer = await daemon.http.get(TOPICS, headers={"accept-encoding": "identity"})
        assert answer.status_code == 200
        assert len(answer.json()) == 500
        taken.release()


@pytest.mark.parametrize(
    "rare",
    [
        post("t", b"{}", "Transfer-Encoding: chunked").removesuffix(b"{}").replace(b"POST", b"PUT", 1)
        + b"2\r\n{}\r\n0\r\n\r\n",
        asked("PUT", "/t", gzip.compress(b"{}"), ZIPPED),
        asked("GET", "/t", b"{}"),
        asked("GET", "/t/stats"),
    ],
)
async def test_a_connection_returns_to_the_lane_after_a_request_for_the_application(rare):
    async with (
        running(hot=True) as listener,
        await trio.open_tcp_stream("127.0.0.1", listener.port) as stream,
    ):
        reader = Reader(stream)
        behind = []
        for request in (asked("GET", "/t"), rare, post("t/publish"), asked("GET", "/t"), post("t/publish")):
            await stream.send_all(request)
            await reader.reply()
            behind.append(listener.toys.by_application)
        assert behind[0] == 0
        assert behind[-1] == behind[1], "only the request that was not for the lane went elsewhere"


async def test_a_page_of_a_browser_stays_with_hypercorn():
    async with (
        running(hot=True) as listener,
        await trio.open_tcp_stream("127.0.0.1", listener.port) as stream,
    ):
        reader = Reader(stream)
        for number in range(1, 4):
            await stream.send_all(asked("GET", "/t", None, "Sec-Fetch-Site: same-origin"))
            await reader.reply()
            assert listener.toys.by_application == number
