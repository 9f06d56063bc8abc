"""Numbers in the outbox: without gaps, in commit order, and assigned however late a commit becomes visible."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, event, insert, select, text
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.orm import Session

from plainsong.sql import Outbox, OutboxInDoubt, OutboxUnusable, create_outbox, outbox_tables
from plainsong.sql.relay import RelayLock
from plainsong.sql.relay_rows import (
    SWEEP_ROWS,
    Numbered,
    OpenedProducer,
    RelayRows,
    Standing,
    check_doubt,
    check_remembered,
)
from tests.daemon.harness import eventually
from tests.patience import PATIENCE_S
from tests.sql.conftest import Order

TABLES = outbox_tables()
MESSAGES, TOPICS = TABLES


@pytest.fixture(params=["postgresql", "sqlite"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """An engine for a database with an outbox; on SQLite without the table of orders."""
    url = request.getfixturevalue("database") if request.param == "postgresql" else f"sqlite:///{tmp_path}/shop.db"
    engine = create_engine(url, connect_args={"timeout": PATIENCE_S} if request.param == "sqlite" else {})
    create_outbox(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def relay(db: Engine) -> Iterator[Connection]:
    with db.connect() as connection:
        yield connection


def publish(engine: Engine, *payloads: bytes, topic: str = "orders") -> None:
    with Session(engine) as session:
        Outbox(session).publish(topic, list(payloads))
        session.commit()


def begun_at(relay: Connection, topic: str = "orders", *, generation: int = 1) -> RelayRows:
    """Return rows in which the topic has a standing, as after the first opening."""
    rows = RelayRows(TABLES)
    rows.standing(relay, topic, "default")
    rows.reconcile(relay, topic, OpenedProducer(1, generation, -1), None)
    return rows


def taken(rows: RelayRows, relay: Connection, most: int = 100, most_bytes: int = 1 << 20) -> list[tuple[int, bytes]]:
    return [(each.number, each.payload) for each in rows.take(relay, "orders", most, most_bytes)]


def left(engine: Engine) -> list[bytes]:
    with engine.connect() as connection:
        return [bytes(each) for each in connection.scalars(select(MESSAGES.c.payload).order_by(MESSAGES.c.id))]


def test_committed_messages_get_numbers_from_0_without_gaps(db: Engine, relay: Connection):
    with Session(db) as session:
        Outbox(session).publish("orders", b"never")
        session.flush()
        session.execute(insert(MESSAGES), [{"topic": "orders", "payload": b"undone"}])
        session.rollback()
    publish(db, b"a", b"b")
    publish(db, b"elsewhere", topic="other")
    publish(db, b"c")
    rows = begun_at(relay)
    assert taken(rows, relay) == [(0, b"a"), (1, b"b"), (2, b"c")]
    rows.sent(relay, "orders", 2, keep=False)
    publish(db, b"d")
    assert taken(rows, relay) == [(3, b"d")]


def test_a_message_whose_transaction_commits_late_is_not_skipped(engine: Engine):
    """PostgreSQL only: SQLite has one writer at a time."""
    create_outbox(engine)
    with engine.connect() as relay, engine.connect() as slow:
        rows = begun_at(relay)
        slow.execute(insert(MESSAGES), [{"topic": "orders", "payload": b"slow"}])  # the smaller id
        publish(engine, b"quick")
        assert taken(rows, relay) == [(0, b"quick")]
        rows.sent(relay, "orders", 0, keep=False)
        assert taken(rows, relay) == []
        slow.commit()
        assert taken(rows, relay) == [(1, b"slow")]


def test_messages_are_in_the_order_of_commits_whatever_began_or_published_first(engine: Engine):
    create_outbox(engine)
    with engine.connect() as relay:
        rows = begun_at(relay)
        with Session(engine) as first, Session(engine) as second:
            second.add(Order(id=2))
            second.flush()
            Outbox(second).publish("orders", b"second")
            first.add(Order(id=1))
            Outbox(first).publish("orders", b"first")
            first.commit()
            second.commit()
        assert taken(rows, relay) == [(0, b"first"), (1, b"second")]


def test_a_batch_is_bounded_in_messages_and_bytes_and_has_at_least_one_message(db: Engine, relay: Connection):
    publish(db, b"1234", b"567", b"89", b"large large", b"0")
    rows = begun_at(relay)
    batches = []
    while batch := taken(rows, relay, most=3, most_bytes=7):
        batches.append([payload for _, payload in batch])
        rows.sent(relay, "orders", batch[-1][0], keep=False)
    assert batches == [[b"1234", b"567"], [b"89"], [b"large large"], [b"0"]]


def test_messages_not_known_to_be_sent_are_repeated_with_the_same_number(db: Engine, relay: Connection):
    publish(db, b"a", b"b")
    rows = begun_at(relay)
    assert taken(rows, relay) == taken(rows, relay) == [(0, b"a"), (1, b"b")]
    publish(db, b"c")
    assert taken(rows, relay) == [(0, b"a"), (1, b"b")]  # no new messages before these are finished


def test_a_relay_that_dies_between_its_statements_leaves_nothing_half_done(db: Engine):
    publish(db, b"a", b"b", b"c")
    with db.connect() as relay:
        begun_at(relay)
    for statement in range(20):

        def dies(_: object, cursor: object, *__: object, budget: list[int] = [statement]) -> None:  # noqa: B006
            if not budget[0]:
                raise ConnectionError("as if it had been killed here")
            budget[0] -= 1

        event.listen(db, "before_cursor_execute", dies)
        try:
            with db.connect() as relay:
                rows = RelayRows(TABLES)
                assert taken(rows, relay) == [(0, b"a"), (1, b"b"), (2, b"c")]
                rows.sent(relay, "orders", 2, keep=False)
            break
        except ConnectionError:
            pass
        finally:
            event.remove(db, "before_cursor_execute", dies)
    assert statement > 5
    assert left(db) == []
    publish(db, b"d")
    with db.connect() as relay:
        assert taken(RelayRows(TABLES), relay) == [(3, b"d")]


@pytest.mark.parametrize("seed", range(3))
def test_no_message_is_skipped_or_numbered_twice_with_many_writers(db: Engine, seed: int):
    """Writers pause between drawing an id and committing, and roll back some transactions, while two relays run."""
    writers, commits = (4, 25) if db.dialect.name == "postgresql" else (3, 8)  # SQLite's writers wait for each other
    is_over, committed = threading.Event(), [0] * writers

    def write(writer: int) -> None:
        chance = random.Random(f"{seed} {writer}")
        with Session(db) as session:
            for number in range(commits):
                messages = [b"%d %d %d" % (writer, number, part) for part in range(chance.randint(1, 3))]
                Outbox(session).publish("orders", messages)
                session.connection()
                if chance.random() < 0.2:
                    session.flush()
                    session.execute(insert(MESSAGES), [{"topic": "orders", "payload": b"undone"}])
                    session.rollback()
                    continue
                session.commit()
                committed[writer] += len(messages)

    given: dict[int, bytes] = {}
    orders: list[list[int]] = []

    def relay() -> None:
        own: list[int] = []
        orders.append(own)
        with db.connect() as connection:
            rows = RelayRows(TABLES)
            while True:
                last_look = is_over.is_set()
                batch = rows.take(connection, "orders", 7, 1 << 20) if rows.topics_that_wait(connection) else []
                for each in batch:
                    assert given.setdefault(each.number, each.payload) == each.payload
                    own.append(each.number)
                if batch:
                    rows.sent(connection, "orders", batch[-1].number, keep=False)
                elif last_look:
                    return

    with db.connect() as connection:
        begun_at(connection)
    failures: list[BaseException] = []

    def told(work: object, *arguments: object) -> None:
        try:
            work(*arguments)  # type: ignore[operator] # it is one of the two above
        except BaseException as error:
            failures.append(error)
            raise

    relays = [threading.Thread(target=told, args=(relay,)) for _ in range(2)]
    threads = [threading.Thread(target=told, args=(write, writer)) for writer in range(writers)]
    for thread in (*relays, *threads):
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    is_over.set()
    for thread in relays:
        thread.join(PATIENCE_S)
    assert not failures
    assert sorted(given) == list(range(sum(committed)))
    assert len(set(given.values())) == len(given)
    assert b"undone" not in given.values()
    assert all(own == sorted(own) for own in orders)
    by_writer = defaultdict(list)
    for number in sorted(given):
        writer, *place = map(int, given[number].split())
        by_writer[writer].append(place)
    assert all(places == sorted(places) for places in by_writer.values())
    assert left(db) == []


def test_two_relays_that_number_at_the_same_moment_wait_for_each_other(engine: Engine):
    create_outbox(engine)
    publish(engine, b"a")
    with engine.connect() as first, engine.connect() as second:
        begun_at(first)
        first.execute(text("UPDATE plainsong_outbox_topics SET topic = topic"))  # lock the row, as the numbering does
        second.execute(text("SET lock_timeout = 1"))
        second.commit()
        with pytest.raises(Exception, match="lock timeout"):
            RelayRows(TABLES).take(second, "orders", 10, 100)
        first.commit()
        assert taken(RelayRows(TABLES), second) == [(0, b"a")]


def test_sent_messages_are_kept_for_the_configured_time(db: Engine, relay: Connection):
    publish(db, *(b"%d" % number for number in range(SWEEP_ROWS + 1)))
    rows = begun_at(relay)
    batch = rows.take(relay, "orders", 5_000, 1 << 20)
    assert batch[-1].number == SWEEP_ROWS
    rows.sent(relay, "orders", SWEEP_ROWS, keep=True)
    assert rows.topics_that_wait(relay) == []
    assert len(left(db)) == SWEEP_ROWS + 1
    assert rows.sweep(relay, keep_s=3600) == 0
    assert rows.sweep(relay, keep_s=-1) == SWEEP_ROWS
    assert rows.sweep(relay, keep_s=-1) == 1
    assert left(db) == []


def test_topics_with_waiting_messages_are_listed_and_idle_ones_are_not(db: Engine, relay: Connection):
    rows = RelayRows(TABLES)
    assert rows.topics_that_wait(relay) == []
    for topic in ("b", "a", "c", "b"):
        publish(db, b"1", topic=topic)
    assert rows.topics_that_wait(relay) == ["a", "b", "c"]
    assert rows.topics_that_wait(relay, {"b": None}) == ["a", "c"]


def test_an_outbox_does_not_change_its_namespace(relay: Connection):
    rows = RelayRows(TABLES)
    assert rows.standing(relay, "orders", "shop") == rows.standing(relay, "orders", "shop")
    with pytest.raises(OutboxUnusable, match="namespace shop"):
        rows.standing(relay, "orders", "default")


# --- the daemon's answers to repeated requests --------------------------------------------------------


def test_messages_that_the_daemon_has_are_finished_and_others_are_sent(db: Engine, relay: Connection):
    publish(db, b"a", b"b", b"c")
    rows = begun_at(relay)
    assert len(taken(rows, relay)) == 3
    rows.reconcile(relay, "orders", OpenedProducer(2, 1, 1), None)
    assert taken(rows, relay) == [(2, b"c")]
    rows.reconcile(relay, "orders", OpenedProducer(3, 1, 2), None)
    assert taken(rows, relay) == []


STANDING = Standing("default", "outbox-1", epoch=4, generation=1, next_number=10, last_sent=6)


@pytest.mark.parametrize(
    ("opened", "before", "in_flight", "match"),
    [
        (OpenedProducer(5, 1, 6), None, 3, None),  # none of the messages has arrived
        (OpenedProducer(5, 1, 8), None, 3, None),
        (OpenedProducer(5, 1, 9), None, 3, None),
        (OpenedProducer(5, 1, 10), None, 3, "from a backup"),
        (OpenedProducer(5, 1, 10), None, 0, "from a backup"),
        (OpenedProducer(1, 1, -1), None, 3, "no longer knows all"),
        (OpenedProducer(1, 1, -1), None, 0, None),
        (OpenedProducer(5, 1, 5), None, 3, "no longer knows all"),  # the daemon was restored from a backup
        (OpenedProducer(1, 2, -1), None, 3, "created again"),
        (OpenedProducer(1, 2, -1), None, 0, None),
        (OpenedProducer(1, 2, -1), 7, 3, None),  # the daemon still has the old generation's producer
        (OpenedProducer(1, 2, -1), 10, 0, "from a backup"),
    ],
)
def test_messages_in_flight_count_as_arrived_only_if_that_can_be_known(
    opened: OpenedProducer, before: int | None, in_flight: int, match: str | None
):
    if match is None:
        check_doubt("orders", STANDING, opened, before, in_flight)
    else:
        with pytest.raises(OutboxInDoubt, match=match) as caught:
            check_doubt("orders", STANDING, opened, before, in_flight)
        assert caught.value.topic == "orders"
        assert "plainsong outbox decide" in caught.value.hint


def test_a_producer_that_the_daemon_has_forgotten_leaves_messages_in_flight_in_doubt():
    check_remembered("orders", STANDING, 8, 3)
    check_remembered("orders", STANDING, None, 0)
    check_remembered("orders", STANDING._replace(generation=None), None, 3)
    with pytest.raises(OutboxInDoubt, match="has forgotten"):
        check_remembered("orders", STANDING, None, 3)


def test_a_recreated_topic_gets_the_messages_that_the_old_one_lacked(db: Engine, relay: Connection):
    publish(db, b"a", b"b", b"c")
    rows = begun_at(relay, generation=1)
    taken(rows, relay)
    rows.reconcile(relay, "orders", OpenedProducer(1, 2, -1), 0)
    assert taken(rows, relay) == [(1, b"b"), (2, b"c")]
    rows.reconcile(relay, "orders", OpenedProducer(2, 2, 1), None)
    assert taken(rows, relay) == [(2, b"c")]


@pytest.mark.parametrize("resend", [True, False])
def test_an_operator_decides_about_messages_in_doubt(db: Engine, relay: Connection, resend: bool):
    publish(db, b"a", b"b")
    rows = begun_at(relay)
    producer = rows.standing(relay, "orders", "default").producer
    taken(rows, relay)
    publish(db, b"c")
    with pytest.raises(OutboxInDoubt, match="messages in flight: 2"):
        rows.reconcile(relay, "orders", OpenedProducer(1, 1, -1), None)
    assert rows.decide(relay, "orders", resend=resend) == 2
    standing = rows.standing(relay, "orders", "default")
    assert standing.producer != producer
    rows.reconcile(relay, "orders", OpenedProducer(1, 1, -1), None)
    assert taken(rows, relay) == ([(2, b"a"), (3, b"b"), (4, b"c")] if resend else [(2, b"c")])


# --- one relay at a time ------------------------------------------------------------------------------


def test_the_lock_has_one_holder_and_ends_with_its_connection(db: Engine):
    first, second = RelayLock(db, "plainsong_outbox"), RelayLock(db, "plainsong_outbox")
    with db.connect() as one, db.connect() as other:
        assert not second.is_held(other)
        assert first.take(one)
        assert second.is_held(other)
        assert not second.take(other)
        letters = RelayLock(db, "letters")
        assert letters.take(other)
        letters.release(other)
        first.release(one)
        assert second.take(other)
        assert not first.take(one)
        if db.dialect.name == "postgresql":
            other.invalidate()
        else:
            second.release(other)
        eventually("the server has noticed", lambda: first.take(one))
        first.release(one)


def test_a_database_in_memory_belongs_to_one_process_and_needs_no_lock():
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        lock = RelayLock(engine, "plainsong_outbox")
        assert lock.take(connection)
        lock.release(connection)
    engine.dispose()


def test_numbered_messages_have_their_time_to_live_and_attributes(db: Engine, relay: Connection):
    with Session(db) as session:
        Outbox(session).publish("orders", b"1", ttl_s=9, attributes={"a": "b"})
        session.commit()
    assert begun_at(relay).take(relay, "orders", 10, 100) == [Numbered(0, b"1", 9, '{"a": "b"}')]
