"""The beginning and the end of an epoch: reads the log to its end, seals it there, or refuses.

    claim       note this process in the directory, and check that the log is this directory's
    take over   end the last epoch with a seal, and write what the log has and the directory lacks
    leave       end the log of a directory for good

What the directory has and the log lacks is sent afterwards, as the first segments of the new epoch.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import trio

from storage.base import StoreError, StoreUnusable
from storage.leveldb.shipping import NO_COMMIT
from storage.replication.bases import FORMAT_NAME, encode_format
from storage.replication.carry import ObjectStoreUnavailable, carry_out
from storage.replication.conditions import check_replacement
from storage.replication.outbox import Unsent, operations_of
from storage.replication.protocol import (
    FOREIGN_HINT,
    ROOT,
    BucketWentBack,
    DirectoryBehind,
    Foreign,
    OwnDirectory,
    Terms,
    check_place,
    claim_prefix,
    follow,
    take_over,
)
from storage.replication.reading import ATTEMPTS, check_store, has_base_after, is_removed
from storage.replication.record import Record, RecordFile, write_record
from storage.replication.segment import RUN_BYTES
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from actors.copy_calls import CopyCalls
    from storage.leveldb.store import LevelDBStore
    from storage.leveldb.tables import LevelDBTables
    from storage.replication.carry import Objects
    from storage.replication.outbox import Outbox, Restarted
    from storage.replication.protocol import Place
    from storage.replication.record import RecordFile
    from storage.replication.segment import Commit, Segment

#: Bytes of the journal, which a start reads to find commits that were not sent before a crash.
UNSENT_BYTES = 64 << 20
#: For an operator who gives up a copy that the object store has lost.
LOST_HINT = (
    "if the object store lost the copy or returned to an earlier state, run plainsong replica leave --without-seal, "
    "then use a new prefix"
)
#: Objects by which a start checks the object store.
PROBES = "probes"


@dataclass(frozen=True, slots=True)
class Begun:
    """The epoch that a take-over has begun."""

    place: Place
    """Of its first segment."""
    restarted: Restarted
    """The last commit of the store, whose commits after ``place`` the log lacks."""
    has_base: bool
    """True if the log goes from a complete base to ``place`` without a gap."""
    had_base: bool
    """True if there was a complete base, also if a gap follows it."""


class CopyStart:
    """One beginning of an epoch: ``claim``, then ``take_over``."""

    def __init__(
        self,
        calls: CopyCalls,
        file: RecordFile,
        store: LevelDBStore,
        outbox: Outbox,
        *,
        is_first: bool,
        on_read: Callable[[], object],
    ) -> None:
        """Args:
        is_first: the process has begun no epoch before, so the log may have what the directory lacks.
        on_read: called for each segment that is read.
        """
        self.run = secrets.token_bytes(RUN_BYTES)
        """In all objects of this epoch."""
        self._calls = calls
        self._file = file
        self._store = store
        self._outbox = outbox
        self._is_first = is_first
        self._on_read = on_read
        self._restarted = outbox.restart()
        #: The place after the last segment that was read.
        self._reached = ROOT
        self._unsent = Unsent(())

    async def claim(self) -> None:
        """Note this run in the directory, and check that the log is the directory's. Raises as ``SecondCopy.begin``."""
        found = await self._file.read()
        # Noted before the first write to the log, so that every later start recognizes this run's objects.
        first = found or Record(secrets.token_hex(16))
        await self._file.change(lambda _: replace(first.started(self.run), shift=self._outbox.shift))
        record, calls = self._file.record, self._calls
        if self._is_first and calls.objects.can_exchange:
            await self._check_replacement()
        await calls.do(claim_prefix(FORMAT_NAME, encode_format(record.store), record.place))
        if await _is_too_old(calls.objects, record.place, lambda: calls.do(check_place(record.place)), read=calls.read):
            raise calls.ended(_too_old(record.place))
        after = record.place.commit
        if self._is_first and after is not None:
            shift = self._outbox.shift
            self._unsent = await self._store.run_reader(lambda tables: Unsent.of(tables, after, UNSENT_BYTES, shift))

    async def take_over(self, terms: Terms, holder: str) -> Begun:
        """End the last epoch, and write what the log has and the directory lacks. Raises as ``SecondCopy.begin``."""
        record, restarted = self._file.record, self._restarted
        entries = self._unsent.entries
        own = OwnDirectory(
            restarted.last,
            frozenset(record.runs),
            entries[0][0] - 1 if entries else restarted.last,
            applies=self._is_first,
            writer=record.writer,
        )
        steps = take_over(
            self.run,
            record.place,
            known=record.known_epoch,
            leased=self._calls.objects.can_exchange,
            directory=own,
            holder=holder,
            terms=terms,
        )
        self._reached = record.place
        place = await self._calls.do(steps, self._apply)
        # Retention may have freed the number of the seal since the check: then the seal ends nothing, since every reader
        # begins with a later base.
        check = partial(has_base_after, self._calls.objects, self._reached, below=place.epoch)
        if await self._calls.read(check):
            raise self._calls.ended(_too_old(self._reached))
        if place.commit is not None and place.commit > restarted.last:
            restarted = self._outbox.restart()
        had_base = record.base is not None
        has_base = place.commit is not None and had_base
        await self._file.change(
            lambda record: replace(record.at(place, self.run), base=record.base if has_base else None)
        )
        return Begun(place, restarted, has_base, had_base)

    async def lacking(self, after: int, time_ms: int) -> list[Commit]:
        """Return the directory's commits after one of them, which the log lacks. Raises StoreError."""
        return await self._store.run_reader(lambda tables: self._unsent.commits(tables, after, time_ms))

    async def _check_replacement(self) -> None:
        name = f"{PROBES}/{self.run.hex()}"
        try:
            await self._calls.do(check_replacement(name))
        finally:
            with suppress(StoreError, StoreUnusable):
                await self._calls.objects.remove([name])

    async def _check_own(self, segment: Segment) -> None:
        """Compare the commits of a segment that the directory has too. Raises Foreign: one differs."""
        last, unsent = self._outbox.last, self._unsent
        own = [each for each in enumerate(segment.commits, segment.first) if each[0] <= last]
        if not own:
            return

        def differing(tables: LevelDBTables) -> int | None:
            for number, commit in own:
                if unsent.contradicts(number, commit) or unsent.has_other_values(tables, number, commit):
                    return number
            return None

        number = await self._store.run_reader(differing)
        if number is not None:
            raise Foreign(
                f"commit {number} of the log is not the one in this directory: a clone of the directory has continued "
                "the log",
                hint=FOREIGN_HINT,
            )

    async def _apply(self, segments: Sequence[Segment]) -> None:
        """Write what the log has and the directory lacks: after a power cut, or in an earlier state of the disk.

        Raises:
          Foreign: a commit of the log and the directory's own with the same number differ.
          DirectoryBehind: the log does not continue the directory's last commit.
        """
        for segment in segments:
            self._on_read()
            self._reached = replace(self._reached, epoch=segment.epoch, number=segment.number + 1)
            await self._check_own(segment)
            for number, commit in enumerate(segment.commits, segment.first):
                last = self._outbox.last
                if number <= last:
                    continue
                if number == last + 1:
                    await self._store.apply(operations_of(commit))
                if self._outbox.last != number:
                    raise DirectoryBehind(f"the log has commit {number}, but this directory ends at {last}")


