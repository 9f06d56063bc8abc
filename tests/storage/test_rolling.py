"""Rollbacks in every store: each store's contract, and the state after a crash in the middle of a rollback."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from spy import Spy

from plainsong.protocol.effects import Delete, Put, RollBack, put_one
from plainsong.protocol.names import TopicName
from plainsong.protocol.rows import decode_row
from storage.base import NothingWritten, StoreError
from storage.leveldb import LevelDBStore
from storage.leveldb.commit import STEP_BYTES, STEP_ROW_BYTES
from storage.memory import MemoryStore
from tests.storage.contract import MESSAGE, METADATA, NAME, everything
from tests.storage.faulty import FaultyStore
from tests.storage.rolling_contract import OTHER_POINTER, POINTER, RollingContract, all_of, run_of, signs, under

ROOT = Path(__file__).parents[2]
STEP_ROWS = STEP_BYTES // STEP_ROW_BYTES


class TestMemoryRollsBack(RollingContract):
    @pytest.fixture
    def store(self):
        return MemoryStore()

    def break_next_write(self, store):
        pytest.skip("memory does not fail; FaultyStore(MemoryStore()) does, and runs these tests")


class TestFaultyStoreRollsBack(RollingContract):
    @pytest.fixture
    def store(self):
        return FaultyStore(MemoryStore())

    def break_next_write(self, store):
        store.fail_next("write", applied=400)


class TestLevelDBRollsBack(RollingContract):
    @pytest.fixture
    async def store(self, tmp_path):
        async with await LevelDBStore.open(tmp_path / "data") as opened:
            yield opened

    def break_next_write(self, store):
        Spy(store).fail = OSError("the disk says no")


# --- LevelDB: steps -------------------------------------------------------------------------------


@pytest.fixture
async def leveldb(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data") as opened:
        yield opened


async def test_a_commit_with_a_short_rollback_is_one_synced_batch(leveldb):
    claim = await leveldb.claim(NAME)
    await leveldb.write([run_of(POINTER, 0, 100)], claim=claim)
    spy = Spy(leveldb)
    commit = [
        run_of(OTHER_POINTER, 100, 5),
        RollBack(b"k", b"k\x00\x00\x00\x64", POINTER),
        put_one(METADATA, b"w", b""),
    ]
    await leveldb.write(commit, claim=claim)
    assert spy.batches == [{"transaction": True, "sync": True}]
    assert await signs(leveldb) == [-POINTER] * 100 + [OTHER_POINTER] * 5


async def test_rows_of_the_same_commit_are_synced_before_the_rollback_that_reads_them(leveldb):
    claim = await leveldb.claim(NAME)
    spy = Spy(leveldb)
    await leveldb.write([run_of(POINTER, 0, 10), all_of(), put_one(METADATA, b"w", b"")], claim=claim)
    assert spy.batches == [{"transaction": True, "sync": True}] * 2


async def test_a_long_rollback_goes_in_synced_steps_of_bounded_size(leveldb):
    claim = await leveldb.claim(NAME)
    rows = 2 * STEP_ROWS + 7
    await leveldb.write([run_of(POINTER, 0, rows)], claim=claim)
    spy = Spy(leveldb)
    await leveldb.write([all_of(), put_one(METADATA, b"w", b"")], claim=claim)
    assert spy.batches == [{"transaction": True, "sync": True}] * 3
    assert await signs(leveldb) == [-POINTER] * rows


async def test_large_rows_are_counted_by_their_bytes(leveldb):
    claim = await leveldb.claim(NAME)
    for at in range(6):
        await leveldb.write([run_of(POINTER, at, 1, payload=bytes(3 << 20))], claim=claim)
    spy = Spy(leveldb)
    await leveldb.write([all_of()], claim=claim)
    assert len(spy.batches) == 6


async def test_rollbacks_of_several_topics_share_a_batch_and_its_bound(leveldb):
    claim = await leveldb.claim(NAME)
    topics = 6
    for number in range(topics):
        # A little less than half a step, because a remainder of one row would need another batch in some orders of the
        # tasks.
        await leveldb.write([run_of(POINTER, 0, STEP_ROWS // 2 - 40, b"t%d" % number)], claim=claim)
    spy = Spy(leveldb)
    spy.hold = threading.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: leveldb.write([put_one(METADATA, b"first", b"")], claim=claim))
        await spy.entered()
        for number in range(topics):
            roll = all_of(POINTER, b"t%d" % number, b"t%d" % (number + 1))
            nursery.start_soon(
                lambda n=number, r=roll: leveldb.write([r, put_one(METADATA, b"%d" % n, b"")], claim=claim)
            )
        await trio.testing.wait_all_tasks_blocked()
        spy.hold.set()
    # Two rollbacks share a step, and none needed a separate batch.
    assert 1 + topics // 2 <= len(spy.batches) <= 1 + topics // 2 + 2
    assert set(await signs(leveldb)) == {-POINTER}
    assert len(await everything(leveldb, METADATA)) == 1 + topics


async def test_others_do_not_wait_for_the_end_of_a_long_rollback(leveldb):
    claim = await leveldb.claim(NAME)
    await leveldb.write([run_of(POINTER, 0, 4 * STEP_ROWS)], claim=claim)
    order: list[str] = []
    spy = Spy(leveldb)
    spy.hold = threading.Event()

    async def write(name: str, operation: object) -> None:
        await leveldb.write([operation], claim=claim)
        order.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write, "rolled back", all_of())
        await spy.entered()
        nursery.start_soon(write, "published", put_one(METADATA, b"other", b""))
        await trio.testing.wait_all_tasks_blocked()
        spy.hold.set()
    assert order == ["published", "rolled back"]


async def test_a_failure_in_the_middle_of_a_rollback_never_says_that_nothing_was_written(leveldb):
    claim = await leveldb.claim(NAME)
    await leveldb.write([run_of(POINTER, 0, 3 * STEP_ROWS)], claim=claim)
    spy = Spy(leveldb)
    spy.hold = threading.Event()
    errors: list[StoreError] = []

    async def roll() -> None:
        with pytest.raises(StoreError) as caught:
            await leveldb.write([all_of()], claim=claim)
        errors.append(caught.value)

    async def fail() -> None:
        with pytest.raises(StoreError):
            await leveldb.write([put_one(METADATA, b"k", "text")], claim=claim)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(roll)
        await spy.entered()
        nursery.start_soon(fail)
        await trio.testing.wait_all_tasks_blocked()
        spy.hold.set()
    assert [type(error) for error in errors] == [StoreError]
    assert not isinstance(errors[0], NothingWritten)
    claim = await leveldb.claim(NAME)
    found = await signs(leveldb)
    turned = found.count(-POINTER)
    assert 0 < turned <= STEP_ROWS
    assert found == [-POINTER] * turned + [POINTER] * (3 * STEP_ROWS - turned)
    await leveldb.write([all_of()], claim=claim)
    assert set(await signs(leveldb)) == {-POINTER}


async def test_a_group_that_fails_in_a_rollback_fails_completely_and_leaves_nothing_partial(leveldb):
    claim = await leveldb.claim(NAME)
    await leveldb.write([run_of(POINTER, 0, 10)], claim=claim)
    spy = Spy(leveldb)
    spy.hold = threading.Event()
    failed: list[str] = []

    async def write(name: str, *commit: object) -> None:
        try:
            await leveldb.write(list(commit), claim=claim)
        except StoreError:
            failed.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write, "first", put_one(METADATA, b"first", b""))
        await spy.entered()
        nursery.start_soon(write, "roll", all_of(), put_one(METADATA, b"w", b""))
        nursery.start_soon(write, "bad", put_one(METADATA, b"bad", "text"))
        nursery.start_soon(write, "plain", put_one(METADATA, b"plain", b""))
        await trio.testing.wait_all_tasks_blocked()
        spy.hold.set()
    assert sorted(failed) == ["bad", "plain", "roll"]
    await leveldb.claim(NAME)
    assert await signs(leveldb) == [POINTER] * 10
    assert [key for key, _ in await everything(leveldb, METADATA)] == [b"first"]


CHILD = """
import sys, trio
from pathlib import Path
from plainsong.protocol.effects import RollBack
from plainsong.protocol.names import TopicName
from storage.leveldb import LevelDBStore

