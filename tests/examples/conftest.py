"""Fixtures of the examples' tests: a shared daemon for tests that do not disturb it, and a namespace for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from plainsong import JSON, Client
from tests.daemon.harness import Daemon

_numbers = count()


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a daemon that no test disturbs."""
    with Daemon(tmp_path_factory.mktemp("examples") / "data") as daemon:
        yield f"http://{daemon.address[0]}:{daemon.address[1]}"


@pytest.fixture
def namespace() -> str:
    return f"test_{next(_numbers)}"


@pytest.fixture
def values() -> Callable[..., list[Any]]:
    """Return a function that reads a topic, decoded, with a client that uses no code of the examples."""

    def read(url: str, namespace: str, topic: str, **options: Any) -> list[Any]:
        with Client(url, namespace=namespace) as client:
            return [message.value for message in client.read(topic, serializer=JSON, **options)]

    return read
