"""Writing a stream: every micro-batch once, however often it is run."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from contextlib import closing

import pytest
from disturbed import Disturbance, register
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql.types import BinaryType, StructField, StructType
from topics import Topics, address, calls_of, wanted

from pyspark_plainsong.options import WriteOptions
from pyspark_plainsong.publishing import CheckpointRewound, Identity, MicroBatch, Stored, TaskStored, Winners
from pyspark_plainsong.staging import StoredUnder, store_body
from pyspark_plainsong.writers import StreamWriter
from tests.client.proxy import Proxy
from tests.daemon.harness import Daemon, eventually
from tests.patience import SPARK_PATIENCE_S
from tests.ports import free_address

#: Rows per file; a file is one micro-batch.
ROWS = 1_000
FILES = 3


@pytest.fixture(scope="module")
def topics(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("daemon") / "data") as daemon:
        yield Topics("http://{}:{}".format(*daemon.address))


@pytest.fixture
def source(spark, tmp_path):
    """A stream over files of numbers from 0 on, which reads one file in each micro-batch, in two partitions."""
    (tmp_path / "in").mkdir()
    for number in range(FILES):
        rows = range(number * ROWS, (number + 1) * ROWS)
        file = tmp_path / "in" / f"{number}.txt"
        file.write_text("".join(f"{row}\n" for row in rows))
        os.utime(file, (number, number))  # Spark reads them by age
    register(spark)
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 250)
    lines = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(tmp_path / "in"))
    yield lines.selectExpr("value as payload").repartition(2)
    spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")


@pytest.fixture
def run(source, tmp_path):
    """A function that runs the stream from its checkpoint to the last file, and raises the error of a failed query."""

    def run(options: dict[str, str], checkpoint: str = "checkpoint", **what) -> None:
        disturb = Disturbance(str(tmp_path), **what).option() if what else ""
        writer = source.writeStream.format("disturbed" if what else "plainsong").options(**options)
        if what:
            writer = writer.option("disturb", disturb)
        query = writer.option("checkpointLocation", str(tmp_path / checkpoint)).trigger(availableNow=True).start()
        try:
            query.awaitTermination()
        finally:
            query.stop()

    return run


def query_id(tmp_path, checkpoint: str = "checkpoint") -> str:
    return json.loads((tmp_path / checkpoint / "metadata").read_text())["id"]


def test_every_micro_batch_appears_once_and_the_query_is_remembered_for_90_days(run, topics, tmp_path) -> None:
    topic = topics.create("plainly")
    run(topics.options(topic))
    assert topics.counted(topic) == wanted(FILES * ROWS)
    (producer,) = topics.ask("GET", f"/v1/namespaces/demo/topics/{topic}/producers")["producers"]
    assert producer["producer"] == query_id(tmp_path)
    assert MicroBatch.of(producer["persisted"]).number == FILES - 1
    assert producer["expiresMs"] - producer["activeMs"] == 90 * 86_400_000


@pytest.mark.parametrize("when", ["before_commit", "after_commit"])
def test_a_failed_commit_is_repeated_by_the_next_start(run, topics, when) -> None:
    topic = topics.create(when)
    with pytest.raises(StreamingQueryException, match="disturbed"):
        run(topics.options(topic), batch=1, **{when: "raise"})
    assert topics.counted(topic) == wanted((2 if when == "after_commit" else 1) * ROWS)
    run(topics.options(topic))
    assert topics.counted(topic) == wanted(FILES * ROWS)


def test_attempts_that_fail_half_way_leave_nothing(run, topics) -> None:
    topic = topics.create("attempts")
    run(topics.options(topic, storeBatchSize=100), batch=1, task="exit")
    assert topics.counted(topic) == wanted(FILES * ROWS)


def test_publishes_whose_answers_are_lost_are_sent_again(run, topics) -> None:
    topic = topics.create("lost")
    with Proxy(address(topics.url)) as proxy:
        proxy.after = {f"/topics/{topic}/publish".encode(): "lose"}
        run(Topics(proxy.url).options(topic))
        assert proxy.lost == 1
    assert topics.counted(topic) == wanted(FILES * ROWS)


def test_a_daemon_killed_between_two_chunks_changes_nothing(run, tmp_path) -> None:
    with Daemon(tmp_path / "data", bind=free_address()) as daemon:
        topics = Topics("http://{}:{}".format(*daemon.address))
        topic = topics.create("killed")

        def restart() -> None:
            eventually("a task has begun", (tmp_path / "reached").exists, SPARK_PATIENCE_S)
            daemon.kill()
            daemon.start()
            (tmp_path / "go").touch()

        thread = threading.Thread(target=restart)
        thread.start()
        run(topics.options(topic, storeBatchSize=100), batch=1, task="wait")
        thread.join()
        assert topics.counted(topic) == wanted(FILES * ROWS)


def test_a_checkpoint_restored_from_an_older_copy_is_an_error_and_no_row_is_left_out_silently(
    run, topics, tmp_path
) -> None:
    topic = topics.create("rewound")
    run(topics.options(topic))
    for log in ("offsets", "commits", "sources/0"):  # as they were after the first micro-batch
        for entry in (tmp_path / "checkpoint" / log).glob("*[12]*"):
            entry.unlink()
    with pytest.raises(StreamingQueryException, match=r"micro-batch 1 of .* has micro-batch 2 already.*older copy"):
        run(topics.options(topic))
    assert topics.counted(topic) == wanted(FILES * ROWS)


def test_a_checkpoint_that_is_older_by_one_micro_batch_is_an_error_too(run, topics, tmp_path) -> None:
    topic = topics.create("rewound-by-one")
    run(topics.options(topic))
    for log in ("offsets", "commits", "sources/0"):
        for entry in (tmp_path / "checkpoint" / log).glob("*2*"):
            entry.unlink()
    with pytest.raises(
        StreamingQueryException, match=r"another micro-batch 2 already.* planned at another time.*older"
    ):
        run(topics.options(topic))
    assert topics.counted(topic) == wanted(FILES * ROWS)


def test_a_repeated_micro_batch_has_the_same_sequence_id_and_one_planned_again_another(tmp_path) -> None:
    (tmp_path / "a#b" / "offsets").mkdir(parents=True)
    checkpoint, entry = str(tmp_path / "a#b"), tmp_path / "a#b" / "offsets" / "7"
    unknown = MicroBatch.logged(checkpoint, 7)
    entry.write_text("one")
    one = MicroBatch.logged(checkpoint, 7)
    assert one == MicroBatch.logged(f"file://{checkpoint}", 7) == MicroBatch.of(one.sequence_id)
    entry.write_text("two")
    two = MicroBatch.logged(checkpoint, 7)
    assert one.is_other_than(two)
    assert not unknown.is_other_than(two)
    assert MicroBatch.logged("hdfs://host/checkpoint", 7) == MicroBatch.logged(None, 7) == MicroBatch(7) == unknown
    assert MicroBatch(6, 2**31 - 1).sequence_id < unknown.sequence_id < min(one.sequence_id, two.sequence_id)
    # Versions before 0.2 published the number itself.
    assert [MicroBatch.of(number) for number in (-1, 0, 7)] == [MicroBatch(-1), MicroBatch(0), MicroBatch(7)]


def test_a_micro_batch_that_an_older_version_published_is_not_published_again(topics) -> None:
    topic = topics.create("older-version")
    with closing(calls_of(topics.url)) as calls:

        def stored(text: bytes) -> Winners:
            calls.store(topic, store_body(StoredUnder("query", text.decode(), 1), [text], 0))
            return Winners(topic, (text.decode(),), 1, 1)

        session = calls.open_producer(topic, "query")
        won = stored(b"old")
        calls.publish_staged(
            topic, producer="query", sequence_id=3, segments=won.segments, epoch=session.epoch, generation=1
        )
        again = Identity("query", MicroBatch(3, 5).sequence_id)
        assert again.is_complete(calls, won)
        assert not again.publish(calls, stored(b"again"))
        with pytest.raises(
            CheckpointRewound, match="micro-batch 2 of producer query, and the topic has micro-batch 3 al"
        ):
            Identity("query", MicroBatch(2, 5).sequence_id).publish(calls, won)
        assert Identity("query", MicroBatch(4, 5).sequence_id).publish(calls, stored(b"next"))
    assert topics.counted(topic) == Counter([b"old", b"next"])


def test_a_topic_with_too_many_remembered_queries_names_the_option(run, tmp_path) -> None:
    with Daemon(tmp_path / "data", "deduplication.max_long_producers=1") as daemon:
        topics = Topics("http://{}:{}".format(*daemon.address))
        topic = topics.create("many")
        run(topics.options(topic))
        with pytest.raises(
            StreamingQueryException, match=r"too_many_producers.*remembered for memoryDays \(90\).*lower"
        ):
            run(topics.options(topic), checkpoint="another")


def test_under_a_user_chosen_name_a_new_checkpoint_is_refused_instead_of_skipped(run, topics, caplog) -> None:
    topic = topics.create("named")
    options = topics.options(topic, producerName="mine")
    run(options)
    with pytest.raises(StreamingQueryException, match=r"micro-batch 0 of producer mine.* has micro-batch 2 already"):
        run(options, checkpoint="another")
    assert topics.counted(topic) == wanted(FILES * ROWS)
    # Spark's commits log to the stderr of its own processes; this commit runs here.
    schema = StructType([StructField("payload", BinaryType())])
    writer = StreamWriter(WriteOptions.parse(options, streaming=True), schema, overwrite=False)
    rows = [TaskStored(0, "segment", {topic: Stored(7, 1)})]
    writer.commit(rows, FILES - 1)
    assert (
        f"topic {topic} has micro-batch 2 of producer mine already, and does not store its 7 rows again" in caplog.text
    )
    with pytest.raises(CheckpointRewound, match="without producerName"):
        writer.commit(rows, 0)
    assert "producerName=mine replaces the query's id" in caplog.text


def test_rows_go_to_several_topics_and_failed_ones_are_repeated(source, topics, tmp_path) -> None:
    topics.create("first")
    frame = source.selectExpr("payload", "if(cast(payload as int) % 2 = 0, 'first', 'second') as topic")

    def run() -> None:
        writer = frame.writeStream.format("plainsong").options(**topics.options())
        query = writer.option("checkpointLocation", str(tmp_path / "two")).trigger(availableNow=True).start()
        try:
            query.awaitTermination()
        finally:
            query.stop()

    with pytest.raises(StreamingQueryException, match="topic_not_found"):
        run()
    topics.create("second")
    run()
    assert topics.counted("first") == Counter(b"%d" % n for n in range(0, FILES * ROWS, 2))
    assert topics.counted("second") == Counter(b"%d" % n for n in range(1, FILES * ROWS, 2))


def test_complete_mode_is_refused(source, topics, tmp_path) -> None:
    topic = topics.create("complete")
    counts = source.groupBy("payload").count().selectExpr("payload")
    options = topics.options(topic, checkpointLocation=tmp_path / "complete")
    query = counts.writeStream.format("plainsong").options(**options).outputMode("complete").start()
    with pytest.raises(PySparkException, match="a topic can only be appended to"):
        query.awaitTermination()


def test_a_shorter_retention_of_the_daemon_is_reported(run, tmp_path) -> None:
    limits = ("deduplication.producer_retention_s=3600", "deduplication.max_retention_s=86400")
    with Daemon(tmp_path / "data", *limits) as daemon:
        topics = Topics("http://{}:{}".format(*daemon.address))
        topic = topics.create("short")
        with pytest.raises(StreamingQueryException, match="memoryDays 90 was requested: lower it"):
            run(topics.options(topic))
        assert topics.counted(topic) == Counter()
        run(topics.options(topic, memoryDays=1))
        assert topics.counted(topic) == wanted(FILES * ROWS)
