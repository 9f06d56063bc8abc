"""Measuring in turn: each side and its baseline within the same seconds, because the machine is never quiet.

Ratios are computed round by round, from values of the same round, and only then reduced to a median: what slows the
machine down for a second slows both sides.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some values, the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one or more values."""
        return cls(median(values), min(values), max(values))

    @classmethod
    def ratio(cls, values: Sequence[float], baseline: Sequence[float]) -> Spread:
        """Return the spread of ``values[i] / baseline[i]``."""
        return cls.of([value / base for value, base in zip(values, baseline, strict=True)])


@dataclass(slots=True)
class Row:
    """One line of a table: labels and results."""

    what: dict[str, str | int]
    values: dict[str, Spread]

    def record(self) -> dict[str, Any]:
        """Return its form in the JSON report."""
        return {"what": self.what, "values": {name: asdict(value) for name, value in self.values.items()}}


@dataclass(slots=True)
class Section:
    """The results of one kind of measurement. Columns that begin with ``÷`` are ratios."""

    name: str
    title: str
    says: str
    """Explanation of the numbers, in a sentence or two."""
    rows: list[Row] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """Return its form in the JSON report."""
        return {"title": self.title, "says": self.says, "rows": [row.record() for row in self.rows]}


def in_turns(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return each side's values, one a round, in the order A B C, C B A, A B C …, so that drift favours no side."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
            found[name].append(sides[name]())
    return found
