"""The second copy: counted commits can be restored exactly, whatever the object store and the process do."""

from __future__ import annotations

import shutil
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from functools import partial
from random import Random

import pytest
import trio
import trio.testing

from actors import copy_calls, copy_start, log_writer, restoring_copy, second_copy
from actors.copy_start import is_deposed, leave_copy
from actors.restoring_copy import SKEW_MS, compare_bases, refuse_late_clock, replay
from actors.second_copy import SecondCopy
from actors.settings import ReplicationConfig
from plainsong.protocol.effects import RollBack, Table, put_one
from storage.base import StoreError, StoreUnusable
from storage.leveldb import LevelDBStore
from storage.replication import carry, reading
from storage.replication.carry import ObjectStoreUnavailable
from storage.replication.notices import LEASE, decode_lease, decode_seal, log_name
from storage.replication.outbox import Outbox, commit_of
from storage.replication.protocol import (
    ROOT,
    BucketWentBack,
    DirectoryBehind,
    Foreign,
    ReignOver,
    Unconditional,
    Verdict,
    after,
)
from storage.replication.reading import CopyMoved, bases_of, verify
from storage.replication.record import read_record, remove_record, write_record
from storage.replication.segment import (
    Change,
    Commit,
    DamagedLog,
    decode_segment,
    digest,
    encode_segment,
    is_segment,
    segment_of,
)
from storage.settings import MEANING
from tests.patience import PATIENCE_S
from tests.storage.contract import METADATA, NAME
from tests.storage.disks import copied_at_once
from tests.storage.replication.objects import FaultyObjects, MemoryObjects
from tests.storage.replication.shipped import rows_of, write_anything
from tests.storage.rolling_contract import under
from tests.storage.tiny_volumes import TINY, key, message, settled

FAST = ReplicationConfig(interval_ms=10, segment_bytes=2000, base_every_h=1, keep_s=3600, lease_s=0, standby="allowed")


async def until(holds):
    while True:
        if holds():
            return
        await trio.sleep(0.01)


class Primary:
    """A store with its second copy."""

    def __init__(self, store, copy, outbox):
        self.store, self.copy, self.outbox = store, copy, outbox
        self.at = 0

    async def write(self, count=1):
        claim = await self.store.claim(NAME)
        for _ in range(count):
            self.at += 1
            await self.store.write([message(self.at), put_one(METADATA, b"last", b"%d" % self.at)], claim=claim)

    async def counted(self):
        """Wait until every commit counts."""
        last = self.outbox.last
        await until(lambda: (-1 if self.copy.status.counted is None else self.copy.status.counted) >= last)


@asynccontextmanager
async def primary(
    directory, objects, *, settings=FAST, finish=True, max_bytes=1 << 30, now_ms=lambda: 1_000_000, outbox=None
):
    outbox = outbox or Outbox(max_bytes=max_bytes, full_bytes=1000)
    async with await LevelDBStore.open(directory, TINY, shipper=outbox) as store:
        copy = SecondCopy(objects, store, outbox, directory, settings, now_ms)
        await copy.begin()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(copy.run)
            running = Primary(store, copy, outbox)
            with trio.fail_after(PATIENCE_S):
                yield running
                if finish:
                    await copy.finish()
            nursery.cancel_scope.cancel()


async def restored(objects, directory, **point):
    """Restore the copy; return its rows, and how far it reaches."""
    async with await LevelDBStore.open(directory) as store:
        done = await replay(objects, store, **point)
        return await rows_of(store), done


@pytest.fixture
def objects():
    return MemoryObjects()


async def test_a_segment_that_is_stored_while_the_log_is_checked_is_not_taken_for_another_processs(tmp_path, objects):
    async with primary(tmp_path / "data", objects) as running:
        await running.counted()
        get, place = objects.get, running.copy.log.reign.place

        async def get_late(name):
            if name == log_name(place.epoch, place.number):
                await running.write()
                await running.counted()
            return await get(name)

        objects.get = get_late
        await running.copy.log.look()
        assert running.copy.log.reign.place.number > place.number


async def test_a_writer_can_wait_until_at_most_half_of_the_backlog_waits(tmp_path, objects):
    settings = replace(FAST, backlog_bytes=2000)
    async with primary(tmp_path / "data", objects, settings=settings) as running:
        await running.counted()
        objects.away = True
        while running.outbox.waiting_bytes <= 1000:
            await running.copy.log.until_room()
            await running.write()
        with trio.move_on_after(0.1) as waiting:
            await running.copy.log.until_room()
        assert waiting.cancelled_caught
        objects.away = False
        await running.copy.log.until_room()
        assert running.outbox.waiting_bytes <= 1000


async def test_everything_written_before_a_clean_stop_is_restored_exactly(tmp_path, objects):
    async with primary(tmp_path / "data", objects) as running:
        await running.write(30)
        await running.counted()
        await running.write(30)
        wanted = await rows_of(running.store)
    found, done = await restored(objects, tmp_path / "new")
    assert found == wanted
    assert done.end.commit == running.outbox.last
    assert (await verify(objects)).ok


def settings_at_their_ends():
    for each in fields(ReplicationConfig):
        meaning = each.metadata[MEANING]
        for end in meaning.choices if meaning.low is None else (meaning.low, meaning.high):
            yield pytest.param(each.name, end, id=f"{each.name}={end}")


@pytest.mark.parametrize(("name", "end"), list(settings_at_their_ends()))
async def test_with_a_setting_at_an_end_of_its_range_everything_is_restored_after_a_restart(
    tmp_path, objects, name, end
):
    settings = replace(FAST, **{name: end})
    for turn in range(2):
        async with primary(tmp_path / "data", objects, settings=settings) as running:
            await until(lambda running=running: running.copy.record.base is not None)
            running.at = 5 * turn
            await running.write(5)
            wanted = await rows_of(running.store)
    found, done = await restored(objects, tmp_path / "new")
    assert found == wanted
    assert done.end.commit == running.outbox.last


