"""A pointer of a topic that is undecided, or under which messages are staged: its state and its row.

The row is written in the first commit with rows under the pointer, and whenever it changes. A topic is loaded from
these rows, so that a transaction's messages need not be found by a scan over all messages. Visibility does not depend
on them: the sign in the message row and the reader's snapshot determine it.

    pointer row   s first used  u last used (ms)  m messages  b bytes  published
                  r runs: first position, last position (10 bytes each), messages of the topic before it (8)
                  c messages, bytes  stored and not published  f first  l last payload position
                  g segment → index, messages, bytes   p first and last position of the publish of the stored messages
                  h digest of the segments that publish listed
                  i producer → ranges of sequence ids published
                  x rolled back  o stored messages are being removed
                  d stored by: list of producer, segment or "", epoch, highest sequence id
                  n the producer that staged: the pointer is below 0, and belongs to no transaction
                  k link of the stored messages without a segment; a segment's is its fourth number: in chained topics
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import msgpack

from plainsong.protocol.ids import POSITION_BYTES, checked_position, ordinal, position_at
from plainsong.protocol.keys import DamagedRow
from plainsong.protocol.records import LINK_BYTES, Packed, checked_number, pack_record, unpack_record
from plainsong.protocol.requests import MAX_SEQUENCE_ID

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from typing import Any

    from plainsong.protocol.rows import Stored

#: Runs kept for one pointer. Beyond that neighbours are joined, and a rollback also reads the rows between them.
MAX_RUNS = 64
DIGEST_BYTES = 8
_RUN = struct.Struct(">10s10sq")
_FIRST_POSITION, _LAST_POSITION = bytes(POSITION_BYTES), b"\xff" * POSITION_BYTES


@dataclass(slots=True)
class Pending:
    """One pointer in one generation of a topic: an undecided transaction's, or that of staged messages."""

    pointer: int
    since_ms: int
    """When it was first used in this topic."""
    used_ms: int
    """When messages were last published or stored under it."""
    runs: list[PointerRun] = field(default_factory=list)
    """Its message rows that are not rolled back; ascending."""
    packed: list[bytes] = field(default_factory=list, repr=False, compare=False)
    """The packed forms of the first ``runs`` that are still valid."""
    ends_at: int = field(default=-1, repr=False, compare=False)
    """``TopicState.appended`` directly after the last of ``runs``; -1 if unknown."""
    messages: int = 0
    """Published under it, stored ones included; ``size``: bytes of their payloads."""
    size: int = 0
    stored: int = 0
    """Stored and not published."""
    stored_bytes: int = 0
    first_stored: bytes | None = None
    last_stored: bytes | None = None
    """The last payload position (10 bytes) used; kept when its row is gone."""
    segments: dict[str, Segment] = field(default_factory=dict)
    link: bytes = b""
    """The link of the stored messages without a segment, in a chained topic; empty if there are none."""
    stored_by: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """Producer and segment ("" for none) → epoch and highest sequence id that it stored; see ``record_store``."""
    packed_by: dict[tuple[str, str], bytes] = field(default_factory=dict, repr=False, compare=False)
    """The packed entries of ``stored_by`` that are still valid."""
    published_ids: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Producer → ranges of sequence ids it published; ascending, beyond ``MAX_RUNS`` the oldest are dropped."""
    published: tuple[bytes, bytes] | None = None
    """The publish of the stored messages: positions of its reference row and of the last row of that request."""
    listed_digest: bytes | None = None
    """Digest of the segments that the publish listed; None if it listed none, and so published all, or if unknown."""
    rolled_back: bool = False
    """True if all of it is rolled back; later publishes under it are refused."""
    orphaned: bool = False
    """Its stored messages will never be published; some may be removed already."""
    decided: bool = False
    """Only its stored messages remain to be removed. Not in the row: after a load the authority has it."""
    damaged: bool = False
    """Its row cannot be read: only a rollback succeeds."""
    staged_by: str | None = None
    """The producer that staged the messages; None if the pointer is a transaction's, or its row is damaged."""

    @classmethod
    def of_damaged(cls, pointer: int, time_ms: int) -> Pending:
        """Return the entry for an unreadable row: the pointer's messages may be anywhere."""
        if pointer < 0:
            return cls(pointer, time_ms, time_ms, damaged=True)  # only staged messages, which have no message rows
        return cls(pointer, time_ms, time_ms, [PointerRun(_FIRST_POSITION, _LAST_POSITION, 0)], damaged=True)

    def add(self, first: bytes, last: bytes, before: int) -> None:
        """Add new message rows ``first`` to ``last``, after all earlier ones."""
        runs = self.runs
        # While no other request interferes, a transaction has a single run, however many requests it makes.
        if runs and (before == self.ends_at or _adjoin(runs[-1].last, first)):
            runs[-1] = PointerRun(runs[-1].first, last, runs[-1].before)
            del self.packed[len(runs) - 1 :]
            return
        if len(runs) >= MAX_RUNS:
            runs[:] = _joined(runs)
            self.packed.clear()
        runs.append(PointerRun(first, last, before))

    def cut(self, first: bytes, last: bytes) -> list[tuple[bytes, bytes]]:
        """Remove rows ``first`` to ``last`` from the runs. Returns the parts of runs removed."""
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
                # ``before`` is too low, since the removed rows are not counted: ``hidden`` may be too high.
                left.append(PointerRun(_neighbour(high, 1), run.last, run.before))
        self.runs = left if len(left) <= MAX_RUNS else _joined(left)
        self.packed.clear()
        self.ends_at = -1
        return gone

    def clear_runs(self) -> None:
        """Drop all runs, as all message rows are rolled back."""
        self.runs.clear()
        self.packed.clear()
        self.ends_at = -1

    def replay_row(self, position: bytes, payload: bytes | None, stored: Stored | None, before: int) -> bool:
        """Add a message row found by a load. Returns True if it was unknown."""
        if self.damaged or (self.runs and position <= self.runs[-1].last):
            return False
        self.add(position, position, before)
        if stored is not None:
            self.published = (position, position)
            self.stored = self.stored_bytes = 0
            self.segments.clear()
            self.link = b""
            self.messages += stored.messages
            self.size += stored.payload_bytes
        else:
            self.messages += 1
            self.size += len(payload or b"")
        return True

    def record_store(self, producer: str, segment: str, epoch: int, highest: int) -> None:
        """Record that a producer stored ids up to ``highest`` under a segment."""
        self.stored_by[producer, segment] = (epoch, highest)
        self.packed_by.pop((producer, segment), None)

    def record_ids(self, producer: str, low: int, high: int) -> None:
        """Record that a producer published ids ``low`` to ``high``, above all its earlier ones."""
        ranges = self.published_ids.setdefault(producer, [])
        if ranges and ranges[-1][1] + 1 == low:
            low = ranges.pop()[0]
        ranges.append((low, high))
        del ranges[:-MAX_RUNS]

    def has_ids(self, producer: str, low: int, high: int) -> bool:
        """Return True if the producer is known to have published all of ``low`` to ``high`` under the pointer."""
        return any(first <= low and high <= last for first, last in self.published_ids.get(producer, ()))

    def hidden(self, appended: int) -> int:
        """Return the number of messages from the pointer's first row on, given the total ``appended`` of the topic."""
        return max(0, appended - self.runs[0].before) if self.runs else 0

    def encode(self) -> bytes:
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
        if self.link:
            record["k"] = self.link
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
        record = unpack_record(value, "pointer")
        try:
            return _decoded(pointer, record)
        except (AttributeError, KeyError, TypeError, ValueError, struct.error) as error:
            raise DamagedRow(f"a pointer row has a missing or invalid field: {error!r}") from error


