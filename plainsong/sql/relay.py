"""The relay: publishes the messages of an outbox, each once and per topic in commit order; one relay runs at a time.

For each topic, repeatedly:

    number    in a transaction: committed messages without a number get the next ones, without gaps
    publish   in one request, with the numbers as sequence ids
    done      in a transaction: published messages are deleted, or kept with the time

If a relay dies in between, the next one opens the producer again. From then on no request of the earlier relay can
succeed, and the daemon returns the last number that it has stored. Messages up to that number are done; later ones are
sent again with the same numbers.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from sqlalchemy import func, select, text
from sqlalchemy.exc import SQLAlchemyError

from plainsong import calls
from plainsong._sync.delivery import opened
from plainsong.errors import DeadlineExceeded
from plainsong.protocol.backoff import Backoff
from plainsong.protocol.errors import GenerationChanged, Gone, InvalidParameter, PlainsongError, ProducerNotFound
from plainsong.protocol.frames import NO_ATTRIBUTES
from plainsong.protocol.plurals import counted
from plainsong.protocol.requests import PublishRequest
from plainsong.request_sizes import RequestSizes
from plainsong.settings import upload_s
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
#: Bytes of one request, payloads and attributes. The daemon accepts bodies of 16 MiB by default.
MAX_BATCH_MESSAGES = 1_000
MAX_BATCH_BYTES = 1 << 20
#: Pause before the next query if no message was waiting, and before the next attempt to take the lock.
PAUSE_S = 0.25
LOCK_PAUSE_S = 1.0
#: Pauses after failures.
RETRIES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)


@dataclass(slots=True)
class Relayed:
    """The work of a relay since it was created."""

    messages: int = 0
    """Messages that this relay published."""
    requests: int = 0
    failures: int = 0
    """Failures of topics and of the database; each was, or will be, retried."""


@dataclass(slots=True)
class Failing:
    """A topic that failed, and the time of its next attempt."""

    error: PlainsongError
    backoff: Backoff = field(default_factory=lambda: Backoff(RETRIES_S))
    until: float = 0.0


class Relay:
    """Publishes the messages of an outbox. One relay works at a time; others wait for it.

        with Client() as client:
            Relay(engine, client).run()

    A topic that fails (it does not exist, a message is too large for the daemon, …) is retried after a pause, while
    the others continue. Requests that get no answer in time become smaller. Use a relay in one thread; ``stop`` may be
    called by any thread and by signal handlers.

    Args:
      engine: engine of the outbox's database.
      client: client of the daemon, in the namespace of all topics of the outbox.
      tables: from ``outbox_tables``; None: those named ``plainsong_outbox``.
      keep_s: how long sent messages are kept in the table; 0: they are deleted at once.
      max_batch_messages, max_batch_bytes: limits of one request; a larger message is sent alone.
      pause_s: pause before the next query if no message was waiting.
      on_sent: called with a topic and the number of messages published.
      on_failure: called with a topic (or "", for the database) and the error, if the error has changed.
    Raises:
      OutboxUnusable: the database is not supported. InvalidParameter: a number is out of range.
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
        self._producers = RelayProducers(client)
        self._namespace = client.namespace
        self._keep_s = keep_s
        self._pause_s = pause_s
        self._on_sent, self._on_failure = on_sent, on_failure
        self._stopped = False
        #: Wakes ``run``. Unlike an Event it can be set by a signal handler in the middle of the wait.
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._failing: dict[str, Failing] = {}
        self._sizes = RequestSizes(max_batch_messages, max_batch_bytes)
        #: Totals so far.
        self.relayed = Relayed()

    def once(self) -> Relayed:
        """Publishes until no message is waiting.

        Returns:
          the totals of this call and all earlier ones.
        Raises:
          OutboxBusy: another relay is running. OutboxMissing, OutboxUnavailable: the database failed.
          PlainsongError: the error of the first topic that failed; the other topics were published.
        """
        self._failing.clear()
        try:
            with self._locked(wait=False) as connection:
                while self._round(connection, self._failing):
                    pass
                self._sweep(connection)
        except SQLAlchemyError as error:
            raise self._failed(error) from error
        for failing in self._failing.values():
            raise failing.error
        return self.relayed

    def run(self) -> None:
        """Publishes, including messages that arrive later, until ``stop``. Retries failures, with pauses.

        Raises:
          OutboxMissing: the tables do not exist.
        """
        backoff = Backoff(RETRIES_S)
        while not self._stopped:
            try:
                with self._locked(wait=True) as connection:
                    while not self._stopped:
                        if not self._round(connection, self._paused_topics()):
                            self._sweep(connection)
                            self._wait(self._pause_s)
                        backoff.reset()
                        self._failing.pop("", None)
            except OutboxBusy:
                return
            except SQLAlchemyError as error:
                failed = self._failed(error)
                if isinstance(failed, OutboxMissing):
                    raise failed from error
                self._fail("", failed)
                self._wait(backoff.failed())

    def stop(self) -> None:
        """Makes ``run`` return after the request under way."""
        self._stopped = True
        self._bell.put(None)

    def _wait(self, seconds: float) -> bool:
        """Waits, at most until ``stop`` is called; returns True if it was."""
        if not self._stopped:
            with suppress(Empty):
                self._bell.get(timeout=seconds)
        return self._stopped

    def decide(self, topic: str, *, resend: bool) -> int:
        """Lets a topic continue after ``OutboxInDoubt``: decides about its messages in flight.

        Args:
          resend: publish them, perhaps twice; otherwise they count as published, even if they are not.
        Returns:
          the number of messages in flight.
        Raises:
          OutboxBusy: a relay is running; stop it first. OutboxMissing, OutboxUnavailable: the database failed.
        """
        try:
            with self._locked(wait=False) as connection:
                self._rows.standing(connection, topic, self._namespace)
                return self._rows.decide(connection, topic, resend=resend)
        except SQLAlchemyError as error:
            raise self._failed(error) from error

    # --- rounds ----------------------------------------------------------------------------------

    @contextmanager
    def _locked(self, *, wait: bool) -> Iterator[Connection]:
        """Opens the connection for all work, which holds the relay's lock; the lock ends with it."""
        with self._engine.connect() as connection:
            if self._engine.dialect.name == "postgresql":
                # Every statement must see everything committed before it, after the row lock of the statement before.
                connection.execution_options(isolation_level="READ COMMITTED")
            if not self._lock.take(connection):
                if not wait:
                    raise OutboxBusy("another relay is running for this outbox", hint="stop it first")
                self._tell("", OutboxBusy("another relay is running for this outbox", hint="waiting for it to end"))
                while not self._lock.take(connection):
                    if self._wait(LOCK_PAUSE_S):
                        raise OutboxBusy("another relay was running until this one was stopped")
            try:
                yield connection
            finally:
                self._producers.close()
                self._lock.release(connection)

    def _round(self, connection: Connection, without: dict[str, Failing]) -> bool:
        """Sends one request for each topic with messages; returns True if there was any."""
        topics = self._rows.topics_that_wait(connection, without)
        for topic in topics:
            if self._stopped:
                break
            try:
                self._relay(connection, topic)
            except PlainsongError as error:
                self._producers.drop(topic)
                self._fail(topic, error)
            else:
                self._failing.pop(topic, None)
        return bool(topics)

    def _relay(self, connection: Connection, topic: str) -> None:
        producer = self._producers.get(topic) or self._opened(connection, topic)
        numbered = self._rows.take(connection, topic, *self._sizes.of(topic))
        if not numbered:
            return
        try:
            producer.publish(numbered)
        except DeadlineExceeded as error:
            if error.outcome != "unknown":
                raise  # the request was never sent
            size = sum(each.size for each in numbered)
            messages = counted(len(numbered), "message")
            error.detail = f"a request of {messages}, {size} bytes, got no answer in time: {error.detail}"
            error.args = (error.detail,)
            if len(numbered) == 1:
                raise
            if not self._sizes.is_reduced(topic):
                self._tell(topic, error)
            self._sizes.timed_out(topic, len(numbered), size)
            # Send fewer of them again immediately. The messages keep their numbers, and once the producer is opened
            # again, this request can no longer take effect if it has not done so already.
            self._producers.drop(topic)
            self.relayed.failures += 1
            return
        self._sizes.passed(topic)
        self._rows.sent(connection, topic, numbered[-1].number, keep=self._keep_s > 0)
        self.relayed.messages += len(numbered)
        self.relayed.requests += 1
        if self._on_sent is not None:
            self._on_sent(topic, len(numbered))

    def _opened(self, connection: Connection, topic: str) -> RelayProducer:
        """Opens the topic's producer, and marks the messages that the daemon has as done."""
        standing = self._rows.standing(connection, topic, self._namespace)
        generation = standing.generation
        if generation is not None:
            known = self._producers.last_known(topic, standing.producer, generation)
            self._rows.check_remembered(connection, topic, known)
        producer = self._producers.open(topic, standing.producer)
        before = None
        if generation is not None and standing.has_moved(producer.opened):
            before = self._producers.last_known(topic, standing.producer, generation)
        self._rows.reconcile(connection, topic, producer.opened, before, keep=self._keep_s > 0)
        return producer

    def _sweep(self, connection: Connection) -> None:
        while self._rows.sweep(connection, self._keep_s) == SWEEP_ROWS and not self._stopped:
            pass

    # --- failures --------------------------------------------------------------------------------

    def _paused_topics(self) -> dict[str, Failing]:
        """Failed topics that are not retried yet."""
        now = time.monotonic()
        return {topic: failing for topic, failing in self._failing.items() if failing.until > now}

    def _fail(self, topic: str, error: PlainsongError) -> None:
        before = self._failing.get(topic)
        failing = Failing(error) if before is None else Failing(error, before.backoff)
        failing.until = time.monotonic() + failing.backoff.failed()
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


