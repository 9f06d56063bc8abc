"""Fixtures of the SQL tests: one PostgreSQL server, a database for each test, and a table of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import Engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from plainsong import Transaction
from tests.sql.server import NoServer, Postgres

_transactions = count(1_700_000_000_000_000_000, 1_000_000)


class Base(DeclarativeBase):
    """The tables of the tests."""


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(default="new")


@pytest.fixture(scope="session")
def server() -> Iterator[Postgres]:
    """A PostgreSQL server; tests that kill it start it again."""
    try:
        server = Postgres()
    except NoServer as error:
        pytest.skip(f"NOT TESTED, rows and messages in one transaction: {error}")
    try:
        yield server.start()
    finally:
        server.remove()


@pytest.fixture
def database(server: Postgres) -> Iterator[str]:
    """The URL of a database with empty tables and no prepared transactions.

    A server that ended by itself fails one test, but not the following ones.
    """
    server.check()
    yield server.emptied("tests", Base.metadata)
    server.check()
    server.forget()


@pytest.fixture
def engine(database: str) -> Iterator[Engine]:
    engine = create_engine(database)
    yield engine
    engine.dispose()


@pytest.fixture
def look(database: str) -> Iterator[Callable[[], tuple[list[int], list[str]]]]:
    """Return a function that reads committed ids and the names of prepared transactions on another connection."""
    engine = create_engine(database, pool_pre_ping=True)

    def looked() -> tuple[list[int], list[str]]:
        with engine.connect() as connection:
            rows = connection.execute(text("SELECT id FROM orders ORDER BY id")).scalars().all()
            query = text("SELECT gid FROM pg_prepared_xacts WHERE database = current_database() ORDER BY prepared")
            return list(rows), list(connection.execute(query).scalars())

    yield looked
    engine.dispose()


def begun() -> Transaction:
    """Return a transaction as the service would begin it, with a unique id."""
    number = next(_transactions)
    return Transaction(number, number)
