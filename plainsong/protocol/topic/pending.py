"""What a topic knows about one pointer that is undecided or unpublished, its segments, and the row it is kept in.

Segments: the parts in which what is kept under a pointer was stored, and of which a publish lists the winners.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import msgpack

from plainsong.protocol.keys import DamagedRow
from plainsong.protocol.records import Packed, checked_number, pack_record, unpack_record

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from typing import Any

    from plainsong.protocol.rows import Stored

#: Runs kept of one pointer; beyond, neighbours are joined, and a rollback reads what stands between them too.
MAX_RUNS = 64
POSITION_BYTES = 10
DIGEST_BYTES = 8
_RUN = struct.Struct(">10s10sq")
_FIRST_POSITION, _LAST_POSITION = bytes(POSITION_BYTES), b"\xff" * POSITION_BYTES


@dataclass(slots=True)
class Pending:
    """One undecided write pointer in one generation of a topic."""

    pointer: int
    since_ms: int
    """When it was first used here."""
    used_ms: int
    """When something was last published or stored under it."""
    runs: list[PointerRun] = field(default_factory=list)
    """Where its message rows are that have not been rolled back; ascending."""
    packed: list[bytes] = field(default_factory=list, repr=False, compare=False)
    """The first of ``runs`` as the row has them: all that has been packed before and is still so."""
    messages: int = 0
    """Published under it, stored ones included; ``size`` is the bytes of their payloads."""
    size: int = 0
    stored: int = 0
    """Stored and not published."""
    stored_bytes: int = 0
    first_stored: bytes | None = None
    last_stored: bytes | None = None
    """The last payload position (10 bytes) given out; stays when its row is gone."""
    segments: dict[str, Segment] = field(default_factory=dict)
    stored_by: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """Producer and segment ("": none) → epoch and highest sequence id of what it stored; see ``record_store``."""
    packed_by: dict[tuple[str, str], bytes] = field(default_factory=dict, repr=False, compare=False)
    """Of ``stored_by``, what has been packed and is still so."""
    published_ids: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Producer → sequence ids it published, as ranges; ascending, the oldest go first beyond ``MAX_RUNS``."""
    published: tuple[bytes, bytes] | None = None
    """Where the publish of what was stored stands: its reference row, and the last row of that request."""
    listed_digest: bytes | None = None
    """Which segments that publish listed, as ``digest_of`` says it; None: none, so that all were meant, or not known."""
    rolled_back: bool = False
    """All of it: whatever comes later is refused."""
    orphaned: bool = False
    """Its stored messages may be gone already: they are never published."""
    decided: bool = False
    """Only its stored messages are left to remove. Not kept: the authority says it again."""
    damaged: bool = False
    """Its row cannot be read: it can be rolled back, and nothing else."""
    staged_by: str | None = None
    """The producer whose staged messages these are; None: it is a transaction's write pointer, or damaged."""

    @classmethod
    def of_damaged(cls, pointer: int, time_ms: int) -> Pending:
        """What is left to know when the row cannot be read: its messages may be anywhere."""
        if pointer < 0:
            return cls(pointer, time_ms, time_ms, damaged=True)  # staged, and published by none: there are none
        return cls(pointer, time_ms, time_ms, [PointerRun(_FIRST_POSITION, _LAST_POSITION, 0)], damaged=True)

    def add(self, first: bytes, last: bytes, before: int) -> None:
        """Message rows ``first`` to ``last`` are new, behind all it had."""
        runs = self.runs
        if runs and _adjoin(runs[-1].last, first):
            runs[-1] = PointerRun(runs[-1].first, last, runs[-1].before)
            del self.packed[len(runs) - 1 :]
            return
        if len(runs) >= MAX_RUNS:
            runs[:] = _joined(runs)
            self.packed.clear()
        runs.append(PointerRun(first, last, before))

    def cut(self, first: bytes, last: bytes) -> list[tuple[bytes, bytes]]:
        """Take rows ``first`` to ``last`` out of the runs; returns which parts of runs these were."""
        gone: list[tuple[bytes, bytes]] = []
        left: list[PointerRun] = []
        for run in self.runs:
            low, high = max(first, run.first), min(last, run.last)
            if low > high:
                left.append(run)
                continue
            gone.append((low, high))
            if run.first < low:
                left.append(PointerRun(run.first, _neighbour(low, -1), run.before))
            if high < run.last:
                # Counted from the run's first row, hence a little too many: nobody counts what stands between.
                left.append(PointerRun(_neighbour(high, 1), run.last, run.before))
        self.runs = left if len(left) <= MAX_RUNS else _joined(left)
        self.packed.clear()
        return gone

    def clear_runs(self) -> None:
        """None of its message rows is left that has not been rolled back."""
        self.runs.clear()
        self.packed.clear()

    def replay_row(self, position: bytes, payload: bytes | None, stored: Stored | None, before: int) -> bool:
        """Take in a message row found on disk; whether it was not known before."""
        if self.damaged or (self.runs and position <= self.runs[-1].last):
            return False
        self.add(position, position, before)
        if stored is not None:
            self.published = (position, position)
            self.stored = self.stored_bytes = 0
            self.segments.clear()
            self.messages += stored.messages
            self.size += stored.payload_bytes
        else:
            self.messages += 1
            self.size += len(payload or b"")
        return True

    def record_store(self, producer: str, segment: str, epoch: int, highest: int) -> None:
        """A producer stored ids up to ``highest`` under a segment."""
        self.stored_by[producer, segment] = (epoch, highest)
        self.packed_by.pop((producer, segment), None)

    def record_ids(self, producer: str, low: int, high: int) -> None:
        """A producer published ids ``low`` to ``high``, above all it had."""
        ranges = self.published_ids.setdefault(producer, [])
        if ranges and ranges[-1][1] + 1 == low:
            low = ranges.pop()[0]
        ranges.append((low, high))
        del ranges[:-MAX_RUNS]

    def has_ids(self, producer: str, low: int, high: int) -> bool:
        """Whether all of ``low`` to ``high`` are known to have been published by the producer under the pointer."""
        return any(first <= low and high <= last for first, last in self.published_ids.get(producer, ()))

    def hidden(self, appended: int) -> int:
        """Messages from its first row on, in a topic with ``appended`` messages ever published."""
        return max(0, appended - self.runs[0].before) if self.runs else 0

    def encode(self) -> bytes:
        """The row's value."""
        record: dict[str, object] = {"s": self.since_ms, "u": self.used_ms}
        if self.runs:
            self.packed += [_RUN.pack(*run) for run in self.runs[len(self.packed) :]]
            record["r"] = b"".join(self.packed)
        if self.messages:
            record["m"], record["b"] = self.messages, self.size
        if self.last_stored is not None:
            record["c"] = [self.stored, self.stored_bytes]
            record["f"], record["l"] = self.first_stored, self.last_stored
        if self.segments:
            record["g"] = Packed.map([each.pack(name) for name, each in self.segments.items()])
        if self.published is not None:
            record["p"] = self.published[0] + self.published[1]
        if self.listed_digest is not None:
            record["h"] = self.listed_digest
        if self.stored_by:
            record["d"] = Packed.list(self._packed_stores())
        if self.published_ids:
            record["i"] = self.published_ids
        if self.rolled_back:
            record["x"] = True
        if self.orphaned:
            record["o"] = True
        if self.staged_by is not None:
            record["n"] = self.staged_by
        return pack_record(record)

    def _packed_stores(self) -> list[bytes]:
        if len(self.packed_by) < len(self.stored_by):
            for who, what in self.stored_by.items():
                if who not in self.packed_by:
                    self.packed_by[who] = msgpack.packb([*who, *what])
        return [self.packed_by[who] for who in self.stored_by]

    @classmethod
    def decode(cls, pointer: int, value: bytes) -> Pending:
        """Read the row's value. Raises DamagedRow."""
        record = unpack_record(value, "pointer")
        try:
            return _decoded(pointer, record)
        except (AttributeError, KeyError, TypeError, ValueError, struct.error) as error:
            raise DamagedRow(f"a pointer row has not what it needs: {error!r}") from error


