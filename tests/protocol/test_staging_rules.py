"""The answers to stores without a write pointer and to publishes of segments, and the rows on disk."""

from __future__ import annotations

import pytest
from producing_topic import NOW_MS, POINTER
from staging_topic import StagingTopic

from plainsong.protocol.effects import Table
from plainsong.protocol.errors import (
    AlreadyPublished,
    GenerationChanged,
    InvalidParameter,
    LowSpace,
    MessageTooLarge,
    Overloaded,
    PlainsongError,
    ProducerExpired,
    ProducerFenced,
    ProducerNotFound,
    RequestTooLarge,
    SequenceConsumed,
    TopicFull,
    TransactionRequired,
    TransactionTooLarge,
)
from plainsong.protocol.keys import POINTER as POINTER_KIND
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.requests import PublishRequest
from plainsong.protocol.rows import NO_PAYLOAD, decode_row
from plainsong.protocol.topic.asks import (
    Cleaned,
    OpenProducer,
    PlanCleaning,
    PublishUnder,
    RemoveProducer,
    RollBackPointer,
    StoreUnder,
)
from plainsong.protocol.topic.producer_state import NamespacePolicy
from plainsong.protocol.topic.state import Now
from plainsong.protocol.transactions.view import View

POSITION_BYTES = 10


@pytest.fixture
def topic():
    return StagingTopic()


# --- one batch, once -------------------------------------------------------------------------------


def test_a_batch_is_one_plain_row_that_every_reader_gets_in_the_order_of_the_stores(topic):
    topic.stage("b", "one", ids=[0])
    topic.stage("lost", "two", ids=[0])
    topic.stage("a", "three", "four", ids=[0, 1])
    topic.stage("b", "five", ids=[1])
    assert topic.read() == []
    topic.batch(0, "a", "b")
    nothing_decided = View(0, frozenset(), frozenset())
    for view in (None, nothing_decided):
        assert topic.read(view) == ["one", "three", "four", "five"]
    ((_, value),) = topic.store.scan(Table.MESSAGE, b"", b"\xff")
    assert value[0] & NO_PAYLOAD
    assert decode_row(value).pointer is None
    assert topic.system_rows(POINTER_KIND) == []
    topic.load()
    assert (topic.read(), topic.state.pending, topic.state.staged) == (["one", "three", "four", "five"], {}, {})


@pytest.mark.parametrize("limit", range(1, 7))
def test_pages_of_every_size_may_end_inside_a_batch_and_continue_there(topic, limit):
    topic.publish([0], producer="other", payloads=["before"])
    topic.stage("lost", "x", "y")
    topic.stage("a", *"bcdef")
    topic.batch(0, "a")
    topic.publish([1], producer="other", payloads=["behind"])
    assert topic.read(limit=limit) == ["before", *"bcdef", "behind"]


def test_a_duplicate_gets_the_original_answer_and_needs_no_segment(topic):
    topic.stage("a", "one", ids=[0])
    first = topic.batch(4, "a")
    topic.load()
    topic.stage("b", "two", ids=[0])
    for again in (topic.batch(4, "a"), topic.batch(4, "gone", "never")):
        assert again.duplicate
        assert (again.first_id, again.last_id, again.last_sequence_id) == (first.first_id, first.last_id, 4)
    assert topic.batch(2, "b").duplicate, "an id below the last one is one that was seen"
    assert topic.read() == ["one"]
    topic.batch(5, "b")
    assert topic.read() == ["one", "two"]


def test_a_receipt_encloses_its_batch_and_nothing_else(topic):
    topic.stage("a", "one", "two")
    receipt = topic.batch(0, "a")
    behind = topic.publish([1])
    position = receipt.first_id[:POSITION_BYTES]
    assert receipt.first_id == position + bytes(10)
    assert receipt.last_id == position + b"\xff" * 10
    assert receipt.last_id < behind.first_id


def test_a_repeated_store_stores_nothing_twice_and_a_longer_one_only_the_new_part(topic):
    topic.stage("a", "0", "1", ids=[0, 1])
    topic.load()
    topic.stage("a", "0", "1", ids=[0, 1])
    topic.stage("a", "1", "2", ids=[1, 2])
    topic.stage("b", "0b", ids=[0])
    topic.batch(0, "a", "b")
    assert topic.read() == ["0", "1", "2", "0b"]


