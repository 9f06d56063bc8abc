"""Messages and bytes of a topic, counted as they are written, in slices of publish time that expire as a whole.

Counting rows would take a scan, and a single total could not account for expiry. So messages are counted in buckets,
each for a slice of about a 128th of the time to live. A bucket is dropped when its last message has expired, so the
sums are too high by at most one slice. The position of the last dropped message is kept, to report missed messages to
late readers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from plainsong.protocol.ids import NO_PAYLOAD_PART, SEQUENCES_PER_MS, pack_position

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Slices within one time to live.
SLICES = 128
#: Buckets a topic may have before neighbours are joined (shortening the ttl leaves many).
MAX_BUCKETS = 4 * SLICES
#: Bytes of a row in addition to its value and the topic's prefix: the position.
ROW_BYTES = 10
_LAST_SEQUENCE_ID = SEQUENCES_PER_MS - 1
#: The last bytes of a bound directly after a message of the message table; the first ones are the message's position.
_BEHIND_ITS_MESSAGE = (1).to_bytes(len(NO_PAYLOAD_PART), "big")


@dataclass(slots=True)
class Bucket:
    """Messages with publish times from ``first_ms`` to ``last_ms``, both included."""

    first_ms: int
    last_ms: int
    messages: int
    bytes: int
    own_expiry_ms: int = 0
    """When the first message with its own time to live expires; 0 if there is none."""
    last_sequence_id: int = _LAST_SEQUENCE_ID
    """The sequence id of the last message in ``last_ms``; the highest possible one if unknown."""

    def join(self, other: Bucket) -> None:
        """Merge the next bucket into this one."""
        self.add(other.last_ms, other.messages, other.bytes, other.own_expiry_ms, other.last_sequence_id)

    def add(self, last_ms: int, messages: int, size: int, own_expiry_ms: int, last_sequence_id: int) -> None:
        """Count messages that follow."""
        self.last_ms, self.last_sequence_id = last_ms, last_sequence_id
        self.messages += messages
        self.bytes += size
        if own_expiry_ms:
            self.own_expiry_ms = min(self.own_expiry_ms or own_expiry_ms, own_expiry_ms)


class Usage:
    """The unexpired messages and bytes of one generation; sums may be too high by one slice."""

    def __init__(
        self,
        buckets: Iterable[Iterable[int]] = (),
        last_sequence_ids: Iterable[int] = (),
        last_dropped: bytes | None = None,
    ) -> None:
        """Restore from ``stored``, ``last_sequence_ids`` (may be missing) and ``last_dropped``."""
        self.buckets = [Bucket(*bucket) for bucket in buckets]
        for bucket, last in zip(self.buckets, last_sequence_ids, strict=False):
            bucket.last_sequence_id = last
        #: The position (10 bytes) of the last message of all dropped buckets; None if none was dropped.
        self.last_dropped = last_dropped
        #: True if any bucket may have messages with their own time to live.
        self._has_own = any(bucket.own_expiry_ms for bucket in self.buckets)
        self.messages = sum(bucket.messages for bucket in self.buckets)
        self.bytes = sum(bucket.bytes for bucket in self.buckets)

    def __repr__(self) -> str:
        return f"<Usage {self.messages} messages, {self.bytes} bytes, {len(self.buckets)} buckets>"

    def stored(self) -> list[list[int]]:
        """Return the buckets, for the high-water mark."""
        return [[b.first_ms, b.last_ms, b.messages, b.bytes, b.own_expiry_ms] for b in self.buckets]

    def last_sequence_ids(self) -> list[int]:
        """Return the last sequence id of each bucket, for the high-water mark."""
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
        """Count messages published at ``ts_ms``, which never decreases; the last has the given sequence id."""
        self.messages += messages
        self.bytes += size
        if own_expiry_ms:
            self._has_own = True
        last = self.buckets[-1] if self.buckets else None
        # A millisecond is never in two slices, even if a shorter ttl makes the slices shorter within it.
        if last is not None and (ts_ms <= last.last_ms or ts_ms < last.first_ms + max(1, ttl_ms // SLICES)):
            last.add(ts_ms, messages, size, own_expiry_ms, last_sequence_id)
            return
        self.buckets.append(Bucket(ts_ms, ts_ms, messages, size, own_expiry_ms, last_sequence_id))
        if len(self.buckets) > MAX_BUCKETS:
            self._join_neighbours()

    def drop_before(self, oldest_ms: int) -> None:
        """Drop the buckets that were completely published before ``oldest_ms``."""
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
        """Return True if a message published at or after the bound ``start`` has expired by the topic's time to live.

        It may also be True without such a message: if only a part of a slice has expired, since the position of the last
        expired message is then unknown; and if ``start`` is inside the stored messages of one position, which expired.
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

    def expires_between(self, before_ms: int, now_ms: int, ttl_ms: int) -> bool:
        """Return True if a message may have expired after the first time, up to the second."""
        return any(
            (bucket.first_ms + ttl_ms < now_ms and bucket.last_ms + ttl_ms >= before_ms)
            or 0 < bucket.own_expiry_ms < now_ms
            for bucket in self.buckets
        )

    def own_expiry_ms(self) -> int:
        """Return when the next message with its own time to live expires; 0 if there is none."""
        if not self._has_own:
            return 0
        return min((b.own_expiry_ms for b in self.buckets if b.own_expiry_ms), default=0)

    def due(self, now_ms: int) -> list[tuple[int, int]]:
        """Return slices ``(first_ms, last_ms)`` in which a message's own time to live has passed."""
        return [(b.first_ms, b.last_ms) for b in self.buckets if 0 < b.own_expiry_ms < now_ms]

    def cleaned(self, first_ms: int, last_ms: int, messages: int, size: int, own_expiry_ms: int) -> None:
        """Subtract rows removed from the slice ``first_ms`` to ``last_ms``, and set its next expiry.

        A slice that has grown or was joined since stays due: it has messages that the janitor has not seen.
        """
        bucket = next((each for each in self.buckets if each.first_ms <= first_ms <= each.last_ms), None)
        if bucket is None:
            return
        # Not below zero: rows at the edge of a slice may be counted in the next one.
        messages, size = min(messages, bucket.messages), min(size, bucket.bytes)
        bucket.messages -= messages
        bucket.bytes -= size
        self.messages -= messages
        self.bytes -= size
        if (bucket.first_ms, bucket.last_ms) == (first_ms, last_ms):
            bucket.own_expiry_ms = own_expiry_ms
            self._has_own = self._has_own or own_expiry_ms != 0

    def _join_neighbours(self) -> None:
        pairs = zip(self.buckets[::2], self.buckets[1::2], strict=False)
        joined = []
        for one, other in pairs:
            one.join(other)
            joined.append(one)
        if len(self.buckets) % 2:
            joined.append(self.buckets[-1])
        self.buckets = joined
