"""The outbox in a session: its messages are committed with its rows, in commit order, on PostgreSQL and SQLite."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, delete, event, select, text
from sqlalchemy.engine import Engine
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from plainsong import JSON, Outgoing
from plainsong.errors import NotEncodable
from plainsong.protocol.errors import InvalidName, InvalidParameter, MessageTooLarge, NoMessages, TransactionTooLarge
from plainsong.sql import (
    Outbox,
    OutboxMissing,
    OutboxUnusable,
    SqlMisused,
    SqlParticipant,
    SqlUnusable,
    create_outbox,
    outbox_tables,
)
from plainsong.sql import outbox as outbox_module
from plainsong.sql.prepared import check_allowed
from tests.sql.conftest import Base, Order, begun
from tests.sql.server import Postgres

MESSAGES, TOPICS = outbox_tables()


@pytest.fixture(params=["postgresql", "sqlite"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """An engine for a database with the table of orders, and an outbox."""
    if request.param == "postgresql":
        engine: Engine = create_engine(request.getfixturevalue("database"))
    else:
        engine = create_engine(f"sqlite:///{tmp_path}/shop.db")
        Base.metadata.create_all(engine)
    create_outbox(engine)
    yield engine
    engine.dispose()


def waiting(engine: Engine) -> list[tuple[str, bytes]]:
    """Return topics and payloads by id, as another connection sees them."""
    with engine.connect() as connection:
        rows = connection.execute(select(MESSAGES).order_by(MESSAGES.c.id)).all()
        return [(row.topic, bytes(row.payload)) for row in rows]


def payloads(engine: Engine) -> list[bytes]:
    return [payload for _, payload in waiting(engine)]


def test_rows_and_messages_are_committed_together(db: Engine):
    with Session(db) as session:
        session.add(Order(id=17))
        Outbox(session).publish("orders", b"17")
        Outbox(session).publish("audit", [b"a", b"b"])
        assert waiting(db) == []
        session.commit()
    assert waiting(db) == [("orders", b"17"), ("audit", b"a"), ("audit", b"b")]


def test_messages_that_the_session_rolls_back_are_never_published(db: Engine):
    with Session(db) as session:
        outbox = Outbox(session)
        outbox.publish("orders", b"1")
        session.rollback()
        session.add(Order(id=1))
        session.commit()
        outbox.publish("orders", b"2")
        session.close()
        outbox.publish("orders", b"3")
        session.commit()
    with Session(db) as session, session.begin() as transaction:
        Outbox(session).publish("orders", b"4")
        transaction.rollback()
    assert payloads(db) == [b"3"]


def test_a_refused_row_rolls_back_its_messages(db: Engine):
    with Session(db) as session:
        session.add(Order(id=1))
        session.commit()
        session.expunge_all()
        session.add(Order(id=1))
        Outbox(session).publish("orders", b"1")
        with pytest.raises(IntegrityError):
            session.commit()
        session.rollback()
        session.commit()
    assert payloads(db) == []


def test_messages_of_a_rolled_back_savepoint_are_never_published_and_the_rest_is(db: Engine):
    with Session(db) as session, session.begin():
        outbox = Outbox(session)
        outbox.publish("orders", b"1")
        with session.begin_nested() as outer:
            outbox.publish("orders", b"2")
            with session.begin_nested():
                outbox.publish("orders", b"3")
            outer.rollback()
        with session.begin_nested():
            outbox.publish("orders", b"4")
            with session.begin_nested() as inner:
                outbox.publish("orders", b"5")
                inner.rollback()
        outbox.publish("orders", b"6")
    assert payloads(db) == [b"1", b"4", b"6"]


def test_a_commit_over_open_savepoints_commits_their_messages(db: Engine):
    with Session(db) as session:
        Outbox(session).publish("orders", b"1")
        session.begin_nested()
        Outbox(session).publish("orders", b"2")
        session.commit()
    assert payloads(db) == [b"1", b"2"]


def test_a_block_that_ends_with_an_open_savepoint_is_refused_and_commits_nothing(db: Engine):
    with Session(db) as session:
        transaction = session.begin()
        session.add(Order(id=1))
        Outbox(session).publish("orders", b"1")
        session.begin_nested()
        with pytest.raises(SqlMisused, match="savepoint open"):
            transaction.commit()  # like the end of ``with session.begin():``
        session.rollback()
    assert payloads(db) == []
    with Session(db) as session:
        assert session.get(Order, 1) is None


def test_messages_published_by_listeners_as_rows_are_written_are_part_of_the_same_commit(db: Engine):
    with Session(db) as session:
        outbox = Outbox(session)

        def tell(session: Session, *_: object) -> None:
            outbox.publish("orders", [b"%d" % row.id for row in session.new])

        event.listen(session, "before_flush", tell)
        # A listener after the outbox's: its row is flushed after the messages have been written.
        event.listen(session, "before_commit", lambda session: session.add(Order(id=2)))
        session.add(Order(id=1))
        session.commit()
    assert payloads(db) == [b"1", b"2"]


def test_ids_are_assigned_as_the_session_commits(db: Engine):
    with Session(db) as early:
        Outbox(early).publish("orders", b"early")
        with Session(db) as late:
            Outbox(late).publish("orders", b"late")
            late.commit()
        early.commit()
    assert payloads(db) == [b"late", b"early"]


def test_an_id_is_never_used_again(db: Engine):
    seen = []
    with Session(db) as session:
        for _ in range(3):
            Outbox(session).publish("orders", b"1")
            session.commit()
            seen.append(session.scalar(select(MESSAGES.c.id)))
            session.execute(delete(MESSAGES))
            session.commit()
    assert seen == sorted(set(seen))


def test_values_are_serialized_and_messages_have_their_own_times_to_live_and_attributes(db: Engine):
    with Session(db) as session:
        outbox = Outbox(session, serializer=JSON)
        outbox.publish("orders", [{"id": 1}, Outgoing({"id": 2}, ttl_s=5)], ttl_s=60)
        outbox.publish("orders", b"3", serializer=bytes, routing_key="é")
        session.commit()
        rows = session.execute(select(MESSAGES).order_by(MESSAGES.c.id)).all()
    assert [(bytes(row.payload), row.ttl_s) for row in rows] == [(b'{"id":1}', 60), (b'{"id":2}', 5), (b"3", None)]
    assert [row.attributes and json.loads(row.attributes) for row in rows] == [None, None, {"routingKey": "é"}]


def test_an_unpublishable_message_is_refused_at_once_and_the_rest_continues(db: Engine):
    with Session(db) as session:
        outbox = Outbox(session, max_message_bytes=3)
        outbox.publish("orders", b"123")
        for error, topic, messages, ttl_s in (
            (InvalidName, "no/name", b"1", None),
            (NoMessages, "orders", [], None),
            (NotEncodable, "orders", "text", None),
            (MessageTooLarge, "orders", [b"1", b"1234"], None),
            (InvalidParameter, "orders", b"1", 0),
        ):
            with pytest.raises(error):
                outbox.publish(topic, messages, ttl_s=ttl_s)
        with pytest.raises(InvalidParameter, match="attributes"):
            outbox.publish("orders", b"1", attributes={"key": "x" * 4094})
        session.commit()
    assert payloads(db) == [b"123"]


def test_the_bytes_of_a_transaction_are_bounded(db: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outbox_module, "MAX_TRANSACTION_BYTES", 10)
    with Session(db) as session:
        outbox = Outbox(session)
        outbox.publish("orders", b"123456")
        with pytest.raises(TransactionTooLarge):
            outbox.publish("orders", b"12345")
        with session.begin_nested() as savepoint:
            outbox.publish("orders", b"1234")
            savepoint.rollback()
        outbox.publish("orders", b"7890")
        session.commit()
        outbox.publish("orders", b"1234567890")
        session.commit()
    assert payloads(db) == [b"123456", b"7890", b"1234567890"]


def test_without_its_tables_the_commit_names_the_function_that_creates_them_and_commits_nothing(tmp_path: Path):
    engine = create_engine(f"sqlite:///{tmp_path}/bare.db")
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add(Order(id=1))
        Outbox(session).publish("orders", b"1")
        with pytest.raises(OutboxMissing, match="plainsong_outbox") as caught:
            session.commit()
        assert "create_outbox" in caught.value.hint
        session.rollback()
        assert session.get(Order, 1) is None
    engine.dispose()


def test_creating_the_tables_twice_is_harmless_and_they_may_have_another_name(db: Engine):
    create_outbox(db)
    other = create_outbox(db, "letters")
    with Session(db) as session:
        Outbox(session, tables=other).publish("orders", b"1")
        Outbox(session).publish("orders", b"2")
        session.commit()
        assert session.scalars(select(other.messages.c.payload)).all() == [b"1"]
    assert payloads(db) == [b"2"]


def test_a_scoped_session_and_one_with_several_engines_have_outboxes(db: Engine):
    scoped = scoped_session(sessionmaker(db))
    Outbox(scoped).publish("orders", b"1")
    scoped.commit()
    scoped.remove()
    with Session(binds={Order: db}) as session:
        Outbox(session, engine=db).publish("orders", b"2")
        session.commit()
    assert payloads(db) == [b"1", b"2"]


def test_anything_but_a_session_is_refused():
    with pytest.raises(OutboxUnusable, match="not a session"):
        Outbox(create_engine("sqlite://"))  # type: ignore[arg-type] # that is the mistake
    with (
        Session(create_engine("sqlite://"), autobegin=False) as session,
        pytest.raises(OutboxUnusable, match="not in a transaction"),
    ):
        Outbox(session).publish("orders", b"1")


def test_a_two_phase_session_writes_its_messages_when_it_is_prepared(engine: Engine):
    create_outbox(engine)
    with Session(engine) as session:
        participant = SqlParticipant(session)
        participant.start_tx(begun())
        session.add(Order(id=1))
        Outbox(session).publish("orders", b"1")
        assert participant.commit_tx()
        participant.tx_changes()
        assert participant.commit_tx()
        assert payloads(engine) == []
        participant.post_tx_commit()
    assert payloads(engine) == [b"1"]


def test_a_database_without_prepared_transactions_is_pointed_to_the_outbox(
    server: Postgres, database: str, tmp_path: Path
):
    lite = create_engine(f"sqlite:///{tmp_path}/shop.db")
    with Session(lite) as session, pytest.raises(SqlUnusable) as caught:
        SqlParticipant(session).start_tx(begun())
    assert "plainsong.sql.Outbox" in caught.value.hint
    lite.dispose()
    engine = create_engine(database)
    with server.without_prepared():
        with pytest.raises(SqlUnusable) as caught:
            check_allowed(engine)
        assert "plainsong.sql.Outbox" in caught.value.hint
        create_outbox(engine)
        with Session(engine) as session:
            session.add(Order(id=1))
            Outbox(session).publish("orders", b"1")
            session.execute(text("SELECT 1"))
            session.commit()
        assert payloads(engine) == [b"1"]
    engine.dispose()
