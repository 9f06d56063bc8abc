"""``python -m bench``: measure, print ratios and verdicts, write the report.

    python -m bench [SECTION ...] [--quick] [--json] [--report DIR] [--scratch DIR]
    python -m bench evenness --beside alone,cleaning --seconds 30
    python -m bench growth --messages 1m,10m --topics 100,1000
    python -m bench backup --messages 10m

A full run takes about half an hour and ten gigabytes of disk, most of it for evenness and growth. ``--quick`` takes two
minutes and only shows that everything works. The exit status is 0 whether or not the targets are reached; the report
contains the verdicts.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from bench.backup import measure_backup
from bench.chained import measure_chained
from bench.cleaning import measure_cleaning
from bench.cluster import measure_cluster
from bench.daemon import end_on_sigterm
from bench.delivery import measure_delivery
from bench.evenness import CONDITIONS, measure_evenness
from bench.front import measure_front
from bench.growth import measure_growth
from bench.hbase import measure_hbase
from bench.hostile import measure_hostile
from bench.memory import measure_memory
from bench.polling import measure_polling
from bench.producers import measure_producers
from bench.profiles import FULL, QUICK
from bench.publishing import measure_publishing
from bench.replicated import measure_copied
from bench.report import conclude, machine
from bench.secured import measure_secured
from bench.sparking import measure_spark
from bench.streaming import measure_streaming
from bench.transactions import measure_transactions
from bench.waking import measure_waking

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.profiles import Profile
    from bench.rounds import Section

MEASUREMENTS: dict[str, Callable[[Profile, Path, Callable[[str], None]], Section]] = {
    "memory": measure_memory,
    "publish": measure_publishing,
    "stream": measure_streaming,
    "poll": measure_polling,
    "wake": measure_waking,
    "transactions": measure_transactions,
    "delivery": measure_delivery,
    "producers": measure_producers,
    "cleaning": measure_cleaning,
    "evenness": measure_evenness,
    "growth": measure_growth,
    "spark": measure_spark,
    "hbase": measure_hbase,
    "cluster": measure_cluster,
    "front": measure_front,
    "hostile": measure_hostile,
    "backup": measure_backup,
    "secured": measure_secured,
    "chained": measure_chained,
    "copied": measure_copied,
}


def main() -> None:
    args = _arguments()
    profile = _chosen(QUICK if args.quick else FULL, args)
    # With --json, standard output is for programs: progress goes to standard error.
    say: Callable[[str], None] = partial(print, file=sys.stderr if args.json else sys.stdout, flush=True)
    facts = machine()
    args.scratch.mkdir(parents=True, exist_ok=True)
    sections = []
    begun_s = time.monotonic()
    for name in args.sections or args.only or MEASUREMENTS:
        with TemporaryDirectory(prefix=f"{name}-", dir=args.scratch) as scratch:
            section = MEASUREMENTS[name](profile, Path(scratch), say)
        if section.rows:  # no rows: a dependency is missing, and the measurement has printed which
            sections.append(section)
    facts["minutes"] = f"{(time.monotonic() - begun_s) / 60:.1f}"
    conclude(profile.name, facts, sections, args.report, say, as_json=args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Compare the daemon with raw plyvel and a bare server."
    )
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help="which (all): " + " ".join(MEASUREMENTS), type=_name
    )
    parser.add_argument("--only", type=_names, help="the same, comma-separated")
    parser.add_argument(
        "--quick", action="store_true", help="a two-minute check that it works; its numbers are not meaningful"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the results as JSON; progress goes to standard error"
    )
    parser.add_argument("--report", type=Path, default=Path("bench/report"), help="directory of the report")
    parser.add_argument("--scratch", type=Path, default=Path(".cache/bench"), help="directory for temporary stores")
    parser.add_argument("--beside", type=_conditions, help="evenness: load conditions, of " + ",".join(CONDITIONS))
    parser.add_argument("--seconds", type=float, help="evenness: seconds of each open loop")
    parser.add_argument(
        "--messages", type=_sizes, help="number of messages: growth (all), backup (the last); 1m,10m,50m"
    )
    parser.add_argument("--topics", type=_sizes, help="growth: number of topics; 100,1000,10k without --quick")
    return parser.parse_args()


def _chosen(profile: Profile, args: argparse.Namespace) -> Profile:
    """Return the profile with the command line's overrides applied."""
    said = {
        "beside": args.beside,
        "even_s": args.seconds,
        "grown_messages": args.messages,
        "backed_up_messages": args.messages and args.messages[-1],
        "grown_topics": args.topics,
    }
    return replace(profile, **{name: value for name, value in said.items() if value is not None})


def _sizes(text: str) -> tuple[int, ...]:
    """Parse rising sizes such as ``100,10k,1m``; an empty text gives none."""
    factors = {"k": 1000, "m": 1_000_000}
    try:
        sizes = [
            round(float(each.rstrip("km")) * factors.get(each[-1:], 1)) for each in text.lower().split(",") if each
        ]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a list of sizes such as 100,10k,1m") from None
    if sizes != sorted(set(sizes)):
        raise argparse.ArgumentTypeError("sizes must rise, since one store is filled further")
    return tuple(sizes)


def _conditions(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - CONDITIONS.keys():
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(CONDITIONS)}")
    return names


def _name(text: str) -> str:
    return _names(text)[0]


def _names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in MEASUREMENTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown measurement {', '.join(unknown)}; known: {', '.join(MEASUREMENTS)}")
    return names


if __name__ == "__main__":
    end_on_sigterm()
    main()
