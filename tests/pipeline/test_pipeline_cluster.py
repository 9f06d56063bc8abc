"""A job on a standalone cluster of two workers, whose Python has nothing of ours but the zip."""

from __future__ import annotations

import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from pipeline.command import pipeline
from plainsong import Client
from plainsong.cli.main import run as run_program
from tests.daemon.harness import Daemon, clean_environ
from tests.pipeline.archives import raw_ids
from tests.spark.cluster import Cluster
from tests.spark_session import spark_environ, why_not

ROWS = 2_000


@pytest.fixture
def python_of_two_hosts(tmp_path):
    """On the driver's machine ours; where executors run one that sees no package that is installed as editable."""
    path = tmp_path / "python"
    bare = f'PYTHONPATH="$PYTHONPATH:{sysconfig.get_path("purelib")}" exec {sys.executable} -S "$@"'
    path.write_text(f'#!/bin/sh\ncase "$PWD" in *work-*) {bare};; esac\nexec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_the_printed_line_runs_on_a_cluster_that_has_only_the_zip(tmp_path, python_of_two_hosts, capsys):
    root, packed = str(tmp_path / "archive"), str(tmp_path / "jobs.zip")
    with Daemon(tmp_path / "data") as daemon, Cluster(tmp_path) as cluster:
        url = f"http://{daemon.address[0]}:{daemon.address[1]}"
        with Client(url) as client:
            client.create_topic("orders")
            client.publish("orders", [str(number).encode() for number in range(ROWS)])
            ids = [bytes(message.id) for message in client.read("orders")]
        assert run_program(pipeline, ["zip", packed], "plainsong pipeline") == 0
        job = ["archive", "append", "orders", "--root", root, "--url", url, "--conf", "spark.executor.memory=512m"]
        printing = ["run", "--print", "--master", cluster.url, "--zip", packed, *job]
        assert run_program(pipeline, printing, "plainsong pipeline") == 0
        line = capsys.readouterr().out.splitlines()[-1]
        submit = Path(sys.executable).with_name("spark-submit")
        own = {**spark_environ(), "PYSPARK_PYTHON": python_of_two_hosts}
        environ = {**clean_environ(), **own, "XDG_CONFIG_HOME": str(tmp_path)}
        environ.pop("PYTHONPATH", None)
        done = subprocess.run(
            [str(submit), *shlex.split(line)[1:]],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    told = [line for line in (done.stdout + done.stderr).splitlines() if " INFO " not in line and "\tat " not in line]
    assert done.returncode == 0, "\n".join(told)[-3000:]
    assert sorted(raw_ids(root)) == ids
