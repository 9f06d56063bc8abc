"""The lease: no standby tries to take over by itself while the primary may still acknowledge, whatever is slow or lost."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from random import Random
from types import ModuleType

import pytest
import trio
from trio.testing import MockClock

from actors import lease, standby
from actors.settings import ReplicationConfig
from storage.replication.carry import ObjectStoreUnavailable, carry_out
from storage.replication.notices import LEASE, Lease, decode_lease, encode_lease
from storage.replication.protocol import Follower, TakeOverLost, Verdict, choose_epoch
from tests.storage.replication.objects import MemoryObjects

SEEDS = 30
PERIOD_S = 10.0
RUN, OTHER = bytes(16), bytes([1] * 16)


class SlowObjects(MemoryObjects):
    """Shares its objects with others. Requests land and are answered late, or not at all; a cancelled one may land."""

    def __init__(self, shared, random, nursery, times):
        super().__init__()
        self.found, self._random, self._nursery = shared.found, random, nursery
        self._shared, self._times = shared, times

    async def get(self, name):
        found = await self._late(self._shared.get, name)
        if isinstance(found, Verdict):
            raise ObjectStoreUnavailable("no answer")
        return found

    async def exchange(self, name, data, etag):
        return await self._late(self._shared.exchange, name, data, etag)

    async def _late(self, call, *arguments):
        answer, done = [Verdict.UNKNOWN], trio.Event()

        async def land():
            await trio.sleep(self._some_time())
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


async def course(lease_module, standby_module, seed):
    """Run a primary and a standby until it begins a take-over; return the time if the primary might acknowledge then."""
    random, shared, wrong = Random(seed), MemoryObjects(), []
    await shared.create(LEASE, encode_lease(Lease(1, RUN, period_ms=10_000)))
    async with trio.open_nursery() as nursery:
        keeper = lease_module.LeaseKeeper(
            SlowObjects(shared, random, nursery, [0.0, 0.01, 0.3, 1.5, 9.0, 30.0]),
            period_s=PERIOD_S,
            allows_standby=True,
            counted=lambda: 1,
            clock=trio.current_time,
        )
        keeper.began(1, RUN, "first", trio.current_time())
        settings = ReplicationConfig(lease_s=PERIOD_S)
        other = standby_module.Standby(
            SlowObjects(shared, random, nursery, [0.0, 0.0, 0.0, 0.01, 0.1, 2.0]),
            Path(),
            settings,
            None,
            lambda: 0,
            clock=trio.current_time,
        )

        async def exchange(name, data, etag):
            """At the moment at which a take-over begins, the primary must not acknowledge."""
            verdict = await MemoryObjects.exchange(shared, name, data, etag)
            if verdict is Verdict.DONE and decode_lease(data).run == OTHER:
                wrong.extend([trio.current_time()] if keeper.holds else ())
                begun.set()
            return verdict

        async def watch():
            while not begun.is_set():
                await other._look_at_lease()
                if other._reason() == "lease":
                    follower = Follower(other._lease)
                    with suppress(TakeOverLost):
                        await carry_out(other._objects, choose_epoch(OTHER, 1, follower=follower))
                await trio.sleep(0.2)

        shared.exchange, begun = exchange, trio.Event()

        nursery.start_soon(keeper.run, trio.lowlevel.checkpoint)
        nursery.start_soon(watch)
        with trio.move_on_after(600):
            await begun.wait()
        nursery.cancel_scope.cancel()
    return wrong


def run(seed, lease_module=lease, standby_module=standby):
    return trio.run(course, lease_module, standby_module, seed, clock=MockClock(autojump_threshold=0))


def test_a_standby_tries_only_after_the_primary_has_stopped_acknowledging():
    assert [seed for seed in range(SEEDS) if run(seed)] == []


def test_in_sync_a_primary_without_renewals_acknowledges_what_counts_and_serves_no_polls():
    now_s = 0.0
    keeper = lease.LeaseKeeper(
        MemoryObjects(),
        period_s=PERIOD_S,
        allows_standby=True,
        is_needed=False,
        counted=lambda: 1,
        clock=lambda: now_s,
    )
    keeper.began(1, RUN, "first", now_s)
    assert (keeper.is_current, keeper.holds) == (True, True)
    now_s = PERIOD_S
    assert (keeper.is_current, keeper.holds) == (False, True)
    keeper.close()
    assert (keeper.is_current, keeper.holds) == (False, False)


#: Module, mistake, the correct code, the wrong code.
MISTAKES = [
    (
        lease,
        "the time of the lease is counted from the answer",
        "            self._valid_until_s = begun_s + self._period_s\n",
        "            self._valid_until_s = self._clock() + self._period_s\n",
    ),
    (
        lease,
        "a lease that is over is valid",
        "self._clock() < self._valid_until_s",
        "self._clock() < self._valid_until_s + 1.0",
    ),
    (
        standby,
        "a renewal does not begin the time again",
        "if lease is None or self._lease is None or _sign(lease) != _sign(self._lease):",
        "if lease is None or self._lease is None:",
    ),
    (
        standby,
        "the standby waits for less than the time of the lease",
        '"lease" if silent_s >= max(wait_s, lease.period_ms / 1000) else ""',
        '"lease" if silent_s >= 0.8 * wait_s else ""',
    ),
]


@pytest.mark.parametrize(("module", "name", "right", "wrong"), MISTAKES, ids=[each[1] for each in MISTAKES])
def test_each_planted_mistake_is_found(module, name, right, wrong):
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert source.count(right) == 1, f"the place of this mistake is gone: {name}"
    made = ModuleType("module_with_a_mistake")
    sys.modules[made.__name__] = made  # dataclasses look their module up
    try:
        exec(compile(source.replace(right, wrong), made.__name__, "exec"), made.__dict__)
        modules = {"lease_module": made} if module is lease else {"standby_module": made}
        assert any(run(seed, **modules) for seed in range(2 * SEEDS))
    finally:
        del sys.modules[made.__name__]