async def test_a_start_that_lasts_longer_than_the_lease_renews_it(tmp_path, objects):
    get = objects.get

    async def late(name):
        if name.startswith("log/") and LEASE in objects.found:
            await until(lambda: decode_lease(objects.found[LEASE][0]).renewed > 2)
        return await get(name)

    objects.get = late
    with trio.fail_after(PATIENCE_S):
        async with primary(tmp_path / "data", objects, settings=replace(FAST, lease_s=0.03)) as running:
            await running.write(3)
            await running.counted()


async def test_a_store_that_had_rows_before_its_copy_is_in_the_base(tmp_path, objects):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        claim = await store.claim(NAME)
        for number in range(1, 40):
            await store.write([message(number, under(7))], claim=claim)
            await settled(store)
    async with primary(tmp_path / "data", objects) as running:
        await running.counted()
        await running.store.write([RollBack(key(1), key(30), 7)], claim=await running.store.claim(NAME))
        wanted = await rows_of(running.store)
    assert (await restored(objects, tmp_path / "new"))[0] == wanted


async def test_every_counted_commit_can_be_restored_and_nothing_else_is_in_that_state(tmp_path, objects):
    states = {}
    async with primary(tmp_path / "data", objects) as running:
        await running.counted()
        for _ in range(10):
            await running.write()
            states[running.outbox.last] = await rows_of(running.store)
    for commit, wanted in states.items():
        found, done = await restored(objects, tmp_path / f"at-{commit}", to_commit=commit)
        assert (found, done.end.commit) == (wanted, commit)


async def test_a_start_after_a_clean_stop_continues_the_log_without_a_new_base(tmp_path, objects):
    async with primary(tmp_path / "data", objects) as running:
        await running.write(5)
        await running.counted()
    async with primary(tmp_path / "data", objects) as running:
        assert running.copy.status.epoch == 2
        assert running.copy.status.counted == running.outbox.last
        running.at = 50
        await running.write(5)
        wanted = await rows_of(running.store)
    assert len(await bases_of(objects)) == 1
    assert (await restored(objects, tmp_path / "new"))[0] == wanted


@pytest.mark.parametrize("seed", range(8))
async def test_the_next_process_sends_commits_that_the_last_one_had_not_sent(tmp_path, objects, seed):
    random = Random(seed)
    async with primary(tmp_path / "data", objects, finish=False) as running:
        at = 0
        for _ in range(random.randrange(40)):
            at = await write_anything(running.store, random, at)
        await running.counted()
        objects.away = True
        for _ in range(random.randrange(40)):
            at = await write_anything(running.store, random, at)
        last = running.outbox.last
    objects.away = False
    async with primary(tmp_path / "data", objects) as running:
        assert running.copy.status.epoch == 2
        assert running.copy.status.counted == running.outbox.last == last
        wanted = await rows_of(running.store)
        await write_anything(running.store, random, at)
    assert len(await bases_of(objects)) == 1
    assert (await restored(objects, tmp_path / "at-start", to_commit=last))[0] == wanted
    async with await LevelDBStore.open(tmp_path / "data", TINY, shipper=Outbox(max_bytes=1, full_bytes=1)) as store:
        wanted = await rows_of(store)
    assert (await restored(objects, tmp_path / "at-end"))[0] == wanted


async def test_unsent_commits_that_are_no_longer_known_make_a_gap_and_a_new_base(tmp_path, objects, monkeypatch):
    async with primary(tmp_path / "data", objects, finish=False) as running:
        await running.write(5)
        await running.counted()
        objects.away = True
        await running.write(5)
    objects.away = False
    monkeypatch.setattr(copy_start, "UNSENT_BYTES", -1)
    async with primary(tmp_path / "data", objects) as running:
        running.at = 50
        await running.write(3)
        await running.counted()
        wanted = await rows_of(running.store)
    (seal,) = [decode_seal(data) for name, (data, _) in objects.found.items() if is_seal(name, data) and "1/" in name]
    assert seal.gap
    assert len(await bases_of(objects)) == 2
    assert (await restored(objects, tmp_path / "new"))[0] == wanted
    found, done = await restored(objects, tmp_path / "old", to_commit=5)
    assert (len(found), done.end.commit) == (6, 5)


def is_seal(name, data):
    return name.startswith("log/") and not is_segment(data)


async def test_commits_wait_while_the_object_store_is_unavailable_and_then_all_count(tmp_path, objects):
    async with primary(tmp_path / "data", objects) as running:
        await running.counted()
        objects.away = True
        await running.write(20)
        await until(lambda: running.copy.status.error)
        assert running.copy.status.lag_bytes > 0
        assert running.copy.status.counted < running.outbox.last
        objects.away = False
        await running.counted()
        assert (running.copy.status.error, running.copy.status.lag_bytes) == ("", 0)


async def test_temporarily_refused_access_only_delays_the_copy(tmp_path, objects, monkeypatch):
    monkeypatch.setattr(copy_calls, "REFUSED_PAUSE_S", 0.01)
    async with primary(tmp_path / "data", objects) as running:
        await running.counted()
        objects.refuses = True
        await running.write(5)
        await until(lambda: "right" in running.copy.status.error)
        objects.refuses = False
        await running.counted()


