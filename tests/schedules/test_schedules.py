"""The store's threads in many orders: no schedule loses, invents or changes an acknowledged row, here or in its copy.

The seeds are the same each time; ``make torture`` uses new ones for an hour. The second half plants mistakes, and the
code of version 0.1, and checks that exploring finds them.
"""

from __future__ import annotations

import gc
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.planted import seeds_for
from tests.schedules import scheduler as sched
from tests.schedules.copy_world import COPY
from tests.schedules.exploring import Found, many, one
from tests.schedules.mistakes import COPY_MISTAKES, MISTAKES, STORE_MISTAKES
from tests.schedules.parts import AT_STARTS, PARTS, noted, rows_of_design
from tests.schedules.store_world import WHOLE

HOUR_S = 3600.0

#: Worlds, and the number of schedules in a normal test run: a quarter of a minute of an idle core in total. Budgets are
#: counts, so that a busy machine takes longer but runs the same schedules.
WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "tables": (60, {}),
    "store": (32, WHOLE),
    "copy": (24, COPY),
}
#: Events that must occur, so that schedules without any work are detected.
HAPPENS = {
    "tables": ("acknowledged", "scans", "views", "kills", "gone", "faults", "failed"),
    "store": ("acknowledged", "in the thread", "inline", "scans", "backups", "scrubs", "merges", "kills"),
    "copy": ("acknowledged", "segments", "scans", "shown", "finished"),
}
#: Schedules within which each planted mistake has to be found; most need a dozen, the slowest took 65.
BUDGET = 200
PLANTED = [
    *((name, each, {}) for name, each in MISTAKES.items()),
    *((name, each, WHOLE) for name, each in STORE_MISTAKES.items()),
    *((name, each, COPY) for name, each in COPY_MISTAKES.items()),
]
#: Seeds that found a mistake, or a race of version 0.1, only after many others. A normal run tries them first; if the
#: store's code has changed, the search goes through all seeds again. ``make torture`` always searches.
QUICK_SEEDS = {
    "a_view_that_outlives_its_volume": 7,
    "a_change_of_what_is_being_replaced": 19,
    "a_rewrite_that_misses_changes": 10,
    "a_checkpoint_that_forgets": 37,
    "a_wake_up_that_is_lost": 2,
    "a_loop_that_writes_while_the_thread_does": 57,
    "a_batch_that_is_sent_before_it_is_durable": 5,
    "a seal next to a drop makes the next volume twice": 135,
    "a rollback after a seal is not done": 7,
}
#: A failing schedule abandons its event loop.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:Trio guest run")


@pytest.fixture(autouse=True)
def quiet():
    """Silence the store's log about the planned faults."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def good(world: str, found: Found) -> None:
    """Raise AssertionError with the command that repeats the failed schedule, if any."""
    if found.error is not None:
        command = f"python -m tests.schedules --world '{world}' --seed {found.seed} --steps {found.steps}"
        raise AssertionError(command) from found.error


@pytest.mark.parametrize("world", WORLDS)
def test_no_schedule_loses_or_changes_acknowledged_messages(world):
    schedules, how = WORLDS[world]
    found = many(range(schedules), **how)
    good(world, found)
    assert min(found.counts[what] for what in HAPPENS[world]) > 5, found.counts


@pytest.mark.torture
@pytest.mark.parametrize("world", WORLDS)
def test_no_schedule_of_an_hour_loses_or_changes_acknowledged_messages(world):
    _, how = WORLDS[world]
    found = many(itertools.count(time.time_ns() // 10**6), seconds=HOUR_S / len(WORLDS), **how)
    good(world, found)
    print(f"{found.schedules} schedules, {found.points} points, {dict(found.counts)}")


@pytest.mark.parametrize("world", WORLDS)
def test_a_schedule_is_repeated_by_its_seed(world):
    _, how = WORLDS[world]
    first, again = one(3, **how), one(3, **how)
    assert (first.scheduler.points, first.counts) == (again.scheduler.points, again.counts)


class Garbage:
    """A cycle that only the garbage collector frees; its finalizer reaches a point, as a lock's release does."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        sched.point()


@pytest.fixture
def collects_often():
    """Run the garbage collector as often as possible, wherever it may run."""
    usual = gc.get_threshold()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*usual)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("collects_often")
def test_garbage_of_earlier_schedules_changes_no_schedule(seed):
    def points(make: Callable[[], object]) -> int:
        def work() -> None:
            for _ in range(200):
                make()
                sched.point()

        def main() -> None:
            threads = [sched.Thread(target=work) for _ in range(3)]
            for each in (*(each.start for each in threads), *(each.join for each in threads)):
                each()

        with sched.running(sched.Scheduler(seed)) as chosen:
            chosen.run(main)
        return chosen.points

    assert points(Garbage) == points(object)


#: Seeds that have found defects, by world, with their steps.
FOUND = [
    # An unreadable list of logs, while the store was reopened, raised an error that was not a StoreError.
    ("store", 30008, 12),
    # The removal of an older version failed: it reappears while the newer one is being removed.
    ("store", 20007, 12),
]


@pytest.mark.parametrize(("world", "seed", "steps"), FOUND)
def test_a_schedule_that_once_found_a_fault_no_longer_finds_it(world, seed, steps):
    _, how = WORLDS[world]
    good(world, many([seed], steps=steps, **how))


def test_each_structure_used_by_two_threads_takes_part():
    with noted() as found:
        good("tables", many(range(4)))
        good("store", many(range(6), **WHOLE))
        good("copy", many(range(4), **COPY))
    assert list(PARTS) == rows_of_design()
    alone = {name for name in PARTS if len(found[name]) < 2}
    assert alone <= AT_STARTS, dict(found)


@pytest.mark.parametrize(("name", "planted", "how"), PLANTED, ids=[name for name, _, _ in PLANTED])
def test_exploring_finds_a_planted_mistake(name, planted, how):
    with planted():
        found = many(seeds_for(name, QUICK_SEEDS, range(BUDGET)), steps=24, **how)
    assert found.error is not None, f"{name}: not found in {BUDGET} schedules"


#: For the store of version 0.1: symptoms of the races that destroyed it.
RACES = {
    "a seal next to a drop makes the next volume twice": ("DroppingWorld", "the next volume cannot be made"),
    "a rollback after a seal is not done": ("ThenWorld", "and may be"),
}


@pytest.mark.parametrize("race", RACES)
def test_exploring_finds_the_races_of_version_0_1(race):
    from tests.schedules import then

    world, text = RACES[race]
    how = {"steps": 40, "make": getattr(then, world), "patches": then.patched_then, "files": then.LINES}
    for seed in seeds_for(race, QUICK_SEEDS, range(BUDGET)):
        found = many([seed], **how)
        if found.error is not None and text in str(found.error):
            return
    raise AssertionError(f"not found in {BUDGET} schedules")
