"""Metrics of single topics and their readers, on a separate route with a bound."""

from __future__ import annotations

import pytest
import trio
from broker_in_process import TOPICS
from prometheus_client.openmetrics.parser import text_string_to_metric_families as families_of_openmetrics
from prometheus_client.parser import text_string_to_metric_families as families_of_text

from broker.api.topics import metrics as topic_metrics

ROUTE = "/metrics/topics"


async def scraped(daemon, match=None, accept=""):
    """Return the samples' values by name and label values."""
    query = {} if match is None else {"match": match}
    answer = await daemon.call("GET", ROUTE, params=query, headers={"Accept": accept})
    parse = families_of_openmetrics if "openmetrics" in answer.headers["content-type"] else families_of_text
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in parse(answer.text)
        for sample in family.samples
    }


async def test_the_metrics_of_a_topic_show_its_content_publishes_and_reads(daemon):
    await daemon.create()
    assert await scraped(daemon) == {
        ("plainsong_topic_messages", "ns", "t"): 0,
        ("plainsong_topic_bytes", "ns", "t"): 0,
        ("plainsong_topic_hidden_messages", "ns", "t"): 0,
        ("plainsong_topic_published_total", "ns", "t"): 0,
        ("plainsong_topic_polled_total", "ns", "t"): 0,
    }
    await daemon.publish("four", "five!")
    await daemon.poll(limit=1)
    daemon.clock.ms += 5_000
    found = await scraped(daemon)
    stats = (await daemon.call("GET", f"{TOPICS}/t/stats")).json()
    assert found == {
        ("plainsong_topic_messages", "ns", "t"): 2,
        ("plainsong_topic_bytes", "ns", "t"): stats["bytes"],
        ("plainsong_topic_oldest_age_seconds", "ns", "t"): 5,
        ("plainsong_topic_hidden_messages", "ns", "t"): 0,
        ("plainsong_topic_published_total", "ns", "t"): 2,
        ("plainsong_topic_polled_total", "ns", "t"): 1,
    }
    assert await scraped(daemon, accept="application/openmetrics-text") == found


async def test_counters_keep_growing_beyond_the_minutes_of_rates(daemon, autojump_clock):
    await daemon.create()
    for _ in range(3):
        await daemon.publish("a", "b")
        await trio.sleep(70)
    assert (await scraped(daemon))["plainsong_topic_published_total", "ns", "t"] == 6
    await trio.sleep(7200)
    assert (await scraped(daemon))["plainsong_topic_published_total", "ns", "t"] == 6


async def test_match_selects_the_topics_of_a_scrape(daemon):
    for topic in ("orders", "orders-eu", "refunds"):
        await daemon.create(topic)
    await daemon.call("PUT", "/v1/namespaces/other/topics/orders", json={})

    async def topics(match):
        return {key[1:] for key in await scraped(daemon, match) if key[0] == "plainsong_topic_messages"}

    assert await topics("ns:orders") == {("ns", "orders")}
    assert await topics("ns:orders*") == {("ns", "orders"), ("ns", "orders-eu")}
    assert await topics("ns:refunds,o*:*") == {("ns", "refunds"), ("other", "orders")}
    assert await topics("none:*") == set()
    assert len(await topics(None)) == len(await topics("*:*")) == 4


@pytest.mark.parametrize(
    "match", ["", "orders", "service", "ns:*a", "ns:a,", "ns:" + "a" * 5_000, ",".join(["a:b"] * 101)]
)
async def test_an_invalid_match_is_refused(daemon, match):
    await daemon.call("GET", ROUTE, params={"match": match}, status=400, code="invalid_parameter")


async def test_a_thousand_topics_are_shown_and_more_are_refused(daemon, monkeypatch):
    monkeypatch.setattr(topic_metrics, "MAX_TOPICS", 3)
    for number in range(4):
        await daemon.create(f"t{number}")
    refused = await daemon.call("GET", ROUTE, status=400, code="invalid_parameter")
    assert "4 topics" in refused.json()["detail"]
    await daemon.call("DELETE", f"{TOPICS}/t0")
    found = await scraped(daemon)
    assert sum(key[0] == "plainsong_topic_messages" for key in found) == 3


async def test_readers_show_what_is_unread_hidden_and_expired_unread(daemon):
    await daemon.create(ttl=60)
    first, _ = await daemon.publish("a", "b")
    await daemon.call("PUT", f"{TOPICS}/t/readers/kept", json={"position": first})
    await daemon.call("POST", f"{TOPICS}/t/poll", json={"limit": 2}, headers={"Plainsong-Reader": "named"})
    daemon.clock.ms += 61_000  # the messages so far have expired
    await daemon.publish("c")
    begun = (await daemon.call("POST", "/v1/transactions", json={})).json()
    body = {"messages": ["d"], "transactionWritePointer": begun["writePointer"]}
    await daemon.call("POST", f"{TOPICS}/t/publish", json=body)
    readers = {key: value for key, value in (await scraped(daemon)).items() if key[0].startswith("plainsong_reader")}
    assert readers == {
        ("plainsong_reader_visible_messages", "ns", "kept", "t"): 1,
        ("plainsong_reader_visible_messages", "ns", "named", "t"): 1,
        ("plainsong_reader_hidden_messages", "ns", "kept", "t"): 1,
        ("plainsong_reader_hidden_messages", "ns", "named", "t"): 1,
        ("plainsong_reader_expired_unread_messages", "ns", "kept", "t"): 1,
        ("plainsong_reader_expired_unread_messages", "ns", "named", "t"): 0,
    }


async def test_a_thousand_readers_are_shown_and_more_are_refused(daemon, monkeypatch):
    monkeypatch.setattr(topic_metrics, "MAX_READERS", 2)
    for topic in ("a", "b"):
        await daemon.create(topic)
        at, _ = await daemon.publish("x", topic=topic)
        for reader in ("one", "two")[: 2 if topic == "a" else 1]:
            await daemon.call("PUT", f"{TOPICS}/{topic}/readers/{reader}", json={"position": at})
    refused = await daemon.call("GET", ROUTE, status=400, code="invalid_parameter")
    assert "3 readers" in refused.json()["detail"]
    assert len([key for key in await scraped(daemon, "ns:a") if key[0] == "plainsong_reader_visible_messages"]) == 2


async def test_a_scrape_opens_no_topic_that_has_no_reader(daemon):
    names = [f"t{number}" for number in range(5)]
    for name in names:
        await daemon.create(name)
    at, _ = await daemon.publish("x", topic="t0")
    await daemon.call("PUT", f"{TOPICS}/t0/readers/r", json={"position": at})
    directory = daemon.service.directory
    before = len(directory)
    await scraped(daemon)
    assert len(directory) == before
