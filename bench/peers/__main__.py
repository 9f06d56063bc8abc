"""``python -m bench.peers``: the daemon and other brokers in turn, with a table, plots and the conditions.

    python -m bench.peers [--only plainsong,original,...] [--quick] [--json] [--report DIR] [--scratch DIR]

The full run takes about half an hour and up to twenty gigabytes of disk, ``--rounds 1`` half of that time. ``--quick``
takes a minute and only shows that everything works. The software of each peer is first fetched into ``.cache/peers``
(if run as root, apt may install packages too). The report lists unavailable peers with the reason. Run it on an
otherwise idle machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from bench.daemon import end_on_sigterm
from bench.generator import compiled
from bench.peers.kafka import Kafka
from bench.peers.loads import FULL, QUICK, Comparison, settled
from bench.peers.nats import Nats
from bench.peers.plainsong import Original, Plainsong
from bench.peers.postgres import Postgres
from bench.peers.redis import Redis
from bench.report import conclude, machine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.peers.peer import Peer

PEERS: dict[str, type[Peer]] = {each.name: each for each in (Plainsong, Original, Kafka, Nats, Redis, Postgres)}
#: Above this load average (one minute) the results mean little.
_QUIET = 0.3
#: Number of syncs from which the median and the 99th percentile are computed.
_SYNCS = 300
_ROW_BYTES = 200


def main() -> None:
    args = _arguments()
    if compiled() is None:
        sys.exit("a C compiler is needed: the load generator speaks the peers' protocols in C only (bench/loadgen)")
    say: Callable[[str], None] = partial(print, file=sys.stderr if args.json else sys.stdout, flush=True)
    profile = QUICK if args.quick else FULL
    if args.rounds:
        profile = replace(profile, rounds=args.rounds)
    args.scratch.mkdir(parents=True, exist_ok=True)
    begun_s = time.monotonic()
    comparison = Comparison(profile, say)
    with TemporaryDirectory(prefix="peers-", dir=args.scratch) as directory, ExitStack() as ending:
        home = Path(directory).resolve()
        home.chmod(0o711)  # one of the peers runs as another user
        facts = machine() | _conditions(home)
        say(", ".join(f"{name} {value}" for name, value in facts.items()))
        if os.getloadavg()[0] > _QUIET:
            say("NOT QUIET: other processes use the cores; for a valid run, start at a load below 0.3")
        comparison.start([PEERS[name]() for name in args.only], home, ending)
        comparison.warm_up()
        facts["all idle"] = f"{comparison.idle_percent(1.0 if args.quick else 10.0):.1f} % of a core"
        settle = (lambda: None) if args.quick else settled
        rates, waits = comparison.measure(settle)
        sections = [rates, waits, comparison.measure_open(settle)]
    facts["load after"] = f"{os.getloadavg()[0]:.2f}"
    facts["minutes"] = f"{(time.monotonic() - begun_s) / 60:.1f}"
    sections = [comparison.overview(), *(section for section in sections if section.rows)]
    conclude(profile.name, facts, sections, args.report, say, as_json=args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description="Compare the daemon with other brokers at the same durability."
    )
    parser.add_argument("--only", type=_names, default=list(PEERS), help="peers to run: " + ",".join(PEERS))
    parser.add_argument("--quick", action="store_true", help="only check that it works; the numbers are not meaningful")
    parser.add_argument("--rounds", type=int, help=f"rounds of each load on each peer ({FULL.rounds})")
    parser.add_argument(
        "--json", action="store_true", help="print the results as JSON; progress goes to standard error"
    )
    parser.add_argument("--report", type=Path, default=Path("bench/report/peers"), help="directory of the report")
    parser.add_argument("--scratch", type=Path, default=Path(".cache/bench"), help="directory for temporary data")
    return parser.parse_args()


def _names(text: str) -> Sequence[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in PEERS]:
        raise argparse.ArgumentTypeError(f"unknown peer {', '.join(unknown)}; the peers are {', '.join(PEERS)}")
    return names


def _conditions(home: Path) -> dict[str, str]:
    """Describe processor and kernel, and measure a sync on this disk."""
    model = [line for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if "model name" in line]
    probe = home / "probe"
    took_ms = []
    with probe.open("wb", buffering=0) as file:
        for _ in range(_SYNCS):
            begun_s = time.perf_counter()
            file.write(bytes(_ROW_BYTES))
            os.fdatasync(file.fileno())
            took_ms.append((time.perf_counter() - begun_s) * 1e3)
    probe.unlink()
    cuts = quantiles(took_ms, n=100)
    return {
        "processor": model[0].partition(":")[2].strip() if model else "unknown",
        "kernel": platform.release(),
        "a synced append of 200 B": f"{cuts[49]:.2f} ms (p99 {cuts[98]:.2f})",
    }


if __name__ == "__main__":
    end_on_sigterm()
    main()
