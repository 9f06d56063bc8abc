"""Pages whose responses are too large or too late are requested again with fewer rows."""

from __future__ import annotations

import pytest
import trio

from storage.base import StoreError
from storage.hbase.gateway import AnswerTooLarge
from storage.hbase.pool import Pool
from storage.hbase.scan import ScannedRow, ScanRange, first_rows, merged_rows, scan
from tests.storage.slow_gateways import Gateways, Rows

MIB = 1 << 20
ALL, ALL_DOWN = ScanRange(b"t", b"", b""), ScanRange(b"t", b"", b"", reverse=True)


async def keys_in(pool: Pool, wanted: ScanRange, first_page: int = 16) -> list[bytes]:
    found: list[bytes] = []

    async def take(page: list[ScannedRow]) -> bool:
        found.extend(row.key for row in page)
        return True

    await scan(pool, wanted, take, first_page=first_page, timeout_s=30.0)
    return found


@pytest.mark.parametrize("gateways", [1, 3])
async def test_pages_with_too_large_answers_are_read_with_fewer_rows(autojump_clock, monkeypatch, gateways):
    rows = Rows([9 * MIB] * 70, max_bytes=64 * MIB)
    made = Gateways(rows.answer)
    pool = made.pool(monkeypatch, gateways=gateways)
    assert await keys_in(pool, ALL, first_page=64) == rows.keys
    assert rows.asked[:4] == [64, 16, 1, 1]
    assert not pool._rotation._failed  # the gateway is not to blame


@pytest.mark.parametrize("gateways", [1, 3])
@pytest.mark.parametrize("wanted", [ALL, ALL_DOWN], ids=["up", "down"])
async def test_pages_that_do_not_arrive_in_time_are_read_with_fewer_rows(autojump_clock, monkeypatch, gateways, wanted):
    rows = Rows([9 * MIB] * 40, bytes_a_second=1.5 * MIB)
    pool = Gateways(rows.answer).pool(monkeypatch, gateways=gateways)
    assert await keys_in(pool, wanted) == (rows.keys[::-1] if wanted.reverse else rows.keys)
    assert rows.asked[:4] == [16, 4, 1, 1]


@pytest.mark.parametrize("slow", [True, False])
async def test_large_rows_after_many_small_ones_are_read_and_pages_grow_again_after_them(
    autojump_clock, monkeypatch, slow
):
    bound = {"bytes_a_second": 1.5 * MIB} if slow else {"max_bytes": 64 * MIB}
    rows = Rows([100] * 3000 + [9 * MIB] * 20 + [100] * 3000, **bound)
    pool = Gateways(rows.answer).pool(monkeypatch)
    assert await keys_in(pool, ALL) == rows.keys
    assert rows.asked[:4] == [16, 64, 256, 1000]
    assert 1 in rows.asked
    assert rows.asked[-1] > 900


async def test_a_row_requested_alone_has_the_whole_time_limit(autojump_clock, monkeypatch):
    rows = Rows([25 * MIB], bytes_a_second=MIB)
    pool = Gateways(rows.answer).pool(monkeypatch)
    assert await keys_in(pool, ALL, first_page=1) == rows.keys
    assert rows.asked == [1, 1]  # one row, and then the end


async def test_a_request_gets_all_its_rows_though_pages_have_fewer(autojump_clock, monkeypatch):
    rows = Rows([9 * MIB] * 100, max_bytes=64 * MIB)
    pool = Gateways(rows.answer).pool(monkeypatch)
    assert [row.key for row in await first_rows(pool, ALL, 64, timeout_s=30.0)] == rows.keys[:64]
    assert [row.key for row in await first_rows(pool, ALL_DOWN, 64, timeout_s=30.0)] == rows.keys[:-65:-1]
    assert len(await first_rows(pool, ALL, 1000, timeout_s=30.0)) == 100


