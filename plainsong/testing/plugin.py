"""The fixtures for pytest, which finds them by the entry point of the distribution."""

from __future__ import annotations

import os
from itertools import count
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from plainsong import Client
    from plainsong.testing import Broker

_numbers = count(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--plainsong-required`` and the configuration value ``plainsong_required``."""
    text = "Fail the tests that need a Plainsong daemon where none is installed, instead of skipping them."
    parser.getgroup("plainsong").addoption("--plainsong-required", action="store_true", help=text)
    parser.addini("plainsong_required", text, type="bool", default=False)


def pytest_configure(config: pytest.Config) -> None:
    """Pass the switch on to ``plainsong.testing``, which tests may use without a fixture."""
    if config.getoption("--plainsong-required") or config.getini("plainsong_required"):
        from plainsong.testing import REQUIRED

        os.environ[REQUIRED] = "1"


def pytest_report_header() -> str | None:
    """Report that no daemon is installed."""
    from plainsong.testing import DaemonFailed, DaemonNotInstalled, command

    try:
        command()
    except DaemonNotInstalled as missing:
        return f"plainsong: NOT TESTED, tests that need the daemon are skipped (--plainsong-required): {missing}"
    except DaemonFailed as missing:
        return f"plainsong: tests that need the daemon fail: {missing}"
    return None


@pytest.fixture(scope="session")
def plainsong_broker() -> Iterator[Broker]:
    """A daemon for the session, on a store in memory. Skips the test when no daemon is installed."""
    from plainsong.testing import DaemonNotInstalled, broker

    try:
        with broker() as started:
            yield started
    except DaemonNotInstalled as missing:
        pytest.skip(str(missing))


@pytest.fixture
def plainsong_client(plainsong_broker: Broker) -> Iterator[Client]:
    """A client of the session's daemon, in a namespace that no other test uses."""
    with plainsong_broker.client(namespace=f"test_{next(_numbers)}") as client:
        yield client
