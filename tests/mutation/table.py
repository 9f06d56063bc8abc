"""Each module's mutants and their results, as a table for docs/reliability.md."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from tests.documents import write_generated
from tests.mutation.equivalent import why_equivalent
from tests.mutation.judge import Verdict
from tests.mutation.mutants import ROOT, Mutant


class Judged(Protocol):
    """The stored result of a mutant."""

    @property
    def verdict(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Row:
    """The counts of one module."""

    module: str
    mutants: int
    """Number of mutants that mutmut makes of the module."""
    tried: int
    killed: int
    equivalent: int
    open: int

    @property
    def share(self) -> float:
        """The share of killed mutants, leaving out equivalent ones."""
        return self.killed / (self.killed + self.open) if self.killed + self.open else 1.0


def row(module: str, mutants: int, sample: Iterable[Mutant], kept: Mapping[str, Judged]) -> Row:
    """Count the results of a module's mutants, except those that change code that runs at import."""
    killed = equivalent = still_open = 0
    for each in sample:
        match kept[each.key].verdict if each.key in kept else None:
            case Verdict.KILLED | Verdict.ENDLESS:
                killed += 1
            case Verdict.SURVIVED | Verdict.UNCOVERED:
                if why_equivalent(each) is None:
                    still_open += 1
                else:
                    equivalent += 1
    return Row(module, mutants, killed + equivalent + still_open, killed, equivalent, still_open)


def total(rows: Iterable[Row]) -> Row:
    rows = list(rows)
    return Row(
        "all",
        sum(each.mutants for each in rows),
        sum(each.tried for each in rows),
        sum(each.killed for each in rows),
        sum(each.equivalent for each in rows),
        sum(each.open for each in rows),
    )


def text(rows: Iterable[Row], seed: int, examples: int | None) -> str:
    """Return the table in Markdown."""
    rows = list(rows)
    whole = total(rows)
    searched = "" if examples is None else f" Tests that search looked at up to {examples} examples each."
    lines = [
        f"Commit {_commit()}, seed {seed}: of {whole.mutants:,} mutants of {len(rows)} modules {whole.tried:,} were tried, "
        f"and {whole.killed:,} killed: {whole.share:.1%} of those that are not equivalent.{searched}",
        "",
        "| module | mutants | tried | killed | survivors, equivalent | survivors, open | killed of what can be |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for each in [*rows, whole]:
        name = f"`plainsong/protocol/{each.module}.py`" if each is not whole else "**all**"
        numbers = (f"{each.mutants:,}", f"{each.tried:,}", f"{each.killed:,}", each.equivalent, each.open)
        lines.append(f"| {name} | {' | '.join(map(str, numbers))} | {each.share:.0%} |")
    return "\n".join(lines)


def write(markdown: str) -> None:
    """Replace the table in the document."""
    write_generated("mutated", markdown)


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
