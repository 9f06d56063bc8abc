"""Small real file systems that can be filled or made read-only, where mounting is permitted."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from plainsong.protocol.effects import Put, Table
from plainsong.protocol.names import TopicName
from storage.base import Store
from storage.leveldb.engine.torn_end import SECTOR_BYTES
from tests.patience import PATIENCE_S

NAME = TopicName("ns", "topic")


@contextmanager
def small_disk(mount_point: Path, size_mib: int):
    """Mount a tmpfs of ``size_mib`` at ``mount_point``; skip the test with a message where that is not permitted."""
    mount_point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(mount_point)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"NOT TESTED: a full or read-only disk, since mounting is not permitted: {done.stderr.strip()}")
    try:
        yield mount_point
    finally:
        subprocess.run(["umount", "-l", str(mount_point)], check=True)


def make_read_only(mount_point: Path) -> None:
    """Remount a disk of ``small_disk`` read-only."""
    subprocess.run(["mount", "-o", "remount,ro", str(mount_point)], check=True)


def fill(directory: Path) -> Path:
    """Write, or extend, a file until the disk is full to the last byte; removing it frees the space."""
    ballast = directory / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(b"x" * size) == size:
                    pass
            except OSError:
                continue
    return ballast


def snapshot(directory: Path) -> dict[str, bytes]:
    """Return every file below a directory with its bytes."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def newest_log(database: Path) -> Path:
    """Return the log that a database writes, or wrote last."""
    return max(database.glob("*.log"), key=lambda log: int(log.stem))


def written(log: Path) -> int:
    """Return the length of a log's commits: the file is longer, and reads as zeros after its last commit."""
    return len(log.read_bytes().rstrip(b"\0"))


def partly_stored(before: bytes, after: bytes, lost: Callable[[int], bool]) -> bytes:
    """Return a log as after a power cut during a commit: lost sectors have their previous content."""
    data = bytearray(after)
    for sector in range(len(after) // SECTOR_BYTES + 1):
        first, end = sector * SECTOR_BYTES, min((sector + 1) * SECTOR_BYTES, len(after))
        if lost(sector):
            data[first:end] = before[first:end].ljust(end - first, b"\0")
    return bytes(data)


async def write_commits(store: Store, count: int, *, rows: int = 10, value: bytes = bytes(100), first: int = 0) -> None:
    """Write commits ``first`` to ``first + count``: each puts ``rows`` rows with keys that start with its number."""
    claim = await store.claim(NAME)
    suffixes = [i.to_bytes(4, "big") for i in range(rows)]
    for number in range(first, first + count):
        await store.write([Put(Table.MESSAGE, number.to_bytes(4, "big"), suffixes, [value] * rows)], claim=claim)


def copied_at_once(source: Path, copy: Path) -> Path:
    """Copy a directory at a moment without changes; LevelDB merges tables at any time."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        before = _files(source)
        try:
            shutil.copytree(source, copy)
        except (shutil.Error, OSError):
            before = {}
        if before and _files(source) == before:
            return copy
        shutil.rmtree(copy, ignore_errors=True)
    raise AssertionError(f"{source} kept changing for {PATIENCE_S:.0f} s")


def _files(directory: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):
            about = path.stat()
            found[str(path)] = (about.st_size, about.st_mtime_ns)
    return found
