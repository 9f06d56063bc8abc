"""Transactions over topics of several instances: no write under a pointer follows its end, whichever owner changes."""

from __future__ import annotations

import pytest
import trio
from actors_in_process import NAME
from pointers_in_process import request
from transactions_in_process import settle
from transactions_of_instances import OTHER, cluster_of

import actors.replica
from plainsong.protocol.errors import (
    GenerationChanged,
    NoOwner,
    OutcomeUnknown,
    TransactionNotInProgress,
    TransactionsUnavailable,
)
from plainsong.protocol.topic.asks import PublishUnder, Remove
from plainsong.protocol.topic.publish import NotEnlisted
from storage.base import SERVICE_NAME


async def test_a_commit_is_visible_in_all_topics_of_all_instances_to_every_later_read():
    async with cluster_of("a", "b", "c") as cluster:
        cluster.say("b", OTHER)
        pointer = await cluster.begin()
        await cluster["a"].publish_under(pointer, "one")
        await cluster["b"].publish_under(pointer, "two", name=OTHER)
        for each in "abc":
            assert await cluster[each].committed(NAME, OTHER) == [[], []]
        assert (await cluster.home().commit(pointer)).changed
        for each in "abc":
            assert await cluster[each].committed(NAME, OTHER) == [["one"], ["two"]]


async def test_nothing_is_written_under_a_pointer_after_its_commit_was_answered():
    async with cluster_of("a", "b") as cluster:
        cluster.say("b", OTHER)
        pointer = await cluster.begin()
        await cluster["b"].publish_under(pointer, "one", name=OTHER)
        await cluster.home().commit(pointer)
        with pytest.raises(TransactionNotInProgress, match="committed"):
            await cluster["b"].publish_under(pointer, "late", name=OTHER)
        given = PublishUnder(request(["late"], pointer), 4)
        with pytest.raises(NotEnlisted):
            await cluster["b"].harness.directory.ask(OTHER, given)
        assert await cluster["a"].committed(OTHER) == [["one"]]


async def test_after_a_checkpoint_a_transaction_cannot_write_to_a_topic_recreated_at_another_instance():
    async with cluster_of("a", "b") as cluster:
        cluster.say("b", OTHER)
        pointer = await cluster.begin()
        await cluster["b"].store_under(pointer, "first half", name=OTHER)
        await cluster["b"].harness.ask(Remove(), name=OTHER)
        checkpoint = (await cluster.home().checkpoint(pointer)).transaction.write_pointer
        await cluster["b"].harness.create(OTHER)
        with pytest.raises(GenerationChanged, match=f"{pointer}"):
            await cluster["b"].publish_under(checkpoint, "second half", name=OTHER)
        await cluster["b"].publish_under(await cluster.begin(), "other", name=OTHER)


async def test_an_enlistment_that_arrives_after_the_commit_has_no_effect():
    async with cluster_of("a", "b") as cluster, trio.open_nursery() as nursery:
        cluster.say("b", OTHER)
        pointer = await cluster.begin()
        await cluster["b"].harness.directory.ask(OTHER, given_nothing())
        cluster.lines.held["b"] = late = trio.Event()
        refused = []

        async def write():
            with pytest.raises(TransactionNotInProgress):
                await cluster["b"].publish_under(pointer, "late", name=OTHER)
            refused.append(True)

        nursery.start_soon(write)
        await settle()
        assert (await cluster.home().commit(pointer)).changed
        assert not refused
        late.set()
        await settle()
        assert refused
        assert await cluster["a"].committed(OTHER) == [[]]


def given_nothing():
    from plainsong.protocol.topic.asks import Describe

    return Describe()


