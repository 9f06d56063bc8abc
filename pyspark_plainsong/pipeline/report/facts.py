"""A report as plain values: its time range cut into steps, the facts about each topic, and every figure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from plainsong import calls
from plainsong.protocol.errors import InvalidParameter
from plainsong.protocol.ids import parse_id, unpack_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from plainsong import Client

Rows: TypeAlias = "Sequence[Mapping[str, Any]]"
#: Explanations of the figures, by section, for the page and the tables.
MADE_FROM = {
    "sizes": "Counted from publish times and the topic's current ttl: a message is in the queue from its publish until "
    "it expires. Rolled back and invalid messages are left out. A message with a shorter time to live of its own is "
    "counted until the topic's ttl while it is there, and missing once it has expired. Where messages expired since "
    "and no archive has them, a size is a lower bound (≥, dashed).",
    "rates": "Messages by the time of their publish, whatever their outcome; messages that have expired since, and "
    "are in no archive, are missing.",
    "latency": "How long a durable message was hidden from committed readers: until the transactions of all messages "
    "up to it, including its own, were decided. 0 for a message with none before it. This excludes the "
    "publisher's wait for its answer and the reader's poll: the daemon's /metrics have both. Messages "
    "after a transaction whose end is not remembered count with a lower bound (at least).",
    "stored": "For messages that were stored before they were published: from the store to the publish.",
    "holds": "A transaction is open from its begin to its commit, abort or invalidation, and holds a topic from its "
    "first message there. The daemon's transaction service knows the ends that it remembers; of other "
    "transactions only the begin is known, from the write pointer.",
}


@dataclass(frozen=True)
class Report:
    """The figures of a time range. Rows are those of ``figures``' tables, as dictionaries."""

    grid: Grid
    made_ms: int
    topics: Sequence[TopicFacts]
    messages: int
    """Messages read: those of the range, and older ones that were still alive when it began."""
    sizes: Rows
    rates: Rows
    latency: Rows
    latency_steps: Rows
    stored: Rows
    holds: Rows
    """The longest, at most ``figures.MAX_HOLDS``."""
    hold_quantiles: Rows
    """``topic, transactions, open, unknown, p50_ms, p95_ms, p99_ms, max_ms`` of ``held_ms``."""
    notes: Sequence[str] = field(default_factory=tuple)
    """Unknown facts, and why they are unknown."""

    def of_topic(self, rows: Rows, topic: str) -> Rows:
        """The rows of one topic, in the order of their times."""
        return sorted((row for row in rows if row["topic"] == topic), key=lambda row: row.get("time_ms", 0))


# --- time range ------------------------------------------------------------------------------------
#
# A rate belongs to a step, a size to the moment between two steps.

#: The default number of steps is at most this: a plot shows no more.
STEPS = 120
#: Maximum number of steps: the figures of each are in memory.
MAX_STEPS = 10_000
_NICE_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)


@dataclass(frozen=True, slots=True)
class Grid:
    """A time range, ``start_ms <= time < end_ms``, in steps of ``step_ms``; the last may be shorter."""

    start_ms: int
    end_ms: int
    step_ms: int

    @property
    def steps(self) -> int:
        """The number of steps."""
        return -(-(self.end_ms - self.start_ms) // self.step_ms)

    def starts(self) -> list[int]:
        """The start of each step, in milliseconds."""
        return [self.start_ms + step * self.step_ms for step in range(self.steps)]

    def samples(self) -> list[int]:
        """The start of every step and the end of the last, in milliseconds."""
        return [*self.starts(), self.end_ms]

    def length_s(self, step: int) -> float:
        """The length of a step, in seconds."""
        start_ms = self.start_ms + step * self.step_ms
        return (min(start_ms + self.step_ms, self.end_ms) - start_ms) / 1000


def grid_over(start_ms: int, end_ms: int, step_s: int | None = None) -> Grid:
    """A grid over a time range.

    Args:
      step_s: seconds of a step; None: the shortest round length that makes at most ``STEPS`` of them.
    Raises:
      InvalidParameter: the range is empty, or makes too many steps.
    """
    if start_ms >= end_ms:
        raise InvalidParameter("the time range is empty", hint="--from must be before --to")
    if step_s is None:
        step_s = _nice_step_s((end_ms - start_ms) / 1000)
    grid = Grid(start_ms, end_ms, step_s * 1000)
    if grid.steps > MAX_STEPS:
        raise InvalidParameter(
            f"the range has {grid.steps} steps; the maximum is {MAX_STEPS}", hint="use a longer --step"
        )
    return grid


def _nice_step_s(range_s: float) -> int:
    for step_s in _NICE_S:
        if range_s <= step_s * STEPS:
            return step_s
    days = -(-range_s // (86_400 * STEPS))
    return int(days) * 86_400


# --- topics ----------------------------------------------------------------------------------------
#
# Facts that need no message: how long messages live, and since when all of them can be read.

#: Columns of ``rows_of``.
TOPICS = "topic STRING, ttl_ms BIGINT, known_from_ms BIGINT, whole BOOLEAN"


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """Facts about a topic, from the daemon or an archive."""

    topic: str
    """``namespace:topic``."""
    generation: int
    ttl_ms: int
    known_from_ms: int
    """All messages published since then can be read, except those with a shorter time to live of their own."""
    whole: bool
    """No message was published before ``known_from_ms``."""
    stats: dict[str, Any]
    """The daemon's ``stats``; empty without a daemon."""
    note: str = ""
    """Notes for the reader of the report."""

    @property
    def name(self) -> str:
        """The name without the namespace."""
        return self.topic.partition(":")[2]


def facts_of(client: Client, topic: str) -> TopicFacts:
    """Ask the daemon about a topic. Raises TopicNotFound."""
    properties, stats = client.admin.properties(topic), client.admin.stats(topic)
    call = calls.topic_offsets(client.namespace, topic, {"maxMessages": 1})
    earliest = client._channel.call(call)["earliest"]
    earliest_ms = unpack_id(parse_id(earliest)).publish_ts_ms
    return TopicFacts(
        f"{client.namespace}:{topic}",
        int(stats["generation"]),
        int(properties["ttl"]) * 1000,
        max(earliest_ms, int(stats["createdMs"])),
        int(stats["createdMs"]) >= earliest_ms,
        {**stats},
    )


def with_archive(facts: TopicFacts, ranges: Sequence[tuple[int, int]], archived_from_start: bool) -> TopicFacts:
    """Return the facts with those of an archive, which has messages that expired in the topic.

    Args:
      ranges: publish times that the archive holds without a gap, ``(first_ms, end_ms)``, in order.
      archived_from_start: the first range starts before all messages of the generation.
    """
    if facts.whole or not ranges:
        return facts
    reaching = [number for number, (_, end_ms) in enumerate(ranges) if end_ms >= facts.known_from_ms]
    if not reaching:
        gap = "after the archive's end, unarchived messages may have expired: sizes are lower bounds"
        return TopicFacts(**{**_fields(facts), "note": gap})
    first_ms, _ = ranges[reaching[0]]
    whole = archived_from_start and reaching[0] == 0
    return TopicFacts(**{**_fields(facts), "known_from_ms": min(first_ms, facts.known_from_ms), "whole": whole})


def _fields(facts: TopicFacts) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in TopicFacts.__slots__}


def rows_of(all_facts: Sequence[TopicFacts]) -> list[tuple[str, int, int, bool]]:
    """Rows of ``TOPICS``."""
    return [(facts.topic, facts.ttl_ms, facts.known_from_ms, facts.whole) for facts in all_facts]
