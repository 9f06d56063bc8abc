"""Staging across crashes, clocks set back, deletions and cleaning: nothing is lost, duplicated or left over."""

from __future__ import annotations

import pytest
from model_store import NAME
from producing_topic import NOW_MS, POINTER
from staging_topic import StagingTopic

from plainsong.protocol.effects import Table
from plainsong.protocol.errors import InvalidParameter, TopicNotFound
from plainsong.protocol.ids import pack_id
from plainsong.protocol.keys import POINTER as POINTER_KIND
from plainsong.protocol.keys import pointer_key
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.requests import PublishRequest
from plainsong.protocol.topic.asks import (
    Create,
    PlanCleaning,
    PublishStaged,
    PublishUnder,
    Remove,
    StoreUnder,
    Undelete,
)
from plainsong.protocol.topic.pending import Pending


@pytest.fixture
def topic():
    return StagingTopic()


def test_a_staged_pointer_is_never_issued_again_after_a_crash_with_the_clock_set_back(topic):
    seen = set()
    for hours in range(4):
        topic.stage("a", "one", producer=f"p{hours}")
        seen |= set(topic.state.staged.values())
        topic.load()
        topic.now_ms -= 3_600_000
    assert len(seen) == 4
    receipt = topic.publish([0], producer="other")
    positions = {pack_id(*divmod(-pointer, 65_536)) for pointer in seen}
    assert receipt.first_id > max(positions)


@pytest.mark.parametrize("rows", range(6))
@pytest.mark.parametrize("passed_ms", [-1000, 0, 1, 1000])
def test_an_interrupted_and_repeated_store_is_published_once(topic, rows, passed_ms):
    topic.stage("a", "zero", ids=[0])
    topic.now_ms += 5
    topic.step(topic.store_ask("a", "one", "two", ids=[1, 2]), rows=rows)
    topic.now_ms += passed_ms
    topic.stage("a", "one", "two", ids=[1, 2])
    topic.stage("a", "three", ids=[3])
    topic.batch(0, "a")
    assert topic.read() == ["zero", "one", "two", "three"]
    assert len(topic.store.tables[Table.PAYLOAD]) == 4


@pytest.mark.parametrize("rows", range(5))
@pytest.mark.parametrize("passed_ms", [-1000, 0, 1000])
def test_an_interrupted_and_repeated_first_store_is_published_once(topic, rows, passed_ms):
    topic.step(topic.store_ask("a", "one", "two", ids=[0, 1]), rows=rows)
    topic.now_ms += passed_ms
    topic.stage("a", "one", "two", ids=[0, 1])
    topic.batch(0, "a")
    assert topic.read() == ["one", "two"]


@pytest.mark.parametrize("rows", range(4))
def test_an_interrupted_publish_happened_or_not_and_its_repeat_takes_effect_once(topic, rows):
    topic.stage("a", "one", "two", ids=[0, 1])
    request = PublishRequest([], producer="p", sequence_ids=[0], segments=["a"])
    topic.step(PublishStaged(request, 0), rows=rows)
    there = rows > 1  # the first row records that the topic remembers producers
    assert topic.read() == (["one", "two"] if there else [])
    assert topic.batch(0, "a").duplicate is there
    assert topic.read() == ["one", "two"]
    assert topic.state.staged == {}
    topic.publish([0], producer="other")
    assert topic.system_rows(POINTER_KIND) == []


def test_interrupted_and_repeated_stores_of_a_transaction_are_published_once(topic):
    topic.store_under(POINTER, [0])
    topic.now_ms += 5
    request = PublishRequest([b"p1"], POINTER, producer="p", sequence_ids=[1])
    topic.step(StoreUnder(request, 0), rows=1)
    topic.now_ms += 5
    topic.store_under(POINTER, [1])
    topic.ask(PublishUnder(PublishRequest([], POINTER), 0))
    assert topic.read() == ["p0", "p1"]


def planned(topic):
    """Return the pointers that the janitor may remove as orphans."""
    return [pointer for pointer, _, _ in topic.ask(PlanCleaning(0)).orphans]


@pytest.mark.parametrize(("lifetime_ms", "life_ms"), [(50_000, 50_000), (0, 7 * 24 * 3600 * 1000)])
def test_unpublished_staged_messages_are_cleaned_one_lifetime_after_the_last_store(lifetime_ms, life_ms):
    topic = StagingTopic(max_lifetime_ms=lifetime_ms)
    topic.stage("a", "one")
    topic.now_ms += life_ms - 1
    assert planned(topic) == []
    topic.stage("a", "two")
    pointer = topic.pending().pointer
    topic.now_ms += life_ms - 1
    assert planned(topic) == []
    topic.now_ms += 1
    assert planned(topic) == [pointer]
    topic.refuses(InvalidParameter, lambda: topic.batch(0, "a"))
    topic.load()
    topic.refuses(InvalidParameter, lambda: topic.batch(0, "a"))
    topic.stage("a", "anew")
    assert topic.pending().pointer != pointer
    topic.batch(0, "a")
    assert topic.read() == ["anew"]
    assert planned(topic) == [pointer], "until all of it is gone"


def test_an_undeleted_topic_has_its_staged_messages_and_a_new_one_has_none(topic):
    topic.stage("a", "one")
    topic.ask(Remove())
    topic.refuses(TopicNotFound, lambda: topic.stage("a", "two"))
    topic.refuses(TopicNotFound, lambda: topic.batch(0, "a"))
    topic.load()
    topic.ask(Undelete())
    topic.stage("a", "two")
    topic.batch(0, "a")
    assert topic.read() == ["one", "two"]
    topic.stage("b", "gone")
    topic.ask(Remove())
    topic.ask(Create(TopicProperties()))
    topic.refuses(InvalidParameter, lambda: topic.batch(1, "b"))
    assert (topic.state.stored_bytes, topic.state.pending) == (0, {})
    topic.stage("b", "new")
    topic.batch(0, "b")
    assert topic.read() == ["new"]


def test_an_unreadable_row_of_a_staged_pointer_costs_its_staged_messages_and_nothing_else(topic):
    topic.stage("a", "one")
    pointer = topic.pending().pointer
    topic.core.state.pending[pointer] = Pending.of_damaged(pointer, NOW_MS)
    topic.core.state.staged.clear()
    topic.state.loaded()
    assert topic.state.staged == {}
    topic.refuses(InvalidParameter, lambda: topic.batch(0, "a"))
    topic.now_ms -= 1000
    topic.stage("a", "anew")
    assert topic.pending().pointer < pointer
    topic.batch(0, "a")
    assert topic.read() == ["anew"]
    topic.now_ms += topic.limits.max_lifetime_ms + 1000
    assert planned(topic) == []
    assert topic.state.pending == {}
    assert pointer_key(NAME, 1, pointer) in topic.store.tables[Table.METADATA], "it is kept for inspection"
