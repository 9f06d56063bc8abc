"""Where message ids come from: positions that strictly increase, whatever the clock does.

    ts  = the later of the topic's time and the last timestamp given
    seq = 0 when ts grew, else the last plus one; a full millisecond goes over into the next

Never from the clock alone: after a restart the last position given is recovered from the table and from
the high-water mark, so that no key is ever written twice.
"""

from __future__ import annotations

from typing import NamedTuple

from protocol.ids import SEQUENCES_PER_MS


class Run(NamedTuple):
    """Consecutive positions within one millisecond: ``(ts, first)`` to ``(ts, first + length - 1)``."""

    ts_ms: int
    first: int
    length: int


class Sequence:
    """The positions of one generation; gives each out once."""

    __slots__ = ("last_sequence_id", "last_ts_ms")

    def __init__(self, last_ts_ms: int = 0, last_sequence_id: int = -1) -> None:
        self.last_ts_ms = last_ts_ms
        self.last_sequence_id = last_sequence_id

    def __repr__(self) -> str:
        return f"<Sequence {self.last_ts_ms}:{self.last_sequence_id}>"

    def saw(self, ts_ms: int, sequence_id: int) -> None:
        """Never give out this position or one before it."""
        if (ts_ms, sequence_id) > (self.last_ts_ms, self.last_sequence_id):
            self.last_ts_ms, self.last_sequence_id = ts_ms, sequence_id

    def take(self, now_ms: int, count: int) -> list[Run]:
        """``count`` new positions, in order; more than one run when a millisecond is full."""
        runs = []
        ts, seq = self.last_ts_ms, self.last_sequence_id + 1
        if now_ms > ts:
            ts, seq = now_ms, 0
        while count:
            if seq == SEQUENCES_PER_MS:
                ts, seq = ts + 1, 0
            taken = min(count, SEQUENCES_PER_MS - seq)
            runs.append(Run(ts, seq, taken))
            seq += taken
            count -= taken
        self.last_ts_ms, self.last_sequence_id = ts, seq - 1
        return runs
