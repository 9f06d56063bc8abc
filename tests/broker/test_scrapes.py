"""Content and formats of a scrape."""

from __future__ import annotations

import os

import trio
from broker_in_process import TOPICS
from prometheus_client.openmetrics.parser import text_string_to_metric_families as families_of_openmetrics
from prometheus_client.parser import text_string_to_metric_families as families_of_text
from trio.testing import wait_all_tasks_blocked


async def scraped(daemon, accept=""):
    """Return the value of each series by name."""
    answer = await daemon.call("GET", "/metrics", headers={"Accept": accept})
    parse = families_of_openmetrics if "openmetrics" in answer.headers["content-type"] else families_of_text
    return {sample.name: sample.value for family in parse(answer.text) for sample in family.samples}


async def test_openmetrics_is_served_where_it_is_accepted_with_the_same_values(daemon):
    await scraped(daemon)  # this scrape is counted in later ones
    text = await scraped(daemon)
    for accept in (
        "application/openmetrics-text; version=1.0.0",
        "application/openmetrics-text;q=0.8,text/plain;q=0.5",
    ):
        answer = await daemon.call("GET", "/metrics", headers={"Accept": accept})
        assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
        assert answer.text.endswith("# EOF\n")
        assert (await scraped(daemon, accept)).keys() == text.keys()
    for accept in (
        "",
        "*/*",
        "text/plain",
        "text/plain;version=0.0.4",
        "application/json",
        "application/openmetrics-text;q=0",
        "application/openmetrics-text;version=0.0.1,text/plain;version=0.0.4;q=0.3",
        "application/openmetrics-text;q=0.2,text/plain;version=0.0.4;q=0.9",
        "application/openmetrics-text;q=x",
        "=;=,;q,",
    ):
        answer = await daemon.call("GET", "/metrics", headers={"Accept": accept})
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8", accept
        assert "Accept" in answer.headers.get_list("vary", split_commas=True)


async def test_the_process_shows_its_memory_time_and_descriptors(daemon):
    found = await scraped(daemon)
    assert found["process_resident_memory_bytes"] > 1 << 20
    assert found["process_cpu_seconds_total"] > 0
    assert abs(found["process_open_fds"] - len(os.listdir("/proc/self/fd"))) < 10


async def test_delivery_is_measured_from_the_publish_of_the_message_a_poll_waited_for(daemon):
    await daemon.create()
    await daemon.publish("old")
    daemon.clock.ms += 5_000

    async def wait_for_one(**body):
        assert [each["payload"] for each in await daemon.poll(waitMs=10_000, **body)] == ["new"]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: wait_for_one(startFrom=daemon.clock.ms))
        nursery.start_soon(lambda: wait_for_one(startFrom=daemon.clock.ms, isolation="committed"))
        await wait_all_tasks_blocked()
        await daemon.publish("new")
    found = await scraped(daemon)
    assert found["plainsong_end_to_end_seconds_count"] == 2
    assert found["plainsong_end_to_end_seconds_sum"] == 0
    daemon.clock.ms += 5_000
    assert len(await daemon.poll(waitMs=10_000)) == 2  # already there when the poll arrived: no delay to count
    assert (await scraped(daemon))["plainsong_end_to_end_seconds_count"] == 2


async def test_the_delivery_of_a_transactional_message_is_measured_from_its_publish_through_its_commit(daemon):
    await daemon.create()
    begun = (await daemon.call("POST", "/v1/transactions", json={})).json()
    body = {"messages": ["held"], "transactionWritePointer": begun["writePointer"]}
    await daemon.call("POST", f"{TOPICS}/t/publish", json=body)
    daemon.clock.ms += 3_000
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: daemon.poll(waitMs=10_000, isolation="committed"))
        await wait_all_tasks_blocked()
        await daemon.call("POST", f"/v1/transactions/{begun['id']}/commit", json={})
    assert (await scraped(daemon))["plainsong_end_to_end_seconds_sum"] == 3
