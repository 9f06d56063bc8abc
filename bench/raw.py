"""The baseline of storage: the same rows through plyvel alone, in its own process.

One thread, rows built beforehand; the measured time contains only LevelDB calls.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any

import plyvel

from bench.bodies import BATCH_ROWS, payloads, topic
from plainsong.protocol.effects import Table
from plainsong.protocol.ids import POSITION_BYTES, consecutive_ids, pack_position
from plainsong.protocol.keys import generation_prefix
from plainsong.protocol.rows import plain_head
from storage.leveldb import LevelDBOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection
    from pathlib import Path

#: The topic whose rows are written and read.
TOPIC = "t"


def open_raw(directory: Path) -> Any:
    """Open a LevelDB with the options of a volume."""
    shape = LevelDBOptions().volume_shape()
    return plyvel.DB(
        str(directory),
        create_if_missing=True,
        paranoid_checks=shape.paranoid_checks,
        write_buffer_size=shape.write_buffer_bytes,
        max_open_files=shape.max_open_files,
        lru_cache_size=shape.block_cache_bytes,
        block_size=shape.block_bytes,
        max_file_size=shape.max_file_bytes,
        bloom_filter_bits=shape.bloom_bits,
        compression="snappy",
    )


def row_prefix() -> bytes:
    """Return the key prefix of the topic's rows in the database."""
    return bytes([Table.MESSAGE]) + generation_prefix(topic(TOPIC), 1)


def seed_raw(directory: Path, messages: int, size: int, ids: Sequence[bytes]) -> None:
    """Write a row for each message of a topic written by ``bench.seed``, which returned ``ids``."""
    prefix = row_prefix()
    db = open_raw(directory)
    for number, first in enumerate(ids):
        texts = payloads(BATCH_ROWS, size)[: messages - number * BATCH_ROWS]
        with db.write_batch() as batch:
            for message_id, text in zip(consecutive_ids(first, len(texts)), texts, strict=True):
                batch.put(prefix + message_id[:POSITION_BYTES], plain_head(size) + text)
    db.close()


class RawStore:
    """A plyvel database in its own process; each call measures in that process and returns the rate."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def write(self, messages: int, size: int, requests: int, seconds: float) -> float:
        """Return rows/s of synced batches, each with the rows of ``requests`` requests of ``messages`` rows."""
        return self._call("write", messages, size, requests, seconds)

    def scan(self, start: bytes, stop: bytes, seconds: float) -> float:
        """Return rows/s of repeated scans of ``[start, stop)``, with the read options of the daemon's scans."""
        return self._call("scan", start, stop, seconds)

    def _call(self, *call: object) -> float:
        self._pipe.send(call)
        rate: float = self._pipe.recv()
        return rate


@contextmanager
def raw_store(directory: Path) -> Iterator[RawStore]:
    """Run a process with the LevelDB in ``directory`` open, and stop it afterwards."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs, directory), daemon=True)
    process.start()
    theirs.close()  # so that recv() fails if the process dies
    try:
        yield RawStore(ours)
    finally:
        ours.close()
        process.join()


def _serve(pipe: Connection, directory: Path) -> None:
    db = open_raw(directory)
    written = _Written(db)
    with suppress(EOFError):  # the other end closes after the last measurement
        while True:
            name, *arguments = pipe.recv()
            pipe.send(written.measure(*arguments) if name == "write" else _scan(db, *arguments))
    db.close()


class _Written:
    """Writes rows under new keys."""

    def __init__(self, db: Any) -> None:
        self._db = db
        self._ts_ms = 1_700_000_000_000

    def measure(self, messages: int, size: int, requests: int, seconds: float) -> float:
        prefix = row_prefix()
        values = [plain_head(size) + payload for payload in payloads(messages, size)] * requests
        rows, busy = 0, 0.0
        while busy < seconds:
            self._ts_ms += 1
            keys = [prefix + pack_position(self._ts_ms, sequence) for sequence in range(len(values))]
            begun = perf_counter()
            with self._db.write_batch(transaction=True, sync=True) as batch:
                put = batch.put
                for key, value in zip(keys, values, strict=True):
                    put(key, value)
            busy += perf_counter() - begun
            rows += len(values)
        return rows / busy


def _scan(db: Any, start: bytes, stop: bytes, seconds: float) -> float:
    with db.iterator(start=start, stop=stop, verify_checksums=True, fill_cache=False) as iterator:
        rows = sum(1 for _ in iterator)
    scans = 0
    begun = perf_counter()
    while (busy := perf_counter() - begun) < seconds or not scans:
        with db.iterator(start=start, stop=stop, verify_checksums=True, fill_cache=False) as iterator:
            deque(iterator, maxlen=0)
        scans += 1
    return rows * scans / busy
