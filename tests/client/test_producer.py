"""Producers of threads against the real daemon, through a proxy that loses answers."""

from __future__ import annotations

import random
import threading
from contextlib import suppress
from importlib import import_module
from typing import Any

import pytest

from plainsong import JSON, Outgoing, Producer
from plainsong.errors import (
    Closed,
    DeadlineExceeded,
    MaxTransactionSizeExceeded,
    NoTransaction,
    NotSent,
    ProducerStopped,
    TransactionTimedOut,
)
from plainsong.protocol.errors import (
    DeduplicationDisabled,
    GenerationChanged,
    MessageTooLarge,
    PartialDuplicate,
    ProducerFenced,
    SequenceConsumed,
    TopicNotFound,
)
from tests.client.client_under_test import Client, only_threads
from tests.client.proxy import Proxy
from tests.client.simulation import kind
from tests.daemon.harness import eventually
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("both_clients")


def payloads(client: Client, topic: str) -> list[bytes]:
    return [message.payload for message in client.read(topic)]


def numbers(client: Client, topic: str) -> list[int]:
    return [int(payload) for payload in payloads(client, topic)]


# --- names and numbers -------------------------------------------------------------------------------


def test_automatic_ids_begin_with_0_and_continue_after_the_last(client: Client, topic: str):
    with client.producer(topic, "p") as producer:
        assert (producer.name, producer.epoch, producer.last_sequence_id) == ("p", 1, -1)
        sents = [producer.send(b"%d" % n) for n in range(100)]
    receipts = [sent.result() for sent in sents]
    assert [receipt.sequence_id for receipt in receipts] == list(range(100))
    assert [receipt.id for receipt in receipts] == [message.id for message in client.read(topic)]
    assert not any(receipt.duplicate for receipt in receipts)
    assert producer.last_sequence_id == 99
    with client.producer(topic, "p") as again:
        assert (again.epoch, again.last_sequence_id) == (2, 99)
        assert again.send(b"100").result(PATIENCE_S).sequence_id == 100
    assert numbers(client, topic) == list(range(101))


def test_the_daemon_makes_unused_names(client: Client, topic: str):
    with client.producer(topic) as one, client.producer(topic) as other:
        assert one.name != other.name
        assert {one.publish(b"1").last_sequence_id, other.publish(b"2").last_sequence_id} == {0}


def test_the_first_automatic_id_can_be_set(client: Client, topic: str):
    with client.producer(topic, "p", initial_sequence_id=41) as producer:
        assert producer.send(b"a").result(PATIENCE_S).sequence_id == 41
        assert producer.publish([b"b", b"c"]).last_sequence_id == 43


def test_from_an_id_at_or_below_the_last_each_message_up_to_it_is_a_duplicate(client: Client, topic: str):
    with client.producer(topic, "p") as producer:
        first = producer.publish([b"0", b"1", b"2", b"3"])
    with client.producer(topic, "p", initial_sequence_id=2) as again:
        receipts = [again.send(b"%d" % n).result(PATIENCE_S) for n in range(2, 6)]
        assert [receipt.duplicate for receipt in receipts] == [True, True, False, False]
        assert again.publish([b"6"]).duplicate is False
    with client.producer(topic, "p", initial_sequence_id=0) as third:
        whole = third.publish([b"0", b"1", b"2", b"3"])
    assert (whole.duplicate, whole.first_id) == (True, first.first_id)
    assert numbers(client, topic) == list(range(7))


def test_explicit_ids_may_have_gaps_and_are_never_mixed_with_automatic_ones(client: Client, topic: str):
    with client.producer(topic, "p") as producer:
        sents = [producer.send(b"%d" % n, sequence_id=n) for n in (3, 7, 12)]
        assert [sent.result(PATIENCE_S).sequence_id for sent in sents] == [3, 7, 12]
        with pytest.raises(ValueError, match="sequence ids"):
            producer.send(b"13")
        assert producer.publish([Outgoing(b"20", sequence_id=20)]).last_sequence_id == 20
        trimmed = producer.publish([b"19", b"20", b"21"], sequence_ids=[19, 20, 21])
        assert (trimmed.dropped, trimmed.stored) == ([19, 20], [21])
    assert numbers(client, topic) == [3, 7, 12, 20, 21]