def test_stores_without_sequence_ids_are_all_new(topic):
    topic.stage("a", "same")
    topic.stage("a", "same")
    topic.batch(0, "a")
    assert topic.read() == ["same", "same"]


def test_producers_stage_concurrently(topic):
    topic.stage("a", "p", producer="p")
    topic.stage("a", "q", producer="q")
    topic.batch(0, "a", producer="q")
    assert topic.read() == ["q"]
    topic.batch(0, "a", producer="p")
    assert topic.read() == ["q", "p"]


def test_a_batch_may_be_larger_than_an_atomic_request_and_may_be_marked_atomic():
    topic = StagingTopic(max_atomic_messages=2, max_atomic_bytes=10)
    topic.stage("a", *"abcdefghijkl")
    topic.batch(0, "a", atomic=True)
    assert topic.read() == list("abcdefghijkl")


# --- refusals ----------------------------------------------------------------------------------------


def test_segments_that_are_not_staged_are_named_and_nothing_is_published(topic):
    error = topic.refuses(InvalidParameter, lambda: topic.batch(0, "a"))
    assert "'a'" in error.detail
    topic.stage("a", "one")
    error = topic.refuses(InvalidParameter, lambda: topic.batch(0, "b", "a", "c"))
    assert "'b', 'c'" in error.detail
    assert "'a'" not in error.detail
    topic.batch(0, "a", "a")
    assert topic.read() == ["one"]
    topic.refuses(InvalidParameter, lambda: topic.batch(1, "a"))


def test_losing_segments_cannot_be_published_later(topic):
    topic.stage("a", "one")
    topic.stage("b", "lost")
    topic.batch(0, "a")
    topic.refuses(InvalidParameter, lambda: topic.batch(1, "b"))


def test_a_partly_published_segment_cannot_continue(topic):
    topic.stage("a", "one", ids=[0])
    topic.batch(0, "a")
    topic.refuses(AlreadyPublished, lambda: topic.stage("a", "two", ids=[1]))
    topic.stage("a", "anew", ids=[0])
    topic.batch(1, "a")
    assert topic.read() == ["one", "anew"]


def test_leftovers_of_failed_attempts_are_dropped_by_a_session_that_says_so_and_by_deleting_the_producer(topic):
    topic = StagingTopic(max_segments=2)
    for drop in (OpenProducer("p", discard_staged=True), RemoveProducer("p")):
        topic.stage("a", "one", ids=[0])
        topic.stage("b", "two", ids=[0])
        for ids in ([0], None):
            error = topic.refuses(TransactionTooLarge, lambda ids=ids: topic.stage("c", "three", ids=ids))
            assert "discardStaged" in error.hint
        topic.open()
        topic.refuses(TransactionTooLarge, lambda: topic.stage("c", "three", ids=[0]))
        topic.ask(drop)
        topic.load()
        topic.refuses(InvalidParameter, lambda: topic.batch(0, "a"))
        topic.refuses(AlreadyPublished, lambda: topic.stage("a", "on", ids=[1]))
        assert len(topic.ask(PlanCleaning(0)).orphans) == 1
        topic.stage("c", "three", ids=[0])
        topic.batch(0, "c")
        assert topic.read()[-1:] == ["three"]
        orphans = tuple(pointer for pointer, *_ in topic.ask(PlanCleaning(0)).orphans)
        topic.ask(Cleaned(topic.state.prefix, (), orphans))
        assert not topic.state.pending
    topic.refuses(ProducerNotFound, lambda: topic.ask(RemoveProducer("q")))


