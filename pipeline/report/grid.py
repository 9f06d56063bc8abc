"""The time a report is about, cut into steps: rates are of the steps, sizes of the moments between them."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import InvalidParameter

#: So many steps at most, unless a step is asked for: a plot shows no more.
STEPS = 120
#: And with any step: the figures of a step are held in memory.
MAX_STEPS = 10_000
_NICE_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)


@dataclass(frozen=True, slots=True)
class Grid:
    """``start_ms <= time < end_ms``, in steps of ``step_ms`` from the start on; the last may be shorter."""

    start_ms: int
    end_ms: int
    step_ms: int

    @property
    def steps(self) -> int:
        """How many."""
        return -(-(self.end_ms - self.start_ms) // self.step_ms)

    def starts(self) -> list[int]:
        """When each step begins, in milliseconds."""
        return [self.start_ms + step * self.step_ms for step in range(self.steps)]

    def samples(self) -> list[int]:
        """The start of every step and the end of the last: one more than there are steps, in milliseconds."""
        return [*self.starts(), self.end_ms]

    def length_s(self, step: int) -> float:
        """How long a step is, in seconds."""
        start_ms = self.start_ms + step * self.step_ms
        return (min(start_ms + self.step_ms, self.end_ms) - start_ms) / 1000


def grid_over(start_ms: int, end_ms: int, step_s: int | None = None) -> Grid:
    """A grid over a time range.

    Args:
      step_s: seconds of a step; None: the shortest round length that makes at most ``STEPS`` of them.
    Raises:
      InvalidParameter: the range is empty, or makes too many steps.
    """
    if start_ms >= end_ms:
        raise InvalidParameter("the time range is empty", hint="--from must be before --to")
    if step_s is None:
        step_s = _nice_step_s((end_ms - start_ms) / 1000)
    grid = Grid(start_ms, end_ms, step_s * 1000)
    if grid.steps > MAX_STEPS:
        raise InvalidParameter(f"the range has {grid.steps} steps, {MAX_STEPS} at most", hint="use a longer --step")
    return grid


def _nice_step_s(range_s: float) -> int:
    for step_s in _NICE_S:
        if range_s <= step_s * STEPS:
            return step_s
    days = -(-range_s // (86_400 * STEPS))
    return int(days) * 86_400
