"""One poll of many topics: it is fair and bounded, has one wait for all topics, and leaves no task behind."""

from __future__ import annotations

import json

import pytest
import trio
from broker_in_process import START_MS, TOPICS, asgi_scope, in_process

from broker.http.wire import accepts_gzip

MANY = "/v1/namespaces/ns/poll"


async def many(daemon, topics, **body):
    answer = await daemon.call("POST", MANY, json={"topics": topics, **body})
    return answer.json()["topics"]


def payloads(answer):
    return {topic: "".join(message["payload"] for message in found["messages"]) for topic, found in answer.items()}


async def test_each_topic_answers_its_messages_last_id_and_end_in_the_order_asked(daemon):
    for topic in ("a", "b", "c"):
        await daemon.create(topic)
    first, _ = await daemon.publish("1", "2", topic="a")
    await daemon.publish("3", topic="b")
    found = await many(daemon, {"c": {}, "a": {"startFrom": first, "inclusive": False}, "b": {"startFrom": START_MS}})
    assert list(found) == ["c", "a", "b"]
    assert payloads(found) == {"a": "2", "b": "3", "c": ""}
    assert {each["end"] for each in found.values()} == {"end"}
    again = {topic: {"startFrom": each["lastId"], "inclusive": False} for topic, each in found.items()}
    again["c"]["startFrom"] = None
    assert payloads(await many(daemon, again)) == {"a": "", "b": "", "c": ""}


async def test_a_missing_topic_has_its_own_problem_and_the_others_their_messages(daemon):
    await daemon.create("a")
    await daemon.publish("x", topic="a")
    found = await many(daemon, {"none": {}, "a": {}}, waitMs=60_000)
    assert found["none"]["error"]["code"] == "topic_not_found"
    assert found["none"]["error"]["status"] == 404
    assert found["a"]["messages"][0]["payload"] == "x"


async def test_a_limit_is_shared_equally_and_unused_shares_go_to_the_others(daemon):
    for topic, count in (("a", 100), ("b", 2), ("c", 100)):
        await daemon.create(topic)
        await daemon.publish(*(["x"] * count), topic=topic)
    for _ in range(3):
        found = await many(daemon, {"a": {}, "b": {}, "c": {}}, limit=22)
        assert {topic: len(each["messages"]) for topic, each in found.items()} == {"a": 10, "b": 2, "c": 10}
        assert {topic: each["end"] for topic, each in found.items()} == {"a": "more", "b": "end", "c": "more"}
    found = await many(daemon, {"a": {"limit": 3}, "b": {}, "c": {}}, limit=30)
    assert {topic: len(each["messages"]) for topic, each in found.items()} == {"a": 3, "b": 2, "c": 25}


async def test_no_topic_is_last_forever_when_there_is_room_for_one_message_only(daemon):
    topics = ["a", "b", "c"]
    for topic in topics:
        await daemon.create(topic)
        await daemon.publish(*("x" * 5), topic=topic)
    served = set()
    for _ in topics:
        found = await many(daemon, {key: {} for key in topics}, limit=1)
        served |= {topic for topic, each in found.items() if each["messages"]}
        assert sum(len(each["messages"]) for each in found.values()) == 1
        assert {each["end"] for each in found.values()} == {"more"}
    assert served == set(topics)


async def test_the_byte_limit_is_shared_and_exceeded_by_one_message_at_most(daemon):
    topics = [f"t{number}" for number in range(5)]
    for topic in topics:
        await daemon.create(topic)
        await daemon.publish(*(["x" * 1000] * 5), topic=topic)
    found = await many(daemon, {key: {} for key in topics}, maxBytes=10_500)
    assert sum(len(each["messages"]) for each in found.values()) == 10
    assert {len(each["messages"]) for each in found.values()} == {2}
    found = await many(daemon, {key: {} for key in topics}, maxBytes=1)
    assert sum(len(each["messages"]) for each in found.values()) == 1


async def test_a_walk_with_small_pages_reads_every_topic_once_and_in_order(daemon):
    expected = {}
    for number in range(4):
        topic = f"t{number}"
        await daemon.create(topic)
        expected[topic] = [f"{number}-{index}" for index in range(number * 7)]
        if expected[topic]:
            await daemon.publish(*expected[topic], topic=topic)
    asked = {topic: {} for topic in expected}
    read = {topic: [] for topic in expected}
    while True:
        found = await many(daemon, asked, limit=5)
        for topic, each in found.items():
            read[topic] += [message["payload"] for message in each["messages"]]
            if each["lastId"]:
                asked[topic] = {"startFrom": each["lastId"], "inclusive": False}
        if all(each["end"] == "end" for each in found.values()):
            break
    assert read == expected


async def test_one_message_in_one_topic_ends_the_wait_and_leaves_no_poll_parked(daemon, nursery):
    topics = [f"t{number}" for number in range(50)]
    for topic in topics:
        await daemon.create(topic)
    answers = []

    async def wait():
        answers.append(await many(daemon, {key: {} for key in topics}, waitMs=60_000))

    nursery.start_soon(wait)
    await trio.testing.wait_all_tasks_blocked()
    assert parked(daemon) == 50
    await daemon.publish("x", topic="t33")
    await trio.testing.wait_all_tasks_blocked()
    assert {topic for topic, text in payloads(answers[0]).items() if text} == {"t33"}
    assert parked(daemon) == 0


def parked(daemon):
    return sum(len(entry.actor.core.parking) for entry in daemon.service.directory)