async def test_an_enlistment_whose_answer_was_lost_is_repeated_and_leaves_no_doubt(monkeypatch):
    async with cluster_of("a", "b") as cluster:
        cluster.say("b", OTHER)
        pointer = await cluster.begin()
        service, lose = cluster.home(), [True]
        enlist = service.enlist

        async def lost(pointer, name):
            answer = await enlist(pointer, name)
            if lose[0]:
                lose[0] = lose[0] == "always"
                raise OutcomeUnknown("there was no answer in time")
            return answer

        monkeypatch.setattr(service, "enlist", lost)
        await cluster["b"].publish_under(pointer, "one", name=OTHER)
        for owner in "ab":
            cluster.say(owner, OTHER)  # a new term of the topic, which holds no pointers
        lose[0] = "always"
        monkeypatch.setattr(actors.replica, "PATIENCE_S", 0.1)
        with pytest.raises(TransactionsUnavailable, match="no answer") as refused:
            await cluster["b"].publish_under(pointer, "two", name=OTHER)
        assert refused.value.outcome == "not-applied"
        lose[0] = False
        await cluster["b"].publish_under(pointer, "three", name=OTHER)
        assert (await cluster.home().commit(pointer)).changed
        assert await cluster["a"].committed(OTHER) == [["one", "three"]]


async def test_a_topic_that_moved_has_to_be_enlisted_again():
    async with cluster_of("a", "b") as cluster:
        pointer = await cluster.begin()
        await cluster["a"].publish_under(pointer, "one")
        cluster.say("b", NAME)
        with pytest.raises(NotEnlisted):
            await cluster["b"].harness.directory.ask(NAME, PublishUnder(request(["two"], pointer), 3))
        await cluster["b"].publish_under(pointer, "two")
        await cluster.home().commit(pointer)
        assert await cluster["b"].committed() == ["one", "two"]
        cluster.say("a", NAME)
        with pytest.raises(TransactionNotInProgress):
            await cluster["a"].publish_under(pointer, "late")


async def test_open_transactions_ids_and_topics_continue_with_the_next_owner_of_the_service():
    async with cluster_of("a", "b", "c") as cluster:
        cluster.say("b", OTHER)
        first, second = await cluster.begin(), await cluster.begin()
        await cluster["b"].publish_under(first, "one", name=OTHER)
        await cluster["b"].publish_under(second, "two", name=OTHER)
        await cluster.home().commit(first)
        cluster.say("c", SERVICE_NAME)
        await settle()
        assert cluster["c"].transactions.home is cluster.home()
        assert cluster["a"].transactions.home is None
        assert await cluster.begin() > second
        assert (await cluster.home().pointer_locations()).topics_of((second,)) == {OTHER}
        assert await cluster["a"].committed(OTHER) == [["one"]]
        assert (await cluster.home().commit(first)).changed is False
        await cluster["b"].publish_under(second, "three", name=OTHER)
        await cluster.home().commit(second)
        for each in "abc":
            assert await cluster[each].committed(OTHER) == [["one", "two", "three"]]


async def test_readers_always_have_a_view_at_the_old_and_the_new_owner_of_the_service():
    async with cluster_of("a", "b") as cluster:
        first, second = await cluster.begin(), await cluster.begin()
        await cluster.home().commit(first)
        await cluster["b"].transactions.fresh()
        for owner in "bab":
            cluster.say(owner, SERVICE_NAME)
            for _ in range(50):
                for each in "ab":
                    known = cluster[each].transactions
                    assert known.view().verdict(first).name == "DELIVER"
                    assert [known.standing(pointer) for pointer in (first, second)] == ["committed", "in_progress"]
                await trio.lowlevel.checkpoint()
            await settle()
            assert cluster[owner].transactions.home is cluster.home()


async def test_a_commit_whose_topics_do_not_answer_did_not_happen_and_can_be_sent_again():
    async with cluster_of("a", "b", commit_deadline_s=0.2) as cluster:
        cluster.say("b", OTHER)
        pointer = await cluster.begin()
        await cluster["b"].publish_under(pointer, "one", name=OTHER)
        cluster.lines.cut.add(("a", "b"))
        with pytest.raises(TransactionsUnavailable, match="ns:u") as refused:
            await cluster.home().commit(pointer)
        assert refused.value.outcome == "not-applied"
        assert cluster.home().standing(pointer) == "in_progress"
        cluster.lines.cut.clear()
        await cluster["b"].publish_under(pointer, "two", name=OTHER)
        assert (await cluster.home().commit(pointer)).changed
        assert await cluster["a"].committed(OTHER) == [["one", "two"]]


