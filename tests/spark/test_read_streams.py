"""Following topics: what each micro-batch reads, waiting for messages, and restarting from a checkpoint."""

from __future__ import annotations

import threading
from contextlib import closing
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows, ReadMinRows
from tables import Tables, batches, payloads, sizes
from topics import calls_of

from pyspark_plainsong.calls import Calls
from pyspark_plainsong.following import Trigger, Wanted, fair_shares, measure
from pyspark_plainsong.subscription import DataLoss
from pyspark_plainsong.wire import BrokerError
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


def test_a_batch_ends_where_the_next_begins(tables, follow):
    topic = tables.create("one")
    written = tables.publish_many(topic, 300)
    reader = follow(topic)
    found, end = batches(reader, reader.initialOffset())
    assert found == [written]
    assert reader.latestOffset(end, ALL) is end
    more = tables.publish_many(topic, 20, first=300)
    assert batches(reader, end)[0] == [more]


def test_offsets_have_one_form_only(tables, follow):
    for topic in ("form-b", "form-a"):
        tables.publish(tables.create(topic), "x")
    reader = follow("form-b,form-a")
    end = reader.latestOffset(reader.initialOffset(), ALL)
    assert list(end) == ["v", "topics"]
    assert list(end["topics"]) == ["demo:form-a", "demo:form-b"]
    message_id = tables.rows("form-a", "message_id")[0]["message_id"]
    successor = (int.from_bytes(message_id, "big") + 1).to_bytes(20, "big").hex()
    assert end["topics"]["demo:form-a"]["gen"] == 1
    assert end["topics"]["demo:form-a"]["next"] >= successor
    assert reader.initialOffset() == reader.initialOffset()


def test_max_offsets_per_trigger_holds_when_all_available_messages_are_read(tables, follow):
    topic = tables.create("max-offsets")
    written = tables.publish_many(topic, 100)
    reader = follow(topic, maxOffsetsPerTrigger=30)
    assert reader.getDefaultReadLimit() == ReadMaxRows(30)
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    tables.publish_many(topic, 10, first=100)  # too late for this run
    found, _ = batches(reader, start)
    assert [len(each) for each in found] == [30, 30, 30, 10]
    assert [payload for each in found for payload in each] == written


def test_max_bytes_per_trigger_holds_and_never_stops_at_a_large_message(tables, follow):
    topic = tables.create("max-bytes")
    tables.publish(topic, *(["x" * 100] * 20), "y" * 5000, "z")
    reader = follow(topic, maxBytesPerTrigger=500)
    assert reader.getDefaultReadLimit() == ReadMaxBytes(500)
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    found, _ = batches(reader, start)
    assert [sum(map(len, each)) for each in found[:-2]] == [400] * 5
    assert [len(each) for each in found[-2:]] == [1, 1]


def test_bounds_are_shared_fairly_between_topics(tables, follow):
    for topic, count in (("fair-a", 100), ("fair-b", 10), ("fair-c", 40)):
        tables.publish_many(tables.create(topic), count)
    reader = follow("fair-a,fair-b,fair-c", maxOffsetsPerTrigger=30)
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    parts = reader.partitions(start, end)
    assert [part.topic for part in parts] == ["fair-a", "fair-b", "fair-c"]
    assert sizes(reader, parts) == [10, 10, 10]
    found, _ = batches(reader, end)
    assert [len(each) for each in found] == [30, 30, 30, 30]


def test_with_room_for_one_message_no_topic_starves(tables, follow):
    for topic in ("starve-a", "starve-b", "starve-c"):
        tables.publish(tables.create(topic), topic, topic)
    reader = follow("starve-a,starve-b,starve-c", maxOffsetsPerTrigger=1)
    found, _ = batches(reader, reader.initialOffset())
    assert all(len(each) == 1 for each in found)
    assert {each[0] for each in found[:3]} == {b"starve-a", b"starve-b", b"starve-c"}
    assert len(found) == 6


