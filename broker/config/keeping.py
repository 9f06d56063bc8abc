"""The settings of what is remembered and for how long: cache, cleaning, readers."""

from __future__ import annotations

from dataclasses import dataclass

from broker.config.meaning import GIB, MIB, count, seconds, size, whole_seconds

_CENTURY_S = 100 * 365 * 86_400


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The recent messages of all topics, kept in memory in wire form."""

    max_bytes: int = size(
        64 * MIB,
        "The memory of the scan cache over all topics; 0 switches it off.",
        small="readers that keep up read from the store all the same",
        large="memory that nothing else can use",
        low=0,
        high=256 * GIB,
    )


@dataclass(frozen=True, slots=True)
class RetentionConfig:
    """The janitor, who removes what nobody can see any more."""

    interval_s: float = seconds(
        60.0,
        "How long the janitor rests between two rounds.",
        small="rounds that find little to remove",
        large="expired messages take disk space for longer",
        low=0.01,
        high=86_400.0,
    )
    delete_grace_s: int = whole_seconds(
        3_600,
        "How long the rows of a deleted topic are kept, so that it can be undeleted; an hour by default.",
        small="a deletion by mistake is final",
        large="deleted topics take disk space for longer",
        low=0,
        high=_CENTURY_S,
    )
    step_rows: int = count(
        200,
        "Rows the janitor removes in one step, between which publishes and polls go first.",
        small="cleaning falls behind a busy topic's expiry",
        large="publishes wait longer while it cleans",
        high=1_000_000,
    )


@dataclass(frozen=True, slots=True)
class ReadersConfig:
    """The positions that readers let the daemon keep."""

    retention_s: int = whole_seconds(
        7_776_000,
        "How long a reader's position is kept after its last change; 90 days by default.",
        small="a reader that pauses starts anew",
        large="positions of readers that are gone stay",
        low=1,
        high=_CENTURY_S,
    )
    max_per_topic: int = count(
        1_000,
        "Readers of one topic whose positions are kept; beyond it a new one is refused.",
        small="readers must keep their positions themselves",
        large="a client that names readers at random fills the store",
        high=1_000_000,
    )
