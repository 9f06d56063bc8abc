"""The data directory: its lock, its FORMAT file, and the errors of opening a store in it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

from plainsong.protocol.version import VERSION
from storage.base import StoreDamaged, StoreFull, StoreInUse, StoreReadOnly, StoreTooNew, StoreUnusable

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Prefix of a file's name until the file is complete.
NEW_PREFIX = ".new-"
DAMAGED_HINT = (
    "keep the daemon stopped, copy the whole directory, inspect it with `plainsong store explain`, and restore a "
    "backup; nothing was changed, and nothing is repaired automatically"
)
FULL_HINT = "free some space on this file system and start again; nothing is lost"
NO_THREADS_HINT = "raise the limit on threads: ulimit -u, TasksMax of a systemd unit, the pids of a container"
READ_ONLY_HINT = "make the directory writable for this user, or name another one with --data-dir"
#: Text in a message of LevelDB or of the system → the error to raise, and its hint. The first match counts.
_WORDS: tuple[tuple[str, type[StoreUnusable], str], ...] = (
    ("No space left", StoreFull, FULL_HINT),
    ("Disk quota exceeded", StoreFull, FULL_HINT),
    ("Read-only file system", StoreReadOnly, READ_ONLY_HINT),
    ("Permission denied", StoreReadOnly, READ_ONLY_HINT),
    ("Operation not permitted", StoreReadOnly, READ_ONLY_HINT),
    ("already held", StoreInUse, "stop the other process first"),
    ("temporarily unavailable", StoreInUse, "stop the other process first"),
    ("Corruption", StoreDamaged, DAMAGED_HINT),
    ("No such file", StoreDamaged, DAMAGED_HINT),
    ("does not exist", StoreDamaged, DAMAGED_HINT),
)


def opening_failed(error: BaseException, path: Path) -> StoreUnusable:
    """Return the error to raise when LevelDB or the system could not open ``path``."""
    text = message_of(error)
    for words, kind, hint in _WORDS:
        if words in text:
            return kind(f"{path}: {text}", hint=hint)
    return StoreUnusable(f"{path}: {text}")


def message_of(error: BaseException) -> str:
    """Return an exception's text. LevelDB's own is bytes."""
    if isinstance(error, OSError) and error.errno in errno.errorcode:
        return str(error)
    content = error.args[0] if error.args else type(error).__name__
    return content.decode("utf-8", "replace") if isinstance(content, bytes) else str(content)


# --- the FORMAT file: the version of the layout, and of the program that first wrote it -----------


FORMAT_NAME = "FORMAT"
#: Left behind by a crash while FORMAT is first written; the next opening writes it again.
UNFINISHED_FORMAT_NAME = "FORMAT.tmp"
#: Incremented when rows, keys or files change so that an older version would misread them.
FORMAT = 3
_MAX_FORMAT_BYTES = 4096


def read_format(directory: Path) -> int | None:
    """Return the format of ``directory``; None if the file does not exist.

    Raises:
      StoreTooNew: a newer version wrote it.
      StoreDamaged: the file cannot be read.
    """
    path = directory / FORMAT_NAME
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_FORMAT_BYTES)
    except FileNotFoundError:
        return None
    try:
        content = json.loads(raw)
        number, by = content["format"], str(content.get("written_by", "unknown"))
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(number)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise StoreDamaged(
            f"{path} cannot be parsed: {raw[:60]!r}",
            hint=f'keep the daemon stopped, and copy the directory; the file should contain {{"format": {FORMAT}, …}}',
        ) from None
    if number > FORMAT:
        raise StoreTooNew(
            f"{directory} has format {number}, written by version {by}; this version reads up to {FORMAT}",
            hint=f"run version {by} or newer; nothing was changed",
        )
    return number


def write_format(directory: Path) -> None:
    """Write the file. After a crash it is complete or absent."""
    text = json.dumps({"format": FORMAT, "written_by": VERSION}) + "\n"
    write_whole(directory / FORMAT_NAME, text.encode("ascii"))


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file. After a crash it is the old one or the new one. Blocks. Raises OSError.

    For one writer at a time: the temporary file has a fixed name, so that crashes never leave more than one.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    with _placed(temporary, path), temporary.open("wb") as file:
        _fill(file, content)


def replace_file(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Do ``write_whole`` with ``mode``, for any number of writers at once. Crashes leave ``.new-`` files."""
    descriptor, temporary = tempfile.mkstemp(prefix=NEW_PREFIX, dir=path.parent)
    with _placed(Path(temporary), path), os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), mode)
        _fill(file, data)


