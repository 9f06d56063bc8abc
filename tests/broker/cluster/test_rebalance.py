"""Instances join and leave in steps: slices outside a step stay in place, and each step waits for the previous one."""

from __future__ import annotations

from contextlib import asynccontextmanager
from itertools import count
from typing import Any, ClassVar

import pytest
import trio

from actors.observe import SystemClock
from broker.cluster import handover as handover_module
from broker.cluster.handover import Rebalance
from broker.config.sections import Ensemble
from broker.membership import membership as membership_module
from broker.membership.membership import Membership
from broker.membership.zookeeper import Disconnected, Node, decode_member, encode_member
from plainsong.protocol.cluster import SLICES, TOPICS_PER_STEP, Member, slice_of
from plainsong.protocol.names import TopicName
from tests.broker.cluster.test_membership import EXPIRING_S, SESSION_S, expire
from tests.patience import PATIENCE_S
from tests.waiting import until

TOPICS = [TopicName("ns", f"t{number}") for number in range(400)]

paths = count()


@pytest.fixture
def ensemble(zookeeper):
    """An unused path."""
    return Ensemble(zookeeper.address, f"/rebalance/{next(paths)}")


class Instance:
    """An instance with all its topics open; it implements ``HandoverSteps``, and pauses when a test says so."""

    def __init__(self, ensemble, name, session_s=SESSION_S):
        self.view = Membership(ensemble, name, weight=100, session_timeout_s=session_s, clock=SystemClock())
        self.rebalance = Rebalance(self.view, self)
        #: The requested waits, in order: ("given" or "taken", the figure).
        self.steps = []
        self.may_go_on = trio.Event()
        self.may_go_on.set()

    @property
    def owned(self):
        return {topic for topic in TOPICS if self.view.is_mine(topic)}

    def open_topics(self):
        return self.owned

    async def given_away(self):
        await self._step("given", self.view.slices)

    async def taken_over(self, slices):
        await self._step("taken", slices)

    async def _step(self, kind, slices):
        self.steps.append((kind, slices))
        await self.may_go_on.wait()


@asynccontextmanager
async def running(ensemble, name, *, hold=False, session_s=SESSION_S):
    """Run an instance that has joined; with ``hold`` it pauses after its first step."""
    one = Instance(ensemble, name, session_s)
    if hold:
        one.may_go_on = trio.Event()
    async with trio.open_nursery() as nursery:
        await nursery.start(one.view.run)
        nursery.start_soon(one.rebalance.run)
        await one.view.enter(f"{name}:7420")
        yield one
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def two(ensemble, *, session_s=SESSION_S):
    """Run two instances that have their shares; ``session_s`` is the first one's session time-out."""
    async with running(ensemble, "a", session_s=session_s) as a, running(ensemble, "b") as b:
        await until(lambda: {one.view.slices_of(name) for one in (a, b) for name in "ab"} == {SLICES})
        yield a, b


async def test_the_first_instance_owns_everything_at_once(ensemble):
    async with running(ensemble, "a") as a:
        assert a.owned == set(TOPICS)
        assert a.steps == []


async def test_a_joining_instance_takes_its_share_in_steps_and_the_others_serve_the_rest(ensemble):
    async with running(ensemble, "a") as a, running(ensemble, "b", hold=True) as b:
        await until(lambda: b.steps)
        assert b.steps == [("taken", 1)]
        await until(lambda: a.view.slices_of("b") == b.view.slices_of("b") == 1)
        assert {slice_of(topic) for topic in b.owned} == {0}
        assert a.owned == set(TOPICS) - b.owned
        b.may_go_on.set()
        await until(lambda: a.view.slices_of("b") == b.view.slices_of("b") == SLICES)
        assert 120 < len(b.owned) < 280
        assert a.owned == set(TOPICS) - b.owned
        figures = [figure for kind, figure in b.steps if kind == "taken"]
        assert figures == sorted(set(figures))
        assert 4 <= len(figures) <= 20
        assert a.steps == []


