"""The plan for a cleaning job, which must stay correct."""

from __future__ import annotations

import pytest
from broker_in_process import START_MS, TOPICS, in_process

MAINTENANCE = f"{TOPICS}/t/maintenance"


async def maintained(daemon, query=""):
    return (await daemon.call("POST", MAINTENANCE + query)).json()


async def test_maintenance_reports_what_has_expired_and_that_the_snapshot_covers_everything(daemon):
    await daemon.create(ttl=60)
    body = {"messages": ["a", "b"], "producer": "p", "sequenceIds": [0, 1]}
    await daemon.call("POST", f"{TOPICS}/t/publish", json=body)
    daemon.clock.ms = START_MS + 61_000
    _, last = await daemon.publish("c")
    told = await maintained(daemon)
    assert (told["generation"], told["expiredBefore"], told["invalid"]) == (1, START_MS + 1_000, [])
    assert told["snapshotPosition"] > last
    page = (await daemon.call("GET", f"{TOPICS}/t/producers")).json()
    assert (page["snapshot"]["entriesSince"], page["snapshot"]["position"]) == (0, told["snapshotPosition"])


async def test_its_report_holds_after_a_crash_with_the_clock_set_back(daemon):
    await daemon.create(ttl=60)
    await daemon.publish("a")
    daemon.clock.ms = START_MS + 61_000
    told = await maintained(daemon)
    async with in_process(store=daemon.store) as again:
        assert again.clock.ms == START_MS
        assert (await maintained(again))["expiredBefore"] == told["expiredBefore"]
        assert await again.poll() == []


async def test_maintenance_names_the_invalid_transactions_with_messages_in_the_topic(daemon):
    await daemon.create()
    begun = (await daemon.call("POST", "/v1/transactions", json={"type": "long"})).json()
    await daemon.call("POST", f"{TOPICS}/t/publish", json={"messages": ["a"], "transactionWritePointer": begun["id"]})
    assert (await maintained(daemon))["invalid"] == []
    await daemon.call("POST", f"/v1/transactions/{begun['id']}/invalidate")
    assert (await maintained(daemon))["invalid"] == [begun["id"]]
    assert (await maintained(daemon, "?longs=string"))["invalid"] == [str(begun["id"])]


@pytest.mark.parametrize("deleted", [True, False])
async def test_a_missing_topic_has_nothing_to_maintain(daemon, deleted):
    if deleted:
        await daemon.create()
        await daemon.call("DELETE", f"{TOPICS}/t")
    await daemon.call("POST", MAINTENANCE, status=404, code="topic_not_found")
