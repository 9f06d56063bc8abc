"""Pauses between the steps of a long read of a store are proportional only to the work in this process."""

from __future__ import annotations

import pytest
import trio

from plainsong.protocol.effects import Table
from plainsong.protocol.keys import topic_range
from storage.pace import BYTE_S, REST, ROW_S, STEP_S, Pace, paced_rows
from tests.storage.far_store import ANSWER_S, FarStore, fill


async def paused_s(pace, *args, **more):
    begun_s = trio.current_time()
    await pace.rest(*args, **more)
    return trio.current_time() - begun_s


async def test_a_step_is_followed_by_a_pause_of_eight_times_its_duration(autojump_clock):
    assert await paused_s(Pace(), 0.25, 1000, read_rows=10) == pytest.approx(REST * 0.25)
    assert await paused_s(Pace(), 0.25, 1000) == pytest.approx(REST * 0.25)


async def test_waiting_for_a_remote_store_needs_no_pause(autojump_clock):
    far = Pace(is_far=True)
    work_s = STEP_S + 10 * ROW_S + 1000 * BYTE_S
    assert await paused_s(far, 2.7, 1000, read_rows=10) == pytest.approx(REST * work_s)
    # A near store answers faster than that, and steps without a read are entirely work.
    assert await paused_s(far, work_s / 2, 1000, read_rows=10) == pytest.approx(REST * work_s / 2)
    assert await paused_s(far, 2.7, 0) == pytest.approx(REST * 2.7)


@pytest.mark.parametrize("is_far", [True, False])
async def test_the_bytes_read_in_a_second_are_bounded(autojump_clock, is_far):
    assert await paused_s(Pace(1000, is_far=is_far), 0.5, 6000, read_rows=1) == pytest.approx(5.5)


async def test_reading_a_remote_store_takes_little_more_than_its_response_times(autojump_clock):
    store = FarStore()
    await fill(store, 5_000)
    found, begun_s = [], trio.current_time()
    steps = [size async for size in paced_rows(store, Table.METADATA, *topic_range(), Pace(is_far=True), found.extend)]
    assert len(found) == 5_000
    assert len(steps) > 2
    assert store.waited_s == pytest.approx(len(steps) * ANSWER_S)
    assert trio.current_time() - begun_s < 1.5 * store.waited_s
