"""Fixtures of the client's tests: a daemon shared by tests that do not disturb it, and a new topic for each test."""

from __future__ import annotations

import os
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

#: Far longer than the tests' patience.
LONG_WAIT_MS = 3_600_000
_numbers = count()


def url_of(daemon: Daemon) -> str:
    return f"http://{daemon.address[0]}:{daemon.address[1]}"


@pytest.fixture(scope="session")
def shared_daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Daemons that no test disturbs, one for each kind of client, because both create topics of the same names."""
    with ExitStack() as daemons:
        urls: dict[str, str] = {}

        def url(name: str) -> str:
            if name not in urls:
                urls[name] = url_of(daemons.enter_context(Daemon(tmp_path_factory.mktemp("client") / "data")))
            return urls[name]

        yield url


@pytest.fixture
def shared_url(shared_daemons: Callable[[str], str]) -> str:
    """The URL of a daemon that no test disturbs."""
    return shared_daemons(kind().name)


@pytest.fixture(scope="module", autouse=True)
def portal_of_module() -> Iterator[None]:
    """Stop everything that one file's tests left running before the next file's tests start."""
    yield
    close_portal()


@pytest.fixture(params=sorted(KINDS), scope="module")
def both_clients(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test in virtual time twice: with the asynchronous client, and with the synchronous one."""
    kinds.append(KINDS[request.param])
    yield request.param
    kinds.pop()


@pytest.fixture(scope="module")
def url_of_long_waits(both_clients: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A daemon and clients whose waits exceed the tests' patience, so that a lost wake-up fails the test.

    With the default limits the call would return after half a minute or a minute, as if it had been woken.
    """
    site = tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text(
        f"from plainsong.protocol import requests\nrequests.MAX_WAIT_MS = {LONG_WAIT_MS}\n"
    )
    with ExitStack() as stack:
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        for client in ("_async", "_sync"):
            patched.setattr(f"plainsong.{client}.messages.MAX_WAIT_MS", LONG_WAIT_MS)
            patched.setattr(f"plainsong.{client}.reading.WAIT_MS", LONG_WAIT_MS)
        environ = {"PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])}
        data = tmp_path_factory.mktemp("long-waits") / "data"
        yield url_of(stack.enter_context(Daemon(data, f"poll.max_wait_ms={LONG_WAIT_MS}", environ=environ)))


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
    """Return a function that starts daemons for this test only; they end with the test."""
    with ExitStack() as daemons:

        def start(*sets: str, **options: Any) -> Daemon:
            return daemons.enter_context(Daemon(tmp_path / "data", *sets, **options))

        yield start


@pytest.fixture
def shared_address(shared_url: str) -> tuple[str, int]:
    host, _, port = shared_url.removeprefix("http://").rpartition(":")
    return host, int(port)
