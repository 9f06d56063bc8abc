"""Polls as of a moment: their results never change, and some moments are refused."""

from __future__ import annotations

import pytest
from broker_in_process import START_MS, TOPICS, in_process

from plainsong.protocol.ids import pack_id
from plainsong.protocol.names import TopicName

TX = "/v1/transactions"
OFFSETS = f"{TOPICS}/t/offsets"
every_listener = pytest.mark.parametrize("listener", [None, "hot", "application"])


async def begin(daemon):
    return (await daemon.call("POST", TX, json={})).json()


async def under(daemon, transaction, *payloads, verb="publish", topic="t"):
    body = {"transactionWritePointer": transaction["writePointer"], "messages": list(payloads)}
    answer = await daemon.call("POST", f"{TOPICS}/{topic}/{verb}", json=body)
    return answer.json() if answer.content else None


async def decide(daemon, transaction, verb="commit"):
    await daemon.call("POST", f"{TX}/{transaction['id']}/{verb}")


async def shown(daemon, at_ms, topic="t", **more):
    return [message["payload"] for message in await daemon.poll(topic, asOfMs=at_ms, **more)]


async def history(daemon):
    """Create a topic with plain messages and one transaction of each kind, one event a second."""
    await daemon.create()
    await daemon.publish("plain 0", ms=START_MS)
    early, late, aborted, invalid, open_ = [await begin(daemon) for _ in range(5)]
    daemon.clock.ms = START_MS + 1_000
    await under(daemon, late, "late 1")
    await under(daemon, early, "early 1")
    await under(daemon, aborted, "aborted 1")
    await under(daemon, open_, "open 1")
    await under(daemon, invalid, "invalid 1")
    await daemon.publish("plain 2", ms=START_MS + 2_000)
    daemon.clock.ms = START_MS + 3_000
    await decide(daemon, early)
    await daemon.publish("plain 4", ms=START_MS + 4_000)
    daemon.clock.ms = START_MS + 5_000
    await decide(daemon, aborted, "abort")
    await decide(daemon, invalid, "invalidate")
    daemon.clock.ms = START_MS + 6_000
    await decide(daemon, late)
    daemon.clock.ms = START_MS + 10_000
    return open_


EXPECTED = {
    -1: [],
    0: ["plain 0"],
    1_999: ["plain 0"],
    2_000: ["plain 0", "plain 2"],
    2_999: ["plain 0", "plain 2"],
    3_000: ["plain 0", "early 1", "plain 2"],
    4_000: ["plain 0", "early 1", "plain 2", "plain 4"],
    5_999: ["plain 0", "early 1", "plain 2", "plain 4"],
    6_000: ["plain 0", "late 1", "early 1", "plain 2", "plain 4"],
    10_000: ["plain 0", "late 1", "early 1", "plain 2", "plain 4"],
}


@every_listener
async def test_a_poll_as_of_a_moment_shows_what_was_committed_by_then_and_never_waits(listener):
    async with in_process(listener=listener) as daemon:
        await history(daemon)
        for at_ms, wanted in EXPECTED.items():
            assert await shown(daemon, START_MS + at_ms, waitMs=60_000) == wanted, at_ms


async def test_the_cache_and_the_store_show_the_same():
    async with in_process() as daemon:
        await history(daemon)
        cache = daemon.service.directory.cache(TopicName("ns", "t"))
        hits = cache.budget.hits
        assert [await shown(daemon, START_MS + at_ms) for at_ms in EXPECTED] == list(EXPECTED.values())
        assert cache.budget.hits == hits + len(EXPECTED)
        cache.start_over()
        assert [await shown(daemon, START_MS + at_ms) for at_ms in EXPECTED] == list(EXPECTED.values())
        assert cache.budget.hits == hits + len(EXPECTED)


async def test_the_query_parameter_works_with_every_encoding():
    async with in_process() as daemon:
        await history(daemon)
        path = f"{TOPICS}/t/poll?as_of_ms={START_MS + 2_999}"
        poll_of_everything = bytes.fromhex("04010202")
        for content_type in ("avro/binary", "avro/binary; version=2"):
            body = poll_of_everything + (b"\x00" * 4 if "2" in content_type else b"")
            answer = await daemon.call("POST", path, content=body, headers={"Content-Type": content_type})
            assert (answer.content.count(b"plain"), answer.content.count(b"early")) == (2, 0)
            assert answer.headers["plainsong-end"] == "end"
        answer = await daemon.call(
            "POST", path, json={}, headers={"Accept": "application/vnd.plainsong.frames", "X-Request-Id": "r"}
        )
        assert answer.content.count(b"plain") == 2


async def test_a_moment_is_read_page_by_page_to_its_end():
    async with in_process() as daemon:
        await history(daemon)
        since, found = {}, []
        for _ in range(6):
            body = {"asOfMs": START_MS + 6_000, "limit": 1, **since}
            answer = await daemon.call("POST", f"{TOPICS}/t/poll", json=body)
            found += [message["payload"] for message in answer.json()]
            since = {"startFrom": answer.headers["plainsong-last-id"], "inclusive": False}
            if answer.headers["plainsong-end"] == "end":
                break
        assert found == EXPECTED[6_000]
        assert answer.headers["plainsong-end"] == "end"


