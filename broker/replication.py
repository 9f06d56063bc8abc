"""The second copy of the store: opens the object store of ``[replication]``, and runs the copy."""

from __future__ import annotations

import logging
import platform
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import trio

from actors.late_commits import LateCommits
from actors.second_copy import SecondCopy
from actors.settling import settle
from broker.finding import Finding
from broker.metrics import LATENCY_BUCKETS_S, Distributions
from plainsong.protocol.plurals import counted
from storage.base import StoreError, StoreUnusable
from storage.clock import now_ms
from storage.leveldb import LevelDBStore
from storage.leveldb.store import NOT_ACKNOWLEDGED, NotAcknowledged
from storage.replication.counted_store import CountingOutbox
from storage.replication.notices import LEASE, decode_lease
from storage.replication.outbox import Outbox
from storage.replication.protocol import ReignOver
from storage.replication.record import read_record
from storage.replication.segment import DamagedLog

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from actors.lease import LeaseKeeper
    from actors.lease_hold import LeaseHold
    from actors.mailbox import RunQueue
    from actors.second_copy import CopyStatus
    from actors.settings import ReplicationConfig
    from broker.config import Config
    from broker.daemon import Daemon
    from broker.metrics import Metrics
    from plainsong.protocol.answers.service import Severity
    from plainsong.protocol.errors import PlainsongError
    from storage.base import Store
    from storage.replication.carry import Objects
    from storage.replication.object_store import BlockingObjects
    from storage.replication.record import Record

log = logging.getLogger(__name__)
DEPOSED_HINT = "follow the new primary with plainsong replica rejoin"
#: How long a deposed primary looks for the name of the new one.
LOOK_S = 5.0
#: A start fails if the object store has not responded within ``replication.timeout_s`` times this.
START_TIMEOUTS = 4
#: Report a copy with more lag than this, in seconds.
LATE_S = 60.0
#: Report after this time that an expected standby is missing: it registers within seconds of its start.
NO_STANDBY_S = 60.0
#: Report a base that is older than ``replication.base_every_h`` times this.
LATE_BASES = 2


def open_objects(url: str, timeout_s: float) -> Objects:
    """Return the objects below a URL. Raises StoreUnusable: it cannot be used, or the library is not installed."""
    with _needs_library():
        from storage.replication.object_store import ObjectStore  # here, since it needs an optional package
    return ObjectStore.open(url, timeout_s=timeout_s)


def open_for_backups(url: str, timeout_s: float) -> BlockingObjects:
    """Like ``open_objects``, but with blocking calls, for a command without an event loop."""
    with _needs_library():
        from storage.replication.object_store import open_blocking
    return open_blocking(url, timeout_s=timeout_s, repeats=True)


@contextmanager
def _needs_library() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise StoreUnusable(
            "an object store needs obstore, which is not installed",
            hint='install the extra: pip install "plainsong-server[replication]"',
        ) from error


def outbox_of(config: Config) -> Outbox | None:
    """Return the outbox that the store is opened with; None without a second copy."""
    replication = config.replication
    if not replication.to:
        return None
    record = record_of(config)
    continues = None if record is None or record.shift is not None else record.place.commit
    shift = 0 if record is None else record.shift or 0
    most = replication.backlog_bytes
    if replication.mode == "sync":
        return CountingOutbox(max_bytes=most, timeout_s=replication.timeout_s, shift=shift, continues=continues)
    return Outbox(max_bytes=most, full_bytes=replication.segment_bytes, shift=shift, continues=continues)


def record_of(config: Config) -> Record | None:
    """Return the data directory's record of its copy; None if it has none. Raises StoreUnusable."""
    return read_record(config.storage.data_dir.absolute())


def is_standby(config: Config) -> bool:
    """True if the directory follows the copy of another one. Raises StoreUnusable."""
    if not config.replication.to:
        return False
    record = record_of(config)
    return config.replication.role == "standby" if record is None else record.standby