@pytest.mark.parametrize(("verb", "state"), [("commit", "committed"), ("abort", "aborted")])
async def test_a_decision_survives_the_session_of_a_dead_topic_owner(autojump_clock, verb, state):
    async with cluster_of("a", "b", "c") as cluster, trio.open_nursery() as nursery:
        cluster.say("b", OTHER)
        pointer = await cluster.begin()
        await cluster["b"].publish_under(pointer, "one", name=OTHER)
        cluster.lines.cut.add(("a", "b"))
        decided = []

        async def decide():
            decided.append((await getattr(cluster.home(), verb)(pointer)).state)

        nursery.start_soon(decide)
        await trio.sleep(12)  # a session lasts 10 s, and the next owner serves 2 s later
        assert not decided
        cluster.say("c", OTHER)
        await trio.sleep(3)
        assert decided == [state]
        assert await cluster["c"].committed(OTHER) == ([["one"]] if verb == "commit" else [[]])


async def test_an_abort_rolls_back_in_topics_of_other_instances():
    async with cluster_of("a", "b") as cluster:
        cluster.say("b", OTHER)
        pointer = await cluster.begin()
        await cluster["b"].publish_under(pointer, "one", name=OTHER)
        assert (await cluster.home().abort(pointer)).state == "aborted"
        with pytest.raises(TransactionNotInProgress, match="aborted"):
            await cluster["b"].publish_under(pointer, "late", name=OTHER)
        assert await cluster["b"].committed(OTHER) == [[]]


async def test_a_replaced_owner_of_the_service_answers_nothing():
    async with cluster_of("a", "b") as cluster:
        cluster.say("b", OTHER)
        pointer, other = await cluster.begin(), await cluster.begin()
        await cluster["b"].publish_under(pointer, "one", name=OTHER)
        deposed = cluster.home()
        # Only b sees that it owns the service; a continues as if nothing had happened.
        cluster.say("b", SERVICE_NAME, to=["b"])
        await settle()
        await cluster["b"].transactions.home.commit(pointer)
        view = deposed.view()
        assert view.verdict(pointer).name == "HOLD"
        with pytest.raises(NoOwner):
            await deposed.enlist(other, NAME)
        with pytest.raises(NoOwner):
            await deposed.fresh()
        for call in (deposed.begin, deposed.abort, deposed.commit):
            with pytest.raises((NoOwner, OutcomeUnknown, TransactionsUnavailable)):
                await (call() if call == deposed.begin else call(other))
        cluster.say("b", SERVICE_NAME)
        await settle()
        assert await cluster["a"].committed(OTHER) == [["one"]]


async def test_held_polls_get_commits_of_the_next_owner_while_the_previous_one_is_frozen():
    async with cluster_of("a", "b", "c") as cluster:
        await freeze_at_a_question_of_b(cluster)
        cluster.say("c", SERVICE_NAME)
        await settle()
        pointer = await cluster.begin()
        await settle()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cluster["b"].pointers.wait, pointer)
            await settle()
            with trio.fail_after(20):
                await cluster.home().commit(pointer)
                while cluster["b"].pointers.waiters:
                    await settle()
        assert cluster["b"].transactions.standing(pointer) == "committed"


@pytest.mark.parametrize("successor", ["b", "c"])
async def test_a_committed_read_does_not_wait_for_a_frozen_owner_once_it_is_replaced(successor):
    async with cluster_of("a", "b", "c") as cluster, trio.open_nursery() as nursery:
        await freeze_at_a_question_of_b(cluster)
        cluster.lines.held["b"] = trio.Event()
        read = trio.Event()

        async def reads():
            assert await cluster["b"].committed() == []
            read.set()

        nursery.start_soon(reads)
        await settle()
        del cluster.lines.held["b"]
        assert not read.is_set()
        cluster.say(successor, SERVICE_NAME)
        with trio.fail_after(20):
            await read.wait()


async def freeze_at_a_question_of_b(cluster):
    """Drop the answer to the question that waits there; later answers to other owners arrive."""
    cluster.lines.held["b"] = trio.Event()
    await cluster.home().commit(await cluster.begin())
    await settle()
    del cluster.lines.held["b"]
