"""The plan lists exactly the rows that the daemon's own janitor removes, and its parts add up to the whole."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.janitor import Janitor
from actors.settings import RetentionConfig
from broker.command.maintain.plan import KeyRange, Limits, cut, plan, time_bounds
from plainsong.protocol.effects import Table
from plainsong.protocol.errors import MalformedBody
from plainsong.protocol.ids import pack_id, pack_position
from plainsong.protocol.keys import generation_prefix, parse_message_key
from plainsong.protocol.names import TopicName
from storage.base import read_rows
from tests.broker.broker_in_process import START_MS, TOPICS, in_process

NAME = TopicName("ns", "t")
PREFIX = generation_prefix(NAME, 3)


def limits(**changes) -> Limits:
    said = {"generation": 3, "expiredBefore": "5000", "invalid": ["7", "2"], "snapshotPosition": None}
    return Limits.of(NAME, said | changes)


async def keys(daemon, table) -> set[bytes]:
    return {row[0] for row in await read_rows(daemon.store, table, b"", b"\xff", limit=10_000)}


async def planned(daemon) -> list[KeyRange]:
    answer = await daemon.call("POST", f"{TOPICS}/t/maintenance?longs=string")
    return plan(Limits.of(NAME, answer.json()))


async def test_the_plan_holds_exactly_the_rows_that_the_janitor_removes():
    async with in_process(retention__delete_grace_s=60) as daemon:
        for _ in range(2):
            await daemon.create(ttl=1000)
            await daemon.publish("of an older generation", "and one more")
            begun = (await daemon.call("POST", "/v1/transactions")).json()
            stored = {"transactionWritePointer": begun["writePointer"], "messages": ["stored under a pointer"]}
            await daemon.call("POST", f"{TOPICS}/t/store", json=stored)
            await daemon.call("DELETE", f"{TOPICS}/t")
            await daemon.call("POST", f"/v1/transactions/{begun['id']}/abort")
        await daemon.create(ttl=1000)
        await daemon.create("other", ttl=1000)
        await daemon.publish("of another topic", topic="other")
        for second in range(1, 6):
            await daemon.publish("m", f"after {second} s", ms=START_MS + second * 1000)
        daemon.clock.ms = START_MS + 1_003_500
        before = {table: await keys(daemon, table) for table in (Table.MESSAGE, Table.PAYLOAD)}
        ranges = [each for each in await planned(daemon) if each.why != "invalid"]
        janitor = Janitor(
            daemon.store, daemon.service.directory, daemon.clock, daemon.service.metrics, RetentionConfig(60, 60.0)
        )
        await janitor.clean(NAME)
        for table, there in before.items():
            removed = there - await keys(daemon, table)
            assert removed
            assert removed == {key for key in there if any(key in each for each in ranges if each.table is table)}
        assert {parse_message_key(key).generation for key in before[Table.MESSAGE]} == {1, 2, 3}
        assert len(await keys(daemon, Table.MESSAGE)) == 5


async def test_expired_rows_stay_until_a_snapshot_covers_what_producers_sent():
    (expired,) = plan(limits(snapshotPosition=pack_id(1200, 4, 0, 1).hex(), invalid=None))[2:]
    assert (expired.start, expired.stop) == (PREFIX, PREFIX + pack_position(1200, 4))
    (expired,) = plan(limits(snapshotPosition=pack_id(9000, 0).hex(), invalid=[]))[2:]
    assert expired.stop == PREFIX + pack_position(5000, 0)


def test_messages_of_invalid_transactions_are_searched_for_where_nothing_has_expired_and_are_not_removed():
    *_, expired, invalid = plan(limits())
    assert (invalid.start, invalid.why, invalid.pointers) == (expired.stop, "invalid", (2, 7))
    assert PREFIX + b"\xff" * 10 in invalid
    assert generation_prefix(NAME, 4) not in invalid


def test_without_an_invalid_list_no_rows_of_invalid_transactions_are_planned():
    assert {each.why for each in plan(limits(invalid=None))} == {"generation", "expired"}


def test_a_first_generation_has_no_older_ones():
    assert {each.why for each in plan(limits(generation=1))} == {"expired", "invalid"}


@given(st.integers(1, 5), st.integers(0, 10**13), st.lists(st.integers(1, 10**18), max_size=3, unique=True))
def test_no_two_ranges_of_a_table_overlap(generation, expired_ms, invalid):
    ranges = plan(limits(generation=generation, expiredBefore=expired_ms, invalid=invalid))
    for table in Table:
        of_table = sorted((each.start, each.stop) for each in ranges if each.table is table)
        assert all(start < stop for start, stop in of_table)
        assert all(one[1] <= other[0] for one, other in pairwise(of_table))


@given(st.binary(max_size=6), st.binary(max_size=6), st.lists(st.binary(max_size=6), max_size=8), st.binary(max_size=7))
def test_every_key_of_a_range_is_in_exactly_one_of_its_parts(start, stop, bounds, key):
    whole = KeyRange(Table.MESSAGE, start, stop, "expired")
    parts = cut(whole, bounds)
    assert sum(key in part for part in parts) == (key in whole)
    assert all(part.start < part.stop for part in parts)
    assert len(parts) <= len(bounds) + 1


@given(st.integers(0, 10**13), st.integers(0, 10**13), st.integers(1, 50))
def test_bounds_by_time_are_of_equal_lengths_and_within_the_range(first_ms, last_ms, parts):
    bounds = time_bounds(PREFIX, first_ms, last_ms, parts)
    times = [first_ms, *(parse_message_key(bound).publish_ts_ms for bound in bounds), max(first_ms, last_ms)]
    assert len(bounds) == parts - 1
    lengths = [later - earlier for earlier, later in pairwise(times)]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("lacking", ["generation", "expiredBefore", "invalid", "snapshotPosition"])
def test_an_incomplete_answer_makes_no_plan(lacking):
    said = {"generation": 1, "expiredBefore": 5, "invalid": [], "snapshotPosition": None}
    del said[lacking]
    with pytest.raises(MalformedBody, match=lacking):
        Limits.of(NAME, said)
