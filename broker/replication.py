"""The second copy of the store: opens the object store of ``[replication]``, and runs the copy."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from actors.second_copy import SecondCopy
from broker.finding import Finding
from storage.base import StoreUnusable
from storage.leveldb import LevelDBStore
from storage.replication.outbox import Outbox

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from actors.second_copy import CopyStatus
    from broker.config import Config
    from broker.metrics import Metrics
    from storage.base import Store
    from storage.replication.carry import Objects

#: A start fails if the object store has not responded within ``replication.timeout_s`` times this.
START_TIMEOUTS = 4
#: Report a copy with more lag than this, in seconds.
LATE_S = 60.0


def open_objects(url: str, timeout_s: float) -> Objects:
    """Return the objects below a URL. Raises StoreUnusable: it cannot be used, or the library is not installed."""
    try:
        from storage.replication.object_store import ObjectStore  # here, since it is an extra
    except ImportError as error:
        raise StoreUnusable(
            "replication needs obstore, which is not installed",
            hint='install the extra: pip install "plainsong-server[replication]"',
        ) from error
    return ObjectStore.open(url, timeout_s=timeout_s)


def outbox_of(config: Config) -> Outbox | None:
    """Return the outbox that the store is opened with; None without a second copy."""
    replication = config.replication
    if not replication.to:
        return None
    return Outbox(max_bytes=replication.backlog_bytes, full_bytes=replication.segment_bytes)


@asynccontextmanager
async def second_copy(config: Config, store: Store, outbox: Outbox | None) -> AsyncIterator[SecondCopy | None]:
    """Run the copy during the block; at its end, ship the remaining commits. Yields None without a second copy.

    Raises:
      StoreUnusable, StoreError: the object store cannot be used, or does not answer.
      StorageFailed: the log does not belong to this directory; see ``SecondCopy.begin``, and ``run`` later.
    """
    if outbox is None:
        yield None
        return
    assert isinstance(store, LevelDBStore)  # checked with the settings
    replication = config.replication
    objects = open_objects(replication.to, replication.timeout_s)
    directory = config.storage.data_dir.absolute()
    copy = SecondCopy(
        objects, store, outbox, directory, replication, _now_ms, base_bytes_per_s=config.backup.bytes_per_s
    )
    start_s = START_TIMEOUTS * replication.timeout_s
    with trio.move_on_after(start_s) as starting:
        await copy.begin()
    if starting.cancelled_caught:
        raise StoreUnusable(
            f"the object store of replication.to gave no answer for {start_s:g} s{_why(copy.error)}",
            hint="a start must read the end of the log there; start again once it answers",
        )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(copy.run)
        yield copy
        with trio.move_on_after(config.shutdown.drain_s):
            await copy.finish()
        nursery.cancel_scope.cancel()


def _why(error: str) -> str:
    return f": {error}" if error else ""


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def add_copy_gauges(metrics: Metrics, copy: SecondCopy) -> None:
    """Register the gauges of the second copy."""

    def reads(name: str, text: str, read: Callable[[CopyStatus], float | None]) -> None:
        metrics.reads(f"plainsong_replication_{name}", text, lambda: read(copy.status))

    reads("epoch", "The number of this start in the commit log.", lambda status: status.epoch)
    reads("last_commit", "The last commit of the store.", lambda status: status.last)
    reads(
        "counted_commit",
        "The last commit that survives the loss of the directory; absent while there is no complete base.",
        lambda status: status.counted,
    )
    reads("lag_bytes", "Bytes of commits that are not in the object store.", lambda status: status.lag_bytes)
    reads("lag_seconds", "Age of the oldest commit that is not in the object store.", lambda status: status.lag_s)
    reads(
        "base_timestamp_seconds",
        "When the last complete base was made, in seconds since 1970; absent without one.",
        lambda status: None if status.base is None else status.base_ms / 1000,
    )
    reads("failing", "1 while the object store refuses access or does not answer.", lambda status: bool(status.error))


def copy_findings(copy: SecondCopy) -> list[Finding]:
    """Report a copy from which nothing can be restored yet, or that lags."""
    status = copy.status
    why = _why(status.error)
    if status.counted is None:
        text = f"The second copy has no complete base yet, so nothing can be restored from it{why}"
        return [Finding("replication", "warning", "replication.to", text)]
    if status.lag_s > LATE_S:
        text = f"The second copy is {status.lag_s:.0f} s behind{why}"
        return [Finding("replication", "critical", "replication.to", text)]
    return []
