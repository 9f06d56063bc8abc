"""The standby: it has everything in the log whenever it is killed, takes over once, and loses no counted commit."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from random import Random

import pytest
import trio
import trio.testing

from actors import followed_log, lease_watch, settling, standby_clock
from actors import standby as standby_module
from actors.copy_start import leave_copy
from actors.log_writer import LOOK_EVERY_S
from actors.settings import ReplicationConfig
from actors.settling import LATE_S, settle, settle_alone
from plainsong.protocol.effects import Put, RollBack, Table
from plainsong.protocol.errors import OutcomeUnknown
from storage.base import StoreError, StoreUnusable
from storage.leveldb import LevelDBStore
from storage.leveldb.commit import Committer
from storage.replication import carry, protocol
from storage.replication.carry import ObjectStoreRefused, ObjectStoreUnavailable
from storage.replication.notices import (
    LEASE,
    EpochSeal,
    Registration,
    decode_lease,
    encode_lease,
    encode_seal,
    log_name,
)
from storage.replication.outbox import Outbox
from storage.replication.protocol import AHEAD, Fetched, Foreign, ReignOver, TakeOverLost, Verdict
from storage.replication.reading import bases_of, is_removed, verify
from storage.replication.record import FOLLOWED_KEY, Followed, RecordFile, read_record
from storage.replication.segment import ASYNC, SYNC, decode_segment, is_segment
from tests.actors.test_second_copy import FAST, primary, restored, until
from tests.patience import PATIENCE_S
from tests.planted import planted
from tests.storage.contract import NAME
from tests.storage.replication.objects import FaultyObjects, MemoryObjects
from tests.storage.replication.shipped import rows_of, write_anything
from tests.storage.rolling_contract import under
from tests.storage.tiny_volumes import TINY, key, message, settled

SETTINGS = ReplicationConfig(interval_ms=10, lease_s=0)
#: How much later ids begin after a take-over by hand.
BY_HAND_MS = round(1000 * (LATE_S + LOOK_EVERY_S))
#: Settings of a primary whose standby takes over automatically; the test moves its clock.
LEASED = replace(FAST, lease_s=10.0, standby="allowed")


@pytest.fixture
def objects():
    return MemoryObjects()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(standby_module, "PAUSE_S", 0.01)
    monkeypatch.setattr(lease_watch, "IDLE_S", 0.01)


class Clock:
    """The monotonic clock of a standby."""

    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s

    def ticks(self):
        """Let a moment pass, so that the lease is read again."""
        self.now_s += 0.011
        return True


def a_standby(directory, objects, settings=SETTINGS, clock=None, now_ms=1_000_000):
    opens = partial(LevelDBStore.open, directory, TINY, follows=True)
    options = {} if clock is None else {"clock": clock}
    present_ms = now_ms if callable(now_ms) else lambda: now_ms
    return standby_module.Standby(objects, directory, settings, opens, present_ms, holder="second", **options)


@asynccontextmanager
async def following(directory, objects, settings=SETTINGS, clock=None, now_ms=1_000_000, holding=None):
    """Run a standby during the block, and then kill it, as far as a task can be killed.

    Args:
      holding: a nursery that holds the lease also after the block.
    """
    standby = a_standby(directory, objects, settings, clock, now_ms)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(standby.run)
        (holding or nursery).start_soon(standby.hold)
        with trio.fail_after(PATIENCE_S):
            yield standby
        nursery.cancel_scope.cancel()


def lease_of(objects):
    return decode_lease(objects.found[LEASE][0])


async def registered(running, objects, clock, count=1):
    """Wait until the lease lists ``count`` standbys and is guarded."""

    def is_so():
        clock.ticks()
        running.copy.lease.serve(running.copy.lease.urls)  # renews at once
        return len(lease_of(objects).standbys) == count and lease_of(objects).guarded

    await until(is_so)


async def has_seen_the_lease(standby, objects, clock):
    """Wait until a standby has read the lease of a primary that has ended."""
    await until(
        lambda: (
            clock.ticks() and standby._watch.lease is not None and standby._watch.lease.sign == lease_of(objects).sign
        )
    )


async def has(standby, commit):
    await until(lambda: standby.status.last is not None and standby.status.last >= commit)


async def rows_in(directory):
    """Return the rows of a closed directory, except for the standby's own."""
    async with await LevelDBStore.open(directory, TINY, follows=True) as store:
        found = await rows_of(store)
    found.pop((Table.METADATA, FOLLOWED_KEY), None)
    return found


async def test_a_standby_has_everything_that_the_primary_has_sent(tmp_path, objects):
    async with primary(tmp_path / "data", objects) as running:
        await running.write(20)
        await running.counted()
        async with following(tmp_path / "second", objects) as standby:
            await running.write(20)
            await running.counted()
            await has(standby, running.outbox.last)
            wanted = await rows_of(running.store)
    assert await rows_in(tmp_path / "second") == wanted


@pytest.mark.parametrize("seed", range(6))
async def test_a_standby_that_is_killed_again_and_again_has_everything_in_the_log(tmp_path, objects, seed):
    random, at = Random(seed), 0
    async with primary(tmp_path / "data", objects) as running:
        for _ in range(6):
            for _ in range(random.randrange(12)):
                at = await write_anything(running.store, random, at)
            async with following(tmp_path / "second", objects) as standby:
                if random.random() < 0.5:
                    await until(lambda: standby.status.last is not None)
                await trio.sleep(random.choice([0, 0.01, 0.02]))
        await running.counted()
        async with following(tmp_path / "second", objects) as standby:
            await has(standby, running.outbox.last)
            wanted = await rows_of(running.store)
    assert await rows_in(tmp_path / "second") == wanted


class WatchedObjects(MemoryObjects):
    """Records which objects of the log are read, and how many at once."""

    def __init__(self):
        super().__init__()
        self.read = []
        self.at_once = self.most_at_once = 0

    async def get(self, name):
        if not name.startswith("log/"):
            return await super().get(name)
        self.read.append(name)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await super().get(name)
        finally:
            self.at_once -= 1


async def a_log(running, segments):
    """Write segments with one commit each."""
    for _ in range(segments):
        await running.write()
        await running.counted()


async def test_a_standby_that_is_behind_reads_several_segments_at_once_and_applies_them_as_one_batch(
    tmp_path, monkeypatch
):
    objects, batches = WatchedObjects(), []
    apply = LevelDBStore.apply

    async def applied(store, operations):
        batches.append(sum(isinstance(each, Put) and each.table is Table.MESSAGE for each in operations))
        await apply(store, operations)

    async with primary(tmp_path / "data", objects) as running:
        await until(lambda: running.copy.record.base is not None)
        await a_log(running, 30)
        monkeypatch.setattr(LevelDBStore, "apply", applied)
        objects.most_at_once = 0
        async with following(tmp_path / "second", objects) as standby:
            await has(standby, running.outbox.last)
        wanted = await rows_of(running.store)
    assert await rows_in(tmp_path / "second") == wanted
    assert objects.most_at_once == AHEAD
    assert max(batches) == AHEAD
    assert sum(batches) >= 30


async def test_segments_of_many_bytes_are_neither_read_ahead_nor_applied_together(tmp_path, monkeypatch):
    objects, batches = WatchedObjects(), []
    apply = LevelDBStore.apply

    async def applied(store, operations):
        batches.append(sum(isinstance(each, Put) and each.table is Table.MESSAGE for each in operations))
        await apply(store, operations)

    async with primary(tmp_path / "data", objects) as running:
        await until(lambda: running.copy.record.base is not None)
        await a_log(running, 20)
        monkeypatch.setattr(LevelDBStore, "apply", applied)
        monkeypatch.setattr(protocol, "BATCH_BYTES", 1)
        monkeypatch.setattr(protocol, "AHEAD_BYTES", 1)
        objects.most_at_once = 0
        async with following(tmp_path / "second", objects) as standby:
            await has(standby, running.outbox.last)
    assert objects.most_at_once == 1
    assert max(batches) == 1


async def test_nothing_after_a_missing_segment_is_applied_until_it_arrives(tmp_path):
    objects = WatchedObjects()
    async with primary(tmp_path / "data", objects) as running:
        await until(lambda: running.copy.record.base is not None)
        await a_log(running, 20)
        place = running.copy.log.reign.place
        name = log_name(place.epoch, place.number - 3)
        missing = objects.found.pop(name)
        async with following(tmp_path / "second", objects) as standby:
            before = decode_segment(missing[0]).first - 1
            await has(standby, before)
            objects.read.clear()
            await until(lambda: objects.read.count(name) > 2)
            assert standby.status.last == before
            objects.found[name] = missing
            await has(standby, running.outbox.last)
        wanted = await rows_of(running.store)
    assert await rows_in(tmp_path / "second") == wanted


