"""Messages that wait in the database of the rows that they tell of, until a relay has published each of them once.

    with Session(engine) as session:
        session.add(Order(id=17))
        Outbox(session).publish("orders", b"17")
        session.commit()          # the row, and a message that will come; or neither

The messages are written last, as the session commits. So their ids grow with commits as anybody can see them: when
one transaction had committed before another's commit was called, it has the smaller ids.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from sqlalchemy import event, insert
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, scoped_session

from plainsong.core.operations import outgoing_request
from plainsong.sql.errors import SqlMisused
from plainsong.sql.outbox_errors import OutboxUnusable
from plainsong.sql.outbox_tables import check_dialect, missing, outbox_tables
from protocol.checks import check_publish
from protocol.errors import MessageTooLarge, NoMessages, TransactionTooLarge
from protocol.frames import NO_ATTRIBUTES
from protocol.names import topic_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sqlalchemy.engine import Engine
    from sqlalchemy.orm import SessionTransaction

    from plainsong.serializers import SerializerLike
    from plainsong.sql.outbox_tables import OutboxTables

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
            kept = Waiting(session, tables, engine)
            session.info[f"plainsong.sql.outbox {tables.messages.fullname}"] = kept
        self._waiting: Waiting = kept
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


class Waiting:
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
