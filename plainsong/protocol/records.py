"""Values of the metadata table: a topic's metadata, its high-water mark, its readers; a namespace's properties.

Each is one version byte and a msgpack map with one-letter keys. A later version may add keys, which this one
ignores; it raises the byte when older programs would misread the row.

    metadata     g generation (negated: deleted)  p properties  c created  u updated  d deleted  k partly cleaned
                 f floor  w creator  a set aside: first and last position, rows  h end of a chain  l restored up to
    high water   t time  s last timestamp and sequence id assigned  b usage buckets  n messages ever published
                 q last sequence id of each bucket  e last position of the buckets dropped  c closed up to
    reader       p position  c changed
    namespace    d deduplication  s how often it was switched off

All times are milliseconds since 1970. Every ``decode`` raises DamagedRow for a value that it cannot read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.ids import MAX_TIMESTAMP_MS, POSITION_BYTES, SEQUENCES_PER_MS, checked_id, pack_position
from plainsong.protocol.keys import DamagedRow
from plainsong.protocol.properties import Deduplication, TopicProperties, parse_properties, stored_properties

if TYPE_CHECKING:
    from collections.abc import Collection

_VERSION = 1
_MAX_GENERATION = (1 << 31) - 1
_BUCKET_NUMBERS = 5
#: The length of a link of a chained topic.
LINK_BYTES = 32


class ChainEnd(NamedTuple):
    """The last entry of a chain that was switched off; a later chain continues from it."""

    position: bytes
    """10 bytes."""
    number: int
    link: bytes
    """32 bytes."""


class SetAside(NamedTuple):
    """A range of a topic that an operator has set aside, because it has damaged rows."""

    first: bytes
    """The position (10 bytes) of the first row; ``last`` is that of the last."""
    last: bytes
    rows: int | None
    """The number of rows, all saved to a file; None: some could not be read."""


#: The maximum number of ranges set aside in a topic; expired ranges are dropped.
MAX_SET_ASIDE = 1_000


@dataclass(frozen=True, slots=True)
class Metadata:
    """A topic's row in the metadata table; it stays forever, with ``deleted_ms`` set once the topic is deleted."""

    generation: int
    properties: TopicProperties
    created_ms: int
    updated_ms: int
    deleted_ms: int | None = None
    partly_cleaned: bool = False
    """Rows of this deleted generation may already be gone: it cannot be brought back."""
    floor_ms: int = 0
    """Messages published before this had expired under earlier properties, and stay expired."""
    creator: str = ""
    """The name that created or undeleted it; empty without authentication."""
    set_aside: tuple[SetAside, ...] = ()
    """Ascending, and none overlaps the next."""
    chain_end: ChainEnd | None = None
    """The end of the topic's earlier chain, which was switched off; None if there was none."""
    restored: bytes | None = None
    """The position (10 bytes) up to which a restore brought a chained topic back, until its chain records that."""

    @property
    def etag(self) -> str:
        """The entity tag: changes with the generation, and with every change of properties."""
        told = f"{self.updated_ms} {sorted(self.properties.stored().items())}"
        return f'"{self.generation}-{blake2b(told.encode(), digest_size=8).hexdigest()}"'

    def encode(self) -> bytes:
        record: dict[str, object] = {
            "g": self.generation if self.deleted_ms is None else -self.generation,
            "p": self.properties.stored(),
            "c": self.created_ms,
            "u": self.updated_ms,
        }
        if self.deleted_ms is not None:
            record["d"] = self.deleted_ms
        if self.partly_cleaned:
            record["k"] = True
        if self.floor_ms:
            record["f"] = self.floor_ms
        if self.creator:
            record["w"] = self.creator
        if self.set_aside:
            record["a"] = [list(each) for each in self.set_aside]
        if self.chain_end is not None:
            record["h"] = list(self.chain_end)
        if self.restored is not None:
            record["l"] = self.restored
        return pack_record(record)

    @staticmethod
    def is_of_deleted(value: bytes) -> bool:
        """True if a row is that of a deleted topic; takes a seventh of the time of ``decode``. Raises DamagedRow."""
        return "d" in unpack_record(value, "metadata")

    @classmethod
    def decode(cls, value: bytes) -> Metadata:
        record = unpack_record(value, "metadata")
        try:
            deleted = "d" in record
            return cls(
                generation=checked_number(-record["g"] if deleted else record["g"], 1, _MAX_GENERATION),
                properties=stored_properties(record["p"]),
                created_ms=checked_number(record["c"]),
                updated_ms=checked_number(record["u"]),
                deleted_ms=checked_number(record["d"]) if deleted else None,
                partly_cleaned=record.get("k", False) is True,
                floor_ms=checked_number(record.get("f", 0)),
                creator=str(record.get("w", "")),
                set_aside=tuple(_set_aside(each) for each in record.get("a", ())),
                chain_end=None if "h" not in record else _chain_end(*record["h"]),
                restored=_checked_position(record.get("l")),
            )
        except (KeyError, TypeError, ValueError, PlainsongError) as error:
            raise DamagedRow(f"a metadata row has a missing or invalid field: {error!r}") from error