async def test_segments_after_the_seal_of_an_epoch_are_never_applied_even_if_they_are_read_ahead(tmp_path):
    objects = WatchedObjects()
    async with primary(tmp_path / "data", objects) as running:
        await until(lambda: running.copy.record.base is not None)
        await a_log(running, 20)
        await running.copy.finish()
        sealed = running.copy.log.reign.place
    async with primary(tmp_path / "data", objects) as running:
        running.at = 100
        await a_log(running, 3)
        (number,) = [
            number
            for number in range(1, sealed.number + 5)
            if (found := objects.found.get(log_name(sealed.epoch, number))) and not is_segment(found[0])
        ]
        void = [log_name(sealed.epoch, number + at) for at in range(1, AHEAD + 1)]
        for name in void:
            objects.found[name] = objects.found[log_name(sealed.epoch, number - 1)]
        async with following(tmp_path / "second", objects) as standby:
            await has(standby, running.outbox.last)
        wanted = await rows_of(running.store)
    assert await rows_in(tmp_path / "second") == wanted
    assert set(void) & set(objects.read)


async def test_removals_and_rollbacks_in_sealed_volumes_are_applied_too(tmp_path, objects):
    async with (
        primary(tmp_path / "data", objects) as running,
        following(tmp_path / "second", objects) as standby,
    ):
        claim = await running.store.claim(NAME)
        for number in range(1, 60):
            await running.store.write([message(number, under(7))], claim=claim)
            await settled(running.store)
        await running.store.discard(Table.MESSAGE, [key(number) for number in range(1, 20)])
        await running.store.write([RollBack(key(1), key(50), 7)], claim=claim)
        await running.counted()
        await has(standby, running.outbox.last)
        wanted = await rows_of(running.store)
    assert await rows_in(tmp_path / "second") == wanted


async def taken_over(standby, directory):
    """Take over by hand, which ends the standby."""
    epoch = await standby.take_over()
    record = read_record(directory)
    assert (record.standby, record.place.epoch) == (False, epoch)
    return epoch


@asynccontextmanager
async def promoted(directory, objects, settings=FAST):
    """Start the primary on a directory that was a standby's."""
    record = read_record(directory)
    continues = record.place.commit if record.shift is None else None
    outbox = Outbox(max_bytes=1 << 30, full_bytes=1000, shift=record.shift or 0, continues=continues)
    async with primary(directory, objects, settings=settings, outbox=outbox) as running:
        yield running


async def test_after_a_take_over_every_counted_commit_is_present_and_the_log_continues(tmp_path, objects):
    async with primary(tmp_path / "data", objects, finish=False) as running:
        await running.write(30)
        await running.counted()
        wanted, last = await rows_of(running.store), running.outbox.last
    async with following(tmp_path / "second", objects) as standby:
        await has(standby, last)
        await taken_over(standby, tmp_path / "second")
    assert await rows_in(tmp_path / "second") == wanted
    async with promoted(tmp_path / "second", objects) as running:
        assert running.copy.status.counted == running.outbox.last == last
        running.at = 100
        await running.write(5)
        await running.counted()
        wanted = await rows_of(running.store)
    assert len(await bases_of(objects)) == 1
    found, done = await restored(objects, tmp_path / "new")
    wanted.pop((Table.METADATA, FOLLOWED_KEY), None)
    assert (found, done.end.commit) == (wanted, last + 5)
    assert (await verify(objects)).ok


async def test_commit_numbers_continue_after_another_start(tmp_path, objects):
    async with primary(tmp_path / "data", objects, finish=False) as running:
        await running.write(30)
        await running.counted()
        last = running.outbox.last
    async with following(tmp_path / "second", objects) as standby:
        await has(standby, last)
        await taken_over(standby, tmp_path / "second")
    for turn in range(3):
        async with promoted(tmp_path / "second", objects) as running:
            assert running.outbox.last == last
            running.at = 100 * (turn + 1)
            await running.write(3)
            await running.counted()
            last += 3
    assert len(await bases_of(objects)) == 1
    assert (await verify(objects)).gaps == []


async def test_a_deposed_primary_ends_and_its_next_start_lists_the_commits_that_never_counted(
    tmp_path, objects, monkeypatch
):
    deposed = False
    try:
        async with primary(tmp_path / "data", objects, finish=False) as running:
            await running.write(3)
            await running.counted()
            last = running.outbox.last
            async with following(tmp_path / "second", objects) as standby:
                await has(standby, last)
                await taken_over(standby, tmp_path / "second")
            await running.write(4)
            await trio.sleep_forever()
    except* ReignOver:
        deposed = True
    assert deposed
    assert not running.copy.lease.holds
    with pytest.raises(Foreign, match="4 commits") as refused:
        async with primary(tmp_path / "data", objects):
            pass
    assert "second" in refused.value.detail
    assert "rejoin" in refused.value.hint


async def test_a_take_over_of_a_primary_that_always_sends_its_next_segment_first_succeeds(tmp_path, objects):
    create, lost = objects.create, []

    async def create_late(name, data):
        """Before each seal, the primary sends another segment, unless it gives way."""
        if name.startswith("log/") and not is_segment(data) and running.copy.status.epoch:
            running.copy.lease.serve(())  # renews now
            await running.write(1)
            await until(lambda: running.copy.log.reign.logged == running.outbox.last or running.copy.log.yields)
            lost.append(name in objects.found)
        return await create(name, data)

    with pytest.raises(ExceptionGroup) as ended:  # noqa: PT012
        async with primary(tmp_path / "data", objects, settings=LEASED, finish=False) as running:
            await running.write(3)
            await running.counted()
            async with following(tmp_path / "second", objects) as standby:
                await has(standby, running.outbox.last)
                objects.create = create_late
                epoch = await standby.take_over()
                assert epoch == running.copy.status.epoch + 1
            objects.create = create
            await trio.sleep_forever()
    assert ended.group_contains(ReignOver)
    assert not lost[-1]


async def test_what_a_take_over_still_has_to_read_is_read_and_applied_several_segments_at_once(tmp_path, monkeypatch):
    objects, batches, tail = WatchedObjects(), [], []
    apply, exchange = LevelDBStore.apply, objects.exchange

    async def applied(store, operations):
        batches.append(sum(isinstance(each, Put) and each.table is Table.MESSAGE for each in operations))
        await apply(store, operations)

    async def exchanged(name, data, etag):
        if decode_lease(data).holder == "second" and not tail:
            tail.append(running.outbox.last)
            await a_log(running, 30)
            monkeypatch.setattr(LevelDBStore, "apply", applied)
            objects.most_at_once = 0
        return await exchange(name, data, etag)

    async with primary(tmp_path / "data", objects, finish=False) as running:
        await until(lambda: running.copy.record.base is not None)
        async with following(tmp_path / "second", objects) as standby:
            await has(standby, running.outbox.last)
            objects.exchange = exchanged
            await taken_over(standby, tmp_path / "second")
        wanted, last = await rows_of(running.store), running.outbox.last
    assert last == tail[0] + 30
    assert await rows_in(tmp_path / "second") == wanted
    assert objects.most_at_once == AHEAD
    assert max(batches) == AHEAD


async def test_a_take_over_that_lasts_longer_than_the_lease_renews_it_until_the_new_primary_does(tmp_path, objects):
    async with primary(tmp_path / "data", objects, finish=False) as running:
        await running.write(3)
        await running.counted()
        last = running.outbox.last
    get = objects.get

    async def late(name):
        if name.startswith("log/") and lease_of(objects).holder == "second":
            await until(lambda: lease_of(objects).renewed > 2)
        return await get(name)

    async with trio.open_nursery() as holding:
        async with following(tmp_path / "second", objects, holding=holding) as standby:
            await has(standby, last)
            objects.get = late
            await taken_over(standby, tmp_path / "second")
        taken = lease_of(objects)
        assert taken.run == read_record(tmp_path / "second").runs[0]
        with trio.fail_after(PATIENCE_S):
            await until(lambda: lease_of(objects).renewed > taken.renewed)
        objects.get = get
        async with promoted(tmp_path / "second", objects) as running:
            assert lease_of(objects).run == running.copy._run
            while holding.child_tasks:  # noqa: ASYNC110 - it ends without a sign
                await trio.sleep(0.01)


