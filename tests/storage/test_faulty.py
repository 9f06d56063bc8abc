"""The faulty store fulfils the contract by default, and fails exactly as instructed."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from plainsong.protocol.effects import Delete, Put, Table, put_one
from storage.base import StoreError, StoreTraits
from storage.leveldb.store import LevelDBStore
from storage.memory import MemoryStore
from tests.storage.contract import LAST, MESSAGE, METADATA, NAME, StoreContract, everything, numbered
from tests.storage.faulty import FaultyStore


class TestFaultyStoreKeepsTheContract(StoreContract):
    @pytest.fixture
    def store(self):
        return FaultyStore(MemoryStore())

    def break_next_write(self, store):
        store.fail_next("write")


@pytest.mark.parametrize("traits", [{}, {"whole_commits": True, "shared": True}])
def test_only_whole_commits_of_one_writer_are_ordered(traits):
    with pytest.raises(ValueError, match="ordered"):
        StoreTraits("kind", "nothing", None, ordered_commits=True, **traits)


async def test_a_store_that_tears_commits_does_not_order_them(tmp_path):
    """A begin of Tephra's clients that waits for a commit would be on no list if that commit were torn after the head."""
    async with await LevelDBStore.open(tmp_path) as disk:
        assert disk.traits.ordered_commits
        assert not FaultyStore(disk).traits.ordered_commits


def faulty() -> FaultyStore:
    return FaultyStore(MemoryStore())


@pytest.mark.parametrize("applied", [False, True, 0, 1, 2, 3, 4, 5])
async def test_a_failed_write_leaves_the_chosen_rows(applied):
    store = faulty()
    claim = await store.claim(NAME)
    await store.write([put_one(MESSAGE, b"x", b"")], claim=claim)
    store.fail_next("write", applied=applied)
    with pytest.raises(StoreError):
        await store.write([numbered(3), Delete(MESSAGE, [b"x"])], claim=claim)
    keys = [key for key, _ in await everything(store)]
    rows = {True: 4, False: 0}.get(applied, applied) if isinstance(applied, bool) else min(applied, 4)
    assert keys == [b"k" + i.to_bytes(4, "big") for i in range(min(rows, 3))] + ([b"x"] if rows < 4 else [])


async def test_faults_hit_the_chosen_call():
    store = faulty()
    store.fail_next("get", after=2)
    store.fail_next("get", after=0)
    for fails in (True, False, True, False):
        if fails:
            with pytest.raises(StoreError):
                await store.get(MESSAGE, b"k")
        else:
            assert await store.get(MESSAGE, b"k") is None
    assert store.calls["get"] == 4


@pytest.mark.parametrize("op", ["claim", "discard", "reclaim", "scan"])
async def test_every_operation_fails_once_on_request(op):
    store = faulty()
    calls = {
        "claim": lambda: store.claim(NAME),
        "discard": lambda: store.discard(MESSAGE, [b"k"]),
        "reclaim": lambda: store.reclaim(MESSAGE, b"", LAST),
        "scan": lambda: everything(store),
    }
    store.fail_next(op)
    with pytest.raises(StoreError):
        await calls[op]()
    await store.claim(NAME)
    await calls[op]()


async def test_a_scan_that_fails_after_some_rows_has_fed_them():
    store = faulty()
    store.inner.apply([numbered(100)])
    store.fail_next("scan", applied=7)
    fed = []
    with pytest.raises(StoreError):
        await store.scan(MESSAGE, b"", LAST, lambda chunk: fed.extend(chunk) or True, first_chunk=4)
    assert len(fed) == 7


async def test_a_claim_that_fails_though_it_happened_leaves_the_store_usable():
    store = faulty()
    store.fail_next("claim", applied=True)
    with pytest.raises(StoreError):
        await store.claim(NAME)
    await store.write([numbered(1)], claim=await store.claim(NAME))


