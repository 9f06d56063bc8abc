"""Instances with front ends on one HBase: if any of their processes dies or freezes, no reader sees an anomaly."""

from __future__ import annotations

from tests.cluster import nemesis
from tests.cluster.course import run
from tests.cluster.harness import open_cluster

SEED = 80
FRONT_ENDS = "http.processes=2"


async def test_no_anomaly_while_front_ends_and_their_owning_processes_fail(hbase, tmp_path):
    faults = [nemesis.front_end_dies, nemesis.owner_process_dies, nemesis.front_end_freezes]
    async with open_cluster(hbase, tmp_path, 2, FRONT_ENDS) as cluster:
        report = await run(cluster, faults, SEED)
    print(report)
    assert report.is_good, str(report)
