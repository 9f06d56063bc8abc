"""An outbox: messages that wait in the database of their rows until a relay has published each of them once.

The two tables of an outbox: messages that wait in the database of their rows, and how far each topic has come.

plainsong_outbox          one row for each message: written by ``Outbox``, numbered and taken away by ``Relay``
plainsong_outbox_topics   one row for each topic: the relay's producer there, the next number, the last one sent

A message's ``id`` is drawn before its transaction commits, so that ids become visible out of order and with holes.
Its ``number`` is given by the relay to what it sees committed, without holes, and is its sequence id in the topic.
"""

from __future__ import annotations

import json
from pathlib import Path
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
    create_engine,
    event,
    func,
    insert,
    inspect,
)
from sqlalchemy.engine import Engine, make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, scoped_session
from sqlalchemy.pool import NullPool

from plainsong.messages import outgoing_request
from plainsong.protocol.errors import MessageTooLarge, NoMessages, TransactionTooLarge
from plainsong.protocol.frames import NO_ATTRIBUTES
from plainsong.protocol.names import MAX_NAME_BYTES, topic_name
from plainsong.protocol.requests import check_publish
from plainsong.sql.errors import OutboxMissing, OutboxUnusable, SqlMisused, first_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sqlalchemy.engine import Dialect
    from sqlalchemy.orm import SessionTransaction

    from plainsong.serializers import SerializerLike

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


# --- outbox ----------------------------------------------------------------------------------------
#
# Messages that wait in the database of the rows that they tell of, until a relay has published each of them once.
#
#     with Session(engine) as session:
#         session.add(Order(id=17))
#         Outbox(session).publish("orders", b"17")
#         session.commit()          # the row, and a message that will come; or neither
#
# The messages are written last, as the session commits. So their ids grow with commits as anybody can see them:
# when one transaction had committed before another's commit was called, it has the smaller ids.


MIB = 1 << 20
#: The largest message; what a daemon takes when it is not told otherwise.
MAX_MESSAGE_BYTES = 8 * MIB
#: Of payloads in one transaction of a session: they are in memory until it commits.
MAX_TRANSACTION_BYTES = 64 * MIB