async def test_commits_over_the_backlog_make_a_gap_and_count_again_after_a_new_base(tmp_path, objects):
    async with primary(tmp_path / "data", objects, max_bytes=3000) as running:
        await running.write(3)
        await running.counted()
        objects.away = True
        await running.write(60)
        assert running.outbox.waiting_bytes <= 3000
        assert running.copy.status.given_up
        objects.away = False
        await running.write(1)
        await running.counted()
        assert (running.copy.status.epoch, running.copy.status.given_up) == (2, False)
        wanted = await rows_of(running.store)
    assert (await restored(objects, tmp_path / "new"))[0] == wanted


async def test_a_store_that_is_reopened_after_a_failed_write_stays_in_step_with_its_copy(
    tmp_path, objects, monkeypatch
):
    monkeypatch.setattr(second_copy, "BASE_PAUSE_S", 0.01)  # the first base may have been read from the broken store
    async with primary(tmp_path / "data", objects) as running:
        await running.write(5)
        running.store._tables.is_broken = True
        running.at = 50
        await running.write(5)
        await running.counted()
        wanted = await rows_of(running.store)
    assert (await restored(objects, tmp_path / "new"))[0] == wanted


async def test_a_gap_while_the_store_cannot_be_reopened_only_delays_the_copy(tmp_path, objects, monkeypatch):
    monkeypatch.setattr(copy_calls, "REFUSED_PAUSE_S", 0.01)
    async with primary(tmp_path / "data", objects, max_bytes=3000) as running:
        await running.write(3)
        await running.counted()
        tables, tries = running.store._tables, []
        real = tables.open

        async def fail():
            tries.append(trio.current_time())
            if len(tries) <= 3:
                raise StoreUnusable("the disk says no")
            await real()

        monkeypatch.setattr(tables, "open", fail)
        objects.away = True
        await running.write(60)
        tables.is_broken = True
        with pytest.raises(StoreError):
            await running.store.claim(NAME)
        objects.away = False
        await until(lambda: running.copy.status.epoch == 2)
        assert len(tries) > 3
        await running.write(1)
        await running.counted()
        wanted = await rows_of(running.store)
    assert (await restored(objects, tmp_path / "new"))[0] == wanted


async def test_a_copied_directory_takes_the_log_and_the_first_process_ends(tmp_path, objects, monkeypatch):
    monkeypatch.setattr(log_writer, "LOOK_EVERY_S", 0.02)
    deposed = False
    try:
        async with primary(tmp_path / "data", objects, finish=False) as running:
            await running.write(3)
            await running.counted()
            copied_at_once(tmp_path / "data", tmp_path / "copy")
            async with primary(tmp_path / "copy", objects) as other:
                assert other.copy.status.epoch == 2
                await trio.sleep_forever()
    except* ReignOver:
        deposed = True
    assert deposed
    with pytest.raises(Foreign):
        async with primary(tmp_path / "data", objects):
            pass


@pytest.mark.parametrize("seed", range(4))
async def test_an_older_state_of_the_directory_takes_the_commits_that_it_lacks_from_the_log(tmp_path, objects, seed):
    random, at = Random(seed), 0
    async with primary(tmp_path / "data", objects) as running:
        for _ in range(30):
            at = await write_anything(running.store, random, at)
        await running.counted()
        copied_at_once(tmp_path / "data", tmp_path / "older")
        for _ in range(30):
            at = await write_anything(running.store, random, at)
        wanted, last = await rows_of(running.store), running.outbox.last
    async with primary(tmp_path / "older", objects) as running:
        assert await rows_of(running.store) == wanted
        assert running.outbox.last == last
        await running.counted()  # the copy was perhaps made before the record had the base
        await write_anything(running.store, random, at)
        wanted = await rows_of(running.store)
    assert (await restored(objects, tmp_path / "new"))[0] == wanted
    with pytest.raises(Foreign):
        async with primary(tmp_path / "data", objects):
            pass


def log_end(objects):
    """Return the last segment in the log, and the bytes of it."""
    data = objects.found[max(name for name in objects.found if name.startswith("log/"))][0]
    return decode_segment(data), data


def put_segment(objects, **fields):
    """Store a segment after the end of the log, of the same process or its clone."""
    last, data = log_end(objects)
    commit = Commit(1, (Change(Table.MESSAGE, b"a clone's", b"row"),))
    fields = {"run": last.run, "first": last.last + 1, "before": digest(data), "commits": [commit]} | fields
    made = segment_of(epoch=last.epoch, number=last.number + 1, mode=last.mode, **fields)
    objects.found[log_name(made.epoch, made.number)] = (encode_segment(made), "clone")


async def test_the_log_can_be_read_after_a_segment_of_a_clone_whose_last_segment_is_missing(tmp_path, objects):
    async with primary(tmp_path / "data", objects, finish=False) as running:
        await running.write(3)
        await running.counted()
    put_segment(objects, before=b"x" * 32)
    checked = await verify(objects)
    assert (checked.ok, checked.void) == (True, 1)
    async with primary(tmp_path / "data", objects) as running:
        running.at = 50
        await running.write(3)
        await running.counted()
        wanted = await rows_of(running.store)
    found, done = await restored(objects, tmp_path / "new")
    assert (found, done.end.commit) == (wanted, running.outbox.last)
    assert (await verify(objects)).ok


async def test_a_segment_of_another_run_that_does_not_continue_the_epoch_is_damage(tmp_path, objects):
    async with primary(tmp_path / "data", objects, finish=False) as running:
        await until(lambda: running.copy.record.base is not None)
        await running.write(3)
        await running.counted()
        last = running.outbox.last
    put_segment(objects, before=b"x" * 32, run=bytes(16))
    assert not (await verify(objects)).ok
    with pytest.raises(DamagedLog, match="of another run"):
        await restored(objects, tmp_path / "new", to_ms=2_000_000_000_000)
    assert (await restored(objects, tmp_path / "before", to_commit=last))[1].end.commit == last


