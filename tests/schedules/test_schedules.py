"""The store's threads in many orders: none loses, invents or changes a row that was acknowledged.

The seeds are the same each time; ``make torture`` takes new ones for an hour. The second half plants mistakes, and the code
of version 0.1, and looks whether exploring finds them.
"""

from __future__ import annotations

import itertools
import logging
import time

import pytest

from tests.schedules.exploring import many, one
from tests.schedules.mistakes import MISTAKES

#: Schedules of a run of all tests: half a minute of a quiet core.
SCHEDULES = 250
#: Schedules in which each planted mistake has to be found; the slowest took 23.
BUDGET = 80


@pytest.fixture(autouse=True)
def quiet():
    """Faults are part of it: what the store logs of them is not."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_no_schedule_loses_or_changes_what_was_acknowledged():
    found = many(range(SCHEDULES))
    if found.error is not None:
        raise AssertionError(f"python -m tests.schedules --seed {found.seed}") from found.error
    counts = found.counts
    assert min(counts[what] for what in ("acknowledged", "scans", "views", "kills", "gone", "faults", "failed")) > 10, (
        counts
    )


@pytest.mark.torture
def test_no_schedule_of_an_hour_loses_or_changes_what_was_acknowledged():
    found = many(itertools.count(time.time_ns() // 10**6), seconds=3600.0)
    if found.error is not None:
        raise AssertionError(f"python -m tests.schedules --seed {found.seed}") from found.error
    print(f"{found.schedules} schedules, {found.points} points, {dict(found.counts)}")


def test_a_schedule_is_repeated_by_its_seed():
    first, again = one(3), one(3)
    assert (first.scheduler.points, first.counts) == (again.scheduler.points, again.counts)


@pytest.mark.parametrize("name", MISTAKES)
def test_exploring_finds_a_mistake_that_was_planted(name):
    with MISTAKES[name]():
        found = many(range(BUDGET), steps=24)
    assert found.error is not None, f"{name}: not found in {BUDGET} schedules"


#: Of the store of version 0.1: what the races that destroyed it look like from outside.
RACES = {
    "a seal next to a drop makes the next volume twice": ("DroppingWorld", "the next volume cannot be made"),
    "a rollback after a seal is not done": ("ThenWorld", "and may be"),
}


@pytest.mark.parametrize("race", RACES)
def test_exploring_finds_the_races_of_version_0_1(race):
    from tests.schedules import then

    world, text = RACES[race]
    how = {"steps": 40, "make": getattr(then, world), "patches": then.patched_then, "files": then.LINES}
    for seed in range(BUDGET):
        found = many([seed], **how)
        if found.error is not None and text in str(found.error):
            return
    raise AssertionError(f"not found in {BUDGET} schedules")
