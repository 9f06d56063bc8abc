"""Several instances in one process, with long time-outs for whatever one instance waits for at another."""

from __future__ import annotations

import pytest

from tests.patience import PATIENCE_S

#: How long to search for an owner, and to wait for the transaction service and for other instances' answers. In the
#: daemon these are a second or two, less than a machine may stall.
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
