"""Restarts in the middle of decisions, failures of the service while topics run, and clock changes at a restart."""

from __future__ import annotations

from math import inf

import pytest
import trio
from held_writes import SERVICE, refused, staged
from trio.testing import wait_all_tasks_blocked
from whole_course import NAMES, TX, Follower, Killed, Scene, life


@pytest.mark.parametrize("keep_rows", [0, 1, 2])
@pytest.mark.parametrize(("verb", "owner"), [("commit", SERVICE), ("abort", SERVICE), ("abort", "a"), ("abort", "b")])
async def test_a_restart_in_the_middle_of_a_decision_leaves_one_outcome(autojump_clock, verb, owner, keep_rows):
    scene = Scene()
    async with life(scene.store) as scene.daemon:
        for topic in NAMES:
            await scene.daemon.create(topic)
            await scene.publish(topic, 1)
        transaction, _ = await scene.begin()
        for topic in NAMES:
            await scene.publish(topic, 2, transaction)
            await scene.publish(topic, 1)
        await scene.look()
        # An abort is first marked in the service, and then goes to the topics.
        scene.fail_write({SERVICE: 0, "a": 1, "b": 2}[owner], keep_rows)
        if verb == "commit":
            transaction.asked_s = next(scene._moments)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scene.daemon.http.post, f"{TX}/{transaction.id}/{verb}")
            while not scene.has_failed:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        raise Killed
    async with life(scene.store) as scene.daemon:
        await scene.look()
        await scene.check()


# --- the service fails ---------------------------------------------------------------------------


@pytest.mark.parametrize("applied", [False, True])
async def test_topics_continue_when_the_service_crashes_in_a_commit(autojump_clock, applied):
    async with staged() as (scene, transaction):
        await scene.publish("b", 2, transaction)
        scene.store.fail_next("scan")  # its first load also fails, so it stays unavailable for a while
        scene.fail_write(0, applied)
        assert await refused(scene.decide, transaction, "commit") == "outcome_unknown"
        while scene.store.calls["claim"] < 4:
            await trio.lowlevel.checkpoint()
        await wait_all_tasks_blocked()
        for topic in NAMES:
            await scene.publish(topic, 1)
        await scene.look()
        committed = Follower("a", isolation="committed")
        await scene.page(committed)  # messages before the first undecided one need no service
        assert await refused(scene.page, committed) == "transactions_unavailable"
        assert await refused(scene.publish, "a", 1, transaction) == "transactions_unavailable"
        assert await refused(scene.begin) == "transactions_unavailable"
        await scene.insist(scene.decide, transaction, "commit")
        assert transaction.committed_s < inf


# --- clocks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("hours", [-1, -200, 1, 20])
async def test_outcomes_hold_when_the_clock_is_set_during_a_restart(autojump_clock, hours):
    scene = Scene()
    async with life(scene.store) as scene.daemon:
        for topic in NAMES:
            await scene.daemon.create(topic)
            await scene.publish(topic, 1)
        committed, _ = await scene.begin()
        left, _ = await scene.begin()
        for topic in NAMES:
            await scene.publish(topic, 1, committed)
            await scene.publish(topic, 1, left)
        await scene.decide(committed, "commit")
        await scene.look()
        later_ms = scene.daemon.clock.ms + hours * 3_600_000
        raise Killed
    async with life(scene.store) as scene.daemon:
        scene.daemon.clock.ms = later_ms
        await scene.look()
        afterwards, _ = await scene.begin()
        assert afterwards.id > left.id
        for topic in NAMES:
            await scene.publish(topic, 1)
        # The open transaction does not block readers beyond its time-out, whatever the clock did.
        await scene.pass_time(31)
        held = Follower("a", isolation="committed")
        assert await scene.page(held) == "end"
        afterwards, _ = await scene.begin()
        for topic in NAMES:
            await scene.publish(topic, 1, afterwards)
        await scene.decide(afterwards, "commit")
        await scene.look()
        for transaction in scene.transactions:
            transaction.expires_ms = 1 << 62  # the wall clock jumped, so it says nothing about time-outs
        await scene.check()