async def leave_copy(objects: Objects, directory: Path, record: Record) -> None:
    """End the log of a directory in the object store, for good: no other start continues it, and no standby.

    Raises:
      Foreign, ReignOver, BucketWentBack: it has been continued or lost already.
      StoreError, DamagedLog: it cannot be read or written. Another call continues.
    """
    await check_store(objects, record.store)
    failed = _bounded()

    async def end() -> None:
        await carry_out(objects, check_place(record.place), failed=failed)
        await _end_log(objects, directory, record, failed)

    try:
        is_too_old = await _is_too_old(objects, record.place, end)
    except BucketWentBack as error:
        raise BucketWentBack(error.detail, hint=LOST_HINT) from None
    if is_too_old:
        raise _too_old(record.place)


async def is_deposed(objects: Objects, record: Record) -> bool:
    """True if another process has continued the log of a primary's directory, so that a start would be refused.

    Raises:
      Foreign: the prefix has the log of another store.
      BucketWentBack: the object store has lost the log.
      StoreError, DamagedLog: it cannot be read.
    """
    place = record.place
    await check_store(objects, record.store)
    own = OwnDirectory(None, frozenset(record.runs), NO_COMMIT, writer=record.writer)
    failed = _bounded()
    try:
        if await _is_too_old(objects, place, lambda: carry_out(objects, check_place(place), failed=failed)):
            return True
    except BucketWentBack as error:
        raise BucketWentBack(error.detail, hint=LOST_HINT) from None
    try:
        await carry_out(objects, follow(place, own, {own.writer}), failed=failed)
    except Foreign:
        return True
    return False