async def test_a_primary_that_has_its_lease_again_serves_only_once_a_segment_is_stored(tmp_path, objects):
    async with primary(tmp_path / "data", objects, settings=LEASED) as running:
        lease, clock = running.copy.lease, Clock()
        await until(lambda: lease_of(objects).renewed)
        lease._clock = clock
        objects._put(LEASE, encode_lease(lease_of(objects).registered(Registration("a", 1, "second"))))

        def after_a_renewal(holds):
            def is_so():
                lease.serve(())
                return holds()

            return until(is_so)

        await after_a_renewal(lambda: lease.is_automatic and lease.is_current)
        await carry.carry_out(objects, protocol.choose_epoch(bytes(16), 1, "second"))
        await after_a_renewal(lambda: lease._rivals.last is not None)
        create, asked, gate = objects.create, [], trio.Event()

        async def late(name, data):
            if name.startswith("log/"):
                asked.append(name)
                await gate.wait()
            return await create(name, data)

        objects.create = late
        place = running.copy.log.reign.place
        clock.now_s += 10.0
        await after_a_renewal(lambda: lease_of(objects).run == running.copy._run)
        await until(lambda: asked)
        assert not lease.is_current
        gate.set()
        await until(lambda: lease.is_current)
        assert asked == [log_name(place.epoch, place.number)]
        await running.write()
        await running.counted()


@pytest.mark.parametrize("is_guarded", [False, True])
async def test_a_take_over_that_was_killed_between_the_seal_and_the_record_is_repeated(
    tmp_path, objects, monkeypatch, is_guarded
):
    clock, settings, change = Clock(), replace(SETTINGS, lease_s=10.0), RecordFile.change
    sealed = trio.Event()

    async def killed(file, changed):
        if not changed(file.record).standby:
            sealed.set()
            await trio.sleep_forever()
        await change(file, changed)

    async with (
        primary(tmp_path / "data", objects, settings=LEASED, finish=False) as running,
        following(tmp_path / "second", objects, settings, clock) as standby,
    ):
        await running.write(3)
        await running.counted()
        last, wanted = running.outbox.last, await rows_of(running.store)
        await has(standby, last)
        if is_guarded:
            await registered(running, objects, clock)
    if not is_guarded:
        # A standby that registers with a primary that has ended may not take over by itself.
        objects._put(LEASE, encode_lease(replace(lease_of(objects), guarded=False, standbys=())))
    with monkeypatch.context() as patch:
        patch.setattr(RecordFile, "change", killed)
        async with following(tmp_path / "second", objects, settings, clock) as standby:
            await has(standby, last)
            async with trio.open_nursery() as asking:
                asking.start_soon(standby.take_over)
                await sealed.wait()
                asking.cancel_scope.cancel()
    assert read_record(tmp_path / "second").standby
    # The primary has lost its epoch, and its start changes nothing.
    taken = objects.found[LEASE]
    with pytest.raises(Foreign, match="never counted"):
        async with primary(tmp_path / "data", objects):
            pass
    assert objects.found[LEASE] == taken
    async with following(tmp_path / "second", objects, settings, clock) as standby:
        await until(lambda: clock.ticks() and standby.status.epoch == 2 and standby.status.caught_up)
        await has_seen_the_lease(standby, objects, clock)
        assert standby.status.automatic is is_guarded
        assert standby.status.urls == ()
        clock.now_s += 20.0
        if is_guarded:
            await until(lambda: clock.ticks() and not read_record(tmp_path / "second").standby)
        else:
            asked = objects.asked
            await until(lambda: clock.ticks() and objects.asked > asked + 5)
            await taken_over(standby, tmp_path / "second")
    record = read_record(tmp_path / "second")
    assert (record.place.epoch, record.place.commit) == (3, last)
    assert record.settle is not None
    assert await rows_in(tmp_path / "second") == wanted
    async with promoted(tmp_path / "second", objects) as running:
        running.at = 100
        await running.write(3)
        await running.counted()
    assert (await verify(objects)).ok


async def test_a_take_over_is_refused_before_the_base_is_complete(tmp_path, objects):
    async with following(tmp_path / "second", objects) as standby:
        with pytest.raises(TakeOverLost, match="base"):
            await standby.take_over()


async def test_a_standby_whose_next_segment_was_removed_starts_over_from_a_base(tmp_path, objects):
    async with primary(tmp_path / "data", objects, settings=LEASED) as running:
        await running.write(3)
        await running.counted()
        async with following(tmp_path / "second", objects) as standby:
            await has(standby, running.outbox.last)
        place = running.copy.record.place
        await running.write(5)
        await running.counted()
        base = await running.copy._make_base()
        assert base.place.number > place.number
        for name in [
            name
            for name in objects.found
            if name.startswith("log/") and name < log_name(base.place.epoch, base.place.number - 1)
        ]:
            if not name.endswith(f"{1:020}") or "/" + f"{0:020}" + "/" not in name:
                del objects.found[name]
        running.copy.lease.serve(())
        await until(lambda: decode_lease(objects.found[LEASE][0]).counted == running.outbox.last)
        async with following(tmp_path / "second", objects) as standby:
            await has(standby, running.outbox.last)
            wanted = await rows_of(running.store)
    assert await rows_in(tmp_path / "second") == wanted


async def test_a_standby_that_follows_a_seal_at_a_number_that_retention_has_freed_starts_over_from_a_base(
    tmp_path, objects
):
    async with primary(tmp_path / "data", objects, settings=LEASED) as running:
        await running.write(3)
        await running.counted()
        async with following(tmp_path / "second", objects) as standby:
            await has(standby, running.outbox.last)
            await until(lambda: standby._log._noted.commit == running.outbox.last)
            place = standby._log._noted
        for _ in range(4):  # in segments of their own
            await running.write()
            await running.counted()
        base = await running.copy._make_base()
        assert base.place.number > place.number + 1
        for number in range(1, base.place.number - 1):
            del objects.found[log_name(place.epoch, number)]
        # Of a start that was refused then.
        seal = encode_seal(EpochSeal(place.epoch + 1, bytes(16)))
        objects.found[log_name(place.epoch, place.number)] = (seal, "dead")
        running.copy.lease.serve(())
        await until(lambda: decode_lease(objects.found[LEASE][0]).counted == running.outbox.last)
        async with following(tmp_path / "second", objects) as standby:
            await has(standby, running.outbox.last)
            wanted = await rows_of(running.store)
    assert await rows_in(tmp_path / "second") == wanted


async def test_a_take_over_does_not_seal_a_number_that_retention_has_freed(tmp_path, objects):
    objects.can_exchange = False  # so that no lease shows the later commits
    async with primary(tmp_path / "data", objects, finish=False) as running:
        await running.write(3)
        await running.counted()
        async with following(tmp_path / "second", objects) as standby:
            await has(standby, running.outbox.last)
        await running.write(5)
        await running.counted()
        base = await running.copy._make_base()
        last, wanted = running.outbox.last, await rows_of(running.store)
    epoch = base.place.epoch
    removed = [log_name(epoch, number) for number in range(1, base.place.number - 1)]
    for name in removed:
        del objects.found[name]
    async with following(tmp_path / "second", objects) as standby:
        assert await standby.take_over() == epoch + 1
        assert standby.status.last == last
    assert not objects.found.keys() & set(removed)
    assert await rows_in(tmp_path / "second") == wanted


async def test_a_standby_without_a_lease_whose_next_segment_was_removed_begins_with_a_base(tmp_path, objects):
    objects.can_exchange = False
    async with primary(tmp_path / "data", objects, finish=False) as running:
        await running.write(3)
        await running.counted()
        async with following(tmp_path / "second", objects) as standby:
            await has(standby, running.outbox.last)
        for _ in range(5):  # in segments of their own
            await running.write()
            await running.counted()
        base = await running.copy._make_base()
        wanted = await rows_of(running.store)
    for number in range(1, base.place.number - 1):
        del objects.found[log_name(base.place.epoch, number)]
    async with following(tmp_path / "second", objects) as standby:
        await has(standby, running.outbox.last)
    assert await rows_in(tmp_path / "second") == wanted


