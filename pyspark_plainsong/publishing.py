"""Publishes what tasks have stored, once: opens a session, asks what the topic remembers, publishes.

A topic remembers the highest sequence id of each producer, so a publish whose answer got lost can be sent again. Opening a
session raises the producer's epoch: from then on no publish of an earlier session can land, however late it arrives, and
what the topic remembers is final.
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
    """The rows of one topic."""

    rows: int
    generation: int
    """The topic's when the first of them was stored, and so of all of them."""


@dataclass(frozen=True)
class TaskStored(WriterCommitMessage):
    """One attempt that came to its end. Nobody sees its rows until its segment is listed in a publish."""

    partition: int
    segment: str
    topics: Mapping[str, Stored]
    """Only those that rows were stored in."""
    query_id: str | None = None
    """Of the streaming query, the same over all restarts from one checkpoint; None: a batch."""


@dataclass(frozen=True)
class Winners:
    """All that one save or micro-batch stored in one topic."""

    topic: str
    segments: tuple[str, ...]
    rows: int
    generation: int


class MixedGenerations(RuntimeError):
    """The topic was created anew while tasks were storing; nothing was published."""


class OutOfOrder(RuntimeError):
    """Rows whose order was asked for came from several partitions; nothing was published."""


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
    """Raise OutOfOrder when the order matters and several tasks stored rows of one topic: theirs stand interleaved."""
    for each in won:
        if ordered and len(each.segments) > 1:
            raise OutOfOrder(
                f"ordered=true, and {len(each.segments)} partitions have rows for topic {each.topic}: "
                "coalesce(1) and sortWithinPartitions() first; nothing was published"
            )


# --- publishing ------------------------------------------------------------------------------------

#: Of refusals after which an earlier attempt of the same publish may have landed all the same.
_SHUT_OUT = frozenset({"producer_fenced", "producer_expired"})
_OFF = "deduplication_disabled"


class NotPublished(RuntimeError):
    """The rows were not published in the topic named, and nothing that is still on its way does it."""


class OutcomeUnknown(RuntimeError):
    """The broker could not be asked any more whether the topic named has the rows."""


@dataclass(frozen=True)
class Identity:
    """As what a save or a micro-batch is remembered by each of its topics."""

    producer: str
    sequence_id: int
    memory_s: int | None = None
    """How long after the producer's last sign of life; None: as the daemon does by default."""
    must_be_remembered: bool = True
    """Refuse topics that remember nothing, where a second run would publish everything again."""
    lower_is_there: bool = True
    """What is below the topic's highest sequence id was published. Else somebody may have forgotten to count up."""

    def publish(self, calls: Calls, won: Winners) -> bool:
        """Publish the segments that count in one topic; False: it has rows of this identity already.

        Raises:
          NotPublished: the topic has not got them.
          OutcomeUnknown: it may have.
        """
        try:
            session = calls.open_producer(
                won.topic, self.producer, retention_s=self.memory_s, generation=won.generation
            )
        except BrokerError as error:
            if error.code != _OFF or self.must_be_remembered:
                raise self._not_published(won, error) from error
            return self._publish_unremembered(calls, won)
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
        return True  # a duplicate, too: in this session nobody else published, so it is our own, sent again

    def is_complete(self, calls: Calls, won: Winners) -> bool:
        """Whether the topic has the rows; if not, no publish that is still on its way brings them.

        Raises:
          BrokerError: it could not be asked.
        """
        known = calls.producer(won.topic, self.producer)
        if known is None:
            return False  # not even the session was opened, and that comes before the publish
        return self._is_there(known) or self._is_there(calls.open_producer(won.topic, self.producer))

    def forget(self, calls: Calls, won: Iterable[Winners]) -> None:
        """Have the topics forget this identity, which is not used again; should that fail, they do so later."""
        with suppress(BrokerError):
            for each in won:
                calls.forget_producer(each.topic, self.producer)

    def _is_there(self, known: ProducerState) -> bool:
        """Whether this was published, as far as the topic remembers."""
        if known.last_sequence_id > self.sequence_id and not self.lower_is_there:
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
        """Where nobody would know a second one: a single attempt."""
        try:
            self._send(calls, won, None)
        except BrokerError as error:
            if error.outcome == "not-applied":
                raise self._not_published(won, error) from error
            raise OutcomeUnknown(
                f"nobody can tell whether topic {won.topic} has the {won.rows} rows, "
                f"since its deduplication is off: {error}"
            ) from error
        return True

    def _settle(self, calls: Calls, won: Winners, error: BrokerError) -> bool:
        """True when the publish that ``error`` says nothing certain of has landed."""
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
    """Publish the segments that count under an outer transaction's pointer; a second time does nothing more.

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
