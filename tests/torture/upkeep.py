"""The store's upkeep, for power cuts: ``python -m tests.torture.upkeep COURSE DIRECTORY``, on a recorded disk.

A course marks its progress with files in the directory, which appear in the disk's log.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import trio

from plainsong.protocol.effects import Put
from plainsong.protocol.ids import pack_position
from plainsong.protocol.keys import generation_prefix, stop_after
from plainsong.protocol.names import TopicName
from storage.config import StorageConfig
from storage.leveldb import LevelDBOptions, LevelDBStore, former
from storage.leveldb.engine import packs
from storage.leveldb.volume_list import Listed, read_list, write_list
from tests.storage.contract import MESSAGE, NAME
from tests.storage.tiny_volumes import settled

KEPT = Path(__file__).parents[1] / "kept" / "0.1" / "data"
#: Volumes with a few rows.
OPTIONS = LevelDBOptions(StorageConfig(write_buffer_bytes=1 << 16, volume_bytes=4_000), max_open_volumes=3)
GOES = generation_prefix(NAME, 1)
STAYS = generation_prefix(TopicName("ns", "stays"), 1)
#: Marks: all rows are written; those of one topic are dropped; tidying has ended.
WRITTEN, DROPPED, TIDIED = "written.mark", "dropped.mark", "tidied.mark"
ROWS = 120
#: Rows of the volume that represents the database of version 0.1.
LARGE_ROWS = 3_000


def row(prefix: bytes, number: int) -> tuple[bytes, bytes]:
    return prefix + pack_position(number, 0), b"%d of " % number + prefix + b"v" * 60


def rows(prefix: bytes, count: int, step: int = 1) -> list[tuple[bytes, bytes]]:
    """Return the first rows of a topic."""
    return [row(prefix, number) for number in range(0, count, step)]


def mark(directory: Path, name: str) -> None:
    """Leave a mark in the disk's log."""
    (directory / name).touch()


async def _write(store: LevelDBStore, prefix: bytes, numbers: range) -> None:
    claim = await store.claim(NAME)
    found = [row(prefix, number) for number in numbers]
    suffixes = [key[len(prefix) :] for key, _ in found]
    await store.write([Put(MESSAGE, prefix, suffixes, [value for _, value in found])], claim=claim)


async def rewriting(directory: Path) -> None:
    """Remove most rows of several volumes, so that the rest is rewritten into fewer volumes."""
    async with await LevelDBStore.open(directory, OPTIONS) as store:
        for number in range(0, ROWS, 4):
            await _write(store, GOES, range(number, number + 4))
            await _write(store, STAYS, range(number, number + 1))
        await settled(store)
        mark(directory, WRITTEN)
        await store.drop(MESSAGE, [(GOES, stop_after(GOES))])
        mark(directory, DROPPED)
        await store.tidy()
        mark(directory, TIDIED)


async def sweeping(directory: Path) -> None:
    """Remove the dead rows of version 0.1's volume in place, piece by piece."""
    former._PIECE_ROWS = 100
    packs.MIN_ROWS = LARGE_ROWS  # that version has no packs
    volumes = directory / "volumes"
    async with await LevelDBStore.open(directory, LevelDBOptions()) as store:
        for number in range(0, LARGE_ROWS, 100):
            await _write(store, GOES, range(number, number + 100))
        await _write(store, STAYS, range(ROWS))
        await store.begin_files()
    first, *others = read_list(volumes) or []
    write_list(volumes, [Listed(first.number, first.folder, large=True), *others])
    (volumes / f"{first.folder}.index").unlink()
    async with await LevelDBStore.open(directory, LevelDBOptions()) as store:
        mark(directory, WRITTEN)
        await store.drop(MESSAGE, [(GOES, stop_after(GOES))])
        mark(directory, DROPPED)
        await store.tidy()
        mark(directory, TIDIED)


async def taking_over(directory: Path) -> None:
    """Upgrade a directory of version 0.1 to the current version."""
    _copy_kept(directory)
    mark(directory, WRITTEN)
    async with await LevelDBStore.open(directory):
        mark(directory, TIDIED)


def _copy_kept(directory: Path) -> None:
    """Make a durable copy of the directory of version 0.1."""
    directory.mkdir(exist_ok=True)
    for path in sorted(KEPT.rglob("*")):
        copy = directory / path.relative_to(KEPT)
        if path.is_dir():
            copy.mkdir(exist_ok=True)
        else:
            copy.write_bytes(path.read_bytes())
    for path in [*directory.rglob("*"), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


COURSES = {each.__name__: each for each in (rewriting, sweeping, taking_over)}

if __name__ == "__main__":
    trio.run(COURSES[sys.argv[1]], Path(sys.argv[2]))