async def test_a_client_that_leaves_frees_everything_it_held(daemon, nursery):
    topics = {f"t{number}": {} for number in range(20)}
    for topic in topics:
        await daemon.create(topic)
    leaves = trio.Event()
    nursery.start_soon(_wait_until, leaves, daemon, topics)
    await trio.testing.wait_all_tasks_blocked()
    assert parked(daemon) == 20
    leaves.set()
    await trio.testing.wait_all_tasks_blocked()
    assert parked(daemon) == 0


async def _wait_until(leaves, daemon, topics):
    body = json.dumps({"topics": topics, "waitMs": 60_000}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    answered = []

    async def receive():
        if messages:
            return messages.pop()
        await leaves.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        answered.append(message)

    await daemon.asgi(asgi_scope("POST", MANY), receive, send)
    assert not answered


async def test_a_wait_ends_on_time_with_what_has_arrived(daemon):
    await daemon.create("a")
    found = await many(daemon, {"a": {}, "none": {}}, waitMs=1)
    assert payloads({"a": found["a"]}) == {"a": ""}
    assert found["none"]["error"]["code"] == "topic_not_found"
    assert parked(daemon) == 0


async def test_a_poll_of_missing_topics_does_not_wait(daemon):
    found = await many(daemon, {"none": {}, "neither": {}}, waitMs=60_000)
    assert {each["error"]["code"] for each in found.values()} == {"topic_not_found"}


async def test_a_topic_deleted_during_the_wait_ends_it(daemon, nursery):
    for topic in ("a", "b"):
        await daemon.create(topic)
    answers = []

    async def wait():
        answers.append(await many(daemon, {"a": {}, "b": {}}, waitMs=60_000))

    nursery.start_soon(wait)
    await trio.testing.wait_all_tasks_blocked()
    await daemon.call("DELETE", f"{TOPICS}/b")
    await trio.testing.wait_all_tasks_blocked()
    assert answers[0]["b"]["error"]["code"] == "topic_not_found"
    assert answers[0]["a"]["messages"] == []


async def test_a_stopping_daemon_answers_the_wait(daemon, nursery):
    for topic in ("a", "b"):
        await daemon.create(topic)
    answers = []

    async def wait():
        answers.append(await many(daemon, {"a": {}, "b": {}}, waitMs=60_000))

    nursery.start_soon(wait)
    await trio.testing.wait_all_tasks_blocked()
    daemon.service.directory.close()
    await trio.testing.wait_all_tasks_blocked()
    assert payloads(answers[0]) == {"a": "", "b": ""}


async def test_expired_messages_do_not_end_a_wait(daemon, nursery):
    await daemon.create("a")
    await daemon.publish({"payload": "x", "ttlSeconds": 1}, topic="a")
    daemon.clock.ms += 1001
    answers = []

    async def wait():
        answers.append(await many(daemon, {"a": {}}, waitMs=60_000))

    nursery.start_soon(wait)
    await trio.testing.wait_all_tasks_blocked()
    assert not answers
    await daemon.publish("y", topic="a")
    await trio.testing.wait_all_tasks_blocked()
    assert payloads(answers[0]) == {"a": "y"}


async def test_at_most_a_thousand_topics_may_be_named(daemon):
    found = await many(daemon, {f"t{number:0240}": {"startFrom": "00" * 20} for number in range(1000)})
    assert len(found) == 1000
    topics = {f"t{number}": {} for number in range(1001)}
    await daemon.call("POST", MANY, status=413, code="request_too_large", json={"topics": topics})


async def test_payloads_can_be_asked_for_in_base64_and_answers_compressed(daemon):
    await daemon.create("a")
    await daemon.publish("x" * 5000, topic="a")
    answer = await daemon.call("POST", MANY + "?payload=base64", json={"topics": {"a": {}}})
    assert "base64" in answer.json()["topics"]["a"]["messages"][0]["payload"]
    assert accepts_gzip(daemon.http.headers["accept-encoding"])
    assert answer.headers["content-encoding"] == "gzip"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "invalid_parameter"),
        (b"[]", 400, "malformed_body"),
        (b'{"topics": {}}', 400, "invalid_parameter"),
        (b'{"topics": []}', 400, "malformed_body"),
        (b'{"topics": {"a": 1}}', 400, "malformed_body"),
        (b'{"topics": {"a": {}, "a": {}}}', 400, "malformed_body"),
        (b'{"topics": {"a.b": {}}}', 400, "invalid_name"),
        (b'{"topics": {"a": {"from": 1}}}', 400, "unknown_field"),
        (b'{"topics": {"a": {"startFrom": "x"}}}', 400, "invalid_message_id"),
        (b'{"topics": {"a": {"startFrom": -1}}}', 400, "invalid_parameter"),
        (b'{"topics": {"a": {"limit": 0}}}', 400, "invalid_parameter"),
        (b'{"topics": {"a": {}}, "limit": 0}', 400, "invalid_parameter"),
        (b'{"topics": {"a": {}}, "waitMs": 60001}', 400, "invalid_parameter"),
        (b'{"topics": {"a": {}}, "isolation": "x"}', 400, "invalid_parameter"),
    ],
)
async def test_wrong_requests_are_refused_as_a_whole(daemon, body, status, code):
    await daemon.call("POST", MANY, status=status, code=code, content=body)


async def test_a_page_is_bounded_by_the_configuration_whatever_is_requested():
    async with in_process(poll__max_messages=4) as daemon:
        for topic in ("a", "b"):
            await daemon.create(topic)
            await daemon.publish(*("x" * 9), topic=topic)
        found = await many(daemon, {"a": {}, "b": {}}, limit=1000)
        assert payloads(found) == {"a": "xx", "b": "xx"}
