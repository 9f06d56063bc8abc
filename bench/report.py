"""The report: tables in Markdown, all values in JSON, and plots."""

from __future__ import annotations

import json
import os
import platform
import time
from typing import TYPE_CHECKING, Any

from bench.generator import generator
from bench.plots import draw
from bench.targets import judge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from bench.rounds import Row, Section, Spread
    from bench.targets import Verdict

REPORT = "report.md"
RESULTS = "results.json"


def write_report(directory: Path, results: dict[str, Any], sections: Sequence[Section]) -> list[Path]:
    """Write the report into ``directory``, replacing an earlier one; return its files."""
    directory.mkdir(parents=True, exist_ok=True)
    plots = draw(directory, sections)
    files = {RESULTS: json.dumps(results, indent=1, ensure_ascii=False), REPORT: _markdown(results, sections, plots)}
    for name, text in files.items():
        (directory / name).write_text(text + "\n", encoding="utf-8")
    return [directory / name for name in (*files, *plots.values())]


def results_of(
    profile: str, facts: dict[str, str], sections: Sequence[Section], verdicts: Sequence[Verdict]
) -> dict[str, Any]:
    """Return everything a run has measured, in the form of ``results.json``."""
    return {
        "profile": profile,
        "facts": facts,
        "targets": [verdict.record() for verdict in verdicts],
        "sections": {section.name: section.record() for section in sections},
    }


def machine() -> dict[str, str]:
    """Describe the properties of the machine that affect the numbers."""
    return {
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "load before": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "load generator": generator(),
        "date": time.strftime("%Y-%m-%d"),
    }


def conclude(
    profile: str,
    facts: dict[str, str],
    sections: Sequence[Section],
    directory: Path,
    say: Callable[[str], None],
    *,
    as_json: bool,
) -> None:
    """Judge a run against its targets, print verdicts, and write the report; ``as_json``: also to standard output."""
    verdicts = judge(sections)
    say("")
    for verdict in verdicts:
        say(verdict_line(verdict))
    results = results_of(profile, facts, sections, verdicts)
    files = write_report(directory, results, sections)
    say("\nreport: " + ", ".join(str(file) for file in files))
    if as_json:
        print(json.dumps(results, ensure_ascii=False))


def verdict_line(verdict: Verdict) -> str:
    """Format a verdict for the terminal."""
    word = "reached" if verdict.reached else "MISSED "
    return f"{word}  {verdict.target}: {number(verdict.result)} ({verdict.direction} {number(verdict.bound)}; {verdict.where})"


def _markdown(results: dict[str, Any], sections: Sequence[Section], plots: dict[str, str]) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in results["facts"].items())
    out = ["# Benchmark", "", f"Profile *{results['profile']}*; {facts}.", ""]
    out += [
        "How each number is taken and what it means: `docs/benchmarks.md`. Every value is the median of the rounds,",
        "with the lowest and highest in brackets. Columns with ÷ are ratios, taken within each round.",
        "",
    ]
    if results["targets"]:
        out += _targets(results["targets"])
    for section in sections:
        out += ["", f"## {section.title}", "", section.says, ""]
        if section.name in plots:
            out += [f"![{section.title}]({plots[section.name]})", ""]
        out += _table(section.rows)
    if not plots:
        out += ["", "(No plots: matplotlib is not installed; `make bench` installs it.)"]
    return "\n".join(out)


def _targets(targets: Sequence[dict[str, Any]]) -> list[str]:
    out = [
        "## Targets",
        "",
        "| target | bound | result | verdict | where it was lowest or highest |",
        "|---|---|---|---|---|",
    ]
    for each in targets:
        word = "reached" if each["reached"] else "**missed**"
        bound = f"{each['direction']} {number(each['bound'])}"
        out.append(f"| {each['target']} | {bound} | {number(each['result'])} | {word} | {each['where']} |")
    return out


def _table(rows: Sequence[Row]) -> list[str]:
    labels = list(dict.fromkeys(name for row in rows for name in row.what))
    columns = list(dict.fromkeys(name for row in rows for name in row.values))
    out = ["| " + " | ".join([*labels, *columns]) + " |", "|" + "---|" * (len(labels) + len(columns))]
    for row in rows:
        cells = [str(row.what.get(label, "")) for label in labels]
        cells += [_spread(row.values[name]) if name in row.values else "" for name in columns]
        out.append("| " + " | ".join(cells) + " |")
    return out


def _spread(spread: Spread) -> str:
    if spread.low == spread.high:
        return number(spread.median)
    return f"{number(spread.median)} ({number(spread.low)} – {number(spread.high)})"


def number(value: float) -> str:
    """Format a number for people: three digits, thousands as k, millions as M."""
    if value >= 1e6:
        return f"{value / 1e6:.2f} M"
    if value >= 1000:
        return f"{value / 1000:.1f} k"
    if value == 0:
        return "0"
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}"
