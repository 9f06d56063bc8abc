"""A topic's rules for write pointers: refusals, answers, rows, and when pointers are forgotten."""

from __future__ import annotations

from itertools import pairwise

import pytest

from plainsong.protocol import errors
from plainsong.protocol.effects import Delete, Put, RollBack, Table
from plainsong.protocol.ids import pack_id, pack_position
from plainsong.protocol.keys import pointer_key
from plainsong.protocol.names import TopicName
from plainsong.protocol.page import item
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.requests import PublishRequest, PublishResponse
from plainsong.protocol.rows import MessageRow, Stored, decode_row, encode_row
from plainsong.protocol.topic.asks import (
    Cleaned,
    Create,
    ListPointers,
    PlanCleaning,
    Publish,
    PublishUnder,
    Remove,
    RollBackPointer,
    SetProperties,
    StoreUnder,
    Undelete,
)
from plainsong.protocol.topic.core import TopicCore
from plainsong.protocol.topic.pending import MAX_RUNS, Pending, Segment
from plainsong.protocol.topic.row_extras import RowExtras
from plainsong.protocol.topic.state import Now, Run, TopicLimits, TopicState
from plainsong.protocol.topic.step import RowBatch, values_of

NAME = TopicName("ns", "t")
NOW_MS = 1_700_000_000_000
P, Q = NOW_MS * 1_000_000, NOW_MS * 1_000_000 + 1
HOUR_MS = 3_600_000


class Topic:
    """A topic's core, which gets one ask, or several in one step."""

    def __init__(self, properties=None, **limits):
        self.standings, self.checkpointed = {}, {}
        self.core = TopicCore(TopicState(NAME, TopicLimits(**limits), authority=self))
        self.now_ms = NOW_MS
        self.ask(Create(properties or TopicProperties()))

    def standing(self, pointer):
        return self.standings.get(pointer, "unknown")

    def pointers_of(self, pointer):
        return self.checkpointed.get(pointer, (pointer,))

    def ask(self, *wanted, decided=()):
        now = Now(self.now_ms, 0.0, decided=decided)
        self.step = self.core.step(list(enumerate(wanted)), now)
        answers = dict(self.core.settled(self.step, now))
        return answers[0] if len(wanted) == 1 else [answers[index] for index in range(len(wanted))]

    def publish(self, pointer, *messages, **more):
        return self.ask(PublishUnder(PublishRequest(messages, pointer, **more), 0))

    def keep(self, pointer, *messages, **more):
        return self.ask(StoreUnder(PublishRequest(messages, pointer, **more), 0))

    def plain(self, *messages):
        return self.ask(Publish(PublishRequest(messages), 0))

    def view(self, pointer=P):
        return next(each for each in self.ask(ListPointers()) if each.pointer == pointer)

    def puts(self, table):
        return [each for each in self.step.operations if isinstance(each, Put) and each.table is table]

    def refuses(self, kind, answer, word=""):
        assert type(answer) is kind, answer
        assert word in f"{answer.detail} {answer.hint}"
        assert not self.step.operations


@pytest.mark.parametrize("verb", ["publish", "keep"])
def test_some_requests_are_refused_under_a_write_pointer(verb):
    topic = Topic(max_lifetime_ms=25 * HOUR_MS)
    write = getattr(topic, verb)
    topic.refuses(errors.InvalidParameter, write(0, b"x"))
    topic.refuses(errors.InvalidParameter, write(-P, b"x"))
    topic.refuses(errors.TransactionRequired, write(None, b"x"))
    topic.refuses(errors.TransactionExpired, write(P - 25 * HOUR_MS * 1_000_000, b"x"), "max_lifetime_s")
    topic.refuses(errors.GenerationChanged, write(P, b"x", generation=2))
    for standing in ("committed", "aborted", "invalid"):
        topic.standings[P] = standing
        topic.refuses(errors.TransactionNotInProgress, write(P, b"x"), standing)
    topic.standings[P] = "in_progress"
    topic.ask(RollBackPointer(P))
    topic.refuses(errors.RolledBack, write(P, b"x"))
    topic.ask(SetProperties({"transactional": "disabled"}))
    topic.refuses(errors.TransactionRefused, write(Q, b"x"))
    topic.ask(Remove())
    topic.refuses(errors.TopicNotFound, write(Q, b"x"))


