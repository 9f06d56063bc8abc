"""Explores schedules: ``python -m tests.schedules`` runs many, shrinks the first that fails, and says how to repeat it."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.schedules.world import World, explore

#: What each writer does in a schedule.
STEPS = 12


@dataclass
class Found:
    """What exploring came to."""

    schedules: int = 0
    points: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    seed: int | None = None
    """Of the first schedule that failed; None if none did."""
    steps: int = 0
    error: BaseException | None = None


def home() -> Path:
    """A folder in memory if there is one: a schedule syncs some hundred times, and its subject is the order, not the disk."""
    memory = Path("/dev/shm")  # not shared: a folder of its own is made in it
    return Path(tempfile.mkdtemp(prefix="schedule-", dir=memory if memory.is_dir() else None))


def one(seed: int, *, steps: int = STEPS, **how: Any) -> World:
    """One schedule. Raises what went wrong."""
    folder = home()
    try:
        return explore(folder / "store", seed, steps=steps, **how)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def many(seeds: Iterable[int], *, seconds: float = float("inf"), steps: int = STEPS, **how: Any) -> Found:
    """Schedules, until one fails or the time is over."""
    found, until_s = Found(steps=steps), time.monotonic() + seconds
    for seed in seeds:
        if time.monotonic() > until_s:
            break
        try:
            world = one(seed, steps=steps, **how)
        except BaseException as error:  # whatever a mistake leads to
            if isinstance(error, KeyboardInterrupt):
                raise
            found.seed, found.error = seed, error
            return found
        found.schedules += 1
        found.points += world.scheduler.points
        found.counts.update(world.counts)
    return found


def shrunk(found: Found, *, tries: int = 40, say: Callable[[str], object] = lambda _: None, **how: Any) -> Found:
    """A shorter schedule that fails: fewer steps of each writer, by some seed near the one that was found."""
    assert found.seed is not None
    best = found
    for steps in range(1, found.steps):
        again = many(range(found.seed, found.seed + tries), steps=steps, **how)
        if again.seed is not None:
            say(f"{steps} steps are enough, with seed {again.seed}")
            best = again
            break
    return best
