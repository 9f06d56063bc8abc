"""Upgrades a data directory of an earlier format in place.

Format 2 differs only in the file FORMAT: its volumes stay unchanged, and later ones may have packs, which a program for
format 2 would read as messages. The volume being written gets no packs; the next one does.

Format 1 (version 0.1) is one LevelDB with all tables, which becomes the first volume. Messages and payloads stay in
place, since a volume has the same keys. The metadata is copied to its own database; the rows that remain in the volume
are never read. Until FORMAT is replaced, version 0.1 can still use the directory; afterwards it refuses to open it.
After a kill at any moment the next start continues:

    FORMAT 1   rows/                       the metadata is copied again, to metadata.new/
    FORMAT 3   rows/                       metadata.new/ becomes metadata/, volumes/LIST is written, rows/ moves
    FORMAT 3   no rows/                    done
"""

from __future__ import annotations

import logging
import shutil
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING

from plainsong.protocol.effects import Table
from storage.base import StoreError, StoreUnusable
from storage.directory import (
    FORMAT,
    METADATA_NAME,
    ROWS_NAME,
    VOLUMES_NAME,
    opening_failed,
    read_format,
    sync_directory,
    write_format,
)
from storage.leveldb.engine.database import Database
from storage.leveldb.engine.errors import FOREIGN, call_failed
from storage.leveldb.former import large_shape
from storage.leveldb.metadata import ROW
from storage.leveldb.opening import make_first
from storage.leveldb.volume_list import LIST_NAME, Listed

if TYPE_CHECKING:
    from pathlib import Path

    from storage.leveldb.options import LevelDBOptions

log = logging.getLogger(__name__)
_COPY_NAME = "metadata.new"
_COPY_ROWS = 1000
_FIRST = Listed(1, f"{1:08d}", large=True)


def upgrade_directory(directory: Path, options: LevelDBOptions, *, check: bool = True) -> None:
    """Upgrade a directory of an earlier format. Does nothing if the directory already has the current format.

    Raises:
      StoreUnusable: one of its subclasses; the next start continues.
    """
    try:
        found = read_format(directory)
        if found is not None and found < FORMAT:
            log.warning(
                f"this data directory has format {found}: it is upgraded to format {FORMAT}, "
                "which earlier versions refuse",
                extra={"directory": str(directory)},
            )
            if found == 1:
                _copy_metadata(directory, options, check=check)
            write_format(directory)
        _move(directory, options)
    except StoreError as error:
        raise StoreUnusable(error.detail, hint=error.hint) from error
    except OSError as error:
        raise opening_failed(error, directory) from error


def _copy_metadata(directory: Path, options: LevelDBOptions, *, check: bool) -> None:
    copy = directory / _COPY_NAME
    if copy.exists():
        shutil.rmtree(copy)
    with (
        closing(Database(directory / ROWS_NAME, large_shape(options), create=False, check=check)) as source,
        closing(Database(copy, options.metadata_shape, create=True)) as target,
    ):
        try:
            with source.rows(Table.METADATA, b"", b"\xff" * 64) as rows:
                every = iter(rows)
                while some := list(islice(every, _COPY_ROWS)):
                    with target.batch(sync=False) as batch:
                        for key, value in some:
                            batch.put(ROW + key, value)
        except FOREIGN as error:
            raise call_failed(error, "copying the metadata") from error
        # LevelDB syncs the table that this writes.
        target.flush_memory()
        target.sync()
    sync_directory(copy)
    sync_directory(directory)


def _move(directory: Path, options: LevelDBOptions) -> None:
    """Finish an upgrade from format 1, if one is unfinished.

    The upgrade is unfinished if and only if ``rows`` exists, since it moves last. Once it has moved, a missing list is
    damage, and every volume may have rows, so the list must be durable before ``rows`` moves.
    """
    volumes, rows, copy = directory / VOLUMES_NAME, directory / ROWS_NAME, directory / _COPY_NAME
    if not rows.exists():
        return
    if copy.exists():
        copy.rename(directory / METADATA_NAME)
    if not (volumes / LIST_NAME).exists():
        make_first(volumes, options, [_FIRST])
    sync_directory(volumes)
    sync_directory(directory)
    rows.rename(volumes / _FIRST.folder)
    sync_directory(volumes)
    sync_directory(directory)