# --- producers -------------------------------------------------------------------------------------
#
# A publish is one request, and is never repeated: after any error, opening the producer again reveals its outcome.


#: Producers open at once; one more closes the one opened first.
MAX_OPEN_PRODUCERS = 1_000


class RelayProducer:
    """The session of one topic's producer."""

    def __init__(self, client: Client, topic: str, producer: str, opened: OpenedProducer) -> None:
        self._client = client
        self._topic = topic
        self._producer = producer
        self.opened = opened

    def publish(self, messages: Sequence[Numbered]) -> None:
        """Publishes in one request. After an error, open the producer again."""
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
        call = calls.publish_in_session(channel.namespace, self._topic, request)
        # No caller waits for the relay, and a large message must get through a slow link, however long it takes.
        channel.call(call, channel.settings.deadline_s + upload_s(len(call.request.body)))


class RelayProducers:
    """The open sessions by topic."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._open: dict[str, RelayProducer] = {}

    def get(self, topic: str) -> RelayProducer | None:
        """The topic's session, if it is open."""
        return self._open.get(topic)

    def open(self, topic: str, name: str) -> RelayProducer:
        """Opens a session; from now on no request of an older one can succeed."""
        channel = self._client._channel
        limit_s = channel.settings.deadline_s
        known, _ = opened(channel, topic, name, limit_s=limit_s)
        while len(self._open) >= MAX_OPEN_PRODUCERS:
            del self._open[next(iter(self._open))]
        producer = RelayProducer(
            self._client, topic, name, OpenedProducer(known.epoch, known.generation, known.last_sequence_id)
        )
        self._open[topic] = producer
        return producer

    def last_known(self, topic: str, producer: str, generation: int) -> int | None:
        """The last sequence id in a generation of the topic; None: the daemon no longer knows it."""
        channel = self._client._channel
        try:
            known = channel.call(calls.ask_producer(channel.namespace, topic, producer, generation))
        except (ProducerNotFound, Gone, GenerationChanged):
            return None
        return known.last_sequence_id

    def drop(self, topic: str) -> None:
        """Forgets the topic's session; the next ``open`` opens a new one."""
        self._open.pop(topic, None)

    def close(self) -> None:
        """Forgets all sessions."""
        self._open.clear()


