"""A clock that disagrees with the store: the warning at startup, the operator's views, the metric and refusals."""

from __future__ import annotations

import logging

import pytest
from broker_in_process import START_MS, SetClock, in_process

from actors import store_time
from actors.store_time import shown_ms
from storage.base import StoreUnusable
from storage.memory import MemoryStore
from tests.storage.faulty import FaultyStore
from tests.waiting import until

DAY_MS = 86_400_000


@pytest.fixture
async def used_store():
    """Return a store whose newest message is from ``START_MS``."""
    store = FaultyStore(MemoryStore())
    async with in_process(store=store) as daemon:
        await daemon.create()
        await daemon.publish("m")
    return store


def clock_at(ms):
    clock = SetClock()
    clock.ms = ms
    return clock


async def findings(daemon):
    found = await daemon.service.attention.findings()
    return [(each.kind, each.text) for each in found if each.kind == "clock"]


async def test_a_clock_that_was_set_back_is_reported_until_it_has_caught_up(daemon):
    await daemon.create()
    await daemon.publish("m")
    assert await findings(daemon) == []
    daemon.clock.ms -= 60_000
    assert await findings(daemon) == []
    daemon.clock.ms = START_MS - 2 * DAY_MS
    ((_, text),) = await findings(daemon)
    assert text.startswith("The clock is 2 days behind the newest time in the store")
    assert daemon.service.store_time.behind_ms() == 2 * DAY_MS
    daemon.clock.ms = START_MS
    assert await findings(daemon) == []


@pytest.mark.parametrize(
    ("by_ms", "level", "logged"),
    [
        (0, None, {}),
        (60_000, None, {}),
        (-60_000, None, {}),
        (-60_001, logging.WARNING, {"behind_s": 60}),
        (-2 * DAY_MS, logging.WARNING, {"behind_s": 2 * 86_400}),
        (60_001, logging.INFO, {"ahead_s": 60}),
        (10 * DAY_MS, logging.WARNING, {"ahead_s": 10 * 86_400}),
    ],
    ids=str,
)
async def test_a_start_logs_how_far_the_clock_is_from_the_store(used_store, caplog, by_ms, level, logged):
    caplog.set_level(logging.INFO, logger="actors.store_time")
    async with in_process(store=used_store, clock=clock_at(START_MS + by_ms)) as daemon:
        await daemon.service.store_time.load(used_store)
        assert bool(await findings(daemon)) is (by_ms < -60_000)
    found = [each for each in caplog.records if each.name == "actors.store_time"]
    assert [each.levelno for each in found] == ([] if level is None else [level])
    for name, value in logged.items():
        assert getattr(found[0], name) == value


async def test_a_clock_that_falls_behind_is_logged_once_until_it_has_caught_up_and_by_its_watch_only(
    daemon, nursery, caplog, monkeypatch
):
    monkeypatch.setattr(store_time, "LOOK_S", 0.001)
    watched = daemon.service.store_time

    def logged() -> int:
        return [each.name for each in caplog.records].count("actors.store_time")

    await daemon.create()
    await daemon.publish("m")
    daemon.clock.ms = START_MS - DAY_MS
    assert watched.behind_ms() == DAY_MS
    assert await findings(daemon)
    assert not logged()
    nursery.start_soon(watched.watch)
    await until(lambda: logged() == 1)
    daemon.clock.ms = START_MS
    await until(lambda: not watched._is_reported)
    daemon.clock.ms = START_MS - 2 * DAY_MS
    await until(lambda: logged() == 2)


async def test_a_clock_that_is_further_ahead_than_the_setting_allows_is_refused(used_store):
    async with in_process(store=used_store, clock=clock_at(START_MS + 2 * DAY_MS)) as daemon:
        with pytest.raises(StoreUnusable, match="the clock is 2 days ahead of the newest time"):
            await daemon.service.store_time.load(used_store, max_ahead_s=86_400)
        await daemon.service.store_time.load(used_store, max_ahead_s=2 * 86_400)
        await daemon.service.store_time.load(used_store)


async def test_a_new_store_agrees_with_any_clock():
    store = FaultyStore(MemoryStore())
    async with in_process(store=store) as daemon:
        await daemon.service.store_time.load(store, max_ahead_s=1)
        assert daemon.service.store_time.behind_ms() == 0


@pytest.mark.parametrize(
    ("ms", "shown"),
    [(999, "0 s"), (59_999, "59 s"), (60_000, "1 minute"), (7_200_000, "2 hours"), (DAY_MS, "1 day")],
)
def test_durations_are_shown_in_their_largest_unit(ms, shown):
    assert shown_ms(ms) == shown
