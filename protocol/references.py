"""References: message rows without a payload, which stand where messages were published that had been stored before.

    n messages  b bytes of their payloads  f first  l last payload position (10 bytes each)
    g indexes of the winning segments  w the staged pointer

Messages of a transaction stand under the write pointer that the row itself carries. Staged ones stand under a
negative pointer that no transaction has, and the row has none: it is a plain row, seen by everybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.ids import NO_PAYLOAD_PART, SEQUENCES_PER_MS
from protocol.keys import DamagedRow

if TYPE_CHECKING:
    from protocol.rows import MessageRow

#: Under which key a reference names the pointer that its messages were staged under.
STAGED = "w"
_LOWEST_POINTER = -(1 << 63)


@dataclass(frozen=True, slots=True)
class Stored:
    """The extras of a reference: which payload rows were published there, and under which pointer they stand."""

    messages: int
    payload_bytes: int
    """Of their payloads."""
    first: bytes
    """Position (10 bytes: write timestamp, sequence id) of the first payload row; it may be a loser's."""
    last: bytes
    """Position of the last one, included."""
    segments: frozenset[int] | None = None
    """The winning segments by index; None: none were listed, and every row counts."""
    staged: int | None = None
    """The pointer they were staged under, below 0; None: they stand under the row's own write pointer."""

    def extras(self) -> dict[str, object]:
        """As the row holds them."""
        extras: dict[str, object] = {"n": self.messages, "b": self.payload_bytes, "f": self.first, "l": self.last}
        if self.segments is not None:
            extras["g"] = sorted(self.segments)
        if self.staged is not None:
            extras[STAGED] = self.staged
        return extras

    def pointer_of_payloads(self, row: MessageRow) -> int:
        """The pointer in the keys of the payload rows that ``row``, which says this, refers to."""
        return abs(row.pointer or 0) if self.staged is None else self.staged

    @classmethod
    def of(cls, row: MessageRow) -> Stored:
        """What a reference refers to. Raises DamagedRow when it does not say."""
        extras = row.extras
        count, size, first, last = (extras.get(key) for key in "nbfl")
        segments, staged = extras.get("g"), extras.get(STAGED)
        if (
            not (_is_pointer(staged) if row.pointer is None else row.pointer and staged is None)
            or not (_is_position(first) and _is_position(last) and _is_count(count) and _is_count(size))
            or not (segments is None or (isinstance(segments, list) and all(map(_is_count, segments))))
        ):
            raise DamagedRow("a row has no payload, and does not say where it is")
        winners = None if segments is None else frozenset(segments)
        return cls(count, size, first, last, winners, staged)  # type: ignore[arg-type]


def staged_pointer(ts_ms: int, sequence_id: int) -> int:
    """The pointer that a position of the topic's own gives to what is staged; no two are the same."""
    return -(ts_ms * SEQUENCES_PER_MS + sequence_id)


def position_of_staged(pointer: int) -> tuple[int, int]:
    """The position ``(ts_ms, sequence_id)`` that a staged pointer was made of; no message has it."""
    return divmod(-pointer, SEQUENCES_PER_MS)


def _is_pointer(value: object) -> bool:
    return type(value) is int and _LOWEST_POINTER <= value < 0


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_position(value: object) -> bool:
    return isinstance(value, bytes) and len(value) == len(NO_PAYLOAD_PART)
