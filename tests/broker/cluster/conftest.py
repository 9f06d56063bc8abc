"""Several instances in one process: what one waits for of another may take as long as it takes."""

from __future__ import annotations

import pytest

from tests.patience import PATIENCE_S

#: How long owners are looked for, the service of transactions is waited for, and others are asked how they are. In the
#: daemon these are a second or two, which a machine that stands still lets pass between two looks.
WAITS = (
    "broker.cluster.owners.PATIENCE_S",
    "broker.cluster.forward.PATIENCE_S",
    "broker.cluster.remote_stream.PATIENCE_S",
    "actors.replica.PATIENCE_S",
    "broker.api.operations.cluster.ASK_TIMEOUT_S",
    "broker.attention.ASK_TIMEOUT_S",
    "broker.catalogue.ASK_TIMEOUT_S",
)


@pytest.fixture(autouse=True)
def _nobody_is_given_up(monkeypatch):
    """A test of one of these times sets its own."""
    for place in WAITS:
        monkeypatch.setattr(place, PATIENCE_S)
