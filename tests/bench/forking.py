"""``python -m bench`` with forked daemons and fewer JVMs, for a test.

A quick run starts sixty daemons, each for a second or less, and shows that every measurement works, not how long a start
takes. So the daemons are forked from a process that has imported their modules, one HBase serves all measurements, and
Spark's copy of files runs in the session of the others. Spark and HBase start with the options of tests, which take a
third off their processor time.
"""

from __future__ import annotations

import io
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from unittest.mock import patch

from bench import cluster, copying, daemon, hbase, sparking
from bench.profiles import Profile
from tests import hbase_server, spark_session
from tests.daemon.forked import fork_server

_start_program = daemon.start_process
_run_process = sparking._Bench._process


def start_process(program: Sequence[str], options: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a daemon as ``bench.daemon.start_process`` does; fork it if it is the program itself."""
    server = fork_server(environ) if tuple(program) == ("broker",) else None
    if server is None:
        return _start_program(program, options, environ)
    line = ["plainsong", "serve", *options]
    forked = server.start(line, cwd=Path.cwd(), environ=environ, stderr=sys.stderr.fileno())
    assert forked.stdout is not None  # a pipe, since no descriptor was given
    forked.stdout = cast("io.BufferedReader", io.TextIOWrapper(forked.stdout, encoding="utf-8"))
    return cast("subprocess.Popen[str]", forked)


def shared_hbase(ending: ExitStack) -> Callable[..., AbstractContextManager[hbase_server.HBase]]:
    """Return a replacement for ``HBase`` that starts one at its first use; ``ending`` ends it."""

    @cache
    def started(jvm: str) -> hbase_server.HBase:
        directory = Path(ending.enter_context(TemporaryDirectory()))  # not scratch, which each measurement removes
        return ending.enter_context(hbase_server.HBase(directory / "hbase", jvm=jvm))

    return lambda _, *, jvm: nullcontext(started(jvm))


def run_process(bench: sparking._Bench, module: str, *arguments: str) -> None:
    """Run a module as a process; run Spark's copy in the session that exists, and leave that running."""
    if module != copying.__name__:
        _run_process(bench, module, *arguments)
        return
    session = bench._spark
    with (
        patch.object(copying, "build_session", return_value=session),
        patch.object(session, "stop"),
        patch.object(sys, "argv", [module, *arguments]),
    ):
        copying.main()


def with_jvm(measure: Callable[..., Any], jvm: str) -> Callable[..., Any]:
    """Return a measurement whose JVMs have other options than the profile's."""

    def measured(profile: Profile, *arguments: Any) -> Any:
        return measure(replace(profile, jvm=jvm), *arguments)

    return measured


if __name__ == "__main__":
    daemon.start_process = start_process
    sparking.measure_spark = with_jvm(sparking.measure_spark, spark_session.QUICK_JVM)
    hbase.measure_hbase = with_jvm(hbase.measure_hbase, hbase_server.QUICK_JVM)
    cluster.measure_cluster = with_jvm(cluster.measure_cluster, hbase_server.QUICK_JVM)
    with ExitStack() as stack:
        stack.enter_context(patch.object(sparking._Bench, "_process", run_process))
        one = shared_hbase(stack)
        for module in (hbase, cluster):
            stack.enter_context(patch.object(module, "HBase", one))
        runpy.run_module("bench", run_name="__main__", alter_sys=True)
