"""Messages that expire before a stream has read them: when a loss is reported, when it is not, and its text."""

from __future__ import annotations

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from tables import READ, Tables, batches, payloads, wait_until_later_than
from topics import NAMESPACE

from pyspark_plainsong.subscription import DataLoss
from tests.daemon.harness import Daemon

ALL = ReadAllAvailable()


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("daemon") / "data", "poll.max_bytes=3000") as daemon:
        yield Tables("http://{}:{}".format(*daemon.address))


@pytest.fixture
def follow(tables):
    """Makes stream readers, and stops them."""
    made = []

    def make(topic=None, **options):
        made.append(tables.stream(topic, **options))
        return made[-1]

    yield make
    for reader in made:
        reader.stop()


def test_messages_that_expire_unread_stop_a_stream_unless_it_may_lose_data(tables, follow):
    topic = tables.create("stream-expiry")
    tables.publish(topic, "read")
    reader = follow(topic)
    start = reader.latestOffset(reader.initialOffset(), ALL)
    tables.publish(topic, "unread")
    lost = tables.rows(topic, "message_id")[-1]["message_id"]
    tables.let_expire(topic, lost)
    tables.publish(topic, "new")
    for each in (reader, follow(topic)):  # in the same run, and after a restart from the checkpoint
        with pytest.raises(DataLoss, match=r"published between .* have expired, and may"):
            each.latestOffset(start, ALL)
    assert batches(follow(topic, failOnDataLoss="false"), start)[0] == [[b"new"]]


def test_a_stream_that_kept_polling_reports_no_loss(tables, follow):
    topic = tables.create("stream-quiet", ttl=10)  # far longer than the first read takes
    tables.publish(topic, "read")
    reader = follow(topic)
    start = reader.latestOffset(reader.initialOffset(), ALL)
    read = tables.rows(topic, "message_id")[-1]["message_id"]
    wait_until_later_than(int.from_bytes(read[:8], "big") + 10_100)
    assert reader.latestOffset(start, ALL) is start
    assert follow(topic).latestOffset(start, ALL) == start  # even after a restart: nothing was published since
    tables.publish(topic, "new")
    assert batches(reader, start)[0] == [[b"new"]]


def test_a_query_that_ran_over_a_quiet_topic_continues_after_any_restart_and_runs_its_batch_twice(tables, follow):
    topic = tables.create("stream-quiet-runs")
    tables.publish_many(topic, 3)
    start = batches(follow(topic, maxOffsetsPerTrigger=3), follow(topic).initialOffset())[1]
    read = tables.rows(topic, "message_id")[-1]["message_id"]
    tables.let_expire(topic, read)
    available_now = follow(topic)
    available_now.prepareForTriggerAvailableNow()
    assert available_now.latestOffset(start, ALL) == start
    tables.publish(topic, "new")
    end = follow(topic).latestOffset(start, ALL)  # restarted just now
    for _ in range(2):  # the second time after a crash
        again = follow(topic)
        assert payloads(again, again.partitions(start, end)) == [b"new"]


def test_messages_that_expire_unread_in_a_topic_that_was_empty_are_missed(tables, follow):
    topic = tables.create("stream-empty")
    reader = follow(topic)
    start = reader.latestOffset(reader.initialOffset(), ALL)
    assert start["topics"]["demo:stream-empty"]["next"] > "00" * 20
    assert reader.latestOffset(start, ALL) is start
    tables.publish(topic, "lost")
    lost = tables.rows(topic, "message_id")[-1]["message_id"]
    tables.let_expire(topic, lost)
    for available_now in (False, True):  # nothing has been published since
        each = follow(topic)
        if available_now:
            each.prepareForTriggerAvailableNow()
        with pytest.raises(DataLoss, match="have expired"):
            each.latestOffset(start, ALL)


