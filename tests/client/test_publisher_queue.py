"""A publisher's queue: contents, next batch and time-outs; driven by hand, so that an hour takes a moment."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plainsong.errors import ConnectFailed, ConnectionLost, DeadlineExceeded, MessageDropped
from plainsong.protocol.errors import BadRequest, MessageTooLarge, TopicNotFound, Unavailable
from plainsong.publisher_queue import ITEM_BYTES, Bounds, Item, PublisherQueue


def publisher_queue(**changed: object) -> PublisherQueue[int]:
    bounds = {
        "linger_s": 0.0,
        "max_batch_messages": 100,
        "max_batch_bytes": 1 << 20,
        "max_pending_bytes": 1 << 20,
        "delivery_timeout_s": 60.0,
        "mode": "reliable",
        "retry_unknown": False,
    }
    return PublisherQueue(Bounds(**{**bounds, **changed}), lambda: 0.0)  # type: ignore[arg-type]


def put(held, topic, payload, future, now_s) -> bool:
    """Put a message into the queue; False if there is no room."""
    return held.put(topic, Item(payload, None, None, None, future), now_s) is not None


def payloads(batch):
    return [item.payload for item in batch.items]


def test_messages_that_gather_during_a_request_are_the_next_request():
    held = publisher_queue()
    put(held, "t", b"1", 1, 0)
    first = held.take(0)
    for n in (2, 3, 4):
        put(held, "t", b"%d" % n, n, 0)
    assert held.take(0) is None, "one request at a time for one topic"
    held.settled(first)
    assert payloads(held.take(0)) == [b"2", b"3", b"4"]


def test_topics_do_not_wait_for_each_other():
    held = publisher_queue()
    put(held, "a", b"1", 1, 0)
    put(held, "b", b"2", 2, 0)
    assert {held.take(0).lane.topic, held.take(0).lane.topic} == {"a", "b"}


def test_a_first_message_lingers_until_its_time_or_until_the_batch_is_full():
    held = publisher_queue(linger_s=0.005, max_batch_messages=2)
    put(held, "t", b"1", 1, 10.0)
    assert held.take(10.004) is None
    assert held.next_s() == pytest.approx(10.005)
    put(held, "t", b"2", 2, 10.001)
    assert payloads(held.take(10.001)) == [b"1", b"2"]
    put(held, "u", b"3", 3, 10.0)
    assert payloads(held.take(10.005)) == [b"3"]


def test_a_batch_is_bounded_in_bytes_and_holds_at_least_one_message():
    held = publisher_queue(max_batch_bytes=10)
    for n, size in enumerate((6, 4, 1, 50)):
        put(held, "t", bytes(size), n, 0)
    sizes = []
    while (batch := held.take(0)) is not None:
        sizes.append([len(payload) for payload in payloads(batch)])
        held.settled(batch)
    assert sizes == [[6, 4], [1], [50]]


def test_there_is_no_room_beyond_the_bound_until_a_message_completes():
    held = publisher_queue(max_pending_bytes=2 * (ITEM_BYTES + 10))
    assert put(held, "t", bytes(10), 1, 0)
    assert put(held, "t", bytes(10), 2, 0)
    assert not put(held, "t", bytes(10), 3, 0)
    batch = held.take(0)
    assert not put(held, "t", bytes(10), 3, 0), "what is under way counts"
    held.settled(batch)
    assert put(held, "t", bytes(10), 3, 0)
    assert not held.fits(Item(bytes(3 * ITEM_BYTES), None, None, None, 4))


def test_a_failed_batch_is_retried_before_later_messages():
    held = publisher_queue()
    put(held, "t", b"1", 1, 0)
    batch = held.take(0)
    put(held, "t", b"2", 2, 0)
    assert held.failed(batch, ConnectFailed(), 0) == []
    assert held.take(0) is None, "after a pause"
    assert payloads(held.take(1)) == [b"1"]


def test_a_batch_of_unknown_outcome_is_not_retried_and_later_ones_continue():
    held = publisher_queue()
    put(held, "t", b"1", 1, 0)
    batch = held.take(0)
    put(held, "t", b"2", 2, 0)
    [lost] = held.failed(batch, ConnectionLost(), 0)
    assert [item.future for item in lost.items] == [1]
    assert lost.error.outcome == "unknown"
    assert held.take(0) is None, "after a pause"
    assert payloads(held.take(1)) == [b"2"]


def test_a_batch_of_unknown_outcome_is_retried_with_at_least_once():
    held = publisher_queue(retry_unknown=True)
    put(held, "t", b"1", 1, 0)
    assert held.failed(held.take(0), ConnectionLost(), 0) == []
    assert payloads(held.take(1)) == [b"1"]


def test_a_message_in_doubt_that_runs_out_of_time_is_unknown():
    held = publisher_queue(retry_unknown=True, delivery_timeout_s=1)
    put(held, "t", b"1", 1, 0)
    held.failed(held.take(0), ConnectionLost(), 0.5)
    [lost] = held.overdue(1)
    assert isinstance(lost.error, DeadlineExceeded)
    assert lost.error.outcome == "unknown"


@pytest.mark.parametrize("refused", [BadRequest, MessageTooLarge])
@pytest.mark.parametrize("guilty", range(7))
def test_a_refused_message_takes_none_of_its_neighbours_with_it(refused, guilty):
    held = publisher_queue()
    for n in range(7):
        put(held, "t", b"%d" % n, n, 0)
    delivered, lost = [], []
    while (batch := held.take(0)) is not None:
        if any(item.future == guilty for item in batch.items):
            lost += [future for gone in held.failed(batch, refused(), 0) for future in gone.futures]
        else:
            delivered += [item.future for item in batch.items]
            held.settled(batch)
    assert lost == [guilty]
    assert delivered == [n for n in range(7) if n != guilty]
    assert held.pending == held.pending_bytes == 0


def test_a_missing_topic_fails_at_once():
    held = publisher_queue()
    put(held, "t", b"1", 1, 0)
    [lost] = held.failed(held.take(0), TopicNotFound(), 0)
    assert isinstance(lost.error, TopicNotFound)


def test_messages_that_wait_too_long_are_dropped_and_the_rest_stay():
    held = publisher_queue(delivery_timeout_s=10, linger_s=100)
    put(held, "t", b"1", 1, 0)
    put(held, "t", b"2", 2, 5)
    assert held.next_s() == 10
    [lost] = held.overdue(10)
    assert [item.future for item in lost.items] == [1]
    assert lost.error.outcome == "not-applied"
    assert held.pending == 1


def test_an_hour_without_a_daemon_costs_a_bounded_memory_and_drops_the_oldest_in_time():
    held = publisher_queue(mode="best_effort", delivery_timeout_s=10, max_pending_bytes=1 << 20)
    refused = dropped = 0
    highest = 0
    for tick in range(36_000):
        now_s = tick / 10
        for _ in range(10):
            refused += not put(held, "t", bytes(100), tick, now_s)
        for lost in held.overdue(now_s):
            assert isinstance(lost.error, MessageDropped)
            dropped += len(lost.items)
        batch = held.take(now_s)
        if batch is not None:
            assert held.left_s(batch, now_s) <= 10
            assert held.failed(batch, ConnectFailed(), now_s) == []
        highest = max(highest, held.pending_bytes)
    assert highest <= 1 << 20
    assert dropped > 350_000
    assert held.pending <= 1100
    assert refused + dropped + held.pending == 360_000
    held.overdue(3700)
    assert (held.pending, held.pending_bytes) == (0, 0)


def test_topics_without_messages_are_forgotten():
    held = publisher_queue()
    for n in range(1000):
        put(held, f"t{n}", b"", n, 0)
    while (batch := held.take(0)) is not None:
        held.settled(batch)
    assert not held._lanes


def test_cleared_messages_report_their_known_outcome():
    held = publisher_queue(retry_unknown=True)
    put(held, "t", b"1", 1, 0)
    held.failed(held.take(0), ConnectionLost(), 0)
    put(held, "t", b"2", 2, 0)
    assert [(lost.items[0].future, lost.error.outcome) for lost in held.clear()] == [(1, "unknown"), (2, "not-applied")]
    assert held.pending == 0


@given(st.integers(0, 1 << 32), st.integers(1, 60))
def test_each_topic_keeps_the_order_of_calls_whatever_fails(seed: int, messages: int):
    random = Random(seed)
    held = publisher_queue(max_batch_messages=3, retry_unknown=True, delivery_timeout_s=1e9)
    stored: dict[str, list[int]] = {"a": [], "b": []}
    under_way = []
    count = 0
    now_s = 0.0
    while count < messages or held.pending:
        now_s += 10
        match random.choice(("put", "take", "end")):
            case "put" if count < messages:
                put(held, random.choice("ab"), b"", count, now_s)
                count += 1
            case "take" if (batch := held.take(now_s)) is not None:
                under_way.append(batch)
            case "end" if under_way:
                batch = under_way.pop(random.randrange(len(under_way)))
                took = random.random() < 0.7
                if took:
                    stored[batch.lane.topic] += [item.future for item in batch.items]
                if took and random.random() < 0.7:
                    held.settled(batch)
                else:
                    assert held.failed(batch, ConnectionLost() if took else Unavailable(), now_s) == []
    for order in stored.values():
        first = list(dict.fromkeys(order))
        assert first == sorted(first)
    assert sorted({*stored["a"], *stored["b"]}) == list(range(messages))


def test_after_a_timeout_batches_shrink_and_grow_again_when_they_are_answered():
    held = publisher_queue(max_batch_messages=64, max_pending_bytes=64 << 20)
    for n in range(1_000):
        put(held, "t", b"x" * 100, n, 0)
    late = held.take(0)
    [lost] = held.failed(late, DeadlineExceeded("late", outcome="unknown"), 0)
    assert lost.items == late.items
    sizes = []
    while (batch := held.take(10)) is not None:
        sizes.append(len(batch.items))
        held.settled(batch)
    assert sizes[:9] == [32] * 8 + [64]
    assert set(sizes[9:-1]) == {64}


def test_a_batch_sent_again_after_a_timeout_is_split_in_halves_and_stays_in_order():
    held = publisher_queue(retry_unknown=True)
    for n in range(7):
        put(held, "t", b"%d" % n, n, 0)
    sent, now_s = [], 0.0
    while (batch := held.take(now_s)) is not None:
        now_s += 1
        if len(batch.items) > 2:
            assert held.failed(batch, DeadlineExceeded("late", outcome="unknown"), now_s - 1) == []
        else:
            sent.append(payloads(batch))
            held.settled(batch)
    assert sent == [[b"%d" % n] for n in range(7)], "as little as was answered"
    assert held.pending == 0


@pytest.mark.parametrize("error", [ConnectionLost("lost"), DeadlineExceeded("never sent")])
def test_other_failures_leave_the_size_of_batches_alone(error: Exception):
    held = publisher_queue(retry_unknown=True, max_batch_messages=4)
    for n in range(8):
        put(held, "t", b"%d" % n, n, 0)
    batch = held.take(0)
    assert held.failed(batch, error, 0) == []
    assert held.take(10) is batch
    held.settled(batch)
    assert len(held.take(10).items) == 4
