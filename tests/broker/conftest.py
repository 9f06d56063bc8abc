"""The application in this process, for every test of the views."""

from __future__ import annotations

import pytest
from broker_in_process import in_process


@pytest.fixture
async def daemon():
    async with in_process() as running:
        yield running
