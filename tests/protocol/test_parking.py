"""Parked polls: woken by position or deadline, and forgotten when their callers leave."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plainsong.protocol.topic.asks import Look
from plainsong.protocol.topic.core import Parking

#: The answer at the deadline, which these tests ignore.
SPAN = None

actions = st.lists(
    st.one_of(
        st.tuples(st.just("park"), st.integers(0, 9), st.integers(0, 9)),
        st.tuples(st.just("reached"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("overdue"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("leave"), st.integers(0, 30), st.just(0)),
    ),
    max_size=60,
)


@given(actions)
def test_each_poll_is_removed_once_when_a_message_arrives_or_its_time_is_over(actions):
    parking, model = Parking(), {}
    for number, (what, one, other) in enumerate(actions):
        if what == "park":
            parking.park(number, Look(bytes([one]), deadline_s=float(other)), SPAN)
            model[number] = (bytes([one]), float(other))
            continue
        if what == "leave":
            assert parking.leave(one) == (model.pop(one, None) is not None)
            gone, taken = set(), []
        elif what == "reached":
            gone, taken = (
                {n for n, (since, _) in model.items() if since < bytes([one])},
                parking.take_reached(bytes([one])),
            )
        else:
            gone, taken = (
                {n for n, (_, deadline_s) in model.items() if deadline_s <= one},
                parking.take_overdue(float(one)),
            )
        assert {parked.ticket for parked in taken} == gone
        assert len(taken) == len(gone)
        for ticket in gone:
            del model[ticket]
        assert len(parking) == len(model)
        assert parking.next_deadline_s() == min((deadline_s for _, deadline_s in model.values()), default=None)
    assert {parked.ticket for parked in parking.take_all()} == set(model)
    assert len(parking) == 0


def held(parking):
    """Return the number of entries in the heaps, including dead ones."""
    return len(parking._by_since), len(parking._by_deadline)


def test_abandoned_polls_are_not_held_in_memory():
    parking = Parking()
    for number in range(5_000):
        parking.park(number, Look(bytes([9]), deadline_s=1.0), SPAN)
    for number in range(5_000):
        parking.leave(number)
    assert max(held(parking)) <= 64


def test_polls_that_are_woken_again_and_again_are_not_held_until_their_deadline():
    parking = Parking()
    parking.park("first", Look(bytes([9]), deadline_s=10.0), SPAN)
    for number in range(5_000):
        parking.park(number, Look(bytes([1]), deadline_s=60.0 + number), SPAN)
        assert len(parking.take_reached(bytes([2]))) == 1
    assert len(parking) == 1
    assert max(held(parking)) <= 70


def test_polls_that_time_out_are_not_held_until_the_next_message():
    parking = Parking()
    for number in range(5_000):
        parking.park(number, Look(bytes([9]), deadline_s=float(number)), SPAN)
        assert len(parking.take_overdue(float(number))) == 1
    assert max(held(parking)) <= 70