class PointerRun(NamedTuple):
    """Message rows ``first`` to ``last`` (positions of 10 bytes, included); between them may be others' rows."""

    first: bytes
    last: bytes
    before: int
    """Messages published in the topic before the first of them."""


@dataclass(slots=True)
class Segment:
    """What was stored under one segment's name."""

    index: int
    messages: int = 0
    size: int = 0
    packed: bytes = field(default=b"", init=False, repr=False, compare=False)
    """Its name and these numbers, as the row has them; empty: to be packed."""

    def grow(self, messages: int, size: int) -> None:
        """More was stored under it."""
        self.messages += messages
        self.size += size
        self.packed = b""

    def pack(self, name: str) -> bytes:
        """Name and numbers: of thousands of segments one store changes one."""
        if not self.packed:
            self.packed = msgpack.packb(name) + msgpack.packb([self.index, self.messages, self.size])
        return self.packed


def digest_of(segments: Collection[str] | None) -> bytes | None:
    """Whether two publishes listed the same segments, in any order, can be told by these 8 bytes; None: they listed none."""
    if segments is None:
        return None
    names = (name.encode() for name in sorted(set(segments)))
    return blake2b(b"".join(b"%d:%b" % (len(name), name) for name in names), digest_size=DIGEST_BYTES).digest()


