"""``python -m bench.document``: update the tables in the documents from the results of benchmark runs.

    python -m bench.document [RESULTS ...]

Each table is between two comments, ``<!-- measured NAME: begin -->`` and ``<!-- measured NAME: end -->``, and is
replaced if one of the files has its section. Without arguments the files are those that ``make bench``, ``make
bench-peers`` and ``make bench-both`` have written: each ``results.json`` under ``bench/report``. The text around the
tables is not changed: review it after every run.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.report import number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    Rows = Sequence[Mapping[str, Any]]

ROOT = Path(__file__).parents[1]
RESULTS = tuple(ROOT / f"bench/report/{place}results.json" for place in ("", "peers/", "both/"))
PEERS = ("plainsong", "original", "kafka", "nats", "postgres", "redis")
TRANSACTING = ("plainsong", "original", "kafka", "postgres")
_SAME = (
    *("single, 1 connection", "single, 16 connections", "single, 50 connections"),
    *("batch, 1 connection", "batch, 4 connections"),
    *("batch over 50 topics, 4 connections", "batch for 20 s, 4 connections"),
)
#: The loads to compare: their names in the results, and the names to show.
LOADS = {name: name for name in _SAME} | {
    "page": "page: the same 10 000 messages, read again and again",
    "walk": "walk: a topic read from its start, in pages of 10 000",
}
#: The loads and columns of the table in the README.
README_LOADS = {
    "single, 1 connection": "one message a request, 1 connection",
    "single, 16 connections": "one message a request, 16 connections",
    "single, 50 connections": "one message a request, 50 connections",
    "batch, 4 connections": "1000 messages a request, 4 connections",
}
README_PEERS = {
    "plainsong": "Plainsong",
    "kafka": "Kafka 4.1",
    "nats": "NATS 2.12",
    "redis": "Redis Streams",
    "postgres": "PostgreSQL",
}


@dataclass(frozen=True, slots=True)
class Run:
    """The results of one run."""

    sections: Mapping[str, Any]
    facts: Mapping[str, str]
    profile: str

    def rows(self, section: str) -> Rows:
        """Return the rows of a section; empty if it was not measured."""
        found: Rows = self.sections.get(section, {}).get("rows", [])
        return found

    def about(self) -> str:
        """Return the conditions of the run as one line."""
        facts = self.facts
        words = [facts["date"], f"{facts['cores']} cores", *([facts["processor"]] if "processor" in facts else [])]
        if "a synced append of 200 B" in facts:
            words.append(f"a synced append took {facts['a synced append of 200 B']}")
        words.append(f"load before {facts['load before'].split()[0]}")
        if self.profile != "full":
            words.append(f"**a {self.profile} run, whose figures mean nothing**")
        return f"*{', '.join(words)}*"


@dataclass(frozen=True, slots=True)
class Document:
    """A table in a document."""

    path: str
    name: str
    """The NAME in its two comments."""
    section: str
    make: Callable[[Run], list[str]]
    """Returns the lines of the table."""


def medians(rows: Rows, label: str) -> dict[str, dict[str, float]]:
    """Return the medians of each row of a section, by the value of ``label``, which identifies the row."""
    return {row["what"][label]: {name: value["median"] for name, value in row["values"].items()} for row in rows}


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = True) -> list[str]:
    """Format a table in Markdown; ``numbers`` right-aligns all columns but the first."""
    rule = "|---|" + ("--:|" if numbers else "---|") * (len(head) - 1)
    return [f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)]


def _cell(values: Mapping[str, float], name: str) -> str:
    return number(values[name]) if name in values else ""


# --- the comparison with other brokers ---


def rates(run: Run) -> list[str]:
    """Return the table of messages per second of all peers."""
    found = medians(run.rows("peers-rates"), "load")
    return table(
        ["load", *PEERS],
        ([LOADS[load], *(_cell(found[load], peer) for peer in PEERS)] for load in LOADS if load in found),
    )


def readme(run: Run) -> list[str]:
    """Return the README's shorter table of rates."""
    found = medians(run.rows("peers-rates"), "load")
    return table(
        ["load", *README_PEERS.values()],
        ([shown, *(_cell(found[load], peer) for peer in README_PEERS)] for load, shown in README_LOADS.items()),
    )


