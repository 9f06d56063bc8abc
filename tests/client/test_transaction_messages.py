"""Messages of a transaction: the order of arrival, the bound on the local buffer, and the state after a failure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from service import Service, then_lost

from plainsong._sync.transaction_messages import ITEM_BYTES
from plainsong.errors import NoTransaction, TransactionFailed, TransactionTimedOut
from plainsong.protocol.errors import InvalidParameter, PlainsongError
from plainsong.protocol.requests import PublishRequest
from plainsong.transactions import BufferBounds
from tests.client.simulation import LOST, Simulation, kind, problem

pytestmark = pytest.mark.usefixtures("both_clients")


class Stage:
    """A transaction without participants."""

    def __init__(self, *, retry: bool = False, **bounds: int) -> None:
        self.service = Service()
        self.simulation = Simulation(self.service.carry)
        self.run = self.simulation.run
        client = SimpleNamespace(_channel=self.simulation.channel(retry=retry))
        self.context = kind().TransactionContext(client, **bounds)
        self.transaction = self.run(self.context.start)

    def put(self, topic: str, *payloads: bytes, **options: Any) -> None:
        under_way = self.context._require("publish")
        if self.context._messages.take(topic, PublishRequest(list(payloads), **options)):
            self.run(self.context._spill, under_way)

    def verbs(self) -> list[str]:
        return [event.removeprefix("service.") for event in self.service.events]

    def published(self, topic: str) -> list[bytes]:
        return self.service.published[topic, self.transaction.id]


def test_nothing_is_sent_before_the_commit_and_then_one_publish_for_each_topic():
    stage = Stage()
    stage.put("one", b"1")
    stage.put("two", b"2", b"3")
    stage.put("one", b"4")
    assert stage.verbs() == ["begin"]
    stage.run(stage.context.finish)
    assert stage.verbs() == ["begin", "publish", "publish", "commit"]
    assert stage.published("one") == [b"1", b"4"]
    assert stage.published("two") == [b"2", b"3"]


def test_a_transaction_without_messages_asks_no_topic():
    stage = Stage()
    stage.run(stage.context.finish)
    assert stage.verbs() == ["begin", "commit"]


def test_messages_that_do_not_fit_are_stored_in_the_order_of_the_calls():
    stage = Stage(buffer_messages=10)
    for n in range(100):
        stage.put("t", b"%d" % n)
    assert stage.verbs().count("store") > 5
    stage.run(stage.context.finish)
    assert stage.verbs().count("publish") == 1
    assert stage.published("t") == [b"%d" % n for n in range(100)]
    (receipt,) = stage.context._messages.receipts["t"]
    assert (receipt.count, receipt.first_id, receipt.last_id) == (100, None, None)


@given(
    sizes=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3_000)), max_size=60),
    buffer_bytes=st.integers(1, 8_000),
    buffer_messages=st.integers(1, 20),
    checkpoints=st.sets(st.integers(0, 60)),
)
def test_memory_is_bounded_and_nothing_lost_or_reordered(
    sizes: list[tuple[str, int]], buffer_bytes: int, buffer_messages: int, checkpoints: set[int]
):
    stage = Stage(buffer_bytes=buffer_bytes, buffer_messages=buffer_messages)
    expected: dict[str, list[bytes]] = {}
    for n, (topic, size) in enumerate(sizes):
        payload = b"%d:" % n + bytes(size)
        stage.put(topic, payload)
        expected.setdefault(topic, []).append(payload)
        assert stage.context._messages.waiting_bytes <= buffer_bytes
        if n in checkpoints:
            stage.run(stage.context.checkpoint)
    stage.run(stage.context.finish)
    found: dict[str, list[bytes]] = {}
    for (topic, _), payloads in sorted(stage.service.published.items(), key=lambda each: each[0][1]):
        found.setdefault(topic, []).extend(payloads)
    assert {topic: payloads for topic, payloads in found.items() if payloads} == expected


def test_no_request_exceeds_its_bound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kind().transaction_messages, "REQUEST_BYTES", 1_000)
    monkeypatch.setattr(kind().transaction_messages, "REQUEST_MESSAGES", 5)
    stage = Stage()
    stage.put("t", *[bytes(100) for _ in range(50)])
    stage.put("t", bytes(5_000))
    stage.run(stage.context.finish)
    sent = [request.messages for verb, request in stage.service.requests if verb in ("store", "publish")]
    assert all(len(each) <= 5 and (len(each) == 1 or sum(len(m) + ITEM_BYTES for m in each) <= 1_000) for each in sent)
    assert len(stage.published("t")) == 51


def test_each_message_has_the_shorter_time_to_live_of_its_own_and_the_call():
    stage = Stage()
    stage.put("t", b"a", b"b", ttl_s=60, message_ttls_s=[30, None])
    stage.put("t", b"c", message_ttls_s=[90])
    stage.put("t", b"d")
    stage.run(stage.context.finish)
    (request,) = [request for verb, request in stage.service.requests if verb == "publish"]
    assert request.message_ttls_s == [30, 60, 90, None]


def test_receipts_say_where_the_messages_went():
    stage = Stage()
    stage.put("t", b"a", b"b")
    stage.run(stage.context.checkpoint)
    stage.put("t", b"c")
    stage.run(stage.context.finish)
    first, second = stage.context._messages.receipts["t"]
    assert (first.count, second.count) == (2, 1)
    assert first.first_id < first.last_id < second.first_id == second.last_id


def test_every_pointer_is_rolled_back_in_every_topic_it_wrote_to():
    stage = Stage(buffer_messages=2)
    stage.put("one", b"1")
    stage.run(stage.context.checkpoint)
    second = stage.context.transaction.write_pointer
    stage.put("two", b"2", b"3", b"4")
    stage.put("three", b"5")
    assert stage.run(stage.context.abort) == "aborted"
    assert stage.service.rolled_back == [("one", stage.transaction.id), ("two", second)]


def test_a_topic_that_cannot_be_rolled_back_makes_it_invalid_and_the_others_are_rolled_back():
    stage = Stage(buffer_messages=1)
    for topic in ("one", "two", "three"):
        stage.put(topic, b"1", b"2")
    stage.service.instead["rollback"] = [problem(503, "recovering")]
    with pytest.raises(PlainsongError):
        stage.run(stage.context.abort)
    assert [topic for topic, _ in stage.service.rolled_back] == ["two", "three"]
    assert stage.service.states[stage.transaction.id] == "invalid"


def test_an_unreachable_daemon_is_not_asked_once_for_each_topic():
    stage = Stage(buffer_messages=1)
    for n in range(50):
        stage.put(f"topic-{n}", b"1", b"2")
    stage.service.events.clear()
    stage.service.instead["rollback"] = [LOST] * 50
    with pytest.raises(PlainsongError):
        stage.run(stage.context.abort)
    assert stage.verbs() == ["rollback", "invalidate"]


@pytest.mark.parametrize("lost", [LOST, then_lost, problem(503, "outcome_unknown", "unknown")])
def test_an_unanswered_store_is_sent_again_as_another_segment(lost: Any):
    stage = Stage(buffer_messages=10, retry=True)
    stage.service.instead["store"] = [lost, lost]
    stage.service.instead["publish"] = [then_lost, lost]
    for n in range(100):
        stage.put("t", b"%d" % n)
    stage.run(stage.context.finish)
    assert stage.published("t") == [b"%d" % n for n in range(100)]
    (segments,) = {tuple(request.segments) for verb, request in stage.service.requests if verb == "publish"}
    assert "1" not in segments
    assert "2" not in segments
    assert stage.context.state == "committed"


def test_an_unanswered_store_is_retried_no_longer_than_the_transaction_may_live():
    stage = Stage(buffer_messages=1, retry=True)
    stage.service.instead["store"] = [then_lost] * 1000
    with pytest.raises(PlainsongError):
        stage.put("t", b"1", b"2")
    assert 25 < stage.simulation.now_s <= 31


@pytest.mark.parametrize("answer", [LOST, then_lost, problem(503, "low_space"), problem(404, "topic_not_found")])
def test_after_a_failed_store_the_transaction_can_only_be_rolled_back(answer: Any):
    stage = Stage(buffer_messages=1)
    stage.service.instead["store"] = [answer]
    with pytest.raises(PlainsongError):
        stage.put("t", b"1", b"2")
    stage.put("t", b"3")
    with pytest.raises(TransactionFailed, match="stored earlier"):
        stage.run(stage.context.finish)
    assert stage.service.states[stage.transaction.id] == "aborted"
    assert not stage.published("t")


def test_storing_too_late_raises():
    stage = Stage(buffer_messages=1)
    stage.simulation.now_s = 40
    stage.service.states[stage.transaction.id] = "invalid"
    with pytest.raises(TransactionTimedOut, match=r"40\.0 s old"):
        stage.put("t", b"1", b"2")


def test_publishing_without_a_transaction_or_after_its_end_is_refused():
    stage = Stage()
    stage.run(stage.context.finish)
    with pytest.raises(NoTransaction, match="the last one is committed"):
        stage.put("t", b"1")


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "8"])
def test_invalid_bounds_are_refused(wrong: Any):
    with pytest.raises(InvalidParameter, match="buffer_bytes"):
        BufferBounds(buffer_bytes=wrong)
    with pytest.raises(InvalidParameter, match="buffer_messages"):
        BufferBounds(buffer_messages=wrong)
