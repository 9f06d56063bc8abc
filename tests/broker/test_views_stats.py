"""Statistics of a topic: exact where possible, and marked as estimates otherwise."""

from __future__ import annotations

import pytest
import trio
from broker_in_process import START_MS, TOPICS, in_process
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.api.topics import stats as topic_stats
from broker.metrics import MAX_DELAYS, WINDOW_S, Delays, LastDelays, Rate, Rates
from plainsong.protocol.names import TopicName

STATS = f"{TOPICS}/t/stats"


async def stats(daemon, **parameters):
    return (await daemon.call("GET", STATS, params=parameters)).json()


async def test_an_empty_topic_has_nothing(daemon):
    await daemon.create()
    assert await stats(daemon) == {
        "messages": 0,
        "bytes": 0,
        "estimated": False,
        "oldestId": None,
        "newestId": None,
        "end": "0" * 40,
        "oldestAgeMs": None,
        "publishPerSecond": 0.0,
        "pollPerSecond": 0.0,
        "endToEndMs": {"p50": None, "p99": None},
        "openTransactions": 0,
        "producers": 0,
        "enabledFrom": None,
        "owner": None,
        "parkedPolls": 0,
        "generation": 1,
        "createdMs": START_MS,
    }


async def test_ends_age_and_count_are_those_of_the_messages(daemon):
    await daemon.create()
    first, _ = await daemon.publish("a", "b")
    last, _ = await daemon.publish("c", ms=START_MS + 500)
    daemon.clock.ms = START_MS + 1500
    found = await stats(daemon)
    assert (found["messages"], found["oldestId"], found["newestId"]) == (3, first, last)
    assert found["oldestAgeMs"] == 1500
    assert found["bytes"] > 3


async def test_expired_messages_are_in_no_number_to_the_millisecond(daemon):
    await daemon.create(ttl=128)  # divides time into slices of one second
    for step in range(4):
        await daemon.publish("x", {"payload": "short", "ttlSeconds": 60}, ms=START_MS + step * 250)
    daemon.clock.ms = START_MS + 60_001
    assert (await stats(daemon))["messages"] == 7
    daemon.clock.ms = START_MS + 128_250
    found = await stats(daemon)
    assert (found["messages"], found["estimated"]) == (3, False)
    daemon.clock.ms += 1
    assert (await stats(daemon))["messages"] == 2
    daemon.clock.ms = START_MS + 128_751
    gone = await stats(daemon)
    assert (gone["messages"], gone["bytes"], gone["oldestId"], gone["newestId"]) == (0, 0, None, None)


async def test_messages_of_one_millisecond_count_once_despite_a_shorter_ttl_in_between(daemon):
    await daemon.create(ttl=1280)  # divides time into slices of ten seconds
    await daemon.publish("old")
    await daemon.publish("a", ms=START_MS + 5000)
    await daemon.call("PUT", f"{TOPICS}/t/properties", json={"ttl": 1})  # slices of seven milliseconds
    await daemon.publish("b", "c")
    found = await stats(daemon)
    assert (found["messages"], found["estimated"]) == (3, False)
    assert len(await daemon.poll()) == 3


@settings(max_examples=25)
@given(
    publishes=st.lists(
        st.tuples(st.integers(0, 3000), st.lists(st.sampled_from([None, 1, 3, 9]), min_size=1, max_size=4)),
        min_size=1,
        max_size=12,
    ),
    later_ms=st.integers(0, 15_000),
    reader=st.integers(0, 30_000),
)
async def test_counts_equal_those_of_reading_everything(publishes, later_ms, reader):
    async with in_process() as daemon:
        await daemon.create(ttl=8)
        for step_ms, ttls in publishes:
            messages = [{"payload": "x", "ttlSeconds": ttl_s} for ttl_s in ttls]
            await daemon.publish(*messages, ms=daemon.clock.ms + step_ms)
        daemon.clock.ms += later_ms
        read = [message["id"] for message in await daemon.poll()]
        position = f"{START_MS + reader:016x}" + "f" * 24
        found = await stats(daemon, reader=position)
        assert found["messages"] == len(read)
        assert (found["oldestId"], found["newestId"]) == ((read[0], read[-1]) if read else (None, None))
        assert found["reader"]["visible"] == sum(1 for each in read if each > position)
        behind = sum(len(ttls) for (_, ttls), at in zip(publishes, _times(publishes), strict=True) if at > reader)
        assert found["reader"]["visible"] + found["reader"]["expiredUnread"] == behind
        assert found["reader"]["hidden"] == 0
        assert not found["estimated"]


def _times(publishes):
    at = 0
    for step_ms, _ in publishes:
        at += step_ms
        yield at


async def test_counts_that_take_too_long_are_estimated_and_marked(daemon, monkeypatch):
    monkeypatch.setattr(topic_stats, "MAX_LOOKS", 10)
    await daemon.create(ttl=128)
    await daemon.publish(*(["x"] * 20))
    await daemon.publish("y", ms=START_MS + 500)
    daemon.clock.ms = START_MS + 128_250
    found = await stats(daemon, reader="00" * 20)
    assert (found["messages"], found["estimated"]) == (21, True)
    assert found["reader"] == {"visible": 21, "hidden": 0, "expiredUnread": 10, "estimated": True}


