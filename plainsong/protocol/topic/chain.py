"""Chained topics: entries whose links hash what requests added and the link before.

    link of an entry = SHA-256( link before it  position of the entry  record )
    entry's value      00  length  link:32  record, a msgpack map                          in the payload table

An entry stands under the pointer 0, which no transaction and no staged message has, at the position of the last row
that it covers, in the commit of those rows and behind them. So a row is never durable with the entry of another one
missing in between, and whoever knows one link can tell whether anything before it has changed.

    messages   rows of a request, or of several that a commit has one behind the other, up to a bound: digests of their
               ids, payloads and attributes, and their write pointer
    found      rows without an entry, which a commit left that was cut off
    rollback   a write pointer was turned in the rows of a range
    set aside  the rows of a range were taken out
    restored   the topic came from a backup, where transactions that were open then count as rolled back
    begin, end the property was switched on or off

A row that publishes stored messages has an entry of its own, with a digest of the rows that it shows.

Entries other than those of messages take a position of their own. Messages with a time to live of their own have a
digest for each time at which some expire: cleaning may remove them, and the digest stays.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

import msgpack

from plainsong.protocol.ids import NO_PAYLOAD_PART, POSITION_BYTES, ordinal
from plainsong.protocol.keys import DamagedRow
from plainsong.protocol.page import ITEM_START, length_prefix
from plainsong.protocol.rows import SEGMENT, Stored, attributes_in, decode_row, expires_ms_of, plain_head

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LINK_BYTES = 32
#: The link before the first one.
NO_LINK = bytes(LINK_BYTES)
#: Rows, and bytes of their values, that an entry covers at most, but always one row: a reader that verifies a topic
#: keeps those of one entry in memory.
MAX_ROWS = 4096
MAX_BYTES = 1 << 20

# Kinds of entries, as the record has them; one of messages has none.
MESSAGES, FOUND, ROLLBACK, SET_ASIDE, RESTORED, BEGIN, END = "m", "u", "r", "a", "s", "b", "e"
#: Kinds of entries that cover rows up to their own position.
COVERING = (MESSAGES, FOUND)
_KINDS = (*COVERING, ROLLBACK, SET_ASIDE, RESTORED, BEGIN, END)

COUNT = Struct(">I")
_ONE = COUNT.pack(1)


# --- entries ----------------------------------------------------------------------------------------


class Expiring(NamedTuple):
    """Rows of an entry that expire at the same time, by a time to live of their own."""

    expires_ms: int
    indexes: tuple[int, ...] | None
    """Which rows, counted from the entry's first; None: all of them."""
    digest: bytes


@dataclass(frozen=True, slots=True)
class ChainEntry:
    """An entry of a chain, as it is stored."""

    position: bytes
    """Where it stands; the position of the last row that it covers, if it covers any."""
    link: bytes
    record: bytes
    """What the link is of, beside the link before and the position."""
    number: int
    """Entries are counted from 1."""
    kind: str = MESSAGES
    epoch: int = 0
    """Of the owner that wrote it; 0 where a store has one writer."""
    first: bytes = b""
    """First position that it is about."""
    last: bytes = b""
    pointer: int = 0
    """The write pointer of its rows; 0: none."""
    digest: bytes | None = None
    """Of the rows without a time to live of their own."""
    expiring: tuple[Expiring, ...] = ()
    of: tuple[str, int] | None = None
    """Topic and generation in which the chain began."""

    @classmethod
    def decode(cls, position: bytes, value: bytes) -> ChainEntry:
        """The entry in a row of the payload table. Raises DamagedRow."""
        payload = decode_row(value).payload
        if payload is None or len(payload) <= LINK_BYTES:
            raise DamagedRow(f"the chain's entry at {position.hex()} is too short")
        link, packed = payload[:LINK_BYTES], payload[LINK_BYTES:]
        try:
            record = msgpack.unpackb(packed, strict_map_key=True)
            kind = record.get("k", MESSAGES)
            first, last = record.get("f", position), record.get("l", position)
            of = record.get("t")
            entry = cls(
                position,
                link,
                packed,
                record["n"],
                kind,
                record.get("e", 0),
                first,
                last,
                record.get("p", 0),
                record.get("d"),
                tuple(_expiring(each) for each in record.get("x", ())),
                None if of is None else (str(of[0]), int(of[1])),
            )
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, msgpack.UnpackException) as error:
            raise DamagedRow(f"the chain's entry at {position.hex()} cannot be read: {error!r}") from error
        entry._check()
        return entry

    def _check(self) -> None:
        """Raises DamagedRow."""
        numbers = all(type(each) is int for each in (self.number, self.epoch, self.pointer))
        ends = (self.position, self.first, self.last)
        positions = all(isinstance(each, bytes) and len(each) == POSITION_BYTES for each in ends)
        if (
            self.kind not in _KINDS
            or not numbers
            or not positions
            or not isinstance(self.digest, bytes | None)
            or (self.kind in COVERING and (self.first > self.position or self.rows > MAX_ROWS))
        ):
            raise DamagedRow(f"the chain's entry at {self.position.hex()} is none that this version knows")

    @property
    def rows(self) -> int:
        """How many rows an entry of messages covers."""
        return ordinal(self.position) - ordinal(self.first) + 1

    def follows(self, link: bytes) -> bool:
        """Whether its link is the one of this entry behind ``link``."""
        return self.link == link_of(link, self.position, self.record)


