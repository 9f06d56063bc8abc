"""The lineage page draws the published flows; if there are none, it explains how to publish some."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from plainsong import Client
from plainsong.errors import TopicNotFound
from tests.console.screen import Screen

FLOWS = [
    ("raw.clicks", "clean.clicks"),
    ("raw.users", "clean.users"),
    ("clean.clicks", "sessions"),
    ("clean.users", "sessions"),
]


@pytest.fixture
def flows(screen: Screen) -> Iterator[None]:
    """Flows that are published twice, as by two runs of a job, with unrelated ones in between."""
    more = [(f"a{number}", f"b{number}") for number in range(5)]
    with Client(screen.url, namespace="system") as client:
        client.create_topic("lineage")
        for _ in range(2):
            rows = [{"v": 1, "from": a, "to": b, "program": "p", "runs": 3} for a, b in [*FLOWS, *more]]
            client.publish("lineage", [json.dumps(row).encode() for row in rows])
        client.publish("lineage", [b"\xff not a flow", b'{"from": 1}', b"<img src=x onerror=alert(1)>"])
        yield
        client.admin.delete_topic("lineage")


def test_without_any_lineage_the_page_says_how_to_record_some(screen: Screen):
    with Client(screen.url, namespace="system") as client, pytest.raises(TopicNotFound):
        client.admin.properties("lineage")
    screen.open("/console/lineage")
    screen.says("lineage-empty", "plainsong pipeline run audit run", "--publish-lineage", "system:lineage")


def test_flows_are_drawn_once_and_a_dataset_shows_what_belongs_to_it(screen: Screen, flows: None):
    screen.open("/console/lineage", "lineage-node")
    screen.until("all of them", lambda: len(screen.all("lineage-node")) == 5 + 10)
    screen.click("lineage-node", dataset="sessions")
    screen.until("what belongs to it", lambda: len(screen.all("lineage-node")) == 5)
    assert {each.text for each in screen.all("lineage-node")} == {name for flow in FLOWS for name in flow}
    assert screen.path == "/console/lineage?dataset=sessions"
    # Sources are to the left of their targets.
    left = {each.text: each.location["x"] for each in screen.all("lineage-node")}
    assert all(left[source] < left[target] for source, target in FLOWS)
    assert screen.accessibility() == []
    # A URL may name a dataset without flows.
    screen.open("/console/lineage?dataset=nobody")
    screen.until("nothing is near it", lambda: "0 flows near nobody" in screen.text())
