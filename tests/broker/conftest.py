"""The application in this process, for every test of the views."""

from __future__ import annotations

import pytest
from broker_in_process import in_process

from broker.http import asgi, gate, http1
from tests.patience import PATIENCE_S


@pytest.fixture
async def daemon():
    async with in_process() as running:
        yield running


@pytest.fixture
def long_linger(monkeypatch):
    """Linger until the client ends a refused request: on a busy machine that takes longer than the usual 2 s."""
    for module in (asgi, gate, http1):
        monkeypatch.setattr(module, "LINGER_S", PATIENCE_S)
