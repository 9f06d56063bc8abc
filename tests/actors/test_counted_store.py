"""In ``SYNC`` mode the store completes and shows only rows that the second copy has, and never loses them."""

from __future__ import annotations

import threading
from contextlib import asynccontextmanager
from random import Random

import pytest
import trio
import trio.testing

from actors.restoring_copy import replay
from actors.second_copy import SecondCopy
from actors.settings import ReplicationConfig
from plainsong.protocol.effects import put_one
from storage.base import StoreError, StoreUnusable, read_rows
from storage.leveldb import LevelDBStore
from storage.leveldb.engine.newest_log import NewestLog
from storage.replication import carry
from storage.replication.answers import CopyUnavailable, NotCounted
from storage.replication.counted_store import CountedStore, CountingOutbox
from storage.replication.notices import EpochSeal, encode_seal
from storage.replication.protocol import ReignOver
from storage.replication.reading import bases_of
from tests.actors.test_second_copy import until
from tests.patience import PATIENCE_S
from tests.storage.contract import MESSAGE, METADATA, NAME
from tests.storage.disks import copied_at_once
from tests.storage.replication.objects import FaultyObjects, MemoryObjects
from tests.storage.replication.shipped import rows_of
from tests.storage.tiny_volumes import TINY, key, message

EAGER = ReplicationConfig(mode="sync", uploads=3, interval_ms=50, segment_bytes=2000, base_every_h=1, keep_s=3600)


class HeldObjects(MemoryObjects):
    """Holds new objects of the log until the test releases them."""

    def __init__(self) -> None:
        super().__init__()
        self.holds = False
        self._gates: dict[str, trio.Event] = {}
        self._asked_for = trio.Event()

    async def create(self, name, data):
        if self.holds and name.startswith("log/"):
            self._gates[name] = trio.Event()
            self._asked_for.set()
            await self._gates[name].wait()
        return await super().create(name, data)

    async def held(self, count):
        """Return the names of the next ``count`` objects once they are held."""
        while len(self._gates) < count:
            self._asked_for = trio.Event()
            await self._asked_for.wait()
        return list(self._gates)

    def let(self, name):
        self._gates[name].set()

    def let_all(self):
        self.holds = False
        for gate in self._gates.values():
            gate.set()


@asynccontextmanager
async def opened(directory, objects, *, timeout_s=PATIENCE_S):
    """Yield a store, and the nursery that runs its copy, once the store accepts writes."""
    outbox = CountingOutbox(max_bytes=1 << 30, timeout_s=timeout_s)
    async with await CountedStore.open(directory, TINY, shipper=outbox) as store:
        copy = SecondCopy(objects, store, outbox, directory, EAGER, lambda: 1_000_000)
        await copy.begin()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(copy.run)
            with trio.fail_after(PATIENCE_S):
                await until(lambda: not outbox.unavailable)
                yield store, nursery
            nursery.cancel_scope.cancel()


@pytest.fixture
def objects():
    return HeldObjects()


class Writing:
    """Runs each write in a separate task, and records its outcome."""

    def __init__(self, store, nursery):
        self.store, self._nursery = store, nursery
        self.done = {}

    def begin(self, number, *rows):
        self._nursery.start_soon(self._write, number, rows)

    async def _write(self, number, rows):
        try:
            # ``CountedStore.claim`` would wait for the writes in progress.
            claim = await LevelDBStore.claim(self.store, NAME)
            self.done[number] = await self.store.write([message(number), *rows], claim=claim)
        except Exception as error:  # noqa: BLE001  # it is the outcome
            self.done[number] = error


async def idle():
    """Wait until all tasks are blocked, three times in a row, since a thread may still wake one of them."""
    for _ in range(3):
        await trio.testing.wait_all_tasks_blocked(0.02)


async def test_a_write_completes_once_its_commit_counts_and_not_before(tmp_path, objects):
    async with opened(tmp_path / "data", objects) as (store, nursery):
        writing = Writing(store, nursery)
        objects.holds = True
        writing.begin(1)
        (name,) = await objects.held(1)
        assert await store.get(MESSAGE, key(1)) is not None  # it is durable here
        assert not writing.done
        objects.let(name)
        await until(lambda: writing.done)
        assert writing.done == {1: None}
        objects.let_all()


async def test_a_commit_that_an_actor_begins_completes_once_it_counts_and_not_before(tmp_path, objects):
    async with opened(tmp_path / "data", objects) as (store, _):
        objects.holds = True
        done = []
        store.begin([message(1)], done.append, claim=None)
        (name,) = await objects.held(1)
        await idle()
        assert not done
        objects.let(name)
        await until(lambda: done)
        assert done == [None]
        objects.let_all()


