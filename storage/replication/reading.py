"""Reading a log back: its bases, the commits after one of them, and a check of everything."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import trio

from storage.base import StoreError, StoreUnusable
from storage.replication.bases import (
    BASES,
    FORMAT_NAME,
    MANIFEST,
    Base,
    PartReader,
    decode_format,
    part_name,
)
from storage.replication.carry import PAUSES_S, ObjectStoreUnavailable, read_all
from storage.replication.notices import LEASE, decode_lease, decode_seal, log_name
from storage.replication.protocol import AHEAD, Foreign, Place, after
from storage.replication.segment import DamagedLog, decode_segment, is_segment
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from storage.replication.carry import Objects
    from storage.replication.protocol import Fetched
    from storage.replication.segment import Commit, Segment

#: Attempts of a read before a command gives up.
ATTEMPTS = 6
MOVED_HINT = "run the command again: it then begins with a later base"


class CopyMoved(StoreError):
    """Retention has removed what was about to be read, because a later base replaces it."""

    title = "The copy has moved on"


async def read(objects: Objects, name: str) -> Fetched | None:
    """Read an object, with a few repetitions. Raises StoreError."""
    for pause_s in PAUSES_S[: ATTEMPTS - 1]:
        try:
            return await objects.get(name)
        except ObjectStoreUnavailable:
            await trio.sleep(pause_s)
    return await objects.get(name)


async def store_of(objects: Objects) -> str:
    """Return the store whose log this is. Raises StoreUnusable, StoreError, DamagedLog."""
    found = await read(objects, FORMAT_NAME)
    if found is None:
        raise StoreUnusable("there is no copy: FORMAT is missing", hint="give the prefix exactly as in replication.to")
    return decode_format(found.data)


async def check_store(objects: Objects, store: str) -> None:
    """Check that a prefix has no log of another store than this one.

    Raises:
      Foreign: it has.
      StoreError, DamagedLog: that cannot be read.
    """
    found = await read(objects, FORMAT_NAME)
    if found is not None and decode_format(found.data) != store:
        raise Foreign(
            "the prefix in replication.to has the copy of another store",
            hint="name the prefix of this directory's own copy; plainsong replica leave --without-seal unlinks it from that",
        )


async def bases_of(objects: Objects) -> list[Base]:
    """Return the complete bases, newest last. Raises StoreError, DamagedLog."""
    found: list[Base] = []
    names = [name for name in await objects.names(BASES) if name.endswith(f"/{MANIFEST}")]
    while names:
        manifests = await read_all(partial(read, objects), names[:AHEAD])
        for name, manifest in zip(names, manifests, strict=False):
            if manifest is not None:  # retention may remove it at any time
                found.append(Base.decode(name.removesuffix(f"/{MANIFEST}"), manifest.data))
        del names[: len(manifests)]
    return sorted(found, key=lambda base: (base.place.epoch, base.commit))


async def latest_ms(objects: Objects) -> int:
    """Return the latest time that a copy shows: of a base, of the last commits in the log, or of the primary's clock.

    Raises:
      StoreError, DamagedLog.
    """
    found = await read(objects, LEASE)
    times = [base.until_ms for base in await bases_of(objects)]
    times.append(0 if found is None else decode_lease(found.data).clock_ms or 0)
    for name in reversed(await objects.names("log")):
        found = await read(objects, name)
        if found is not None and is_segment(found.data):
            segment = await in_thread(decode_segment, found.data)
            if segment.commits:
                times.append(segment.last_ms)
                break
    return max(times)


async def has_base_after(objects: Objects, place: Place, *, below: int | None = None) -> bool:
    """True if a base is of a later place of the log than this one. Raises StoreError, DamagedLog.

    Then the object at the place has existed, since a base is complete only once all segments before it are stored. If the
    object is missing, retention has removed it, so the log does not end there.

    Args:
      below: only bases of epochs before this one.
    """
    bases = await bases_of(objects)
    if below is None and place.commit is not None and any(base.commit > place.commit for base in bases):
        # Such a base may be of an earlier epoch: then this place follows a seal that ends nothing, which was stored at a
        # number that retention had freed.
        return True
    places = [base.place for base in bases if below is None or base.place.epoch < below]
    return any((at.epoch, at.number) > (place.epoch, place.number) for at in places)


async def is_removed(objects: Objects, place: Place) -> bool:
    """True if the missing object at ``place`` was removed, False if it has not been stored, or was stored since.

    Raises:
      StoreError, DamagedLog.
    """
    return await has_base_after(objects, place) and await objects.get(log_name(place.epoch, place.number)) is None


async def rows_of(objects: Objects, base: Base, take: Callable[[Commit], Awaitable[object]]) -> None:
    """Give ``take`` all rows of a base, part by part.

    Raises:
      CopyMoved: retention has removed the base.
      StoreError, DamagedLog: it cannot be read.
    """
    reader = PartReader(base)
    parts = _Ahead(objects, partial(part_name, base.folder))
    for number in range(1, base.parts + 1):
        found = await parts.next()
        if found is None:
            if await _is_gone(objects, base):
                raise CopyMoved("a base was removed while it was read", hint=MOVED_HINT)
            raise DamagedLog(f"part {number} of the base at commit {base.commit} is missing")
        await take(await in_thread(reader.read, found.data))


@dataclass(frozen=True, slots=True)
class End:
    """Where a reading ended."""

    place: Place
    commit: int
    """The last commit that was applied."""
    time_ms: int | None
    """Its time; None if none was applied."""
    gap: bool
    """True if commits are missing after it, and the log continues without them."""
    void: int
    """Segments before it that do not count, because a clone of the primary wrote another one before them."""


async def commits_after(
    objects: Objects,
    base: Base,
    take: Callable[[int, list[Commit]], Awaitable[object]],
    *,
    to_commit: int | None = None,
    to_ms: int | None = None,
) -> End:
    """Give ``take`` the commits after a base, with the number of the first: those of a segment at a time.

    It ends before the first commit that is later than ``to_commit`` or ``to_ms``, at a gap, or at the end of the log.

    Raises:
      CopyMoved: retention has removed the base and the next segments.
      StoreError, DamagedLog: it cannot be read.
    """
    place, last, void = base.place, base.commit, 0
    time_ms: int | None = None
    log = _Ahead(objects, partial(log_name, place.epoch), place.number)
    while to_commit is None or last < to_commit:
        found = await log.next()
        if found is None:
            if await is_removed(objects, place):
                raise await _missing(objects, base, last)
            break
        following, segment = await in_thread(after, place, found.data)
        if segment is None:
            if is_segment(found.data):
                void += 1
            else:
                if decode_seal(found.data).gap:
                    return End(place, last, time_ms, gap=True, void=void)
                log = _Ahead(objects, partial(log_name, following.epoch))
        else:
            wanted = _wanted(segment, to_commit, to_ms)
            if wanted:
                await take(segment.first, wanted)
                last, time_ms = segment.first + len(wanted) - 1, wanted[-1].time_ms
            if len(wanted) < len(segment.commits):
                break
        place = following
    return End(place, last, time_ms, gap=False, void=void)


async def _missing(objects: Objects, base: Base, last: int) -> CopyMoved | DamagedLog:
    """Return the error for a log that lacks the segment after commit ``last``, and continues later. Raises StoreError."""
    if await _is_gone(objects, base):
        return CopyMoved("segments were removed while they were read", hint=MOVED_HINT)
    return DamagedLog(f"objects are missing: the log has commits after {last}, and not the next one", hint=_hint(last))


def _hint(last: int) -> str:
    return f"plainsong replica restore with --commit {last} restores up to there"


async def _is_gone(objects: Objects, base: Base) -> bool:
    """True if retention has removed a base: first its manifest, then its parts and the log before the next one."""
    return await read(objects, f"{base.folder}/{MANIFEST}") is None


async def reported_commit(objects: Objects) -> int:
    """Return the last commit that a primary has reported as counted; 0 if none. Raises StoreError, DamagedLog.

    Read it before the log: the log that is read later must reach that far.
    """
    found = await read(objects, LEASE)
    return 0 if found is None else decode_lease(found.data).counted or 0


def lacking(last: int, reported: int) -> DamagedLog:
    """Return the error for a log that ends at ``last``, before a commit that was reported."""
    return DamagedLog(
        f"objects are missing: the log ends at commit {last}, but commit {reported} was in it before", hint=_hint(last)
    )


def _wanted(segment: Segment, to_commit: int | None, to_ms: int | None) -> list[Commit]:
    wanted: list[Commit] = []
    for number, commit in enumerate(segment.commits, segment.first):
        if (to_commit is not None and number > to_commit) or (to_ms is not None and commit.time_ms > to_ms):
            break
        wanted.append(commit)
    return wanted


def base_before(bases: list[Base], to_commit: int | None, to_ms: int | None) -> Base:
    """Return the newest base before a point. Raises StoreUnusable: there is none."""
    found = [
        base
        for base in bases
        if (to_commit is None or base.until <= to_commit) and (to_ms is None or base.until_ms <= to_ms)
    ]
    if not found:
        oldest = f"; the oldest is of commit {bases[0].until}" if bases else ""
        raise StoreUnusable(f"the copy has no complete base before that point{oldest}")
    return found[-1]


@dataclass(slots=True)
class Checked:
    """The result of checking a copy."""

    store: str
    bases: list[Base]
    segments: int = 0
    commits: int = 0
    end: End | None = None
    gaps: list[int] = field(default_factory=list)
    """Last commits before a gap."""
    void: int = 0
    """Segments that do not count: see ``End``."""
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if every base and the log after it can be restored."""
        return bool(self.bases) and not self.problems


