"""HBase's servers, killed separately: no reader sees an anomaly."""

from __future__ import annotations

import pytest

from tests.cluster import nemesis
from tests.cluster.course import run
from tests.cluster.harness import open_cluster
from tests.cluster.test_cluster_histories import REPORT
from tests.hbase_server import why_not
from tests.hbase_servers import HBaseServers

SEED = 120
#: Time limit until a region is served again: the master starts and a log is split, on a busy machine.
QUIET_S = 900.0
FAULTS = (
    *(nemesis.region_server_dies, nemesis.master_dies, nemesis.region_server_dies, nemesis.gateway_dies),
    # Double faults: HBase may refuse requests for a long time, and must recover without help.
    *(nemesis.gateway_dies_twice, nemesis.region_server_and_gateway_die),
)

pytestmark = [pytest.mark.torture, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


@pytest.fixture
def servers(tmp_path):
    with HBaseServers(tmp_path / "hbase") as started:
        yield started


@pytest.mark.parametrize("seed", range(SEED, SEED + 3))
async def test_no_anomaly_while_region_servers_die_apart_from_the_master(servers, tmp_path, seed):
    async with open_cluster(servers, tmp_path, 2) as cluster:
        report = await run(cluster, FAULTS, seed, between=40, quiet_s=QUIET_S, restless=True)
    report.append_to(REPORT)
    assert report.is_good, str(report)
