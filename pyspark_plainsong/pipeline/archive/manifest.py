"""Manifests: the messages in each entry's files, and the rules that select one of several entries for a message."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from plainsong.cli.command import CommandFailed, Exit
from pyspark_plainsong.pipeline.archive.layout import MANIFEST_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

VERSION = 1


@dataclass(frozen=True, slots=True)
class Stats:
    """Count, size, digest and bounds of rows."""

    count: int
    payload_bytes: int
    digest: int
    """64 bits, unsigned."""
    first: bytes | None = None
    last: bytes | None = None
    """The smallest and the largest id; None: there is no row."""

    def __add__(self, other: Stats) -> Stats:
        firsts = [each for each in (self.first, other.first) if each is not None]
        lasts = [each for each in (self.last, other.last) if each is not None]
        return Stats(
            self.count + other.count,
            self.payload_bytes + other.payload_bytes,
            self.digest ^ other.digest,
            min(firsts, default=None),
            max(lasts, default=None),
        )


NOTHING = Stats(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Manifest:
    """An entry of an archive: a batch of one query, or a day."""

    kind: Literal["batch", "day"]
    namespace: str
    topic: str
    generation: int
    start: bytes
    end: bytes
    """The entry holds all messages with ``start <= id < end`` that could be read when it was written."""
    stats: Stats
    files: tuple[tuple[str, int], ...]
    """Names and sizes in bytes, sorted."""
    written_ms: int
    source: str
    """The archive id of a batch; the entry id of a day."""
    batch: int | None = None
    day: str | None = None
    revision: int = 0
    folder: str = ""
    """The entry's folder, from the root; not part of the file."""

    @property
    def rank(self) -> tuple[int, int, int, str, int, str]:
        """The precedence where entries overlap: the entry with the lowest rank is read."""
        return (self.kind == "batch", -self.revision, self.written_ms, self.source, self.batch or 0, self.folder)

    @property
    def name(self) -> str:
        """A name to show."""
        what = f"batch {self.batch} of {self.source[:8]}" if self.kind == "batch" else f"day {self.day}"
        return f"{self.namespace}:{self.topic} {what}"

    def as_json(self) -> bytes:
        """Encode the manifest's file."""
        ids = (self.stats.first, self.stats.last)
        first, last = (None if each is None else each.hex() for each in ids)
        times = (None if each is None else int.from_bytes(each[:8], "big") for each in ids)
        fields: dict[str, Any] = {
            "version": VERSION,
            "kind": self.kind,
            "namespace": self.namespace,
            "topic": self.topic,
            "generation": self.generation,
            "archive" if self.kind == "batch" else "entry": self.source,
            "batch" if self.kind == "batch" else "day": self.batch if self.kind == "batch" else self.day,
            **({"revision": self.revision} if self.kind == "day" else {}),
            "start": self.start.hex(),
            "end": self.end.hex(),
            "count": self.stats.count,
            "payloadBytes": self.stats.payload_bytes,
            "digest": f"{self.stats.digest:016x}",
            "firstId": first,
            "lastId": last,
            **dict(zip(("minTimeMs", "maxTimeMs"), times, strict=True)),
            "files": [{"name": name, "bytes": size} for name, size in self.files],
            "writtenMs": self.written_ms,
        }
        return (json.dumps(fields, indent=1) + "\n").encode()


