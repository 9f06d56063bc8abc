"""The lag of the tables: the age of the oldest message that a run would still take, according to the daemon."""

from __future__ import annotations

import pytest

from plainsong import Client
from plainsong.cli.connection import Where
from plainsong.positions import now_ms
from pyspark_plainsong.pipeline.audit import stream
from pyspark_plainsong.pipeline.audit.manifest import TablesManifest
from pyspark_plainsong.pipeline.audit.stream import NOTES, Lag, Quiet
from pyspark_plainsong.pipeline.job import Run
from tests.daemon.harness import Daemon


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("behind") / "data") as running:
        yield "http://{}:{}".format(*running.address)


@pytest.fixture
def client(url, request):
    with Client(url, namespace=request.node.name) as made:
        made.create_topic("audit", ttl_s=3600)
        yield made


@pytest.fixture
def lag(url, client, monkeypatch, tmp_path):
    """Calculates the lag of topics one minute from now, given the last message of each that is in the tables."""
    monkeypatch.setattr(stream, "now_ms", lambda: now_ms() + 60_000)

    def told(*topics, uncommitted=False, **through):
        run = Run("audit", Where((url,), client.namespace))
        known = TablesManifest(
            through={f"{client.namespace}:{topic}": bytes(last).hex() for topic, last in through.items()}
        )
        ttls_s = dict.fromkeys([f"{client.namespace}:{topic}" for topic in topics], 3600)
        worst_s = Lag(run, client, ttls_s, Quiet(tmp_path, ttls_s), uncommitted=uncommitted).tell(known)
        lines = [line.rpartition(" ") for line in run.metrics.text().splitlines() if "_lag_seconds{" in line]
        found = {line.partition('topic="')[2].partition('"')[0]: round(float(value)) for line, _, value in lines}
        assert round(worst_s) == max(found.values(), default=0)
        return found

    return told


def test_the_lag_is_the_age_of_the_oldest_message_that_is_not_in_the_tables_topic_by_topic(client, lag, tmp_path):
    client.create_topic("other", ttl_s=3600)
    assert lag("audit", "other") == {"audit": 0, "other": 0}
    client.publish("audit", [b"one", b"two"])
    first, last = (each.id for each in client.admin.messages("audit"))
    assert lag("audit", "other") == {"audit": 60, "other": 0}
    assert lag("audit", audit=first) == {"audit": 60}
    assert not (tmp_path / NOTES).exists()
    assert lag("audit", audit=last) == {"audit": 0}
    assert (tmp_path / NOTES).exists(), "it is recorded that nothing waits"


def test_rolled_back_messages_are_not_waited_for_and_those_of_an_open_transaction_are(client, lag):
    for _ in range(3):
        transaction = client.transactions.begin()
        client.publish("audit", [b"x"] * 60, transaction=transaction)
        client.transactions.abort(transaction)
    assert lag("audit") == {"audit": 0}
    assert lag("audit", uncommitted=True) == {"audit": 60}
    still_open = client.transactions.begin()
    client.publish("audit", b"y", transaction=still_open)
    assert lag("audit") == {"audit": 60}


def test_the_number_of_skipped_messages_is_bounded(client, lag, monkeypatch):
    monkeypatch.setattr(stream, "_PAGES", (1, 1))
    transaction = client.transactions.begin()
    client.publish("audit", [b"x"] * 3, transaction=transaction)
    client.transactions.abort(transaction)
    assert lag("audit") == {"audit": 60}


def test_a_daemon_that_does_not_answer_leaves_the_metrics_unchanged(client, lag):
    client.create_topic("gone")
    client.admin.delete_topic("gone")
    assert lag("gone", "audit") == {"audit": 0}
