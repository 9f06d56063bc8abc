"""Committed and uncommitted reading: open, committed, rolled back and invalid transactions, and no service at all."""

from __future__ import annotations

import threading

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from tables import Tables, payloads

from pyspark_plainsong.columns import read_schema
from pyspark_plainsong.wire import BrokerError
from tests.daemon.harness import Daemon, free_port

ALL = ReadAllAvailable()


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("daemon") / "data") as daemon:
        yield Tables("http://{}:{}".format(*daemon.address))


def test_an_open_transaction_holds_the_table_and_its_commit_releases_it(tables):
    topic = tables.create("held")
    tables.publish(topic, "before")
    pointer = tables.begin()
    tables.publish(topic, "inside", transactionWritePointer=pointer)
    tables.publish(topic, "behind")
    assert tables.read(topic) == [b"before"]
    assert tables.read(topic, isolation="uncommitted") == [b"before", b"inside", b"behind"]
    tables.decide(pointer, "commit")
    assert tables.read(topic) == [b"before", b"inside", b"behind"]


def test_rolled_back_and_invalid_messages_are_skipped(tables):
    topic = tables.create("passed-over")
    for verb in ("abort", "invalidate"):
        pointer = tables.begin()
        tables.publish(topic, f"{verb}ed", transactionWritePointer=pointer)
        tables.decide(pointer, verb)
        tables.publish(topic, f"after {verb}")
    assert tables.read(topic) == [b"after abort", b"after invalidate"]
    assert len(tables.read(topic, isolation="uncommitted")) == 4


def test_the_write_pointer_is_a_column_on_request(tables):
    topic = tables.create("pointers")
    committed, aborted = tables.begin(), tables.begin()
    tables.publish(topic, "plain")
    for pointer, verb in ((committed, "commit"), (aborted, "abort")):
        tables.publish(topic, verb, transactionWritePointer=pointer)
        tables.decide(pointer, verb)
    reader = tables.batch(topic, isolation="uncommitted", includeTransaction="true")
    reader._reader._schema = read_schema(include_transaction=True)
    found = [
        row["transaction_write_pointer"]
        for part in reader.partitions()
        for batch in reader.read(part)
        for row in batch.to_pylist()
    ]
    assert found == [None, committed, -aborted]


def test_an_open_transaction_holds_the_stream_and_its_commit_wakes_it(tables):
    topic = tables.create("held-stream")
    reader = tables.stream(topic, pollTimeoutMs=20_000)
    start = reader.initialOffset()
    pointer = tables.begin()
    tables.publish(topic, "inside", transactionWritePointer=pointer)
    tables.publish(topic, "behind")
    deciding = threading.Thread(target=tables.decide, args=(pointer, "commit"))
    deciding.start()
    end = reader.latestOffset(start, ALL)
    deciding.join()
    assert payloads(reader, reader.partitions(start, end)) == [b"inside", b"behind"]
    reader.stop()


def test_a_batch_of_a_stream_is_the_same_however_often_it_is_read(tables):
    topic = tables.create("replayed")
    reader = tables.stream(topic)
    start = reader.initialOffset()
    first, second = tables.begin(), tables.begin()
    tables.publish(topic, "first", transactionWritePointer=first)
    tables.publish(topic, "second", transactionWritePointer=second)
    tables.decide(first, "commit")
    end = reader.latestOffset(start, ALL)
    parts = reader.partitions(start, end)
    assert payloads(reader, parts) == [b"first"]
    tables.decide(second, "commit")
    tables.publish(topic, "third")
    assert payloads(reader, parts) == [b"first"]
    assert payloads(reader, reader.partitions(start, end)) == [b"first"]
    later = reader.latestOffset(end, ALL)
    assert payloads(reader, reader.partitions(end, later)) == [b"second", b"third"]
    reader.stop()


def test_where_transactions_are_off_plain_reading_needs_no_option(tmp_path):
    with Daemon(tmp_path / "data", "transactions.service=off") as daemon:
        tables = Tables("http://{}:{}".format(*daemon.address))
        topic = tables.create("plain")
        tables.publish(topic, "a", "b")
        assert tables.read(topic) == [b"a", b"b"]
        reader = tables.stream(topic)
        start = reader.initialOffset()
        end = reader.latestOffset(start, ALL)
        assert payloads(reader, reader.partitions(start, end)) == [b"a", b"b"]
        reader.stop()


def test_a_stream_checks_between_two_batches_whether_there_are_transactions(tmp_path, monkeypatch):
    bind = f"127.0.0.1:{free_port()}"
    tables = Tables(f"http://{bind}")
    with Daemon(tmp_path / "data", "transactions.service=off", bind=bind):
        topic = tables.create("switched-on")
        tables.publish(topic, "a")
        reader = tables.stream(topic)
        start = reader.initialOffset()
        end = reader.latestOffset(start, ALL)
        assert payloads(reader, reader.partitions(start, end)) == [b"a"]
    with Daemon(tmp_path / "data", bind=bind):
        tables.publish(topic, "inside", transactionWritePointer=tables.begin())
        tables.publish(topic, "behind")
        monkeypatch.setattr(reader._subscription, "_ask_s", 0.0)  # as after a minute
        assert reader.latestOffset(end, ALL) == end, "what is undecided comes later"
        reader.stop()


def test_without_the_service_a_stream_and_a_batch_end_before_undecided_messages(tmp_path):
    port = free_port()
    settings = ("transactions.service=tephra", f"transactions.tephra=127.0.0.1:{port}")
    deciding = Daemon(tmp_path / "service", f"transactions.thrift=127.0.0.1:{port}")
    with deciding, Daemon(tmp_path / "data", *settings) as daemon:
        tables = Tables("http://{}:{}".format(*daemon.address))
        topic = tables.create("down")
        tables.publish(topic, "a")
        pointer = Tables("http://{}:{}".format(*deciding.address)).begin()
        tables.publish(topic, "undecided", transactionWritePointer=pointer)
        deciding.kill()
        reader = tables.stream(topic)
        start = reader.initialOffset()
        reached = reader.latestOffset(start, ALL)
        assert reader.latestOffset(reached, ALL) == reached
        assert payloads(reader, reader.partitions(start, reached)) == [b"a"]
        reader.stop()
        assert tables.read(topic, isolation="uncommitted") == [b"a", b"undecided"]


def test_a_batch_on_a_daemon_that_never_had_the_service_says_why(tmp_path):
    settings = ("transactions.service=tephra", f"transactions.tephra=127.0.0.1:{free_port()}")
    with Daemon(tmp_path / "data", *settings) as daemon:
        tables = Tables("http://{}:{}".format(*daemon.address))
        topic = tables.create("down")
        tables.publish(topic, "a")
        with pytest.raises(BrokerError, match="isolation=uncommitted reads everything"):
            tables.read(topic)
        assert tables.read(topic, isolation="uncommitted") == [b"a"]