class Outbox:
    """Puts messages into the outbox of a session's database; they take part in the session's transaction.

    Nothing here waits for a daemon. What a savepoint or the session rolls back was never there. Made anew for the
    same session it is the same outbox.

    Args:
      session: a ``Session``; of a ``scoped_session`` it is this thread's. Commit by it, not by its connection.
      tables: from ``outbox_tables``; None: those called ``plainsong_outbox``.
      engine: which one, for a session that has several.
      serializer: from values to payloads, as in ``client.publish``.
      max_message_bytes: the largest payload; no larger than what the daemon takes, or the relay cannot go on.
    Raises:
      OutboxUnusable: it is no session of PostgreSQL or SQLite.
    """

    def __init__(
        self,
        session: Session | scoped_session[Session],
        *,
        tables: OutboxTables | None = None,
        engine: Engine | None = None,
        serializer: SerializerLike = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        session = session() if isinstance(session, scoped_session) else session
        if not isinstance(session, Session):
            raise OutboxUnusable(f"{type(session).__name__} is no session of sqlalchemy.orm", hint="take a Session")
        tables = outbox_tables() if tables is None else tables
        kept = session.info.setdefault(f"plainsong.sql.outbox {tables.messages.fullname}", None)
        if kept is None:
            kept = PendingRows(session, tables, engine)
            session.info[f"plainsong.sql.outbox {tables.messages.fullname}"] = kept
        self._waiting: PendingRows = kept
        self._serializer = serializer
        self._max_message_bytes = max_message_bytes

    def publish(
        self,
        topic: str,
        messages: Any,
        *,
        ttl_s: int | None = None,
        serializer: SerializerLike = None,
        attributes: Mapping[str, str] | None = None,
        routing_key: str | None = None,
    ) -> None:
        """Leave messages behind that are published after the session has committed, in that order.

        Args:
          messages: one, or a list (or tuple) of several, each what the serializer takes (bytes, without one), or an
            ``Outgoing`` around it.
          ttl_s: seconds that they live from when they are published, if that is shorter than the topic's ttl.
          serializer: instead of the outbox's own.
          attributes, routing_key: of those that have none themselves.
        Raises:
          InvalidName, InvalidParameter, NoMessages, NotEncodable, MessageTooLarge: nothing happened.
          TransactionTooLarge: with these it would be more than 64 MiB in one transaction; nothing happened.
        """
        topic_name("default", topic)
        many = messages if isinstance(messages, (list, tuple)) else [messages]
        if not many:
            raise NoMessages("the list is empty")
        using = self._serializer if serializer is None else serializer
        request = outgoing_request(many, using, ttl_s, attributes, routing_key)
        check_publish(request)
        own = request.message_ttls_s or [None] * len(many)
        strings = request.attributes or [NO_ATTRIBUTES] * len(many)
        largest = max(map(len, request.messages))
        if largest > self._max_message_bytes:
            detail = f"a message of {largest} bytes; the outbox takes {self._max_message_bytes}"
            raise MessageTooLarge(detail, hint="max_message_bytes of Outbox, and of the daemon's topics")
        rows = [
            {
                "topic": topic,
                "payload": payload,
                "ttl_s": ttl_s if ttl is None else ttl,
                "attributes": json.dumps(dict(has)) if has else None,
            }
            for payload, ttl, has in zip(request.messages, own, strings, strict=True)
        ]
        self._waiting.add(rows)


class PendingRows:
    """The messages of a session's transaction until it commits, each with the savepoint that it belongs to."""

    def __init__(self, session: Session, tables: OutboxTables, engine: Engine | None) -> None:
        self._session = session
        self._tables = tables
        self._bind = {} if engine is None else {"bind": engine}
        self._rows: list[tuple[SessionTransaction, dict[str, Any]]] = []
        self._bytes = 0
        self._is_committing = False
        self._released: SessionTransaction | None = None
        check_dialect(self._engine().dialect)
        event.listen(session, "before_commit", self._before_commit)
        event.listen(session, "after_soft_rollback", self._after_soft_rollback)
        event.listen(session, "after_transaction_end", self._after_transaction_end)

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Keep them until the session commits; when it is just doing that, write them."""
        more = sum(len(row["payload"]) for row in rows)
        if self._bytes + more > MAX_TRANSACTION_BYTES:
            detail = f"messages of {self._bytes + more} bytes in one transaction; there may be {MAX_TRANSACTION_BYTES}"
            raise TransactionTooLarge(detail, hint="commit oftener, or publish where the large ones are to be found")
        if not self._session.in_transaction():
            if not self._session.autobegin:
                raise OutboxUnusable("the session is in no transaction", hint="call session.begin() first")
            self._session.begin()
        self._bytes += more
        if self._is_committing:
            self._write(rows)
            return
        owner = self._session.get_nested_transaction() or self._session.get_transaction()
        assert owner is not None
        self._rows += [(owner, row) for row in rows]

    def _before_commit(self, session: Session) -> None:
        savepoint = session.get_nested_transaction()
        if savepoint is not None:
            if savepoint is self._released and self._rows:
                # An outer transaction commits while this is open: SQLAlchemy does not say so before its last step.
                raise SqlMisused(
                    "the session was committed with a savepoint open", hint="end the savepoint before the transaction"
                )
            self._released = savepoint
            return
        session.flush()  # what listeners publish as rows are written belongs to this transaction
        self._is_committing = True
        rows = [row for _, row in self._rows]
        self._rows.clear()
        if rows:
            self._write(rows)

    def _write(self, rows: Iterable[dict[str, Any]]) -> None:
        try:
            self._session.execute(insert(self._tables.messages), list(rows), bind_arguments=self._bind)
        except SQLAlchemyError as error:
            lacks = missing(self._engine(), self._tables)
            if lacks is not None:
                raise lacks from error
            raise

    def _after_soft_rollback(self, session: Session, previous: SessionTransaction) -> None:
        self._rows = [(owner, row) for owner, row in self._rows if not _is_within(owner, previous)]
        self._bytes = sum(len(row["payload"]) for _, row in self._rows)

    def _after_transaction_end(self, session: Session, transaction: SessionTransaction) -> None:
        if transaction.parent is None:
            self._rows.clear()
            self._bytes, self._is_committing, self._released = 0, False, None

    def _engine(self) -> Any:
        return self._bind.get("bind") or self._session.get_bind(clause=self._tables.messages)


def _is_within(inner: SessionTransaction | None, outer: SessionTransaction) -> bool:
    """Whether ``inner`` is ``outer``, or a savepoint of it, however deep."""
    while inner is not None and inner is not outer:
        inner = inner.parent
    return inner is outer


# --- outbox engine ---------------------------------------------------------------------------------
#
# An engine from a URL, for those who have only the URL: the command line.


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
