"""Walking through lineage: from a dataset to what it came from, or to what came from it, step by step.

The steps are flows, asked for as the walk gets to them, so that a walk costs what it finds and not what there is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from datetime import datetime

Direction = Literal["up", "down"]


@dataclass(frozen=True)
class Flow:
    """Runs of a program took from `source` and wrote to `target`."""

    source: str
    program: str
    target: str
    runs: int
    first_seen: datetime
    last_seen: datetime
    #: The one run, where runs are told apart.
    run: str | None = None

    def near(self, direction: Direction) -> str:
        """The end that a walk in this direction comes from."""
        return self.target if direction == "up" else self.source

    def far(self, direction: Direction) -> str:
        """The end that it goes to."""
        return self.source if direction == "up" else self.target


def walk(
    dataset: str,
    flows_at: Callable[[Collection[str]], Iterable[Flow]],
    direction: Direction,
    depth: int | None = None,
) -> Iterator[tuple[int, Flow]]:
    """Flows on the way from a dataset, with their distance: 1 for those that touch it.

    Args:
      flows_at: the flows whose near end is one of these datasets.
      depth: how many flows a way may have; None: any number.
    Each dataset is gone on from once, when it is met first: so each flow comes once, a flow that closes a cycle comes
    too, and the walk ends.
    """
    seen = {dataset}
    frontier = {dataset}
    distance = 0
    while frontier and (depth is None or distance < depth):
        distance += 1
        met: set[str] = set()
        for flow in sorted(
            flows_at(frontier), key=lambda each: (each.source, each.target, each.program, each.run or "")
        ):
            yield distance, flow
            met.add(flow.far(direction))
        frontier = met - seen
        seen |= met
