"""Files that a job writes in addition to Spark's, on local disks and on any file system that Hadoop supports.

All paths are from the root. ``write`` is atomic and durable: on local disks it syncs the bytes before the rename and
the folder after it; elsewhere it relies on the file system's own close and rename.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, Protocol

from plainsong.cli.command import CommandFailed, Exit
from pyspark_plainsong.pipeline.locks import locked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from pyspark.sql import SparkSession

    from pyspark_plainsong.pipeline.locks import Hold


class Files(Protocol):
    """The file operations that an archive needs."""

    def url(self, path: str) -> str:
        """Return a path in the form that Spark accepts."""

    def table(self, path: str) -> str:
        """Return a path in the form that delta-rs accepts."""

    def make_folder(self, path: str) -> None:
        """Create a folder and those above it, unless they exist."""

    def read(self, path: str) -> bytes | None:
        """Return the content of a file; None if it does not exist."""

    def write(self, path: str, data: bytes) -> None:
        """Create or replace a file atomically, and create its folders."""

    def lock(self, path: str, what: str, say: Callable[[str], None]) -> AbstractContextManager[Hold]:
        """Hold a lock for the ``with`` block.

        Args:
          what: what the lock protects, for errors.
          say: called with a sentence if the lock of a dead process was taken over.
        Raises:
          Busy: another process holds the lock; nothing was changed.
        """

    def sizes(self, folder: str) -> dict[str, int]:
        """Return names and sizes of the Parquet files directly in a folder, sorted; empty if it does not exist."""

    def names(self, folder: str) -> list[str]:
        """Return the names directly in a folder, sorted; empty if it does not exist."""

    def settle(self, paths: Sequence[str]) -> None:
        """Make files durable, and the folders above them."""

    def remove(self, folder: str) -> None:
        """Remove a folder with its content, if it exists."""


#: Characters that make a path a pattern for Spark's readers of files; a backslash quotes each.
_OF_PATTERNS: Final = re.compile(r"[\\*?\[\]{}]")
_LOCAL_URL: Final = re.compile(r"file:(?://(?:localhost)?(?=/))?(/.*)", re.DOTALL)


def literal(path: str) -> str:
    """Quote a path or a URL for Spark's readers of files, which expand patterns."""
    return _OF_PATTERNS.sub(r"\\\g<0>", path)


def open_files(root: str, session: Callable[[], SparkSession] | None = None) -> Files:
    """Open the file system of a root: a path, ``file:…``, or a URL that Hadoop can open.

    Args:
      session: returns the Spark session; its JVM opens URLs.
    Raises:
      CommandFailed: the root is a URL, and there is no session.
    """
    if "://" not in root and not root.startswith("file:"):
        return LocalFiles(Path(root))
    local = _LOCAL_URL.fullmatch(root)
    if local is not None and not local[1].startswith("//"):
        return LocalFiles(Path(local[1]))
    if session is None:
        raise CommandFailed(f"{root} cannot be read without Spark", code=Exit.USAGE)
    from pyspark_plainsong.pipeline.hadoop import HadoopFiles

    return HadoopFiles(root, session())


class LocalFiles:
    """Files on this machine's disks, or mounted as if they were."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def url(self, path: str) -> str:
        """See ``Files``."""
        return f"file://{self._at(path)}"  # unquoted, as Hadoop takes paths

    def table(self, path: str) -> str:
        """See ``Files``. Raises CommandFailed: delta-rs would open another path."""
        at = str(self._at(path))
        if "\\" in at or "%" in at:
            says = f"a Delta table cannot have a backslash or a percent sign in its path: {at}"
            raise CommandFailed(says, hint="choose another --root", code=Exit.USAGE)
        return Path(at).as_uri()

    def make_folder(self, path: str) -> None:
        """See ``Files``."""
        self._at(path).mkdir(parents=True, exist_ok=True)

    def read(self, path: str) -> bytes | None:
        """See ``Files``."""
        try:
            return self._at(path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, path: str, data: bytes) -> None:
        """See ``Files``."""
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
        """See ``Files``. Uses a lock of the kernel, which ends with its holder."""
        return locked(self._at(path), what)

    def sizes(self, folder: str) -> dict[str, int]:
        """See ``Files``."""
        return {each.name: each.stat().st_size for each in self._parquet(folder)}

    def names(self, folder: str) -> list[str]:
        """See ``Files``."""
        at = self._at(folder)
        return sorted(each.name for each in at.iterdir()) if at.is_dir() else []

    def settle(self, paths: Sequence[str]) -> None:
        """See ``Files``."""
        above: set[Path] = set()
        for each in map(self._at, paths):
            _sync(each)
            # New parent folders must survive a power cut, too.
            above |= {folder for folder in each.parents if folder.is_relative_to(self._root)}
        for folder in sorted(above, reverse=True):
            _sync(folder)

    def remove(self, folder: str) -> None:
        """See ``Files``."""
        shutil.rmtree(self._at(folder), onerror=_unless_gone)

    def _at(self, path: str) -> Path:
        return self._root.joinpath(*PurePosixPath(path).parts)

    def _parquet(self, folder: str) -> list[Path]:
        return sorted(each for each in self._at(folder).glob("*.parquet") if each.name[0] not in "._")


def _unless_gone(call: object, path: str, raised: tuple[type[BaseException], BaseException, object]) -> None:
    """Ignore a file that another process has removed."""
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
# A job replaces a folder of Parquet only if it holds nothing else.

#: The names that Spark writes into the folder of a table; those with a dot and `.crc` are checksums.
_WRITTEN: Final = re.compile(r"\.?part-[^/]*\.parquet(\.crc)?|\.?_SUCCESS(\.crc)?|_temporary")


def check_replaceable(files: Files, folders: Iterable[str]) -> None:
    """Check that folders hold only what Spark wrote, since Spark replaces a folder whole.

    Raises:
      CommandFailed: one of ``folders`` holds other files; nothing was written.
    """
    for folder in folders:
        others = [name for name in files.names(folder) if not _WRITTEN.fullmatch(name)]
        if others:
            says = (
                f"{files.url(folder)} would be replaced, but it holds files that do not belong to a table, such as "
                f"{others[0]!r}"
            )
            raise CommandFailed(says, hint="name another folder", code=Exit.USAGE)