async def main():
    async with await LevelDBStore.open(Path(sys.argv[1])) as store:
        claim = await store.claim(TopicName("ns", "topic"))
        print("rolling", flush=True)
        await store.write([RollBack(b"k", b"l", int(sys.argv[2]))], claim=claim)
        print("done", flush=True)

trio.run(main)
"""


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.05])
async def test_a_rollback_killed_in_the_middle_leaves_whole_rows_of_either_sign_and_can_be_done_again(
    tmp_path, after_s
):
    rows = 10 * STEP_ROWS
    async with await LevelDBStore.open(tmp_path / "data") as store:
        await store.write([run_of(POINTER, 0, rows)], claim=await store.claim(NAME))
    command = [sys.executable, "-c", CHILD, str(tmp_path / "data"), str(POINTER)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as child:
        assert child.stdout.readline() == b"rolling\n"
        try:
            child.wait(after_s)
        except subprocess.TimeoutExpired:
            child.kill()
    async with await LevelDBStore.open(tmp_path / "data") as store:
        found = await signs(store)
        turned = found.count(-POINTER)
        assert found == [-POINTER] * turned + [POINTER] * (rows - turned)
        await store.write([all_of()], claim=await store.claim(NAME))
        assert await signs(store) == [-POINTER] * rows


# --- torn in any place ----------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [*range(12), True])
async def test_a_torn_rollback_leaves_the_chosen_rows(kept):
    store = FaultyStore(MemoryStore())
    claim = await store.claim(NAME)
    await store.write([run_of(POINTER, 0, 4)], claim=claim)
    commit = [run_of(POINTER, 4, 3), all_of(), put_one(METADATA, b"w", b"v")]
    store.fail_next("write", applied=kept)
    with pytest.raises(StoreError):
        await store.write(commit, claim=claim)
    put, turned = (3, 7) if kept is True else (min(int(kept), 3), min(max(int(kept) - 3, 0), 7))
    assert await signs(store) == [-POINTER] * turned + [POINTER] * (4 + put - turned)
    assert await store.get(METADATA, b"w") == (b"v" if kept is True or kept > 10 else None)
    await store.write([all_of()], claim=await store.claim(NAME))
    assert await signs(store) == [-POINTER] * (4 + put)


@given(
    rows=st.lists(st.sampled_from([POINTER, -POINTER, OTHER_POINTER, -OTHER_POINTER, None]), max_size=12),
    ranges=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.booleans()), min_size=1, max_size=4),
    removed=st.sets(st.integers(0, 11), max_size=4),
    kept=st.integers(0, 40),
)
def test_after_any_tear_every_row_has_its_payload_and_one_of_its_signs(rows, ranges, removed, kept):
    async def run() -> None:
        store = FaultyStore(MemoryStore())
        claim = await store.claim(NAME)
        keys = [b"k%02d" % index for index in range(len(rows))]
        values = [under(pointer, b"payload %d" % index) for index, pointer in enumerate(rows)]
        await store.write([Put(MESSAGE, b"", keys, values)], claim=claim)
        commit = [Delete(MESSAGE, [b"k%02d" % index for index in sorted(removed)])]
        for first, last, other in ranges:
            commit.append(RollBack(b"k%02d" % first, b"k%02d" % last, OTHER_POINTER if other else POINTER))
        store.fail_next("write", applied=kept)
        with pytest.raises(StoreError):
            await store.write(commit, claim=claim)
        for key, value in await everything(store):
            index, row = int(key[1:]), decode_row(value)
            assert row.payload == b"payload %d" % index
            assert row.pointer in (rows[index], -abs(rows[index] or 0) or None)
        await store.write(commit, claim=await store.claim(NAME))
        expected = {}
        for index, pointer in enumerate(rows):
            if index in removed:
                continue
            hit = any(
                first <= index < last and pointer == (OTHER_POINTER if other else POINTER)
                for first, last, other in ranges
            )
            expected[keys[index]] = -pointer if hit else pointer
        assert {key: decode_row(value).pointer for key, value in await everything(store)} == expected

    trio.run(run)


async def test_an_invalid_pointer_is_refused():
    store = MemoryStore()
    await store.write([run_of(POINTER, 0, 1)], claim=await store.claim(TopicName("ns", "topic")))
    for pointer in (0, -POINTER):
        with pytest.raises(ValueError, match="cannot be rolled back"):
            store.apply([RollBack(b"", b"\xff", pointer)])
