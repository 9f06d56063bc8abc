"""The files of backups: in a folder of this machine, or below a prefix of an object store.

Both write a file whole or not at all, durably, and let one process at a time make or remove backups.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

from storage.base import StoreError, StoreInUse, StoreUnusable
from storage.directory import replace_file, sync_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from storage.replication.object_store import BlockingObjects

LOCK_NAME = "lock"
#: The folder of locks in an object store. A holder renews its lock this often.
LOCKS = "locks"
RENEW_S = 5.0
#: A lock that was not renewed for this long belongs to a process that has ended.
LOCK_S = 30.0
#: How often a waiting process looks at the lock.
LOOK_S = 1.0
#: Attempts to create an object of a lock.
ATTEMPTS = 5


class BackupFiles(Protocol):
    """Named files. Methods block, and raise OSError or StoreError if a file cannot be read or written."""

    shown: str
    """The place, for messages."""

    def make(self, name: str, data: bytes) -> None:
        """Create the place, for its owner only, if necessary, with its first file. Raises StoreUnusable: it has others."""
        ...

    def get(self, name: str) -> bytes:
        """Read a file. Raises FileNotFoundError."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Create or replace a file, durably. After a crash it is complete or absent."""
        ...

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the sizes of the files in a folder, by name in order."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Remove files, durably."""
        ...

    def locked(self) -> AbstractContextManager[Callable[[], None]]:
        """Keep other processes from making or removing backups here.

        Yields a function that raises StoreInUse if another process has taken the lock.
        Raises StoreInUse.
        """
        ...


