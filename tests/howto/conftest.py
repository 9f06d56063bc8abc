"""Fixtures of the pages' tests: daemons, and the PostgreSQL of the SQL ring."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.daemon.harness import Daemon
from tests.sql.conftest import database, engine, look, server

__all__ = ["daemon", "database", "engine", "look", "server"]


@pytest.fixture
def daemon() -> Iterator[Callable[[Path], Daemon]]:
    """Return a function that starts a daemon in a directory; the daemon ends with the test."""
    with ExitStack() as stack:
        yield lambda data_dir: stack.enter_context(Daemon(data_dir))
