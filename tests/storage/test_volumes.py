"""Volumes: the store's contract with tiny volumes, and how volumes are sealed, changed, opened and closed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import aclosing
from functools import partial
from pathlib import Path

import plyvel
import pytest
import trio
from disks import copied_at_once

from plainsong.protocol.effects import Delete, Put, RollBack, put_one
from plainsong.protocol.ids import pack_position
from plainsong.protocol.keys import generation_prefix, payload_prefix, stop_after
from plainsong.protocol.names import TopicName
from plainsong.protocol.rows import decode_row
from storage.base import StoreDamaged, StoreError, StoreUnusable, Unreadable, read_rows
from storage.leveldb import LevelDBStore, listed_volumes, opening, tidying
from storage.leveldb.engine.database import Database
from storage.leveldb.keeper_thread import Stopped
from storage.leveldb.reads import VolumeReads
from storage.leveldb.sealed_rows import SealedRows
from storage.leveldb.volume import Volume, index_path
from storage.leveldb.volume_list import MAX_PAUSES_S, STEP_BYTES, ListUnknown, remove_slowly, write_list
from tests.storage.contract import MESSAGE, METADATA, NAME, PAYLOAD, StoreContract, everything
from tests.storage.rolling_contract import RollingContract, under
from tests.storage.tiny_volumes import PREFIX, TINY, fill, key, message, paused_until, settled


def fail_next_batch() -> None:
    """Make the next batch fail, in any database."""
    real = Database.batch

    def fail(self: Database, *, sync: bool) -> None:
        Database.batch = real
        raise StoreError("the disk says no")

    Database.batch = fail


class TestTinyVolumesKeepTheContract(StoreContract):
    @pytest.fixture
    async def store(self, tmp_path):
        async with await LevelDBStore.open(tmp_path / "data", TINY) as opened:
            yield opened

    def break_next_write(self, store):
        fail_next_batch()


class TestTinyVolumesRollBack(RollingContract):
    @pytest.fixture
    async def store(self, tmp_path):
        async with await LevelDBStore.open(tmp_path / "data", TINY) as opened:
            yield opened

    def break_next_write(self, store):
        fail_next_batch()


@pytest.fixture
async def store(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as opened:
        yield opened


def volumes(store: LevelDBStore) -> list[int]:
    """Return the numbers of the volumes that have rows."""
    return [volume.number for volume in store._db.sets.current.all if volume.rows]


# --- sealing ----------------------------------------------------------------------------------------


async def test_a_full_volume_is_sealed_and_the_next_commit_goes_to_another(store):
    await fill(store, 40)
    *sealed, newest = store._db.sets.current.all
    assert len(sealed) > 4
    row_bytes = newest.memory_bytes // newest.rows
    assert all(0 <= volume.memory_bytes - TINY.settings.volume_bytes < row_bytes for volume in sealed)
    assert newest.memory_bytes < TINY.settings.volume_bytes
    assert [found for found, _ in await everything(store)] == [key(number) for number in range(40)]
    assert [found for found, _ in await everything(store, reverse=True)] == [
        key(number) for number in range(39, -1, -1)
    ]
    assert await store.get(METADATA, b"last") == b"39"


async def test_rows_and_metadata_of_all_volumes_are_present_after_a_clean_close(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await fill(store, 40)
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        assert len(await everything(store)) == 40
        assert await store.get(METADATA, b"last") == b"39"
        await fill(store, 10, 40)
        assert len(await everything(store)) == 50


async def test_no_more_volumes_are_open_than_allowed(store):
    await fill(store, 60)
    await settled(store)
    for number in range(60):
        assert await store.get(MESSAGE, key(number)) is not None
        assert store._db.databases.open_count <= TINY.max_open_volumes + 1
    await everything(store)
    assert store._db.databases.open_count <= TINY.max_open_volumes + 1


def leases(store: LevelDBStore, monkeypatch: pytest.MonkeyPatch) -> set[Volume]:
    """Record the volumes whose databases are leased after this call."""
    found: set[Volume] = set()
    acquire = store._db.databases.acquire
    monkeypatch.setattr(store._db.databases, "acquire", lambda volume: found.add(volume) or acquire(volume))
    return found


async def test_a_range_opens_only_the_volumes_that_have_rows_of_it(store, monkeypatch):
    await fill(store, 60)
    await settled(store)
    all_volumes = store._db.sets.current.all
    leased = leases(store, monkeypatch)
    rows = await read_rows(store, MESSAGE, key(30), key(32), limit=10)
    assert [found for found, _ in rows] == [key(30), key(31)]
    assert store._db.sets.current.all == all_volumes
    assert 1 <= len(leased) <= 2


async def test_a_volume_without_rows_of_a_topic_is_not_opened_for_it(store, monkeypatch):
    await fill(store, 60)
    other = generation_prefix(TopicName("ns", "other"), 1)
    await store.write([message(1, prefix=other)], claim=await store.claim(NAME))
    await settled(store)
    sealed = store._db.sets.current.sealed
    leased = leases(store, monkeypatch)
    assert len(await read_rows(store, MESSAGE, other, stop_after(other), limit=10)) == 1
    assert leased.isdisjoint(sealed)


# --- rows of several volumes ------------------------------------------------------------------------


async def test_payloads_that_were_stored_alternately_are_read_in_key_order(store):
    claim = await store.claim(NAME)
    pointers = [payload_prefix(NAME, 1, pointer) for pointer in (7, 5, 9, -3)]
    for number in range(30):
        for prefix in pointers:
            await store.write([Put(PAYLOAD, prefix, [pack_position(number, 0)], [b"p" * 50])], claim=claim)
    expected = sorted(prefix + pack_position(number, 0) for prefix in pointers for number in range(30))
    assert [found for found, _ in await everything(store, PAYLOAD)] == expected
    assert [found for found, _ in await everything(store, PAYLOAD, reverse=True)] == expected[::-1]
    one = await read_rows(store, PAYLOAD, pointers[0], stop_after(pointers[0]), limit=100)
    assert [found for found, _ in one] == [pointers[0] + pack_position(number, 0) for number in range(30)]


async def test_of_two_rows_with_one_key_the_one_in_the_newer_volume_counts(store):
    await fill(store, 30)
    claim = await store.claim(NAME)
    await store.write([message(3, b"new")], claim=claim)
    assert await store.get(MESSAGE, key(3)) == b"new"
    assert dict(await everything(store))[key(3)] == b"new"
    assert len(await everything(store, reverse=True)) == 30
    await store.discard(MESSAGE, [key(3)])
    assert await store.get(MESSAGE, key(3)) is None
    assert len(await everything(store)) == 29


# --- changes in sealed volumes ----------------------------------------------------------------------


async def test_a_rollback_flips_rows_in_place(store):
    claim = await store.claim(NAME)
    for number in range(30):
        await store.write([message(number, under(77, b"x" * 90))], claim=claim)
    before = [volume.rows for volume in store._db.sets.current.all]
    await store.write([RollBack(PREFIX, stop_after(PREFIX), 77), put_one(METADATA, b"k", b"v")], claim=claim)
    assert [value for _, value in await everything(store)] == [under(-77, b"x" * 90)] * 30
    assert [volume.rows for volume in store._db.sets.current.all][: len(before)] == before
    assert await store.get(METADATA, b"k") == b"v"


async def test_changes_in_sealed_volumes_survive_any_end(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        claim = await store.claim(NAME)
        for number in range(30):
            await store.write([message(number, under(77, b"x" * 90))], claim=claim)
        await store.discard(MESSAGE, [key(number) for number in range(0, 30, 3)])
        await store.write([Delete(MESSAGE, [key(1), key(28)])], claim=claim)
        await store.write([RollBack(key(4), key(20), 77)], claim=claim)
        expected = await everything(store)
        assert len(expected) == 18
        killed = await copy_of(store, tmp_path / "killed")
    for path in (tmp_path / "data", killed):
        async with await LevelDBStore.open(path, TINY) as store:
            assert await everything(store) == expected


async def test_a_rollback_that_is_killed_between_two_volumes_is_finished_by_a_repeat(tmp_path, monkeypatch):
    roll_back = [RollBack(PREFIX, stop_after(PREFIX), 77), put_one(METADATA, b"rolled back", b"yes")]
    real = SealedRows.change

    def killed_before(self: SealedRows, change: object) -> None:
        copied_at_once(tmp_path / "data", tmp_path / "killed")
        real(self, change)

    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        claim = await store.claim(NAME)
        for number in range(4):
            if number == 2:
                await store.begin_files()
            await store.write([message(number, under(77))], claim=claim)
        monkeypatch.setattr(SealedRows, "change", killed_before)
        await store.write(roll_back, claim=claim)
    monkeypatch.undo()
    async with await LevelDBStore.open(tmp_path / "killed", TINY) as store:
        assert [decode_row(value).pointer for _, value in await everything(store)] == [77, 77, -77, -77]
        assert await store.get(METADATA, b"rolled back") is None
        await store.write(roll_back, claim=await store.claim(NAME))
        assert [decode_row(value).pointer for _, value in await everything(store)] == [-77] * 4
        assert await store.get(METADATA, b"rolled back") == b"yes"


async def test_a_rollback_does_not_restore_a_discarded_row(store):
    claim = await store.claim(NAME)
    for number in range(30):
        await store.write([message(number, under(77, b"x" * 90))], claim=claim)
    await store.discard(MESSAGE, [key(2), key(29)])
    await store.write([RollBack(PREFIX, stop_after(PREFIX), 77)], claim=claim)
    assert [found for found, _ in await everything(store)] == [key(n) for n in range(30) if n not in (2, 29)]


# --- dropping ---------------------------------------------------------------------------------------


def folders(store: LevelDBStore) -> set[str]:
    """Return the folders of volumes on disk."""
    return {path.name for path in (store._directory.path / "volumes").iterdir() if path.is_dir()}


async def copy_of(store: LevelDBStore, copy: Path) -> Path:
    """Copy the directory in the state in which a kill would leave it now."""
    await settled(store)
    return copied_at_once(store._directory.path, copy)


async def test_completely_dead_volumes_are_removed_by_tidying(store):
    await fill(store, 40)
    await settled(store)
    before = folders(store)
    await store.drop(MESSAGE, [(PREFIX, key(30))])
    assert await store.tidy() > 3
    assert len(folders(store)) < len(before) - 3
    assert [found for found, _ in await everything(store)] == [key(number) for number in range(30, 40)]
    assert await store.get(METADATA, b"last") == b"39"


async def test_the_newest_volume_is_sealed_and_dropped_when_everything_in_it_is_dead(store):
    await fill(store, 40)
    await settled(store)
    full = store._db.measure()
    await store.drop(MESSAGE, [(PREFIX, stop_after(PREFIX))])
    await store.tidy()
    await settled(store)
    assert volumes(store) == []
    assert store._db.measure() < full / 2
    assert await everything(store) == []
    assert await store.get(METADATA, b"last") == b"39"
    await fill(store, 3, 40)
    assert len(await everything(store)) == 3


async def test_dropped_rows_stay_so_after_any_end_and_dead_ranges_are_forgotten(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await fill(store, 40)
        await store.drop(MESSAGE, [(PREFIX, key(33))])
        await fill(store, 1, 40)
        copies = [await copy_of(store, tmp_path / "before")]
        await store.tidy()
        await fill(store, 1, 41)
        copies.append(await copy_of(store, tmp_path / "after"))
        await store.drop(MESSAGE, [(PREFIX, stop_after(PREFIX))])
        await store.tidy()
        await store.tidy()
        assert list(store._db.metadata.dead_ranges()) == []
    for path, last in zip(copies, (41, 42), strict=True):
        async with await LevelDBStore.open(path, TINY) as store:
            assert [found for found, _ in await everything(store)] == [key(number) for number in range(33, last)]
            await store.tidy()
            assert [found for found, _ in await everything(store)] == [key(number) for number in range(33, last)]
            assert await store.get(METADATA, b"last") == b"%d" % (last - 1)


async def test_a_volume_that_is_being_read_keeps_its_files_until_the_read_ends(store):
    await fill(store, 40)
    await settled(store)
    fed: list[bytes] = []
    before = folders(store)

    def feed(rows: list[tuple[bytes, bytes]]) -> bool:
        fed.extend(found for found, _ in rows)
        if len(fed) == 1:
            trio.from_thread.run(store.drop, MESSAGE, [(PREFIX, stop_after(PREFIX))])
            trio.from_thread.run(store.tidy)
            assert folders(store) >= before
        return True

    await store.scan(MESSAGE, PREFIX, stop_after(PREFIX), feed, first_chunk=1)
    assert fed == [key(number) for number in range(40)]
    await settled(store)
    assert len(folders(store)) <= 2


async def test_rows_removed_one_by_one_free_a_volume_too(store):
    await fill(store, 40)
    await store.discard(MESSAGE, [key(number) for number in range(35)])
    assert await store.tidy() > 3
    assert [found for found, _ in await everything(store)] == [key(number) for number in range(35, 40)]


async def test_many_rows_are_found_at_once_wherever_each_is_found_alone(store):
    claim = await store.claim(NAME)
    await fill(store, 10)
    many = [pack_position(number, 0) for number in range(10, 40)]
    await store.write([Put(MESSAGE, PREFIX, many, [b"v"] * len(many))], claim=claim)
    await store.begin_files()
    other = b"\xff" + PREFIX[1:]
    await store.write([message(5, prefix=other)], claim=claim)
    await store.begin_files()
    await settled(store)
    index = store._db.sets.current.index[MESSAGE]
    in_one, beyond = [key(number) for number in range(10, 40)], [key(number) for number in range(30, 60)]
    over_several, of_two_groups = [key(number) for number in range(40)], [*in_one, other + pack_position(5, 0)]
    ((_, (extent,)), *_) = index.of_each(in_one[:1])
    volume = extent.volume
    for places in (index, volume.extents[MESSAGE]):
        for keys in (
            in_one,
            beyond,
            over_several,
            of_two_groups,
            in_one[:2],
            [key(number) for number in range(90, 110)],
            [],
        ):
            alone = [(each, list(places.overlapping(each, each + b"\x00"))) for each in keys]
            assert list(places.of_each(keys)) == [found for found in alone if found[1]]
    assert extent.last == in_one[-1]
    before = volume.live_bytes
    row_bytes = len(in_one[0]) + 1
    await store.discard(MESSAGE, in_one[:20])
    assert volume.live_bytes == before - 20 * row_bytes
    await store.discard(MESSAGE, beyond)
    assert volume.live_bytes == before - 30 * row_bytes, "ten of these are in it"


async def test_counting_a_row_as_removed_twice_loses_no_row(store):
    await fill(store, 40)
    for _ in range(50):
        await store.discard(MESSAGE, [key(3), key(4)])
    await store.tidy()
    assert len(await everything(store)) == 38


async def test_tidying_without_anything_dead_changes_nothing(store):
    await fill(store, 40)
    await settled(store)
    before = folders(store)
    assert await store.tidy() == 0
    assert folders(store) == before


# --- rewriting --------------------------------------------------------------------------------------


async def of_two_topics(store: LevelDBStore, count: int) -> bytes:
    """Write rows of a topic to each volume, and a few rows of another topic; return the latter's prefix."""
    claim = await store.claim(NAME)
    other = generation_prefix(TopicName("ns", "stays"), 1)
    for number in range(count):
        await fill(store, 1, number)
        if number % 5 == 0:
            await store.write([message(number, under(77, b"stays %d" % number), other)], claim=claim)
    await settled(store)
    return other


