"""A session as a participant, step by step with a real PostgreSQL: visibility, and refusals."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.engine import Engine
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from plainsong import Transaction, TransactionAware
from plainsong.sql import SqlInDoubt, SqlMisused, SqlParticipant, SqlUnusable
from plainsong.sql.prepared import Gid, new_gid, parse_gid
from tests.sql.conftest import Order, begun
from tests.sql.server import Postgres

Look = Callable[[], tuple[list[int], list[str]]]


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with Session(engine) as session:
        yield session


@pytest.fixture
def participant(session: Session) -> SqlParticipant:
    return SqlParticipant(session)


def prepare(participant: SqlParticipant) -> None:
    assert participant.tx_changes() == ()
    assert participant.commit_tx() is True


# --- a transaction that commits, and one that does not -----------------------------------------------


def test_a_sql_participant_implements_the_protocol_of_participants(participant: SqlParticipant):
    assert isinstance(participant, TransactionAware)


def test_rows_are_visible_after_the_decision_and_not_before(session: Session, participant: SqlParticipant, look: Look):
    transaction = begun()
    participant.start_tx(transaction)
    session.add(Order(id=1))
    assert look() == ([], [])
    prepare(participant)
    rows, (gid,) = look()
    assert rows == []
    assert re.fullmatch(rf"plainsong:-:{transaction.id}:[0-9a-f]{{16}}", gid)
    participant.post_tx_commit()
    assert look() == ([1], [])


def test_a_session_is_free_after_the_transaction_and_can_be_used_for_the_next(
    session: Session, participant: SqlParticipant, look: Look, engine: Engine
):
    for number in (1, 2, 3):
        participant.start_tx(begun())
        session.add(Order(id=number))
        prepare(participant)
        participant.post_tx_commit()
        assert not session.in_transaction()
        assert not session.twophase
    session.add(Order(id=4))
    session.commit()
    assert look() == ([1, 2, 3, 4], [])
    session.close()
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("prepared", [False, True])
def test_rolled_back_rows_are_gone_and_the_session_forgets_them(
    session: Session, participant: SqlParticipant, look: Look, prepared: bool
):
    participant.start_tx(begun())
    order = Order(id=1)
    session.add(order)
    session.flush()
    if prepared:
        prepare(participant)
    assert participant.rollback_tx() is True
    assert look() == ([], [])
    assert order not in session
    assert not session.in_transaction()


def test_a_rollback_may_precede_any_work(session: Session, participant: SqlParticipant):
    participant.start_tx(begun())
    assert participant.rollback_tx() is True
    assert not session.in_transaction()


def test_a_checkpoint_flushes_and_the_transaction_of_the_session_continues(
    session: Session, participant: SqlParticipant, look: Look
):
    transaction = begun()
    participant.start_tx(transaction)
    session.add(Order(id=1))
    assert participant.commit_tx() is True
    assert look() == ([], [])
    participant.update_tx(Transaction(transaction.id, transaction.id + 1))
    session.get_one(Order, 1).state = "paid"
    session.add(Order(id=2))
    prepare(participant)
    participant.post_tx_commit()
    assert look() == ([1, 2], [])
    assert session.get_one(Order, 1).state == "paid"


def test_savepoints_are_free_inside_the_transaction(session: Session, participant: SqlParticipant, look: Look):
    participant.start_tx(begun())
    session.add(Order(id=1))
    with session.begin_nested():
        session.add(Order(id=2))
    with pytest.raises(IntegrityError), session.begin_nested():
        session.execute(text("INSERT INTO orders (id, state) VALUES (2, 'again')"))
    prepare(participant)
    participant.post_tx_commit()
    assert look() == ([1, 2], [])


def test_hooks_of_the_session_run_once_and_those_after_the_commit_after_the_decision(
    session: Session, participant: SqlParticipant, look: Look
):
    seen: list[object] = []
    event.listen(session, "before_commit", lambda session: session.add(Order(id=9)))
    event.listen(session, "after_commit", lambda session: seen.append(look()))
    participant.start_tx(begun())
    session.add(Order(id=1))
    prepare(participant)
    assert seen == []
    participant.post_tx_commit()
    assert seen == [([1, 9], [])]


def test_a_hook_that_fails_after_the_commit_does_not_change_it(
    session: Session, participant: SqlParticipant, look: Look, engine: Engine
):
    def fails(session: Session) -> None:
        raise ZeroDivisionError

    participant.start_tx(begun())
    session.add(Order(id=1))
    prepare(participant)
    event.listen(session, "after_commit", fails)
    with pytest.raises(ZeroDivisionError):
        participant.post_tx_commit()
    event.remove(session, "after_commit", fails)
    assert look() == ([1], [])
    session.close()
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    participant.start_tx(begun())
    assert participant.rollback_tx() is True


def test_a_constraint_that_fails_at_the_end_is_raised_unchanged(
    session: Session, participant: SqlParticipant, look: Look, engine: Engine
):
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE lines (orders int REFERENCES orders DEFERRABLE INITIALLY DEFERRED)"))
    participant.start_tx(begun())
    session.execute(text("INSERT INTO lines VALUES (17)"))
    participant.tx_changes()
    with pytest.raises(IntegrityError, match="lines_orders_fkey"):
        participant.commit_tx()
    assert participant.rollback_tx() is True
    participant.start_tx(begun())
    session.add(Order(id=1))
    prepare(participant)
    participant.post_tx_commit()
    assert look() == ([1], [])


def test_the_session_of_this_thread_takes_part_for_a_scoped_session(engine: Engine, look: Look):
    scoped = scoped_session(sessionmaker(engine))
    participant = SqlParticipant(scoped)
    participant.start_tx(begun())
    scoped.add(Order(id=1))
    prepare(participant)
    participant.post_tx_commit()
    scoped.remove()
    assert look() == ([1], [])


def test_options_of_the_connection_are_for_the_caller_to_choose(session: Session):
    participant = SqlParticipant(session, execution_options={"isolation_level": "SERIALIZABLE"})
    participant.start_tx(begun())
    assert session.execute(text("SHOW transaction_isolation")).scalar_one() == "serializable"
    participant.rollback_tx()
    assert session.execute(text("SHOW transaction_isolation")).scalar_one() == "read committed"


# --- while the decision is unknown -------------------------------------------------------------------


def test_closing_a_session_that_waits_for_a_decision_decides_nothing(
    session: Session, participant: SqlParticipant, look: Look, engine: Engine
):
    participant.start_tx(begun())
    session.add(Order(id=1))
    prepare(participant)
    session.close()
    rows, gids = look()
    assert (rows, len(gids)) == ([], 1)
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]


def test_committing_a_session_that_waits_for_a_decision_is_refused(
    session: Session, participant: SqlParticipant, look: Look
):
    participant.start_tx(begun())
    session.add(Order(id=1))
    prepare(participant)
    with pytest.raises(SqlMisused, match="is undecided"):
        session.commit()
    session.close()
    rows, gids = look()
    assert (rows, len(gids)) == ([], 1)


def test_a_session_left_in_doubt_can_begin_another_transaction(
    session: Session, participant: SqlParticipant, look: Look
):
    participant.start_tx(begun())
    session.add(Order(id=1))
    prepare(participant)
    session.close()
    participant.start_tx(begun())
    session.add(Order(id=2))
    prepare(participant)
    participant.post_tx_commit()
    rows, gids = look()
    assert (rows, len(gids)) == ([2], 1)


# --- the database dies -------------------------------------------------------------------------------


def test_rows_of_a_committed_transaction_survive_a_kill_and_restart_of_the_database(
    session: Session, participant: SqlParticipant, look: Look, server: Postgres
):
    participant.start_tx(begun())
    session.add(Order(id=1))
    prepare(participant)
    server.restart()
    participant.post_tx_commit()
    assert look() == ([1], [])


def test_a_database_that_stays_unavailable_is_reported_and_keeps_the_rows_of_a_committed_transaction(
    session: Session, participant: SqlParticipant, look: Look, server: Postgres
):
    participant.start_tx(begun())
    session.add(Order(id=1))
    prepare(participant)
    server.kill()
    with pytest.raises(SqlInDoubt, match="plainsong:-:") as caught:
        participant.post_tx_commit()
    assert caught.value.outcome == "applied"
    assert "recover" in caught.value.hint
    server.start()
    rows, gids = look()
    assert (rows, len(gids)) == ([], 1)


def test_a_rollback_finds_prepared_transactions_of_a_killed_database(
    session: Session, participant: SqlParticipant, look: Look, server: Postgres
):
    participant.start_tx(begun())
    session.add(Order(id=1))
    prepare(participant)
    server.restart()
    assert participant.rollback_tx() is True
    assert look() == ([], [])


def test_a_rollback_that_cannot_reach_the_database_returns_false(
    session: Session, participant: SqlParticipant, server: Postgres, look: Look
):
    participant.start_tx(begun())
    session.add(Order(id=1))
    prepare(participant)
    server.kill()
    assert participant.rollback_tx() is False
    server.start()
    assert len(look()[1]) == 1


def test_a_database_killed_while_the_session_worked_leaves_nothing(
    session: Session, participant: SqlParticipant, server: Postgres, look: Look
):
    participant.start_tx(begun())
    session.add(Order(id=1))
    session.flush()
    server.restart()
    participant.tx_changes()
    with pytest.raises(OperationalError):
        participant.commit_tx()
    assert participant.rollback_tx() is True
    assert look() == ([], [])


# --- refusals ----------------------------------------------------------------------------------------


def test_a_session_already_in_a_transaction_is_refused(session: Session, participant: SqlParticipant):
    session.execute(text("SELECT 1"))
    with pytest.raises(SqlUnusable, match="already in a transaction") as caught:
        participant.start_tx(begun())
    assert "inside its block" in caught.value.hint
    session.rollback()
    participant.start_tx(begun())
    participant.rollback_tx()


def test_committing_inside_the_transaction_is_refused(session: Session, participant: SqlParticipant, look: Look):
    participant.start_tx(begun())
    session.add(Order(id=1))
    with pytest.raises(SqlMisused, match="committed inside"):
        session.commit()
    assert participant.rollback_tx() is True
    assert look() == ([], [])


@pytest.mark.parametrize("leave", [Session.rollback, Session.close])
def test_rolled_back_work_inside_the_transaction_does_not_commit_without_it(
    session: Session, participant: SqlParticipant, look: Look, leave: Callable[[Session], None]
):
    participant.start_tx(begun())
    session.add(Order(id=1))
    session.flush()
    leave(session)
    session.add(Order(id=2))
    participant.tx_changes()
    with pytest.raises(SqlMisused, match="rolled back or closed"):
        participant.commit_tx()
    assert participant.rollback_tx() is True
    assert look() == ([], [])


def test_sqlite_is_refused_with_an_explanation():
    engine = create_engine("sqlite://")
    with Session(engine) as session, pytest.raises(SqlUnusable, match="sqlite has no two-phase commit") as caught:
        SqlParticipant(session).start_tx(begun())
    assert "PostgreSQL" in caught.value.hint
    engine.dispose()


def test_anything_but_a_session_is_refused():
    with pytest.raises(SqlUnusable, match="object is not a session"):
        SqlParticipant(object()).start_tx(begun())  # type: ignore[arg-type]


def test_a_session_of_a_connection_is_refused(engine: Engine):
    with (
        engine.connect() as connection,
        Session(connection) as session,
        pytest.raises(SqlUnusable, match="bound to a connection"),
    ):
        SqlParticipant(session).start_tx(begun())


def test_a_second_database_in_one_session_is_refused(engine: Engine, server: Postgres, look: Look):
    other = create_engine(server.url())
    with Session(engine, binds={Order: other}) as session:
        participant = SqlParticipant(session, engine=engine)
        participant.start_tx(begun())
        with pytest.raises(SqlMisused, match="second database"):
            session.get(Order, 1)
        participant.tx_changes()
        with pytest.raises(SqlMisused, match="second database"):
            participant.commit_tx()
        assert participant.rollback_tx() is True
    other.dispose()
    assert look() == ([], [])


def test_a_server_without_prepared_transactions_is_reported_with_the_setting_to_change(server: Postgres, database: str):
    engine = create_engine(database)
    with server.without_prepared(), Session(engine) as session:
        with pytest.raises(SqlUnusable, match="max_prepared_transactions") as caught:
            SqlParticipant(session).start_tx(begun())
        assert "ALTER SYSTEM SET max_prepared_transactions" in caught.value.hint
    engine.dispose()


# --- names -------------------------------------------------------------------------------------------


def test_names_of_prepared_transactions_round_trip():
    gid = new_gid("a1b2", 1_700_000_000_000_000_000)
    assert parse_gid(str(gid)) == gid
    assert new_gid("", 1).service == "-"
    assert len(str(new_gid("x" * 64, (1 << 63) - 1))) < 200  # PostgreSQL's limit


@pytest.mark.parametrize(
    "text",
    ["", "plainsong:-:0:0123456789abcdef", "_sa_0123", "plainsong:-:1:x';DROP", "plainsong:-:1:0123456789abcdeF"],
)
def test_names_of_others_are_not_recognised_as_ours(text: str):
    assert parse_gid(text) is None


def test_a_name_that_is_unsafe_in_quotes_is_not_made():
    with pytest.raises(ValueError, match="invalid name"):
        new_gid("it's", 1)
    assert isinstance(new_gid("s", 1), Gid)


@pytest.mark.parametrize("told", [True, False])
def test_a_session_is_free_when_a_later_participant_could_not_start(
    session: Session, participant: SqlParticipant, look: Look, *, told: bool
):
    participant.start_tx(begun())
    if told:
        participant.abandon_tx()
        assert not session.in_transaction()
        assert not session.twophase
    participant.start_tx(begun())
    session.add(Order(id=1))
    prepare(participant)
    participant.post_tx_commit()
    assert look() == ([1], [])