async def test_a_directory_whose_commit_has_the_rows_of_the_log_with_other_values_is_refused(tmp_path, objects):
    async with primary(tmp_path / "data", objects, finish=False) as running:
        await running.write(3)
        await running.counted()
        objects.away = True
        await running.write(2)
        await until(lambda: running.copy.log.under_way)
        batches = [batch for taken in running.copy.log.under_way for batch in taken.batches]
    objects.away = False

    def otherwise(change):
        is_last = isinstance(change, Change) and change.key == b"last"
        return replace(change, value=b"a clone's") if is_last else change

    commits = [commit_of(batch) for batch in batches]
    clones = [replace(each, changes=tuple(otherwise(change) for change in each.changes)) for each in commits]
    assert clones != commits
    put_segment(objects, commits=clones)
    with pytest.raises(Foreign, match="of the log is not the one in this directory"):
        async with primary(tmp_path / "data", objects):
            pass
    put_segment_at = log_name(1, max(decode_segment(data).number for data, _ in segments_of(objects)))
    del objects.found[put_segment_at]
    put_segment(objects, commits=commits)  # as if its own upload had succeeded and the answer were lost
    async with primary(tmp_path / "data", objects) as running:
        await running.counted()


def segments_of(objects):
    return [found for name, found in objects.found.items() if name.startswith("log/") and is_segment(found[0])]


async def test_a_directory_whose_commit_differs_from_the_log_is_refused_although_its_own_run_has_written_it(
    tmp_path, objects
):
    async with primary(tmp_path / "data", objects, finish=False) as running:
        await running.write(3)
        await running.counted()
        objects.away = True
        await running.write(2)
    objects.away = False
    put_segment(objects)
    before = dict(objects.found)
    with pytest.raises(Foreign, match=f"commit {running.outbox.last - 1} of the log is not the one in this directory"):
        async with primary(tmp_path / "data", objects):
            pass
    assert {name for name in objects.found if name.startswith("log/")} == {
        name for name in before if name.startswith("log/")
    }


@pytest.mark.parametrize("is_same", [False, True])
async def test_a_message_of_the_log_that_has_another_value_than_the_directorys_own_shows_a_clone(
    tmp_path, objects, is_same
):
    own, clones = ([message(77, b"\x01" + (5).to_bytes(8, "big") + value)] for value in (b"mine", b"other"))
    async with primary(tmp_path / "data", objects, finish=False) as running:
        await running.write(3)
        await running.counted()
        objects.away = True
        claim = await running.store.claim(NAME)
        await running.store.write(own, claim=claim)
        # Turning the sign of a pointer is no difference.
        await running.store.write([RollBack(key(77), key(77) + b"\x00", 5)], claim=claim)
    objects.away = False
    put_segment(objects, commits=[Commit(1, tuple(own if is_same else clones))])
    if is_same:
        async with primary(tmp_path / "data", objects) as running:
            await running.counted()
    else:
        with pytest.raises(
            Foreign, match=f"commit {running.outbox.last - 1} of the log is not the one in this directory"
        ):
            async with primary(tmp_path / "data", objects):
                pass


async def an_old_directory(tmp_path, objects, keep_s):
    """Return a directory as it was after a kill between its seal and its first segment; the log has gone on since."""
    now, settings = [1_000_000], replace(FAST, keep_s=keep_s)
    for turn in range(4):
        async with primary(tmp_path / "data", objects, settings=settings, now_ms=lambda: now[0]) as running:
            running.at = 100 * turn
            await running.write(6)
            await running.counted()
            await until(lambda: running.copy.status.base_ms >= now[0])
            await until(lambda: keep_s or sum(name.endswith("/manifest") for name in objects.found) <= 2)
            if turn == 3 and not keep_s:  # retention removes the log of a base after its manifest
                await until(lambda: log_name(1, 1) not in objects.found)
        if not turn:
            copied_at_once(tmp_path / "data", tmp_path / "older")
        now[0] += 2 * 3_600_000
    begun = after(ROOT, objects.found[log_name(0, 1)][0])[0]
    write_record(tmp_path / "older", replace(read_record(tmp_path / "older"), place=begun, base=None))
    return tmp_path / "older"


async def is_refused_and_seals_nothing(older, objects, number):
    """Check that a start on an old directory is refused, and writes neither a seal at its place nor the lease."""
    lease = objects.found[LEASE]
    with pytest.raises(BucketWentBack, match="too old"):
        async with primary(older, objects):
            pass
    assert log_name(1, number) not in objects.found
    assert objects.found[LEASE] == lease


async def test_a_directory_older_than_everything_that_is_kept_is_refused_and_seals_nothing(tmp_path, objects):
    older = await an_old_directory(tmp_path, objects, keep_s=0)
    assert log_name(1, 1) not in objects.found
    await is_refused_and_seals_nothing(older, objects, 1)


async def test_a_directory_older_than_everything_that_is_kept_does_not_leave_the_copy_which_others_continue(
    tmp_path, objects
):
    older = await an_old_directory(tmp_path, objects, keep_s=0)
    lease, record = objects.found[LEASE], read_record(older)
    seal = max(int(name.rpartition("/")[2]) for name in objects.found if name.startswith(f"log/{1:020}/"))
    for number in (1, 2, seal):
        record = replace(record, place=replace(record.place, number=number, commit=0))
        write_record(older, record)
        with pytest.raises(BucketWentBack, match="too old") as refused:
            await leave_copy(objects, older, record)
        assert "rejoin" in refused.value.hint
        with pytest.raises(BucketWentBack, match="too old"):  # a start gives the same advice
            async with primary(older, objects):
                pass
        assert (log_name(1, number) in objects.found) is (number == seal)
        assert objects.found[LEASE] == lease