def transactional_pointers(pointers: Iterable[int]) -> set[int]:
    """Those that are transactions': nobody but the topic is to hear of what is staged."""
    return {pointer for pointer in pointers if pointer > 0}


# --- decoding --------------------------------------------------------------------------------------


def _decoded(pointer: int, record: dict[str, Any]) -> Pending:
    stored, stored_bytes = record.get("c", (0, 0))
    published = record.get("p")
    if published is not None and len(published) != 2 * POSITION_BYTES:
        raise ValueError("a publish of what was stored is two positions")
    return Pending(
        pointer,
        since_ms=checked_number(record["s"]),
        used_ms=checked_number(record["u"]),
        runs=list(map(PointerRun._make, _RUN.iter_unpack(record.get("r", b"")))),
        messages=checked_number(record.get("m", 0)),
        size=checked_number(record.get("b", 0)),
        stored=checked_number(stored),
        stored_bytes=checked_number(stored_bytes),
        first_stored=_position(record["f"]) if "c" in record else None,
        last_stored=_position(record["l"]) if "c" in record else None,
        segments={
            str(name): Segment(*(checked_number(number) for number in numbers))
            for name, numbers in record.get("g", {}).items()
        },
        stored_by={
            (str(producer), str(segment)): (checked_number(epoch), checked_number(highest, 0, (1 << 63) - 1))
            for producer, segment, epoch, highest in record.get("d", ())
        },
        published_ids={
            str(producer): [
                (checked_number(low, 0, (1 << 63) - 1), checked_number(high, 0, (1 << 63) - 1)) for low, high in ranges
            ]
            for producer, ranges in record.get("i", {}).items()
        },
        published=None if published is None else (published[:POSITION_BYTES], published[POSITION_BYTES:]),
        listed_digest=_digest(record.get("h")),
        rolled_back=record.get("x", False) is True,
        orphaned=record.get("o", False) is True,
        staged_by=str(record["n"]) if pointer < 0 else None,
    )


def _digest(value: object) -> bytes | None:
    if value is not None and (not isinstance(value, bytes) or len(value) != DIGEST_BYTES):
        raise ValueError(f"{value!r} is no digest")
    return value


def _position(value: object) -> bytes:
    if not isinstance(value, bytes) or len(value) != POSITION_BYTES:
        raise ValueError(f"{value!r} is no position")
    return value


# --- runs ------------------------------------------------------------------------------------------


def _adjoin(last: bytes, first: bytes) -> bool:
    """Whether no position of the same millisecond stands between the two."""
    return last[:8] == first[:8] and int.from_bytes(last[8:], "big") + 1 == int.from_bytes(first[8:], "big")


def _neighbour(position: bytes, by: int) -> bytes:
    return (int.from_bytes(position, "big") + by).to_bytes(POSITION_BYTES, "big")


def _joined(runs: list[PointerRun]) -> list[PointerRun]:
    """Half as many: each and its neighbour become one."""
    return [
        PointerRun(one.first, other.last, one.before)
        for one, other in zip_longest(runs[::2], runs[1::2], fillvalue=runs[-1])
    ]
