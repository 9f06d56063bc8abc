"""The soak's slope test: noise and single spikes are flat, a leak is not."""

from __future__ import annotations

from random import Random

import pytest

from tests.torture.slope import Limit, growth, is_flat

TIMES = [float(second) for second in range(600)]
LIMIT = Limit(share=0.05, at_least=2.0)


def noisy(grows_by: float) -> list[float]:
    rng = Random(19)
    return [100 + grows_by * time / 600 + rng.gauss(0, 5) for time in TIMES]


def test_noise_and_spikes_are_flat():
    values = noisy(0)
    for at in range(0, 600, 50):
        values[at] = 1000
    assert is_flat(TIMES, values, LIMIT)


def test_a_small_leak_under_much_noise_is_not_flat():
    assert not is_flat(TIMES, noisy(15), LIMIT)


def test_a_decrease_is_flat():
    assert is_flat(TIMES, noisy(-50), LIMIT)


def test_growth_is_reported_in_the_unit_of_the_values():
    assert growth(TIMES, [2 * time for time in TIMES]) == pytest.approx(2 * 599)


def test_a_small_number_may_grow_by_at_least_the_allowance():
    assert is_flat([0, 1, 2, 3], [1, 1, 2, 2], LIMIT)
    assert not is_flat([0, 1, 2, 3], [1, 3, 5, 7], LIMIT)