# --- lock ------------------------------------------------------------------------------------------
#
# One relay at a time: an advisory lock of a PostgreSQL session, or a locked file next to SQLite's database. Both end
# with the process that holds them. The lock only avoids useless work: if a relay loses it without noticing, the numbers
# in the tables and the producer sessions still keep two relays correct.


#: Suffix of the lock file next to SQLite's database, after the names of the database and the table.
SUFFIX = "relay"


class RelayLock:
    """The lock of one outbox.

    Args:
      engine: engine of its database.
      table: name of its table of messages.
    """

    def __init__(self, engine: Engine, table: str) -> None:
        digest = hashlib.sha256(f"plainsong relay {table}".encode()).digest()
        self._key = {"key": int.from_bytes(digest[:8], "big", signed=True)}
        self._path = _file_of(engine, table)
        self._is_postgresql = engine.dialect.name == "postgresql"
        self._file: int | None = None

    def take(self, connection: Connection) -> bool:
        """Tries to take the lock, for the life of this connection (PostgreSQL) or this object (SQLite)."""
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

    def release(self, connection: Connection) -> None:
        """Releases the lock. A connection that fails is closed, which releases it too."""
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
        """True if any process, perhaps this one, has the lock."""
        if self._file is not None:
            return True
        if not self.take(connection):
            return True
        self.release(connection)
        return False


def _file_of(engine: Engine, table: str) -> str | None:
    """The lock file of a SQLite database; None: the database is not a file."""
    if engine.dialect.name != "sqlite":
        return None
    with engine.connect() as connection:
        path = connection.exec_driver_sql("SELECT file FROM pragma_database_list WHERE name = 'main'").scalar()
    return f"{path}-{table}-{SUFFIX}" if path else None


# --- status ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TopicStatus:
    """The messages of one topic."""

    topic: str
    waiting: int
    """Messages that are not known to be published."""
    oldest_age_s: float | None
    """Seconds since the oldest of them was written, by this computer's and the database's clocks; None if none waits."""
    kept: int
    """Published messages that are kept for ``keep_s``."""
    producer: str | None
    """The relay's producer in the topic; None if no relay has published there yet."""
    next_number: int
    last_sent: int
    """The highest sequence id known to be published; -1: none."""


@dataclass(frozen=True, slots=True)
class OutboxStatus:
    """The state of an outbox."""

    is_relayed: bool
    """True if a relay is running."""
    topics: tuple[TopicStatus, ...]
    """Topics with messages, by name."""

    @property
    def waiting(self) -> int:
        """Messages that are not known to be published."""
        return sum(each.waiting for each in self.topics)


def outbox_status(engine: Engine, *, tables: OutboxTables | None = None) -> OutboxStatus:
    """Counts the messages of an outbox; reads all waiting messages.

    Raises:
      OutboxUnusable, OutboxMissing: there is no outbox. OutboxUnavailable: the database cannot be reached.
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
        raise (lacks or OutboxUnavailable(f"cannot query the database: {first_line(error)}")) from error


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
    """SQLite's times are in UTC, without a zone."""
    return max(0.0, (now - (written if written.tzinfo else written.replace(tzinfo=UTC))).total_seconds())