async def test_rows_of_many_ranges_are_read_though_pages_have_fewer(autojump_clock, monkeypatch):
    rows = Rows([9 * MIB] * 100, max_bytes=64 * MIB)
    pool = Gateways(rows.answer).pool(monkeypatch)
    found: list[bytes] = []

    async def take(page: list[ScannedRow]) -> bool:
        found.extend(row.key for row in page)
        return True

    ranges = [ScanRange(b"t", b"%05d" % tens, b"%05d" % (tens + 1)) for tens in range(10)]
    await merged_rows(pool, ranges, lambda key: key, take, timeout_s=30.0)
    assert found == rows.keys


@pytest.mark.parametrize(
    ("wanted", "where"), [(ALL, "first row from 3030303030320"), (ALL_DOWN, "last row before 303030303034")]
)
async def test_one_oversized_row_is_an_error_that_names_it_and_ends_the_scan(
    autojump_clock, monkeypatch, wanted, where
):
    rows = Rows([100] * 3 + [300 * MIB] + [100] * 3, max_bytes=256 * MIB)
    pool = Gateways(rows.answer).pool(monkeypatch)
    begun_s = trio.current_time()
    with pytest.raises(StoreError, match=f"{where}.* of HBase's table t cannot be read: an answer of 314572") as caught:
        await keys_in(pool, wanted, first_page=2)
    assert "framed" not in str(caught.value)
    assert rows.asked[-1] == 1
    assert len(rows.asked) < 10
    assert trio.current_time() - begun_s < 1


async def test_a_row_that_never_arrives_ends_the_scan_when_its_time_is_over(autojump_clock, monkeypatch):
    rows = Rows([100] * 2 + [300 * MIB], bytes_a_second=MIB)
    pool = Gateways(rows.answer).pool(monkeypatch)
    begun_s = trio.current_time()
    with pytest.raises(StoreError, match="had no answer in 30 s: no answer of 1 row in"):
        await keys_in(pool, ALL, first_page=2)
    # Twice ten seconds for several rows, and the full time for one.
    assert trio.current_time() - begun_s == pytest.approx(50, abs=0.5)


async def test_a_scan_waits_for_a_gateway_that_is_slow_with_any_number_of_rows(autojump_clock, monkeypatch):
    rows = Rows([100] * 50)
    prompt = rows.answer

    async def slow(*asked: object) -> object:
        await trio.sleep(12)
        return await prompt(*asked)

    pool = Gateways(slow).pool(monkeypatch)
    assert await keys_in(pool, ALL, first_page=64) == rows.keys


async def test_a_size_that_did_not_arrive_in_time_is_not_requested_again_with_every_other_page(
    autojump_clock, monkeypatch
):
    rows = Rows([2_000] * 20_000, bytes_a_second=150_000)  # a thousand rows take longer than an attempt may
    pool = Gateways(rows.answer).pool(monkeypatch)
    assert await keys_in(pool, ALL) == rows.keys
    assert sum(asked >= 1000 for asked in rows.asked) < len(rows.asked) / 8


async def test_a_scan_keeps_its_place_until_it_has_asked_for_fewer_rows(autojump_clock, monkeypatch):
    rows = Rows([9 * MIB] * 40, max_bytes=64 * MIB)
    busy = 0

    async def answer(address: object, name: str, args: tuple[object, ...]) -> object:
        nonlocal busy
        if name != "getRow":
            return await rows.answer(address, name, args)  # type: ignore[arg-type]
        busy += 1
        await trio.sleep(0.25)
        return []

    pool = Gateways(answer).pool(monkeypatch)
    async with trio.open_nursery() as nursery:

        async def call_on_and_on() -> None:
            while True:
                await pool.call("getRow")

        for _ in range(300):  # each waits for about twenty seconds
            nursery.start_soon(call_on_and_on)
        await trio.sleep(60)
        assert await keys_in(pool, ALL) == rows.keys
        nursery.cancel_scope.cancel()
    assert busy > 1_000


async def test_a_call_whose_answer_is_too_large_fails_at_once(autojump_clock, monkeypatch):
    asked = 0

    async def answer(*_: object) -> object:
        nonlocal asked
        asked += 1
        raise AnswerTooLarge("an answer of 300000000 bytes exceeds the limit")

    pool = Gateways(answer).pool(monkeypatch)
    with pytest.raises(StoreError, match="getRow: an answer of 300000000 bytes"):
        await pool.call("getRow")
    assert asked == 1
