"""The sequence ids of one producer: automatic, one more each time, or the caller's own; never both."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from plainsong.errors import SequenceIdsMixed
from plainsong.protocol.errors import InvalidSequenceIds

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_SEQUENCE_ID = (1 << 63) - 1


class Numbering:
    """Gives out ids.

    Args:
      next_id: the first automatic one.
    """

    __slots__ = ("explicit", "next_id")

    def __init__(self, next_id: int) -> None:
        self.next_id = next_id
        self.explicit: bool | None = None
        """Whether the caller names them; None before the first message."""

    def take(self, given: int | None) -> int:
        """The id of one message. Raises SequenceIdsMixed, InvalidSequenceIds: nothing happened."""
        explicit = given is not None
        if not explicit:
            self._check_left(1)
        if self.explicit is not explicit:
            self._decide(explicit)
        if given is not None:
            return checked_sequence_id(given)
        taken = self.next_id
        self.next_id += 1
        return taken

    def take_many(self, given: Sequence[int] | None, count: int) -> Sequence[int]:
        """The ids of messages that go together, increasing. Raises as ``take``; none of them is used up then."""
        if given is None:
            self._check_left(count)
            self._decide(False)
            start = self.next_id
            self.next_id += count
            return list(range(start, start + count))
        ids = list(given)
        if len(ids) != count:
            raise InvalidSequenceIds(f"{len(ids)} sequence ids for {count} messages", hint="give one for each")
        for each in ids:
            checked_sequence_id(each)
        if any(later <= earlier for earlier, later in pairwise(ids)):
            raise InvalidSequenceIds("the sequence ids do not increase", hint="each must be larger than the one before")
        self._decide(True)
        return ids

    def _check_left(self, count: int) -> None:
        if self.next_id + count - 1 > MAX_SEQUENCE_ID:
            raise InvalidSequenceIds(
                f"{max(0, MAX_SEQUENCE_ID - self.next_id + 1)} automatic sequence ids are left for {count} messages",
                hint=f"the last one is {MAX_SEQUENCE_ID}; go on with a producer of another name",
            )

    def _decide(self, explicit: bool) -> None:
        if self.explicit is None:
            self.explicit = explicit
        elif self.explicit is not explicit:
            raise SequenceIdsMixed(
                "some messages have sequence ids and some have none" + (", of one producer" if explicit else ""),
                hint="give one with every message of a producer, or with none",
            )


def checked_sequence_id(given: object) -> int:
    """Raises InvalidSequenceIds unless it can be one."""
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= MAX_SEQUENCE_ID:
        raise InvalidSequenceIds(f"{given!r} is no sequence id", hint=f"use a whole number from 0 to {MAX_SEQUENCE_ID}")
    return given
