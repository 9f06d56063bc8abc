"""CloudEvents through an instance that does not own their topic."""

from __future__ import annotations

import base64
import json

import pytest

from plainsong.protocol.codec.cloud_events import BATCH_TYPE, EVENT_TYPE
from tests.broker.cluster.in_process import TOPICS, cluster

EVENT = {"specversion": "1.0", "id": "A-1", "source": "/shop", "type": "sold"}
HEADERS = {f"ce-{name}": value for name, value in EVENT.items()}


@pytest.fixture
async def nodes():
    async with cluster("a", "b") as running:
        running.move("ns:t", "b")
        await running["b"].create()
        yield running


@pytest.mark.parametrize("asked", ["a", "b"])
async def test_events_are_published_and_polled_through_any_instance(nodes, asked):
    publish, poll = f"{TOPICS}/t/publish", f"{TOPICS}/t/poll"
    binary = HEADERS | {"ce-subject": "50%25", "ce-x": "y", "Content-Type": "image/png"}
    await nodes[asked].call("POST", publish, content=b"\xff", headers=binary)
    event = EVENT | {"data": {"n": 1}}
    await nodes[asked].call("POST", publish, content=json.dumps(event), headers={"Content-Type": EVENT_TYPE})
    await nodes[asked].call("POST", publish, content=json.dumps([event]), headers={"Content-Type": BATCH_TYPE})
    wrong = {name: value for name, value in HEADERS.items() if name != "ce-type"}
    await nodes[asked].call("POST", publish, headers=wrong, status=400, code="invalid_parameter")
    answer = await nodes[asked].call("POST", poll, json={}, headers={"Accept": BATCH_TYPE})
    assert answer.headers["content-type"] == BATCH_TYPE
    assert answer.headers["plainsong-end"] == "end"
    found = answer.json()
    assert len({each.pop("plainsongid") for each in found}) == 3
    more = {
        "subject": "50%",
        "x": "y",
        "datacontenttype": "image/png",
        "data_base64": base64.b64encode(b"\xff").decode(),
    }
    assert found == [EVENT | more, event, event]
