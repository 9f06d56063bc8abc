"""What became of a request of a producer, told for each of its messages and for all of them."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from plainsong.ids import nth_id
from plainsong.messages import Receipt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plainsong.core.producing.calls import Known
    from plainsong.ids import MessageId


class MessageReceipt(NamedTuple):
    """What became of one message of a producer: it is durable, now or since an earlier attempt."""

    sequence_id: int
    id: MessageId | None
    """None of duplicates that are not among the last requests, which the daemon does not know any more; and of those
    that were sent again between others, since only the ends of a request are told."""
    duplicate: bool
    """It was there before: nothing was stored."""
    deduplicated: bool
    """False where deduplication is switched off: it was stored, whatever was there."""
    generation: int
    """Which life of the topic's name it is in."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """One request that came to a good end."""

    sequence_ids: Sequence[int]
    first_id: MessageId | None
    last_id: MessageId | None
    """Of those that were stored; where none was, of the originals."""
    duplicates: int
    """So many, from the first on, were there before."""
    deduplicated: bool
    generation: int
    last_sequence_id: int | None

    def of(self, index: int) -> MessageReceipt:
        """The receipt of one message."""
        duplicate = index < self.duplicates
        message_id = self._id_of_duplicate(index) if duplicate else self._id_of_stored(index - self.duplicates)
        return MessageReceipt(self.sequence_ids[index], message_id, duplicate, self.deduplicated, self.generation)

    def _id_of_stored(self, index: int) -> MessageId | None:
        """What was stored in one request follows each other."""
        if self.first_id is None or self.last_id is None:
            return None
        return nth_id(self.first_id, self.last_id, index, len(self.sequence_ids) - self.duplicates)

    def _id_of_duplicate(self, index: int) -> MessageId | None:
        """Between the first and the last there may be messages of others, and ids that were never stored."""
        last = len(self.sequence_ids) - 1
        if self.duplicates <= last:
            return None
        return self.first_id if index == 0 else self.last_id if index == last else None

    def whole(self) -> Receipt:
        """The receipt of all of them."""
        count = len(self.sequence_ids)
        trimmed = 0 < self.duplicates < count
        return Receipt(
            self.first_id,
            self.last_id,
            count,
            self.generation,
            duplicate=bool(count) and self.duplicates == count,
            deduplicated=self.deduplicated,
            last_sequence_id=self.last_sequence_id,
            stored=list(self.sequence_ids[self.duplicates :]) if trimmed else None,
            dropped=list(self.sequence_ids[: self.duplicates]) if trimmed else None,
        )


def told(receipt: Receipt, sequence_ids: Sequence[int]) -> Delivered:
    """As the daemon answered it."""
    dropped = len(receipt.dropped or ())
    return Delivered(
        sequence_ids,
        receipt.first_id,
        receipt.last_id,
        len(sequence_ids) if receipt.duplicate else dropped,
        receipt.deduplicated,
        receipt.generation,
        receipt.last_sequence_id,
    )


def found(known: Known, sequence_ids: Sequence[int], before: int) -> Delivered:
    """As it was found out afterwards; ``before`` is the last sequence id that was durable before it was sent."""
    duplicates = bisect_right(sequence_ids, before)
    first = sequence_ids[duplicates if duplicates < len(sequence_ids) else 0]
    last = sequence_ids[-1]
    ids = next((each for each in known.recent if (each.first, each.last) == (first, last)), None)
    return Delivered(
        sequence_ids,
        ids.first_id if ids else None,
        ids.last_id if ids else None,
        duplicates,
        True,
        known.generation,
        known.last_sequence_id,
    )
