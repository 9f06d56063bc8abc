"""Reads as of a moment return what had been committed by then, in every way of reading."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest

from plainsong import calls
from plainsong.errors import InvalidParameter, TransactionsUnavailable
from plainsong.messages import Origin
from plainsong.positions import checked_as_of
from plainsong.protocol.codec import AVRO_2
from plainsong.protocol.requests import PollRequest
from tests.client.simulation import Simulation, problem

pytestmark = pytest.mark.usefixtures("both_clients")


def closed_moment(client, topic):
    """Return a moment, by this computer's clock, that separates earlier publishes and commits from later ones.

    A read as of the moment closes it. Publishes and commits may have times up to a millisecond ahead of the clock, so
    this waits until the clock has passed them.
    """
    behind_ms = time.time_ns() // 1_000_000 + 2
    while (now_ms := time.time_ns() // 1_000_000) < behind_ms:
        pass
    client.poll(topic, as_of=now_ms)
    return now_ms


def payloads(messages):
    return [message.payload for message in messages]


@pytest.fixture
def history(client, topic):
    """Return moments of a topic with what had been committed by each."""
    early, late = (client.transactions.begin(type="long") for _ in range(2))
    client.publish(topic, b"plain")
    client.publish(topic, b"late", transaction=late)
    client.publish(topic, b"early", transaction=early)
    found = {closed_moment(client, topic): [b"plain"]}
    client.transactions.commit(early)
    found[closed_moment(client, topic)] = [b"plain", b"early"]
    client.publish(topic, b"behind")
    found[closed_moment(client, topic)] = [b"plain", b"early", b"behind"]
    client.transactions.commit(late)
    found[closed_moment(client, topic)] = [b"plain", b"late", b"early", b"behind"]
    client.publish(topic, b"last")
    return found


def test_polls_and_readers_as_of_a_moment_show_what_was_committed_by_then(client, topic, history):
    for moment_ms, wanted in history.items():
        assert payloads(client.poll(topic, as_of=moment_ms, wait_ms=60_000)) == wanted
        assert payloads(client.read(topic, as_of=moment_ms)) == wanted
        assert payloads(client.read(topic, as_of=moment_ms, page_messages=1, isolation="committed")) == wanted
        assert client.poll(topic, as_of=moment_ms).held is None
    assert payloads(client.poll(topic)) == [b"plain", b"late", b"early", b"behind", b"last"]


def test_the_last_messages_are_counted_as_of_the_moment(client, topic, history):
    for moment_ms, wanted in history.items():
        start = client.position_of_last(topic, 1, as_of=moment_ms)
        assert payloads(client.poll(topic, start or "oldest", as_of=moment_ms)) == wanted[-1:]


def test_a_moment_is_given_in_every_form_of_a_time(client, topic, history):
    moment_ms, wanted = next(iter(history.items()))
    moment = datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=moment_ms)
    for as_of in (moment, moment.isoformat(), str(moment_ms)):
        assert payloads(client.poll(topic, as_of=as_of)) == wanted
    assert payloads(client.poll(topic, as_of=timedelta(days=365))) == []
    assert payloads(client.poll(topic, as_of="-52w")) == []


def test_contradicting_arguments_are_refused_before_any_request(client, topic):
    for options in ({"as_of": "oldest"}, {"as_of": b"x" * 20}, {"as_of": 1, "isolation": "uncommitted"}):
        with pytest.raises(InvalidParameter):
            client.poll(topic, **options)
        with pytest.raises(InvalidParameter):
            client.read(topic, **options)
    with pytest.raises(InvalidParameter, match="follow and as_of"):
        client.read(topic, as_of="-1m", follow=True)


def test_a_transaction_reads_its_own_snapshot_and_not_as_of_a_moment(client, topic):
    with client.transaction():
        with pytest.raises(InvalidParameter, match="own snapshot"):
            client.poll(topic, as_of="-1m")
        with pytest.raises(InvalidParameter, match="own snapshot"):
            client.read(topic, as_of="-1m")
        assert payloads(client.poll(topic, as_of="-1m", direct=True)) == []


def test_a_future_moment_is_refused_by_the_daemon(client, topic):
    with pytest.raises(InvalidParameter, match="asOfMs"):
        client.poll(topic, as_of=time.time_ns() // 1_000_000 + 86_400_000)


def test_the_moment_is_in_the_query_and_the_isolation_in_the_body():
    request = PollRequest(None, True, 5, isolation="committed", as_of_ms=17)
    call = calls.poll("default", Origin("t"), request)
    assert call.request.path.endswith("/topics/t/poll?as_of_ms=17")
    assert AVRO_2.decode_poll(call.request.body).isolation == "committed"


def test_a_read_as_of_a_moment_never_becomes_an_uncommitted_one_on_an_older_daemon():
    world = Simulation([problem(503, "transactions_unavailable")])

    def asked(isolation):
        return calls.poll("default", Origin("t"), PollRequest(None, True, 5, isolation=isolation, as_of_ms=17))

    _, isolation = checked_as_of(17, None, 1_000_000)
    with pytest.raises(TransactionsUnavailable):
        world.run(world.channel().read, asked, isolation)
    assert [AVRO_2.decode_poll(each.request.body).isolation for each in world.sent] == ["committed"]