class PointerRun(NamedTuple):
    """Message rows ``first`` to ``last`` (positions of 10 bytes, inclusive); may include rows of others in between."""

    first: bytes
    last: bytes
    before: int
    """Messages published in the topic before the first of them."""


@dataclass(slots=True)
class Segment:
    """A named part of a pointer's stored messages; a publish lists the winning segments."""

    index: int
    messages: int = 0
    size: int = 0
    link: bytes = b""
    """The link of its messages, in a chained topic; empty if there are none, or the topic has no chain."""
    packed: bytes = field(default=b"", init=False, repr=False, compare=False)
    """Name, numbers and link, packed; empty: stale."""

    def grow(self, messages: int, size: int) -> None:
        """Count more messages stored under it."""
        self.messages += messages
        self.size += size
        self.packed = b""

    def pack(self, name: str) -> bytes:
        """Return name, numbers and link, packed; cached, since a store changes one of perhaps thousands of segments."""
        if not self.packed:
            numbers = [self.index, self.messages, self.size]
            self.packed = msgpack.packb(name) + msgpack.packb([*numbers, self.link] if self.link else numbers)
        return self.packed


def digest_of(segments: Collection[str] | None) -> bytes | None:
    """Return eight bytes that are equal for equal sets of segments, in any order; None for no list."""
    if segments is None:
        return None
    names = (name.encode() for name in sorted(set(segments)))
    return blake2b(b"".join(b"%d:%b" % (len(name), name) for name in names), digest_size=DIGEST_BYTES).digest()