async def test_a_standby_becomes_a_store_of_its_own_once_it_has_reached_its_bases_state(tmp_path, objects, monkeypatch):
    async with primary(tmp_path / "data", objects) as running:
        await running.write(3)
        await running.counted()
        async with following(tmp_path / "second", objects) as standby:
            await has(standby, running.outbox.last)
    record = read_record(tmp_path / "second")
    async with await LevelDBStore.open(tmp_path / "second", TINY, follows=True) as store:
        noted = Followed.decode(await store.get(Table.METADATA, FOLLOWED_KEY)).place
        last = max(noted.commit or 0, record.place.commit)
        with pytest.raises(StoreUnusable, match=f"consistent only from commit {last + 1}"):
            await settle_alone(store, replace(record, until=last + 1), lambda: 1, 0.0)
        settled = []

        async def recorded(store, what, now_ms):
            settled.append(what)
            await settle(store, what, now_ms)

        monkeypatch.setattr(settling, "settle", recorded)
        for lease_s in (0.0, 25.0):
            await settle_alone(store, replace(record, until=last), lambda: 1, lease_s)
    # The primary may have acknowledged until its lease was over.
    assert settled[1].ahead_ms - settled[0].ahead_ms == 25_000 - round(1000 * LATE_S)


async def test_a_standby_does_not_take_over_a_log_that_lacks_counted_commits(tmp_path, objects):
    async with primary(tmp_path / "data", objects, settings=LEASED, finish=False) as running:
        await running.write(3)
        await running.counted()
        async with following(tmp_path / "second", objects) as standby:
            await has(standby, running.outbox.last)
        place, lost = running.copy.log.reign.place, running.outbox.last + 1
        await running.write(5)
        await running.counted()
        running.copy.lease.serve(())
        await until(lambda: decode_lease(objects.found[LEASE][0]).counted == running.outbox.last)
    removed = objects.found.pop(log_name(place.epoch, place.number))
    assert decode_segment(removed[0]).first == lost
    async with following(tmp_path / "second", objects) as standby:
        with pytest.raises(TakeOverLost, match="objects are missing"):
            await standby.take_over()
        assert log_name(place.epoch, place.number) not in objects.found
    checked = await verify(objects)
    assert not checked.ok
    assert "objects are missing" in checked.problems[-1]


async def test_a_standby_takes_over_once_the_lease_has_expired(tmp_path, objects):
    clock, settings = Clock(), replace(SETTINGS, lease_s=10.0)
    async with following(tmp_path / "second", objects, settings, clock) as standby:
        async with primary(tmp_path / "data", objects, settings=LEASED, finish=False) as running:
            await running.write(3)
            await running.counted()
            running.copy.lease.serve(("http://first:7420",))
            await has(standby, running.outbox.last)
            await registered(running, objects, clock)
        await has_seen_the_lease(standby, objects, clock)
        assert standby.status.urls == ("http://first:7420",)
        assert standby.status.automatic
        clock.now_s += 9.9
        asked = objects.asked
        await until(lambda: objects.asked > asked + 5)
        assert read_record(tmp_path / "second").standby
        clock.now_s += 0.2
        await until(lambda: not read_record(tmp_path / "second").standby)
    assert read_record(tmp_path / "second").settle is not None


async def test_ids_begin_later_by_the_time_of_a_long_lease_since_the_primary_may_have_acknowledged_for_that_time(
    tmp_path, objects
):
    clock, settings = Clock(), replace(SETTINGS, lease_s=25.0)
    async with following(tmp_path / "second", objects, settings, clock) as standby:
        async with primary(tmp_path / "data", objects, settings=replace(LEASED, lease_s=25.0), finish=False) as running:
            await running.write(3)
            await running.counted()
            await has(standby, running.outbox.last)
            await registered(running, objects, clock)
        await has_seen_the_lease(standby, objects, clock)
        ahead_ms = standby._clock.ahead_ms
        now_ms = standby._clock.steady_ms
        clock.now_s += 25.0
        await until(lambda: not read_record(tmp_path / "second").standby)
    settle = read_record(tmp_path / "second").settle
    # The standby's wall clock stands still in this test.
    assert settle.ahead_ms == max(0, ahead_ms + now_ms + 25_000 - 1_000_000) + 25_000


async def test_a_standby_reads_the_lease_when_its_time_is_over_and_not_only_at_its_next_regular_look(
    tmp_path, objects, monkeypatch
):
    clock, settings = Clock(), replace(SETTINGS, lease_s=10.0)
    async with following(tmp_path / "second", objects, settings, clock) as standby:
        async with primary(tmp_path / "data", objects, settings=LEASED, finish=False) as running:
            await running.write(3)
            await running.counted()
            await has(standby, running.outbox.last)
            await registered(running, objects, clock)
        await has_seen_the_lease(standby, objects, clock)
        over_s = standby._watch._since_s + 10.0
        monkeypatch.setattr(lease_watch, "IDLE_S", 2.0)
        clock.now_s = over_s - 0.5
        await until(lambda: standby._watch._read_s == clock.now_s)
        assert read_record(tmp_path / "second").standby
        clock.now_s = over_s
        await until(lambda: not read_record(tmp_path / "second").standby)


@pytest.mark.parametrize("mode", ["async", "sync"])
async def test_a_standby_whose_lease_went_back_takes_over_by_itself_only_if_nothing_can_be_lost(
    tmp_path, objects, mode
):
    clock, settings = Clock(), replace(LEASED, mode=mode)
    async with primary(tmp_path / "data", objects, settings=settings) as running:
        await until(lambda: running.copy.record.base is not None)
        await running.counted()
    earlier = replace(lease_of(objects), guarded=True)
    async with primary(tmp_path / "data", objects, settings=settings, finish=False) as running:
        await running.write(3)
        await running.counted()
        last = running.outbox.last
    objects._put(LEASE, encode_lease(earlier))
    async with following(tmp_path / "second", objects, replace(SETTINGS, lease_s=10.0), clock) as standby:
        await has(standby, last)
        await has_seen_the_lease(standby, objects, clock)
        await until(lambda: standby.status.caught_up)
        assert standby.status.automatic is (mode == "sync")
        clock.now_s += 20.0
        if mode == "sync":
            await until(lambda: clock.ticks() and not read_record(tmp_path / "second").standby)
        else:  # the last primary may acknowledge without a lease
            asked = objects.asked
            await until(lambda: clock.ticks() and objects.asked > asked + 5)
            await taken_over(standby, tmp_path / "second")
    assert lease_of(objects).epoch == read_record(tmp_path / "second").place.epoch == 3


async def test_renewing_the_lease_restarts_its_time(tmp_path, objects):
    clock = Clock()
    async with primary(tmp_path / "data", objects, settings=LEASED) as running:
        await running.write(3)
        await running.counted()
        settings = replace(SETTINGS, lease_s=10.0)
        async with following(tmp_path / "second", objects, settings, clock) as standby:
            await has(standby, running.outbox.last)
            await registered(running, objects, clock)
            for _ in range(5):
                clock.now_s += 8.0
                before = decode_lease(objects.found[LEASE][0]).renewed
                running.copy.lease.serve(())
                await until(lambda before=before: decode_lease(objects.found[LEASE][0]).renewed > before)
                await until(
                    lambda: (
                        clock.ticks() and standby._watch.lease.renewed >= decode_lease(objects.found[LEASE][0]).renewed
                    )
                )
            assert read_record(tmp_path / "second").standby


async def test_of_two_standbys_one_takes_over_and_the_other_follows_it(tmp_path, objects):
    clock, settings, names = Clock(), replace(SETTINGS, lease_s=10.0), ["second", "third"]
    async with (
        following(tmp_path / "second", objects, settings, clock) as second,
        following(tmp_path / "third", objects, settings, clock) as third,
    ):
        async with primary(tmp_path / "data", objects, settings=LEASED, finish=False) as running:
            await running.write(3)
            await running.counted()
            await has(second, running.outbox.last)
            await has(third, running.outbox.last)
            await registered(running, objects, clock, 2)
        await has_seen_the_lease(second, objects, clock)
        await has_seen_the_lease(third, objects, clock)
        clock.now_s += 10.5
        await until(lambda: any(not read_record(tmp_path / name).standby for name in names))
        await until(lambda: second.status.epoch == third.status.epoch == 2)
    roles = sorted(read_record(tmp_path / name).standby for name in names)
    assert roles == [False, True]


