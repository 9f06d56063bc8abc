"""HBase on an HDFS with three data nodes: no anomaly while data nodes and region servers are killed and frozen."""

from __future__ import annotations

from random import Random

import pytest

from tests.cluster import nemesis
from tests.cluster.course import run
from tests.cluster.harness import open_cluster
from tests.cluster.test_cluster_histories import REPORT
from tests.cluster.test_region_servers import QUIET_S
from tests.hbase_server import why_not
from tests.hbase_servers import HBaseServers

SEED = 130
FAULTS = (
    *(nemesis.data_node_dies, nemesis.region_server_dies, nemesis.two_data_nodes_die),
    *(nemesis.region_server_freezes, nemesis.data_node_dies, nemesis.master_dies, nemesis.data_node_dies),
)

pytestmark = [pytest.mark.torture, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


@pytest.fixture
def servers(tmp_path):
    with HBaseServers(tmp_path / "hbase", hdfs=True) as started:
        yield started


@pytest.mark.parametrize("seed", range(SEED, SEED + 3))
async def test_no_anomaly_while_data_nodes_and_region_servers_die_over_hdfs(servers, tmp_path, seed):
    faults = Random(seed).sample(FAULTS, len(FAULTS))
    async with open_cluster(servers, tmp_path, 2) as cluster:
        report = await run(cluster, faults, seed, between=40, quiet_s=QUIET_S, restless=True)
    report.append_to(REPORT)
    assert report.is_good, str(report)