def test_with_lifetime_zero_a_pointer_may_have_any_age():
    topic = Topic(max_lifetime_ms=0)
    assert topic.publish(1, b"x").write_pointer == 1


def test_a_topic_that_requires_transactions_accepts_publishes_under_one():
    topic = Topic(TopicProperties(transactional="required"))
    assert topic.publish(P, b"x").write_pointer == P


def test_a_new_pointer_beyond_the_bound_is_refused_and_an_old_one_is_not():
    topic = Topic(max_pending=1)
    topic.publish(P, b"x")
    topic.refuses(errors.Overloaded, topic.publish(Q, b"x"), "max_per_topic")
    topic.refuses(errors.Overloaded, topic.keep(Q, b"x"))
    topic.refuses(errors.Overloaded, topic.ask(RollBackPointer(Q)))
    assert topic.publish(P, b"y").write_pointer == P
    assert topic.ask(PublishUnder(PublishRequest([b"x"], Q), 0), decided=(P,)).write_pointer == Q


def test_a_segment_beyond_the_bound_is_refused():
    topic = Topic(max_segments=1)
    topic.keep(P, b"x", segment="a")
    topic.refuses(errors.TransactionTooLarge, topic.keep(P, b"x", segment="b"))
    assert topic.keep(P, b"x", segment="a") is None


def test_stored_messages_are_published_by_one_row_before_the_messages_of_the_request():
    topic = Topic()
    topic.keep(P, b"a", b"bb")
    topic.now_ms += 1
    topic.keep(P, b"ccc")
    answer = topic.publish(P, b"inline")
    (put,) = topic.puts(Table.MESSAGE)
    reference = Stored.of(decode_row(put.values[0]))
    first, last = pack_position(NOW_MS, 0), pack_position(NOW_MS + 1, 0)
    assert reference == Stored(3, 6, first, last)
    assert decode_row(put.values[1]) == MessageRow(b"inline", P)
    assert put.suffixes == [pack_position(NOW_MS + 1, 0), pack_position(NOW_MS + 1, 1)]
    assert (answer.start_sequence_id, answer.end_sequence_id) == (0, 1)
    assert topic.core.state.usage.messages == topic.core.state.appended == 4


def test_publishing_nothing_again_answers_as_the_first_time_and_writes_nothing():
    topic = Topic()
    topic.keep(P, b"a")
    first = topic.publish(P, b"inline")
    topic.plain(b"another")
    assert topic.publish(P) == first
    assert not topic.step.operations
    topic.refuses(errors.AlreadyPublished, topic.keep(P, b"late"))


def test_publishing_nothing_at_all_gives_an_empty_answer_and_writes_no_row():
    topic = Topic()
    answer = topic.publish(P)
    assert (answer.start_timestamp_ms, answer.start_sequence_id) == (answer.end_timestamp_ms, answer.end_sequence_id)
    assert not topic.step.operations
    assert not topic.core.state.pending


def test_only_listed_segments_count_and_unknown_ones_are_ignored():
    topic = Topic()
    topic.keep(P, b"a", segment="one")
    topic.keep(P, b"bb", b"bb", segment="two")
    topic.keep(P, b"c")
    topic.publish(P, segments=["two", "three"])
    reference = Stored.of(decode_row(topic.puts(Table.MESSAGE)[0].values[0]))
    assert (reference.messages, reference.payload_bytes, reference.segments) == (2, 4, frozenset({1}))
    assert topic.view().messages == 2


