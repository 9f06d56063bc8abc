"""Several instances on one HBase, killed, frozen, cut off and moved under load: no reader sees an anomaly."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest

from tests.cluster import nemesis
from tests.cluster.course import run
from tests.cluster.harness import open_cluster, why_no_wrong_clocks
from tests.cluster.nemesis import Fault

SEED = int(os.environ.get("PLAINSONG_RING_SEED", "80"))
#: ``make torture`` appends faults and results to this file.
REPORT = Path(__file__).parents[2] / "build/torture/cluster.txt"
#: The faults of the ordinary run on three instances, in order.
SHORT = (nemesis.kill, nemesis.move, nemesis.long_pause, nemesis.lossy_gateway, nemesis.no_zookeeper)
CLOCKS = why_no_wrong_clocks() is None


async def test_no_anomaly_while_three_instances_fail_in_turn(hbase, tmp_path):
    async with open_cluster(hbase, tmp_path, 3) as cluster:
        report = await run(cluster, SHORT, SEED)
    print(report)
    assert report.is_good, str(report)


async def test_no_anomaly_while_the_gateway_hbase_and_zookeeper_freeze_and_die(hbase, tmp_path):
    async with open_cluster(hbase, tmp_path, 2) as cluster:
        report = await run(cluster, [nemesis.gateway_dies, nemesis.hbase_freezes, nemesis.hbase_dies], SEED + 2)
    print(report)
    assert report.is_good, str(report)


@pytest.mark.skipif(not CLOCKS, reason=why_no_wrong_clocks() or "")
async def test_no_anomaly_while_the_clock_of_one_instance_jumps_by_an_hour(hbase, tmp_path):
    async with open_cluster(hbase, tmp_path, 2, clocks=True) as cluster:
        report = await run(
            cluster,
            [nemesis.clock_jumps(nemesis.HOUR_S), nemesis.restart, nemesis.clock_jumps(-nemesis.HOUR_S)],
            SEED + 1,
            clients=1,  # the effect of a clock on a request does not depend on other requests
        )
    print(report)
    assert report.is_good, str(report)


async def test_no_anomaly_while_connections_are_cut_in_one_direction_and_in_both(hbase, tmp_path):
    async with open_cluster(hbase, tmp_path, 2, links=True) as cluster:
        report = await run(cluster, [nemesis.unheard_link, nemesis.no_links, nemesis.unheard_link], SEED + 3)
    print(report)
    assert report.is_good, str(report)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(SEED + 10, SEED + 16))
async def test_no_anomaly_through_many_faults_of_all_kinds(hbase, tmp_path, seed):
    """Append the report of each run to ``build/torture/cluster.txt``. Every other cluster has front ends."""
    rng, front_ends = Random(seed), seed % 2
    kinds = (*nemesis.ALL, *nemesis.OF_LINKS, *(nemesis.OF_FRONT_ENDS if front_ends else ()))
    faults: list[Fault] = []
    for _ in range(4):
        faults += rng.sample(kinds, len(kinds))
    processes = f"http.processes={1 + front_ends}"
    async with open_cluster(hbase, tmp_path, 3, processes, clocks=CLOCKS, links=True) as cluster:
        report = await run(
            cluster,
            [each for each in faults if CLOCKS or each is not nemesis.wrong_clock],
            seed,
            between=40,
            restless=True,
        )
    report.append_to(REPORT)
    assert report.is_good, str(report)