def _bounded() -> Callable[[str], None]:
    """Count the failures of a command's requests, and end it at the last one allowed with ObjectStoreUnavailable."""
    failures = 0

    def failed(why: str) -> None:
        nonlocal failures
        failures += 1
        if failures == ATTEMPTS:
            raise ObjectStoreUnavailable(why, hint="run the command again once the object store responds")

    return failed


async def _end_log(objects: Objects, directory: Path, record: Record, failed: Callable[[str], None]) -> None:
    run = secrets.token_bytes(RUN_BYTES)
    record = record.started(run)
    await in_thread(write_record, directory, record)
    own = OwnDirectory(None, frozenset(record.runs), NO_COMMIT, writer=record.writer)
    known, leased = record.known_epoch, objects.can_exchange
    # Otherwise a standby would take over next to a daemon that serves the directory without a copy.
    terms = Terms(0, allows_standby=False, is_free=True, is_kept=False)
    reached = record.place

    async def note(segments: Sequence[Segment]) -> None:
        nonlocal reached
        await trio.lowlevel.checkpoint()
        reached = replace(reached, epoch=segments[-1].epoch, number=segments[-1].number + 1)

    steps = take_over(run, record.place, known=known, leased=leased, directory=own, terms=terms)
    place = await carry_out(objects, steps, note, failed=failed)
    # As after a start: retention may have freed the number of the seal since it was checked.
    if await has_base_after(objects, reached, below=place.epoch):
        raise _too_old(reached)


async def _once(read: Callable[[], Awaitable[bool]]) -> bool:
    return await read()


async def _is_too_old(
    objects: Objects,
    place: Place,
    attempt: Callable[[], Awaitable[object]],
    *,
    read: Callable[[Callable[[], Awaitable[bool]]], Awaitable[bool]] = _once,
) -> bool:
    """True if retention has removed the log after a directory's place, which then only looks like the log's end.

    A seal at such a place ends nothing, since every reader begins with a later base.

    Args:
      attempt: made unless the object at ``place`` was removed, and only once; checks at least the object before it.
      read: makes one read, and may repeat it.
    Raises:
      BucketWentBack: of ``attempt``, if no base is of a later place: then retention has removed nothing there.
      StoreError, DamagedLog: the bases cannot be read.
    """
    # Also if the object before it exists: retention may have failed to remove that one.
    if await read(partial(is_removed, objects, place)):
        return True
    try:
        await attempt()
    except BucketWentBack:
        if await read(partial(has_base_after, objects, place)):
            return True
        raise
    return False


def _too_old(place: Place) -> BucketWentBack:
    return BucketWentBack(
        f"the log after this directory's last state, in epoch {place.epoch}, has been removed: the directory is too "
        "old",
        hint="restore the copy, or make this directory a standby's: plainsong replica rejoin",
    )
