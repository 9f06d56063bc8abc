"""Fixtures of the console's tests: one shared daemon and browser, and a namespace for each test."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from selenium.webdriver import Chrome

from plainsong import Client
from tests.console.screen import NoBrowser, Screen, showing, start_browser
from tests.daemon.harness import Daemon
from tests.ports import free_address

_namespaces = count(1)


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    # At a reserved address, where pages look for the daemon after it was killed and restarted.
    with Daemon(tmp_path_factory.mktemp("console") / "data", bind=free_address()) as running:
        yield running


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
    with showing(browser, "http://{}:{}".format(*daemon.address)) as screen:
        yield screen


@pytest.fixture
def ns() -> str:
    """A new namespace."""
    return f"n{next(_namespaces)}"


@pytest.fixture
def client(daemon: Daemon, ns: str) -> Iterator[Client]:
    with Client("http://{}:{}".format(*daemon.address), namespace=ns) as client:
        yield client
