"""One writer at a time: a kernel's lock on local disks, which ends with its holder; elsewhere a lease."""

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
from plainsong.cli.options import now_ms
from plainsong.cli.output import escaped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

#: Bytes read of a lock's file, which names its holder.
MAX_OWNER_CHARS = 200


class Busy(CommandFailed):
    """Another process holds the lock. Nothing was changed."""


class Hold(Protocol):
    """A lock or a lease that this process holds."""

    def check(self) -> None:
        """Raises Busy: this process does not hold it any more, and must not finish anything."""


class KernelHold:
    """A lock of the kernel, held until it is released."""

    def check(self) -> None:
        """As ``Hold``; a lock cannot be lost."""


@contextmanager
def locked(path: Path, what: str) -> Iterator[Hold]:
    """Hold a lock on a local file, which is created with its folders and stays.

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
    """The name of this process in errors."""
    since = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return f"process {os.getpid()} on {socket.gethostname()}, since {since}"


def busy(what: str, by: str) -> Busy:
    """The error about a lock that another process holds."""
    who = escaped(by.strip()[:MAX_OWNER_CHARS]) or "another process"
    return Busy(f"{what} is being written already, by {who}", hint="wait until it ends", code=Exit.STORE)


# --- leases ----------------------------------------------------------------------------------------
#
# Leases are numbered files, of which the highest number holds.
#
# A process takes a lease by creating the file of the next number, which only one of several can do, and writes it again
# every minute. It writes that it gives the lease back; a file that was not written for ten minutes is stale, and its
# holder is taken for dead. Both files stay until the next one is there, so no number is used twice: a process that has
# created a file looks once more, and gives way to a higher number. A holder that only slept finds the higher number
# before it finishes anything.
#
# This needs a file system that creates a file for one of several processes at once (HDFS does). Object stores may not;
# there, too, nothing that was finished is lost, since each try writes into a folder of its own.

RENEW_S = 60.0
STALE_S = 600.0
_SUFFIX = ".lease"


class LeaseFiles(Protocol):
    """The file operations that leases need."""

    def create(self, path: str, data: bytes) -> bool:
        """Create a file; False: it exists."""

    def read(self, path: str) -> bytes | None:
        """The content of a file; None: there is no such file."""

    def write(self, path: str, data: bytes) -> None:
        """Replace a file atomically."""

    def names(self, folder: str) -> list[str]:
        """The names directly in a folder, sorted."""

    def discard(self, path: str) -> None:
        """Remove a file, if it exists."""

    def modified_ms(self, folder: str) -> int | None:
        """When a folder, or a name directly in it, was last changed, in milliseconds since 1970; None: it is gone."""


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
        """As ``Hold``: the lease has the highest number, and was renewed too recently to count as stale."""
        if self._clock() - self._renewed_s > STALE_S / 2:
            raise self._lost("it was not renewed for too long")
        self._give_way()

    def renew(self) -> None:
        """Renew the lease. Raises Busy: another process holds a higher one."""
        asked_s = self._clock()
        self._give_way()
        self._files.write(self._path, encode_lease(self._owner))
        self._renewed_s = asked_s

    def give_back(self) -> None:
        """Give the lease back."""
        self._files.write(self._path, encode_lease(""))

    def settle(self) -> None:
        """Check a lease that was just created. Raises Busy: a higher one was created meanwhile."""
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
        stale = f"{what}: taken over from {holder}, of which nothing was heard for {age_s:.0f} s" if holder else ""
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
    """The numbers of the leases in a folder."""
    found = (name.removesuffix(_SUFFIX) for name in files.names(folder) if name.endswith(_SUFFIX))
    return sorted(int(number) for number in found if number.isdigit())


def encode_lease(holder: str) -> bytes:
    """The content of a lease's file; an empty holder gives it back."""
    return json.dumps({"owner": holder, "renewedMs": now_ms()}).encode()


def _holder(files: LeaseFiles, folder: str, number: int) -> tuple[str, int]:
    """The holder of a lease, and when it was written."""
    try:
        written = json.loads(files.read(_path(folder, number)) or b"")
        return str(written["owner"]), int(written["renewedMs"])
    except (ValueError, KeyError, TypeError):  # created, and not yet written, or never
        made_ms = files.modified_ms(folder)
        return "another process", now_ms() if made_ms is None else made_ms


def _path(folder: str, number: int) -> str:
    return f"{folder}/{number:012d}{_SUFFIX}"
