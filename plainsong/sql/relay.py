"""The relay: publishes what waits in an outbox, each message once, in each topic in the order of commits.

For each topic, again and again:

    number    in a transaction: what is committed and has no number gets the next ones, without holes
    publish   in one request, with the numbers as sequence ids
    done      in a transaction: what the daemon has taken is deleted, or kept with the time

Whatever dies in between, the next relay opens the producer again: from then on nothing of the one before can arrive,
and the daemon says which number it has seen last. What it has is done with; what it has not is sent, with the same
numbers.
"""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from sqlalchemy.exc import SQLAlchemyError

from plainsong.sql.errors import first_line
from plainsong.sql.outbox_errors import OutboxBusy, OutboxMissing, OutboxUnavailable
from plainsong.sql.outbox_tables import check_dialect, missing, outbox_tables
from plainsong.sql.relay_lane import Lanes
from plainsong.sql.relay_lock import RelayLock
from plainsong.sql.relay_rows import SWEEP_ROWS, RelayRows
from protocol.errors import InvalidParameter, PlainsongError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy.engine import Connection, Engine

    from plainsong import Client
    from plainsong.sql.outbox_tables import OutboxTables
    from plainsong.sql.relay_lane import Lane

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
        self._lanes = Lanes(client)
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

    def _opened(self, connection: Connection, topic: str) -> Lane:
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
