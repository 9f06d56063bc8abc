"""Instances that start at the same time agree on the transaction authority, and have the same namespaces."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from actors import namespaces as module
from actors.authority import AUTHORITY_KEY, AuthorityChanged, keep_authority
from actors.namespaces import Namespaces
from plainsong.protocol.effects import Delete, Table, put_one
from plainsong.protocol.keys import namespace_key, pointer_key
from plainsong.protocol.names import TopicName
from plainsong.protocol.records import unpack_record
from plainsong.protocol.topic.pending import Pending
from tests.storage.shared_memory import SharedMemory, SharedMemoryStore

CHOICES = ("embedded", "embedded", "embedded")


async def kept(store):
    value = await store.get(Table.METADATA, AUTHORITY_KEY)
    return unpack_record(value, "authority")["a"]


async def test_instances_that_start_together_with_the_same_authority_all_start():
    shared = SharedMemory()
    async with trio.open_nursery() as nursery:
        for choice in CHOICES:
            nursery.start_soon(keep_authority, shared.store(), choice)
    assert await kept(shared.store()) == "embedded"


async def test_a_starting_instance_cannot_change_the_authority_while_messages_are_undecided():
    shared = SharedMemory()
    store = shared.store()
    await keep_authority(store, "embedded")
    name = TopicName("ns", "t")
    row = put_one(Table.METADATA, pointer_key(name, 1, 5), Pending(5, 1, 1).encode())
    await store.write([row], claim=await store.claim(name))
    with pytest.raises(AuthorityChanged, match="ns:t"):
        await keep_authority(shared.store(), "off")
    assert await kept(store) == "embedded"


async def test_changes_of_a_namespace_at_two_instances_build_on_each_other():
    shared = SharedMemory()
    one, other = Namespaces(shared.store()), Namespaces(shared.store())
    await one.put("ns", {"deduplication": "disabled"})
    assert other.policy("ns").switched == 0
    await other.put("ns", {"deduplication": "enabled"})
    await other.put("ns", {"deduplication": "disabled"})
    assert other.policy("ns").switched == 2
    await one.read_again("ns")
    assert one.policy("ns") == other.policy("ns")


async def test_concurrent_changes_of_namespaces_both_take_effect():
    shared = SharedMemory()
    one, other = Namespaces(shared.store()), Namespaces(shared.store())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.put, "a", {"deduplication": "disabled"})
        nursery.start_soon(other.put, "b", {"deduplication": "disabled"})
    late = Namespaces(shared.store())
    await late.load()
    assert [late.properties(each)["deduplication"] for each in "ab"] == ["disabled", "disabled"]


async def test_an_instance_that_missed_a_namespace_change_reads_it_again(autojump_clock):
    shared = SharedMemory()
    told = []

    async def tell(namespace):
        told.append(namespace)

    one, other = Namespaces(shared.store(), notify=tell), Namespaces(shared.store())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(other.run)
        await one.put("ns", {"deduplication": "disabled"})
        assert told == ["ns"]
        assert other.properties("ns") == {"deduplication": "inherit"}
        await trio.sleep(module.REFRESH_S + 1)
        assert other.properties("ns") == {"deduplication": "disabled"}
        nursery.cancel_scope.cancel()


async def test_an_unchanged_namespace_is_announced_again_since_its_writer_may_have_crashed():
    shared, told = SharedMemory(), []

    async def tell(namespace):
        told.append(namespace)

    await Namespaces(shared.store()).put("ns", {"deduplication": "disabled"})
    assert await Namespaces(shared.store(), notify=tell).put("ns", {"deduplication": "disabled"})
    assert told == ["ns"]


async def test_an_instance_that_rejoins_reads_namespaces_at_once(autojump_clock):
    shared = SharedMemory()
    one, other = Namespaces(shared.store()), Namespaces(shared.store())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(other.run)
        for chosen in ("disabled", "enabled"):
            await one.put("ns", {"deduplication": chosen})
            other.reload_soon()
            await trio.sleep(0.1)
            assert other.properties("ns") == {"deduplication": chosen}
        nursery.cancel_scope.cancel()


class HeldStore(SharedMemoryStore):
    """A store whose answers a test can delay."""

    def __init__(self, shared):
        super().__init__(shared)
        self._held = {}

    def hold(self, kind):
        """Delay the next answer of a kind; return an event set once it is in flight, and one that lets it arrive."""
        self._held[kind] = trio.Event(), trio.Event()
        return self._held[kind]

    async def _answered(self, kind):
        left, arrives = self._held.pop(kind, (trio.Event(), None))
        if arrives is not None:
            left.set()
            await arrives.wait()

    async def get(self, *args, **more):
        found = await super().get(*args, **more)
        await self._answered("get")
        return found

    async def scan(self, *args, **more):
        await super().scan(*args, **more)
        await self._answered("scan")

    async def write(self, *args, **more):
        await super().write(*args, **more)
        await self._answered("write")


@asynccontextmanager
async def arriving_late(store, kind, call):
    """Within the block the store has answered this call, but the answer is in flight; it arrives at the block's end."""
    on_its_way, arrives = store.hold(kind)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)
        await on_its_way.wait()
        yield
        arrives.set()


