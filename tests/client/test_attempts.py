"""When and where a call is retried, and its final error, tested without a network and without waiting."""

from __future__ import annotations

from typing import Any

import pytest

from plainsong import calls
from plainsong.calls import Answer
from plainsong.errors import ConnectFailed, ConnectionLost, DeadlineExceeded, UnexpectedAnswer
from plainsong.protocol.codec import AVRO
from plainsong.protocol.errors import (
    NotFound,
    OutcomeUnknown,
    Overloaded,
    PlainsongError,
    TopicExists,
    TopicNotFound,
    Unavailable,
)
from plainsong.protocol.ids import pack_id
from plainsong.protocol.paging import pages
from plainsong.protocol.requests import PublishRequest, Receipt
from tests.client.simulation import LOST, NO_DAEMON, SILENT, Simulation, problem, said

pytestmark = pytest.mark.usefixtures("both_clients")

RECEIPT = Answer(200, {"content-type": "avro/binary"}, AVRO.encode_receipt(Receipt(pack_id(5, 0), pack_id(5, 1), 1)))


def publish(retry_unknown: bool = False) -> calls.Call:
    return calls.publish("default", "t", PublishRequest([b"a", b"b"]), retry_unknown=retry_unknown)


def outcome_of(simulation: Simulation, call: calls.Call, **options: object) -> object:
    try:
        return simulation.run(simulation.channel(**options).call, call)
    except PlainsongError as error:
        return error


def test_a_refused_connection_is_retried_since_nothing_happened():
    simulation = Simulation([NO_DAEMON, NO_DAEMON, RECEIPT])
    receipt = outcome_of(simulation, publish())
    assert receipt.first_id == pack_id(5, 0)
    assert receipt.count == 2
    assert len(simulation.sent) == 3


def test_pauses_double_up_to_five_seconds():
    simulation = Simulation([NO_DAEMON] * 12 + [RECEIPT])
    outcome_of(simulation, publish(), deadline_s=600)
    assert simulation.pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5, 5, 5]


def test_retry_after_is_honoured():
    simulation = Simulation([problem(503, "overloaded", retry_after="7"), RECEIPT])
    outcome_of(simulation, publish())
    assert simulation.pauses == [7]


@pytest.mark.parametrize(
    "failure", [LOST, SILENT, problem(503, "outcome_unknown", "unknown"), problem(500, "internal", "unknown")]
)
def test_a_publish_of_unknown_outcome_is_not_sent_again(failure):
    simulation = Simulation([failure])
    error = outcome_of(simulation, publish())
    assert isinstance(error, PlainsongError)
    assert error.outcome == "unknown"
    assert len(simulation.sent) == 1


@pytest.mark.parametrize("failure", [LOST, SILENT, problem(503, "outcome_unknown", "unknown")])
def test_a_publish_of_unknown_outcome_is_sent_again_with_at_least_once(failure):
    simulation = Simulation([failure, RECEIPT])
    assert outcome_of(simulation, publish(retry_unknown=True)).generation == 1


def test_an_earlier_attempt_of_unknown_outcome_makes_the_result_unknown():
    simulation = Simulation([LOST, problem(404, "topic_not_found")])
    error = outcome_of(simulation, publish(retry_unknown=True))
    assert isinstance(error, TopicNotFound)
    assert error.outcome == "unknown"


@pytest.mark.parametrize(
    ("status", "code", "cls"),
    [(404, "topic_not_found", TopicNotFound), (409, "topic_exists", TopicExists), (404, "not_found", NotFound)],
)
def test_errors_are_raised_as_their_classes_and_not_retried(status, code, cls):
    simulation = Simulation([problem(status, code)])
    error = outcome_of(simulation, publish())
    assert type(error) is cls
    assert (error.detail, error.hint, error.outcome) == (f"told {code}", "a hint", "not-applied")


def test_a_code_of_a_later_version_is_kept_and_its_status_decides_the_class():
    error = outcome_of(Simulation([problem(409, "of_the_future")]), publish())
    assert error.code == "of_the_future"
    assert type(error).__name__ == "Conflict"


@pytest.mark.parametrize(
    "failure", [LOST, SILENT, NO_DAEMON, problem(503, "recovering"), problem(503, "outcome_unknown", "unknown")]
)
def test_reads_are_retried_after_any_failure(failure):
    simulation = Simulation([failure, said(["a"])])
    assert outcome_of(simulation, calls.list_topics("default")) == ["a"]


def test_a_failed_read_reports_that_nothing_happened():
    error = outcome_of(Simulation(lambda _: LOST), calls.list_topics("default"))
    assert isinstance(error, DeadlineExceeded)
    assert error.outcome == "not-applied"


def test_the_deadline_reports_that_nothing_happened_when_no_attempt_can_have_succeeded():
    simulation = Simulation(lambda _: NO_DAEMON)
    error = outcome_of(simulation, publish(), deadline_s=10)
    assert isinstance(error, DeadlineExceeded)
    assert error.outcome == "not-applied"
    assert isinstance(error.__cause__, ConnectFailed)
    assert simulation.now_s < 10


