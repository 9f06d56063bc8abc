"""Copies of tasks, and executors killed while they write, on a cluster: the topic has exactly the input's rows."""

from __future__ import annotations

import pytest
from disturbed import Disturbance
from topics import Topics, wanted
from writing_program import Program, Save

from tests.daemon.harness import Daemon
from tests.spark_session import QUICK_JVM

ROWS = 2_000

#: Spark starts a copy of any task that takes longer than the others.
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.01",
    "spark.speculation.minTaskRuntime": "100ms",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.executor.extraJavaOptions": QUICK_JVM,
}


@pytest.fixture
def topics(tmp_path):
    with Daemon(tmp_path / "data") as daemon:
        yield Topics("http://{}:{}".format(*daemon.address))


def test_speculative_tasks_and_killed_executors_on_a_cluster_leave_no_extra_rows(cluster, topics, tmp_path) -> None:
    for name in ("copies", "killed"):
        topics.create(name)
    copies = Save(topics.options("copies", storeBatchSize=100), Disturbance(str(tmp_path), task="wait"), ROWS)
    # Kill any attempt of the task: a speculative copy may be ahead of the first attempt.
    kill = Disturbance(str(tmp_path), task="kill", attempts=99)
    killed = Save(topics.options("killed", storeBatchSize=100), kill, ROWS)
    assert Program([copies, killed], cluster.url, SPECULATION).run() == 0
    assert (tmp_path / "reached").exists()
    assert (tmp_path / "copied").exists()
    assert not (tmp_path / "given-up").exists()  # "go" was never signalled: the copy finished first
    assert (tmp_path / "killed").exists()
    assert topics.counted("copies") == wanted(ROWS)
    assert topics.counted("killed") == wanted(ROWS)
