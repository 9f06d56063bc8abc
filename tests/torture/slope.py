"""Flatness of a series of measurements, by the median slope of all pairs, which outliers do not affect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

#: Longer series are thinned out to this number of points.
POINTS = 300


@dataclass(frozen=True, slots=True)
class Limit:
    """Allowed growth of a measurement over a run: the larger of ``share`` and ``at_least``."""

    share: float
    """As a fraction of its median."""
    at_least: float
    """In the measurement's unit."""


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Return the median slope of all pairs of points (Theil and Sen)."""
    step = max(1, len(times) // POINTS)
    points = list(zip(times, values, strict=True))[::step]
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2) if x2 > x1]
    return median(slopes) if slopes else 0.0


def growth(times: Sequence[float], values: Sequence[float]) -> float:
    """Return the slope multiplied by the duration, in the values' unit."""
    return slope(times, values) * (times[-1] - times[0]) if times else 0.0


def is_flat(times: Sequence[float], values: Sequence[float], limit: Limit) -> bool:
    """True if the values grew by no more than the limit; a decrease counts as flat."""
    return not values or growth(times, values) <= max(limit.share * median(values), limit.at_least)
