"""The relay's side of the tables: what waits, which sequence id it gets, and whether a daemon's answer fits what the rows say.

The relay's side of the tables: what waits, which number it gets, and what is done with.

Numbers are given in a transaction of their own, which first locks the topic's row. It numbers what it sees committed,
by id, and goes on where the last one ended. So no message is skipped, however late its transaction commits: it gets
the next number when it is there. And no message comes before one that was committed when its own commit was called:
that one has a smaller id (``outbox``), and whoever sees the later sees the earlier.
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
#: Rows that are deleted by one statement.
SWEEP_ROWS = 1_000


class Numbered(NamedTuple):
    """A message that has its number."""

    number: int
    payload: bytes
    ttl_s: int | None
    attributes: str | None = None
    """As JSON."""


class RelayRows:
    """Statements, each method one transaction of the connection that it is given. Raises what SQLAlchemy raises."""

    def __init__(self, tables: OutboxTables) -> None:
        self._messages, self._topics = tables
        self._waits = self._messages.c.sent.is_(None)

    def topics_that_wait(self, connection: Connection, without: Collection[str] = ()) -> list[str]:
        """Topics that have messages to send, by name."""
        column = self._messages.c.topic
        found: list[str] = []
        last = ""
        with connection.begin():
            # One step in the index for each topic, instead of all that waits in it.
            while (topic := connection.scalar(select(func.min(column)).where(self._waits, column > last))) is not None:
                last = topic
                if topic not in without:
                    found.append(topic)
        return found

    def standing(self, connection: Connection, topic: str, namespace: str) -> Standing:
        """How far the topic has come; a new one begins, with a producer whose name nobody else has.

        Raises:
          OutboxUnusable: its messages went to another namespace until now.
        """
        name = f"outbox-{secrets.token_hex(12)}"
        row = {"topic": topic, "namespace": namespace, "producer": name}
        with connection.begin():
            connection.execute(_INSERT[connection.dialect.name](self._topics).values(row).on_conflict_do_nothing())
            standing = self._look(connection, topic)
        standing.check(topic, namespace)
        return standing

    def check_remembered(self, connection: Connection, topic: str, known: int | None) -> None:
        """Raises OutboxInDoubt: the daemon has forgotten the producer, and messages are on the way."""
        with connection.begin():
            standing, on_the_way = self._look(connection, topic), self._on_the_way(connection, topic)
        check_remembered(topic, standing, known, on_the_way)

    def believe(
        self, connection: Connection, topic: str, opened: OpenedProducer, before: int | None, *, keep: bool = False
    ) -> None:
        """Take the daemon's word for what it has: up to there messages are sent, whoever heard the answer.

        Args:
          before: the producer's last sequence id in the generation that the topic had, where that was another one;
            None: the daemon has forgotten it.
        Raises:
          OutboxInDoubt: what the daemon says does not fit what is here, and there are messages that it may have.
        """
        with connection.begin():
            standing = self._locked(connection, topic)
            on_the_way = self._on_the_way(connection, topic)
            check_doubt(topic, standing, opened, before, on_the_way)
            last = opened.last_sequence_id
            has = before if standing.has_moved(opened) else last
            if on_the_way and has is not None:
                self._done(connection, topic, has, keep=keep)
            change = {"epoch": opened.epoch, "generation": opened.generation, "last_sent": last}
            connection.execute(update(self._topics).where(self._topics.c.topic == topic).values(change))

    def take(self, connection: Connection, topic: str, max_rows: int, max_bytes: int) -> list[Numbered]:
        """The next messages of a topic, in the order of their numbers; those that had none have been given theirs.

        At least one, if one waits, and no more bytes than allowed after that.
        """
        columns = self._messages.c
        numbered = select(columns.number, func.length(columns.payload)).where(
            columns.topic == topic, self._waits, columns.number.is_not(None)
        )
        with connection.begin():
            standing = self._locked(connection, topic)
            sizes = connection.execute(numbered.order_by(columns.number).limit(max_rows)).all()
            if not sizes:
                self._number(connection, topic, standing.next_number, max_rows)
                sizes = connection.execute(numbered.order_by(columns.number).limit(max_rows)).all()
            chosen: list[int] = []
            left = max_bytes
            for number, size in sizes:
                left -= size
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
        """All up to number ``last`` has been published: it is deleted, or kept with the time."""
        with connection.begin():
            standing = self._locked(connection, topic)
            self._done(connection, topic, last, keep=keep)
            if last > standing.last_sent:
                here = self._topics.c.topic == topic
                connection.execute(update(self._topics).where(here).values(last_sent=last))

    def sweep(self, connection: Connection, keep_s: float) -> int:
        """Delete what was sent longer ago than that; how many, at most ``SWEEP_ROWS``."""
        columns = self._messages.c
        old = columns.sent < datetime.now(UTC) - timedelta(seconds=keep_s)
        some = select(columns.id).where(columns.sent.is_not(None), old).order_by(columns.sent).limit(SWEEP_ROWS)
        with connection.begin():
            deleted: Any = connection.execute(delete(self._messages).where(columns.id.in_(some)))
        return int(deleted.rowcount)

    def decide(self, connection: Connection, topic: str, *, resend: bool) -> int:
        """Let the topic go on with a new producer: what has been on the way waits again, or counts as sent.

        Returns:
          how many messages that were.
        """
        columns = self._messages.c
        doubtful = (columns.topic == topic) & self._waits & columns.number.is_not(None)
        with connection.begin():
            self._locked(connection, topic)
            count = self._on_the_way(connection, topic)
            if resend:
                connection.execute(update(self._messages).where(doubtful).values(number=None))
            else:
                connection.execute(delete(self._messages).where(doubtful))
            anew = {"producer": f"outbox-{secrets.token_hex(12)}", "epoch": 0, "generation": None, "last_sent": -1}
            connection.execute(update(self._topics).where(self._topics.c.topic == topic).values(anew))
        return count

    # --- inside of a transaction -----------------------------------------------------------------

    def _locked(self, connection: Connection, topic: str) -> Standing:
        """The topic's row, locked: an update, since that is what keeps others of SQLite out from here on."""
        here = self._topics.c.topic == topic
        connection.execute(update(self._topics).where(here).values(topic=self._topics.c.topic))
        return self._look(connection, topic)

    def _look(self, connection: Connection, topic: str) -> Standing:
        columns = self._topics.c
        query = select(*(columns[name] for name in Standing._fields)).where(columns.topic == topic)
        return Standing(*connection.execute(query).one())

    def _on_the_way(self, connection: Connection, topic: str) -> int:
        """How many messages have a number and are not known to be sent."""
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