def _expiring(packed: list[object]) -> Expiring:
    expires_ms, indexes, digest = packed
    if type(expires_ms) is not int or not isinstance(digest, bytes) or not isinstance(indexes, list | None):
        raise ValueError("a digest of expiring rows has a time, indexes and bytes")
    if indexes is not None and not all(type(index) is int for index in indexes):
        raise ValueError("an index is a number")
    return Expiring(expires_ms, None if indexes is None else tuple(indexes), digest)


def link_of(before: bytes, position: bytes, record: bytes) -> bytes:
    """The link of an entry behind the link ``before``."""
    return sha256(before + position + record).digest()


def digest_of(items: Sequence[bytes], attributes: Mapping[int, Mapping[str, str]]) -> bytes:
    """The digest of messages: their number, their wire forms, and the attributes of those that have some, by index."""
    digest = sha256(COUNT.pack(len(items)))
    digest.update(b"".join(items))
    if attributes:
        digest.update(msgpack.packb([[index, sorted(each.items())] for index, each in sorted(attributes.items())]))
    return digest.digest()


def item_of(position: bytes, payload: bytes) -> bytes:
    """The wire form of a message in the message table."""
    return b"".join((ITEM_START, position, NO_PAYLOAD_PART, length_prefix(len(payload)), payload))


# --- stored messages ---------------------------------------------------------------------------------
#
# What a publish of stored messages shows was stored by requests before it, and by segments that lose. So each segment
# has a running link, kept with the pointer, and the entry of the publish has a digest of those that won. A message that
# was stored stays until its publish expires, whatever its own time to live, so that the links can be made again.

#: The index of stored messages without a segment.
NO_SEGMENT = -1


def link_rows(link: bytes, positions: Sequence[bytes], values: Sequence[bytes]) -> bytes:
    """The link of a segment behind further payload rows; ``link`` empty: these are the first ones."""
    link = link or NO_LINK
    for position, value in zip(positions, values, strict=True):
        link = sha256(link + position + value).digest()
    return link


def digest_of_stored(position: bytes, stored: Stored, links: Mapping[int, bytes]) -> bytes:
    """The digest of stored messages that were published at ``position``; ``links`` are those of segments that won."""
    segments = None if stored.segments is None else sorted(stored.segments)
    says = [stored.messages, stored.payload_bytes, stored.first, stored.last, stored.staged, segments]
    return sha256(b"stored" + position + msgpack.packb([*says, sorted(links.items())])).digest()


class StoredRow(NamedTuple):
    """A row of the payload table behind the row that publishes it."""

    id: bytes
    """Of the message: the position where it is published, and its payload position."""
    value: bytes

    @property
    def position(self) -> bytes:
        """Where it is published."""
        return self.id[:POSITION_BYTES]