async def test_a_directory_that_is_too_old_seals_nothing_though_retention_has_left_the_object_before_its_place(
    tmp_path, objects
):
    older = await an_old_directory(tmp_path, objects, keep_s=0)
    record, left = read_record(older), b"an object that could not be removed"
    objects._put(log_name(1, 1), left)
    write_record(older, replace(record, place=replace(record.place, number=2, before=digest(left), commit=0)))
    await is_refused_and_seals_nothing(older, objects, 2)


async def test_a_directory_is_deposed_once_another_process_has_continued_its_log_and_not_before(tmp_path, objects):
    data = tmp_path / "data"

    async def deposed():
        return await is_deposed(objects, read_record(data))

    async with primary(data, objects) as running:
        await running.write(3)
        await running.counted()
    assert not await deposed()
    async with primary(data, objects, finish=False) as running:
        await running.write(3)  # killed before it sends them
    assert not await deposed()
    shutil.copytree(data, tmp_path / "other")
    async with primary(tmp_path / "other", objects):
        pass
    assert await deposed()
    with pytest.raises(Foreign):
        async with primary(data, objects):
            pass


async def test_a_directory_whose_log_was_lost_or_cannot_be_read_is_not_said_to_be_deposed(
    tmp_path, objects, monkeypatch
):
    async with primary(tmp_path / "data", objects) as running:
        await running.write(3)
        await running.counted()
    record = read_record(tmp_path / "data")
    monkeypatch.setattr(reading, "PAUSES_S", (0.001,) * 5)
    monkeypatch.setattr(carry, "PAUSES_S", (0.001, 0.01))
    objects.away = True
    with pytest.raises(ObjectStoreUnavailable, match="away"):
        await is_deposed(objects, record)
    objects.away, get = False, objects.get

    async def get_no_segment(name):
        if name.startswith("log/"):
            raise ObjectStoreUnavailable("no segment")
        return await get(name)

    objects.get = get_no_segment
    monkeypatch.setattr(copy_start, "is_removed", never_removed)
    with pytest.raises(ObjectStoreUnavailable, match="no segment"):
        await is_deposed(objects, record)
    objects.get = get
    objects.found.clear()
    with pytest.raises(BucketWentBack, match="is missing"):
        await is_deposed(objects, record)


async def never_removed(objects, place):
    del objects, place
    await trio.lowlevel.checkpoint()
    return False


async def test_a_directory_older_than_everything_that_is_kept_is_deposed(tmp_path, objects):
    older = await an_old_directory(tmp_path, objects, keep_s=0)
    assert await is_deposed(objects, read_record(older))


async def test_leaving_a_copy_ends_if_the_object_store_stops_responding_and_can_be_repeated(
    tmp_path, objects, monkeypatch
):
    async with primary(tmp_path / "data", objects) as running:
        await running.write(3)
        await running.counted()
    monkeypatch.setattr(carry, "PAUSES_S", (0.001, 0.01))
    create = objects.create

    async def create_nothing(name, data):
        raise ObjectStoreUnavailable("no seal")

    objects.create = create_nothing
    with pytest.raises(ObjectStoreUnavailable, match="no seal") as ended:
        await leave_copy(objects, tmp_path / "data", read_record(tmp_path / "data"))
    assert "again" in ended.value.hint
    objects.create = create
    await leave_copy(objects, tmp_path / "data", read_record(tmp_path / "data"))
    last = max(name for name in objects.found if name.startswith("log/"))
    assert is_seal(last, objects.found[last][0])


async def test_leaving_a_copy_whose_bucket_went_back_in_time_needs_no_seal(tmp_path, objects):
    async with primary(tmp_path / "data", objects) as running:
        await running.write(3)
        await running.counted()
    record = read_record(tmp_path / "data")
    del objects.found[log_name(record.place.epoch, record.place.number - 1)]
    with pytest.raises(BucketWentBack, match="is missing") as refused:
        await leave_copy(objects, tmp_path / "data", record)
    assert "--without-seal" in refused.value.hint


@pytest.mark.parametrize("leaves", [False, True])
async def test_neither_a_start_nor_leaving_succeeds_at_a_number_that_retention_has_freed_in_that_moment(
    tmp_path, objects, leaves
):
    older, get = await an_old_directory(tmp_path, objects, keep_s=86_400), objects.get

    async def get_once(name):
        found = await get(name)
        if name == log_name(1, 1):
            for each, (data, _) in list(objects.found.items()):
                of_epoch = each.startswith((f"log/{1:020}/", f"bases/{1:020}/"))
                if of_epoch and (is_segment(data) or each.endswith("/manifest")):
                    del objects.found[each]
        return found

    async def start():
        async with primary(older, objects):
            pass

    objects.get = get_once
    with pytest.raises(BucketWentBack, match="too old"):  # noqa: PT012  # one of two statements
        if leaves:
            await leave_copy(objects, older, read_record(older))
        else:
            async with primary(older, objects):
                pass
    assert log_name(1, 1) in objects.found  # the log's first number has a seal now; it ends no epoch
    assert (await verify(objects)).ok


async def test_retention_of_a_deposed_primary_removes_nothing_of_its_successor(tmp_path, objects):
    now = [1_000_000]
    settings = replace(FAST, keep_s=0)
    async with primary(tmp_path / "data", objects, settings=settings, now_ms=lambda: now[0], finish=False) as first:
        for _ in range(2):
            await first.write(3)
            await first.counted()
            now[0] += 1
            newest = await first.copy._make_base()
        copied_at_once(tmp_path / "data", tmp_path / "copy")
    async with primary(tmp_path / "copy", objects, settings=settings, now_ms=lambda: now[0]) as second:
        second.at = 100
        for _ in range(2):
            await second.write(3)
            await second.counted()
            await second.copy._make_base()
        kept = {name for name in objects.found if name.startswith(f"bases/{second.copy.status.epoch:020}/")}
        now[0] += 1000
        await first.copy._bases.remove_old(newest, partial(first.copy._file.change, first.copy._at_place))
        assert kept <= set(objects.found)
        assert (await verify(objects)).ok