def test_a_session_that_has_ended_neither_stages_nor_publishes(topic):
    old = topic.open().epoch
    topic.stage("a", "one", producer_epoch=old, ids=[0])
    new = topic.open().epoch
    topic.refuses(ProducerFenced, lambda: topic.stage("a", "two", producer_epoch=old, ids=[1]))
    topic.refuses(ProducerFenced, lambda: topic.stage("a", "two", producer_epoch=old))
    topic.refuses(ProducerFenced, lambda: topic.batch(0, "a", producer_epoch=old))
    topic.refuses(ProducerExpired, lambda: topic.batch(0, "a", producer_epoch=new + 1))
    topic.refuses(ProducerExpired, lambda: topic.stage("a", "x", producer="unknown", producer_epoch=1))
    topic.stage("a", "two", ids=[1])
    topic.batch(0, "a", producer_epoch=new)
    assert topic.read() == ["one", "two"]


def test_topics_that_require_a_transaction_refuse_both_and_those_without_transactions_accept_both():
    strict = StagingTopic(TopicProperties(transactional="required"))
    strict.refuses(TransactionRequired, lambda: strict.stage("a", "one"))
    strict.refuses(TransactionRequired, lambda: strict.batch(0, "a"))
    plain = StagingTopic(TopicProperties(transactional="disabled"))
    plain.stage("a", "one")
    plain.batch(0, "a")
    assert plain.read() == ["one"]


def test_ids_that_were_used_under_a_write_pointer_are_consumed(topic):
    topic.publish_under(POINTER, [0])
    topic.stage("a", "one")
    topic.refuses(SequenceConsumed, lambda: topic.batch(0, "a"))


def test_another_generation_is_refused(topic):
    topic.refuses(GenerationChanged, lambda: topic.stage("a", "one", generation=2))
    topic.stage("a", "one", generation=1)
    topic.refuses(GenerationChanged, lambda: topic.batch(0, "a", generation=2))


def test_messages_and_segments_have_the_bounds_of_all_stores():
    topic = StagingTopic(max_message_bytes=3, max_segments=2, max_pending=2)
    error = topic.refuses(MessageTooLarge, lambda: topic.stage("a", "one", "four"))
    assert "message 1" in error.detail
    topic.stage("a", "one")
    topic.stage("b", "two")
    for ids in (None, [0]):
        topic.refuses(TransactionTooLarge, lambda ids=ids: topic.stage("c", "x", ids=ids))
    topic.stage("b", "x")
    topic.stage("a", "x", producer="q")
    topic.refuses(Overloaded, lambda: topic.stage("a", "x", producer="r"))
    topic.refuses(Overloaded, lambda: topic.ask(StoreUnder(PublishRequest([b"x"], POINTER), 0)))
    topic.batch(0, "a", producer="q")
    topic.stage("a", "x", producer="r")


def test_on_a_full_disk_nothing_is_staged_or_published_and_duplicates_are_answered(topic):
    topic.stage("a", "one")
    topic.batch(0, "a")
    topic.stage("b", "two")
    full = Now(NOW_MS, 0.0, low_space=True)
    topic.now = lambda: full
    topic.refuses(LowSpace, lambda: topic.stage("b", "three"))
    topic.refuses(LowSpace, lambda: topic.batch(1, "b"))
    assert topic.batch(0, "a").duplicate


# --- deduplication switched off ------------------------------------------------------------------------


def test_without_deduplication_a_batch_is_published_as_it_arrives(topic):
    topic.policy = NamespacePolicy(enabled=False)
    topic.stage("a", "one", ids=[0])
    topic.stage("b", "one", ids=[0])
    receipt = topic.batch(0, "a", "b")
    assert (receipt.duplicate, receipt.deduplicated, receipt.last_sequence_id) == (False, False, None)
    assert receipt.verdict.last_sequence_id is None
    assert topic.read() == ["one", "one"]
    topic.refuses(InvalidParameter, lambda: topic.batch(0, "a"))
    topic.load()
    assert topic.read() == ["one", "one"]


def test_without_deduplication_a_store_is_still_known_by_its_sequence_ids():
    topic = StagingTopic(max_lifetime_ms=50_000)
    topic.policy = NamespacePolicy(enabled=False)
    topic.stage("a", "0", "1", ids=[0, 1])
    topic.load()
    topic.stage("a", "1", "2", ids=[1, 2])
    assert topic.pending().stored == 3
    topic.now_ms += 50_001
    topic.ask(PlanCleaning(0))
    topic.refuses(AlreadyPublished, lambda: topic.stage("a", "3", ids=[3]))
    topic.stage("a", "anew", ids=[0])
    topic.batch(0, "a")
    topic.refuses(AlreadyPublished, lambda: topic.stage("a", "on", ids=[1]))
    assert topic.read() == ["anew"]


