"""Runs the tests of mutants: all tests are loaded once, and each mutant gets a fork of that process.

First the tests run unchanged, and coverage records which test runs which line of the protocol. A mutant's tests are
those that run its line; the first that fails kills it.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import json
import math
import os
import resource
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

from tests.mutation.mutants import CORE, Mutant, path_of
from tests.mutation.swap import NotApplicable, functions_below, swap

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Processor time of a test beyond three times its usual: one that never ends is killed by this limit.
PATIENCE_CPU_S = 4
#: Wall-clock limit, for a test that waits forever without using the processor. The machine may be much slower now.
PATIENCE_S = 900
#: Memory beyond that of the process: a mutant may collect forever.
MEMORY = 2 << 30
SURVIVED, KILLED, LOADED = 0, 1, 2


class Verdict(StrEnum):
    """The result of a mutant."""

    KILLED = "killed"
    ENDLESS = "killed: it does not end, or takes all memory"
    SURVIVED = "survived"
    UNCOVERED = "no test runs the line"
    LOADED = "it changes what runs when the module is loaded, which is not judged"


@dataclass(frozen=True, slots=True)
class Result:
    """A verdict with its details."""

    mutant: Mutant
    verdict: Verdict
    test: str
    """The test that failed; empty if none."""
    tests: int
    """Number of tests that run the line."""
    seconds: float


@dataclass(slots=True)
class Baseline:
    """The tests without a change."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Processor time, by test."""
    lines: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    """By module and line: the tests that run it, as indexes into ``seconds``."""

    def tests_of(self, module: str, first: int, last: int) -> list[str]:
        """Return the tests that run one of the lines, the quickest first."""
        names = list(self.seconds)
        lines = self.lines.get(module, {})
        found = {place for line in range(first, last + 1) for place in lines.get(line, ())}
        return sorted((names[place] for place in found), key=lambda name: (self.seconds[name], name))


class Judge:
    """A pytest plugin that runs mutants where pytest would run tests."""

    def __init__(
        self,
        mutants: Iterable[Mutant],
        report: Callable[[Result], None],
        kept: Path,
        say: Callable[[str], None],
        examples: int | None,
    ) -> None:
        self._mutants, self._report, self._kept, self._say, self._examples = mutants, report, kept, say, examples
        self._killers: Counter[tuple[str, str]] = Counter()
        self._failed = ""

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        """Search for failures as usual, but do not shrink them: they are not shown."""
        from hypothesis import Phase, settings  # not at the top: pytest has to load it first

        house = settings(settings.get_profile("house"), phases=(Phase.explicit, Phase.generate))
        settings.register_profile("house", settings(house, max_examples=self._examples or house.max_examples))
        settings.load_profile("house")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed = report.nodeid

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        # Results of tests in a fork are not results of this run, and must not be printed.
        session.config.pluginmanager.unregister(name="terminalreporter")
        items = {item.nodeid: item for item in session.items}
        if self._examples is not None:
            _bound_examples(session.items, self._examples)
        baseline = self._baseline(session, items)
        functions = functions_below(CORE)
        gc.freeze()
        for mutant in self._mutants:
            begun_s = time.monotonic()
            first, last = _statement(path_of(mutant.module), mutant.line)
            tests = baseline.tests_of(mutant.module, first, last)
            if tests:
                # Tests that killed other mutants of the module run first, which changes only how soon one fails.
                tests.sort(key=lambda name: -self._killers[mutant.module, name])
                change = partial(swap, functions, path_of(mutant.module), mutant.source)
                work = partial(self._run, change, [(items[name], baseline.seconds[name]) for name in tests])
                code, test = forked(work, PATIENCE_CPU_S)
                verdict = {SURVIVED: Verdict.SURVIVED, KILLED: Verdict.KILLED, LOADED: Verdict.LOADED}.get(
                    code, Verdict.ENDLESS
                )
                if test:
                    self._killers[mutant.module, test] += 1
            else:
                verdict, test = Verdict.UNCOVERED, ""
            self._report(Result(mutant, verdict, test, len(tests), time.monotonic() - begun_s))
        return True

    def _run(self, change: Callable[[], object], items: list[tuple[pytest.Item, float]]) -> tuple[int, str]:
        try:
            change()
        except NotApplicable:
            return LOADED, ""
        for place, (item, cpu_s) in enumerate(items):
            following = items[place + 1][0] if place + 1 < len(items) else None
            bound_cpu(3 * cpu_s + PATIENCE_CPU_S)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._failed:
                return KILLED, self._failed
        return SURVIVED, ""

    def _baseline(self, session: pytest.Session, items: dict[str, pytest.Item]) -> Baseline:
        """Return the stored baseline if neither code nor tests have changed since; otherwise measure it."""
        digest = hashlib.sha256(repr((self._examples, list(items))).encode())
        for path in sorted([*CORE.rglob("*.py"), *{item.path for item in session.items}]):
            digest.update(path.read_bytes())
        if self._kept.exists():
            kept = json.loads(self._kept.read_text(encoding="utf-8"))
            if kept["digest"] == digest.hexdigest():
                lines = {
                    module: {int(line): tests for line, tests in by_line.items()}
                    for module, by_line in kept["lines"].items()
                }
                return Baseline(kept["seconds"], lines)
        self._say(f"running {len(items)} tests without a change, to see which of them run which lines")
        written = self._kept.with_suffix(".new")
        code, test = forked(lambda: self._measure(items, written), None)
        if code != SURVIVED:
            raise pytest.UsageError(f"without any change the tests do not pass: {test or code}")
        measured = json.loads(written.read_text(encoding="utf-8"))
        written.unlink()
        self._kept.write_text(json.dumps({"digest": digest.hexdigest(), **measured}), encoding="utf-8")
        return self._baseline(session, items)

    def _measure(self, items: dict[str, pytest.Item], written: Path) -> tuple[int, str]:
        import coverage

        seconds: dict[str, float] = {}
        measured = coverage.Coverage(data_file=None, include=[f"{CORE}/*"], config_file=False, messages=False)
        measured.start()
        those = list(items.items())
        for place, (name, item) in enumerate(those):
            measured.switch_context(str(place))
            begun_s = time.process_time()
            following = those[place + 1][1] if place + 1 < len(those) else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            seconds[name] = time.process_time() - begun_s
            if self._failed:
                return KILLED, self._failed
        measured.stop()
        data = measured.get_data()
        lines = {
            Path(file).relative_to(CORE).with_suffix("").as_posix(): {
                line: [int(context) for context in contexts if context]
                for line, contexts in data.contexts_by_lineno(file).items()
            }
            for file in data.measured_files()
        }
        written.write_text(json.dumps({"seconds": seconds, "lines": lines}), encoding="utf-8")
        return SURVIVED, ""


