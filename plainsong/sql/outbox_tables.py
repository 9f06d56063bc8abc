"""The two tables of an outbox: messages that wait in the database of their rows, and how far each topic has come.

plainsong_outbox          one row for each message: written by ``Outbox``, numbered and taken away by ``Relay``
plainsong_outbox_topics   one row for each topic: the relay's producer there, the next number, the last one sent

A message's ``id`` is drawn before its transaction commits, so that ids become visible out of order and with holes.
Its ``number`` is given by the relay to what it sees committed, without holes, and is its sequence id in the topic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    func,
    inspect,
)
from sqlalchemy.exc import SQLAlchemyError

from plainsong.sql.outbox_errors import OutboxMissing, OutboxUnusable
from protocol.names import MAX_NAME_BYTES

if TYPE_CHECKING:
    from sqlalchemy.engine import Dialect, Engine

#: What the table of messages is called, unless somebody says otherwise; the other one adds ``_topics``.
TABLE = "plainsong_outbox"
#: Databases that this has been made for.
DIALECTS = ("postgresql", "sqlite")
_PRODUCER_BYTES = 64
#: SQLite counts up by itself only what it calls INTEGER, which has 8 bytes there all the same.
_ID = BigInteger().with_variant(Integer, "sqlite")


class OutboxTables(NamedTuple):
    """Both tables of one outbox."""

    messages: Table
    topics: Table


def outbox_tables(metadata: MetaData | None = None, name: str = TABLE) -> OutboxTables:
    """The tables, for whoever makes tables by ``metadata.create_all`` or by migrations.

    Args:
      metadata: that they become part of; None: one of their own.
    """
    metadata = MetaData() if metadata is None else metadata
    if name in metadata.tables:
        return OutboxTables(metadata.tables[name], metadata.tables[f"{name}_topics"])
    messages = Table(
        name,
        metadata,
        Column("id", _ID, primary_key=True, autoincrement=True),
        Column("topic", String(MAX_NAME_BYTES), nullable=False),
        Column("payload", LargeBinary, nullable=False),
        Column("ttl_s", Integer),
        Column("attributes", Text),
        Column("written", DateTime(timezone=True), nullable=False, server_default=func.now()),
        Column("number", BigInteger),
        Column("sent", DateTime(timezone=True)),
        UniqueConstraint("topic", "number", name=f"{name}_number"),
        sqlite_autoincrement=True,  # or the id of a message that was taken away would come again
    )
    waits = messages.c.sent.is_(None)
    Index(f"{name}_waiting", messages.c.topic, messages.c.id, postgresql_where=waits, sqlite_where=waits)
    kept = messages.c.sent.is_not(None)
    Index(f"{name}_sent", messages.c.sent, postgresql_where=kept, sqlite_where=kept)
    topics = Table(
        f"{name}_topics",
        metadata,
        Column("topic", String(MAX_NAME_BYTES), primary_key=True),
        Column("namespace", String(MAX_NAME_BYTES), nullable=False),
        Column("producer", String(_PRODUCER_BYTES), nullable=False),
        Column("epoch", BigInteger, nullable=False, server_default="0"),
        Column("generation", BigInteger),
        Column("next_number", BigInteger, nullable=False, server_default="0"),
        Column("last_sent", BigInteger, nullable=False, server_default="-1"),
    )
    return OutboxTables(messages, topics)


def create_outbox(engine: Engine, name: str = TABLE) -> OutboxTables:
    """Make the tables if they are not there, in a transaction of their own; they are then used under that name.

    Raises:
      OutboxUnusable: the database is not one that this has been made for. SQLAlchemyError: it cannot be reached,
      or this user may not.
    """
    check_dialect(engine.dialect)
    tables = outbox_tables(None, name)
    try:
        tables.messages.metadata.create_all(engine)
    except SQLAlchemyError:  # somebody else may have been making them at the same moment
        if not all(inspect(engine).has_table(table.name) for table in tables):
            raise
    return tables


def check_dialect(dialect: Dialect) -> None:
    """Raises OutboxUnusable unless it is a database whose order of commits has been thought through."""
    if dialect.name not in DIALECTS:
        detail = f"an outbox has been made for PostgreSQL and SQLite, and not for {dialect.name}"
        raise OutboxUnusable(detail, hint="keep the outbox in one of them")


def missing(engine_or_connection: Any, tables: OutboxTables) -> OutboxMissing | None:
    """What to raise when a statement failed because the tables are not there; None: it was something else."""
    try:
        there = inspect(engine_or_connection)
        lacks = [table.name for table in tables if not there.has_table(table.name, schema=table.schema)]
    except SQLAlchemyError:
        return None
    if not lacks:
        return None
    hint = "create_outbox(engine) makes the tables, or plainsong outbox create, or outbox_tables with your migrations"
    return OutboxMissing(f"this database has no table {' and no table '.join(lacks)}", hint=hint)
