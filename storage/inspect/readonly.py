"""Opens a stopped store without changing it. LevelDB writes whenever it opens, so this opens a copy.

Table files never change once written: they are linked rather than copied if the copy is on the same file system. All
other files are small.
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
from storage.directory import (
    FORMAT_NAME,
    LOCK_NAME,
    METADATA_NAME,
    ROWS_NAME,
    VOLUMES_NAME,
    opening_failed,
    read_format,
    take_lock,
)
from storage.leveldb.options import LevelDBOptions
from storage.leveldb.tables import LevelDBTables
from storage.leveldb.upgrade import upgrade_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

_NEVER_REWRITTEN = {".ldb", ".sst"}
_COPY_NAME = "copy"


@contextmanager
def open_stopped(directory: Path) -> Iterator[tuple[LevelDBTables, str]]:
    """Open the tables of a stopped ``directory`` from a copy, which is removed afterwards. The original is unchanged.

    Yields the tables and, if LevelDB's checks failed and it was opened leniently, their message (else an empty string).
    In that case rows may be missing, but those that are found are valid.

    Raises:
      StoreInUse: a daemon uses the directory.
      StoreTooNew, StoreDamaged, StoreUnusable: it cannot be read, or is not a store.
    """
    directory = directory.absolute()
    with _copy(directory) as copy:
        complaint = ""
        try:
            tables = _open(copy, LevelDBOptions())
        except StoreDamaged as damage:
            complaint = damage.detail.replace(str(copy), str(directory))
        if complaint:
            tables = _open_leniently(directory, copy, complaint)
        try:
            yield tables, complaint
        finally:
            tables.close()


def _open(copy: Path, options: LevelDBOptions, *, check: bool = True) -> LevelDBTables:
    upgrade_directory(copy, options, check=check)
    return LevelDBTables(copy, options, check=check)


def _open_leniently(directory: Path, copy: Path, complaint: str) -> LevelDBTables:
    # A failed opening may have changed the copy: start again from the original.
    shutil.rmtree(copy)
    try:
        _copy_store(directory, copy)
        return _open(copy, LevelDBOptions(paranoid_checks=False), check=False)
    except OSError as error:
        raise opening_failed(error, directory) from error
    except StoreUnusable as error:
        raise StoreDamaged(f"{complaint}; nothing in it can be read", hint=error.hint) from error


@contextmanager
def _copy(directory: Path) -> Iterator[Path]:
    """Copy the store next to ``directory`` or into the temporary folder, under a lock that keeps daemons out."""
    try:
        if read_format(directory) is None:
            raise StoreUnusable(
                f"{directory} is not a store: it has no FORMAT", hint="name the daemon's data directory"
            )
        lock = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
        try:
            take_lock(lock, directory, fcntl.LOCK_SH)
            scratch = _scratch(directory.parent)
            try:
                _copy_store(directory, scratch / _COPY_NAME)
            except BaseException:
                shutil.rmtree(scratch)
                raise
        finally:
            os.close(lock)
    except OSError as error:
        raise opening_failed(error, directory) from error
    try:
        yield scratch / _COPY_NAME
    finally:
        shutil.rmtree(scratch)


def _scratch(beside: Path) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix=".plainsong-look-", dir=beside))
    except OSError:
        return Path(tempfile.mkdtemp(prefix="plainsong-look-"))


def _copy_store(directory: Path, copy: Path) -> None:
    copy.mkdir()
    shutil.copyfile(directory / FORMAT_NAME, copy / FORMAT_NAME)
    # An interrupted upgrade is completed in the copy.
    for name in (ROWS_NAME, METADATA_NAME, f"{METADATA_NAME}.new", VOLUMES_NAME):
        if (directory / name).is_dir():
            _copy_files(directory / name, copy / name)


def _copy_files(rows: Path, copy: Path) -> None:
    copy.mkdir()
    for source in rows.iterdir():
        target = copy / source.name
        if source.suffix in _NEVER_REWRITTEN:
            try:
                target.hardlink_to(source)
                continue
            except OSError:
                # The file system is another one or has no links, or the file belongs to another user.
                pass
        if source.is_dir():
            _copy_files(source, target)
        elif source.is_file():
            shutil.copyfile(source, target)
