"""The verdicts on a producer's requests, with the stored rows and the answer for each."""

from __future__ import annotations

import pytest
from producing_topic import POINTER, Topic, publish

from plainsong.protocol.effects import Put, Table
from plainsong.protocol.errors import (
    DeduplicationDisabled,
    GenerationChanged,
    InvalidParameter,
    InvalidSequenceIds,
    PartialDuplicate,
    PlainsongError,
    ProducerExpired,
    ProducerFenced,
    ProducerNotFound,
    RolledBack,
    SequenceConsumed,
    TooManyProducers,
    TopicFull,
    TransactionNotInProgress,
    TransactionTooLarge,
)
from plainsong.protocol.ids import SEQUENCES_PER_MS, pack_position
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.requests import ProducerVerdict, PublishRequest
from plainsong.protocol.rows import BATCH, INDEX, STAMP, Stamp, decode_row
from plainsong.protocol.topic.asks import (
    Create,
    GetProducer,
    ListProducers,
    OpenProducer,
    Publish,
    PublishUnder,
    Remove,
    RollBackPointer,
    SetProperties,
    Undelete,
)
from plainsong.protocol.topic.producer_state import NamespacePolicy
from plainsong.protocol.transactions.transaction import NoAuthority

DAY_MS = 24 * 3600 * 1000


def rows_of(topic):
    return [decode_row(value) for _, value in sorted(topic.store.tables[Table.MESSAGE].items())]


# --- verdicts -------------------------------------------------------------------------------------


def test_e1_a_new_producer_has_no_last_sequence_id():
    assert Topic().open().last_sequence_id == -1


def test_e2_stored_ids_are_duplicates():
    topic = Topic()
    for each in range(3):
        assert topic.publish([each]).duplicate is False
    for each in (1, 2):
        assert topic.publish([each]).duplicate
    assert topic.payloads() == ["p0", "p1", "p2"]


def test_e3_stored_ids_are_duplicates_after_a_restart_too():
    topic = Topic()
    for each in range(3):
        topic.publish([each])
    topic.load()
    again = [topic.publish([each]) for each in (1, 2)]
    assert all(each.duplicate for each in again)
    assert again[1].last_sequence_id == 2
    assert topic.payloads() == ["p0", "p1", "p2"]


def test_e4_ids_inside_a_gap_count_as_seen_and_are_counted():
    topic = Topic()
    topic.publish([1])
    topic.publish([5])
    step = topic.core.step([(0, publish([3]))], topic.now())
    [(_, answer)] = topic.core.settled(step, topic.now())
    assert answer.duplicate
    assert (answer.first_id, answer.last_id) == (None, None)
    assert step.producer_outcomes == {"duplicate": 1, "unremembered": 1}
    assert topic.publish([6]).duplicate is False
    assert topic.payloads() == ["p1", "p5", "p6"]


def test_e5_producers_and_topics_are_independent():
    topic = Topic()
    topic.publish([0], "a")
    assert topic.publish([0], "b").duplicate is False
    assert Topic().publish([0], "a").duplicate is False


def test_e6_a_duplicate_of_the_last_five_requests_has_the_original_ids_and_an_older_one_has_none():
    topic = Topic()
    answers = [topic.publish([each, each + 1]) for each in range(0, 14, 2)]
    again = [topic.publish([each, each + 1]) for each in range(0, 14, 2)]
    assert [(each.first_id, each.last_id) for each in again[2:]] == [(e.first_id, e.last_id) for e in answers[2:]]
    assert [(each.first_id, each.last_id) for each in again[:2]] == [(None, None)] * 2
    assert all(each.duplicate and each.deduplicated for each in again)


def test_a_part_of_a_request_sent_again_is_found_in_it():
    topic = Topic()
    whole = topic.publish(range(10))
    part = topic.publish([3, 4])
    first = int.from_bytes(whole.first_id[:10], "big")
    assert [int.from_bytes(each[:10], "big") - first for each in (part.first_id, part.last_id)] == [3, 4]
    both = Topic()
    both.publish([0, 1]), both.publish([2, 3])
    again = both.publish(range(4))
    assert (again.first_id, again.last_id) == (None, None), "between two requests there may be messages of others"


def test_a_duplicate_has_the_ids_of_one_remembered_request_and_none_that_are_uncertain():
    topic = Topic()
    topic.publish([0])
    topic.publish([0], "other")
    topic.publish([5])
    again = topic.publish([0, 3, 5])
    assert (again.duplicate, again.first_id, again.last_id) == (True, None, None)
    holes = topic.publish([10, 13, 15])
    whole, part = topic.publish([10, 11, 15]), topic.publish([10, 13])
    assert (whole.first_id, whole.last_id) == (holes.first_id, holes.last_id)
    assert (part.first_id, part.last_id) == (holes.first_id, None)


