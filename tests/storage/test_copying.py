"""A copy keeps every row unchanged, continues after any crash, and refuses rows that would get mixed or do not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plainsong.protocol import keys
from plainsong.protocol.effects import Put, Table, put_one
from plainsong.protocol.keys import metadata_key, namespace_key, pointer_key
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.records import Metadata, NamespaceProperties, pack_record
from plainsong.protocol.rows import MessageRow
from plainsong.protocol.transactions.ledger_rows import AUTHORITY, HEAD, Head, service_key
from storage import copying as writing
from storage.base import Deposed, StoreError, StoreUnusable, read_rows
from storage.copy_parts import COPY_KEY, DONE, CopyRow, copy_row, refuse_unfinished
from storage.copying import CopyRequest, CopyRun, StoresDiffer
from storage.leveldb import LevelDBStore
from storage.memory import MemoryStore
from tests.storage.faulty import FaultyStore
from tests.storage.rows_of_all_kinds import (
    INVALID,
    NOW_MS,
    ORDERS,
    message,
    rows_about_producers,
    rows_about_staging,
    rows_of_all_kinds,
    rows_that_do_not_parse,
)
from tests.storage.shared_memory import SharedMemory

EVERYTHING = CopyRequest("here")
COPYING_PREFIX = keys.SYSTEM + keys.COPYING


def now_ms() -> int:
    return NOW_MS


async def filled(store, *more):
    claim = await store.claim(ORDERS)
    rows = [*rows_of_all_kinds(), *rows_about_producers(), *rows_about_staging(), *more]
    await store.write(rows, claim=claim)
    return store


async def rows_of(store) -> list[tuple[Table, bytes, bytes]]:
    """Return all rows except the copy's own."""
    found = []
    for table in Table:
        for key, value in await read_rows(store, table, b"", b"\xff" * 9, limit=1_000_000):
            if not key.startswith(COPYING_PREFIX):
                found.append((table, key, value))
    return found


async def copied(source, target, asked=EVERYTHING):
    return await CopyRun(source, target, asked).run(now_ms)


@pytest.fixture(params=["memory", "leveldb", "shared"])
async def target(request, tmp_path):
    if request.param == "leveldb":
        store = await LevelDBStore.open(tmp_path / "target")
    else:
        store = MemoryStore() if request.param == "memory" else SharedMemory().store()
    yield store
    await store.aclose()


# --- copied rows -----------------------------------------------------------------------------------


async def test_rows_of_all_kinds_are_copied_byte_for_byte_readable_or_not(target):
    source = await filled(MemoryStore(), *rows_that_do_not_parse())
    compared = await copied(source, target)
    assert await rows_of(target) == await rows_of(source)
    assert all(part.is_same for part in compared)
    labels = {part.part.label for part in compared}
    assert {"shop:orders", "shop:gone", "namespaces", "transaction service", "rows of no topic"} <= labels
    assert sum(part.source.rows for part in compared) == len(await rows_of(source))


async def test_a_copy_there_and_back_is_the_same_store(target):
    source = await filled(MemoryStore())
    await copied(source, target)
    back = MemoryStore()
    await copied(target, back, CopyRequest("there"))
    assert await rows_of(back) == await rows_of(source)


async def test_chosen_topics_are_copied_with_their_namespaces_and_the_transaction_service(target):
    other = TopicName("shop", "other")
    row = Metadata(1, TopicProperties(), 1, 2).encode()
    source = await filled(MemoryStore(), put_one(Table.METADATA, metadata_key(other), row))
    await copied(source, target, CopyRequest("here", (ORDERS,)))
    there = await rows_of(target)
    assert (Table.METADATA, metadata_key(other), row) not in there
    assert {key for _, key, _ in there} >= {metadata_key(ORDERS), namespace_key("shop"), service_key(HEAD)}


async def test_a_repeated_copy_changes_nothing(target):
    source = await filled(MemoryStore())
    await copied(source, target)
    before = await rows_of(target)
    assert await copied(source, target) is None
    assert await rows_of(target) == before
    assert (await copy_row(target)).state == DONE


async def test_rows_about_the_progress_of_topics_are_removed_at_the_end(target):
    await copied(await filled(MemoryStore()), target)
    own = await read_rows(target, Table.METADATA, COPYING_PREFIX, keys.stop_after(COPYING_PREFIX), limit=10)
    assert [key for key, _ in own] == [COPY_KEY]


async def test_messages_of_many_steps_are_all_present_and_in_order(target, monkeypatch):
    monkeypatch.setattr(writing, "STEP_ROWS", 7)
    many = [message(ORDERS, 2, NOW_MS + number, 0, MessageRow(b"%d" % number)) for number in range(50)]
    source = await filled(MemoryStore(), *many)
    await copied(source, target)
    assert await rows_of(target) == await rows_of(source)


async def test_rows_of_a_put_are_of_one_generation_or_of_one_write_pointer():
    first = await read_rows(await filled(MemoryStore()), Table.PAYLOAD, b"", b"\xff", limit=100)
    assert len({row[0][:-10] for row in first}) > 1
    for put in writing.puts(Table.PAYLOAD, first):
        assert isinstance(put, Put)
        assert len({(put.prefix + suffix)[:-10] for suffix in put.suffixes}) == 1


