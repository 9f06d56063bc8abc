"""PostgreSQL's side of two-phase commit: what it must allow, what is prepared there, and how it is finished."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from plainsong.sql.errors import SqlUnusable
from plainsong.sql.gids import PREFIX, Gid, parse_gid

if TYPE_CHECKING:
    from sqlalchemy.engine import Engine

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
class Prepared:
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


def prepared(engine: Engine) -> list[Prepared]:
    """Ours in the engine's database, the oldest first. Raises what SQLAlchemy raises."""
    with engine.connect() as connection:
        rows = connection.execute(_LIST, {"prefix": PREFIX}).all()
    named = [(parse_gid(row.gid), row) for row in rows]
    return [Prepared(gid, row.owner, float(row.age_s)) for gid, row in named if gid is not None]


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
