"""The relay's side of the tables: messages to send, their sequence ids, and checks of a daemon's answers.

Numbers are assigned in a separate transaction, which first locks the topic's row. It numbers the messages that it sees
committed, in id order, and continues after the last assigned number. So no message is skipped, however late its
transaction commits: it gets the next number once it is visible. And commit order is kept: if one commit returned before
another was called, its message has the smaller id (``outbox``), and a transaction that sees the later message sees the
earlier one.
"""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import delete, func, select, update
from sqlalchemy.dialects import postgresql, sqlite

from plainsong.sql.errors import OutboxInDoubt, OutboxUnusable

if TYPE_CHECKING:
    from collections.abc import Collection

    from sqlalchemy.engine import Connection

    from plainsong.sql.outbox import OutboxTables

_INSERT: dict[str, Any] = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}
#: Rows deleted by one statement.
SWEEP_ROWS = 1_000


class Numbered(NamedTuple):
    """A message with its number."""

    number: int
    payload: bytes
    ttl_s: int | None
    attributes: str | None = None
    """JSON."""

    @property
    def size(self) -> int:
        """Its size in bytes, as ``take`` counts it."""
        return len(self.payload) + len(self.attributes or "")


class RelayRows:
    """Statements; each method is one transaction on the given connection. Raises SQLAlchemy's errors."""

    def __init__(self, tables: OutboxTables) -> None:
        self._messages, self._topics = tables
        self._waits = self._messages.c.sent.is_(None)

    def topics_that_wait(self, connection: Connection, without: Collection[str] = ()) -> list[str]:
        """Topics with messages to send, by name."""
        column = self._messages.c.topic
        found: list[str] = []
        last = ""
        with connection.begin():
            # One index lookup per topic, instead of a scan of all its waiting messages.
            while (topic := connection.scalar(select(func.min(column)).where(self._waits, column > last))) is not None:
                last = topic
                if topic not in without:
                    found.append(topic)
        return found

    def standing(self, connection: Connection, topic: str, namespace: str) -> Standing:
        """Return the topic's progress; a new topic gets a producer with a unique name.

        Raises:
          OutboxUnusable: its messages were sent to another namespace.
        """
        name = f"outbox-{secrets.token_hex(12)}"
        row = {"topic": topic, "namespace": namespace, "producer": name}
        with connection.begin():
            connection.execute(_INSERT[connection.dialect.name](self._topics).values(row).on_conflict_do_nothing())
            standing = self._look(connection, topic)
        standing.check(topic, namespace)
        return standing

    def check_remembered(self, connection: Connection, topic: str, known: int | None) -> None:
        """Raises OutboxInDoubt when the daemon has forgotten the producer while messages are in flight."""
        with connection.begin():
            standing, in_flight = self._look(connection, topic), self._in_flight(connection, topic)
        check_remembered(topic, standing, known, in_flight)

    def reconcile(
        self, connection: Connection, topic: str, opened: OpenedProducer, before: int | None, *, keep: bool = False
    ) -> None:
        """Marks messages as sent up to the last sequence id that the daemon has.

        Args:
          before: the producer's last sequence id in the topic's previous generation; None if there was none, or if the
            daemon no longer stores it.
        Raises:
          OutboxInDoubt: the daemon's answer contradicts the rows, and messages are in flight.
        """
        with connection.begin():
            standing = self._locked(connection, topic)
            in_flight = self._in_flight(connection, topic)
            check_doubt(topic, standing, opened, before, in_flight)
            last = opened.last_sequence_id
            has = before if standing.has_moved(opened) else last
            if in_flight and has is not None:
                self._done(connection, topic, has, keep=keep)
            change = {"epoch": opened.epoch, "generation": opened.generation, "last_sent": last}
            connection.execute(update(self._topics).where(self._topics.c.topic == topic).values(change))

    def take(self, connection: Connection, topic: str, max_rows: int, max_bytes: int) -> list[Numbered]:
        """Returns the next messages of a topic in the order of their numbers; if there are none, numbers new ones.

        If any message waits, at least one is returned, whatever its size. Otherwise ``max_bytes`` limits the total size
        of payloads and attributes.
        """
        columns = self._messages.c
        # The JSON of attributes is ASCII: it has as many bytes as characters.
        size = func.length(columns.payload) + func.coalesce(func.length(columns.attributes), 0)
        numbered = select(columns.number, size).where(columns.topic == topic, self._waits, columns.number.is_not(None))
        with connection.begin():
            standing = self._locked(connection, topic)
            sizes = connection.execute(numbered.order_by(columns.number).limit(max_rows)).all()
            if not sizes:
                self._number(connection, topic, standing.next_number, max_rows)
                sizes = connection.execute(numbered.order_by(columns.number).limit(max_rows)).all()
            chosen: list[int] = []
            left = max_bytes
            for number, bytes_of_it in sizes:
                left -= bytes_of_it
                if left < 0 and chosen:
                    break
                chosen.append(number)
            if not chosen:
                return []
            query = select(columns.number, columns.payload, columns.ttl_s, columns.attributes).where(
                columns.topic == topic, columns.number.between(chosen[0], chosen[-1]), self._waits
            )
            rows = connection.execute(query.order_by(columns.number)).all()
        return [Numbered(int(row.number), bytes(row.payload), row.ttl_s, row.attributes) for row in rows]

    def _number(self, connection: Connection, topic: str, first: int, max_rows: int) -> None:
        columns = self._messages.c
        new = (
            select(columns.id, (func.row_number().over(order_by=columns.id) + (first - 1)).label("number"))
            .where(columns.topic == topic, self._waits, columns.number.is_(None))
            .order_by(columns.id)
            .limit(max_rows)
            .subquery()
        )
        given = update(self._messages).where(columns.id == new.c.id).values(number=new.c.number)
        count: Any = connection.execute(given)
        here = self._topics.c.topic == topic
        connection.execute(update(self._topics).where(here).values(next_number=first + count.rowcount))

    def sent(self, connection: Connection, topic: str, last: int, *, keep: bool) -> None:
        """Deletes messages up to number ``last`` as published, or keeps them and records the time."""
        with connection.begin():
            standing = self._locked(connection, topic)
            self._done(connection, topic, last, keep=keep)
            if last > standing.last_sent:
                here = self._topics.c.topic == topic
                connection.execute(update(self._topics).where(here).values(last_sent=last))

    def sweep(self, connection: Connection, keep_s: float) -> int:
        """Deletes messages sent longer than ``keep_s`` ago; returns how many, at most ``SWEEP_ROWS``."""
        columns = self._messages.c
        old = columns.sent < datetime.now(UTC) - timedelta(seconds=keep_s)
        some = select(columns.id).where(columns.sent.is_not(None), old).order_by(columns.sent).limit(SWEEP_ROWS)
        with connection.begin():
            deleted: Any = connection.execute(delete(self._messages).where(columns.id.in_(some)))
        return int(deleted.rowcount)

    def decide(self, connection: Connection, topic: str, *, resend: bool) -> int:
        """Gives the topic a new producer, and makes messages in flight wait again or deletes them; returns how many."""
        columns = self._messages.c
        doubtful = (columns.topic == topic) & self._waits & columns.number.is_not(None)
        with connection.begin():
            self._locked(connection, topic)
            count = self._in_flight(connection, topic)
            if resend:
                connection.execute(update(self._messages).where(doubtful).values(number=None))
            else:
                connection.execute(delete(self._messages).where(doubtful))
            anew = {"producer": f"outbox-{secrets.token_hex(12)}", "epoch": 0, "generation": None, "last_sent": -1}
            connection.execute(update(self._topics).where(self._topics.c.topic == topic).values(anew))
        return count

    # --- inside a transaction --------------------------------------------------------------------

    def _locked(self, connection: Connection, topic: str) -> Standing:
        """Locks and returns the topic's row. Uses an update, since that excludes other writers on SQLite too."""
        here = self._topics.c.topic == topic
        connection.execute(update(self._topics).where(here).values(topic=self._topics.c.topic))
        return self._look(connection, topic)

    def _look(self, connection: Connection, topic: str) -> Standing:
        columns = self._topics.c
        query = select(*(columns[name] for name in Standing._fields)).where(columns.topic == topic)
        return Standing(*connection.execute(query).one())

    def _in_flight(self, connection: Connection, topic: str) -> int:
        """Count the messages that have a number and are not known to be sent."""
        columns = self._messages.c
        query = select(func.count()).where(columns.topic == topic, self._waits, columns.number.is_not(None))
        return int(connection.execute(query).scalar_one())

    def _done(self, connection: Connection, topic: str, last: int, *, keep: bool) -> None:
        columns = self._messages.c
        done = (columns.topic == topic) & (columns.number <= last) & self._waits
        if keep:
            connection.execute(update(self._messages).where(done).values(sent=datetime.now(UTC)))
        else:
            connection.execute(delete(self._messages).where(done))


