"""A report as tables for people at a terminal, and as JSON for programs."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING, Any

from plainsong.cli.command import one_line
from plainsong.cli.options import show_length, show_time
from plainsong.cli.output import show_bytes, table, width
from plainsong.cli.output import show_count as count_of
from plainsong.cli.output import show_rate as rate_of
from pyspark_plainsong.pipeline.report.facts import MADE_FROM

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyspark_plainsong.pipeline.report.facts import Report

#: Transactions in the list for people.
MAX_LISTED = 10
_QUANTILES = (">P50", ">P95", ">P99", ">MAX")
_NAMES = ("p50_ms", "p95_ms", "p99_ms", "max_ms")


def show_count(count: float | None) -> str:
    """A whole number with grouped digits, the same on the report's page, in its plots and in its text."""
    return count_of(count, grouped=True)


def show_rate(per_second: float) -> str:
    """A rate; for a quiet topic with two significant digits, instead of 0."""
    return f"{per_second:.2g}/s" if 0 < per_second < 0.05 else rate_of(per_second, grouped=True)


def tables_of(report: Report) -> Iterator[tuple[str, str, Sequence[str], list[tuple[str, ...]]]]:
    """Every section with data: its key in ``MADE_FROM``, its title, headings and rows."""
    yield "sizes", "Queue sizes", ("TOPIC", ">NOW", ">BYTES", ">AT START", ">LEAST", ">MOST", "TTL"), _sizes(report)
    yield "rates", "Throughput", ("TOPIC", ">MESSAGES", ">BYTES", ">MEAN", ">BUSIEST STEP"), _rates(report)
    waited = ("TOPIC", ">MESSAGES", *_QUANTILES, ">AT LEAST", ">WAITING", ">NEVER", ">UNKNOWN")
    yield "latency", "Publish to visible", waited, [_waited(row) for row in _sorted(report.latency)]
    if report.stored:
        stored = [(row["topic"], show_count(row["messages"]), *_lengths(row)) for row in _sorted(report.stored)]
        yield "stored", "Store to publish", ("TOPIC", ">MESSAGES", *_QUANTILES), stored
    if report.hold_quantiles:
        held = [
            (row["topic"], *(show_count(row[name]) for name in ("transactions", "open", "unknown")), *_lengths(row))
            for row in _sorted(report.hold_quantiles)
        ]
        yield "holds", "Topics held", ("TOPIC", ">TRANSACTIONS", ">OPEN", ">UNKNOWN", *_QUANTILES), held
        longest = ("TOPIC", "TRANSACTION", "CLIENT", "STATE", ">MESSAGES", "BEGUN", ">OPEN FOR", ">HELD FOR")
        yield "holds", "Longest holds", longest, [_hold(row) for row in report.holds[:MAX_LISTED]]


def lines_of(report: Report) -> list[str]:
    """The whole report as text."""
    grid = report.grid
    lines = [f"{show_time(grid.start_ms)} to {show_time(grid.end_ms)}, in steps of {show_length(grid.step_ms)}"]
    explained: set[str] = set()
    for key, title, headings, rows in tables_of(report):
        lines += ["", title, *table(headings, rows, columns=160)]
        if key not in explained:
            lines += wrap(MADE_FROM[key], width(), initial_indent="  ", subsequent_indent="  ")
            explained.add(key)
    if report.notes:
        wrapped = (wrap(note, width(), initial_indent="  ", subsequent_indent="    ") for note in report.notes)
        lines += ["", "Not known", *(line for lines_ in wrapped for line in lines_)]
    return lines


def as_json(report: Report) -> dict[str, Any]:
    """All figures; times in milliseconds since 1970, pointers as strings."""
    return {
        "startMs": report.grid.start_ms,
        "endMs": report.grid.end_ms,
        "stepMs": report.grid.step_ms,
        "madeMs": report.made_ms,
        "messagesRead": report.messages,
        "topics": [
            {
                "topic": facts.topic,
                "generation": facts.generation,
                "ttlMs": facts.ttl_ms,
                "knownFromMs": facts.known_from_ms,
                "whole": facts.whole,
                "stats": facts.stats or None,
            }
            for facts in report.topics
        ],
        "sizes": [dict(row) for row in report.sizes],
        "rates": [dict(row) for row in report.rates],
        "latency": [dict(row) for row in report.latency],
        "latencySteps": [dict(row) for row in report.latency_steps],
        "stored": [dict(row) for row in report.stored],
        "holds": [{**row, "transaction": str(row["transaction"])} for row in report.holds],
        "holdQuantiles": [dict(row) for row in report.hold_quantiles],
        "madeFrom": MADE_FROM,
        "notes": list(report.notes),
    }


# --- rows --------------------------------------------------------------------------------------------


def _sorted(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted(rows, key=lambda row: row["topic"])


def _sizes(report: Report) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for facts in report.topics:
        rows = report.of_topic(report.sizes, facts.topic)
        counts = [row["messages"] for row in rows]
        sign = ["" if row["complete"] else "≥" for row in rows]
        least, most = counts.index(min(counts)), counts.index(max(counts))
        found.append(
            (
                facts.topic,
                sign[-1] + show_count(counts[-1]),
                show_bytes(rows[-1]["bytes"]),
                sign[0] + show_count(counts[0]),
                sign[least] + show_count(counts[least]),
                sign[most] + show_count(counts[most]),
                show_length(facts.ttl_ms),
            )
        )
    return found


def _rates(report: Report) -> list[tuple[str, ...]]:
    grid = report.grid
    found: list[tuple[str, ...]] = []
    range_s = (grid.end_ms - grid.start_ms) / 1000
    for facts in report.topics:
        rows = report.of_topic(report.rates, facts.topic)
        messages = sum(row["messages"] for row in rows)
        busiest = max(row["messages"] / grid.length_s(step) for step, row in enumerate(rows))
        size = show_bytes(sum(row["bytes"] for row in rows))
        found.append((facts.topic, show_count(messages), size, show_rate(messages / range_s), show_rate(busiest)))
    return found


def _waited(row: Mapping[str, Any]) -> tuple[str, ...]:
    counts = (show_count(row[name]) for name in ("at_least", "waiting", "never", "unknown"))
    return (row["topic"], show_count(row["messages"]), *_lengths(row), *counts)


def _lengths(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(show_wait(row[name]) for name in _NAMES)


def show_wait(milliseconds: float | None) -> str:
    """A length of time, with fractions below a minute: ``0ms``, ``1.25s``, ``3m 5s``."""
    if milliseconds is None or not 1000 <= milliseconds < 60_000:
        return show_length(milliseconds)
    return f"{milliseconds / 1000:.2f}".rstrip("0").rstrip(".") + "s"


def _hold(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["topic"],
        str(row["transaction"]),
        one_line(row["client"] or "-"),
        row["state"].replace("_", " "),
        show_count(row["messages"]),
        "-" if row["begun_ms"] is None else show_time(row["begun_ms"]),
        show_wait(row["open_ms"]),
        show_wait(row["held_ms"]),
    )
