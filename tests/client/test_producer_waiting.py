"""A producer's queue, driven by hand: contents, next batch, time-outs; and limits of lightweight transactions."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pytest

from plainsong import JSON, Outgoing, lightweight
from plainsong.errors import (
    ConnectionLost,
    MaxTransactionSizeExceeded,
    NotEncodable,
    NoTransaction,
    ProducerStopped,
    SequenceIdsMixed,
    TransactionInProgress,
    TransactionOutcomeUnknown,
    TransactionTimedOut,
)
from plainsong.lightweight import MAX_BYTES, Lightweight
from plainsong.messages import Receipt, with_attributes
from plainsong.producer_queue import (
    ProducerQueue,
    Session,
    atomic_request,
    producer_bounds,
    whole_request,
)
from plainsong.protocol.errors import (
    InvalidParameter,
    InvalidSequenceIds,
    MessageTooLarge,
    NoMessages,
    OutcomeUnknown,
    ProducerFenced,
)
from plainsong.publisher_queue import Item, Whole, item_of
from plainsong.serializers import BYTES


@dataclass(eq=False)
class Fate:
    retrieved: bool = False


def producer_queue(*, last: int = -1, initial: int | None = None, **bounds: Any) -> ProducerQueue[Fate]:
    given = {
        "linger_ms": 0,
        "max_batch_messages": 4,
        "max_batch_bytes": 1000,
        "max_pending_bytes": 100_000,
        "overflow": "wait",
        "delivery_timeout_s": 120,
    }
    session = Session("t", "p", 1, 1, last, optional=False)
    return ProducerQueue(session, producer_bounds(**{**given, **bounds}), BYTES, initial, 30.0)


def put(one: ProducerQueue[Fate], *ids: int | None, now_s: float = 0.0) -> list[Fate]:
    fates = [Fate() for _ in ids]
    for given, fate in zip(ids, fates, strict=True):
        assert one.put("t", Item(b"m", None, None, given, fate), now_s) is not None
    return fates


def put_whole(one: ProducerQueue[Fate], messages: list[bytes], ids: Any = (), *more: Any, now_s: float = 0.0) -> Fate:
    fate = Fate()
    assert one.put("t", Whole(whole_request(messages, BYTES)[0], ids, fate, *more), now_s) is not None
    return fate


def taken(one: ProducerQueue[Fate], now_s: float = 0.0) -> list[int]:
    parcel, _ = one.work(now_s)
    assert parcel is not None
    return list(parcel.request().sequence_ids or [])


def under_way(one: ProducerQueue[Fate]) -> Any:
    """Return the only batch that is being delivered."""
    return one._lanes["t"].under_way


def settle(one: ProducerQueue[Fate]) -> None:
    one.settled(under_way(one))


# --- numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("last", "initial", "first"), [(-1, None, 0), (7, None, 8), (-1, 5, 5), (7, 3, 3), (7, 0, 0)])
def test_the_first_automatic_id_is_the_next_one_unless_it_is_set(last: int, initial: int | None, first: int):
    one = producer_queue(last=last, initial=initial)
    put(one, None, None)
    assert taken(one) == [first, first + 1]


def test_explicit_and_automatic_ids_are_never_mixed():
    one = producer_queue()
    put(one, 4)
    with pytest.raises(ValueError, match="some have none"):
        put(one, None)
    with pytest.raises(SequenceIdsMixed):
        put_whole(one, [b"x"])
    other = producer_queue()
    put(other, None)
    with pytest.raises(SequenceIdsMixed):
        put(other, 9)
    with pytest.raises(SequenceIdsMixed):
        put_whole(producer_queue(), [b"x", b"y"], [1, None])


@pytest.mark.parametrize("ids", [[2, 2], [3, 1], [1], [-1, 4], [True, 2], [1, 1 << 63]])
def test_invalid_ids_are_refused_before_anything_is_sent(ids: list[int]):
    one = producer_queue()
    with pytest.raises(InvalidSequenceIds):
        put_whole(one, [b"x", b"y"], ids)
    assert one.pending == 0
    put(one, None)
    assert taken(one) == [0]


# --- batches -----------------------------------------------------------------------------------------


def test_one_request_is_in_progress_and_later_messages_are_batched():
    one = producer_queue()
    put(one, None)
    assert taken(one) == [0]
    put(one, None, None, None)
    assert one.work(0) == (None, [])
    settle(one)
    assert taken(one) == [1, 2, 3]
    assert one.pending == 3


def test_decreasing_ids_begin_another_request():
    one = producer_queue()
    put(one, 5, 6, 6, 2, 9)
    found = []
    for _ in range(3):
        found.append(taken(one))
        settle(one)
    assert found == [[5, 6], [6], [2, 9]]


def test_messages_published_together_are_a_request_of_their_own():
    one = producer_queue()
    put(one, None)
    put_whole(one, [b"x"] * 6)
    put(one, None)
    found = []
    for _ in range(3):
        found.append(taken(one))
        settle(one)
    assert found == [[0], [1, 2, 3, 4, 5, 6], [7]]
    assert (one.pending, one.pending_bytes) == (0, 0)


def test_attributes_and_ttls_are_sent_with_each_message():
    one = producer_queue()
    one.put("t", item_of(with_attributes(Outgoing(b"a", 5), {"h": "1"}, "key"), BYTES, Fate()), 0)
    put(one, None)
    parcel, _ = one.work(0)
    assert parcel is not None
    assert parcel.request().attributes == [{"h": "1", "routingKey": "key"}, {}]
    assert parcel.request().message_ttls_s == [5, None]


def test_messages_published_together_end_the_lingering_of_those_before_them_and_wake_the_sender():
    one = producer_queue(linger_ms=60_000)
    assert one.put("t", Item(b"m", None, None, None, Fate()), 0.0)
    assert one.work(0.0) == (None, [])
    assert one.put("t", Whole(whole_request([b"m"], BYTES)[0], (), Fate()), 0.0)
    assert taken(one) == [0]
    settle(one)
    assert taken(one) == [1]


def test_lingering_ends_with_a_full_request_or_a_flush():
    one = producer_queue(linger_ms=1000)
    put(one, None)
    assert one.next_s() == 1.0
    put(one, None, None, None)
    assert taken(one) == [0, 1, 2, 3]
    settle(one)
    put(one, None)
    one.flushing = True
    assert taken(one) == [4]


# --- failures ----------------------------------------------------------------------------------------


def failed(one: ProducerQueue[Fate], error: Any) -> list[Any]:
    return one.failed(under_way(one), error, 0.0)


def test_a_refused_message_with_an_automatic_id_fails_alone():
    one = producer_queue()
    fates = put(one, None, None, None)
    assert taken(one) == [0, 1, 2]
    assert failed(one, MessageTooLarge()) == []
    assert taken(one) == [0]
    (ended,) = failed(one, MessageTooLarge())
    assert ended.futures == [fates[0]]
    assert taken(one) == [1, 2]
    settle(one)
    put(one, None)
    assert taken(one) == [3]


def test_a_refused_message_with_an_id_of_its_own_stops_its_producer_and_nothing_overtakes_it():
    one = producer_queue()
    fates = put(one, 1, 2, 3)
    taken(one)
    put_later = put(one, 7)
    failed(one, MessageTooLarge())
    assert taken(one) == [1]
    settle(one)
    assert taken(one) == [2, 3]
    failed(one, MessageTooLarge())
    assert taken(one) == [2]
    ended = failed(one, MessageTooLarge())
    assert [each.futures for each in ended] == [[fates[1]], [fates[2]], put_later]
    assert isinstance(ended[1].error, ProducerStopped)
    assert ended[1].error.outcome == "not-applied"
    with pytest.raises(ProducerStopped):
        one.check_usable()


def test_after_an_unknown_outcome_automatic_ids_continue_and_explicit_ones_stop():
    one = producer_queue()
    put(one, None)
    taken(one)
    failed(one, OutcomeUnknown())
    put(one, None)
    assert taken(one) == [1]
    other = producer_queue()
    put(other, 4)
    taken(other)
    failed(other, OutcomeUnknown())
    with pytest.raises(ProducerStopped):
        other.check_usable()


def test_a_caller_that_waits_for_a_request_decides_what_follows():
    one = producer_queue()
    put_whole(one, [b"x"], [3])
    taken(one)
    behind = put(one, 4)
    ended = failed(one, OutcomeUnknown())
    assert ended[1].futures == behind
    one.check_usable()
    put(one, 3)
    assert taken(one) == [3]


def test_fencing_fails_all_waiting_messages():
    one = producer_queue()
    put(one, None)
    taken(one)
    behind = put(one, None)
    ended = failed(one, ProducerFenced())
    assert isinstance(ended[1].error, ProducerFenced)
    assert (ended[1].futures, ended[1].error.outcome) == (behind, "not-applied")
    with pytest.raises(ProducerFenced):
        one.check_usable()


def test_a_message_that_waited_too_long_is_given_up():
    one = producer_queue()
    fates = put(one, None, None)
    parcel, ended = one.work(121)
    assert parcel is None
    assert [sent for each in ended for sent in each.futures] == fates
    assert (one.pending, one.pending_bytes) == (0, 0)


def whole(one: ProducerQueue[Fate], limit_s: float | None, *ids: int, now_s: float = 0.0) -> Fate:
    return put_whole(one, [b"w"], ids, limit_s, now_s=now_s)


def lost(ended: list[Any]) -> list[Any]:
    return [sent for each in ended for sent in each.futures]


def test_an_explicit_deadline_counts_while_another_request_is_in_progress():
    one = producer_queue()
    put(one, None)
    taken(one)
    fates = put(one, None)
    short = whole(one, 1.0)
    fates += put(one, None)
    assert one.next_s() == 1.0
    assert one.work(0.9) == (None, [])
    parcel, ended = one.work(1.0)
    assert (parcel, lost(ended)) == (None, [short])
    assert "within 1 s" in ended[0].error.detail
    assert ended[0].error.outcome == "not-applied"
    assert (one.next_s(), one.pending) == (120, 3)
    settle(one)
    assert taken(one, 2) == [1, 3]
    settle(one)
    assert (one.next_s(), one.pending, one.pending_bytes) == (None, 0, 0)


def test_messages_that_wait_too_long_are_given_up_while_another_request_is_in_progress():
    one = producer_queue()
    whole(one, 600.0)
    taken(one)
    fates = put(one, None, now_s=5.0)
    assert one.next_s() == 125.0
    assert lost(one.work(125.0)[1]) == fates
    assert under_way(one) is not None


def test_a_deadline_may_be_longer_than_the_delivery_timeout():
    one = producer_queue()
    put(one, None)
    taken(one)
    long, fates = whole(one, 600.0), put(one, None)
    assert lost(one.work(120.0)[1]) == fates
    assert lost(one.work(599.0)[1]) == []
    settle(one)
    parcel, _ = one.work(599.0)
    assert parcel is not None
    assert (parcel.futures, one.until_s(parcel.items[0])) == ([long], 600)


def test_with_explicit_ids_messages_after_a_late_one_fail_and_earlier_ones_continue():
    one = producer_queue()
    put(one, 1)
    taken(one)
    put(one, 2)
    short = whole(one, 1.0, 3)
    behind = put(one, 4)
    _, ended = one.work(1.0)
    assert lost(ended) == [short, *behind]
    assert isinstance(ended[1].error, ProducerStopped)
    one.check_usable()
    settle(one)
    assert taken(one, 1.0) == [2]


def test_with_explicit_ids_a_late_message_stops_its_producer():
    one = producer_queue()
    put(one, 1)
    taken(one)
    long, late = whole(one, 600.0, 2), put(one, 3, 4)
    assert lost(one.work(120.0)[1]) == late
    with pytest.raises(ProducerStopped):
        one.check_usable()
    settle(one)
    parcel, _ = one.work(121.0)
    assert parcel is not None
    assert parcel.futures == [long]


def test_producers_cannot_drop_messages():
    with pytest.raises(InvalidParameter):
        producer_queue(overflow="drop")


# --- lightweight transactions ------------------------------------------------------------------------


def test_one_transaction_is_open_at_a_time():
    one = producer_queue()
    first = one.begin("k", None, 0)
    with pytest.raises(TransactionInProgress):
        one.begin("k", None, 1)
    first.abort()
    second = one.begin("k", None, 2)
    second.write(b"x", sequence_id=None, ttl_s=None, now_s=2)
    second.committing(3)
    with pytest.raises(TransactionInProgress):
        one.begin("k", None, 100)
    second.committed(Receipt(None, None, 1, 1))
    one.begin("k", None, 101)


def test_an_aborted_transaction_uses_no_id():
    one = producer_queue()
    held = one.begin("k", None, 0)
    held.write(b"x", sequence_id=None, ttl_s=None, now_s=0)
    held.abort()
    put(one, None)
    assert taken(one) == [0]


def open_one(timeout_s: float = 30.0, serializer: Any = BYTES) -> Lightweight:
    return Lightweight("k", serializer, timeout_s, timeout_s)


def write(held: Lightweight, value: Any, now_s: float = 0.0) -> None:
    held.write(value, sequence_id=None, ttl_s=None, now_s=now_s)


def test_exactly_16_mebibytes_of_serialized_bytes_fit_and_one_more_leaves_the_transaction_open():
    held = open_one(serializer=JSON)
    write(held, "x" * (MAX_BYTES - 2 - 10))
    write(held, "12345678")
    assert held.size == MAX_BYTES
    with pytest.raises(MaxTransactionSizeExceeded):
        write(held, 1)
    assert (held.state, len(held)) == ("open", 2)
    assert sum(map(len, held.committing(0).messages)) == MAX_BYTES


def test_the_number_of_messages_in_a_transaction_is_bounded():
    held = open_one()
    for _ in range(65_536):
        write(held, b"")
    with pytest.raises(MaxTransactionSizeExceeded):
        write(held, b"")
    assert held.state == "open"


def test_an_invalid_message_is_refused_and_the_transaction_stays_open():
    held = open_one()
    with pytest.raises(NoMessages):
        held.committing(0)
    with pytest.raises(InvalidParameter):
        write(held, None)
    with pytest.raises(NotEncodable):
        write(held, "text")
    with pytest.raises(InvalidParameter):
        write(held, Outgoing(b"x", routing_key="another"))
    write(held, Outgoing(b"x", routing_key="k", attributes={"h": "1"}))
    request = held.committing(0)
    assert (request.atomic, request.routing_key, request.attributes) == (True, "k", [{"h": "1"}])
    with pytest.raises(InvalidParameter):
        Lightweight(5, BYTES, 1, 1)  # type: ignore[arg-type]


def test_a_transaction_that_has_ended_accepts_nothing():
    held = open_one()
    write(held, b"x")
    held.abort()
    held.abort()
    for use in (lambda: write(held, b"y"), lambda: held.committing(0)):
        with pytest.raises(NoTransaction):
            use()
    done = open_one()
    write(done, b"x")
    done.committing(0)
    with pytest.raises(NoTransaction):
        done.abort()
    done.committed(Receipt(None, None, 1, 1))
    for use in (done.abort, lambda: write(done, b"y"), lambda: done.committing(0)):
        with pytest.raises(NoTransaction):
            use()


def test_the_time_of_a_transaction_counts_only_while_it_is_open():
    held = open_one(timeout_s=10)
    write(held, b"x" * 100, now_s=9.9)
    with pytest.raises(TransactionTimedOut):
        write(held, b"y", now_s=10)
    assert (held.state, held.size, len(held)) == ("aborted", 0, 0)
    with pytest.raises(TransactionTimedOut):
        held.committing(11)
    slow = open_one(timeout_s=10)
    write(slow, b"x")
    slow.committing(9)
    assert not slow.expire(1000)
    slow.committed(Receipt(None, None, 1, 1))
    assert slow.state == "committed"


def test_a_timeout_frees_the_buffer():
    one = producer_queue()
    held = one.begin("k", 10, 0)
    write(held, b"x")
    assert one.next_s() == 10
    one.work(10)
    assert (held.state, len(held), one.next_s()) == ("aborted", 0, None)


def test_a_transaction_that_certainly_did_not_happen_is_open_again_and_one_in_doubt_is_over():
    held = open_one()
    write(held, b"x")
    held.committing(0)
    refused = MessageTooLarge()
    held.failed(refused, 1)
    assert held.state == "open"
    held.committing(2)
    held.failed(TransactionOutcomeUnknown(), 3)
    assert held.state == "unknown"
    for use in (lambda: write(held, b"y"), lambda: held.committing(0)):
        with pytest.raises(TransactionOutcomeUnknown):
            use()
    lost = open_one()
    write(lost, b"x")
    lost.committing(0)
    lost.failed(ConnectionLost(), 3)
    assert lost.state == "unknown"


def test_an_atomic_request_has_one_routing_key_and_is_not_empty_or_too_large():
    with pytest.raises(NoMessages):
        atomic_request("k", [], BYTES)
    with pytest.raises(InvalidParameter):
        atomic_request("k", [Outgoing(b"x", routing_key="other")], BYTES)
    with pytest.raises(MaxTransactionSizeExceeded):
        atomic_request("k", [b"x" * MAX_BYTES, b"y"], BYTES)
    request, _ = atomic_request("k", [b"x" * MAX_BYTES], BYTES)
    assert (request.atomic, request.routing_key) == (True, "k")


def test_a_commit_at_the_very_end_of_the_timeout_includes_everything(monkeypatch: pytest.MonkeyPatch):
    held = open_one(timeout_s=1)
    held.write(Outgoing(b"a", attributes={"trace": "1"}), sequence_id=7, ttl_s=60, now_s=0)
    make = lightweight.outgoing_request
    sender = threading.Thread(target=held.expire, args=(2.0,))

    def making(*arguments: Any) -> Any:
        sender.start()
        sender.join(0.1)  # until it blocks
        return make(*arguments)

    monkeypatch.setattr(lightweight, "outgoing_request", making)
    request = held.committing(0.5)
    sender.join()
    assert held.state == "committing"
    assert request.attributes == [{"trace": "1"}]
    assert (request.message_ttls_s, held.sequence_ids) == ([60], [7])
