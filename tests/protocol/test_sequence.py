"""Message positions strictly increase, whatever the clock does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plainsong.protocol.ids import SEQUENCES_PER_MS
from plainsong.protocol.topic.state import PositionSequence, Run

#: Clocks that stop and jump both ways, with requests for a few positions or for more than fit in a millisecond.
takes = st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 2, 3, 65_535, 65_536, 65_537, 200_000])), max_size=8)


def positions(runs):
    return [(run.ts_ms << 16) + run.first + offset for run in runs for offset in (0, run.length - 1)]


@given(takes)
def test_positions_strictly_increase_under_any_clock(takes):
    sequence, last = PositionSequence(), -1
    for now_ms, count in takes:
        runs = sequence.take(now_ms, count)
        assert sum(run.length for run in runs) == count
        assert all(run.first + run.length <= SEQUENCES_PER_MS for run in runs)
        given_out = positions(runs)
        assert given_out[0] > last
        assert given_out == sorted(given_out)
        assert runs[0].ts_ms >= now_ms
        last = given_out[-1]
        assert last == (sequence.last_ts_ms << 16) + sequence.last_sequence_id


def test_a_later_clock_starts_the_millisecond_at_zero():
    sequence = PositionSequence(5, 7)
    assert sequence.take(6, 2) == [Run(6, 0, 2)]
    assert sequence.take(6, 1) == [Run(6, 2, 1)]
    assert sequence.take(3, 1) == [Run(6, 3, 1)]


def test_a_full_millisecond_continues_in_the_next():
    sequence = PositionSequence(5, 65_534)
    assert sequence.take(5, 3) == [Run(5, 65_535, 1), Run(6, 0, 2)]
    assert PositionSequence(5, 65_535).take(5, 1) == [Run(6, 0, 1)]
    assert PositionSequence().take(0, 131_073) == [Run(0, 0, 65_536), Run(1, 0, 65_536), Run(2, 0, 1)]


def test_a_position_seen_on_disk_is_not_issued_again():
    sequence = PositionSequence()
    sequence.advance_past(9, 4)
    sequence.advance_past(9, 2)
    sequence.advance_past(8, 60_000)
    assert sequence.take(1, 1) == [Run(9, 5, 1)]
