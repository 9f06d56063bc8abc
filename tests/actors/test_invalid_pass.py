"""Passes over the invalid list: complete and incomplete ones, their rollbacks, pruning of pointers, log lines."""

from __future__ import annotations

import logging

import pytest
import trio
from actors_in_process import NAME
from daemon_in_process import LIFETIME_MS, Cut, OneClock, daemon
from pointers_in_process import pointer_rows, publish, store

from actors.invalid_list import InvalidPass
from actors.pointers import PointerIndex
from plainsong.protocol.effects import Table, put_one
from plainsong.protocol.errors import (
    OutcomeUnknown,
    RolledBack,
    TransactionExpired,
    TransactionNotInProgress,
    TransactionsUnavailable,
)
from plainsong.protocol.keys import metadata_key
from plainsong.protocol.names import TopicName
from plainsong.protocol.rows import decode_row
from plainsong.protocol.topic.asks import Remove, Undelete
from plainsong.protocol.transactions.asks import CompletePass, PruningFigures
from storage.base import read_rows
from storage.leveldb import LevelDBStore
from storage.leveldb.sealed_rows import SealedRows
from storage.memory import MemoryStore
from tests.storage.disks import copied_at_once
from tests.storage.faulty import FaultyStore

OTHER = TopicName("ns", "other")


def a_disk():
    return FaultyStore(MemoryStore())


def signs(disk):
    """Return the pointers of all message rows."""
    return [decode_row(value).pointer for value in disk.inner.tables[Table.MESSAGE].rows.values()]


async def an_invalid_one(it, *names):
    """Publish a message to each of these topics in a transaction, and invalidate it; return its pointer."""
    pointer = (await it.service.begin()).transaction.write_pointer
    for name in names:
        await publish(it.harness, pointer, "m", name=name)
    await it.service.invalidate(pointer)
    return pointer


async def test_a_complete_pass_rolls_back_every_row_of_invalid_pointers_and_of_no_others(autojump_clock):
    async with daemon(a_disk(), OneClock()) as it:
        for name in (NAME, OTHER):
            await it.harness.create(name)
        invalid = await an_invalid_one(it, NAME, OTHER)
        living = (await it.service.begin()).transaction.write_pointer
        await publish(it.harness, living, "m")
        report = await it.clean()
        assert (report.complete, report.invalid, report.rolled_back) == (True, 1, 2)
        assert sorted(signs(it.harness.store)) == [-invalid, -invalid, living]
        assert await it.read(OTHER, it.service.view()) == ([], None)


async def test_topics_are_asked_about_a_pointer_once_and_not_in_every_round(autojump_clock):
    async with daemon(a_disk(), OneClock()) as it:
        await it.harness.create()
        await an_invalid_one(it, NAME)
        assert (await it.clean()).rolled_back == 1
        commits = it.harness.watch.count["commits"]
        assert [(await it.clean()).rolled_back for _ in range(3)] == [0, 0, 0]
        assert it.harness.watch.count["commits"] == commits


async def test_a_complete_pass_prunes_a_pointer_past_its_maximum_lifetime(autojump_clock):
    async with daemon(a_disk(), OneClock()) as it:
        await it.harness.create()
        invalid = await an_invalid_one(it, NAME)
        assert (await it.clean()).pruned == 0
        assert it.service.invalids() == (invalid,)
        await trio.sleep(LIFETIME_MS / 1000)
        assert (await it.clean()).pruned == 1
        assert it.service.invalids() == ()
        await it.clean()
        assert pointer_rows(it.harness) == []
        assert await it.read(NAME, it.service.view()) == ([], None)
        with pytest.raises((TransactionExpired, TransactionNotInProgress, RolledBack)):
            await publish(it.harness, invalid, "late")


async def test_a_topic_that_cannot_be_scanned_keeps_every_pointer_on_the_list(autojump_clock, caplog):
    disk, clock = a_disk(), OneClock()
    async with daemon(disk, clock) as it:
        for name in (NAME, OTHER):
            await it.harness.create(name)
        invalid = await an_invalid_one(it, NAME, OTHER)
    good = disk.inner.tables[Table.METADATA].rows[metadata_key(OTHER)]
    disk.inner.apply([put_one(Table.METADATA, metadata_key(OTHER), b"\xff garbled")])
    async with daemon(disk, clock) as it:
        await trio.sleep(LIFETIME_MS / 1000)
        report = await it.clean()
        assert (report.complete, report.missed, report.rolled_back) == (False, (OTHER,), 1)
        assert it.service.invalids() == (invalid,)
        assert it.service.pruning().safe_bound is None
        assert "invalid pass incomplete, nothing is pruned" in caplog.text
    disk.inner.apply([put_one(Table.METADATA, metadata_key(OTHER), good)])
    async with daemon(disk, clock) as it:
        assert (await it.clean()).pruned == 1
        assert set(signs(disk)) == {-invalid}


