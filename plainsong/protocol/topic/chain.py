"""Chained topics: each entry has a link, a hash over the content that it covers and the previous link.

    link of an entry = SHA-256( link before it  position of the entry  record )
    entry's value      00  length  link:32  record, a msgpack map                          in the payload table

An entry is stored under the pointer 0, which no transaction and no staged message has, at the position of the last row
that it covers, in the same commit and after these rows. So the durable rows never have a gap in their entries, and a
holder of one link can detect every change before it.

    messages   rows of a request, or of several consecutive ones in a commit, up to a bound: digests of their
               ids, payloads and attributes, and their write pointer
    found      rows without an entry, left by an interrupted commit
    rollback   the sign of a write pointer was inverted in the rows of a range
    set aside  the rows of a range were removed
    restored   the topic was restored from a backup; transactions that were open then count as rolled back
    begin, end the property was switched on or off

A row that publishes stored messages has a separate entry, with a digest of the rows that it makes visible.

Entries that do not cover messages have their own position. Messages with their own time to live have a
separate digest for each expiry time, which stays when cleaning removes them.
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
from plainsong.protocol.records import LINK_BYTES
from plainsong.protocol.rows import SEGMENT, Stored, attributes_in, decode_row, expires_ms_of, plain_head

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: The link before the first one.
NO_LINK = bytes(LINK_BYTES)
#: An entry covers at most this many rows and bytes of their values, but at least one row: verification keeps the rows
#: of one entry in memory.
MAX_ROWS = 4096
MAX_BYTES = 1 << 20

# Kinds of entries in the record; an entry of messages has none.
MESSAGES, FOUND, ROLLBACK, SET_ASIDE, RESTORED, BEGIN, END = "m", "u", "r", "a", "s", "b", "e"
#: Kinds of entries that cover rows up to their own position.
COVERING = (MESSAGES, FOUND)
_KINDS = (*COVERING, ROLLBACK, SET_ASIDE, RESTORED, BEGIN, END)

COUNT = Struct(">I")
_ONE = COUNT.pack(1)


# --- entries ----------------------------------------------------------------------------------------


class Expiring(NamedTuple):
    """Rows of an entry that expire at the same time, by their own time to live."""

    expires_ms: int
    indexes: tuple[int, ...] | None
    """The rows, counted from the entry's first one; None: all of them."""
    digest: bytes


@dataclass(frozen=True, slots=True)
class ChainEntry:
    """A stored entry of a chain."""

    position: bytes
    """The entry's position: that of the last row that it covers, if any."""
    link: bytes
    record: bytes
    """The hashed content, in addition to the previous link and the position."""
    number: int
    """Numbers begin with 1."""
    kind: str = MESSAGES
    epoch: int = 0
    """The epoch of the owner that wrote it; 0 if the store has a single writer."""
    first: bytes = b""
    """The first position that it covers or refers to."""
    last: bytes = b""
    pointer: int = 0
    """The write pointer of its rows; 0 if they have none."""
    digest: bytes | None = None
    """The digest of the rows without their own time to live."""
    expiring: tuple[Expiring, ...] = ()
    of: tuple[str, int] | None = None
    """The topic and generation in which the chain began."""

    @classmethod
    def decode(cls, position: bytes, value: bytes) -> ChainEntry:
        """Decode an entry from a row of the payload table. Raises DamagedRow."""
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
        """Raise DamagedRow if the entry is invalid."""
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
            raise DamagedRow(f"the chain's entry at {self.position.hex()} is of a kind that this version does not know")

    @property
    def rows(self) -> int:
        """The number of rows that an entry of messages covers."""
        return ordinal(self.position) - ordinal(self.first) + 1

    def follows(self, link: bytes) -> bool:
        """Return True if its link is correct after the previous link ``link``."""
        return self.link == link_of(link, self.position, self.record)


def _expiring(packed: list[object]) -> Expiring:
    expires_ms, indexes, digest = packed
    if type(expires_ms) is not int or not isinstance(digest, bytes) or not isinstance(indexes, list | None):
        raise ValueError("a digest of expiring rows has a time, indexes and bytes")
    if indexes is not None and not all(type(index) is int for index in indexes):
        raise ValueError("an index is a number")
    return Expiring(expires_ms, None if indexes is None else tuple(indexes), digest)


def link_of(before: bytes, position: bytes, record: bytes) -> bytes:
    """Compute the link of an entry after the previous link ``before``."""
    return sha256(before + position + record).digest()


def digest_of(items: Sequence[bytes], attributes: Mapping[int, Mapping[str, str]]) -> bytes:
    """Compute the digest of messages: their number, their wire forms, and any attributes, by index."""
    digest = sha256(COUNT.pack(len(items)))
    digest.update(b"".join(items))
    if attributes:
        digest.update(msgpack.packb([[index, sorted(each.items())] for index, each in sorted(attributes.items())]))
    return digest.digest()


def item_of(position: bytes, payload: bytes) -> bytes:
    """Return the wire form of a message in the message table."""
    return b"".join((ITEM_START, position, NO_PAYLOAD_PART, length_prefix(len(payload)), payload))