async def test_an_answer_of_version_1_of_any_length_is_read_as_of_the_moment_too():
    async with in_process(poll__max_messages=2) as daemon:
        await history(daemon)
        path = f"{TOPICS}/t/poll?as_of_ms={START_MS + 6_000}"
        answer = await daemon.call(
            "POST", path, content=bytes.fromhex("04010202"), headers={"Content-Type": "avro/binary"}
        )
        assert [answer.content.count(word) for word in (b"plain", b"early", b"late", b"open", b"aborted")] == [
            3,
            1,
            1,
            0,
            0,
        ]


async def test_a_view_as_of_now_does_not_change_later():
    async with in_process() as daemon:
        open_ = await history(daemon)
        now_ms = daemon.clock.ms
        before = await shown(daemon, now_ms)
        await decide(daemon, open_)
        await daemon.publish("of the same millisecond")
        assert await shown(daemon, now_ms) == before
        daemon.clock.ms += 1
        assert await shown(daemon, now_ms + 1) == [
            *("plain 0", "late 1", "early 1", "open 1", "plain 2", "plain 4", "of the same millisecond")
        ]


async def test_stored_messages_are_shown_with_their_transaction():
    async with in_process() as daemon:
        await daemon.create()
        await daemon.create("u")
        transaction = await begin(daemon)
        for topic in "tu":
            await under(daemon, transaction, f"{topic} 1", f"{topic} 2", verb="store", topic=topic)
            await under(daemon, transaction, topic=topic)
        daemon.clock.ms += 1_000
        await decide(daemon, transaction)
        daemon.clock.ms += 1_000
        for topic in "tu":
            assert await shown(daemon, START_MS + 999, topic) == []
            assert await shown(daemon, START_MS + 1_000, topic) == [f"{topic} 1", f"{topic} 2"]


async def test_expired_messages_do_not_reappear():
    async with in_process() as daemon:
        await daemon.create(ttl=10)
        await daemon.publish("old")
        daemon.clock.ms += 5_000
        await daemon.publish("young")
        assert await shown(daemon, START_MS + 5_000) == ["old", "young"]
        daemon.clock.ms += 6_000
        assert await shown(daemon, START_MS + 5_000) == ["young"]


async def test_offsets_count_as_of_the_moment():
    async with in_process() as daemon:
        await history(daemon)
        for at_ms, wanted in EXPECTED.items():
            answer = (await daemon.call("POST", OFFSETS, json={"asOfMs": START_MS + at_ms})).json()
            assert answer["count"] == len(wanted)


async def test_a_future_moment_is_refused():
    async with in_process() as daemon:
        await daemon.create()
        for path in (f"{TOPICS}/t/poll", OFFSETS):
            body = {"asOfMs": START_MS + 1}
            answer = await daemon.call("POST", path, json=body, status=400, code="invalid_parameter")
            assert str(START_MS + 1) in answer.json()["detail"]


async def test_a_moment_before_the_remembered_outcomes_is_refused_with_the_earliest_readable_one_in_the_detail():
    async with in_process(transactions__outcome_retention_s=3600) as daemon:
        await daemon.create()
        transaction = await begin(daemon)
        await under(daemon, transaction, "kept")
        daemon.clock.ms += 1_000
        await decide(daemon, transaction)
        assert await shown(daemon, START_MS) == []
        daemon.clock.ms += 3_601_000
        await begin(daemon)
        for path in (f"{TOPICS}/t/poll", OFFSETS):
            answer = await daemon.call("POST", path, json={"asOfMs": START_MS}, status=410, code="as_of_too_old")
            assert str(START_MS + 1_000) in answer.json()["detail"]
            assert answer.json()["outcome"] == "not-applied"
        assert await shown(daemon, START_MS + 1_000) == ["kept"]


@pytest.mark.parametrize(
    "body",
    [
        {"asOfMs": START_MS, "isolation": "uncommitted"},
        {"asOfMs": START_MS, "transaction": "AAAA"},
        {"asOfMs": -1},
    ],
)
async def test_contradicting_parameters_are_refused(body):
    async with in_process() as daemon:
        await daemon.create()
        for path in (f"{TOPICS}/t/poll", OFFSETS):
            await daemon.call("POST", path, json=body, status=400, code="invalid_parameter")


async def test_committed_isolation_may_be_given_as_well():
    async with in_process() as daemon:
        await history(daemon)
        assert await shown(daemon, START_MS + 3_000, isolation="committed") == EXPECTED[3_000]


async def test_a_poll_of_many_topics_refuses_it_rather_than_ignoring_it():
    async with in_process() as daemon:
        await daemon.create()
        path = f"/v1/namespaces/ns/poll?as_of_ms={START_MS}"
        await daemon.call("POST", path, json={"topics": {"t": {}}}, status=400, code="invalid_parameter")


async def test_a_daemon_that_decides_no_transactions_says_so():
    async with in_process(transactions__service="off") as daemon:
        await daemon.create()
        body = {"asOfMs": START_MS}
        await daemon.call("POST", f"{TOPICS}/t/poll", json=body, status=503, code="transactions_unavailable")


async def test_a_position_to_resume_from_is_after_skipped_messages():
    async with in_process() as daemon:
        await daemon.create()
        _, last = await daemon.publish("one", ms=START_MS)
        _, later = await daemon.publish("two", ms=START_MS + 1_000)
        answer = await daemon.call("POST", f"{TOPICS}/t/poll", json={"asOfMs": START_MS})
        assert [message["id"] for message in answer.json()] == [last]
        assert answer.headers["plainsong-last-id"] >= later
        assert later == pack_id(START_MS + 1_000, 0).hex()
