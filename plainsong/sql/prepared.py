"""Transactions prepared in PostgreSQL: their names, finishing them, and recovery of those that a crash left.

A name says which service decides the transaction, by which id, and which participant prepared it:

    plainsong:SERVICE:ID:TAG

SERVICE names the transaction service (``-`` when it has no name), ID is the transaction's id there, and TAG is random
for each participant, so that no name is used twice. All parts are safe inside quotes.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from sqlalchemy import create_engine, text
from sqlalchemy.engine import Engine, make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from plainsong.sql.errors import SqlUnavailable, SqlUnusable, first_line, without_driver

if TYPE_CHECKING:
    from plainsong import Client
    from plainsong.transactions import TransactionState, TransactionStatus

#: The prefix of all names.
PREFIX = "plainsong:"
#: Used for a service without a name.
NAMELESS = "-"
_GID = re.compile(r"plainsong:(?P<service>[A-Za-z0-9_.-]{1,64}):(?P<id>[1-9][0-9]{0,18}):(?P<tag>[0-9a-f]{16})")


class Gid(NamedTuple):
    """The name of a prepared transaction; ``str`` gives its form in the database."""

    service: str
    transaction_id: int
    tag: str

    def __str__(self) -> str:
        return f"{PREFIX}{self.service}:{self.transaction_id}:{self.tag}"


def new_gid(service: str, transaction_id: int) -> Gid:
    """Makes a unique name. Raises ValueError for a service or an id that cannot be part of one."""
    gid = Gid(service or NAMELESS, transaction_id, secrets.token_hex(8))
    if parse_gid(str(gid)) is None:
        raise ValueError(f"invalid name of a prepared transaction: {gid}")
    return gid


def parse_gid(text: str) -> Gid | None:
    """Parses a name; None for one that is not ours."""
    found = _GID.fullmatch(text)
    return None if found is None else Gid(found["service"], int(found["id"]), found["tag"])


# --- two-phase commit in PostgreSQL ----------------------------------------------------------------


#: SQLSTATEs. Source: PostgreSQL's manual, appendix A.
UNDEFINED_OBJECT = "42704"
BUSY = "55000"
FORBIDDEN = "42501"
#: How often, and how long, to wait for another connection that is finishing the same transaction.
BUSY_ATTEMPTS = 50
BUSY_PAUSE_S = 0.02
_LIST = text(
    "SELECT gid, owner, extract(epoch FROM now() - prepared) AS age_s FROM pg_prepared_xacts"
    " WHERE database = current_database() AND starts_with(gid, :prefix) ORDER BY prepared, gid"
)


@dataclass(frozen=True, slots=True)
class PreparedTransaction:
    """One of our prepared transactions, still open in the database."""

    gid: Gid
    owner: str
    age_s: float
    """Seconds since it was prepared, by the database's clock."""


def check_backend(name: str) -> None:
    """Raises SqlUnusable unless this is the dialect of PostgreSQL."""
    if name != "postgresql":
        why = "has no two-phase commit" if name == "sqlite" else "is not supported"
        detail = f"{name} {why}, without which rows and messages cannot become visible together"
        fits = "use plainsong.sql.Outbox here, or " if name == "sqlite" else "use "
        hint = f"{fits}PostgreSQL; SqlPosition alone works with any database"
        raise SqlUnusable(detail, hint=hint)


def check_kind(engine: Engine) -> None:
    """Raises SqlUnusable unless the engine is one of PostgreSQL through psycopg 3."""
    check_backend(engine.dialect.name)
    if engine.dialect.driver != "psycopg":
        hint = "create_engine('postgresql+psycopg://…'), of the package psycopg"
        raise SqlUnusable(f"the engine's driver is {engine.dialect.driver}", hint=hint)


def check_allowed(engine: Engine) -> None:
    """Raises SqlUnusable when the server has no prepared transactions, which is PostgreSQL's default."""
    with engine.connect() as connection:
        allowed = connection.exec_driver_sql("SHOW max_prepared_transactions").scalar_one()
    if int(allowed) == 0:
        raise SqlUnusable(
            "max_prepared_transactions of this PostgreSQL server is 0",
            hint="ALTER SYSTEM SET max_prepared_transactions = 64, as many as its connections, then restart the server;"
            " where that is not possible, use plainsong.sql.Outbox",
        )


def prepared(engine: Engine) -> list[PreparedTransaction]:
    """Our prepared transactions in the engine's database, oldest first. Raises SQLAlchemy's errors."""
    with engine.connect() as connection:
        rows = connection.execute(_LIST, {"prefix": PREFIX}).all()
    named = [(parse_gid(row.gid), row) for row in rows]
    return [PreparedTransaction(gid, row.owner, float(row.age_s)) for gid, row in named if gid is not None]