async def test_a_restore_that_retention_overtakes_is_refused_and_a_lost_segment_is_damage(tmp_path, objects):
    await three_bases(tmp_path, objects)
    first, second, _ = await bases_of(objects)
    at_ms = second.until_ms - 1
    lost = log_name(first.place.epoch, first.place.number)
    get = objects.get

    async def get_late(name):
        """Retention removes the oldest base and the log after it when the log is read."""
        if name == lost:
            for each in [f"{first.folder}/manifest", lost]:
                objects.found.pop(each, None)
        return await get(name)

    held = dict(objects.found)
    objects.get = get_late
    with pytest.raises(CopyMoved):
        await restored(objects, tmp_path / "overtaken", to_ms=at_ms)
    objects.found.clear()
    objects.found.update(held)
    assert (await verify(objects)).bases == [second, (await bases_of(objects))[-1]]
    objects.get = get
    objects.found.clear()
    objects.found.update({name: held[name] for name in held if name != lost})
    with pytest.raises(DamagedLog, match="objects are missing"):
        await restored(objects, tmp_path / "lost", to_ms=at_ms)
    assert not (await verify(objects)).ok
    assert (await restored(objects, tmp_path / "before", to_commit=first.until))[1].end.commit == first.until


async def test_a_restore_of_a_log_that_lacks_its_end_is_refused_and_up_to_that_end_possible(tmp_path, objects):
    async with primary(tmp_path / "data", objects, settings=replace(FAST, lease_s=10.0), finish=False) as running:
        await running.write(3)
        await running.counted()
        reached = running.outbox.last
        await running.write(1)
        await running.counted()
        running.copy.lease.serve(())
        await until(lambda: decode_lease(objects.found[LEASE][0]).counted == running.outbox.last)
    last, _ = log_end(objects)
    del objects.found[log_name(last.epoch, last.number)]
    with pytest.raises(DamagedLog, match=f"commit {running.outbox.last} was in it") as refused:
        await restored(objects, tmp_path / "new")
    assert f"--commit {reached}" in refused.value.hint
    assert (await restored(objects, tmp_path / "earlier", to_commit=reached))[1].end.commit == reached


async def test_an_older_state_is_refused_if_the_log_does_not_continue_it(tmp_path, objects, monkeypatch):
    async with primary(tmp_path / "data", objects) as running:
        await running.write(3)
        await running.counted()
        copied_at_once(tmp_path / "data", tmp_path / "older")
        await running.write(3)

    async def apply(self, commit):
        del self, commit
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(LevelDBStore, "apply", apply)
    with pytest.raises(DirectoryBehind):
        async with primary(tmp_path / "older", objects):
            pass


async def test_an_emptied_bucket_and_a_truncated_log_are_refused(tmp_path, objects):
    async with primary(tmp_path / "data", objects) as running:
        await running.write(3)
        await running.counted()
    emptied = MemoryObjects()
    with pytest.raises(BucketWentBack):
        async with primary(tmp_path / "data", emptied):
            pass
    place = read_record(tmp_path / "data").place
    del objects.found[log_name(place.epoch, place.number - 1)]
    with pytest.raises(BucketWentBack):
        async with primary(tmp_path / "data", objects):
            pass


async def test_a_start_replaces_a_lease_that_went_back_to_an_earlier_epoch(tmp_path, objects):
    async with primary(tmp_path / "data", objects) as running:
        await running.write(3)
        await running.counted()
        earlier = objects.found[LEASE][0]
    async with primary(tmp_path / "data", objects) as running:
        await running.counted()
    objects._put(LEASE, earlier)
    async with primary(tmp_path / "data", objects) as running:
        lease = decode_lease(objects.found[LEASE][0])
        assert (lease.epoch, lease.run) == (running.copy.status.epoch, running.copy._run) == (3, running.copy._run)
        await running.write(3)
        await running.counted()
    objects._put(LEASE, earlier)
    del objects.found[log_name(3, read_record(tmp_path / "data").place.number - 1)]
    with pytest.raises(BucketWentBack):  # the log went back too
        async with primary(tmp_path / "data", objects):
            pass


async def test_a_running_primary_replaces_a_lease_that_went_back(tmp_path, objects):
    async with primary(tmp_path / "data", objects, settings=replace(FAST, lease_s=10.0)) as running:
        await running.counted()
        earlier = objects.found[LEASE][0]
        for _ in range(3):
            before = decode_lease(objects.found[LEASE][0]).renewed
            running.copy.lease.serve(())
            await until(lambda before=before: decode_lease(objects.found[LEASE][0]).renewed > before)
        objects._put(LEASE, earlier)
        running.copy.lease.serve(())
        await until(lambda: decode_lease(objects.found[LEASE][0]).renewed > before + 1 and running.copy.lease.holds)
        await running.write(3)
        await running.counted()


async def test_a_running_primary_ends_if_lease_and_log_went_back(tmp_path, objects):
    with pytest.raises(ExceptionGroup) as ended:  # noqa: PT012
        async with primary(tmp_path / "data", objects, settings=replace(FAST, lease_s=10.0), finish=False) as running:
            await running.counted()
            found = dict(objects.found)
            await running.write(3)
            await running.counted()
            before = decode_lease(objects.found[LEASE][0]).renewed
            running.copy.lease.serve(())
            await until(lambda: decode_lease(objects.found[LEASE][0]).renewed > before)
            objects.found.clear()
            objects.found.update(found)
            running.copy.lease.serve(())
            await trio.sleep_forever()
    assert ended.group_contains(BucketWentBack, match="is missing or has changed")
    assert not running.copy.lease.holds
    assert objects.found[LEASE] == found[LEASE]