async def test_volumes_that_are_mostly_dead_are_rewritten_as_few(store, tmp_path):
    other = await of_two_topics(store, 60)
    expected = await read_rows(store, MESSAGE, other, stop_after(other), limit=100)
    before = folders(store)
    await store.drop(MESSAGE, [(PREFIX, key(60))])
    assert await store.tidy() > 4
    assert len(folders(store)) < len(before) / 2
    assert any(name.endswith(".1") for name in folders(store))
    assert await everything(store) == expected
    copy = await copy_of(store, tmp_path / "copy")
    async with await LevelDBStore.open(copy, TINY) as again:
        assert await everything(again) == expected
        await again.drop(MESSAGE, [(other, stop_after(other))])
        await again.tidy()
        assert await everything(again) == []
        assert not any("." in name for name in folders(again))


#: The keys of a burst of messages: a tiny part of those of its topic.
BURST = [PREFIX + pack_position(1_000_000, number) for number in range(8)]


async def store_burst(store: LevelDBStore) -> bytes:
    """Fill a volume with an early message, a burst, and a message of another topic, whose prefix is returned."""
    other = generation_prefix(TopicName("ns", "other"), 1)
    claim = await store.claim(NAME)
    await store.write([message(0), message(0, prefix=other)], claim=claim)
    for key_of_one in BURST:
        await store.write([Put(MESSAGE, b"", [key_of_one], [b"v" * 100])], claim=claim)
        await settled(store)
    await fill(store, 1, 2_000_000)
    assert volumes(store) == [1, 2]
    return other


