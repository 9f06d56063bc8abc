"""Fixtures of the tests of the running daemon: daemons that end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.harness import Daemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Return a function that starts daemons, by default in ``tmp_path / "data"``; they end with the test."""
    with ExitStack() as daemons:

        def start(*sets: str, data_dir: Path | None = None, **options: Any) -> Daemon:
            return daemons.enter_context(Daemon(data_dir or tmp_path / "data", *sets, **options))

        yield start