# --- doubt -----------------------------------------------------------------------------------------
#
# After a crash some messages may be in flight: they have numbers, and the daemon may or may not have them. The daemon's
# last sequence id decides, if daemon, topic and database are still the same. If one of them was replaced, it proves
# nothing, and continuing would lose messages or publish them twice.


#: The hint of OutboxInDoubt.
DECIDE = "plainsong outbox decide: --resend publishes them, perhaps twice; --forget drops them as published"


class Standing(NamedTuple):
    """A topic's progress, according to the database."""

    namespace: str
    producer: str
    epoch: int
    """Epoch of the latest session; 0 if there was none."""
    generation: int | None
    """The topic's generation at that time."""
    next_number: int
    last_sent: int
    """The highest number known to be in this generation; -1: none."""

    def check(self, topic: str, namespace: str) -> None:
        """Raises OutboxUnusable if the topic's messages were sent to another namespace."""
        if self.namespace != namespace:
            detail = f"messages of {topic} were sent to namespace {self.namespace}, not {namespace}"
            raise OutboxUnusable(detail, hint="use that namespace for the relay, or another outbox")

    def has_moved(self, opened: OpenedProducer) -> bool:
        """True if the topic was deleted and created again since."""
        return self.generation not in (None, opened.generation)


class OpenedProducer(NamedTuple):
    """The daemon's answer to opening a producer."""

    epoch: int
    generation: int
    last_sequence_id: int
    """-1 if the daemon has stored nothing from this producer."""


