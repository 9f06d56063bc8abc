"""An engine from a URL, for those who have only the URL: the command line."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import create_engine
from sqlalchemy.engine import Engine, make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from plainsong.sql.errors import first_line
from plainsong.sql.outbox_errors import OutboxUnusable
from plainsong.sql.outbox_tables import check_dialect

#: How long SQLite waits for who is just writing.
SQLITE_PATIENCE_S = 30.0


def outbox_engine(url: str, *, create: bool = False) -> Engine:
    """An engine of PostgreSQL, of the driver psycopg where the URL names none, or of SQLite.

    Args:
      create: a file of SQLite that is not there may be made.
    Raises:
      OutboxUnusable: it is no URL, of another kind of database, or of a file that is not there.
    """
    try:
        parsed = make_url(url)
        if parsed.drivername in ("postgresql", "postgres"):
            parsed = parsed.set(drivername="postgresql+psycopg")
        is_sqlite = parsed.get_backend_name() == "sqlite"
        options = {"timeout": SQLITE_PATIENCE_S} if is_sqlite else {}
        engine = create_engine(parsed, poolclass=NullPool, connect_args=options)
    except (SQLAlchemyError, ModuleNotFoundError) as error:
        hint = "it looks like postgresql://user@host:5432/database, or sqlite:////var/lib/shop/shop.db"
        raise OutboxUnusable(f"this is no URL of a database: {first_line(error)}", hint=hint) from error
    check_dialect(engine.dialect)
    if is_sqlite:
        path = parsed.database
        if not path or path == ":memory:":
            raise OutboxUnusable("a database in memory is of another process", hint="name SQLite's file")
        if not create and not path.startswith("file:") and not Path(path).exists():
            raise OutboxUnusable(f"there is no file {path}", hint="sqlite:////absolute/path has four slashes")
    return engine