def test_a_topic_without_a_share_of_a_micro_batch_is_measured_once(tables, monkeypatch):
    topics = [tables.create(f"share-{letter}") for letter in "abc"]
    for topic in topics:
        tables.publish(topic, "x", "y")
    measured = []
    real = Calls.offsets

    def offsets(calls, topic, **given):
        measured.append(topic)
        return real(calls, topic, **given)

    monkeypatch.setattr(Calls, "offsets", offsets)
    with closing(calls_of(tables.url)) as calls:
        wanted = {topic: Wanted(bytes(20), None) for topic in topics}
        found = measure(calls, wanted, "committed", Trigger(1, None), 0)
    assert [found[topic].extent.messages for topic in topics] == [1, 0, 0]
    assert all(each.is_cut for each in found.values())
    assert measured == topics


def test_max_bytes_holds_over_topics_whose_messages_are_larger_than_their_share(tables, follow):
    for topic in ("wide-a", "wide-b", "wide-c"):
        tables.publish(tables.create(topic), "x" * 300)
    reader = follow("wide-a,wide-b,wide-c", maxBytesPerTrigger=700)
    found, _ = batches(reader, reader.initialOffset())
    assert sorted(len(each) for each in found) == [1, 2]


def test_a_single_run_over_everything_ignores_bounds(tables, follow):
    topic = tables.create("once")
    tables.publish_many(topic, 100)
    reader = follow(topic, maxOffsetsPerTrigger=30)
    assert [len(each) for each in batches(reader, reader.initialOffset(), ALL)[0]] == [100]


def test_topics_that_come_later_join_a_pattern_from_their_start(tables, follow):
    tables.publish(tables.create("join-a"), "a")
    reader = follow(None, subscribePattern="join-.")
    start = reader.initialOffset()
    found, end = batches(reader, start)
    assert found == [[b"a"]]
    tables.publish(tables.create("join-b"), "b")
    tables.publish(tables.create("join-bb"), "not of the pattern")
    assert batches(reader, end)[0] == [[b"b"]]


def test_a_stream_of_a_pattern_can_start_without_any_topic(tables, follow):
    reader = follow(None, subscribePattern="later-.*", startingOffsets="latest")
    start = reader.initialOffset()
    assert start == {"v": 1, "topics": {}}
    assert reader.latestOffset(start, ALL) == start
    tables.publish(tables.create("later-x"), "x")
    assert batches(reader, start)[0] == [[b"x"]]


def test_a_stream_may_start_at_latest_at_a_time_and_at_an_id(tables, follow):
    topic = tables.create("starts")
    tables.publish(topic, "a", "b")
    row = tables.rows(topic)[1]
    for where, expected in (
        ({"startingOffsets": "latest"}, []),
        ({"startingOffsets": row["message_id"].hex()}, [[b"b"]]),
        ({"startingTimestamp": int(row["publish_timestamp"].timestamp() * 1000)}, [[b"a", b"b"]]),
        ({}, [[b"a", b"b"]]),
    ):
        reader = follow(topic, **where)
        assert batches(reader, reader.initialOffset())[0] == expected, where


def test_latest_leaves_out_nothing_that_becomes_visible_later(tables, follow):
    topic = tables.create("latest-open")
    tables.publish(topic, "seen")
    pointer = tables.begin()
    tables.publish(topic, "open", transactionWritePointer=pointer)
    reader = follow(topic, startingOffsets="latest")
    start = reader.initialOffset()
    tables.decide(pointer, "commit")
    assert batches(reader, start)[0] == [[b"open"]]


def test_waiting_ends_with_the_first_message_of_any_topic(tables, follow):
    for topic in ("wait-a", "wait-b"):
        tables.create(topic)
    reader = follow("wait-a,wait-b", pollTimeoutMs=20_000)
    start = reader.initialOffset()
    publishing = threading.Thread(target=tables.publish, args=("wait-b", "x"))
    publishing.start()
    end = reader.latestOffset(start, ALL)
    publishing.join()
    assert payloads(reader, reader.partitions(start, end)) == [b"x"]


