"""The simulation's result for each planted mistake: a table in docs/reliability.md."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from tests.cluster.history import records
from tests.documents import generated, write_generated
from tests.simulation import brief, moments
from tests.simulation.planted import MISTAKES, Mistake

#: Maximum number of histories per mistake.
MOST = 10_000


@dataclass(frozen=True, slots=True)
class Finding:
    """The result for one mistake."""

    mistake: Mistake
    histories: int
    cpu_s: float
    seed: int | None
    """The first bad history; None if the mistake was not found."""
    words: tuple[str, ...]
    """The violations in that history, in the judges' terms."""

    def row(self) -> str:
        if self.seed is None:
            return (
                f"| {self.mistake.name} | {self.mistake.promise} | not in {self.histories} | {self.cpu_s:.0f} | | | |"
            )
        judges = ", ".join(dict.fromkeys(map(judge_of, self.words)))
        return (
            f"| {self.mistake.name} | {self.mistake.promise} | {self.histories} | {self.cpu_s:.1f} "
            f"| {self.seed} | {judges} | {', '.join(self.words)} |"
        )


def judge_of(word: str) -> str:
    """Return the judge that uses this term."""
    if word in get_args(records.Kind):
        return "clients' histories"
    if word in get_args(brief.Kind):
        return "expiry"
    if word in get_args(moments.Kind):
        return "moments"
    others = {"garden": "lives of topics", "asleep": "who waits", "chain": "chains", "issued twice": "begins"}
    others |= {"shown undecided": "Tephra's clients", "missed conflict": "Tephra's clients"}
    return others.get(word, "answers")


def look_for(mistake: Mistake, most: int = MOST) -> Finding:
    """Plant the mistake in a separate process, and simulate until it is found."""
    command = [sys.executable, "-m", "tests.simulation", "--json", "--planted", mistake.name, "--count", str(most)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if not lines:
        raise RuntimeError(f"{mistake.name}: {done.stderr[-2000:]}")
    words = Counter[str]()
    for bad in lines[:-1]:
        words.update(kind for kind, _ in bad["anomalies"])
        if bad["unexplained"] and not bad["anomalies"]:
            words["unexplained answer, or no end"] += 1
    seed = lines[-1]["bad"][0] if lines[-1]["bad"] else None
    return Finding(mistake, lines[-1]["histories"], lines[-1]["cpuSeconds"], seed, tuple(sorted(words)))


def table(findings: Iterable[Finding], most: int = MOST) -> str:
    """Format the table in Markdown."""
    findings = list(findings)
    found = [each for each in findings if each.seed is not None]
    histories = sorted(each.histories for each in found)
    head = f"{len(found)} of {len(findings)} are found, each looked for in up to {most:,} histories"
    if histories:
        head += f", half of them within {histories[len(histories) // 2]}, nine in ten within {histories[len(histories) * 9 // 10]}"
    rows = [each.row() for each in sorted(findings, key=lambda each: (each.seed is None, each.histories))]
    columns = (
        "| mistake | breaks | found after histories | seconds of one core | seed | judge | calls it |\n"
        "|---|---|--:|--:|--:|---|---|"
    )
    return "\n".join([f"{head}.", "", columns, *rows])


def write(text: str) -> None:
    """Replace the table in the document."""
    write_generated("planted", text)


def names_in_document() -> list[str]:
    """Return the mistakes in the document's table."""
    between = generated("planted")
    return [line.split(" | ")[0].removeprefix("| ") for line in between.splitlines() if line.startswith("| ")][1:]


def main(mistakes: Iterable[Mistake] = MISTAKES, most: int = MOST) -> None:
    """Look for all mistakes, and write the table."""
    findings: list[Finding] = []
    for mistake in mistakes:
        findings.append(look_for(mistake, most))
        print(findings[-1].row(), file=sys.stderr, flush=True)
    write(table(findings, most))
