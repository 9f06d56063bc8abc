"""PostgreSQL rows and messages in one transaction, through SQLAlchemy 2 and psycopg 3 (``plainsong[sql]``).

SqlParticipant   enlists a session in ``client.transaction(participants=[…])``
SqlPosition      keeps a reader's position in the transaction of its effects
recover          finishes what a crash left in doubt
"""

from __future__ import annotations

try:
    import psycopg
    import sqlalchemy
except ModuleNotFoundError as _missing:
    raise ModuleNotFoundError(
        f"plainsong.sql needs the package {_missing.name}: pip install 'plainsong[sql]'", name=_missing.name
    ) from _missing

from plainsong.sql.errors import SqlInDoubt, SqlMisused, SqlUnavailable, SqlUnusable
from plainsong.sql.participant import SqlParticipant
from plainsong.sql.positions import SqlPosition, positions_table
from plainsong.sql.recovery import Found, Recovery, recover

del psycopg, sqlalchemy

__all__ = [
    "Found",
    "Recovery",
    "SqlInDoubt",
    "SqlMisused",
    "SqlParticipant",
    "SqlPosition",
    "SqlUnavailable",
    "SqlUnusable",
    "positions_table",
    "recover",
]