def _fill(file: IO[bytes], content: bytes) -> None:
    file.write(content)
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def _placed(temporary: Path, path: Path) -> Iterator[None]:
    """Move the file that the block writes to ``path``, durably; remove it if the block fails."""
    try:
        yield
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in ``directory`` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- the directory: one process at a time, a format that this version reads, no foreign files -----
#
#     plainsong.lock   locked while a daemon uses the directory; names that process
#     FORMAT           the layout's number; written last in a new directory, so it implies that everything else exists
#     REPLICATION      the log of commits in an object store that belongs to this directory, if it has one
#     metadata/        a LevelDB
#     volumes/         LIST, and a LevelDB for each period of messages
#     rows/            format 1: one LevelDB with everything; it becomes a volume
#     deposed-TIME/    the store of a primary before it joined again as a standby


LOCK_NAME = "plainsong.lock"
METADATA_NAME = "metadata"
VOLUMES_NAME = "volumes"
ROWS_NAME = "rows"
REPLICATION_NAME = "REPLICATION"
#: Files that a directory without a store may have: those of an unfinished creation, and of mkfs.
_OURS = {
    LOCK_NAME,
    METADATA_NAME,
    VOLUMES_NAME,
    ROWS_NAME,
    UNFINISHED_FORMAT_NAME,
    REPLICATION_NAME,
    f"{REPLICATION_NAME}.tmp",
    "lost+found",
}
#: Prefix of a folder with the store of a deposed primary.
DEPOSED_PREFIX = "deposed-"
#: What ``empty_store`` removes. FORMAT is last: rows without it would count as damage.
_OF_A_STORE = (METADATA_NAME, VOLUMES_NAME, ROWS_NAME, "scrub.json", "last-backup.json", FORMAT_NAME)
_MAX_HOLDER_BYTES = 4096


@dataclass(slots=True)
class DataDirectory:
    """A data directory that this process has locked."""

    path: Path
    is_new: bool
    """True if it had no store yet; ``seal`` makes it one."""
    lock: int
    """Descriptor of the locked file; -1 once closed."""

    @classmethod
    def open(cls, path: Path, *, address: str = "") -> Self:
        """Lock ``path``; create it and its parents if necessary. Blocks; for threads.

        Raises:
          StoreInUse: another process has locked it; the detail names that process and its start time.
          StoreTooNew, StoreDamaged, StoreReadOnly, StoreFull, StoreUnusable: nothing was changed.
        """
        path = path.absolute()
        try:
            _create(path)
            is_new = read_format(path) is None
            if is_new:
                _refuse_foreign(path)
            lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                take_lock(lock, path, fcntl.LOCK_EX)
                # Read again under the lock: another process may have made a store here since.
                is_new = read_format(path) is None
                if is_new:
                    for rows in (path / ROWS_NAME, path / METADATA_NAME, *(path / VOLUMES_NAME).glob("*")):
                        _refuse_rows_without_format(rows)
                _sign(lock, address)
            except BaseException:
                os.close(lock)
                raise
        except OSError as error:
            raise opening_failed(error, path) from error
        return cls(path, is_new, lock)

    def seal(self) -> None:
        """Make the opened files survive a power cut; this turns a new directory into a store.

        Raises:
          StoreReadOnly, StoreFull, StoreUnusable: it could not be written.
        """
        try:
            sync_directory(self.path)
            if self.is_new:
                write_format(self.path)
                self.is_new = False
        except OSError as error:
            raise opening_failed(error, self.path) from error

    def close(self) -> None:
        """Release the directory. Idempotent."""
        if self.lock >= 0:
            # The file stays: removing it would let two processes lock two files of the same name.
            with suppress(OSError):
                os.ftruncate(self.lock, 0)
            os.close(self.lock)
            self.lock = -1


