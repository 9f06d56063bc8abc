"""Publishes the rows that tasks have stored, exactly once: opens a session, checks the producer's state, publishes.

A topic remembers the highest sequence id of each producer, so a publish can be repeated if its answer was lost.
Opening a session raises the producer's epoch and fences earlier sessions: none of their publishes can land later, so
the state that the topic returns is final.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql.datasource import WriterCommitMessage

from pyspark_plainsong.wire import BrokerError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyspark_plainsong.calls import Calls, ProducerState


@dataclass(frozen=True)
class Stored:
    """The rows that a task stored in one topic."""

    rows: int
    generation: int
    """The topic's generation when the first row was stored; all others were stored in the same."""


@dataclass(frozen=True)
class TaskStored(WriterCommitMessage):
    """A successful task attempt. Its rows are invisible until a publish lists its segment."""

    partition: int
    segment: str
    topics: Mapping[str, Stored]
    """The topics that rows were stored in."""
    query_id: str | None = None
    """The streaming query, the same over all restarts from one checkpoint; None: a batch."""


@dataclass(frozen=True)
class Winners:
    """The segments that a save or micro-batch publishes in one topic: those of the attempts that Spark counts."""

    topic: str
    segments: tuple[str, ...]
    rows: int
    generation: int


class MixedGenerations(RuntimeError):
    """The topic was created again while tasks were storing; nothing was published."""


class OutOfOrder(RuntimeError):
    """With ``ordered``, rows of a topic came from several partitions; nothing was published."""


def winners(tasks: Iterable[TaskStored]) -> list[Winners]:
    """Return the segments to publish, in the order of the partitions, for each topic with rows; topics by name.

    Raises:
      MixedGenerations: some rows were stored before a topic was created again, and some after it.
    """
    by_topic: dict[str, list[tuple[TaskStored, Stored]]] = {}
    for task in sorted(tasks, key=lambda task: task.partition):
        for topic, stored in task.topics.items():
            by_topic.setdefault(topic, []).append((task, stored))
    found = []
    for topic, parts in sorted(by_topic.items()):
        generations = {stored.generation for _, stored in parts}
        if len(generations) > 1:
            raise MixedGenerations(
                f"topic {topic} was created again during the write (generations {sorted(generations)}): nothing was "
                "published; write it again"
            )
        segments = tuple(task.segment for task, _ in parts)
        found.append(Winners(topic, segments, sum(stored.rows for _, stored in parts), generations.pop()))
    return found


def check_order(won: Iterable[Winners], *, ordered: bool) -> None:
    """Check that ``ordered`` can be fulfilled.

    Raises:
      OutOfOrder: several tasks stored rows of one topic, so their order is undefined.
    """
    for each in won:
        if ordered and len(each.segments) > 1:
            raise OutOfOrder(
                f"ordered=true, and {len(each.segments)} partitions have rows for topic {each.topic}: "
                "coalesce(1) and sortWithinPartitions() first; nothing was published"
            )


# --- publishing ------------------------------------------------------------------------------------

#: A publish refused with one of these may still have landed in an earlier attempt.
_SHUT_OUT = frozenset({"producer_fenced", "producer_expired"})
_OFF = "deduplication_disabled"


class NotPublished(RuntimeError):
    """The rows are not in the topic named, and no request in flight will publish them."""


class CheckpointRewound(RuntimeError):
    """The topic named has a later micro-batch of the query, or another one of this number; nothing was published."""


class OutcomeUnknown(RuntimeError):
    """The topic named may have the rows; the daemon did not answer."""


_FINGERPRINT_BITS = 31
#: A path, or a URL of one; Hadoop quotes no characters in it. Other URLs do not match.
_LOCAL = re.compile(r"(?:file:(?:///?)?(?=/))?((?![\w+.-]+:).+)", re.DOTALL)


