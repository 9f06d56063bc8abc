"""While an instance reads ZooKeeper, its own changes are kept, and topics that it has lost stay lost."""

from __future__ import annotations

from itertools import count

import pytest
import trio

from broker.config.sections import Ensemble
from plainsong.protocol.cluster import SLICES
from tests.broker.cluster.test_membership import TOPICS, member, owned, running, until
from tests.broker.cluster.test_rebalance import two

paths = count()


@pytest.fixture
def ensemble(zookeeper):
    """An unused path."""
    return Ensemble(zookeeper.address, f"/of-looks/{next(paths)}")


class Held:
    """Replaces an asynchronous method, and blocks it until the test lets it continue."""

    def __init__(self, replaced):
        self.begun, self.may_go_on = trio.Event(), trio.Event()
        self._replaced = replaced

    async def __call__(self):
        self.begun.set()
        await self.may_go_on.wait()
        return await self._replaced()


async def test_an_instance_that_has_to_leave_while_it_joins_never_owns_anything(ensemble):
    a, seen = member(ensemble, "a"), []
    a.on_change(lambda: seen.append(len(owned(a))))
    async with trio.open_nursery() as nursery:
        await nursery.start(a.run)
        await until(lambda: a.connected, a)
        a._nodes.members = held = Held(a._nodes.members)
        nursery.start_soon(a.enter, "a:7420")
        await held.begun.wait()
        async with trio.open_nursery() as leaving:
            leaving.start_soon(a.leave)
            await until(lambda: a._me.leaving, a)
            held.may_go_on.set()
        await until(lambda: a.entered, a)
        assert not any(seen)
        assert [(each.leaving, each.slices) for each in a.assignment.members] == [(True, 0)]
        nursery.cancel_scope.cancel()


async def test_topics_claimed_by_others_are_not_claimed_back_during_a_reread_or_after_its_failure(
    ensemble,
):
    async with running(ensemble, "a") as a:
        topic = TOPICS[0]
        a._nodes.placement = held = Held(a._nodes.placement)
        a.deposed(topic)
        await held.begun.wait()
        assert not a.is_mine(topic)
        a.deposed(TOPICS[1])  # the read in progress may return the old state of this topic
        held.may_go_on.set()
        await until(lambda: a.is_mine(topic), a)

        a._nodes.placement = held = Held(a._nodes.placement)
        a.deposed(topic)
        with trio.move_on_after(0.05):
            await a._reread()  # as by a caller that times out early
        assert not a.is_mine(topic)
        held.may_go_on.set()
        await until(lambda: owned(a) == set(TOPICS), a)


async def test_nothing_is_released_or_taken_back_while_zookeeper_is_unavailable(ensemble, monkeypatch):
    monkeypatch.setattr("broker.cluster.handover.RETRY_S", 0.01)
    async with two(ensemble) as (a, b):
        a.may_go_on = trio.Event()
        await b.view.change_placement(lambda placement: placement.with_drained("a", drained=True))
        await until(lambda: a.steps, a.view)
        await until(lambda: b.view.slices_of("a") == a.view.slices < SLICES, b.view)
        monkeypatch.setattr(a.view._zookeeper, "connected", False)
        had, seen = a.owned, []
        a.view.on_change(lambda: seen.append(a.owned))
        a.may_go_on.set()
        await trio.sleep(0.1)  # ten times the pause before a step is retried
        assert all(each == had for each in seen)
        a.view._zookeeper.connected = True
        await until(lambda: not a.owned, a.view)