class LocalFiles:
    """The files of a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shown = str(path)

    def make(self, name: str, data: bytes) -> None:
        """See ``BackupFiles``."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(each.name != LOCK_NAME for each in self.path.iterdir()):
            raise _not_empty(self.shown)
        self.path.chmod(0o700)
        self.put(name, data)

    def get(self, name: str) -> bytes:
        """See ``BackupFiles``."""
        return (self.path / name).read_bytes()

    def put(self, name: str, data: bytes) -> None:
        """See ``BackupFiles``."""
        place = self.path / name
        self._make_folder(place.parent)
        replace_file(place, data)

    def _make_folder(self, folder: Path) -> None:
        """Make a folder that survives a power cut."""
        if folder == self.path or folder.exists():
            return
        self._make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_directory(folder.parent)

    def sizes(self, prefix: str) -> dict[str, int]:
        """See ``BackupFiles``. Includes the temporary files of processes that were killed."""
        return dict(sorted(self._sizes(prefix)))

    def _sizes(self, folder: str) -> Iterator[tuple[str, int]]:
        try:
            entries = list(os.scandir(self.path / folder))
        except FileNotFoundError:
            return
        for each in entries:
            name = f"{folder}/{each.name}"
            if each.is_dir(follow_symlinks=False):
                yield from self._sizes(name)
            else:
                yield name, each.stat(follow_symlinks=False).st_size

    def remove(self, names: Sequence[str]) -> None:
        """See ``BackupFiles``."""
        for name in names:
            (self.path / name).unlink()
        for folder in {(self.path / name).parent for name in names}:
            sync_directory(folder)

    @contextmanager
    def locked(self) -> Iterator[Callable[[], None]]:
        """See ``BackupFiles``. The lock of a process ends with the process."""
        lock = os.open(self.path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise _in_use(self.shown) from error
            yield lambda: None
        finally:
            os.close(lock)


class StoredFiles:
    """The files below a prefix of an object store."""

    def __init__(self, objects: BlockingObjects, url: str, on_wait: Callable[[str], object] = lambda _: None) -> None:
        """Args:
        on_wait: called with a text before a wait for the lock of another process.
        """
        self._objects = objects
        self.shown = url
        self._on_wait = on_wait

    def make(self, name: str, data: bytes) -> None:
        """See ``BackupFiles``."""
        if any(not found.startswith(f"{LOCKS}/") for found, _ in self._objects.sizes("")):
            raise _not_empty(self.shown)
        # Do not overwrite the first file of another process, which may begin a second copy here.
        self._objects.create(name, data)

    def get(self, name: str) -> bytes:
        """See ``BackupFiles``."""
        found = self._objects.get(name)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return found.data

    def put(self, name: str, data: bytes) -> None:
        """See ``BackupFiles``."""
        self._objects.put(name, data)

    def sizes(self, prefix: str) -> dict[str, int]:
        """See ``BackupFiles``."""
        return dict(self._objects.sizes(prefix))

    def remove(self, names: Sequence[str]) -> None:
        """See ``BackupFiles``."""
        self._objects.remove(names)

    @contextmanager
    def locked(self) -> Iterator[Callable[[], None]]:
        """See ``BackupFiles``. A lock that its holder does not renew can be taken after ``LOCK_S``."""
        lock = _StoredLock(self._objects, self.shown)
        lock.take(self._on_wait)
        ended = threading.Event()
        renewing = threading.Thread(target=lock.renew_until, args=(ended,), daemon=True)
        renewing.start()
        try:
            yield lock.check
        finally:
            ended.set()
            renewing.join()
            lock.release()


class _StoredLock:
    """Numbered objects, each created only if absent. The last one names the process that has the lock.

    The holder creates the next one every few seconds. Another process takes the lock after it has seen no new one for
    ``LOCK_S``, so no clock is compared with that of another machine. A single object that is replaced conditionally
    would need fewer names, but there are S3 servers whose readers see the old contents with the new version.
    """

    def __init__(self, objects: BlockingObjects, shown: str) -> None:
        self._objects = objects
        self._shown = shown
        self._run = secrets.token_hex(16)
        #: The number of the last object that this process has created.
        self._number = 0
        #: Held while the next one is created.
        self._turn = threading.Lock()

    def take(self, on_wait: Callable[[str], object]) -> None:
        """Take the lock. Raises StoreInUse: a running process holds it; StoreError."""
        seen, since_s = 0, time.monotonic()
        while True:
            numbers = self._numbers()
            last = numbers[-1] if numbers else 0
            if not last or self._is_free(last) or (last == seen and time.monotonic() - since_s >= LOCK_S):
                # A process that was stopped here may create one that the holder has removed, and then is not the last.
                if self._create(last + 1) and self._numbers()[-1:] == [last + 1]:
                    self._number = last + 1
                    self._objects.remove([_lock_name(each) for each in numbers])
                    return
            elif not seen:
                seen, since_s = last, time.monotonic()
                on_wait(f"{self._shown} is locked; waiting for up to {LOCK_S:g} s to see whether its process runs")
            elif last != seen:
                raise _in_use(self._shown)
            else:
                time.sleep(LOOK_S)

    def renew_until(self, ended: threading.Event) -> None:
        """Renew the lock until an event. For a thread."""
        while not ended.wait(RENEW_S):
            try:
                self.check()
            except StoreInUse:
                return  # the next check by the holder raises it again
            except StoreError:
                continue  # the holder's ``check`` decides

    def check(self) -> None:
        """Renew the lock. Raises StoreInUse: another process has it; StoreError: it is unknown who has it."""
        with self._turn:
            self._next()

    def release(self) -> None:
        """Let the next process take the lock at once, unless another has it or the object store is unavailable."""
        with self._turn, suppress(StoreError, StoreUnusable):
            self._next(is_free=True)

    def _next(self, *, is_free: bool = False) -> None:
        if not self._create(self._number + 1, is_free=is_free):
            raise _in_use(self._shown)
        self._number += 1
        # The one before stays: a listing may miss an object that was created while it was made.
        self._objects.remove([_lock_name(self._number - 2)])

    def _create(self, number: int, *, is_free: bool = False) -> bool:
        """Create an object; False if another process has created it. Raises StoreError: the result is unknown."""
        name = _lock_name(number)
        data = json.dumps({"run": self._run, "free": is_free}).encode()
        for _ in range(ATTEMPTS):
            self._objects.create(name, data)
            # Its answer may be lost, or be 409 because another process creates it now.
            found = self._objects.get(name)
            if found is not None:
                return found.data == data
            time.sleep(LOOK_S)
        raise StoreError(f"the lock of {self._shown} cannot be written")

    def _numbers(self) -> list[int]:
        return [int(name.rpartition("/")[2]) for name, _ in self._objects.sizes(LOCKS)]

    def _is_free(self, number: int) -> bool:
        found = self._objects.get(_lock_name(number))
        try:
            return found is not None and bool(json.loads(found.data)["free"])
        except (ValueError, KeyError, TypeError):
            return False


def _lock_name(number: int) -> str:
    return f"{LOCKS}/{number:020}"


def _not_empty(shown: str) -> StoreUnusable:
    return StoreUnusable(f"{shown} has other files, and is not a folder of backups", hint="name a new or empty folder")


def _in_use(shown: str) -> StoreInUse:
    return StoreInUse(f"another process is creating or removing backups in {shown}")