def test_e7_without_a_producer_rows_and_answers_are_the_plain_ones():
    topic = Topic()
    request = PublishRequest([b"m", b"n"])
    receipt = topic.ask(Publish(request, 0))
    assert [value for _, value in sorted(topic.store.tables[Table.MESSAGE].items())] == [b"\0\2m", b"\0\2n"]
    assert (receipt.deduplicated, receipt.last_sequence_id, receipt.verdict) == (False, None, None)
    assert topic.system_rows(b"e") == topic.system_rows(b"p") == []


def test_e8_a_producer_gives_an_id_to_every_message():
    topic = Topic()
    with pytest.raises(InvalidSequenceIds):
        topic.ask(Publish(PublishRequest([b"m"], producer="p"), 0))
    assert topic.payloads() == []


def test_e9_the_rest_of_a_straddling_request_is_stored_and_both_parts_are_reported():
    topic = Topic()
    topic.publish(range(6))
    receipt = topic.publish(range(4, 9))
    assert (receipt.stored, receipt.dropped) == ([6, 7, 8], [4, 5])
    assert receipt.duplicate is False
    assert receipt.verdict == ProducerVerdict("partial", 8)
    assert topic.payloads() == [f"p{each}" for each in range(9)]


def test_e9_the_rest_keeps_its_attributes_and_a_copy_names_neither_stored_nor_dropped_messages():
    topic = Topic()
    topic.publish([0])
    topic.publish([0, 1, 2], attributes=[{"of": "0"}, {"of": "1"}, {"of": "2"}])
    assert [row.extras.get("a") for row in rows_of(topic)] == [None, {"of": "1"}, {"of": "2"}]
    copy = topic.publish([1, 2])
    assert (copy.duplicate, copy.stored, copy.dropped) == (True, None, None)


def test_e10_a_straddling_atomic_request_stores_nothing():
    topic = Topic()
    topic.publish(range(6))
    with pytest.raises(PartialDuplicate):
        topic.publish(range(4, 9), atomic=True)
    assert topic.get().last_sequence_id == 5
    assert topic.publish(range(6), atomic=True).duplicate


def test_e13_a_copy_in_the_same_step_shares_the_first_ones_outcome():
    topic = Topic()
    one, copy = topic.step(publish([0, 1]), publish([0, 1]))
    assert (one.duplicate, copy.duplicate) == (False, True)
    assert (one.first_id, one.last_id) == (copy.first_id, copy.last_id)
    assert topic.payloads() == ["p0", "p1"]


def test_e15_a_failed_request_is_accepted_again_and_no_later_one_passes_it():
    topic = Topic()
    topic.publish([6])
    topic.step(publish([7]), publish([8]), rows=0)
    assert topic.publish([7]).duplicate is False
    assert topic.publish([8]).duplicate is False
    assert topic.payloads() == ["p6", "p7", "p8"]


def test_e19_an_invalid_request_fails_alone():
    topic = Topic()
    first, bad, last = topic.step(publish([0]), publish([1], producer_epoch=3), publish([1]))
    assert type(bad) is ProducerExpired
    assert (first.duplicate, last.duplicate) == (False, False)
    assert topic.payloads() == ["p0", "p1"]


def test_a_refused_request_creates_no_producer():
    topic = Topic(TopicProperties(max_bytes=30))
    topic.publish([0], payloads=["x" * 12])
    with pytest.raises(TopicFull):
        topic.publish([0], "q", payloads=["x" * 20])
    assert topic.book.known.keys() == {"p"}
    assert topic.publish([0], payloads=["x" * 12]).duplicate, "a duplicate needs no room"


def test_ids_of_one_generation_mean_nothing_in_another():
    topic = Topic()
    topic.publish([0], generation=1)
    topic.ask(Remove())
    topic.ask(Create(TopicProperties()))
    with pytest.raises(GenerationChanged):
        topic.publish([1], generation=1)
    assert topic.publish([0], generation=2).duplicate is False


def test_an_undeleted_generation_knows_its_producers():
    topic = Topic()
    topic.open()
    topic.publish([0, 1], producer_epoch=1)
    topic.ask(Remove())
    topic.load()
    assert topic.get(generation=1).last_sequence_id == 1
    topic.ask(Undelete())
    assert topic.publish([0, 1], producer_epoch=1).duplicate


# --- content of rows ------------------------------------------------------------------------------