def check_remembered(topic: str, standing: Standing, known: int | None, in_flight: int) -> None:
    """Raises OutboxInDoubt when the daemon has forgotten the producer; call it before opening, which would hide that.

    Args:
      known: the producer's last sequence id in the database's generation of the topic; None: forgotten.
      in_flight: how many messages have a number and are not known to be sent.
    """
    if standing.generation is not None and known is None and in_flight:
        why = f"the daemon has forgotten producer {standing.producer} of topic {topic}"
        raise OutboxInDoubt(f"{why}; messages in flight: {in_flight}", hint=DECIDE, topic=topic)


def check_doubt(topic: str, standing: Standing, opened: OpenedProducer, before: int | None, in_flight: int) -> None:
    """Raises OutboxInDoubt unless the daemon's answer shows for every message in flight whether it was stored.

    Args:
      before: the last sequence id in the previous generation, if the topic was created again and the daemon knows it.
      in_flight: how many messages have a number and are not known to be sent.
    """
    last = max(opened.last_sequence_id, -1 if before is None else before)
    if last >= standing.next_number:
        detail = (
            f"topic {topic} has message {last} of producer {standing.producer}, but this database has only given"
            f" numbers below {standing.next_number}: it is older than the messages it sent, as if restored from a backup"
        )
        hint = "delete the messages that the topic has from the outbox, then run plainsong outbox decide --resend"
        raise OutboxInDoubt(detail, hint=hint, topic=topic)
    if standing.has_moved(opened):
        is_known = before is not None
        why = f"topic {topic} was deleted and created again, and the daemon no longer knows what it had"
    else:
        is_known = opened.epoch > standing.epoch and opened.last_sequence_id >= standing.last_sent
        why = f"the daemon no longer knows all that producer {standing.producer} of topic {topic} sent"
    if in_flight and not is_known:
        raise OutboxInDoubt(f"{why}; messages in flight: {in_flight}", hint=DECIDE, topic=topic)
