"""The relay: publishes what waits in an outbox, each message once, in each topic in the order of commits; one relay at a time.

The relay: publishes what waits in an outbox, each message once, in each topic in the order of commits.

For each topic, again and again:

    number    in a transaction: what is committed and has no number gets the next ones, without holes
    publish   in one request, with the numbers as sequence ids
    done      in a transaction: what the daemon has taken is deleted, or kept with the time

Whatever dies in between, the next relay opens the producer again: from then on nothing of the one before can arrive,
and the daemon says which number it has seen last. What it has is done with; what it has not is sent, with the same
numbers.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from sqlalchemy import func, select, text
from sqlalchemy.exc import SQLAlchemyError

from plainsong import calls
from plainsong._sync.delivery import opened
from plainsong.protocol.errors import GenerationChanged, Gone, InvalidParameter, PlainsongError, ProducerNotFound
from plainsong.protocol.frames import NO_ATTRIBUTES
from plainsong.protocol.requests import PublishRequest
from plainsong.sql.errors import OutboxBusy, OutboxMissing, OutboxUnavailable, first_line
from plainsong.sql.outbox import check_dialect, missing, outbox_tables
from plainsong.sql.relay_rows import SWEEP_ROWS, OpenedProducer, RelayRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sqlalchemy.engine import Connection, Engine

    from plainsong import Client
    from plainsong.sql.outbox import OutboxTables
    from plainsong.sql.relay_rows import Numbered

log = logging.getLogger("plainsong.sql")
#: Of one request. The daemon takes bodies of 16 MiB when it is not told otherwise.
MAX_BATCH_MESSAGES = 1_000
MAX_BATCH_BYTES = 1 << 20
#: How long to wait before looking again, when there was nothing; and for a lock that somebody else holds.
PAUSE_S = 0.25
LOCK_PAUSE_S = 1.0
#: The first pause after a failure, and the longest.
FIRST_RETRY_S = 0.5
LAST_RETRY_S = 30.0


@dataclass(slots=True)
class Relayed:
    """What a relay has done since it was made."""

    messages: int = 0
    """That the daemon took from this relay."""
    requests: int = 0
    failures: int = 0
    """Of topics and of the database; each was, or will be, tried again."""


@dataclass(slots=True)
class Failing:
    """A topic that cannot go on, and when it is tried again."""

    error: PlainsongError
    retry_s: float = FIRST_RETRY_S
    until: float = 0.0


class Relay:
    """Publishes what waits in the outbox of a database. One is at work at a time; others wait for it.

        with Client() as client:
            Relay(engine, client).run()

    A topic that cannot go on (there is none of that name, a message is too large for the daemon, …) waits, and is
    tried again; the others go on. To be used by one thread; ``stop`` may be called by any, and by signal handlers.

    Args:
      engine: of the outbox's database.
      client: of the daemon, and of the namespace that all topics of the outbox are in.
      tables: from ``outbox_tables``; None: those called ``plainsong_outbox``.
      keep_s: how long messages that were sent are kept in the table; 0: they are deleted at once.
      max_batch_messages, max_batch_bytes: of one request; a larger message goes alone.
      pause_s: before looking again, when nothing waited.
      on_sent: called with a topic, and how many messages the daemon has taken.
      on_failure: called with a topic (or "", for the database), and the error, when that is another than before.
    Raises:
      OutboxUnusable: it is no database that can hold an outbox. InvalidParameter: a number makes no sense.
    """

    def __init__(
        self,
        engine: Engine,
        client: Client,
        *,
        tables: OutboxTables | None = None,
        keep_s: float = 0.0,
        max_batch_messages: int = MAX_BATCH_MESSAGES,
        max_batch_bytes: int = MAX_BATCH_BYTES,
        pause_s: float = PAUSE_S,
        on_sent: Callable[[str, int], None] | None = None,
        on_failure: Callable[[str, PlainsongError], None] | None = None,
    ) -> None:
        check_dialect(engine.dialect)
        for name, number in (("max_batch_messages", max_batch_messages), ("max_batch_bytes", max_batch_bytes)):
            if number < 1:
                raise InvalidParameter(f"{name} is {number}", hint="use 1 or more")
        if keep_s < 0 or pause_s <= 0:
            raise InvalidParameter(f"keep_s is {keep_s}, pause_s {pause_s}", hint="use lengths of time")
        self._engine = engine
        self._tables = outbox_tables() if tables is None else tables
        self._rows = RelayRows(self._tables)
        self._lock = RelayLock(engine, self._tables.messages.fullname)
        self._lanes = RelayLanes(client)
        self._namespace = client.namespace
        self._keep_s = keep_s
        self._max_rows, self._max_bytes = max_batch_messages, max_batch_bytes
        self._pause_s = pause_s
        self._on_sent, self._on_failure = on_sent, on_failure
        self._stopped = False
        #: Wakes who waits. Unlike an Event it may be told by a signal handler in the middle of the wait.
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._failing: dict[str, Failing] = {}
        #: What was done so far.
        self.relayed = Relayed()

    def once(self) -> Relayed:
        """Publish until nothing waits.

        Returns:
          what was done, by this call and those before it.
        Raises:
          OutboxBusy: another relay is at work. OutboxMissing, OutboxUnavailable: the database. PlainsongError: what
          the daemon said of the first topic that could not go on; the others have gone on.
        """
        self._failing.clear()
        try:
            with self._at_work(wait=False) as connection:
                while self._round(connection, self._failing):
                    pass
                self._sweep(connection)
        except SQLAlchemyError as error:
            raise self._failed(error) from error
        for failing in self._failing.values():
            raise failing.error
        return self.relayed

    def run(self) -> None:
        """Publish, also what will come, until ``stop``. What fails is tried again, with pauses.

        Raises:
          OutboxMissing: the tables are not there.
        """
        pause_s = FIRST_RETRY_S
        while not self._stopped:
            try:
                with self._at_work(wait=True) as connection:
                    while not self._stopped:
                        if not self._round(connection, self._resting()):
                            self._sweep(connection)
                            self._wait(self._pause_s)
                        pause_s = FIRST_RETRY_S
                        self._failing.pop("", None)
            except OutboxBusy:
                return
            except SQLAlchemyError as error:
                failed = self._failed(error)
                if isinstance(failed, OutboxMissing):
                    raise failed from error
                self._fail("", failed)
                self._wait(pause_s)
                pause_s = min(2 * pause_s, LAST_RETRY_S)

    def stop(self) -> None:
        """Let ``run`` return, after the request that is under way."""
        self._stopped = True
        self._bell.put(None)

    def _wait(self, seconds: float) -> bool:
        """Wait, not beyond ``stop``; whether it was that."""
        if not self._stopped:
            with suppress(Empty):
                self._bell.get(timeout=seconds)
        return self._stopped

    def decide(self, topic: str, *, resend: bool) -> int:
        """Let a topic go on whose messages on the way are in doubt (``OutboxInDoubt``).

        Args:
          resend: publish them, perhaps again; else they count as published, perhaps though they are not.
        Returns:
          how many there were.
        Raises:
          OutboxBusy: a relay is at work; stop it first. OutboxMissing, OutboxUnavailable: the database.
        """
        try:
            with self._at_work(wait=False) as connection:
                self._rows.standing(connection, topic, self._namespace)
                return self._rows.decide(connection, topic, resend=resend)
        except SQLAlchemyError as error:
            raise self._failed(error) from error

    # --- one after the other ---------------------------------------------------------------------

    @contextmanager
    def _at_work(self, *, wait: bool) -> Iterator[Connection]:
        """The connection that all is done with, while we are the only relay: the lock is lost with it."""
        with self._engine.connect() as connection:
            if self._engine.dialect.name == "postgresql":
                # Every statement sees what is committed as it begins, behind the lock that the one before it took.
                connection.execution_options(isolation_level="READ COMMITTED")
            if not self._lock.take(connection):
                if not wait:
                    raise OutboxBusy("another relay is at work at this outbox", hint="one is enough; stop it first")
                self._tell("", OutboxBusy("another relay is at work at this outbox", hint="waiting for it to end"))
                while not self._lock.take(connection):
                    if self._wait(LOCK_PAUSE_S):
                        raise OutboxBusy("another relay was at work until this one was stopped")
            try:
                yield connection
            finally:
                self._lanes.close()
                self._lock.let_go(connection)

    def _round(self, connection: Connection, without: dict[str, Failing]) -> bool:
        """One request for each topic that waits; whether there was any."""
        topics = self._rows.topics_that_wait(connection, without)
        for topic in topics:
            if self._stopped:
                break
            try:
                self._relay(connection, topic)
            except PlainsongError as error:
                self._lanes.drop(topic)
                self._fail(topic, error)
            else:
                self._failing.pop(topic, None)
        return bool(topics)

    def _relay(self, connection: Connection, topic: str) -> None:
        lane = self._lanes.get(topic) or self._opened(connection, topic)
        numbered = self._rows.take(connection, topic, self._max_rows, self._max_bytes)
        if not numbered:
            return
        lane.publish(numbered)
        self._rows.sent(connection, topic, numbered[-1].number, keep=self._keep_s > 0)
        self.relayed.messages += len(numbered)
        self.relayed.requests += 1
        if self._on_sent is not None:
            self._on_sent(topic, len(numbered))

    def _opened(self, connection: Connection, topic: str) -> RelayLane:
        """The topic's producer, with all that the daemon has of it done with."""
        standing = self._rows.standing(connection, topic, self._namespace)
        generation = standing.generation
        if generation is not None:
            known = self._lanes.last_known(topic, standing.producer, generation)
            self._rows.check_remembered(connection, topic, known)
        lane = self._lanes.open(topic, standing.producer)
        before = None
        if generation is not None and standing.has_moved(lane.opened):
            before = self._lanes.last_known(topic, standing.producer, generation)
        self._rows.believe(connection, topic, lane.opened, before, keep=self._keep_s > 0)
        return lane

    def _sweep(self, connection: Connection) -> None:
        while self._rows.sweep(connection, self._keep_s) == SWEEP_ROWS and not self._stopped:
            pass

    # --- failures --------------------------------------------------------------------------------

    def _resting(self) -> dict[str, Failing]:
        """Topics that are not tried now."""
        now = time.monotonic()
        return {topic: failing for topic, failing in self._failing.items() if failing.until > now}

    def _fail(self, topic: str, error: PlainsongError) -> None:
        before = self._failing.get(topic)
        failing = Failing(error) if before is None else Failing(error, min(2 * before.retry_s, LAST_RETRY_S))
        failing.until = time.monotonic() + failing.retry_s
        self._failing[topic] = failing
        self.relayed.failures += 1
        if before is None or before.error.code != error.code:
            self._tell(topic, error)

    def _tell(self, topic: str, error: PlainsongError) -> None:
        log.warning("%s: %s. %s", topic or "the outbox", error.detail or error.title, error.hint)
        if self._on_failure is not None:
            self._on_failure(topic, error)

    def _failed(self, error: SQLAlchemyError) -> OutboxMissing | OutboxUnavailable:
        lacks = missing(self._engine, self._tables)
        return lacks or OutboxUnavailable(f"the outbox's database failed: {first_line(error)}")