def test_staged_messages_survive_a_switch_of_deduplication(topic):
    topic.stage("a", "one", ids=[0])
    topic.policy = NamespacePolicy(enabled=False)
    topic.stage("a", "two", ids=[1])
    topic.policy = NamespacePolicy(enabled=True, switched=1)
    topic.stage("a", "three", ids=[2])
    assert topic.batch(0, "a").deduplicated
    assert topic.read() == ["one", "two", "three"]


# --- room, TTLs ----------------------------------------------------------------------------------------


def test_staged_messages_count_for_max_bytes_until_they_are_published():
    topic = StagingTopic(TopicProperties(max_bytes=100))
    topic.stage("a", "x" * 40)
    topic.stage("b", "y" * 40)
    assert topic.state.stored_bytes == 80
    topic.refuses(TopicFull, lambda: topic.stage("a", "x" * 30))
    topic.refuses(TopicFull, lambda: topic.publish([0], producer="other", payloads=["z" * 30]))
    topic.refuses(RequestTooLarge, lambda: topic.stage("a", "x" * 101))
    topic.batch(0, "a")
    assert (topic.state.stored_bytes, topic.state.usage.bytes) == (0, 40 + 10)
    topic.publish([0], producer="other", payloads=["z" * 30])
    topic.load()
    assert (topic.state.stored_bytes, topic.state.usage.messages, topic.state.appended) == (0, 2, 2)


def test_times_to_live_count_from_the_publish_and_the_shortest_holds(topic):
    topic.stage("a", "short", ttl_s=1)
    topic.stage("a", "own", "long", message_ttls_s=[2, None])
    topic.now_ms += 10_000
    topic.batch(0, "a", ttl_s=3)
    for passed_ms, left in ((1000, ["short", "own", "long"]), (1, ["own", "long"]), (1000, ["long"]), (1000, [])):
        topic.now_ms += passed_ms
        topic.step()
        assert topic.read() == left


# --- protection of staged rows -------------------------------------------------------------------------


def test_rollbacks_of_transactions_leave_batches_alone(topic):
    topic.ask(PublishUnder(PublishRequest([b"undone"], POINTER), 0))
    topic.stage("a", "one")
    topic.batch(0, "a")
    topic.stage("b", "open")
    everything = bytes(POSITION_BYTES), b"\xff" * POSITION_BYTES
    for pointer in (POINTER, POINTER + 1):
        topic.ask(RollBackPointer(pointer, everything))
        topic.ask(RollBackPointer(pointer))
    assert topic.read(View(POINTER + 9, frozenset(), frozenset())) == ["one"]
    topic.batch(1, "b")
    with pytest.raises(InvalidParameter):
        topic.ask(RollBackPointer(topic.state.sequence.last_ts_ms * -65_536))


def test_a_batch_is_not_held_by_its_own_stores_and_is_held_by_earlier_messages(topic):
    topic.stage("a", "one")
    topic.ask(PublishUnder(PublishRequest([b"undecided"], POINTER), 0))
    topic.publish([0], producer="other", payloads=["plain"])
    nothing_decided = View(0, frozenset(), frozenset())
    assert topic.read(nothing_decided) == []
    topic.batch(0, "a")
    assert topic.read(nothing_decided) == []
    assert topic.read(View(POINTER, frozenset(), frozenset())) == ["undecided", "plain", "one"]


def test_every_error_of_staging_has_an_outcome_and_a_hint(topic):
    """Every error of staging has an outcome and a hint."""
    for ask in (lambda: topic.batch(0, "a"), lambda: topic.stage("a", "x", producer_epoch=3)):
        with pytest.raises(PlainsongError) as caught:
            ask()
        assert (caught.value.outcome, bool(caught.value.hint)) == ("not-applied", True)