async def test_a_segment_that_is_stored_before_an_earlier_one_completes_nothing(tmp_path, objects):
    async with opened(tmp_path / "data", objects) as (store, nursery):
        writing = Writing(store, nursery)
        objects.holds = True
        writing.begin(1, put_one(METADATA, b"a", b"1"))
        await objects.held(1)
        writing.begin(2, put_one(METADATA, b"a", b"2"))
        first, second = await objects.held(2)
        objects.let(second)
        await until(lambda: second in objects.found)
        await idle()
        assert not writing.done
        objects.let(first)
        await until(lambda: len(writing.done) == 2)
        assert writing.done == {1: None, 2: None}
        objects.let_all()


async def test_a_row_of_the_metadata_is_shown_once_its_commit_counts(tmp_path, objects):
    async with opened(tmp_path / "data", objects) as (store, nursery):
        writing, seen = Writing(store, nursery), []
        objects.holds = True
        writing.begin(1, put_one(METADATA, b"row", b"value"))
        (name,) = await objects.held(1)

        async def read(call):
            seen.append(await call())

        nursery.start_soon(read, lambda: store.get(METADATA, b"row"))
        nursery.start_soon(read, lambda: read_rows(store, METADATA, b"row", b"rox", limit=1))
        nursery.start_soon(read, lambda: store.claim(NAME))
        nursery.start_soon(read, lambda: store.pin(60.0))
        await idle()
        assert not seen
        objects.let(name)
        await until(lambda: len(seen) == 4)
        assert b"value" in seen
        assert [(b"row", b"value")] in seen
        objects.let_all()


async def test_an_object_store_that_does_not_answer_in_time_leaves_the_outcome_unknown_and_refuses_the_next(
    tmp_path, objects
):
    async with opened(tmp_path / "data", objects, timeout_s=0.2) as (store, nursery):
        writing = Writing(store, nursery)
        objects.holds = True
        writing.begin(1, put_one(METADATA, b"row", b"value"))
        await until(lambda: writing.done)
        assert isinstance(writing.done[1], NotCounted)
        for call in (lambda: store.write([message(2)], claim=None), lambda: store.claim(NAME)):
            with pytest.raises(CopyUnavailable):
                await call()
        objects.let_all()
        await until(lambda: not store._outbox.unavailable)
        assert await store.get(METADATA, b"row") == b"value"
        await store.write([message(3)], claim=await store.claim(NAME))
        assert await store.get(MESSAGE, key(2)) is None


async def test_a_read_that_was_given_up_refuses_no_later_change(tmp_path, objects):
    async with opened(tmp_path / "data", objects) as (store, _):
        outbox = store._outbox
        outbox.numbered(outbox.last + 1)  # a batch is about to be written
        async with trio.open_nursery() as reading:
            reading.start_soon(store.get, METADATA, b"row")
            await until(lambda: outbox.answers.oldest_s is not None)
            reading.cancel_scope.cancel()
        assert outbox.answers.oldest_s is None
        outbox.write_failed(outbox.last)
        assert await store.get(METADATA, b"row") is None
        await store.write([message(1)], claim=None)


async def test_a_store_whose_disk_lost_a_commit_that_was_sent_is_not_opened_again(tmp_path, objects):
    async with opened(tmp_path / "data", objects) as (store, _):
        store._outbox.is_torn = True
        with pytest.raises(StoreUnusable, match="sent to the second copy"):
            store._outbox.opened(store._outbox.last)
        store._outbox.is_torn = False


async def test_a_commit_is_looked_at_again_once_its_changes_in_sealed_volumes_are_made(tmp_path, objects):
    async with opened(tmp_path / "data", objects) as (store, _):
        await store.write([message(1)], claim=None)
        looks, look = [], store._outbox.on_full
        store._outbox.on_full = lambda: (looks.append(len(store._outbox.answers._waiting)), look())
        await store.discard(MESSAGE, [key(1)])
        assert len(looks) == 2  # when it was queued, and when it completed


async def test_nothing_is_acknowledged_before_the_first_base_is_complete(tmp_path, objects):
    outbox = CountingOutbox(max_bytes=1 << 30, timeout_s=PATIENCE_S)
    async with await CountedStore.open(tmp_path / "data", TINY, shipper=outbox) as store:
        copy = SecondCopy(objects, store, outbox, tmp_path / "data", EAGER, lambda: 1_000_000)
        await copy.begin()
        async with trio.open_nursery() as nursery:
            writing = Writing(store, nursery)
            writing.begin(1)
            await idle()
            assert "base" in outbox.unavailable
            assert not writing.done
            nursery.start_soon(copy.run)
            await until(lambda: writing.done)
            assert writing.done == {1: None}
            assert await bases_of(objects)
            await until(lambda: not outbox.unavailable)
            nursery.cancel_scope.cancel()