async def test_a_primary_that_allows_no_standby_has_none(tmp_path, objects):
    settings = replace(LEASED, standby="never")
    async with primary(tmp_path / "data", objects, settings=settings) as running:
        await running.counted()
        running.copy.lease.serve(())
        await until(lambda: decode_lease(objects.found[LEASE][0]).period_ms)
        with pytest.raises(StoreUnusable, match="no standby"):
            await a_standby(tmp_path / "second", objects).run()


@pytest.mark.parametrize(
    ("allows", "has_standby", "holds"), [("allowed", True, False), ("allowed", False, True), ("never", False, True)]
)
async def test_without_renewals_a_primary_stops_acknowledging_in_time_if_a_standby_is_registered(
    tmp_path, objects, allows, has_standby, holds
):
    async with primary(tmp_path / "data", objects, settings=replace(LEASED, standby=allows)) as running:
        lease, clock = running.copy.lease, Clock()
        await until(lambda: lease_of(objects).renewed)
        lease._clock = clock
        if has_standby:
            objects._put(LEASE, encode_lease(lease_of(objects).registered(Registration("a", 1, "second"))))

        def is_renewed():
            lease.serve(())
            return lease._valid_until_s == clock.now_s + 10.0 and lease_of(objects).guarded is has_standby

        await until(is_renewed)
        assert lease.holds
        assert lease.is_automatic is has_standby
        clock.now_s += 10.0
        assert lease.holds is holds


async def test_in_sync_mode_a_primary_with_a_standby_acknowledges_logged_commits_without_a_lease(tmp_path, objects):
    async with primary(tmp_path / "data", objects, settings=replace(LEASED, mode="sync")) as running:
        lease, clock = running.copy.lease, Clock()
        await until(lambda: lease_of(objects).renewed)
        objects._put(LEASE, encode_lease(lease_of(objects).registered(Registration("a", 1, "second"))))

        def is_guarded():
            lease.serve(())
            return lease_of(objects).guarded and lease.is_automatic

        await until(is_guarded)
        lease._clock = clock
        clock.now_s += 1e9
        assert not lease.is_current
        assert lease.holds
        lease.close()
        assert not lease.holds


async def test_a_standby_that_a_primary_has_not_noticed_takes_over_only_by_hand(tmp_path, objects):
    async with primary(tmp_path / "data", objects, settings=LEASED, finish=False) as running:
        await running.write(3)
        await running.counted()
        last = running.outbox.last
        await until(lambda: lease_of(objects).renewed)
    clock = Clock()
    async with following(tmp_path / "second", objects, replace(SETTINGS, lease_s=10.0), clock) as standby:
        await has(standby, last)
        await until(lambda: clock.ticks() and lease_of(objects).standbys)
        clock.now_s += 100.0
        await has_seen_the_lease(standby, objects, clock)
        await until(lambda: clock.ticks() and lease_of(objects).standbys[0].beat > 1)
        assert not standby.status.automatic
        assert read_record(tmp_path / "second").standby
        await taken_over(standby, tmp_path / "second")


async def test_a_standby_does_not_take_over_by_hand_from_a_primary_that_allows_none_since_its_last_start(
    tmp_path, objects
):
    clock = Clock()
    async with following(tmp_path / "second", objects, clock=clock) as standby:
        async with primary(tmp_path / "data", objects, settings=LEASED, finish=False) as running:
            await running.write(3)
            await running.counted()
            await has(standby, running.outbox.last)
            await registered(running, objects, clock)
        async with primary(tmp_path / "data", objects, settings=replace(LEASED, standby="never")) as running:
            # The clock stands still, so the standby has not read the new lease.
            with pytest.raises(TakeOverLost, match="allows no standby"):
                await standby.take_over()
            running.at = 100
            await running.write(3)
            await running.counted()
    assert read_record(tmp_path / "second").standby


def counted_builds(standby):
    """Return a list that grows each time a standby is built from a base."""
    begun, build = [], standby._log.build

    async def counted(store, base):
        begun.append(base)
        await build(store, base)

    standby._log.build = counted
    return begun


async def builds_with_a_base_in_the_tail(folder, objects):
    """Make a base in the part of the log that a take-over reads; return how often the standby was built."""
    async with primary(folder / "data", objects, finish=False) as running:
        await running.write(3)
        await running.counted()
        exchange, made = objects.exchange, []

        async def exchanged(name, data, etag):
            if decode_lease(data).holder == "second" and not made:
                await running.write(5)
                await running.counted()
                made.append(await running.copy._make_base())
            return await exchange(name, data, etag)

        objects.exchange = exchanged
        async with following(folder / "second", objects) as standby:
            builds = counted_builds(standby)
            await has(standby, running.outbox.last)
            await taken_over(standby, folder / "second")
        wanted = await rows_of(running.store)
    assert made[0].commit == running.outbox.last
    assert await rows_in(folder / "second") == wanted
    return len(builds)


async def builds_with_a_base_since_the_end_was_read(folder, objects):
    """Make a base once a standby has read the log to its end; return how often it was built."""
    async with primary(folder / "data", objects, finish=False) as running:
        await running.write(3)
        await running.counted()
        names, made = objects.names, []
        async with following(folder / "second", objects) as standby:
            builds = counted_builds(standby)
            await has(standby, running.outbox.last)

            async def listed(prefix):
                if not made:
                    made.append(True)
                    await running.write(5)
                    await running.counted()
                    await running.copy._make_base()
                return await names(prefix)

            objects.names = listed
            await taken_over(standby, folder / "second")
        wanted = await rows_of(running.store)
    assert made
    assert await rows_in(folder / "second") == wanted
    return len(builds)


async def ahead_after_another_start(folder, objects):
    """Start a standby again after its primary has ended; return by how much it underestimates that clock's lead."""
    async with primary(folder / "data", objects, finish=False) as running:
        await running.write(3)
        await running.counted()
        async with following(folder / "second", objects, clock=Clock()) as standby:
            await has(standby, running.outbox.last)
            await running.write(3)
            await running.counted()
            await has(standby, running.outbox.last)
    # The segments that it reads again are old by now, and show less.
    async with following(folder / "second", objects, clock=Clock(), now_ms=2_000_000) as standby:
        await has(standby, running.outbox.last)
        await taken_over(standby, folder / "second")
    settle = read_record(folder / "second").settle
    return settle.cut_ms - 1_000_000 - (settle.ahead_ms - BY_HAND_MS)


async def test_ids_begin_above_the_last_commit_if_the_standbys_clock_was_set_back_before_a_restart(tmp_path, objects):
    objects.can_exchange = False  # a folder, where no lease shows the primary's clock again
    async with primary(tmp_path / "data", objects, finish=False) as running:
        await running.write(3)
        await running.counted()
        async with following(tmp_path / "second", objects, clock=Clock(), now_ms=2_000_000_000_000) as standby:
            await has(standby, running.outbox.last)
    async with following(tmp_path / "second", objects, clock=Clock(), now_ms=1000) as standby:
        await taken_over(standby, tmp_path / "second")
    settle = read_record(tmp_path / "second").settle
    assert settle.first_ms(1000) == settle.cut_ms + BY_HAND_MS


async def ids_that_begin_too_early(folder, objects):
    """Take over by hand from an idle primary; return the milliseconds for which ids may be issued twice."""
    async with primary(folder / "data", objects, finish=False) as running:
        await running.write(3)
        await running.counted()
    segments = [decode_segment(data) for data, _ in objects.found.values() if is_segment(data)]
    last_ms = max(segment.last_ms for segment in segments if segment.commits)
    # The primary's clock is 5 s ahead, and the standby reads the last commit a second after it was made.
    present_ms = last_ms + 1000
    async with following(folder / "second", objects, clock=Clock(), now_ms=present_ms - 5000) as standby:
        await has(standby, running.outbox.last)
        await taken_over(standby, folder / "second")
    # By the primary's clock; the primary may not find the seal until then.
    acknowledged_ms = present_ms + round(1000 * LOOK_EVERY_S)
    first_ms = present_ms - 5000 + read_record(folder / "second").settle.ahead_ms
    return max(0, acknowledged_ms - first_ms)


