"""The memory store fulfils the contract, without threads and under any clock."""

from __future__ import annotations

import pytest
import trio

from plainsong.protocol.effects import Delete, Put, Table, put_one
from storage.memory import MemoryStore, MemoryTable
from tests.storage.contract import LAST, MESSAGE, NAME, StoreContract, everything, numbered


class TestMemoryStoreKeepsTheContract(StoreContract):
    @pytest.fixture
    def store(self):
        return MemoryStore()

    def break_next_write(self, store):
        pytest.skip("memory does not fail; FaultyStore(MemoryStore()) does, and runs these tests")


async def test_every_call_is_a_checkpoint(autojump_clock):
    store = MemoryStore()
    claim = await store.claim(NAME)
    for call in (
        lambda: store.claim(NAME),
        lambda: store.write([numbered(1)], claim=claim),
        lambda: store.discard(MESSAGE, [b"k"]),
        lambda: store.get(MESSAGE, b"k"),
        lambda: everything(store),
        lambda: store.reclaim(MESSAGE, b"", LAST),
    ):
        with trio.testing.assert_checkpoints():
            await call()


async def test_a_scan_tolerates_rows_that_are_added_and_removed():
    store = MemoryStore()
    store.apply([numbered(2000)])
    seen: list[bytes] = []

    def feed(chunk):
        seen.extend(key for key, _ in chunk)
        store.apply([put_one(MESSAGE, b"a", b""), Delete(MESSAGE, [b"k" + (1500).to_bytes(4, "big")])])
        return True

    await store.scan(MESSAGE, b"", LAST, feed, first_chunk=10)
    assert seen == sorted(set(seen))
    assert len(seen) == 1999


def test_a_table_is_a_sorted_dict():
    from random import Random

    random, table, model = Random(1), MemoryTable(), {}
    for _ in range(300):
        keys = sorted({bytes([random.randrange(64), random.randrange(4)]) for _ in range(random.randrange(1, 9))})
        if random.random() < 0.6:
            table.put(keys, keys)
            model.update(zip(keys, keys, strict=True))
        else:
            random.shuffle(keys)
            table.remove(keys)
            for key in keys:
                model.pop(key, None)
        assert list(table.walk(b"", b"\xff", reverse=False)) == sorted(model.items())
        assert list(table.walk(b"\x10", b"\x20", reverse=True)) == sorted(
            (row for row in model.items() if b"\x10" <= row[0] < b"\x20"), reverse=True
        )


def test_a_put_of_uneven_lists_is_refused():
    with pytest.raises(ValueError, match="shorter"):
        MemoryStore().apply([Put(Table.MESSAGE, b"", [b"a", b"b"], [b"v"])])
