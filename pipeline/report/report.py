"""A report: every figure in it, as plain values, and what they are made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.report.facts import TopicFacts
    from pipeline.report.grid import Grid

Rows: TypeAlias = "Sequence[Mapping[str, Any]]"

#: What every page and table says of its figures, by the section it stands in.
MADE_FROM = {
    "sizes": "Counted from publish times and the topic's present ttl: a message is in the queue from its publish until "
    "it expires. Rolled back and invalid messages are left out. A message with a shorter time to live of its own is "
    "counted until the topic's ttl while it is there, and missing once it has expired. Where messages expired since "
    "and no archive has them, a size is a lower bound (≥, dashed).",
    "rates": "Messages by the time of their publish, whatever became of them since; what expired since, and is in no "
    "archive, is missing.",
    "latency": "For how long a committed reader could not get a message that was already durable: until the "
    "transactions of all messages up to it were decided, its own included. 0 for a message that nothing stood before. "
    "What a publisher waits for its answer is not in here, nor is what a reader takes to poll: the daemon's /metrics "
    "have both. Messages behind a transaction whose end is not remembered count with what is known (at least).",
    "stored": "For messages that were stored before they were published: from the store to the publish.",
    "holds": "A transaction is open from its begin to its commit, abort or invalidation, and holds a topic from its "
    "first message there on. Ends are what the daemon's transaction service remembers; of others only the begin is "
    "known, from the write pointer.",
}


@dataclass(frozen=True)
class Report:
    """The figures of a time range. Rows are those of the tables in ``pipeline/report``, as dictionaries."""

    grid: Grid
    made_ms: int
    topics: Sequence[TopicFacts]
    messages: int
    """That were read: those of the range, and those that were still alive when it began."""
    sizes: Rows
    rates: Rows
    latency: Rows
    latency_steps: Rows
    stored: Rows
    holds: Rows
    """The longest, at most ``gather.MAX_HOLDS``."""
    hold_quantiles: Rows
    """``topic, transactions, open, unknown, p50_ms, p95_ms, p99_ms, max_ms`` of ``held_ms``."""
    notes: Sequence[str] = field(default_factory=tuple)
    """What is not known, and why."""

    def of_topic(self, rows: Rows, topic: str) -> Rows:
        """Those of one topic, in time order where they have a time."""
        return sorted((row for row in rows if row["topic"] == topic), key=lambda row: row.get("time_ms", 0))
