"""The lease: no standby takes over by itself while the primary may still acknowledge, whatever is slow or lost; and a
primary without a standby never stops.

A simulation with the real code and its own clock. Standbys start, register, freeze and end, also during a take-over; the
primary is cut off, ends, or starts again and allows no standby. For each rule a mistake that breaks it is planted.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
import trio
import trio._core._run as internals
from hypothesis import settings
from trio.testing import MockClock

from actors import lease, lease_hold, lease_watch, standby
from actors.followed_log import FollowedLog
from actors.last_error import LastError
from actors.settings import ReplicationConfig
from actors.standby_clock import StandbyClock
from storage.base import StoreUnusable
from storage.replication import protocol
from storage.replication.carry import ObjectStoreUnavailable, carry_out
from storage.replication.notices import LEASE, Lease, decode_lease, encode_lease, log_name
from storage.replication.protocol import BucketWentBack, Follower, ReignOver, TakeOverLost, Verdict
from storage.replication.record import RecordFile
from storage.replication.segment import ASYNC, is_segment
from tests.planted import planted, seeds_for
from tests.storage.replication.objects import MemoryObjects

#: Runs of each kind; ``make torture`` does many more.
SEEDS = 20 if settings.get_current_profile_name() == "house" else 1_000
#: Enough for each planted mistake.
SEEDS_OF_MISTAKES = 400
#: Seeds that find a mistake only after others. A normal run tries them first; if the code has changed, the search goes
#: through all seeds again. ``make torture`` always searches.
QUICK_SEEDS = {
    "a lease that is over is valid": 146,
    "the standby waits for less than the time of the lease": 66,
    "a standby takes over from a primary that allows none any more": 46,
    "a start that allows no standby leaves the lease as it is until the first renewal": 47,
    "a lease that was renewed is replaced": 40,
    "a standby reads to the end of the log after it has looked at the lease": 9,
    "a lease that was taken back is valid before a segment is stored": 15,
    "a lease that was written again is valid before a segment is stored": 7,
}
PERIOD_S = 10.0
RUN = bytes(16)
#: How long the object store may take on either way.
SLOW, MILD = [0.0, 0.0, 0.01, 0.3, 1.5, 9.0, 30.0], [0.0, 0.0, 0.0, 0.01, 0.1, 2.0]
SETTINGS = ReplicationConfig(lease_s=PERIOD_S)


class SlowObjects(MemoryObjects):
    """Shares its objects with others. Requests land and are answered late, or not at all; a cancelled one may land."""

    def __init__(self, shared, random, nursery, times):
        super().__init__()
        self.found, self._random, self._nursery = shared.found, random, nursery
        self._shared, self._times = shared, times
        self.connected = trio.Event()
        self.connected.set()

    def cut_off(self):
        """Let no request land before ``connected`` is set."""
        self.connected = trio.Event()

    async def get(self, name):
        found = await self._late(self._shared.get, name)
        if isinstance(found, Verdict):
            raise ObjectStoreUnavailable("no answer")
        return found

    async def create(self, name, data):
        return await self._late(self._shared.create, name, data)

    async def exchange(self, name, data, etag):
        return await self._late(self._shared.exchange, name, data, etag)

    async def _late(self, call, *arguments):
        answer, done = [Verdict.UNKNOWN], trio.Event()

        async def land():
            await trio.sleep(self._some_time())
            await self.connected.wait()
            answer[0] = await call(*arguments)
            await trio.sleep(self._some_time())
            if self._random.random() < 0.02:
                answer[0] = Verdict.UNKNOWN
            done.set()

        self._nursery.start_soon(land)
        await done.wait()
        return answer[0]

    def _some_time(self):
        return self._random.choice(self._times)


class FreezingObjects(SlowObjects):
    """The objects as seen by a process that is sometimes frozen before a request."""

    async def _late(self, call, *arguments):
        await trio.sleep(self._random.choice([0.0, 0.0, 20.0, 40.0]))
        return await super()._late(call, *arguments)


class CarelessObjects(MemoryObjects):
    """Accepts two replacements of an object that overlap, and returns the former contents as the new version."""

    def __init__(self, random):
        super().__init__()
        self._random = random
        self._coming = ""

    async def get(self, name):
        found = await super().get(name)
        return replace(found, etag=self._coming) if found is not None and self._coming else found

    async def exchange(self, name, data, etag):
        await trio.sleep(self._random.uniform(0, 0.2))
        found = await self.get(name)
        if found is None or found.etag != etag:
            return Verdict.REFUSED
        self._versions += 1
        coming = self._coming = str(self._versions)
        await trio.sleep(self._random.uniform(0, 1))
        self.found[name] = (data, coming)
        if self._coming == coming:
            self._coming = ""
        return Verdict.DONE


@dataclass(frozen=True)
class Code:
    """The modules of a course: the real ones, or one with a mistake."""

    lease: ModuleType = lease
    lease_hold: ModuleType = lease_hold
    lease_watch: ModuleType = lease_watch
    standby: ModuleType = standby
    protocol: ModuleType = protocol


class Site:
    """A primary and its standbys, on one object store."""

    def __init__(self, code: Code, random: Random, nursery: trio.Nursery, times: list[float]) -> None:
        self.code, self.random, self.nursery, self.times = code, random, nursery, times
        self.shared = MemoryObjects()
        self.wrong: list[str] = []
        self.taken = trio.Event()
        #: The keeper of the primary that serves; None while none does.
        self.serves: Any = None
        #: The log of the primary; None if the course has only leases.
        self.reign: Any = None
        self.tried = trio.Event()
        self.is_sealed = False
        self.allows_standby = True
        #: True while an operator asks for a take-over.
        self.by_hand = False
        self.keeping = trio.CancelScope()
        self.attempts: dict[bytes, str] = {}
        exchange = self.shared.exchange

        async def watched(name, data, etag):
            """At the moment at which a take-over begins, the primary must not acknowledge."""
            before, lease = decode_lease(self.shared.found[LEASE][0]), decode_lease(data)
            verdict = await exchange(name, data, etag)
            if verdict is Verdict.DONE and (reason := self.attempts.get(lease.run)):
                if not before.allows_standby or (self.serves is not None and not self.allows_standby):
                    self.wrong.append(f"{reason}: the primary allows none")
                elif reason == "lease" and self.serves is not None and self.serves.holds:
                    self.wrong.append(f"{trio.current_time()}: the primary may acknowledge")
                self.tried.set()
                if self.reign is None:
                    self.taken.set()
            return verdict

        create = self.shared.create

        async def watched_create(name, data):
            """At the moment at which the log of the primary is sealed, it must not acknowledge."""
            verdict = await create(name, data)
            if verdict is Verdict.DONE and self.reign is not None and not is_segment(data):
                self.is_sealed = True
                self.taken.set()
                if self.serves.holds:
                    self.wrong.append(f"{trio.current_time()}: the primary may acknowledge after the seal")
            return verdict

        self.shared.exchange, self.shared.create = watched, watched_create

    def objects(self, times=None):
        return SlowObjects(self.shared, self.random, self.nursery, times or self.times)

    async def start(self, run=RUN, *, allows_standby=True, has_log=False):
        """Start a primary, as its first start or as the next one on its directory."""
        self.keeping.cancel()
        self.serves, self.keeping = None, trio.CancelScope()
        self.at = self.objects()
        keeper = a_keeper(self.at, module=self.code.lease, clock=trio.current_time, allows_standby=allows_standby)
        begun_s, protocol = trio.current_time(), self.code.protocol
        if has_log:
            place = await carry_out(self.at, protocol.take_over(run, protocol.ROOT, terms=keeper.terms))
            epoch, self.reign = place.epoch, protocol.Reign(place, run, ASYNC, has_base=True)
            await self._store(self.reign.open(1, 0))
        else:
            epoch = await carry_out(self.at, protocol.choose_epoch(run, 0, "first", terms=keeper.terms))
        keeper.began(epoch, run, "first", begun_s)
        self.serves, self.allows_standby = keeper, allows_standby
        self.nursery.start_soon(self._keep, keeper, self.keeping)
        return keeper

    async def _keep(self, keeper, keeping):
        keeper.check_log = self._check
        with keeping:
            try:
                await keeper.run(self._look, self._secure)
            except (ReignOver, BucketWentBack):
                keeper.close()

    async def _check(self):
        await carry_out(self.at, self.code.protocol.check_place(self.reign.logged_place))
        await self._look()

    def set_back(self, data):
        """Let the lease become an earlier one."""
        self.shared._put(LEASE, data)

    async def _store(self, upload):
        await carry_out(self.at, self.code.protocol.store(upload))
        self.reign.stored(upload.number)

    async def _look(self):
        await trio.lowlevel.checkpoint()
        if self.reign is None:
            return
        with suppress(ObjectStoreUnavailable):
            if await self.at.get(log_name(self.reign.epoch, self.reign.place.number)) is not None:
                raise ReignOver("another process has sealed the log")

    async def _secure(self):
        await trio.lowlevel.checkpoint()
        if self.reign is not None:
            await self._store(self.reign.announce(0))

    def kill(self):
        self.keeping.cancel()
        self.serves = None

    async def follow(self, starts_s, *, lives_s=1e9, freezes=True, settings=SETTINGS):
        """Act as a standby that has read the log."""
        await trio.sleep(starts_s)
        objects = self.objects(MILD)
        watch = a_watch(objects, settings, self.code.lease_watch)
        with suppress(StoreUnusable), trio.move_on_after(lives_s):
            while not self.taken.is_set():
                if self.by_hand:
                    reason, self.by_hand = "by hand", False
                else:
                    await watch.look()
                    reason = watch.reason(())
                if reason:
                    await (self.take_over if self.reign is None else self.seal)(watch, objects, reason)
                if freezes and self.random.random() < 0.003:
                    await trio.sleep(self.random.choice([20.0, 90.0]))  # frozen
                await trio.sleep(0.5)

    async def take_over(self, watch, objects, reason):
        run = self.random.randbytes(16)
        self.attempts[run] = reason
        follower = Follower(watch.lease if reason != "by hand" else None, watch.registration.id)
        with suppress(TakeOverLost):
            await carry_out(objects, self.code.protocol.choose_epoch(run, 1, follower=follower))

    async def seal(self, watch, objects, reason):
        """Take over from a primary that has a log, and freeze at times."""
        run, protocol = self.random.randbytes(16), self.code.protocol
        self.attempts[run] = reason
        place = await carry_out(objects, protocol.follow(protocol.ROOT, None, set()))
        follower = Follower(watch.lease if reason != "by hand" else None, watch.registration.id)
        freezing = FreezingObjects(self.shared, self.random, self.nursery, MILD)
        with suppress(TakeOverLost, ReignOver):
            await carry_out(freezing, protocol.take_over(run, place, known=place.epoch, follower=follower))


def a_keeper(objects, *, clock, module=lease, **options):
    settings = {"period_s": PERIOD_S, "allows_standby": True, "counted": lambda: 1, "now_ms": lambda: 0}
    return module.LeaseKeeper(objects, clock=clock, **(settings | options))


async def a_primary(objects, clock):
    """Return the keeper of a primary that has begun."""
    keeper = a_keeper(objects, clock=clock)
    epoch = await carry_out(objects, protocol.choose_epoch(RUN, 0, "first", terms=keeper.terms))
    keeper.began(epoch, RUN, "first", clock())
    return keeper


def a_watch(objects, settings, module=lease_watch):
    """Return the watch of a standby that has read the log."""
    clock, error = StandbyClock(lambda: 0, trio.current_time), LastError(logging.getLogger(__name__), "unread")
    log = FollowedLog(objects, RecordFile(Path()), clock, error)
    log.caught_up = True
    return module.LeaseWatch(objects, log, clock, error, settings.lease_s)


async def nothing():
    await trio.lowlevel.checkpoint()


@asynccontextmanager
async def a_site(code, seed, times=(0.0, 0.01, 0.1)):
    """Make a site, and end all its tasks after the block."""
    async with trio.open_nursery() as nursery:
        yield Site(code, Random(seed), nursery, times)
        nursery.cancel_scope.cancel()


async def course(code, seed):
    """Let anything happen until a take-over begins; return what is wrong then."""
    async with a_site(code, seed, SLOW) as site:
        await site.start()
        site.nursery.start_soon(site.follow, site.random.uniform(0, 60))
        if site.random.random() < 0.5:
            site.nursery.start_soon(
                partial(site.follow, site.random.uniform(0, 60), lives_s=site.random.uniform(10, 90))
            )

        async def disturb():
            while True:
                await trio.sleep(site.random.uniform(5, 60))
                what = site.random.random()
                if what < 0.5:
                    cut = site.at
                    cut.cut_off()
                    await trio.sleep(site.random.choice([5.0, 30.0, 200.0]))
                    cut.connected.set()
                elif what < 0.7:
                    await site.start(site.random.randbytes(16), allows_standby=site.random.random() < 0.3)
                    site.by_hand = site.random.random() < 0.5

        site.nursery.start_soon(disturb)
        with trio.move_on_after(300):
            await site.taken.wait()
    return site.wrong


async def slow(code, seed):
    """Let the object store be slow until a take-over begins; return what is wrong then."""
    async with a_site(code, seed, SLOW[1:]) as site:
        await site.start()
        site.nursery.start_soon(partial(site.follow, 0.0, freezes=False))
        with trio.move_on_after(300):
            await site.taken.wait()
    return site.wrong


async def orphaned(code, seed):
    """End a primary that has two standbys: one takes over in time."""
    async with a_site(code, seed) as site:
        keeper = await site.start()
        for _ in range(2):
            site.nursery.start_soon(partial(site.follow, site.random.uniform(0, 10), freezes=False))
        await trio.sleep(site.random.uniform(60, 90))
        was_automatic = keeper.is_automatic
        site.kill()
        with trio.move_on_after(60):
            await site.taken.wait()
    found = [] if was_automatic else ["no standby is registered after a minute"]
    return found if site.taken.is_set() else [*found, "no standby has taken over"]


async def regained(code, seed):
    """End a process between the lease and the seal: the primary gets its lease back, though standbys register."""
    async with a_site(code, seed) as site:
        keeper = await site.start()
        for _ in range(2):
            by_hand = partial(
                site.follow, site.random.uniform(0, 10), freezes=False, settings=ReplicationConfig(lease_s=0)
            )
            site.nursery.start_soon(by_hand)
        await trio.sleep(60)
        await carry_out(site.shared, code.protocol.choose_epoch(site.random.randbytes(16), 1, "other"))
        await trio.sleep(25)  # long enough for one rival, but not for several
        lease = decode_lease(site.shared.found[LEASE][0])
    return [] if keeper.holds and lease.run == RUN else ["the primary no longer has a lease"]


async def awakened(code, seed):
    """Freeze a standby in its take-over until the primary has its lease again: then it does not seal the log."""
    async with a_site(code, seed) as site:
        keeper = await site.start(has_log=True)
        site.nursery.start_soon(partial(site.follow, 0.0, freezes=False))
        await trio.sleep(60)
        site.at.cut_off()
        with trio.move_on_after(60):
            await site.tried.wait()
        await trio.sleep(site.random.choice([0.0, 5.0, 15.0]))
        site.at.connected.set()
        await trio.sleep(200)
    return [*site.wrong, "the primary acknowledges after the seal"] if site.is_sealed and keeper.holds else site.wrong


async def passed_on(code, seed):
    """Let a process that holds the lease begin as the primary, on a server that accepts two replacements at once."""
    random = Random(seed)
    objects, hold, run = CarelessObjects(random), code.lease_hold.LeaseHold(), random.randbytes(16)
    taken = Lease(2, RUN, period_ms=10_000)
    objects._put(LEASE, encode_lease(taken))
    one = code.standby.Standby(objects, Path(), SETTINGS, None, lambda: 0, clock=trio.current_time, hold=hold)
    one._watch.lease, one._take_over.run, one._file.record = taken, RUN, replace(one._file.record, standby=False)
    keeper = a_keeper(objects, module=code.lease, clock=trio.current_time, hold=hold)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.hold)
        await trio.sleep(random.uniform(0, 20))
        async with keeper.holding(run):
            epoch = await carry_out(hold.excluded(objects, PERIOD_S), code.protocol.choose_epoch(run, 2))
            keeper.began(epoch, run, "first", trio.current_time())
            await trio.sleep(30)
        nursery.cancel_scope.cancel()
    lease = decode_lease(objects.found[LEASE][0])
    return [] if (lease.epoch, lease.run) == (3, run) and lease.renewed else [f"the lease is of epoch {lease.epoch}"]


async def set_back(code, seed):
    """Let the lease go back to any earlier one: the primary writes it again, and no standby takes over."""
    async with a_site(code, seed) as site:
        site.shared._put(LEASE, encode_lease(Lease(3, bytes([1]) * 16, period_ms=10_000)))
        earlier = [site.shared.found[LEASE][0]]
        keeper = await site.start(has_log=True)
        site.nursery.start_soon(partial(site.follow, site.random.uniform(0, 10), freezes=False))
        for _ in range(5):
            await trio.sleep(site.random.uniform(5, 30))
            site.set_back(site.random.choice(earlier))
            earlier.append(encode_lease(keeper._lease))
        await trio.sleep(15)
        lease = decode_lease(site.shared.found[LEASE][0])
    is_right = keeper.holds and not site.is_sealed and lease.sign == (4, RUN, keeper._number)
    return site.wrong if is_right else [*site.wrong, "the primary has not written its lease again"]


async def rolled_back(code, seed):
    """Set the whole object store back: the primary finds that in its log, and leaves the lease."""
    async with a_site(code, seed) as site:
        keeper = await site.start(has_log=True)
        await trio.sleep(site.random.uniform(5, 60))
        before = dict(site.shared.found)
        await trio.sleep(site.random.uniform(5, 60))
        await site._secure()  # a later segment
        site.shared.found.clear()
        site.shared.found.update(before)
        await trio.sleep(15)
        is_left = site.shared.found[LEASE] == before[LEASE]
    return [] if is_left and not keeper.holds else ["the primary continues a log that lacks a segment"]


async def awakened_after_the_lease_went_back(code, seed):
    """Freeze a standby in its take-over, and set the lease back to the primary's: the seal ends what it acknowledges."""
    async with a_site(code, seed) as site:
        keeper = await site.start(has_log=True)
        site.nursery.start_soon(partial(site.follow, 0.0, freezes=False))
        await trio.sleep(60)
        earlier = encode_lease(keeper._lease)
        await trio.sleep(5)
        site.at.cut_off()
        with trio.move_on_after(60):
            await site.tried.wait()
        await trio.sleep(site.random.choice([0.0, 1.0, 5.0, 15.0, 25.0]))
        site.set_back(earlier)
        site.at.connected.set()
        await trio.sleep(200)
    return [*site.wrong, "the primary acknowledges after the seal"] if site.is_sealed and keeper.holds else site.wrong