def empty_store(path: Path) -> None:
    """Remove the store in a directory, which becomes a new one. Blocks. Repeat it after a crash.

    Raises:
      StoreInUse, StoreReadOnly, StoreUnusable.
    """
    home = DataDirectory.open(path, address="a standby that is building its store")
    try:
        for name in _OF_A_STORE:
            part = path / name
            if part.is_dir():
                shutil.rmtree(part)
            else:
                part.unlink(missing_ok=True)
            sync_directory(path)
    except OSError as error:
        raise opening_failed(error, path) from error
    finally:
        home.close()


def set_aside(path: Path, name: str) -> None:
    """Move the store in a locked directory into a folder there. Blocks. Repeat it after a crash. Raises StoreUnusable.

    Inside the directory, which may be a mount point, or the only place where this user may write.
    """
    aside = path / name
    try:
        aside.mkdir(mode=0o700, exist_ok=True)
        for part in _OF_A_STORE:
            if (path / part).exists():
                (path / part).rename(aside / part)
                sync_directory(aside)
                sync_directory(path)
    except OSError as error:
        raise StoreUnusable(
            f"the store in {path} cannot be moved to {aside}: {message_of(error)}",
            hint="remove the cause, and run the command again",
        ) from error


def refuse_replicated(path: Path) -> None:
    """Raise StoreUnusable if a directory has a second copy, since it would lack this process's commits."""
    if (path / REPLICATION_NAME).exists():
        raise StoreUnusable(
            f"{path} has a second copy in an object store, and replication.to is not set",
            hint="set replication.to as before, or give up the copy with plainsong replica leave",
        )


def take_lock(descriptor: int, path: Path, kind: int) -> None:
    """Lock the open lock file of ``path``, exclusively or shared.

    Raises:
      StoreInUse: another process holds it.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StoreInUse(
            f"{path} is in use by {_holder(descriptor)}",
            hint="stop that process first (SIGTERM lets it finish), or name another directory with --data-dir",
        ) from None


def _create(path: Path) -> None:
    if path.is_dir():
        return
    if path.exists():
        raise StoreUnusable(f"{path} is a file, not a directory", hint="name a directory with --data-dir")
    missing = [path, *path.parents]
    missing = missing[: next(i for i, part in enumerate(missing) if part.exists())]
    for part in reversed(missing):
        part.mkdir(mode=0o700 if part == path else 0o755, exist_ok=True)
        sync_directory(part.parent)


def _refuse_foreign(path: Path) -> None:
    names = [entry.name for entry in path.iterdir()]
    foreign = sorted(name for name in names if name not in _OURS and not name.startswith(DEPOSED_PREFIX))
    if foreign:
        shown = ", ".join(foreign[:3]) + (", …" if len(foreign) > 3 else "")
        raise StoreUnusable(
            f"{path} is not a Plainsong store: it has other files ({shown}) and no FORMAT",
            hint="name an empty directory, or one that does not exist yet, with --data-dir",
        )


def _refuse_rows_without_format(rows: Path) -> None:
    """Raise StoreDamaged for rows without FORMAT: creating a store over them would remove them."""
    if not rows.is_dir():
        return
    for entry in rows.iterdir():
        if entry.name.endswith((".ldb", ".sst")) or (entry.name.endswith(".log") and entry.stat().st_size):
            raise StoreDamaged(f"{rows} has rows ({entry.name}), but there is no FORMAT", hint=DAMAGED_HINT)


def _sign(lock: int, address: str) -> None:
    who = {"pid": os.getpid(), "host": socket.gethostname(), "address": address, "since_s": int(time.time())}
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps(who).encode(), 0)


def _holder(lock: int) -> str:
    try:
        who = json.loads(os.pread(lock, _MAX_HOLDER_BYTES, 0))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(int(who["since_s"])))
        serving = f", serving {who['address']}" if who.get("address") else ""
        return f"process {int(who['pid'])} on {who['host']} since {since}{serving}"
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, OSError):
        return "a process that has not identified itself"
