"""Rows and messages, both or neither, through SQLAlchemy 2 (``plainsong-client[sql]``); for PostgreSQL through psycopg 3.

SqlParticipant   enlists a session in ``client.transaction(participants=[…])``
SqlPosition      keeps a reader's position in the transaction of its effects
recover          finishes prepared transactions after a crash
Outbox, Relay    messages stored with the rows until sent, for databases without prepared transactions, such as SQLite
"""

from __future__ import annotations

# Before our own modules, which import these at once: an error here says what to install.
try:
    import sqlalchemy
except ModuleNotFoundError as _missing:
    raise ModuleNotFoundError(
        f"plainsong.sql needs the package {_missing.name}: pip install 'plainsong-client[sql]'", name=_missing.name
    ) from _missing

from plainsong.sql.errors import (
    OutboxBusy,
    OutboxInDoubt,
    OutboxMissing,
    OutboxUnavailable,
    OutboxUnusable,
    SqlInDoubt,
    SqlMisused,
    SqlUnavailable,
    SqlUnusable,
)
from plainsong.sql.outbox import Outbox, OutboxTables, create_outbox, outbox_engine, outbox_tables
from plainsong.sql.participant import SqlParticipant
from plainsong.sql.positions import SqlPosition, positions_table
from plainsong.sql.prepared import Found, Recovery, recover
from plainsong.sql.relay import OutboxStatus, Relay, Relayed, TopicStatus, outbox_status

del sqlalchemy
__all__ = [
    "Found",
    "Outbox",
    "OutboxBusy",
    "OutboxInDoubt",
    "OutboxMissing",
    "OutboxStatus",
    "OutboxTables",
    "OutboxUnavailable",
    "OutboxUnusable",
    "Recovery",
    "Relay",
    "Relayed",
    "SqlInDoubt",
    "SqlMisused",
    "SqlParticipant",
    "SqlPosition",
    "SqlUnavailable",
    "SqlUnusable",
    "TopicStatus",
    "create_outbox",
    "outbox_engine",
    "outbox_status",
    "outbox_tables",
    "positions_table",
    "recover",
]