def test_the_first_row_has_the_stamp_and_the_others_are_those_of_a_plain_request():
    topic = Topic()
    topic.publish([3, 4, 7])
    topic.publish(range(8, 308), routing_key="k", payloads=["x" * (each % 3) for each in range(300)])
    first, *rest = rows_of(topic)
    assert Stamp.of(first) == Stamp("p", 0, [3, 4, 7], 3)
    assert [row.extras for row in rest[:2]] == [{}, {}]
    assert Stamp.of(rest[2]) == Stamp("p", 0, range(8, 308), 300)
    assert [set(row.extras) for row in rest[3:]] == [{"a"}] * 299
    assert {str(row.extras["a"]) for row in rest[2:]} == {"{'routingKey': 'k'}"}
    assert [len(row.payload) for row in rest[2:]] == [each % 3 for each in range(300)]


def test_an_atomic_request_without_a_producer_is_marked_as_one():
    topic = Topic()
    topic.ask(Publish(PublishRequest([b"a", b"b"], atomic=True), 0))
    assert [row.extras for row in rows_of(topic)] == [{BATCH: 2}, {}]


@pytest.mark.parametrize("more", [{}, {"routing_key": "k"}], ids=str)
@pytest.mark.parametrize("count", [2, 300, 1025])
def test_in_a_store_shared_by_instances_each_row_is_marked_as_part_of_a_request(count, more):
    # An owner of version 0.1 does not count other rows: it would treat the request as cut off.
    topic = Topic()
    topic.state.epoch = 7
    topic.publish(range(count), **more)
    topic.ask(Publish(PublishRequest([b"x"] * count, atomic=True, **more), 0))
    topic.store_under(POINTER, [0], "s")
    topic.publish_under(POINTER, [9000])
    rows = rows_of(topic)
    assert [row.extras.get(INDEX, 0) for row in rows] == [*range(count)] * 2 + [0, 1]
    assert {"a" in row.extras for row in rows[: 2 * count]} == {bool(more)}


@pytest.mark.parametrize("kind", ["a producer's", "an atomic"])
@pytest.mark.parametrize(
    "own", [{"message_ttls_s": [None, 5, 6]}, {"ttl_s": 9}, {"attributes": [{}, {"a": "1"}, {}]}], ids=str
)
def test_rows_that_may_be_removed_one_by_one_have_their_index_in_the_request(kind, own):
    topic = Topic()
    if kind == "an atomic":
        topic.ask(Publish(PublishRequest([b"x"] * 3, atomic=True, **own), 0))
    else:
        topic.publish([0, 1, 2], **own)
    assert [row.extras.get(INDEX) for row in rows_of(topic)] == [None, 1, 2]


def test_attributes_are_in_the_rows_of_their_messages_in_every_case():
    topic = Topic()
    strings = [{"a": "1"}, {}, {"b": "2"}]
    topic.ask(Publish(PublishRequest([b"x"] * 3, attributes=strings), 0))
    topic.publish([0, 1, 2], attributes=strings, message_ttls_s=[None, 5, 6], routing_key="k")
    rows = rows_of(topic)
    assert [row.extras for row in rows[:3]] == [{"a": {"a": "1"}}, {}, {"a": {"b": "2"}}]
    assert [row.extras["a"] for row in rows[3:]] == [{**each, "routingKey": "k"} for each in strings]
    assert [row.extras.get(INDEX) for row in rows[3:]] == [None, 1, 2]
    assert [row.ttl_s for row in rows[3:]] == [None, 5, 6]


def test_one_request_has_one_routing_key():
    with pytest.raises(InvalidParameter):
        Topic().publish([0], attributes=[{"routingKey": "a"}], routing_key="b")


def test_e50_an_atomic_request_has_its_bounds_exactly():
    topic = Topic(max_atomic_messages=3, max_atomic_bytes=6)
    topic.publish([0, 1, 2], payloads=["xx"] * 3, atomic=True)
    for count, size in ((4, 1), (2, 4)):
        with pytest.raises(TransactionTooLarge):
            topic.ask(Publish(PublishRequest([b"x" * size] * count, atomic=True), 0))
    assert len(topic.payloads()) == 3


def test_e41_messages_of_an_atomic_request_follow_each_other():
    topic = Topic()
    topic.step(publish([0], "a"), publish(range(3), atomic=True), publish([1], "a"))
    assert topic.payloads() == ["a0", "p0", "p1", "p2", "a1"]


@pytest.mark.parametrize("rows", range(1, 5))
def test_e43_nothing_of_an_interrupted_atomic_request_is_ever_visible(rows):
    topic = Topic()
    topic.publish([0])
    ask = publish(range(1, 6), atomic=True)
    topic.step(ask, rows=rows)
    assert topic.step()[:] == []
    assert topic.payloads() == ["p0"]
    assert topic.state.usage.messages == 1
    assert topic.step(ask)[0].duplicate is False
    assert topic.payloads() == [f"p{each}" for each in range(6)]


