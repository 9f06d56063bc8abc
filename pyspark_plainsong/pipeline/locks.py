"""Exclusive locks: a kernel lock on local disks, which ends with its holder; elsewhere a lease."""

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

from plainsong.cli.command import CommandFailed, Exit
from plainsong.cli.output import escaped
from plainsong.positions import now_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

#: Characters read from a lock's file, which names its holder.
MAX_OWNER_CHARS = 200


class Busy(CommandFailed):
    """Another process holds the lock. Nothing was changed."""


class Hold(Protocol):
    """A lock or a lease that this process holds."""

    def check(self) -> None:
        """Check that this process still holds it. Raises Busy: it does not, and must not finish anything."""


class KernelHold:
    """A kernel lock, held until it is released."""

    def check(self) -> None:
        """See ``Hold``. A lock cannot be lost."""


@contextmanager
def locked(path: Path, what: str) -> Iterator[Hold]:
    """Hold a lock on a local file, which is created with its folders and never removed.

    Args:
      what: what the holder writes, for the error: ``the archive of default:orders``.
    Raises:
      Busy: another process or thread holds it.
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
    """Return the name of this process for errors."""
    since = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return f"process {os.getpid()} on {socket.gethostname()}, since {since}"


def busy(what: str, by: str) -> Busy:
    """Make the error about a lock that another process holds."""
    who = escaped(by.strip()[:MAX_OWNER_CHARS]) or "another process"
    return Busy(f"{what} is already being written, by {who}", hint="wait until it ends", code=Exit.STORE)


# --- leases ----------------------------------------------------------------------------------------
#
# Leases are numbered files; the highest number is valid.
#
# A process takes a lease by creating the file with the next number, which succeeds for one process only, and renews it
# by rewriting it every minute. To release the lease, it writes an empty owner. A file that was not written for ten
# minutes is stale, and its holder is presumed dead. A file is only removed after the next one was created, so no number
# is used twice: after creating a file, a process lists the folder again, and yields to a higher number. A holder that
# was merely suspended finds the higher number before it finishes anything.
#
# This needs exclusive creation of files, which HDFS has. Object stores may lack it; even there no finished work is lost,
# since each try writes into a folder of its own.

RENEW_S = 60.0
STALE_S = 600.0
_SUFFIX = ".lease"


class LeaseFiles(Protocol):
    """The file operations that leases need."""

    def create(self, path: str, data: bytes) -> bool:
        """Create a file; False if it exists."""

    def read(self, path: str) -> bytes | None:
        """Return the content of a file; None if it does not exist."""

    def write(self, path: str, data: bytes) -> None:
        """Replace a file atomically."""

    def names(self, folder: str) -> list[str]:
        """Return the names directly in a folder, sorted."""

    def discard(self, path: str) -> None:
        """Remove a file, if it exists."""

    def modified_ms(self, folder: str) -> int | None:
        """Return the latest change of a folder and its direct entries, in milliseconds since 1970; None if it is gone."""


class Lease:
    """A lease that this process has taken.

    Args:
      clock: a monotonic clock in seconds.
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
        """See ``Hold``. The lease must have the highest number, and have been renewed too recently to look stale."""
        if self._clock() - self._renewed_s > STALE_S / 2:
            raise self._lost("it was not renewed in time")
        self._give_way()

    def renew(self) -> None:
        """Renew the lease. Raises Busy: another process holds a higher one."""
        asked_s = self._clock()
        self._give_way()
        self._files.write(self._path, encode_lease(self._owner))
        self._renewed_s = asked_s

    def give_back(self) -> None:
        """Release the lease."""
        self._files.write(self._path, encode_lease(""))

    def settle(self) -> None:
        """Confirm a lease that was just created, and remove older ones. Raises Busy: a higher one exists."""
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
      say: called with a sentence if a stale lease was taken over.
    Raises:
      Busy: another process holds it.
    """
    number = max(numbers(files, folder), default=0)
    stale = ""
    if number:
        holder, renewed_ms = _holder(files, folder, number)
        age_s = (now_ms() - renewed_ms) / 1000
        if holder and age_s < STALE_S:
            raise busy(what, holder)
        stale = f"{what}: taken over from {holder}, which showed no sign of life for {age_s:.0f} s" if holder else ""
    if not files.create(_path(folder, number + 1), encode_lease(owner())):
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
    """Hold the lease of a folder, and renew it in a thread. Raises Busy: another process holds it."""
    lease = take(files, folder, what, say=say)
    ended = threading.Event()

    def renewing() -> None:
        while not ended.wait(RENEW_S):
            try:
                lease.renew()
            except Exception:  # noqa: BLE001, S112 - file systems raise anything; `check` fails without recent renewals
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
    """Return the numbers of the leases in a folder, sorted."""
    found = (name.removesuffix(_SUFFIX) for name in files.names(folder) if name.endswith(_SUFFIX))
    return sorted(int(number) for number in found if number.isdigit())


def encode_lease(holder: str) -> bytes:
    """Encode a lease's file; an empty holder means released."""
    return json.dumps({"owner": holder, "renewedMs": now_ms()}).encode()


def _holder(files: LeaseFiles, folder: str, number: int) -> tuple[str, int]:
    """Return the holder of a lease, and the time of its last renewal."""
    try:
        written = json.loads(files.read(_path(folder, number)) or b"")
        return str(written["owner"]), int(written["renewedMs"])
    except (ValueError, KeyError, TypeError):  # the file was created, and its content is not written yet, or was lost
        made_ms = files.modified_ms(folder)
        return "another process", now_ms() if made_ms is None else made_ms


def _path(folder: str, number: int) -> str:
    return f"{folder}/{number:012d}{_SUFFIX}"
