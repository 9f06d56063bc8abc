"""One quick run of the whole benchmark, shared by the tests of its report."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import hbase_server, spark_session
from tests.storage.replication.s3_server import s3_program

ROOT = Path(__file__).parents[2]
#: Ten times its duration.
PATIENCE_S = 1200
#: Overrides of the profile's sizes: the sizes at which growth is measured; the last is also that of backups.
SIZES = ("--messages", "3k,50k", "--topics", "5")


@dataclass(frozen=True, slots=True)
class Report:
    """The output of a run."""

    directory: Path
    results: dict[str, Any]
    """Its results, which are all that it prints to standard output."""
    said: str
    """Its standard error: progress, and a comparison with the targets."""


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The report of one quick run of everything, with some sizes overridden on the command line."""
    lacking = spark_session.why_not() or hbase_server.why_not()
    if s3_program() is None:
        lacking = "NOT TESTED: versitygw is not installed here; etc/tools fetches it where there is Go"
    if lacking is not None:
        pytest.skip(lacking)
    directory = tmp_path_factory.mktemp("bench")
    command = [sys.executable, "-m", "tests.bench.forking", "--quick", "--json", "--seconds", "0.2", *SIZES]
    command += ["--report", str(directory / "report"), "--scratch", str(directory / "scratch")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            results, said = process.communicate(timeout=PATIENCE_S)
        finally:
            process.terminate()  # if these tests are interrupted: SIGKILL would leave its daemons running
    assert process.returncode == 0, results + said
    assert not list((directory / "scratch").iterdir())
    return Report(directory / "report", json.loads(results), said)