@pytest.mark.parametrize("rows", range(6))
def test_the_rest_of_an_interrupted_plain_request_is_stored_when_it_is_sent_again(rows):
    topic = Topic()
    topic.publish([0])
    topic.step(publish(range(1, 6)), rows=rows)
    topic.publish([0], "other")  # at the position of the next row
    topic.load()
    receipt = topic.publish(range(1, 6))
    assert topic.get().last_sequence_id == 5
    assert sorted(topic.payloads()) == sorted(["other0", *(f"p{each}" for each in range(6))])
    assert receipt.verdict.duplicate == ("false" if rows == 0 else "true" if rows == 5 else "partial")


def plain(*payloads):
    return Publish(PublishRequest([each.encode() for each in payloads]), 0)


@pytest.mark.parametrize("rows", range(6))
def test_messages_that_follow_an_interrupted_request_are_not_counted_as_its_own(rows):
    topic = Topic()
    topic.publish([0])
    topic.step(publish(range(1, 6)), rows=rows)
    topic.ask(plain("a", "b"))  # the clock does not advance: these get the next positions
    topic.load()
    assert topic.get().last_sequence_id == rows
    receipt = topic.publish(range(1, 6))
    assert sorted(topic.payloads()) == sorted(["a", "b", *(f"p{each}" for each in range(6))])
    assert receipt.verdict.duplicate == ("false" if rows == 0 else "true" if rows == 5 else "partial")


@pytest.mark.parametrize("rows", range(5))
def test_messages_that_follow_an_interrupted_atomic_request_are_not_removed_with_it(rows):
    topic = Topic()
    topic.ask(plain("before"))
    topic.step(Publish(PublishRequest([b"x"] * 5, atomic=True), 0), rows=rows)
    topic.ask(plain("a", "b"))
    topic.load()
    assert topic.payloads() == ["before", "a", "b"]
    assert topic.state.usage.messages == 3


def test_a_request_that_spans_two_milliseconds_is_counted_in_full():
    topic = Topic()
    topic.ask(plain(*["x"] * (SEQUENCES_PER_MS - 2)))
    topic.publish(range(5))
    topic.ask(plain("a"))
    assert topic.state.sequence.last_ts_ms == topic.now_ms + 1
    topic.load()
    assert topic.get().last_sequence_id == 4
    assert topic.publish(range(5)).duplicate


# --- sessions -------------------------------------------------------------------------------------


def test_e39_a_session_ends_the_ones_before_it_even_across_a_restart():
    topic = Topic()
    assert topic.open().epoch == 1
    topic.publish([0], producer_epoch=1)
    assert topic.open().epoch == 2
    topic.load()
    with pytest.raises(ProducerFenced):
        topic.publish([1], producer_epoch=1)
    assert topic.publish([1], producer_epoch=2).duplicate is False
    assert topic.get().last_sequence_id == 1


def test_the_older_session_is_fenced_within_one_step_too():
    topic = Topic()
    topic.open()
    before, opened, after = topic.step(
        publish([0], producer_epoch=1), OpenProducer("p"), publish([1], producer_epoch=1)
    )
    assert before.duplicate is False
    assert (opened.epoch, opened.last_sequence_id) == (2, 0)
    assert type(after) is ProducerFenced


def test_a_session_that_was_not_written_was_not_opened():
    topic = Topic()
    topic.open()
    topic.step(OpenProducer("p"), rows=0)
    assert topic.publish([0], producer_epoch=1).duplicate is False


def test_a_generated_name_must_be_new():
    topic = Topic()
    assert topic.open("made", must_be_new=True).epoch == 1
    with pytest.raises(ProducerFenced):
        topic.open("made", must_be_new=True)


def test_opening_returns_recent_requests():
    topic = Topic()
    receipt = topic.publish([4, 5])
    [result] = topic.open().recent
    assert (result.first, result.last, result.first_id, result.last_id) == (4, 5, receipt.first_id, receipt.last_id)
    assert result.response is None


def test_e35_e37_an_idle_producer_is_forgotten_and_its_session_gets_an_error():
    topic = Topic(producer_retention_ms=7 * DAY_MS)
    topic.open()
    topic.publish([0], producer_epoch=1)
    topic.close()
    topic.now_ms += 7 * DAY_MS + 1
    with pytest.raises(ProducerExpired):
        topic.publish([1], producer_epoch=1)
    topic.load()
    assert topic.book.known == {}
    assert topic.publish([0]).duplicate is False


def test_e36_an_active_producer_is_kept():
    topic = Topic(producer_retention_ms=7 * DAY_MS)
    for each in range(3):
        topic.publish([each])
        topic.now_ms += 6 * DAY_MS
        topic.load()
    assert topic.publish([2]).duplicate


