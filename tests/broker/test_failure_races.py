"""Races in which the store delays one request until another has finished: every reader sees all or nothing."""

from __future__ import annotations

from functools import partial
from math import inf

import pytest
from held_writes import SERVICE, and_fail, leaving, refused, staged
from trio.testing import wait_all_tasks_blocked
from whole_course import NAMES, TX, Follower

# --- time-outs -----------------------------------------------------------------------------------


async def test_a_timeout_during_a_publish_leaves_its_transaction_undone(autojump_clock):
    async with staged() as (scene, transaction):
        async with scene.store.held("b", scene.publish, "b", 2, transaction):
            await scene.pass_time(31)
            await scene.decide(transaction, "commit")
            assert transaction.undone_s < inf, "the client was refused as too late"
        await scene.look()
        assert await refused(scene.publish, "b", 1, transaction) == "transaction_not_in_progress"


async def test_a_timeout_while_a_commit_waits_for_a_publish_leaves_one_outcome(autojump_clock):
    async with staged() as (scene, transaction):
        async with scene.store.held("b", scene.publish, "b", 2, transaction) as nursery:
            nursery.start_soon(scene.decide, transaction, "commit")
            await wait_all_tasks_blocked()
            await scene.pass_time(31)
        await scene.look()


async def test_a_commit_being_written_wins_over_a_timeout(autojump_clock):
    async with staged() as (scene, transaction):
        await scene.publish("b", 2, transaction)
        async with scene.store.held(SERVICE, scene.decide, transaction, "commit"):
            await scene.pass_time(31)
            await scene.look()
        assert transaction.committed_s < inf


async def test_a_commit_waits_for_the_publish_being_written(autojump_clock):
    async with staged() as (scene, transaction):
        async with scene.store.held("b", scene.publish, "b", 2, transaction) as nursery:
            nursery.start_soon(scene.decide, transaction, "commit")
            await wait_all_tasks_blocked()
            assert await refused(scene.publish, "a", 1, transaction) == "transaction_not_in_progress"
            assert transaction.committed_s == inf, "it waits"
        assert transaction.committed_s < inf


# --- lost answers --------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["commit", "abort"])
async def test_a_transaction_ends_as_decided_although_the_answer_to_a_publish_was_lost(autojump_clock, verb):
    async with staged() as (scene, transaction):
        async with scene.store.held("b", leaving, scene.publish, "b", 2, transaction):
            pass
        if verb == "abort":
            await scene.roll_back("b", transaction)
        await scene.decide(transaction, verb)


async def test_a_rollback_requested_before_the_publish_has_landed_wins(autojump_clock):
    async with staged() as (scene, transaction):
        async with scene.store.held("b", leaving, scene.publish, "b", 2, transaction) as nursery:
            nursery.start_soon(scene.roll_back, "b", transaction)
            await wait_all_tasks_blocked()
        assert [pointer for _, _, pointer in (await scene.log("b")).rows] == [0, -transaction.id, -transaction.id]
        assert await refused(scene.publish, "b", 1, transaction) == "rolled_back"
        await scene.decide(transaction, "abort")


async def test_a_commit_whose_answer_was_lost_can_be_repeated(autojump_clock):
    async with staged() as (scene, transaction):
        await scene.publish("b", 2, transaction)
        async with scene.store.held(SERVICE, leaving, scene.decide, transaction, "commit"):
            await scene.look()
        await scene.look()
        await scene.decide(transaction, "commit")
        assert transaction.committed_s < inf
        assert await refused(scene.post, f"{TX}/{transaction.id}/abort") == "transaction_not_in_progress"


@pytest.mark.parametrize("owner", ["a", "b", SERVICE])
async def test_a_rollback_whose_answer_was_lost_can_be_repeated(autojump_clock, owner):
    async with staged() as (scene, transaction):
        await scene.publish("b", 2, transaction)
        async with scene.store.held(owner, leaving, scene.decide, transaction, "abort"):
            pass
        await scene.look()
        await scene.decide(transaction, "abort")
        for topic in NAMES:
            assert {p for _, _, p in (await scene.log(topic)).rows} == {0, -transaction.id}