def parse_manifest(text: bytes, folder: str) -> Manifest:
    """Parse a manifest. Raises CommandFailed, which names the folder: it is invalid, or of a newer version."""
    try:
        fields = json.loads(text)
        if fields["version"] != VERSION:
            raise _bad(folder, f"it is of version {fields['version']}, this program reads {VERSION}")
        is_batch = fields["kind"] == "batch"
        if fields["count"] and not fields["files"]:
            raise _bad(folder, f"it has {fields['count']} rows in no files")
        return Manifest(
            kind="batch" if is_batch else "day",
            namespace=fields["namespace"],
            topic=fields["topic"],
            generation=int(fields["generation"]),
            start=bytes.fromhex(fields["start"]),
            end=bytes.fromhex(fields["end"]),
            stats=Stats(
                int(fields["count"]),
                int(fields["payloadBytes"]),
                int(fields["digest"], 16),
                None if fields["firstId"] is None else bytes.fromhex(fields["firstId"]),
                None if fields["lastId"] is None else bytes.fromhex(fields["lastId"]),
            ),
            files=tuple((each["name"], int(each["bytes"])) for each in fields["files"]),
            written_ms=int(fields["writtenMs"]),
            source=fields["archive" if is_batch else "entry"],
            batch=int(fields["batch"]) if is_batch else None,
            day=None if is_batch else fields["day"],
            revision=0 if is_batch else int(fields["revision"]),
            folder=folder,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise _bad(folder, f"{type(error).__name__}: {error}") from error


def _bad(folder: str, why: str) -> CommandFailed:
    return CommandFailed(f"{folder}/{MANIFEST_NAME} cannot be read: {why}", code=Exit.STORE)


# --- coverage --------------------------------------------------------------------------------------
#
# Every entry of an archive (a batch, or a day made of batches) holds all messages of one range of ids,
# ``start <= id < end``. Where entries overlap, one of them is read and the others are not: a day wins over
# batches, a higher revision over a lower one, and the batch written first over later ones (a later copy of the same
# range may lack messages that expired in between). So no row is read twice, even if an entry was replaced in part or
# two compactions ran at once; and an entry gives up a range only where another one holds it.


class Range(NamedTuple):
    """Ids ``start <= id < end``, 20 bytes each."""

    start: bytes
    end: bytes


class Piece(NamedTuple):
    """The part of an entry that is read: ``start <= id < end``."""

    entry: Manifest
    start: bytes
    end: bytes

    @property
    def is_whole(self) -> bool:
        """True if the piece is the whole entry."""
        return (self.start, self.end) == (self.entry.start, self.entry.end)


def pieces(entries: Iterable[Manifest]) -> list[Piece]:
    """Return the pieces of entries to read, in the order of the ids; no id is in two pieces.

    Args:
      entries: of one generation of one topic.
    """
    taken: list[Range] = []
    found: list[Piece] = []
    for entry in sorted(entries, key=lambda each: each.rank):
        free = minus(Range(entry.start, entry.end), taken)
        found += [Piece(entry, start, end) for start, end in free]
        taken = merged([*taken, *free])
    return sorted(found, key=lambda piece: piece.start)


def covered(entries: Iterable[Manifest]) -> list[Range]:
    """The ranges that entries hold, in order, merged."""
    return merged(Range(entry.start, entry.end) for entry in entries)


def holes(entries: Sequence[Manifest], reached: Range | None = None) -> list[Range]:
    """The ranges that an archive lacks: between its entries, before a batch that was not the first, and before the
    place that its query has reached.

    Args:
      entries: of one generation of one topic.
      reached: the range that is archived by the query's checkpoint.
    """
    held = covered(entries)
    due = [] if reached is None else [reached]
    if held:
        # Before a batch with a number above 0 there must be another one, or a day in its place.
        is_headless = any(each.batch for each in entries if each.start == held[0].start)
        due.append(Range(bytes(20) if is_headless else held[0].start, held[-1].end))
    return [hole for each in merged(due) for hole in minus(each, held)]


def minus(whole: Range, taken: Sequence[Range]) -> list[Range]:
    """``whole`` without the ranges ``taken``, which are in order and do not overlap."""
    left: list[Range] = []
    start = whole.start
    for each in taken:
        if each.end <= start or each.start >= whole.end:
            continue
        if each.start > start:
            left.append(Range(start, each.start))
        start = each.end
    if start < whole.end:
        left.append(Range(start, whole.end))
    return left


def merged(ranges: Iterable[Range]) -> list[Range]:
    """The same ids in ranges that neither overlap nor touch, in order; empty ones are left out."""
    found: list[Range] = []
    for each in sorted(each for each in ranges if each.start < each.end):
        if found and each.start <= found[-1].end:
            found[-1] = Range(found[-1].start, max(found[-1].end, each.end))
        else:
            found.append(each)
    return found
