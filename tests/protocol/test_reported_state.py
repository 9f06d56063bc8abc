"""Reports by topics and the transaction service about themselves: spans, figures, chains, and forwarded moments."""

from __future__ import annotations

import msgpack
import pytest
from chained_topic import ChainedTopic
from producing_topic import NOW_MS, POINTER, Topic, publish
from transactions_in_memory import START_MS, TransactionsInMemory

from plainsong.protocol.errors import InvalidParameter, MalformedTransaction
from plainsong.protocol.ids import FIRST_BOUND, SEQUENCES_PER_MS, after, unpack_id
from plainsong.protocol.keys import DamagedRow
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.records import LINK_BYTES
from plainsong.protocol.rows import MessageRow, decode_row, encode_row
from plainsong.protocol.topic.asks import DescribeChain, Look, RollBackPointer
from plainsong.protocol.topic.chain import ChainEntry
from plainsong.protocol.transactions.manager import pruning_figures
from plainsong.protocol.transactions.view import Moment, Verdict, View


def plain(payload):
    return publish(None, None, [payload])


# --- topics ----------------------------------------------------------------------------------------


def test_a_range_lists_as_many_undecided_pointers_as_requested():
    topic = Topic()
    pointers = {POINTER, POINTER + 1, POINTER + 2}
    for pointer in pointers:
        topic.publish_under(pointer, None, None, ["x"])
    assert topic.ask(Look(FIRST_BOUND)).undecided == frozenset()
    assert topic.ask(Look(FIRST_BOUND, undecided=3)).undecided == pointers
    some = topic.ask(Look(FIRST_BOUND, undecided=2)).undecided
    assert len(some) == 2
    assert some < pointers


def test_messages_that_do_not_fit_into_their_millisecond_count_as_those_that_do():
    together, divided = Topic(), Topic()
    divided.state.sequence.advance_past(NOW_MS, SEQUENCES_PER_MS - 3)
    for topic in (together, divided):
        receipt = topic.ask(publish(None, None, ["a", "bb", "ccc", "dddd"]))
    assert unpack_id(receipt.first_id).publish_ts_ms < unpack_id(receipt.last_id).publish_ts_ms
    assert (divided.state.usage.messages, divided.state.usage.bytes) == (4, together.state.usage.bytes)


def test_a_range_says_whether_messages_after_its_start_have_expired():
    topic = Topic(TopicProperties(ttl_s=60))
    first = topic.ask(plain("first")).first_id
    assert not topic.ask(Look(FIRST_BOUND)).expired
    topic.now_ms += 61_000
    topic.ask(plain("second"))
    assert topic.ask(Look(FIRST_BOUND)).expired
    assert not topic.ask(Look(after(first))).expired


def test_nothing_is_published_at_or_before_a_moment_that_was_read_even_when_the_clock_goes_back():
    topic = Topic()
    topic.now_ms += 10
    topic.ask(Look(FIRST_BOUND, as_of_ms=NOW_MS + 10))
    topic.now_ms -= 1000
    assert unpack_id(topic.ask(plain("late")).first_id).publish_ts_ms > NOW_MS + 10
    topic.load()
    topic.now_ms -= 1000
    assert unpack_id(topic.ask(plain("later")).first_id).publish_ts_ms > NOW_MS + 10


def test_a_future_moment_is_refused():
    topic = Topic()
    with pytest.raises(InvalidParameter):
        topic.ask(Look(FIRST_BOUND, as_of_ms=NOW_MS + 1))


def test_a_damaged_producer_is_listed_among_the_others_with_the_generation_of_the_topic():
    topic = Topic()
    topic.publish([1], "b")
    topic.book.damaged.add("a")  # as a load does if it cannot read a producer's row
    damaged, well = topic.page().producers
    assert (damaged.name, damaged.damaged, damaged.generation) == ("a", True, 1)
    assert (damaged.epoch, damaged.last_sequence_id, damaged.pushed, damaged.active_ms) == (0, -1, -1, 0)
    assert (well.name, well.damaged, well.generation) == ("b", False, 1)


def test_a_list_of_producers_has_the_cost_of_loading_them():
    topic = Topic()
    topic.publish([1])
    topic.load()
    topic.book.replay_ms = 17  # as set by a load that reads the clock
    snapshot = topic.page().snapshot
    assert (snapshot.replayed_entries, snapshot.replay_ms) == (1, 17)


# --- chains ----------------------------------------------------------------------------------------


