"""Transactions prepared in PostgreSQL: their names, how each is finished, and how those that a crash left are recovered.

Names of prepared transactions: whose service decides them, by which id, and which participant made them.

    plainsong:SERVICE:ID:TAG

SERVICE names the transaction service that was asked (``-`` when it has no name), ID is the transaction's there,
TAG is drawn anew for each participant, so that no name ever comes twice. All of it is safe inside quotes.
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

from plainsong.sql.errors import SqlUnavailable, SqlUnusable, first_line

if TYPE_CHECKING:
    from plainsong import Client
    from plainsong.transactions import TransactionState, TransactionStatus

#: What all names begin with.
PREFIX = "plainsong:"
#: Where the service has no name.
NAMELESS = "-"
_GID = re.compile(r"plainsong:(?P<service>[A-Za-z0-9_.-]{1,64}):(?P<id>[1-9][0-9]{0,18}):(?P<tag>[0-9a-f]{16})")


class Gid(NamedTuple):
    """The name of one prepared transaction; ``str`` of it is what the database knows."""

    service: str
    transaction_id: int
    tag: str

    def __str__(self) -> str:
        return f"{PREFIX}{self.service}:{self.transaction_id}:{self.tag}"


def new_gid(service: str, transaction_id: int) -> Gid:
    """A name that nobody else has. Raises ValueError for a service or an id that cannot be part of one."""
    gid = Gid(service or NAMELESS, transaction_id, secrets.token_hex(8))
    if parse_gid(str(gid)) is None:
        raise ValueError(f"{gid} is no name for a prepared transaction")
    return gid


def parse_gid(text: str) -> Gid | None:
    """The parts of a name; None for one that is not ours."""
    found = _GID.fullmatch(text)
    return None if found is None else Gid(found["service"], int(found["id"]), found["tag"])


# --- prepared --------------------------------------------------------------------------------------
#
# PostgreSQL's side of two-phase commit: what it must allow, what is prepared there, and how it is finished.


#: SQLSTATEs. Source: PostgreSQL's manual, appendix A.
UNDEFINED_OBJECT = "42704"
BUSY = "55000"
FORBIDDEN = "42501"
#: How often somebody who is just finishing the same transaction is waited for, and how long each time.
BUSY_ATTEMPTS = 50
BUSY_PAUSE_S = 0.02
_LIST = text(
    "SELECT gid, owner, extract(epoch FROM now() - prepared) AS age_s FROM pg_prepared_xacts"
    " WHERE database = current_database() AND starts_with(gid, :prefix) ORDER BY prepared, gid"
)


@dataclass(frozen=True, slots=True)
class PreparedTransaction:
    """One prepared transaction that is ours, and still undecided in the database."""

    gid: Gid
    owner: str
    age_s: float
    """Since it was prepared, by the database's clock."""


def check_kind(engine: Engine) -> None:
    """Raises SqlUnusable unless the engine is one of PostgreSQL through psycopg 3."""
    if engine.dialect.name != "postgresql":
        why = "has no two-phase commit" if engine.dialect.name == "sqlite" else "is not one that this has been made for"
        detail = f"{engine.dialect.name} {why}, without which rows and messages cannot become visible together"
        fits = "plainsong.sql.Outbox fits here, or use " if engine.dialect.name == "sqlite" else "use "
        hint = f"{fits}PostgreSQL; SqlPosition alone works with any database"
        raise SqlUnusable(detail, hint=hint)
    if engine.dialect.driver != "psycopg":
        hint = "create_engine('postgresql+psycopg://…'), of the package psycopg"
        raise SqlUnusable(f"the engine's driver is {engine.dialect.driver}", hint=hint)


def check_allowed(engine: Engine) -> None:
    """Raises SqlUnusable when the server keeps no prepared transactions, which is how it is delivered."""
    with engine.connect() as connection:
        allowed = connection.exec_driver_sql("SHOW max_prepared_transactions").scalar_one()
    if int(allowed) == 0:
        raise SqlUnusable(
            "max_prepared_transactions of this PostgreSQL server is 0",
            hint="ALTER SYSTEM SET max_prepared_transactions = 64, as many as its connections, then restart the server;"
            " where that cannot be, plainsong.sql.Outbox fits",
        )


def prepared(engine: Engine) -> list[PreparedTransaction]:
    """Ours in the engine's database, the oldest first. Raises what SQLAlchemy raises."""
    with engine.connect() as connection:
        rows = connection.execute(_LIST, {"prefix": PREFIX}).all()
    named = [(parse_gid(row.gid), row) for row in rows]
    return [PreparedTransaction(gid, row.owner, float(row.age_s)) for gid, row in named if gid is not None]


