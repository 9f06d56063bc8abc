"""What the tests of the client share: one daemon for those that leave it in peace, and topics of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from plainsong import Client
from tests.daemon.harness import Daemon

_numbers = count()


def url_of(daemon: Daemon) -> str:
    return f"http://{daemon.address[0]}:{daemon.address[1]}"


@pytest.fixture(scope="session")
def shared_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A daemon that no test disturbs."""
    with Daemon(tmp_path_factory.mktemp("client") / "data") as daemon:
        yield url_of(daemon)


@pytest.fixture
def client(shared_url: str) -> Iterator[Client]:
    with Client(shared_url, deadline_s=20) as client:
        yield client


@pytest.fixture
def topic(client: Client) -> str:
    """A new topic of the shared daemon."""
    return client.create_topic(f"topic-{next(_numbers)}").name


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Starts daemons of the test's own, and ends them with it."""
    with ExitStack() as daemons:

        def start(*sets: str, **options: Any) -> Daemon:
            return daemons.enter_context(Daemon(tmp_path / "data", *sets, **options))

        yield start


@pytest.fixture
def shared_address(shared_url: str) -> tuple[str, int]:
    """Where the shared daemon listens."""
    host, _, port = shared_url.removeprefix("http://").rpartition(":")
    return host, int(port)