def test_a_second_publish_with_other_segments_is_refused_since_they_are_never_visible():
    topic = Topic()
    topic.keep(P, b"a", segment="one")
    topic.keep(P, b"b", segment="two")
    first = topic.publish(P, segments=["one", "none"])
    for _ in range(2):
        topic.refuses(errors.AlreadyPublished, topic.publish(P, segments=["two"]))
        topic.refuses(errors.AlreadyPublished, topic.publish(P, b"c", segments=["one"]))
        assert topic.publish(P, segments=["none", "one", "one"]) == first
        assert topic.publish(P) == first
        known = topic.core.state.pending
        known[P] = Pending.decode(P, known[P].encode())  # as after a restart
    assert topic.publish(P, b"c", segments=["none", "one"]).write_pointer == P
    assert topic.view().messages == 2


def test_a_repeated_publish_of_everything_stored_gets_its_answer_whatever_is_listed():
    topic = Topic()
    topic.keep(P, b"a", segment="one")
    first = topic.publish(P)
    assert topic.publish(P, segments=["one"]) == first


def test_a_publish_without_winners_publishes_nothing_forever():
    topic = Topic()
    topic.keep(P, b"a", segment="one")
    topic.publish(P, segments=["other"])
    assert Stored.of(decode_row(topic.puts(Table.MESSAGE)[0].values[0])).messages == 0
    topic.refuses(errors.AlreadyPublished, topic.keep(P, b"b"))


def test_stored_messages_count_towards_the_size_of_the_topic():
    topic = Topic(TopicProperties(max_bytes=250))
    topic.keep(P, b"x" * 150)
    topic.refuses(errors.TopicFull, topic.plain(b"y" * 150))
    topic.refuses(errors.TopicFull, topic.keep(P, b"y" * 150))
    assert topic.publish(P).write_pointer == P  # adds no bytes
    topic.refuses(errors.TopicFull, topic.plain(b"y" * 150))


def test_a_rollback_touches_only_the_rows_of_its_range_and_leaves_the_pointer_usable():
    topic = Topic()
    one, two = topic.publish(P, b"1"), topic.publish(P, b"2")
    position = pack_position(one.start_timestamp_ms, one.start_sequence_id)
    topic.ask(RollBackPointer(P, (position, position)))
    (rollback,) = [each for each in topic.step.operations if isinstance(each, RollBack)]
    prefix = topic.core.state.prefix
    assert rollback == RollBack(prefix + position, prefix + position + b"\x00", P)
    assert topic.step.rolled_back == [(P, position, position)]
    assert topic.view().first == pack_position(two.start_timestamp_ms, two.start_sequence_id)
    assert topic.publish(P, b"3").write_pointer == P


def test_a_rollback_wins_over_publishes_of_its_pointer_in_the_same_step():
    topic = Topic()
    publish = PublishUnder(PublishRequest([b"x"], P), 0)
    first, rolled_back, second = topic.ask(publish, RollBackPointer(P), publish)
    assert (first.write_pointer, rolled_back, type(second)) == (P, None, errors.RolledBack)
    kinds = [type(each) if isinstance(each, RollBack) else each.table for each in topic.step.operations]
    assert kinds.index(Table.MESSAGE) < kinds.index(RollBack) < len(kinds) - 1
    assert kinds[-1] is Table.METADATA
    topic.ask(RollBackPointer(P))
    assert not topic.step.operations


@pytest.mark.parametrize("standing", ["deciding", "committed"])
def test_a_late_client_cannot_roll_back_committed_messages(standing):
    topic = Topic()
    topic.standings[P] = "in_progress"
    topic.publish(P, b"x")
    topic.standings[P] = standing
    topic.refuses(errors.TransactionNotInProgress, topic.ask(RollBackPointer(P)), "committed")


