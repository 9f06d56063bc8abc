"""Polls answered without a task: small pages from memory, with the same answers as from a task."""

from __future__ import annotations

import pytest
import trio
from broker_in_process import TOPICS, in_process
from hypothesis import given, settings
from hypothesis import strategies as st
from started_polls import AVRO_TYPE, FRAMES, JSON_TYPE, NAME, POINTERS, answered, asked, same, started

from broker.api.messages.poll import START_BYTES
from plainsong.protocol.errors import InvalidParameter, TransactionsUnavailable
from plainsong.protocol.ids import FIRST_BOUND, LAST_BOUND, after


@pytest.mark.parametrize(
    "headers", [JSON_TYPE, AVRO_TYPE, JSON_TYPE | FRAMES, AVRO_TYPE | FRAMES, JSON_TYPE | POINTERS]
)
async def test_a_small_page_of_the_scan_cache_is_the_answer_of_any_poll(headers):
    async with in_process() as daemon:
        await daemon.create()
        first, last = await daemon.publish("a", "b", "c")
        for since in (None, bytes.fromhex(first), bytes.fromhex(last)):
            _, _, _, body = await same(daemon, asked(headers, start_from=since, limit=2))
            assert b"c" in body or b"b" in body


async def test_an_empty_page_is_the_answer_of_a_poll_that_does_not_wait():
    async with in_process() as daemon:
        await daemon.create()
        _, last = await daemon.publish("a")
        last = bytes.fromhex(last)
        await same(daemon, asked(start_from=last, inclusive=False))
        assert started(daemon, asked(start_from=last, inclusive=False, wait_ms=50)) is None
        await same(daemon, asked(start_from=last, wait_ms=50))


async def test_the_position_of_a_reader_is_still_recorded():
    async with in_process() as daemon:
        await daemon.create()
        _, last = await daemon.publish("a", "b")
        assert started(daemon, asked(JSON_TYPE | {"plainsong-reader": "one"})) is not None
        (noted,) = (await daemon.call("GET", f"{TOPICS}/t/lag")).json()["readers"]
        assert (noted["name"], noted["position"]) == ("one", last)
        with pytest.raises(Exception, match="reader"):
            started(daemon, asked(JSON_TYPE | {"plainsong-reader": "n o"}))


async def test_an_invalid_poll_is_refused_like_any():
    async with in_process() as daemon:
        await daemon.create()
        with pytest.raises(InvalidParameter, match="wait_ms"):
            started(daemon, asked(query="wait-ms=5"))
        with pytest.raises(InvalidParameter):
            started(daemon, asked(limit=0))