async def test_a_stalled_write_has_done_nothing_until_it_is_released(autojump_clock):
    store = faulty()
    claim = await store.claim(NAME)
    store.stall("write")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: store.write([numbered(3)], claim=claim))
        await store.stalled("write")
        assert await everything(store) == []
        store.release("write")
    assert len(await everything(store)) == 3


async def test_a_stalled_write_is_not_interrupted_by_cancellation(autojump_clock):
    store = faulty()
    claim = await store.claim(NAME)
    store.stall("write")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: store.write([numbered(3)], claim=claim))
        await store.stalled("write")
        nursery.cancel_scope.cancel()
        store.release("write")
    assert len(await everything(store)) == 3


async def test_a_stalled_read_can_be_cancelled(autojump_clock):
    store = faulty()
    store.stall("get")
    with trio.move_on_after(1) as scope:
        await store.get(MESSAGE, b"k")
    assert scope.cancelled_caught


@pytest.mark.parametrize("keep", range(6))
async def test_a_power_cut_leaves_any_prefix_of_the_commit_under_way(keep, autojump_clock):
    store = faulty()
    claim = await store.claim(NAME)
    await store.write([put_one(METADATA, b"before", b"acknowledged")], claim=claim)
    commit = [Put(MESSAGE, b"m", [b"0", b"1", b"2"], [b"v"] * 3), put_one(METADATA, b"head", b"v")]
    store.stall("write")

    async def write() -> None:
        with pytest.raises(StoreError):
            await store.write(commit, claim=claim)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        await store.stalled("write")
        store.crash(keep_rows=keep)
    assert len(await everything(store)) == min(keep, 3)
    assert await store.get(METADATA, b"head") == (b"v" if keep >= 4 else None)
    assert await store.get(METADATA, b"before") == b"acknowledged"
    with pytest.raises(StoreError):
        await store.write([numbered(1)], claim=claim)
    await store.write([numbered(1, b"z")], claim=await store.claim(NAME))


@pytest.mark.parametrize("keep", [0, 1, 3])
async def test_a_power_cut_brings_discarded_rows_back_unless_a_write_completed_since(keep):
    store = faulty()
    claim = await store.claim(NAME)
    await store.write([numbered(6)], claim=claim)
    keys = [key for key, _ in await everything(store)]
    await store.discard(MESSAGE, keys[:2])
    await store.write([put_one(METADATA, b"k", b"v")], claim=claim)
    await store.discard(MESSAGE, keys[2:5])
    store.crash(keep_discards=keep)
    assert [key for key, _ in await everything(store)] == keys[2 + keep :]


@given(
    writes=st.lists(st.integers(1, 4), max_size=5),
    torn=st.integers(0, 5),
    discarded=st.integers(0, 9),
    kept=st.integers(0, 9),
)
def test_after_any_cut_every_completed_write_is_present_and_the_rest_is_a_prefix(writes, torn, discarded, kept):
    async def run() -> None:
        store = faulty()
        claim = await store.claim(NAME)
        for number, count in enumerate(writes):
            await store.write([numbered(count, b"w%d" % number)], claim=claim)
        acknowledged = [key for key, _ in await everything(store)]
        await store.discard(MESSAGE, acknowledged[:discarded])
        store.fail_next("write", applied=torn)
        with pytest.raises(StoreError):
            await store.write([numbered(5, b"z")], claim=claim)
        store.crash(keep_rows=0, keep_discards=kept)
        rows = [key for key, _ in await everything(store)]
        assert [key for key in rows if key[:1] == b"z"] == [b"z" + i.to_bytes(4, "big") for i in range(torn)]
        gone = [key for key in acknowledged if key not in rows]
        assert gone == acknowledged[: len(gone)]
        assert len(gone) <= discarded

    trio.run(run)


def test_a_crash_needs_a_memory_store_inside():
    with pytest.raises(TypeError, match="MemoryStore"):
        FaultyStore(faulty()).crash()


def test_its_tables_are_those_of_the_inner_store():
    assert set(faulty().inner.tables) == set(Table)