class MicroBatch(NamedTuple):
    """A micro-batch, as the sequence id that topics remember: its number plus 1, then its fingerprint in 31 bits."""

    number: int
    """-1: none."""
    fingerprint: int = 0
    """Distinguishes micro-batches that Spark planned under the same number; 0 if unknown."""

    @property
    def sequence_id(self) -> int:
        """The sequence id, which increases with the number."""
        return (self.number + 1) << _FINGERPRINT_BITS | self.fingerprint

    @classmethod
    def of(cls, sequence_id: int) -> MicroBatch:
        """Convert a sequence id back. Smaller ones are numbers, published by versions before 0.2."""
        number, fingerprint = divmod(sequence_id, 1 << _FINGERPRINT_BITS)
        return cls(number - 1, fingerprint) if number > 0 else cls(sequence_id)

    @classmethod
    def logged(cls, checkpoint: str | None, number: int) -> MicroBatch:
        """Return a micro-batch with the fingerprint of its entry in the offset log of a checkpoint on local disks.

        A repeated micro-batch keeps its entry. A micro-batch that is planned again gets an entry with a different time.
        """
        local = _LOCAL.fullmatch(checkpoint or "")
        if local is None:
            return cls(number)
        try:
            entry = (Path(local[1]) / "offsets" / str(number)).read_bytes()
        except OSError:
            return cls(number)
        return cls(number, int.from_bytes(sha256(entry).digest()[:8], "big") % ((1 << _FINGERPRINT_BITS) - 1) + 1)

    def is_other_than(self, other: MicroBatch) -> bool:
        """True if both fingerprints are known, and differ."""
        return 0 not in (self.fingerprint, other.fingerprint) and self.fingerprint != other.fingerprint


