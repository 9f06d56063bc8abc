"""The library with which disks fail, compiled once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torture.disk import library


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Path:
    """The library with which disks fail."""
    return library(tmp_path_factory.mktemp("library"))