async def set_namespace(namespaces, chosen):
    await namespaces.put("ns", {"deduplication": chosen})


async def test_a_slow_read_of_all_namespaces_does_not_overwrite_later_changes():
    store = HeldStore(SharedMemory())
    namespaces = Namespaces(store)
    await set_namespace(namespaces, "enabled")
    async with arriving_late(store, "scan", namespaces.load):
        await set_namespace(namespaces, "disabled")
        policy = namespaces.policy("ns")
    assert namespaces.properties("ns") == {"deduplication": "disabled"}
    assert namespaces.policy("ns") == policy
    await namespaces.load()
    assert namespaces.policy("ns") == policy


@pytest.mark.parametrize("other_says", ["disabled", None])
async def test_a_slow_read_of_all_namespaces_does_not_overwrite_later_changes_and_removals_of_another_instance(
    other_says,
):
    shared = SharedMemory()
    store = HeldStore(shared)
    namespaces = Namespaces(store)
    await set_namespace(namespaces, "enabled")
    async with arriving_late(store, "scan", namespaces.load):
        if other_says is None:
            removal = Delete(Table.METADATA, [namespace_key("ns")])
            other = shared.store()
            await other.write([removal], claim=await other.claim(TopicName("", "namespaces")))
        else:
            await set_namespace(Namespaces(shared.store()), other_says)
        await namespaces.read_again("ns")
    assert namespaces.properties("ns") == {"deduplication": other_says or "inherit"}
    assert ("ns" in namespaces.policies) is (other_says is not None)


async def test_the_later_read_of_a_namespace_wins_whichever_answer_arrives_first():
    shared = SharedMemory()
    store = HeldStore(shared)
    namespaces, other = Namespaces(store), Namespaces(shared.store())
    await set_namespace(other, "enabled")
    async with arriving_late(store, "get", partial(namespaces.read_again, "ns")):
        await set_namespace(other, "disabled")
        await namespaces.load()
    assert namespaces.properties("ns") == {"deduplication": "disabled"}


@pytest.mark.parametrize("read_first", [True, False])
async def test_the_later_write_of_another_instance_wins_whenever_ours_is_answered(nursery, read_first):
    shared = SharedMemory()
    store = HeldStore(shared)
    namespaces, other = Namespaces(store), Namespaces(shared.store())
    on_its_way, arrives = store.hold("write")
    written, read = trio.Event(), trio.Event()

    async def write():
        await set_namespace(namespaces, "disabled")
        written.set()

    async def read_again():
        await namespaces.read_again("ns")
        read.set()

    nursery.start_soon(write)
    await on_its_way.wait()
    await set_namespace(other, "enabled")  # makes this instance read the namespace again
    if read_first:
        await read_again()
        arrives.set()
    else:
        read_on_its_way, read_arrives = store.hold("get")
        nursery.start_soon(read_again)
        await read_on_its_way.wait()
        arrives.set()
        await written.wait()
        read_arrives.set()
    await written.wait()
    await read.wait()
    assert namespaces.properties("ns") == {"deduplication": "enabled"}