async def ids_after_a_step(folder, objects, step_ms=-120_000):
    """Set a standby's clock right before it takes over; return by how much ids begin too early, or too late."""
    async with primary(folder / "data", objects, finish=False) as running:
        await running.write(3)
        await running.counted()
    segments = [decode_segment(data) for data, _ in objects.found.values() if is_segment(data)]
    last_ms = max(segment.last_ms for segment in segments if segment.commits)
    now_ms = [last_ms - max(0, step_ms)]
    async with following(folder / "second", objects, clock=Clock(), now_ms=lambda: now_ms[0]) as standby:
        await has(standby, running.outbox.last)
        now_ms[0] += step_ms
        await taken_over(standby, folder / "second")
    return now_ms[0] + read_record(folder / "second").settle.ahead_ms - (last_ms + BY_HAND_MS)


async def ids_that_begin_below_the_primarys_clock(folder, objects):
    """Take over from a primary whose clock is an hour ahead, and whose segments do not show that, since all were late.

    Return by how many milliseconds ids may be given twice.
    """
    present_ms, hour_ms = 2_000_000_000_000, 3_600_000  # later than the commits, which have the time of this machine
    async with primary(folder / "data", objects, now_ms=lambda: present_ms + hour_ms, finish=False) as running:
        await running.write(3)
        await running.counted()
    async with following(folder / "second", objects, now_ms=present_ms) as standby:
        await has(standby, running.outbox.last)
        await taken_over(standby, folder / "second")
    first_ms = present_ms + read_record(folder / "second").settle.ahead_ms
    return max(0, present_ms + hour_ms + BY_HAND_MS - first_ms)


async def rows_that_a_refused_write_loses(folder, objects):
    """Refuse one write of a standby; return how many rows it then lacks."""
    refused = []
    apply = LevelDBStore.apply

    async def applied(store, operations):
        if not refused and len(operations) > 1:
            refused.append(True)
            raise StoreError("the disk says no")
        await apply(store, operations)

    async with primary(folder / "data", objects) as running:
        await running.write(5)
        await running.counted()
        async with following(folder / "second", objects) as standby:
            await has(standby, running.outbox.last)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(LevelDBStore, "apply", applied)
                await running.write(5)
                await running.counted()
                await until(lambda: refused)
                await has(standby, running.outbox.last)
        wanted = await rows_of(running.store)
    assert refused
    return len(wanted.items() - (await rows_in(folder / "second")).items())


async def test_a_standby_is_not_rebuilt_if_a_base_was_made_in_the_log_that_its_take_over_read(tmp_path, objects):
    assert await builds_with_a_base_in_the_tail(tmp_path, objects) == 1


async def test_a_standby_is_not_rebuilt_if_a_base_was_made_after_it_read_to_the_end(tmp_path, objects):
    assert await builds_with_a_base_since_the_end_was_read(tmp_path, objects) == 1


async def test_the_lead_of_the_primarys_clock_survives_another_start_of_the_standby(tmp_path, objects):
    assert await ahead_after_another_start(tmp_path, objects) == 0


async def test_ids_after_a_take_over_begin_after_those_that_the_primary_may_still_have_acknowledged(tmp_path, objects):
    assert await ids_that_begin_too_early(tmp_path, objects) == 0


async def test_ids_after_a_take_over_begin_after_the_primarys_clock_though_every_segment_was_read_late(
    tmp_path, objects
):
    assert await ids_that_begin_below_the_primarys_clock(tmp_path, objects) == 0


async def test_a_standby_whose_disk_has_refused_a_write_applies_the_same_segments_again(tmp_path, objects):
    assert await rows_that_a_refused_write_loses(tmp_path, objects) == 0


#: Scenario, module, mistake, the correct code, the wrong code.
MISTAKES = [
    (
        builds_with_a_base_in_the_tail,
        standby_module,
        "a base after the place where the take-over began means that the end was removed",
        "if await has_base_after(self._objects, reached, below=place.epoch):",
        "if await has_base_after(self._objects, before, below=place.epoch):",
    ),
    (
        builds_with_a_base_since_the_end_was_read,
        standby_module,
        "a base after the end means that the next segment was removed",
        "if await is_removed(self._objects, self._log.place):",
        "if await has_base_after(self._objects, self._log.place):",
    ),
    (
        ahead_after_another_start,
        followed_log,
        "the clock's lead is not read again",
        "self.time_ms, self._clock.ahead_ms = found.time_ms, max(self._clock.ahead_ms, found.ahead_ms)",
        "self.time_ms = found.time_ms",
    ),
    (
        ids_that_begin_too_early,
        standby_module,
        "segments are assumed to be read at the moment of their last commit",
        'late_s = LATE_S + LOOK_EVERY_S if reason == "by hand" else LATE_S',
        "late_s = 0.0",
    ),
    (
        ids_that_begin_too_early,
        standby_module,
        "a primary is assumed to end at the moment of a take-over by hand",
        'late_s = LATE_S + LOOK_EVERY_S if reason == "by hand" else LATE_S',
        "late_s = LATE_S",
    ),
    (
        ids_after_a_step,
        standby_clock,
        "the clocks are compared by the time of day",
        "return self._zero_ms + round(1000 * self.now_s())",
        "return self.now_ms()",
    ),
    (
        ids_that_begin_below_the_primarys_clock,
        lease_watch,
        "the clock in the lease is not looked at",
        "        if lease is not None and lease.clock_ms is not None:\n",
        "        if False:\n",
    ),
    (
        rows_that_a_refused_write_loses,
        followed_log,
        "the place is recorded before the segments are applied",
        "            if batch.segments:\n"
        "                await self.apply(store, batch.segments)\n"
        "            self.place = batch.place\n",
        "            self.place = batch.place\n"
        "            await store.apply([self._row()])\n"
        "            if batch.segments:\n"
        "                await self.apply(store, batch.segments)\n",
    ),
]


#: The class of each module that ``Standby`` uses.
CLASSES = {
    standby_module: "Standby",
    followed_log: "FollowedLog",
    lease_watch: "LeaseWatch",
    standby_clock: "StandbyClock",
}


@pytest.mark.parametrize(("course", "module", "name", "right", "wrong"), MISTAKES, ids=[each[2] for each in MISTAKES])
async def test_each_planted_mistake_is_found(tmp_path, objects, monkeypatch, course, module, name, right, wrong):
    wanted = await course(tmp_path / "right", MemoryObjects())
    made = planted(module, name, right, wrong)
    made.PAUSE_S = made.IDLE_S = 0.01
    made.BuildAgain = followed_log.BuildAgain  # which the other modules catch
    monkeypatch.setattr(standby_module, CLASSES[module], getattr(made, CLASSES[module]))
    assert await course(tmp_path / "wrong", objects) != wanted


async def test_the_lead_of_the_primarys_clock_survives_a_rebuild_of_the_standby(tmp_path, objects):
    async with primary(tmp_path / "data", objects, finish=False) as running:
        await running.write(3)
        await running.counted()
        async with following(tmp_path / "second", objects, clock=Clock()) as standby:
            await running.write(1)
            await running.counted()
            await has(standby, running.outbox.last)
            ahead_ms = standby._clock.ahead_ms
        for _ in range(3):  # in segments of their own
            await running.write()
            await running.counted()
        base = await running.copy._make_base()
        running.copy.lease.serve(())
        await until(lambda: lease_of(objects).counted == running.outbox.last)
    for name in list(objects.found):
        if log_name(base.place.epoch, 1) <= name < log_name(base.place.epoch, base.place.number - 1):
            del objects.found[name]
    async with following(tmp_path / "second", objects, clock=Clock(), now_ms=9_000_000) as standby:
        await has(standby, running.outbox.last)
    assert ahead_ms > 0
    assert read_record(tmp_path / "second").ahead_ms == ahead_ms


@pytest.mark.parametrize("step_ms", [-120_000, 3_600_000])
async def test_a_step_of_the_standbys_clock_does_not_change_when_ids_begin(tmp_path, objects, step_ms):
    assert await ids_after_a_step(tmp_path, objects, step_ms) == 0


@pytest.mark.parametrize("step_ms", [-120_000, 120_000])
async def test_a_step_of_the_standbys_clock_does_not_change_when_ids_begin_if_only_the_lease_shows_the_primarys_clock(
    tmp_path, objects, step_ms
):
    present_ms, hour_ms = 2_000_000_000_000, 3_600_000
    async with primary(tmp_path / "data", objects, now_ms=lambda: present_ms + hour_ms, finish=False) as running:
        await running.write(3)
        await running.counted()
    get, clock, now_ms = objects.get, Clock(), [present_ms]

    async def without_lease(name):
        if name == LEASE:
            raise ObjectStoreUnavailable("no answer")
        return await get(name)

    objects.get = without_lease
    async with following(tmp_path / "second", objects, clock=clock, now_ms=lambda: now_ms[0]) as standby:
        await has(standby, running.outbox.last)
        assert standby._watch.lease is None
        now_ms[0] += step_ms
        objects.get = get
        clock.ticks()
        await until(lambda: standby._watch.lease is not None)
        seen_ms = standby._clock.steady_ms
        await taken_over(standby, tmp_path / "second")
        passed_ms = standby._clock.steady_ms - seen_ms
    first_ms = now_ms[0] + read_record(tmp_path / "second").settle.ahead_ms
    assert first_ms == present_ms + hour_ms + BY_HAND_MS + passed_ms


