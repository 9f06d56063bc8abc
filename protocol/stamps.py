"""What the rows of a request say of it beside their messages: whose it is, its sequence ids, how many there are.

    d   on the first row of a request with a producer   [name, epoch, count, ids]
    b   on the first row of an atomic batch             its messages
    i   on every following row of such a request        its index in the request, from 1

The ids are the first one where they are consecutive, which is nearly always, else the list of all. The first row
of what publishes stored messages is their reference. Whoever meets an ``i`` finds the first row by going back so
many positions, since those of a request have no holes: a position is one number, and the next one is one more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.keys import DamagedRow

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

STAMP = "d"
INDEX = "i"
BATCH = "b"


@dataclass(frozen=True, slots=True)
class Stamp:
    """Whose request it was."""

    producer: str
    epoch: int
    """Of the session; 0: it named none."""
    count: int
    """Sequence ids: one a message, and one of a publish without messages."""
    ids: int | Sequence[int]
    """The first, when they are consecutive; else all."""

    @classmethod
    def of(cls, producer: str, epoch: int | None, ids: Sequence[int]) -> Stamp:
        """A stamp in its shortest form; ``ids`` ascend, and there is at least one."""
        count = len(ids)
        return cls(producer, epoch or 0, count, ids[0] if ids[-1] - ids[0] == count - 1 else ids)

    @property
    def first(self) -> int:
        """The lowest sequence id."""
        return self.ids if isinstance(self.ids, int) else self.ids[0]

    @property
    def last(self) -> int:
        """The highest."""
        return self.ids + self.count - 1 if isinstance(self.ids, int) else self.ids[-1]

    def sequence_id(self, index: int) -> int:
        """The id of the message with this index, 0 to ``count - 1``."""
        return self.ids + index if isinstance(self.ids, int) else self.ids[index]

    def packed(self) -> list[object]:
        """As the row has it."""
        ids = self.ids if isinstance(self.ids, int) else list(self.ids)
        return [self.producer, self.epoch, self.count, ids]


def stamp_of(extras: Mapping[str, object]) -> Stamp | None:
    """The stamp of a first row; None where there is none.

    Raises:
      DamagedRow: it is none of ours.
    """
    packed = extras.get(STAMP)
    if packed is None:
        return None
    if isinstance(packed, list) and len(packed) == 4:
        producer, epoch, count, ids = packed
        if isinstance(producer, str) and type(epoch) is int and type(count) is int and count > 0:
            if type(ids) is int:
                return Stamp(producer, epoch, count, ids)
            if isinstance(ids, list) and len(ids) == count and all(type(each) is int for each in ids):
                return Stamp(producer, epoch, count, ids)
    raise DamagedRow("a row's stamp does not say whose it is")


def number_in(extras: Mapping[str, object], key: str) -> int | None:
    """``INDEX`` or ``BATCH`` of a row, 1 or more; None where it is not there. Raises DamagedRow."""
    number = extras.get(key)
    if number is None:
        return None
    if type(number) is not int or number < 1:
        raise DamagedRow(f"a row's {key!r} is no number from 1 on")
    return number


def first_position(position: bytes, index: int) -> bytes | None:
    """The position of the first row of the request that has its row ``index`` here; None: there is none so early."""
    at = int.from_bytes(position, "big") - index
    return None if at < 0 else at.to_bytes(len(position), "big")
