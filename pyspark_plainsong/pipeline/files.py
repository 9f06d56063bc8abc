"""Files that a job writes beside Spark's own, on local disks and on whatever Hadoop's FileSystem reaches.

All paths are from the root. ``write`` is atomic and durable: on local disks it syncs the bytes before the rename and the
folder after it; elsewhere it relies on the file system's own close and rename.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import urlsplit

from plainsong.cli.verb import CommandFailed, Exit
from pyspark_plainsong.pipeline.archive.layout import MANIFEST_NAME as MANIFEST
from pyspark_plainsong.pipeline.locks import locked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from pyspark.sql import SparkSession

    from pyspark_plainsong.pipeline.locks import Hold


class Files(Protocol):
    """What archives need of a file system."""

    def url(self, path: str) -> str:
        """The same for Spark."""

    def find(self, under: str, name: str) -> list[str]:
        """All files of that name below a folder, sorted, but for folders that ``_`` or ``.`` hides; others may change them."""

    def read(self, path: str) -> bytes | None:
        """What is in a file; None when there is none."""

    def write(self, path: str, data: bytes) -> None:
        """Make or replace a file, with its folders, whole or not at all."""

    def lock(self, path: str, what: str, say: Callable[[str], None]) -> AbstractContextManager[Hold]:
        """Be the only one who writes ``what`` (for people), while others that ask for the same path are refused.

        Args:
          say: called with a sentence when somebody's hold was taken over who seems to be dead.
        Raises:
          Busy: somebody else is; nothing was changed.
        """

    def sizes(self, folder: str) -> dict[str, int]:
        """Names and sizes of the Parquet files right in a folder, sorted; none when there is no such folder."""

    def names(self, folder: str) -> list[str]:
        """What stands right in a folder, sorted; nothing when there is none."""

    def settle(self, folder: str) -> None:
        """Make the Parquet files of a folder durable."""

    def remove(self, folder: str) -> None:
        """Take a folder away with all that is in it; nothing when there is none."""

    def modified_ms(self, folder: str) -> int | None:
        """When something right in it was changed last, in milliseconds since 1970; None when it is gone."""


def open_files(root: str, session: Callable[[], SparkSession] | None = None) -> Files:
    """The file system of a root: a path, ``file:…``, or a URL that Hadoop knows.

    Args:
      session: gives the session through which other file systems are reached.
    Raises:
      CommandFailed: it is such a URL, and there is no session.
    """
    parts = urlsplit(root)
    if "://" not in root and not root.startswith("file:"):
        return LocalFiles(Path(root))
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return LocalFiles(Path(parts.path))
    if session is None:
        raise CommandFailed(f"{root} cannot be looked into without Spark", code=Exit.USAGE)
    from pyspark_plainsong.pipeline.hadoop import HadoopFiles

    return HadoopFiles(root, session())


class LocalFiles:
    """Files on this machine's disks, or mounted as if they were."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def url(self, path: str) -> str:
        """As ``Files``."""
        return f"file://{self._at(path)}"  # unquoted, as Hadoop takes paths

    def find(self, under: str, name: str) -> list[str]:
        """As ``Files``."""
        found = []
        for folder, below, names in os.walk(self._at(under)):  # which takes it well when a folder goes meanwhile
            below[:] = [each for each in below if each[0] not in "._"]
            if name in names:
                found.append((Path(folder) / name).relative_to(self._root).as_posix())
        return sorted(found)

    def read(self, path: str) -> bytes | None:
        """As ``Files``."""
        try:
            return self._at(path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, path: str, data: bytes) -> None:
        """As ``Files``."""
        target = self._at(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        try:
            with beside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
        _sync(target.parent)

    def lock(self, path: str, what: str, say: Callable[[str], None]) -> AbstractContextManager[Hold]:
        """As ``Files``; the kernel knows who is dead."""
        return locked(self._at(path), what)

    def sizes(self, folder: str) -> dict[str, int]:
        """As ``Files``."""
        return {each.name: each.stat().st_size for each in self._parquet(folder)}

    def names(self, folder: str) -> list[str]:
        """As ``Files``."""
        at = self._at(folder)
        return sorted(each.name for each in at.iterdir()) if at.is_dir() else []

    def settle(self, folder: str) -> None:
        """As ``Files``."""
        for each in self._parquet(folder):
            _sync(each)
        at = self._at(folder)
        # Folders that were made on the way must not be lost either.
        while at.is_relative_to(self._root):
            _sync(at)
            at = at.parent

    def remove(self, folder: str) -> None:
        """As ``Files``; what has a manifest loses that first, so that no half of it is ever taken for a whole."""
        at = self._at(folder)
        if at.is_dir():
            (at / MANIFEST).unlink(missing_ok=True)
            _sync(at)
            shutil.rmtree(at, onerror=_unless_gone)

    def modified_ms(self, folder: str) -> int | None:
        """As ``Files``."""
        at = self._at(folder)
        try:
            return max(each.stat().st_mtime_ns for each in (at, *at.iterdir())) // 1_000_000
        except FileNotFoundError:  # it changes under our eyes
            return None

    def _at(self, path: str) -> Path:
        return self._root.joinpath(*PurePosixPath(path).parts)

    def _parquet(self, folder: str) -> list[Path]:
        return sorted(each for each in self._at(folder).glob("*.parquet") if each.name[0] not in "._")


def _unless_gone(call: object, path: str, raised: tuple[type[BaseException], BaseException, object]) -> None:
    """Let somebody else take away the same at the same time."""
    if not isinstance(raised[1], FileNotFoundError):
        raise raised[1]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- replacing -------------------------------------------------------------------------------------
#
# Folders of Parquet that a job replaces: only those that hold nothing else.

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
