"""What a topic keeps of one producer, and of having producers at all, with the rows these are kept in.

producer row    e epoch  h highest id  u highest under a pointer  a active  m memory (ms)
                r results: lowest id, highest id, first and last position, write pointer or 0
producers row   o on  s switched  f from  g forgotten  x epochs
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from protocol.keys import DamagedRow
from protocol.records import checked_number, pack_record, unpack_record

if TYPE_CHECKING:
    from typing import Any

#: Requests of a producer that are remembered with where their messages went.
MAX_RESULTS = 5
POSITION_BYTES = 10
#: Sequence ids are what an Avro long holds.
MAX_SEQUENCE_ID = (1 << 63) - 1


class Result(NamedTuple):
    """One stored request: its lowest and highest id, its first and last row (positions of 10 bytes)."""

    low: int
    high: int
    first: bytes
    last: bytes
    pointer: int
    """The write pointer it was published under; 0: none."""


@dataclass(slots=True)
class Producer:
    """One producer in one generation of a topic."""

    name: str
    epoch: int = 0
    """Of its last session; 0: it never opened one."""
    pushed: int = -1
    """The highest sequence id that was taken."""
    persisted: int = -1
    """The highest one that is durable: behind ``pushed`` while a commit is under way."""
    active_ms: int = 0
    memory_ms: int | None = None
    """For how long it is remembered while inactive, where it asked for longer than others."""
    recent: tuple[Result, ...] = ()
    under: int = -1
    """The highest id that was ever published under a write pointer."""

    def took(self, result: Result) -> None:
        """A request was given its rows."""
        self.pushed = result.high
        if result.pointer:
            self.under = result.high
        self.recent = (*self.recent[1 - MAX_RESULTS :], result)

    def encode(self) -> bytes:
        """The row's value."""
        record: dict[str, object] = {"e": self.epoch, "h": self.pushed, "a": self.active_ms}
        if self.under >= 0:
            record["u"] = self.under
        if self.memory_ms is not None:
            record["m"] = self.memory_ms
        if self.recent:
            record["r"] = self.recent
        return pack_record(record)

    @classmethod
    def decode(cls, name: str, value: bytes) -> Producer:
        """Read the row's value. Raises DamagedRow."""
        record = unpack_record(value, "producer")
        try:
            highest = checked_number(record["h"], -1, MAX_SEQUENCE_ID)
            return cls(
                name,
                epoch=checked_number(record["e"]),
                pushed=highest,
                persisted=highest,
                under=checked_number(record.get("u", -1), -1, MAX_SEQUENCE_ID),
                active_ms=checked_number(record["a"]),
                memory_ms=checked_number(record["m"]) if "m" in record else None,
                recent=tuple(map(_result, record.get("r", ()))),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedRow(f"a producer row has not what it needs: {error!r}") from error


def _result(packed: Any) -> Result:
    low, high, first, last, pointer = packed
    ids = (checked_number(low, 0, MAX_SEQUENCE_ID), checked_number(high, 0, MAX_SEQUENCE_ID))
    return Result(*ids, _position(first), _position(last), checked_number(pointer, 0, MAX_SEQUENCE_ID))


@dataclass(frozen=True, slots=True)
class Remembering:
    """Whether a generation remembers producers, and from where on."""

    on: bool = True
    switched: int = field(default=0, compare=False)
    """How often the namespace had been switched off when this was written."""
    since: bytes | None = None
    """The position up to which stamps count for nothing; None: all of them count."""
    forgotten: bytes | None = None
    """Where producers were last forgotten: up to there stamps are in the producers' rows, or count for nothing."""
    epochs: int = 0
    """No epoch up to this one is given again."""

    def counts_from(self) -> bytes:
        """The position up to which no stamp is replayed."""
        return max(self.since or b"", self.forgotten or b"")

    def encode(self) -> bytes:
        """The row's value."""
        record: dict[str, object] = {"o": self.on, "s": self.switched, "x": self.epochs}
        if self.since is not None:
            record["f"] = self.since
        if self.forgotten is not None:
            record["g"] = self.forgotten
        return pack_record(record)

    @classmethod
    def decode(cls, value: bytes) -> Remembering:
        """Read the row's value. Raises DamagedRow."""
        record = unpack_record(value, "producers")
        try:
            return cls(
                record["o"] is True,
                checked_number(record["s"]),
                _position(record["f"]) if "f" in record else None,
                _position(record["g"]) if "g" in record else None,
                checked_number(record["x"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedRow(f"a producers row has not what it needs: {error!r}") from error


def _position(value: object) -> bytes:
    if not isinstance(value, bytes) or len(value) != POSITION_BYTES:
        raise ValueError(f"{str(value)[:40]!r} is no position")
    return value
