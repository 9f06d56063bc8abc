"""Capacity planning past one machine: machines needed for a million messages a second on a hundred thousand topics.

    python -m bench.scale [--topics 100000] [--messages 1e6] [--per-request 10,30,100] [--headroom 0.6] [--seed 1] …

For each number of messages per request it finds the smallest deployment in which no member is busier than
``--headroom``. It reports the first bottleneck, what would move it, and how long topics are unavailable when an
instance dies and when all restart. The model is in ``bench/scale_model.py`` and ``scale_storm.py``, the costs, measured
on one machine, in ``bench/costs.json`` (``bench/scale_costs.py`` derives them from a run of the benchmark). Prints
Markdown.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bench.scale_costs import FILE, Costs
from bench.scale_model import ONE_TOPIC, OWNER, Fleet, Load, Outcome, Placement, largest_topic, reckon, skew_of
from bench.scale_storm import storm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Limits of the search for a deployment.
MAX_INSTANCES = 2000
MAX_REGION_SERVERS = 500


def plan(placement: Placement, costs: Costs, headroom: float, cores: int = 16) -> tuple[Fleet, Outcome]:
    """Return the smallest deployment in which nothing is busier than ``headroom``.

    Raises ValueError if there is none: one topic alone is too much for its owner, or the limits are reached.
    """
    fleet = Fleet(instances=1, region_servers=1, cores=cores)
    while True:
        outcome = reckon(placement, fleet, costs)
        walls = outcome.walls
        if (share := walls[ONE_TOPIC]) > headroom:
            raise ValueError(f"one topic alone takes {share:.2f} of an owner, which no deployment changes")
        owners = _needed(fleet.instances, walls[OWNER], headroom)
        servers = _needed(fleet.region_servers, max(walls[name] for name in _OF_REGION_SERVERS), headroom)
        if (owners, servers) == (fleet.instances, fleet.region_servers):
            return fleet, outcome
        if owners > MAX_INSTANCES or servers > MAX_REGION_SERVERS:
            raise ValueError(f"more than {MAX_INSTANCES} instances or {MAX_REGION_SERVERS} region servers are needed")
        fleet = replace(fleet, instances=owners, region_servers=servers)


_OF_REGION_SERVERS = ("a region server's cores", "a gateway's cores", "a region server's log")


def _needed(there: int, busy: float, headroom: float) -> int:
    """Return the next number to try: 95 % of the way at once, since the busiest member changes as the fleet grows."""
    if busy <= headroom:
        return there
    return max(there + 1, math.floor(there * busy / headroom * 0.95))


def tables(load: Load, per_request: list[float], costs: Costs, headroom: float, seed: int) -> Iterator[str]:
    """Yield the report, line by line."""
    yield from _table_head("deployment", [f"{each:g} a request" for each in per_request])
    plans = []
    placement = Placement(load, seed)
    for each in per_request:
        placement = placement.asked(replace(load, messages_per_request=each))
        plans.append((placement, *plan(placement, costs, headroom)))
    for what, cell in _ROWS.items():
        yield "| " + " | ".join([what, *(cell(*each, costs) for each in plans)]) + " |"
    yield ""
    yield from _table_head("busiest, of its wall", [f"{each:g} a request" for each in per_request])
    for wall in plans[0][2].walls:
        yield "| " + " | ".join([wall, *(f"{outcome.walls[wall]:.3f}" for _, _, outcome in plans)]) + " |"
    yield ""
    yield from _table_head("silence in s: median / 99 % / last", [f"{each:g} a request" for each in per_request])
    for what, dead in (("one instance dies", 1), ("all start again", 0)):
        cells = [_silence(placed, fleet, costs, dead, seed) for placed, fleet, _ in plans]
        yield "| " + " | ".join([what, *cells]) + " |"
    yield ""
    middle = plans[len(plans) // 2]
    yield from _levers(*middle, costs)


def _levers(placement: Placement, fleet: Fleet, outcome: Outcome, costs: Costs) -> Iterator[str]:
    """Yield a table of each resource's load after one parameter is doubled or changed."""
    load = placement.load
    names = list(outcome.walls)
    yield from _table_head(f"{load.messages_per_request:g} a request, then", names)
    changes: dict[str, tuple[Load, Fleet]] = {
        "as planned": (load, fleet),
        "instances × 2": (load, replace(fleet, instances=2 * fleet.instances)),
        "region servers × 2": (load, replace(fleet, region_servers=2 * fleet.region_servers)),
        "messages a request × 2": (replace(load, messages_per_request=2 * load.messages_per_request), fleet),
        "readers × 2": (replace(load, readers_per_topic=2 * load.readers_per_topic), fleet),
        "message size × 10": (replace(load, message_bytes=10 * load.message_bytes), fleet),
        "no client follows owners": (replace(load, misdirected=1.0), fleet),
        "load × 2": (replace(load, messages_per_s=2 * load.messages_per_s), fleet),
    }
    for what, (asked, there) in changes.items():
        walls = reckon(placement.asked(asked), there, costs).walls
        yield "| " + " | ".join([what, *(f"{walls[name]:.3f}" for name in names)]) + " |"