async def test_a_volume_is_rewritten_once_most_of_it_is_dead_however_its_rows_are_spread(store):
    """A burst is a tiny part of a topic's keys, and most of its bytes: what a count found alive dies with it."""
    other = await store_burst(store)
    await store.drop(MESSAGE, [(PREFIX, BURST[0])])
    assert await store.tidy() == 0
    assert not any("." in name for name in folders(store))
    await store.drop(MESSAGE, [(BURST[0], key(1_000_001))])
    await store.tidy()
    assert "00000001.1" in folders(store)
    assert [found for found, _ in await everything(store)] == [other + pack_position(0, 0), key(2_000_000)]


async def test_rows_that_die_while_they_are_counted_do_not_count_as_alive(store, monkeypatch):
    await store_burst(store)
    real, loop = tidying._count_live_rows, trio.lowlevel.current_trio_token()

    def count_and_drop(keeper, volume, table):
        yield next(counting := real(keeper, volume, table))
        if table is MESSAGE:
            monkeypatch.undo()
            yield from paused_until(loop, partial(store.drop, MESSAGE, [(BURST[0], key(1_000_001))]))
        yield from counting

    monkeypatch.setattr(tidying, "_count_live_rows", count_and_drop)
    await store.drop(MESSAGE, [(PREFIX, BURST[0])])
    await store.tidy()
    await store.tidy()
    assert "00000001.1" in folders(store)


def payloads(pointer: int) -> Put:
    """Return rows that are stored under a pointer."""
    suffixes = [pack_position(1_700_000_000_000, number) for number in range(4)]
    return Put(PAYLOAD, PREFIX + pointer.to_bytes(8, "big"), suffixes, [b"p" * 40] * 4)


def range_of(put: Put) -> tuple[bytes, bytes]:
    return put.prefix + put.suffixes[0], put.prefix + put.suffixes[-1] + b"\x00"


#: Write pointers of three transactions, a second apart.
POINTERS = [1_795_000_000_000_000_000 + number * 1_000_000_000 for number in range(3)]


async def store_payloads(store: LevelDBStore) -> list[Put]:
    """Fill a volume with payloads of three transactions, and begin the next one."""
    claim = await store.claim(NAME)
    stored = [payloads(pointer) for pointer in POINTERS]
    for put in stored:
        await store.write([put], claim=claim)
        await settled(store)
    await fill(store, 2)
    assert volumes(store) == [1, 2]
    return stored


@pytest.mark.parametrize("left", [0, 1])
async def test_a_volume_of_payloads_that_are_dead_is_removed_or_rewritten(store, left):
    """The payloads of one transaction are a tiny part of the keys between the first and the last transaction's."""
    stored = await store_payloads(store)
    for put in stored[left:]:
        await store.drop(PAYLOAD, [range_of(put)])
        await store.tidy()
    for _ in range(tidying.QUIET_STEPS + 1):
        await store.tidy()
    assert {name for name in folders(store) if name.startswith("00000001")} == ({"00000001.1"} if left else set())
    assert len(await everything(store, PAYLOAD)) == 4 * left


async def test_a_volume_is_counted_a_few_times_however_often_payloads_die_in_it(store, monkeypatch):
    counted: list[object] = []
    real = tidying._count_live

    def count(keeper, volume):
        counted.append(volume)
        return real(keeper, volume)

    monkeypatch.setattr(tidying, "_count_live", count)
    claim = await store.claim(NAME)
    prefix = PREFIX + POINTERS[0].to_bytes(8, "big")
    suffixes = [pack_position(1_700_000_000_000, number) for number in range(200)]
    await store.write([Put(PAYLOAD, prefix, suffixes[:100], [b"p"] * 100)], claim=claim)
    await settled(store)
    await store.write([Put(PAYLOAD, prefix, suffixes[100:], [b"p"] * 100)], claim=claim)
    await fill(store, 2)
    for suffix in suffixes[:64]:
        await store.drop(PAYLOAD, [(prefix + suffix, prefix + suffix + b"\x00")])
        await store.tidy()
    assert 2 <= len(counted) <= 4
    for _ in range(3 * tidying.QUIET_STEPS):
        await store.tidy()
    assert len(counted) <= 5


