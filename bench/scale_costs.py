"""Costs for ``bench/scale.py``: the numbers in ``bench/costs.json``, each with the run it was measured in.

python -m bench --only hbase,cluster && python -m bench.scale_costs bench/report/results.json --run "two cores, today"
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("costs.json")


@dataclass(frozen=True, slots=True)
class Costs:
    """Processor time on one core of the measuring machine; latencies without load."""

    request_us: float
    """Owner: a publish request, without its messages and its share of a commit."""
    message_us: float
    """Owner: a message of a publish, of 100 B."""
    commit_us: float
    """Owner: a commit, regardless of how many requests share it."""
    poll_us: float
    """Owner: a poll, without its messages and its share of a head check."""
    look_us: float
    """Owner: checking the head before a response that follows no write."""
    delivered_us: float
    """Owner: a message of a poll, from the cache."""
    forward_us: float
    """Forwarder: forwarding a request and its answer."""
    forwarded_us: float
    """Owner: additional cost of a forwarded request; negative if it costs less."""
    round_trip_ms: float
    """A compare-and-set through the gateway without load."""
    region_write_us: float
    """Region server: a compare-and-set of 100 B."""
    region_read_us: float
    """Region server: a get."""
    region_byte_ns: float
    """Region server: a byte of a cell written."""
    gateway_call_us: float
    """Gateway: a call."""
    gateway_byte_ns: float
    """Gateway: forwarding a byte."""
    log_write_bytes: float
    """Write-ahead log: bytes of a compare-and-set in addition to its cell."""
    row_bytes: float
    """Cell: bytes of a message in addition to its payload."""
    open_ms: float
    """Opening a topic (claiming and loading it) on an idle cluster."""
    open_us: float
    """Owner: opening a topic."""
    topic_kib: float
    """Owner: memory of an open, idle topic."""
    base_mib: float
    """A daemon's memory without topics."""

    @classmethod
    def read(cls, file: Path = FILE) -> Costs:
        """Read a file like ``bench/costs.json``. Raises ValueError if a cost is missing, unknown or has no source."""
        found = json.loads(file.read_text(encoding="utf-8"))
        names = {field.name for field in fields(cls)}
        if found.keys() != names:
            raise ValueError(f"{file} and the model differ in {', '.join(sorted(found.keys() ^ names))}")
        unsourced = [name for name, cost in found.items() if not cost.get("source")]
        if unsourced:
            raise ValueError(f"{file} does not say where {', '.join(unsourced)} is from")
        return cls(**{name: float(cost["value"]) for name, cost in found.items()})


def derive(results: dict[str, Any], run: str) -> dict[str, dict[str, float | str]]:
    """Derive the costs that a run of the benchmark has measured, from its ``results.json``.

    Args:
      run: description of the run, such as ``two cores, 2026-11-21``.
    """
    calls = _Measured(results, "hbase", run)
    links = _Measured(results, "cluster", run)
    single, shared = calls.row("cost of a publish of 1", 1), calls.row("cost of a publish of 1", 64)
    group = calls.row("cost of a publish of 1000", 1)
    # A single publish pays for a whole commit, one of 64 concurrent publishes for a share.
    commit_us = (single["daemon µs"] - shared["daemon µs"]) / (1 - 1 / shared["requests a commit"])
    message_us = (group["daemon µs"] - single["daemon µs"]) / 999
    empty, together = calls.row("cost of an empty poll", 1), calls.row("cost of an empty poll", 64)
    look_us = (empty["daemon µs"] - together["daemon µs"]) / (1 - 1 / 32)
    page = calls.row("cost of a cached poll of 1000", 1)
    swap, get = calls.row("cost of a compare-and-set", 1), calls.row("cost of a get", 1)
    one, thousand = calls.row("cost of a commit of 1", 1), calls.row("cost of a commit of 1000", 1)
    size = thousand["log B"] - one["log B"]
    opening = calls.row("cost of opening a topic", 1)
    sent = links.row("forwarded single", 16)
    found = {
        "request_us": single["daemon µs"] - commit_us - message_us,
        "message_us": message_us,
        "commit_us": commit_us,
        "poll_us": empty["daemon µs"] - look_us,
        "look_us": look_us,
        "delivered_us": (page["daemon µs"] - empty["daemon µs"]) / 1000,
        "forward_us": sent["forwarder µs"],
        "forwarded_us": sent["owner µs"] - sent["owner µs, direct"],
        "round_trip_ms": calls.row("single", 1)["raw ms"] / 2,
        "region_write_us": swap["region µs"],
        "region_read_us": get["region µs"],
        "region_byte_ns": (thousand["region µs"] - one["region µs"]) / size * 1e3,
        "gateway_call_us": swap["gateway µs"],
        "gateway_byte_ns": (thousand["gateway µs"] - one["gateway µs"]) / size * 1e3,
        "row_bytes": size / 999 - 100,
        "log_write_bytes": (one["log B"] - size / 999) / 2,
        "open_ms": opening["ms"],
        "open_us": opening["daemon µs"],
        "topic_kib": opening["KiB"],
        "base_mib": opening["resident MB"] * 1e6 / 2**20,
    }
    linked = {"forward_us", "forwarded_us"}
    sources = {name: (links if name in linked else calls).source for name in found}
    return {name: {"value": round(value, 4), "source": sources[name]} for name, value in found.items()}


class _Measured:
    """One section of a run."""

    def __init__(self, results: dict[str, Any], section: str, run: str) -> None:
        self._rows = results["sections"][section]["rows"]
        self.source = f"python -m bench --only {section}; {run}, profile {results['profile']}"

    def row(self, what: str, connections: int) -> dict[str, float]:
        """Return the medians of a row. Raises ValueError if it was not measured."""
        for row in self._rows:
            if row["what"]["what"] == what and row["what"]["connections"] == connections:
                return {name: float(value["median"]) for name, value in row["values"].items()}
        raise ValueError(f"there is no row {what}, {connections} connections")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.scale_costs", description="Makes costs for bench.scale of a run of the benchmark."
    )
    parser.add_argument("results", type=Path, help="results.json of python -m bench --only hbase,cluster")
    parser.add_argument("--run", required=True, help="description of the run: machine, date")
    parser.add_argument("--out", type=Path, default=FILE)
    args = parser.parse_args()
    costs = derive(json.loads(args.results.read_text(encoding="utf-8")), args.run)
    args.out.write_text(json.dumps(costs, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