# --- rollbacks and polls -------------------------------------------------------------------------


@pytest.mark.parametrize("owner", ["a", "b"])
async def test_a_rollback_being_written_shows_nothing_to_waiting_readers(autojump_clock, owner):
    async with staged() as (scene, transaction):
        await scene.publish("b", 2, transaction)
        for topic in NAMES:
            await scene.publish(topic, 1)
        await scene.look()
        waiting = [Follower(topic, isolation="committed", limit=1) for topic in NAMES for _ in range(2)]
        for follower in waiting:
            await scene.page(follower)
        async with scene.store.held(owner, scene.decide, transaction, "abort") as nursery:
            for follower in waiting:
                nursery.start_soon(partial(scene.page, follower, wait_ms=60_000))
            await wait_all_tasks_blocked()
        assert [page.end for page in scene.pages[-4:]] == ["end"] * 4
        assert all(len(page.messages) == 1 for page in scene.pages[-4:])


@pytest.mark.parametrize("held_up", NAMES)
async def test_a_poll_of_both_topics_shows_a_transaction_in_both_or_in_none(autojump_clock, held_up):
    """The poll reads one topic early and the other late, and the transaction commits in between."""
    early = next(topic for topic in NAMES if topic != held_up)
    async with staged() as (scene, other):
        await scene.decide(other, "abort")
        transaction, _ = await scene.begin()
        await scene.publish(held_up, 1, transaction)
        body = {"topics": {topic: {} for topic in NAMES}, "isolation": "committed"}
        answers = []

        async def poll_both():
            answers.append((await scene.post("/v1/namespaces/ns/poll", body)).json()["topics"])

        async with scene.store.held(held_up, scene.publish, held_up, 1) as nursery:
            nursery.start_soon(poll_both)
            await wait_all_tasks_blocked()
            await scene.publish(early, 1, transaction)
            await scene.decide(transaction, "commit")
        (topics,) = answers
        mine = {each.payloads[0].decode() for each in scene.requests if each.transaction is transaction}
        shown = {message["payload"] for one in topics.values() for message in one["messages"]}
        assert len(mine) == 2
        assert shown & mine in (set(), mine)


# --- two clients, one pointer --------------------------------------------------------------------


async def test_two_clients_publish_under_one_pointer_and_one_commits(autojump_clock):
    async with staged() as (scene, transaction):
        async with scene.store.held("b", scene.publish, "b", 2, transaction) as nursery:
            for _ in range(3):
                nursery.start_soon(scene.publish, "b", 1, transaction)
                nursery.start_soon(scene.publish, "a", 1, transaction)
            await wait_all_tasks_blocked()
        await scene.decide(transaction, "commit")
        assert await refused(scene.publish, "a", 1, transaction) == "transaction_not_in_progress"
        assert await refused(scene.roll_back, "a", transaction) == "transaction_not_in_progress"
        await scene.decide(transaction, "commit")


async def test_two_clients_use_one_pointer_and_one_rolls_back_while_the_other_publishes(autojump_clock):
    async with staged() as (scene, transaction):
        async with scene.store.held("b", scene.publish, "b", 2, transaction) as nursery:
            nursery.start_soon(scene.decide, transaction, "abort")
            await wait_all_tasks_blocked()
            nursery.start_soon(and_fail, scene.publish, "b", 1, transaction)
            await wait_all_tasks_blocked()
        assert {p for _, _, p in (await scene.log("b")).rows} == {0, -transaction.id}


async def test_of_two_clients_that_decide_one_pointer_differently_one_wins(autojump_clock):
    for first, second in (("commit", "abort"), ("abort", "commit"), ("commit", "invalidate"), ("invalidate", "commit")):
        async with staged() as (scene, transaction):
            await scene.publish("b", 2, transaction)
            async with scene.store.held(SERVICE, scene.decide, transaction, first) as nursery:
                nursery.start_soon(scene.decide, transaction, second)
                await wait_all_tasks_blocked()
                await scene.look()
