"""Explores schedules: ``python -m tests.schedules`` runs many, and shrinks the first one that fails."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.schedules.scheduler import Stuck
from tests.schedules.world import World, explore

#: Operations of each writer in a schedule.
STEPS = 12


@dataclass
class Found:
    """The result of exploring."""

    schedules: int = 0
    points: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    seed: int | None = None
    """Seed of the first failed schedule; None if none failed."""
    steps: int = 0
    error: BaseException | None = None


def home() -> Path:
    """Make a folder, in memory if possible: a schedule makes hundreds of syncs, and tests their order, not the disk."""
    memory = Path("/dev/shm")  # mkdtemp makes a private folder in it
    return Path(tempfile.mkdtemp(prefix="schedule-", dir=memory if memory.is_dir() else None))


def one(seed: int, *, steps: int = STEPS, **how: Any) -> World:
    """Run one schedule. Raises the failure."""
    folder = home()
    try:
        return explore(folder / "store", seed, steps=steps, **how)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def many(seeds: Iterable[int], *, seconds: float = float("inf"), steps: int = STEPS, **how: Any) -> Found:
    """Run schedules until one fails or the time is over."""
    found, until_s = Found(steps=steps), time.monotonic() + seconds
    for seed in seeds:
        if time.monotonic() > until_s:
            break
        try:
            world = one(seed, steps=steps, **how)
        except BaseException as error:  # a mistake may raise anything
            if isinstance(error, KeyboardInterrupt | Stuck):
                raise
            found.seed, found.error = seed, error
            return found
        found.schedules += 1
        found.points += world.scheduler.points
        found.counts.update(world.counts)
    return found


def shrunk(found: Found, *, tries: int = 40, say: Callable[[str], object] = lambda _: None, **how: Any) -> Found:
    """Search for a shorter failing schedule: fewer steps for each writer, and seeds near the one found."""
    assert found.seed is not None
    best = found
    for steps in range(1, found.steps):
        again = many(range(found.seed, found.seed + tries), steps=steps, **how)
        if again.seed is not None:
            say(f"{steps} steps are enough, with seed {again.seed}")
            best = again
            break
    return best
