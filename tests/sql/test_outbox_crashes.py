"""Each message once, in commit order, although writer, relay, daemon and database are killed at any moment."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from plainsong import Client
from plainsong.sql import create_outbox, outbox_status
from tests.daemon.forked import Forked
from tests.daemon.harness import PLAINSONG, Daemon, eventually, free_port, start_python
from tests.patience import PATIENCE_S
from tests.sql.conftest import Base
from tests.sql.server import Postgres

WRITER = Path(__file__).with_name("outbox_writer.py")
#: Imported before forking: programs are killed and restarted constantly, and these imports are half of a start's work.
IMPORTS = ("sqlalchemy.orm", "psycopg", "plainsong.sql", "plainsong.cli.main")


class Writer(NamedTuple):
    process: subprocess.Popen[bytes] | Forked
    said: Path
    """The file for its output, since an unread pipe would block it."""


class Harness:
    """Writers, a database, relays and a daemon; each is restarted after a kill."""

    def __init__(self, home: Path, server: Postgres | None, database: str) -> None:
        self.home = home
        self.server = server
        self.database = database
        options = {} if server is not None else {"timeout": 30}
        self.engine = create_engine(database, poolclass=NullPool, connect_args=options)
        Base.metadata.create_all(self.engine)
        create_outbox(self.engine)
        self.daemon = Daemon(home / "data", bind=f"127.0.0.1:{free_port()}").start()
        self.url = f"http://{self.daemon.address[0]}:{self.daemon.address[1]}"
        self.client = Client(self.url, namespace="sql")
        self.client.create_topic("orders")
        self.times: dict[int, tuple[int, int]] = {}
        self._first = 0
        self.writers: list[Writer] = []
        self.relays = [self._relay(), self._relay()]

    def close(self) -> None:
        for relay in self.relays:
            relay.kill()
            relay.wait()
        for writer in self.writers:  # an interrupted test has not ended its own
            writer.process.kill()
            writer.process.wait()
        self.client.close()
        self.daemon.end()

    def _spawn(self, *words: str | Path, said: str | Path = os.devnull) -> subprocess.Popen[bytes] | Forked:
        with open(said, "wb") as out, open(os.devnull, "wb") as silent:
            return start_python(*words, imports=IMPORTS, stdout=out.fileno(), stderr=silent.fileno())

    def _relay(self) -> subprocess.Popen[bytes] | Forked:
        at = ("--database", self.database, "--url", self.url, "-n", "sql")
        return self._spawn(PLAINSONG, "outbox", "run", *at)

    def writer(self) -> Writer:
        """Start a writer, and wait until it has committed a transaction."""
        if self.server is not None:
            self.server.check()
        self._first += 1_000_000
        said = self.home / f"writer{self._first}"
        writer = Writer(self._spawn(WRITER, self.database, str(self._first), said=said), said)
        self.writers.append(writer)
        eventually("it has committed", lambda: b"\n" in said.read_bytes())
        return writer

    def kill(self, victim: str, writer: Writer) -> None:
        """Kill the victim; if it is a relay, the other relay continues."""
        if victim == "writer":
            writer.process.kill()
        elif victim == "relay":
            self.relays[0].kill()
            self.relays[0].wait()
            self.relays = [self.relays[1], self._relay()]
        elif victim == "daemon":
            self.daemon.kill()
            self.daemon.end()
            self.daemon.start()
        else:
            assert self.server is not None
            self.server.restart()

    def end(self, writer: Writer) -> None:
        """Kill a writer, and read all its output."""
        self.writers.remove(writer)
        writer.process.kill()
        writer.process.wait()
        for line in writer.said.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                number, called, returned = map(int, line.split())
                self.times[number] = (called, returned)

    def settled(self) -> tuple[set[int], list[list[int]]]:
        """Return the ids of rows, and all messages in the topic's order, once the outbox is empty."""
        deadline_s = time.monotonic() + PATIENCE_S
        while outbox_status(self.engine).waiting:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        with self.engine.connect() as connection:
            rows = set(connection.execute(text("SELECT id FROM orders")).scalars())
        return rows, [list(map(int, message.payload.split())) for message in self.client.read("orders")]


@pytest.fixture(scope="module", params=["postgresql", "sqlite"])
def harness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    home = tmp_path_factory.mktemp("outbox")
    if request.param == "postgresql":
        server: Postgres = request.getfixturevalue("server")
        harness = Harness(home, server, server.emptied("outbox", Base.metadata))
    else:
        harness = Harness(home, None, f"sqlite:///{home}/shop.db")
    yield harness
    harness.close()


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.torture) for seed in range(1, 40))]


@pytest.mark.parametrize("victim", ["writer", "relay", "daemon", "database"])
@pytest.mark.parametrize("seed", SEEDS)
def test_each_message_of_a_committed_row_is_published_once_in_the_order_of_commits(
    harness: Harness, victim: str, seed: int
):
    if victim == "database" and harness.server is None:
        pytest.skip("SQLite has no process of its own: it dies with the writer and with the relay")
    chance = random.Random(f"{victim} {seed}")
    writers = [harness.writer(), harness.writer()]
    for _ in range(2):
        time.sleep(chance.uniform(0.0, 0.2))  # at a random moment of the work
        harness.kill(victim, writers[0])
        if victim == "writer":
            harness.end(writers[0])
            writers[0] = harness.writer()
    for writer in writers:
        harness.end(writer)
    rows, messages = harness.settled()
    assert len(set(map(tuple, messages))) == len(messages)
    assert {number for number, _ in messages} == rows
    assert harness.times.keys() <= rows
    check_order(harness, messages)


def check_order(harness: Harness, messages: list[list[int]]) -> None:
    """Check that a transaction that committed before another's commit was called comes first; messages keep order."""
    latest_call = 0
    for number, _ in messages:
        if number in harness.times:
            called, returned = harness.times[number]
            assert returned > latest_call, f"{number} had been committed before a message that precedes it"
            latest_call = max(latest_call, called)
    last_part: dict[int, int] = {}
    for number, part in messages:
        assert last_part.get(number, -1) < part
        last_part[number] = part


def test_both_relays_end_on_request(harness: Harness):
    for relay in harness.relays:
        # A relay that has just been started may not have installed its handler yet.
        eventually("the relay handles SIGTERM", lambda relay=relay: catches(relay.pid, signal.SIGTERM))
        relay.terminate()
    assert [relay.wait(PATIENCE_S) for relay in harness.relays] == [0, 0]
    eventually("no relay is running", lambda: not outbox_status(harness.engine).is_relayed)


def catches(pid: int, number: int) -> bool:
    """True if the process has a handler for the signal (proc(5))."""
    (mask,) = re.findall(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)
