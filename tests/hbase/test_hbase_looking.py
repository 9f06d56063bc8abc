"""``plainsong store dump`` and ``explain`` on HBase, while a daemon runs."""

from __future__ import annotations

import json

import pytest

from plainsong.cli.command import Exit
from plainsong.cli.main import program, run
from tests.daemon.harness import Daemon
from tests.daemon.talk import create, publish, read_all
from tests.hbase_server import free_ports


@pytest.fixture
def settings(hbase):
    sets = ("storage.kind=hbase", f"storage.hbase.thrift=127.0.0.1:{hbase.thrift}", "storage.hbase.table_prefix=look_")
    return [part for each in sets for part in ("--set", each)]


@pytest.fixture
def daemon(settings, tmp_path):
    with Daemon(tmp_path / "data", *settings[1::2]) as running:
        yield running


def test_a_store_in_hbase_is_shown_and_summed_up_while_its_daemon_runs(daemon, settings, capsys):
    create(daemon.address, "seen")
    publish(daemon.address, "seen", b"first", b"second")
    create(daemon.address, "other")
    publish(daemon.address, "other", b"elsewhere")
    capsys.readouterr()
    assert (
        run(program, ["store", "dump", *settings, "--topic", "ring:seen", "--table", "message", "--json"], "plainsong")
        == Exit.OK
    )
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["id"] for row in shown] == [message_id.hex() for message_id, _ in read_all(daemon.address, "seen")]
    assert run(program, ["store", "explain", *settings, "--json"], "plainsong") == Exit.OK
    summary = json.loads(capsys.readouterr().out)
    assert {each["topic"] for each in summary["topics"]} == {"seen", "other"}
    publish(daemon.address, "seen", b"third")
    assert len(read_all(daemon.address, "seen")) == 3


def test_inspecting_creates_no_tables_and_names_missing_ones(settings, capsys):
    assert (
        run(program, ["store", "explain", *settings, "--set", "storage.hbase.table_prefix=nowhere_"], "plainsong")
        == Exit.STORE
    )
    assert "HBase has no table nowhere_metadata" in capsys.readouterr().err
    (port,) = free_ports(1)
    nobody = ["--set", f"storage.hbase.thrift=127.0.0.1:{port}", "--set", "storage.hbase.timeout_s=0.5"]
    assert run(program, ["store", "dump", *settings, *nobody], "plainsong") == Exit.STORE
    assert "no Thrift gateway of HBase answers" in capsys.readouterr().err