@pytest.mark.parametrize("pointer", [Q, (1 << 63) - 1])
def test_a_pointer_that_the_service_never_issued_is_refused_and_leaves_nothing(pointer):
    topic = Topic(issues_pointers=True)
    request = PublishRequest([b"x"], write_pointer=pointer)
    for ask in (PublishUnder(request, 0), StoreUnder(request, 0)):
        topic.refuses(errors.TransactionNotInProgress, topic.ask(ask), "not issued")
    assert topic.ask(RollBackPointer(pointer)) is None
    assert topic.core.state.pending == {}
    topic.standings[pointer] = "in_progress"
    assert isinstance(topic.ask(PublishUnder(request, 0)), PublishResponse)


def test_a_pointer_accepted_by_an_earlier_version_is_forgotten_once_it_is_rolled_back():
    topic = Topic(issues_pointers=True)
    pointer = (1 << 63) - 1
    topic.standings[pointer] = "in_progress"
    topic.publish(pointer, b"x")
    del topic.standings[pointer]
    assert topic.ask(RollBackPointer(pointer)) is None
    assert topic.step.rolled_back
    topic.ask(PlanCleaning(0))
    assert topic.core.state.pending == {}


def test_a_pointer_of_another_service_may_be_as_far_ahead_as_clocks_are():
    topic = Topic(max_ahead_ms=300_000)
    near, far = Q + 300_000 * 1_000_000 - 1, Q + 300_001 * 1_000_000
    assert isinstance(topic.ask(PublishUnder(PublishRequest([b"x"], write_pointer=near), 0)), PublishResponse)
    refused = topic.ask(PublishUnder(PublishRequest([b"x"], write_pointer=far), 0))
    topic.refuses(errors.TransactionNotInProgress, refused, "would be issued in 300 s")
    of_any_age = Topic()
    assert isinstance(of_any_age.ask(PublishUnder(PublishRequest([b"x"], write_pointer=far), 0)), PublishResponse)


def test_the_service_rolls_back_in_a_deleted_topic_and_a_client_does_not():
    topic = Topic()
    topic.publish(P, b"x")
    topic.ask(Remove())
    topic.refuses(errors.TopicNotFound, topic.ask(RollBackPointer(P)))
    assert topic.ask(RollBackPointer(P, by_client=False)) is None
    assert topic.step.rolled_back
    topic.ask(Undelete())
    assert topic.view().rolled_back


@pytest.mark.parametrize("wrote", ["publish", "keep"])
def test_a_transaction_that_wrote_into_an_earlier_generation_can_no_longer_write_into_the_topic(wrote):
    topic = Topic()
    getattr(topic, wrote)(P, b"x")
    topic.ask(Remove())
    topic.ask(Create(TopicProperties()))
    assert topic.step.operations[-1] == Delete(Table.METADATA, [pointer_key(NAME, 1, P)])
    nothing, more = PublishRequest([], write_pointer=P), PublishRequest([b"y"], write_pointer=P)
    for ask in (PublishUnder(nothing, 0), PublishUnder(more, 0), StoreUnder(more, 0)):
        topic.refuses(errors.GenerationChanged, topic.ask(ask), "created again")
        assert not topic.step.operations
    assert isinstance(topic.ask(PublishUnder(PublishRequest([b"z"], write_pointer=Q), 0)), PublishResponse)
    (view,) = [view for view in topic.ask(ListPointers()) if view.pointer == P]
    assert (view.messages, view.stored, view.hidden) == (0, 0, 0)
    topic.ask(ListPointers(), decided=(P,))
    topic.plain(b"z")
    assert Delete(Table.METADATA, [pointer_key(NAME, 2, P)]) in topic.step.operations
    assert topic.step.dropped == [P]


