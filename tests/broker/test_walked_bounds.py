"""After a restart the daemon reads everything that it accepted: extreme settings, properties, names and sizes."""

from __future__ import annotations

from itertools import product

import pytest
from broker_in_process import TOPICS, in_process
from test_committed_polls import begin, decide, under

from broker.config import every_setting
from plainsong.protocol.properties import DEFAULT_TTL_S, TopicProperties
from plainsong.protocol.records import Metadata
from plainsong.protocol.requests import MAX_ATTRIBUTE_BYTES, MAX_PRODUCER_BYTES, MAX_SEGMENT_BYTES, MAX_TTL_S
from storage.memory import MemoryStore
from storage.settings import Kind
from tests.storage.faulty import FaultyStore

LONG = 255
#: Settings of parts that do not run in this process: listeners, disk, other instances, files of certificates and
#: tokens.
ELSEWHERE = ("http.", "tls.", "cluster.", "storage.", "security.", "log.", "otel.", "shutdown.", "console.", "metrics.")


def walked_settings():
    for name, setting in every_setting().items():
        meaning = setting.meaning
        if name.startswith(ELSEWHERE) or (name, Kind.CHOICE) == ("transactions.service", meaning.kind):
            continue
        if meaning.kind is Kind.SWITCH:
            ends = (False, True)
        elif meaning.kind is Kind.CHOICE:
            ends = meaning.choices
        elif meaning.low is None:
            continue
        else:
            ends = (meaning.low, meaning.high)
        for end in ends:
            yield pytest.param(name.replace(".", "__"), end, id=f"{name}={end}")


#: Statuses that a setting may cause; each means that nothing happened.
REFUSED = {
    200,
    404,
    409,  # a limit on open transactions or producers, an old write pointer
    413,  # a low limit on messages
    503,  # a low limit on queues and open topics
}


async def everything(daemon):
    """Store one thing of each kind, and return everything that was acknowledged."""
    done = {}

    async def ask(what, method, path, body=None):
        answer = await daemon.ask(method, path, body)
        assert answer.status_code in REFUSED, (what, answer.status_code, answer.text)
        done[what] = answer.status_code == 200
        return answer.json() if answer.status_code == 200 and answer.content else {}

    await ask("topic", "PUT", f"{TOPICS}/t")
    await ask("properties", "PUT", f"{TOPICS}/u", {"ttl": 3600})
    await ask("namespace", "PUT", "/v1/namespaces/ns/properties", {"deduplication": "enabled"})
    await ask("plain", "POST", f"{TOPICS}/t/publish", {"messages": ["p"]})
    session = await ask("producer", "PUT", f"{TOPICS}/t/producers/s", {})
    if session:
        body = {"messages": ["d"], "producer": "s", "producerEpoch": session["epoch"], "sequenceIds": [0]}
        await ask("deduplicated", "POST", f"{TOPICS}/t/publish", body)
    begun = await ask("begun", "POST", "/v1/transactions")
    if begun:
        body = {"messages": ["c"], "transactionWritePointer": begun["writePointer"]}
        await ask("under", "POST", f"{TOPICS}/t/publish", body)
        await ask("committed", "POST", f"/v1/transactions/{begun['id']}/commit")
    await ask("reader", "PUT", f"{TOPICS}/t/readers/r", {"position": "0" * 40})
    return done


async def check(daemon, done):
    """Check that everything acknowledged can be read, and that the daemon is ready."""
    assert (await daemon.call("GET", "/readyz")).json()["ready"]
    for what, path in (
        ("topic", f"{TOPICS}/t"),
        ("properties", f"{TOPICS}/u"),
        ("namespace", "/v1/namespaces/ns/properties"),
        ("producer", f"{TOPICS}/t/producers/s"),
    ):
        if done.get(what):
            await daemon.call("GET", path)
    found = {message["payload"] for message in await daemon.poll()}
    wanted = {"plain": "p", "deduplicated": "d", "under": "c"}
    assert found >= {payload for what, payload in wanted.items() if done.get(what)}
    assert (await daemon.call("GET", f"{TOPICS}/t/readers")).status_code == 200
    assert (await daemon.call("GET", f"{TOPICS}/t/stats")).status_code == 200


@pytest.mark.parametrize(("setting", "value"), list(walked_settings()))
async def test_data_stored_with_a_setting_at_an_end_of_its_range_is_readable_after_a_restart(setting, value):
    store = FaultyStore(MemoryStore())
    async with in_process(store=store, **{setting: value}) as daemon:
        done = await everything(daemon)
    async with in_process(store=store, **{setting: value}) as daemon:
        for what, method, path in (("topic", "GET", f"{TOPICS}/t"), ("ready", "GET", "/readyz")):
            assert (await daemon.ask(method, path)).status_code == 200, what
    async with in_process(store=store) as daemon:
        await check(daemon, done)


# --- properties ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "properties",
    [
        {"ttl": 1},
        {"ttl": MAX_TTL_S},
        {"max_bytes": 1},
        {"max_bytes": (1 << 63) - 1},
        *({"transactional": each} for each in ("optional", "required", "disabled")),
        *({"deduplication": each} for each in ("inherit", "enabled", "disabled")),
        *({"chain": each} for each in ("none", "sha256")),
    ],
    ids=str,
)
async def test_properties_at_the_ends_of_their_ranges_are_read_again_after_a_restart(properties):
    store = FaultyStore(MemoryStore())
    async with in_process(store=store) as daemon:
        await daemon.create("created", **properties)
        await daemon.create("changed")
        await daemon.call("PUT", f"{TOPICS}/changed/properties", json=properties)
        created = (await daemon.call("GET", f"{TOPICS}/created")).json()
        for key, value in properties.items():
            assert created["properties"].get(key, "none") == str(value)
    async with in_process(store=store) as daemon:
        assert (await daemon.call("GET", f"{TOPICS}/created")).json() == created
        changed = (await daemon.call("GET", f"{TOPICS}/changed")).json()
        assert changed["properties"] == created["properties"]