async def loading(code, seed):
    """Let a process take over, and load for a minute: no other standby takes over from it."""
    async with a_site(code, seed) as site:
        await site.start()
        site.nursery.start_soon(partial(site.follow, 0.0, freezes=False))
        await trio.sleep(60)
        site.kill()
        run, objects = site.random.randbytes(16), site.objects(MILD)
        one = code.standby.Standby(objects, Path(), SETTINGS, None, lambda: 0, clock=trio.current_time)
        one._take_over.run = run
        site.nursery.start_soon(one.hold)
        await carry_out(objects, code.protocol.choose_epoch(run, 1, "second"))
        await trio.sleep(60)
        lease = decode_lease(site.shared.found[LEASE][0])
    return [] if lease.run == run else ["another standby has taken over"]


async def distant(code, seed):
    """Let each request take two seconds: a primary with a standby does not refuse everything."""
    async with a_site(code, seed, [1.0]) as site:
        keeper = await site.start()
        site.nursery.start_soon(partial(site.follow, 0.0, freezes=False))
        await trio.sleep(60)
        held = []
        for _ in range(1000):
            await trio.sleep(0.1)
            held.append(keeper.holds)
    # A registration that comes between the two requests of a renewal costs two more, and so some of the time.
    return [] if sum(held) >= 300 else [f"the primary acknowledges {sum(held)} times of 1000"]


