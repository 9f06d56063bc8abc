"""The settings of producers: what is remembered of them, for how long, and how many there may be."""

from __future__ import annotations

from dataclasses import dataclass

from broker.config.meaning import count, seconds, switch, whole_seconds

_CENTURY_S = 100 * 365 * 86_400


@dataclass(frozen=True, slots=True)
class DeduplicationConfig:
    """Producers: messages with sequence ids are stored once, and what that takes."""

    default: bool = switch(
        True,
        "Whether sequence ids of producers are remembered where neither the topic nor its namespace says; "
        "it costs nothing without a producer.",
    )
    snapshot_entries: int = count(
        1_000,
        "Requests of producers after which a topic notes on disk what it knows of them.",
        small="more rows to write",
        large="a topic takes longer to load after a crash",
    )
    snapshot_interval_s: float = seconds(
        120.0,
        "How long a change in what a topic knows of its producers may go unnoted.",
        small="more rows to write",
        large="a topic takes longer to load after a crash",
        low=0.01,
        high=86_400.0,
    )
    producer_retention_s: int = whole_seconds(
        604_800,
        "How long a producer that does nothing is remembered; 7 days by default.",
        small="a producer that pauses may store a message twice",
        large="short-lived producers take memory and disk space for longer",
        low=1,
        high=_CENTURY_S,
    )
    max_retention_s: int = whole_seconds(
        15_552_000,
        "The longest memory a producer may ask for when it opens its session; 180 days by default.",
        small="producers that pause for long cannot be remembered",
        large="producers that are gone stay",
        low=1,
        high=_CENTURY_S,
    )
    max_producers: int = count(
        10_000,
        "Producers one topic remembers; a new one takes the place of the longest idle, else it is 503 too_many_producers.",
        small="new producers are sent away",
        large="more memory, and a longer load of the topic",
        high=1_000_000,
    )
    max_long_producers: int = count(
        1_000,
        "Those among them that may be remembered for longer than deduplication.producer_retention_s.",
        small="producers that pause for long are sent away",
        large="they take the place of others",
        low=0,
        high=1_000_000,
    )
    answer_timeout_s: float = seconds(
        30.0,
        "How long a publish of a producer waits for the store; after it the answer is 503 outcome_unknown, and the "
        "publish may still happen.",
        small="a slow disk makes producers ask what became of their messages",
        large="producers learn late that something is wrong",
        low=0.01,
        high=3_600.0,
    )
