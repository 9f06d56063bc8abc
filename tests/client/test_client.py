"""Topics, publishing and polling with the synchronous client, against the real daemon."""

from __future__ import annotations

import threading
from datetime import UTC, datetime

import pytest

from plainsong import JSON, MessageId, Outgoing, ServerPosition
from plainsong.errors import Closed, ConnectFailed, DeadlineExceeded, NotSent
from plainsong.protocol.errors import (
    InvalidName,
    InvalidParameter,
    InvalidProperty,
    MessageTooLarge,
    NoMessages,
    NotFound,
    TopicExists,
    TopicNotFound,
    TransactionsUnavailable,
)
from tests.client.client_under_test import Client, only_threads
from tests.client.proxy import Proxy
from tests.daemon.harness import eventually
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("both_clients")


def test_a_topic_is_created_shown_changed_deleted_and_undeleted(client: Client):
    orders = client.create_topic("orders", ttl_s=3600, max_bytes=1 << 30)
    assert "orders" in client.topics()
    assert orders.properties()["ttl"] == "3600"
    assert orders.properties()["max_bytes"] == str(1 << 30)
    orders.set_properties(ttl_s=60, transactional="optional")
    assert (orders.properties()["ttl"], orders.properties()["max_bytes"]) == ("60", str(1 << 30))
    orders.set_properties(max_bytes=None)
    assert orders.properties()["ttl"] == "60"
    assert "max_bytes" not in orders.properties()
    orders.replace_properties(max_bytes=1 << 20)
    assert (orders.properties()["ttl"], orders.properties()["max_bytes"]) == ("604800", str(1 << 20))
    orders.publish(b"kept")
    orders.delete()
    with pytest.raises(TopicNotFound):
        orders.poll()
    orders.undelete()
    assert [message.payload for message in orders.poll()] == [b"kept"]


