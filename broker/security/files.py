"""Files that settings name: refused if other users can write them, and replaced atomically."""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from storage.directory import replace_file

if TYPE_CHECKING:
    from collections.abc import Iterator


class FileUnusable(Exception):
    """A file that a setting names cannot be used; ``setting`` is the name of the setting."""

    def __init__(self, setting: str, why: str, hint: str = "") -> None:
        super().__init__(f"{setting}: {why}")
        self.setting = setting
        self.why = why
        self.hint = hint


class UnsafeFile(OSError):
    """A file that other users could write; it was not read."""


class Stamp(NamedTuple):
    """Identifies a version of a file."""

    inode: int
    size: int
    mtime_ns: int


def stamp_of(path: Path) -> Stamp | None:
    """Return the stamp of a file; None if it does not exist or cannot be accessed."""
    try:
        found = path.stat()
    except OSError:
        return None
    return Stamp(found.st_ino, found.st_size, found.st_mtime_ns)


def read_guarded(path: Path, max_bytes: int, *, secret: bool = False) -> tuple[bytes, Stamp]:
    """Return a file's content and its stamp.

    Raises:
      UnsafeFile: it is owned by neither this process's user nor root, or writable by its group or others; or, with
        ``secret``, readable by others; or it has more than ``max_bytes``.
      OSError: it cannot be read.
    """
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise UnsafeFile(f"{path} is not a file")
        if found.st_uid not in (0, os.geteuid()):
            raise UnsafeFile(f"{path} belongs to a user other than the daemon's and root")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UnsafeFile(f"{path} can be written by its group or by others (mode {found.st_mode & 0o777:04o})")
        if secret and found.st_mode & stat.S_IROTH:
            raise UnsafeFile(f"{path} can be read by all users (mode {found.st_mode & 0o777:04o}): chmod 600 it")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise UnsafeFile(f"{path} is larger than {max_bytes} bytes")
    return data, Stamp(found.st_ino, found.st_size, found.st_mtime_ns)


def read_named(setting: str, path: str, max_bytes: int, hint: str) -> bytes:
    """Return the content of the file with a secret that a setting names. Raises FileUnusable."""
    try:
        return read_guarded(Path(path), max_bytes, secret=True)[0]
    except OSError as error:
        raise FileUnusable(setting, reason_of(error, path), hint) from error


def why_of(error: Exception) -> str:
    """Return why a file cannot be used, without the numbers of the system's errors."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def reason_of(error: Exception, path: str | Path) -> str:
    """Return why the file cannot be used, with its path."""
    why = why_of(error)
    return why if str(path) in why else f"{path}: {why}"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file next to ``path``, which every process that changes ``path`` takes; wait for it."""
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_guarded(path: Path, data: bytes) -> None:
    """Replace ``path`` durably and atomically. Raises OSError."""
    path = path.resolve()
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o600
    replace_file(path, data, mode=mode)


def write_secret(path: Path, text: str) -> None:
    """Create a file that only its owner can read. Raises FileExistsError: an existing one is never replaced."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