async def test_parked_polls_are_counted_while_they_wait(daemon, nursery):
    await daemon.create()
    for _ in range(3):
        nursery.start_soon(lambda: daemon.poll(waitMs=60_000))
    await trio.testing.wait_all_tasks_blocked()
    assert (await stats(daemon))["parkedPolls"] == 3
    await daemon.publish("x")
    assert (await stats(daemon))["parkedPolls"] == 0


async def test_rates_are_of_messages_published_and_delivered(daemon):
    await daemon.create()
    await daemon.publish(*(["x"] * 60))
    await daemon.poll()
    await daemon.poll(limit=30)
    found = await stats(daemon)
    assert 0 < found["publishPerSecond"] <= 1
    assert found["pollPerSecond"] == pytest.approx(1.5 * found["publishPerSecond"], rel=0.1)


async def test_the_position_of_a_reader_is_an_id(daemon):
    await daemon.create()
    await daemon.call("GET", STATS + "?reader=5", status=400, code="invalid_message_id")
    await daemon.call("GET", STATS + "?raeder=5", status=400, code="invalid_parameter")


def test_a_rate_is_of_the_last_minute_and_fades():
    rate, name = Rate(), TopicName("n", "t")
    rate.add(name, 120, 10 * WINDOW_S)
    assert rate.per_second(name, 10 * WINDOW_S) == 2
    assert rate.per_second(name, 11.5 * WINDOW_S) == 1
    assert rate.per_second(name, 12 * WINDOW_S) == 0
    rate.add(name, 60, 20 * WINDOW_S)
    assert rate.per_second(name, 20 * WINDOW_S) == 1
    assert rate.per_second(TopicName("n", "other"), 0) == 0


def test_rates_are_kept_for_a_bounded_number_of_topics_and_the_least_recently_used_are_evicted():
    rate = Rate(max_topics=3)
    names = [TopicName("n", str(number)) for number in range(4)]
    for name in names[:3]:
        rate.add(name, 1, 0)
    rate.add(names[0], 1, WINDOW_S)
    rate.add(names[3], 1, WINDOW_S)
    assert len(rate) == 3
    assert rate.per_second(names[1], WINDOW_S) == 0
    assert rate.per_second(names[0], WINDOW_S) > 0
    rates = Rates()
    rates.delivered(names[0], 0, 0.0)
    assert len(rates.polling) == 0


def test_a_busy_topic_whose_rate_is_read_in_every_window_outlives_an_idle_one():
    rate, busy, idle = Rate(max_topics=2), TopicName("n", "busy"), TopicName("n", "idle")
    rate.add(busy, 1, 0.0)
    rate.add(idle, 1, 1.0)
    for window in range(1, 4):
        rate.per_second(busy, window * WINDOW_S)  # read before the topic's first message in this window
        rate.add(busy, 1, window * WINDOW_S + 1)
        rate.per_second(idle, window * WINDOW_S + 2)
    rate.add(TopicName("n", "new"), 1, 4 * WINDOW_S - 1)
    assert (rate.total(busy), rate.total(idle)) == (4, 0)


async def test_end_to_end_delays_are_measured_by_polls_that_had_waited(daemon, nursery):
    await daemon.create()
    for seconds in (3, 1, 2):
        begun = (await daemon.call("POST", "/v1/transactions", json={})).json()
        body = {"messages": ["held"], "transactionWritePointer": begun["writePointer"]}
        await daemon.call("POST", f"{TOPICS}/t/publish", json=body)
        from_ms = daemon.clock.ms
        nursery.start_soon(lambda from_ms=from_ms: daemon.poll(startFrom=from_ms, waitMs=60_000, isolation="committed"))
        await trio.testing.wait_all_tasks_blocked()
        daemon.clock.ms += seconds * 1_000
        await daemon.call("POST", f"/v1/transactions/{begun['id']}/commit", json={})
        await trio.testing.wait_all_tasks_blocked()
        daemon.clock.ms += 10_000
        await daemon.poll(startFrom=from_ms)  # does not wait, so it adds no delay
    assert (await stats(daemon))["endToEndMs"] == {"p50": 2_000, "p99": 3_000}


def test_delays_cover_the_last_polls_of_each_topic():
    delays, name = LastDelays(), TopicName("n", "t")
    assert delays.of(name) == Delays(None, None)
    delays.add(name, 7)
    assert delays.of(name) == Delays(7, 7)
    for delay_ms in range(1_000, 1_000 + MAX_DELAYS):
        delays.add(name, delay_ms)
    assert delays.of(name) == Delays(1_000 + MAX_DELAYS // 2 - 1, 1_000 + MAX_DELAYS * 99 // 100)
    for _ in range(MAX_DELAYS):
        delays.add(name, 5)
    assert delays.of(name) == Delays(5, 5)


def test_delays_are_kept_for_a_bounded_number_of_topics_and_the_least_recently_used_are_evicted():
    delays = LastDelays(max_topics=3)
    names = [TopicName("n", str(number)) for number in range(4)]
    for name in (*names[:3], names[0], names[3]):
        delays.add(name, 1)
    assert len(delays) == 3
    assert [delays.of(name).p50_ms for name in names] == [1, None, 1, 1]