def test_after_a_checkpoint_a_transaction_that_wrote_into_an_earlier_generation_can_no_longer_write_into_the_topic():
    topic = Topic()
    topic.keep(P, b"x")
    topic.ask(Remove())
    topic.checkpointed = {P: (P, Q), Q: (P, Q)}
    topic.ask(Create(TopicProperties()))
    for messages in ([], [b"y"]):
        ask = PublishUnder(PublishRequest(messages, write_pointer=Q), 0)
        topic.refuses(errors.GenerationChanged, topic.ask(ask), f"write pointer {P}")
        assert not topic.step.operations
    other = PublishUnder(PublishRequest([b"z"], write_pointer=Q + 1), 0)
    assert isinstance(topic.ask(other), PublishResponse)


def test_a_generation_that_an_open_transaction_wrote_to_is_kept_until_it_is_decided():
    topic = Topic()
    topic.standings[P] = "in_progress"
    topic.keep(P, b"x")
    topic.ask(Remove())
    assert topic.ask(PlanCleaning(0)).purge is None
    topic.standings[P] = "aborted"
    assert topic.ask(PlanCleaning(0)).purge == (1, 1)


def test_a_decided_pointer_is_forgotten_with_the_next_commit():
    topic = Topic()
    topic.publish(P, b"x")
    assert topic.ask(ListPointers(), decided=(P,)) == []
    assert not topic.step.operations
    topic.plain(b"y")
    assert Delete(Table.METADATA, [pointer_key(NAME, 1, P)]) in topic.step.operations
    assert topic.step.dropped == [P]


def test_stored_messages_of_a_decided_pointer_are_removed_before_it_is_forgotten():
    topic = Topic()
    topic.keep(P, b"x")
    topic.ask(ListPointers(), decided=(P,))
    plan = topic.ask(PlanCleaning(0))
    assert [pointer for pointer, _, _ in plan.orphans] == [P]
    assert topic.core.state.stored_bytes == 1
    topic.ask(Cleaned(plan.prefix, (), (P,)))
    assert (topic.core.state.pending, topic.core.state.stored_bytes) == ({}, 0)
    assert topic.step.dropped == [P]


@pytest.mark.parametrize(("standing", "forgotten"), [("unknown", True), ("invalid", False)])
def test_past_the_maximum_lifetime_a_pointer_is_forgotten_with_its_stored_messages_unless_it_is_invalid(
    standing, forgotten
):
    topic = Topic(max_lifetime_ms=HOUR_MS)
    topic.keep(P, b"x")
    topic.standings[P] = standing
    topic.now_ms += 2 * HOUR_MS
    plan = topic.ask(PlanCleaning(0))
    assert [pointer for pointer, _, _ in plan.orphans] == [P]
    topic.ask(Cleaned(plan.prefix, (), (P,)))
    assert topic.core.state.stored_bytes == 0
    assert (P not in topic.core.state.pending) is forgotten


def test_without_a_lifetime_orphans_expire_by_the_ttl_and_can_no_longer_be_published():
    topic = Topic(TopicProperties(ttl_s=3600), max_lifetime_ms=0)
    topic.keep(1, b"x")
    topic.now_ms += HOUR_MS
    assert topic.ask(PlanCleaning(0)).orphans == ()
    topic.now_ms += 1
    assert [pointer for pointer, _, _ in topic.ask(PlanCleaning(0)).orphans] == [1]
    topic.refuses(errors.TransactionExpired, topic.publish(1))


@pytest.mark.parametrize(("standing", "forgotten"), [("unknown", True), ("invalid", False), ("in_progress", False)])
def test_past_the_maximum_lifetime_only_unknown_pointers_are_forgotten(standing, forgotten):
    topic = Topic(max_lifetime_ms=HOUR_MS)
    topic.publish(P, b"x")
    if standing == "invalid":
        topic.ask(RollBackPointer(P))
    topic.standings[P] = standing
    topic.now_ms += HOUR_MS
    topic.ask(PlanCleaning(0))
    assert (P not in topic.core.state.pending) is forgotten