def transactions(run: Run) -> list[str]:
    """Return transactions per second of the peers that support them, with the median and the 99th percentile."""
    found = medians(run.rows("peers-rates"), "load")
    waits = {(row["what"]["load"], row["what"]["peer"]): row["values"] for row in run.rows("peers-waits")}

    def cell(load: str, peer: str) -> str:
        if peer not in found[load]:
            return ""
        at = waits[load, peer]
        return f"{number(found[load][peer])} ({number(at['p50 ms']['median'])} / {number(at['p99 ms']['median'])})"

    loads = [load for load in found if load.startswith("transaction")]
    shown = {load: load.removeprefix("transaction, ") for load in loads}
    return table(
        ["a message to each of", *TRANSACTING],
        ([shown[load], *(cell(load, peer) for peer in TRANSACTING)] for load in loads),
    )


def waits(run: Run) -> list[str]:
    """Return the latencies of the open-loop loads."""
    found = {(row["what"]["rate"], row["what"]["peer"]): row["values"] for row in run.rows("peers-open")}

    def cell(rate: str, peer: str) -> str:
        if (rate, peer) not in found:
            return ""
        at = found[rate, peer]
        text = " / ".join(number(at[f"{name} ms"]["median"]) for name in ("p50", "p99", "p99.9"))
        return f"{text} at {number(at['messages/s']['median'])}" if "highest" in rate else text

    chosen = [rate for rate in dict.fromkeys(rate for rate, _ in found) if rate.endswith("second") or "1/2" in rate]
    shown = {rate: "half of its highest rate" if "1/2" in rate else rate for rate in chosen}
    return table(
        ["rate", *PEERS], ([shown[rate], *(cell(rate, peer) for peer in PEERS)] for rate in chosen), numbers=False
    )


def original(run: Run) -> list[str]:
    """Return the comparison with the original service alone."""
    found = medians(run.rows("peers-rates"), "load")
    at = {(row["what"]["load"], row["what"]["peer"]): row["values"] for row in run.rows("peers-waits")}

    def both(load: str, name: str) -> str:
        return ", ".join(number(at[load, peer][name]["median"]) for peer in ("original", "plainsong"))

    rows = (
        [
            load,
            *(number(values[column]) for column in ("original", "plainsong", "÷ original")),
            *(both(load, name) for name in ("p50 ms", "p99 ms")),
        ]
        for load, values in found.items()
        if "÷ original" in values
    )
    return table(["load", "original", "plainsong", "÷ original", "p50 of both, ms", "p99 of both, ms"], rows)


# --- the original service ---


def both(run: Run) -> list[str]:
    """Return all loads of ``bench.peers.both``; loads that differ only in connections share a row."""
    grouped: dict[str, list[tuple[str, Mapping[str, float]]]] = {}
    for load, values in medians(run.rows("peers-both"), "load").items():
        name, _, connections = load.rpartition(", ") if load.endswith(("connection", "connections")) else (load, "", "")
        grouped.setdefault(name, []).append((connections.split(" ")[0], values))

    def row(name: str, some: Sequence[tuple[str, Mapping[str, float]]]) -> list[str]:
        connections = " / ".join(each for each, _ in some)
        cells = [
            " / ".join(number(values[column]) for _, values in some)
            for column in ("original/s", "plainsong/s", "÷ original")
        ]
        return [f"{name}, {connections}" if connections else name, *cells]

    return table(
        ["load, connections", "original", "plainsong", "÷ original"],
        (row(name, some) for name, some in grouped.items()),
    )


# --- the daemon alone ---


