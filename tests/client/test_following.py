"""A client goes directly to the owner named in an answer, and back if it is unreachable; without network or waiting."""

from __future__ import annotations

from contextlib import suppress

import pytest

from plainsong import calls
from plainsong.calls import Answer
from plainsong.protocol.codec import AVRO
from plainsong.protocol.errors import OutcomeUnknown, PlainsongError
from plainsong.protocol.ids import pack_id
from plainsong.protocol.requests import PublishRequest, Receipt
from plainsong.retry import FIRST_AVOID_S, MAX_AVOID_S, MAX_OWNERS, Places, owned_part
from plainsong.settings import follows_owners
from tests.client.simulation import LOST, NO_DAEMON, SILENT, Simulation, problem, said

pytestmark = pytest.mark.usefixtures("both_clients")

RECEIPT = AVRO.encode_receipt(Receipt(pack_id(5, 0), pack_id(5, 0), 1))


def stored(owner=None):
    """Return a receipt that was forwarded by an instance, which names the owner, or that is from the owner itself."""
    named = {} if owner is None else {"plainsong-owner": owner}
    return Answer(200, {"content-type": "avro/binary", **named}, RECEIPT)


def publish(topic="t"):
    return calls.publish("default", topic, PublishRequest([b"a"]))


def sent(script, *asked, url="http://one", clock=None, **options):
    """Make calls one after another, and return the destination of each attempt."""
    simulation = Simulation(script)
    client = simulation.channel(url, clock=clock, **options)
    for call in asked:
        with suppress(PlainsongError):
            simulation.run(client.call, call)
    return [each.url for each in simulation.sent], simulation


def test_the_next_request_about_a_topic_goes_to_its_owner():
    urls, _ = sent(
        [stored("two:7420"), stored(), stored(), stored()], publish(), publish(), publish("other"), publish()
    )
    assert urls == ["http://one", "http://two:7420", "http://one", "http://two:7420"]


def test_an_owner_that_moved_is_followed_again():
    urls, _ = sent([stored("two:1"), stored("three:1"), stored()], publish(), publish(), publish())
    assert urls == ["http://one", "http://two:1", "http://three:1"]


def test_errors_name_the_owner_too():
    missing = problem(404, "topic_not_found", plainsong_owner="two:1")
    urls, _ = sent([missing, stored()], publish(), publish())
    assert urls == ["http://one", "http://two:1"]


@pytest.mark.parametrize("failure", [NO_DAEMON, problem(503, "no_owner"), problem(503, "shutting_down")])
@pytest.mark.parametrize("retry", [True, False])
def test_a_missing_owner_costs_one_attempt_and_no_pause(failure, retry):
    urls, simulation = sent([stored("two:1"), failure, stored()], publish(), publish(), retry=retry)
    assert urls == ["http://one", "http://two:1", "http://one"]
    assert simulation.pauses == []


@pytest.mark.parametrize("failure", [LOST, SILENT])
def test_a_write_that_an_owner_may_have_stored_is_not_sent_again(failure):
    simulation = Simulation([stored("two:1"), failure])
    client = simulation.channel()
    simulation.run(client.call, publish())
    with pytest.raises(PlainsongError) as raised:
        simulation.run(client.call, publish())
    assert raised.value.outcome == "unknown"
    assert not isinstance(raised.value, OutcomeUnknown)


@pytest.mark.parametrize("failure", [LOST, SILENT])
def test_a_read_goes_back_to_the_given_url(failure):
    topics = calls.describe_topic("default", "t")
    shown = said({"name": "t", "properties": {}})
    urls, _ = sent([stored("two:1"), failure, shown], publish(), topics)
    assert urls == ["http://one", "http://two:1", "http://one"]


