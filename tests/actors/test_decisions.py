"""Every topic is asked before a decision: many may be slow, and one that does not answer ends the attempt."""

from __future__ import annotations

import pytest
import trio
from transactions_of_instances import cluster_of

from actors.decisions import close_pointers, roll_back
from plainsong.protocol.errors import Recovering, TransactionsUnavailable
from plainsong.protocol.names import TopicName
from plainsong.protocol.topic.asks import ClosePointers

DEADLINE_S = 15.0
POINTER = 7


class Topics:
    """Topics that answer after a given time; tests ask them and look them up as the service does."""

    def __init__(self, count, answer_s):
        self.names = [TopicName("ns", f"t{number:05}") for number in range(count)]
        self.answer_s = dict.fromkeys(self.names, answer_s)
        self.failing = {}
        self.last_answer_s = 0.0

    def topics_of(self, pointers):
        return set(self.names)

    async def ask(self, name, ask):
        await trio.sleep(self.answer_s[name])
        if name in self.failing:
            raise self.failing[name]
        self.last_answer_s = trio.current_time()

    async def close(self):
        """Close the topics' pointers; return True if all were closed."""
        return not await close_pointers(self.ask, self.names, [POINTER], DEADLINE_S)

    async def roll_back(self):
        """Roll back the topics' pointers; return True if all were rolled back."""
        return await roll_back(self, self.ask, [POINTER], DEADLINE_S) == {POINTER}


each_decision = pytest.mark.parametrize("decide", [Topics.close, Topics.roll_back])


@each_decision
async def test_a_decision_over_many_topics_continues_while_each_answers(autojump_clock, decide):
    topics = Topics(2_000, answer_s=0.3)
    assert await decide(topics)
    assert trio.current_time() > 2 * DEADLINE_S


@each_decision
async def test_a_silent_topic_ends_the_attempt_one_deadline_after_the_last_answer(autojump_clock, decide):
    topics = Topics(2_000, answer_s=0.3)
    topics.answer_s[topics.names[5]] = float("inf")
    assert not await decide(topics)
    assert topics.last_answer_s > 2 * DEADLINE_S
    assert trio.current_time() == pytest.approx(topics.last_answer_s + DEADLINE_S)


async def test_only_the_silent_topic_is_missing(autojump_clock):
    topics = Topics(2_000, answer_s=0.3)
    topics.answer_s[topics.names[5]] = float("inf")
    assert await close_pointers(topics.ask, topics.names, [POINTER], DEADLINE_S) == {topics.names[5]}


@each_decision
async def test_an_unavailable_topic_does_not_count_as_an_answer(autojump_clock, decide):
    topics = Topics(2, answer_s=0.3)
    topics.failing[topics.names[0]] = Recovering("later")
    assert not await decide(topics)
    assert trio.current_time() <= topics.last_answer_s + DEADLINE_S


@each_decision
async def test_a_decision_over_few_topics_takes_at_most_the_deadline(autojump_clock, decide):
    topics = Topics(16, answer_s=DEADLINE_S - 1)
    topics.answer_s[topics.names[0]] = float("inf")
    assert not await decide(topics)
    assert trio.current_time() == pytest.approx(DEADLINE_S)


@each_decision
async def test_slow_topics_waiting_for_the_slots_of_stuck_ones_do_not_delay_a_decision_for_hours(
    autojump_clock, decide
):
    topics = Topics(1_600, answer_s=DEADLINE_S - 1)
    topics.answer_s.update(dict.fromkeys(topics.names[:15], float("inf")))
    assert not await decide(topics)
    assert trio.current_time() == pytest.approx(1_600 / 16 * DEADLINE_S)


@each_decision
async def test_a_decision_waits_for_many_topics_that_each_answer_just_within_the_deadline(autojump_clock, decide):
    topics = Topics(1_601, answer_s=DEADLINE_S - 0.01)
    assert await decide(topics)


# --- at the service --------------------------------------------------------------------------------


async def test_a_commit_over_many_topics_may_exceed_its_deadline_and_timeout_and_a_repeated_request_joins_it(
    autojump_clock,
):
    names = [TopicName("ns", f"t{number:02}") for number in range(50)]
    async with cluster_of("a", "b", topics=names, commit_deadline_s=3.0) as cluster:
        closed = slow_to_close(cluster, 2.0)
        pointer = await cluster.begin(timeout_s=1)
        for name in names:
            await cluster["a"].publish_under(pointer, "one", name=name)
        with trio.move_on_after(1.0) as gave_up:
            await cluster.home().commit(pointer)
        assert gave_up.cancelled_caught
        assert (await cluster.home().commit(pointer)).state == "committed"
        assert sorted(closed) == names
        assert await cluster["b"].committed(*names) == [["one"]] * 50


async def test_a_transaction_whose_commit_was_abandoned_times_out_like_any_other(autojump_clock):
    names = [TopicName("ns", f"t{number:02}") for number in range(50)]
    async with cluster_of("a", "b", topics=names, commit_deadline_s=3.0) as cluster:
        closed = slow_to_close(cluster, 2.0, never=names[3])
        pointer = await cluster.begin(timeout_s=1)
        for name in names:
            await cluster["a"].publish_under(pointer, "one", name=name)
        with pytest.raises(TransactionsUnavailable, match="no answer from 1 topic: ns:t03"):
            await cluster.home().commit(pointer)
        assert len(closed) == 49
        await trio.testing.wait_all_tasks_blocked()
        assert cluster.home().standing(pointer) == "invalid"


def slow_to_close(cluster, answer_s, never=None):
    """Delay the closing of pointers by topics; return a list that collects the names of topics that have closed."""
    real, closed = cluster.ask, []

    async def ask(me, name, what):
        if isinstance(what, ClosePointers):
            await trio.sleep(float("inf") if name == never else answer_s)
            closed.append(name)
        return await real(me, name, what)

    cluster.ask = ask
    return closed
