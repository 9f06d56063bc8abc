"""A report as one HTML page: plots and tables, what each figure is made from, and what is not known.

The page needs nothing else: no script, no font, no picture from elsewhere; it may be mailed and printed.
"""

from __future__ import annotations

import os
from html import escape
from typing import TYPE_CHECKING

from pipeline.report.plots import MAX_LINES, plots_of
from pipeline.report.report import MADE_FROM
from pipeline.report.shown import tables_of
from plainsong.cli.options import show_length, show_time

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pipeline.report.report import Report

_CSS = """
:root { color-scheme: light dark; --back: #ffffff; --text: #1c2024; --quiet: #5b636b; --rule: #d9dde1; }
@media (prefers-color-scheme: dark) {
  :root { --back: #15181b; --text: #e4e7ea; --quiet: #9aa3ab; --rule: #363c42; }
}
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif;
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem; }
p, figcaption { color: var(--quiet); margin: .2rem 0 .8rem; max-width: 46rem; }
figure { margin: .5rem 0; } svg { width: 100%; height: auto; font-family: system-ui, sans-serif; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .4rem 0 1rem; }
th, td { padding: .2rem .9rem .2rem 0; border-bottom: 1px solid var(--rule); text-align: left; white-space: nowrap; }
th { font-weight: 600; color: var(--quiet); } .n { text-align: right; }
"""


def page_of(report: Report) -> str:
    """The whole page."""
    grid = report.grid
    span = f"{show_time(grid.start_ms)} to {show_time(grid.end_ms)}"
    topics = ", ".join(facts.topic for facts in report.topics)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Plainsong: {escape(span)}</title><style>{_CSS}</style></head><body>",
        f"<h1>Plainsong report</h1><p>{escape(span)}, in steps of {show_length(grid.step_ms)}. Made "
        f"{show_time(report.made_ms)} from {report.messages:,} messages of {escape(topics)}. Times are UTC, by the "
        "daemon's clock.</p>",
        *_sections(report),
        *_unknown(report.notes),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def write_page(report: Report, file: Path) -> None:
    """Write it, whole or not at all. Raises OSError: what was there is as it was."""
    beside = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(page_of(report), encoding="utf-8")
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)


def _sections(report: Report) -> list[str]:
    plots = {plot.key: plot for plot in plots_of(report)}
    parts: list[str] = []
    told: set[str] = set()
    for key, title, headings, rows in tables_of(report):
        parts.append(f"<h2>{escape(title)}</h2>")
        if key not in told:
            parts.append(f"<p>{escape(MADE_FROM[key])}</p>")
            if key in plots:
                caption = plots[key].title + _left_out(report, key)
                drawing = plots[key].svg.replace("<svg", f'<svg role="img" aria-label="{escape(caption)}"', 1)
                parts.append(f"<figure>{drawing}<figcaption>{escape(caption)}</figcaption></figure>")
            elif key == "latency" and report.latency_steps:
                parts.append("<p>Of the messages that could be read, none was held up.</p>")
        told.add(key)
        parts.append(_table(headings, rows))
    return parts


def _left_out(report: Report, key: str) -> str:
    left_out = len(report.topics) - MAX_LINES
    return "" if left_out <= 0 or key == "holds" else f" ({left_out} topics with fewer messages are not drawn)"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    classes = [' class="n"' if heading.startswith(">") else "" for heading in headings]
    names = [heading.removeprefix(">").capitalize() for heading in headings]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for kind, name in zip(classes, names, strict=True))
    body = "\n".join(
        "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(classes, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _unknown(notes: Sequence[str]) -> list[str]:
    if not notes:
        return []
    return ["<h2>Not known</h2><ul>", *(f"<li>{escape(note)}</li>" for note in notes), "</ul>"]
