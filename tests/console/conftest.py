"""Fixtures of the console's tests: one shared daemon and browser, and a namespace for each test."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import trio
from selenium.webdriver import Chrome

from plainsong import Client
from plainsong.protocol.effects import Table, put_one
from plainsong.protocol.keys import metadata_key
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.records import Metadata
from storage.leveldb import LevelDBStore
from tests.console.screen import NoBrowser, Screen, start_browser
from tests.daemon.harness import Daemon
from tests.ports import free_address

_namespaces = count(1)
#: A namespace of ten thousand topics, without messages.
MANY = "many"
MANY_TOPICS = 10_000


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    data = tmp_path_factory.mktemp("console") / "data"
    trio.run(make_many, data)
    # At a reserved address, where pages look for the daemon after it was killed and restarted.
    with Daemon(data, bind=free_address()) as running:
        yield running


async def make_many(data: Path) -> None:
    """Write ten thousand topics to a new store, as a daemon does; over HTTP that would take a minute."""
    made_ms = int(time.time() * 1000)
    rows = []
    for number in range(MANY_TOPICS):
        name = TopicName(MANY, f"t{number:05}")
        metadata = Metadata(1, TopicProperties(ttl_s=604_800), made_ms, made_ms)
        rows.append(put_one(Table.METADATA, metadata_key(name), metadata.encode()))
    async with await LevelDBStore.open(data) as store:
        await store.write(rows, claim=await store.claim(TopicName(MANY, "t00000")))


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    try:
        browser = start_browser(tmp_path_factory.mktemp("downloads"))
    except NoBrowser as error:
        pytest.skip(f"NOT TESTED, the console in a browser: {error}")
    yield browser
    browser.quit()


@pytest.fixture
def screen(browser: Chrome, daemon: Daemon) -> Iterator[Screen]:
    """The empty window; the test fails if the browser reports an error."""
    screen = Screen(browser, "http://{}:{}".format(*daemon.address))
    yield screen
    complaints = screen.complaints()
    screen.as_it_was()
    assert complaints == []


@pytest.fixture
def ns() -> str:
    """A new namespace."""
    return f"n{next(_namespaces)}"


@pytest.fixture
def client(daemon: Daemon, ns: str) -> Iterator[Client]:
    with Client("http://{}:{}".format(*daemon.address), namespace=ns) as client:
        yield client
