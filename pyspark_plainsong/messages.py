"""What a task tells the driver when it is through: which rows of which topics stand under its segment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import WriterCommitMessage

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


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
