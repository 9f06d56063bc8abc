"""How much to measure: all of it, or a little of each to see that it works."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Profile:
    """Sizes and durations of all measurements."""

    name: str
    rounds: int
    """Times each side is measured, in turns."""
    seconds: float
    """How long one side is measured at a time."""
    messages: tuple[int, ...]
    """Messages per publish request."""
    connections: tuple[int, ...]
    message_bytes: tuple[int, ...]
    page_messages: int
    """Messages one poll returns."""
    poll_connections: tuple[int, ...]
    behind_messages: int
    """Messages between a reader who starts from far behind and those in the cache."""
    parked: tuple[int, ...]
    """Polls that wait at once."""
    parked_s: float
    """How long the processor time they cost is counted."""
    wakes: int
    """Times they are woken, per round."""
    expired_rows: int
    quiet_s: float
    """How long the quiet before and after the cleaning is measured."""
    cleaning_connections: tuple[int, ...]
    topics: int
    """Idle topics whose memory is weighed."""
    transactions: int
    """Other transactions, open and invalid, that a committed poll has to know about."""
    stored_messages: int
    """Messages of one stored transaction."""
    committed_s: float
    """How long a committed reader's latencies are measured."""
    stamped_requests: int
    """Requests of producers that a load has to replay."""
    producers: int
    """Producers whose memory is weighed."""
    spark_rows: int
    """Rows of 100 B that Spark reads and writes at a time; of larger ones as many as take the same bytes."""
    partitions: tuple[int, ...]
    """Of Spark's tables."""
    hbase_connections: tuple[int, ...]
    """Of publishers to a daemon on HBase."""
    instances: tuple[int, ...]
    """How many share the topics, in turn."""
    cluster_topics: int
    """Of each of them."""
    handed_topics: int
    """That change hands at once."""
    micro_batches: int
    """Of which the first four, in which code is compiled, do not count."""
    beside: tuple[str, ...]
    """What goes on beside publishes whose evenness is measured; names of ``bench.evenness.CONDITIONS``."""
    even_s: float
    """How long each open loop lasts."""
    cleaned_beside: int
    """Messages that expire at once beside it."""
    grown_messages: tuple[int, ...]
    """Sizes, in messages, at which a growing store is looked at."""
    grown_topics: tuple[int, ...]
    """The same, in topics."""
    backed_up_messages: int
    """In the store of which backups are made while others publish."""
    backup_pairs: int
    """Pairs of stretches, with a backup and without."""
    backup_s: float
    """How long each of them lasts."""
    jvm: str
    """Options of HBase's and Spark's processes: none where they are measured."""


FULL = Profile(
    name="full",
    rounds=5,
    seconds=0.6,
    messages=(1, 100, 1000),
    connections=(1, 16, 64),
    message_bytes=(100, 1024),
    page_messages=10_000,
    poll_connections=(1, 4),
    behind_messages=500_000,
    parked=(1, 1000),
    parked_s=5.0,
    wakes=10,
    expired_rows=5_000_000,
    quiet_s=5.0,
    cleaning_connections=(1, 16),
    topics=1000,
    transactions=10_000,
    stored_messages=1_000_000,
    committed_s=20.0,
    stamped_requests=200_000,
    producers=10_000,
    spark_rows=1_000_000,
    partitions=(1, 2),
    hbase_connections=(1, 4),
    instances=(1, 2, 3),
    cluster_topics=6,
    handed_topics=300,
    micro_batches=12,
    beside=("alone", "cleaning", "readers", "copy"),
    even_s=15.0,
    cleaned_beside=2_000_000,
    grown_messages=(1_000_000, 10_000_000, 50_000_000),
    grown_topics=(100, 1000, 10_000),
    backed_up_messages=10_000_000,
    backup_pairs=12,
    backup_s=8.0,
    jvm="",
)

QUICK = Profile(
    name="quick",
    rounds=1,
    seconds=0.1,
    messages=(1, 1000),
    connections=(16,),
    message_bytes=(100,),
    page_messages=10_000,
    poll_connections=(1,),
    behind_messages=20_000,
    parked=(1, 100),
    parked_s=0.5,
    wakes=2,
    expired_rows=60_000,
    quiet_s=0.3,
    cleaning_connections=(1,),
    topics=20,
    transactions=100,
    stored_messages=50_000,
    committed_s=1.0,
    stamped_requests=3_000,
    producers=320,
    spark_rows=20_000,
    partitions=(1,),
    hbase_connections=(1,),
    instances=(1, 2),
    cluster_topics=2,
    handed_topics=8,
    micro_batches=6,
    beside=("alone", "cleaning", "readers", "copy"),
    even_s=0.5,
    cleaned_beside=20_000,
    grown_messages=(20_000, 60_000),
    grown_topics=(20, 60),
    backed_up_messages=50_000,
    backup_pairs=2,
    backup_s=0.5,
    # What starts once and works for seconds starts sooner so.
    jvm="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
)