def test_a_session_of_a_forgotten_producer_does_not_match_the_next_one():
    topic = Topic()
    topic.open()
    topic.remove()
    assert topic.open().epoch == 2
    with pytest.raises(ProducerFenced):
        topic.publish([0], producer_epoch=1)
    topic.ask(Remove())
    topic.ask(Create(TopicProperties()))
    topic.load()
    assert topic.open().epoch == 3


def test_a_longer_retention_is_kept_and_has_a_bound_and_a_cap():
    topic = Topic(producer_retention_ms=DAY_MS, max_retention_ms=10 * DAY_MS, max_long_producers=1)
    topic.open("long", retention_ms=10 * DAY_MS)
    topic.publish([0], "long", producer_epoch=1)
    with pytest.raises(TooManyProducers):
        topic.open("other", retention_ms=2 * DAY_MS)
    with pytest.raises(InvalidParameter):
        topic.open("other", retention_ms=11 * DAY_MS)
    topic.close()
    topic.now_ms += 9 * DAY_MS
    assert topic.publish([0], "long", producer_epoch=1).duplicate
    topic.now_ms += 10 * DAY_MS + 1
    topic.open("other", retention_ms=2 * DAY_MS)


def test_a_producer_with_a_longer_retention_counts_once_however_often_it_is_opened():
    topic = Topic(producer_retention_ms=DAY_MS, max_retention_ms=10 * DAY_MS, max_long_producers=2)
    for _ in range(3):
        topic.open("long", retention_ms=2 * DAY_MS)
    assert topic.book.long_retention == 1
    topic.open("long", retention_ms=DAY_MS)
    assert topic.book.long_retention == 0


def test_a_session_may_ask_for_any_retention_from_none_to_the_cap():
    topic = Topic(producer_retention_ms=DAY_MS, max_retention_ms=10 * DAY_MS)
    for retention_ms in (0, 10 * DAY_MS):
        topic.open(retention_ms=retention_ms)
    for retention_ms in (-1, 10 * DAY_MS + 1):
        with pytest.raises(InvalidParameter):
            topic.open(retention_ms=retention_ms)


def test_e38_the_longest_idle_producers_are_evicted_and_when_all_are_active_the_new_one_is_refused():
    topic = Topic(max_producers=3, producer_active_ms=1000, max_long_producers=3)
    topic.open("long", retention_ms=30 * DAY_MS)
    for each in range(2):
        topic.now_ms += 1
        topic.publish([0], f"p{each}")
    with pytest.raises(TooManyProducers):
        topic.publish([0], "new")
    topic.now_ms += 1000
    topic.publish([0], "new")
    assert topic.book.known.keys() == {"long", "p1", "new"}
    topic.load()
    assert topic.book.known.keys() == {"long", "p1", "new"}
    assert topic.publish([0], "p1").duplicate


def test_with_producers_that_publish_once_the_book_stays_bounded():
    topic = Topic(max_producers=64, producer_active_ms=0)
    for each in range(2000):
        topic.now_ms += 1
        topic.publish([0], f"p{each}")
    assert len(topic.book.known) <= 64
    assert len(topic.system_rows(b"p")) <= 64
    assert len(topic.payloads()) == 1000  # one page


def test_a_deleted_producer_starts_over():
    topic = Topic()
    topic.publish([5])
    topic.remove()
    topic.load()
    with pytest.raises(ProducerNotFound):
        topic.get()
    assert topic.publish([0]).duplicate is False
    topic.load()
    assert topic.get().last_sequence_id == 0


def test_producers_are_listed_by_name_page_by_page():
    topic = Topic()
    for name in "cab":
        topic.publish([1], name)
    page = topic.page(limit=2)
    assert ([each.name for each in page.producers], page.more, page.total) == (["a", "b"], True, 3)
    page = topic.page(after="b", limit=2)
    assert ([each.name for each in page.producers], page.more) == (["c"], False)
    assert page.snapshot.entries_since == 3


def test_both_maps_are_shown_while_a_commit_is_under_way():
    topic = Topic()
    topic.publish([1])
    step = topic.core.step([(0, publish([2])), (1, ListProducers()), (2, GetProducer("p"))], topic.now())
    producer = topic.book.known["p"]
    assert (producer.pushed, producer.persisted) == (2, 1)
    topic.core.settled(step, topic.now())
    assert (producer.pushed, producer.persisted) == (2, 2)
    assert (step.answers[1][1].producers[0].pushed, step.answers[2][1].last_sequence_id) == (2, 2)


# --- snapshots ------------------------------------------------------------------------------------


