"""The paths of an archive, from its root.

    NAMESPACE/TOPIC/_delta_log/                  the log of the topic's Delta table
    NAMESPACE/TOPIC/data/BATCH-TRY/day=2026-01-31/part-….parquet
    NAMESPACE/TOPIC/data/compacted-TRY/day=2026-01-31/part-….parquet
    NAMESPACE/TOPIC/_caught_up/gen=1.json        when there was nothing left to archive
    NAMESPACE/TOPIC/_replays/NAME.json           plans of replays

Only the log says which files are part of the table. Each attempt at a batch has a folder of its own, so no file that was
finished is ever overwritten. Delta's vacuum leaves alone what begins with ``_``.
"""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from plainsong.cli.options import show_time

DAY_MS = 86_400_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: The start of the names of folders in archives that were written before they were Delta tables.
FORMER = "gen="
#: The start of the paths of compacted files, from the table's folder.
COMPACTED = "data/compacted-"
#: The smallest id.
FIRST = bytes(20)


class Range(NamedTuple):
    """Ids ``start <= id < end``, 20 bytes each."""

    start: bytes
    end: bytes


def topic_folder(namespace: str, topic: str) -> str:
    """The folder of a topic, with all generations."""
    return f"{namespace}/{topic}"


def new_batch_folder(namespace: str, topic: str, batch: int) -> str:
    """Return a new folder for an attempt to write a batch."""
    return f"{topic_folder(namespace, topic)}/data/{batch:012d}-{secrets.token_hex(4)}"


def new_compacted_folder(folder: str) -> str:
    """Return a new folder for an attempt to compact a day of the table in a folder."""
    return f"{folder}/{COMPACTED}{secrets.token_hex(4)}"


def caught_up_file(namespace: str, topic: str, generation: int) -> str:
    """The file with the time when there was nothing left to archive."""
    return f"{topic_folder(namespace, topic)}/_caught_up/gen={generation}.json"


def day_of(timestamp_ms: int) -> str:
    """The day of a publish time, in UTC: ``2026-01-31``."""
    return (_EPOCH + timedelta(milliseconds=timestamp_ms)).date().isoformat()


def day_start_ms(day: str) -> int:
    """The start of a day, in milliseconds since 1970."""
    return (datetime.fromisoformat(day).replace(tzinfo=UTC) - _EPOCH) // timedelta(milliseconds=1)


def time_bound(timestamp_ms: int) -> bytes:
    """The first id that a message of a time can have."""
    return timestamp_ms.to_bytes(8, "big") + bytes(12)


def time_of(message_id: bytes) -> int:
    """The publish time in an id, in milliseconds since 1970."""
    return int.from_bytes(message_id[:8], "big")


def show_range(start: bytes, end: bytes) -> str:
    """A range of ids as people read it."""
    first, last = (show_time(time_of(each)) for each in (start, end))
    return f"from {first} to {last}" if any(start) else f"before {last}"
