"""What ``etc`` has for several instances: settings that load and fit each other, units that name what there is."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from broker.config import load_config
from broker.config.config import sections

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "etc/cluster/plainsong.toml"


@pytest.fixture(scope="module")
def site():
    tree = ET.parse(ROOT / "etc/hbase/hbase-site.xml")
    return {each.findtext("name"): int(each.findtext("value")) for each in tree.getroot()}


def test_the_example_of_an_instance_loads_with_what_its_unit_gives_it():
    unit = (ROOT / "etc/cluster/plainsong@.service").read_text()
    environ = dict(re.findall(r"^#   (PLAINSONG_\w+)=(\S+)", unit, re.MULTILINE))
    config = load_config(EXAMPLE, {**environ, "PLAINSONG_CLUSTER__INSTANCE": "a1"}, {}).config
    assert (config.storage.kind, config.cluster.instance, config.http.bind) == ("hbase", "a1", "10.0.0.11:7420")
    assert config.cluster.advertise == "a1.example:7420"
    assert "cluster" in sections()
    assert f"TimeoutStopSec={2 * int(config.shutdown.drain_s)}" in unit


def test_cells_fit_hbase_and_frames_fit_cells(site):
    config = load_config(EXAMPLE, {}, {}).config
    cell = config.storage.hbase.max_cell_bytes
    assert cell < site["hbase.client.keyvalue.maxsize"] == site["hbase.server.keyvalue.maxsize"]
    assert 2 * cell < site["hbase.regionserver.thrift.framed.max_frame_size_in_mb"] << 20
    assert site["hbase.client.operation.timeout"] < config.storage.hbase.timeout_s * 1000
    assert site["hbase.thrift.minWorkerThreads"] >= config.storage.hbase.max_connections