def test_pointers_are_listed_by_their_first_rows_and_those_without_rows_last():
    topic = Topic()
    topic.keep(P, b"stored")
    topic.publish(P + 2, b"first")
    topic.publish(Q, b"second")
    topic.publish(P + 2, b"third")
    assert [each.pointer for each in topic.ask(ListPointers())] == [P + 2, Q, P]


def test_a_pointer_counts_messages_published_directly_and_stored_first():
    topic = Topic()
    topic.publish(P, b"inline")
    topic.keep(P, b"a", b"bb")
    topic.publish(P, b"last")
    view = topic.view()
    assert (view.messages, view.bytes, view.stored, view.stored_bytes) == (4, 13, 0, 0)


def test_hidden_messages_are_those_from_the_first_row_of_the_pointer_on():
    topic = Topic()
    topic.plain(b"before")
    topic.publish(P, b"1", b"2")
    topic.plain(b"behind")
    topic.keep(Q, b"stored", b"stored")
    view = topic.view()
    assert (view.hidden, view.messages, view.bytes, view.since_ms, view.stored) == (3, 2, 2, NOW_MS, 0)
    assert (topic.view(Q).hidden, topic.view(Q).first, topic.view(Q).stored) == (0, None, 2)
    topic.publish(Q)
    assert (topic.view(P).hidden, topic.view(Q).hidden) == (5, 2)


def test_a_commit_writes_one_row_about_each_pointer_however_often_it_published():
    topic = Topic()
    topic.ask(*(PublishUnder(PublishRequest([b"x"], pointer), 0) for pointer in (P, Q) * 50))
    assert len(topic.puts(Table.MESSAGE)) == 1
    (about,) = topic.puts(Table.METADATA)
    assert len(about.suffixes) == 2
    assert topic.step.pointers == {P, Q}


def test_runs_of_a_pointer_are_bounded_and_cover_all_its_rows():
    pending = Pending(P, 0, 0)
    positions = [pack_position(ts_ms, 0) for ts_ms in range(10, 4000, 10)]
    for before, position in enumerate(positions):
        pending.add(position, position, before)
        assert len(pending.runs) <= MAX_RUNS
        assert Pending.decode(P, pending.encode()) == pending
    assert all(any(run.first <= each <= run.last for run in pending.runs) for each in positions)
    gone = pending.cut(positions[100], positions[200])
    assert (gone[0][0], gone[-1][1]) == (positions[100], positions[200])
    assert pending.cut(positions[100], positions[200]) == []
    assert not any(run.first <= positions[150] <= run.last for run in pending.runs)


def runs_of(topic, pointer=P):
    return topic.core.state.pending[pointer].runs


def test_uninterrupted_requests_of_one_pointer_are_one_run():
    topic = Topic()
    size = None
    for number in range(100):
        topic.now_ms += 1
        topic.publish(P, b"x", b"x")
        (about,) = topic.puts(Table.METADATA)
        size = size or len(about.values[0])
        assert len(about.values[0]) <= size + 20, number
    (run,) = runs_of(topic)
    assert run.before == 0
    topic.plain(b"between")
    topic.now_ms += 1
    topic.keep(P, b"stored", b"stored")
    topic.publish(P, b"with what is stored")
    topic.now_ms += 1
    topic.publish(P, b"x")
    assert [each.before for each in runs_of(topic)] == [0, 201]
    topic.now_ms += 1
    topic.publish(Q, b"between")
    topic.now_ms += 1
    topic.publish(P, b"x")
    assert [each.before for each in runs_of(topic)] == [0, 201, 206]
    assert topic.view().hidden == 207


def test_messages_published_after_a_rolled_back_part_are_a_run_of_their_own():
    topic = Topic()
    for message in (b"stays", b"goes"):
        topic.now_ms += 1
        topic.publish(P, message)
    (run,) = runs_of(topic)
    gone = run.last
    topic.ask(RollBackPointer(P, (gone, gone)))
    topic.now_ms += 1
    topic.publish(P, b"stays")
    assert len(runs_of(topic)) == 2
    assert not any(each.first <= gone <= each.last for each in runs_of(topic))