async def test_pages_that_are_large_or_not_in_memory_are_left_to_a_task():
    async with in_process(cache__max_bytes=1 << 20) as daemon:
        await daemon.create()
        await daemon.publish("a", "b")
        for left in (
            asked(topic="missing"),
            asked(as_of_ms=5),
            asked(JSON_TYPE | {"accept": "application/cloudevents-batch+json"}),
        ):
            assert started(daemon, left) is None
        # A version 1 answer continues if there are more messages, which needs a task, but not past the request's limit.
        assert started(daemon, asked(AVRO_TYPE, limit=1)) is not None
        daemon.service.directory.cache(NAME).start_over()
        assert started(daemon, asked()) is None
        for _ in range(2):
            await answered(daemon, asked(limit=1))
        await same(daemon, asked(limit=1))  # a page from the store, now cached
        await daemon.create("large")
        await daemon.publish("x" * (START_BYTES // 2), "y" * (START_BYTES // 2), "z", topic="large")
        assert started(daemon, asked(topic="large")) is None
        assert started(daemon, asked(limit=1, topic="large")) is not None
        assert started(daemon, asked(max_bytes=40_000, topic="large")) is not None
        await daemon.create("larger")
        await daemon.publish("x" * 2 * START_BYTES, topic="larger")
        assert started(daemon, asked(limit=1, topic="larger")) is None


async def test_a_page_with_many_attributes_is_left_to_a_task():
    async with in_process() as daemon:
        await daemon.create()
        for _ in range(2):
            messages = [{"payload": "a", "attributes": {"k": "v" * 4000}}] * 10
            await daemon.call("POST", f"{TOPICS}/t/publish", json={"messages": messages})
        await same(daemon, asked(limit=10))
        assert started(daemon, asked()) is None
        assert len((await answered(daemon, asked()))[3]) > 80_000


async def test_a_poll_waits_for_its_step_while_the_topic_is_busy():
    async with in_process() as daemon:
        await daemon.create()
        await daemon.publish("a")
        assert started(daemon, asked()) is not None
        daemon.store.stall("write")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(daemon.publish, "b")
            await daemon.store.stalled("write")
            meanwhile = started(daemon, asked())
            daemon.store.release("write")  # before any assertion, because the daemon ends only after the write
        assert meanwhile is None
        assert b'"b"' in started(daemon, asked())[3]


async def test_a_committed_poll_held_by_an_undecided_message_is_answered_without_a_task_too():
    async with in_process() as daemon:
        await daemon.create()
        await daemon.publish("a")
        await same(daemon, asked(isolation="committed"))
        begun = (await daemon.call("POST", "/v1/transactions", json={})).json()
        under = {"transactionWritePointer": begun["writePointer"], "messages": ["b"]}
        await daemon.call("POST", f"{TOPICS}/t/publish", json=under)
        assert b'"b"' not in (await same(daemon, asked(isolation="committed")))[3]
        other = (await daemon.call("POST", "/v1/transactions", json={})).json()
        under = {"transactionWritePointer": other["writePointer"], "messages": ["c"]}
        await daemon.call("POST", f"{TOPICS}/t/publish", json=under)
        last_id = bytes.fromhex((await daemon.poll())[2]["id"])
        for since in (None, last_id):  # including after the first undecided message
            assert ("Plainsong-End", "held") in (await same(daemon, asked(isolation="committed", start_from=since)))[2]
        assert started(daemon, asked(isolation="committed", start_from=last_id, wait_ms=50)) is None
        assert b'"b"' in (await same(daemon, asked()))[3]
        for verb in ("prepare", "commit"):
            await daemon.call("POST", f"/v1/transactions/{begun['id']}/{verb}")
        assert b'"b"' in (await answered(daemon, asked(isolation="committed")))[3]


async def test_without_transactions_a_committed_poll_is_refused_as_any():
    async with in_process(transactions__service="off") as daemon:
        await daemon.create()
        assert started(daemon, asked(isolation="committed")) is None
        with pytest.raises(TransactionsUnavailable):
            await answered(daemon, asked(isolation="committed"))


async def test_such_answers_contain_no_expired_messages():
    async with in_process() as daemon:
        await daemon.create(ttl=10)
        await daemon.publish("a")
        daemon.clock.ms += 5_000
        await daemon.publish("b")
        daemon.clock.ms += 6_000
        # The expiry must be durable first.
        assert started(daemon, asked()) is None
        assert b'"a"' not in (await answered(daemon, asked()))[3]
        assert b'"a"' not in (await same(daemon, asked()))[3]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("publish"), st.integers(1, 20), st.sampled_from([1, 100, 9_000])),
            st.tuples(st.just("cold")),
            st.tuples(st.just("later"), st.integers(1, 4_000)),
            st.tuples(
                st.just("poll"),
                st.sampled_from([JSON_TYPE, AVRO_TYPE, JSON_TYPE | FRAMES]),
                st.sampled_from([None, 1, 3, 10_000]),
                st.sampled_from([None, 200, 100_000]),
                st.sampled_from([None, "committed", "uncommitted"]),
                st.integers(0, 40),
            ),
            st.tuples(
                st.just("poll"),
                st.just(JSON_TYPE),
                st.just(5),
                st.none(),
                st.none(),
                st.integers(0, 40),
            ),
        ),
        max_size=25,
    )
)
@settings(max_examples=60)
def test_every_poll_gets_the_same_answer_with_and_without_a_task(actions):
    async def run():
        async with in_process(cache__max_bytes=1 << 20) as daemon:
            await daemon.create(ttl=10)
            ids = [FIRST_BOUND, LAST_BOUND]
            for action, *given in actions:
                if action == "publish":
                    count, size = given
                    first, last = await daemon.publish(*["m" * size] * count)
                    ids += [bytes.fromhex(first), bytes.fromhex(last), after(bytes.fromhex(last))[:20]]
                elif action == "cold":
                    daemon.service.directory.cache(NAME).start_over()
                elif action == "later":
                    daemon.clock.ms += given[0]
                else:
                    headers, limit, max_bytes, isolation, at = given
                    since = ids[at % len(ids)]
                    bounds = {"limit": limit, "max_bytes": max_bytes, "isolation": isolation}
                    make = asked(headers, start_from=since, **bounds)
                    found = started(daemon, make)
                    if found is not None:
                        assert found == await answered(daemon, make)

    trio.run(run)
