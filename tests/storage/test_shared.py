"""Shared memory keeps every store's contract, and lets one owner at a time write."""

from __future__ import annotations

import pytest

from storage.base import Deposed
from tests.storage.contract import MESSAGE, NAME, StoreContract, everything, numbered
from tests.storage.shared_memory import SharedMemory


class TestSharedMemoryKeepsTheContract(StoreContract):
    @pytest.fixture
    def store(self):
        return SharedMemory().store()

    def break_next_write(self, store):
        pytest.skip("memory does not fail; FaultyStore(MemoryStore()) does, and runs these tests")


async def test_a_replaced_owner_can_neither_write_nor_confirm_that_it_owns():
    shared = SharedMemory()
    first, second = shared.store(), shared.store()
    old = await first.claim(NAME)
    new = await second.claim(NAME)
    for call in (first.write([numbered(1)], claim=old), first.check(old)):
        with pytest.raises(Deposed):
            await call
    assert await everything(first, MESSAGE) == []
    await second.write([numbered(2)], claim=new)
    await second.check(new)
    assert len(await everything(first, MESSAGE)) == 2


async def test_a_commit_in_progress_counts_only_if_no_other_owner_came_first():
    import trio

    shared = SharedMemory()
    first, second = shared.store(), shared.store()
    old = await first.claim(NAME)
    first.reachable = trio.Event()
    async with trio.open_nursery() as nursery:

        async def write():
            with pytest.raises(Deposed):
                await first.write([numbered(1)], claim=old)

        nursery.start_soon(write)
        await trio.testing.wait_all_tasks_blocked()
        await second.claim(NAME)
        first.reachable.set()
    assert await everything(second, MESSAGE) == []
