"""Tables as of a moment: exactly what had been committed by then, whatever is decided or published later."""

from __future__ import annotations

import pytest
from tables import READ, Tables, wait_until_later_than

from pyspark_plainsong.options import BadOption
from pyspark_plainsong.wire import BrokerError
from tests.daemon.harness import Daemon


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("daemon") / "data") as daemon:
        yield Tables("http://{}:{}".format(*daemon.address))


def begin(tables):
    """Begin a long transaction, which does not time out even on a slow machine; return its pointer."""
    return int(tables.ask("POST", "/v1/transactions", {"type": "long"})["id"])


def moment_of(tables, topic):
    """Return the publish time of the topic's newest message; everything published afterwards gets a later time."""
    messages = tables.ask("POST", f"{READ}/{topic}/poll", {})
    at_ms = int(messages[-1]["id"][:16], 16)
    wait_until_later_than(at_ms)  # after a read as of a moment, ids may be a millisecond ahead of the clock
    tables.ask("POST", f"{READ}/{topic}/poll", {"asOfMs": at_ms})
    return at_ms


@pytest.fixture
def history(tables, request):
    """Return two topics and a moment. A transaction with messages in both topics is committed after the moment."""
    name = request.node.name.replace("_", "-")
    topics = [tables.create(f"{name}-a"), tables.create(f"{name}-b")]
    early, late = begin(tables), begin(tables)
    for topic in topics:
        tables.publish(topic, "early", transactionWritePointer=early)
        tables.publish(topic, "late", transactionWritePointer=late)
    tables.decide(early, "commit")
    decided_ms = int(tables.ask("GET", f"/v1/transactions/{early}")["decidedMs"])
    wait_until_later_than(decided_ms)
    tables.ask("POST", f"{READ}/{topics[0]}/poll", {"asOfMs": decided_ms})
    for topic in topics:
        tables.publish(topic, "plain")
    at_ms = max(moment_of(tables, topic) for topic in topics)
    for topic in topics:
        tables.ask("POST", f"{READ}/{topic}/poll", {"asOfMs": at_ms})
    tables.decide(late, "commit")
    for topic in topics:
        tables.publish(topic, "behind")
    return topics, at_ms


def test_a_table_has_the_messages_committed_by_then_in_each_of_its_topics(tables, history):
    topics, at_ms = history
    both = ",".join(topics)
    assert tables.read(both, asOfTimestamp=at_ms) == [b"early", b"plain"] * 2
    assert tables.read(both) == [b"early", b"late", b"plain", b"behind"] * 2
    assert tables.read(both, asOfTimestamp=at_ms) == [b"early", b"plain"] * 2


def test_partitions_give_the_same_table(tables, history):
    (topic, _), at_ms = history
    assert tables.read(topic, asOfTimestamp=at_ms, minPartitions=3) == [b"early", b"plain"]
    assert tables.read(topic, asOfTimestamp=at_ms, maxRecordsPerPartition=1) == [b"early", b"plain"]
    assert tables.read(topic, asOfTimestamp=at_ms, fetchSize=1) == [b"early", b"plain"]


def test_messages_published_between_the_plan_and_the_tasks_are_not_included(tables):
    topic = tables.create("planned")
    tables.publish(topic, "before")
    at_ms = moment_of(tables, topic)
    reader = tables.batch(topic, "payload", asOfTimestamp=at_ms)
    parts = reader.partitions()
    tables.publish(topic, "behind")
    rows = [row["payload"] for part in parts for batch in reader.read(part) for row in batch.to_pylist()]
    assert rows == [b"before"]


def test_an_open_transaction_does_not_end_the_table(tables):
    topic = tables.create("open")
    pointer = begin(tables)
    tables.publish(topic, "inside", transactionWritePointer=pointer)
    tables.publish(topic, "behind")
    assert tables.read(topic) == []
    assert tables.read(topic, asOfTimestamp=moment_of(tables, topic)) == [b"behind"]
    tables.decide(pointer, "abort")


def test_a_future_moment_is_refused_when_the_query_is_planned(tables):
    topic = tables.create("future")
    tables.publish(topic, "now")
    with pytest.raises(BrokerError, match="asOfMs") as caught:
        tables.batch(topic, "payload", asOfTimestamp=moment_of(tables, topic) + 86_400_000).partitions()
    assert caught.value.code == "invalid_parameter"


def test_uncommitted_reading_as_of_a_moment_is_a_contradiction(tables):
    with pytest.raises(BadOption, match="asOfTimestamp and isolation uncommitted exclude each other"):
        tables.read_options("t", asOfTimestamp=1, isolation="uncommitted")


def test_a_stream_has_no_such_option(tables):
    with pytest.raises(BadOption, match="asOfTimestamp is for reading a batch"):
        tables.read_options("t", streaming=True, asOfTimestamp=1)


def test_a_moment_within_a_millisecond_is_the_millisecond_that_it_is_in(tables):
    assert tables.read_options("t", asOfTimestamp="2026-01-31T12:00:00.0009Z").as_of_ms == 1_769_860_800_000
    assert tables.read_options("t", asOfTimestamp="1700000000000").as_of_ms == 1_700_000_000_000
    assert tables.read_options("t").as_of_ms is None


def test_a_daemon_without_a_transaction_service_is_reported_rather_than_everything_shown(tmp_path):
    with Daemon(tmp_path / "data", "transactions.service=off") as daemon:
        tables = Tables("http://{}:{}".format(*daemon.address))
        topic = tables.create("t")
        tables.publish(topic, "plain")
        with pytest.raises(BrokerError) as caught:
            tables.batch(topic, "payload", asOfTimestamp=1, numRetries=0).partitions()
        assert caught.value.code == "transactions_unavailable"
