"""``python -m bench`` with forked daemons and fewer JVMs, for a test.

A quick run starts sixty daemons, each for a second or less, and shows that every measurement works, not how long a start
takes. So the daemons are forked from a process that has imported their modules, and one HBase serves all measurements.
Spark and HBase start with the options of tests, which take a third off their processor time.
"""

from __future__ import annotations

import io
import os
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

from bench import cluster, daemon, hbase, sparking
from bench.profiles import Profile
from tests import hbase_server, spark_session
from tests.daemon.forked import fork_server

_start_program = daemon.start_process
#: Unlike ``os.environ`` without what Spark adds to it.
_ENVIRON = dict(os.environ)


def start_process(program: Sequence[str], options: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a daemon as ``bench.daemon.start_process`` does; fork it if it is the program itself."""
    server = fork_server(_ENVIRON) if tuple(program) == ("broker",) else None
    if server is None:
        return _start_program(program, options, environ)
    own = {name: value for name, value in environ.items() if os.environ.get(name) != value}
    line = ["plainsong", "serve", *options]
    forked = server.start(line, cwd=Path.cwd(), environ={**_ENVIRON, **own}, stderr=sys.stderr.fileno())
    assert forked.stdout is not None  # a pipe, since no descriptor was given
    forked.stdout = cast("io.BufferedReader", io.TextIOWrapper(forked.stdout, encoding="utf-8"))
    return cast("subprocess.Popen[str]", forked)


def shared_hbase(ending: ExitStack) -> Callable[..., AbstractContextManager[hbase_server.HBase]]:
    """Return a replacement for ``HBase`` that starts one at its first use; ``ending`` ends it."""

    @cache
    def started(jvm: str) -> hbase_server.HBase:
        directory = Path(ending.enter_context(TemporaryDirectory()))  # not scratch, which each measurement removes
        return ending.enter_context(hbase_server.HBase(directory / "hbase", jvm=jvm))

    def of_measurement(directory: Path, *, jvm: str) -> AbstractContextManager[hbase_server.HBase]:
        assert directory.parent.is_dir()
        assert not directory.exists()
        return nullcontext(started(jvm))

    return of_measurement


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
        one = shared_hbase(stack)
        for module in (hbase, cluster):
            stack.enter_context(patch.object(module, "HBase", one))
        runpy.run_module("bench", run_name="__main__", alter_sys=True)
