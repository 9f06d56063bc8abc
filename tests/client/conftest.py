"""What the tests of the client share: one daemon for those that leave it in peace, and topics of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.client.client_under_test import Client, close_portal
from tests.client.simulation import KINDS, kind, kinds
from tests.daemon.harness import Daemon
from tests.patience import PATIENCE_S

_numbers = count()


def url_of(daemon: Daemon) -> str:
    return f"http://{daemon.address[0]}:{daemon.address[1]}"


@pytest.fixture(scope="session")
def shared_daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Daemons that no test disturbs, by the kind of client, since both make topics of the same names."""
    with ExitStack() as daemons:
        urls: dict[str, str] = {}

        def url(name: str) -> str:
            if name not in urls:
                urls[name] = url_of(daemons.enter_context(Daemon(tmp_path_factory.mktemp("client") / "data")))
            return urls[name]

        yield url


@pytest.fixture
def shared_url(shared_daemons: Callable[[str], str]) -> str:
    """A daemon that no test disturbs."""
    return shared_daemons(kind().name)


@pytest.fixture(scope="module", autouse=True)
def portal_of_module() -> Iterator[None]:
    """What the tests of one file left open does not run beside those of the next."""
    yield
    close_portal()


@pytest.fixture(params=sorted(KINDS), scope="module")
def both_clients(request: pytest.FixtureRequest) -> Iterator[str]:
    """What is tested in virtual time is tested twice: of the client for event loops, and of the one for threads."""
    kinds.append(KINDS[request.param])
    yield request.param
    kinds.pop()


@pytest.fixture
def client(shared_url: str) -> Iterator[Any]:
    with Client(shared_url, deadline_s=PATIENCE_S) as client:
        yield client


@pytest.fixture
def topic(client: Any) -> str:
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
