"""One relay at a time: an advisory lock of PostgreSQL's session, or a locked file beside SQLite's.

Both end with the process that holds them, however it ends. They are for calm: what keeps two relays from harm, when
one has lost its lock without knowing, are the numbers in the tables and the session that each opens in a topic.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from typing import TYPE_CHECKING

from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

#: What the file beside SQLite's database is called: the database's name, the table's, and this.
SUFFIX = "relay"


class RelayLock:
    """The lock of one outbox.

    Args:
      engine: of its database.
      table: the name of its table of messages.
    """

    def __init__(self, engine: Engine, table: str) -> None:
        digest = hashlib.sha256(f"plainsong relay {table}".encode()).digest()
        self._key = {"key": int.from_bytes(digest[:8], "big", signed=True)}
        self._path = _file_of(engine, table)
        self._is_postgresql = engine.dialect.name == "postgresql"
        self._file: int | None = None

    def take(self, connection: Connection) -> bool:
        """Whether it is ours now, for as long as this connection (of PostgreSQL) or this object (of SQLite) lives."""
        if self._is_postgresql:
            with connection.begin():
                return bool(connection.execute(text("SELECT pg_try_advisory_lock(:key)"), self._key).scalar_one())
        if self._path is None or self._file is not None:
            return True
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        self._file = file
        return True

    def let_go(self, connection: Connection) -> None:
        """Let others have it. A connection that cannot be asked is given up, and the lock goes with it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._is_postgresql:
            try:
                with connection.begin():
                    connection.execute(text("SELECT pg_advisory_unlock(:key)"), self._key)
            except SQLAlchemyError:
                connection.invalidate()

    def is_held(self, connection: Connection) -> bool:
        """Whether somebody, perhaps this object, holds it."""
        if self._file is not None:
            return True
        if not self.take(connection):
            return True
        self.let_go(connection)
        return False


def _file_of(engine: Engine, table: str) -> str | None:
    """Where the lock of SQLite's database is; None: the database is in memory, or no file."""
    if engine.dialect.name != "sqlite":
        return None
    with engine.connect() as connection:
        path = connection.exec_driver_sql("SELECT file FROM pragma_database_list WHERE name = 'main'").scalar()
    return f"{path}-{table}-{SUFFIX}" if path else None
