"""One instance on HBase, killed, frozen and cut off under load: no reader sees an anomaly."""

from __future__ import annotations

from tests.cluster import nemesis
from tests.cluster.course import run
from tests.cluster.harness import open_cluster

SEED = 80


async def test_one_instance_keeps_its_promises_through_kills_and_a_gateway_that_loses_answers(hbase, tmp_path):
    faults = [nemesis.lossy_gateway, nemesis.kill, nemesis.no_gateway, nemesis.gateway_dies]
    async with open_cluster(hbase, tmp_path, 1, alone=True) as cluster:
        report = await run(cluster, faults, SEED)
    print(report)
    assert report.is_good, str(report)
