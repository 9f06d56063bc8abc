"""Publishes what tasks have stored, once: opens a session, asks what the topic remembers, publishes.

A topic remembers the highest sequence id of each producer, so a publish whose answer got lost can be sent again.
Opening a session raises the producer's epoch: from then on no publish of an earlier session can land, however late it
arrives, and what the topic remembers is final.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    """A task attempt that succeeded. No reader sees its rows until a publish lists its segment."""

    partition: int
    segment: str
    topics: Mapping[str, Stored]
    """The topics that rows were stored in."""
    query_id: str | None = None
    """The streaming query, the same over all restarts from one checkpoint; None: a batch."""


@dataclass(frozen=True)
class Winners:
    """The segments of one topic that a save or micro-batch publishes: of the attempts that Spark counts."""

    topic: str
    segments: tuple[str, ...]
    rows: int
    generation: int


class MixedGenerations(RuntimeError):
    """The topic was created anew while tasks were storing; nothing was published."""


class OutOfOrder(RuntimeError):
    """With ``ordered``, rows of a topic came from several partitions; nothing was published."""


def winners(tasks: Iterable[TaskStored]) -> list[Winners]:
    """What to publish: for each topic that has rows, the segments in the order of the partitions; topics by name.

    Raises:
      MixedGenerations: some rows were stored before a topic was created anew, and some after it.
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
                f"topic {topic} was created anew while this was written (generations {sorted(generations)}): "
                "nothing was published, write it again"
            )
        segments = tuple(task.segment for task, _ in parts)
        found.append(Winners(topic, segments, sum(stored.rows for _, stored in parts), generations.pop()))
    return found


def check_order(won: Iterable[Winners], *, ordered: bool) -> None:
    """Raises OutOfOrder: ``ordered``, and several tasks stored rows of one topic, whose order is then not defined."""
    for each in won:
        if ordered and len(each.segments) > 1:
            raise OutOfOrder(
                f"ordered=true, and {len(each.segments)} partitions have rows for topic {each.topic}: "
                "coalesce(1) and sortWithinPartitions() first; nothing was published"
            )


# --- publishing ------------------------------------------------------------------------------------

#: Refusals that do not exclude that an earlier attempt of the same publish has landed.
_SHUT_OUT = frozenset({"producer_fenced", "producer_expired"})
_OFF = "deduplication_disabled"


class NotPublished(RuntimeError):
    """The rows are not in the topic named, and no request that is under way will publish them."""


class CheckpointRewound(RuntimeError):
    """The topic named has later micro-batches of the query than the one to publish; nothing was published in it."""


class OutcomeUnknown(RuntimeError):
    """The daemon did not answer whether the topic named has the rows."""


