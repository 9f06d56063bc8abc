"""Mutation tests of the protocol: change one small place in its code, and check that a test of that place fails.

make mutate                                        40 changes of each main module, and those that no test noticed
make mutate ARGS="--sample 200 topic/publish ids"  200 of each of these
make mutate ARGS="--sample 0 topic/publish"        all of this one
make mutate ARGS="--all --table"                   of every module, and the table in docs/reliability.md

An interrupted run resumes: build/mutation stores the result of each change. A change that a test noticed is tried again
only when its module changes; one that no test noticed is tried each time, unless it is known to be equivalent. Exit
status 1: fewer than nine in ten were noticed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import pytest

from tests.mutation import mutants, table
from tests.mutation.equivalent import why_equivalent
from tests.mutation.judge import Judge, Result, Verdict
from tests.mutation.mutants import FOREMOST, ROOT, Mutant

KEPT = ROOT / "build/mutation"
#: Required share of the mutants that are not equivalent.
WANTED = 0.9


@dataclass(frozen=True, slots=True)
class Entry:
    """The stored result of a mutant: a line of JSON in ``results.jsonl``, where the last line of a key counts."""

    key: str
    module: str
    line: int
    before: str
    after: str
    verdict: str
    test: str
    tests: int
    seconds: float


def main() -> int:
    """Judge the mutants chosen on the command line."""
    arguments = _arguments()
    mutants.add_tools()
    names = arguments.module or (mutants.modules() if arguments.all else list(FOREMOST))
    if unknown := [name for name in names if not mutants.path_of(name).is_file()]:
        print(f"error: plainsong/protocol has no module {unknown[0]}", file=sys.stderr)
        print(f"hint: one of {', '.join(mutants.modules())}", file=sys.stderr)
        return 2
    KEPT.mkdir(parents=True, exist_ok=True)
    kept = {} if arguments.fresh else _kept()
    wanted = {
        name: list(mutants.sample(name, None if arguments.sample == 0 else arguments.sample, arguments.seed))
        for name in names
    }
    open_ones = [each for name in names for each in wanted[name] if _is_open(each, kept.get(each.key))]
    if not arguments.report:
        _judge(open_ones, kept, arguments)
    rows = [table.row(name, mutants.count(name), wanted[name], kept) for name in names]
    return _summarize(rows, wanted, kept, arguments)


def _is_open(mutant: Mutant, entry: Entry | None) -> bool:
    """True if the mutant is to be tried: it has no result, or a test added since may kill it."""
    if entry is None:
        return True
    return entry.verdict in (Verdict.SURVIVED, Verdict.UNCOVERED) and why_equivalent(mutant) is None


def _judge(open_ones: list[Mutant], kept: dict[str, Entry], arguments: argparse.Namespace) -> None:
    if not open_ones:
        return
    done = 0

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with (KEPT / "results.jsonl").open("w" if arguments.fresh else "a", encoding="utf-8") as lines:

        def report(result: Result) -> None:
            nonlocal done
            done += 1
            mutant = result.mutant
            entry = Entry(
                mutant.key,
                mutant.module,
                mutant.line,
                mutant.before,
                mutant.after,
                result.verdict,
                result.test,
                result.tests,
                round(result.seconds, 2),
            )
            kept[mutant.key] = entry
            lines.write(f"{json.dumps(asdict(entry))}\n")
            lines.flush()
            if result.verdict is Verdict.SURVIVED and why_equivalent(mutant) is None:
                say(f"survived {result.tests} tests: {mutant}")
            if done % 20 == 0:
                say(f"{done} of {len(open_ones)}")

        options = ["--no-header", "--no-summary", "-p", "no:cacheprovider", *arguments.tests]
        judge = Judge(open_ones, report, KEPT / "baseline.json", say, arguments.examples)
        status = pytest.main(options, plugins=[judge])
    if done < len(open_ones):
        say(f"ended by pytest with status {int(status)}; {done} of {len(open_ones)} are judged")
        raise SystemExit(3)


def _kept() -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    path = KEPT / "results.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        entry = Entry(**json.loads(line))
        found[entry.key] = entry
    return found


def _summarize(
    rows: list[table.Row], wanted: dict[str, list[Mutant]], kept: dict[str, Entry], arguments: argparse.Namespace
) -> int:
    open_ones = list(_open(wanted, kept))
    total = table.total(rows)
    if arguments.json:
        print(
            json.dumps(
                {
                    "modules": [asdict(row) for row in rows],
                    "total": asdict(total),
                    "survivors": [asdict(kept[each.key]) for each in open_ones],
                }
            )
        )
    else:
        for each in open_ones:
            print(f"{kept[each.key].verdict}: {each}")
        print(table.text(rows, arguments.seed, arguments.examples))
    if arguments.table:
        table.write(table.text(rows, arguments.seed, arguments.examples))
    return 0 if total.share >= WANTED else 1


def _open(wanted: dict[str, list[Mutant]], kept: dict[str, Entry]) -> Iterator[Mutant]:
    for each in (mutant for those in wanted.values() for mutant in those):
        entry = kept.get(each.key)
        if entry and entry.verdict in (Verdict.SURVIVED, Verdict.UNCOVERED) and why_equivalent(each) is None:
            yield each


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make mutate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("module", nargs="*", help="below plainsong/protocol, such as topic/core")
    parser.add_argument("--all", action="store_true", help="every module, not only the main ones")
    parser.add_argument("--sample", type=int, default=40, help="number of mutants per module (40); 0: all")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample (1)")
    parser.add_argument("--fresh", action="store_true", help="ignore the stored results")
    parser.add_argument("--report", action="store_true", help="judge none; report the stored results")
    parser.add_argument(
        "--tests", nargs="+", default=["tests/protocol"], help="tests that may kill mutants (tests/protocol)"
    )
    parser.add_argument("--examples", type=int, help="most examples of a property test; default: the test's own number")
    parser.add_argument("--table", action="store_true", help="write the table in docs/reliability.md")
    parser.add_argument("--json", action="store_true", help="the result as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