def test_e23_a_snapshot_with_the_mark_is_written_every_few_requests():
    topic = Topic(snapshot_entries=10)
    for each in range(10):
        topic.publish([each])
    snapshot = topic.page().snapshot
    assert snapshot.entries_since == 0
    last = topic.state.sequence
    assert snapshot.position == pack_position(last.last_ts_ms, last.last_sequence_id)
    topic.load()
    assert topic.book.replayed_entries == 0
    assert topic.get().last_sequence_id == 9


def test_e24_a_snapshot_is_also_written_after_a_while_without_requests():
    topic = Topic(snapshot_interval_ms=120_000)
    topic.publish([0])
    due_s = topic.core.next_deadline_s()
    assert due_s == topic.now_ms / 1000 + 120
    topic.now_ms += 119_999
    topic.step()
    assert topic.page().snapshot.entries_since == 1
    topic.now_ms += 1
    topic.step()
    assert topic.page().snapshot.entries_since == 0
    assert topic.core.next_deadline_s() is None
    topic.load()
    assert topic.book.replayed_entries == 0


def test_e25_a_snapshot_at_close_limits_a_later_replay_to_an_interval():
    topic = Topic(snapshot_entries=1000)
    for each in range(999):
        topic.publish([each])
    topic.close()
    for each in range(999, 1998):
        topic.publish([each])
    topic.load()
    assert topic.book.replayed_entries == 999
    topic.publish([1998])
    assert topic.page().snapshot.entries_since == 0


def test_e31_without_a_mark_all_rows_are_replayed_to_the_same_map():
    topic = Topic(snapshot_entries=3)
    for each in range(10):
        topic.publish([2 * each, 2 * each + 1], "pq"[each % 2])
    before = {name: (each.pushed, each.recent) for name, each in topic.book.known.items()}
    [mark] = topic.system_rows(b"h")
    del topic.store.tables[Table.METADATA][mark]
    for key in topic.system_rows(b"p"):
        del topic.store.tables[Table.METADATA][key]
    topic.load()
    assert {name: (each.pushed, each.recent) for name, each in topic.book.known.items()} == before


def test_without_a_mark_forgotten_producers_stay_forgotten():
    topic = Topic()
    topic.publish([7])
    topic.remove()
    topic.publish([0])
    [mark] = topic.system_rows(b"h")
    del topic.store.tables[Table.METADATA][mark]
    topic.load()
    assert topic.get().last_sequence_id == 0


def test_a_session_is_opened_in_the_generation_known_to_its_client():
    topic = Topic()
    generation = topic.open().generation
    assert topic.open(generation=generation).generation == generation
    with pytest.raises(GenerationChanged):
        topic.open(generation=generation + 1)
    assert topic.get().epoch == 2


# --- switches -------------------------------------------------------------------------------------


def test_e33_switching_off_forgets_everything_and_switching_on_records_from_where():
    topic = Topic()
    topic.publish([0, 1])
    assert topic.page().enabled is True
    topic.ask(SetProperties({"deduplication": "disabled"}))
    assert topic.page().enabled is False
    assert topic.book.known == {}
    assert topic.system_rows(b"p") == []
    receipt = topic.publish([1])
    assert (receipt.duplicate, receipt.deduplicated, receipt.last_sequence_id) == (False, False, None)
    assert receipt.verdict == ProducerVerdict("false", None)
    with pytest.raises(DeduplicationDisabled):
        topic.open()
    last = topic.state.watermark
    topic.ask(SetProperties({"deduplication": "enabled"}))
    assert topic.publish([0, 1]).duplicate is False
    topic.load()
    assert topic.publish([0, 1]).duplicate
    assert topic.get().enabled_from == topic.page().enabled_from == last
    assert topic.payloads() == ["p0", "p1", "p1", "p0", "p1"]


def test_without_deduplication_answers_under_a_pointer_report_no_duplicate():
    topic = Topic(TopicProperties(deduplication="disabled"))
    topic.store_under(POINTER, None, None, ["a"])
    first, again = (topic.publish_under(POINTER, [], "p", []) for _ in range(2))
    assert again == first
    assert first.verdict == again.verdict == ProducerVerdict("false", None)


@pytest.mark.parametrize("rows", range(6))
def test_an_interrupted_switch_off_is_completed(rows):
    topic = Topic()
    for name in "pqr":
        topic.open(name)
    topic.policy = NamespacePolicy(enabled=False, switched=1)
    topic.step(rows=rows)
    topic.step()
    assert topic.system_rows(b"p") == []
    topic.policy = NamespacePolicy(enabled=True, switched=1)
    topic.step()
    assert topic.book.known == {}
    assert topic.open().epoch == 2


