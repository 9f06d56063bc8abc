"""A lost answer if the same sequence ids were used before, and invalid numbers and names."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from test_producer_delivery import Desk
from topic_of_producers import then_lost

from plainsong import Client
from plainsong.producer_queue import Delivered, Numbering
from plainsong.protocol.errors import (
    InvalidParameter,
    InvalidSequenceIds,
    OutcomeUnknown,
    PlainsongError,
    SequenceConsumed,
)
from plainsong.protocol.requests import MAX_SEQUENCE_ID, PublishRequest
from tests.client.proxy import Proxy
from tests.client.simulation import LOST, NO_DAEMON, SILENT, kind, problem


def deliver(desk: Desk, *ids: int, pointer: int | None = None) -> Delivered:
    request = PublishRequest([b"m%d" % each for each in ids], pointer, sequence_ids=ids)
    return desk.simulation.run(kind().Delivery(desk.channel, desk.session, request, desk.simulation.now_s + 120).run)


# --- ids that were used before ---------------------------------------------------------------------


@pytest.mark.usefixtures("both_clients")
@pytest.mark.parametrize("doubt", [LOST, SILENT, then_lost, problem(503, "outcome_unknown", "unknown")])
@pytest.mark.parametrize("pointer", [None, 8])
def test_ids_of_a_rolled_back_transaction_are_never_mistaken_for_a_lost_request(doubt: Any, pointer: int | None):
    desk = Desk()
    deliver(desk, 0, pointer=7)
    desk.topic.instead["publish"] = [doubt]
    with pytest.raises(SequenceConsumed) as raised:
        deliver(desk, 0, pointer=pointer)
    assert raised.value.outcome == "not-applied"
    assert desk.topic.payloads == [b"m0"]
    assert deliver(desk, 1, pointer=pointer).whole().duplicate is False


@pytest.mark.usefixtures("both_clients")
def test_under_a_remembered_write_pointer_a_stored_request_is_recognised():
    desk = Desk()
    desk.topic.instead["publish"] = [then_lost]
    delivered = deliver(desk, 0, 1, pointer=7)
    assert desk.topic.verbs == ["open", "publish", "ask"]
    assert delivered.whole().duplicate is False
    assert delivered.last_id is not None


@pytest.mark.usefixtures("both_clients")
def test_the_daemon_judges_a_duplicate_whose_answer_is_lost_and_that_is_not_remembered():
    desk = Desk()
    for each in range(7):
        deliver(desk, each)
    desk.topic.instead["publish"] = [LOST]
    assert deliver(desk, 0).whole().duplicate
    assert desk.topic.verbs[-4:] == ["publish", "ask", "open", "publish"]
    assert len(desk.topic.payloads) == 7


@pytest.mark.usefixtures("both_clients")
@pytest.mark.parametrize("pointer", [None, 8])
def test_after_an_unknown_outcome_its_ids_prove_nothing(pointer: int | None):
    desk = Desk()
    desk.topic.instead["publish"] = [then_lost]
    desk.topic.instead["ask"] = [problem(500, "internal", "not-applied")]
    with pytest.raises(OutcomeUnknown):
        deliver(desk, 0, pointer=7)
    assert desk.session.last_sequence_id == -1
    desk.topic.instead["publish"] = [LOST]
    with pytest.raises(SequenceConsumed):
        deliver(desk, 0, pointer=pointer)
    assert desk.topic.payloads == [b"m0"]


def test_a_request_that_the_daemon_could_not_judge_in_time_is_unknown():
    desk = Desk(retry=False)
    desk.topic.instead["publish"] = [then_lost]
    desk.topic.instead["ask"] = [problem(500, "internal", "not-applied")]
    with pytest.raises(OutcomeUnknown):
        deliver(desk, 4)
    for one in desk.topic.producers.values():
        one.recent = []
    desk.topic.instead["publish"] = [LOST]
    with pytest.raises(OutcomeUnknown, match="perhaps by an earlier request"):
        deliver(desk, 4)
    assert len(desk.topic.payloads) == 1


def test_a_request_that_certainly_did_not_happen_leaves_no_doubt():
    desk = Desk(retry=False)
    desk.topic.instead["publish"] = [NO_DAEMON]
    with pytest.raises(PlainsongError) as raised:
        deliver(desk, 0)
    assert (raised.value.outcome, desk.session.doubted) == ("not-applied", -1)


def test_a_daemon_refuses_ids_of_a_rolled_back_transaction_even_if_the_answer_is_lost(
    client: Client, topic: str, shared_address: tuple[str, int]
):
    with (
        Proxy(shared_address) as proxy,
        Client(proxy.url, request_timeout_s=2) as far,
        far.producer(topic, "p") as producer,
    ):
        with suppress(KeyError), far.transaction():
            producer.publish(b"undone", sequence_ids=[0])
            raise KeyError

        def again() -> None:
            with far.transaction():
                proxy.then = ["swallow"]
                producer.publish(b"again", sequence_ids=[0])

        with pytest.raises(SequenceConsumed):
            again()
        with far.transaction():
            proxy.then = ["swallow"]
            assert producer.publish(b"new", sequence_ids=[1]).duplicate is False
    assert [message.payload for message in client.read(topic, isolation="committed")] == [b"new"]


# --- the largest numbers, and names ------------------------------------------------------------------


def test_there_is_no_sequence_id_after_the_last_and_nothing_happens():
    numbers = Numbering(MAX_SEQUENCE_ID - 1)
    for take in (lambda: numbers.take_many(None, 3), lambda: Numbering(MAX_SEQUENCE_ID + 1).take(None)):
        with pytest.raises(InvalidSequenceIds) as raised:
            take()
        assert raised.value.outcome == "not-applied"
    assert numbers.take_many(None, 2) == [MAX_SEQUENCE_ID - 1, MAX_SEQUENCE_ID]
    with pytest.raises(InvalidSequenceIds):
        numbers.take(None)


@pytest.mark.usefixtures("both_clients")
@pytest.mark.parametrize("name", ["", "\ud800", "a\udfffb"])
def test_an_invalid_name_is_refused_before_anything_is_sent(name: str):
    desk = Desk()
    options = {"initial_sequence_id": None, "optional": False, "retention_s": None, "deadline_s": None}
    with pytest.raises(InvalidParameter) as raised:
        desk.simulation.run(partial(kind().begin, desk.channel, "t", name, **options))
    assert raised.value.outcome == "not-applied"
    assert desk.topic.verbs == ["open"]


def test_at_the_last_sequence_id_a_producer_raises_and_sends_nothing(client: Client, topic: str):
    with client.producer(topic, "p", initial_sequence_id=MAX_SEQUENCE_ID) as producer:
        assert producer.publish(b"last").last_sequence_id == MAX_SEQUENCE_ID
        with pytest.raises(InvalidSequenceIds):
            producer.publish(b"none")
        with pytest.raises(InvalidSequenceIds):
            producer.send(b"none")
    with client.producer(topic, "p") as again, pytest.raises(InvalidSequenceIds):
        again.publish(b"none")
    assert [message.payload for message in client.read(topic)] == [b"last"]