def test_half_a_request_that_expired_unread_is_missed(tables, follow):
    topic = tables.create("stream-half")
    tables.publish_many(topic, 10)
    reader = follow(topic, maxOffsetsPerTrigger=5)
    start = reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())
    last = tables.rows(topic, "message_id")[-1]["message_id"]
    tables.let_expire(topic, last)
    with pytest.raises(DataLoss, match="have expired"):
        follow(topic).latestOffset(start, ALL)


def test_a_recreated_topic_is_reported_while_it_is_empty(tables, follow):
    topic = tables.create("stream-again-empty")
    tables.publish(topic, "old")
    reader = follow(topic)
    start = reader.latestOffset(reader.initialOffset(), ALL)
    tables.delete(topic)
    tables.create(topic)
    for available_now in (False, True):
        each, careless = follow(topic), follow(topic, failOnDataLoss="false")
        if available_now:
            each.prepareForTriggerAvailableNow()
            careless.prepareForTriggerAvailableNow()
        with pytest.raises(DataLoss, match="created again"):
            each.latestOffset(start, ALL)
        end = careless.latestOffset(start, ALL)
        assert end["topics"]["demo:stream-again-empty"]["gen"] == 2
    tables.publish(topic, "new")
    assert batches(follow(topic), end)[0] == [[b"new"]]


def test_a_stream_from_a_time_begins_with_the_available_messages(tables, follow):
    topic = tables.create("stream-time")
    tables.publish(topic, "old")
    old = tables.rows(topic, "message_id")[-1]["message_id"]
    tables.let_expire(topic, old)
    tables.publish(topic, "new")
    reader = follow(topic, startingTimestamp="1")
    assert batches(reader, reader.initialOffset())[0] == [[b"new"]]


def test_a_recreated_topic_stops_a_stream_unless_it_may_lose_data(tables, follow):
    topic = tables.create("stream-again")
    tables.publish(topic, "old")
    reader = follow(topic)
    start = reader.latestOffset(reader.initialOffset(), ALL)
    tables.delete(topic)
    with pytest.raises(DataLoss, match="was deleted: its unread"):
        reader.latestOffset(start, ALL)
    careless = follow(topic, failOnDataLoss="false")
    assert careless.latestOffset(start, ALL) == start
    tables.create(topic)
    tables.publish(topic, "new")
    with pytest.raises(DataLoss, match=r"created again \(generation 1 before, 2 now\)"):
        reader.latestOffset(start, ALL)
    found, end = batches(careless, start)
    assert [each for each in found if each] == [[b"new"]]
    assert end["topics"]["demo:stream-again"]["gen"] == 2


def test_a_deleted_topic_of_a_pattern_is_not_skipped_silently(tables, follow):
    for topic in ("gone-a", "gone-b"):
        tables.publish(tables.create(topic), topic)
    pattern = {"subscribePattern": "gone-."}
    reader = follow(None, **pattern)
    start = reader.initialOffset()
    tables.delete("gone-a")
    for prepare in (False, True):
        if prepare:
            reader.prepareForTriggerAvailableNow()
        with pytest.raises(DataLoss, match="topic demo:gone-a was deleted"):
            reader.latestOffset(start, ALL)
    assert batches(follow(None, failOnDataLoss="false", **pattern), start)[0] == [[b"gone-b"]]
    assert follow(None, subscribePattern="gone-b").latestOffset(start, ALL) != start  # it is no longer requested


def test_rows_set_aside_by_an_operator_are_skipped_with_a_warning(tables, follow, caplog):
    topic = tables.create("set-aside")
    tables.publish(topic, "first", "second", "third", "last")
    ids = [row["message_id"].hex() for row in tables.rows(topic, "message_id")]
    reader = follow(topic)
    start = reader.initialOffset()
    tables.ask("POST", f"{READ}/{topic}/set-aside", {"from": ids[1], "to": ids[2]})
    assert batches(reader, start)[0] == [[b"first", b"last"]]
    assert tables.read(topic) == [b"first", b"last"]
    said = f"skipped 2 damaged rows of topic {NAMESPACE}:{topic} that an operator has set aside"
    assert {record.getMessage() for record in caplog.records if record.name == "pyspark_plainsong"} == {said}