@asynccontextmanager
async def second_copy(
    config: Config,
    store: Store,
    outbox: Outbox | None,
    switching: trio.Event,
    hold: LeaseHold,
    keep_alive: Callable[[], Awaitable[None]],
    start_s: float | None = None,
) -> AsyncIterator[SecondCopy | None]:
    """Run the copy during the block; at its end, ship the remaining commits. Yields None without a second copy.

    Args:
      hold: renews the lease of a take-over in this process.
      switching: if it is set at the end, end the log cleanly for a standby.
      keep_alive: notifies a service manager during the last upload, until cancelled.
      start_s: how long to wait for an object store that does not answer; None: ``START_TIMEOUTS`` time-outs.
    Raises:
      StoreUnusable, StoreError: the object store cannot be used, or does not answer.
      StorageFailed: the log does not belong to this directory; see ``SecondCopy.begin`` and ``SecondCopy.run``.
    """
    if outbox is None:
        yield None
        return
    assert isinstance(store, LevelDBStore)  # checked with the settings
    replication = config.replication
    objects = open_objects(replication.to, replication.timeout_s)
    directory = config.storage.data_dir.absolute()
    copy = SecondCopy(
        objects,
        store,
        outbox,
        directory,
        replication,
        now_ms,
        base_bytes_per_s=config.backup.bytes_per_s,
        holder=platform.node(),
        hold=hold,
    )
    seal_s = START_TIMEOUTS * replication.timeout_s
    if start_s is None:
        start_s = seal_s
    with trio.move_on_after(start_s) as starting:
        copy.on_read = partial(_extend, starting, start_s)
        await copy.begin()
    if starting.cancelled_caught:
        raise StoreUnusable(
            f"the object store in replication.to has not answered for {start_s:g} s{_why(copy.error)}",
            hint="the daemon has to read the end of the log there before it starts; start it again once the store "
            "answers",
        )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_ship, copy, objects)
        await _settle(copy, store)
        store.acknowledges = lambda: copy.lease.holds
        yield copy
        if switching.is_set():
            nursery.start_soon(keep_alive)
        with trio.move_on_after(config.shutdown.drain_s) as finishing:
            await copy.finish()
        if switching.is_set():
            await _hand_over(copy, seal_s, is_complete=not finishing.cancelled_caught and copy.is_whole)
        nursery.cancel_scope.cancel()


def _extend(scope: trio.CancelScope, seconds: float) -> None:
    """Extend the time limit of a start, because the object store has answered."""
    scope.deadline = trio.current_time() + seconds


async def _ship(copy: SecondCopy, objects: Objects) -> None:
    """Run the copy. If another process has taken over, find out which."""
    try:
        await copy.run()
    except* ReignOver:
        lease = None
        with trio.move_on_after(LOOK_S), suppress(StoreError, DamagedLog):
            found = await objects.get(LEASE)
            lease = None if found is None else decode_lease(found.data)
        if lease is None or not lease.holder:
            raise
        where = f" at {', '.join(lease.urls)}" if lease.urls else ""
        detail = f"{lease.holder}{where} has taken over in epoch {lease.epoch}"
        if unsent := copy.status.lag_commits:
            detail += f"; up to {counted(unsent, 'commit')} may exist only in this directory"
        raise ReignOver(detail, hint=DEPOSED_HINT) from None


async def _settle(copy: SecondCopy, store: LevelDBStore) -> None:
    """Apply the rules of a restore after a take-over that may have lost commits. Raises StoreError, StoreUnusable."""
    if (what := copy.record.settle) is not None:
        settled = await settle(store, what, now_ms(), copy.log.until_room)
        await copy.settled()
        facts = {"topics": settled.topics, "rolled_back": settled.rolled_back}
        log.warning("commits of the last primary may be missing: sessions and transactions begin again", extra=facts)


async def _hand_over(copy: SecondCopy, seconds: float, *, is_complete: bool) -> None:
    if not is_complete:
        log.error("the log is not handed over: the object store has not taken everything within shutdown.drain_s")
        return
    with trio.move_on_after(seconds) as sealing:
        await copy.hand_over()
    if sealing.cancelled_caught:
        log.error("the log may not be handed over: the object store does not answer")


def answer_while_leased(lease: LeaseKeeper, run_queue: RunQueue) -> None:
    """Let actors answer without a commit, such as repeated publishes, only while they may acknowledge."""

    def check() -> None:
        if not lease.holds:
            raise NotAcknowledged(NOT_ACKNOWLEDGED)

    run_queue.check = check