async def verify(objects: Objects) -> Checked:
    """Read every base, and the log after the oldest. Raises StoreError."""
    reported = await reported_commit(objects)
    checked = Checked(await store_of(objects), await bases_of(objects))

    async def count(first: int, commits: list[Commit]) -> None:
        del first
        checked.segments += 1
        checked.commits += len(commits)
        await trio.lowlevel.checkpoint()

    async def look(commit: Commit) -> None:
        del commit
        await trio.lowlevel.checkpoint()

    reached = 0
    moved: CopyMoved | None = None
    for base in checked.bases.copy():
        try:
            await rows_of(objects, base, look)
        except CopyMoved as error:
            moved = error
            checked.bases.remove(base)
            continue
        except DamagedLog as error:
            checked.problems.append(error.detail)
        if base.commit < reached:
            continue  # the log after an earlier base has been read beyond it
        try:
            checked.end = await commits_after(objects, base, count)
        except CopyMoved as error:
            moved = error
            checked.bases.remove(base)
            continue
        except DamagedLog as error:
            checked.problems.append(error.detail)
            continue
        reached = checked.end.commit
        checked.void += checked.end.void
        if reached < base.until:
            checked.problems.append(f"the log ends at commit {reached}, before base {base.commit} is consistent")
        if checked.end.gap:
            checked.gaps.append(reached)
    if checked.end is not None and not checked.end.gap and reached < reported:
        checked.problems.append(lacking(reached, reported).detail)
    if moved is not None and not checked.bases:
        raise moved
    return checked


class _Ahead:
    """Reads numbered objects in order, several at a time."""

    def __init__(self, objects: Objects, name: Callable[[int], str], first: int = 1) -> None:
        self._objects = objects
        self._name = name
        self._number = first
        self._found: list[Fetched | None] = []

    async def next(self) -> Fetched | None:
        """Return the next object; None if it does not exist, after which there is no other. Raises StoreError."""
        if not self._found:
            names = [self._name(self._number + at) for at in range(AHEAD)]
            self._found = await read_all(partial(read, self._objects), names)
            self._number += len(self._found)
        return self._found.pop(0)
