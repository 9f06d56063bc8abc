"""A topic's counts of producers, and its answers about producers that it has partly forgotten."""

from __future__ import annotations

import pytest
from producing_topic import Topic, publish

from plainsong.protocol.effects import Put
from plainsong.protocol.keys import HIGH_WATER
from plainsong.protocol.topic.producer_sessions import old_producer_view


def outcomes(topic, *asks):
    step = topic.core.step(list(enumerate(asks)), topic.now())
    topic.core.settled(step, topic.now())
    return step.producer_outcomes


def test_duplicates_and_partial_duplicates_are_counted_one_by_one():
    topic = Topic()
    topic.publish([1, 2])
    assert outcomes(topic, publish([1]), publish([2]), publish([2, 3]), publish([3, 4])) == {
        "duplicate": 2,
        "partial": 2,
    }


def test_duplicates_inside_gaps_are_counted_one_by_one():
    topic = Topic()
    topic.publish([1])
    topic.publish([9])
    assert outcomes(topic, publish([3]), publish([5])) == {"duplicate": 2, "unremembered": 2}


def test_evicted_producers_are_counted():
    topic = Topic(max_producers=2, producer_active_ms=1000)
    for name in ("a", "b"):
        topic.publish([1], name)
    topic.now_ms += 2000
    assert outcomes(topic, publish([1], "c"))["evicted"] == 1


@pytest.mark.parametrize(("most", "evicted"), [(63, 1), (64, 2), (127, 2), (128, 3)])
def test_with_many_producers_one_in_sixty_four_is_evicted_in_advance_so_that_few_new_ones_cost_a_mark(most, evicted):
    topic = Topic(max_producers=most, producer_active_ms=1000)
    for number in range(most):
        topic.publish([1], f"p{number}")
    topic.now_ms += 2000
    assert outcomes(topic, publish([1], "new"))["evicted"] == evicted


def test_a_producer_of_an_earlier_generation_is_kept_no_longer():
    topic = Topic()
    topic.publish([1])
    [producer] = topic.book.known.values()
    view = old_producer_view(producer, topic.book.record, 1)
    assert view.expires_ms == view.active_ms == topic.now_ms


@pytest.mark.parametrize(("few_rows", "is_written"), [(2, True), (3, False), (4, False)])
def test_closing_writes_a_mark_unless_there_are_few_rows_to_replay(few_rows, is_written):
    topic = Topic()
    topic.close()
    for payload in ("a", "b", "c"):
        topic.ask(publish(None, None, [payload]))
    step, _ = topic.core.close(few_rows=few_rows)
    marks = [each for each in step.operations if isinstance(each, Put) and each.prefix[:2] == b"\0" + HIGH_WATER]
    assert bool(marks) == is_written
