"""The outcome of a producer's request, whatever is lost: stored once, not stored, or reported as unknown."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from topic_of_producers import Topic, then_lost

from plainsong.calls import Known, Recent
from plainsong.errors import DeadlineExceeded, TransactionOutcomeUnknown
from plainsong.messages import MessageId, MessageReceipt
from plainsong.producer_queue import Delivered, Session, as_found
from plainsong.protocol.errors import (
    DeduplicationDisabled,
    GenerationChanged,
    InvalidSequenceIds,
    MessageTooLarge,
    OutcomeUnknown,
    PartialDuplicate,
    PlainsongError,
    ProducerExpired,
    ProducerFenced,
    TopicNotFound,
)
from plainsong.protocol.ids import NO_PAYLOAD_PART, pack_position
from plainsong.protocol.requests import PublishRequest
from tests.client.simulation import LOST, NO_DAEMON, SILENT, Simulation, kind, problem

pytestmark = pytest.mark.usefixtures("both_clients")


class Desk:
    """A producer for an in-memory topic, on a clock that advances only in pauses."""

    def __init__(self, topic: Topic | None = None, name: str | None = "p", **changed: Any) -> None:
        self.topic = topic or Topic()
        self.simulation = Simulation(self.topic.carry)
        self.channel = self.simulation.channel(**changed)
        self.session = self.open(name)

    def open(self, name: str | None = "p", *, optional: bool = False) -> Session:
        options = {"initial_sequence_id": None, "optional": optional, "retention_s": None, "deadline_s": None}
        return self.simulation.run(partial(kind().begin, self.channel, "t", name, **options))

    def deliver(self, *ids: int, atomic: bool = False, payload: bytes = b"m", limit_s: float = 120) -> Delivered:
        request = PublishRequest([payload + b"%d" % each for each in ids], sequence_ids=ids, atomic=atomic)
        if payload == b"too large":
            request.messages = [payload]
        until_s = self.simulation.now_s + limit_s
        return self.simulation.run(kind().Delivery(self.channel, self.session, request, until_s).run)

    def fails(self, error: type[PlainsongError], *ids: int, outcome: str, **options: Any) -> PlainsongError:
        with pytest.raises(error) as raised:
            self.deliver(*ids, **options)
        assert raised.value.outcome == outcome
        assert type(raised.value) is error
        return raised.value


def test_a_new_producer_begins_without_an_id_and_with_a_first_epoch():
    desk = Desk()
    assert (desk.session.epoch, desk.session.last_sequence_id, desk.session.generation) == (1, -1, 1)


def test_the_daemon_makes_a_name_for_a_producer_without_one():
    assert Desk(name=None).session.name.startswith("made-")


def test_any_text_can_be_a_name():
    desk = Desk(name="a/b ü?#")
    desk.deliver(0)
    assert desk.topic.requests[0].producer == "a/b ü?#"
    assert desk.topic.producers["a/b ü?#"].last == 0


def test_delivered_messages_have_a_receipt_each():
    desk = Desk()
    delivered = desk.deliver(0, 1, 5)
    assert [(delivered.of(n).sequence_id, delivered.of(n).duplicate) for n in range(3)] == [
        (0, False),
        (1, False),
        (5, False),
    ]
    assert delivered.of(2).id == delivered.last_id
    assert delivered.whole().last_sequence_id == desk.session.last_sequence_id == 5


@pytest.mark.parametrize(
    "doubt", [LOST, SILENT, problem(503, "outcome_unknown", "unknown"), problem(500, "internal", "unknown")]
)
def test_a_request_that_did_not_happen_is_sent_again_under_a_new_epoch(doubt: Any):
    desk = Desk()
    desk.topic.instead["publish"] = [doubt]
    delivered = desk.deliver(0, 1)
    assert desk.topic.verbs == ["open", "publish", "ask", "open", "publish"]
    assert desk.topic.payloads == [b"m0", b"m1"]
    assert not delivered.whole().duplicate
    assert [request.producer_epoch for request in desk.topic.requests] == [2]


def test_a_stored_request_is_not_sent_again_and_its_ids_are_found():
    desk = Desk()
    desk.topic.instead["publish"] = [then_lost]
    delivered = desk.deliver(0, 1)
    assert desk.topic.verbs == ["open", "publish", "ask"]
    assert desk.topic.payloads == [b"m0", b"m1"]
    assert delivered.of(0).id is not None
    assert delivered.of(1).id == delivered.last_id
    assert delivered.whole().duplicate is False
    assert desk.session.last_sequence_id == 1


def test_a_delayed_request_that_arrives_after_the_check_has_no_effect():
    desk = Desk()
    late: list[Any] = []

    def delayed(happen: Any) -> Any:
        late.append(happen)
        return LOST

    desk.topic.instead["publish"] = [delayed]
    desk.deliver(0)
    assert late[0]().status == 409
    assert desk.topic.payloads == [b"m0"]


def test_a_request_stored_between_the_check_and_the_opening_is_found_by_the_opening():
    desk = Desk()
    late: list[Any] = []
    desk.topic.instead["publish"] = [lambda happen: late.append(happen) or LOST]

    def opened_after(happen: Any) -> Any:
        late[0]()
        return happen()

    desk.topic.instead["open"] = [opened_after]
    delivered = desk.deliver(0)
    assert desk.topic.payloads == [b"m0"]
    assert delivered.of(0).id is not None


def test_openings_whose_answers_are_lost_are_not_mistaken_for_another_producer():
    desk = Desk()
    desk.topic.instead["publish"] = [LOST]
    desk.topic.instead["open"] = [then_lost, then_lost]
    desk.deliver(0)
    assert desk.session.epoch == 4
    assert desk.topic.payloads == [b"m0"]


def test_a_request_that_certainly_did_not_happen_is_sent_again_without_a_new_session():
    desk = Desk()
    desk.topic.instead["publish"] = [
        NO_DAEMON,
        problem(503, "overloaded", retry_after="2"),
        problem(503, "recovering"),
    ]
    desk.deliver(0)
    assert desk.topic.verbs == ["open"] + ["publish"] * 4
    assert max(desk.simulation.pauses) == 2


def test_a_deadline_without_a_successful_attempt_reports_that_nothing_happened():
    desk = Desk()
    desk.topic.instead["publish"] = [NO_DAEMON] * 1000
    desk.fails(DeadlineExceeded, 0, outcome="not-applied", limit_s=10)
    assert desk.simulation.now_s <= 10


def test_a_daemon_that_never_returns_leaves_the_outcome_unknown():
    desk = Desk()
    desk.topic.instead["publish"] = [LOST]
    desk.topic.instead["ask"] = [NO_DAEMON] * 1000
    error = desk.fails(OutcomeUnknown, 0, outcome="unknown", limit_s=10)
    assert "has not retried it" in error.hint
    assert desk.topic.payloads == []
    assert desk.session.over is None


def test_a_fenced_producer_sends_nothing_more():
    desk = Desk()
    desk.open()
    desk.fails(ProducerFenced, 0, outcome="not-applied")
    arrived = len(desk.topic.verbs)
    desk.fails(ProducerFenced, 1, outcome="not-applied")
    assert len(desk.topic.verbs) == arrived


def test_a_name_that_another_producer_has_opened_is_not_taken_back():
    desk = Desk()
    desk.topic.instead["publish"] = [LOST]
    other = desk.open()
    desk.fails(ProducerFenced, 0, outcome="not-applied")
    assert desk.topic.producers["p"].epoch == other.epoch


def test_a_request_that_another_producer_may_have_sent_is_unknown():
    desk = Desk()
    desk.topic.instead["publish"] = [then_lost]
    desk.open()
    desk.topic.producers["p"].last = 0
    desk.fails(OutcomeUnknown, 0, outcome="unknown")
    desk.fails(ProducerFenced, 1, outcome="not-applied")


def test_a_forgotten_producer_does_not_start_over_in_silence():
    desk = Desk()
    desk.topic.producers.clear()
    desk.fails(ProducerExpired, 0, outcome="not-applied")
    assert desk.topic.producers == {}


@pytest.mark.parametrize("again", [False, True])
def test_requests_of_a_forgotten_producer_are_unknown(again: bool):
    desk = Desk()
    desk.session.epoch = desk.topic.producers["p"].epoch = 7
    desk.topic.instead["publish"] = [LOST]
    desk.topic.producers.clear()
    if again:
        desk.open()
    desk.fails(OutcomeUnknown, 0, outcome="unknown")
    desk.fails(ProducerExpired, 1, outcome="not-applied")
    assert desk.topic.payloads == []


def test_a_recreated_topic_is_detected():
    desk = Desk()
    desk.deliver(0)
    desk.topic.recreate()
    desk.fails(GenerationChanged, 1, outcome="not-applied")
    desk.fails(GenerationChanged, 2, outcome="not-applied")
    assert desk.topic.payloads == []


def test_the_old_generation_reports_that_the_request_was_stored():
    desk = Desk()

    def then_recreated(happen: Any) -> Any:
        happen()
        desk.topic.recreate()
        return LOST

    desk.topic.instead["publish"] = [then_recreated]
    delivered = desk.deliver(0, 1, atomic=True)
    assert delivered.generation == 1
    assert delivered.of(1).id is not None
    desk.fails(GenerationChanged, 2, outcome="not-applied")
    assert desk.topic.payloads == []


def test_the_old_generation_reports_that_the_request_was_not_stored():
    desk = Desk()

    def recreated(happen: Any) -> Any:
        desk.topic.recreate()
        return LOST

    desk.topic.instead["publish"] = [recreated]
    desk.fails(GenerationChanged, 0, outcome="not-applied")
    assert desk.topic.payloads == []


@pytest.mark.parametrize(("atomic", "error"), [(False, OutcomeUnknown), (True, TransactionOutcomeUnknown)])
def test_an_old_generation_without_answers_leaves_a_request_unknown_and_unsent(
    atomic: bool, error: type[PlainsongError]
):
    desk = Desk()

    def recreated(happen: Any) -> Any:
        happen()
        desk.topic.recreate(forget=True)
        return LOST

    desk.topic.instead["publish"] = [recreated]
    desk.fails(error, 0, outcome="unknown", atomic=atomic)
    assert desk.topic.payloads == []
    assert desk.session.over is not None


@pytest.mark.parametrize("took", [False, True])
def test_a_deleted_topic_still_reports_outcomes(took: bool):
    desk = Desk()

    def deleted(happen: Any) -> Any:
        if took:
            happen()
        desk.topic.deleted = True
        return LOST

    desk.topic.instead["publish"] = [deleted]
    if took:
        assert desk.deliver(0).of(0).id is not None
    else:
        desk.fails(TopicNotFound, 0, outcome="not-applied")


def test_messages_stored_before_are_reported_and_not_swallowed():
    desk = Desk()
    desk.deliver(0, 1, 2)
    session = desk.open()
    assert session.last_sequence_id == 2
    desk.session = session
    again = desk.deliver(0, 1, 2)
    assert again.whole().duplicate
    assert all(again.of(n).duplicate for n in range(3))
    whole = again.whole()
    assert [again.of(n).id for n in range(3)] == [whole.first_id, None, whole.last_id]
    forgotten = desk.deliver(1)
    assert forgotten.of(0) == MessageReceipt(1, None, True, True, 1)


def test_the_receipt_of_a_duplicate_never_names_the_message_of_another():
    first, last = (MessageId(pack_position(7, n) + NO_PAYLOAD_PART) for n in (0, 2))
    again = Delivered([0, 3, 5], first, last, 3, deduplicated=True, generation=1, last_sequence_id=5)
    assert [again.of(n).id for n in range(3)] == [first, None, last], "ids in between may belong to another producer"


def test_detected_duplicates_have_the_ids_of_their_own_request():
    first, last, other = (MessageId(pack_position(7, n) + NO_PAYLOAD_PART) for n in (0, 1, 2))
    known = Known("p", 1, 5, 1, [Recent(0, 5, first, last), Recent(5, 5, other, other)])
    again = as_found(known, [0, 5], 5)
    assert [again.of(n).id for n in range(2)] == [first, last]
    assert as_found(known, [3, 5], 5).of(0).id is None


def test_a_straddling_request_reports_which_were_stored():
    desk = Desk()
    desk.deliver(5)
    delivered = desk.deliver(4, 5, 6, 7)
    assert [delivered.of(n).duplicate for n in range(4)] == [True, True, False, False]
    assert [delivered.of(n).id is None for n in range(4)] == [True, True, False, False]
    assert (delivered.whole().dropped, delivered.whole().stored) == ([4, 5], [6, 7])


def test_a_straddling_request_whose_answer_is_lost_reports_the_same():
    desk = Desk()
    desk.deliver(5)
    desk.topic.instead["publish"] = [then_lost]
    delivered = desk.deliver(4, 5, 6, 7)
    assert [delivered.of(n).duplicate for n in range(4)] == [True, True, False, False]
    assert delivered.of(3).id is not None


def test_a_straddling_atomic_request_is_refused():
    desk = Desk()
    desk.deliver(5)
    desk.fails(PartialDuplicate, 5, 6, outcome="not-applied", atomic=True)
    assert desk.session.last_sequence_id == 5


def test_a_message_that_is_refused_is_not_sent_again():
    desk = Desk()
    desk.fails(MessageTooLarge, 0, outcome="not-applied", payload=b"too large")
    assert desk.topic.verbs == ["open", "publish"]


def test_an_unreadable_answer_leaves_no_doubt_for_long():
    desk = Desk()

    def garbled(happen: Any) -> Any:
        answer = happen()
        return type(answer)(200, answer.headers, b"\x00garbage")

    desk.topic.instead["publish"] = [garbled]
    assert desk.deliver(0).of(0).id is not None
    assert desk.topic.payloads == [b"m0"]


# --- deduplication switched off ------------------------------------------------------------------


def test_when_deduplication_is_off_opening_is_refused_unless_it_is_optional():
    topic = Topic()
    topic.enabled = False
    with pytest.raises(DeduplicationDisabled):
        Desk(topic)


def test_an_optional_producer_sends_without_a_session_and_determines_no_outcome():
    desk = Desk()
    desk.topic.enabled = False
    desk.session = desk.open(optional=True)
    delivered = desk.deliver(0)
    assert (delivered.deduplicated, desk.topic.requests[0].producer_epoch) == (False, None)
    desk.topic.instead["publish"] = [LOST]
    desk.fails(OutcomeUnknown, 1, outcome="unknown")
    assert len(desk.topic.payloads) == 1


def test_a_producer_that_requires_deduplication_stops_when_it_is_switched_off():
    desk = Desk()
    desk.deliver(0)
    desk.topic.enabled = False
    assert desk.deliver(1).deduplicated is False
    desk.fails(DeduplicationDisabled, 2, outcome="not-applied")


def test_a_negative_first_id_is_refused():
    desk = Desk()
    with pytest.raises(InvalidSequenceIds):
        desk.simulation.run(
            partial(
                kind().begin,
                desk.channel,
                "t",
                "p",
                initial_sequence_id=-1,
                optional=False,
                retention_s=None,
                deadline_s=None,
            )
        )
