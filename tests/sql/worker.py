"""A program that writes rows and messages in transactions, and kills processes at a given step.

    worker.py DAEMON_URL DATABASE_URL

It reads lines ``NUMBERS POINT VICTIM``: NUMBERS is ``17`` or ``100-`` (until it is killed), POINT is one of ``POINTS``
or ``-``, and VICTIM is the pids to kill, separated by commas, ``self`` or ``-``. It prints the outcome of each
transaction: ``17 committed``, or the error's name.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from typing import Any

from sqlalchemy import create_engine, text
from sqlalchemy.engine import Engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from plainsong import Client, PlainsongError
from plainsong._sync.transaction import TransactionContext
from plainsong.sql import SqlParticipant

#: The steps of a transaction. From each to the next, the state of the database or the daemon changes.
POINTS = ("begun", "worked", "prepared", "published", "committed", "finished")
#: Short, since undecided transactions must time out; long enough for a stalled machine to reach the step.
TIMEOUT_S = 8
DEADLINE_S = 5


class Knife:
    """A participant that kills when one of its steps is called."""

    name = "knife"

    def __init__(self, at_commit: str, after_commit: str) -> None:
        self._at_commit = at_commit
        self._after_commit = after_commit

    def start_tx(self, transaction: object) -> None:
        pass

    update_tx = start_tx

    def tx_changes(self) -> tuple[bytes, ...]:
        return ()

    def commit_tx(self) -> bool:
        strike(self._at_commit)
        return True

    def post_tx_commit(self) -> None:
        strike(self._after_commit)

    def rollback_tx(self) -> bool:
        return True


class Order:
    """The current command."""

    point = "-"
    victims: tuple[int, ...] = ()


def strike(point: str) -> None:
    """Kill the victims if this is their step."""
    if point == Order.point:
        Order.point = "-"
        for pid in Order.victims:
            with suppress(ProcessLookupError):  # a database's processes end by themselves when the first has died
                os.kill(pid, signal.SIGKILL)


def striking_before_the_decision(committed: Any) -> Any:
    def strikes_first(*arguments: Any) -> Any:
        strike("published")
        return committed(*arguments)

    return strikes_first


def work(client: Client, session: Session, number: int) -> None:
    before, after = Knife("worked", "committed"), Knife("prepared", "finished")
    with client.transaction([before, SqlParticipant(session), after], timeout_s=TIMEOUT_S) as tx:
        strike("begun")
        session.execute(text("INSERT INTO orders (id, state) VALUES (:id, 'new')"), {"id": number})
        tx.publish("orders", b"%d" % number)


def work_through(client: Client, engine: Engine, numbers: Iterable[int]) -> None:
    for number in numbers:
        try:
            with Session(engine) as session:
                work(client, session, number)
            print(number, "committed", flush=True)
        except (PlainsongError, OperationalError) as error:
            print(number, type(error).__name__, flush=True)


def main(daemon: str, database: str) -> None:
    TransactionContext._committed = striking_before_the_decision(TransactionContext._committed)
    engine = create_engine(database, connect_args={"connect_timeout": 2}, pool_pre_ping=True)
    with Client(daemon, namespace="sql", deadline_s=DEADLINE_S) as client:
        for line in sys.stdin:
            numbers, Order.point, victims = line.split()
            own = (os.getpid(),) if victims == "self" else ()
            Order.victims = own or tuple(int(pid) for pid in victims.split(",") if pid.isdigit())
            first = int(numbers.rstrip("-"))
            work_through(client, engine, count(first) if numbers.endswith("-") else [first])
    engine.dispose()


if __name__ == "__main__":
    main(*sys.argv[1:])
