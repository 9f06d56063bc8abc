"""Publishing without waiting, from threads, against the real daemon."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import FIRST_COMPLETED, as_completed, wait
from concurrent.futures import TimeoutError as FutureTimeoutError

import pytest

from plainsong import JSON, Outgoing
from plainsong.calls import AVRO_2
from plainsong.errors import BufferFull, Closed, ConnectionLost, DeadlineExceeded, MessageDropped, NotEncodable, NotSent
from plainsong.protocol.errors import InvalidName, InvalidParameter, MessageTooLarge, TopicNotFound
from plainsong.protocol.requests import PublishRequest
from plainsong.publisher_queue import ITEM_BYTES
from tests.client.client_under_test import Client, only_threads
from tests.client.proxy import Proxy
from tests.client.simulation import kind
from tests.daemon.harness import eventually
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("both_clients")


def payloads(client: Client, topic: str) -> list[bytes]:
    return [message.payload for message in client.read(topic)]


def test_each_message_has_a_future_with_its_id(client: Client, topic: str):
    with client.publisher(topic) as publisher:
        sents = [publisher.send(b"%d" % n) for n in range(1000)]
    assert all(sent.done() for sent in sents)
    read = list(client.read(topic))
    assert [message.payload for message in read] == [b"%d" % n for n in range(1000)]
    assert [sent.result() for sent in sents] == [message.id for message in read]
    assert publisher.counts == (0, 0, 1000, 0, 0)


def test_futures_work_with_the_tools_of_python_for_futures(client: Client, topic: str):
    only_threads("tasks await")
    with client.publisher(topic) as publisher:
        sents = [publisher.send(b"x") for _ in range(10)]
        assert set(as_completed(sents, timeout=PATIENCE_S)) == set(sents)
        done, _ = wait([publisher.send(b"y")], timeout=PATIENCE_S, return_when=FIRST_COMPLETED)
        assert len(done) == 1
        called = []
        last = publisher.send(b"z")
        last.add_done_callback(called.append)
        assert last.result(PATIENCE_S)
        assert last.exception() is None
        eventually("the callback was called", lambda: called == [last])
        assert not last.cancel()

        async def awaited() -> object:
            return await asyncio.wrap_future(publisher.send(b"w"))

        assert len(asyncio.run(awaited())) == 20


def test_messages_linger_and_are_sent_together(client: Client, topic: str):
    with client.publisher(topic, linger_ms=60_000, max_batch_messages=5) as publisher:
        sents = [publisher.send(b"%d" % n) for n in range(5)]
        together = {sent.result(PATIENCE_S)[:8] for sent in sents}
        assert len(together) == 1, "a full batch does not linger"
        waiting = publisher.send(b"5")
        with pytest.raises(FutureTimeoutError):
            waiting.result(0.01)
        publisher.flush()
        assert waiting.done()


def test_topics_are_served_concurrently_each_in_its_order(client: Client):
    topics = [client.create_topic(f"side-{n}").name for n in range(8)]
    with client.publisher(max_batch_messages=7) as publisher:
        for k in range(100):
            for name in topics:
                publisher.send(b"%d" % k, topic=name)
    for name in topics:
        assert payloads(client, name) == [b"%d" % k for k in range(100)]


def test_each_thread_sees_its_own_order(client: Client, topic: str):
    with client.publisher(topic, max_pending_bytes=200 * ITEM_BYTES) as publisher:
        threads = [
            threading.Thread(target=lambda n=n: [publisher.send(b"%d:%d" % (n, k)) for k in range(500)])
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = [payload.split(b":") for payload in payloads(client, topic)]
    for n in range(4):
        assert [int(k) for who, k in found if int(who) == n] == list(range(500))


def test_values_and_times_to_live_are_sent(client: Client, topic: str):
    with client.publisher(topic, serializer=JSON) as publisher:
        publisher.send({"n": 1})
        publisher.send(Outgoing({"n": 2}, ttl_s=60))
        with pytest.raises(NotEncodable):
            publisher.send(object())
    assert [message.value for message in client.read(topic, serializer=JSON)] == [{"n": 1}, {"n": 2}]
    lives = [seen.expires_ms - seen.publish_time_ms for seen in client.admin.messages(topic)]
    assert lives == [7 * 86_400_000, 60_000]


def test_one_message_too_large_fails_alone(client: Client, topic: str):
    with client.publisher(topic, linger_ms=50, max_batch_bytes=64 << 20, max_pending_bytes=64 << 20) as publisher:
        sents = [publisher.send(bytes(9 << 20) if n == 3 else b"%d" % n) for n in range(6)]
        assert isinstance(sents[3].exception(PATIENCE_S), MessageTooLarge)
    assert payloads(client, topic) == [b"0", b"1", b"2", b"4", b"5"]


def test_an_unretrieved_failure_is_reported_on_close(client: Client, topic: str):
    publisher = client.publisher("not-there")
    publisher.send(b"x")
    heard = publisher.send(b"y")
    assert isinstance(heard.exception(PATIENCE_S), TopicNotFound)
    with pytest.raises(NotSent) as caught:
        publisher.close()
    assert (caught.value.unsent, caught.value.unknown, caught.value.outcome) == (1, 0, "not-applied")
    publisher.close()
    with pytest.raises(Closed):
        publisher.send(b"z")


def test_only_temporary_failures_are_said_to_need_time():
    assert NotSent(1, 0).hint == "their futures say which; pass a longer timeout_s to close"
    assert NotSent(0, 1, [ConnectionLost("gone")]).hint == "their futures say which; pass a longer timeout_s to close"
    assert NotSent(1, 0, [MessageTooLarge("9 MiB")]).hint == "their futures say which"


def test_a_message_without_a_topic_is_refused(client: Client):
    with client.publisher() as publisher, pytest.raises(InvalidParameter):
        publisher.send(b"x")


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "fast"},
        {"overflow": "burst"},
        {"linger_ms": -1},
        {"max_batch_messages": 0},
        {"max_pending_bytes": 0},
        {"delivery_timeout_s": 0},
        {"mode": "best_effort", "overflow": "wait"},
        {"connections": 0},
    ],
)
def test_options_that_make_no_sense_are_refused(client: Client, options):
    with pytest.raises(InvalidParameter):
        client.publisher("t", **options)


# --- the buffer is full ---------------------------------------------------------------------------

ROOM_FOR_TWO = 2 * (ITEM_BYTES + 1)


@pytest.fixture
def nobody() -> Client:
    """A client that waits for an unreachable daemon: its messages stay in the buffer and occupy it."""
    return Client("http://127.0.0.1:1", deadline_s=1, wait_for_daemon_s=PATIENCE_S)


def test_a_full_buffer_raises_if_configured(nobody: Client):
    publisher = nobody.publisher("t", overflow="raise", max_pending_bytes=ROOM_FOR_TWO)
    publisher.send(b"1"), publisher.send(b"2")
    with pytest.raises(BufferFull) as caught:
        publisher.send(b"3")
    assert caught.value.outcome == "not-applied"
    with pytest.raises(NotSent) as left:
        publisher.close(0)
    assert left.value.unsent + left.value.unknown == 2


def test_a_full_buffer_drops_the_new_message_if_configured(nobody: Client):
    dropped = []
    publisher = nobody.publisher("t", overflow="drop", max_pending_bytes=ROOM_FOR_TWO, on_drop=dropped.append)
    publisher.send(b"1"), publisher.send(b"2")
    third = publisher.send(b"3")
    assert isinstance(third.exception(0), MessageDropped)
    assert [(each.topic, each.payload) for each in dropped] == [("t", b"3")]
    assert publisher.counts.dropped == 1
    with pytest.raises(NotSent):
        publisher.close(0)


def test_a_full_buffer_makes_the_caller_wait_if_configured(client: Client, topic: str):
    with client.publisher(topic, max_pending_bytes=ROOM_FOR_TWO) as publisher:
        for n in range(50):
            publisher.send(b"%d" % (n % 10))
            assert publisher.counts.pending_bytes <= ROOM_FOR_TWO
    assert len(payloads(client, topic)) == 50


def test_a_caller_waiting_for_room_gets_an_error_when_the_publisher_closes(nobody: Client):
    publisher = nobody.publisher("t", max_pending_bytes=ROOM_FOR_TWO)
    publisher.send(b"1"), publisher.send(b"2")
    told = []

    def send() -> None:
        try:
            publisher.send(b"3")
        except Closed as error:
            told.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    eventually("it waits", lambda: publisher._sender.room._waiters)
    with pytest.raises(NotSent):
        publisher.close(0)
    thread.join(PATIENCE_S)
    assert told


def test_a_message_larger_than_the_buffer_is_refused_whatever_is_configured(nobody: Client):
    with pytest.raises(BufferFull):
        nobody.publisher("t", max_pending_bytes=1000).send(bytes(1000))


# --- best effort ----------------------------------------------------------------------------------


def test_best_effort_drops_counts_and_reports_and_neither_raises_nor_waits(nobody: Client):
    dropped = []

    def on_drop(message) -> None:
        dropped.append(message)
        raise ValueError("a user's mistake")

    with nobody.publisher("t", mode="best_effort", delivery_timeout_s=0.2, on_drop=on_drop) as publisher:
        sents = [publisher.send(b"%d" % n) for n in range(100)]
        eventually("all are given up", lambda: publisher.counts.dropped == 100)
    assert sorted(int(message.payload) for message in dropped) == list(range(100))
    assert all(message.error.outcome == "not-applied" for message in dropped)
    assert isinstance(sents[0].exception(0), MessageDropped)


def test_best_effort_delivers_messages_while_it_can(client: Client, topic: str):
    with client.publisher(topic, mode="best_effort") as publisher:
        for n in range(100):
            publisher.send(b"%d" % n)
    assert len(payloads(client, topic)) == 100


# --- lost answers ---------------------------------------------------------------------------------


def test_a_lost_answer_is_reported_as_unknown_and_later_messages_continue(client: Client, topic: str, shared_address):
    with Proxy(shared_address) as proxy, Client(proxy.url) as through:
        proxy.then = ["lose"]
        with through.publisher(topic, max_batch_messages=1) as publisher:
            first, second = publisher.send(b"1"), publisher.send(b"2")
            error = first.exception(PATIENCE_S)
            assert isinstance(error, ConnectionLost)
            assert error.outcome == "unknown"
            assert second.result(PATIENCE_S)
    assert payloads(client, topic) == [b"1", b"2"], "it had taken"


def test_at_least_once_sends_again_and_keeps_the_order(client: Client, topic: str, shared_address):
    with Proxy(shared_address) as proxy, Client(proxy.url) as through:
        proxy.then = ["lose", "pass", "cut", "lose", "pass"]
        with through.publisher(topic, max_batch_messages=2, retry_unknown=True) as publisher:
            for n in range(10):
                publisher.send(b"%d" % n)
    found = payloads(client, topic)
    assert list(dict.fromkeys(found)) == [b"%d" % n for n in range(10)]
    assert len(found) > 10, "some came twice"


def test_a_missing_answer_ends_with_the_delivery_timeout(topic: str, shared_address, monkeypatch: pytest.MonkeyPatch):
    # No time passes in the buffer: the message is sent with its full time-out, even if the sender is delayed.
    monkeypatch.setattr(f"plainsong._{kind().name}.publisher.now", lambda: 0.0)
    with Proxy(shared_address) as proxy, Client(proxy.url) as through:
        proxy.mode = "swallow"
        with through.publisher(topic, delivery_timeout_s=2) as publisher:
            error = publisher.send(b"1").exception(PATIENCE_S)
        assert isinstance(error, DeadlineExceeded)
        assert error.outcome == "unknown"


def test_a_publish_whose_answer_is_lost_is_unknown(client: Client, topic: str, shared_address):
    with Proxy(shared_address) as proxy, Client(proxy.url) as through:
        proxy.then = ["lose"]
        with pytest.raises(ConnectionLost) as caught:
            through.publish(topic, b"1")
        assert caught.value.outcome == "unknown"
        proxy.then = ["cut"]
        assert through.publish(topic, b"2", retry_unknown=True).count == 1
    assert payloads(client, topic) == [b"1", b"2", b"2"]


def test_a_request_without_an_answer_ends_in_time(client: Client, topic: str, shared_address):
    with Proxy(shared_address) as proxy:
        proxy.mode = "swallow"
        with (
            Client(proxy.url, request_timeout_s=1, deadline_s=PATIENCE_S) as through,
            pytest.raises(DeadlineExceeded, match="no answer within 1 s") as caught,
        ):
            through.publish(topic, b"1")
        assert caught.value.outcome == "unknown"
        with Client(proxy.url, deadline_s=1) as through, pytest.raises(DeadlineExceeded) as read:
            through.poll(topic)
        assert read.value.outcome == "not-applied"


def test_reading_is_retried_when_no_answer_arrives(client: Client, topic: str, shared_address):
    client.publish(topic, b"1")
    with Proxy(shared_address) as proxy, Client(proxy.url, request_timeout_s=1, deadline_s=PATIENCE_S) as through:
        proxy.mode = "swallow"

        def pass_the_third() -> None:
            eventually("there is a third connection", lambda: proxy.connections >= 3)
            proxy.mode = "pass"

        passing = threading.Thread(target=pass_the_third)
        passing.start()
        assert [message.payload for message in through.poll(topic)] == [b"1"]
        passing.join()


def test_an_answer_cut_in_the_middle_is_never_the_end_of_a_topic(client: Client, topic: str, shared_address):
    client.publish(topic, [b"%d" % n for n in range(1000)])
    with Proxy(shared_address) as proxy, Client(proxy.url) as through:
        proxy.then = ["cut", "cut", "lose"]
        assert len(list(through.read(topic))) == 1000
        assert proxy.lost == 3


# --- messages that cannot be encoded ---------------------------------------------------------------

#: A file name that is not UTF-8, as Python returns it (with a surrogate escape).
NOT_UTF8 = "caf\udce9.txt"
CANNOT_BE_WRITTEN = {
    "a value that is not UTF-8": lambda send: send(Outgoing(b"bad", attributes={"file": NOT_UTF8})),
    "a name that is not UTF-8": lambda send: send(Outgoing(b"bad", attributes={NOT_UTF8: "x"})),
    "a routing key that is not UTF-8": lambda send: send(Outgoing(b"bad", routing_key=NOT_UTF8)),
    "attributes beyond the limit": lambda send: send(Outgoing(b"bad", attributes={"file": "x" * 4093})),
    "a time to live beyond the limit": lambda send: send(Outgoing(b"bad", ttl_s=1 << 31)),
}


@pytest.mark.parametrize("bad", CANNOT_BE_WRITTEN.values(), ids=CANNOT_BE_WRITTEN)
@pytest.mark.parametrize("kind_of_sender", ["publisher", "producer"])
def test_a_message_that_cannot_be_written_fails_alone_and_at_the_call(
    client: Client, topic: str, bad, kind_of_sender: str
):
    with getattr(client, kind_of_sender)(topic, linger_ms=60_000) as sender:
        sents = [sender.send(b"before")]
        with pytest.raises(InvalidParameter) as refused:
            bad(sender.send)
        sents.append(sender.send(b"after"))
        sender.flush(PATIENCE_S)
        assert all(sent.result(PATIENCE_S) for sent in sents)
    assert refused.value.outcome == "not-applied"
    assert payloads(client, topic) == [b"before", b"after"]


def test_an_invalid_topic_is_refused_at_the_call(client: Client, topic: str):
    with pytest.raises(InvalidName):
        client.publisher(NOT_UTF8)
    with client.publisher(topic, linger_ms=60_000) as publisher:
        publisher.send(b"before")
        with pytest.raises(InvalidName):
            publisher.send(b"bad", topic=NOT_UTF8)
    assert payloads(client, topic) == [b"before"]


def test_attributes_changed_by_the_caller_later_are_sent_as_they_were_at_the_call(client: Client, topic: str):
    attributes = {"file": "a.txt"}
    with client.publisher(topic, linger_ms=60_000) as publisher:
        publisher.send(Outgoing(b"x", attributes=attributes))
        attributes["file"] = NOT_UTF8
    assert [message.attributes for message in client.read(topic)] == [{"file": "a.txt"}]


@pytest.mark.parametrize("kind_of_sender", ["publisher", "producer"])
def test_a_message_that_a_codec_cannot_write_fails_alone(
    client: Client, topic: str, kind_of_sender: str, monkeypatch: pytest.MonkeyPatch
):
    """No known message fails to encode, so a codec that raises simulates one."""
    encode = AVRO_2.encode_publish

    def encode_unless_bad(request: PublishRequest) -> bytes:
        if b"bad" in request.messages:
            raise OverflowError("bad")
        return encode(request)

    monkeypatch.setattr(type(AVRO_2), "encode_publish", lambda _, request: encode_unless_bad(request))
    with getattr(client, kind_of_sender)(topic, linger_ms=60_000) as sender:
        sents = [sender.send(Outgoing(each, ttl_s=60)) for each in (b"1", b"2", b"bad", b"3")]
        with pytest.raises(NotSent, match="1 message not sent: the message cannot be serialized"):
            sender.flush(PATIENCE_S)
        with pytest.raises(InvalidParameter, match="OverflowError: bad"):
            sents[2].result(PATIENCE_S)
    assert payloads(client, topic) == [b"1", b"2", b"3"]
