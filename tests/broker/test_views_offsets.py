"""The reported end, size and split points of a bounded read, compared with those of a real read."""

from __future__ import annotations

import itertools

import pytest
import trio
from broker_in_process import START_MS, TOPICS, in_process
from hypothesis import given
from hypothesis import strategies as st

from plainsong.protocol.ids import FIRST_BOUND, after, bound_at, pack_id, pack_position
from plainsong.protocol.rows import MessageRow, encode_row
from plainsong.protocol.topic.asks import Span
from plainsong.protocol.topic.reading import MAX_SPLIT_POINTS, Extent, Paging

OFFSETS = f"{TOPICS}/t/offsets"


async def test_an_empty_topic_ends_where_it_begins(daemon):
    await daemon.create()
    found = (await daemon.call("POST", OFFSETS)).json()
    assert found == {
        "end": "00" * 20,
        "count": 0,
        "bytes": 0,
        "splits": [],
        "earliest": bound_at(START_MS - 604_800_000).hex(),
        "expired": False,
        "generation": 1,
    }


async def test_a_range_is_half_open_and_its_end_is_where_the_next_one_starts(daemon):
    await daemon.create()
    for index in range(6):
        await daemon.publish("x" * 10, ms=START_MS + index)
    first = (await daemon.call("POST", OFFSETS, json={"maxMessages": 4})).json()
    assert first["count"] == 4
    second = (await daemon.call("POST", OFFSETS, json={"start": first["end"]})).json()
    assert second["count"] == 2
    nothing = (await daemon.call("POST", OFFSETS, json={"start": second["end"]})).json()
    assert (nothing["count"], nothing["end"]) == (0, second["end"])
    await daemon.publish("new")
    assert (await daemon.call("POST", OFFSETS, json={"start": second["end"]})).json()["count"] == 1
    by_time = {"start": START_MS + 1, "end": START_MS + 3}
    assert (await daemon.call("POST", OFFSETS, json=by_time)).json()["count"] == 2
    bounded = {"start": first["end"], "end": pack_id(START_MS + 5, 0).hex()}
    assert (await daemon.call("POST", OFFSETS, json=bounded)).json()["count"] == 1
    backwards = {"start": START_MS + 3, "end": START_MS + 1}
    found = (await daemon.call("POST", OFFSETS, json=backwards)).json()
    assert (found["count"], found["end"]) == (0, pack_id(START_MS + 3, 0).hex())


async def test_the_bounds_of_messages_and_bytes_are_those_of_a_poll(daemon):
    await daemon.create()
    await daemon.publish("x" * 100, "y" * 200, {"payload": "short", "ttlSeconds": 1}, "z" * 300, "e")
    daemon.clock.ms += 1001
    for bounds in ({}, {"limit": 2}, {"maxBytes": 1}, {"maxBytes": 400}, {"limit": 3, "maxBytes": 500}):
        polled = await daemon.call("POST", f"{TOPICS}/t/poll", json=bounds)
        asked = {"maxMessages": bounds.get("limit"), "maxBytes": bounds.get("maxBytes")}
        found = (await daemon.call("POST", OFFSETS, json=asked)).json()
        assert found["count"] == len(polled.json())
        if polled.headers["plainsong-end"] == "more":
            assert found["end"] == after(bytes.fromhex(polled.headers["plainsong-last-id"])).hex()


async def test_splits_cut_the_range_into_parts_of_about_equal_bytes(daemon):
    await daemon.create()
    for index in range(40):
        await daemon.publish("x" * 25, ms=START_MS + index)
    found = (await daemon.call("POST", OFFSETS, json={"splits": 4})).json()
    assert len(found["splits"]) == 3
    bounds = ["00" * 20, *found["splits"], found["end"]]
    counts = [
        (await daemon.call("POST", OFFSETS, json={"start": start, "end": end})).json()["count"]
        for start, end in itertools.pairwise(bounds)
    ]
    assert counts == [10, 10, 10, 10]
    assert (await daemon.call("POST", OFFSETS, json={"splits": 1})).json()["splits"] == []


