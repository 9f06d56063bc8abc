"""What is known of each topic before any message is read: how long messages live, and since when all are there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plainsong.core import calls
from protocol.ids import parse_id, unpack_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plainsong import Client

#: Columns of ``rows_of``.
TOPICS = "topic STRING, ttl_ms BIGINT, known_from_ms BIGINT, whole BOOLEAN"


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """A topic, as the daemon or an archive tells of it."""

    topic: str
    """``namespace:topic``."""
    generation: int
    ttl_ms: int
    known_from_ms: int
    """Every message published since then can be read, unless it had a shorter time to live of its own."""
    whole: bool
    """Nothing was published before."""
    stats: dict[str, Any]
    """What the daemon's ``stats`` said; empty without a daemon."""
    note: str = ""
    """What the reader of the report should know of it."""

    @property
    def name(self) -> str:
        """Without the namespace."""
        return self.topic.partition(":")[2]


def facts_of(client: Client, topic: str) -> TopicFacts:
    """Ask the daemon. Raises TopicNotFound."""
    properties, stats = client.properties(topic), client.stats(topic)
    call = calls.topic_offsets(client.namespace, topic, {"maxMessages": 1})
    earliest = client._shell.run(client._operations.call(call))["earliest"]
    earliest_ms = unpack_id(parse_id(earliest)).publish_ts_ms
    return TopicFacts(
        f"{client.namespace}:{topic}",
        int(stats["generation"]),
        int(properties["ttl"]) * 1000,
        max(earliest_ms, int(stats["createdMs"])),
        int(stats["createdMs"]) >= earliest_ms,
        stats,
    )


def with_archive(facts: TopicFacts, ranges: Sequence[tuple[int, int]], archived_from_start: bool) -> TopicFacts:
    """The same, when messages that expired in the topic stand in an archive.

    Args:
      ranges: publish times that the archive holds without a gap, ``(first_ms, end_ms)``, in order.
      archived_from_start: the first of them begins before any message of the generation.
    """
    if facts.whole or not ranges:
        return facts
    reaching = [number for number, (_, end_ms) in enumerate(ranges) if end_ms >= facts.known_from_ms]
    if not reaching:
        gap = "behind the archive's end messages may have expired that it has not: sizes are lower bounds"
        return TopicFacts(**{**_fields(facts), "note": gap})
    first_ms, _ = ranges[reaching[0]]
    whole = archived_from_start and reaching[0] == 0
    return TopicFacts(**{**_fields(facts), "known_from_ms": min(first_ms, facts.known_from_ms), "whole": whole})


def _fields(facts: TopicFacts) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in TopicFacts.__slots__}


def rows_of(all_facts: Sequence[TopicFacts]) -> list[tuple[str, int, int, bool]]:
    """Rows of ``TOPICS``."""
    return [(facts.topic, facts.ttl_ms, facts.known_from_ms, facts.whole) for facts in all_facts]
