"""Unreadable rows: found by the scrub, shown among messages, and set aside so that readers can continue."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trio
from selenium.webdriver import Chrome

from plainsong import Client
from plainsong.protocol.effects import Put, Table
from plainsong.protocol.keys import generation_prefix
from plainsong.protocol.names import TopicName
from storage.leveldb import LevelDBStore
from tests.console.screen import Screen, showing
from tests.daemon.harness import Daemon
from tests.daemon.talk import JSON_HEADERS, ask

NAME = TopicName("shop", "orders")


async def damage(data: Path, *message_ids: bytes) -> None:
    """Overwrite message rows with unparsable ones."""
    async with await LevelDBStore.open(data) as store:
        keys = [each[:10] for each in message_ids]
        rows = Put(Table.MESSAGE, generation_prefix(NAME, 1), keys, [b"\xff"] * len(keys))
        await store.write([rows], claim=await store.claim(NAME))


@pytest.fixture
def damaged(
    browser: Chrome, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[Screen, Client, list[str]]]:
    """A daemon with four messages. The test requests how many are unreadable, from the second on (default: one)."""
    count = getattr(request, "param", 1)
    data = tmp_path / "data"
    with Daemon(data) as daemon, Client("http://{}:{}".format(*daemon.address), namespace="shop") as client:
        client.create_topic("orders")
        client.publish("orders", [b"a", b"b", b"c", b"d"])
        ids = [each.id for each in client.admin.messages("orders")]
    trio.run(damage, data, *map(bytes, ids[1 : 1 + count]))
    with (
        Daemon(data) as daemon,
        Client("http://{}:{}".format(*daemon.address), namespace="shop") as client,
        showing(browser, "http://{}:{}".format(*daemon.address)) as screen,
    ):
        yield screen, client, [each.hex() for each in ids]


def set_aside(screen: Screen, first: str, last: str) -> None:
    """Set rows aside without the page under test."""
    host, _, port = urlsplit(screen.url).netloc.partition(":")
    body = json.dumps({"from": first, "to": last}).encode()
    path = "/v1/namespaces/shop/topics/orders/set-aside"
    assert ask((host, int(port)), "POST", path, body, JSON_HEADERS).status == 200


def payloads(client: Client) -> list[bytes]:
    return [each.payload for each in client.poll("orders", isolation="uncommitted").messages]


def test_a_damaged_message_is_set_aside_where_it_is_shown_and_readers_continue(
    damaged: tuple[Screen, Client, list[str]],
):
    screen, client, ids = damaged
    assert payloads(client) == [b"a"]
    screen.open("/console/topics/shop/orders", "message-row")
    screen.until(
        "which is damaged",
        lambda: [each.text for each in screen.all("message-state")] == ["plain", "plain", "damaged", "plain"],
    )
    screen.click("set-aside")
    said = screen.says("confirm-text", "1 message", "Readers skip them", "cannot be parsed")
    assert "file" in said
    screen.click("cancel")
    screen.gone("confirm")
    assert payloads(client) == [b"a"]
    screen.click("set-aside")
    screen.click("confirm")
    screen.says("toast", "1 row of shop:orders set aside in set-aside/")
    screen.says("message-row", "readers skip them", state="set-aside", id=ids[1])
    assert payloads(client) == [b"a", b"c", b"d"]
    # The row stays in place when the page is updated.
    screen.says("stat-messages", "3")  # there were 4 before one was set aside
    client.publish("orders", [b"e"])
    screen.says("stat-messages", "4")
    assert screen.one("message-row", state="set-aside", id=ids[1])


def test_a_page_with_a_damaged_message_follows_when_it_is_set_aside_elsewhere(
    damaged: tuple[Screen, Client, list[str]],
):
    screen, client, ids = damaged
    screen.open("/console/topics/shop/orders", "message-row")
    screen.says("message-row", "Set aside", state="damaged", id=ids[1])
    set_aside(screen, ids[1], ids[1])
    # A publish makes the page reload.
    client.publish("orders", [b"e"])
    row = screen.says("message-row", "1 row", "readers skip them", state="set-aside", id=ids[1])
    assert "cannot be" not in row
    assert "Set aside" not in row


@pytest.mark.parametrize("damaged", [2], indirect=True)
def test_a_page_with_damaged_neighbours_shows_them_as_one_when_they_are_set_aside_elsewhere(
    damaged: tuple[Screen, Client, list[str]],
):
    screen, client, ids = damaged
    screen.open("/console/topics/shop/orders", "message-row")
    screen.until("all messages are shown", lambda: screen.rows() == ids[::-1])
    set_aside(screen, ids[1], ids[2])
    client.publish("orders", [b"e"])
    screen.says("message-row", "2 rows", "readers skip them", state="set-aside", id=ids[1])
    assert screen.rows() == [ids[3], ids[1], ids[0]]
    screen.open("/console/topics/shop/orders", "message-row")
    screen.until("the same rows and the new one are shown", lambda: screen.rows()[1:] == [ids[3], ids[1], ids[0]])


def test_findings_of_the_scrub_are_set_aside_from_their_list(damaged: tuple[Screen, Client, list[str]]):
    screen, client, ids = damaged
    screen.open("/console/cluster", "scrub")
    screen.click("scrub-start")
    screen.click("confirm")
    screen.says("toast", "The scrub has begun")

    def found() -> bool:
        screen.click("refresh")
        return bool(screen.all("finding-row"))

    screen.until("the finding is listed", found)
    screen.says("finding-row", ids[1])
    screen.click("set-aside")
    screen.says("confirm-text", "1 row of them cannot be parsed")
    screen.click("confirm")
    screen.says("toast", "1 row of shop:orders set aside")
    assert payloads(client) == [b"a", b"c", b"d"]