def _chain_end(position: object, number: object, link: object) -> ChainEnd:
    checked = _checked_position(position)
    if checked is None or not isinstance(link, bytes) or len(link) != LINK_BYTES:
        raise ValueError("the end of a chain has a position and a link")
    return ChainEnd(checked, checked_number(number), link)


def _set_aside(each: list[Any]) -> SetAside:
    first, last, rows = each
    if _checked_position(first) is None or _checked_position(last) is None:
        raise ValueError("a range has two positions")
    return SetAside(first, last, None if rows is None else checked_number(rows))


@dataclass(slots=True)
class HighWater:
    """The progress of a generation: what must outlive its messages, and the position where replay begins."""

    time_ms: int = 0
    """The topic's time: it never goes back, whatever the clock does."""
    last_ts_ms: int = 0
    last_sequence_id: int = -1
    """The last position assigned; -1 with timestamp 0: none yet."""
    buckets: list[list[int]] = field(default_factory=list)
    """The counts of ``Usage`` up to that position."""
    appended: int = 0
    """Messages ever published in this generation, up to that position."""
    last_sequence_ids: list[int] = field(default_factory=list)
    """Sequence id of the last message of each bucket; empty: not known."""
    last_dropped: bytes | None = None
    """Position (10 bytes) of the last message of the buckets dropped as expired; None if none was dropped."""
    closed_ms: int = 0
    """No position up to the end of this millisecond is assigned any more. Set by a take-over, which does not replay the
    messages after the last position; 0 in other marks."""

    @property
    def floor(self) -> tuple[int, int]:
        """Timestamp and sequence id after which the next position is assigned, as far as this row shows."""
        last = self.last_ts_ms, self.last_sequence_id
        return max(last, (self.closed_ms, SEQUENCES_PER_MS - 1)) if self.closed_ms else last

    @property
    def before_buckets(self) -> bytes:
        """The position after every message of the dropped buckets."""
        if self.buckets:
            return pack_position(self.buckets[0][0], 0)
        return pack_position(self.last_ts_ms, max(0, self.last_sequence_id))

    def encode(self) -> bytes:
        record: dict[str, object] = {
            "t": self.time_ms,
            "s": [self.last_ts_ms, self.last_sequence_id],
            "b": self.buckets,
        }
        if self.appended:
            record["n"] = self.appended
        if self.last_sequence_ids:
            record["q"] = self.last_sequence_ids
        if self.last_dropped is not None:
            record["e"] = self.last_dropped
        if self.closed_ms:
            record["c"] = self.closed_ms
        return pack_record(record)

    @classmethod
    def decode(cls, value: bytes) -> HighWater:
        record = unpack_record(value, "high-water")
        try:
            last_ts_ms, last_sequence_id = record["s"]
            return cls(
                checked_number(record["t"]),
                checked_number(last_ts_ms),
                checked_number(last_sequence_id, -1, SEQUENCES_PER_MS - 1),
                [_bucket(bucket) for bucket in record["b"]],
                checked_number(record.get("n", 0)),
                [checked_number(last, 0, SEQUENCES_PER_MS - 1) for last in record.get("q", ())],
                _checked_position(record.get("e")),
                checked_number(record.get("c", 0)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedRow(f"a high-water row has a missing or invalid field: {error!r}") from error


@dataclass(frozen=True, slots=True)
class Reader:
    """A position that the daemon keeps for a named reader."""

    position: bytes
    """The id last read, 20 bytes; reading continues after it."""
    changed_ms: int

    def encode(self) -> bytes:
        return pack_record({"p": self.position, "c": self.changed_ms})

    @classmethod
    def decode(cls, value: bytes) -> Reader:
        record = unpack_record(value, "reader")
        try:
            return cls(checked_id(record["p"]), checked_number(record["c"]))
        except (KeyError, TypeError, ValueError, PlainsongError) as error:
            raise DamagedRow(f"a reader row has a missing or invalid field: {error!r}") from error


@dataclass(frozen=True, slots=True)
class NamespaceProperties:
    """The properties of a namespace."""

    deduplication: Deduplication = "inherit"
    switched: int = 0
    """Counts how often deduplication was switched off for its topics."""

    def encode(self) -> bytes:
        return pack_record({"d": self.deduplication, "s": self.switched})

    @classmethod
    def decode(cls, value: bytes) -> NamespaceProperties:
        record = unpack_record(value, "namespace")
        try:
            properties = parse_properties({"deduplication": record["d"]})
            return cls(properties.deduplication, checked_number(record["s"]))
        except (KeyError, TypeError, ValueError, PlainsongError) as error:
            raise DamagedRow(f"a namespace row has a missing or invalid field: {error!r}") from error


def checked_number(value: object, low: int = 0, high: int = MAX_TIMESTAMP_MS) -> int:
    """Return ``value`` if it is a whole number from ``low`` to ``high``. Raises ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{str(value)[:40]!r} is not a number from {low} to {high}")
    return value


def _checked_position(value: object) -> bytes | None:
    if value is not None and (not isinstance(value, bytes) or len(value) != POSITION_BYTES):
        raise ValueError(f"{value!r} is not a position")
    return value


def _bucket(value: object) -> list[int]:
    if not isinstance(value, list) or len(value) != _BUCKET_NUMBERS:
        raise ValueError(f"a bucket is {_BUCKET_NUMBERS} numbers")
    return [checked_number(number) for number in value]


class Packed(bytes):
    """The value of a record's field, already packed."""

    @classmethod
    def map(cls, pairs: Collection[bytes]) -> Packed:
        """Return a map of packed pairs, each a packed name and its packed value."""
        return cls(b"".join((msgpack.Packer().pack_map_header(len(pairs)), *pairs)))

    @classmethod
    def list(cls, items: Collection[bytes]) -> Packed:
        return cls(b"".join((msgpack.Packer().pack_array_header(len(items)), *items)))


def pack_record(record: dict[str, object]) -> bytes:
    """Encode a row of the metadata table: the version byte and the map."""
    version = bytes([_VERSION])
    if Packed not in map(type, record.values()):
        packed: bytes = msgpack.packb(record)
        return version + packed
    pairs = (
        msgpack.packb(key) + (value if isinstance(value, Packed) else msgpack.packb(value))
        for key, value in record.items()
    )
    return version + b"".join((msgpack.Packer().pack_map_header(len(record)), *pairs))


def unpack_record(value: bytes, what: str) -> dict[str, Any]:
    """Decode the result of ``pack_record``; ``what`` names the kind of row in the error. Raises DamagedRow."""
    if value[:1] != bytes([_VERSION]):
        raise DamagedRow(f"a {what} row has version {value[:1].hex() or 'none'}, this version reads {_VERSION}")
    try:
        record = msgpack.unpackb(value[1:])
    except (ValueError, msgpack.UnpackException) as error:
        raise DamagedRow(f"a {what} row is garbled: {value[:24].hex()}…") from error
    if not isinstance(record, dict):
        raise DamagedRow(f"a {what} row is not a map")
    return record
