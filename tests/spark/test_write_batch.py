"""Writing a DataFrame to topics: saves that succeed, and mistakes of the user that are refused."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from pyspark.errors import PySparkException
from topics import Topics, numbers, wanted

from plainsong import Client
from tests.daemon.harness import Daemon
from tests.patience import SPARK_PATIENCE_S


@pytest.fixture(scope="module")
def topics(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("daemon") / "data") as daemon:
        yield Topics("http://{}:{}".format(*daemon.address))


def save(frame, options: dict[str, str]) -> None:
    frame.write.format("plainsong").options(**options).mode("append").save()


def refusal(frame, options: dict[str, str], mode: str = "append") -> str:
    with pytest.raises(PySparkException) as caught:
        frame.write.format("plainsong").options(**options).mode(mode).save()
    return str(caught.value)


@pytest.mark.usefixtures("adaptive")
def test_all_rows_of_all_partitions_appear_once(spark, topics) -> None:
    topic = topics.create("all-rows")
    save(numbers(spark, 5_000), topics.options(topic, storeBatchSize=700))
    assert topics.counted(topic) == wanted(5_000)


def test_five_saves_with_ids_0_0_1_0_1_store_two(spark, topics) -> None:
    topic = topics.create("five-saves")
    for sequence_id in (0, 0, 1, 0, 1):
        save(numbers(spark, 50), topics.options(topic, producerName="job", sequenceId=sequence_id))
    assert topics.counted(topic) == wanted(50) + wanted(50)


def test_a_row_that_the_daemon_refuses_is_named_by_its_number_within_its_task(spark, tmp_path) -> None:
    with Daemon(tmp_path / "data", "topic.max_message_bytes=1024") as daemon:
        topics = Topics("http://{}:{}".format(*daemon.address))
        topic = topics.create("large-row")
        rows = spark.range(0, 10, 1, 1).selectExpr("if(id = 6, repeat('x', 2000), 'x') AS payload")
        assert f"row 7 that this task writes to topic {topic} has 2000 bytes" in refusal(
            rows, topics.options(topic, storeBatchSize=4)
        )
        rows = rows.selectExpr("'x' AS payload", "map('name', repeat('y', 3 * length(payload))) AS headers")
        assert f"the attributes of row 7 that this task writes to topic {topic} are 6004 bytes" in refusal(
            rows, topics.options(topic, storeBatchSize=4)
        )
        assert topics.counted(topic) == Counter()


def test_a_save_is_one_entry_of_a_chained_topic_which_is_verified(spark, topics) -> None:
    topic = topics.create("chained", chain="sha256")
    save(numbers(spark, 5_000), topics.options(topic, storeBatchSize=700))
    save(numbers(spark, 10), topics.options(topic))
    with Client(topics.url, namespace="demo") as client:
        found = client.admin.verify_chain(topic)
    assert (found.faults, found.messages, found.entries) == ((), 5_010, 3)


def test_saves_without_a_name_run_each_time_and_leave_no_producer(spark, topics) -> None:
    topic = topics.create("unnamed")
    for _ in range(2):
        save(numbers(spark, 20), topics.options(topic))
    assert topics.counted(topic) == wanted(20) + wanted(20)
    assert topics.ask("GET", f"/v1/namespaces/demo/topics/{topic}/producers")["producers"] == []


def test_an_empty_dataframe_publishes_nothing(spark, topics) -> None:
    topic = topics.create("empty")
    save(numbers(spark, 0), topics.options(topic))
    assert topics.counted(topic) == Counter()
    assert topics.ask("GET", "/v1/namespaces/demo/topics/empty/producers")["count"] == 0


def test_empty_partitions_take_no_part(spark, topics) -> None:
    topic = topics.create("hollow")
    save(numbers(spark, 100, 4).where("payload <= encode('2', 'utf-8')"), topics.options(topic))
    assert topics.counted(topic) == Counter(n for n in wanted(100) if n <= b"2")


def test_rows_go_to_the_topics_their_column_names(spark, topics) -> None:
    for name in ("even", "odd"):
        topics.create(name)
    frame = numbers(spark, 1_000).selectExpr(
        "payload", "if(cast(decode(payload, 'utf-8') as int) % 2 = 0, 'even', 'odd') as topic"
    )
    save(frame, topics.options())
    assert topics.counted("even") == Counter(b"%d" % n for n in range(0, 1_000, 2))
    assert topics.counted("odd") == Counter(b"%d" % n for n in range(1, 1_000, 2))


def test_keys_headers_and_times_to_live_are_preserved(spark, topics) -> None:
    topic = topics.create("attributes")
    frame = spark.sql(
        "select 'a' as payload, 'key' as routing_key, map('h', '1') as headers, 100 as ttl_seconds "
        "union all select 'b', null, null, null"
    )
    save(frame.coalesce(1), topics.options(topic, ttlSeconds=500))
    found = {frame.payload: dict(frame.attributes) for frame in topics.messages(topic)}
    assert found == {b"a": {"h": "1", "routingKey": "key"}, b"b": {}}
    told = topics.ask("GET", "/v1/namespaces/demo/topics/attributes/messages")
    lives_s = {each["payload"]: (each["expiresMs"] - each["publishTimeMs"]) / 1000 for each in told}
    assert 90 < lives_s["a"] <= 100
    assert 490 < lives_s["b"] <= 500


def test_kafka_headers_become_attributes_with_the_expression_in_the_error_or_are_refused(spark, topics) -> None:
    topic = topics.create("of-kafka")
    rows = "SELECT 'x' AS payload, array({}) AS headers"
    pair = "named_struct('key', '{}', 'value', {})"
    as_said = "map_from_entries(transform(headers, h -> struct(h.key, decode(h.value, 'UTF-8')))) AS headers"

    def converted(*pairs: tuple[str, str]):
        return spark.sql(rows.format(", ".join(pair.format(*each) for each in pairs))).selectExpr("payload", as_said)

    plain = spark.sql(rows.format(pair.format("a", "X'62'")))
    assert as_said.removesuffix(" AS headers") in refusal(plain, topics.options(topic))
    save(converted(("a", "X'62'"), ("c", "X'C3A4'")), topics.options(topic))
    assert [frame.attributes for frame in topics.messages(topic)] == [{"a": "b", "c": "ä"}]
    assert "DUPLICATED_MAP_KEY" in refusal(converted(("a", "X'62'"), ("a", "X'63'")), topics.options(topic))
    assert "MALFORMED_CHARACTER_CODING" in refusal(converted(("a", "X'FF'")), topics.options(topic))
    assert len(topics.payloads(topic)) == 1


def test_an_ordered_save_keeps_the_order_of_its_rows(spark, topics) -> None:
    topic = topics.create("ordered")
    frame = numbers(spark, 3_000).coalesce(1).sortWithinPartitions("payload", ascending=False)
    save(frame, topics.options(topic, ordered=True, storeBatchSize=100))
    assert topics.payloads(topic) == sorted(wanted(3_000), reverse=True)


def test_an_ordered_save_of_two_partitions_is_refused_as_a_whole(spark, topics) -> None:
    topic = topics.create("disordered")
    said = refusal(numbers(spark, 100), topics.options(topic, ordered=True))
    assert "2 partitions have rows for topic disordered: coalesce(1)" in said
    assert topics.counted(topic) == Counter()


@pytest.mark.parametrize("decision", ["commit", "abort"])
def test_the_rows_share_the_outcome_of_an_outer_transaction(spark, topics, decision) -> None:
    topic = topics.create(f"outer-{decision}")
    transaction = topics.ask("POST", "/v1/transactions", {})
    save(numbers(spark, 500), topics.options(topic, transactionWritePointer=transaction["writePointer"]))
    assert topics.payloads(topic, "committed") == []
    if decision == "commit":
        topics.ask("POST", f"/v1/transactions/{transaction['id']}/commit", {})
    else:
        topics.ask("POST", f"/v1/transactions/{transaction['id']}/abort", {})
    assert Counter(topics.payloads(topic, "committed")) == (wanted(500) if decision == "commit" else Counter())


def test_topics_are_only_ever_appended_to(spark, topics) -> None:
    topic = topics.create("append-only")
    assert "a topic can only be appended to" in refusal(numbers(spark, 1), topics.options(topic), "overwrite")
    assert '"Append"' in refusal(numbers(spark, 1), topics.options(topic), "error")


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("'x' as value", "column value cannot be written: a message has payload, topic"),
        ("1 as payload", "column payload is INT; it must be BINARY or STRING"),
        ("cast(null as binary) as payload", "payload is null"),
    ],
)
def test_wrong_columns_are_refused_with_the_reason(spark, topics, expression, words) -> None:
    topic = topics.create("columns-" + expression.rpartition(" ")[2] + str(len(expression)))
    assert words in refusal(spark.range(1).selectExpr(expression), topics.options(topic))
    assert topics.counted(topic) == Counter()


def test_a_missing_topic_is_named_before_anything_runs(spark, topics) -> None:
    ran = spark.sparkContext.accumulator(0)
    frame = numbers(spark, 10).rdd.map(lambda row: ran.add(1) or row).toDF("payload binary")
    assert "topic_not_found" in refusal(frame, topics.options("nowhere"))
    assert ran.value == 0


def test_the_topic_may_be_given_only_once(spark, topics) -> None:
    topic = topics.create("once")
    assert "found neither" in refusal(numbers(spark, 1), topics.options())
    assert "found both" in refusal(numbers(spark, 1).selectExpr("*", "'once' as topic"), topics.options(topic))


def test_without_deduplication_only_a_save_without_a_name_is_accepted(spark, topics) -> None:
    topic = topics.create("forgetful", deduplication="disabled")
    save(numbers(spark, 100), topics.options(topic))
    assert topics.counted(topic) == wanted(100)
    said = refusal(numbers(spark, 100), topics.options(topic, producerName="job", sequenceId=0))
    assert "a second run would publish every row again" in said
    assert topics.counted(topic) == wanted(100)


def test_a_named_save_is_remembered_for_the_requested_time(spark, topics) -> None:
    topic = topics.create("memory")
    save(numbers(spark, 10), topics.options(topic, producerName="yearly", sequenceId=0, memoryDays=30))
    found = topics.ask("GET", "/v1/namespaces/demo/topics/memory/producers/yearly")
    assert found["expiresMs"] - found["activeMs"] == 30 * 86_400_000
    assert found["lastSequenceId"] == 0
    assert abs(found["activeMs"] / 1000 - time.time()) < 60


def test_a_save_from_another_thread_finds_the_source_once_the_session_is_active_in_that_thread(spark, topics) -> None:
    topic = topics.create("threads")

    def job() -> None:
        spark.createDataFrame([], "payload STRING")  # makes the session active, as docs/spark.md says
        save(numbers(spark, 20), topics.options(topic))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(job).result()
    assert topics.counted(topic) == wanted(20)


def test_a_stream_from_another_thread_finds_the_source_too(spark, topics, tmp_path) -> None:
    source, topic = topics.create("thread-source"), topics.create("thread-stream")
    save(numbers(spark, 20), topics.options(source))

    def job() -> None:
        spark.createDataFrame([], "payload STRING")
        rows = spark.readStream.format("plainsong").options(**topics.options(subscribe=source)).load()
        writer = rows.select("payload").writeStream.format("plainsong").options(**topics.options(topic))
        writer = writer.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True)
        assert writer.start().awaitTermination(SPARK_PATIENCE_S)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(job).result()
    assert topics.counted(topic) == wanted(20)
