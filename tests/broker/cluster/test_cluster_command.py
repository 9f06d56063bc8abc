"""``plainsong cluster`` against a cluster of daemons."""

from __future__ import annotations

import json
from itertools import count

import pytest
import trio

from broker.config.sections import Ensemble
from plainsong.cli.cluster import _row
from plainsong.cli.command import Exit
from plainsong.cli.main import program, run
from tests.broker.cluster.daemons import TOPICS, daemons

paths = count()


@pytest.fixture
async def three(zookeeper, monkeypatch):
    ensemble = Ensemble(zookeeper.address, f"/of-commands/{next(paths)}")
    async with daemons(ensemble, monkeypatch, "a", "b", "c") as each:
        yield each


@pytest.fixture
def cli(three, capsys, monkeypatch, tmp_path):
    """Run the program against the first daemon and check its exit code."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    async def call(*arguments, code=0):
        words = [*arguments, "--url", three["a"].address, "--namespace", "ns"]
        ended = await trio.to_thread.run_sync(run, program, words, "plainsong")
        out, err = capsys.readouterr()
        assert ended == code, (out, err)
        return out if code == 0 else err

    return call


async def test_status_shows_instances_transactions_and_the_owner_of_a_topic(three, cli):
    lines = (await cli("cluster", "status", "orders")).splitlines()
    assert lines[0].split() == ["INSTANCE", "ADDRESS", "STATE", "WEIGHT", "TOPICS"]
    assert [line.split()[0] for line in lines[1:4]] == ["a", "b", "c"]
    assert lines[1].split()[1] == "*"
    assert any(line.startswith("zookeeper") and "connected for" in line for line in lines)
    assert any(line.startswith("ns:orders") for line in lines)
    assert json.loads(await cli("cluster", "status", "--json"))["instance"] == "a"


def test_the_state_of_a_joining_or_leaving_instance_has_its_number_of_topic_slices():
    there = {"name": "b", "address": "b:1", "leaving": False, "drained": False, "weight": 100, "topicsOpen": 3}
    states = [_row({**there, "slices": slices, "drained": slices < 40}, "a")[2] for slices in (64, 40, 12, 0)]
    assert states == ["there", "40/64", "drained, 12/64", "drained"]
    assert _row({**there, "slices": 0}, "a")[2] == "0/64"  # the instance has just joined


async def test_drain_returns_when_the_topics_have_moved(three, cli):
    for number in range(9):
        await three["b"].call("PUT", f"{TOPICS}/t{number}")
    told = json.loads(await cli("cluster", "drain", "b", "--json"))
    assert (told["instance"], told["drained"], told["topicsOpen"]) == ("b", True, 0)
    assert told["effect"]["moves"]["topicsOpen"] > 0
    assert "drained" in await cli("cluster", "status")
    assert "b" not in [await three["a"].owner(f"t{number}") for number in range(9)]
    assert json.loads(await cli("cluster", "undrain", "b", "--json")) == {"instance": "b", "drained": False}
    await cli("cluster", "drain", "b", "--no-wait")
    await cli("cluster", "undrain", "b")


async def test_drain_reports_how_many_topics_remain_at_its_time_limit(three, cli, monkeypatch):
    monkeypatch.setattr("actors.topic.FEW_ROWS", 0)
    await three["b"].call("PUT", f"{TOPICS}/t")
    await three["b"].publish("t", "a mark is to be written for it")
    owner = three[await three["a"].owner("t")]
    owner.store.reachable = trio.Event()  # its mark waits for the store
    try:
        err = await cli("cluster", "drain", owner.name, "--within", "0.3", code=Exit.UNAVAILABLE)
    finally:
        owner.store.reachable.set()  # or the daemon would not end
    assert "still has 1 topic open" in err


async def test_move_and_unpin_report_where_a_topic_is(three, cli):
    for to in ("a", "b", "c"):
        assert json.loads(await cli("cluster", "move", "orders", to, "--json")) == {
            "topic": "ns:orders",
            "instance": to,
            "owner": to,
        }
        assert await three["a"].owner("orders") == to
    assert "pinned to c" in await cli("cluster", "status", "orders")
    told = json.loads(await cli("cluster", "unpin", "orders", "--json"))
    assert told["instance"] == await three["a"].owner("orders")
    assert "pinned" not in await cli("cluster", "status", "orders")


async def test_moving_a_topic_to_a_drained_instance_reports_where_it_stays(three, cli):
    await cli("cluster", "drain", "b")
    told = json.loads(await cli("cluster", "move", "orders", "b", "--json"))
    assert (told["instance"], told["owner"]) == ("b", await three["a"].owner("orders"))
    assert told["owner"] != "b"


async def test_drain_of_a_silent_instance_does_not_claim_that_its_topics_have_moved(three, cli, monkeypatch):
    monkeypatch.setattr("broker.api.operations.cluster.TOPICS_OPEN", "a call without a handler")
    err = await cli("cluster", "drain", "b", "--within", "0.3", code=Exit.UNAVAILABLE)
    assert "b is drained, but does not report" in err


async def test_an_unknown_instance_is_refused_with_the_nearest_name(three, cli):
    assert "there is no instance aa" in await cli("cluster", "drain", "aa", code=Exit.NOT_FOUND)
    assert "there is no instance aa" in await cli("cluster", "move", "orders", "aa", code=Exit.USAGE)
