"""What waits in an outbox, and since when: for people, and for whoever watches."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError

from plainsong.sql.errors import first_line
from plainsong.sql.outbox_errors import OutboxUnavailable
from plainsong.sql.outbox_tables import check_dialect, missing, outbox_tables
from plainsong.sql.relay_lock import RelayLock

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine

    from plainsong.sql.outbox_tables import OutboxTables


@dataclass(frozen=True, slots=True)
class TopicStatus:
    """What waits for one topic."""

    topic: str
    waiting: int
    """Messages that are not known to be published."""
    oldest_age_s: float | None
    """Since the oldest of them was written, by this computer's clock and the database's; None: there is none."""
    kept: int
    """Messages that are published, and kept for ``keep_s``."""
    producer: str | None
    """The relay's name in the topic; None: no relay has begun there."""
    next_number: int
    last_sent: int
    """The highest sequence id that the topic has; -1: none."""


@dataclass(frozen=True, slots=True)
class OutboxStatus:
    """All of an outbox."""

    is_relayed: bool
    """Whether a relay is at work."""
    topics: tuple[TopicStatus, ...]
    """By name."""

    @property
    def waiting(self) -> int:
        """Messages that are not known to be published."""
        return sum(each.waiting for each in self.topics)


def outbox_status(engine: Engine, *, tables: OutboxTables | None = None) -> OutboxStatus:
    """Count what is there; reads all that waits.

    Raises:
      OutboxUnusable, OutboxMissing: there is no outbox. OutboxUnavailable: the database cannot be asked.
    """
    check_dialect(engine.dialect)
    tables = outbox_tables() if tables is None else tables
    try:
        with engine.connect() as connection:
            is_relayed = RelayLock(engine, tables.messages.fullname).is_held(connection)
            with connection.begin():
                return OutboxStatus(is_relayed, tuple(_topics(connection, tables)))
    except SQLAlchemyError as error:
        lacks = missing(engine, tables)
        raise (lacks or OutboxUnavailable(f"the database cannot be asked: {first_line(error)}")) from error


def _topics(connection: Connection, tables: OutboxTables) -> list[TopicStatus]:
    columns = tables.messages.c
    waits, kept = columns.sent.is_(None), columns.sent.is_not(None)
    counted = select(columns.topic, func.count().label("messages"), func.min(columns.written).label("oldest"))
    waiting = {row.topic: row for row in connection.execute(counted.where(waits).group_by(columns.topic))}
    done = {row.topic: row for row in connection.execute(counted.where(kept).group_by(columns.topic))}
    stands = {row.topic: row for row in connection.execute(select(tables.topics))}
    now = datetime.now(UTC)
    found = []
    for topic in sorted({*waiting, *done, *stands}):
        row, stand = waiting.get(topic), stands.get(topic)
        found.append(
            TopicStatus(
                topic,
                0 if row is None else row.messages,
                None if row is None else _age_s(row.oldest, now),
                done[topic].messages if topic in done else 0,
                None if stand is None else stand.producer,
                0 if stand is None else stand.next_number,
                -1 if stand is None else stand.last_sent,
            )
        )
    return found


def _age_s(written: datetime, now: datetime) -> float:
    """SQLite's times are of UTC and do not say so."""
    return max(0.0, (now - (written if written.tzinfo else written.replace(tzinfo=UTC))).total_seconds())