class StoredRows:
    """Computes the digest of stored messages from the row that publishes them, and from their payload rows in order."""

    def __init__(self, position: bytes, stored: Stored) -> None:
        self._position = position
        self._stored = stored
        self._links: dict[int, bytes] = {}
        self.messages = 0
        """Those that are shown, so far."""
        self.unreadable: bytes | None = None
        """The payload position of the first row that cannot be read; None: all can be."""

    def take(self, position: bytes, value: bytes) -> None:
        """Take the row at the next payload position; never raises."""
        segment: object = NO_SEGMENT
        try:
            segment = decode_row(value).extras.get(SEGMENT, NO_SEGMENT)
        except DamagedRow:
            self.unreadable = self.unreadable or position
        winners = self._stored.segments
        if type(segment) is int and (winners is None or segment in winners):
            self._links[segment] = link_rows(self._links.get(segment, NO_LINK), (position,), (value,))
            self.messages += 1

    def digest(self) -> bytes:
        """The digest of the rows that were taken."""
        return digest_of_stored(self._position, self._stored, self._links)


# --- rows that entries cover -------------------------------------------------------------------------


class ChainedRow(NamedTuple):
    """A row of the message table, as a chain covers it."""

    position: bytes
    item: bytes | None
    """Its message in wire form; None: the row publishes stored messages, or cannot be read."""
    pointer: int = 0
    """Its write pointer, below 0 if it is rolled back; 0: none."""
    attributes: Mapping[str, str] = {}
    ttl_s: int | None = None
    """Its own time to live; None: it has none."""
    stored: Stored | None = None
    """Which stored messages it publishes; None: it is no such row."""
    value: bytes = b""
    """Of a row that publishes stored messages, as it is in the store."""

    @property
    def messages(self) -> int:
        """How many messages readers get of it."""
        return 1 if self.stored is None else self.stored.messages

    @property
    def expires_ms(self) -> int:
        """When its own time to live is over; 0: it has none."""
        return expires_ms_of(self.position, self.ttl_s)

    def continues(self, run: Sequence[ChainedRow]) -> bool:
        """Whether one entry may cover it behind these, as far as it is not about bytes."""
        last = run[-1]
        return (
            ordinal(self.position) == ordinal(last.position) + 1
            and abs(self.pointer) == abs(last.pointer)
            and len(run) < MAX_ROWS
        )


def row_of(position: bytes, value: bytes) -> ChainedRow:
    """A row of the message table; never raises, whatever its bytes are."""
    try:
        row = decode_row(value)
        attributes = attributes_in(row.extras) or {}
        if row.payload is None:
            return ChainedRow(position, None, row.pointer or 0, {}, row.ttl_s, Stored.of(row), value)
    except DamagedRow:
        return ChainedRow(position, None)
    return ChainedRow(position, item_of(position, row.payload), row.pointer or 0, attributes, row.ttl_s)


# --- the running chain of a topic -------------------------------------------------------------------


