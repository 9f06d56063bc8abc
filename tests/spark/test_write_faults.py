"""Writing a DataFrame while tasks fail, answers get lost and the daemon is killed: exactly its rows, or none."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import closing, contextmanager

import pyarrow as pa
import pytest
from disturbed import Disturbance, register
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql.types import BinaryType, StructField, StructType
from topics import Topics, calls_of, numbers, wanted

from pyspark_plainsong.options import WriteOptions
from pyspark_plainsong.publishing import CheckpointRewound, Identity, MicroBatch, NotPublished, OutcomeUnknown, Winners
from pyspark_plainsong.staging import StoredUnder, store_body
from pyspark_plainsong.wire import BrokerError
from pyspark_plainsong.writers import BatchWriter, SaveIsComplete
from tests.client.proxy import Proxy
from tests.daemon.harness import Daemon, eventually
from tests.patience import SPARK_PATIENCE_S
from tests.ports import free_address

#: A failed save raises the first of these; if the abort fails as well, the second, with the texts of both errors.
FAILED = (PySparkException, Py4JError)
ROWS = 4_000
#: Rows of an Arrow batch; a partition has four batches.
BATCH = 500


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("daemon") / "data") as daemon:
        yield daemon


@pytest.fixture
def topics(daemon):
    return Topics("http://{}:{}".format(*daemon.address))


@pytest.fixture
def disturb(spark, tmp_path):
    """Save with a disturbance; its folder is ``tmp_path``."""
    register(spark)
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", BATCH)

    def save(options: dict[str, str], rows: int = ROWS, **what) -> None:
        disturb = Disturbance(str(tmp_path), **what).option()
        frame = numbers(spark, rows)
        frame.write.format("disturbed").options(**options, disturb=disturb).mode("append").save()

    yield save
    spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")


@contextmanager
def meanwhile(tmp_path, happens):
    """Call ``happens`` when a task or commit reports that it has reached its point, and let it continue."""

    def wait() -> None:
        eventually("the point is reached", (tmp_path / "reached").exists, SPARK_PATIENCE_S)
        happens()
        (tmp_path / "go").touch()

    thread = threading.Thread(target=wait)
    thread.start()
    yield
    thread.join(SPARK_PATIENCE_S)


def save_plainly(spark, options: dict[str, str], rows: int = ROWS) -> None:
    numbers(spark, rows).write.format("plainsong").options(**options).mode("append").save()


@pytest.mark.parametrize("task", ["raise", "exit"])
def test_an_attempt_that_fails_half_way_leaves_nothing(disturb, topics, task) -> None:
    topic = topics.create(f"task-{task}")
    disturb(topics.options(topic, storeBatchSize=100), task=task)
    assert topics.counted(topic) == wanted(ROWS)


def test_when_all_attempts_fail_nothing_is_visible_and_the_save_can_be_repeated(spark, disturb, topics) -> None:
    topic = topics.create("all-fail")
    options = topics.options(topic, producerName="job", sequenceId=0)
    with pytest.raises(FAILED, match="disturbed"):
        disturb(options, task="raise", attempts=99)
    assert topics.counted(topic) == Counter()
    save_plainly(spark, options)
    assert topics.counted(topic) == wanted(ROWS)


def test_stores_whose_answers_are_lost_are_sent_again(spark, daemon, topics) -> None:
    topic = topics.create("lost-stores")
    with Proxy(daemon.address) as proxy:
        marks = [f"/topics/{topic}/store".encode()] * 3
        options = Topics(proxy.url).options(topic, storeBatchSize=250)
        proxy.after = {marks[0]: "lose"}
        thread = threading.Thread(target=lose_more, args=(proxy, marks[1:]))
        thread.start()
        save_plainly(spark, options)
        thread.join()
        assert proxy.lost == len(marks)
    assert topics.counted(topic) == wanted(ROWS)


def lose_more(proxy: Proxy, marks: list[bytes]) -> None:
    for number, mark in enumerate(marks, 1):
        eventually("the previous answer is lost", lambda number=number: proxy.lost >= number, SPARK_PATIENCE_S)
        proxy.after[mark] = "lose"


def test_a_publish_whose_answer_is_lost_is_sent_again(spark, daemon, topics) -> None:
    topic = topics.create("lost-publish")
    with Proxy(daemon.address) as proxy:
        proxy.after = {f"/topics/{topic}/publish".encode(): "lose"}
        save_plainly(spark, Topics(proxy.url).options(topic))
        assert proxy.lost == 1
    assert topics.counted(topic) == wanted(ROWS)


def test_a_publish_that_never_gets_an_answer_is_in_doubt_and_can_be_repeated_under_its_name(
    spark, daemon, topics
) -> None:
    topic = topics.create("in-doubt")
    with Proxy(daemon.address) as proxy:
        proxy.after = {f"/topics/{topic}/publish".encode(): "die"}
        options = Topics(proxy.url).options(topic, producerName="job", sequenceId=0, numRetries=1)
        with pytest.raises(FAILED, match=r"it is not known whether .*: unreachable.*producer job, sequence id 0"):
            save_plainly(spark, options)
    save_plainly(spark, topics.options(topic, producerName="job", sequenceId=0))
    assert topics.counted(topic) == wanted(ROWS)


def test_a_publish_is_not_rolled_back_when_spark_aborts(disturb, topics) -> None:
    topic = topics.create("complete")
    with pytest.raises(FAILED) as caught:
        disturb(topics.options(topic, producerName="job", sequenceId=0), after_commit="raise")
    assert "these topics have all rows of the save, and keep them: complete; run it again with" in str(caught.value)
    assert topics.counted(topic) == wanted(ROWS)


def test_the_abort_reports_a_publish_that_spark_did_not_see(daemon, topics) -> None:
    topic = topics.create("behind")
    schema = StructType([StructField("payload", BinaryType())])
    writer = BatchWriter(WriteOptions.parse(topics.options(topic), streaming=False), schema, overwrite=False)
    task = writer.write(iter([pa.record_batch([pa.array([b"row"])], names=["payload"])]))
    with Proxy(daemon.address) as proxy:
        proxy.after = {f"/topics/{topic}/publish".encode(): "die"}
        options = WriteOptions.parse(Topics(proxy.url).options(topic, numRetries=0), streaming=False)
        writer._connection = options.connection
        with pytest.raises(OutcomeUnknown, match="it is not known whether topic behind has the 1 row"):
            writer.commit([task])
    writer._connection = WriteOptions.parse(topics.options(topic), streaming=False).connection
    with pytest.raises(SaveIsComplete, match="have all rows of the save, and keep them: behind; do not run it again"):
        writer.abort([task])
    assert topics.counted(topic) == Counter([b"row"])


def test_a_commit_that_fails_before_it_asks_the_daemon_leaves_nothing(disturb, topics) -> None:
    topic = topics.create("aborted")
    with pytest.raises(FAILED, match="disturbed"):
        disturb(topics.options(topic), before_commit="raise")
    assert topics.counted(topic) == Counter()


def test_rows_of_an_outer_transaction_are_rolled_back_when_spark_aborts(disturb, topics) -> None:
    topic = topics.create("outer")
    transaction = topics.ask("POST", "/v1/transactions", {})
    options = topics.options(topic, transactionWritePointer=transaction["writePointer"])
    with pytest.raises(FAILED, match="disturbed"):
        disturb(options, after_commit="raise")
    topics.ask("POST", f"/v1/transactions/{transaction['id']}/commit", {})
    assert topics.payloads(topic, "committed") == []


@pytest.mark.parametrize("when", ["task", "before_commit"])
def test_killing_and_starting_the_daemon_again_changes_nothing(disturb, tmp_path, when) -> None:
    with Daemon(tmp_path / "data", bind=free_address()) as daemon:
        topics = Topics("http://{}:{}".format(*daemon.address))
        topic = topics.create("killed")

        def restart() -> None:
            daemon.kill()
            daemon.start()

        with meanwhile(tmp_path, restart):
            disturb(topics.options(topic, storeBatchSize=100), **{when: "wait"})
        assert topics.counted(topic) == wanted(ROWS)


def test_a_save_waits_for_a_daemon_that_is_unavailable_for_a_while(disturb, tmp_path) -> None:
    with Daemon(tmp_path / "data", bind=free_address()) as daemon:
        topics = Topics("http://{}:{}".format(*daemon.address))
        topic = topics.create("away")
        with meanwhile(tmp_path, daemon.kill):
            back = threading.Thread(
                target=lambda: (eventually("go", (tmp_path / "go").exists, SPARK_PATIENCE_S), daemon.start())
            )
            back.start()
            disturb(topics.options(topic, storeBatchSize=100, numRetries=12), task="wait")
            back.join()
        assert topics.counted(topic) == wanted(ROWS)


def test_rows_stored_by_a_late_attempt_are_never_visible(spark, topics) -> None:
    topic = topics.create("late")
    options = topics.options(topic, producerName="job", sequenceId=0)
    save_plainly(spark, options, 100)
    with closing(calls_of(topics.url)) as calls:
        calls.store(topic, store_body(StoredUnder("job", "zombie", 1), [b"late"], 0))
        assert topics.counted(topic) == wanted(100)
        save_plainly(spark, {**options, "sequenceId": "1"}, 100)
        calls.store(topic, store_body(StoredUnder("job", "another", 1), [b"later"], 0))
    assert topics.counted(topic) == wanted(100) + wanted(100)


def test_a_segment_partly_published_by_another_save_is_not_continued(spark, topics) -> None:
    topic = topics.create("gone-on")
    with closing(calls_of(topics.url)) as calls:
        calls.store(topic, store_body(StoredUnder("job", "half", 1), [b"lost"], 0))
        save_plainly(spark, topics.options(topic, producerName="job", sequenceId=0), 100)
        with pytest.raises(BrokerError, match="already_published: segment 'half' continues with sequence id 1"):
            calls.store(topic, store_body(StoredUnder("job", "half", 1), [b"on"], 1))


def test_a_publish_still_on_its_way_when_spark_aborts_has_no_effect(topics) -> None:
    topic = topics.create("delayed")
    identity, won = Identity("job", 0), Winners(topic, ("segment",), 1, 1)
    with closing(calls_of(topics.url)) as calls:
        calls.store(topic, store_body(StoredUnder("job", "segment", 1), [b"row"], 0))
        assert not identity.is_complete(calls, won)
        session = calls.open_producer(topic, "job")
        assert not identity.is_complete(calls, won)
        with pytest.raises(BrokerError, match="producer_fenced"):
            calls.publish_staged(topic, producer="job", sequence_id=0, segments=["segment"], epoch=session.epoch)
        assert topics.counted(topic) == Counter()
        assert identity.publish(calls, won)
        assert identity.is_complete(calls, won)
        assert not identity.publish(calls, won)
    assert topics.counted(topic) == Counter([b"row"])


def test_without_deduplication_stores_whose_answers_are_lost_are_sent_again_too(spark, daemon, topics) -> None:
    topic = topics.create("forgetful", deduplication="disabled")
    with Proxy(daemon.address) as proxy:
        proxy.after = {f"/topics/{topic}/store".encode(): "lose"}
        save_plainly(spark, Topics(proxy.url).options(topic, storeBatchSize=500))
        assert proxy.lost == 1
    assert topics.counted(topic) == wanted(ROWS)


def test_a_save_with_a_lower_id_is_refused_unless_it_is_known_to_be_stored(topics) -> None:
    topic = topics.create("counted-down")
    with closing(calls_of(topics.url)) as calls:

        def save(sequence_id: int, **more: bool) -> bool:
            segment = f"s{sequence_id}"
            calls.store(topic, store_body(StoredUnder("job", segment, 1), [b"%d" % sequence_id], 0))
            own = sequence_id if more else MicroBatch(sequence_id).sequence_id
            return Identity("job", own, **more).publish(calls, Winners(topic, (segment,), 1, 1))

        for sequence_id in (3, 5, 7, 8, 9, 10):
            assert save(sequence_id, is_micro_batch=False)
        assert not save(10, is_micro_batch=False)
        assert not save(5, is_micro_batch=False)
        for sequence_id in (3, 6):  # the first is no longer remembered, the second never was
            with pytest.raises(NotPublished, match="use a sequenceId above all earlier ones"):
                save(sequence_id, is_micro_batch=False)
            lower = Identity("job", sequence_id, is_micro_batch=False)
            assert not lower.is_complete(calls, Winners(topic, ("s6",), 1, 1))
        with pytest.raises(CheckpointRewound, match="has micro-batch 10 already"):
            save(6)
    assert topics.counted(topic) == Counter([b"3", b"5", b"7", b"8", b"9", b"10"])


def test_a_topic_recreated_while_it_is_written_gets_nothing(disturb, topics, tmp_path) -> None:
    topic = topics.create("anew")

    def recreate() -> None:
        topics.ask("DELETE", f"/v1/namespaces/demo/topics/{topic}")
        topics.create(topic)

    with meanwhile(tmp_path, recreate), pytest.raises(FAILED, match="generation_changed"):
        disturb(topics.options(topic), before_commit="wait")
    assert topics.counted(topic) == Counter()
