"""``spark.readStream.format("plainsong")``: micro-batches, checkpoints, restarts, and idle queries."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from tables import Tables

from tests.daemon.harness import Daemon, eventually
from tests.patience import SPARK_PATIENCE_S


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("daemon") / "data") as daemon:
        yield Tables("http://{}:{}".format(*daemon.address))


class Query:
    """A stream that writes its micro-batches into a folder, with its checkpoint next to them."""

    def __init__(self, spark, tables, folder: Path) -> None:
        self.spark, self.tables, self.folder = spark, tables, folder

    def start(self, topic, *, now: bool = True, pattern: str | None = None, **given):
        options = self.tables.options(subscribe=topic, subscribePattern=pattern, **{"pollTimeoutMs": 200, **given})
        frame = (
            self.spark.readStream.schema("payload binary, topic string").format("plainsong").options(**options).load()
        )
        rows = str(self.folder / "rows")

        def keep(batch, number):
            batch.selectExpr("decode(payload, 'UTF-8') as text", "topic").write.mode("overwrite").json(
                f"{rows}/{number}"
            )

        writer = frame.writeStream.foreachBatch(keep).option("checkpointLocation", str(self.folder / "checkpoint"))
        return (writer.trigger(availableNow=True) if now else writer).start()

    def run(self, topic, **given):
        """Read all messages available now, until the query ends; return the query."""
        query = self.start(topic, **given)
        assert query.awaitTermination(SPARK_PATIENCE_S)
        return query

    def batches(self) -> list[list[str]]:
        """Return the texts of each micro-batch so far."""
        folders = sorted((self.folder / "rows").glob("*"), key=lambda each: int(each.name))
        return [
            [json.loads(line)["text"] for part in sorted(each.glob("*.json")) for line in part.read_text().splitlines()]
            for each in folders
        ]

    def rows(self) -> list[str]:
        return [text for batch in self.batches() for text in batch]


@pytest.fixture
def query(spark, tables, tmp_path):
    return Query(spark, tables, tmp_path)


def texts(payloads) -> list[str]:
    return [payload.decode() for payload in payloads]


def test_bounds_hold_for_available_messages_and_a_restart_continues(query, tables):
    topic = tables.create("now")
    written = texts(tables.publish_many(topic, 100))
    ended = query.run(topic, maxOffsetsPerTrigger=40)
    assert [len(batch) for batch in query.batches()] == [40, 40, 20]
    assert query.rows() == written
    last = json.loads((query.folder / "checkpoint" / "offsets" / "2").read_text().splitlines()[-1])
    assert list(last["topics"]) == ["demo:now"]
    progress = ended.lastProgress["sources"][0]
    assert json.loads(progress["latestOffset"])["topics"]["demo:now"] == last["topics"]["demo:now"]
    more = texts(tables.publish_many(topic, 30, first=100))
    query.run(topic, maxOffsetsPerTrigger=40)
    assert query.rows() == written + more


def test_progress_has_the_number_of_messages_that_each_micro_batch_left(query, tables):
    topic = tables.create("progress")
    tables.publish_many(topic, 100)
    ended = query.run(topic, maxOffsetsPerTrigger=40)
    latest = [json.loads(each["sources"][0]["latestOffset"]) for each in ended.recentProgress if each["numInputRows"]]
    assert [each["behind"] for each in latest] == [{"demo:progress": left} for left in (60, 20, 0)]


def test_a_query_waits_for_its_least_number_of_messages(query, tables):
    topic = tables.create("least")
    running = query.start(topic, now=False, minOffsetsPerTrigger=5, maxTriggerDelay="1h")
    for number in range(5):
        tables.publish(topic, str(number))
    eventually("the query has read them", lambda: len(query.rows()) == 5, SPARK_PATIENCE_S)
    tables.publish(topic, "5")
    tables.publish(topic, "6", "7", "8", "9")
    eventually("it has read the others", lambda: len(query.rows()) == 10, SPARK_PATIENCE_S)
    running.stop()
    assert [len(batch) for batch in query.batches() if batch] == [5, 5]


def test_bytes_bound_batches_too(query, tables):
    topic = tables.create("bytes")
    written = texts(tables.publish_many(topic, 50))
    query.run(topic, maxBytesPerTrigger=600)
    assert [len(batch) for batch in query.batches()] == [21, 21, 8]  # six bytes each, and 22 of id and length
    assert query.rows() == written


def test_a_batch_that_was_not_committed_is_read_again_as_it_was(query, tables):
    topic = tables.create("rerun")
    written = texts(tables.publish_many(topic, 60))
    query.run(topic, maxOffsetsPerTrigger=30)
    for name in ("1", ".1.crc"):  # as if the query had been killed before it recorded that batch 1 is complete
        (query.folder / "checkpoint" / "commits" / name).unlink(missing_ok=True)
    tables.publish_many(topic, 5, first=60)
    query.run(topic, maxOffsetsPerTrigger=1000)
    assert [len(batch) for batch in query.batches()] == [30, 30, 5]
    assert query.rows()[:60] == written


def test_topics_created_later_join_a_query_by_pattern(query, tables):
    tables.publish(tables.create("grow-a"), "a")
    running = query.start(None, pattern="grow-.*", now=False)
    eventually("the first topic is read", lambda: query.rows() == ["a"], SPARK_PATIENCE_S)
    tables.publish(tables.create("grow-b"), "b")
    eventually("the second one too", lambda: query.rows() == ["a", "b"], SPARK_PATIENCE_S)
    running.stop()


def test_an_idle_query_asks_no_more_than_twice_a_second_and_stops_at_once(query, tables):
    topic = tables.create("idle")
    tables.publish(topic, "a")
    running = query.start(topic, now=False, pollTimeoutMs=1000)
    eventually("the message is read", lambda: query.rows() == ["a"], SPARK_PATIENCE_S)
    eventually(
        "it has asked for more", lambda: running.status["message"].startswith("Getting offsets"), SPARK_PATIENCE_S
    )
    begun_s = time.monotonic()  # taken before the count: a pause between the two can only lengthen the measured time
    before = asked(tables.url)
    eventually("it asks four times", lambda: asked(tables.url) >= before + 4, SPARK_PATIENCE_S)
    assert time.monotonic() - begun_s > 2
    running.stop()
    assert running.exception() is None


def asked(url: str) -> float:
    """Return the number of requests answered so far, without those to the metrics."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    counts = [line for line in lines if line.startswith("plainsong_requests_total{") and 'route="metrics"' not in line]
    return sum(float(line.rpartition(" ")[2]) for line in counts)


def test_a_recreated_topic_ends_the_query_with_the_reason(query, tables):
    topic = tables.create("anew")
    tables.publish(topic, "old")
    query.run(topic)
    tables.delete(topic)
    tables.create(topic)
    tables.publish(topic, "new")
    with pytest.raises(StreamingQueryException, match="created again"):
        query.run(topic)
    query.run(topic, failOnDataLoss="false")
    assert query.rows() == ["old", "new"]


def test_a_topic_that_never_existed_is_not_called_deleted(query, tables):
    with pytest.raises(StreamingQueryException, match="topic demo:never does not exist") as caught:
        query.run("never")
    assert "failOnDataLoss" not in str(caught.value)


def test_a_batch_option_is_refused(query, tables):
    with pytest.raises(StreamingQueryException, match="endingOffsets is for reading a batch, not for reading a stream"):
        query.run(tables.create("refused"), endingOffsets="latest")
