"""``python -m tests.schedules [--world copy] [--seconds 3600] [--seed 7 [--steps 12]]``."""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import time
import traceback
from typing import Any

from tests.schedules.copy_world import COPY
from tests.schedules.exploring import STEPS, many, one, shrunk
from tests.schedules.store_world import WHOLE

#: The worlds that can be explored, with their options.
WORLDS: dict[str, dict[str, Any]] = {"tables": {}, "store": WHOLE, "copy": COPY}


def main() -> int:
    """Run schedules; return exit status 1 if one failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.schedules", description="Explore orders of the store's threads."
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="how long")
    parser.add_argument("--seed", type=int, help="one schedule, again")
    parser.add_argument("--steps", type=int, default=STEPS, help="operations of each writer in a schedule")
    parser.add_argument("--world", choices=WORLDS, default="tables", help="whose threads (default: %(default)s)")
    chosen = parser.parse_args()
    how = WORLDS[chosen.world]
    logging.disable(logging.CRITICAL)
    if chosen.seed is not None:
        world = one(chosen.seed, steps=chosen.steps, **how)
        print(f"seed {chosen.seed}: {world.scheduler.points} points, {world.counts}")
        return 0
    found = many(itertools.count(time.time_ns() // 10**6), seconds=chosen.seconds, steps=chosen.steps, **how)
    print(f"{found.schedules} schedules, {found.points} points, {dict(found.counts)}")
    if found.error is None:
        return 0
    traceback.print_exception(found.error)
    smaller = shrunk(found, say=print, **how)
    print(
        f"repeat it with: python -m tests.schedules --world '{chosen.world}' --seed {smaller.seed} --steps {smaller.steps}"
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