@pytest.mark.parametrize("after", range(3))
@pytest.mark.parametrize("applied", [0, 1, 2, True])
async def test_a_failing_write_makes_the_pass_incomplete_and_the_next_one_finishes(autojump_clock, after, applied):
    async with daemon(a_disk(), OneClock()) as it:
        names = [TopicName("ns", f"t{number}") for number in range(3)]
        for name in names:
            await it.harness.create(name)
        invalid = await an_invalid_one(it, *names)
        it.harness.store.fail_next("write", after=after, applied=applied)
        assert not (await it.invalid_pass.run_once()).complete
        report = await it.invalid_pass.run_once()
        assert report.complete
        assert signs(it.harness.store) == [-invalid] * 3


@pytest.mark.parametrize("end", ["abort", "invalidate"])
async def test_half_a_rollback_that_a_kill_left_is_seen_by_no_committed_reader_and_finished_by_a_repeat(
    tmp_path, monkeypatch, end
):
    def killed_before(self, change):
        copied_at_once(tmp_path / "data", tmp_path / "killed")
        real(self, change)

    async def pointers(store):
        rows = await read_rows(store, Table.MESSAGE, b"", b"\xff" * 64, limit=100)
        return [decode_row(value).pointer for _, value in rows]

    clock, real = OneClock(), SealedRows.change
    async with await LevelDBStore.open(tmp_path / "data") as store, daemon(FaultyStore(store), clock) as it:
        await it.harness.create()
        pointer = (await it.service.begin()).transaction.write_pointer
        await publish(it.harness, pointer, "in the sealed volume")
        await store.begin_files()
        await publish(it.harness, pointer, "in the newest")
        monkeypatch.setattr(SealedRows, "change", killed_before)
        await getattr(it.service, end)(pointer)
        await it.clean()
    monkeypatch.undo()
    async with await LevelDBStore.open(tmp_path / "killed") as store, daemon(FaultyStore(store), clock) as it:
        assert await pointers(store) == [pointer, -pointer]
        seen, _ = await it.read(NAME, it.service.view())
        assert seen == []
        if end == "abort":
            await it.service.abort(pointer)
        else:
            await it.clean()
        assert await pointers(store) == [-pointer, -pointer]
        assert await it.read(NAME, it.service.view()) == ([], None)


async def test_rows_being_written_when_the_pass_begins_are_included(autojump_clock):
    async with daemon(a_disk(), OneClock()) as it:
        await it.harness.create()
        pointer = (await it.service.begin()).transaction.write_pointer
        report = None
        async with trio.open_nursery() as nursery:
            disk = it.harness.store
            disk.stall("write")
            nursery.start_soon(publish, it.harness, pointer, "m")
            await disk.stalled("write")
            disk.release("write")
            await it.service.invalidate(pointer)
            report = await it.invalid_pass.run_once()
        assert report.complete
        assert signs(it.harness.store) == [-pointer]


async def test_a_deleted_topic_is_included_and_shows_nothing_after_its_undelete(autojump_clock):
    async with daemon(a_disk(), OneClock()) as it:
        await it.harness.create()
        invalid = await an_invalid_one(it, NAME)
        await it.harness.ask(Remove())
        assert (await it.invalid_pass.run_once()).complete
        await it.harness.ask(Undelete())
        await it.service.truncate([invalid])
        assert await it.read(NAME, it.service.view()) == ([], None)


async def test_messages_stored_under_an_invalid_pointer_are_never_visible(autojump_clock):
    async with daemon(a_disk(), OneClock()) as it:
        await it.harness.create()
        pointer = (await it.service.begin()).transaction.write_pointer
        await store(it.harness, pointer, "a", "b")
        await publish(it.harness, pointer)
        await it.service.invalidate(pointer)
        await trio.sleep(LIFETIME_MS / 1000)
        assert (await it.clean()).pruned == 1
        assert await it.read(NAME, it.service.view()) == ([], None)
        assert await it.read(NAME) == ([b"a", b"b"], None)


async def test_a_restart_during_a_pass_starts_it_over(autojump_clock):
    disk, clock = a_disk(), OneClock()
    with pytest.RaisesGroup(Cut, flatten_subgroups=True, allow_unwrapped=True):
        async with daemon(disk, clock) as it:
            await it.harness.create()
            invalid = await an_invalid_one(it, NAME)
            disk.fail_next("write", applied=1)
            await it.invalid_pass.run_once()
            raise Cut
    disk.crash()
    async with daemon(disk, clock) as it:
        assert it.service.pruning().safe_bound is None
        assert (await it.invalid_pass.run_once()).complete
        assert signs(disk) == [-invalid]


