"""The scrub over HTTP: it starts on request, and damage is in its report and among the findings that need attention."""

from __future__ import annotations

from plainsong.protocol.effects import Put, Table
from plainsong.protocol.keys import generation_prefix
from plainsong.protocol.names import TopicName
from storage.base import StoreError

SCRUB = "/v1/scrub"
KEY = b"\x00\x00\x01\x8b\xcf\xe5\x68\x00\x00\x09"


async def test_a_requested_round_is_acknowledged_and_begins(daemon):
    assert (await daemon.call("GET", SCRUB)).json()["state"] == "waiting"
    begun = (await daemon.call("POST", SCRUB)).json()
    assert begun["started"]
    assert begun["lastCompleteMs"] is None


async def test_damage_is_reported_with_its_place_and_needs_attention(daemon):
    await daemon.create()
    await daemon.publish("whole")
    name = TopicName("ns", "t")
    claim = await daemon.store.claim(name)
    await daemon.store.write([Put(Table.MESSAGE, generation_prefix(name, 1), [KEY], [b"\xff"])], claim=claim)
    await daemon.service.scrub.round()
    shown = (await daemon.call("GET", SCRUB)).json()
    (finding,) = shown["findings"]
    assert finding.pop("why")
    place = KEY.hex() + "0" * 20
    assert finding == {
        "namespace": "ns",
        "topic": "t",
        "generation": 1,
        "table": "message",
        "from": place,
        "to": place,
        "rows": 1,
        "file": None,
    }
    assert shown["lastCompleteMs"] == daemon.clock.ms
    told = [each for each in (await daemon.call("GET", "/v1/attention")).json() if each["kind"] == "damaged"]
    assert [(each["subject"], each["severity"]) for each in told] == [("ns:t", "critical")]
    assert b"plainsong_scrub_findings 1.0" in (await daemon.call("GET", "/metrics")).content


async def test_topics_that_the_store_cannot_read_are_reported_and_need_attention(daemon, monkeypatch):
    await daemon.create()
    scan = daemon.store.scan

    async def away(table, *range_, **more):
        if table is Table.MESSAGE:
            raise StoreError("no answer in 30 s")
        await scan(table, *range_, **more)

    with monkeypatch.context() as patched:
        patched.setattr(daemon.store, "scan", away)
        assert not await daemon.service.scrub.round()
    shown = (await daemon.call("GET", SCRUB)).json()
    assert (shown["state"], shown["lastCompleteMs"], shown["findings"]) == ("stopped", None, [])
    assert shown["unread"] == [{"namespace": "ns", "topic": "t", "why": "no answer in 30 s"}]
    (told,) = [each for each in (await daemon.call("GET", "/v1/attention")).json() if each["kind"] == "unread"]
    assert (told["severity"], told["subject"]) == ("warning", "service")
    assert told["text"] == "the scrub could not read 1 topic (first ns:t): no answer in 30 s"