@pytest.mark.parametrize("ends", ["cleanly", "by a kill", "by a kill, then cleanly"])
async def test_payloads_that_died_before_the_end_are_counted_after_the_next_start(tmp_path, ends):
    data = tmp_path / "data"
    async with await LevelDBStore.open(data, TINY) as store:
        stored = await store_payloads(store)
        await store.drop(PAYLOAD, [range_of(put) for put in stored])
        if ends != "cleanly":
            data = await copy_of(store, tmp_path / "copy")
    if ends == "by a kill, then cleanly":
        async with await LevelDBStore.open(data, TINY):
            pass
    async with await LevelDBStore.open(data, TINY) as store:
        await store.tidy()
        assert volumes(store) == [2]


async def test_after_a_clean_end_no_volume_is_read_through_whose_payloads_were_counted(tmp_path, monkeypatch):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        first, *_ = await store_payloads(store)
        await store.drop(PAYLOAD, [range_of(first)])
        await store.tidy()
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        monkeypatch.setattr(tidying, "_count_live", None)
        for _ in range(2 * tidying.QUIET_STEPS):
            await store.tidy()
        assert volumes(store) == [1, 2]


async def test_what_a_count_found_is_known_after_a_stop_before_the_rewrite(tmp_path, monkeypatch):
    def stop(*_):
        raise Stopped("the store is being closed")

    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        _, *others = await store_payloads(store)
        await store.drop(PAYLOAD, [range_of(put) for put in others])
        monkeypatch.setattr(tidying, "rewrite", stop)
        with pytest.raises(Stopped):
            await store.tidy()
        monkeypatch.undo()
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await store.tidy()
        assert "00000001.1" in folders(store)
        assert len(await everything(store, PAYLOAD)) == 4


@pytest.mark.parametrize("ends", ["cleanly", "by a kill"])
async def test_what_was_removed_one_by_one_before_an_end_is_known_after_the_next_start(tmp_path, ends):
    """In each life of the store some rows are removed, never half of them."""
    data = tmp_path / "data"
    async with await LevelDBStore.open(data, TINY) as store:
        other = await store_burst(store)
        keys = [*BURST, key(0), other + pack_position(0, 0)]
    for number, removed in enumerate([keys[:3], keys[3:6], keys[6:]]):
        async with await LevelDBStore.open(data, TINY) as store:
            assert volumes(store)[0] == 1
            await store.discard(MESSAGE, removed)
            if ends == "by a kill":
                data = await copy_of(store, tmp_path / f"copy-{number}")
    async with await LevelDBStore.open(data, TINY) as store:
        await store.tidy()
        assert "00000001" not in folders(store)
        assert [found for found, _ in await everything(store)] == [key(2_000_000)]


async def test_removals_before_a_kill_have_their_volume_counted_once_and_those_before_a_stop_never(
    tmp_path, monkeypatch
):
    counted: list[str] = []
    real = tidying._count_live

    def count(keeper, volume):
        counted.append(volume.name)
        return real(keeper, volume)

    monkeypatch.setattr(tidying, "_count_live", count)
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await store_burst(store)
        await store.discard(MESSAGE, BURST[:1])
        killed = await copy_of(store, tmp_path / "copy")
    for data, expected in ((tmp_path / "data", []), (killed, ["00000001"]), (killed, [])):
        counted.clear()
        async with await LevelDBStore.open(data, TINY) as store:
            for _ in range(2 * tidying.QUIET_STEPS):
                await store.tidy()
        assert counted == expected


async def test_large_rows_that_are_removed_one_by_one_count_as_what_they_were(store):
    """Ten small rows and two large ones are in a volume: the large ones are most of it."""
    claim = await store.claim(NAME)
    await store.write([message(number, b"v") for number in range(10)], claim=claim)
    await settled(store)
    await store.write([message(number, b"v" * 400) for number in (10, 11)], claim=claim)
    await fill(store, 2, 12)
    assert volumes(store) == [1, 2]
    await store.discard(MESSAGE, [key(10), key(11)])
    await store.tidy()
    assert "00000001.1" in folders(store)


async def test_large_rows_that_were_removed_from_the_newest_volume_are_known_once_it_is_sealed(store):
    claim = await store.claim(NAME)
    # Too few for the next volume to be made.
    await store.write([message(number, b"v") for number in range(3)], claim=claim)
    await store.write([message(number, b"v" * 120) for number in (10, 11)], claim=claim)
    await store.discard(MESSAGE, [key(10), key(11)])
    assert len(store._db.sets.current.all) == 1
    await store.begin_files()
    await settled(store)
    await store.tidy()
    assert "00000001.1" in folders(store)


async def test_rows_that_were_written_and_removed_by_one_commit_do_not_count_as_alive(store):
    claim = await store.claim(NAME)
    rows = [message(number, b"v" * 120) for number in (10, 11)]
    await store.write([message(0, b"v"), *rows, Delete(MESSAGE, [key(10), key(11)])], claim=claim)
    await store.begin_files()
    await settled(store)
    await store.tidy()
    assert "00000001.1" in folders(store)


async def test_a_volume_is_removed_whose_last_row_was_removed_alone_after_a_burst_died_together(store):
    await store.write([message(number) for number in range(4)], claim=await store.claim(NAME))
    await store.write([message(3_600_000)], claim=await store.claim(NAME))
    await store.begin_files()
    await settled(store)
    await store.drop(MESSAGE, [(PREFIX, key(10))])
    await store.tidy()
    await store.discard(MESSAGE, [key(3_600_000)])
    await store.tidy()
    assert "00000001" not in folders(store)


async def test_an_index_is_marked_stale_before_rows_are_removed(store, monkeypatch):
    await fill(store, 20)
    first = store._db.sets.current.all[0]
    real, found = Database.batch, []

    def batch(database, *, sync):
        if not found and database._db.name == str(first.path):
            found.append(json.loads(index_path(first.path).read_bytes().partition(b"\n")[2])["counted"])
        return real(database, sync=sync)

    monkeypatch.setattr(Database, "batch", batch)
    await store.discard(MESSAGE, [key(0)])
    assert found == [False]


async def test_rows_that_are_removed_while_they_are_counted_do_not_count_as_alive(store, monkeypatch):
    other = await store_burst(store)
    first = store._db.sets.current.all[0]
    real, loop = tidying._count_live_rows, trio.lowlevel.current_trio_token()

    def count_and_remove(keeper, volume, table):
        yield next(counting := real(keeper, volume, table))
        if table is MESSAGE:
            monkeypatch.undo()
            yield from paused_until(loop, partial(store.discard, MESSAGE, BURST[:2]))
        yield from counting

    monkeypatch.setattr(tidying, "_count_live_rows", count_and_remove)
    await store.drop(MESSAGE, [(PREFIX, BURST[0])])
    first.note_uncounted(1)
    await store.tidy()
    left = [other + pack_position(0, 0), *BURST[2:]]
    in_first = [found for found in left if first.extent_of(MESSAGE, found).last >= found]
    assert first.live_bytes == sum(len(found) + 100 for found in in_first)
    assert first in store._db.sets.current.all


