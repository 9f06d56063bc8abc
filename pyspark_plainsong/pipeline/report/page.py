"""A report as one HTML page: plots and tables, what each figure is made from, and what is not known.

The page is complete: no script, no font and no picture from elsewhere; it may be mailed and printed.
"""

from __future__ import annotations

import io
import os
import re
from datetime import UTC
from html import escape
from math import ceil
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib as mpl
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from plainsong.cli.options import show_length, show_time
from plainsong.protocol.plurals import counted, plural
from pyspark_plainsong.pipeline.report.facts import MADE_FROM
from pyspark_plainsong.pipeline.report.text import show_count, tables_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from pyspark_plainsong.pipeline.report.facts import Report

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
        f"{show_time(report.made_ms)} from {show_count(report.messages)} {plural('message', report.messages)} of "
        f"{escape(topics)}. Times are UTC, by the daemon's clock.</p>",
        *_sections(report),
        *_unknown(report.notes),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def write_page(report: Report, file: Path) -> None:
    """Write the page atomically. Raises OSError: the file is unchanged."""
    beside = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(page_of(report), encoding="utf-8")
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)


def _sections(report: Report) -> list[str]:
    plots = {plot.key: plot for plot in plots_of(report)}
    parts: list[str] = []
    explained: set[str] = set()
    for key, title, headings, rows in tables_of(report):
        parts.append(f"<h2>{escape(title)}</h2>")
        if key not in explained:
            parts.append(f"<p>{escape(MADE_FROM[key])}</p>")
            if key in plots:
                caption = plots[key].title + _left_out(report, key)
                drawing = plots[key].svg.replace("<svg", f'<svg role="img" aria-label="{escape(caption)}"', 1)
                parts.append(f"<figure>{drawing}<figcaption>{escape(caption)}</figcaption></figure>")
            elif key == "latency" and report.latency_steps:
                parts.append("<p>None of the readable messages was held.</p>")
        explained.add(key)
        parts.append(_table(headings, rows))
    return parts


def _left_out(report: Report, key: str) -> str:
    left_out = len(report.topics) - MAX_LINES
    if left_out <= 0 or key == "holds":
        return ""
    return f" (not drawn: {counted(left_out, 'topic')} with fewer messages)"


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


# --- plots -----------------------------------------------------------------------------------------
#
# SVG in the page's own colours, which follow the reader's light or dark. The same report makes the same bytes: there
# are no time stamps in it.

#: Topics with a line of their own; the tables have the others.
MAX_LINES = 8
#: Readable on white and on near-black, and far from each other in hue or lightness: as many as there are lines.
COLOURS = ("#2f7fd1", "#e08a00", "#0f8a5f", "#d65db1", "#c2362b", "#6b4fd8", "#23b5c4", "#8a9a1b")
STATE_COLOURS = {"committed": COLOURS[2], "in_progress": COLOURS[1], "aborted": "#8a8f98", "invalid": COLOURS[4]}
#: States differ in form too, for readers who see red and green alike.
STATE_MARKERS = {"committed": "o", "in_progress": "s", "aborted": "X", "invalid": "^"}
#: Characters of a name in a legend, so that two names fit side by side.
MAX_NAME = 40
#: The largest number of columns of a legend.
MAX_COLUMNS = 4
#: Inches: the width of a figure, its height without a legend, and what each row of a legend adds.
_WIDTH, _HEIGHT, _LEGEND_ROW = 8.6, 2.9, 0.24
#: Ticks of a scale of times: powers of ten would be 1m 40s and 16m 40s.
_TICKS_MS = (0, 1, 10, 100, 1_000, 10_000, 60_000, 600_000, 3_600_000, 86_400_000, 864_000_000, 8_640_000_000)
#: Placeholders for the page's colours, which the SVG replaces.
_TEXT, _GRID = "#010203", "#040506"
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": ["sans-serif"],
    "font.size": 10,
    "text.color": _TEXT,
    "axes.labelcolor": _TEXT,
    "axes.edgecolor": _GRID,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "xtick.color": _TEXT,
    "ytick.color": _TEXT,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}


class Plot(NamedTuple):
    """A plot and its caption."""

    key: str
    """Its section in ``MADE_FROM``."""
    title: str
    svg: str


def plots_of(report: Report) -> list[Plot]:
    """All plots that have data."""
    found = [
        Plot("sizes", "Messages in the queue", _drawn("sizes", report, _sizes)),
        Plot("rates", "Messages published per second", _drawn("rates", report, _rates)),
    ]
    if any(row["max_ms"] for row in report.latency_steps):
        found.append(
            Plot(
                "latency",
                "Publish to visible: median (dots), 99th percentile (triangles)",
                _drawn("l", report, _latency),
            )
        )
    if any(row["held_ms"] is not None for row in report.holds):
        found.append(Plot("holds", "How long transactions held a topic", _drawn("holds", report, _holds)))
    return found


def _drawn(name: str, report: Report, draw: Callable[[Axes, Report], None]) -> str:
    """One figure as an ``svg`` element."""
    # Each figure has a salt of its own: the ids of several figures in one page must differ.
    with mpl.rc_context({**_STYLE, "svg.hashsalt": f"plainsong {name}"}):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        axes = figure.add_subplot()
        draw(axes, report)
        axes.set_xlim(_time(report.grid.start_ms), _time(report.grid.end_ms))
        locator = AutoDateLocator(minticks=3, maxticks=8)  # type: ignore[no-untyped-call]
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=UTC))  # type: ignore[no-untyped-call]
        _add_legend(figure, len(axes.get_legend_handles_labels()[1]))
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :].replace(_TEXT, "currentColor").replace(_GRID, "var(--rule)")
    return re.sub(r' width="[\d.]+pt" height="[\d.]+pt"| height="[\d.]+pt"| width="[\d.]+pt"', "", svg, count=2)