def start_refusing(outbox: Outbox | None, daemon: Daemon, actors: trio.Nursery) -> None:
    """In the mode ``sync``, refuse requests while their commits could not count. Call before the daemon serves."""
    if not isinstance(outbox, CountingOutbox):
        return
    directory, service = daemon.directory, daemon.authority.own

    def end_late(refusal: Callable[[], PlainsongError]) -> None:
        directory.end_late(refusal)
        if service is not None:
            service.actor.end_late(refusal)

    actors.start_soon(LateCommits(outbox, directory.environment.run_queue, end_late).run)


def _why(error: str) -> str:
    return f": {error}" if error else ""


def lacks_standby(status: CopyStatus, settings: ReplicationConfig) -> bool:
    """True if a standby is expected, and none has registered for a minute."""
    return settings.standby == "expected" and not status.standbys and status.alone_s >= NO_STANDBY_S


def add_copy_gauges(metrics: Metrics, copy: SecondCopy, settings: ReplicationConfig) -> None:
    """Register the gauges of the second copy."""

    def reads(name: str, text: str, read: Callable[[CopyStatus], float | None]) -> None:
        metrics.reads(f"plainsong_replication_{name}", text, lambda: read(copy.status))

    reads("epoch", "Number of this start of the daemon in the commit log.", lambda status: status.epoch)
    reads("last_commit", "Last commit of the store.", lambda status: status.last)
    reads(
        "counted_commit",
        "Last commit that survives the loss of the directory; absent before the first complete base.",
        lambda status: status.counted,
    )
    reads("lag_commits", "Commits not yet in the object store.", lambda status: status.lag_commits)
    reads("lag_bytes", "Bytes of commits not yet in the object store.", lambda status: status.lag_bytes)
    reads("lag_seconds", "Age of the oldest commit not yet in the object store.", lambda status: status.lag_s)
    reads(
        "base_timestamp_seconds",
        "Time of the last complete base, in seconds since 1970; absent without one.",
        lambda status: None if status.base is None else status.base_ms / 1000,
    )
    reads(
        "oldest_timestamp_seconds",
        "Earliest moment that can be restored, in seconds since 1970; absent while unknown.",
        lambda status: None if status.oldest_ms is None else status.oldest_ms / 1000,
    )
    reads(
        "upload_timestamp_seconds",
        "Time of the last segment stored, in seconds since 1970; absent before the first.",
        lambda status: None if status.uploaded_ms is None else status.uploaded_ms / 1000,
    )
    reads(
        "given_up",
        "1 while the copy has a gap, so that later commits can be restored only once a new base is complete.",
        lambda status: status.given_up,
    )
    reads("standbys", "Registered standbys.", lambda status: len(status.standbys))
    reads(
        "standby_missing",
        "1 while a standby is expected but none has been registered for a minute.",
        lambda status: lacks_standby(status, settings),
    )
    reads("failing", "1 while the object store refuses access or does not answer.", lambda status: bool(status.error))
    puts = Distributions(
        "plainsong_replication_put_duration_seconds", "Time to write one object to the object store.", LATENCY_BUCKETS_S
    )
    metrics.registry.register(puts)
    copy.puts.on_put = puts.of().observe


def copy_findings(copy: SecondCopy, settings: ReplicationConfig, now_ms: Callable[[], int] = now_ms) -> list[Finding]:
    """Report commits that cannot be restored, or only late, and an object store that does not answer."""
    status = copy.status
    why = _why(status.error)
    if status.given_up:
        text = f"The second copy has a gap: later commits can be restored only once a new base is complete{why}"
        return [_finding("critical", text)]
    if status.counted is None:
        return [_finding("warning", f"The second copy has no complete base yet, so it cannot be restored{why}")]
    if status.lag_s > LATE_S:
        return [_finding("critical", f"The second copy is {status.lag_s:.0f} s behind{why}")]
    found = []
    age_h = (now_ms() - status.base_ms) / 3_600_000
    if age_h > LATE_BASES * settings.base_every_h:
        text = (
            f"The last base of the second copy is {age_h:.0f} h old; a restore has to replay the log of all that time"
        )
        found.append(_finding("warning", text))
    if lacks_standby(status, settings):
        text = (
            f"No standby has been registered for {status.alone_s:.0f} s although one is expected: no machine would "
            "take over"
        )
        found.append(_finding("warning", text, "replication.standby"))
    if status.error:
        found.append(_finding("warning", f"The daemon cannot write its second copy{why}"))
    return found


def _finding(severity: Severity, text: str, setting: str = "replication.to") -> Finding:
    return Finding("replication", severity, setting, text, link="/console")