def test_e34_the_topic_overrides_its_namespace_and_that_overrides_the_service():
    topic = Topic(deduplication_default=False)
    assert topic.publish([0]).deduplicated is False
    topic.policy = NamespacePolicy(enabled=True)
    assert topic.publish([0]).deduplicated
    topic.ask(SetProperties({"deduplication": "disabled"}))
    assert topic.publish([0]).deduplicated is False
    topic.ask(SetProperties({}))
    assert topic.publish([0]).deduplicated
    topic.policy = NamespacePolicy()
    assert topic.publish([0]).deduplicated is False


def test_the_system_namespace_remembers_producers_only_where_a_topic_says_so():
    topic = Topic(name=TopicName("system", "t"))
    topic.policy = NamespacePolicy(enabled=True)
    assert topic.publish([0]).deduplicated is False
    topic.ask(SetProperties({"deduplication": "enabled"}))
    assert topic.publish([0]).deduplicated


def test_deduplication_switched_off_and_on_while_the_topic_was_closed_forgets_its_producers():
    topic = Topic()
    topic.publish([0])
    topic.close()
    topic.policy = NamespacePolicy(enabled=None, switched=1)
    assert topic.publish([0]).duplicate is False
    topic.load()
    assert topic.publish([0]).duplicate


def test_a_topic_with_its_own_setting_ignores_that_of_its_namespace():
    topic = Topic(TopicProperties(deduplication="enabled"))
    topic.publish([0])
    topic.policy = NamespacePolicy(enabled=False, switched=1)
    assert topic.publish([0]).duplicate
    topic.policy = NamespacePolicy(enabled=None, switched=1)
    topic.ask(SetProperties({}))
    topic.load()
    assert topic.publish([0]).duplicate


def test_e40_when_switched_off_many_producers_leave_nothing():
    topic = Topic(TopicProperties(deduplication="disabled"))
    for each in range(200):
        topic.publish([0], f"p{each}")
    assert topic.book.known == {}
    assert topic.book.changed == set()
    assert topic.system_rows(b"p") == topic.system_rows(b"e") == []
    assert all(row.extras == {} for row in rows_of(topic))


# --- under a write pointer ------------------------------------------------------------------------


def test_e59_a_repeated_transactional_publish_has_the_same_answer():
    topic = Topic()
    first = topic.publish_under(POINTER, [0, 1])
    again = topic.publish_under(POINTER, [0, 1])
    assert again.duplicate
    assert again.verdict == ProducerVerdict("true", 1)
    again.duplicate = False
    assert again == first
    assert topic.payloads() == ["p0", "p1"]


@pytest.mark.parametrize("standing", ["deciding", "committed"])
def test_a_transactional_publish_repeated_while_its_transaction_commits_has_the_same_answer(standing):
    class Standings(NoAuthority):
        now = "in_progress"

        def standing(self, pointer):
            return self.now

    authority = Standings()
    topic = Topic(authority=authority)
    first = topic.publish_under(POINTER, [0, 1])
    authority.now = standing
    again = topic.publish_under(POINTER, [0, 1])
    assert (again.duplicate, again.start_sequence_id) == (True, first.start_sequence_id)
    assert (again.end_timestamp_ms, again.end_sequence_id) == (first.end_timestamp_ms, first.end_sequence_id)
    with pytest.raises(TransactionNotInProgress):
        topic.publish_under(POINTER, [2])


def test_ids_used_under_a_pointer_are_consumed_for_any_other_even_after_a_rollback():
    topic = Topic()
    topic.publish_under(POINTER, [0, 1])
    with pytest.raises(SequenceConsumed):
        topic.publish_under(POINTER + 1, [0, 1])
    with pytest.raises(SequenceConsumed):
        topic.publish([0, 1])
    topic.ask(RollBackPointer(POINTER))
    with pytest.raises(SequenceConsumed):
        topic.publish_under(POINTER + 1, [0, 1])
    with pytest.raises(RolledBack):
        topic.publish_under(POINTER, [0, 1])
    topic.load()
    with pytest.raises(SequenceConsumed):
        topic.publish_under(POINTER + 1, [1, 2])
    topic.publish_under(POINTER + 1, [2, 3])


def test_a_straddling_transactional_publish_covers_the_messages_before_it():
    topic = Topic()
    first = topic.publish_under(POINTER, [0, 1])
    rest = topic.publish_under(POINTER, [0, 1, 2])
    assert rest.verdict == ProducerVerdict("partial", 2)
    assert (rest.start_timestamp_ms, rest.start_sequence_id) == (first.start_timestamp_ms, first.start_sequence_id)
    assert rest.end_sequence_id == first.end_sequence_id + 1