@dataclass(slots=True)
class Chain:
    """How far a topic's chain has come."""

    epoch: int = 0
    """Of the owner."""
    number: int = 0
    """Of the last entry."""
    position: bytes = bytes(POSITION_BYTES)
    """Of the last entry."""
    link: bytes = NO_LINK
    """Of the last entry."""
    due: bool = False
    """Whether the next step has entries to write that the load found missing."""
    begins: bool = False
    """Among them the one with which the chain begins."""
    found: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Entries of rows that had none: the next step writes them."""

    def next(self, position: bytes, record: dict[str, object]) -> bytes:
        """Go on by one entry; returns the value of its row."""
        self.number += 1
        record["n"] = self.number
        if self.epoch:
            record["e"] = self.epoch
        packed: bytes = msgpack.packb(record)
        self.link = link = sha256(self.link + position + packed).digest()
        self.position = position
        return plain_head(LINK_BYTES + len(packed)) + link + packed

    def cover(self, rows: Sequence[tuple[bytes, bytes]], stored: Mapping[bytes, bytes]) -> None:
        """Cover rows of the message table that have no entry, in key order; those that cannot be read get none.

        Args:
          stored: position of each row that publishes stored messages → their digest.
        """
        self.due = True
        run: list[ChainedRow] = []
        size = 0
        for key, value in rows:
            row = row_of(key[-POSITION_BYTES:], value)
            item_bytes = len(row.item or b"")
            if run and (row.item is None or not row.continues(run) or size + item_bytes > MAX_BYTES):
                self._cover_run(run)
                run, size = [], 0
            if row.item is not None:
                run.append(row)
                size += item_bytes
            elif row.stored is not None:
                record = record_of_stored(row.position, stored[row.position], row.ttl_s, abs(row.pointer))
                self.found.append((row.position, self.next(row.position, {**record, "k": FOUND})))
        if run:
            self._cover_run(run)

    def _cover_run(self, run: Sequence[ChainedRow]) -> None:
        attributes = {index: row.attributes for index, row in enumerate(run) if row.attributes}
        ttls_s = [row.ttl_s for row in run]
        known_ttls = ttls_s if any(each is not None for each in ttls_s) else None
        suffixes, items = [row.position for row in run], [row.item or b"" for row in run]
        record = record_of(suffixes, items, attributes, known_ttls, abs(run[0].pointer))
        record["k"] = FOUND
        self.found.append((suffixes[-1], self.next(suffixes[-1], record)))


# --- records of messages -----------------------------------------------------------------------------


def pieces(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """``[start, stop)`` of rows that one entry may cover each, from the bytes of the rows."""
    if len(sizes) <= MAX_ROWS and sum(sizes) <= MAX_BYTES:
        return [(0, len(sizes))]
    found = []
    start = held = 0
    for index, size in enumerate(sizes):
        if index > start and (index - start == MAX_ROWS or held + size > MAX_BYTES):
            found.append((start, index))
            start, held = index, 0
        held += size
    return [*found, (start, len(sizes))]


def with_first(positions: Sequence[bytes], record: dict[str, object]) -> dict[str, object]:
    if len(positions) > 1:
        record["f"] = positions[0]
    return record


def record_of_wire(first: bytes, count: int, wire: bytes) -> dict[str, object]:
    """The record of an entry of ``count`` messages from the position ``first`` on, given their wire form.

    They have no write pointer, no attributes and no times to live of their own.
    """
    if count == 1:
        return {"d": sha256(_ONE + wire).digest()}
    return {"d": sha256(COUNT.pack(count) + wire).digest(), "f": first}


def record_of(
    positions: Sequence[bytes],
    items: Sequence[bytes],
    attributes: Mapping[int, Mapping[str, str]],
    ttls_s: Sequence[int | None] | None,
    pointer: int,
) -> dict[str, object]:
    """The record of an entry of messages."""
    record = with_first(positions, {})
    if pointer:
        record["p"] = pointer
    if ttls_s is None:
        record["d"] = digest_of(items, attributes)
        return record
    groups: dict[int, list[int]] = {}
    for index, (position, ttl_s) in enumerate(zip(positions, ttls_s, strict=True)):
        expires_ms = expires_ms_of(position, ttl_s)
        groups.setdefault(expires_ms, []).append(index)
    expiring = []
    for expires_ms, indexes in sorted(groups.items()):
        digest = digest_of_some(indexes, items, attributes)
        if expires_ms == 0:
            record["d"] = digest
        else:
            expiring.append([expires_ms, None if len(indexes) == len(items) else indexes, digest])
    if expiring:
        record["x"] = expiring
    return record


def record_of_stored(position: bytes, digest: bytes, ttl_s: int | None, pointer: int) -> dict[str, object]:
    """The record of the entry of a row that publishes stored messages."""
    record: dict[str, object] = {"p": pointer} if pointer else {}
    expires_ms = expires_ms_of(position, ttl_s)
    if expires_ms:
        record["x"] = [[expires_ms, None, digest]]
    else:
        record["d"] = digest
    return record


def digest_of_some(
    indexes: Sequence[int], items: Sequence[bytes], attributes: Mapping[int, Mapping[str, str]]
) -> bytes:
    """The digest of those of some messages that ``indexes`` say."""
    theirs = {at: attributes[index] for at, index in enumerate(indexes) if index in attributes}
    return digest_of([items[index] for index in indexes], theirs)