# --- stored messages ---------------------------------------------------------------------------------
#
# A publish of stored messages covers rows of earlier requests, and not those of losing segments. So each segment has a
# running link, stored with the pointer, and the entry of the publish has a digest of the winning segments' links. A
# stored message stays until its publish expires, whatever its own time to live, so that the links can be recomputed.

#: The index of stored messages without a segment.
NO_SEGMENT = -1


def link_rows(link: bytes, positions: Sequence[bytes], values: Sequence[bytes]) -> bytes:
    """Compute the link of a segment after more payload rows; ``link`` is empty for the first ones."""
    link = link or NO_LINK
    for position, value in zip(positions, values, strict=True):
        link = sha256(link + position + value).digest()
    return link


def digest_of_stored(position: bytes, stored: Stored, links: Mapping[int, bytes]) -> bytes:
    """Compute the digest of stored messages published at ``position``; ``links`` are those of the winning segments."""
    segments = None if stored.segments is None else sorted(stored.segments)
    says = [stored.messages, stored.payload_bytes, stored.first, stored.last, stored.staged, segments]
    return sha256(b"stored" + position + msgpack.packb([*says, sorted(links.items())])).digest()


class StoredRow(NamedTuple):
    """A payload row, together with the position of the row that publishes it."""

    id: bytes
    """The id of the message: the position of its publish, and its payload position."""
    value: bytes

    @property
    def position(self) -> bytes:
        """The position of its publish."""
        return self.id[:POSITION_BYTES]


class StoredRows:
    """Computes the digest of stored messages from the row that publishes them, and from their payload rows in order."""

    def __init__(self, position: bytes, stored: Stored) -> None:
        self._position = position
        self._stored = stored
        self._links: dict[int, bytes] = {}
        self.messages = 0
        """The number of visible messages so far."""
        self.unreadable: bytes | None = None
        """The payload position of the first unreadable row; None if there is none."""

    def take(self, position: bytes, value: bytes) -> None:
        """Add the row at the next payload position; never raises."""
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
        """Return the digest of the added rows."""
        return digest_of_stored(self._position, self._stored, self._links)


# --- rows that entries cover -------------------------------------------------------------------------


class ChainedRow(NamedTuple):
    """A row of the message table, in the form that a chain covers."""

    position: bytes
    item: bytes | None
    """Its message in wire form; None if the row publishes stored messages, or cannot be read."""
    pointer: int = 0
    """Its write pointer, below 0 if it is rolled back; 0: none."""
    attributes: Mapping[str, str] = {}
    ttl_s: int | None = None
    """Its own time to live; None if it has none."""
    stored: Stored | None = None
    """The stored messages that it publishes; None if it is not such a row."""
    value: bytes = b""
    """The stored value, only of a row that publishes stored messages."""

    @property
    def messages(self) -> int:
        """The number of messages that readers get from it."""
        return 1 if self.stored is None else self.stored.messages

    @property
    def expires_ms(self) -> int:
        """When it expires by its own time to live; 0 if it has none."""
        return expires_ms_of(self.position, self.ttl_s)

    def continues(self, run: Sequence[ChainedRow]) -> bool:
        """Return True if the entry of these rows may cover it too; does not check the bound on bytes."""
        last = run[-1]
        return (
            ordinal(self.position) == ordinal(last.position) + 1
            and abs(self.pointer) == abs(last.pointer)
            and len(run) < MAX_ROWS
        )


def row_of(position: bytes, value: bytes) -> ChainedRow:
    """Decode a row of the message table; never raises, whatever its bytes are."""
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
    """The end of a topic's chain."""

    epoch: int = 0
    """The epoch of the owner."""
    number: int = 0
    """``number``, ``position``, ``link``: those of the last entry."""
    position: bytes = bytes(POSITION_BYTES)
    link: bytes = NO_LINK
    due: bool = False
    """True if the next step has to write entries that the load found missing."""
    begins: bool = False
    """True if the entry that begins the chain is among them."""
    found: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Entries for rows that had none, to be written by the next step."""

    def next(self, position: bytes, record: dict[str, object]) -> bytes:
        """Append an entry; return the value of its row."""
        self.number += 1
        record["n"] = self.number
        if self.epoch:
            record["e"] = self.epoch
        packed: bytes = msgpack.packb(record)
        self.link = link = sha256(self.link + position + packed).digest()
        self.position = position
        return plain_head(LINK_BYTES + len(packed)) + link + packed

    def cover(self, rows: Sequence[tuple[bytes, bytes]], stored: Mapping[bytes, bytes]) -> None:
        """Cover rows of the message table that have no entry, in key order; unreadable rows get none.

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
    """Return ``[start, stop)`` of the rows for each entry, given the bytes of all rows."""
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


def record_of_wire(first: bytes, count: int, wire: bytes) -> dict[str, object]:
    """Return the record of an entry of ``count`` messages from the position ``first`` on, given their wire form.

    They must have no write pointer, no attributes and no times to live of their own.
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
    """Return the record of an entry of messages."""
    record: dict[str, object] = {"f": positions[0]} if len(positions) > 1 else {}
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
    """Return the record of the entry of a row that publishes stored messages."""
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
    """Compute the digest of the messages at ``indexes``."""
    theirs = {at: attributes[index] for at, index in enumerate(indexes) if index in attributes}
    return digest_of([items[index] for index in indexes], theirs)
