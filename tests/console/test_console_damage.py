"""Rows that cannot be read: found by the scrub, shown among messages, and set aside so that readers pass."""

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
from tests.console.screen import Screen
from tests.daemon.harness import Daemon
from tests.daemon.talk import JSON_HEADERS, ask

NAME = TopicName("shop", "orders")


async def damage(data: Path, message_id: bytes) -> None:
    """Makes a message's row no row of a message."""
    async with await LevelDBStore.open(data) as store:
        key = message_id[:10]
        row = Put(Table.MESSAGE, generation_prefix(NAME, 1), [key], [b"\xff"])
        await store.write([row], claim=await store.claim(NAME))


@pytest.fixture
def damaged(browser: Chrome, tmp_path: Path) -> Iterator[tuple[Screen, Client, list[str]]]:
    """A daemon with four messages, the second of which cannot be read."""
    data = tmp_path / "data"
    with Daemon(data) as daemon, Client("http://{}:{}".format(*daemon.address), namespace="shop") as client:
        client.create_topic("orders")
        client.publish("orders", [b"a", b"b", b"c", b"d"])
        ids = [each.id for each in client.messages("orders")]
    trio.run(damage, data, bytes(ids[1]))
    with Daemon(data) as daemon, Client("http://{}:{}".format(*daemon.address), namespace="shop") as client:
        screen = Screen(browser, "http://{}:{}".format(*daemon.address))
        yield screen, client, [each.hex() for each in ids]
        complaints = screen.complaints()
        screen.as_it_was()
        assert complaints == []


def payloads(client: Client) -> list[bytes]:
    return [each.payload for each in client.poll("orders", isolation="uncommitted").messages]


def test_a_damaged_message_is_set_aside_where_it_is_shown_and_readers_pass(
    damaged: tuple[Screen, Client, list[str]],
):
    screen, client, ids = damaged
    assert payloads(client) == [b"a"]
    screen.open("/console/topics/shop/orders", "message-row")
    assert [each.text for each in screen.all("message-state")] == ["plain", "plain", "damaged", "plain"]
    screen.click("set-aside")
    said = screen.says("confirm-text", "1 message", "Readers pass them", "cannot be parsed")
    assert "file" in said
    screen.click("cancel")
    screen.gone("confirm")
    assert payloads(client) == [b"a"]
    screen.click("set-aside")
    screen.click("confirm")
    screen.says("toast", "1 row of shop:orders set aside in set-aside/")
    screen.says("message-row", "readers pass them", state="set-aside", id=ids[1])
    assert payloads(client) == [b"a", b"c", b"d"]
    # It stays where it is when the page is brought up to date.
    client.publish("orders", [b"e"])
    screen.says("stat-messages", "4")
    assert screen.one("message-row", state="set-aside", id=ids[1])


def test_a_page_that_shows_a_damaged_message_shows_what_became_of_it_when_another_sets_it_aside(
    damaged: tuple[Screen, Client, list[str]],
):
    screen, client, ids = damaged
    screen.open("/console/topics/shop/orders", "message-row")
    screen.says("message-row", "Set aside", state="damaged", id=ids[1])
    host, _, port = urlsplit(screen.url).netloc.partition(":")
    body = json.dumps({"from": ids[1], "to": ids[1]}).encode()
    path = "/v1/namespaces/shop/topics/orders/set-aside"
    assert ask((host, int(port)), "POST", path, body, JSON_HEADERS).status == 200
    # The page looks again when something is published.
    client.publish("orders", [b"e"])
    row = screen.says("message-row", "1 row", "readers pass them", state="set-aside", id=ids[1])
    assert "cannot be" not in row
    assert "Set aside" not in row


def test_what_the_scrub_has_found_is_set_aside_from_its_list(damaged: tuple[Screen, Client, list[str]]):
    screen, client, ids = damaged
    screen.open("/console/cluster", "scrub")
    screen.click("scrub-start")
    screen.click("confirm")
    screen.says("toast", "The scrub has begun")

    def found() -> bool:
        screen.click("refresh")
        return bool(screen.all("finding-row"))

    screen.until("it is found", found)
    assert ids[1] in screen.one("finding-row").text
    screen.click("set-aside")
    screen.says("confirm-text", "1 row of them cannot be parsed")
    screen.click("confirm")
    screen.says("toast", "1 row of shop:orders set aside")
    assert payloads(client) == [b"a", b"c", b"d"]
