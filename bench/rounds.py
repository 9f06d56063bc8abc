"""Measuring in turns: every side and its baseline in the same seconds, since the machine is never quiet.

Ratios are taken round by round, one side against the other's value of the same round, and only then reduced
to a median: what slows the machine down for a second slows both.
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
        """The spread of at least one value."""
        return cls(median(values), min(values), max(values))

    @classmethod
    def ratio(cls, values: Sequence[float], baseline: Sequence[float]) -> Spread:
        """The spread of ``values[i] / baseline[i]``."""
        return cls.of([value / base for value, base in zip(values, baseline, strict=True)])


@dataclass(slots=True)
class Row:
    """One line of a table: what was measured, and what came out."""

    what: dict[str, str | int]
    values: dict[str, Spread]

    def record(self) -> dict[str, Any]:
        """As the JSON report has it."""
        return {"what": self.what, "values": {name: asdict(value) for name, value in self.values.items()}}


@dataclass(slots=True)
class Section:
    """The results of one kind of measurement. Columns that begin with ``÷`` are ratios."""

    name: str
    title: str
    says: str
    """What the numbers are, in a sentence or two."""
    rows: list[Row] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """As the JSON report has it."""
        return {"title": self.title, "says": self.says, "rows": [row.record() for row in self.rows]}


def in_turns(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Each side's values, one a round: A B C, C B A, A B C …, so that a slow drift favours nobody."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
            found[name].append(sides[name]())
    return found
