"""How much a topic holds, counted as it is written, in slices of time that expire as a whole.

Counting rows again would cost a scan; one number could not tell what has expired since. So messages are
counted in buckets, each for a slice of publish time of about a 128th of the time to live. A bucket is
dropped when its last message has expired, hence the sums are too high by at most one slice. Where the last of
all dropped ones stood is kept: so a reader who comes late can be told whether anything expired before it came.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from plainsong.protocol.ids import NO_PAYLOAD_PART, SEQUENCES_PER_MS, pack_position

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Slices of one time to live.
SLICES = 128
#: Buckets a topic may have before neighbours are joined (a shortened ttl leaves many behind).
MAX_BUCKETS = 4 * SLICES
#: Bytes a row has beside its value and the topic's prefix: the position.
ROW_BYTES = 10
_LAST_SEQUENCE_ID = SEQUENCES_PER_MS - 1
#: What a position is followed by in the bound just behind the message that has all of it.
_BEHIND_ITS_MESSAGE = (1).to_bytes(len(NO_PAYLOAD_PART), "big")


@dataclass(slots=True)
class Bucket:
    """Messages with publish times from ``first_ms`` to ``last_ms``, both included."""

    first_ms: int
    last_ms: int
    messages: int
    bytes: int
    own_expiry_ms: int = 0
    """When the first message with a time to live of its own expires; 0: there is none."""
    last_sequence_id: int = _LAST_SEQUENCE_ID
    """Of the last message in ``last_ms``; the highest there is where it is not known."""

    def join(self, other: Bucket) -> None:
        """Take in the next bucket."""
        self.last_ms, self.last_sequence_id = other.last_ms, other.last_sequence_id
        self.messages += other.messages
        self.bytes += other.bytes
        self.own_expiry_ms = _earlier(self.own_expiry_ms, other.own_expiry_ms)


def _earlier(one: int, other: int) -> int:
    return min(one, other) if one and other else one or other


class Usage:
    """The messages and bytes of one generation that have not been counted out yet."""

    def __init__(
        self,
        buckets: Iterable[Iterable[int]] = (),
        last_sequence_ids: Iterable[int] = (),
        last_dropped: bytes | None = None,
    ) -> None:
        """What ``stored``, ``lasts`` and ``gone`` were; without the second it is not known."""
        self.buckets = [Bucket(*bucket) for bucket in buckets]
        for bucket, last in zip(self.buckets, last_sequence_ids, strict=False):
            bucket.last_sequence_id = last
        #: The position (10 bytes) of the last message of all buckets dropped; None: none was.
        self.last_dropped = last_dropped
        self.messages = sum(bucket.messages for bucket in self.buckets)
        self.bytes = sum(bucket.bytes for bucket in self.buckets)

    def __repr__(self) -> str:
        return f"<Usage {self.messages} messages, {self.bytes} bytes, {len(self.buckets)} buckets>"

    def stored(self) -> list[list[int]]:
        """For the high-water mark."""
        return [[b.first_ms, b.last_ms, b.messages, b.bytes, b.own_expiry_ms] for b in self.buckets]

    def last_sequence_ids(self) -> list[int]:
        """For the high-water mark, beside ``stored``."""
        return [bucket.last_sequence_id for bucket in self.buckets]

    def add(
        self,
        ts_ms: int,
        messages: int,
        size: int,
        ttl_ms: int,
        own_expiry_ms: int = 0,
        last_sequence_id: int = _LAST_SEQUENCE_ID,
    ) -> None:
        """Count messages published at ``ts_ms``, the last one at this sequence id; not before any counted earlier."""
        self.messages += messages
        self.bytes += size
        new = Bucket(ts_ms, ts_ms, messages, size, own_expiry_ms, last_sequence_id)
        last = self.buckets[-1] if self.buckets else None
        # No millisecond is in two slices, also when a shorter ttl makes them shorter in the middle of one.
        if last is not None and (ts_ms <= last.last_ms or ts_ms < last.first_ms + max(1, ttl_ms // SLICES)):
            last.join(new)
            return
        self.buckets.append(new)
        if len(self.buckets) > MAX_BUCKETS:
            self._join_neighbours()

    def drop_before(self, oldest_ms: int) -> None:
        """Count out what was published before ``oldest_ms``, bucket by bucket."""
        gone = 0
        while gone < len(self.buckets) and self.buckets[gone].last_ms < oldest_ms:
            self.messages -= self.buckets[gone].messages
            self.bytes -= self.buckets[gone].bytes
            gone += 1
        if gone:
            last = self.buckets[gone - 1]
            self.last_dropped = pack_position(last.last_ms, last.last_sequence_id)
            del self.buckets[:gone]

    def expired_from(self, start: bytes, oldest_ms: int) -> bool:
        """Whether a message published at or behind the bound ``start`` has expired by the topic's time to live.

        Of a slice of which a part has expired it is not known up to where messages stood: that counts as yes. So does
        a start among stored messages that were published at one position, when that has expired.
        """
        last_expired = self.last_dropped
        for bucket in self.buckets:
            if bucket.first_ms >= oldest_ms:
                break
            if bucket.last_ms >= oldest_ms:
                last_expired = pack_position(oldest_ms - 1, _LAST_SEQUENCE_ID)
                break
            last_expired = pack_position(bucket.last_ms, bucket.last_sequence_id)
        if last_expired is None:
            return False
        position, inside = start[:ROW_BYTES], start[ROW_BYTES:]
        return position < last_expired if inside == _BEHIND_ITS_MESSAGE else position <= last_expired

    def own_expiry_ms(self) -> int:
        """When the next message with a time to live of its own expires; 0: none has one."""
        return min((b.own_expiry_ms for b in self.buckets if b.own_expiry_ms), default=0)

    def due(self, now_ms: int) -> list[tuple[int, int]]:
        """Slices ``(first_ms, last_ms)`` in which a message's own time to live has passed."""
        return [(b.first_ms, b.last_ms) for b in self.buckets if 0 < b.own_expiry_ms < now_ms]

    def cleaned(self, first_ms: int, last_ms: int, messages: int, size: int, own_expiry_ms: int) -> None:
        """Count out rows removed from the slice ``first_ms`` to ``last_ms``, and set what is next there.

        A slice that has grown or was joined meanwhile stays due: it holds messages the cleaner has not seen.
        """
        bucket = next((each for each in self.buckets if each.first_ms <= first_ms <= each.last_ms), None)
        if bucket is None:
            return
        # Never below zero: rows at the very edge may be counted in the next slice.
        messages, size = min(messages, bucket.messages), min(size, bucket.bytes)
        bucket.messages -= messages
        bucket.bytes -= size
        self.messages -= messages
        self.bytes -= size
        if (bucket.first_ms, bucket.last_ms) == (first_ms, last_ms):
            bucket.own_expiry_ms = own_expiry_ms

    def _join_neighbours(self) -> None:
        pairs = zip(self.buckets[::2], self.buckets[1::2], strict=False)
        joined = []
        for one, other in pairs:
            one.join(other)
            joined.append(one)
        if len(self.buckets) % 2:
            joined.append(self.buckets[-1])
        self.buckets = joined
