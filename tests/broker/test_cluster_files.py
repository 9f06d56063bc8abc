"""The files in ``etc`` for several instances: settings load and agree, and units name existing files."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from broker.config import load_config
from broker.config.config import sections
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "etc/cluster/plainsong.toml"


@pytest.fixture(scope="module")
def site():
    tree = ET.parse(ROOT / "etc/hbase/hbase-site.xml")
    return {each.findtext("name"): int(each.findtext("value")) for each in tree.getroot()}


def test_the_example_of_an_instance_loads_with_the_environment_of_its_unit():
    unit = (ROOT / "etc/cluster/plainsong@.service").read_text()
    environ = dict(re.findall(r"^#   (PLAINSONG_\w+)=(\S+)", unit, re.MULTILINE))
    config = load_config(EXAMPLE, {**environ, "PLAINSONG_CLUSTER__INSTANCE": "a1"}, {}).config
    assert (config.storage.kind, config.cluster.instance, config.http.bind) == ("hbase", "a1", "10.0.0.11:7420")
    assert config.cluster.advertise == "a1.example:7420"
    assert "cluster" in sections()
    assert f"TimeoutStopSec={3 * int(config.shutdown.drain_s) + 10}" in unit


PART = ROOT / "etc/cluster/part"


def start_part(tmp_path, *arguments):
    """Start a part whose command appends a line to ``starts`` each time."""
    (tmp_path / "log").mkdir()
    (tmp_path / "command").write_text('#!/bin/sh\necho started >> "$CLUSTER_DATA/starts"\necho why it ends\nexit 7\n')
    (tmp_path / "command").chmod(0o755)
    environ = {**os.environ, "CLUSTER_DATA": str(tmp_path), "CLUSTER_AGAIN_S": "0.01"}
    return subprocess.Popen([PART, *arguments, tmp_path / "command"], env=environ, stderr=subprocess.PIPE, text=True)


def test_an_instance_that_dies_is_reported_and_started_again_until_the_cluster_is_stopped(tmp_path):
    with start_part(tmp_path, "--again", "one") as part:
        for _ in range(3):
            assert f"error: one ended with 7; its log is {tmp_path}/log/one.log" in part.stderr.readline()
            while "starting one again" not in (line := part.stderr.readline()):
                assert line
        part.send_signal(signal.SIGTERM)
        part.stderr.read()
        assert part.wait(PATIENCE_S) == 0
    assert (tmp_path / "starts").read_text().count("started") >= 3


def test_the_end_of_any_other_part_is_an_error_that_ends_the_cluster(tmp_path):
    with start_part(tmp_path, "hbase") as part:
        assert part.wait(PATIENCE_S) == 1
        assert "why it ends" in part.stderr.read()
    assert (tmp_path / "starts").read_text() == "started\n"


def test_only_instances_are_started_again():
    parts = dict(line.split(": ", 1) for line in (ROOT / "etc/cluster/Procfile").read_text().splitlines())
    assert {name for name, command in parts.items() if " --again " in command} == {"one", "two", "three"}


def test_cells_fit_hbase_and_frames_fit_cells(site):
    config = load_config(EXAMPLE, {}, {}).config
    cell = config.storage.hbase.max_cell_bytes
    assert cell < site["hbase.client.keyvalue.maxsize"] == site["hbase.server.keyvalue.maxsize"]
    assert 2 * cell < site["hbase.regionserver.thrift.framed.max_frame_size_in_mb"] << 20
    assert site["hbase.client.operation.timeout"] < config.storage.hbase.timeout_s * 1000
    assert site["hbase.thrift.minWorkerThreads"] >= config.storage.hbase.max_connections
