"""Folders of Parquet that a job writes in place of what it wrote before: only those that hold nothing else."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from plainsong.cli.verb import CommandFailed, Exit

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipeline.archive.files import Files

#: What Spark puts into a folder that it writes a table to; dots and `.crc` are of its checksums.
_WRITTEN: Final = re.compile(r"\.?part-[^/]*\.parquet(\.crc)?|\.?_SUCCESS(\.crc)?|_temporary")


def check_replaceable(files: Files, folders: Iterable[str]) -> None:
    """Spark replaces a folder whole, so it has to be one that Spark wrote.

    Raises:
      CommandFailed: one of `folders` holds something else; nothing was written.
    """
    for folder in folders:
        others = [name for name in files.names(folder) if not _WRITTEN.fullmatch(name)]
        if others:
            says = f"{files.url(folder)} is to be replaced, but holds other things than a table, such as {others[0]!r}"
            raise CommandFailed(says, hint="name another folder", code=Exit.USAGE)