async def test_an_index_that_cannot_be_marked_stale_is_removed(store, monkeypatch):
    await fill(store, 20)
    first = store._db.sets.current.all[0]
    assert index_path(first.path).exists()

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Volume, "write_index", fail)
        await store.discard(MESSAGE, [key(0)])
    assert not index_path(first.path).exists()
    assert len(await everything(store)) == 19


async def test_a_volume_that_cannot_be_read_when_its_dead_rows_are_looked_for_is_left_alone(store, monkeypatch, caplog):
    await fill(store, 40)
    first = store._db.sets.current.all[0]
    real = VolumeReads.first_in

    def fail(reads, volume, *part):
        if volume is first:
            raise Unreadable("scanning: IO error: Input/output error")
        return real(reads, volume, *part)

    monkeypatch.setattr(VolumeReads, "first_in", fail)
    await store.discard(MESSAGE, [key(number) for number in range(20)])
    await store.tidy()
    assert first in store._db.sets.current.all
    assert first.number + 1 not in volumes(store)
    assert caplog.messages.count("volumes are damaged and not tidied") == 1
    assert len(await everything(store)) == 20


async def test_a_volume_in_which_each_topic_has_one_row_left_is_rewritten_once(tmp_path):
    kept = [generation_prefix(TopicName("ns", name), 1) for name in ("one", "two")]
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        claim = await store.claim(NAME)
        for prefix in kept:
            await store.write([message(0, prefix=prefix)], claim=claim)
        await fill(store, 30)
        await store.drop(MESSAGE, [(PREFIX, stop_after(PREFIX))])
        assert await store.tidy() > 0
        before = folders(store)
        assert [name for name in before if "." in name] == ["00000001.1"]
        for _ in range(3):
            assert await store.tidy() == 0
            assert folders(store) == before
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        for _ in range(3):
            assert await store.tidy() == 0
            assert folders(store) == before
        assert [found for found, _ in await everything(store)] == sorted(
            prefix + pack_position(0, 0) for prefix in kept
        )


@pytest.mark.parametrize(("of", "step"), [(tidying, "_copy"), (Volume, "look_through")])
async def test_changes_in_a_volume_while_it_is_rewritten_are_in_the_new_one(store, monkeypatch, of, step):
    other = await of_two_topics(store, 60)
    await store.drop(MESSAGE, [(PREFIX, stop_after(PREFIX))])
    rows = await read_rows(store, MESSAGE, other, stop_after(other), limit=100)
    real = getattr(of, step)
    made = 0

    async def change() -> None:
        await store.discard(MESSAGE, [found for found, _ in rows[:3]])
        await store.write([RollBack(rows[3][0], rows[6][0], 77)], claim=None)

    loop = trio.lowlevel.current_trio_token()

    def make_and_change(*arguments: object) -> Iterator[float | None]:
        nonlocal made
        yield from real(*arguments)
        made += 1
        if made == 1:
            yield from paused_until(loop, change)

    monkeypatch.setattr(of, step, make_and_change)
    await store.tidy()
    assert made
    found = await everything(store)
    assert [row[0] for row in found] == [row[0] for row in rows[3:]]
    signs = [decode_row(value).pointer for _, value in found]
    assert signs == [-77] * 3 + [77] * (len(rows) - 6)
    # The new volumes' statistics match their content.
    for volume in store._db.sets.current.all[:-1]:
        counted = sum(extent.rows for extent in volume.extents[MESSAGE].values())
        with store._db.databases.lease(volume) as database, database.rows(MESSAGE, b"", b"\xff" * 64) as there:
            assert counted == sum(1 for _ in there) > 0


async def test_commits_reads_and_views_do_not_wait_while_a_rewritten_volume_is_read_through(store, monkeypatch):
    other = await of_two_topics(store, 60)
    await store.drop(MESSAGE, [(PREFIX, key(60))])
    expected = await read_rows(store, MESSAGE, other, stop_after(other), limit=100)
    first = store._db.sets.current.newest.number
    done = []

    async def use_it() -> None:
        await fill(store, 20, 60)
        assert store._db.sets.current.newest.number > first
        assert await everything(store) == [*expected, *((key(number), b"v" * 100) for number in range(60, 80))]
        await store.discard(MESSAGE, [key(number) for number in range(60, 80)])
        async with aclosing(await store.pin(60)) as view:
            assert await everything(view) == expected
        done.append(len(folders(store)))

    loop = trio.lowlevel.current_trio_token()
    real = Volume.look_through

    def look(volume: Volume, *arguments: object) -> Iterator[float | None]:
        if not done:
            yield from paused_until(loop, use_it)
        yield from real(volume, *arguments)

    monkeypatch.setattr(Volume, "look_through", look)
    await store.tidy()
    assert len(folders(store)) < done[0]
    assert await everything(store) == expected


async def test_a_rewrite_that_fails_changes_nothing(store, monkeypatch):
    other = await of_two_topics(store, 60)
    await store.drop(MESSAGE, [(PREFIX, key(60))])
    expected = await read_rows(store, MESSAGE, other, stop_after(other), limit=100)

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(tidying, "sync_directory", fail)
        with pytest.raises(StoreError, match="No space left"):
            await store.tidy()
    assert await everything(store) == expected
    with pytest.raises(StoreError):
        await store.write([message(99)], claim=None)
    await store.claim(NAME)
    await store.write([message(99)], claim=None)
    await store.tidy()
    assert await everything(store) == [*expected, (key(99), b"v" * 100)]