def test_every_property_is_walked():
    shown = TopicProperties(max_bytes=1, chain="sha256").shown(1)
    assert shown.keys() == {"ttl", "generation", "max_bytes", "transactional", "deduplication", "chain"}


def test_a_topic_may_set_any_time_to_live_that_the_default_may_be():
    assert every_setting()["topic.default_ttl_s"].meaning.high == MAX_TTL_S


def test_a_row_with_a_longer_time_to_live_than_any_topic_may_set_is_read():
    too_long = Metadata(1, TopicProperties(ttl_s=100 * 365 * 86_400), 5, 5)
    assert Metadata.decode(too_long.encode()).properties == TopicProperties(ttl_s=MAX_TTL_S)
    usual = Metadata(1, TopicProperties(), 5, 5)
    assert Metadata.decode(usual.encode()).properties.ttl_s == DEFAULT_TTL_S


@pytest.mark.parametrize("value", ["inherit", "enabled", "disabled"])
async def test_properties_of_a_namespace_are_read_again_after_a_restart(value):
    store = FaultyStore(MemoryStore())
    async with in_process(store=store) as daemon:
        await daemon.call("PUT", "/v1/namespaces/ns/properties", json={"deduplication": value})
    async with in_process(store=store) as daemon:
        assert (await daemon.call("GET", "/v1/namespaces/ns/properties")).json()["properties"] == {
            "deduplication": value
        }


# --- names, attributes, sizes and numbers ----------------------------------------------------------


@pytest.mark.parametrize("size", [1, LONG])
async def test_names_of_any_length_are_read_again_after_a_restart(size):
    store = FaultyStore(MemoryStore())
    namespace, topic, reader, producer = "n" * size, "t" * size, "r" * size, "p" * size
    path = f"/v1/namespaces/{namespace}/topics/{topic}"
    async with in_process(store=store) as daemon:
        await daemon.call("PUT", path)
        await daemon.call("POST", f"{path}/publish", json={"messages": ["x"]})
        await daemon.call("PUT", f"{path}/readers/{reader}", json={"position": "f" * 40})
        await daemon.call("PUT", f"{path}/producers/{producer}", json={})
        begun = await begin(daemon, clientId="c" * size)
        body = {"messages": ["y"], "transactionWritePointer": begun["writePointer"]}
        await daemon.call("POST", f"{path}/publish", json=body)
    async with in_process(store=store) as daemon:
        assert (await daemon.call("GET", f"/v1/namespaces/{namespace}/topics")).json() == [topic]
        assert [each["payload"] for each in (await daemon.call("POST", f"{path}/poll", json={})).json()] == ["x", "y"]
        assert [each["name"] for each in (await daemon.call("GET", f"{path}/readers")).json()] == [reader]
        assert (await daemon.call("GET", f"{path}/producers/{producer}")).json()["producer"] == producer
        await decide(daemon, begun, "commit")


@pytest.mark.parametrize("sequence_id", [0, (1 << 63) - 1])
@pytest.mark.parametrize("producer", ["p", "é" * (MAX_PRODUCER_BYTES // 2)])
async def test_sequence_ids_and_producers_at_the_ends_are_remembered_after_a_restart(producer, sequence_id):
    store = FaultyStore(MemoryStore())
    body = {"messages": ["x"], "producer": producer, "sequenceIds": [sequence_id]}
    for turn in range(2):
        async with in_process(store=store) as daemon:
            if not turn:
                await daemon.create()
            answer = await daemon.call("POST", f"{TOPICS}/t/publish", json=body)
            assert answer.json()["duplicate"] is bool(turn)


ATTRIBUTES = [{}, {"k": ""}, {"k": "v" * (MAX_ATTRIBUTE_BYTES - 1)}, {"a" * MAX_ATTRIBUTE_BYTES: ""}]


@pytest.mark.parametrize(
    ("size", "attributes", "ttl_s"),
    [
        *product((0, 1), ATTRIBUTES, (1, MAX_TTL_S)),
        # Once is enough for the largest payload, whose size does not change how the others are stored.
        (8 << 20, ATTRIBUTES[-1], MAX_TTL_S),
    ],
    ids=lambda each: f"{len(each)} attributes" if isinstance(each, dict) else str(each),
)
async def test_messages_of_any_size_and_attributes_are_read_again_after_a_restart(size, attributes, ttl_s):
    store = FaultyStore(MemoryStore())
    payload = "x" * size
    async with in_process(store=store) as daemon:
        await daemon.create()
        begun = await begin(daemon)
        more = {"attributes": [attributes], "ttlSeconds": ttl_s}
        await daemon.publish(payload, **more)
        body = {"messages": [payload], "transactionWritePointer": begun["writePointer"], **more}
        await daemon.call("POST", f"{TOPICS}/t/store", json={**body, "segment": "s" * MAX_SEGMENT_BYTES})
        await under(daemon, begun)
        await decide(daemon, begun, "commit")
    async with in_process(store=store) as daemon:
        found = await daemon.poll(isolation="committed", limit=1)
        found += await daemon.poll(isolation="committed", startFrom=found[0]["id"], inclusive=False)
        assert [each["payload"] for each in found] == [payload, payload]
        assert [each.get("attributes", {}) for each in found] == [attributes, attributes]
