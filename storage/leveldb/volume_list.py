"""The list of volumes: the folders that belong to the store, in writing order; the last one is being written.

It is replaced as a whole: after a crash it is the old list or the new one. A volume is listed before anything is written
to it, and its files are removed only after it is unlisted, so an unlisted folder contains nothing to keep. Only the keeper's
thread writes the list (``storage.leveldb.listed_volumes``).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from storage.base import StoreDamaged
from storage.directory import DAMAGED_HINT, sync_directory
from storage.leveldb.volume import index_path

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence
    from pathlib import Path

LIST_NAME = "LIST"
#: Files of removed volumes are shortened by this much at a time, with a pause after each. With steps of a mebibyte, a
#: fifth of a millisecond each, dropping volumes raises the p99 of publishes visibly more.
STEP_BYTES = 1 << 18
PAUSE_S = 0.002
#: Total pause while the files of one volume are shortened, however large it is.
MAX_PAUSES_S = 2.0
#: Names of volumes' folders and index files. All other files in the directory are ignored.
_OURS = re.compile(r"(\d{8,}(\.\d+)?)((\.index)(\.tmp)?)?\Z")


class ListUnknown(OSError):
    """The list may have been replaced; after a crash it may be the old one or the new one."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A volume in the list."""

    number: int
    folder: str
    """``00000012``; a rewritten volume has a suffix ``.1``, then ``.2``."""
    large: bool = False
    """True for the database of version 0.1, which may be of any size and has its own layout."""
    packed: bool = False
    """True if rows of messages may be in packs; never in volumes of format 2."""


def read_list(directory: Path) -> list[Listed] | None:
    """Read the list in ``directory``; None if there is none. Raises StoreDamaged."""
    path = directory / LIST_NAME
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        check, _, content = raw.partition(b"\n")
        if int(check, 16) != zlib.crc32(content):
            raise ValueError("its checksum is wrong")
        found = [
            Listed(each["number"], each["folder"], each.get("large", False), each.get("packed", False))
            for each in json.loads(content)
        ]
        if not all(_OURS.match(each.folder) for each in found):
            raise ValueError("a folder's name")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreDamaged(f"{path} cannot be read: {error}", hint=DAMAGED_HINT) from None
    return found


def write_list(directory: Path, volumes: Sequence[Listed]) -> None:
    """Replace the list, durably.

    Raises:
      ListUnknown: the list is the new one or the old one: remove nothing that either names.
      OSError: any other error; the list is unchanged.
    """
    content = json.dumps(
        [
            {
                "number": each.number,
                "folder": each.folder,
                **({"large": True} if each.large else {}),
                **({"packed": True} if each.packed else {}),
            }
            for each in volumes
        ]
    ).encode()
    temporary = directory / (LIST_NAME + ".tmp")
    with temporary.open("wb") as file:
        file.write(b"%08x\n" % zlib.crc32(content) + content)
        file.flush()
        os.fsync(file.fileno())
    try:
        temporary.replace(directory / LIST_NAME)
        sync_directory(directory)
    except OSError as error:
        raise ListUnknown(*error.args) from error


def unlisted(directory: Path, volumes: Sequence[Listed]) -> list[Path]:
    """Return the folders of volumes that are not listed. Raises OSError."""
    listed = {each.folder for each in volumes}
    found = [(entry, _OURS.match(entry.name)) for entry in directory.iterdir()]
    return sorted(
        entry for entry, match in found if match is not None and not match.group(3) and entry.name not in listed
    )


def remove_unlisted(directory: Path, volumes: Sequence[Listed]) -> None:
    """Remove unlisted volumes' folders and indexes. Raises OSError."""
    listed = {each.folder for each in volumes}
    for entry in directory.iterdir():
        match = _OURS.match(entry.name)
        if match is not None and match.group(1) not in listed:
            remove_volume(entry) if match.group(3) is None else entry.unlink(missing_ok=True)


def remove_slowly(path: Path) -> Generator[float, None, None]:
    """Remove a volume in steps. Freeing 32 MiB on ext4 at once keeps a core in the kernel for 2 to 11 ms.

    Yields pauses in seconds, ``MAX_PAUSES_S`` in total at most. If closed early, the rest is removed at once.
    """
    try:
        files = _files_of(path)
        steps = sum(size for _, size in files) // STEP_BYTES
        pause_s = min(PAUSE_S, MAX_PAUSES_S / max(1, steps))
        for file, _ in files:
            with suppress(OSError):
                for _ in _shrunk(file):
                    yield pause_s
    finally:
        remove_volume(path)


def _files_of(path: Path) -> list[tuple[Path, int]]:
    """Return the files in a folder with their sizes; empty if it cannot be read."""
    with suppress(OSError):
        return [(file, file.stat(follow_symlinks=False).st_size) for file in path.iterdir()]
    return []


def _shrunk(file: Path) -> Iterator[None]:
    """Shorten a file step by step. Raises OSError."""
    descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        about = os.fstat(descriptor)
        if about.st_nlink == 1:  # a file with more links also belongs to a copy under examination
            for shorter in range(about.st_size - STEP_BYTES, 0, -STEP_BYTES):
                os.ftruncate(descriptor, shorter)
                yield
    finally:
        os.close(descriptor)


def remove_volume(path: Path) -> None:
    """Remove a volume's folder and index. Errors are ignored: the next start removes the rest."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        index_path(path).unlink(missing_ok=True)