def test_stored_messages_are_published_once_for_one_sequence_id():
    topic = Topic()
    topic.store_under(POINTER, [0, 1])
    topic.store_under(POINTER, [0, 1])
    assert topic.state.pending[POINTER].stored == 2
    topic.load()
    topic.store_under(POINTER, [1, 2])
    assert topic.state.pending[POINTER].stored == 3
    request = PublishRequest([], POINTER, producer="p", sequence_ids=[0])
    first = topic.ask(PublishUnder(request, 0))
    again = topic.ask(PublishUnder(request, 0))
    assert again.duplicate
    assert (again.start_sequence_id, again.end_sequence_id) == (first.start_sequence_id, first.end_sequence_id)
    [row] = rows_of(topic)
    assert Stamp.of(row) == Stamp("p", 0, range(1), 1)
    topic.store_under(POINTER, [1, 2])  # a late retransmission changes nothing


def test_the_stamp_distinguishes_stored_messages_from_others_published_together():
    topic = Topic()
    topic.store_under(POINTER, [0], "s")
    topic.publish_under(POINTER, [4, 5])
    reference, first, second = rows_of(topic)
    assert Stamp.of(reference) == Stamp("p", 0, range(4, 6), 3)
    assert reference.extras[STAMP][4] == 3
    assert [first.extras, second.extras] == [{}, {}]
    topic.load()
    assert topic.get().last_sequence_id == 5
    assert topic.publish_under(POINTER, [4, 5]).duplicate


def test_another_attempt_is_stored_under_its_own_segment():
    topic = Topic()
    topic.store_under(POINTER, [0, 1], segment="one")
    topic.store_under(POINTER, [0, 1], segment="two")
    topic.store_under(POINTER, [0, 1], segment="two")
    assert topic.state.pending[POINTER].stored == 4


def test_a_session_of_an_earlier_producer_never_matches_a_later_one_that_began_without_a_session():
    topic = Topic()
    topic.open()
    old = topic.open().epoch
    topic.remove()
    topic.publish([0])
    assert topic.open().epoch > old
    with pytest.raises(ProducerFenced):
        topic.publish([1], producer_epoch=old)


@pytest.mark.parametrize("crashed", [False, True])
def test_a_publish_under_an_open_pointer_is_a_duplicate_however_many_requests_ago(crashed):
    topic = Topic()
    answers = [topic.publish_under(POINTER, [each]) for each in range(9)]
    if crashed:
        topic.load()
    again = topic.publish_under(POINTER, [0])
    assert again.duplicate
    assert again.start_sequence_id == answers[0].start_sequence_id
    assert again.end_sequence_id == answers[-1].end_sequence_id


def test_an_id_used_between_those_of_a_pointer_is_not_one_of_them():
    topic = Topic()
    topic.publish_under(POINTER, [0])
    topic.publish([1])
    for each in range(2, 9):
        topic.publish_under(POINTER, [each])
    with pytest.raises(SequenceConsumed) as caught:
        topic.publish_under(POINTER, [1])
    assert caught.value.outcome == "unknown"


@pytest.mark.parametrize("sequence_id", range(10))
def test_ids_of_a_pointer_that_was_rolled_back_are_consumed_however_long_ago_they_were_used(sequence_id):
    topic = Topic()
    for each in range(10):
        topic.publish_under(POINTER, [each])
    topic.ask(RollBackPointer(POINTER))
    topic.publish_under(POINTER + 1, [100], producer="other")
    with pytest.raises(SequenceConsumed):
        topic.publish_under(POINTER + 1, [sequence_id])
    with pytest.raises(SequenceConsumed):
        topic.publish([sequence_id])
    topic.load()
    with pytest.raises(SequenceConsumed):
        topic.publish([sequence_id])


def test_ids_after_those_of_a_pointer_are_checked_as_usual():
    topic = Topic()
    topic.publish_under(POINTER, [0])
    for each in range(1, 10):
        topic.publish([each])
    assert topic.publish([1]).duplicate
    with pytest.raises(SequenceConsumed):
        topic.publish([0])


# --- unreadable rows ------------------------------------------------------------------------------


def test_rows_about_producers_are_written_after_their_messages():
    topic = Topic(snapshot_entries=1)
    step = topic.core.step([(0, publish([0]))], topic.now())
    tables = [(each.table, each.prefix[:2]) for each in step.operations if isinstance(each, Put)]
    kinds = [kind for table, kind in tables if table is Table.METADATA]
    assert kinds == [b"\0e", b"\0p", b"\0h"]
    assert [table for table, _ in tables].index(Table.MESSAGE) == 1


def test_errors_say_that_nothing_happened_and_what_to_do():
    topic = Topic()
    topic.open()
    for ask in (
        lambda: topic.publish([0], producer_epoch=0),
        lambda: topic.publish([0], producer_epoch=9),
        lambda: topic.open(retention_ms=1 << 50),
    ):
        with pytest.raises(PlainsongError) as told:
            ask()
        assert told.value.outcome == "not-applied"
        assert told.value.hint