# --- crashes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("applied", [False, 1, True])
async def test_a_copy_interrupted_at_any_write_continues_and_loses_and_doubles_nothing(monkeypatch, applied):
    monkeypatch.setattr(writing, "STEP_ROWS", 2)
    source = await filled(MemoryStore())
    wanted = await rows_of(source)
    writes = 0
    while True:
        target = MemoryStore()
        faulty = FaultyStore(target)
        faulty.fail_next("write", applied=applied, after=writes)
        try:
            await copied(source, faulty)
        except StoreError:
            pass
        else:
            break
        await refuses_to_serve_what_is_not_complete(target, wanted)
        await copied(source, target)
        assert await rows_of(target) == wanted
        await refuse_unfinished(target)
        writes += 1
    assert writes > 20


async def refuses_to_serve_what_is_not_complete(target, wanted):
    rows = await rows_of(target)
    try:
        await refuse_unfinished(target)
    except StoreUnusable:
        return
    assert rows in ([], wanted)


# --- refusals --------------------------------------------------------------------------------------


async def test_a_target_with_topics_of_the_same_names_is_refused_and_named(target):
    await filled(target)
    before = await rows_of(target)
    with pytest.raises(StoreUnusable, match="shop:gone, shop:orders"):
        await copied(await filled(MemoryStore()), target)
    assert await rows_of(target) == before


async def test_another_copy_that_is_not_complete_is_refused(target):
    claim = await target.claim(ORDERS)
    row = CopyRow("elsewhere", None)
    await target.write([put_one(Table.METADATA, COPY_KEY, row.encode())], claim=claim)
    with pytest.raises(StoreUnusable, match="a copy of elsewhere"):
        await copied(await filled(MemoryStore()), target)


async def test_a_row_too_large_for_the_target_is_named_before_anything_is_copied():
    target = MemoryStore()
    target.traits = replace(target.traits, max_row_bytes=1000)
    source = await filled(MemoryStore(), message(ORDERS, 2, NOW_MS + 7, 0, MessageRow(bytes(2000))))
    with pytest.raises(StoreUnusable, match=r"shop:orders: row [0-9a-f]{40} of the message table has 2003 bytes"):
        await copied(source, target)
    assert await rows_of(target) == []


async def test_messages_of_transactions_are_not_copied_under_another_service(target):
    claim = await target.claim(ORDERS)
    await target.write([put_one(Table.METADATA, service_key(HEAD), Head(9, 9, 1).encode())], claim=claim)
    with pytest.raises(StoreUnusable, match="its own transaction service"):
        await copied(await filled(MemoryStore()), target)


async def test_a_service_that_was_only_chosen_does_not_count_yet(target):
    claim = await target.claim(ORDERS)
    await target.write([put_one(Table.METADATA, service_key(AUTHORITY), pack_record({"a": "none"}))], claim=claim)
    source = await filled(MemoryStore())
    await copied(source, target)
    assert await rows_of(target) == await rows_of(source)


async def test_a_namespace_with_other_properties_is_refused(target):
    claim = await target.claim(ORDERS)
    row = NamespaceProperties("disabled", 5).encode()
    await target.write([put_one(Table.METADATA, namespace_key("shop"), row)], claim=claim)
    with pytest.raises(StoreUnusable, match="namespace shop has other properties"):
        await copied(await filled(MemoryStore()), target)


async def test_a_missing_topic_is_named(target):
    with pytest.raises(StoreUnusable, match="no topic shop:nothing"):
        await copied(await filled(MemoryStore()), target, CopyRequest("here", (TopicName("shop", "nothing"),)))


# --- writes during a copy --------------------------------------------------------------------------


async def test_an_owner_that_claims_a_topic_of_the_source_during_the_copy_ends_the_copy():
    shared = SharedMemory()
    source = await filled(shared.store())

    class Overtaken(MemoryStore):
        async def write(self, commit, *, claim, expect=()):
            if claim.name == ORDERS:
                await shared.store().claim(ORDERS)
            await super().write(commit, claim=claim, expect=expect)

    with pytest.raises(Deposed, match="a daemon took over shop:orders"):
        await copied(source, Overtaken())


async def test_a_source_written_after_it_was_copied_is_found_to_differ(target):
    source = await filled(MemoryStore())
    await copied(source, target)
    late = message(ORDERS, 2, NOW_MS + 9, 0, MessageRow(b"late"))
    await source.write([late], claim=await source.claim(ORDERS))
    different = [each.part.label for each in await CopyRun(source, target, EVERYTHING).verify() if not each.is_same]
    assert different == ["shop:orders"]


async def test_a_source_written_during_the_copy_is_never_called_complete(target):
    source = await filled(MemoryStore())
    looked = await CopyRun(source, target, EVERYTHING).look()
    pointer = put_one(Table.METADATA, pointer_key(ORDERS, 2, INVALID + 5), b"\x01\x80")
    await source.write([pointer], claim=await source.claim(ORDERS))
    copying = CopyRun(source, target, EVERYTHING)

    async def before():
        return looked

    copying.look = before
    with pytest.raises(StoresDiffer, match="shop:orders"):
        await copying.run(now_ms)
    with pytest.raises(StoreUnusable, match="not complete"):
        await refuse_unfinished(target)
