"""Rows and messages commit together: client, daemon and database killed at each step of a commit, and at any moment."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import Engine

from plainsong import Client
from plainsong.protocol.errors import TransactionNotInProgress
from plainsong.sql import recover
from tests.daemon.forked import Forked
from tests.daemon.harness import Daemon, eventually, free_port, start_python
from tests.patience import PATIENCE_S
from tests.sql.conftest import Base
from tests.sql.server import Postgres
from tests.sql.worker import POINTS

WORKER = Path(__file__).with_name("worker.py")
#: Imported before forking: each killed transaction needs another program, and these imports are half of its start.
IMPORTS = ("sqlalchemy.orm", "psycopg", "plainsong.sql", "plainsong._sync.transaction")
VICTIMS = ("client", "daemon", "database")
#: Steps after which the transaction is committed, whichever process dies.
DECIDED = ("committed", "finished")


class Harness:
    """A daemon and a database that are started again after a kill, and a program that uses both."""

    def __init__(self, home: Path, server: Postgres, database: str) -> None:
        self.server = server
        self.database = database
        self.engine: Engine = create_engine(database, pool_pre_ping=True)
        self.daemon = Daemon(home / "data", bind=f"127.0.0.1:{free_port()}").start()
        self.client = Client(f"http://{self.daemon.address[0]}:{self.daemon.address[1]}", namespace="sql")
        self.client.create_topic("orders")
        self._spare = self._spawn()

    def close(self) -> None:
        self._end(self._spare)
        self.client.close()
        self.engine.dispose()
        self.daemon.end()

    def _spawn(self) -> subprocess.Popen[bytes] | Forked:
        url = f"http://{self.daemon.address[0]}:{self.daemon.address[1]}"
        return start_python(WORKER, url, self.database, imports=IMPORTS, stdin=True)

    @contextmanager
    def worker(self, numbers: str, point: str = "-", victim: str = "-") -> Iterator[subprocess.Popen[bytes] | Forked]:
        """Run a program; when it dies, the next one is started at once, because a start takes a while."""
        self.server.check()
        self.server.forget()  # left by a failed test
        pids = {
            "client": "self",
            "daemon": str(self.daemon.pid),
            "database": ",".join(map(str, self.server.pids)),
            "-": "-",
        }
        worker = self._spare
        assert worker.stdin is not None
        worker.stdin.write(f"{numbers} {point} {pids[victim]}\n".encode())
        try:
            yield worker
        finally:
            if victim in ("client", "-"):
                self._spare = self._spawn()
                self._end(worker)

    def _end(self, worker: subprocess.Popen[bytes] | Forked) -> None:
        worker.kill()
        worker.wait(PATIENCE_S)
        for pipe in (worker.stdin, worker.stdout):
            assert pipe is not None
            pipe.close()
        assert worker.stderr is not None
        with worker.stderr as stderr:
            err = stderr.read().decode()
        assert "Traceback" not in err, err

    def kill(self, victim: str, worker: subprocess.Popen[bytes] | Forked) -> None:
        if victim == "client":
            worker.kill()
        elif victim == "daemon":
            self.daemon.kill()
        else:
            self.server.kill()

    def heal(self, victim: str) -> None:
        """Start the killed process again."""
        if victim == "daemon":
            self.daemon.end()
            self.daemon.start()
        elif victim == "database":
            self.server.restart()

    def abort_abandoned(self) -> None:
        """Abort the transactions of programs that have died, like an operator who does not wait for time-outs."""
        for each in self.client.transactions.list(state="in_progress"):
            with suppress(TransactionNotInProgress):  # the program's last request was still under way
                self.client.transactions.abort(each.id)

    def settled(self) -> tuple[list[int], list[int]]:
        """Return rows and messages, once recovery is complete."""
        eventually("everything is decided", self._is_decided)
        with self.engine.connect() as connection:
            rows = connection.execute(text("SELECT id FROM orders ORDER BY id")).scalars().all()
        messages = [int(message.payload) for message in self.client.read("orders", isolation="committed")]
        return list(rows), sorted(messages)

    def _is_decided(self) -> bool:
        recovery = recover(self.engine, self.client)
        assert not recovery.unsure
        undecided = self.client.transactions.list(state="in_progress")
        return not recovery.count("left") and not undecided


@pytest.fixture(scope="module")
def harness(server: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    database = server.emptied("crashes", Base.metadata)
    harness = Harness(tmp_path_factory.mktemp("crashes"), server, database)
    yield harness
    harness.close()


def said_so_far(pipe: IO[bytes]) -> list[bytes]:
    """Return the lines in the pipe, without waiting for more; a program writes each as a whole."""
    os.set_blocking(pipe.fileno(), False)
    said = pipe.read() or b""
    os.set_blocking(pipe.fileno(), True)
    return said.splitlines()


_numbers = iter(range(1, 1_000))


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("point", POINTS)
def test_rows_and_messages_are_both_present_or_both_absent_after_a_crash(harness: Harness, victim: str, point: str):
    number = next(_numbers)
    with harness.worker(str(number), point, victim) as worker:
        out = worker.stdout.readline().decode()  # type: ignore[union-attr] # it is a pipe
    harness.heal(victim)
    if victim == "client" and point in ("worked", "published"):  # at the other points it times out
        harness.abort_abandoned()
    rows, messages = harness.settled()
    assert rows == messages
    if point in DECIDED:
        assert number in rows
    if victim == "client" and point not in DECIDED:
        assert number not in rows
    if f"{number} committed" in out:
        assert number in rows


ROUNDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.torture) for seed in range(3, 60))]


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("seed", ROUNDS)
def test_rows_and_messages_are_the_same_after_a_crash_at_any_moment(harness: Harness, victim: str, seed: int):
    chance = random.Random(f"{victim} {seed}")
    first = 1_000 + 100_000 * (VICTIMS.index(victim) + 3 * seed)
    told = []
    with harness.worker(f"{first}-") as worker:
        assert worker.stdout is not None
        told.append(next(line for line in worker.stdout if b"committed" in line))  # it works
        time.sleep(chance.uniform(0.0, 0.1))  # at a random moment of the work
        harness.kill(victim, worker)
        harness.heal(victim)
        if victim != "client":
            # A daemon that dies may forget a transaction in which nothing was published, and only its program knows
            # then to roll back what it has prepared: kill the program in a transaction that began after that.
            told += said_so_far(worker.stdout)
            told.append(worker.stdout.readline())
            told.append(next(line for line in worker.stdout if b"committed" in line))  # it works again
            worker.kill()
        told += worker.stdout
    if seed:  # the first time they time out
        harness.abort_abandoned()
    rows, messages = harness.settled()
    assert rows == messages
    acknowledged = {int(line.split()[0]) for line in told if line.strip().endswith(b"committed")}
    assert acknowledged
    assert acknowledged <= set(rows)