def test_a_chain_that_continues_has_the_epoch_of_its_owner():
    topic = ChainedTopic()
    topic.state.epoch = 3
    topic.set(chain="none")
    topic.set(chain="sha256")
    topic.publish(b"a")
    *_, (key, value) = topic.entries()
    assert ChainEntry.decode(key[-10:], value).epoch == 3


def test_a_chain_lists_the_open_pointers_up_to_the_requested_number():
    topic = ChainedTopic()
    one, other = topic.now_ms * 1_000_000, topic.now_ms * 1_000_000 + 1
    topic.publish_under(one, b"a")
    topic.publish_under(other, b"b")
    assert topic.do(DescribeChain()).undecided == ()
    assert topic.do(DescribeChain(undecided=5)).undecided == (one, other)
    assert topic.do(DescribeChain(undecided=1)).undecided == (one,)
    topic.do(RollBackPointer(one))
    assert topic.do(DescribeChain(undecided=5)).undecided == (other,)


@pytest.mark.parametrize(
    "changed", [{"k": "?"}, {"n": "1"}, {"e": None}, {"p": 0.5}, {"f": b"short"}, {"l": 7}, {"d": "text"}]
)
def test_an_entry_of_a_chain_with_an_unknown_kind_or_a_wrong_part_is_damaged(changed):
    topic = ChainedTopic()
    topic.publish(b"a")
    *_, (key, value) = topic.entries()
    payload = decode_row(value).payload
    record = msgpack.unpackb(payload[LINK_BYTES:])
    packed = msgpack.packb({**record, **changed})
    with pytest.raises(DamagedRow):
        ChainEntry.decode(key[-10:], encode_row(MessageRow(payload[:LINK_BYTES] + packed)))


def test_every_entry_whose_messages_have_expired_is_counted():
    topic = ChainedTopic()
    topic.publish(b"a")
    topic.now_ms += 1
    topic.publish(b"b")
    assert topic.verify().expired == 0
    topic.now_ms += 3_600_001
    topic.publish(b"c")
    found = topic.verify()
    assert (found.messages, found.expired, found.is_good) == (1, 2, True)


# --- the transaction service -----------------------------------------------------------------------


def test_figures_count_open_invalid_and_remembered_transactions():
    at = TransactionsInMemory()
    figures = at.core.figures()
    assert (figures.open, figures.invalid, figures.outcomes, figures.oldest_open_ms) == (0, 0, 0, None)
    at.commit(at.new())
    at.pass_s(1)
    first = at.new()
    at.checkpoint(first)
    at.pass_s(1)
    at.new()
    bad = [at.new(), at.new(), at.new()]
    for each in bad:
        at.invalidate(each)
    figures = at.core.figures()
    assert (figures.open, figures.invalid, figures.oldest_open_ms) == (2, 3, START_MS + 1_000)
    assert figures.outcomes == len(at.ledger.outcomes)
    assert at.ledger.committed.bytes == 0
    first_set = at.new()
    at.prepare(first_set, b"key")
    at.commit(first_set)
    assert at.ledger.committed.bytes > 0


def test_pruning_figures_name_the_oldest_invalid_pointer_and_that_of_each_topic():
    at = TransactionsInMemory()
    topics = {TopicName("ns", "t"): 7}
    assert pruning_figures(at.core, topics).oldest_invalid is None
    bad = [at.new(), at.new()]
    for each in reversed(bad):
        at.invalidate(each)
    figures = pruning_figures(at.core, topics)
    assert (figures.invalid, figures.oldest_invalid, figures.oldest_by_topic) == (2, bad[0], topics)
    assert (figures.safe_bound, figures.last_pass_ms) == (None, None)


def test_a_moment_is_the_same_at_another_instance():
    moment = Moment(START_MS, frozenset({5, 3}), (7, 9), 1, 20)
    assert Moment.unpack(moment.packed()) == moment


@pytest.mark.parametrize(
    "packed", [b"", b"\xc1", b"\x01", b"\x93\x01\x90\x90", b"\x95\x01\x01\x90\x01\x02", b"\x95\xa1x\x90\x90\x01\x02"]
)
def test_bytes_that_are_not_a_moment_are_refused(packed):
    with pytest.raises(MalformedTransaction):
        Moment.unpack(packed)


def test_without_the_service_everything_not_undecided_or_rolled_back_is_committed():
    view = View.without_service(frozenset({5}))
    verdicts = [view.verdict(pointer) for pointer in (4, 5, 6, (1 << 63) - 1, -4)]
    assert verdicts == [Verdict.DELIVER, Verdict.HOLD, Verdict.DELIVER, Verdict.DELIVER, Verdict.SKIP]
