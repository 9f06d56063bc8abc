"""The protocol of the commit log, without any input or output: how an epoch begins, is written, read and ended.

A procedure is a generator. It yields requests to the object store (``Get``, ``GetAll``, ``Create``, ``Exchange``) and
gets their answers; ``Apply`` hands segments that were read to the caller. So the same code runs against a real object
store and in a simulation that loses, delays and reorders the requests of several processes.

There is no clock in the protocol. An epoch ends at the first number that does not exist, by the creation of a seal
there. Either the next segment of the old primary is created at this number, or the seal: the object store decides, and
both sides learn of it by reading that one object.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar

from plainsong.protocol.errors import StorageFailed
from plainsong.protocol.plurals import plural
from storage.replication.notices import (
    LEASE,
    EpochSeal,
    Lease,
    Registration,
    decode_lease,
    decode_seal,
    encode_lease,
    encode_seal,
    log_name,
)
from storage.replication.segment import (
    NOTHING_BEFORE,
    Commit,
    DamagedLog,
    Segment,
    commits_bytes,
    decode_segment,
    digest,
    encode_segment,
    is_segment,
    segment_of,
)

T = TypeVar("T")
#: Objects of the log that are read at once, since each takes a round trip; within these bytes, if they are as large as
#: those before.
AHEAD = 8
AHEAD_BYTES = 32 << 20
#: A batch has further segments only within these bytes before compression. Beyond them a sync costs little of the time.
BATCH_BYTES = 4 << 20
FOREIGN_HINT = (
    "if a standby has taken over, follow it with plainsong replica rejoin; if this directory was copied or restored "
    "elsewhere and you keep this one, run plainsong replica leave, then use a new prefix"
)
LEAVE_HINT = (
    "start again; if the error remains, give up this copy and begin another one: run plainsong replica leave "
    "(--without-seal if it says so), then use a new prefix"
)


# --- requests -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Get:
    """Read an object. The answer is ``Fetched``, or None if it does not exist. Repeat it until it has an answer."""

    name: str


@dataclass(frozen=True, slots=True)
class GetAll:
    """Read several objects at once, in any order. The answer has what ``Get`` has for each, in the order of ``names``: at
    least the first, and fewer than all if one of the others cannot be read."""

    names: Sequence[str]


@dataclass(frozen=True, slots=True)
class Fetched:
    """An object, and its version."""

    data: bytes
    etag: str


@dataclass(frozen=True, slots=True)
class Create:
    """Create an object only if there is none. The answer is a ``Verdict``."""

    name: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Exchange:
    """Replace an object only if it still has this version. The answer is a ``Verdict``."""

    name: str
    data: bytes
    etag: str


@dataclass(frozen=True, slots=True)
class Apply:
    """Take consecutive segments that count. There is no answer."""

    segments: Sequence[Segment]


class Verdict(Enum):
    """The answer to a conditional write."""

    DONE = "done"
    REFUSED = "refused"
    """The condition failed, or another write of the object was under way."""
    UNKNOWN = "unknown"
    """The answer was lost. The write may have happened, may still happen, or may never happen."""


Steps = Generator[Get | GetAll | Create | Exchange | Apply, Any, T]


class ReignOver(StorageFailed):
    """Another process has ended the epoch of this one, which may acknowledge nothing more."""

    title = "Another process has taken over the commit log"


class BucketWentBack(StorageFailed):
    """The object store lacks what this directory knows to have been there."""

    title = "The commit log is truncated"


class LeaseWentBack(BucketWentBack):
    """The lease is older than one that was written. Only the log shows if the object store went back, or lost a
    replacement of the lease."""


class Foreign(StorageFailed):
    """The log was continued by a process that was not started on this directory."""

    title = "The commit log belongs to another directory"


class TakeOverLost(StorageFailed):
    """A standby cannot take over now: another process did, or commits are missing from the log. It continues to follow."""

    title = "The take-over has failed"


class Unconditional(StorageFailed):
    """The object store ignores the conditions of writes."""

    title = "The object store has no conditional writes"


class DirectoryBehind(StorageFailed):
    """The directory lacks commits that are in the log."""

    title = "The directory is older than its copy"


class NumberReused(StorageFailed):
    """A commit does not follow the last one that was handed over."""

    title = "A commit has a wrong number"


# --- reading ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """A place between two objects of the log."""

    epoch: int
    number: int
    """The number of the next object."""
    before: bytes
    """SHA-256 of the object before it."""
    commit: int | None
    """The last commit before it. None if it is not known: there was none, or there is a gap."""
    clean: bool = False
    """True if the object before it is a seal after which nothing is missing that was acknowledged."""
    run: bytes = field(default=b"", compare=False)
    """The run that writes this epoch; empty if it is not known, since the directory's record does not name it."""


