"""Rows and messages in one transaction with a real daemon, recovery, and readers whose position is a row."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.engine import Engine
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from plainsong import AsyncClient, Client, Transaction
from plainsong.cli.main import program, run
from plainsong.errors import CommittedWithErrors, TransactionFailed
from plainsong.protocol.errors import PositionChanged, TopicNotFound, TransactionConflict
from plainsong.sql import SqlInDoubt, SqlParticipant, SqlPosition, SqlUnavailable, SqlUnusable, recover
from tests.daemon.harness import Daemon
from tests.sql.conftest import Order
from tests.sql.server import Postgres

Look = Callable[[], tuple[list[int], list[str]]]
_namespaces = count()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("together") / "data") as daemon:
        yield daemon


def url_of(daemon: Daemon) -> str:
    return f"http://{daemon.address[0]}:{daemon.address[1]}"


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(url_of(daemon), namespace=f"together_{next(_namespaces)}") as client:
        client.create_topic("orders")
        yield client


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with Session(engine) as session:
        yield session


def payloads(client: Client, topic: str = "orders") -> list[bytes]:
    return [message.payload for message in client.read(topic, isolation="committed", direct=True)]


def together(
    client: Client, session: Session, number: int, *more: Any, topic: str = "orders", fails: bool = False
) -> None:
    """Write a row and a message in one transaction; ``more`` takes part before the session."""
    with client.transaction([*more, SqlParticipant(session)]) as tx:
        session.add(Order(id=number))
        tx.publish(topic, b"%d" % number)
        if fails:
            session.flush()
            raise ZeroDivisionError


def prepared(client: Client, session: Session, number: int) -> Transaction:
    """Return a transaction that stopped just before the decision, when its program died."""
    transaction = client.transactions.begin()
    participant = SqlParticipant(session)
    participant.start_tx(transaction)
    session.add(Order(id=number))
    participant.tx_changes()
    assert participant.commit_tx()
    session.close()
    return transaction


# --- blocks ------------------------------------------------------------------------------------------


def test_a_block_makes_both_visible_at_its_end(client: Client, session: Session, look: Look):
    with client.transaction([SqlParticipant(session)]) as tx:
        session.add(Order(id=1))
        tx.publish("orders", b"1")
        session.flush()
        assert (look()[0], payloads(client)) == ([], [])
    assert (look(), payloads(client)) == (([1], []), [b"1"])


def test_an_exception_in_the_block_leaves_neither_rows_nor_messages(client: Client, session: Session, look: Look):
    with pytest.raises(ZeroDivisionError):
        together(client, session, 1, fails=True)
    assert (look(), payloads(client)) == (([], []), [])
    assert not session.in_transaction()


def test_a_refused_row_rolls_back_the_messages(client: Client, session: Session, look: Look):
    together(client, session, 1)
    session.expunge_all()
    with pytest.raises(TransactionFailed, match="orders_pkey") as caught:
        together(client, session, 1)
    assert isinstance(caught.value.__cause__, IntegrityError)
    assert (look(), payloads(client)) == (([1], []), [b"1"])


def test_refused_messages_roll_back_the_rows(client: Client, session: Session, look: Look):
    with pytest.raises(TopicNotFound, match="nowhere"):
        together(client, session, 1, topic="nowhere")
    assert look() == ([], [])


def test_a_transaction_with_many_messages_and_a_checkpoint_is_atomic(client: Client, session: Session, look: Look):
    with client.transaction([SqlParticipant(session)], buffer_messages=10) as tx:
        for number in range(100):
            session.add(Order(id=number))
            tx.publish("orders", b"%d" % number)
            if number == 50:
                tx.checkpoint()
    assert look() == (list(range(100)), [])
    assert payloads(client) == [b"%d" % number for number in range(100)]


def test_two_databases_and_messages_are_one_transaction(client: Client, session: Session, server: Postgres, look: Look):
    other = create_engine(server.emptied("others", Order.metadata))
    with Session(other) as second:
        with client.transaction([SqlParticipant(session), SqlParticipant(second)]) as tx:
            session.add(Order(id=1))
            second.add(Order(id=2))
            tx.publish("orders", b"12")
        assert (look()[0], [each.id for each in second.query(Order)], payloads(client)) == ([1], [2], [b"12"])
        second.rollback()
        before = SqlParticipant(second)
        second.add(Order(id=2))  # a duplicate id
        with pytest.raises(SqlUnusable, match="already in a transaction"):
            together(client, session, 3, before)
        second.rollback()
        with pytest.raises(ZeroDivisionError):
            together(client, session, 3, before, fails=True)
        assert (look(), [each.id for each in second.query(Order)]) == (([1], []), [2])
    other.dispose()


def test_a_database_that_dies_after_the_decision_is_reported_as_committed(
    client: Client, session: Session, server: Postgres, engine: Engine, look: Look
):
    class Kills:
        name = "kills"

        def start_tx(self, transaction: Transaction) -> None: ...
        def update_tx(self, transaction: Transaction) -> None: ...
        def tx_changes(self) -> list[bytes]:
            return []

        def commit_tx(self) -> bool:
            return True

        def post_tx_commit(self) -> None:
            server.kill()

        def rollback_tx(self) -> bool:
            return True

    with pytest.raises(CommittedWithErrors) as caught:
        together(client, session, 1, Kills())
    assert isinstance(caught.value.__cause__, SqlInDoubt)
    server.start()
    assert (look()[0], payloads(client)) == ([], [b"1"])
    assert recover(engine, client).count("committed") == 1
    assert look() == ([1], [])


async def test_a_session_takes_part_in_transactions_of_an_async_client(
    client: Client, daemon: Daemon, session: Session, look: Look
):
    client.publish("orders", b"1")
    async with AsyncClient(url_of(daemon), namespace=client.namespace) as asynchronous:
        for _ in range(2):
            async with asynchronous.transaction([SqlParticipant(session)]) as tx:
                position = SqlPosition(session, "billing", create=True)
                async for message in tx.read("orders", limit=1, position=position):
                    session.add(Order(id=int(message.payload)))
                    await tx.publish("orders", b"2")
    assert (look(), payloads(client)) == (([1, 2], []), [b"1", b"2", b"2"])


# --- recovery ----------------------------------------------------------------------------------------


def test_recovery_applies_decisions_of_the_daemon_and_leaves_transactions_in_progress(
    client: Client, session: Session, engine: Engine, look: Look
):
    committed, aborted, invalid, open_ = (prepared(client, session, number) for number in (1, 2, 3, 4))
    client.transactions.commit(committed)
    client.transactions.abort(aborted)
    client.transactions.invalidate(invalid)
    done = {each.transaction_id: (each.state, each.action) for each in recover(engine, client).found}
    assert done == {
        committed.id: ("committed", "committed"),
        aborted.id: ("aborted", "rolled_back"),
        invalid.id: ("invalid", "rolled_back"),
        open_.id: ("in_progress", "left"),
    }
    rows, gids = look()
    assert rows == [1]
    assert [str(open_.id) in gid for gid in gids] == [True]
    client.transactions.commit(open_)
    recovery = recover(engine, client)
    assert (recovery.count("committed"), recovery.unsure) == (1, ())
    assert look() == ([1, 4], [])
    assert recover(engine, client).found == ()


def test_transactions_unknown_to_the_daemon_are_left_and_reported_loudly(
    client: Client, session: Session, engine: Engine, look: Look, caplog: pytest.LogCaptureFixture
):
    participant = SqlParticipant(session)
    participant.start_tx(Transaction(17, 17))
    session.add(Order(id=1))
    participant.tx_changes()
    participant.commit_tx()
    session.close()
    with caplog.at_level(logging.ERROR, "plainsong.sql"):
        (found,) = recover(engine, client).unsure
    assert (found.state, found.action, found.transaction_id) == ("unknown", "left", 17)
    assert f"COMMIT PREPARED '{found.gid}' or ROLLBACK PREPARED '{found.gid}'" in found.advice
    assert found.gid in caplog.text
    assert len(look()[1]) == 1


def test_another_service_with_the_same_id_is_not_trusted(client: Client, session: Session, engine: Engine, look: Look):
    transaction = client.transactions.begin()
    participant = SqlParticipant(session)
    participant.start_tx(replace(transaction, service="4711"))
    session.add(Order(id=1))
    participant.tx_changes()
    participant.commit_tx()
    session.close()
    client.transactions.commit(transaction)
    (found,) = recover(engine, client).unsure
    assert (found.state, found.action) == ("unknown", "left")
    assert "ask the daemon that decided it" in found.advice
    assert f"plainsong:4711:{transaction.id}:" in look()[1][0]


def test_concurrent_recoveries_do_each_thing_once(client: Client, session: Session, engine: Engine, look: Look):
    for number in range(8):
        client.transactions.commit(prepared(client, session, number))
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(recover(engine, client).count("committed"))) for _ in "123"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(found) == 8
    assert look() == (list(range(8)), [])


def test_an_active_client_and_a_recovery_do_not_disturb_each_other(
    client: Client, session: Session, engine: Engine, look: Look
):
    ended = threading.Event()

    def recovers() -> None:
        while not ended.is_set():
            assert not recover(engine, client).unsure

    thread = threading.Thread(target=recovers)
    thread.start()
    try:
        for number in range(40):
            together(client, session, number)
    finally:
        ended.set()
        thread.join()
    assert look() == (list(range(40)), [])
    assert len(payloads(client)) == 40


def test_a_participant_can_recover_before_the_first_transaction(
    client: Client, session: Session, database: str, look: Look
):
    client.transactions.commit(prepared(client, session, 1))
    engine = create_engine(database)  # as in a new process
    with Session(engine) as later, client.transaction([SqlParticipant(later, recover_with=client)]):
        later.add(Order(id=2))
    engine.dispose()
    assert look() == ([1, 2], [])


def test_recovery_accepts_urls_and_says_what_is_wrong_with_one(client: Client, session: Session, database: str):
    client.transactions.commit(prepared(client, session, 1))
    plain = database.replace("postgresql+psycopg://", "postgresql://")
    assert recover(plain, client).count("committed") == 1
    with pytest.raises(SqlUnavailable, match="cannot query the database"):
        recover(plain.rpartition("/")[0] + "/no_such_database", client)
    for wrong in ("nonsense", "sqlite://", "nosuch://host/base"):
        with pytest.raises(SqlUnusable):
            recover(wrong, client)


# --- readers -----------------------------------------------------------------------------------------


def book(client: Client, session: Session, fails_at: bytes = b"") -> None:
    """Write a row for each message, together with the position."""
    with client.read("orders", position=SqlPosition(session, "billing", create=True)) as messages:
        for message in messages:
            session.add(Order(id=int(message.payload)))
            if message.payload == fails_at:
                raise ZeroDivisionError
            messages.save()
            session.commit()


def test_effects_and_position_of_a_plain_session_are_committed_together(
    client: Client, session: Session, engine: Engine, look: Look
):
    client.publish("orders", [b"1", b"2", b"3"])
    with pytest.raises(ZeroDivisionError):
        book(client, session, fails_at=b"3")
    session.rollback()
    assert look()[0] == [1, 2]
    book(client, session)
    assert look()[0] == [1, 2, 3]


def test_a_transaction_that_is_tried_again_reads_the_same_messages_again(client: Client, session: Session, look: Look):
    client.create_topic("paid")
    client.publish("orders", [b"1", b"2"])
    seen = []

    def bill(tx: object) -> None:
        read = [message.payload for message in client.read("orders", position=SqlPosition(session, "b", create=True))]
        seen.append(read)
        for payload in read:
            session.add(Order(id=int(payload)))
            client.publish("paid", payload)
        if len(seen) == 1:
            raise TransactionConflict("somebody else")

    client.run_in_transaction(bill, participants=[SqlParticipant(session)])
    client.run_in_transaction(bill, participants=[SqlParticipant(session)])
    assert seen == [[b"1", b"2"], [b"1", b"2"], []]
    assert (look(), payloads(client, "paid")) == (([1, 2], []), [b"1", b"2"])


def test_of_two_programs_that_read_under_one_name_only_one_has_the_effects(
    client: Client, session: Session, engine: Engine, look: Look
):
    client.publish("orders", [b"1"])
    with Session(engine) as other:
        mine = client.read("orders", position=SqlPosition(session, "billing", create=True))
        theirs = client.read("orders", position=SqlPosition(other, "billing"))
        for messages, of in ((mine, session), (theirs, other)):
            of.add(Order(id=int(next(messages).payload)))
        mine.save()
        session.commit()
        with pytest.raises(PositionChanged):
            theirs.save()
        other.rollback()
        with pytest.raises(PositionChanged):
            theirs.close()
    assert look()[0] == [1]


# --- the command line, and the package without the extra ---------------------------------------------


def test_the_command_recovers_and_says_what_it_did(
    client: Client,
    session: Session,
    daemon: Daemon,
    database: str,
    look: Look,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setenv("PLAINSONG_URL", url_of(daemon))
    done = prepared(client, session, 1)
    client.transactions.commit(done)
    assert run(program, ["tx", "recover", "--database", database], "plainsong") == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == [str(done.id), "committed", "committed"]
    assert look() == ([1], [])
    participant = SqlParticipant(session)
    participant.start_tx(Transaction(17, 17))
    session.add(Order(id=2))
    participant.tx_changes()
    participant.commit_tx()
    session.close()
    assert run(program, ["tx", "recover", "--database", database], "plainsong") == 1
    said = capsys.readouterr()
    assert "ROLLBACK PREPARED 'plainsong:-:17:" in said.out
    assert "error: 1 prepared transaction is undecided" in said.err
    assert run(program, ["tx", "recover", "--database", database, "--json"], "plainsong") == 1
    assert '"action":"left"' in capsys.readouterr().out


def test_the_command_reports_a_missing_database(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PLAINSONG_URL", url_of(daemon))
    assert run(program, ["tx", "recover", "--database", "postgresql://nobody@127.0.0.1:1/none"], "plainsong") == 5
    assert "cannot query the database" in capsys.readouterr().err


def test_without_the_extra_it_says_what_to_install():
    code = (
        "import sys; sys.modules['sqlalchemy'] = None\n"
        "try:\n import plainsong.sql\nexcept ModuleNotFoundError as error:\n print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "plainsong.sql needs the package sqlalchemy: pip install 'plainsong-client[sql]'"


def test_an_outbox_on_sqlite_needs_no_psycopg_and_a_url_says_which_package_it_lacks(tmp_path):
    code = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from plainsong import errors, sql\n"
        "engine = sql.outbox_engine(sys.argv[1], create=True)\n"
        "sql.create_outbox(engine)\n"
        "for url in ('postgresql://u@h/db', 'postgresql+asyncpg://u@h/db'):\n"
        "    try:\n        sql.outbox_engine(url)\n"
        "    except errors.PlainsongError as error:\n        print(error)\n"
    )
    command = [sys.executable, "-c", code, f"sqlite:///{tmp_path / 'shop.db'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "this database needs the package psycopg, which is not installed (hint: pip install 'plainsong-client[sql]')",
        "this database needs the package asyncpg, which is not installed (hint: pip install asyncpg)",
    ]