# --- relay lane ------------------------------------------------------------------------------------
#
# The way into the topics: for each a producer that is opened, published by once, and opened again when in doubt.
#
# A publish is one request and is never repeated here: whatever happens to it, the next opening tells what became of
# it.


#: Producers that are open at once; one more closes the one that was opened first.
MAX_LANES = 1_000


class RelayLane:
    """The session of one topic's producer."""

    def __init__(self, client: Client, topic: str, producer: str, opened: OpenedProducer) -> None:
        self._client = client
        self._topic = topic
        self._producer = producer
        self.opened = opened

    def publish(self, messages: Sequence[Numbered]) -> None:
        """Publish them in one request. Raises what went wrong; open the producer again then."""
        request = PublishRequest(
            [each.payload for each in messages],
            producer=self._producer,
            producer_epoch=self.opened.epoch,
            generation=self.opened.generation,
            sequence_ids=[each.number for each in messages],
        )
        ttls_s = [each.ttl_s for each in messages]
        if any(ttl_s is not None for ttl_s in ttls_s):
            request.message_ttls_s = ttls_s
        if any(each.attributes for each in messages):
            request.attributes = [
                json.loads(each.attributes) if each.attributes else NO_ATTRIBUTES for each in messages
            ]
        channel = self._client._channel
        channel.call(calls.publish_in_session(channel.namespace, self._topic, request))