@dataclass(frozen=True)
class Identity:
    """The producer and sequence id by which topics remember a save or a micro-batch."""

    producer: str
    sequence_id: int
    memory_s: int | None = None
    """Retention of the producer's state after its last publish or session; None: the daemon's default."""
    must_be_remembered: bool = True
    """Refuse topics without deduplication, where a second run would publish everything again."""
    is_micro_batch: bool = True
    """True if Spark numbers the publishes, and repeats only the last one; ``sequence_id`` is that of a ``MicroBatch``.
    False if the user numbers the saves, and may repeat any recent one."""

    def publish(self, calls: Calls, won: Winners) -> bool:
        """Publish the segments in one topic; False if the topic already has this save or micro-batch.

        Raises:
          NotPublished: the topic does not have the rows.
          CheckpointRewound: the topic has a later micro-batch, or one of this number that Spark planned separately, with
            possibly different rows.
          OutcomeUnknown: the topic may have the rows.
        """
        try:
            session = calls.open_producer(
                won.topic, self.producer, retention_s=self.memory_s, generation=won.generation
            )
        except BrokerError as error:
            if error.code != _OFF or self.must_be_remembered:
                raise self._not_published(won, error) from error
            return self._publish_unremembered(calls, won)
        if self.is_micro_batch:
            self._check_checkpoint(won, MicroBatch.of(session.last_sequence_id))
        if self._is_there(session):
            return False
        if session.last_sequence_id > self.sequence_id:
            raise NotPublished(
                f"{_rows_for(won)} not published: it has save {session.last_sequence_id} of "
                f"producer {self.producer}, and save {self.sequence_id} is not among the last it remembers; use a "
                "sequenceId above all earlier ones"
            )
        try:
            self._send(calls, won, session.epoch)
        except BrokerError as error:
            if error.outcome == "not-applied" and error.code not in _SHUT_OUT:
                raise self._not_published(won, error) from error
            return self._settle(calls, won, error)
        return True  # a duplicate, too: in this session it can only be our own retry

    def _check_checkpoint(self, won: Winners, last: MicroBatch) -> None:
        """Raises CheckpointRewound."""
        own = MicroBatch.of(self.sequence_id)
        if last.number > own.number:
            found = f"micro-batch {last.number} already, which no query publishes before this one"
        elif last.number == own.number and last.is_other_than(own):
            found = f"another micro-batch {last.number} already, which Spark planned at another time"
        else:
            return
        raise CheckpointRewound(
            f"{_rows_for(won)} not published: this is micro-batch {own.number} of producer "
            f"{self.producer}, and the topic has {found}; was the checkpoint restored from an older copy, or is it new "
            "under an old producerName? Restore the newest checkpoint, or start from a new one without producerName "
            "(its input is then published again)"
        )

    def is_complete(self, calls: Calls, won: Winners) -> bool:
        """True if the topic has the rows; if False, no publish in flight can add them.

        Raises:
          BrokerError: the daemon does not answer.
        """
        known = calls.producer(won.topic, self.producer)
        if known is None:
            return False  # no session was opened, so nothing was published
        return self._is_there(known) or self._is_there(calls.open_producer(won.topic, self.producer))

    def forget(self, calls: Calls, won: Iterable[Winners]) -> None:
        """Delete the topics' state of this identity, which is not used again. Errors are ignored: the state expires."""
        with suppress(BrokerError):
            for each in won:
                calls.forget_producer(each.topic, self.producer)

    def _is_there(self, known: ProducerState) -> bool:
        """True if the producer's state shows that this was published."""
        if self.is_micro_batch:
            return MicroBatch.of(known.last_sequence_id).number >= MicroBatch.of(self.sequence_id).number
        if known.last_sequence_id > self.sequence_id:
            return known.has(self.sequence_id)
        return known.last_sequence_id == self.sequence_id

    def _send(self, calls: Calls, won: Winners, epoch: int | None) -> None:
        calls.publish_staged(
            won.topic,
            producer=self.producer,
            sequence_id=self.sequence_id,
            segments=won.segments,
            epoch=epoch,
            generation=won.generation,
            repeatable=epoch is not None,
        )

    def _publish_unremembered(self, calls: Calls, won: Winners) -> bool:
        """Publish in a topic without deduplication: one attempt, since the topic would not recognize a retry."""
        try:
            self._send(calls, won, None)
        except BrokerError as error:
            if error.outcome == "not-applied":
                raise self._not_published(won, error) from error
            raise OutcomeUnknown(
                f"it is not known whether topic {won.topic} has the {show_rows(won.rows)}, "
                f"since its deduplication is off: {error}"
            ) from error
        return True

    def _settle(self, calls: Calls, won: Winners, error: BrokerError) -> bool:
        """Return True if a publish of unknown outcome has landed; otherwise raise NotPublished or OutcomeUnknown."""
        try:
            complete = self.is_complete(calls, won)
        except BrokerError as silence:
            raise OutcomeUnknown(
                f"it is not known whether topic {won.topic} has the {show_rows(won.rows)}: {error}; then: {silence}. "
                f"The topic remembers them as producer {self.producer}, sequence id {self.sequence_id}"
            ) from error
        if not complete:
            raise self._not_published(won, error) from error
        return True

    def _not_published(self, won: Winners, error: BrokerError) -> NotPublished:
        why = str(error)
        if error.code == _OFF:
            why += "; without it a second run would publish every row again"
        elif self.memory_s is not None and error.code == "too_many_producers":
            why += (
                f"; each name or query is remembered for memoryDays ({self.memory_s // 86400}) after its last save: lower "
                "memoryDays, or delete the producers of queries that are done"
            )
        elif self.memory_s is not None and "retention" in error.detail:
            why += f"; memoryDays {self.memory_s // 86400} was requested: lower it, or raise the daemon's limit"
        return NotPublished(f"{_rows_for(won)} not published: {why}")


def show_rows(count: int) -> str:
    """``1 row``, ``12 rows``."""
    return "1 row" if count == 1 else f"{count} rows"


def _rows_for(won: Winners) -> str:
    """The beginning of a sentence."""
    return f"{show_rows(won.rows)} for topic {won.topic} {'was' if won.rows == 1 else 'were'}"


def publish_under(calls: Calls, won: Winners, pointer: int) -> None:
    """Publish the segments under an outer transaction's write pointer; repeating it does nothing.

    Raises:
      NotPublished, OutcomeUnknown: as ``Identity.publish``.
    """
    try:
        calls.publish_under(won.topic, pointer=pointer, segments=won.segments, generation=won.generation)
    except BrokerError as error:
        rows = f"the {show_rows(won.rows)} under write pointer {pointer}"
        if error.outcome == "not-applied":
            raise NotPublished(f"topic {won.topic} did not get {rows}: {error}") from error
        raise OutcomeUnknown(f"it is not known whether topic {won.topic} has {rows}: {error}") from error
