"""One writer at a time: a kernel's lock on local disks, leases of numbered files where there are no locks.

One writer at a time: a lock that the kernel gives back whatever its holder dies of.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol

from plainsong.cli.options import now_ms
from plainsong.cli.output import escaped
from plainsong.cli.verb import CommandFailed, Exit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

#: Of what a lock's file says about its holder.
MAX_OWNER_CHARS = 200


class Busy(CommandFailed):
    """Another process is at it. Nothing was changed."""


class Hold(Protocol):
    """Being the only writer of something."""

    def check(self) -> None:
        """Raises Busy: it is so no longer, so nothing may be finished."""


class KernelHold:
    """Held until it is given back, by the kernel's word."""

    def check(self) -> None:
        """As ``Hold``; nobody can take this away."""


@contextmanager
def locked(path: Path, what: str) -> Iterator[Hold]:
    """Hold a lock on a local file, which is made with its folders if need be and stays.

    Args:
      what: is written by its holder, for the error: ``the archive of default:orders``.
    Raises:
      Busy: another process holds it, or another thread.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            raise busy(what, file.read(MAX_OWNER_CHARS)) from error
        file.truncate(0)
        file.write(owner())
        file.flush()
        yield KernelHold()


def owner() -> str:
    """This process, for people."""
    since = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return f"process {os.getpid()} on {socket.gethostname()}, since {since}"


def busy(what: str, by: str) -> Busy:
    """The error of one who came second."""
    who = escaped(by.strip()[:MAX_OWNER_CHARS]) or "another process"
    return Busy(f"{what} is being written already, by {who}", hint="wait until it ends", code=Exit.STORE)


# --- leases ----------------------------------------------------------------------------------------
#
# One writer at a time where there are no locks: leases, numbered files of which the highest number holds.
#
# A lease is taken by making the file of the next number, which one of several can do. Its holder writes it again
# every minute. Given back it says so; one that was not written for ten minutes is stale, its holder taken for dead.
# Both stay until the next one is there, so that a number is never taken twice: who makes a file looks once more,
# and gives way to a higher one. A holder that was only asleep finds the higher one before it finishes anything.
#
# This needs a file system that makes a file for one of several at once (HDFS does). Object stores may not; there,
# what is finished is safe all the same, since each try writes into a folder of its own.


RENEW_S = 60.0
STALE_S = 600.0
_SUFFIX = ".lease"


class LeaseFiles(Protocol):
    """What leases need of a file system."""

    def create(self, path: str, data: bytes) -> bool:
        """Make a file; False: there is one already."""

    def read(self, path: str) -> bytes | None:
        """What is in a file; None when there is none."""

    def write(self, path: str, data: bytes) -> None:
        """Replace a file, whole or not at all."""

    def names(self, folder: str) -> list[str]:
        """What stands right in a folder, sorted."""

    def discard(self, path: str) -> None:
        """Take a file away; nothing when there is none."""

    def modified_ms(self, folder: str) -> int | None:
        """When it, or something right in it, was changed last, in milliseconds since 1970; None when it is gone."""


class Lease:
    """One lease, from when it was taken.

    Args:
      clock: seconds that never go back.
    """

    def __init__(
        self, files: LeaseFiles, folder: str, what: str, number: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._files = files
        self._folder = folder
        self._what = what
        self._number = number
        self._clock = clock
        self._owner = owner()
        self._renewed_s = clock()

    def check(self) -> None:
        """As ``Hold``: it is still the highest, and was written so lately that nobody may take it for stale."""
        if self._clock() - self._renewed_s > STALE_S / 2:
            raise self._lost("it was not renewed for too long")
        self._give_way()

    def renew(self) -> None:
        """Write it again. Raises Busy: another one holds."""
        asked_s = self._clock()
        self._give_way()
        self._files.write(self._path, told(self._owner))
        self._renewed_s = asked_s

    def give_back(self) -> None:
        """Say that nobody holds it any more."""
        self._files.write(self._path, told(""))

    def settle(self) -> None:
        """After it was made. Raises Busy: a higher one was made meanwhile."""
        if max(numbers(self._files, self._folder)) > self._number:
            self._files.discard(self._path)
            self._give_way()
        for number in numbers(self._files, self._folder):
            if number < self._number:
                self._files.discard(_path(self._folder, number))

    def _give_way(self) -> None:
        highest = max(numbers(self._files, self._folder), default=0)
        if highest != self._number:
            raise self._lost(_holder(self._files, self._folder, highest)[0])

    def _lost(self, why: str) -> Busy:
        return busy(self._what, why)

    @property
    def _path(self) -> str:
        return _path(self._folder, self._number)


def take(files: LeaseFiles, folder: str, what: str, *, say: Callable[[str], None] = lambda text: None) -> Lease:
    """Take the lease of a folder.

    Args:
      say: called with a sentence when a stale one was taken over.
    Raises:
      Busy: somebody holds it.
    """
    number = max(numbers(files, folder), default=0)
    stale = ""
    if number:
        holder, renewed_ms = _holder(files, folder, number)
        age_s = (now_ms() - renewed_ms) / 1000
        if holder and age_s < STALE_S:
            raise busy(what, holder)
        stale = f"{what}: taken over from {holder}, of which nothing was heard for {age_s:.0f} s" if holder else ""
    if not files.create(_path(folder, number + 1), told(owner())):
        raise busy(what, "")
    lease = Lease(files, folder, what, number + 1)
    lease.settle()
    if stale:
        say(stale)
    return lease


@contextmanager
def leased(
    files: LeaseFiles, folder: str, what: str, *, say: Callable[[str], None] = lambda text: None
) -> Iterator[Hold]:
    """Hold the lease of a folder, and renew it in a thread. Raises Busy: somebody holds it."""
    lease = take(files, folder, what, say=say)
    ended = threading.Event()

    def renewing() -> None:
        while not ended.wait(RENEW_S):
            try:
                lease.renew()
            except Exception:  # noqa: BLE001, S112 - whatever the file system has; `check` sees how long ago it went well
                continue

    thread = threading.Thread(target=renewing, name="lease", daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        ended.set()
        thread.join()
        lease.give_back()


def numbers(files: LeaseFiles, folder: str) -> list[int]:
    """Of the leases that stand in a folder."""
    found = (name.removesuffix(_SUFFIX) for name in files.names(folder) if name.endswith(_SUFFIX))
    return sorted(int(number) for number in found if number.isdigit())


def told(holder: str) -> bytes:
    """What is in a lease's file; nobody's holder is empty."""
    return json.dumps({"owner": holder, "renewedMs": now_ms()}).encode()


def _holder(files: LeaseFiles, folder: str, number: int) -> tuple[str, int]:
    """Who holds it, and when it was written."""
    try:
        said = json.loads(files.read(_path(folder, number)) or b"")
        return str(said["owner"]), int(said["renewedMs"])
    except (ValueError, KeyError, TypeError):  # made, and not written yet, or never
        made_ms = files.modified_ms(folder)
        return "another process", now_ms() if made_ms is None else made_ms


def _path(folder: str, number: int) -> str:
    return f"{folder}/{number:012d}{_SUFFIX}"
