"""A subscription: the topics of a query, their bounds, the isolation level, and the handling of losses."""

from __future__ import annotations

import logging
import re
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from pyspark_plainsong.offsets import FIRST, Position, at_time
from pyspark_plainsong.partitions import whole_extent
from pyspark_plainsong.wire import BrokerError

if TYPE_CHECKING:
    from pyspark_plainsong.calls import Calls, Isolation
    from pyspark_plainsong.options import Bound, ReadOptions, TopicBound


#: How long to cache that a daemon has no transaction service.
SERVICE_OFF_S = 60.0


class Subscription:
    """The topics of a query, resolved at each call. All methods raise BrokerError."""

    def __init__(self, calls: Calls, options: ReadOptions, losses: Losses) -> None:
        self._calls = calls
        self._options = options
        self._losses = losses
        self._isolation: Isolation | None = None
        self._ask_s = 0.0

    @property
    def isolation(self) -> Isolation:
        """The isolation to read with: the option's, but uncommitted if the daemon has no transaction service."""
        if self._isolation is None:
            self._isolation = self._options.isolation
            if (
                self._options.as_of_ms is None
                and self._isolation == "committed"
                and self._calls.transaction_service().service == "off"
            ):
                self._isolation = "uncommitted"
                self._ask_s = time.monotonic() + SERVICE_OFF_S
        return self._isolation

    def ask_again(self) -> None:
        """Forget that the daemon had no transaction service, once that is ``SERVICE_OFF_S`` old.

        Call it between micro-batches only: isolation must not change within one.
        """
        if self._isolation != self._options.isolation and time.monotonic() >= self._ask_s:
            self._isolation = None

    def check_transactions(self) -> None:
        """Check that committed messages can be told from undecided ones.

        Raises:
          BrokerError: the transaction service is not available.
        """
        if self.isolation == "committed":
            service = self._calls.transaction_service()
            if not service.available:
                raise BrokerError(503, "transactions_unavailable", service.why or "it is not known what is committed")

    def topics(self) -> list[str]:
        """Return the names of the topics, sorted: those listed, or those that match the pattern now."""
        if self._options.topics is not None:
            return sorted(self._options.topics)
        return [topic for topic in self._calls.topics() if self.has(topic)]

    def has(self, topic: str) -> bool:
        """True if a topic belongs to the subscription, existing or not."""
        if self._options.topics is not None:
            return topic in self._options.topics
        return re.fullmatch(self._options.pattern, topic) is not None

    def generation(self, topic: str) -> int | None:
        """Return a topic's generation; None if a topic that matched the pattern is gone."""
        try:
            return self._calls.generation(topic)
        except BrokerError as error:
            if error.code == "topic_not_found" and self._options.topics is None:
                return None
            raise

    def start(self, topic: str) -> Position:
        """Return where the first read of a topic starts.

        Raises:
          DataLoss: the options name a message of an earlier generation, or one that expired.
        """
        generation = self._calls.generation(topic)
        asked = self._options.starting.of(topic)
        if asked.generation is not None and asked.generation != generation:
            self._losses.recreated(topic, asked.generation, generation)
            return Position(generation, FIRST)
        return Position(generation, self._position(topic, asked))

    def end(self, topic: str, start: bytes) -> bytes:
        """Return the exclusive end of a batch from ``start``. All transactions before it are decided.

        With ``as_of_ms``, no message that belongs to the batch can appear after the end.

        Raises:
          BrokerError: ``as_of_ms`` is too long ago, or in the future.
        """
        if self._options.as_of_ms is not None:
            # This reads nothing, but it closes the moment: no later commit gets a time up to it.
            self._calls.offsets(topic, start=FIRST, end=FIRST, isolation="committed", as_of_ms=self._options.as_of_ms)
        asked, generation = self._options.ending.of(topic)
        if generation is not None:
            found = self._calls.generation(topic)
            if found != generation:
                self._losses.recreated(topic, generation, found)
                asked = "latest"
        return self._decided(topic, start, None if asked in ("latest", "earliest") else _id(asked))

    def may_grow(self, topic: str, end: bytes) -> bool:
        """True if a later call of ``end`` may return a later position than ``end``."""
        asked = self._options.ending.of(topic).bound
        return self._options.as_of_ms is None and (isinstance(asked, str) or end < _id(asked))

    def newest(self, topic: str) -> bytes:
        """Return the position after all published messages, decided or not."""
        return self._calls.end(topic)[0]

    def after(self, topic: str, position: bytes) -> tuple[bytes, int]:
        """Return ``newest``, and about how many messages there are to read from a position on."""
        return self._calls.after(topic, position, self.isolation)

    def _position(self, topic: str, asked: TopicBound) -> bytes:
        if asked.bound == "earliest":
            return FIRST
        if asked.bound == "latest":
            return self._decided(topic, FIRST, None)
        if isinstance(asked.bound, bytes):
            self._check_there(topic, asked.bound)
        elif self._calls.standing(topic, _id(asked.bound)).expired:
            return FIRST  # a time promises only the messages that still exist
        return _id(asked.bound)

    def _check_there(self, topic: str, start: bytes) -> None:
        """Check a start at a message, which promises all messages after it. Raises DataLoss: some have expired."""
        if start == FIRST:
            return
        found = self._calls.standing(topic, start)
        if found.expired:
            self._losses.expired(topic, start, found.earliest)

    def _decided(self, topic: str, start: bytes, end: bytes | None) -> bytes:
        """Return the end of the decided messages, at most ``end``."""
        published, undecided = self._calls.end(topic)
        last = published if end is None else min(end, published)
        if self.isolation == "uncommitted" or self._options.as_of_ms is not None or not undecided or last <= start:
            return last
        # The daemon examines every message for this, so do it only if there are open transactions.
        return whole_extent(self._calls, topic, start=start, end=last, isolation="committed").end


