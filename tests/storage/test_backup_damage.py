"""A backup of a store with damaged blocks fails; with permission, it has the readable rows and names the others."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import pytest

from plainsong.protocol.effects import Put, Table, put_one
from plainsong.protocol.ids import pack_position
from plainsong.protocol.keys import generation_prefix, metadata_key
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.records import Metadata
from plainsong.protocol.rows import plain_head
from storage.backup.cut import Cut
from storage.backup.objects import decode_rows
from storage.base import StoreError, Unreadable
from storage.config import StorageConfig
from storage.leveldb import LevelDBOptions, LevelDBStore
from storage.memory import MemoryStore
from storage.pace import Pace
from tests.storage.faulty import FaultyStore

OPTIONS = LevelDBOptions(StorageConfig(write_buffer_bytes=1 << 19, block_cache_bytes=0))
NAMES = [TopicName("shop", f"topic-{number:04d}") for number in range(300)]
BIG = NAMES[150]
FIRST_MS = 1_700_000_000_000
ROWS = 1_000


async def fill(folder):
    """Write topics with one message each, and one with many incompressible ones; reopen, so that all are in tables."""
    random = Random(1)
    async with await LevelDBStore.open(folder, OPTIONS) as store:
        metadata = Metadata(1, TopicProperties(), 1, 1).encode()
        commit = []
        for name in NAMES:
            commit.append(put_one(Table.METADATA, metadata_key(name), metadata))
            positions = [pack_position(FIRST_MS + n, 0) for n in range(ROWS if name == BIG else 1)]
            values = [plain_head(200) + random.randbytes(200) for _ in positions]
            commit.append(Put(Table.MESSAGE, generation_prefix(name, 1), positions, values))
        await store.write(commit, claim=await store.claim(BIG))
    async with await LevelDBStore.open(folder, OPTIONS):
        pass


def flip(folder, pattern):
    """Flip a bit in the middle of the largest table."""
    table = max(folder.glob(pattern), key=lambda each: each.stat().st_size)
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 1
    table.write_bytes(data)


async def listed(cut, name):
    """Return the rows of a topic's messages, and the parts left out."""
    rows, left_out, after = [], [], None
    while True:
        page = await cut.page(name, after)
        left_out += [each for each in page.left_out if each not in left_out]
        for each in page.objects:
            cut._kept.clear()  # so that the object is read again
            data = await cut.object(each.sha256)
            rows += decode_rows(data) if each.table == "messages" else []
        after = page.next
        if after is None:
            return rows, left_out


@pytest.fixture
async def opened(tmp_path):
    """Return a function that flips a bit in the largest file that matches a pattern, and opens a cut."""
    await fill(tmp_path / "data")

    async def open_cut(pattern, *, around_damage):
        flip(tmp_path / "data", pattern)
        store = await LevelDBStore.open(tmp_path / "data", OPTIONS)
        view = await store.pin(600)
        stores.append((store, view))
        return Cut(view, Pace(rest=0), around_damage=around_damage)

    stores = []
    yield open_cut
    for store, view in stores:
        await view.aclose()
        await store.aclose()


async def test_a_block_of_messages_is_left_out_with_its_ids_and_every_other_row_is_in_an_object(opened):
    cut = await opened("volumes/*/*.ldb", around_damage=True)
    await cut.look()
    assert [each.name for each in await cut.topics()] == NAMES
    rows, left_out = await listed(cut, BIG)
    (place,) = left_out
    assert place.table == "messages"
    found = {int.from_bytes(key[-10:-2], "big") - FIRST_MS for key, _ in rows}
    lost = sorted(set(range(ROWS)) - found)
    assert 0 < len(lost) < 100
    assert lost == list(range(lost[0], lost[-1] + 1))
    first, last = (f"{FIRST_MS + number:016x}" for number in (lost[0], lost[-1]))
    assert place.first[:16] <= first <= last <= place.last[:16]
    assert place.first[:16] >= f"{FIRST_MS + lost[0] - 1:016x}"
    for name in (NAMES[0], NAMES[-1]):
        rows, left_out = await listed(cut, name)
        assert (len(rows), left_out) == (1, [])


async def test_topics_with_unreadable_names_are_left_out_and_all_others_are_present(opened):
    cut = await opened("metadata/*.ldb", around_damage=True)
    await cut.look()
    names = [each.name for each in await cut.topics()]
    (place,) = cut.left_out
    lost = [name for name in NAMES if name not in names]
    assert 1 < len(lost) < len(NAMES) // 2
    first, last = bytes.fromhex(place.first), bytes.fromhex(place.last)
    assert all(first <= metadata_key(name) <= last for name in lost)
    for name in names:
        rows, left_out = await listed(cut, name)
        assert (len(rows), left_out) == (ROWS if name == BIG else 1, [])


@pytest.mark.parametrize("pattern", ["volumes/*/*.ldb", "metadata/*.ldb"])
async def test_nothing_is_left_out_without_permission(opened, pattern):
    cut = await opened(pattern, around_damage=False)
    with pytest.raises(Unreadable):  # noqa: PT012 - any of these calls may raise
        await cut.look()
        for each in await cut.topics():
            await listed(cut, each.name)


async def test_a_failing_store_is_not_taken_for_a_damaged_one():
    store = FaultyStore(MemoryStore())
    claim = await store.claim(BIG)
    await store.write(
        [put_one(Table.METADATA, metadata_key(BIG), Metadata(1, TopicProperties(), 1, 1).encode())], claim=claim
    )
    view = SimpleNamespace(exact=False, get=store.get, scan=store.scan)
    cut = Cut(view, Pace(rest=0), around_damage=True)
    await cut.look()
    store.fail_next("scan")
    with pytest.raises(StoreError):
        await cut.topics()
    assert cut.left_out == []
    assert [each.name for each in await cut.topics()] == [BIG]
