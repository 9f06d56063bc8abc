"""An outbox: messages are kept in the database of the rows that they belong to until a relay has published each once.

plainsong_outbox          one row for each message: written by ``Outbox``, numbered and removed by ``Relay``
plainsong_outbox_topics   one row for each topic: the relay's producer, the next number, the last number sent

The database assigns a message's ``id`` before its transaction commits, so ids become visible out of order and with
gaps. The relay assigns the ``number`` when it reads a committed message, without gaps; it is the sequence id in the
topic.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
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

from plainsong.messages import as_list, outgoing_request
from plainsong.protocol.errors import MessageTooLarge, NoMessages, TransactionTooLarge
from plainsong.protocol.frames import NO_ATTRIBUTES
from plainsong.protocol.names import MAX_NAME_BYTES, topic_name
from plainsong.protocol.requests import check_publish
from plainsong.sql.errors import (
    OutboxMissing,
    OutboxUnavailable,
    OutboxUnusable,
    SqlMisused,
    first_line,
    without_driver,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from sqlalchemy.engine import Dialect
    from sqlalchemy.orm import SessionTransaction

    from plainsong.serializers import SerializerLike

#: Default name of the table of messages; the other table adds ``_topics``.
TABLE = "plainsong_outbox"
#: Supported databases: those whose order of commits is known.
DIALECTS = ("postgresql", "sqlite")
_PRODUCER_BYTES = 64
#: SQLite autoincrements only INTEGER, which still has 8 bytes there.
_ID = BigInteger().with_variant(Integer, "sqlite")


class OutboxTables(NamedTuple):
    """The two tables of an outbox."""

    messages: Table
    topics: Table


def outbox_tables(metadata: MetaData | None = None, name: str = TABLE) -> OutboxTables:
    """Defines the tables, to be created by ``metadata.create_all`` or by migrations.

    Args:
      metadata: the metadata to add the tables to; None: new metadata.
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
        sqlite_autoincrement=True,  # otherwise the id of a removed message would be used again
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
    """Creates the tables, if they do not exist, in a transaction of its own.

    Raises:
      OutboxUnusable: the database is not supported. SQLAlchemyError: it cannot be reached, or this user may not
        create tables.
    """
    check_dialect(engine.dialect)
    tables = outbox_tables(None, name)
    try:
        tables.messages.metadata.create_all(engine)
    except SQLAlchemyError:  # another process may have created them at the same moment
        if not all(inspect(engine).has_table(table.name) for table in tables):
            raise
    return tables


@contextmanager
def raising_unavailable(failed: str) -> Iterator[None]:
    """Converts errors of the database in the block to OutboxUnavailable; ``failed`` begins its text."""
    try:
        yield
    except SQLAlchemyError as error:
        raise OutboxUnavailable(f"{failed}: {first_line(error)}") from error


def check_dialect(dialect: Dialect) -> None:
    """Raises OutboxUnusable unless the database is supported."""
    check_backend(dialect.name)


def check_backend(name: str) -> None:
    """Raises OutboxUnusable unless the dialect of this name, as in a URL, is supported."""
    if name not in DIALECTS:
        detail = f"an outbox works on PostgreSQL and SQLite, not on {name}"
        raise OutboxUnusable(detail, hint="use one of these for the outbox")


def missing(engine_or_connection: Any, tables: OutboxTables) -> OutboxMissing | None:
    """The error to raise when a statement failed for missing tables; None: it failed for another reason."""
    try:
        there = inspect(engine_or_connection)
        lacks = [table.name for table in tables if not there.has_table(table.name, schema=table.schema)]
    except SQLAlchemyError:
        return None
    if not lacks:
        return None
    hint = "create the tables by create_outbox(engine), plainsong outbox create, or outbox_tables with your migrations"
    return OutboxMissing(f"this database has no table {' and no table '.join(lacks)}", hint=hint)


# --- the session's side ----------------------------------------------------------------------------
#
# Messages are written last, as the session commits, so that ids follow the visible order of commits: a transaction
# that committed before another's commit was called has the smaller ids.


MIB = 1 << 20
#: The largest message; the default of the daemon.
MAX_MESSAGE_BYTES = 8 * MIB
#: Payloads in one transaction of a session, which stay in memory until it commits.
MAX_TRANSACTION_BYTES = 64 * MIB


