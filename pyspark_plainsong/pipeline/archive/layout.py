"""The paths of an archive, from its root.

    NAMESPACE/TOPIC/gen=1/batches/archive=ID/batch=000000000000-TRY/part-….parquet, _manifest.json
    NAMESPACE/TOPIC/gen=1/days/dt=2026-01-31/entry=ID-TRY/part-….parquet, _manifest.json
    NAMESPACE/TOPIC/_checkpoints/gen=1/          Spark's, and _start.json
    NAMESPACE/TOPIC/_replays/NAME.json           plans of replays
    NAMESPACE/TOPIC/_appending, _compacting      locks of the writers

``gen`` is the generation of the topic; an archive id is that of a streaming query, hence of its checkpoint. Each try at
a batch or a day has a folder of its own, so no file that was finished is ever overwritten.
"""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta

from plainsong.cli.options import show_time

DAY_MS = 86_400_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def topic_folder(namespace: str, topic: str) -> str:
    """The folder of a topic, with all generations."""
    return f"{namespace}/{topic}"


def holds_no_entries(folder: str) -> bool:
    """True for checkpoints, plans, locks and the like. A namespace or a topic may begin with ``_``, too."""
    name = folder.rpartition("/")[2]
    return name.startswith(".") or (name.startswith("_") and folder.count("/") > 1)


def generation_folder(namespace: str, topic: str, generation: int) -> str:
    """The folder of one generation."""
    return f"{topic_folder(namespace, topic)}/gen={generation}"


def batches_folder(namespace: str, topic: str, generation: int, archive: str) -> str:
    """The folder of the batches of one query."""
    return f"{generation_folder(namespace, topic, generation)}/batches/archive={archive}"


def batch_name(batch: int) -> str:
    """The start of the names of a batch's folders; it sorts as the number."""
    return f"batch={batch:012d}"


def new_try(name: str) -> str:
    """A new name for the folder of one try."""
    return f"{name}-{secrets.token_hex(4)}"


def lock_file(namespace: str, topic: str, doing: str) -> str:
    """The lock of the process that is ``appending`` or ``compacting``."""
    return f"{topic_folder(namespace, topic)}/_{doing}"


def day_folder(namespace: str, topic: str, generation: int, day: str) -> str:
    """The folder of the entries of one day."""
    return f"{generation_folder(namespace, topic, generation)}/days/dt={day}"


def checkpoint_folder(namespace: str, topic: str, generation: int) -> str:
    """The checkpoint of the topic's query, by default."""
    return f"{topic_folder(namespace, topic)}/_checkpoints/gen={generation}"


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


# --- manifest --------------------------------------------------------------------------------------


MANIFEST_NAME = "_manifest.json"