# --- relay doubt -----------------------------------------------------------------------------------
#
# Whether what a daemon says of a producer fits what the database knows: all that can have happened in between.
#
# After a crash some messages may be on the way: they have their numbers, and nobody knows whether the daemon has
# them. Its last sequence id tells, as long as daemon, topic and database are those that they were. When one of them
# is not, it tells nothing, and to go on would lose messages or publish them twice.


#: What a person can do.
DECIDE = "plainsong outbox decide: --resend publishes them, perhaps again; --forget takes them as published"


class Standing(NamedTuple):
    """How far a topic has come, by the database."""

    namespace: str
    producer: str
    epoch: int
    """Of the session that was opened last; 0: none yet."""
    generation: int | None
    """The topic's, then."""
    next_number: int
    last_sent: int
    """The highest number that this generation is known to have; -1: none."""

    def check(self, topic: str, namespace: str) -> None:
        """Raises OutboxUnusable: the topic's messages went to another namespace until now."""
        if self.namespace != namespace:
            detail = f"messages of {topic} have gone to namespace {self.namespace} until now, and not to {namespace}"
            raise OutboxUnusable(detail, hint="give the relay that namespace, or use another outbox")

    def has_moved(self, opened: OpenedProducer) -> bool:
        """Whether the topic was deleted and made anew since."""
        return self.generation not in (None, opened.generation)


class OpenedProducer(NamedTuple):
    """What the daemon says as a producer is opened."""

    epoch: int
    generation: int
    last_sequence_id: int
    """-1: it has nothing of this producer."""


def check_remembered(topic: str, standing: Standing, known: int | None, on_the_way: int) -> None:
    """Raises OutboxInDoubt when the daemon has forgotten the producer; before it is opened, which would hide that.

    Args:
      known: the producer's last sequence id in the generation that the database names; None: nobody knows it.
      on_the_way: how many messages have a number and are not known to be sent.
    """
    if standing.generation is not None and known is None and on_the_way:
        why = f"the daemon has forgotten what topic {topic} had of producer {standing.producer}"
        raise OutboxInDoubt(f"{why}; {on_the_way} messages were on the way", hint=DECIDE, topic=topic)


def check_doubt(topic: str, standing: Standing, opened: OpenedProducer, before: int | None, on_the_way: int) -> None:
    """Raises OutboxInDoubt unless the daemon's word tells of every message on the way whether it has it.

    Args:
      before: the last sequence id in the generation before, where the topic has moved and the daemon knows it.
      on_the_way: how many messages have a number and are not known to be sent.
    """
    last = max(opened.last_sequence_id, -1 if before is None else before)
    if last >= standing.next_number:
        detail = (
            f"topic {topic} has message {last} of producer {standing.producer}, and this database has only given"
            f" numbers below {standing.next_number}: it is older than what it has sent, as if it came from a backup"
        )
        hint = "delete from the outbox what the topic has; then plainsong outbox decide --resend"
        raise OutboxInDoubt(detail, hint=hint, topic=topic)
    if standing.has_moved(opened):
        is_known = before is not None
        why = f"topic {topic} was deleted and made anew, and the daemon does not know any more what it had"
    else:
        is_known = opened.epoch > standing.epoch and opened.last_sequence_id >= standing.last_sent
        why = f"the daemon knows less of producer {standing.producer} of topic {topic} than it did"
    if on_the_way and not is_known:
        raise OutboxInDoubt(f"{why}; {on_the_way} messages were on the way", hint=DECIDE, topic=topic)