async def test_a_copy_that_the_list_may_name_is_not_removed(store, monkeypatch):
    other = await of_two_topics(store, 60)
    await store.drop(MESSAGE, [(PREFIX, key(60))])
    expected = await read_rows(store, MESSAGE, other, stop_after(other), limit=100)

    def replaced(directory, volumes):
        write_list(directory, volumes)
        raise ListUnknown(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(listed_volumes, "write_list", replaced)
        with pytest.raises(StoreError, match="Input/output error"):
            await store.tidy()
    await store.claim(NAME)
    assert await everything(store) == expected


async def test_a_rewrite_whose_copy_cannot_be_read_back_replaces_nothing(store, monkeypatch):
    other = await of_two_topics(store, 60)
    await store.drop(MESSAGE, [(PREFIX, key(60))])
    expected = await read_rows(store, MESSAGE, other, stop_after(other), limit=100)
    before = [volume.name for volume in store._db.sets.current.all]
    real = tidying._copy

    def damaged(keeper, sources, target, database):
        yield from real(keeper, sources, target, database)
        for table in target.path.glob("*.ldb"):
            data = bytearray(table.read_bytes())
            data[10] ^= 1
            table.write_bytes(data)

    monkeypatch.setattr(tidying, "_copy", damaged)
    assert await store.tidy() == 0
    assert [volume.name for volume in store._db.sets.current.all][: len(before)] == before
    assert await everything(store) == expected


async def test_dead_rows_are_removed_from_the_large_volume_of_version_0_1(store):
    other = await of_two_topics(store, 60)
    gone = generation_prefix(TopicName("ns", "a"), 1)
    large = store._db.sets.current.all[0]
    with store._db.databases.lease(large) as database, database.batch(sync=True) as batch:
        for number in range(500):
            batch.put(b"\x02" + gone + pack_position(number, 0), b"x" * 50)
    index_path(large.path).unlink()
    copied_at_once(store._directory.path, store._directory.path.with_name("large"))
    async with await LevelDBStore.open(store._directory.path.with_name("large"), TINY) as store:
        large = store._db.sets.current.all[0]
        large.large = True
        expected = await read_rows(store, MESSAGE, other, stop_after(other), limit=100)
        await store.drop(MESSAGE, [(gone, gone + pack_position(450, 0)), (PREFIX, stop_after(PREFIX))])
        await store.tidy()
        assert store._db.sets.current.all[0].path == large.path
        with store._db.databases.lease(large) as database, database.rows(MESSAGE, gone, stop_after(gone)) as rows:
            assert [found for found, _ in rows] == [gone + pack_position(number, 0) for number in range(450, 500)]
        assert (await everything(store))[50:] == expected
        assert not list(store._db.metadata.dead_ranges())
        await store.drop(MESSAGE, [(gone, stop_after(gone)), (other, stop_after(other))])
        await store.tidy()
        assert await everything(store) == []
        assert not large.path.exists()


async def test_the_large_volume_of_version_0_1_is_dropped_when_its_payloads_are_dead_too(store):
    stored = await store_payloads(store)
    large = store._db.sets.current.all[0]
    large.large = True
    for put in stored[:-1]:
        await store.drop(PAYLOAD, [range_of(put)])
        await store.tidy()
    assert large in store._db.sets.current.all
    await store.drop(PAYLOAD, [range_of(stored[-1])])
    for _ in range(tidying.QUIET_STEPS + 1):
        await store.tidy()
    assert volumes(store) == [2]
    assert not large.path.exists()


async def test_the_large_volume_of_version_0_1_stays_until_the_last_message_or_payload_in_it_is_dead(
    store, monkeypatch
):
    monkeypatch.setattr(tidying, "_PIECE_PARTS", 1)
    other = generation_prefix(TopicName("ns", "other"), 1)
    await store.write([message(0, prefix=other)], claim=await store.claim(NAME))
    await settled(store)
    first, between, last = await store_payloads(store)
    large = store._db.sets.current.all[0]
    large.large = True
    await store.drop(MESSAGE, [(other, stop_after(other))])
    # The part between the two dead ranges has no row, and what is alive comes after it.
    await store.drop(PAYLOAD, [range_of(first), range_of(between)])
    await store.tidy()
    assert large in store._db.sets.current.all
    assert len(await everything(store, PAYLOAD)) == 4
    await store.drop(PAYLOAD, [range_of(last)])
    for _ in range(tidying.QUIET_STEPS + 1):
        await store.tidy()
    assert volumes(store) == [2]


async def test_the_large_volume_of_version_0_1_is_dropped_when_a_message_outlives_its_payloads(store):
    other = generation_prefix(TopicName("ns", "other"), 1)
    await store.write([message(0, prefix=other)], claim=await store.claim(NAME))
    await settled(store)
    stored = await store_payloads(store)
    large = store._db.sets.current.all[0]
    large.large = True
    await store.drop(PAYLOAD, [range_of(put) for put in stored])
    for _ in range(tidying.QUIET_STEPS + 1):
        await store.tidy()
    assert large in store._db.sets.current.all
    await store.drop(MESSAGE, [(other, stop_after(other))])
    await store.tidy()
    assert volumes(store) == [2]


# --- views ------------------------------------------------------------------------------------------


async def test_while_a_view_is_pinned_no_volume_is_removed_and_afterwards_they_are(store):
    other = await of_two_topics(store, 60)
    expected = await everything(store)
    view = await store.pin(60)
    before = folders(store)
    await store.drop(MESSAGE, [(PREFIX, stop_after(PREFIX))])
    await store.write([RollBack(other, stop_after(other), 77)], claim=None)
    assert await store.tidy() == 0
    assert folders(store) >= before
    assert await everything(view) == expected
    await view.aclose()
    assert await store.tidy() > 0
    assert len(folders(store)) < len(before)


async def test_an_unclosed_view_keeps_no_volume_after_its_time_is_over(store):
    await fill(store, 40)
    await settled(store)
    await store.pin(0)
    await store.drop(MESSAGE, [(PREFIX, stop_after(PREFIX))])
    assert await store.tidy() > 3


async def test_a_view_that_is_opened_while_volumes_are_rewritten_keeps_their_files(store, monkeypatch):
    other = await of_two_topics(store, 60)
    await store.drop(MESSAGE, [(PREFIX, key(60))])
    expected = await everything(store)
    views = []
    real = tidying._copy

    async def pin() -> None:
        views.append(await store.pin(60))

    loop = trio.lowlevel.current_trio_token()

    def copy_and_pin(*arguments: object) -> Iterator[float]:
        yield from real(*arguments)
        if not views:
            yield from paused_until(loop, pin)

    before = folders(store)
    with monkeypatch.context() as patched:
        patched.setattr(tidying, "_copy", copy_and_pin)
        assert await store.tidy() > 0
    # The store uses the new volumes, and the view uses the old ones.
    assert folders(store) > before
    await store.write([RollBack(other, stop_after(other), 77)], claim=None)
    assert await everything(views[0]) == expected
    assert {decode_row(value).pointer for _, value in await everything(store)} == {-77}
    assert await store.tidy() == 0
    await views[0].aclose()
    await settled(store)
    assert len(folders(store)) < len(before)
    assert [found for found, _ in await everything(store)] == [found for found, _ in expected]


async def test_a_view_that_is_opened_between_two_changes_of_a_volume_that_is_rewritten_shows_the_first_alone(
    store, monkeypatch
):
    other = await of_two_topics(store, 60)
    await store.drop(MESSAGE, [(PREFIX, key(60))])
    rows = await read_rows(store, MESSAGE, other, stop_after(other), limit=100)
    views = []
    real = tidying._copy

    async def change() -> None:
        await store.discard(MESSAGE, [rows[0][0]])
        views.append(await store.pin(60))
        await store.discard(MESSAGE, [found for found, _ in rows[1:3]])
        await store.write([RollBack(rows[3][0], stop_after(other), 77)], claim=None)

    loop = trio.lowlevel.current_trio_token()

    def copy_and_change(*arguments: object) -> Iterator[float]:
        yield from real(*arguments)
        if not views:
            yield from paused_until(loop, change)

    monkeypatch.setattr(tidying, "_copy", copy_and_change)
    assert await store.tidy() > 0
    assert await everything(views[0]) == rows[1:]
    assert [found for found, _ in await everything(store)] == [found for found, _ in rows[3:]]
    await views[0].aclose()


async def test_a_view_ends_when_the_store_is_opened_again(store):
    await fill(store, 10)
    view = await store.pin(60)
    fail_next_batch()
    with pytest.raises(StoreError):
        await store.write([message(99)], claim=None)
    await store.claim(NAME)
    with pytest.raises(StoreError):
        await view.get(METADATA, b"last")
    await view.aclose()
    assert len(await everything(store)) == 10


# --- crashes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("commits", [1, 5, 12, 40])
async def test_a_copy_of_a_running_store_has_all_that_was_acknowledged(tmp_path, commits):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await fill(store, commits)
        copy = await copy_of(store, tmp_path / "copy")
    async with await LevelDBStore.open(copy, TINY) as store:
        assert [found for found, _ in await everything(store)] == [key(number) for number in range(commits)]
        assert await store.get(METADATA, b"last") == b"%d" % (commits - 1)
        await fill(store, 5, commits)
        assert len(await everything(store)) == commits + 5


async def test_a_journal_with_a_gap_is_damage(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await fill(store, 3)
        copy = await copy_of(store, tmp_path / "copy")
        volume = store._db.sets.current.newest.path.name
    with plyvel.DB(str(copy / "volumes" / volume)) as database:
        database.delete(b"\x00" + (2).to_bytes(8, "big"))
    with pytest.raises(StoreDamaged, match="entry 2 of the journal is missing"):
        await LevelDBStore.open(copy, TINY)


async def without_last_entry(tmp_path: Path, at: int) -> Path:
    """Copy the directory as if killed, and remove the last journal entry of a volume whose metadata is complete."""
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await fill(store, 20)
        await store.reclaim(METADATA, b"", b"\xff")  # writes the metadata to the database
        copy = await copy_of(store, tmp_path / "copy")
        folder = [volume for volume in store._db.sets.current.all if volume.journal_last][at].name
    for index in (copy / "volumes").glob("*.index"):
        index.unlink()
    with plyvel.DB(str(copy / "volumes" / folder)) as database:
        *_, (last, _) = database.iterator(start=b"\x00", stop=b"\x01")
        database.delete(last)
    return copy


async def test_a_volume_that_has_lost_the_end_of_its_journal_is_damage_although_the_metadata_has_it(tmp_path):
    copy = await without_last_entry(tmp_path, 1)
    with pytest.raises(StoreDamaged, match="are missing from 00000002"):
        await LevelDBStore.open(copy, TINY)


async def test_a_journal_that_ends_before_the_metadata_is_damage(tmp_path):
    copy = await without_last_entry(tmp_path, -1)
    with pytest.raises(StoreDamaged, match="the metadata has entry 20 of the journal"):
        await LevelDBStore.open(copy, TINY)


async def test_no_folder_is_removed_before_the_list_that_lacks_it_is_durable(tmp_path, monkeypatch):
    """The previous daemon may have ended between replacing the list and syncing its directory."""
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await fill(store, 20)
    volumes = tmp_path / "data" / "volumes"
    unlisted = volumes / "00000001.1"
    shutil.copytree(volumes / "00000001", unlisted)

    def fails(directory: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(opening, "sync_directory", fails)
        with pytest.raises(StoreUnusable, match="Input/output error"):
            await LevelDBStore.open(tmp_path / "data", TINY)
        assert unlisted.exists()
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        assert len(await everything(store)) == 20
    assert not unlisted.exists()


async def test_a_store_opens_although_an_index_cannot_be_written_for_want_of_space(tmp_path, monkeypatch, caplog):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await fill(store, 20)
    index = tmp_path / "data" / "volumes" / "00000001.index"
    index.unlink()
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("00000001.index.tmp"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
            assert [found for found, _ in await everything(store)] == [key(number) for number in range(20)]
            await fill(store, 1, 20)
    assert "a volume's index was not written" in caplog.text
    assert not index.exists()
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        assert len(await everything(store)) == 21
    assert index.exists()


async def test_after_a_stop_during_which_leveldb_wrote_a_table_the_next_start_does_not_read_the_newest_volume(
    tmp_path, monkeypatch
):
    close, ended = Database.close, []

    def close_late(database):
        """LevelDB writes a table, and removes its log, before it ends."""
        if database not in ended:
            ended.append(database)
            database.flush_memory()
        close(database)

    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await fill(store, 3)
        monkeypatch.setattr(Database, "close", close_late)
    monkeypatch.undo()
    looked = []
    monkeypatch.setattr(Volume, "look_through", lambda volume, database: looked.append((volume, database)) or iter(()))
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        assert await store.get(MESSAGE, key(2)) is not None
    assert looked == []


async def test_an_index_that_is_missing_or_garbled_is_made_again(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await fill(store, 40)
    indexes = sorted((tmp_path / "data" / "volumes").glob("*.index"))
    assert len(indexes) > 4
    indexes[0].unlink()
    indexes[1].write_bytes(b"")
    indexes[2].write_bytes(indexes[2].read_bytes()[:-3])
    indexes[3].write_bytes(indexes[4].read_bytes())
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        assert [found for found, _ in await everything(store)] == [key(number) for number in range(40)]
    assert set(indexes) <= set((tmp_path / "data" / "volumes").glob("*.index"))


async def test_the_size_of_a_topics_largest_row_stays_known_for_each_volume(tmp_path):
    sizes = [10, 4000, 20, 700, 10] * 4
    rows = [(key(number), b"v" * size) for number, size in enumerate(sizes)]

    def largest(store):
        return [extent.largest for volume in store._db.sets.current.all for extent in volume.extents[MESSAGE].values()]

    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        for name, value in rows:
            await store.write([put_one(MESSAGE, name, value)], claim=None)
        known = largest(store)
        assert len(known) > 4
        assert [max(known), min(known)] == [4000, 700]
        assert await everything(store) == rows
    indexes = sorted((tmp_path / "data" / "volumes").glob("*.index"))
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        assert largest(store) == known
    for index in indexes[::2]:
        index.unlink()
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        assert largest(store) == known, "counted again"
        assert await everything(store) == rows


async def test_after_a_kill_only_the_volumes_that_were_written_last_are_read_through(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await fill(store, 40)
        killed = await copy_of(store, tmp_path / "killed")
    async with await LevelDBStore.open(killed, TINY) as store:
        known = [volume.is_known for volume in store._db.sets.current.all]
        assert len(known) > 5
        # The last one may be the next volume, which is listed in advance.
        assert all(known[:-2])
        assert not known[-1]
        assert len(await everything(store)) == 40


def change_indexes(directory, change):
    for index in (directory / "volumes").glob("*.index"):
        found = json.loads(index.read_bytes().partition(b"\n")[2])
        change(found)
        content = json.dumps(found).encode()
        index.write_bytes(b"%08x\n" % zlib.crc32(content) + content)


def shorten_extents(found, fields):
    """Make an index as builds did that noted fewer fields of each extent."""
    for table, extents in found["extents"].items():
        found["extents"][table] = [extent[:fields] for extent in extents]


@pytest.mark.parametrize(
    "shorten",
    [
        lambda found: shorten_extents(found, 6),
        lambda found: shorten_extents(found, 7),
        lambda found: found.pop("logs"),
        lambda found: found.pop("log_checks"),
    ],
    ids=["no packs", "no largest row", "no lengths of logs", "no checksums of logs"],
)
async def test_an_index_of_a_build_that_wrote_fewer_fields_is_made_again(tmp_path, shorten):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await fill(store, 40)
    change_indexes(tmp_path / "data", shorten)
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        assert not any(volume.is_known for volume in store._db.sets.current.all)
        assert [found for found, _ in await everything(store)] == [key(number) for number in range(40)]
        await fill(store, 10, 40)
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        assert all(volume.is_known for volume in store._db.sets.current.all)
        assert len(await everything(store)) == 50


async def test_an_index_of_a_build_that_did_not_note_whether_its_rows_were_counted_is_used_and_they_are_counted(
    tmp_path,
):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await fill(store, 40)
    change_indexes(tmp_path / "data", lambda found: found.pop("counted"))
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        volumes = store._db.sets.current.all
        assert all(volume.is_known and volume.is_index_stale and volume.uncounted for volume in volumes[:-1])
        assert len(volumes) > 5


async def test_folders_that_are_not_listed_are_removed_and_foreign_files_are_not(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await fill(store, 5)
    folder = tmp_path / "data" / "volumes"
    (folder / "00000099").mkdir()
    (folder / "00000099" / "CURRENT").write_bytes(b"")
    (folder / "00000003.1").mkdir()
    (folder / "00000099.index").write_bytes(b"")
    (folder / "notes.txt").write_bytes(b"")
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        assert len(await everything(store)) == 5
    names = {path.name for path in folder.iterdir()}
    assert "notes.txt" in names
    assert not names & {"00000099", "00000003.1", "00000099.index"}


async def test_a_volume_that_is_listed_and_missing_is_damage(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await fill(store, 40)
    shutil.rmtree(tmp_path / "data" / "volumes" / "00000002")
    with pytest.raises(StoreUnusable, match="00000002"):
        await LevelDBStore.open(tmp_path / "data", TINY)


async def test_a_damaged_volume_is_left_alone_and_the_others_are_tidied_and_written(store, tmp_path, caplog):
    await of_two_topics(store, 60)
    copy = await copy_of(store, tmp_path / "copy")
    async with await LevelDBStore.open(copy, TINY):
        pass  # an orderly close writes logs into tables
    # A table with a live row, which must be read.
    file = sorted(path for path in (copy / "volumes").glob("*/*.ldb") if b"stays" in path.read_bytes())[3]
    chosen = file.parent
    data = bytearray(file.read_bytes())
    data[data.index(b"stays")] ^= 1
    file.write_bytes(data)
    async with await LevelDBStore.open(copy, TINY) as again:
        before = folders(again)
        await again.drop(MESSAGE, [(PREFIX, key(60))])
        for _ in range(3):
            await again.tidy()
            await fill(again, 1, first=100)
        with pytest.raises(StoreError, match="Corruption"):
            await everything(again)  # an error instead of fewer rows
        assert chosen.name in folders(again)
        assert len(folders(again)) < len(before)
        assert [record.message for record in caplog.records].count("volumes are damaged and not tidied") == 1


# --- the files of a removed volume -------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "00000007"
    made.mkdir()
    (made / "000005.ldb").write_bytes(bytes(5 * STEP_BYTES // 2))
    (made / "CURRENT").write_bytes(b"MANIFEST-000002\n")
    index_path(made).write_bytes(b"index")
    return made


@pytest.fixture
def cut(monkeypatch):
    """Record the sizes to which files get truncated."""
    sizes = []
    truncate = os.ftruncate
    monkeypatch.setattr(os, "ftruncate", lambda descriptor, size: (sizes.append(size), truncate(descriptor, size)))
    return sizes


def test_files_of_a_removed_volume_are_shortened_in_steps_before_they_are_deleted(folder, cut):
    for done, pause_s in enumerate(remove_slowly(folder), 1):
        assert pause_s > 0
        assert len(cut) == done
        assert folder.exists()
    assert cut == [3 * STEP_BYTES // 2, STEP_BYTES // 2]
    assert not folder.exists()
    assert not index_path(folder).exists()


def test_a_file_that_a_copy_shares_is_removed_without_being_shortened(folder, cut, tmp_path):
    copy = tmp_path / "copy.ldb"
    copy.hardlink_to(folder / "000005.ldb")
    assert list(remove_slowly(folder)) == []
    assert cut == []
    assert copy.stat().st_size == 5 * STEP_BYTES // 2
    assert not folder.exists()


def test_files_are_removed_at_once_when_the_store_is_closing(folder, cut):
    removal = remove_slowly(folder)
    next(removal)
    with pytest.raises(Stopped):
        removal.throw(Stopped("the store is being closed"))
    assert len(cut) == 1
    assert not folder.exists()
    assert not index_path(folder).exists()


def test_a_link_in_a_volume_is_removed_and_its_target_is_not(folder, cut, tmp_path):
    other = tmp_path / "elsewhere"
    other.write_bytes(bytes(3 * STEP_BYTES))
    (folder / "000001.ldb").symlink_to(other)
    assert len(list(remove_slowly(folder))) == 2
    assert len(cut) == 2
    assert not folder.exists()
    assert other.stat().st_size == 3 * STEP_BYTES


def test_pauses_end_however_large_a_volume_is(folder):
    (folder / "000009.ldb").touch()
    os.truncate(folder / "000009.ldb", 8000 * STEP_BYTES)  # sparse
    pauses = list(remove_slowly(folder))
    assert len(pauses) > 8000
    assert sum(pauses) <= MAX_PAUSES_S
    assert not folder.exists()


def test_a_volume_is_removed_even_if_one_of_its_files_cannot_be_shortened(folder, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "no")

    monkeypatch.setattr(os, "ftruncate", refuse)
    assert list(remove_slowly(folder)) == []
    assert not folder.exists()


# --- operations that the commit applies only if the volumes have not changed ------------------------


async def test_volumes_that_have_left_the_set_cannot_be_replaced_again(store):
    await fill(store, 30)
    current = store._db.sets.current
    first, second = current.sealed[:2]
    following = current.replacing([first], None)
    assert following.sealed == current.sealed[1:]
    assert following.replacing([first], None) is None
    assert following.replacing([first, second], None) is None


async def test_a_dead_range_is_not_forgotten_while_a_volume_has_rows_in_it(store):
    await fill(store, 30)
    await store.drop(MESSAGE, [(PREFIX, stop_after(PREFIX))])
    current = store._db.sets.current
    assert current.forgetting(MESSAGE, PREFIX, stop_after(PREFIX)) is None
    assert current.forgetting(MESSAGE, PREFIX, key(3)) is None, "there is no such range"
    await store.tidy()
    assert not store._db.sets.current.dead[MESSAGE].items()