@pytest.mark.parametrize("ends", ["abort", "truncate", "pass"])
async def test_rows_of_an_interrupted_commit_are_rolled_back_after_a_restart_before_the_topic_is_opened(
    autojump_clock, ends
):
    disk, clock = a_disk(), OneClock()
    with pytest.RaisesGroup(Cut, flatten_subgroups=True, allow_unwrapped=True):
        async with daemon(disk, clock) as it:
            await it.harness.create()
            await it.harness.publish("so that there is a mark")
            pointer = (await it.service.begin()).transaction.write_pointer
            disk.fail_next("write", applied=1)
            with pytest.raises(OutcomeUnknown):
                await publish(it.harness, pointer, "torn")
            raise Cut
    disk.crash()
    assert pointer in signs(disk)
    async with daemon(disk, clock) as it:
        assert len(it.harness.directory) == 0
        if ends == "abort":
            assert (await it.service.abort(pointer)).state == "aborted"
        else:
            await it.service.invalidate(pointer)
        if ends == "truncate":
            assert await it.service.truncate([pointer]) == 1
        elif ends == "pass":
            assert (await it.invalid_pass.run_once()).rolled_back == 1
        assert signs(disk) == [None, -pointer]
        assert await it.read(NAME, it.service.view()) == ([b"so that there is a mark"], None)


async def test_the_figures_of_the_last_complete_pass_survive_a_restart(autojump_clock):
    disk, clock = a_disk(), OneClock()
    async with daemon(disk, clock, prune=False) as it:
        await it.harness.create()
        invalid = await an_invalid_one(it, NAME)
        await it.clean()
        before = it.service.pruning()
        assert (before.safe_bound, before.oldest_by_topic) == (invalid, {NAME: invalid})
    async with daemon(disk, clock, prune=False) as it:
        after = it.service.pruning()
        assert (after.safe_bound, after.last_pass_ms) == (before.safe_bound, before.last_pass_ms)
        assert after.kept_because


async def test_the_log_of_a_complete_pass_contains_what_an_operator_needs(autojump_clock, caplog):
    async with daemon(a_disk(), OneClock(), lifetime_ms=0) as it:
        await it.harness.create()
        with caplog.at_level(logging.INFO):
            await it.clean()
            assert "invalid pass complete" not in caplog.text, "a pass without anything to do is no news"
            invalid = await an_invalid_one(it, NAME)
            await it.clean()
    [line] = [each for each in caplog.records if each.message == "invalid pass complete"]
    assert (line.invalid, line.rolled_back, line.pruned, line.safe_bound) == (1, 1, 0, invalid)
    assert (line.oldest_referenced, line.oldest_topic) == (invalid, str(NAME))
    assert "transactions.max_lifetime_s is 0" in line.kept_because


async def test_without_a_maximum_lifetime_nothing_is_pruned_automatically(autojump_clock):
    async with daemon(a_disk(), OneClock(), lifetime_ms=0) as it:
        await it.harness.create(ttl_s=10)
        invalid = await an_invalid_one(it, NAME)
        await trio.sleep(10**7)
        for _ in range(3):
            assert (await it.clean()).pruned == 0
        assert it.service.invalids() == (invalid,)


class Elsewhere:
    """An invalid list on another instance, which is unavailable or cannot record the pass."""

    def __init__(self, fails):
        self.fails = fails
        self.completed = []

    def _may_fail(self, what):
        if self.fails == what:
            raise TransactionsUnavailable(f"{what} is unavailable")

    def begin_pass(self):
        self._may_fail("begin")
        return CompletePass(1, (7,), 9)

    async def pointer_locations(self):
        self._may_fail("where")
        return PointerIndex()

    async def complete(self, passed):
        self._may_fail("complete")
        self.completed.append(passed)
        return 0

    def pruning(self):
        self._may_fail("pruning")
        return PruningFigures(1, 7, {}, 9, 1, 0, "it is pruned there")


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        ("begin", "invalid pass not begun"),
        ("where", "invalid pass not begun"),
        ("complete", "complete invalid pass not recorded"),
        ("pruning", ""),
        ("", "invalid pass complete"),
    ],
)
async def test_an_unreachable_list_blocks_nothing(autojump_clock, caplog, fails, said):
    async with daemon(a_disk(), OneClock()) as it:
        elsewhere = Elsewhere(fails)
        with caplog.at_level(logging.DEBUG):
            report = await InvalidPass(it.harness.directory, elsewhere).run_once()
        assert said in caplog.text
        assert (report is None) == (fails in ("begin", "where", "complete"))
        assert len(elsewhere.completed) == (fails in ("", "pruning"))
