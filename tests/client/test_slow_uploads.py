"""Large bodies on slow links: their time-out grows with their size, as the daemon's does, up to the caller's deadline."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from topic_of_producers import Topic

from plainsong import calls
from plainsong._async.stream import AsyncStream
from plainsong._sync import stream as sync_stream
from plainsong.calls import Answer, Failure, Send
from plainsong.errors import DeadlineExceeded, OutcomeUnknown
from plainsong.producer_queue import ProducerQueue, Session, producer_bounds
from plainsong.protocol.codec import AVRO
from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.ids import pack_id
from plainsong.protocol.requests import PublishRequest, Receipt
from plainsong.publisher_queue import Item, TooSlow
from plainsong.serializers import BYTES
from tests.client.simulation import SILENT, Simulation, kind

pytestmark = pytest.mark.usefixtures("both_clients")

RECEIPT = Answer(200, {"content-type": "avro/binary"}, AVRO.encode_receipt(Receipt(pack_id(5, 0), pack_id(5, 0), 1)))
MIB = 1 << 20
BOUNDS = producer_bounds(
    linger_ms=0,
    max_batch_messages=100,
    max_batch_bytes=MIB,
    max_pending_bytes=MIB,
    overflow="wait",
    delivery_timeout_s=600,
)


class Line(Simulation):
    """A link on which every answer takes ``took_s``, unless the client gives up earlier."""

    def __init__(self, took_s: float, answer: Any = lambda _: RECEIPT) -> None:
        def carried(send: Send) -> Answer | Failure:
            self.now_s += min(took_s, send.timeout_s)
            return answer(send) if took_s <= send.timeout_s else SILENT

        super().__init__(carried)


def outcome_of(line: Line, size: int, deadline_s: float | None = None) -> Any:
    call = calls.publish("default", "t", PublishRequest([bytes(size)]))
    try:
        return line.run(line.channel().call, call, deadline_s)
    except PlainsongError as error:
        return error


def test_the_timeout_grows_by_a_second_for_each_16_kib_of_the_body():
    line = Line(60)
    assert outcome_of(line, MIB, 120).first_id == pack_id(5, 0)
    assert [send.timeout_s for send in line.sent] == [30 + 64]


def test_a_small_body_has_the_request_timeout():
    line = Line(60)
    assert outcome_of(line, 1_000).outcome == "unknown"
    assert line.now_s == 30


def test_a_large_body_does_not_delay_the_change_from_a_silent_daemon_to_another():
    def answer(send: Send) -> Answer | Failure:
        if send.url == "http://two":
            return RECEIPT
        line.now_s += send.timeout_s
        return SILENT

    line = Simulation(answer)
    call = calls.publish("default", "t", PublishRequest([bytes(MIB)]), retry_unknown=True)
    assert line.run(line.channel(["http://one", "http://two"]).call, call, 120.0).first_id == pack_id(5, 0)
    assert [send.timeout_s for send in line.sent] == [30, 30]


@pytest.mark.parametrize(("given_s", "limit_s"), [(None, 60), (40, 40)])
def test_the_deadline_of_a_call_holds_for_every_body(given_s, limit_s):
    line = Line(100)
    assert isinstance(outcome_of(line, MIB, given_s), DeadlineExceeded)
    assert line.now_s == limit_s


def deliver(line: Line, size: int, limit_s: float) -> Any:
    channel = line.channel()
    opening = {"initial_sequence_id": None, "optional": False, "retention_s": None, "deadline_s": 120.0}
    session = line.run(partial(kind().begin, channel, "t", "p", **opening))
    request = PublishRequest([bytes(size)], sequence_ids=[0])
    began_s = line.now_s
    try:
        return line.run(kind().Delivery(channel, session, request, began_s + limit_s).run)
    except PlainsongError as error:
        return error


def test_the_outcome_of_a_request_is_not_queried_while_it_may_still_be_in_flight():
    topic = Topic()
    line = Line(29, topic.carry)
    assert deliver(line, MIB, 120).last_sequence_id == 0
    topic = Topic()
    slow = Line(29, lambda send: topic.carry(send) if not is_publish(send) or send.timeout_s >= 60 else SILENT)
    assert deliver(slow, MIB, 120).last_sequence_id == 0
    assert topic.verbs == ["open", "publish"]


def test_the_delivery_timeout_of_a_producer_holds_for_every_body():
    topic = Topic()
    line = Line(29, lambda send: SILENT if is_publish(send) else topic.carry(send))
    assert isinstance(deliver(line, MIB, 40), (DeadlineExceeded, OutcomeUnknown))
    assert [send.timeout_s for send in line.sent if is_publish(send)] == [40]


def test_the_answer_to_a_large_request_of_a_stream_has_the_same_longer_timeout():
    Stream = {"async": AsyncStream, "sync": sync_stream.Stream}[kind().name]  # noqa: N806
    stream = Stream(Line(0).channel(), "t", serializer=None, max_pending_bytes=MIB)
    assert stream._answer_s() == 30
    stream._queue.put_single(bytes(MIB), SimpleNamespace())
    assert stream._answer_s() == 30 + 64


def is_publish(send: Send) -> bool:
    return send.request.path.endswith("/publish")


def late_above(topic: Topic, most_bytes: int, *, arrives: bool) -> Any:
    """Lose the answers to publishes with larger bodies; with ``arrives`` the topic stores their messages anyway."""

    def carry(send: Send) -> Answer | Failure:
        if not is_publish(send) or len(send.request.body) <= most_bytes:
            return topic.carry(send)
        if arrives:
            topic.carry(send)
        else:
            topic.verbs.append("late")
        return SILENT

    return carry


@pytest.mark.parametrize("arrives", [True, False])
def test_after_a_timeout_a_producer_sends_smaller_requests_each_message_once_and_in_order(
    arrives: bool,
):
    topic = Topic()
    line = Line(0, late_above(topic, 2_000, arrives=arrives))
    channel = line.channel()
    opening = {"initial_sequence_id": None, "optional": False, "retention_s": None, "deadline_s": None}
    session = line.run(partial(kind().begin, channel, "t", "p", **opening))
    queue: ProducerQueue[int] = ProducerQueue(session, BOUNDS, BYTES, None, 30.0)
    for number in range(20):
        queue.put("t", Item(b"%03d" % number + bytes(500), None, None, None, number), 0.0)
    while (batch := queue.take(line.now_s)) is not None:
        delivery = kind().Delivery(channel, session, batch.request(), 1e6, may_split=len(batch.items) > 1)
        try:
            line.run(delivery.run)
            queue.settled(batch)
        except PlainsongError as error:
            assert queue.failed(batch, error, line.now_s) == []
    assert [int(payload[:3]) for payload in topic.payloads] == list(range(20))
    assert queue.pending == 0
    if not arrives:
        assert topic.verbs.count("late") <= 4, "the next requests are as small"


@pytest.mark.parametrize("explicit", [False, True])
def test_a_message_that_waits_to_be_sent_again_is_given_up_at_its_deadline(explicit: bool):
    session = Session("t", "p", 1, 1, -1, optional=False)
    queue: ProducerQueue[int] = ProducerQueue(session, BOUNDS, BYTES, None, 30.0)

    def put(number: int, now_s: float) -> None:
        queue.put("t", Item(b"x", None, None, number if explicit else None, number), now_s)

    for number in range(6):
        put(number, 0.0)
    batch = queue.take(0.0)
    assert batch is not None
    assert queue.failed(batch, TooSlow("no answer"), 0.0) == []
    put(6, BOUNDS.delivery_timeout_s - 1)
    assert queue.overdue(BOUNDS.delivery_timeout_s - 1) == []
    ended = queue.overdue(BOUNDS.delivery_timeout_s)
    given_up = [future for each in ended for future in each.futures]
    # With explicit ids, later messages also fail, because the caller decides what to do about the gap.
    assert given_up == (list(range(7)) if explicit else list(range(6)))
    assert queue.pending == len(list(queue.futures())) == 7 - len(given_up)
    assert isinstance(ended[0].error, DeadlineExceeded)


def test_messages_published_as_one_request_are_never_split():
    topic = Topic()
    requests: list[int] = []

    def late_twice(send: Send) -> Answer | Failure:
        if is_publish(send):
            requests.append(len(send.request.body))
            if len(requests) < 3:
                return SILENT
        return topic.carry(send)

    assert deliver(Line(0, late_twice), 10_000, 600).last_sequence_id == 0
    assert len(set(requests)) == 1