async def test_waiting_ends_with_the_first_message_or_at_the_deadline(daemon, nursery):
    await daemon.create()
    answers = []

    async def wait():
        answers.append((await daemon.call("POST", OFFSETS, json={"waitMs": 60000})).json())

    nursery.start_soon(wait)
    await trio.testing.wait_all_tasks_blocked()
    assert not answers
    await daemon.publish("a")
    await trio.testing.wait_all_tasks_blocked()
    assert [each["count"] for each in answers] == [1]
    late = (await daemon.call("POST", OFFSETS, json={"start": answers[0]["end"], "waitMs": 1})).json()
    assert (late["count"], late["end"]) == (0, answers[0]["end"])


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"start": "x"}, 400, "invalid_message_id"),
        ({"start": -1}, 400, "invalid_parameter"),
        ({"end": 1.5}, 400, "malformed_body"),
        ({"maxMessages": 0}, 400, "invalid_parameter"),
        ({"maxBytes": -1}, 400, "invalid_parameter"),
        ({"splits": 0}, 400, "invalid_parameter"),
        ({"splits": 1001}, 400, "invalid_parameter"),
        ({"waitMs": 60001}, 400, "invalid_parameter"),
        ({"isolation": "dirty"}, 400, "invalid_parameter"),
        ({"begin": 1}, 400, "unknown_field"),
        ({"isolation": "committed"}, 200, None),
        ({"transaction": "AAAA"}, 400, "malformed_transaction"),
        ({"transaction": "AAAA", "isolation": "committed"}, 400, "invalid_parameter"),
        ({"isolation": "uncommitted"}, 200, None),
    ],
)
async def test_invalid_measurements_are_refused(daemon, body, status, code):
    await daemon.create()
    await daemon.call("POST", OFFSETS, status=status, code=code, json=body)


async def test_the_topic_must_exist(daemon):
    await daemon.call("POST", OFFSETS, status=404, code="topic_not_found")


MESSAGES = st.lists(
    st.tuples(st.integers(0, 60), st.sampled_from([None, 1, 5, 100]), st.integers(0, 3)), min_size=1, max_size=40
)


@given(
    messages=MESSAGES,
    limit=st.none() | st.integers(1, 45),
    max_bytes=st.none() | st.integers(1, 3000),
    since_ms=st.integers(0, 50),
    now_ms=st.integers(0, 20_000),
    parts=st.integers(1, 12),
)
def test_an_extent_equals_the_page_and_its_parts_add_up(messages, limit, max_bytes, since_ms, now_ms, parts):
    rows, at = [], 1
    for size, ttl_s, step in messages:
        at += step
        value = (
            encode_row(MessageRow(b"x" * size)) if ttl_s is None else encode_row(MessageRow(b"x" * size, ttl_s=ttl_s))
        )
        rows.append((pack_position(at, len(rows)), value))
    span = Span(1, b"", max(FIRST_BOUND, bound_at(since_ms)), bound_at(at + 1), now_ms, 0, None)
    wanted = [row for row in rows if row[0] + bytes(10) >= span.start]
    page = Paging(span, limit or 10**6, max_bytes or 10**9)
    page.feed_rows(wanted)
    extent = Extent(span, limit, max_bytes)
    extent.feed_rows(wanted)
    assert (extent.count, extent.bytes) == (page.page().count, page.page().payload_bytes)
    if page.page().end == "more":
        assert extent.end == after(page.page().last_id)
    else:
        assert extent.end == max(span.since, span.until)
    bounds = [span.since, *extent.splits(parts), extent.end]
    assert bounds == sorted(set(bounds)) or extent.count == 0
    assert len(bounds) <= parts + 1
    assert set(bounds[1:-1]) <= {key + bytes(10) for key, _ in wanted}


def test_positions_remembered_for_splitting_are_bounded_and_the_parts_stay_about_equal():
    span = Span(1, b"", FIRST_BOUND, bound_at(10**9), 0, 0, None)
    extent = Extent(span)
    value = encode_row(MessageRow(b"x" * 10))
    count = MAX_SPLIT_POINTS * 5
    extent.feed_rows([(pack_position(ms, 0), value) for ms in range(1, count + 1)])
    assert len(extent._split_points) <= MAX_SPLIT_POINTS
    cuts = [int.from_bytes(bound[:8], "big") for bound in extent.splits(10)]
    assert len(cuts) == 9
    for part, cut in enumerate(cuts, 1):
        assert abs(cut - count * part / 10) <= count / 1000


async def test_measuring_reads_through_the_store_in_lists_and_holds_no_payload():
    async with in_process() as daemon:
        await daemon.create()
        await daemon.publish(*(["x" * 1000] * 3000))
        found = (await daemon.call("POST", OFFSETS, json={"splits": 3})).json()
        assert found["count"] == 3000
        assert len(found["splits"]) == 2
