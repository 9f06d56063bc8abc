"""Whether a series of measurements is flat: the slope that half of all pairs exceed, which outliers do not move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

#: All pairs of so many points are looked at; a longer series is thinned out.
POINTS = 300


@dataclass(frozen=True, slots=True)
class Limit:
    """How much a measurement may grow from one end of a run to the other: the larger of the two."""

    share: float
    """Of its median."""
    at_least: float
    """In its own unit."""


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """The median of the slopes of all pairs of points (Theil and Sen)."""
    step = max(1, len(times) // POINTS)
    points = list(zip(times, values, strict=True))[::step]
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2) if x2 > x1]
    return median(slopes) if slopes else 0.0


def growth(times: Sequence[float], values: Sequence[float]) -> float:
    """What the slope makes of the whole length, in the unit of the values."""
    return slope(times, values) * (times[-1] - times[0]) if times else 0.0


def is_flat(times: Sequence[float], values: Sequence[float], limit: Limit) -> bool:
    """Whether it grew by no more than its limit. What becomes less is flat."""
    return not values or growth(times, values) <= max(limit.share * median(values), limit.at_least)
