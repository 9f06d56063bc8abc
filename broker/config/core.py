"""The settings of what is behind the doors: the store, topics, commits, polls and cleaning."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path  # noqa: TC003 - dataclasses and readers resolve annotations

from broker.config.hbase import HBaseConfig
from broker.config.meaning import GIB, KIB, MIB, TIB, choice, count, milliseconds, path, seconds, size, whole_seconds

_CENTURY_S = 100 * 365 * 86_400


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """Where messages are kept."""

    kind: str = choice(
        "leveldb",
        "The store; hbase may be shared by several instances, memory forgets everything when the daemon ends.",
        "leveldb",
        "hbase",
        "memory",
    )
    data_dir: Path = path(  # noqa: RUF009 - declares a field, like its neighbours
        "data", "The directory of the store, made when absent; a relative one starts at the working directory."
    )
    min_free_bytes: int = size(
        256 * MIB,
        "Free disk space below which publishes get 503 low_space, while polls and cleaning go on.",
        small="the disk fills up, and then there is no room even to delete",
        large="publishes are refused while there is room",
        low=0,
        high=1024 * TIB,
    )
    write_buffer_bytes: int = size(
        8 * MIB,
        "What LevelDB gathers in memory before it writes a sorted table; up to two of these are held.",
        small="many small tables, and more work merging them",
        large="more memory, and a longer start after a crash",
        low=64 * KIB,
        high=1 * GIB,
    )
    block_cache_bytes: int = size(
        8 * MIB,
        "What LevelDB keeps of the blocks that point reads needed; scans do not fill it.",
        small="loading topics reads the same blocks from disk again",
        large="memory that cache.max_bytes would use better",
        low=0,
        high=64 * GIB,
    )
    hbase: HBaseConfig = field(default_factory=HBaseConfig)


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """The topics, each served by one actor while it is open."""

    default_ttl_s: int = whole_seconds(
        604_800,
        "The time to live of a topic created without one; 7 days by default.",
        small="messages expire before slow consumers read them",
        large="the disk fills with what nobody reads any more",
        low=1,
        high=_CENTURY_S,
    )
    max_message_bytes: int = size(
        8 * MIB,
        "The largest message; beyond it the answer is 413 message_too_large.",
        small="producers must cut their messages",
        large="single messages crowd out pages and caches",
        low=1,
        high=1 * GIB,
    )
    idle_s: float = seconds(
        300.0,
        "How long a topic that nobody asks for stays open.",
        small="topics used now and then are loaded from disk again and again",
        large="memory is held for topics that nobody uses",
        low=0.1,
        high=86_400.0,
    )
    max_open: int = count(
        10_000,
        "Topics open at once; beyond it the longest idle one is let go, or the answer is 503 overloaded.",
        small="topics take turns, and each turn reads the disk",
        large="memory grows with the number of topics in use",
        high=1_000_000,
    )
    mailbox_requests: int = count(
        4096,
        "Requests that may wait for one topic; beyond it the answer is 503 overloaded.",
        small="bursts are sent away",
        large="requests wait for seconds when the disk is slow",
        high=1_000_000,
    )
    mailbox_bytes: int = size(
        64 * MIB,
        "Bytes of messages that may wait for one topic; beyond it the answer is 503 overloaded.",
        small="bursts of large requests are sent away",
        large="one busy topic takes much of http.max_inflight_bytes",
        low=KIB,
        high=64 * GIB,
    )
    checkpoint_rows: int = count(
        10_000,
        "Rows after which a topic notes its counts and positions on disk, so that loading it reads no further back.",
        small="more rows to write",
        large="a topic takes longer to load after a crash",
        high=100_000_000,
    )
    max_parked_polls: int = count(
        10_000,
        "Long polls that may wait on one topic; beyond it the answer is 503 overloaded.",
        small="waiting consumers are sent away",
        large="memory grows with waiting consumers",
        high=1_000_000,
    )


@dataclass(frozen=True, slots=True)
class CommitConfig:
    """One group of requests made durable by one write."""

    max_requests: int = count(
        1024,
        "Requests in one commit; the rest wait for the next.",
        small="each synced write carries less, and throughput falls with the disk's latency",
        large="the first request of a commit waits for the last to be decided",
        high=65_536,
    )
    max_bytes: int = size(
        8 * MIB,
        "Bytes of rows in one commit; a larger request goes alone.",
        small="each synced write carries less",
        large="everyone in the commit waits for one long write",
        low=KIB,
        high=1 * GIB,
    )


@dataclass(frozen=True, slots=True)
class PollConfig:
    """The bounds of a page of messages, and of a wait for one."""

    max_messages: int = count(
        100_000,
        "Messages in one page, whatever limit the request names.",
        small="readers far behind make many requests",
        large="one page keeps others waiting",
        high=10_000_000,
    )
    max_bytes: int = size(
        16 * MIB,
        "Bytes of payload in one page; at least one message is always returned, whatever its size.",
        small="readers far behind make many requests",
        large="memory grows with the number of readers at once",
        low=1,
        high=1 * GIB,
    )
    max_wait_ms: int = milliseconds(
        60_000,
        "The longest wait of a poll; one that asks for longer is answered after this.",
        small="idle consumers ask again and again",
        large="proxies in between cut the connection first",
        low=0,
        high=3_600_000,
    )
