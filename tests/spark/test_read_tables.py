"""Reading topics of a real daemon as tables: bounds, several topics, partitions, and reads of many pages."""

from __future__ import annotations

import time

import pytest
from tables import READ, Tables, payloads, sizes, wait_until_later_than

from pyspark_plainsong.calls import Calls
from pyspark_plainsong.partitions import TooManyPartitions, cut
from pyspark_plainsong.subscription import DataLoss
from pyspark_plainsong.wire import BrokerError
from tests.daemon.harness import Daemon, free_port


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Topics of a daemon with small pages, so that all but the shortest reads need many."""
    with Daemon(tmp_path_factory.mktemp("daemon") / "data", "poll.max_bytes=2000", "poll.max_messages=70") as daemon:
        yield Tables("http://{}:{}".format(*daemon.address))


def test_a_page_cut_by_the_daemon_is_not_the_end(tables):
    topic = tables.create("long")
    written = tables.publish_many(topic, 1000)
    assert tables.read(topic) == written
    assert tables.read(topic, fetchSize=7) == written


def save(tables, topic, producer, segments, winners, rows):
    """Stage ``rows[segment]`` rows in each segment, and publish the segments ``winners`` as one batch."""
    path = f"{READ}/{topic}"
    for segment in segments:
        for at in range(0, rows[segment], 20_000):
            count = min(20_000, rows[segment] - at)
            staged = {"producer": producer, "segment": segment, "messages": [segment] * count}
            tables.ask("POST", f"{path}/store", {**staged, "sequenceIds": list(range(at, at + count))})
    tables.ask(
        "POST", f"{path}/publish", {"producer": producer, "sequenceIds": [0], "segments": winners, "messages": []}
    )


def test_a_topic_that_ends_with_a_batch_of_one_is_read_to_its_end(tables):
    topic = tables.create("ends-with-one")
    tables.publish_many(topic, 100)
    save(tables, topic, "job", ["only"], ["only"], {"only": 1})
    assert len(tables.read(topic)) == 101
    transaction = tables.begin()
    tables.store(topic, transaction, "stored")
    tables.publish(topic, transactionWritePointer=transaction)
    tables.decide(transaction, "commit")
    assert tables.read(topic)[-2:] == [b"only", b"stored"]
    for reader in (tables.stream(topic), tables.stream(topic, startingOffsets="earliest")):
        reader.prepareForTriggerAvailableNow()
        start = reader.initialOffset()
        assert (
            sum(sizes(reader, reader.partitions(start, reader.latestOffset(start, reader.getDefaultReadLimit()))))
            == 102
        )


def test_a_topic_that_ends_with_very_many_rows_of_losers_is_read_to_its_end(tables):
    topic = tables.create("ends-with-losers")
    tables.publish_many(topic, 50)
    save(tables, topic, "job", ["wins", "loses"], ["wins"], {"wins": 10, "loses": 120_000})
    assert len(tables.read(topic)) == 60


def test_every_column_of_a_message_is_present(tables):
    topic = tables.create("whole")
    body = {"messages": [{"payload": "x", "attributes": {"routingKey": "k", "traceparent": "t"}}, "y"]}
    tables.ask("POST", f"{READ}/{topic}/publish", body)
    first, second = tables.rows(topic)
    assert (first["namespace"], first["topic"], first["payload"]) == ("demo", "whole", b"x")
    assert (first["routing_key"], dict(first["headers"])) == ("k", {"traceparent": "t"})
    assert (second["routing_key"], second["headers"]) == (None, None)
    shown = tables.ask("GET", f"{READ}/{topic}/messages")[0]
    assert first["message_id"].hex() == shown["id"]
    assert int(first["publish_timestamp"].timestamp() * 1000) == shown["publishTimeMs"]
    assert (first["seq_id"], first["write_timestamp"], first["payload_seq_id"]) == (0, None, None)
    assert list(first)[-1] == "headers"


def test_time_bounds_are_half_open(tables):
    topic = tables.create("times")
    tables.publish(topic, "a")
    middle_ms = int(time.time() * 1000) + 1
    wait_until_later_than(middle_ms)
    tables.publish(topic, "b")
    at = tables.rows(topic)[1]["publish_timestamp"]
    at_ms = int(at.timestamp() * 1000)
    assert tables.read(topic, startingTimestamp=at_ms) == [b"b"]
    assert tables.read(topic, endingTimestamp=at_ms) == [b"a"]
    assert tables.read(topic, startingTimestamp=at.isoformat(), endingTimestamp=at_ms + 1) == [b"b"]
    assert tables.read(topic, endingTimestamp=2**60) == [b"a", b"b"]


def test_id_bounds_are_half_open_for_all_topics_or_one(tables):
    topic, other = tables.create("ids-one"), tables.create("ids-two")
    tables.publish(topic, "a", "b", "c")
    tables.publish(other, "d")
    ids = [row["message_id"].hex() for row in tables.rows(topic, "message_id")]
    assert tables.read(topic, startingOffsets=ids[1]) == [b"b", b"c"]
    assert tables.read(topic, startingOffsets=ids[0], endingOffsets=ids[2]) == [b"a", b"b"]
    both = f"{topic},{other}"
    assert tables.read(both, startingOffsets=f'{{"{topic}": "{ids[2]}"}}') == [b"c", b"d"]
    assert tables.read(both, endingOffsets=f'{{"demo:{topic}": "{ids[1]}"}}') == [b"a", b"d"]


def test_a_list_and_a_pattern_of_whole_names(tables):
    for topic in ("ev-a", "ev-b", "ev-b-old", "xev-a"):
        tables.publish(tables.create(topic), topic)
    assert tables.read("ev-b,xev-a, ev-b") == [b"ev-b", b"xev-a"]
    assert tables.read(None, subscribePattern="ev-[ab]") == [b"ev-a", b"ev-b"]
    assert tables.read(None, subscribePattern="ev-.*") == [b"ev-a", b"ev-b", b"ev-b-old"]
    assert tables.read(None, subscribePattern="none-.*") == []


def test_a_missing_topic_is_named(tables):
    with pytest.raises(BrokerError, match="topic demo:nowhere does not exist"):
        tables.read("nowhere")


@pytest.mark.parametrize("options", [{}, {"minPartitions": 3}, {"maxRecordsPerPartition": 2}])
def test_the_planned_partitions_are_read_up_to_the_end_of_the_topic_at_that_time(tables, options):
    topic = tables.create(f"grows-{len(options)}-{''.join(options)}")
    reader = tables.batch(topic, "payload", **options)
    parts = reader.partitions()
    assert payloads(reader, parts) == []
    written = tables.publish_many(topic, 5)
    assert payloads(reader, parts) == written
    reader = tables.batch(topic, "payload", **options)
    parts = reader.partitions()
    written += tables.publish_many(topic, 5, 5)
    assert payloads(reader, parts) == written
    assert payloads(reader, parts) == written  # no row is in two partitions


def test_a_range_with_an_explicit_end_is_always_the_same(tables):
    topic = tables.create("fixed")
    tables.publish(topic, "a", "b")
    last = tables.rows(topic, "message_id")[-1]["message_id"]
    now_ms = int.from_bytes(last[:8], "big") + 1
    wait_until_later_than(now_ms)
    ends = ({"endingOffsets": last.hex()}, {"endingTimestamp": now_ms}, {"asOfTimestamp": now_ms})
    readers = [tables.batch(topic, "payload", **end) for end in ends]
    planned = [reader.partitions() for reader in readers]
    tables.publish(topic, "c")
    found = [payloads(reader, parts) for reader, parts in zip(readers, planned, strict=True)]
    assert found == [[b"a"], [b"a", b"b"], [b"a", b"b"]]


def test_a_table_grows_up_to_an_end_in_the_future_and_past_a_transaction_that_was_open(tables):
    topic = tables.create("grows-until")
    tables.publish(topic, "a")
    pointer = tables.begin()
    tables.publish(topic, "undecided", transactionWritePointer=pointer)
    tables.publish(topic, "b")
    reader = tables.batch(topic, "payload", endingTimestamp="2200-01-01")
    parts = reader.partitions()
    assert payloads(reader, parts) == [b"a"]
    tables.decide(pointer, "commit")
    assert payloads(reader, parts) == [b"a", b"undecided", b"b"]


def test_topics_that_match_a_pattern_later_are_included_in_the_table(tables):
    reader = tables.batch(None, "payload", subscribePattern="later-.*")
    parts = reader.partitions()
    assert payloads(reader, parts) == []
    tables.publish(tables.create("later-a"), "a")
    tables.create("later-b")
    assert payloads(reader, parts) == [b"a"]


def test_a_table_whose_topic_was_created_again_or_deleted_fails_with_the_reason(tables):
    topic = tables.create("replaced")
    tables.publish(topic, "a")
    reader = tables.batch(topic, "payload")
    parts = reader.partitions()
    tables.delete(topic)
    with pytest.raises(DataLoss, match="was deleted"):
        payloads(reader, parts)
    tables.publish(tables.create(topic), "b")
    with pytest.raises(DataLoss, match=r"generation 1 before, 2 now"):
        payloads(reader, parts)


def test_an_empty_topic_and_a_partition_of_spark_itself_have_no_rows(tables):
    reader = tables.batch(tables.create("void"), "payload")
    assert payloads(reader, reader.partitions()) == []
    assert list(reader.read(None)) == []


@pytest.mark.parametrize("wanted", [2, 3, 10])
def test_the_number_of_partitions_is_at_least_the_minimum(tables, wanted):
    topic = tables.create(f"cut-{wanted}")
    written = tables.publish_many(topic, 500)
    reader = tables.batch(topic, "payload", minPartitions=wanted)
    parts = reader.partitions()
    assert len(parts) >= wanted
    assert payloads(reader, parts) == written
    assert max(sizes(reader, parts)) <= 2 * 500 / wanted


def test_several_topics_share_the_partitions_by_their_size(tables):
    small, large = tables.create("share-small"), tables.create("share-large")
    tables.publish(small, "x")
    written = tables.publish_many(large, 400)
    reader = tables.batch(f"{small},{large}", "payload", minPartitions=5)
    parts = reader.partitions()
    assert [part.topic for part in parts].count(small) == 1
    assert len(parts) >= 5
    assert sorted(payloads(reader, parts)) == sorted([b"x", *written])


def test_no_partition_has_more_than_its_maximum_of_records(tables):
    topic = tables.create("records")
    written = tables.publish_many(topic, 250)
    for extra in ({}, {"minPartitions": 7}):
        reader = tables.batch(topic, "payload", maxRecordsPerPartition=40, **extra)
        parts = reader.partitions()
        assert max(sizes(reader, parts)) <= 40
        assert payloads(reader, parts) == written
    assert len(tables.batch(topic, maxRecordsPerPartition=50).partitions()) == 5


def test_partitions_may_be_cut_within_the_messages_that_a_transaction_stored(tables):
    topic = tables.create("inside")
    pointer = tables.begin()
    texts = [f"{number:03d}" for number in range(90)]
    tables.store(topic, pointer, *texts)
    tables.publish(topic, transactionWritePointer=pointer)
    tables.decide(pointer, "commit")
    for given in ({"minPartitions": 4}, {"maxRecordsPerPartition": 11}):
        reader = tables.batch(topic, **given)
        parts = reader.partitions()
        assert len(parts) >= 4
        rows = [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]
        assert [row["payload"].decode() for row in rows] == texts
        assert len({row["publish_timestamp"] for row in rows}) == 1
        assert all(row["write_timestamp"] is not None for row in rows)


def test_too_many_partitions_are_refused(tables, monkeypatch):
    topic = tables.create("crumbs")
    tables.publish_many(topic, 30)
    monkeypatch.setattr("pyspark_plainsong.partitions.MAX_PARTITIONS", 20)
    with pytest.raises(TooManyPartitions, match="more than 20 partitions"):
        tables.batch(topic, maxRecordsPerPartition=1).partitions()


def test_expired_messages_are_lost_only_for_a_read_that_names_them(tables):
    topic = tables.create("expiring")
    tables.publish(topic, "old")
    old = tables.rows(topic, "message_id")[0]["message_id"]
    named = old.hex()
    tables.let_expire(topic, old)
    tables.publish(topic, "new")
    assert tables.read(topic) == [b"new"]
    assert tables.read(topic, startingTimestamp=0) == [b"new"]
    with pytest.raises(DataLoss, match=r"expired, and may not have been read.*failOnDataLoss=false"):
        tables.read(topic, startingOffsets=named)
    assert tables.read(topic, startingOffsets=named, failOnDataLoss="false") == [b"new"]


def test_a_recreated_topic_is_distinguished_from_an_expired_one(tables):
    topic = tables.create("again")
    tables.publish(topic, "old")
    offsets = f'{{"v": 1, "topics": {{"demo:{topic}": {{"gen": 1, "next": "{"0" * 40}"}}}}}}'
    reader = tables.batch(topic, "payload")
    parts = reader.partitions()
    tables.delete(topic)
    with pytest.raises(DataLoss, match="was deleted: its unread"):
        payloads(reader, parts)
    tables.create(topic)
    tables.publish(topic, "new")
    with pytest.raises(DataLoss, match=r"created again \(generation 1 before, 2 now\)"):
        payloads(reader, parts)
    with pytest.raises(DataLoss, match="created again"):
        tables.read(topic, startingOffsets=offsets)
    assert tables.read(topic, startingOffsets=offsets, failOnDataLoss="false") == [b"new"]
    ending = offsets.replace("0" * 40, "f" * 40)
    with pytest.raises(DataLoss, match="created again"):
        tables.read(topic, endingOffsets=ending)
    assert tables.read(topic, endingOffsets=ending, failOnDataLoss="false") == [b"new"]


def test_a_range_that_expires_while_it_is_read_is_noticed(tables):
    topic = tables.create("meanwhile")
    tables.publish(topic, "a", "b")
    first = tables.rows(topic, "message_id")[0]["message_id"]
    reader = tables.batch(topic, "payload", startingOffsets=first.hex())
    parts = reader.partitions()
    tables.let_expire(topic, first)
    with pytest.raises(DataLoss, match="expired"):
        payloads(reader, parts)


def test_splitting_an_empty_range_makes_no_request():
    assert cut(Calls(None, "n"), [], 5, 5) == []  # type: ignore[arg-type]


def test_reading_continues_after_the_daemon_was_killed_and_is_back(tmp_path):
    with Daemon(tmp_path / "data", bind=f"127.0.0.1:{free_port()}") as daemon:
        tables = Tables("http://{}:{}".format(*daemon.address))
        written = tables.publish_many(tables.create("killed"), 1000)
        reader = tables.batch("killed", "payload", fetchSize=300)
        (part,) = reader.partitions()
        pages = reader.read(part)
        found = [next(pages)]
        daemon.kill()
        daemon.start()
        found += pages
    assert [value.as_py() for page in found for value in page.column("payload")] == written