async def test_nothing_is_acknowledged_after_another_process_has_ended_the_reign(tmp_path, objects):
    writing = None
    try:
        async with opened(tmp_path / "data", objects) as (store, nursery):
            writing = Writing(store, nursery)
            objects.holds = True
            with trio.CancelScope(shield=True):
                writing.begin(1)
                (name,) = await objects.held(1)
                objects.found[name] = (encode_seal(EpochSeal(9, bytes(16))), "other")
                objects.let_all()
                await until(lambda: writing.done)
    except* ReignOver:
        pass
    assert isinstance(writing.done[1], NotCounted)


async def test_a_write_that_waits_for_the_object_store_ends_with_its_process(tmp_path, objects):
    async with trio.open_nursery() as writers, opened(tmp_path / "data", objects) as (store, nursery):
        writing = Writing(store, writers)
        objects.holds = True
        writing.begin(1)
        await objects.held(1)
        nursery.cancel_scope.cancel()
    assert isinstance(writing.done[1], NotCounted)
    assert "no longer" in writing.done[1].detail


@pytest.mark.parametrize("seed", range(8))
async def test_everything_acknowledged_is_in_the_copy_whatever_answers_are_lost_and_whenever_the_process_ends(
    tmp_path, seed, monkeypatch
):
    monkeypatch.setattr(carry, "PAUSES_S", (0.001, 0.01))
    random, objects, acknowledged, number = Random(seed), FaultyObjects(seed), set(), 0
    for life in range(3):
        async with opened(tmp_path / "data", objects) as (store, nursery):
            writing = Writing(store, nursery)
            for _ in range(random.randrange(5, 40)):
                number += 1
                writing.begin(number, put_one(METADATA, b"%d" % number, b"%d" % life))
                if random.random() < 0.5:
                    await trio.sleep(0.002)
            enough = random.randrange(1, len(writing.done) + 2)
            await until(lambda writing=writing, enough=enough: len(writing.done) >= enough)
            acknowledged |= {each for each, outcome in writing.done.items() if outcome is None}
            nursery.cancel_scope.cancel()  # requests in progress may still arrive
        async with await LevelDBStore.open(tmp_path / f"new-{life}") as new:
            await replay(objects, new)
            found = await rows_of(new)
        assert [each for each in acknowledged if (MESSAGE, key(each)) not in found] == []
        assert [each for each in acknowledged if (METADATA, b"%d" % each) not in found] == []
    assert acknowledged


async def test_a_commit_is_sent_while_the_disk_syncs_it(tmp_path, objects, monkeypatch):
    async with opened(tmp_path / "data", objects) as (store, nursery):
        real, goes_on = NewestLog.finish_sync, threading.Event()

        def finish_sync(syncing):
            goes_on.wait(PATIENCE_S)
            real(syncing)

        await store.write([message(0)], claim=None)
        monkeypatch.setattr(NewestLog, "finish_sync", staticmethod(finish_sync))
        writing = Writing(store, nursery)
        before = len(objects.found)
        writing.begin(1)
        await until(lambda: len(objects.found) > before)
        await idle()
        assert not writing.done
        goes_on.set()
        await until(lambda: writing.done)
        assert writing.done == {1: None}


async def test_a_sync_that_fails_after_its_commit_was_sent_ends_the_process_and_the_next_takes_it_from_the_log(
    tmp_path, objects, monkeypatch
):
    writing, fails = None, threading.Event()
    try:
        async with opened(tmp_path / "data", objects) as (store, nursery):
            await store.write([message(0)], claim=None)
            copied_at_once(tmp_path / "data", tmp_path / "cut")  # the state after a power cut

            def finish_sync(syncing):
                del syncing
                fails.wait(PATIENCE_S)
                raise OSError("the disk says no")

            monkeypatch.setattr(NewestLog, "finish_sync", staticmethod(finish_sync))
            before = len(objects.found)
            writing = Writing(store, nursery)
            writing.begin(1)
            await until(lambda: len(objects.found) > before)
            fails.set()
            await trio.sleep_forever()
    except* StoreError as errors:
        assert "sent to the second copy" in str(errors.exceptions)
    assert isinstance(writing.done[1], StoreError)
    monkeypatch.undo()
    async with opened(tmp_path / "cut", objects) as (store, _):
        assert await store.get(MESSAGE, key(1)) is not None


def test_commit_numbers_of_a_store_that_took_over_are_those_of_the_log():
    outbox = CountingOutbox(max_bytes=1000, timeout_s=1.0, continues=100)
    outbox.opened(7)
    assert (outbox.last, outbox.newest) == (100, 100)
    outbox.progressed(100, 100)
    assert (outbox.unsent, outbox.unavailable) == (8, "")
    outbox.numbered(8)
    assert not outbox.answers.may_show(outbox.newest)
    outbox.write_failed(7)
    assert not outbox.is_torn
