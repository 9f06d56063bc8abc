"""Instances that start at the same time agree who decides transactions; namespaces are the same at all of them."""

from __future__ import annotations

import pytest
import trio

from actors import namespaces as module
from actors.authority import AUTHORITY_KEY, AuthorityChanged, keep_authority
from actors.namespaces import Namespaces
from plainsong.protocol.effects import Table, put_one
from plainsong.protocol.keys import pointer_key
from plainsong.protocol.names import TopicName
from plainsong.protocol.records import unpack_record
from plainsong.protocol.topic.pending import Pending
from storage.memory import SharedMemory

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


async def test_an_authority_is_not_changed_by_who_starts_while_messages_are_undecided():
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


async def test_changes_of_namespaces_at_the_same_time_are_both_made():
    shared = SharedMemory()
    one, other = Namespaces(shared.store()), Namespaces(shared.store())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.put, "a", {"deduplication": "disabled"})
        nursery.start_soon(other.put, "b", {"deduplication": "disabled"})
    late = Namespaces(shared.store())
    await late.load()
    assert [late.properties(each)["deduplication"] for each in "ab"] == ["disabled", "disabled"]


async def test_who_was_not_told_of_a_namespace_reads_it_again_by_itself(autojump_clock):
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


async def test_what_a_namespace_says_already_is_told_again_since_who_wrote_it_may_have_fallen():
    shared, told = SharedMemory(), []

    async def tell(namespace):
        told.append(namespace)

    await Namespaces(shared.store()).put("ns", {"deduplication": "disabled"})
    assert await Namespaces(shared.store(), notify=tell).put("ns", {"deduplication": "disabled"})
    assert told == ["ns"]


async def test_who_comes_back_among_the_others_reads_namespaces_at_once(autojump_clock):
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