def transactional_pointers(pointers: Iterable[int]) -> set[int]:
    """Return the pointers of transactions, without those of staged messages, which are internal to the topic."""
    return {pointer for pointer in pointers if pointer > 0}


# --- decoding --------------------------------------------------------------------------------------


def _decoded(pointer: int, record: dict[str, Any]) -> Pending:
    stored, stored_bytes = record.get("c", (0, 0))
    published = record.get("p")
    if published is not None and len(published) != 2 * POSITION_BYTES:
        raise ValueError("the publish of the stored messages is two positions")
    return Pending(
        pointer,
        since_ms=checked_number(record["s"]),
        used_ms=checked_number(record["u"]),
        runs=list(map(PointerRun._make, _RUN.iter_unpack(record.get("r", b"")))),
        messages=checked_number(record.get("m", 0)),
        size=checked_number(record.get("b", 0)),
        stored=checked_number(stored),
        stored_bytes=checked_number(stored_bytes),
        first_stored=checked_position(record["f"]) if "c" in record else None,
        last_stored=checked_position(record["l"]) if "c" in record else None,
        segments={
            str(name): Segment(checked_number(index), checked_number(messages), checked_number(size), *map(_link, link))
            for name, (index, messages, size, *link) in record.get("g", {}).items()
        },
        link=_link(record.get("k", b"")),
        stored_by={
            (str(producer), str(segment)): (checked_number(epoch), checked_number(highest, 0, MAX_SEQUENCE_ID))
            for producer, segment, epoch, highest in record.get("d", ())
        },
        published_ids={
            str(producer): [
                (checked_number(low, 0, MAX_SEQUENCE_ID), checked_number(high, 0, MAX_SEQUENCE_ID))
                for low, high in ranges
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


def _link(value: object) -> bytes:
    if not isinstance(value, bytes) or len(value) not in (0, LINK_BYTES):
        raise ValueError(f"{value!r} is no link")
    return value


# --- runs ------------------------------------------------------------------------------------------


def _adjoin(last: bytes, first: bytes) -> bool:
    """Return True if the two are neighbours within one millisecond."""
    return last[:8] == first[:8] and int.from_bytes(last[8:], "big") + 1 == int.from_bytes(first[8:], "big")


def _neighbour(position: bytes, by: int) -> bytes:
    return position_at(ordinal(position) + by)


def _joined(runs: list[PointerRun]) -> list[PointerRun]:
    """Join pairs of neighbours, which halves the number of runs."""
    return [
        PointerRun(one.first, other.last, one.before)
        for one, other in zip_longest(runs[::2], runs[1::2], fillvalue=runs[-1])
    ]
