"""The relay with a real daemon: each message once, in commit order, despite failures, conflicts and restores."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, insert
from sqlalchemy.engine import Engine
from sqlalchemy.orm import Session

from plainsong import Client
from plainsong.calls import Answer, Failure, Send
from plainsong.errors import ConnectionLost, DeadlineExceeded
from plainsong.protocol.errors import (
    DeduplicationDisabled,
    InvalidParameter,
    MessageTooLarge,
    PlainsongError,
    ProducerFenced,
    TopicNotFound,
)
from plainsong.sql import (
    Outbox,
    OutboxBusy,
    OutboxInDoubt,
    OutboxMissing,
    OutboxUnavailable,
    OutboxUnusable,
    Relay,
    create_outbox,
    outbox_engine,
    outbox_status,
    outbox_tables,
)
from plainsong.sql.errors import SqlUnusable
from plainsong.sql.prepared import _engine_of
from plainsong.sql.relay import RelayProducer
from tests.daemon.harness import Daemon, eventually, free_port
from tests.patience import PATIENCE_S
from tests.sql.server import Postgres

MESSAGES, TOPICS = outbox_tables()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    home = tmp_path_factory.mktemp("relay")
    with Daemon(home / "data", bind=f"127.0.0.1:{free_port()}") as daemon:
        yield daemon


_namespaces = iter(range(1_000))


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    """A client with its own namespace."""
    url = f"http://{daemon.address[0]}:{daemon.address[1]}"
    with Client(url, namespace=f"relay{next(_namespaces)}", deadline_s=10) as client:
        yield client


@pytest.fixture(params=["postgresql", "sqlite"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """An engine on a database with an outbox."""
    url = request.getfixturevalue("database") if request.param == "postgresql" else f"sqlite:///{tmp_path}/shop.db"
    engine = create_engine(url, connect_args={"timeout": PATIENCE_S} if request.param == "sqlite" else {})
    create_outbox(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def lite(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path}/shop.db", connect_args={"timeout": PATIENCE_S})
    create_outbox(engine)
    yield engine
    engine.dispose()


def publish(engine: Engine, *payloads: bytes, topic: str = "orders") -> None:
    with Session(engine) as session:
        Outbox(session).publish(topic, list(payloads))
        session.commit()


def read(client: Client, topic: str = "orders") -> list[bytes]:
    return [message.payload for message in client.read(topic)]


@contextmanager
def running(relay: Relay) -> Iterator[threading.Thread]:
    """Call ``run`` in a thread, and stop it at the end."""
    thread = threading.Thread(target=relay.run)
    thread.start()
    try:
        yield thread
    finally:
        relay.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def losing(monkeypatch: pytest.MonkeyPatch, *, arrives: bool) -> None:
    """Make the next publish raise: its request is lost, or (``arrives``) its answer."""
    real = RelayProducer.publish

    def publish(producer: RelayProducer, messages: Any) -> None:
        monkeypatch.setattr(RelayProducer, "publish", real)
        if arrives:
            real(producer, messages)
        raise ConnectionLost("as if the wire had been cut")

    monkeypatch.setattr(RelayProducer, "publish", publish)


def answering_in_time(
    monkeypatch: pytest.MonkeyPatch, client: Client, most_bytes: int, *, arrives: bool = False
) -> list[int]:
    """Make publishes with larger bodies time out, having taken effect if ``arrives``. Return all sizes."""
    pool, sizes = client._channel.pool, list[int]()
    real = pool.carry

    def carry(send: Send) -> Answer | Failure:
        if not send.request.path.endswith("/publish"):
            return real(send)
        sizes.append(len(send.request.body))
        if sizes[-1] <= most_bytes:
            return real(send)
        if arrives:
            real(send)
        return Failure("timeout", "no answer within 30 s")

    monkeypatch.setattr(pool, "carry", carry)
    return sizes


@pytest.mark.parametrize("arrives", [True, False])
def test_requests_too_large_for_the_connection_are_split_with_each_message_sent_once_and_in_order(
    db: Engine, client: Client, arrives: bool, monkeypatch: pytest.MonkeyPatch
):
    client.create_topic("orders")
    payloads = [b"%03d" % each + bytes(1_000) for each in range(200)]
    publish(db, *payloads)
    sizes = answering_in_time(monkeypatch, client, 20_000, arrives=arrives)
    told: list[PlainsongError] = []
    relay = Relay(db, client, on_failure=lambda topic, error: told.append(error))
    relay.once()
    assert read(client) == payloads
    assert outbox_status(db).waiting == 0
    assert len(told) == 1, "it is reported once"
    assert told[0].detail.startswith("a request of 200 messages, 200600 bytes, got no answer in time")
    assert arrives or sizes[:5] == sorted(sizes[:5], reverse=True)


def test_requests_become_larger_again_when_they_are_answered(
    lite: Engine, client: Client, monkeypatch: pytest.MonkeyPatch
):
    client.create_topic("orders")
    publish(lite, *[bytes(1_000)] * 64)
    relay = Relay(lite, client, max_batch_messages=64)
    with monkeypatch.context() as slow:
        answering_in_time(slow, client, 20_000)
        relay.once()
    sent: list[int] = []
    relay._on_sent = lambda topic, messages: sent.append(messages)
    publish(lite, *[bytes(1_000)] * 2_000)
    relay.once()
    assert sent == sorted(sent[:-1]) + sent[-1:]
    assert sent[-2] == 64


def test_a_single_message_that_gets_no_answer_in_time_is_retried_after_a_pause(
    lite: Engine, client: Client, monkeypatch: pytest.MonkeyPatch
):
    client.create_topic("orders")
    publish(lite, bytes(1_000), bytes(1_000))
    answering_in_time(monkeypatch, client, 100)
    with pytest.raises(DeadlineExceeded, match="a request of 1 message, 1000 bytes"):
        Relay(lite, client).once()
    monkeypatch.undo()
    Relay(lite, client).once()
    assert len(read(client)) == 2


def test_attributes_count_as_bytes_of_a_request(db: Engine, client: Client):
    client.create_topic("orders")
    with Session(db) as session:
        for _ in range(4):
            Outbox(session).publish("orders", b"x", attributes={"a": "y" * 1_000})
        session.commit()
    relay = Relay(db, client, max_batch_bytes=2_100)
    assert (relay.once().messages, relay.relayed.requests) == (4, 2)


def test_waiting_messages_are_published_once_in_order_and_removed(db: Engine, client: Client):
    client.create_topic("orders")
    client.create_topic("audit")
    publish(db, b"1", b"2")
    publish(db, b"a", topic="audit")
    publish(db, b"3")
    relay = Relay(db, client, max_batch_messages=2)
    assert relay.once().messages == 4
    assert relay.once().requests == 3
    assert (read(client), read(client, "audit")) == ([b"1", b"2", b"3"], [b"a"])
    status = outbox_status(db)
    assert (status.waiting, status.is_relayed) == (0, False)
    assert [(each.topic, each.next_number, each.last_sent) for each in status.topics] == [
        ("audit", 1, 0),
        ("orders", 3, 2),
    ]
    publish(db, b"4")
    Relay(db, client).once()
    assert read(client) == [b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("arrives", [True, False])
def test_a_request_of_unknown_outcome_is_queried_and_its_messages_are_published_once(
    db: Engine, client: Client, arrives: bool, monkeypatch: pytest.MonkeyPatch
):
    client.create_topic("orders")
    publish(db, b"1", b"2")
    losing(monkeypatch, arrives=arrives)
    with pytest.raises(ConnectionLost):
        Relay(db, client).once()
    assert outbox_status(db).waiting == 2
    publish(db, b"3")
    done = Relay(db, client).once()
    assert done.messages == (1 if arrives else 3)
    assert read(client) == [b"1", b"2", b"3"]
    assert outbox_status(db).waiting == 0


def test_a_topic_that_cannot_continue_waits_and_the_others_continue(lite: Engine, client: Client):
    client.create_topic("orders")
    publish(lite, b"1", topic="later")
    publish(lite, b"2")
    relay = Relay(lite, client)
    with pytest.raises(TopicNotFound):
        relay.once()
    assert read(client) == [b"2"]
    assert [(each.topic, each.waiting) for each in outbox_status(lite).topics] == [("later", 1), ("orders", 0)]
    client.create_topic("later")
    relay.once()
    assert read(client, "later") == [b"1"]


def test_a_message_that_the_daemon_refuses_keeps_its_place_until_an_operator_decides(lite: Engine, client: Client):
    client.create_topic("orders")
    with Session(lite) as session:
        session.execute(insert(MESSAGES), [{"topic": "orders", "payload": bytes(9 << 20)}])
        session.commit()
    publish(lite, b"after")
    with pytest.raises(MessageTooLarge):
        Relay(lite, client).once()
    assert read(client) == []
    with lite.begin() as connection:
        connection.execute(MESSAGES.update().where(MESSAGES.c.id == 1).values(payload=b"smaller"))
    Relay(lite, client).once()
    assert read(client) == [b"smaller", b"after"]


def test_when_deduplication_is_off_nothing_is_published(lite: Engine, client: Client):
    client.create_topic("orders", deduplication="disabled")
    publish(lite, b"1")
    with pytest.raises(DeduplicationDisabled):
        Relay(lite, client).once()
    assert read(client) == []


def test_the_second_of_two_relays_says_that_it_waits_and_continues_when_the_first_has_ended(db: Engine, client: Client):
    client.create_topic("orders")
    told: list[str] = []
    first, second = Relay(db, client), Relay(db, client, on_failure=lambda _, error: told.append(error.code))
    with running(first):
        eventually("the first is at work", lambda: outbox_status(db).is_relayed)
        with pytest.raises(OutboxBusy):
            Relay(db, client).once()
        with pytest.raises(OutboxBusy):
            Relay(db, client).decide("orders", resend=True)
        with running(second):
            eventually("the second has reported it", lambda: told == ["outbox_busy"])
            publish(db, b"1")
            eventually("the first has published", lambda: read(client) == [b"1"])
            first.stop()
            publish(db, b"2")
            eventually("one of them has published", lambda: read(client) == [b"1", b"2"])
            publish(db, b"3")
            eventually("the second has published", lambda: read(client) == [b"1", b"2", b"3"])
            assert second.relayed.messages
    assert told == ["outbox_busy"]


def test_a_relay_that_waits_for_its_turn_can_be_stopped(lite: Engine, client: Client):
    with running(Relay(lite, client)):
        eventually("the first relay runs", lambda: outbox_status(lite).is_relayed)
        with running(Relay(lite, client)):
            pass


def test_a_relay_that_has_lost_its_turn_without_knowing_can_store_nothing(
    lite: Engine, client: Client, monkeypatch: pytest.MonkeyPatch
):
    client.create_topic("orders")
    publish(lite, b"1", b"2")
    late: list[Callable[[], None]] = []
    real = RelayProducer.publish

    def hold(producer: RelayProducer, messages: Any) -> None:
        late.append(lambda: real(producer, messages))
        raise ConnectionLost("under way for a long time")

    monkeypatch.setattr(RelayProducer, "publish", hold)
    with pytest.raises(ConnectionLost):
        Relay(lite, client, max_batch_messages=1).once()
    monkeypatch.undo()
    Relay(lite, client).once()
    with pytest.raises(ProducerFenced):
        late[0]()
    assert read(client) == [b"1", b"2"]


def test_run_continues_through_restarts_of_the_daemon(db: Engine, client: Client, daemon: Daemon):
    client.create_topic("orders")
    relay = Relay(db, client, pause_s=0.05)
    with running(relay):
        publish(db, b"1")
        eventually("it is published", lambda: read(client) == [b"1"])
        daemon.kill()
        daemon.end()
        publish(db, b"2")
        daemon.start()
        eventually("so is the next", lambda: read(client) == [b"1", b"2"])
    assert outbox_status(db).waiting == 0


def test_run_continues_through_restarts_of_the_database(engine: Engine, client: Client, server: Postgres):
    create_outbox(engine)
    client.create_topic("orders")
    told: list[tuple[str, str]] = []
    relay = Relay(engine, client, pause_s=0.05, on_failure=lambda topic, error: told.append((topic, error.code)))
    with running(relay):
        publish(engine, b"1")
        eventually("it is published", lambda: read(client) == [b"1"])
        server.kill()
        eventually("the failure is reported", lambda: ("", "outbox_unavailable") in told)
        server.start()
        # Use a separate engine: disposing of the relay's would drop a connection that the relay has just opened.
        fresh = create_engine(engine.url)
        publish(fresh, b"2")
        fresh.dispose()
        eventually("so is the next", lambda: read(client) == [b"1", b"2"])


def test_a_database_that_does_not_answer_is_distinguished_from_one_without_the_tables(client: Client, tmp_path: Path):
    gone = create_engine("postgresql+psycopg://nobody@127.0.0.1:1/none")
    for ask in (Relay(gone, client).once, lambda: outbox_status(gone)):
        with pytest.raises(OutboxUnavailable):
            ask()
    bare = create_engine(f"sqlite:///{tmp_path}/bare.db")
    for ask in (Relay(bare, client).once, Relay(bare, client).run, lambda: outbox_status(bare)):
        with pytest.raises(OutboxMissing):
            ask()
    bare.dispose()


def test_options_that_make_no_sense_are_refused(lite: Engine, client: Client):
    for options in ({"max_batch_messages": 0}, {"max_batch_bytes": 0}, {"keep_s": -1}, {"pause_s": 0}):
        with pytest.raises(InvalidParameter):
            Relay(lite, client, **options)  # type: ignore[arg-type] # one after the other
    for url in ("nonsense", "mysql://x@y/z", "sqlite:////no/such/file.db", "sqlite://"):
        with pytest.raises(OutboxUnusable):
            outbox_engine(url)


def test_times_to_live_and_attributes_are_published_with_the_messages(lite: Engine, client: Client):
    client.create_topic("orders")
    with Session(lite) as session:
        Outbox(session).publish("orders", b"1", ttl_s=3600, attributes={"a": "b"}, routing_key="k")
        Outbox(session).publish("orders", b"2")
        session.commit()
    Relay(lite, client).once()
    first, second = client.read("orders")
    assert dict(first.attributes) == {"a": "b", "routingKey": "k"}
    assert dict(second.attributes) == {}
    seen = client.admin.messages("orders")[0]
    assert seen.expires_ms - seen.publish_time_ms == 3_600_000


def test_kept_messages_are_counted_and_deleted_when_their_time_has_come(lite: Engine, client: Client):
    client.create_topic("orders")
    publish(lite, b"1", b"2")
    Relay(lite, client, keep_s=3600).once()
    (status,) = outbox_status(lite).topics
    assert (status.waiting, status.kept) == (0, 2)
    Relay(lite, client).once()
    (status,) = outbox_status(lite).topics
    assert (status.waiting, status.kept) == (0, 0)
    assert read(client) == [b"1", b"2"]


# --- outcomes that cannot be known, and some that can --------------------------------------------------


def test_the_daemon_still_reports_what_the_old_generation_of_a_recreated_topic_had(
    lite: Engine, client: Client, monkeypatch: pytest.MonkeyPatch
):
    client.create_topic("orders")
    publish(lite, b"1")
    losing(monkeypatch, arrives=True)
    with pytest.raises(ConnectionLost):
        Relay(lite, client).once()
    client.admin.delete_topic("orders")
    client.create_topic("orders")
    publish(lite, b"2")
    Relay(lite, client).once()
    assert read(client) == [b"2"]


@pytest.mark.parametrize("resend", [True, False])
def test_when_the_daemon_has_forgotten_the_producer_nothing_is_sent_until_an_operator_decides(
    lite: Engine, client: Client, resend: bool, monkeypatch: pytest.MonkeyPatch
):
    client.create_topic("orders")
    publish(lite, b"1")
    losing(monkeypatch, arrives=True)
    with pytest.raises(ConnectionLost):
        Relay(lite, client).once()
    (status,) = outbox_status(lite).topics
    assert status.producer is not None
    forget(client, "orders", status.producer)
    publish(lite, b"2")
    for _ in range(2):
        with pytest.raises(OutboxInDoubt, match="messages in flight: 1"):
            Relay(lite, client).once()
    assert Relay(lite, client).decide("orders", resend=resend) == 1
    Relay(lite, client).once()
    assert read(client) == ([b"1", b"1", b"2"] if resend else [b"1", b"2"])


def test_a_database_from_a_backup_publishes_nothing_until_an_operator_decides(client: Client, tmp_path: Path):
    client.create_topic("orders")
    path = tmp_path / "shop.db"
    engine = create_engine(f"sqlite:///{path}")
    create_outbox(engine)
    publish(engine, b"1")
    Relay(engine, client).once()
    engine.dispose()
    backup = path.read_bytes()
    publish(engine, b"2")
    Relay(engine, client).once()
    engine.dispose()
    path.write_bytes(backup)
    publish(engine, b"3")  # would get the number that 2 had, and pass for a duplicate
    with pytest.raises(OutboxInDoubt, match="backup"):
        Relay(engine, client).once()
    Relay(engine, client).decide("orders", resend=True)
    Relay(engine, client).once()
    assert read(client) == [b"1", b"2", b"3"]
    engine.dispose()


def forget(client: Client, topic: str, producer: str) -> None:
    """Remove a producer, as the daemon does once it has been idle for too long."""
    url = f"{client._channel.places.current}/v1/namespaces/{client.namespace}/topics/{topic}/producers/{producer}"
    import httpx

    assert httpx.delete(url).is_success


def test_failures_are_reported_once_for_each_reason(lite: Engine, client: Client):
    publish(lite, b"1")
    told: list[PlainsongError] = []
    relay = Relay(lite, client, pause_s=0.01, on_failure=lambda _, error: told.append(error))
    with running(relay):
        eventually("it has failed more than once", lambda: relay.relayed.failures > 1)
        client.create_topic("orders")
        eventually("it continued", lambda: read(client) == [b"1"])
    assert [error.code for error in told] == ["topic_not_found"]


@pytest.mark.parametrize("url", ["mysql://x@y/z", "oracle://x@y/z"])
def test_an_unsupported_database_is_named_and_no_driver_is_requested_for_it(url):
    with pytest.raises(OutboxUnusable, match="an outbox works on PostgreSQL and SQLite, not on") as refused:
        outbox_engine(url)
    assert "pip" not in refused.value.hint
    with pytest.raises(SqlUnusable, match="is not supported") as refused:
        _engine_of(url)
    assert "pip" not in refused.value.hint