async def test_the_prefix_of_another_directory_is_refused(tmp_path, objects):
    async with primary(tmp_path / "data", objects):
        pass
    with pytest.raises(Foreign):
        async with primary(tmp_path / "other", objects):
            pass


async def test_an_object_store_that_ignores_conditions_is_refused(tmp_path, objects, monkeypatch):
    async def create(name, data):
        await trio.lowlevel.checkpoint()
        objects.found[name] = (data, "1")
        return Verdict.DONE

    monkeypatch.setattr(objects, "create", create)
    with pytest.raises(Unconditional):
        async with primary(tmp_path / "data", objects):
            pass


async def test_an_object_store_that_replaces_an_object_whatever_its_version_is_refused(tmp_path, objects, monkeypatch):
    async def exchange(name, data, etag):
        await trio.lowlevel.checkpoint()
        objects.found[name] = (data, f"{etag}+")
        return Verdict.DONE

    monkeypatch.setattr(objects, "exchange", exchange)
    with pytest.raises(Unconditional, match="If-Match"):
        async with primary(tmp_path / "data", objects):
            pass
    assert set(objects.found) == set()


async def test_without_conditional_replacement_there_is_no_lease_and_the_seal_still_fences(tmp_path, objects):
    objects.can_exchange = False
    for epoch in (1, 2, 3):
        async with primary(tmp_path / "data", objects) as running:
            assert running.copy.status.epoch == epoch
            running.at = 10 * epoch
            await running.write(2)
            await running.counted()
            wanted = await rows_of(running.store)
    assert "lease.json" not in objects.found
    assert (await restored(objects, tmp_path / "new"))[0] == wanted


async def test_a_start_repeats_its_look_at_the_bases_while_the_object_store_is_away(tmp_path, objects):
    async with primary(tmp_path / "data", objects) as running:
        await running.write(3)
        await running.counted()
    names, failures = objects.names, []

    async def names_later(prefix):
        if not failures:
            failures.append(prefix)
            raise ObjectStoreUnavailable("no answer")
        return await names(prefix)

    objects.names = names_later
    async with primary(tmp_path / "data", objects) as running:
        await running.write()
        await running.counted()
    assert failures


async def test_after_a_gap_no_segments_are_made_for_the_numbers_of_the_epoch_before(tmp_path, objects):
    async with primary(tmp_path / "data", objects, max_bytes=3000) as running:
        for _ in range(5):
            await running.write()
            await running.counted()
        await running.copy.log.secure()
        epoch = running.copy.status.epoch
        objects.away = True
        await running.write(60)
        objects.away = False
        await until(lambda: running.copy.status.epoch > epoch)
        await running.counted()
        await running.write()
        await running.counted()
        names = [name for name in objects.found if name.startswith(f"log/{running.copy.status.epoch:020}/")]
        empty = [name for name in names if not decode_segment(objects.found[name][0]).commits]
        assert len(empty) == 1  # it says the mode


async def test_the_manifests_of_bases_are_read_at_once(tmp_path, objects):
    async with primary(tmp_path / "data", objects) as running:
        for _ in range(3):
            await running.write()
            await running.copy._make_base()
    get, under_way, most = objects.get, set(), 0

    async def slow(name):
        nonlocal most
        under_way.add(name)
        await trio.testing.wait_all_tasks_blocked()
        most = max(most, len(under_way))
        under_way.discard(name)
        return await get(name)

    objects.get = slow
    found = await bases_of(objects)
    assert [base.commit for base in found] == sorted(base.commit for base in found)
    assert most == len(found) >= 3


async def test_a_clock_before_the_last_commit_is_corrected_or_refused_although_the_newest_base_is_earlier(
    tmp_path, objects
):
    async with primary(tmp_path / "data", objects) as running:
        await running.write(3)
        await running.counted()
    assert (await bases_of(objects))[-1].until_ms == 1_000_000  # the commits have the time of this machine
    last_ms = max(decode_segment(data).last_ms for data, _ in objects.found.values() if is_segment(data))
    assert last_ms > 2_000_000
    for has_lease in (True, False):
        if not has_lease:
            del objects.found[LEASE]
        assert await refuse_late_clock(objects, last_ms, is_given=False) == last_ms
        assert await refuse_late_clock(objects, last_ms - 45_000, is_given=False) == last_ms + SKEW_MS
        for behind_ms, is_given in ((SKEW_MS + 1, False), (1, True)):
            with pytest.raises(StoreUnusable, match="before the last commit"):
                await refuse_late_clock(objects, last_ms - behind_ms, is_given=is_given)


async def test_a_clock_before_that_of_the_primary_at_its_last_renewal_is_late_too(tmp_path, objects):
    later_ms = 4_000_000_000_000
    async with primary(tmp_path / "data", objects, now_ms=lambda: later_ms) as running:
        await running.counted()
    for name in [name for name in objects.found if name.startswith("bases/")]:
        del objects.found[name]
    assert await refuse_late_clock(objects, later_ms - 1, is_given=False) == later_ms + SKEW_MS


async def test_after_leaving_the_directory_starts_alone_and_its_copy_can_still_be_restored(tmp_path, objects):
    async with primary(tmp_path / "data", objects) as running:
        await running.write(3)
        await running.counted()
        wanted = await rows_of(running.store)
    await leave_copy(objects, tmp_path / "data", read_record(tmp_path / "data"))
    remove_record(tmp_path / "data")
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        assert await rows_of(store) == wanted
    assert (await restored(objects, tmp_path / "new"))[0] == wanted
    with pytest.raises(Foreign):
        async with primary(tmp_path / "data", objects):
            pass