def _add_legend(figure: Figure, labels: int) -> None:
    """Add a legend below the plot, which keeps the whole width, in as many columns as fit."""
    if not labels:
        return
    for columns in range(min(labels, MAX_COLUMNS), 0, -1):
        legend = figure.legend(loc="outside lower left", ncols=columns)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            figure.set_size_inches(_WIDTH, _HEIGHT + _LEGEND_ROW * ceil(labels / columns))
            return
        legend.remove()


# --- what is drawn -----------------------------------------------------------------------------------


def _sizes(axes: Axes, report: Report) -> None:
    lines = _lines(report, report.sizes)
    labels = _labels([topic for topic, _ in lines])
    for topic, colour in lines:
        rows = report.of_topic(report.sizes, topic)
        # Where one line continues the other, both have the point, so that there is no gap.
        known = [row["messages"] if row["complete"] else None for row in rows]
        least = [
            row["messages"] if not row["complete"] or not rows[max(0, at - 1)]["complete"] else None
            for at, row in enumerate(rows)
        ]
        if any(value is not None for value in known):
            _plot(axes, rows, known, colour, label=labels[topic])
        if any(value is not None for value in least):
            label = None if any(value is not None for value in known) else labels[topic] + " (at least)"
            _plot(axes, rows, least, colour, linestyle="--", label=label)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(_count))


def _rates(axes: Axes, report: Report) -> None:
    lines = _lines(report, report.rates)
    labels = _labels([topic for topic, _ in lines])
    for topic, colour in lines:
        rows = report.of_topic(report.rates, topic)
        per_second = [row["messages"] / report.grid.length_s(step) for step, row in enumerate(rows)]
        # The last step ends with the range.
        steps = [*rows, {"time_ms": report.grid.end_ms}]
        _plot(axes, steps, [*per_second, per_second[-1]], colour, drawstyle="steps-post", label=labels[topic])
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(_count))


def _latency(axes: Axes, report: Report) -> None:
    lines = _lines(report, report.latency_steps)
    labels = _labels([topic for topic, _ in lines])
    for topic, colour in lines:
        rows = report.of_topic(report.latency_steps, topic)
        # No lines: between the steps with messages there is no value.
        points: dict[str, Any] = {"linestyle": "none", "markersize": 4}
        _plot(axes, rows, [row["p50_ms"] for row in rows], colour, marker="o", label=labels[topic], **points)
        _plot(axes, rows, [row["p99_ms"] for row in rows], colour, marker="^", alpha=0.6, **points)
    _lengths(axes)


def _holds(axes: Axes, report: Report) -> None:
    for state in sorted({row["state"] for row in report.holds if row["held_ms"] is not None}):
        rows = [row for row in report.holds if row["state"] == state and row["held_ms"] is not None]
        axes.scatter(
            [_time(row["first_publish_ms"]) for row in rows],
            [row["held_ms"] for row in rows],
            s=18,
            linewidths=0,
            marker=STATE_MARKERS.get(state, "D"),
            color=STATE_COLOURS.get(state, COLOURS[5]),
            label=" " + state.replace("_", " "),
        )
    _lengths(axes)


def _plot(
    axes: Axes, rows: Sequence[Mapping[str, Any]], values: Sequence[float | None], colour: str, **more: Any
) -> None:
    drawn = [float("nan") if value is None else value for value in values]
    axes.plot([_time(row["time_ms"]) for row in rows], drawn, color=colour, **more)


def _lengths(axes: Axes) -> None:
    """A scale from zero to days."""
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(FixedLocator(_TICKS_MS))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show_length(value)))


def _lines(report: Report, rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The topics with most messages, each with the colour of its line."""
    total = {facts.topic: 0 for facts in report.topics}
    for row in rows:
        total[row["topic"]] = max(total.get(row["topic"], 0), row["messages"])
    most = sorted(total, key=lambda topic: (-total[topic], topic))[:MAX_LINES]
    # A topic has the same colour in all plots, unless another line of this plot has it.
    wanted = {facts.topic: COLOURS[number % len(COLOURS)] for number, facts in enumerate(report.topics)}
    colour: dict[str, str] = {}
    free = list(COLOURS)
    for topic in sorted(most, key=list(wanted).index):
        if wanted[topic] in free:
            colour[topic] = wanted[topic]
            free.remove(wanted[topic])
    for topic in most:
        if topic not in colour:
            colour[topic] = free.pop(0)
    return [(topic, colour[topic]) for topic in sorted(most)]


def _time(time_ms: int) -> float:
    """A time as matplotlib counts it: days since 1970."""
    return time_ms / 86_400_000


def _labels(topics: Sequence[str]) -> dict[str, str]:
    """The names of topics in a legend: shortened, and different from each other."""
    names = {topic: topic.partition(":")[2] for topic in topics}
    short = {topic: _shortened(name) for topic, name in names.items()}
    labels = {}
    for topic, name in names.items():
        alike = [names[other] for other in topics if other != topic and short[other] == short[topic]]
        # Names that differ only in the part left out are shown from where they differ.
        start = max((len(commonprefix([name, other])) for other in alike), default=None)  # noqa: RUF071 - not paths
        label = short[topic] if start is None else "…" + name[start:][: MAX_NAME - 1]
        labels[topic] = " " + label  # matplotlib leaves names that start with an underscore out of the legend
    return labels


def _shortened(name: str) -> str:
    # Names of one family differ at their ends.
    return name if len(name) <= MAX_NAME else name[: MAX_NAME // 2 - 1] + "…" + name[-MAX_NAME // 2 :]


def _count(value: float, _: object) -> str:
    return f"{value:,.0f}".replace(",", " ") if value == int(value) else f"{value:g}"
