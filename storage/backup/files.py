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

    from storage.replication.object_store import BlockingObjectStore

LOCK_NAME = "lock"
#: The holder of a lock in an object store renews it this often.
RENEW_S = 5.0
#: A lock that was not renewed for this long belongs to a process that has ended.
LOCK_S = 30.0
#: How often a waiting process looks at the lock.
LOOK_S = 1.0


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

    def __init__(self, objects: BlockingObjectStore, url: str) -> None:
        self._objects = objects
        self.shown = url

    def make(self, name: str, data: bytes) -> None:
        """See ``BackupFiles``."""
        if any(found != LOCK_NAME for found, _ in self._objects.sizes("")):
            raise _not_empty(self.shown)
        # Not over the first file of another process: it may begin a second copy here.
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
        lock.take()
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
    """An object that its holder replaces every few seconds, each time only if it is the version that it wrote.

    No clock is compared with that of another machine: a process takes the lock after it has seen the same version for
    ``LOCK_S``.
    """

    def __init__(self, objects: BlockingObjectStore, shown: str) -> None:
        self._objects = objects
        self._shown = shown
        self._run = secrets.token_hex(16)
        self._renewed = 0
        self._etag = ""
        #: Held while the object is replaced.
        self._turn = threading.Lock()

    def take(self) -> None:
        """Take the lock. Raises StoreInUse: a running process holds it; StoreError."""
        data = self._data()
        seen, since_s = "", time.monotonic()
        while True:
            found = self._objects.get(LOCK_NAME)
            if found is None:
                self._objects.create(LOCK_NAME, data)
            elif found.data == data:
                self._etag = found.etag
                return
            elif _is_free(found.data) or (found.etag == seen and time.monotonic() - since_s >= LOCK_S):
                self._objects.exchange(LOCK_NAME, data, found.etag)
            elif not seen:
                seen, since_s = found.etag, time.monotonic()
            elif found.etag != seen:
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
                continue  # `check` of the holder decides

    def check(self) -> None:
        """Renew the lock. Raises StoreInUse: another process has it; StoreError: that is unknown."""
        with self._turn:
            self._renewed += 1
            self._replace(self._data())

    def release(self) -> None:
        """Let the next process take the lock at once, unless another has it or the object store is away."""
        with self._turn, suppress(StoreError, StoreUnusable):
            self._replace(self._data(is_free=True))

    def _replace(self, data: bytes) -> None:
        self._objects.exchange(LOCK_NAME, data, self._etag)
        # Its answer may be lost, and it does not name the new version.
        found = self._objects.get(LOCK_NAME)
        if found is None or self._run.encode() not in found.data:
            raise _in_use(self._shown)
        self._etag = found.etag
        if found.data != data:
            raise StoreError(f"the lock of {self._shown} could not be renewed")

    def _data(self, *, is_free: bool = False) -> bytes:
        return json.dumps({"run": self._run, "renewed": self._renewed, "free": is_free}).encode()


def _is_free(data: bytes) -> bool:
    try:
        return bool(json.loads(data)["free"])
    except (ValueError, KeyError, TypeError):
        return False


def _not_empty(shown: str) -> StoreUnusable:
    return StoreUnusable(f"{shown} has files and is not a folder of backups", hint="name an empty one, or a new one")


def _in_use(shown: str) -> StoreInUse:
    return StoreInUse(f"another process makes or removes backups in {shown}")