async def test_a_directory_with_a_store_of_its_own_does_not_become_a_standbys(tmp_path, objects):
    async with primary(tmp_path / "data", objects) as running:
        await running.counted()
    async with await LevelDBStore.open(tmp_path / "other", TINY):
        pass
    with pytest.raises(StoreUnusable, match="cannot become a standby"):
        await a_standby(tmp_path / "other", objects).run()


async def test_a_planned_switch_ends_the_log_cleanly_and_the_primary_can_follow_at_once(tmp_path, objects):
    async with primary(tmp_path / "data", objects, settings=LEASED) as running:
        await running.write(5)
        await running.counted()
        last = running.outbox.last
        async with following(tmp_path / "second", objects, replace(SETTINGS, lease_s=10.0)) as standby:
            await has(standby, last)
            await running.write(2)
            await running.copy.finish()
            await running.copy.hand_over()
            await until(lambda: not read_record(tmp_path / "second").standby)
            wanted = await rows_of(running.store)
    record = read_record(tmp_path / "second")
    assert (record.settle, record.place.commit, record.place.clean) == (None, last + 2, True)
    assert await rows_in(tmp_path / "second") == wanted
    async with promoted(tmp_path / "second", objects) as running:
        running.at = 100
        await running.write(3)
        await running.counted()
        async with following(tmp_path / "data", objects) as standby:
            await has(standby, last + 5)
            wanted = await rows_of(running.store)
    wanted.pop((Table.METADATA, FOLLOWED_KEY), None)
    assert await rows_in(tmp_path / "data") == wanted


async def test_a_standby_reads_the_lease_as_soon_as_the_primary_has_sealed_the_log_for_it(
    tmp_path, objects, monkeypatch
):
    clock, settings = Clock(), replace(SETTINGS, lease_s=10.0)
    async with primary(tmp_path / "data", objects, settings=LEASED) as running:
        await running.write(5)
        await running.counted()
        async with following(tmp_path / "second", objects, settings, clock) as standby:
            await has(standby, running.outbox.last)
            await registered(running, objects, clock)
            monkeypatch.setattr(lease_watch, "IDLE_S", 2.0)
            clock.ticks()
            await running.copy.finish()
            await running.copy.hand_over()
            await until(lambda: not read_record(tmp_path / "second").standby)  # at the same moment


async def test_a_former_primary_that_takes_over_again_knows_when_its_last_commit_was_made(tmp_path, objects):
    async with primary(tmp_path / "data", objects, settings=LEASED) as running:
        await running.write(3)
        await running.counted()
        running.copy._now_ms = lambda: 5_000_000  # long after its base
        await running.copy.finish()
        await running.copy.hand_over()
        last = running.outbox.last
    async with following(tmp_path / "second", objects) as standby:
        await has(standby, last)
        await taken_over(standby, tmp_path / "second")
    async with promoted(tmp_path / "second", objects):
        pass  # it says that its mode is async, and ends
    async with following(tmp_path / "data", objects, now_ms=5_000_001) as standby:
        await has(standby, last)
        await until(lambda: standby.status.epoch == lease_of(objects).epoch)
        await taken_over(standby, tmp_path / "data")
    assert read_record(tmp_path / "data").settle.cut_ms == 5_000_000


async def base_without_more_log(directory, objects, settings):
    """Make a log whose newest base is in the last epoch, with no commit after it; return its last commit."""
    async with primary(directory, objects, settings=settings, finish=False) as running:
        await running.write(3)
        await running.counted()
    async with primary(directory, objects, settings=settings, finish=False) as running:
        base = await running.copy._make_base()
        assert base.until == running.outbox.last
        return running.outbox.last


async def test_a_standby_with_a_base_and_no_later_segment_goes_by_the_mode_in_the_log(tmp_path):
    for mode, cut_ms in (("sync", None), ("async", 1_000_000)):
        objects, folder = MemoryObjects(), tmp_path / mode
        last = await base_without_more_log(folder / "data", objects, replace(FAST, mode=mode))
        async with following(folder / "second", objects) as standby:
            await has(standby, last)
            await taken_over(standby, folder / "second")
        settle = read_record(folder / "second").settle
        assert (None if settle is None else settle.cut_ms) == cut_ms


async def test_the_log_says_async_until_the_rules_of_a_restore_are_applied(tmp_path, objects):
    async with primary(tmp_path / "data", objects, finish=False) as running:
        await running.write(3)
        await running.counted()
        last = running.outbox.last
    async with following(tmp_path / "second", objects) as standby:
        await has(standby, last)
        await taken_over(standby, tmp_path / "second")
    async with promoted(tmp_path / "second", objects, settings=replace(FAST, mode="sync")) as running:
        running.at = 100
        await running.write()
        await running.counted()
        assert newest_mode(objects) == ASYNC
        assert running.copy.lease.terms.clock_ms == read_record(tmp_path / "second").settle.first_ms(1_000_000)
        await running.copy.settled()
        assert running.copy.lease.terms.clock_ms == 1_000_000
        await running.write()
        await running.counted()
        assert newest_mode(objects) == SYNC


def newest_mode(objects):
    names = [name for name, (data, _) in objects.found.items() if name.startswith("log/") and is_segment(data)]
    return decode_segment(objects.found[max(names)][0]).mode


@pytest.mark.parametrize("seed", range(8))
async def test_no_counted_commit_is_lost_across_take_overs_with_lost_answers(tmp_path, seed, monkeypatch):
    monkeypatch.setattr(carry, "PAUSES_S", (0.001, 0.01))
    random, objects = Random(seed), FaultyObjects(seed)
    names, counted = ["a", "b"], 0
    run = partial(primary, tmp_path / "a", objects)
    for turn in range(4):
        async with run(finish=random.random() < 0.3) as running:
            running.at = 1000 * turn
            for _ in range(random.randrange(1, 8)):
                await running.write(random.randrange(1, 4))
                await trio.sleep(random.choice([0, 0.001, 0.02]))
            await running.counted()
            counted, wanted = running.outbox.last, await rows_of(running.store)
        wanted.pop((Table.METADATA, FOLLOWED_KEY), None)
        name = names[(turn + 1) % 2] + str(turn)
        async with following(tmp_path / name, objects) as standby:
            await has(standby, counted)
            await taken_over(standby, tmp_path / name)
        assert await rows_in(tmp_path / name) == wanted
        run = partial(promoted_with, tmp_path / name, objects)
    objects.calm = True
    assert (await verify(objects)).ok


@asynccontextmanager
async def promoted_with(directory, objects, *, finish):
    record = read_record(directory)
    continues = record.place.commit if record.shift is None else None
    outbox = Outbox(max_bytes=1 << 30, full_bytes=1000, shift=record.shift or 0, continues=continues)
    async with primary(directory, objects, finish=finish, outbox=outbox) as running:
        yield running


async def test_a_standby_continues_after_its_disk_has_refused_a_write(tmp_path, objects, monkeypatch):
    async with primary(tmp_path / "data", objects) as running:
        await running.write(5)
        await running.counted()
        async with following(tmp_path / "second", objects) as standby:
            await has(standby, running.outbox.last)
            real, refused = Committer._write_batch, []

            def write_batch(committer, *args):
                if not refused and committer._shipper is None:  # the standby's
                    refused.append(True)
                    raise StoreError("the disk says no")
                real(committer, *args)

            monkeypatch.setattr(Committer, "_write_batch", write_batch)
            await running.write(5)
            await running.counted()
            await has(standby, running.outbox.last)
            assert refused