async def alone(code, seed):
    """Cut off a primary whose standbys have ended: it does not stop acknowledging."""
    async with a_site(code, seed) as site:
        keeper = await site.start()
        for _ in range(site.random.randrange(3)):
            site.nursery.start_soon(
                partial(site.follow, site.random.uniform(0, 20), lives_s=site.random.uniform(1, 60))
            )
        await trio.sleep(250)
        site.at.cut_off()
        await trio.sleep(100)
    return [] if keeper.holds else ["a primary without a standby acknowledges nothing"]


def wrong(seed, courses, code=None):
    """Return what is wrong in the courses of a seed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(internals, "_ALLOW_DETERMINISTIC_SCHEDULING", True)  # as hypothesis does
        patch.setattr(internals, "_r", Random(seed))
        return [
            found
            for each in courses
            for found in trio.run(each, code or Code(), seed, clock=MockClock(autojump_threshold=0))
        ]


def test_a_standby_tries_only_after_the_primary_has_stopped_acknowledging():
    assert [(seed, found) for seed in range(SEEDS) if (found := wrong(seed, [course, slow]))] == []


def test_in_sync_a_primary_without_renewals_acknowledges_what_counts_and_serves_no_polls():
    now_s = 0.0
    keeper = a_keeper(MemoryObjects(), is_needed=False, clock=lambda: now_s)
    keeper.began(1, RUN, "first", now_s)
    assert (keeper.is_current, keeper.holds) == (True, True)
    now_s = PERIOD_S
    assert (keeper.is_current, keeper.holds) == (False, True)
    keeper.close()
    assert (keeper.is_current, keeper.holds) == (False, False)


def test_one_of_two_registered_standbys_takes_over_once_the_primary_has_ended():
    assert [(seed, found) for seed in range(SEEDS) if (found := wrong(seed, [orphaned]))] == []


def test_a_primary_without_a_standby_acknowledges_while_its_object_store_is_unavailable():
    assert [(seed, found) for seed in range(SEEDS) if (found := wrong(seed, [alone]))] == []


def test_a_primary_gets_its_lease_back_from_a_process_that_ended_before_the_seal():
    assert [(seed, found) for seed in range(SEEDS) if (found := wrong(seed, [regained]))] == []


async def test_a_primary_gets_its_lease_back_from_standbys_that_try_again_and_again():
    now_s, objects = 0.0, MemoryObjects()
    keeper = await a_primary(objects, lambda: now_s)
    for number in range(8):
        # None ever seals, and each follows before the time of the one before it is over.
        if decode_lease(objects.found[LEASE][0]).run != RUN or not number:
            await carry_out(objects, protocol.choose_epoch(bytes([number + 1]) * 16, 1, "other"))
        for _ in range(3):
            now_s += 3.0
            await keeper._renew(nothing, nothing)
    assert keeper.holds
    assert decode_lease(objects.found[LEASE][0]).run == RUN


async def test_a_primary_leaves_the_lease_of_a_rival_that_has_sealed_the_log_since_its_last_look():
    now_s, objects, rival = 0.0, MemoryObjects(), bytes([1]) * 16
    keeper = await a_primary(objects, lambda: now_s)
    await carry_out(objects, protocol.choose_epoch(rival, 1, "other"))
    await keeper._renew(nothing, nothing)
    now_s = PERIOD_S

    async def look():
        await trio.lowlevel.checkpoint()
        raise ReignOver("the rival has sealed the log")

    with pytest.raises(ReignOver):
        await keeper._renew(look, nothing)
    assert decode_lease(objects.found[LEASE][0]).run == rival


async def test_a_primary_gets_its_lease_back_from_a_process_that_hangs_in_its_take_over_and_renews_the_lease():
    now_s, objects, rival = 0.0, MemoryObjects(), bytes([1]) * 16
    keeper = await a_primary(objects, lambda: now_s)
    await carry_out(objects, protocol.choose_epoch(rival, 1, "other"))
    for number in range(1, 20):
        now_s += 2.0
        await lease_hold.LeaseHold().renew(objects, rival, number, PERIOD_S)
        await keeper._renew(nothing, nothing)
        # Before that, the process may still be reading the log.
        assert keeper.holds == (now_s - 2.0 >= lease.RIVALS * PERIOD_S or now_s < PERIOD_S)
    assert decode_lease(objects.found[LEASE][0]).run == RUN


async def test_a_process_that_takes_over_renews_the_lease_in_the_time_that_the_lease_says(autojump_clock):
    objects, taken = MemoryObjects(), Lease(2, RUN, period_ms=1000)
    objects._put(LEASE, encode_lease(taken))
    one = standby.Standby(objects, Path(), ReplicationConfig(lease_s=60.0), None, lambda: 0, clock=trio.current_time)
    one._watch.lease, one._take_over.run = taken, RUN
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.hold)
        await trio.sleep(1.0)
        assert decode_lease(objects.found[LEASE][0]).renewed >= 2
        nursery.cancel_scope.cancel()


async def test_a_standby_renews_no_lease_after_the_primary_of_its_process_has_begun(autojump_clock):
    objects, hold = MemoryObjects(), lease_hold.LeaseHold()
    one = standby.Standby(objects, Path(), SETTINGS, None, lambda: 0, clock=trio.current_time, hold=hold)
    one._take_over.run, one._file.record = RUN, replace(one._file.record, standby=False)
    objects._put(LEASE, encode_lease(Lease(2, RUN, period_ms=10_000)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.hold)
        await trio.sleep(5.5)
        assert decode_lease(objects.found[LEASE][0]).renewed
        a_keeper(objects, clock=trio.current_time, hold=hold).began(3, bytes([1]) * 16, "first", 0.0)
        went_back = encode_lease(Lease(2, RUN, period_ms=10_000))
        objects._put(LEASE, went_back)
        await trio.sleep(20)
        assert objects.found[LEASE][0] == went_back
        nursery.cancel_scope.cancel()


async def test_a_lease_that_cannot_be_read_does_not_end_the_process_that_holds_it():
    objects = MemoryObjects()
    objects._put(LEASE, b"{}")
    assert await lease_hold.LeaseHold().renew(objects, RUN, 1, PERIOD_S)


def test_no_standby_seals_the_log_of_a_primary_that_has_its_lease_again():
    assert [(seed, found) for seed in range(SEEDS) if (found := wrong(seed, [awakened]))] == []


def test_no_renewal_of_a_process_undoes_its_own_replacement_of_the_lease():
    assert [(seed, found) for seed in range(SEEDS) if (found := wrong(seed, [passed_on]))] == []


def test_a_primary_whose_lease_went_back_writes_it_again():
    assert [(seed, found) for seed in range(SEEDS) if (found := wrong(seed, [set_back]))] == []


def test_a_primary_whose_log_went_back_too_ends():
    assert [(seed, found) for seed in range(SEEDS) if (found := wrong(seed, [rolled_back]))] == []


def test_a_primary_whose_lease_went_back_acknowledges_nothing_that_a_standby_may_seal_off():
    courses = [awakened_after_the_lease_went_back]
    assert [(seed, found) for seed in range(SEEDS) if (found := wrong(seed, courses))] == []


def test_no_standby_takes_over_from_a_process_that_takes_over_and_loads_for_longer_than_the_lease():
    assert [(seed, found) for seed in range(SEEDS) if (found := wrong(seed, [loading]))] == []


def test_a_primary_with_a_standby_acknowledges_although_each_request_takes_two_seconds():
    assert [(seed, found) for seed in range(SEEDS) if (found := wrong(seed, [distant]))] == []


#: Course that finds it, module, mistake, the correct code, the wrong code.
MISTAKES = [
    (
        slow,
        lease,
        "the time of the lease is counted from the answer",
        "            self._valid_until_s = begun_s + self._period_s\n",
        "            self._valid_until_s = self._clock() + self._period_s\n",
    ),
    (
        slow,
        lease,
        "a lease that is over is valid",
        "self._clock() < self._valid_until_s",
        "self._clock() < self._valid_until_s + 1.0",
    ),
    (
        course,
        lease_watch,
        "a renewal does not begin the time again",
        "if lease is None or self.lease is None or lease.sign != self.lease.sign:",
        "if lease is None or self.lease is None:",
    ),
    (
        slow,
        lease_watch,
        "the standby waits for less than the time of the lease",
        "self._since_s + max(self._lease_s, lease.period_ms / 1000)",
        "self._since_s + 0.8 * self._lease_s",
    ),
    (
        course,
        lease_watch,
        "a standby takes over although the primary does not keep the terms for it",
        "if not lease.guarded or not lease.period_ms",
        "if not lease.period_ms",
    ),
    (
        orphaned,
        lease_watch,
        "a standby that registers begins the time again",
        "lease.sign != self.lease.sign:",
        "lease != self.lease:",
    ),
    (
        course,
        lease,
        "the terms end with a renewal that failed",
        "        self._renewed_s = None\n",
        "        self._renewed_s, self.is_guarded = None, False\n",
    ),
    (
        course,
        lease,
        "the terms end with the time of a registration, before the lease says so",
        "        return is_open and (not self._standbys.is_guarded or",
        "        return is_open and (not self._standbys.is_guarded"
        " or self._clock() - (self._standbys._renewed_s or 0) > EXPIRES_S or",
    ),
    (
        course,
        lease,
        "the lease says that the terms are kept before they are",
        "            is_kept=self._standbys.is_guarded,\n",
        "            is_kept=True,\n",
    ),
    (
        regained,
        lease,
        "a standby that registers begins the time again that a rival has for its seal",
        "if self.last is not None and found.sign == self.last.sign:",
        "if found == self.last:",
    ),
    (
        distant,
        lease,
        "a renewal has less time than two slow requests",
        "        with trio.move_on_after(2 * self._every_s):\n",
        "        with trio.move_on_after(self._every_s):\n",
    ),
    (
        alone,
        lease,
        "a registration outlives its standby",
        "if unchanged_s >= EXPIRES_S)",
        "if unchanged_s >= 1e9)",
    ),
    (
        orphaned,
        lease,
        "a registration ends before its standby",
        "if unchanged_s >= EXPIRES_S)",
        "if unchanged_s >= 0.0)",
    ),
    (
        course,
        protocol,
        "a standby takes over from a primary that allows none any more",
        "        if follower is not None and not before.allows_standby:\n",
        "        if False:\n",
    ),
    (
        course,
        protocol,
        "a start that allows no standby leaves the lease as it is until the first renewal",
        "            mine = terms.applied(mine)\n",
        "            pass\n",
    ),
    (
        slow,
        protocol,
        "a lease that was renewed is replaced",
        "        if seen is not None and before.sign != seen.sign and before.run != run:\n",
        "        if False:\n",
    ),
    (
        awakened,
        protocol,
        "a standby seals without a look at the lease",
        "        if follower is not None and leased and not (yield from _has_lease(run)):\n",
        "        if False:\n",
    ),
    (
        awakened,
        protocol,
        "a standby reads to the end of the log after it has looked at the lease",
        "        if follower is not None and leased and not (yield from _has_lease(run)):\n",
        "        has_lease = yield from _has_lease(run)\n"
        "        place = yield from follow(place, directory, wrote)\n"
        "        if follower is not None and leased and not has_lease:\n",
    ),
    (
        awakened,
        lease,
        "a lease that was taken back is valid before a segment is stored",
        "                await secure()\n",
        "                pass\n",
    ),
    (
        passed_on,
        lease_hold,
        "a process renews its lease while it replaces it",
        "            async with self._writing:\n",
        "            if True:\n",
    ),
    (
        set_back,
        lease,
        "a lease that went back is an error, whatever the log says",
        "        if self.check_log is None:\n",
        "        if True:\n",
    ),
    (
        rolled_back,
        lease,
        "a lease that went back is written again without a look at the log",
        "            await self.check_log()\n",
        "            pass\n",
    ),
    (
        awakened_after_the_lease_went_back,
        lease,
        "a lease that was written again is valid before a segment is stored",
        "                await secure()\n",
        "                if self._rivals.last is not None:\n                    await secure()\n",
    ),
    (
        loading,
        standby,
        "a process that takes over does not renew its lease",
        "self._hold.renew(self._objects, run, number, period_s)",
        "self._hold.renew(self._objects, run, 0, period_s)",
    ),
]
#: Names that code outside a copy of the protocol compares with.
SHARED = (
    "Get",
    "GetAll",
    "Create",
    "Exchange",
    "Apply",
    "Fetched",
    "Verdict",
    "TakeOverLost",
    "ReignOver",
    "BucketWentBack",
    "LeaseWentBack",
)


def code_with(module, name, right, wrong):
    made = planted(module, name, right, wrong)
    if module is lease:
        return Code(lease=made)
    for field, each in vars(Code()).items():
        if module is each is not protocol:
            return Code(**{field: made})
    made.__dict__.update({each: getattr(protocol, each) for each in SHARED})
    return Code(protocol=made)


@pytest.mark.parametrize(
    ("found_in", "module", "name", "right", "wrong_"), MISTAKES, ids=[each[2] for each in MISTAKES]
)
def test_each_planted_mistake_is_found(found_in, module, name, right, wrong_):
    code = code_with(module, name, right, wrong_)
    seeds = seeds_for(name, QUICK_SEEDS, range(SEEDS_OF_MISTAKES))
    assert any(wrong(seed, [found_in], code) and not wrong(seed, [found_in]) for seed in seeds)
