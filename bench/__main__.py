"""``python -m bench``: measure, print ratios and verdicts, write the report.

    python -m bench [--quick] [--only publish,stream,poll,wake,transactions,delivery,cleaning,memory,spark,hbase,cluster,front] [--report DIR] [--scratch DIR]

The full run takes about ten minutes and two gigabytes of disk; ``--quick`` a minute or two, for seeing that it works. It
exits 0 whether or not the targets are reached: what they say is in the report.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from bench.cleaning import measure_cleaning
from bench.cluster import measure_cluster
from bench.delivery import measure_delivery
from bench.front import measure_front
from bench.hbase import measure_hbase
from bench.memory import measure_memory
from bench.polling import measure_polling
from bench.producers import measure_producers
from bench.profiles import FULL, QUICK
from bench.publishing import measure_publishing
from bench.report import machine, verdict_line, write_report
from bench.sparking import measure_spark
from bench.streaming import measure_streaming
from bench.targets import judge
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
    "spark": measure_spark,
    "hbase": measure_hbase,
    "cluster": measure_cluster,
    "front": measure_front,
}


def main() -> None:
    """The command line."""
    args = _arguments()
    profile = QUICK if args.quick else FULL
    facts = machine()
    args.scratch.mkdir(parents=True, exist_ok=True)
    sections = []
    begun_s = time.monotonic()
    for name in args.only:
        with TemporaryDirectory(prefix=f"{name}-", dir=args.scratch) as scratch:
            section = MEASUREMENTS[name](profile, Path(scratch), lambda line: print(line, flush=True))
        if section.rows:  # one has none where what it needs is not there, and has said so
            sections.append(section)
    facts["minutes"] = f"{(time.monotonic() - begun_s) / 60:.1f}"
    verdicts = judge(sections)
    print()
    for verdict in verdicts:
        print(verdict_line(verdict))
    files = write_report(args.report, profile, facts, sections, verdicts)
    print("\nreport: " + ", ".join(str(file) for file in files))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Measures the daemon beside raw plyvel and a bare server."
    )
    parser.add_argument(
        "--quick", action="store_true", help="a minute or two, to see that it works; the numbers mean little"
    )
    parser.add_argument(
        "--only", type=_names, default=list(MEASUREMENTS), help="which, by commas: " + ",".join(MEASUREMENTS)
    )
    parser.add_argument("--report", type=Path, default=Path("bench/report"), help="where the report goes")
    parser.add_argument("--scratch", type=Path, default=Path(".cache/bench"), help="where stores are made and removed")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in MEASUREMENTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no measurement {', '.join(unknown)}; there are {', '.join(MEASUREMENTS)}")
    return names


if __name__ == "__main__":
    main()