def _silence(placement: Placement, fleet: Fleet, costs: Costs, dead: int, seed: int) -> str:
    gone = range(dead or fleet.instances)
    found = storm(placement, fleet.instances, gone, costs, session_s=10.0 if dead else 0.0, seed=seed)
    return f"{found.topics:,} topics: {found.median_s:.2f} / {found.p99_s:.2f} / {found.last_s:.2f}"


def _table_head(what: str, columns: list[str]) -> Iterator[str]:
    yield "| " + " | ".join([what, *columns]) + " |"
    yield "|" + "---|" * (len(columns) + 1)


_ROWS: dict[str, Callable[[Placement, Fleet, Outcome, Costs], str]] = {
    "instances, one core each": lambda _p, fleet, _o, _c: f"{fleet.instances:,}",
    "region servers, 16 cores each and as many for their gateways": lambda _p, fleet, _o, _c: (
        f"{fleet.region_servers:,}"
    ),
    "requests and polls a second": lambda _p, _f, outcome, _c: f"{outcome.requests_per_s:,.0f}",
    "commits a second": lambda _p, _f, outcome, _c: f"{outcome.commits_per_s:,.0f}",
    "messages a commit": lambda placed, _f, outcome, _c: f"{placed.load.messages_per_s / outcome.commits_per_s:,.1f}",
    "a commit takes, ms": lambda _p, _f, outcome, _c: f"{outcome.commit_ms:.2f}",
    "HBase writes a second": lambda _p, _f, outcome, _c: (
        f"{sum(server.writes_per_s for server in outcome.region_servers):,.0f}"
    ),
    "HBase looks a second": lambda _p, _f, outcome, _c: (
        f"{sum(server.reads_per_s for server in outcome.region_servers):,.0f}"
    ),
    "log of a region server, MB/s before replication": lambda _p, _f, outcome, _c: (
        f"{max(server.log_bytes_per_s for server in outcome.region_servers) / 1e6:,.1f}"
    ),
    "fullest instance ÷ mean: topics": lambda _p, _f, outcome, _c: (
        f"{skew_of([each.topics for each in outcome.instances]):.2f}"
    ),
    "fullest instance ÷ mean: messages": lambda _p, _f, outcome, _c: (
        f"{skew_of([each.messages_per_s for each in outcome.instances]):.2f}"
    ),
    "fullest region server ÷ mean: messages": lambda _p, _f, outcome, _c: (
        f"{skew_of([each.messages_per_s for each in outcome.region_servers]):.2f}"
    ),
    "one topic alone fills an owner so far at, messages a second": lambda placed, _f, outcome, costs: (
        f"{largest_topic(placed.load, costs, outcome.walls[OWNER]):,.0f}"
    ),
    "memory of the fullest instance, MiB": lambda _p, _f, outcome, costs: (
        f"{costs.base_mib + max(each.topics for each in outcome.instances) * costs.topic_kib / 1024:,.0f}"
    ),
    "ZooKeeper sessions": lambda _p, fleet, _o, _c: f"{fleet.instances + fleet.region_servers + 1:,}",
    "links between instances": lambda _p, fleet, _o, _c: f"{fleet.instances * (fleet.instances - 1):,}",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--topics", type=int, default=100_000)
    parser.add_argument("--messages", type=float, default=1e6, help="messages a second, over all topics")
    parser.add_argument("--bytes", type=int, default=100, help="of a message")
    parser.add_argument("--per-request", default="10,30,100", help="messages a request, comma-separated")
    parser.add_argument("--readers", type=float, default=1.0, help="readers of each topic that wait for new messages")
    parser.add_argument("--skew", type=float, default=0.5, help="topic k gets a share of 1 / k^SKEW; 0: all alike")
    parser.add_argument("--misdirected", type=float, default=0.1, help="share of requests to any instance")
    parser.add_argument("--headroom", type=float, default=0.6, help="maximum load of the busiest")
    parser.add_argument("--costs", type=Path, default=FILE, help="measured costs, as in bench/costs.json")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    load = Load(
        topics=args.topics,
        messages_per_s=args.messages,
        message_bytes=args.bytes,
        skew=args.skew,
        readers_per_topic=args.readers,
        misdirected=args.misdirected,
    )
    per_request = [float(each) for each in args.per_request.split(",")]
    for line in tables(load, per_request, Costs.read(args.costs), args.headroom, args.seed):
        print(line)


if __name__ == "__main__":
    main()