class Outbox:
    """Puts messages into the outbox of a session's database, as part of the session's transaction.

        with Session(engine) as session:
            session.add(Order(id=17))
            Outbox(session).publish("orders", b"17")
            session.commit()          # the row, and a message that the relay will publish; or neither

    No call waits for a daemon. Messages that are rolled back with a savepoint or the session are never published. A
    second ``Outbox`` of the same session is the same outbox.

    Args:
      session: a ``Session``; or a ``scoped_session``, whose session for this thread is used. Commit the session, not
        its connection.
      tables: from ``outbox_tables``; None: those named ``plainsong_outbox``.
      engine: the engine, for a session with several.
      serializer: from values to payloads, as in ``client.publish``.
      max_message_bytes: the largest payload; must not exceed the daemon's limit, or the relay cannot continue.
    Raises:
      OutboxUnusable: not a session of PostgreSQL or SQLite.
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
            raise OutboxUnusable(f"{type(session).__name__} is not a session of sqlalchemy.orm", hint="use a Session")
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
        """Queues messages, to be published in this order after the session has committed.

        Args:
          messages: one message, or a list or tuple of messages; each a value for the serializer (bytes, without
            one), or an ``Outgoing``.
          ttl_s: time to live in seconds from publishing, if that is shorter than the topic's ttl.
          serializer: replaces the outbox's own.
          attributes, routing_key: for messages that have none themselves.
        Raises:
          InvalidName, InvalidParameter, NoMessages, NotEncodable, MessageTooLarge: nothing happened.
          TransactionTooLarge: more than 64 MiB in one transaction; nothing happened.
        """
        topic_name("default", topic)
        many = as_list(messages)
        if not many:
            raise NoMessages("the list is empty")
        using = self._serializer if serializer is None else serializer
        request = outgoing_request(many, using, ttl_s, attributes, routing_key)
        check_publish(request)
        own = request.message_ttls_s or [None] * len(many)
        strings = request.attributes or [NO_ATTRIBUTES] * len(many)
        largest = max(map(len, request.messages))
        if largest > self._max_message_bytes:
            detail = f"a message of {largest} bytes; the outbox accepts {self._max_message_bytes}"
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
    """The messages of a session's transaction until it commits, each with its savepoint."""

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
        """Keeps rows until the session commits; writes them at once if it is committing."""
        more = sum(len(row["payload"]) for row in rows)
        if self._bytes + more > MAX_TRANSACTION_BYTES:
            detail = f"{self._bytes + more} bytes of messages in one transaction; the limit is {MAX_TRANSACTION_BYTES}"
            raise TransactionTooLarge(detail, hint="commit more often, or publish references to large messages")
        if not self._session.in_transaction():
            if not self._session.autobegin:
                raise OutboxUnusable("the session is not in a transaction", hint="call session.begin() first")
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
                # An outer transaction commits while a savepoint is open: SQLAlchemy reports that only in its last step.
                raise SqlMisused(
                    "the session was committed with a savepoint open", hint="end the savepoint before the transaction"
                )
            self._released = savepoint
            return
        session.flush()  # messages that listeners publish during the flush belong to this transaction
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
    """True if ``inner`` is ``outer`` or a savepoint inside it, at any depth."""
    while inner is not None and inner is not outer:
        inner = inner.parent
    return inner is outer


# --- engines ---------------------------------------------------------------------------------------


#: How long SQLite waits for another writer.
SQLITE_PATIENCE_S = 30.0


def outbox_engine(url: str, *, create: bool = False) -> Engine:
    """Creates an engine for SQLite, or for PostgreSQL (with psycopg unless the URL names another driver).

    Args:
      create: whether a missing SQLite file may be created.
    Raises:
      OutboxUnusable: an invalid URL, an unsupported database, or a missing file.
    """
    try:
        parsed = make_url(url)
        if parsed.drivername in ("postgresql", "postgres"):
            parsed = parsed.set(drivername="postgresql+psycopg")
        check_backend(parsed.get_backend_name())  # raises a clearer error than a missing driver
        is_sqlite = parsed.get_backend_name() == "sqlite"
        options = {"timeout": SQLITE_PATIENCE_S} if is_sqlite else {}
        engine = create_engine(parsed, poolclass=NullPool, connect_args=options)
    except ModuleNotFoundError as missing:
        raise without_driver(OutboxUnusable, missing) from missing
    except SQLAlchemyError as error:
        hint = "it looks like postgresql://user@host:5432/database, or sqlite:////var/lib/shop/shop.db"
        raise OutboxUnusable(f"invalid database URL: {first_line(error)}", hint=hint) from error
    check_dialect(engine.dialect)
    if is_sqlite:
        path = parsed.database
        if not path or path == ":memory:":
            raise OutboxUnusable("a database in memory belongs to another process", hint="name SQLite's file")
        if not create and not path.startswith("file:") and not Path(path).exists():
            raise OutboxUnusable(f"no such file: {path}", hint="sqlite:////absolute/path has four slashes")
    return engine