async def test_a_new_base_removes_objects_that_only_older_moments_need_but_never_a_seal(tmp_path, objects):
    now = [1_000_000]
    settings = ReplicationConfig(interval_ms=10, segment_bytes=500, base_every_h=1, keep_s=0)
    for turn in range(4):
        async with primary(tmp_path / "data", objects, settings=settings, now_ms=lambda: now[0]) as running:
            running.at = 100 * turn
            await running.write(6)
            await running.counted()
            await until(lambda: running.copy.status.base_ms >= now[0])
            await until(lambda: sum(name.endswith("/manifest") for name in objects.found) <= 2)
            wanted = await rows_of(running.store)
        now[0] += 2 * 3_600_000
    assert len(await bases_of(objects)) <= 2
    epochs = {name.split("/")[1] for name in objects.found if name.startswith("log/")}
    assert len(epochs) == 5
    assert (await verify(objects)).ok
    assert (await restored(objects, tmp_path / "new"))[0] == wanted


@pytest.mark.parametrize("seed", range(12))
async def test_no_counted_commit_is_lost_whatever_answers_are_lost_and_whenever_processes_end(
    tmp_path, seed, monkeypatch
):
    monkeypatch.setattr(carry, "PAUSES_S", (0.001, 0.01))
    random, objects = Random(seed), FaultyObjects(seed)
    states, counted = {}, -1
    for turn in range(5):
        async with primary(tmp_path / "data", objects, finish=random.random() < 0.5) as running:
            running.at = 1000 * turn
            states[running.outbox.last] = await rows_of(running.store)
            for _ in range(random.randrange(12)):
                await running.write(random.randrange(1, 4))
                states[running.outbox.last] = await rows_of(running.store)
                await trio.sleep(random.choice([0, 0.001, 0.02, 0.05]))
                counted = max(counted, -1 if running.copy.status.counted is None else running.copy.status.counted)
    objects.calm = True
    if counted < 0:
        return
    found, done = await restored(objects, tmp_path / "new")
    assert done.end.commit >= counted
    if done.end.commit in states:
        assert found == states[done.end.commit]


async def three_bases(tmp_path, objects):
    """Make a copy with three bases of a store that changes in every way."""
    now, random, at = [1_000_000], Random(3), 0
    settings = replace(FAST, base_every_h=1, keep_s=86_400)
    for turn in range(3):
        async with primary(tmp_path / "data", objects, settings=settings, now_ms=lambda: now[0]) as running:
            await until(lambda: running.copy.status.base_ms >= now[0])
            for _ in range(25 if turn < 2 else 0):
                at = await write_anything(running.store, random, at)
        now[0] += 2 * 3_600_000
    assert len(await bases_of(objects)) == 3


async def test_each_base_equals_the_replay_from_the_previous_base(tmp_path, objects):
    await three_bases(tmp_path, objects)
    (tmp_path / "scratch").mkdir()
    found = await compare_bases(objects, tmp_path / "scratch")
    assert (found.problems, found.alone) == ([], [])
    assert found.equal == [base.until for base in (await bases_of(objects))[1:]]


async def test_a_base_that_lacks_a_row_of_the_log_before_it_is_found(tmp_path, objects, monkeypatch):
    lacking = []

    async def rows_without_one(objects, base, take):
        async def take_some(commit):
            changes = commit.changes
            if base.until == lacking[0]:
                changes = [change for change in changes if change.table is not Table.METADATA]
            await take(replace(commit, changes=changes))

        await rows_from(objects, base, take_some)

    await three_bases(tmp_path, objects)
    bases = await bases_of(objects)
    lacking.append(bases[1].until)
    rows_from = restoring_copy.rows_of
    monkeypatch.setattr(restoring_copy, "rows_of", rows_without_one)
    (tmp_path / "scratch").mkdir()
    found = await compare_bases(objects, tmp_path / "scratch")
    assert found.problems[0] == f"base {bases[1].until} differs from the replay of the log before it: metadata"
    assert bases[1].until not in found.equal


async def test_a_base_after_a_gap_is_compared_with_nothing(tmp_path, objects):
    async with primary(tmp_path / "data", objects, max_bytes=1000) as running:
        await running.counted()
        objects.away = True
        await running.write(30)
        await until(lambda: running.outbox.lost)
        objects.away = False
        await running.write()
        await running.counted()
    (tmp_path / "scratch").mkdir()
    found = await compare_bases(objects, tmp_path / "scratch")
    assert (found.problems, found.equal) == ([], [])
    assert found.alone == [(await bases_of(objects))[-1].until]


async def test_a_copy_without_a_base_cannot_be_restored(tmp_path, objects):
    with pytest.raises(StoreUnusable, match="no copy"):
        await restored(objects, tmp_path / "new")
    async with primary(tmp_path / "data", objects) as running:
        await running.write(2)
        await running.counted()
    with pytest.raises(StoreUnusable, match="no complete base"):
        await restored(objects, tmp_path / "newer", to_ms=1)


async def test_a_start_reports_each_segment_that_it_reads_so_that_many_do_not_count_as_silence(tmp_path, objects):
    async with primary(tmp_path / "data", objects) as running:
        await running.counted()
        copied_at_once(tmp_path / "data", tmp_path / "older")
        for _ in range(5):
            await running.write(1)
            await running.counted()
    outbox, reads = Outbox(max_bytes=1 << 30, full_bytes=1000), []
    async with await LevelDBStore.open(tmp_path / "older", TINY, shipper=outbox) as store:
        copy = SecondCopy(objects, store, outbox, tmp_path / "older", FAST, lambda: 1_000_000)
        copy.on_read = lambda: reads.append(outbox.last)
        await copy.begin()
    assert len(reads) >= 5