#: Every log begins here. The first object is the seal of an epoch 0 without segments: it names the first epoch.
ROOT = Place(0, 1, NOTHING_BEFORE, None)


def after(place: Place, data: bytes) -> tuple[Place, Segment | None]:
    """Return the place after an object that was found at ``place``, and the segment; None for a seal or a void segment.

    A segment is void if it was made after another object than the one before it. Clones of a running process write in
    one epoch: of their segments with the same number, one is in the log, and those after the other one do not count.

    Raises DamagedLog: the object is not what its name says, or commits are missing before it.
    """
    if not is_segment(data):
        seal = decode_seal(data)
        if seal.next <= place.epoch:
            raise DamagedLog(f"the seal of epoch {place.epoch} names epoch {seal.next}")
        commit = None if seal.gap else place.commit
        return Place(seal.next, 1, digest(data), commit, seal.clean, seal.run), None
    segment = decode_segment(data)
    if (segment.epoch, segment.number) != (place.epoch, place.number):
        raise DamagedLog(f"segment {place.number} of epoch {place.epoch} says that it is another one")
    if segment.before != place.before:
        if place.run and segment.run != place.run:
            raise DamagedLog(
                f"segment {place.number} of epoch {place.epoch} is of another run, and does not continue it"
            )
        return replace(place, number=place.number + 1, clean=False), None
    if place.commit is not None and segment.first != place.commit + 1:
        raise DamagedLog(f"commit {segment.first} follows commit {place.commit} in epoch {place.epoch}")
    return Place(place.epoch, place.number + 1, digest(data), segment.last, run=segment.run), segment


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive segments that are applied together."""

    segments: Sequence[Segment]
    place: Place
    """The place after them; after a seal or a void segment, if there are none."""


def batch_after(place: Place, objects: Sequence[bytes | None]) -> Batch:
    """Return the next batch of objects that were read ahead from ``place``, in any order; None: there was no such object.

    It ends before a missing object, whatever was stored after that, and before a seal. A seal is taken by itself: what is
    stored after it in its epoch is void.

    Raises DamagedLog: see ``after``.
    """
    segments: list[Segment] = []
    size = 0
    for data in objects:
        if data is None:
            break
        size += commits_bytes(data)
        if segments and (size > BATCH_BYTES or not is_segment(data)):
            break
        try:
            following, segment = after(place, data)
        except DamagedLog:
            if segments:
                break  # the segments before the damage count
            raise
        place = following
        if segment is None:
            break
        segments.append(segment)
    return Batch(segments, place)


def batches_after(place: Place, objects: Sequence[bytes | None]) -> Iterator[Batch]:
    """Yield the batches, as ``batch_after`` returns them, of all objects that count.

    Raises DamagedLog: as ``batch_after`` does.
    """
    at = place
    while at.epoch == place.epoch and at.number - place.number < len(objects):
        batch = batch_after(at, objects[at.number - place.number :])
        if batch.place == at:
            return
        yield batch
        at = batch.place


class ReadAhead:
    """The number of objects that are read at once: one at the log's end, and twice as many each time all existed."""

    def __init__(self) -> None:
        self._width = 1

    def names(self, place: Place) -> list[str]:
        """Return the names of the objects to read next, in the order of their numbers."""
        return [log_name(place.epoch, place.number + at) for at in range(self._width)]

    def took(self, objects: Sequence[bytes | None]) -> None:
        """Note what was read; fewer objects than names if not all could be read."""
        sizes = [len(data) for data in objects if data is not None]
        is_whole = len(sizes) == self._width
        self._width = max(1, min(2 * self._width, AHEAD, AHEAD_BYTES // max(sizes))) if is_whole else 1


def follow(place: Place, directory: OwnDirectory | None, wrote: set[bytes]) -> Steps[Place]:
    """Read the log from ``place``, apply what counts, and return the first place where there is nothing yet.

    Args:
      directory: the objects must be of its runs; None: of any.
      wrote: the runs that have written segments, to which those that are read are added. A run makes no seal after its
        first segment, so a later one is a clone's.
    Raises:
      Foreign: an object is of another run, or of a clone.
    """
    ahead = ReadAhead()
    while True:
        found: list[Fetched | None] = yield GetAll(ahead.names(place))
        objects = [None if each is None else each.data for each in found]
        ahead.took(objects)
        if objects[0] is None:
            return place
        first = place
        for batch in batches_after(first, objects):
            data = objects[place.number - first.number]
            if directory is not None and data is not None:
                _refuse_foreign(place, batch, data, directory, wrote)
            wrote.update(segment.run for segment in batch.segments)
            place = batch.place
            if batch.segments:
                yield Apply(batch.segments)


def _refuse_foreign(place: Place, batch: Batch, data: bytes, directory: OwnDirectory, wrote: set[bytes]) -> None:
    """Raise Foreign for the first object of a batch that is not of a directory's own runs.

    Args:
      place: where the batch begins.
      data: its first object.
    """
    commit = place.commit
    for segment in batch.segments:
        if segment.run not in directory.runs:
            raise _foreign(replace(place, commit=commit), directory)
        commit = segment.last
    if not (batch.segments or is_segment(data)):
        seal = decode_seal(data)
        if seal.run not in directory.runs or seal.run in wrote:
            raise _foreign(place, directory, seal.holder)


def _foreign(place: Place, directory: OwnDirectory, holder: str = "") -> Foreign:
    """Return the error for a log that another process has continued at ``place``, with what only the directory has."""
    detail = f"{holder or 'another process'} has continued the log in epoch {place.epoch}"
    if place.commit is not None and directory.last is not None:
        lost = max(0, directory.last - place.commit)
        detail += f"; {lost} {plural('commit', lost)} of this directory never counted"
    return Foreign(detail, hint=FOREIGN_HINT)


# --- the beginning of a reign -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Terms:
    """The fields for standbys that a serving primary writes into its lease."""

    period_ms: int
    """The period of the lease; 0: standbys take over by hand only."""
    allows_standby: bool
    is_free: bool
    """True if the lease has no period, so that the primary need do nothing to keep the terms."""
    is_kept: bool
    """True if the primary already acknowledges nothing without a valid lease; only then may the lease be ``guarded``."""
    gone: frozenset[Registration] = frozenset()
    """Registrations that have not changed for a time: their standbys no longer exist."""
    clock_ms: int | None = None
    """The primary's wall clock, read after the period of the lease has begun."""

    def applied(self, lease: Lease) -> Lease:
        """Return a lease with these terms."""
        standbys = tuple(each for each in lease.standbys if self.allows_standby and each not in self.gone)
        return replace(
            lease,
            period_ms=self.period_ms,
            allows_standby=self.allows_standby,
            guarded=self.allows_standby and (self.is_free or (self.is_kept and bool(standbys))),
            standbys=standbys,
            clock_ms=self.clock_ms,
        )


@dataclass(frozen=True, slots=True)
class Follower:
    """The caller of a take-over is a standby: it must not skip a gap."""

    seen: Lease | None = None
    """The lease that has expired. The attempt fails if that lease is renewed, or another process takes over first. None:
    the attempt is by hand, and ends the last epoch, whichever it is."""
    registration: str = ""
    """The id of its registration, which ends with the take-over."""


def choose_epoch(
    run: bytes,
    known: int,
    holder: str = "",
    follower: Follower | None = None,
    terms: Terms | None = None,
    last: int = 0,
    is_in_log: bool = False,
) -> Steps[int]:
    """Raise the epoch in the lease, and return it.

    Args:
      known: the last epoch that the caller's directory has seen, 0 if none.
      last: the last epoch that this run has chosen, 0 if none.
      holder: the caller's machine, for people.
      terms: of a caller that serves from now on.
      is_in_log: the log shows that the epoch ``known`` has begun. Then a lease of an earlier epoch was set back by a write
        that the object store should have refused, and is replaced: it decides nothing.
    Raises:
      BucketWentBack: the lease is missing.
      LeaseWentBack: it is of an earlier epoch than ``known``, and the log does not show that epoch.
      TakeOverLost: the lease has been renewed since the follower has seen it, or allows no standby.
    """
    seen = None if follower is None else follower.seen
    while True:
        found = yield Get(LEASE)
        before = Lease(0, run) if found is None else decode_lease(found.data)
        held = before.epoch
        if held < known and found is None:
            raise BucketWentBack(f"the lease is missing, but epoch {known} has begun already", hint=LEAVE_HINT)
        if held < known and not is_in_log:
            raise LeaseWentBack(
                f"the lease is of epoch {held}, but epoch {known} has begun already: the object store was set back, or "
                "lost a replacement",
                hint=LEAVE_HINT,
            )
        if found is not None and before.run == run and held > last:
            return held  # an earlier write of this attempt took effect after its check
        if seen is not None and before.sign != seen.sign and before.run != run:
            raise TakeOverLost("the lease has changed")
        if follower is not None and not before.allows_standby:
            raise TakeOverLost("the primary allows no standby")
        # The lease keeps its period and terms, because this process may end before it serves.
        epoch = max(held, known) + 1
        mine = replace(before, epoch=epoch, run=run, holder=holder, urls=(), renewed=0, released=False)
        if follower is not None:
            mine = mine.without(follower.registration)
        if terms is not None:
            # These terms bind standbys from now on, even before the first renewal.
            mine = terms.applied(mine)
        lease = encode_lease(mine)
        request = Create(LEASE, lease) if found is None else Exchange(LEASE, lease, found.etag)
        verdict = yield request
        if verdict is Verdict.DONE:
            return epoch
        found = yield Get(LEASE)
        if found is not None and _is_same(decode_lease(found.data), mine):
            return epoch


def _is_same(found: Lease, written: Lease) -> bool:
    """True if the lease in the object store is the one that was written. Standbys may have registered since."""
    return replace(found, standbys=written.standbys) == written


@dataclass(frozen=True, slots=True)
class OwnDirectory:
    """The state of a directory's log."""

    last: int | None
    """Its last commit; None if that does not matter, because the log ends for good."""
    runs: frozenset[bytes]
    """The runs that were started on it: only their objects may follow ``place``."""
    since: int
    """It can still send all commits after this one."""
    applies: bool = False
    """True if the caller applies the commits that the directory lacks."""
    writer: bytes = b""
    """The run that writes the epoch of the place from which the log is read; empty if that is not known."""


def take_over(
    run: bytes,
    place: Place,
    *,
    known: int = 0,
    leased: bool = True,
    directory: OwnDirectory | None = None,
    holder: str = "",
    clean: bool = False,
    follower: Follower | None = None,
    terms: Terms | None = None,
) -> Steps[Place]:
    """End the last epoch and begin one. Returns the place of its first segment.

    Every start of a primary is a take-over, also on the directory of its last run: uploads of that run may still be
    under way, and must not be mistaken for those of this one.

    An epoch is held only with the object store's answer that the seal which names it was created. A seal that is found
    to have the right contents proves nothing: a clone of this process makes the same one. Then that epoch is ended too.

    Args:
      place: read the log from there; everything before it has been applied.
      known: as for ``choose_epoch``.
      leased: False if objects cannot be replaced conditionally: the epoch is the one after the last in the log.
      directory: of a caller that is a primary. If the log lacks commits that the directory can no longer send, the
        seal marks a gap.
      holder: the caller's machine, for people.
      clean: the caller is the primary, and everything that it acknowledged is in the log.
      follower: the caller is a standby.
      terms: as for ``choose_epoch``.
    Raises:
      ReignOver: another process has chosen a later epoch, and has begun it.
      Foreign: the log was continued by a process that was not started on the directory.
      DirectoryBehind: the directory lacks commits of the log.
      TakeOverLost: see ``Follower``; or another process, perhaps the primary, has taken the lease since.
    """
    wrote: set[bytes] = set()
    first = place
    if directory is not None:
        wrote.add(directory.writer)
        # A deposed primary ends here, and leaves the lease to its successor.
        place = yield from follow(place, directory, wrote)
    epoch = (yield from _choose_next(run, known, first, place, holder, follower, terms)) if leased else 0
    begun = place.epoch
    attempts: set[bytes] = set()
    while True:
        place = yield from follow(place, directory, wrote)
        if place.number == 1 and place.before in attempts:
            begun = place.epoch
            if follower is not None and follower.seen is not None:
                follower = replace(follower, seen=Lease(epoch, run))
            if leased:
                epoch = yield from _choose_next(run, known, first, place, holder, follower, terms, last=epoch)
        if leased and place.epoch >= epoch:
            raise ReignOver(f"epoch {place.epoch} has begun")
        if follower is not None and place.commit is None:
            raise TakeOverLost(f"commits are missing from the log before epoch {place.epoch}")
        if follower is not None and follower.seen is not None and place.epoch != begun:
            raise TakeOverLost(f"epoch {place.epoch} has begun")
        if follower is not None and leased and not (yield from _has_lease(run)):
            # Checked only after the log's end was read. A primary that regains its lease stores a segment before it
            # relies on the lease, so the number of that segment, which was free at that time, is taken.
            raise TakeOverLost("the primary or another process has renewed or taken the lease")
        gap = False
        if directory is not None and place.commit is not None:
            last = directory.last
            if last is not None and place.commit > last and not directory.applies:
                raise DirectoryBehind(f"the log has commit {place.commit}, but this directory ends at {last}")
            gap = place.commit < directory.since
        # After a clean seal, an epoch without a segment belongs to the process that made the seal, which has ended.
        is_clean = clean or (place.clean and place.number == 1)
        following = epoch if leased else place.epoch + 1
        seal = encode_seal(EpochSeal(following, run, clean=is_clean and not gap, gap=gap, holder=holder))
        attempts.add(digest(seal))
        verdict = yield Create(log_name(place.epoch, place.number), seal)
        if verdict is Verdict.DONE:
            return after(place, seal)[0]
        # Another object has that name, a segment or a seal: read and follow it. If none has, the next attempt may
        # succeed.


def _choose_next(
    run: bytes,
    known: int,
    first: Place,
    place: Place,
    holder: str,
    follower: Follower | None,
    terms: Terms | None,
    last: int = 0,
) -> Steps[int]:
    """Choose an epoch after that of ``place``, to which the log was read from ``first``. Raises as ``choose_epoch``."""
    known = max(known, place.epoch)
    try:
        return (yield from choose_epoch(run, known, holder, follower, terms, last))
    except LeaseWentBack:
        # The log must have what it had: an object that continues it from ``first``, or the one before that.
        if known > place.epoch or (place.before == first.before and not (yield from _has_object_before(place))):
            raise
    return (yield from choose_epoch(run, known, holder, follower, terms, last, is_in_log=True))


def _has_object_before(place: Place) -> Steps[bool]:
    # The name of a seal before the first segment is not known here.
    found = (yield Get(log_name(place.epoch, place.number - 1))) if place.number > 1 else None
    return found is not None and digest(found.data) == place.before


def _has_lease(run: bytes) -> Steps[bool]:
    found = yield Get(LEASE)
    return found is not None and decode_lease(found.data).run == run


def claim_prefix(name: str, data: bytes, place: Place) -> Steps[None]:
    """Create the object that names the log's store, or check it; check that existing objects are not overwritten.

    Raises:
      BucketWentBack: the directory has a log, and the object is missing.
      Foreign: the log is another directory's.
      Unconditional: the object store overwrites existing objects although it must not.
    """
    while True:
        found = yield Get(name)
        if found is None:
            if place != ROOT:
                raise BucketWentBack(f"{name} is missing from the object store", hint=LEAVE_HINT)
            yield Create(name, data)
            continue
        if found.data != data:
            raise Foreign(
                "the prefix in replication.to holds the copy of another directory",
                hint="use a prefix that no other directory uses",
            )
        verdict = yield Create(name, data)
        if verdict is Verdict.DONE:
            raise Unconditional(
                "the object store ignores If-None-Match: it overwrote an existing object",
                hint="use an object store with conditional writes (If-None-Match and If-Match)",
            )
        if verdict is Verdict.REFUSED:
            return


def hold(run: bytes, renewed: int) -> Steps[bool]:
    """Renew the lease of a run that does not serve yet, and change nothing else in it. False: the run has no lease."""
    while True:
        found = yield Get(LEASE)
        if found is None or (held := decode_lease(found.data)).run != run:
            return False
        lease = encode_lease(replace(held, renewed=renewed))
        # The exchange fails if a standby has registered in between: try again.
        if held.renewed == renewed or (yield Exchange(LEASE, lease, found.etag)) is Verdict.DONE:
            return True


def renew(
    lease: Lease,
    confirmed: int,
    terms: Terms,
    over: Lease | None = None,
    *,
    is_silent: bool = True,
    is_in_log: bool = False,
) -> Steps[Lease]:
    """Replace the lease by the next one of its run.

    If that replaces the lease of another run, this run may rely on its lease only once it has stored a segment that it
    began afterwards: the other run may still create a seal at a number that it found free before.

    Returns the lease with the standbys that are registered, and whether it is ``guarded``; or the lease of another run
    that was found instead: it tries to take over. The log shows whether it has succeeded.

    Args:
      confirmed: ``renewed`` of the last lease of this run that was written for certain.
      over: replace also this lease of another run, which has tried and did not seal.
      is_silent: only if that run has not renewed it since.
      is_in_log: the log has everything that this run has stored, and no seal: replace an older lease too.
    Raises:
      BucketWentBack: the lease is missing.
      LeaseWentBack: it is older than one that this run wrote.
    """
    sent: Lease | None = None
    while True:
        found = yield Get(LEASE)
        held = None if found is None else decode_lease(found.data)
        if held is not None and sent is not None and _is_same(held, sent):
            return held  # the answer was lost
        is_own = held is not None and held.run == lease.run
        if held is None:
            raise BucketWentBack("the lease is missing", hint=LEAVE_HINT)
        is_older = held.epoch < lease.epoch or (is_own and held.renewed < confirmed)
        if is_older and not is_in_log:
            raise LeaseWentBack("the lease is older than the one that this process wrote", hint=LEAVE_HINT)
        if not (is_own or is_older or _may_replace(held, over, is_silent=is_silent)):
            return held
        assert found is not None  # ``held`` was decoded from it
        sent = terms.applied(replace(lease, standbys=held.standbys))
        if (yield Exchange(LEASE, encode_lease(sent), found.etag)) is Verdict.DONE:
            return sent


def _may_replace(held: Lease, over: Lease | None, *, is_silent: bool) -> bool:
    return (
        over is not None
        and (held.epoch, held.run) == (over.epoch, over.run)
        and (held.renewed == over.renewed or not is_silent)
    )


def check_place(place: Place) -> Steps[None]:
    """Check that the object before ``place`` is still in the log. Raises BucketWentBack."""
    if place.number > 1:
        found = yield Get(log_name(place.epoch, place.number - 1))
        if found is None or digest(found.data) != place.before:
            raise BucketWentBack(
                f"segment {place.number - 1} of epoch {place.epoch} is missing or has changed",
                hint=LEAVE_HINT,
            )


# --- writing ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Upload:
    """An object of the log to create, and its number."""

    number: int
    name: str
    data: bytes


class Reign:
    """The log of one epoch, while it is written. Several uploads may be under way."""

    def __init__(self, place: Place, run: bytes, mode: int, *, has_base: bool) -> None:
        """Begin.

        Args:
          place: what ``take_over`` returned.
          has_base: True if a base, and the log from there to ``place`` without a gap, are stored.
        """
        self._place = place
        self._run = run
        #: Of the segments to come.
        self.mode = mode
        self._has_base = has_base and place.commit is not None
        self._last = place.commit
        #: The place after each segment that is not known to be in the log.
        self._begun: dict[int, Place] = {}
        self._stored: set[int] = set()
        #: Everything before this place is in the log.
        self._logged = place

    @property
    def epoch(self) -> int:
        """The epoch of this reign."""
        return self._place.epoch

    @property
    def place(self) -> Place:
        """Where the next segment will be."""
        return self._place

    @property
    def last(self) -> int | None:
        """The last commit that was handed over. None before ``open``."""
        return self._last

    @property
    def says_mode(self) -> bool:
        """True once the log has the mode of this epoch. Before that, no answer may rely on ``ASYNC``."""
        return self._logged.number > 1

    @property
    def logged_place(self) -> Place:
        """The place after the last object that is in the log with all before it."""
        return self._logged

    @property
    def logged(self) -> int | None:
        """The last commit that is in the log, with all before it."""
        return self._logged.commit

    @property
    def counted(self) -> int | None:
        """The last commit that counts: it survives the loss of the directory. None while there is no base."""
        return self._logged.commit if self._has_base else None

    def open(self, commit: int, time_ms: int) -> Upload:
        """Begin a log whose first commit follows ``commit``, where the log so far has no commits, or a gap."""
        self._last = commit
        at = self._place
        opening = Segment(at.epoch, at.number, self._run, self.mode, commit + 1, at.before, (), time_ms, time_ms)
        return self.drafted(opening, encode_segment(opening))

    def announce(self, time_ms: int) -> Upload:
        """Make a segment without commits: the log says the mode before the first commit of this epoch."""
        assert self._last is not None  # the epoch is open
        return self.open(self._last, time_ms)

    def cut(self, first: int, commits: Sequence[Commit]) -> Upload:
        """Make the next segment. Raises NumberReused."""
        segment = self.draft(first, commits)
        return self.drafted(segment, encode_segment(segment))

    def draft(self, first: int, commits: Sequence[Commit]) -> Segment:
        """Begin the next segment; encode it, in any thread, and give it to ``drafted``. Raises NumberReused."""
        if self._last is None or first != self._last + 1:
            raise NumberReused(f"commit {first} was handed over after commit {self._last}")
        at = self._place
        return segment_of(
            epoch=at.epoch,
            number=at.number,
            run=self._run,
            mode=self.mode,
            first=first,
            before=at.before,
            commits=commits,
        )

    def drafted(self, segment: Segment, data: bytes) -> Upload:
        """Take an encoded segment that ``draft`` began."""
        self._last = segment.last
        self._place = Place(segment.epoch, segment.number + 1, digest(data), segment.last)
        self._begun[segment.number] = self._place
        return Upload(segment.number, log_name(segment.epoch, segment.number), data)

    def stored(self, number: int) -> None:
        """Note that an object is stored. It counts once all before it in its epoch are stored too."""
        self._stored.add(number)
        while self._logged.number in self._stored:
            self._stored.remove(self._logged.number)
            self._logged = self._begun.pop(self._logged.number)

    def based(self) -> None:
        """Note that a base is stored, of a commit in this log."""
        self._has_base = True


def store(upload: Upload) -> Steps[None]:
    """Create an object of the log. Raises ReignOver: another object has its name."""
    while True:
        verdict = yield Create(upload.name, upload.data)
        if verdict is Verdict.DONE:
            return
        found = yield Get(upload.name)
        if found is None:
            continue  # refused because of another write under way, or lost
        if found.data == upload.data:
            return  # an earlier attempt stored it, and its answer was lost
        raise ReignOver(f"another process has written {upload.name}")