def test_an_idle_stream_asks_once_in_each_poll_timeout(tables, follow, monkeypatch):
    topic = tables.create("idle")
    tables.publish(topic, "a")
    reader = follow(topic, pollTimeoutMs=50)
    _, end = batches(reader, reader.initialOffset())
    asked: list[str] = []
    ask = reader._calls.wire.ask
    monkeypatch.setattr(reader._calls.wire, "ask", lambda *a, **k: asked.append(a[1]) or ask(*a, **k))
    for _ in range(5):
        assert reader.latestOffset(end, ALL) is end
        reader.reportLatestOffset()
    assert asked == ["/v1/namespaces/demo/poll"] * 5


def test_invisible_messages_are_read_once(tables, follow):
    topic = tables.create("nothing-to-see")
    reader = follow(topic)
    start = reader.latestOffset(reader.initialOffset(), ALL)
    pointer = tables.begin()
    tables.publish(topic, "x", transactionWritePointer=pointer)
    tables.decide(pointer, "abort")
    assert reader.latestOffset(start, ALL) is start
    position, looked = reader._following._empty_to[topic]
    assert looked > position.next
    tables.publish(topic, "y")
    assert batches(reader, start)[0] == [[b"y"]]


def test_the_lag_is_reported(tables, follow):
    for topic in ("lag", "no-lag"):
        tables.publish_many(tables.create(topic), 50 if topic == "lag" else 2)
    reader = follow("lag,no-lag", maxOffsetsPerTrigger=12)
    assert reader.reportLatestOffset() is None
    end = reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())
    newest = reader.reportLatestOffset()
    assert newest["topics"]["demo:lag"]["next"] > end["topics"]["demo:lag"]["next"]
    assert newest["behind"] == {"demo:lag": 40, "demo:no-lag": 0}
    _, end = batches(reader, end)
    assert reader.reportLatestOffset() == {**end, "behind": {"demo:lag": 0, "demo:no-lag": 0}}


@pytest.mark.parametrize(("isolation", "behind"), [("committed", 4), ("uncommitted", 7)])
def test_the_lag_has_the_messages_that_the_stream_may_read(tables, follow, isolation, behind):
    topic = tables.create(f"lag-{isolation}")
    tables.publish_many(topic, 6)
    pointer = tables.begin()
    tables.publish(topic, "x", "y", "z", transactionWritePointer=pointer)
    reader = follow(topic, maxOffsetsPerTrigger=2, isolation=isolation)
    reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())
    assert reader.reportLatestOffset()["behind"] == {f"demo:{topic}": behind}
    tables.decide(pointer, "commit")


# --- a minimum number of messages --------------------------------------------------------------------


def test_a_micro_batch_waits_until_there_are_enough_messages_in_all_topics(tables, follow):
    for topic in ("least-a", "least-b"):
        tables.create(topic)
    reader = follow("least-a,least-b", minOffsetsPerTrigger=10, maxTriggerDelay="1h")
    limit, start = reader.getDefaultReadLimit(), reader.initialOffset()
    assert limit == ReadMinRows(10)
    _, start = batches(reader, start)
    tables.publish_many("least-a", 4)
    tables.publish_many("least-b", 5)
    assert batches(reader, start)[0] == []
    assert reader.reportLatestOffset()["behind"] == {"demo:least-a": 4, "demo:least-b": 5}
    tables.publish_many("least-a", 2, first=4)
    ((batch,), start) = batches(reader, start)
    assert len(batch) == 11
    tables.publish_many("least-b", 9)
    assert batches(reader, start)[0] == []
    assert reader.latestOffset(start, ALL) != start  # as a single run over everything requests


