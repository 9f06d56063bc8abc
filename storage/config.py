"""The settings of the store: the section ``storage``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path  # noqa: TC003 - dataclasses and readers resolve annotations

from storage.hbase.settings import HBaseConfig
from storage.settings import CENTURY_S, GIB, KIB, MIB, TIB, choice, path, seconds, size, whole_seconds


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """The store of messages."""

    kind: str = choice(
        "leveldb",
        "Where messages are stored. leveldb: in storage.data_dir. hbase: in HBase, which several instances can "
        "share. memory: in memory only, so that everything is lost when the daemon ends.",
        "leveldb",
        "hbase",
        "memory",
    )
    data_dir: Path = path(  # noqa: RUF009 - declares a field, like its neighbours
        "data",
        "Directory of the store, created if it does not exist; a relative path starts at the working directory.",
    )
    min_free_bytes: int = size(
        256 * MIB,
        "Minimum free disk space; below it publishes get 503 low_space, while polls and cleaning continue.",
        small="the disk fills up until there is no space left even to delete",
        large="publishes are refused although there is space",
        low=0,
        high=1024 * TIB,
    )
    write_buffer_bytes: int = size(
        32 * MIB,
        (
            "Memory of a LevelDB write buffer, which becomes a sorted table on disk when it is full; there are two "
            "buffers, briefly three."
        ),
        small="many small tables; volumes are smaller too, or publishes wait for merges",
        large="more memory, longer bursts of writing, and a longer start after a crash",
        low=64 * KIB,
        high=1 * GIB,
    )
    volume_bytes: int = size(
        112 * MIB,
        "Size at which a volume is complete. A volume is a database of messages that is dropped once all of them "
        "have expired. By default 3.5 write buffers.",
        small="many volumes to open and close, each with several files",
        large="space is freed later; above 3.5 write buffers LevelDB merges its tables, and publishes wait for that",
        low=64 * KIB,
        high=1 * TIB,
    )
    block_cache_bytes: int = size(
        8 * MIB,
        "LevelDB's block cache, filled by point reads but not by scans.",
        small="loading topics may read the same blocks from disk again",
        large="memory that would be better spent on cache.max_bytes",
        low=0,
        high=64 * GIB,
    )
    inline_commit_s: float = seconds(
        0.002,
        "How long a write by the event loop may take. The loop writes small commits, and reads single rows of "
        "metadata, without waking a thread; after one that took longer, threads do this for at least 10 times as "
        "long as it took. 0: threads always do it, which is best for a disk that may hang.",
        small="on a disk that is slow at times, threads write, and a publish takes up to half as long again",
        large="slow writes repeatedly stall polls and everything else",
        low=0.0,
        high=1.0,
    )
    max_clock_ahead_s: int = whole_seconds(
        0,
        "How far the clock may be ahead of the newest time in the store at startup; beyond it the daemon does not "
        "start. 0: no limit. A store that was not used for that long looks the same.",
        small="a daemon that was stopped for longer starts only with this setting at 0",
        large="a wrong clock makes messages expire, which cannot be undone",
        low=0,
        high=CENTURY_S,
    )
    scrub_interval_s: int = whole_seconds(
        7 * 86_400,
        (
            "Time between two scrubs, which read and check every row; the first begins an hour after startup. 0: "
            "only on request."
        ),
        small="the disk is read all the time",
        large="a damaged row is found only when a request reads it, perhaps after its last backup was removed",
        low=0,
        high=CENTURY_S,
    )
    scrub_bytes_per_s: int = size(
        4 * MIB,
        "Maximum rate at which a scrub reads.",
        small="a scrub takes long, perhaps longer than its interval",
        large="a slow disk has less left for requests",
        low=1 * KIB,
        high=1 * TIB,
    )
    hbase: HBaseConfig = field(default_factory=HBaseConfig)
