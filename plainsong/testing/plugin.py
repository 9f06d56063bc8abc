"""The fixtures for pytest, which finds them by the entry point of the distribution."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from plainsong import Client
    from plainsong.testing import Broker

_numbers = count(1)


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
    """A client of it, in a namespace that no other test uses."""
    with plainsong_broker.client(namespace=f"test_{next(_numbers)}") as client:
        yield client