def test_a_micro_batch_waits_no_longer_than_the_longest_delay(tables, follow):
    topic = tables.create("delay")
    reader = follow(topic, minOffsetsPerTrigger=10, maxTriggerDelay="60s")
    now_s = [1_000.0]
    reader._following._backlog._clock = lambda: now_s[0]
    start = reader.initialOffset()
    now_s[0] += 100  # without a message nothing waits
    written = tables.publish_many(topic, 3)
    assert batches(reader, start)[0] == []
    now_s[0] += 59
    written += tables.publish_many(topic, 3, first=3)
    assert batches(reader, start)[0] == []
    now_s[0] += 2
    found, start = batches(reader, start)
    assert found == [written]
    tables.publish_many(topic, 3)
    assert batches(reader, start)[0] == []  # and its delay begins now


def test_waiting_messages_are_counted_once(tables, follow, monkeypatch):
    topic = tables.create("counted-once")
    reader = follow(topic, minOffsetsPerTrigger=100, maxTriggerDelay="1h")
    start = reader.initialOffset()
    counted = []
    real = Calls.offsets

    def counting(self, *given, **more):
        extent = real(self, *given, **more)
        counted.append(extent.messages)
        return extent

    for number in range(3):
        tables.publish_many(topic, 20, first=20 * number)
        with monkeypatch.context() as patched:
            patched.setattr(Calls, "offsets", counting)
            assert reader.latestOffset(start, reader.getDefaultReadLimit()) == start
    assert counted == [20, 20, 20]


def test_all_bounds_of_a_micro_batch_hold_together(tables, follow):
    topic = tables.create("least-and-most")
    written = tables.publish_many(topic, 25)
    reader = follow(topic, minOffsetsPerTrigger=10, maxOffsetsPerTrigger=10, maxTriggerDelay="1h")
    assert batches(reader, reader.initialOffset())[0] == [written[:10], written[10:20]]
    reader = follow(topic, minOffsetsPerTrigger=10, maxBytesPerTrigger=100, maxTriggerDelay="1h")
    assert [len(batch) for batch in batches(reader, reader.initialOffset())[0]] == [3, 3, 3, 3, 3, 3]


def test_a_run_over_the_available_messages_waits_for_no_others(tables, follow):
    topic = tables.create("least-available")
    written = tables.publish_many(topic, 5)
    reader = follow(topic, minOffsetsPerTrigger=10, maxTriggerDelay="1h")
    reader.prepareForTriggerAvailableNow()
    assert batches(reader, reader.initialOffset())[0] == [written]


def test_a_loss_waits_for_no_further_messages(tables, follow):
    topic = tables.create("least-lost")
    tables.publish(topic, "a")
    (row,) = tables.rows(topic, "message_id")
    start = {"v": 1, "topics": {f"demo:{topic}": {"gen": 1, "next": row["message_id"].hex()}}}
    tables.let_expire(topic, row["message_id"])
    tables.publish(topic, "b")
    reader = follow(topic, minOffsetsPerTrigger=10, maxTriggerDelay="1h")
    with pytest.raises(DataLoss, match="have expired"):
        reader.latestOffset(start, reader.getDefaultReadLimit())


def test_a_batch_is_cut_into_partitions_too(tables, follow):
    topic = tables.create("stream-cut")
    written = tables.publish_many(topic, 200)
    reader = follow(topic, minPartitions=4, maxRecordsPerPartition=60)
    start = reader.initialOffset()
    parts = reader.partitions(start, reader.latestOffset(start, ALL))
    assert len(parts) >= 4
    assert payloads(reader, parts) == written