async def test_a_leaving_instance_gives_up_one_portion_at_a_time_and_serves_the_rest(ensemble):
    async with two(ensemble) as (a, b):
        had = a.owned
        a.may_go_on = trio.Event()
        a.steps.clear()
        await a.view.begin_to_leave()
        await until(lambda: a.steps)
        ((kind, figure),) = a.steps
        gone = {topic for topic in had if slice_of(topic) >= figure}
        assert kind == "given"
        assert 0 < len(gone) <= TOPICS_PER_STEP
        assert a.owned == had - gone
        assert a.view.me in a.view.instances
        await until(lambda: b.owned == set(TOPICS) - a.owned)
        assert [each.name for each in b.view.instances] == ["a", "b"]
        a.may_go_on.set()
        with trio.fail_after(PATIENCE_S):
            await a.rebalance.all_given_away()
        assert a.owned == set()
        assert len(a.steps) == pytest.approx(len(had) / TOPICS_PER_STEP, abs=4)
        await until(lambda: b.owned == set(TOPICS))
        assert [each.name for each in b.view.instances] == ["b"]


async def test_a_drained_instance_gives_up_all_topics_and_gets_its_share_back_when_undrained(ensemble):
    async with two(ensemble) as (a, b):
        had = a.owned
        await b.view.change_placement(lambda placement: placement.with_drained("a", drained=True))
        await until(lambda: a.view.slices == 0 and b.owned == set(TOPICS))
        assert len([kind for kind, _ in a.steps if kind == "given"]) > 1
        assert [each.name for each in b.view.instances] == ["a", "b"]
        await a.view.change_placement(lambda placement: placement.with_drained("a", drained=False))
        await until(lambda: a.owned == had and b.owned == set(TOPICS) - had)


async def test_when_all_are_drained_each_has_its_share_again(ensemble):
    async with two(ensemble) as (a, b):
        shares = a.owned, b.owned
        for name in "ab":
            await a.view.change_placement(lambda placement, name=name: placement.with_drained(name, drained=True))
        await until(lambda: (a.owned, b.owned) == shares and a.rebalance.settled and b.rebalance.settled)


async def test_a_drained_instance_left_alone_owns_everything_at_once(ensemble):
    async with running(ensemble, "a") as a:
        async with running(ensemble, "b") as b:
            await a.view.change_placement(lambda placement: placement.with_drained("a", drained=True))
            await until(lambda: b.owned == set(TOPICS) and not a.owned)
            a.may_go_on = trio.Event()
        await until(lambda: a.owned == set(TOPICS))


async def test_the_last_instance_to_leave_gives_up_everything_in_one_step(ensemble):
    async with two(ensemble) as (a, b):
        a.steps.clear()
        await b.view.leave()
        await until(lambda: a.owned == set(TOPICS))
        await a.view.begin_to_leave()
        with trio.fail_after(PATIENCE_S):
            await a.rebalance.all_given_away()
        assert a.steps == [("given", 0)]


async def test_an_unconfirmed_step_is_followed_by_the_next(ensemble, monkeypatch):
    monkeypatch.setattr(handover_module, "STEP_S", 0.02)
    async with running(ensemble, "a"), running(ensemble, "b", hold=True) as b:
        await until(lambda: b.view.slices == SLICES)


async def test_topics_that_remain_at_the_time_limit_are_released_at_once(ensemble):
    async with two(ensemble) as (a, b):
        a.may_go_on = trio.Event()
        await a.view.begin_to_leave()
        await until(lambda: a.steps)
        await a.view.leave()
        assert a.owned == set()
        await until(lambda: b.owned == set(TOPICS))


async def test_a_step_that_could_not_be_announced_is_undone_and_made_later(ensemble, monkeypatch):
    monkeypatch.setattr(handover_module, "RETRY_S", 0.02)
    async with two(ensemble) as (a, b):
        had, tried, keep = a.owned, [], a.view._nodes.keep

        async def unanswered(me, *, first):
            if me.slices < SLICES and len(tried) < 3:
                tried.append(a.owned)
                raise Disconnected("not at the moment")
            await keep(me, first=first)

        monkeypatch.setattr(a.view._nodes, "keep", unanswered)
        untaken = []
        a.view.on_change(lambda: untaken.append(a.owned == had))
        await b.view.change_placement(lambda placement: placement.with_drained("a", drained=True))
        await until(lambda: a.owned == set() and b.owned == set(TOPICS))
        assert len(tried) == 3
        assert all(had - each for each in tried)
        assert sum(untaken) >= 3