def _id(bound: Bound) -> bytes:
    if isinstance(bound, int):
        return at_time(bound)
    assert isinstance(bound, bytes)
    return bound


# --- lost messages ---------------------------------------------------------------------------------

log = logging.getLogger("pyspark_plainsong")
WAY_OUT = "failOnDataLoss=false continues with the remaining messages"


class DataLoss(RuntimeError):
    """Messages are gone, or may be gone, that were not read."""


class Losses:
    """Handles lost messages: raises DataLoss (failOnDataLoss), or logs one warning and continues."""

    def __init__(self, namespace: str, *, fail: bool) -> None:
        self._namespace = namespace
        self._fail = fail
        self._warned: set[str] = set()

    def expired(self, topic: str, start: bytes, earliest: bytes) -> None:
        """Handle the expiry of messages from ``start`` on, if any were published then. Raises DataLoss."""
        self._lost(
            f"messages of topic {self._namespace}:{topic} published between {_when(start)} and {_when(earliest)} have "
            "expired, and may not have been read"
        )

    def recreated(self, topic: str, known: int, found: int) -> None:
        """Handle a topic that was deleted and created again. Raises DataLoss."""
        self._lost(
            f"topic {self._namespace}:{topic} was deleted and created again (generation {known} before, {found} now): "
            "unread messages of the former one are lost"
        )

    def deleted(self, topic: str) -> None:
        """Handle a deleted topic. Raises DataLoss."""
        self._lost(f"topic {self._namespace}:{topic} was deleted: its unread messages are lost, unless it is restored")

    def set_aside(self, topic: str, rows: int) -> None:
        """Warn about skipped damaged rows. It is no loss: an operator set them aside so that readers skip them."""
        self._warn(
            f"skipped {rows} damaged {'row' if rows == 1 else 'rows'} of topic {self._namespace}:{topic} that an operator has set aside"
        )

    def _lost(self, what: str) -> None:
        if self._fail:
            raise DataLoss(f"{what}; {WAY_OUT}")
        self._warn(what)

    def _warn(self, what: str) -> None:
        if what not in self._warned and len(self._warned) < 1_000:
            self._warned.add(what)
            log.warning("%s", what)


def _when(position: bytes) -> str:
    """Format the time in an id for people."""
    milliseconds = int.from_bytes(position[:8], "big")
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError):
        return f"{milliseconds} ms"