def finish(engine: Engine, gid: Gid, *, commit: bool) -> bool:
    """Commit or roll back a prepared transaction, on a connection of its own.

    Returns:
      True when this call did it; False when there is no such one any more: somebody else was quicker.
    Raises:
      DBAPIError: it could not be reached, or this user may not.
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
    """The five characters by which PostgreSQL names an error; empty when it was not the server that spoke."""
    return getattr(getattr(error, "orig", None), "sqlstate", None) or ""


# --- recovery --------------------------------------------------------------------------------------
#
# What a crash left prepared in a database: found by its name, decided by the daemon, never guessed.


log = logging.getLogger("plainsong.sql")
#: ``gone``: somebody else finished it meanwhile. ``left``: see the advice, if there is one.
Action = Literal["committed", "rolled_back", "gone", "left"]


@dataclass(frozen=True, slots=True)
class Found:
    """One prepared transaction, and what was done about it."""

    gid: str
    transaction_id: int
    state: TransactionState
    """What the daemon says of it."""
    action: Action
    age_s: float
    """Since it was prepared."""
    advice: str = ""
    """What a person has to do; empty: nothing."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """All that was found, the oldest first."""

    found: tuple[Found, ...]

    def count(self, action: Action) -> int:
        """How many were treated so."""
        return sum(each.action == action for each in self.found)

    @property
    def unsure(self) -> tuple[Found, ...]:
        """Those that wait for a person."""
        return tuple(each for each in self.found if each.advice)


def recover(database: Engine | str, client: Client) -> Recovery:
    """Finish what was left prepared: committed transactions are committed, aborted and invalid ones rolled back.

    What is in progress is left to its client, and what the daemon does not know is left, and told as an error in
    the log and in the answer. Safe beside clients that are at work and beside other recoveries.

    Args:
      database: an engine, or its URL. It must be the database, and a user, that prepared them.
      client: of the daemon that decided.
    Raises:
      SqlUnusable: it is no database that prepares. SqlUnavailable: the database could not be asked. PlainsongError:
        the daemon could not. What was finished before stays finished; do it again.
    """
    if isinstance(database, Engine):
        return _recover(database, client)
    engine = _engine_of(database)
    try:
        return _recover(engine, client)
    finally:
        engine.dispose()


def _engine_of(url: str) -> Engine:
    """An engine; of the driver that prepares, where the URL names none."""
    try:
        parsed = make_url(url)
        if parsed.drivername in ("postgresql", "postgres"):
            parsed = parsed.set(drivername="postgresql+psycopg")
        return create_engine(parsed, poolclass=NullPool)
    except (SQLAlchemyError, ModuleNotFoundError) as error:
        hint = "it looks like postgresql://user@host:5432/database"
        raise SqlUnusable(f"this is no URL of a database: {first_line(error)}", hint=hint) from error


def _recover(engine: Engine, client: Client) -> Recovery:
    check_kind(engine)
    found = []
    try:
        waiting = prepared(engine)
    except SQLAlchemyError as error:
        raise SqlUnavailable(f"the database cannot be asked: {first_line(error)}") from error
    for each in waiting:
        treated = _treat(engine, each, client.transactions.get(each.gid.transaction_id))
        level = logging.ERROR if treated.advice else logging.INFO
        log.log(level, "%s is %s: %s. %s", each.gid, treated.state, treated.action, treated.advice)
        found.append(treated)
    return Recovery(tuple(found))


def _treat(engine: Engine, each: PreparedTransaction, status: TransactionStatus) -> Found:
    gid, advice = str(each.gid), ""
    action: Action = "left"
    # Ids come from the clock: another service may know one that is the same, and another outcome for it.
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
                advice = f"the database refused, do it as {each.owner}: {first_line(error)}"
            elif sqlstate(error) != BUSY:  # then somebody else is at it
                raise SqlUnavailable(f"{gid} cannot be finished: {first_line(error)}") from error
    return Found(gid, each.gid.transaction_id, state, action, each.age_s, advice)


def _by_hand(each: PreparedTransaction) -> str:
    return (
        f"this daemon knows no outcome of {each.gid.transaction_id}: ask the daemon that it was of; if it was this one"
        f" and has forgotten, see whether messages by {each.gid.transaction_id} are committed (plainsong peek), and run"
        f" COMMIT PREPARED '{each.gid}' or ROLLBACK PREPARED '{each.gid}' in this database"
    )