def _bound_examples(items: list[pytest.Item], most: int) -> None:
    """Bound the number of examples, including those of tests with their own setting."""
    from hypothesis import settings

    for item in items:
        holders = ((getattr(item, "cls", None), "settings"), (item.obj, "_hypothesis_internal_use_settings"))
        for holder, name in holders:
            if isinstance(own := getattr(holder, name, None), settings) and own.max_examples > most:
                function = getattr(holder, "__func__", holder)
                setattr(function, name, settings(own, max_examples=most))


def _statement(path: Path, line: int) -> tuple[int, int]:
    """Return the first and last line of the smallest statement around a line: coverage may count only one of them."""
    found, most = (line, line), sys.maxsize
    for each in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(each, ast.stmt) and each.end_lineno is not None and each.lineno <= line <= each.end_lineno:
            lines = each.end_lineno - each.lineno
            if lines < most:
                found, most = (each.lineno, each.end_lineno), lines
    return found


def forked(work: Callable[[], tuple[int, str]], cpu_s: float | None) -> tuple[int, str]:
    """Run ``work`` in a fork, with limits unless ``cpu_s`` is None; return its result, with code -1 if killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            _in_child(work, cpu_s, writing)
        finally:
            os._exit(KILLED)  # only an error caused by the change gets here
    os.close(writing)
    waiting = os.pidfd_open(child)
    try:
        if not select.select([waiting], [], [], None if cpu_s is None else PATIENCE_S)[0]:
            signal.pidfd_send_signal(waiting, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return (code, os.read(reading, 65_536).decode()) if code >= 0 else (-1, "")
    finally:
        os.close(waiting)
        os.close(reading)


def bound_cpu(more_s: float) -> None:
    """Limit this process to this much more processor time, after which it is killed."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + more_s), hard))


def _in_child(work: Callable[[], tuple[int, str]], cpu_s: float | None, writing: int) -> NoReturn:
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    if cpu_s is not None:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
        bound_cpu(cpu_s)
    code, name = work()
    os.write(writing, name.encode())
    os._exit(code)
