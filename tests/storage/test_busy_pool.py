"""More calls than the connections to HBase can serve: calls that get one are answered, the others fail clearly."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import trio

from storage.base import StoreError
from storage.hbase.pool import NoConnectionFree
from storage.hbase.scan import ScanRange, first_rows
from tests.storage.slow_gateways import Gateways, Rows

CALL_S = 0.3
TIMEOUT_S = 30.0
#: Long enough that starvation would collapse the throughput.
MINUTES = 5


async def answered_in_the_last_minute(ask: Any, callers: int) -> int:
    """Return the number of calls answered in the last of ``MINUTES`` minutes with callers that repeat their calls."""
    answered = 0

    async def call_on() -> None:
        nonlocal answered
        while True:
            try:
                await ask()
            except NoConnectionFree:
                continue
            answered += 1

    async with trio.open_nursery() as nursery:
        for _ in range(callers):
            nursery.start_soon(call_on)
        await trio.sleep(60 * (MINUTES - 1))
        before = answered
        await trio.sleep(60)
        nursery.cancel_scope.cancel()
    return answered - before


async def slowly(*_: object) -> bool:
    await trio.sleep(CALL_S)
    return True


# A connection answers 100 calls within a call's time limit. With three gateways an attempt has a third of that time,
# enough for 33 calls.
@pytest.mark.parametrize(("gateways", "callers"), [(1, 250), (3, 120), (3, 250)])
async def test_overloaded_calls_are_answered_up_to_the_capacity_of_the_connections(
    autojump_clock, monkeypatch, gateways, callers
):
    made = Gateways(slowly)
    pool = made.pool(monkeypatch, size=2, gateways=gateways)
    answered = await answered_in_the_last_minute(partial(pool.call, "getRow"), callers)
    assert answered >= 0.9 * 2 * 60 / CALL_S
    assert len(made.opened) <= 2  # no connection was dropped


@pytest.mark.parametrize(("gateways", "callers"), [(1, 80), (3, 40), (3, 80)])
async def test_overloaded_scans_are_answered_up_to_the_capacity_of_the_connections(
    autojump_clock, monkeypatch, gateways, callers
):
    rows = Rows([10, 10])

    async def answer(*args: Any) -> object:
        await trio.sleep(CALL_S)
        return await rows.answer(*args)

    made = Gateways(answer)
    pool = made.pool(monkeypatch, size=2, gateways=gateways)
    ask = partial(first_rows, pool, ScanRange(b"t", b"", b""), 16, timeout_s=TIMEOUT_S)
    answered = await answered_in_the_last_minute(ask, callers)
    a_scan_s = 2 * (CALL_S + 0.01)  # opening the scan, and one page
    assert answered >= 0.9 * 60 / a_scan_s  # one of the two connections is reserved for row calls
    assert len(made.opened) <= 2


async def test_a_call_for_which_no_connection_became_free_says_so_and_was_not_made(autojump_clock, monkeypatch):
    asked: list[str] = []

    async def answer(_: object, name: str, __: object) -> bool:
        asked.append(name)
        await trio.sleep(TIMEOUT_S - 1)
        return True

    pool = Gateways(answer).pool(monkeypatch, size=2, timeout_s=TIMEOUT_S)
    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(pool.call, "get")
        await trio.testing.wait_all_tasks_blocked()
        begun_s = trio.current_time()
        with pytest.raises(NoConnectionFree) as caught:
            await pool.call("mutateRow")
        assert trio.current_time() - begun_s == pytest.approx(TIMEOUT_S)
    assert asked == ["get"] * 4
    assert "storage.hbase.max_connections" in caught.value.hint


async def test_a_scan_waits_for_both_bounds_no_longer_than_for_one(autojump_clock, monkeypatch):
    async def never(*_: object) -> object:
        return await trio.sleep_forever()

    pool = Gateways(never).pool(monkeypatch, size=2, timeout_s=TIMEOUT_S)
    async with trio.open_nursery() as nursery:

        async def keep(block: Any, s: float) -> None:
            async with block:
                await trio.sleep(s)

        nursery.start_soon(keep, pool.place_to_scan(1), 20.0)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(2):
            nursery.start_soon(keep, pool.connection(), 100.0)
        await trio.testing.wait_all_tasks_blocked()
        begun_s = trio.current_time()
        with pytest.raises(NoConnectionFree):
            await first_rows(pool, ScanRange(b"t", b"", b""), 1, timeout_s=TIMEOUT_S)
        assert trio.current_time() - begun_s == pytest.approx(TIMEOUT_S)
        # The cancelled scan has left both queues: the next scan begins as soon as a connection is free.
        nursery.cancel_scope.cancel()
    async with pool.place_to_scan(1):
        pass


async def test_a_call_that_broke_off_before_its_wait_is_not_reported_as_not_made(autojump_clock, monkeypatch):
    begun = trio.Event()

    async def answer(_: object, name: str, __: object) -> bool:
        if name == "mutateRow":
            begun.set()
            await trio.sleep(1)
            raise OSError("the gateway closed the connection")
        await trio.sleep_forever()
        return True

    pool = Gateways(answer).pool(monkeypatch, size=2, timeout_s=TIMEOUT_S)

    async def keep() -> None:
        async with pool.connection():
            await trio.sleep(10 * TIMEOUT_S)

    async def write() -> None:
        with pytest.raises(StoreError, match="no connection to HBase became free") as caught:
            await pool.call("mutateRow")
        assert not isinstance(caught.value, NoConnectionFree)
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(write)
        await begun.wait()
        nursery.start_soon(keep)  # queued ahead of the second attempt


@pytest.mark.parametrize(("gateways", "attempt_s"), [(1, TIMEOUT_S), (3, TIMEOUT_S / 3)])
async def test_a_call_that_waited_has_the_time_of_one_attempt_after_its_wait_and_no_more(
    autojump_clock, monkeypatch, gateways, attempt_s
):
    async def never(*_: object) -> object:
        return await trio.sleep_forever()

    made = Gateways(never)
    pool = made.pool(monkeypatch, size=1, gateways=gateways)
    async with trio.open_nursery() as nursery:

        async def keep() -> None:
            async with pool.connection():
                await trio.sleep(TIMEOUT_S - 1)

        nursery.start_soon(keep)
        await trio.testing.wait_all_tasks_blocked()
        begun_s = trio.current_time()
        with pytest.raises(StoreError, match=f"no answer in {attempt_s:g} s"):
            await pool.call("get")
        assert trio.current_time() - begun_s == pytest.approx(TIMEOUT_S - 1 + attempt_s, abs=0.1)


async def test_a_call_that_waited_goes_to_the_next_gateway_if_the_first_is_frozen(autojump_clock, monkeypatch):
    async def answer(address: tuple[str, int], *_: object) -> str:
        if address[0] == "gateway0":
            await trio.sleep_forever()
        return address[0]

    made = Gateways(answer)
    pool = made.pool(monkeypatch, size=1, gateways=3)
    async with trio.open_nursery() as nursery:

        async def keep() -> None:
            async with pool.connection():
                await trio.sleep(TIMEOUT_S / 3)

        nursery.start_soon(keep)  # connects to the first gateway
        await trio.testing.wait_all_tasks_blocked()
        begun_s = trio.current_time()
        assert await pool.call("get") == "gateway1"
        assert trio.current_time() - begun_s == pytest.approx(2 * TIMEOUT_S / 3, abs=0.1)
