"""Several instances in one process, with long time-outs for the calls between them."""

from __future__ import annotations

import pytest

from tests.patience import PATIENCE_S

#: The time-outs of the search for an owner, and of calls to the transaction service and to other instances. In the
#: daemon they are a second or two, but a test machine may stall for longer.
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
def _no_instance_is_given_up(monkeypatch):
    """A test of one of these time-outs sets its own value."""
    for place in WAITS:
        monkeypatch.setattr(place, PATIENCE_S)
