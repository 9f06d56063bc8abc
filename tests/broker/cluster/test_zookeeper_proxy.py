"""A real ZooKeeper, reached through a proxy that terminates TLS, delays answers and merges them into one TLS record."""

from __future__ import annotations

from itertools import count

import pytest

from broker.config.sections import Ensemble
from broker.membership import membership as membership_module
from broker.membership import zookeeper as zookeeper_module
from broker.membership.zookeeper import ZooKeeper
from tests.broker.cluster.test_membership import SESSION_S, running, until, until_shared
from tests.certificates import Authority
from tests.patience import PATIENCE_S
from tests.tls_proxy import TlsProxy

#: How long the proxy collects data for one record.
GATHERS_S = 0.05

paths = count()


@pytest.fixture
def proxy(zookeeper, tmp_path):
    """A running proxy, and the settings for a client that trusts it."""
    authority = Authority(tmp_path)
    with TlsProxy(("127.0.0.1", zookeeper.port), authority.issue("proxy"), gathers_s=GATHERS_S) as running_proxy:
        yield running_proxy, {"use_ssl": True, "verify_certs": True, "ca": str(authority.file)}


async def test_answers_in_one_record_are_all_read_at_once(proxy, monkeypatch):
    monkeypatch.setattr(zookeeper_module, "CALL_TIMEOUT_S", PATIENCE_S)  # no ping is due earlier
    there, access = proxy
    events = 0

    def on_event():
        nonlocal events
        events += 1

    async with ZooKeeper(there.text, session_timeout_s=SESSION_S, on_event=on_event, access=access) as client:
        await until(lambda: client.connected)
        path = f"/behind-a-proxy/{next(paths)}"
        await client.create(path, b"0")
        for number in range(20):
            # A change causes two messages at once: the event for the watch of this read, and the answer to the write.
            node = await client.get(path)
            assert node.value == b"%d" % number
            seen = events
            await client.set(path, b"%d" % (number + 1), node.version)
            await until(lambda seen=seen: events > seen)


async def test_a_step_that_zookeeper_records_slowly_is_not_taken_back(proxy, monkeypatch):
    monkeypatch.setattr(membership_module, "PATIENCE_S", 2 * GATHERS_S)
    there, access = proxy
    ensemble = Ensemble(there.text, f"/behind-a-proxy/{next(paths)}")
    async with (
        running(ensemble, "a", access=access) as a,
        running(ensemble, "b", access=access) as b,
        running(ensemble, "c", access=access) as c,
    ):
        await until_shared(a, b, c)