def test_no_concurrent_change_is_lost(client: Client, topic: str):
    """Each thread repeatedly changes one property while the others change theirs."""

    def change(name, values):
        for value in values:
            client.admin.set_properties(topic, **{name: value})

    changes = {"ttl_s": range(1000, 1010), "max_bytes": range(10**6, 10**6 + 10), "transactional": ["required"] * 10}
    threads = [threading.Thread(target=change, args=each) for each in changes.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = client.admin.properties(topic)
    assert (kept["ttl"], kept["max_bytes"], kept["transactional"]) == ("1009", str(10**6 + 9), "required")


def test_creating_an_existing_topic_is_an_error_by_default(client: Client, topic: str):
    with pytest.raises(TopicExists) as caught:
        client.create_topic(topic)
    assert caught.value.outcome == "not-applied"
    client.create_topic(topic, if_not_exists=True)


def test_properties_whose_change_was_not_answered_are_not_changed_twice(client: Client, topic: str, shared_address):
    with Proxy(shared_address) as proxy, Client(proxy.url, deadline_s=PATIENCE_S) as through:
        proxy.after = {b"/properties": "lose"}
        report = through.admin.set_properties(topic, ttl_s=3600)
        assert proxy.lost == 1
    assert (report["dryRun"], report["changed"], report["before"]["ttl"]) == (True, [], "3600")
    assert client.admin.properties(topic)["ttl"] == "3600"


def test_wrong_names_and_properties_are_refused(client: Client):
    with pytest.raises(InvalidName):
        client.create_topic("no spaces")
    with pytest.raises(TypeError, match="'ttll'; did you mean 'ttl_s'"):
        client.create_topic("x", ttll=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'ttl'; did you mean 'ttl_s'"):
        client.admin.set_properties("x", ttl=5)  # type: ignore[call-arg]
    with pytest.raises(InvalidProperty):
        client.create_topic("x", ttl_s=0)


def test_messages_are_read_in_order_under_the_ids_of_the_receipt(client: Client, topic: str):
    first = client.publish(topic, b"one")
    rest = client.publish(topic, [b"two", b"", b"\xff" * 1000])
    page = client.poll(topic)
    assert [message.payload for message in page] == [b"one", b"two", b"", b"\xff" * 1000]
    assert page[0].id == first.first_id == first.last_id
    assert (page[1].id, page[-1].id) == (rest.first_id, rest.last_id)
    assert (rest.count, rest.generation, rest.duplicate) == (3, 1, False)
    assert (page.end, page.last_id) == ("end", rest.last_id)
    assert abs((page[0].publish_time - datetime.now(UTC)).total_seconds()) < 60
    assert page[0].topic == topic
    assert dict(page[0].attributes) == {}


def test_values_go_through_a_serializer_both_ways(client: Client, topic: str):
    client.publish(topic, [{"n": 1}, Outgoing({"n": 2}, ttl_s=60)], serializer=JSON)
    client.publish(topic, b"no json")
    values = [message.value for message in client.poll(topic, serializer=JSON)]
    assert values[:2] == [{"n": 1}, {"n": 2}]
    assert values[2].payload == b"no json"


def test_the_shortest_time_to_live_of_a_message_counts(client: Client, topic: str):
    client.publish(topic, [Outgoing(b"own", ttl_s=60), b"request's"], ttl_s=120)
    client.publish(topic, b"topic's")
    lives_s = [(seen.expires_ms - seen.publish_time_ms) // 1000 for seen in client.admin.messages(topic)]
    assert lives_s == [60, 120, 7 * 86_400]
    for wrong in (0, -1, "60", 1.5, 1 << 31):
        with pytest.raises(InvalidParameter):
            client.publish(topic, b"", ttl_s=wrong)
        with pytest.raises(InvalidParameter):
            Outgoing(b"", ttl_s=wrong)
    for wrong in (0, "5", 1 << 40):
        with pytest.raises(InvalidParameter):
            client.poll(topic, limit=wrong)


def test_polls_start_and_end_where_requested(client: Client, topic: str):
    ids = [client.publish(topic, b"%d" % n).first_id for n in range(5)]

    def polled(*where: object, **options: object) -> list[bytes]:
        return [message.payload for message in client.poll(topic, *where, **options)]

    assert polled(ids[1]) == [b"2", b"3", b"4"]
    assert polled(str(ids[1]), inclusive=True, limit=2) == [b"1", b"2"]
    assert polled(until=ids[2]) == [b"0", b"1"]
    assert polled(ids[2], until="newest") == [b"3", b"4"]
    assert polled(ids[0].publish_time_ms) == [b"0", b"1", b"2", b"3", b"4"]
    assert polled("-1h", limit=1) == [b"0"]
    assert polled("newest") == []
    assert polled(ids[4]) == []
    assert len(polled(max_bytes=1)) == 1


def test_the_position_of_the_last_messages_is_known_without_reading_them(client: Client, topic: str):
    ids = [client.publish(topic, b"%d" % n).first_id for n in range(5)]
    for count in range(8):
        page = client.poll(topic, client.position_of_last(topic, count))
        assert [message.id for message in page] == (ids[-count:] if count else [])


def test_a_poll_waits_for_a_first_message(client: Client, topic: str):
    before = client.publish(topic, b"before").last_id

    def publish_when_parked() -> None:
        eventually("a poll is parked", lambda: client.admin.stats(topic)["parkedPolls"])
        client.publish(topic, b"at last")

    thread = threading.Thread(target=publish_when_parked)
    thread.start()
    page = client.poll(topic, before, wait_ms=20_000)
    thread.join()
    assert [message.payload for message in page] == [b"at last"]
    assert not client.poll(topic, page.last_id, wait_ms=1)


def test_messages_can_be_shown_with_their_state(client: Client, topic: str):
    receipt = client.publish(topic, [b"a", b"\xff"])
    seen = client.admin.messages(topic, receipt.first_id, limit=5)
    assert [(each.id, each.payload, each.state, each.size) for each in seen] == [
        (receipt.first_id, b"a", "plain", 1),
        (receipt.last_id, b"\xff", "plain", 1),
    ]


def test_stats_of_a_topic_show_how_far_behind_a_reader_is(client: Client, topic: str):
    receipt = client.publish(topic, [b"a", b"b", b"c"])
    stats = client.admin.stats(topic, reader=receipt.first_id)
    assert stats["messages"] == 3
    assert stats["newestId"] == str(receipt.last_id)
    assert stats["reader"]["visible"] == 2


def test_positions_of_readers_are_kept_by_the_daemon(client: Client, topic: str):
    receipt = client.publish(topic, b"a")
    with pytest.raises(NotFound) as caught:
        client.admin.reader(topic, "me")
    assert not isinstance(caught.value, TopicNotFound)
    client.admin.set_reader(topic, "me", receipt.first_id)
    assert MessageId(client.admin.reader(topic, "me")["position"]) == receipt.first_id
    assert [each["name"] for each in client.admin.readers(topic)] == ["me"]
    client.admin.delete_reader(topic, "me")
    assert client.admin.readers(topic) == []


def test_errors_of_the_daemon_are_classes_with_hints(client: Client, topic: str):
    with pytest.raises(TopicNotFound) as caught:
        client.publish("not-there", b"")
    assert (caught.value.code, caught.value.outcome) == ("topic_not_found", "not-applied")
    assert caught.value.hint
    with pytest.raises(MessageTooLarge):
        client.publish(topic, bytes(9 << 20))
    with pytest.raises(NoMessages):
        client.publish(topic, [])


def test_a_call_does_not_wait_for_a_route_that_the_daemon_lacks(client: Client, topic: str):
    with pytest.raises((InvalidProperty, TransactionsUnavailable)):
        client.create_topic("tx", transactional="nonsense")


def test_a_refused_connection_means_that_nothing_happened():
    waiting = Client("http://127.0.0.1:1", deadline_s=0.3, wait_for_daemon_s=PATIENCE_S)
    with waiting as client, pytest.raises(DeadlineExceeded) as caught:
        client.publish("t", b"")
    assert caught.value.outcome == "not-applied"
    with Client("http://127.0.0.1:1", retry=False) as client, pytest.raises(ConnectFailed) as refused:
        client.publish("t", b"")
    assert refused.value.outcome == "not-applied"


def test_the_second_url_is_used_when_the_first_is_dead(shared_url: str, topic: str):
    with Client(["http://127.0.0.1:1", shared_url], retry=False) as client:
        assert client.publish(topic, b"x").count == 1
        assert repr(client).endswith(f"at {shared_url}>")


def test_one_client_serves_many_threads(client: Client, topic: str):
    def publish(n: int) -> None:
        for k in range(10):
            client.publish(topic, b"%d:%d" % (n, k))

    threads = [threading.Thread(target=publish, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [message.payload.split(b":") for message in client.poll(topic)]
    assert len(found) == 80
    for n in range(8):
        assert [int(k) for who, k in found if int(who) == n] == list(range(10))


def test_closing_a_client_reports_the_messages_that_its_publishers_could_not_send():
    only_threads("publishers of tasks end with their own blocks")
    client = Client("http://127.0.0.1:1")
    client.publisher("t", exit_timeout_s=0.05).send(b"x")
    client.publisher("t", mode="best_effort", exit_timeout_s=0.05).send(b"x")
    with pytest.raises(NotSent) as caught:
        client.close()
    assert caught.value.unsent + caught.value.unknown == 1


def test_a_closed_client_raises(shared_url: str):
    client = Client(shared_url)
    client.topics()
    client.close()
    client.close()
    with pytest.raises(Closed):
        client.topics()


@pytest.mark.parametrize("url", [5, None, [5], b"http://one"], ids=repr)
def test_an_invalid_url_is_refused_with_an_explanation(url):
    with pytest.raises(InvalidParameter, match="url is "):
        Client(url)


def test_a_position_without_the_required_methods_is_refused_with_an_explanation(client: Client, topic: str):
    with pytest.raises(InvalidParameter, match="position is 'one'"):
        client.read(topic, position="one")


def test_a_reader_is_set_to_any_place_where_reading_can_start(client: Client, topic: str):
    first = client.publish(topic, [b"a", b"b"]).first_id
    for place, rest in (("oldest", 2), (first, 1), (str(first), 1), ("newest", 0), ("-1h", 2), (0, 2)):
        client.admin.set_reader(topic, "r", place)
        assert len(list(client.read(topic, position=ServerPosition("r")))) == rest, place
    with pytest.raises(InvalidParameter):
        client.admin.set_reader(topic, "r", "somewhere")
