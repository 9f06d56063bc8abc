"""The FORMAT file: which version of the layout a data directory has, and who wrote it first."""

from __future__ import annotations

import json
import os
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from storage.base import StoreDamaged, StoreTooNew

if TYPE_CHECKING:
    from pathlib import Path

FILE_NAME = "FORMAT"
#: A crash while the file is first written leaves this one; it is written anew.
UNFINISHED_NAME = "FORMAT.tmp"
#: Raised when rows, keys or files change so that an older version would misread them.
FORMAT = 1
_MAX_BYTES = 4096


def read_format(directory: Path) -> int | None:
    """The format of ``directory``; None when the file is not there.

    Raises:
      StoreTooNew: a newer version wrote it.
      StoreDamaged: the file says nothing that can be read.
    """
    path = directory / FILE_NAME
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES)
    except FileNotFoundError:
        return None
    try:
        said = json.loads(raw)
        number, by = said["format"], str(said.get("written_by", "unknown"))
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(number)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise StoreDamaged(
            f"{path} cannot be read: it holds {raw[:60]!r}",
            hint=f'keep the daemon stopped, copy the directory; FORMAT should read {{"format": {FORMAT}, …}}',
        ) from None
    if number > FORMAT:
        raise StoreTooNew(
            f"{directory} has format {number}, written by version {by}; this version reads up to {FORMAT}",
            hint=f"run version {by} or newer; nothing was changed",
        )
    return number


def write_format(directory: Path) -> None:
    """Write the file so that after a crash it is there whole or not at all."""
    temporary = directory / UNFINISHED_NAME
    text = json.dumps({"format": FORMAT, "written_by": _version()}) + "\n"
    with temporary.open("w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / FILE_NAME)
    sync_directory(directory)


def sync_directory(directory: Path) -> None:
    """Make the names in ``directory`` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _version() -> str:
    try:
        return version("plainsong")
    except PackageNotFoundError:
        return "unknown"
