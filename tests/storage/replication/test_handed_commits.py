"""The store hands over every durable batch once, in order, with the changes that it made."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import pytest
import trio

from plainsong.protocol.effects import RollBack
from storage.base import StoreError, StoreUnusable
from storage.directory import REPLICATION_NAME
from storage.leveldb import LevelDBStore
from storage.leveldb.engine.database import Database
from storage.leveldb.keeper_thread import NotChanged
from storage.leveldb.sealed_rows import SealedRows
from storage.replication.outbox import Outbox, commit_of
from tests.storage.contract import NAME
from tests.storage.replication.shipped import apply, rows_of, write_anything
from tests.storage.rolling_contract import under
from tests.storage.tiny_volumes import TINY, fill, key, message

LARGE = 1 << 30


def an_outbox(**changes):
    return Outbox(**{"max_bytes": LARGE, "full_bytes": LARGE, **changes})


@pytest.fixture
def outbox():
    return an_outbox()


@pytest.fixture
async def store(tmp_path, outbox):
    async with await LevelDBStore.open(tmp_path / "data", TINY, shipper=outbox) as opened:
        yield opened


def all_of(outbox):
    """Take everything out; check that the numbers follow each other."""
    batches = []
    while (taken := outbox.take(LARGE)) is not None:
        assert [batch.number for batch in taken.batches] == list(range(taken.first, taken.first + len(taken.batches)))
        batches += taken.batches
    return batches


@pytest.mark.parametrize("seed", range(6))
async def test_the_handed_batches_rebuild_the_store_whatever_was_written(store, outbox, seed):
    random, at, model = Random(seed), 0, {}
    for _ in range(120):
        at = await write_anything(store, random, at)
    assert len(store._db.sets.current.all) > 3
    batches = all_of(outbox)
    assert batches[0].number == 1
    assert batches[-1].number == outbox.last == store._db.metadata.position
    for batch in batches:
        apply(model, commit_of(batch))
    assert model == await rows_of(store)


async def test_a_batch_is_not_taken_before_the_keeper_has_changed_its_sealed_rows(store, outbox, monkeypatch):
    claim = await store.claim(NAME)
    await store.write([message(0, under(7))], claim=claim)
    await fill(store, 30, first=1)
    all_of(outbox)
    real, seen = SealedRows.change, []

    def change(self, sealed):
        seen.append(outbox.take(LARGE))
        real(self, sealed)

    monkeypatch.setattr(SealedRows, "change", change)
    await store.write([RollBack(key(0), key(1), 7)], claim=claim)
    assert seen == [None]
    (batch,) = all_of(outbox)
    assert [row[0] for row in batch.rolled_back] == [key(0)]


async def test_a_batch_whose_sealed_rows_cannot_be_changed_is_lost(store, outbox, monkeypatch):
    claim = await store.claim(NAME)
    await store.write([message(0, under(7))], claim=claim)
    await fill(store, 30, first=1)
    all_of(outbox)

    def fail(self, sealed):
        del self, sealed
        raise NotChanged("a block is damaged")

    monkeypatch.setattr(SealedRows, "change", fail)
    with pytest.raises(StoreError):
        await store.write([RollBack(key(0), key(1), 7)], claim=claim)
    assert outbox.take(LARGE) is None
    assert "sealed" in outbox.lost
    assert outbox.restart().last == store._db.metadata.position


async def test_numbers_continue_after_the_store_was_closed_and_opened(tmp_path):
    for first in (1, 4, 7):
        outbox = an_outbox()
        async with await LevelDBStore.open(tmp_path / "data", TINY, shipper=outbox) as store:
            claim = await store.claim(NAME)
            for number in range(3):
                await store.write([message(first * 10 + number)], claim=claim)
            assert [batch.number for batch in all_of(outbox)] == [first, first + 1, first + 2]


async def test_a_failed_write_makes_the_commits_after_it_lost_only_if_it_took_a_number(store, outbox):
    claim = await store.claim(NAME)
    await store.write([message(1)], claim=claim)
    real = Database.batch

    def fail(self, *, sync):
        Database.batch = real
        raise StoreError("the disk says no")

    Database.batch = fail
    with pytest.raises(StoreError):
        await store.write([message(2)], claim=claim)
    claim = await store.claim(NAME)
    await store.write([message(3)], claim=claim)
    assert not outbox.lost
    assert [batch.number for batch in all_of(outbox)] == [1, 2]
    outbox.opened(7)
    assert "reopened" in outbox.lost


def a_batch(number, size=10, sealed=()):
    return SimpleNamespace(number=number, size=size, sealed=sealed, time_ms=number)


def test_batches_beyond_the_bound_are_lost_and_those_that_waited_before_are_still_taken():
    outbox, full = an_outbox(max_bytes=25, full_bytes=20), []
    outbox.on_full = lambda: full.append(True)
    outbox.opened(0)
    for number in range(1, 5):
        outbox.hand_over(a_batch(number))
    assert full == [True]
    assert outbox.waiting_bytes == 20
    assert "backlog_bytes" in outbox.lost
    assert outbox.take(10).first == 1
    assert outbox.take(10).first == 2
    assert outbox.take(10) is None
    assert outbox.restart().last == 4
    outbox.hand_over(a_batch(5))
    assert (outbox.lost, outbox.take(10).first) == ("", 5)


def test_one_batch_larger_than_the_bound_is_taken_alone():
    outbox = an_outbox(max_bytes=25)
    outbox.opened(0)
    outbox.hand_over(a_batch(1, 100))
    assert [batch.number for batch in outbox.take(5).batches] == [1]


def test_a_restart_names_the_changes_that_the_store_is_still_making():
    outbox = an_outbox(max_bytes=15)
    outbox.opened(0)
    changes = [SimpleNamespace(made=None) for _ in range(3)]
    for number, change in enumerate(changes, 1):
        outbox.hand_over(a_batch(number, sealed=(change,)))
    changes[1].made = True
    assert sorted(map(id, outbox.restart().unmade)) == sorted(map(id, [changes[0], changes[2]]))
    assert outbox.restart().unmade == []


async def test_a_directory_with_a_second_copy_is_refused_without_a_shipper(tmp_path, outbox):
    async with await LevelDBStore.open(tmp_path / "data", TINY, shipper=outbox):
        (tmp_path / "data" / REPLICATION_NAME).write_text("{}")
    with pytest.raises(StoreUnusable, match="second copy"):
        await LevelDBStore.open(tmp_path / "data", TINY)
    async with await LevelDBStore.open(tmp_path / "data", TINY, shipper=an_outbox()):
        await trio.lowlevel.checkpoint()


async def test_without_a_second_copy_a_plain_publish_writes_no_journal_entry(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await store.write([message(1)], claim=await store.claim(NAME))
        assert store._db.metadata.position == 0