def test_an_owner_that_did_not_answer_is_left_alone_longer_each_time():
    now_s = [0.0]
    script = [stored("two:1")]
    for _ in range(8):
        script += [NO_DAEMON, stored("two:1"), stored("two:1")]
    simulation = Simulation(script)
    client = simulation.channel(clock=lambda: now_s[0])
    simulation.run(client.call, publish())
    pause_s = FIRST_AVOID_S
    for _ in range(8):
        before = len(simulation.sent)
        simulation.run(client.call, publish())
        now_s[0] += pause_s - 1
        simulation.run(client.call, publish())
        assert [each.url for each in simulation.sent[before:]] == ["http://two:1", "http://one", "http://one"]
        now_s[0] += 1
        pause_s = min(2 * pause_s, MAX_AVOID_S)


def test_connecting_to_an_owner_may_take_a_second_and_to_a_given_url_the_requested_time():
    _, simulation = sent([stored("two:1"), NO_DAEMON, stored("two:1")], publish(), publish())
    assert [each.connect_timeout_s for each in simulation.sent] == [5.0, 1.0, 5.0]


def test_another_server_at_the_address_of_an_owner_is_left_alone():
    page = Answer(404, {"content-type": "text/html"}, b"<html>")
    urls, _ = sent([stored("two:1"), page, stored("two:1"), stored()], publish(), publish(), publish())
    assert urls == ["http://one", "http://two:1", "http://one", "http://one"]


def test_when_switched_off_no_owner_is_followed():
    urls, _ = sent([stored("two:1"), stored("two:1")], publish(), publish(), follow_owners=False)
    assert urls == ["http://one", "http://one"]


@pytest.mark.parametrize("url", ["http://proxy/plainsong", "https://proxy/plainsong"])
def test_an_owner_after_a_proxy_with_a_path_is_not_followed(url):
    urls, _ = sent([stored("two:1"), stored()], publish(), publish(), url=url)
    assert urls == [url, url]


def test_following_keeps_the_encryption():
    urls, _ = sent([stored("two:1"), stored()], publish(), publish(), url="https://one")
    assert urls == ["https://one", "https://two:1"]


@pytest.mark.parametrize("address", ["", "two", "two:port", "user@two:1", "two:1/path", "two:1 three:1", "two:123456"])
def test_an_invalid_address_is_not_followed(address):
    urls, _ = sent([stored(address), stored()], publish(), publish())
    assert urls == ["http://one", "http://one"]


def test_an_owner_may_be_one_of_the_given_urls():
    urls, _ = sent(
        [stored("two:1"), NO_DAEMON, stored("three:1"), stored()],
        *[publish()] * 3,
        url=["http://one:1", "http://two:1", "http://three:1"],
    )
    assert urls == ["http://one:1", "http://two:1", "http://one:1", "http://three:1"]


def test_the_number_of_remembered_owners_is_bounded():
    places = Places(("http://one",))
    for number in range(3 * MAX_OWNERS):
        places.remember_owner(f"n/topics/t{number}", "http://one", {"plainsong-owner": "two:1"})
        assert places.where(f"n/topics/t{number}") == "http://two:1"
        assert len(places._owners) <= MAX_OWNERS


def test_only_topics_and_transactions_have_owners():
    assert (
        owned_part("/v1/namespaces/n/topics/t") == owned_part("/v1/namespaces/n/topics/t/poll?limit=1") == "n/topics/t"
    )
    assert owned_part("/v1/namespaces/n/topics/t/producers/p%2Fq") == "n/topics/t"
    assert owned_part("/v1/transactions") == owned_part("/v1/transactions/7/commit") == "transactions"
    for path in ("/v1/namespaces", "/v1/namespaces/n/topics", "/v1/namespaces/n/poll", "/readyz", "/v1/cluster"):
        assert owned_part(path) == ""


def test_the_environment_switches_it_off():
    assert follows_owners({})
    assert follows_owners({"PLAINSONG_FOLLOW_OWNERS": "true"})
    assert not follows_owners({"PLAINSONG_FOLLOW_OWNERS": "False"})