def test_a_damaged_pointer_row_stops_publishes_but_nothing_else():
    topic = Topic()
    topic.plain(b"x")
    topic.core.state.pending[P] = Pending.of_damaged(P, NOW_MS)
    assert isinstance(topic.publish(P, b"x"), errors.StorageFailed)
    assert (topic.view().first, topic.view().hidden) == (None, 0)
    assert topic.ask(RollBackPointer(P)) is None
    (rollback,) = topic.step.operations
    assert rollback.start == topic.core.state.prefix + bytes(10)
    assert topic.publish(Q, b"x").write_pointer == Q


@pytest.mark.parametrize("sizes", [(3,), (3, 3), (3, 200, 0)])
@pytest.mark.parametrize("ttls_s", [None, 5])
@pytest.mark.parametrize("extras", [None, {"s": 3}])
def test_values_made_in_bulk_equal_those_made_one_by_one(sizes, ttls_s, extras):
    messages = [bytes(size) for size in sizes]
    ttls = None if ttls_s is None else [ttls_s] * len(sizes)
    wanted = [encode_row(MessageRow(each, P, ttls_s, extras or {})) for each in messages]
    assert values_of(messages, ttls, P, None if extras is None else RowExtras(every=extras)) == wanted


def test_items_start_over_after_a_reference():
    roll = RowBatch()
    roll.add([Run(5, 0, 2)], [b"a", b"b"], None, P)
    roll.add([Run(5, 2, 1)], [b"c"], None, P)
    assert roll.pointers == [(0, 3, P)]
    roll.add_reference(pack_position(5, 3), b"reference")
    assert roll.item_count == 0
    roll.add([Run(5, 4, 1)], [b"d"], [60], Q)
    roll.add([Run(5, 5, 1)], [b"e"], None)
    assert (len(roll), roll.item_count, roll.pointers, roll.expiries) == (6, 2, [(0, 1, Q)], {0: 60_005})
    assert roll.items == [item(pack_id(5, 4), b"d"), item(pack_id(5, 5), b"e")]
    assert roll.items_from(5) == roll.items[1:]
    assert roll.wire() == (b"".join(roll.items), range(0, 47, 23))
    assert roll.restart == pack_position(5, 4) + bytes(10)


@pytest.mark.parametrize("messages", [[b"a", b"b", b"c"], [b"a", b"", b"ccc"], [b"a"]])
@pytest.mark.parametrize("pointer", [None, P])
def test_the_wire_form_of_a_batch_is_cut_where_each_of_its_messages_begins(messages, pointer):
    batch = RowBatch()
    batch.add([Run(5, 0, len(messages))], messages, None, pointer)
    wire, starts = batch.wire()
    assert [wire[start:stop] for start, stop in pairwise(starts)] == batch.items
    wanted = [item(pack_position(5, number) + bytes(10), each) for number, each in enumerate(messages)]
    assert batch.items == wanted


def test_rolling_back_an_old_pointer_without_rows_stores_nothing():
    topic = Topic(max_lifetime_ms=1000)
    topic.ask(RollBackPointer(1))
    assert not topic.core.state.pending


def test_the_row_of_a_pointer_is_the_same_when_most_of_it_was_packed_before():
    pending = Pending(-7, 1, 1, first_stored=bytes(10), last_stored=bytes(10), staged_by="p")
    for index in range(40):
        name = f"s{index % 20}"
        pending.segments.setdefault(name, Segment(len(pending.segments))).grow(1, index)
        pending.record_store("p", name, 0, index)
        row = pending.encode()
        again = Pending.decode(-7, row)
        assert again == pending
        assert again.encode() == row
