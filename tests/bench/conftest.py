"""One quick run of the whole benchmark, for all who ask what it reports."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import hbase_server, spark_session

ROOT = Path(__file__).parents[2]
#: Ten times what it takes.
PATIENCE_S = 1200
#: Other sizes than the profile's: those at which growth is looked at, of which the last is that of backups, too.
SIZES = ("--messages", "3k,50k", "--topics", "5")


@dataclass(frozen=True, slots=True)
class Report:
    """What a run left behind."""

    directory: Path
    results: dict[str, Any]
    """As it printed them, on standard output and alone there."""
    said: str
    """What it said meanwhile, and of its targets."""


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The report of one quick run of everything, of which the command line says some sizes otherwise."""
    lacking = spark_session.why_not() or hbase_server.why_not()
    if lacking is not None:
        pytest.skip(lacking)
    directory = tmp_path_factory.mktemp("bench")
    command = [sys.executable, "-m", "bench", "--quick", "--json", "--seconds", "0.2", *SIZES]
    command += ["--report", str(directory / "report"), "--scratch", str(directory / "scratch")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list((directory / "scratch").iterdir())
    return Report(directory / "report", json.loads(done.stdout), done.stderr)
