"""Publishes that a topic refuses have no effect."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from plainsong.protocol.errors import (
    GenerationChanged,
    LowSpace,
    MessageTooLarge,
    NoMessages,
    PlainsongError,
    RequestTooLarge,
    TopicFull,
    TopicNotFound,
    TransactionRequired,
)
from plainsong.protocol.ids import pack_id, pack_position
from plainsong.protocol.keys import DamagedRow
from plainsong.protocol.names import TopicName
from plainsong.protocol.page import item
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.requests import Lengths, PublishRequest, Receipt
from plainsong.protocol.rows import HAS_TTL, STAMP, MessageRow, Stamp, encode_row, row_head
from plainsong.protocol.topic.asks import CheckPublish, Create, Publish
from plainsong.protocol.topic.core import TopicCore
from plainsong.protocol.topic.row_extras import row_extras_of, stamped_head, with_stamp
from plainsong.protocol.topic.state import Now, Run, TopicLimits, TopicState
from plainsong.protocol.topic.step import MANY_ROWS, MAX_CUT_BYTES, RowBatch, Step, own_ttls

NOW_MS = 1_700_000_000_000


class Topic:
    """A topic core that receives one request at a time."""

    def __init__(self, properties: TopicProperties | None = None, **limits: int):
        self.core = TopicCore(TopicState(TopicName("ns", "t"), TopicLimits(**limits)))
        if properties is not None:
            self.ask(Create(properties))

    def ask(self, ask, now_ms: int = NOW_MS, *, low_space: bool = False):
        now = Now(now_ms, 0.0, low_space)
        step = self.core.step([("caller", ask)], now)
        [(_, answer)] = self.core.settled(step, now)
        return answer

    def publish(self, *messages: bytes, now_ms: int = NOW_MS, low_space: bool = False, **fields):
        return self.ask(Publish(PublishRequest(messages, **fields), 0), now_ms, low_space=low_space)

    def refuses(self, kind: type[PlainsongError], *messages: bytes, **fields) -> PlainsongError:
        before = (repr(self.core), self.core.state.rows_since_mark)
        error = self.publish(*messages, **fields)
        assert type(error) is kind
        assert error.outcome == "not-applied"
        assert (repr(self.core), self.core.state.rows_since_mark) == before
        return error


def test_a_missing_topic_accepts_nothing():
    Topic().refuses(TopicNotFound, b"x")


def test_a_request_needs_a_message():
    Topic(TopicProperties()).refuses(NoMessages)


def test_the_error_for_a_too_large_message_has_its_index():
    topic = Topic(TopicProperties(), max_message_bytes=3)
    assert (
        "message 1 has 4 bytes; topic.max_message_bytes allows"
        in topic.refuses(MessageTooLarge, b"abc", b"abcd").detail
    )
    assert isinstance(topic.publish(b"abc"), Receipt)


def test_the_number_of_messages_in_a_request_is_bounded():
    topic = Topic(TopicProperties(), max_request_messages=2)
    topic.refuses(RequestTooLarge, b"", b"", b"")
    assert isinstance(topic.publish(b"", b""), Receipt)


def test_a_topic_that_requires_transactions_accepts_no_plain_publish():
    Topic(TopicProperties(transactional="required")).refuses(TransactionRequired, b"x")


def test_a_publish_for_another_generation_is_refused():
    topic = Topic(TopicProperties())
    topic.refuses(GenerationChanged, b"x", generation=2)
    assert isinstance(topic.publish(b"x", generation=1), Receipt)


def test_nothing_is_accepted_while_the_disk_is_nearly_full():
    topic = Topic(TopicProperties())
    topic.refuses(LowSpace, b"x", low_space=True)
    assert isinstance(topic.publish(b"x"), Receipt)


def test_a_full_topic_accepts_nothing_until_something_has_expired():
    topic = Topic(TopicProperties(ttl_s=10, max_bytes=200))
    assert isinstance(topic.publish(b"x" * 150), Receipt)
    error = topic.refuses(TopicFull, b"y" * 150)
    assert error.retry_after_s
    assert type(topic.publish(b"y" * 150, now_ms=NOW_MS + 10_000)) is TopicFull
    assert isinstance(topic.publish(b"y" * 150, now_ms=NOW_MS + 10_001), Receipt)


SMALL = b"x" * 100
CHECKED = {
    "taken": lambda: Topic(TopicProperties()),
    "no topic": Topic,
    "transactions only": lambda: Topic(TopicProperties(transactional="required")),
    "message too large": lambda: Topic(TopicProperties(), max_message_bytes=99),
    "never fits": lambda: Topic(TopicProperties(max_bytes=99)),
    "full": lambda: filled(Topic(TopicProperties(max_bytes=200))),
}


def filled(topic: Topic) -> Topic:
    assert isinstance(topic.publish(b"y" * 150), Receipt)
    return topic


@pytest.mark.parametrize("low_space", [False, True])
@pytest.mark.parametrize("case", CHECKED)
def test_the_check_of_a_publish_answers_as_the_publish_would_and_stores_nothing(case, low_space):
    topic = CHECKED[case]()
    before = (repr(topic.core), topic.core.state.rows_since_mark)
    checked = topic.ask(CheckPublish(len(SMALL)), low_space=low_space)
    assert (repr(topic.core), topic.core.state.rows_since_mark) == before
    published = topic.publish(SMALL, low_space=low_space)
    if isinstance(published, Receipt):
        assert checked is None
    else:
        assert (type(checked), checked.detail) == (type(published), published.detail)
    assert (checked is None) == (case == "taken" and not low_space)


def test_a_publish_that_can_never_fit_into_a_topic_is_not_asked_to_wait():
    error = Topic(TopicProperties(max_bytes=50)).refuses(RequestTooLarge, b"x" * 51)
    assert error.retry_after_s is None


# --- many messages at once ------------------------------------------------------------------------


def stamped(kind, count):
    """Return the extras of the ``count`` rows in a request of this kind."""
    if kind == "plain":
        return None
    request = PublishRequest([b""] * count, atomic=kind == "atomic", routing_key="key" if kind == "shared" else None)
    extras = row_extras_of(request)
    return with_stamp(extras, Stamp("p", 3, range(1 << 40, (1 << 40) + count), count)) if kind == "stamped" else extras


KINDS = ["plain", "stamped", "atomic", "shared"]


@pytest.mark.parametrize("length", [0, 1, 63, 64, 100, MAX_CUT_BYTES, MAX_CUT_BYTES + 1])
@pytest.mark.parametrize("count", [MANY_ROWS - 1, MANY_ROWS, MANY_ROWS + 1, 1000])
def test_rows_of_messages_of_one_length_equal_those_made_one_by_one(length, count):
    messages = [bytes([number % 256]) * length for number in range(count)]
    at_once, one_by_one = RowBatch(), RowBatch()
    for first in (7, 7 + count):
        at_once.add([Run(NOW_MS, first, count)], messages, None, length=length)
        for number, message in enumerate(messages, first):
            one_by_one.add([Run(NOW_MS, number, 1)], [message], None, length=length)
        assert (at_once.suffixes, at_once.values) == (one_by_one.suffixes, one_by_one.values)
        assert at_once.wire() == one_by_one.wire()
        assert at_once.value_bytes == one_by_one.value_bytes == sum(map(len, at_once.values))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pointer", [None, 7])
@pytest.mark.parametrize("count", [1, 2, 63, 64, 127, 128, 129, 256, 257, 1024, 1025])
@pytest.mark.parametrize("lengths", [(0,), (100,), (MAX_CUT_BYTES + 1,), (5, 300, 0)])
def test_rows_of_a_request_have_the_extras_of_each_message(kind, pointer, count, lengths):
    messages = [bytes(lengths[number % len(lengths)]) for number in range(count)]
    extras = stamped(kind, count)
    batch = RowBatch()
    batch.add([Run(NOW_MS, 7, count)], messages, None, pointer, extras, Lengths(messages).of_each)
    shared = {"a": {"routingKey": "key"}} if kind == "shared" else {}
    own = [shared] * count
    if kind in ("stamped", "atomic"):
        own[0] = {"b": count} if kind == "atomic" else {"d": ["p", 3, count, 1 << 40]}
    wanted = [encode_row(MessageRow(each, pointer, None, own[at])) for at, each in enumerate(messages)]
    assert batch.values == wanted
    assert batch.value_bytes == sum(map(len, wanted))
    items = [item(pack_id(NOW_MS, 7 + index), each) for index, each in enumerate(messages)]
    assert batch.items == items
    wire, offsets = batch.wire()
    assert [wire[at:end] for at, end in pairwise(offsets)] == items
    assert batch.pointers == ([] if pointer is None else [(0, count, pointer)])


@pytest.mark.parametrize("length", [0, 100, 20_000])
@pytest.mark.parametrize("order", list(product(["plain", "stamped", "shared", "pointer"], repeat=3)))
def test_rows_of_requests_with_one_message_equal_those_of_other_requests(order, length):
    message = b"m" * length
    singly, as_any = RowBatch(), RowBatch()
    for number, kind in enumerate(order):
        pointer, extras = (7, None) if kind == "pointer" else (None, stamped(kind, 1))
        run = Run(NOW_MS, number, 1)
        as_any.add([run], [message], None, pointer, extras, length)
        if kind == "shared":  # it has attributes
            singly.add([run], [message], None, pointer, extras, length)
            continue
        head = row_head(pointer) if extras is None else extras.head_of_one(pointer)
        assert singly.add_one(run, message, head, pointer) == len(as_any.values[-1])
    for each in ("suffixes", "values", "value_bytes", "items", "pointers", "attributes", "item_count"):
        assert getattr(singly, each) == getattr(as_any, each), each
    assert singly.wire() == as_any.wire()
    assert stamped_head(Stamp("p", 3, range(5, 6), 1)) == with_stamp(None, Stamp("p", 3, [5], 1)).head_of_one(None)


def test_rows_of_several_requests_have_their_wire_form_whatever_their_lengths_are():
    requests = [[b"x" * 10] * MANY_ROWS, [b"y" * 10] * MANY_ROWS, [b"z" * 11] * MANY_ROWS, [b"some", b"others"]]
    at_once, one_by_one = RowBatch(), RowBatch()
    for number, messages in enumerate(requests):
        at_once.add([Run(NOW_MS + number, 0, len(messages))], messages, None, length=Lengths(messages).of_each)
        one_by_one.add([Run(NOW_MS + number, 0, len(messages))], messages, None)
        wire, offsets = at_once.wire()
        assert (wire, list(offsets)) == (one_by_one.wire()[0], list(one_by_one.wire()[1]))
    assert at_once.items == one_by_one.items


@pytest.mark.parametrize("ttls_s", [None, [None, None], [None, 5], [5, None]], ids=str)
@pytest.mark.parametrize("behind", ["nothing", "plain rows", "a reference"])
def test_rows_are_marked_without_a_time_to_live_only_if_none_has_one(ttls_s, behind):
    step = Step(bytes(20))
    batch = step.row_batch(b"prefix")
    batch.add([Run(NOW_MS, 0, 2)], [b"a", b"b"], ttls_s)
    if behind == "plain rows":
        batch.add([Run(NOW_MS, 2, 2)], [b"c", b"d"], None)
    if behind == "a reference":
        batch.add_reference(pack_position(NOW_MS, 2), encode_row(MessageRow(None, 7, ttl_s=5)))
        batch.add([Run(NOW_MS, 3, 2)], [b"c", b"d"], None)
    step.flush()
    (put,) = step.operations
    have_one = [value for value in put.values if value[0] & HAS_TTL]
    assert put.may_expire == bool(have_one)
    assert len(have_one) == (behind == "a reference") + (ttls_s is not None and 5 in ttls_s)


@pytest.mark.parametrize("order", [KINDS, KINDS[::-1], ["stamped", "plain", "atomic"], ["stamped", "stamped"]])
@pytest.mark.parametrize("count", [3, MANY_ROWS])
@pytest.mark.parametrize("lengths", [(10,), (10, 11), (4, 300)])
def test_requests_of_all_kinds_have_their_wire_form_in_one_batch(order, count, lengths):
    batch, items = RowBatch(), []
    for number, kind in enumerate(order):
        messages = [bytes([index % 256]) * lengths[number % len(lengths)] for index in range(count)]
        first = len(batch)
        batch.add(
            [Run(NOW_MS + number, 0, count)], messages, None, None, stamped(kind, count), Lengths(messages).of_each
        )
        items += [item(pack_id(NOW_MS + number, index), message) for index, message in enumerate(messages)]
        assert batch.items == items
        assert batch.items_from(first) == items[first:]
        assert batch.wire_of(first, len(batch)) == b"".join(items[first:])
        wire, offsets = batch.wire()
        assert [wire[at:end] for at, end in pairwise(offsets)] == items


@pytest.mark.parametrize("messages", [[], [b""], [b"ab", b"cd"], [b"a", b"", b"abc"]])
def test_the_lengths_of_messages_are_their_longest_their_sum_and_their_common_one(messages):
    lengths, sizes = Lengths(messages), [len(message) for message in messages]
    assert (lengths.longest, lengths.total) == (max(sizes, default=0), sum(sizes))
    assert lengths.of_each == (sizes[0] if sizes and len(set(sizes)) == 1 else None)


def test_a_message_has_the_shorter_of_its_own_time_to_live_and_that_of_its_request():
    assert own_ttls(3, 60, [10, None, 600]) == [10, 60, 60]
    assert own_ttls(2, None, [None, 7]) == [None, 7]
    assert own_ttls(2, 60, None) == [60, 60]
    assert own_ttls(2, None, [None, None]) is own_ttls(2, None, None) is None


@pytest.mark.parametrize("ids", [[], [2, 2], [3, 2], [-1], ["1"], -1, None])
def test_a_stamp_with_invalid_ids_is_damaged(ids):
    with pytest.raises(DamagedRow):
        Stamp.of(MessageRow(b"x", extras={STAMP: ["p", 0, 1, ids]}))
