"""The PostgreSQL server of the tests: a failure is reported once, with the server's log, and affects no later test."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import psycopg
import pytest

from tests.daemon.harness import eventually
from tests.sql.server import Postgres, ServerEnded


@pytest.fixture
def running(server: Postgres) -> Iterator[Postgres]:
    server.check()
    yield server
    server.check()


def end(server: Postgres, number: int) -> None:
    """End the server from outside, without its harness."""
    os.kill(server.pids[0], number)
    eventually("it has ended", lambda: not server.runs)


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGTERM, "received smart shutdown request"), (signal.SIGKILL, "ended by itself with -9")],
)
def test_a_server_that_ended_by_itself_is_reported_once_with_its_log_and_started_again(
    running: Postgres, number: int, reason: str
):
    end(running, number)
    with pytest.raises(ServerEnded, match=reason):
        running.check()
    assert running.runs
    running.check()


def test_a_start_that_fails_shows_the_log_and_the_next_one_succeeds(running: Postgres, database: str):
    with psycopg.connect(database.replace("+psycopg", ""), autocommit=True) as connection:
        for statement in ("BEGIN", "INSERT INTO orders VALUES (1, 'new')", "PREPARE TRANSACTION 'left'"):
            connection.execute(statement)
    running.stop()
    with pytest.raises(ServerEnded, match="maximum number of prepared transactions"):
        running.start(max_prepared=0)
    assert not running.runs
    running.start()
    with running.without_prepared():  # rolls back prepared transactions, which would prevent that start
        pass


def test_a_killed_server_starts_again_while_another_process_has_its_pid(running: Postgres):
    end(running, signal.SIGKILL)
    lock = running.home / "data/postmaster.pid"
    _, *others = lock.read_text().splitlines(keepends=True)
    with subprocess.Popen(["sleep", "1000"], **running.identity) as other:
        lock.write_text("".join([f"{other.pid}\n", *others]))
        running.start()
        other.kill()
