"""Opens a stopped store without changing it: LevelDB writes whenever it opens, so this opens a copy.

Table files never change once written: they are linked, not copied, if the copy is on the same file system.
Everything else is small.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from storage.base import StoreDamaged, StoreUnusable
from storage.directory import LOCK_NAME, ROWS_NAME, opening_failed, read_format, take_lock
from storage.leveldb.database import Database, LevelDBOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

_NEVER_REWRITTEN = {".ldb", ".sst"}


@contextmanager
def open_stopped(directory: Path) -> Iterator[tuple[Database, str]]:
    """The database of a stopped ``directory``, from a copy that is removed afterwards; the original stays as it is.

    Gives the database and, if LevelDB's own checks failed and it was opened leniently, their message (else an empty
    string): rows may be missing then, but those that are there are good.

    Raises:
      StoreInUse: a daemon uses the directory.
      StoreTooNew, StoreDamaged, StoreUnusable: it cannot be read, or is no store.
    """
    directory = directory.absolute()
    with _copy(directory) as rows:
        complaint = ""
        try:
            database = Database(rows, LevelDBOptions(), create=False)
        except StoreDamaged as damage:
            complaint = damage.detail.replace(str(rows), str(directory / ROWS_NAME))
        if complaint:
            database = _open_leniently(directory, rows, complaint)
        try:
            yield database, complaint
        finally:
            database.close()


def _open_leniently(directory: Path, rows: Path, complaint: str) -> Database:
    # A failed opening may have changed the copy: start from the original again.
    shutil.rmtree(rows)
    try:
        _copy_files(directory / ROWS_NAME, rows)
        return Database(rows, LevelDBOptions(paranoid_checks=False), create=False, check=False)
    except OSError as error:
        raise opening_failed(error, directory) from error
    except StoreUnusable as error:
        raise StoreDamaged(f"{complaint}; not even a part of it can be read", hint=error.hint) from error


@contextmanager
def _copy(directory: Path) -> Iterator[Path]:
    """A copy of the rows beside ``directory``, or in the folder for temporary files; made while no daemon uses it."""
    try:
        if read_format(directory) is None:
            raise StoreUnusable(f"{directory} is no store: it has no FORMAT", hint="name the daemon's data directory")
        lock = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
        try:
            take_lock(lock, directory, fcntl.LOCK_SH)
            scratch = _scratch(directory.parent)
            try:
                _copy_files(directory / ROWS_NAME, scratch / ROWS_NAME)
            except BaseException:
                shutil.rmtree(scratch)
                raise
        finally:
            os.close(lock)
    except OSError as error:
        raise opening_failed(error, directory) from error
    try:
        yield scratch / ROWS_NAME
    finally:
        shutil.rmtree(scratch)


def _scratch(beside: Path) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix=".plainsong-look-", dir=beside))
    except OSError:
        return Path(tempfile.mkdtemp(prefix="plainsong-look-"))


def _copy_files(rows: Path, copy: Path) -> None:
    copy.mkdir()
    for source in rows.iterdir():
        target = copy / source.name
        if source.suffix in _NEVER_REWRITTEN:
            try:
                target.hardlink_to(source)
                continue
            except OSError:
                # Another file system, or one without links, or another user's file.
                pass
        if source.is_file():
            shutil.copyfile(source, target)