def test_a_micro_batch_is_measured_once_for_its_bounds_and_its_partitions(tables, follow, monkeypatch):
    topic = tables.create("stream-measured")
    written = tables.publish_many(topic, 200)
    measured = []
    real = Calls.offsets

    def offsets(calls, topic, **given):
        found = real(calls, topic, **given)
        measured.append(found.messages)
        return found

    monkeypatch.setattr(Calls, "offsets", offsets)
    reader = follow(topic, minPartitions=4, maxOffsetsPerTrigger=120)
    start, read = reader.initialOffset(), []
    for count in (120, 80):
        measured.clear()
        end = reader.latestOffset(start, reader.getDefaultReadLimit())
        parts = reader.partitions(start, end)
        assert (len(parts), sum(measured)) == (4, count)
        read += payloads(reader, parts)
        begun, start = start, end
    assert read == written
    # A batch that runs again, in another process, has the same messages.
    again = follow(topic, minPartitions=4)
    assert payloads(again, again.partitions(begun, end)) == written[120:]


def test_a_batch_that_ends_where_it_starts_has_no_partitions(tables, follow):
    topic = tables.create("stream-none")
    tables.publish(topic, "a")
    reader = follow(topic)
    end = reader.latestOffset(reader.initialOffset(), ALL)
    assert reader.partitions(end, end) == []


def test_a_long_topic_is_measured_in_steps(tables, follow, monkeypatch):
    monkeypatch.setattr("pyspark_plainsong.partitions.STEP_MESSAGES", 30)
    topic = tables.create("stream-steps")
    written = tables.publish_many(topic, 100)
    size = follow(topic)._calls.offsets(topic).size_bytes // 100
    for bounds, counts in (
        ({}, [100]),
        ({"maxOffsetsPerTrigger": 60}, [60, 40]),
        ({"maxOffsetsPerTrigger": 70}, [70, 30]),
        ({"maxBytesPerTrigger": size * 35}, [35, 35, 30]),
        ({"maxBytesPerTrigger": size * 36 - 1}, [35, 35, 30]),
    ):
        reader = follow(topic, **bounds)
        found, _ = batches(reader, reader.initialOffset())
        assert [len(each) for each in found] == counts
        assert list(chain.from_iterable(found)) == written
    reader = follow(topic, minPartitions=6)
    start = reader.initialOffset()
    parts = reader.partitions(start, reader.latestOffset(start, ALL))
    assert len(parts) >= 6
    assert payloads(reader, parts) == written


def test_a_missing_topic_is_an_error_from_the_start(tables, follow):
    with pytest.raises(BrokerError, match="topic demo:missing does not exist"):
        follow("missing").initialOffset()


def test_a_checkpoint_of_another_namespace_or_version_is_refused(follow):
    reader = follow("any")
    with pytest.raises(ValueError, match="of the namespace other"):
        reader.latestOffset({"v": 1, "topics": {"other:t": {"gen": 1, "next": "00" * 20}}}, ALL)
    with pytest.raises(ValueError, match="version 2"):
        reader.latestOffset({"v": 2, "topics": {}}, ALL)


def test_more_topics_than_one_request_can_wait_for_are_all_followed(tables, follow, monkeypatch):
    monkeypatch.setattr("pyspark_plainsong.following.MAX_AWAITED", 2)
    names = [tables.create(f"many-{letter}") for letter in "abcde"]
    reader = follow(",".join(names), pollTimeoutMs=1)
    start = reader.initialOffset()
    start = reader.latestOffset(start, ALL)
    assert reader.latestOffset(start, ALL) == start
    for name in names[1:]:
        tables.publish(name, name)
    assert batches(reader, start)[0] == [[name.encode() for name in names[1:]]]


@given(st.integers(0, 200), st.dictionaries(st.text("abc", min_size=1), st.integers(1, 60)), st.integers(0, 9))
def test_shares_are_fair_and_use_the_whole_bound(room, wanted, turn):
    shares = fair_shares(room, wanted, turn)
    assert sum(shares.values()) == min(room, sum(wanted.values()))
    assert all(shares[name] <= wanted[name] for name in wanted)
    short = [shares[name] for name in wanted if shares[name] < wanted[name]]
    assert all(max(shares.values()) - share <= 1 for share in short)
