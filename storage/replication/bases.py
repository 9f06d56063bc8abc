"""Bases: complete copies of a store, next to the log that continues them.

    FORMAT                                  {"format":1,"store":…}: the store of the log
    bases/<epoch>/<commit>-<random>/<number>    a part: rows, encoded as a segment with one commit
    bases/<epoch>/<commit>-<random>/manifest    written last; without it the parts are void

A base is read while the store is written. It has everything up to ``commit``, and may have more, up to ``until``. The log
from ``commit`` on, applied to it, gives the exact state at ``until`` and at every later commit, because a change in the
log is a row or its removal, never a difference.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plainsong.protocol.effects import Put
from storage.replication.protocol import Place
from storage.replication.segment import (
    ASYNC,
    NOTHING_BEFORE,
    Commit,
    DamagedLog,
    Segment,
    decode_segment,
    digest,
    encode_segment,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from plainsong.protocol.effects import Table
    from storage.base import Row

FORMAT_NAME = "FORMAT"
BASES = "bases"
MANIFEST = "manifest"
#: Bytes of rows in a part.
PART_BYTES = 4 << 20


def epoch_folder(epoch: int) -> str:
    """Return the prefix of the bases of an epoch."""
    return f"{BASES}/{epoch:020}"


def encode_format(store: str) -> bytes:
    """Encode the object that names the store of a log."""
    return json.dumps({"format": 1, "store": store}, sort_keys=True, separators=(",", ":")).encode()


def decode_format(data: bytes) -> str:
    """Decode the store. Raises DamagedLog: it is not a log of this version."""
    try:
        found = json.loads(data)
        if found["format"] != 1:
            raise DamagedLog(f"the log has format {found['format']}; this version reads 1")
        return str(found["store"])
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedLog("FORMAT in the object store is not that of a commit log") from error


@dataclass(frozen=True, slots=True)
class Base:
    """A manifest."""

    folder: str
    """The prefix of its objects."""
    place: Place
    """Where the log continues the base; ``place.commit`` is a commit number."""
    until: int
    """The base is consistent once the log has been applied up to this commit."""
    until_ms: int
    """The time at which ``until`` had been made."""
    parts: int
    rows: int
    size: int
    """Bytes of its parts."""
    last_digest: bytes
    """SHA-256 of the last part, which names the one before it, and so on."""

    @property
    def commit(self) -> int:
        """The commit up to which the base is complete; it may also have later changes."""
        assert self.place.commit is not None  # a base begins at a commit
        return self.place.commit

    def encode(self) -> bytes:
        """Encode the manifest."""
        place = self.place
        shown = {
            "epoch": place.epoch,
            "number": place.number,
            "before": place.before.hex(),
            "commit": place.commit,
            "until": self.until,
            "untilMs": self.until_ms,
            "parts": self.parts,
            "rows": self.rows,
            "bytes": self.size,
            "last": self.last_digest.hex(),
        }
        return json.dumps(shown, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, folder: str, data: bytes) -> Base:
        """Decode the manifest in a folder. Raises DamagedLog."""
        try:
            found = json.loads(data)
            place = Place(found["epoch"], found["number"], bytes.fromhex(found["before"]), int(found["commit"]))
            until, until_ms, parts, rows, size = (
                int(found[name]) for name in ("until", "untilMs", "parts", "rows", "bytes")
            )
            return cls(folder, place, until, until_ms, parts, rows, size, bytes.fromhex(found["last"]))
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedLog("the manifest of a base cannot be read") from error


class Parts:
    """Makes the parts of one base, in order."""

    def __init__(self, place: Place, run: bytes, time_ms: int, random: bytes) -> None:
        """Begin.

        Args:
          random: distinguishes attempts at the same place.
        """
        assert place.commit is not None  # a base begins at a commit
        self._place = place
        self._run = run
        self._time_ms = time_ms
        self._folder = f"{epoch_folder(place.epoch)}/{place.commit:020}-{random.hex()}"
        self._before = NOTHING_BEFORE
        self._count = self._rows = self._bytes = 0

    def part(self, table: Table, rows: Sequence[Row]) -> tuple[str, bytes]:
        """Return the next part's name and data. For a thread, one at a time."""
        self._count += 1
        commit = Commit(self._time_ms, tuple(_puts(table, rows)))
        at = self._place
        data = encode_segment(
            Segment(at.epoch, self._count, self._run, ASYNC, 1, self._before, (commit,), self._time_ms, self._time_ms)
        )
        self._before = digest(data)
        self._rows += len(rows)
        self._bytes += len(data)
        return part_name(self._folder, self._count), data

    def manifest(self, until: int, until_ms: int) -> Base:
        """Return the manifest, after the last part."""
        return Base(self._folder, self._place, until, until_ms, self._count, self._rows, self._bytes, self._before)


def part_name(folder: str, number: int) -> str:
    """Return the name of a part."""
    return f"{folder}/{number:020}"


class PartReader:
    """Checks and decodes the parts of a base, in order."""

    def __init__(self, base: Base) -> None:
        self._base = base
        self._before = NOTHING_BEFORE
        self._count = 0

    def read(self, data: bytes) -> Commit:
        """Return the rows of the next part. Raises DamagedLog."""
        self._count += 1
        segment = decode_segment(data)
        if (segment.epoch, segment.number, segment.before) != (self._base.place.epoch, self._count, self._before):
            raise DamagedLog(f"part {self._count} of the base at commit {self._base.commit} does not belong to it")
        self._before = digest(data)
        if self._count == self._base.parts and self._before != self._base.last_digest:
            raise DamagedLog(f"the last part of the base at commit {self._base.commit} does not belong to it")
        return segment.commits[0]


def _puts(table: Table, rows: Sequence[Row]) -> Iterator[Put]:
    """Yield rows in runs of keys of one length."""
    at = 0
    while at < len(rows):
        end, size = at + 1, len(rows[at][0])
        while end < len(rows) and len(rows[end][0]) == size:
            end += 1
        some = rows[at:end]
        yield Put(table, b"", [key for key, _ in some], [value for _, value in some])
        at = end
