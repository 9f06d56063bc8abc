"""Any instance answers any request: where the owner is, once, and the client is told where that was."""

from __future__ import annotations

import pytest
import trio

from tests.broker.cluster.in_process import TOPICS, cluster


@pytest.fixture
async def nodes():
    async with cluster("a", "b", "c") as running:
        running.move("ns:t", "b")
        yield running


async def test_what_is_published_at_one_instance_is_read_at_every_other(nodes):
    await nodes["a"].create()
    await nodes["c"].publish("t", "one", "two")
    for node in nodes.values():
        assert await node.poll() == ["one", "two"]
    assert [len(node.service.directory) for node in nodes.values()] == [0, 1, 0]
