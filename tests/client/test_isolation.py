"""A read without an isolation level returns committed messages, if the daemon can tell which are committed."""

from __future__ import annotations

import logging

import pytest

from plainsong import calls
from plainsong.calls import Answer, Failure, Send
from plainsong.messages import Origin
from plainsong.protocol.codec import AVRO_2
from plainsong.protocol.errors import TransactionsUnavailable
from plainsong.protocol.requests import PollRequest
from tests.client.client_under_test import Client
from tests.client.conftest import url_of
from tests.client.simulation import LOST, NO_DAEMON, Simulation, problem, said
from tests.daemon.harness import Daemon

pytestmark = pytest.mark.usefixtures("both_clients")

AWAY = problem(503, "transactions_unavailable")


def service(name):
    return said({"ready": True, "transactions": {"service": name, "available": False, "why": "why"}})


def asked(isolation):
    return calls.poll("default", Origin("t"), PollRequest(None, True, 5, isolation=isolation))._replace(
        read=lambda answer: isolation
    )


def isolations(world):
    polls = [each.request for each in world.sent if each.request.path.endswith("/poll")]
    return [AVRO_2.decode_poll(each.body).isolation for each in polls]


def test_a_read_is_committed_by_default_and_shows_no_rolled_back_messages(client, topic):
    client.publish(topic, b"plain")
    begun = client.transactions.begin()
    client.publish(topic, b"rolled back", transaction=begun)
    client.rollback(topic, begun)
    client.transactions.abort(begun)
    undecided = client.transactions.begin()
    client.publish(topic, b"open", transaction=undecided)
    client.publish(topic, b"behind")
    assert [message.payload for message in client.read(topic)] == [b"plain"]
    assert [message.payload for message in client.poll(topic)] == [b"plain"]
    assert client.poll(topic).held.write_pointer == undecided.write_pointer
    assert client.position_of_last(topic, 1) == client.position_of_last(topic, 2) is None
    everything = [b"plain", b"rolled back", b"open", b"behind"]
    assert [message.payload for message in client.read(topic, isolation="uncommitted")] == everything
    assert [message.payload for message in client.poll(topic, isolation="uncommitted")] == everything
    client.transactions.commit(undecided)
    assert [message.payload for message in client.read(topic)] == [b"plain", b"open", b"behind"]


@pytest.mark.parametrize("name", ["off", "tephra"])
def test_without_transactions_a_default_read_shows_everything_and_says_so_once(name, caplog):
    world = Simulation(
        lambda send: (
            service(name)
            if send.request.path == "/readyz"
            else AWAY
            if AVRO_2.decode_poll(send.request.body).isolation == "committed"
            else said(0)
        )
    )
    channel = world.channel()
    with caplog.at_level(logging.WARNING):
        assert world.run(channel.read, asked, None) == world.run(channel.read, asked, None) == "uncommitted"
    assert [record.message for record in caplog.records if record.name == "plainsong.client"] != []
    assert len(caplog.records) == 1
    assert "rolled-back" in caplog.text
    # A service that is off stays off; a Tephra service may return.
    asked_again = [] if name == "off" else ["committed"]
    assert isolations(world) == ["committed", "uncommitted", *asked_again, "uncommitted"]


class Restarted(Simulation):
    """A daemon without a transaction service until ``is_on``."""

    def __init__(self) -> None:
        self.is_on = False
        self.fails: list[Failure] = []
        super().__init__(self._answered)

    def _answered(self, send: Send) -> Answer | Failure:
        if self.fails:
            return self.fails.pop()
        if send.request.path == "/readyz":
            return service("off")
        is_committed = AVRO_2.decode_poll(send.request.body).isolation == "committed"
        return AWAY if is_committed and not self.is_on else said(0)


def test_reads_become_committed_within_a_minute_after_the_daemon_gets_a_transaction_service():
    world = Restarted()
    channel = world.channel()
    assert world.run(channel.read, asked, None) == "uncommitted"
    world.is_on = True
    world.now_s = 59
    assert world.run(channel.read, asked, None) == "uncommitted"
    world.now_s = 60
    assert world.run(channel.read, asked, None) == "committed"


@pytest.mark.parametrize("failure", [LOST, NO_DAEMON])
def test_reads_become_committed_after_reconnecting_to_a_daemon_that_got_a_transaction_service(
    failure,
):
    world = Restarted()
    channel = world.channel()
    assert world.run(channel.read, asked, None) == "uncommitted"
    world.is_on = True
    world.fails = [failure]
    assert world.run(channel.read, asked, None) == "uncommitted", "this one had begun"
    assert world.run(channel.read, asked, None) == "committed"


def test_only_an_explicit_committed_is_refused_without_transactions():
    world = Simulation([AWAY])
    with pytest.raises(TransactionsUnavailable):
        world.run(world.channel().read, asked, "committed")


def test_a_reader_waits_for_a_briefly_unavailable_service():
    world = Simulation([AWAY, service("embedded"), AWAY, AWAY, said(0)])
    assert world.run(world.channel().read, asked, None) == "committed"
    assert isolations(world) == ["committed"] * 4


def test_a_default_read_without_a_transaction_service_works(tmp_path):
    with Daemon(tmp_path / "data", "transactions.service=off") as daemon, Client(url_of(daemon)) as client:
        client.create_topic("t")
        client.publish("t", [b"one", b"two"])
        assert [message.payload for message in client.read("t")] == [b"one", b"two"]
        assert client.position_of_last("t", 1) == client.poll("t")[0].id
        with pytest.raises(TransactionsUnavailable):
            client.poll("t", isolation="committed")
