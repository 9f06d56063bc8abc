"""Whole daemons of one cluster: each verifies that it is reachable at its own address, or logs a warning."""

from __future__ import annotations

import logging
import socket

import trio
from daemons import daemons

from broker.config.sections import Ensemble
from tests.patience import PATIENCE_S

SAYS = "this instance cannot reach itself at its own address"


def said(caplog):
    return [record for record in caplog.records if record.getMessage() == SAYS]


async def test_a_daemon_with_a_wrong_advertised_address_reports_it_at_its_start(zookeeper, monkeypatch, caplog):
    ensemble = Ensemble(zookeeper.address, "/of-addresses")
    with socket.socket() as taken, caplog.at_level(logging.WARNING):
        taken.bind(("127.0.0.1", 0))  # no server listens there
        nowhere = f"127.0.0.1:{taken.getsockname()[1]}"
        async with daemons(ensemble, monkeypatch, "a") as found:
            await found.start("b", **{"cluster.advertise": nowhere})
            with trio.fail_after(PATIENCE_S):
                while not said(caplog):  # noqa: ASYNC110 - a line in the log sets no event
                    await trio.sleep(0.01)
            (one,) = said(caplog)
            assert (one.instance, one.address) == ("b", nowhere)
            # The other instance cannot reach it either, and doctor reports that.
            instances = (await found["a"].cluster())["instances"]
            assert {each["name"]: each["topicsOpen"] for each in instances if each["name"] == "b"} in ({"b": None}, {})