def test_threads_agree_with_the_topic_about_the_order(client: Client, topic: str):
    with client.producer(topic, "p") as producer:
        sents: list[Any] = []
        lock = threading.Lock()

        def work() -> None:
            for n in range(100):
                sent = producer.send(b"%d" % n)
                with lock:
                    sents.append(sent)

        threads = [threading.Thread(target=work) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    receipts = sorted((sent.result() for sent in sents), key=lambda receipt: receipt.sequence_id)
    assert [receipt.sequence_id for receipt in receipts] == list(range(2000))
    assert [receipt.id for receipt in receipts] == [message.id for message in client.read(topic)]


def test_values_attributes_and_routing_keys_are_sent(client: Client, topic: str):
    with client.producer(topic, serializer=JSON) as producer:
        producer.send({"a": 1}, attributes={"traceparent": "00"}, routing_key="k").result(PATIENCE_S)
        producer.publish([[1], Outgoing([2], attributes={"own": "x"})], routing_key="r")
    found = list(client.read(topic, serializer=JSON))
    assert [message.value for message in found] == [{"a": 1}, [1], [2]]
    assert [dict(message.attributes) for message in found] == [
        {"traceparent": "00", "routingKey": "k"},
        {"routingKey": "r"},
        {"own": "x", "routingKey": "r"},
    ]


def test_attributes_are_sent_with_every_kind_of_publish(client: Client, topic: str):
    client.publish(topic, b"plain", attributes={"h": "1"}, routing_key="k")
    with client.publisher(topic) as publisher:
        publisher.send(Outgoing(b"gathered", attributes={"h": "2"}))
    with client.transaction() as tx:
        tx.publish(topic, Outgoing(b"in a block", attributes={"h": "3"}))
        client.publish(topic, b"in it too", attributes={"h": "4"})
    client.publish(topic, b"own", transaction="own", attributes={"h": "5"})
    client.publish_atomic(topic, "key", [b"atomic"], attributes={"h": "6"})
    assert [message.attributes["h"] for message in client.read(topic)] == list("123456")


# --- lost answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["lose", "cut"])
def test_stored_messages_are_found_and_nothing_is_stored_twice(
    client: Client, topic: str, shared_address: tuple[str, int], mode: Any
):
    with Proxy(shared_address) as proxy, Client(proxy.url, deadline_s=PATIENCE_S) as far:
        with far.producer(topic, "p") as producer:
            for n in range(20):
                proxy.then = [mode] if n % 3 == 0 else []
                receipt = producer.send(b"%d" % n).result(PATIENCE_S)
                assert (receipt.sequence_id, receipt.duplicate, receipt.id is None) == (n, False, False)
        assert proxy.lost > 5
    assert numbers(client, topic) == list(range(20))


def test_requests_that_never_arrived_are_sent_again(client: Client, topic: str, shared_address: tuple[str, int]):
    with (
        Proxy(shared_address) as proxy,
        Client(proxy.url, deadline_s=PATIENCE_S) as far,
        far.producer(topic, "p") as producer,
    ):
        proxy.mode = "refuse"
        sents = [producer.send(b"%d" % n) for n in range(50)]
        eventually("it was refused once", lambda: not sents[0].done())
        proxy.mode = "pass"
        assert [sent.result(PATIENCE_S).sequence_id for sent in sents] == list(range(50))
    assert numbers(client, topic) == list(range(50))


def test_a_missing_answer_is_queried(client: Client, topic: str, shared_address: tuple[str, int]):
    with (
        Proxy(shared_address) as proxy,
        Client(proxy.url, deadline_s=PATIENCE_S, request_timeout_s=2) as far,
        far.producer(topic, "p") as producer,
    ):
        proxy.after = {b"/publish": "swallow"}
        assert producer.publish([b"0", b"1"]).duplicate is False
        assert not proxy.after
        assert producer.epoch == 1  # the publish had happened, so no session had to be fenced
    assert numbers(client, topic) == [0, 1]


def test_an_explicit_deadline_holds_after_an_unanswered_request(
    client: Client, topic: str, shared_address: tuple[str, int]
):
    with (
        Proxy(shared_address) as proxy,
        Client(proxy.url, request_timeout_s=6) as far,
        far.producer(topic, "p") as producer,
    ):
        proxy.mode = "swallow"
        stuck = producer.send(b"0")
        with pytest.raises(DeadlineExceeded) as late:
            producer.publish(b"1", deadline_s=0.1)
        assert not stuck.done(), "it was reported while the other one was in flight"
        proxy.mode = "pass"
        assert (late.value.outcome, late.value.hint) == ("not-applied", "deadline_s is the limit")
        assert stuck.result(PATIENCE_S).sequence_id == 0
    assert numbers(client, topic) == [0]


def test_many_producers_on_a_bad_connection_lose_nothing_and_repeat_nothing(
    client: Client, topic: str, shared_address: tuple[str, int]
):
    chance = random.Random(6)
    with Proxy(shared_address) as proxy:
        stop = threading.Event()

        def disturb() -> None:
            for n in range(40):
                if stop.wait(0.03):
                    break
                proxy.then = [chance.choice(["lose", "cut"])]
                if n % 10 == 9:
                    proxy.close_all()

        def produce(name: str, wrong: list[BaseException]) -> None:
            try:
                with Client(proxy.url) as far, far.producer(topic, name, max_batch_messages=7) as producer:
                    for n in range(60):
                        if n % 10 == 0:
                            producer.publish_atomic(name, [b"%s %d" % (name.encode(), n), b"%s -" % name.encode()])
                        else:
                            producer.send(b"%s %d" % (name.encode(), n))
            except BaseException as error:  # noqa: BLE001 - the test reports it
                wrong.append(error)

        wrong: list[BaseException] = []
        threads = [threading.Thread(target=produce, args=(f"p{n}", wrong)) for n in range(8)]
        disturber = threading.Thread(target=disturb)
        disturber.start()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stop.set()
        disturber.join()
    assert wrong == []
    found = [payload.decode().split() for payload in payloads(client, topic)]
    for n in range(8):
        own = [each for name, each in found if name == f"p{n}"]
        assert [each for each in own if each != "-"] == [str(n) for n in range(60)]
    singles = [index for index, (_, each) in enumerate(found) if each == "-"]
    assert len(singles) == 8 * 6
    assert all(found[index - 1][0] == found[index][0] for index in singles), "an atomic batch is in one piece"


# --- the end of a session ----------------------------------------------------------------------------


def test_the_newest_session_of_a_name_fences_the_older_ones(client: Client, topic: str):
    with client.producer(topic, "p", linger_ms=20_000 * PATIENCE_S) as old:
        waiting = old.send(b"too late")
        with client.producer(topic, "p") as new:
            with pytest.raises(ProducerFenced):
                old.publish(b"late")
            error = waiting.exception(PATIENCE_S)
            assert isinstance(error, ProducerFenced)
            assert error.outcome == "not-applied"
            with pytest.raises(ProducerFenced):
                old.send(b"later")
            new.publish(b"good")
    assert payloads(client, topic) == [b"good"]


def test_a_recreated_topic_gets_nothing_meant_for_the_old_one(client: Client, topic: str):
    with client.producer(topic, "p") as producer:
        producer.publish(b"old")
        client.admin.delete_topic(topic)
        with pytest.raises(TopicNotFound):
            producer.publish(b"to nowhere")
        client.create_topic(topic)
        with pytest.raises(GenerationChanged):
            producer.publish(b"history")
        with pytest.raises(GenerationChanged):
            producer.send(b"more of it")
    assert payloads(client, topic) == []
    with client.producer(topic, "p") as producer:
        assert (producer.generation, producer.last_sequence_id) == (2, -1)


def test_the_old_generation_reports_the_outcome_of_the_last_request(
    client: Client, topic: str, shared_address: tuple[str, int]
):
    with (
        Proxy(shared_address) as proxy,
        Client(proxy.url, deadline_s=PATIENCE_S, request_timeout_s=2) as far,
        far.producer(topic, "p") as producer,
    ):
        proxy.mode = "swallow"
        sent = producer.send(b"in the old one")
        eventually("it is stored", lambda: len(client.poll(topic)) == 1)
        client.admin.delete_topic(topic)
        client.create_topic(topic)
        proxy.mode = "pass"
        assert sent.result(PATIENCE_S).generation == 1
        with pytest.raises(GenerationChanged):
            producer.publish(b"another")
    assert payloads(client, topic) == []


def test_where_deduplication_is_off_opening_is_refused_unless_it_is_optional(client: Client, topic: str):
    client.admin.set_properties(topic, deduplication="disabled")
    with pytest.raises(DeduplicationDisabled):
        client.producer(topic, "p")
    with client.producer(topic, "p", optional=True) as producer:
        assert (producer.deduplicated, producer.epoch, producer.last_sequence_id) == (False, None, -1)
        receipts = [producer.publish(b"x"), producer.publish(b"x")]
    assert [receipt.deduplicated for receipt in receipts] == [False, False]
    assert len(payloads(client, topic)) == 2


def test_a_producer_that_requires_deduplication_stops_when_it_is_switched_off(client: Client, topic: str):
    with client.producer(topic, "p") as producer:
        producer.publish(b"0")
        client.admin.set_properties(topic, deduplication="disabled")
        assert producer.publish(b"1").deduplicated is False
        with pytest.raises(DeduplicationDisabled):
            producer.publish(b"2")
    assert numbers(client, topic) == [0, 1]


def test_a_refused_message_with_an_id_of_its_own_stops_its_producer(client: Client, topic: str):
    with client.producer(topic, "p", linger_ms=50) as producer:
        good, bad, behind = (
            producer.send(payload, sequence_id=n) for n, payload in enumerate([b"0", b"x" * (9 << 20), b"2"])
        )
        assert good.result(PATIENCE_S)
        assert isinstance(bad.exception(PATIENCE_S), MessageTooLarge)
        assert isinstance(behind.exception(PATIENCE_S), ProducerStopped)
        with pytest.raises(ProducerStopped):
            producer.send(b"3", sequence_id=3)
        assert producer.last_sequence_id == 0


def test_closing_reports_unsent_messages_and_a_closed_producer_accepts_nothing(client: Client, topic: str):
    producer = client.producer(topic, "p")
    client.admin.delete_topic(topic)
    producer.send(b"x")
    with pytest.raises(NotSent) as raised:
        producer.close()
    assert (raised.value.unsent, raised.value.unknown) == (1, 0)
    producer.close()
    with pytest.raises(Closed):
        producer.send(b"y")


def test_a_producer_that_was_not_closed_is_closed_with_its_client(shared_url: str, client: Client, topic: str):
    only_threads("producers of tasks end with their own blocks")
    with Client(shared_url) as other:
        sent = other.producer(topic, "p", linger_ms=60_000).send(b"x")
    assert sent.result(0).sequence_id == 0


# --- lightweight transactions ------------------------------------------------------------------------


def test_a_lightweight_transaction_is_atomic_and_readable_when_commit_returns(client: Client, topic: str):
    with client.producer(topic, "p") as producer, client.publisher(topic) as others:
        for n in range(20):
            others.send(b"other")
            with producer.begin("key") as tx:
                for part in range(3):
                    tx.write(b"%d.%d" % (n, part))
                receipt = tx.commit()
            assert tx.state == "committed"
            assert tx.commit() == receipt
            assert receipt.count == 3
            page = client.poll(topic, receipt.first_id, inclusive=True, limit=3)
            assert [message.payload for message in page] == [b"%d.%d" % (n, part) for part in range(3)]
            assert page[-1].id == receipt.last_id
        assert producer.last_sequence_id == 59
        assert page[0].attributes["routingKey"] == "key"


def test_aborted_and_open_transactions_publish_nothing_and_use_no_id(client: Client, topic: str):
    with client.producer(topic, "p") as producer:
        with producer.begin("key") as tx:
            tx.write(b"left open")
        assert tx.state == "aborted"
        tx.abort()
        other = producer.begin("key")
        other.write(b"aborted")
        other.abort()
        with pytest.raises(NoTransaction):
            other.commit()
        with suppress(KeyError), producer.begin("key") as failed:
            failed.write(b"x")
            raise KeyError
        last = producer.begin("key")
        last.write(b"y")
        assert producer.publish_atomic("key", [b"a", b"b"]).last_sequence_id == 1
    assert last.state == "aborted", "closing the producer aborts what is open"
    assert payloads(client, topic) == [b"a", b"b"]


def test_a_timeout_aborts_an_open_transaction_by_itself(client: Client, topic: str, monkeypatch: pytest.MonkeyPatch):
    now = {module: import_module(f"plainsong._{kind().name}.{module}").now for module in ("producer", "publisher")}
    with client.producer(topic, "p", transaction_timeout_s=1) as producer:
        # The clock is stopped for the caller and for the worker until the message is in.
        for module in now:
            monkeypatch.setattr(f"plainsong._{kind().name}.{module}.now", lambda: 0.0)
        tx = producer.begin("key")
        tx.write(b"x")
        for module, real in now.items():
            monkeypatch.setattr(f"plainsong._{kind().name}.{module}.now", real)
        eventually("its buffer is free", lambda: tx._transaction.state == "aborted" and len(tx) == 0)
        with pytest.raises(TransactionTimedOut):
            tx.commit()
        producer.begin("key", timeout_s=30).abort()
    assert payloads(client, topic) == []


@pytest.mark.parametrize("mode", ["lose", "swallow", "cut"])
def test_the_outcome_of_a_commit_with_a_lost_answer_is_determined(
    client: Client, topic: str, shared_address: tuple[str, int], mode: Any
):
    with (
        Proxy(shared_address) as proxy,
        Client(proxy.url, request_timeout_s=6) as far,
        far.producer(topic, "p") as producer,
        producer.begin("key", timeout_s=5) as tx,
    ):
        tx.write(b"a")
        tx.write(b"b")
        proxy.then = [mode]
        receipt = tx.commit()
        assert (tx.state, receipt.duplicate, receipt.first_id is None) == ("committed", False, False)
    assert payloads(client, topic) == [b"a", b"b"]


def test_a_straddling_transaction_stores_nothing(client: Client, topic: str):
    with client.producer(topic, "p") as producer:
        producer.publish(b"5", sequence_ids=[5])
        tx = producer.begin("key")
        tx.write(b"5 again", sequence_id=5)
        tx.write(b"6", sequence_id=6)
        with pytest.raises(PartialDuplicate):
            tx.commit()
        assert tx.state == "open"
        tx.abort()
        producer.publish_atomic("key", [b"6", b"7"], sequence_ids=[6, 7])
    assert numbers(client, topic) == [5, 6, 7]


def test_at_most_16_mebibytes_fit_into_one_transaction(client: Client, topic: str):
    most = [b"x" * (4 << 20)] * 4
    with client.producer(topic, "p") as producer, producer.begin("key") as tx:
        for payload in most:
            tx.write(payload)
        with pytest.raises(MaxTransactionSizeExceeded):
            tx.write(b"y")
        assert tx.commit().count == 4
        with pytest.raises(MaxTransactionSizeExceeded):
            producer.publish_atomic("key", [*most, b"y"])
        with pytest.raises(MaxTransactionSizeExceeded):
            client.publish_atomic(topic, "key", [*most, b"y"])
    assert sum(map(len, payloads(client, topic))) == 16 << 20


def test_a_batch_needs_no_producer(client: Client, topic: str):
    receipt = client.topic(topic).publish_atomic("key", ["a", "b"], serializer=str)
    assert (receipt.count, receipt.deduplicated) == (2, False)
    assert [message.attributes["routingKey"] for message in client.read(topic)] == ["key", "key"]


# --- inside transactions -----------------------------------------------------------------------------


def test_inside_a_block_a_producer_publishes_under_the_transaction(
    client: Client, topic: str, shared_address: tuple[str, int]
):
    with (
        Proxy(shared_address) as proxy,
        Client(proxy.url, deadline_s=PATIENCE_S, request_timeout_s=2) as far,
        far.producer(topic, "p") as producer,
    ):
        with far.transaction():
            proxy.then = ["swallow"]
            receipt = producer.publish([b"a", b"b"])
            assert receipt.first_id is not None
            assert list(client.read(topic, isolation="committed")) == []
        assert len(list(client.read(topic, isolation="committed"))) == 2
        with suppress(KeyError), far.transaction():
            producer.publish(b"undone")
            raise KeyError
        with far.transaction():
            producer.publish(b"direct", direct=True)
    assert [message.payload for message in client.read(topic, isolation="committed")] == [b"a", b"b", b"direct"]


def test_ids_of_a_rolled_back_transaction_are_consumed(client: Client, topic: str):
    with client.producer(topic, "p") as producer:
        with suppress(KeyError), client.transaction():
            producer.publish(b"undone", sequence_ids=[1])
            raise KeyError
        with pytest.raises(SequenceConsumed), client.transaction():
            producer.publish(b"again", sequence_ids=[1])
        with client.transaction():
            producer.publish(b"new", sequence_ids=[2])
    assert [message.payload for message in client.read(topic, isolation="committed")] == [b"new"]


# --- administration ----------------------------------------------------------------------------------


def test_producers_and_namespaces_can_be_administered(client: Client, topic: str):
    producer: Producer = client.producer(topic, "a/b c")
    producer.publish([b"0", b"1"])
    page = client.admin.producers(topic)
    assert [each["producer"] for each in page["producers"]] == ["a/b c"]
    assert client.admin.producer_state(topic, "a/b c")["lastSequenceId"] == 1
    assert client.topic(topic).producers()["count"] == 1
    client.admin.delete_producer(topic, "a/b c")
    assert client.admin.producers(topic)["producers"] == []
    assert client.namespace in client.admin.namespaces.list()
    assert client.admin.namespaces.set("other", deduplication="disabled")["properties"] == {"deduplication": "disabled"}
    assert client.admin.namespaces.show("other")["deduplication"] == {"enabled": False, "level": "namespace"}
    assert client.admin.namespaces.show()["deduplication"]["enabled"] is True
