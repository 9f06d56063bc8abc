"""The manifest of an entry: which messages its files hold, and how to tell whether they still do.

``_manifest.json`` is written last, whole or not at all: a folder without one is no part of the archive. Its digest is
the exclusive or of a 64-bit hash of each row (id, payload, routing key, headers), so it depends on no order, and that
of two entries together is theirs combined. It finds damage; it does not resist an adversary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from plainsong.cli.verb import CommandFailed, Exit

NAME = "_manifest.json"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Stats:
    """What rows amount to."""

    count: int
    payload_bytes: int
    digest: int
    """64 bits, without a sign."""
    first: bytes | None = None
    last: bytes | None = None
    """The smallest and the largest id; None when there is no row."""

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
    """It holds all messages with ``start <= id < end`` that could be read when it was written."""
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
    """Where it stands, from the root; not part of the file."""

    @property
    def rank(self) -> tuple[int, int, int, str, int, str]:
        """Of two entries that hold the same ids, the one of the lower rank answers."""
        return (self.kind == "batch", -self.revision, self.written_ms, self.source, self.batch or 0, self.folder)

    @property
    def name(self) -> str:
        """For people."""
        what = f"batch {self.batch} of {self.source[:8]}" if self.kind == "batch" else f"day {self.day}"
        return f"{self.namespace}:{self.topic} {what}"

    def as_json(self) -> bytes:
        """The file."""
        ids = (self.stats.first, self.stats.last)
        first, last = (None if each is None else each.hex() for each in ids)
        times = (None if each is None else int.from_bytes(each[:8], "big") for each in ids)
        told: dict[str, Any] = {
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
        return (json.dumps(told, indent=1) + "\n").encode()


def parse_manifest(text: bytes, folder: str) -> Manifest:
    """Read one. Raises CommandFailed naming the folder: it is none, or of a newer version."""
    try:
        told = json.loads(text)
        if told["version"] != VERSION:
            raise _bad(folder, f"it is of version {told['version']}, this program reads {VERSION}")
        is_batch = told["kind"] == "batch"
        if told["count"] and not told["files"]:
            raise _bad(folder, f"it has {told['count']} rows in no files")
        return Manifest(
            kind="batch" if is_batch else "day",
            namespace=told["namespace"],
            topic=told["topic"],
            generation=int(told["generation"]),
            start=bytes.fromhex(told["start"]),
            end=bytes.fromhex(told["end"]),
            stats=Stats(
                int(told["count"]),
                int(told["payloadBytes"]),
                int(told["digest"], 16),
                None if told["firstId"] is None else bytes.fromhex(told["firstId"]),
                None if told["lastId"] is None else bytes.fromhex(told["lastId"]),
            ),
            files=tuple((each["name"], int(each["bytes"])) for each in told["files"]),
            written_ms=int(told["writtenMs"]),
            source=told["archive" if is_batch else "entry"],
            batch=int(told["batch"]) if is_batch else None,
            day=None if is_batch else told["day"],
            revision=0 if is_batch else int(told["revision"]),
            folder=folder,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise _bad(folder, f"{type(error).__name__}: {error}") from error


def _bad(folder: str, why: str) -> CommandFailed:
    return CommandFailed(f"{folder}/{NAME} cannot be read: {why}", code=Exit.STORE)