@pytest.mark.parametrize("fails", ["recover", "apply"])
async def test_a_standby_that_can_apply_nothing_shows_how_far_the_primary_is_and_refuses_a_take_over(
    tmp_path, objects, monkeypatch, fails
):
    clock, real, is_full = Clock(), getattr(LevelDBStore, fails), False

    async def refused(store, *args):
        if is_full:
            raise StoreError("no space left on device")
        return await real(store, *args)

    monkeypatch.setattr(LevelDBStore, fails, refused)
    settings = replace(SETTINGS, lease_s=10.0)
    async with (
        primary(tmp_path / "data", objects, settings=LEASED) as running,
        following(tmp_path / "second", objects, settings, clock) as standby,
    ):
        await running.write(3)
        await running.counted()
        last = running.outbox.last
        await has(standby, last)
        await registered(running, objects, clock)
        await until(lambda: clock.ticks() and standby.status.automatic)
        is_full = True
        if fails == "recover":
            monkeypatch.setattr(followed_log, "read_all", unreadable(followed_log.read_all))
        await running.write(5)
        await running.counted()
        running.copy.lease.serve(())
        await until(lambda: clock.ticks() and "no space" in standby.status.error and standby.status.lag_commits == 5)
        assert (standby.status.automatic, standby.status.caught_up) == (False, False)
        with pytest.raises(TakeOverLost, match="no space"):
            await standby.take_over()
        is_full = False
        await has(standby, running.outbox.last)
        assert read_record(tmp_path / "second").standby


def unreadable(read_all):
    """Let the first call fail, so that the standby reopens its store."""
    calls = []

    async def read(*args):
        calls.append(args)
        if len(calls) == 1:
            raise StoreError("one failure")
        return await read_all(*args)

    return read


async def test_a_take_over_whose_client_has_given_up_is_not_retried(tmp_path, objects):
    async with primary(tmp_path / "data", objects) as running:
        await running.write(5)
        await running.counted()
        standby = a_standby(tmp_path / "second", objects)
        async with trio.open_nursery() as asking:
            asking.start_soon(standby.take_over)
            await trio.testing.wait_all_tasks_blocked()
            asking.cancel_scope.cancel()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(standby.run)
            with trio.fail_after(PATIENCE_S):
                await has(standby, running.outbox.last)
                await running.write(5)
                await running.counted()
                await has(standby, running.outbox.last)  # it follows, and is no primary
            nursery.cancel_scope.cancel()


async def test_a_take_over_that_the_object_store_does_not_allow_in_time_is_refused_with_the_reason(tmp_path, objects):
    async with primary(tmp_path / "data", objects) as running:
        await running.write(5)
        await running.counted()
        async with following(tmp_path / "second", objects) as standby:
            await has(standby, running.outbox.last)
            objects.away = True
            await until(lambda: standby.status.error)
            with pytest.raises(TakeOverLost, match=standby.status.error):
                await standby.take_over(0.05)
            objects.away = False
            await running.write(5)
            await running.counted()
            await has(standby, running.outbox.last)  # it follows, and is no primary


async def test_an_error_page_in_place_of_the_lease_ends_neither_the_primary_nor_the_standby(tmp_path, objects):
    clock = Clock()
    async with primary(tmp_path / "data", objects, settings=LEASED) as running:
        await running.write(5)
        await running.counted()
        async with following(tmp_path / "second", objects, replace(SETTINGS, lease_s=10.0), clock) as standby:
            await has(standby, running.outbox.last)
            await registered(running, objects, clock)
            get = objects.get

            async def error_page(name):
                found = await get(name)
                return Fetched(b"<html>503</html>", found.etag) if name == LEASE else found

            def both_have_read_it():
                clock.ticks()
                running.copy.lease.serve(running.copy.lease.urls)  # renews at once
                errors = standby.status.error, running.copy.lease._error.why
                return all("is not a JSON object" in error for error in errors)

            objects.get = error_page
            await until(both_have_read_it)
            objects.get = get
            await registered(running, objects, clock)
            await running.write(5)
            await running.counted()
            await has(standby, running.outbox.last)
            assert standby.status.epoch == running.copy.status.epoch


async def test_a_take_over_that_fails_after_its_seal_says_that_its_outcome_is_not_known(tmp_path, objects):
    async with primary(tmp_path / "data", objects, finish=False) as running:
        await running.write(5)
        await running.counted()
    create, get = objects.create, objects.get

    async def refused(name):
        raise ObjectStoreRefused("the credentials were withdrawn")

    async def create_once(name, data):
        verdict = await create(name, data)
        if not is_segment(data):
            objects.get = refused
            return Verdict.UNKNOWN
        return verdict

    async with following(tmp_path / "second", objects) as standby:
        await has(standby, running.outbox.last)
        objects.create = create_once
        with pytest.raises(OutcomeUnknown, match="the credentials were withdrawn"):
            await standby.take_over()
        objects.create, objects.get = create, get


async def test_a_take_over_that_has_sent_its_seal_says_that_its_outcome_is_not_known(tmp_path, objects):
    async with primary(tmp_path / "data", objects, finish=False) as running:
        await running.write(5)
        await running.counted()
    create, sent = objects.create, trio.Event()

    async def unanswered(name, data):
        if not (sent.is_set() or is_segment(data)):
            sent.set()
            await trio.sleep_forever()
        return await create(name, data)

    async with following(tmp_path / "second", objects) as standby:
        await has(standby, running.outbox.last)
        objects.create = unanswered
        with pytest.raises(OutcomeUnknown):
            await standby.take_over(0.5)
        assert sent.is_set()


async def test_a_take_over_whose_client_left_while_the_object_store_was_unavailable_deposes_no_primary(
    tmp_path, objects, monkeypatch
):
    async with primary(tmp_path / "data", objects) as running:
        await running.write(5)
        await running.counted()
        async with following(tmp_path / "second", objects) as standby:
            await has(standby, running.outbox.last)

            async def goes_away(where, place):
                found = await is_removed(where, place)
                objects.away = True  # the attempt begins now
                return found

            monkeypatch.setattr(standby_module, "is_removed", goes_away)
            async with trio.open_nursery() as asking:
                asking.start_soon(standby.take_over)
                await until(lambda: objects.away)
                asking.cancel_scope.cancel()
            objects.away = False
            monkeypatch.setattr(standby_module, "is_removed", is_removed)
            await running.write(5)
            await running.counted()
            await has(standby, running.outbox.last)  # it follows, and is no primary
            assert lease_of(objects).run == running.copy._run


async def test_a_take_over_by_hand_that_may_not_write_the_seal_is_tried_once(tmp_path, objects):
    create = objects.create

    async def without_seals(name, data):
        if name.startswith("log/") and not is_segment(data):
            raise ObjectStoreRefused("no right to seal")
        return await create(name, data)

    async with primary(tmp_path / "data", objects) as running:
        await running.write(5)
        await running.counted()
        async with following(tmp_path / "second", objects) as standby:
            await has(standby, running.outbox.last)
            objects.create = without_seals
            with pytest.raises(TakeOverLost, match="no right to seal"):
                await standby.take_over()
            await running.write(5)
            await running.counted()
            await has(standby, running.outbox.last)
            assert lease_of(objects).epoch == running.copy.status.epoch + 1


async def test_no_standby_takes_over_after_its_primary_has_left_the_copy(tmp_path, objects):
    clock = Clock()
    with pytest.raises(ExceptionGroup) as ended:  # noqa: PT012
        async with following(tmp_path / "second", objects, replace(SETTINGS, lease_s=10.0), clock) as standby:
            async with primary(tmp_path / "data", objects, settings=LEASED) as running:
                await running.write(3)
                await running.counted()
                await has(standby, running.outbox.last)
                await registered(running, objects, clock)
            await leave_copy(objects, tmp_path / "data", read_record(tmp_path / "data"))
            await has_seen_the_lease(standby, objects, clock)
            clock.now_s += 20.0
            await until(lambda: clock.ticks() and not read_record(tmp_path / "second").standby)
    assert ended.group_contains(StoreUnusable, match="allows no standby")
    assert read_record(tmp_path / "second").standby


async def test_two_clients_that_ask_for_a_take_over_get_the_same_epoch(tmp_path, objects):
    async with primary(tmp_path / "data", objects) as running:
        await running.write(5)
        await running.counted()
        wanted = running.outbox.last
    epochs = []
    async with following(tmp_path / "second", objects) as standby:
        await has(standby, wanted)

        async def ask():
            epochs.append(await standby.take_over())

        async with trio.open_nursery() as asking:
            asking.start_soon(ask)
            asking.start_soon(ask)
    assert len(epochs) == 2
    assert len(set(epochs)) == 1
