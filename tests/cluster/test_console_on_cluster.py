"""The console's cluster page, on real daemons that share an HBase: drain, pin, and their effects."""

from __future__ import annotations

import json
from urllib.request import urlopen

import pytest
import trio

from plainsong import Client
from tests.cluster.harness import open_cluster
from tests.console.screen import NoBrowser, Screen, start_browser

TOPICS = [f"t{number}" for number in range(9)]
#: Nothing is killed here: a stall of the machine must neither look like a death nor cause a complaint on the page.
CALM = ("cluster.session_timeout_s=20", "storage.hbase.timeout_s=30")


@pytest.fixture
def browser(tmp_path):
    try:
        browser = start_browser(tmp_path)
    except NoBrowser as error:
        pytest.skip(f"NOT TESTED, the console in a browser: {error}")
    yield browser
    browser.quit()


async def test_an_operator_drains_an_instance_and_pins_a_topic_in_the_console(hbase, tmp_path, browser):
    async with open_cluster(hbase, tmp_path, 3, *CALM) as cluster:
        url = "http://{}:{}".format(*cluster[0].address)
        await trio.to_thread.run_sync(_drain_and_pin, Screen(browser, url), url)


def _drain_and_pin(screen: Screen, url: str) -> None:
    with Client(url, namespace="shop") as client:
        for topic in TOPICS:
            client.create_topic(topic)
            client.publish(topic, [topic.encode()])
        screen.open("/console/cluster", "instance-row")
        screen.until("all serve", lambda: [_state(screen, each) for each in "abc"] == ["serving"] * 3)
        screen.says("instance-row", "64 of 64", instance="b")

        # Cancelling changes nothing.
        _press(screen, "drain", "b")
        screen.says("confirm-text", "All its topics move to the other instances")
        screen.click("cancel")
        screen.gone("confirm")
        assert _state(screen, "b") == "serving"

        _press(screen, "drain", "b")
        screen.click("confirm")
        screen.says("toast", "b is being drained")
        # The drained instance releases its topics before the other instance notices that its own share has changed.
        gone = ["drained", "100", "0 of 64", "0"]
        screen.until("it is drained, and has no topic", lambda: _cells(screen, "b")[2:6] == gone)
        assert "b" not in {_owner(url, topic) for topic in TOPICS}

        to = next(each for each in "ac" if each != _owner(url, "t3"))
        screen.type("pin-topic", "shop:t3")
        screen.choose("pin-instance", to)
        screen.click("pin")
        screen.says("confirm-text", "while that instance is available")
        screen.click("confirm")
        screen.says("toast", f"shop:t3 is pinned to {to}")
        screen.says("pin-row", "shop:t3", to)
        screen.until("its owner has changed", lambda: _owner(url, "t3") == to)
        client.publish("t3", [b"after"])
        assert [each.payload for each in client.poll("t3", isolation="uncommitted")] == [b"t3", b"after"]

        screen.click("unpin")
        screen.says("confirm-text", "placement is automatic again")
        screen.click("confirm")
        screen.gone("pin-row")

        _press(screen, "undrain", "b")
        screen.click("confirm")
        screen.says("toast", "b gets its share of the topics again")
        screen.until("it serves again", lambda: _state(screen, "b") == "serving")
        assert screen.complaints() == []


def _cells(screen: Screen, instance: str) -> list[str]:
    """Return an instance's name, address, state, weight, share and open topics."""
    row = screen.one("instance-row", instance=instance)
    return [each.text for each in row.find_elements("css selector", "th, td")]


def _state(screen: Screen, instance: str) -> str:
    return _cells(screen, instance)[2]


def _press(screen: Screen, button: str, instance: str) -> None:
    def pressed() -> bool:
        row = screen.one("instance-row", instance=instance)
        row.find_element("css selector", f"[data-testid={button}]").click()
        return True

    screen.until(f"{button} of {instance} is pressed", pressed)


def _owner(url: str, topic: str) -> str | None:
    """Return a topic's owner according to this instance."""
    with urlopen(f"{url}/v1/cluster?topic=shop:{topic}") as answer:
        owner: str | None = json.load(answer)["topic"]["owner"]
    return owner