@dataclass(frozen=True)
class Identity:
    """The producer and sequence id by which topics remember a save or a micro-batch."""

    producer: str
    sequence_id: int
    memory_s: int | None = None
    """How long topics remember the producer after its last sign of life; None: the daemon's default."""
    must_be_remembered: bool = True
    """Refuse topics without deduplication, where a second run would publish everything again."""
    is_micro_batch: bool = True
    """Spark repeats the last micro-batch only; False: the user counts, and may repeat any of the last saves."""

    def publish(self, calls: Calls, won: Winners) -> bool:
        """Publish the segments in one topic; False: it has the rows of this identity already.

        Raises:
          NotPublished: the topic does not have them.
          CheckpointRewound: the topic has a later micro-batch, so what it has under this number may be other rows.
          OutcomeUnknown: the topic may have them.
        """
        try:
            session = calls.open_producer(
                won.topic, self.producer, retention_s=self.memory_s, generation=won.generation
            )
        except BrokerError as error:
            if error.code != _OFF or self.must_be_remembered:
                raise self._not_published(won, error) from error
            return self._publish_unremembered(calls, won)
        if self.is_micro_batch and session.last_sequence_id > self.sequence_id:
            raise CheckpointRewound(
                f"{won.rows} rows for topic {won.topic} were not published: they are micro-batch {self.sequence_id} of "
                f"producer {self.producer}, and the topic has micro-batch {session.last_sequence_id} already, which no "
                "query publishes before this one; was the checkpoint restored from an older copy, or is it new under "
                "an old producerName? Bring back the newest checkpoint, or start from a new one without producerName "
                "(what it reads is published again)"
            )
        if self._is_there(session):
            return False
        if session.last_sequence_id > self.sequence_id:
            raise NotPublished(
                f"{won.rows} rows for topic {won.topic} were not published: it has save {session.last_sequence_id} of "
                f"producer {self.producer}, and save {self.sequence_id} is not among the last it remembers; "
                "take a sequenceId above all that were used"
            )
        try:
            self._send(calls, won, session.epoch)
        except BrokerError as error:
            if error.outcome == "not-applied" and error.code not in _SHUT_OUT:
                raise self._not_published(won, error) from error
            return self._settle(calls, won, error)
        return True  # also if it was a duplicate: in this session that is our own publish, sent again

    def is_complete(self, calls: Calls, won: Winners) -> bool:
        """Whether the topic has the rows; if not, no publish that is under way can add them.

        Raises:
          BrokerError: the daemon does not answer.
        """
        known = calls.producer(won.topic, self.producer)
        if known is None:
            return False  # the session was not opened, which comes before the publish
        return self._is_there(known) or self._is_there(calls.open_producer(won.topic, self.producer))

    def forget(self, calls: Calls, won: Iterable[Winners]) -> None:
        """Make the topics forget this identity, which is not used again; if that fails, they forget it later."""
        with suppress(BrokerError):
            for each in won:
                calls.forget_producer(each.topic, self.producer)

    def _is_there(self, known: ProducerState) -> bool:
        """Whether the topic remembers that this was published."""
        if known.last_sequence_id > self.sequence_id and not self.is_micro_batch:
            return known.has(self.sequence_id)
        return known.last_sequence_id >= self.sequence_id

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
        """Publish in a topic without deduplication: a single attempt, since a second one would not be recognized."""
        try:
            self._send(calls, won, None)
        except BrokerError as error:
            if error.outcome == "not-applied":
                raise self._not_published(won, error) from error
            raise OutcomeUnknown(
                f"it is not known whether topic {won.topic} has the {won.rows} rows, "
                f"since its deduplication is off: {error}"
            ) from error
        return True

    def _settle(self, calls: Calls, won: Winners, error: BrokerError) -> bool:
        """Find out whether a publish of unknown outcome has landed; True: it has."""
        try:
            complete = self.is_complete(calls, won)
        except BrokerError as silence:
            raise OutcomeUnknown(
                f"whether topic {won.topic} has the {won.rows} rows is not known: {error}; then: {silence}. "
                f"It remembers them as producer {self.producer}, sequence id {self.sequence_id}"
            ) from error
        if not complete:
            raise self._not_published(won, error) from error
        return True

    def _not_published(self, won: Winners, error: BrokerError) -> NotPublished:
        why = str(error)
        if error.code == _OFF:
            why += "; without it a second run would publish every row again"
        elif self.memory_s is not None and "retention" in error.detail:
            why += f"; {self.memory_s // 86400} days of memory were asked for: lower memoryDays, or have the daemon allow it"
        return NotPublished(f"{won.rows} rows for topic {won.topic} were not published: {why}")


def publish_under(calls: Calls, won: Winners, pointer: int) -> None:
    """Publish the segments under an outer transaction's write pointer; repeating it does nothing.

    Raises:
      NotPublished, OutcomeUnknown: as ``Identity.publish``.
    """
    try:
        calls.publish_under(won.topic, pointer=pointer, segments=won.segments, generation=won.generation)
    except BrokerError as error:
        rows = f"the {won.rows} rows under write pointer {pointer}"
        if error.outcome == "not-applied":
            raise NotPublished(f"{rows} were not published in topic {won.topic}: {error}") from error
        raise OutcomeUnknown(f"whether topic {won.topic} has {rows} is not known: {error}") from error