def growth(run: Run) -> list[str]:
    """Return sizes and times by the number of messages, and by the number of topics."""
    lines: list[str] = []
    shown = {
        "a second": "stored in a second",
        "longest ms since the last size": "longest wait of a request, ms",
        "anon MB": "the daemon's own memory, MB",
        "anon MB after start": "the same after a start, MB",
        "disk MB": "on disk, MB",
        "start s": "time to start, s",
        "poll p50 ms": "a poll from a random time, p50 ms",
    }
    for what in ("messages", "topics"):
        rows = [row for row in run.rows("growth") if row["what"]["what"] == what]
        if rows:
            columns = [f"{row['what']['stored']:,}".replace(",", " ") for row in rows]
            body = ([says, *(number(row["values"][name]["median"]) for row in rows)] for name, says in shown.items())
            lines += ["", *table([what, *columns], body)]
    return lines[1:]


def spark(run: Run) -> list[str]:
    """Return rows per second through Spark, and the rates to compare them with."""
    lines: dict[tuple[str, int], dict[int, Mapping[str, Any]]] = {}
    for row in run.rows("spark"):
        what = row["what"]
        if "rows/s" in row["values"]:
            lines.setdefault((what["what"], what["bytes"]), {})[what["partitions"]] = row["values"]
    compared = dict.fromkeys(name for each in lines.values() for at in each.values() for name in at if name != "rows/s")

    def row_of(what: str, size: int, at: Mapping[int, Mapping[str, Any]]) -> list[str]:
        cells = [number(at[each]["rows/s"]["median"]) if each in at else "" for each in (1, 2)]
        first = at[min(at)]
        cells += [number(first[name]["median"]) if name in first else "" for name in compared]
        return [f"{what}, {size} B", *cells]

    head = ["rows a second", "one partition", "two partitions", *compared]
    return table(head, (row_of(*of, at) for of, at in lines.items()))


TABLES = (
    Document("README.md", "rates", "peers-rates", readme),
    Document("docs/benchmarks.md", "rates", "peers-rates", rates),
    Document("docs/benchmarks.md", "transactions", "peers-rates", transactions),
    Document("docs/benchmarks.md", "waits", "peers-open", waits),
    Document("docs/benchmarks.md", "growth", "growth", growth),
    Document("docs/benchmarks.md", "spark", "spark", spark),
    Document("docs/measurements/original.md", "rates", "peers-rates", original),
    Document("docs/measurements/original.md", "both", "peers-both", both),
)


def marks(name: str) -> tuple[str, str]:
    """Return the comments before and after a table."""
    return f"<!-- measured {name}: begin -->", f"<!-- measured {name}: end -->"


def written(text: str, name: str, lines: Sequence[str]) -> str:
    """Return the document with the lines between the comments of this name replaced.

    Raises:
      LookupError: the comments are missing, or occur more than once.
    """
    begin, end = marks(name)
    replaced, count = re.subn(
        f"{begin}.*?{end}", lambda _: "\n".join([begin, "", *lines, "", end]), text, flags=re.DOTALL
    )
    if count != 1:
        raise LookupError(f"there are {count} places for the table {name}")
    return replaced


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.document", description="Write the documents' tables from results of benchmark runs."
    )
    parser.add_argument("results", nargs="*", type=Path, help="files results.json (those below bench/report)")
    args = parser.parse_args()
    files = args.results or [path for path in RESULTS if path.exists()]
    if not files:
        sys.exit("there are no results below bench/report: make bench, make bench-peers or make bench-both")
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        run = Run(found["sections"], found["facts"], found["profile"])
        for document in TABLES:
            if run.rows(document.section):
                path = ROOT / document.path
                lines = [*document.make(run), "", run.about()]
                path.write_text(written(path.read_text(encoding="utf-8"), document.name, lines), encoding="utf-8")
                print(f"{document.path}, {document.name}: from {file}")


if __name__ == "__main__":
    main()
