"""Sizes and durations: a full run, and a quick one to check that everything works."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Profile:
    """Sizes and durations of all measurements."""

    name: str
    rounds: int
    """Measurements of each side."""
    warms_up: bool
    """Measure each side of Spark, of HBase and of several instances once before it counts, because a cold JVM is slow."""
    seconds: float
    """Duration of one measurement of one side."""
    filled_s: float
    """Duration of the load after which the daemon's memory is measured."""
    messages: tuple[int, ...]
    """Messages per publish request."""
    connections: tuple[int, ...]
    message_bytes: tuple[int, ...]
    page_messages: int
    """Messages per poll."""
    poll_connections: tuple[int, ...]
    behind_messages: int
    """Messages between the start of a lagging reader and the cached ones."""
    parked: tuple[int, ...]
    """Numbers of concurrently parked polls."""
    parked_s: float
    """Duration of the measurement of parked polls' processor time."""
    wakes: int
    """Wake-ups per round."""
    expired_rows: int
    quiet_s: float
    """Duration of the measurement before, and after, the cleaning."""
    cleaning_connections: tuple[int, ...]
    topics: int
    """Idle topics for the memory measurement."""
    transactions: int
    """Other transactions, open and invalid, that a committed poll has to take into account."""
    stored_messages: int
    """Messages of one stored transaction."""
    committed_s: float
    """Duration of the measurement of a committed reader's latencies."""
    stamped_requests: int
    """Requests of producers that a load has to replay."""
    producers: int
    """Producers for the memory measurement."""
    spark_rows: int
    """Rows of 100 B per read or write by Spark; of larger rows, the number with the same total size."""
    partitions: tuple[int, ...]
    """Numbers of partitions of Spark's tables."""
    hbase_connections: tuple[int, ...]
    """Numbers of connections publishing to a daemon on HBase."""
    instances: tuple[int, ...]
    """Numbers of instances sharing the topics, measured in turn."""
    cluster_topics: int
    """Topics per instance."""
    handed_topics: int
    """Topics handed over at once."""
    micro_batches: int
    """Batches per stream; the first four are discarded, because code is compiled during them."""
    beside: tuple[str, ...]
    """Conditions under which evenness is measured; names of ``bench.evenness.CONDITIONS``."""
    even_s: float
    """Duration of each open loop."""
    cleaned_beside: int
    """Messages that expire at once during the measurement."""
    grown_messages: tuple[int, ...]
    """Sizes, in messages, at which a growing store is measured."""
    grown_topics: tuple[int, ...]
    """Sizes, in topics."""
    backed_up_messages: int
    """Messages in the store that is backed up during publishes."""
    backup_pairs: int
    """Pairs of measurements, with and without a backup."""
    backup_s: float
    """Duration of each measurement."""
    put_ms: tuple[int, ...]
    """Latencies that are added to each request to the object store of the second copy."""
    copied_connections: tuple[int, ...]
    """Numbers of connections publishing to a daemon with a second copy."""
    copied_s: float
    """Duration of one measurement of one mode."""
    taken_over: tuple[int, int]
    """Messages and topics of the store that a standby takes over."""
    lease_s: int
    """The lease of its primary."""
    jvm: str
    """JVM options of HBase and Spark: none in a full run."""
    fetches: bool
    """Download Kafka and Spark's connector for it if they are missing."""


FULL = Profile(
    name="full",
    rounds=5,
    warms_up=True,
    seconds=0.6,
    filled_s=10.0,
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
    put_ms=(0, 1, 10, 50),
    copied_connections=(1, 16, 50),
    copied_s=2.0,
    taken_over=(1_000_000, 1000),
    lease_s=10,
    jvm="",
    fetches=True,
)

QUICK = Profile(
    name="quick",
    rounds=1,
    warms_up=False,
    seconds=0.1,
    filled_s=0.5,
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
    micro_batches=5,
    beside=("alone", "cleaning", "readers", "copy"),
    even_s=0.5,
    cleaned_beside=20_000,
    grown_messages=(20_000, 60_000),
    grown_topics=(20, 60),
    backed_up_messages=50_000,
    backup_pairs=2,
    backup_s=0.5,
    put_ms=(0, 10),
    copied_connections=(50,),
    copied_s=0.2,
    taken_over=(2_000, 20),
    lease_s=2,
    # Faster start for processes that run for seconds.
    jvm="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    fetches=False,
)