def finish(engine: Engine, gid: Gid, *, commit: bool) -> bool:
    """Commits or rolls back a prepared transaction, on a separate connection.

    Returns:
      True when this call did it; False when it no longer exists, because another process finished it.
    Raises:
      DBAPIError: the database cannot be reached, or this user may not finish it.
    """
    order = f"{'COMMIT' if commit else 'ROLLBACK'} PREPARED '{gid}'"
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for attempt in range(BUSY_ATTEMPTS):
            try:
                connection.exec_driver_sql(order)
            except DBAPIError as error:
                if sqlstate(error) == UNDEFINED_OBJECT:
                    return False
                if sqlstate(error) != BUSY or attempt == BUSY_ATTEMPTS - 1:
                    raise
                time.sleep(BUSY_PAUSE_S)
            else:
                return True
    return False


def sqlstate(error: BaseException) -> str:
    """PostgreSQL's five-character code of an error; empty when the error is not the server's."""
    return getattr(getattr(error, "orig", None), "sqlstate", None) or ""


# --- recovery --------------------------------------------------------------------------------------


log = logging.getLogger("plainsong.sql")
#: ``gone``: another process has finished it. ``left``: see the advice, if there is any.
Action = Literal["committed", "rolled_back", "gone", "left"]


@dataclass(frozen=True, slots=True)
class Found:
    """A prepared transaction, and what recovery did."""

    gid: str
    transaction_id: int
    state: TransactionState
    """Its state, according to the daemon."""
    action: Action
    age_s: float
    """Seconds since it was prepared."""
    advice: str = ""
    """Advice for an operator; empty: nothing to do."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """The prepared transactions found, oldest first."""

    found: tuple[Found, ...]

    def count(self, action: Action) -> int:
        """The number of transactions for which recovery took this action."""
        return sum(each.action == action for each in self.found)

    @property
    def unsure(self) -> tuple[Found, ...]:
        """The transactions that an operator has to decide."""
        return tuple(each for each in self.found if each.advice)


def recover(database: Engine | str, client: Client) -> Recovery:
    """Finishes prepared transactions: commits those that were committed, rolls back aborted and invalid ones.

    Transactions in progress are left to their clients. Those that the daemon does not know are left too, and reported
    in the log and in the result. Safe while clients and other recoveries are running.

    Args:
      database: an engine, or its URL, for the database and the user that prepared the transactions.
      client: a client of the daemon that decided them.
    Raises:
      SqlUnusable: the database cannot prepare transactions. SqlUnavailable: the database cannot be reached.
        PlainsongError: the daemon cannot be reached. Transactions finished before stay finished; call it again.
    """
    if isinstance(database, Engine):
        return _recover(database, client)
    engine = _engine_of(database)
    try:
        return _recover(engine, client)
    finally:
        engine.dispose()


def _engine_of(url: str) -> Engine:
    """Returns the engine; for a URL without a driver, one with psycopg."""
    try:
        parsed = make_url(url)
        if parsed.drivername in ("postgresql", "postgres"):
            parsed = parsed.set(drivername="postgresql+psycopg")
        check_backend(parsed.get_backend_name())  # raises a clearer error than a missing driver
        return create_engine(parsed, poolclass=NullPool)
    except ModuleNotFoundError as missing:
        raise without_driver(SqlUnusable, missing) from missing
    except SQLAlchemyError as error:
        hint = "it looks like postgresql://user@host:5432/database"
        raise SqlUnusable(f"invalid database URL: {first_line(error)}", hint=hint) from error


def _recover(engine: Engine, client: Client) -> Recovery:
    check_kind(engine)
    found = []
    try:
        waiting = prepared(engine)
    except SQLAlchemyError as error:
        raise SqlUnavailable(f"cannot query the database: {first_line(error)}") from error
    for each in waiting:
        treated = _treat(engine, each, client.transactions.get(each.gid.transaction_id))
        level = logging.ERROR if treated.advice else logging.INFO
        log.log(level, "%s is %s: %s. %s", each.gid, treated.state, treated.action, treated.advice)
        found.append(treated)
    return Recovery(tuple(found))


def _treat(engine: Engine, each: PreparedTransaction, status: TransactionStatus) -> Found:
    gid, advice = str(each.gid), ""
    action: Action = "left"
    # Ids come from the clock: another service may know the same id, with another outcome.
    state = status.state if each.gid.service in (NAMELESS, status.service) else "unknown"
    if state == "unknown":
        advice = _by_hand(each)
    elif state != "in_progress":
        commit = state == "committed"
        try:
            is_ours = finish(engine, each.gid, commit=commit)
            action = ("committed" if commit else "rolled_back") if is_ours else "gone"
        except DBAPIError as error:
            if sqlstate(error) == FORBIDDEN:
                advice = f"the database refused; run recovery as {each.owner}: {first_line(error)}"
            elif sqlstate(error) != BUSY:  # another process is finishing it
                raise SqlUnavailable(f"cannot finish {gid}: {first_line(error)}") from error
    return Found(gid, each.gid.transaction_id, state, action, each.age_s, advice)


def _by_hand(each: PreparedTransaction) -> str:
    return (
        f"this daemon does not know the outcome of {each.gid.transaction_id}: ask the daemon that decided it; if it "
        f"was this one, and it no longer remembers, check whether messages by {each.gid.transaction_id} are committed "
        f"(plainsong peek), and run COMMIT PREPARED '{each.gid}' or ROLLBACK PREPARED '{each.gid}' in this database"
    )