def test_the_deadline_reports_unknown_when_an_attempt_may_have_succeeded():
    error = outcome_of(Simulation(lambda _: LOST), publish(retry_unknown=True), deadline_s=10)
    assert isinstance(error, DeadlineExceeded)
    assert error.outcome == "unknown"


def test_an_attempt_gets_no_more_time_than_the_call_has_left():
    simulation = Simulation(lambda _: problem(503, "overloaded"), took_s=4)
    outcome_of(simulation, publish(), deadline_s=11, request_timeout_s=6)
    assert [send.timeout_s for send in simulation.sent] == [6, pytest.approx(6), pytest.approx(1)]


def test_no_attempt_follows_a_pause_that_outlasts_the_deadline():
    simulation = Simulation(lambda _: NO_DAEMON, overslept_s=11)
    error = outcome_of(simulation, publish(), deadline_s=10)
    assert (type(error), error.outcome) == (DeadlineExceeded, "not-applied")
    assert len(simulation.sent) == 1


def test_without_retry_there_is_one_attempt():
    simulation = Simulation([problem(503, "overloaded")])
    assert isinstance(outcome_of(simulation, publish(), retry=False), Overloaded)
    assert not simulation.pauses


def test_the_next_url_is_tried_at_once_when_one_cannot_be_reached():
    simulation = Simulation(lambda send: RECEIPT if send.url == "http://two" else NO_DAEMON)
    outcome_of(simulation, publish(), url=["http://one", "http://two"], retry=False)
    assert [send.url for send in simulation.sent] == ["http://one", "http://two"]
    assert not simulation.pauses


def test_a_call_refused_by_a_stopping_daemon_is_sent_to_the_next_url():
    simulation = Simulation([problem(503, "shutting_down"), RECEIPT])
    outcome_of(simulation, publish(), url=["http://one", "http://two"])
    assert [send.url for send in simulation.sent] == ["http://one", "http://two"]


def test_the_url_that_answered_is_kept_for_the_next_call():
    simulation = Simulation([NO_DAEMON, RECEIPT, RECEIPT])
    channel = simulation.channel(["http://one", "http://two"])
    simulation.run(channel.call, publish())
    simulation.run(channel.call, publish())
    assert [send.url for send in simulation.sent] == ["http://one", "http://two", "http://two"]


def test_a_client_does_not_wait_for_missing_transactions():
    simulation = Simulation([problem(503, "transactions_unavailable")])
    assert isinstance(outcome_of(simulation, publish()), Unavailable)
    assert len(simulation.sent) == 1


def test_an_error_page_of_a_proxy_is_reported_as_one():
    error = outcome_of(Simulation([Answer(502, {"content-type": "text/html"}, b"<html>bad gateway")]), publish())
    assert isinstance(error, UnexpectedAnswer)
    assert "bad gateway" in error.detail
    assert error.outcome == "unknown"


def test_a_receipt_that_does_not_decode_reports_that_the_messages_were_stored():
    error = outcome_of(Simulation([Answer(200, {}, b"\x07")]), publish())
    assert isinstance(error, UnexpectedAnswer)
    assert error.outcome == "applied"


def test_creating_a_topic_is_retried_after_an_unknown_outcome_only_if_an_existing_one_is_fine():
    sure = calls.create_topic("default", "t", {}, if_not_exists=True)
    assert outcome_of(Simulation([LOST, Answer(200, {}, b"")]), sure) is None
    error = outcome_of(Simulation([LOST]), calls.create_topic("default", "t", {}, if_not_exists=False))
    assert isinstance(error, ConnectionLost)


def test_an_unknown_outcome_is_raised_as_such():
    assert isinstance(outcome_of(Simulation([problem(503, "outcome_unknown", "unknown")]), publish()), OutcomeUnknown)


def test_a_call_may_change_after_each_failed_attempt():
    seen: list[str] = []

    def again(error: PlainsongError) -> calls.Call[Any] | None:
        seen.append(error.outcome)
        return calls.list_topics("second") if error.outcome == "unknown" else None

    simulation = Simulation([NO_DAEMON, LOST, said([])])
    channel = simulation.channel()
    call = calls.list_topics("first")._replace(repeat="harmless", again=again)
    assert list(simulation.run(channel.call, call)) == []
    assert seen == ["not-applied", "unknown"]
    assert ["second" in send.request.path for send in simulation.sent] == [False, False, True]


def test_all_pages_of_a_list_are_read_and_stopping_early_requests_no_more():
    asked: list[str | None] = []

    def ask(after: str | None) -> dict[str, Any]:
        asked.append(after)
        return {"names": [after], "next": {None: "b", "b": "d"}.get(after)}

    assert [page["names"][0] for page in pages(ask)] == [None, "b", "d"]
    next(pages(ask))
    assert asked == [None, "b", "d", None]