async def test_a_process_that_restarts_after_a_crash_has_its_topics_at_once(ensemble):
    async with running(ensemble, "b") as b:
        died = Instance(ensemble, "a")
        async with trio.open_nursery() as nursery:
            await nursery.start(died.view.run)
            nursery.start_soon(died.rebalance.run)
            await died.view.enter("a:7420")
            await until(lambda: b.view.slices_of("a") == SLICES)
            async with running(ensemble, "a") as back:
                assert back.view.slices == SLICES
                assert back.steps == []
            nursery.cancel_scope.cancel()


async def test_an_instance_whose_session_expired_has_its_topics_at_once(ensemble):
    async with two(ensemble, session_s=EXPIRING_S) as (a, b):
        had, session = a.owned, a.view._zookeeper.session
        a.steps.clear()
        await expire(a.view)
        await until(lambda: a.view.connected and a.view._zookeeper.session not in (0, session))
        await until(lambda: b.owned == set(TOPICS) - had and b.view.slices_of("a") == SLICES)
        assert a.owned == had
        assert a.steps == []


# --- a slow ZooKeeper ------------------------------------------------------------------------------


class SlowZooKeeper:
    """Replaces ``ZooKeeper``, on its own clock: every call succeeds after ``TAKES_S``."""

    TAKES_S = 0.4
    nodes: ClassVar[dict[str, Node]] = {}
    watches: ClassVar[dict[str, set[Any]]] = {}
    #: The values that were set, in order.
    values: ClassVar[list[bytes]] = []

    def __init__(self, hosts, *, session_timeout_s, on_event, access=None):
        del hosts, session_timeout_s, access
        self._on_event = on_event
        self.connected, self.session = True, 1

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def renew(self):
        pass

    async def get(self, path):
        await trio.sleep(self.TAKES_S)
        self.watches.setdefault(path, set()).add(self._on_event)
        return self.nodes.get(path)

    async def children(self, path):
        await trio.sleep(self.TAKES_S)
        self.watches.setdefault(path, set()).add(self._on_event)
        return sorted(each.rsplit("/", 1)[1] for each in self.nodes if each.startswith(path + "/"))

    async def create(self, path, value, *, ephemeral=False):
        del ephemeral
        await trio.sleep(self.TAKES_S)
        self.nodes[path] = Node(value, 0, self.session)
        self._changed(path)
        self._changed(path.rsplit("/", 1)[0])

    async def set(self, path, value, version):
        await trio.sleep(self.TAKES_S)
        assert self.nodes[path].version == version
        self.nodes[path] = Node(value, version + 1, self.session)
        self.values.append(value)
        self._changed(path)

    def _changed(self, path):
        for watch in self.watches.pop(path, ()):
            watch()


async def test_a_slow_zookeeper_takes_no_step_back_however_many_instances_there_are(monkeypatch, autojump_clock):
    monkeypatch.setattr(membership_module, "ZooKeeper", SlowZooKeeper)
    for number in range(60):
        name = f"i{number}"
        SlowZooKeeper.nodes[f"/p/instances/{name}"] = Node(encode_member(Member(name, f"{name}:1")), 0, 2)
    one = Instance(Ensemble("localhost:1", "/p"), "a")
    async with trio.open_nursery() as nursery:
        await nursery.start(one.view.run)
        nursery.start_soon(one.rebalance.run)
        await one.view.enter("a:7420")
        with trio.fail_after(600):
            while one.view.slices_of("a") < SLICES:
                await one.rebalance._changed.wait()
        nursery.cancel_scope.cancel()
    figures = [decode_member("a", value).slices for value in SlowZooKeeper.values]
    assert figures == sorted(figures)
    assert len(figures) <= 20