class RelayLanes:
    """The sessions that are open."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._open: dict[str, RelayLane] = {}

    def get(self, topic: str) -> RelayLane | None:
        """The topic's, if it is open."""
        return self._open.get(topic)

    def open(self, topic: str, producer: str) -> RelayLane:
        """Open a session: from now on nothing that an older one has sent can arrive."""
        channel = self._client._channel
        limit_s = channel.settings.deadline_s
        known, _ = opened(channel, topic, producer, limit_s=limit_s)
        while len(self._open) >= MAX_LANES:
            del self._open[next(iter(self._open))]
        lane = RelayLane(
            self._client, topic, producer, OpenedProducer(known.epoch, known.generation, known.last_sequence_id)
        )
        self._open[topic] = lane
        return lane

    def last_known(self, topic: str, producer: str, generation: int) -> int | None:
        """The last sequence id in a generation of the topic; None: the daemon does not know it any more."""
        channel = self._client._channel
        try:
            known = channel.call(calls.ask_producer(channel.namespace, topic, producer, generation))
        except (ProducerNotFound, Gone, GenerationChanged):
            return None
        return known.last_sequence_id

    def drop(self, topic: str) -> None:
        """The next one is opened anew."""
        self._open.pop(topic, None)

    def close(self) -> None:
        """All are opened anew."""
        self._open.clear()


# --- relay lock ------------------------------------------------------------------------------------
#
# One relay at a time: an advisory lock of PostgreSQL's session, or a locked file beside SQLite's.
#
# Both end with the process that holds them, however it ends. They are for calm: what keeps two relays from harm,
# when one has lost its lock without knowing, are the numbers in the tables and the session that each opens in a
# topic.


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


# --- outbox status ---------------------------------------------------------------------------------
#
# What waits in an outbox, and since when: for people, and for whoever watches.


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
