"""The report's plots, one per section; none without matplotlib."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from bench.rounds import Row, Section

#: Sides of the publish plot, from the slowest server to the fastest kind of write.
_SIDES = ("bare", "plainsong", "listener", "raw request", "raw group")


def draw(directory: Path, sections: Sequence[Section]) -> dict[str, str]:
    """Draw the sections that have a plot; return the file names by section."""
    if find_spec("matplotlib") is None:
        return {}
    import matplotlib as mpl

    mpl.use("svg")
    # Reproducible: the same numbers give the same file.
    mpl.rcParams["svg.hashsalt"] = "plainsong"
    from matplotlib import pyplot

    drawn = {}
    for section in sections:
        plot = _PLOTS.get(section.name)
        if plot is None or not section.rows:
            continue
        figure = plot(pyplot, section.rows)
        figure.tight_layout()
        figure.savefig(directory / f"{section.name}.svg", metadata={"Date": None})
        pyplot.close(figure)
        drawn[section.name] = f"{section.name}.svg"
    return drawn


def _publish(pyplot: Any, rows: Sequence[Row]) -> Any:
    sizes = sorted({int(row.what["bytes"]) for row in rows})
    counts = sorted({int(row.what["messages"]) for row in rows})
    figure, grid = pyplot.subplots(len(sizes), len(counts), figsize=(4 * len(counts), 3 * len(sizes)), squeeze=False)
    for line, size in zip(grid, sizes, strict=True):
        for axes, count in zip(line, counts, strict=True):
            cell = [row for row in rows if row.what["bytes"] == size and row.what["messages"] == count]
            _bars(axes, cell, "connections", _SIDES)
            axes.set_title(f"{count} × {size} B a request", fontsize=9)
            axes.set_ylabel("messages/s")
            axes.set_xlabel("connections")
    grid[0][0].legend(fontsize=7)
    return figure


def _bars(axes: Any, rows: Sequence[Row], label: str, sides: Sequence[str]) -> None:
    width = 0.8 / len(sides)
    for index, side in enumerate(sides):
        values = [row.values[side] for row in rows]
        medians = [value.median for value in values]
        errors = [[v.median - v.low for v in values], [v.high - v.median for v in values]]
        places = [place + (index - (len(sides) - 1) / 2) * width for place in range(len(rows))]
        axes.bar(places, medians, width, yerr=errors, label=side, error_kw={"linewidth": 0.7})
    axes.set_xticks(range(len(rows)), [str(row.what[label]) for row in rows])
    axes.set_yscale("log")


def _across(column: str, unit: str, name: Callable[[Row], str]) -> Callable[[Any, Sequence[Row]], Any]:
    """Return a plot of one column, with a horizontal bar per row."""

    def plot(pyplot: Any, rows: Sequence[Row]) -> Any:
        figure, axes = pyplot.subplots(figsize=(7, 0.4 * len(rows) + 1))
        values = [row.values[column] for row in rows]
        errors = [[v.median - v.low for v in values], [v.high - v.median for v in values]]
        axes.barh([name(row) for row in rows], [v.median for v in values], xerr=errors, error_kw={"linewidth": 0.7})
        axes.invert_yaxis()
        axes.set_xlabel(unit)
        return figure

    return plot


def _cleaning(pyplot: Any, rows: Sequence[Row]) -> Any:
    figure, axes = pyplot.subplots(figsize=(5, 3))
    _bars(axes, rows, "connections", ("quiet p50 ms", "cleaning p50 ms", "quiet p99 ms", "cleaning p99 ms"))
    axes.set_xlabel("connections that publish")
    axes.set_ylabel("ms")
    axes.legend(fontsize=7)
    return figure


def _evenness(pyplot: Any, rows: Sequence[Row]) -> Any:
    kinds = list(dict.fromkeys(str(row.what["what"]) for row in rows))
    figure, line = pyplot.subplots(1, len(kinds), figsize=(4.5 * len(kinds), 3.5), squeeze=False)
    for axes, kind in zip(line[0], kinds, strict=True):
        for index, beside in enumerate(dict.fromkeys(str(row.what["beside"]) for row in rows)):
            mine = [row for row in rows if row.what["what"] == kind and row.what["beside"] == beside]
            shares = [str(row.what["of the highest"]) for row in mine]
            for column, style in (("p50 ms", ":"), ("p99.9 ms", "-")):
                waits = [row.values[column].median for row in mine]
                axes.plot(
                    shares, waits, style, color=f"C{index}", marker="o", markersize=3, label=f"{beside}, {column}"
                )
        axes.set_title(kind, fontsize=9)
        axes.set_xlabel("of the highest rate")
        axes.set_ylabel("ms since it was due")
        axes.set_yscale("log")
    _legend_next_to(line[0][-1])
    return figure


def _growth(pyplot: Any, rows: Sequence[Row]) -> Any:
    columns = ("a second", "anon MB", "disk MB", "start s", "poll p50 ms")
    kinds = list(dict.fromkeys(str(row.what["what"]) for row in rows))
    figure, grid = pyplot.subplots(
        len(kinds), len(columns), figsize=(2.6 * len(columns), 2.4 * len(kinds)), squeeze=False
    )
    for line, kind in zip(grid, kinds, strict=True):
        mine = [row for row in rows if row.what["what"] == kind]
        for axes, column in zip(line, columns, strict=True):
            axes.plot([row.what["stored"] for row in mine], [row.values[column].median for row in mine], "o-")
            axes.set_xscale("log")
            axes.set_ylim(bottom=0)
            axes.set_title(column, fontsize=9)
            axes.set_xlabel(kind)
    return figure


def _peers_rates(pyplot: Any, rows: Sequence[Row]) -> Any:
    peers = list(dict.fromkeys(name for row in rows for name in row.values if not name.startswith("÷")))
    columns = 3
    lines = -(-len(rows) // columns)
    figure, grid = pyplot.subplots(
        lines, columns, figsize=(4 * columns, 0.35 * (len(peers) + 2) * lines), squeeze=False
    )
    for axes, row in zip(grid.flat, rows, strict=False):
        names = [name for name in peers if name in row.values]
        values = [row.values[name] for name in names]
        errors = [[v.median - v.low for v in values], [v.high - v.median for v in values]]
        colors = ["C1" if name == "plainsong" else "C0" for name in names]
        axes.barh(names, [v.median for v in values], xerr=errors, color=colors, error_kw={"linewidth": 0.7})
        axes.invert_yaxis()
        axes.set_title(f"{row.what['load']}, messages/s", fontsize=8)
        axes.tick_params(labelsize=7)
    for axes in list(grid.flat)[len(rows) :]:
        axes.set_visible(False)
    return figure


def _peers_open(pyplot: Any, rows: Sequence[Row]) -> Any:
    """Plot the rates common to all peers on one side, and fractions of each peer's own highest rate on the other."""
    rates = list(dict.fromkeys(str(row.what["rate"]) for row in rows))
    halves = [each for each in ([r for r in rates if "highest" not in r], [r for r in rates if "highest" in r]) if each]
    figure, line = pyplot.subplots(1, len(halves), figsize=(5 * len(halves), 4), squeeze=False, sharey=True)
    for axes, half in zip(line[0], halves, strict=True):
        for index, peer in enumerate(dict.fromkeys(str(row.what["peer"]) for row in rows)):
            mine = {str(row.what["rate"]): row.values for row in rows if row.what["peer"] == peer}
            for column, style in (("p50 ms", ":"), ("p99.9 ms", "-")):
                places = [place for place, rate in enumerate(half) if rate in mine]
                waits = [mine[half[place]][column].median for place in places]
                axes.plot(places, waits, style, color=f"C{index}", marker="o", markersize=3, label=f"{peer}, {column}")
        axes.set_xticks(range(len(half)), half, fontsize=7)
        axes.set_yscale("log")
    line[0][0].set_ylabel("ms since it was due")
    _legend_next_to(line[0][-1])
    return figure


def _legend_next_to(axes: Any) -> None:
    axes.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1.02, 1))


_PLOTS: dict[str, Callable[[Any, Sequence[Row]], Any]] = {
    "publish": _publish,
    "poll": _across(
        "messages/s", "messages/s", lambda row: f"{row.what['what']}, {row.what['connections']} connections"
    ),
    "wake": _across("p99 ms", "p99, ms", lambda row: f"{row.what['server']}, {row.what['parked']} parked"),
    "cleaning": _cleaning,
    "evenness": _evenness,
    "peers-rates": _peers_rates,
    "peers-open": _peers_open,
    "growth": _growth,
    "memory": _across("resident MB", "MB resident", lambda row: str(row.what["state"])),
}
