"""``spark.read.format("plainsong")``: found by its name, with Spark's own types, sessions, tasks and SQL around it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as sf
from pyspark.sql.datasource import DataSourceReader
from tables import Tables
from topics import NAMESPACE

from pyspark_plainsong.columns import COLUMNS
from pyspark_plainsong.readers import BatchReader, StreamReader
from tests.client.proxy import Proxy
from tests.daemon.harness import Daemon


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("daemon") / "data") as daemon:
        yield Tables("http://{}:{}".format(*daemon.address))


def load(spark, tables, topic, schema=None, **given):
    reader = spark.read if schema is None else spark.read.schema(schema)
    return reader.format("plainsong").options(**tables.options(subscribe=topic, **given)).load()


def refusal(action) -> str:
    with pytest.raises(PySparkException) as caught:
        action()
    return str(caught.value)


def test_the_source_is_found_by_its_name_and_has_all_columns(spark, tables):
    topic = tables.create("spark-all")
    attributes = {"routingKey": "k", "a": "b"}
    tables.ask("POST", f"/v1/namespaces/{NAMESPACE}/topics/{topic}/publish", {
        "messages": [{"payload": "x", "attributes": attributes}, "y"],
    })  # fmt: skip
    frame = load(spark, tables, topic)
    assert {field.name: field.dataType for field in frame.schema.fields} == COLUMNS
    first, second = frame.orderBy("message_id").collect()
    shown = tables.ask("GET", f"/v1/namespaces/{NAMESPACE}/topics/{topic}/messages")
    assert [bytes(row.message_id).hex() for row in (first, second)] == [each["id"] for each in shown]
    assert (first.namespace, first.topic, bytes(first.payload)) == (NAMESPACE, topic, b"x")
    assert (first.routing_key, first.headers) == ("k", {"a": "b"})
    assert (second.routing_key, second.headers, second.write_timestamp) == (None, None, None)


@pytest.mark.parametrize(
    "schema",
    [
        "message_id binary",
        "payload binary, message_id binary",
        "headers map<string,string>, seq_id int, publish_timestamp timestamp, topic string",
        "transaction_write_pointer bigint, payload_seq_id int, write_timestamp timestamp, routing_key string",
    ],
)
def test_any_columns_in_any_order_are_a_projection(spark, tables, schema):
    if not tables.ask("GET", f"/v1/namespaces/{NAMESPACE}/topics").count("spark-some"):
        tables.publish(tables.create("spark-some"), "x", "y")
    frame = load(spark, tables, "spark-some", schema)
    whole = load(spark, tables, "spark-some", includeTransaction="true").select(*frame.columns)
    assert frame.collect() == whole.collect()
    assert len(frame.collect()) == 2


def test_times_are_the_same_in_every_session(spark, tables):
    topic = tables.create("spark-zones")
    tables.publish(topic, "x")
    published_ms = tables.ask("GET", f"/v1/namespaces/{NAMESPACE}/topics/{topic}/messages")[0]["publishTimeMs"]
    before = spark.conf.get("spark.sql.session.timeZone")
    try:
        for zone in ("UTC", "America/Los_Angeles", "Asia/Kolkata"):
            spark.conf.set("spark.sql.session.timeZone", zone)
            frame = load(spark, tables, topic)
            assert frame.select(sf.unix_millis("publish_timestamp")).collect()[0][0] == published_ms, zone
            assert load(spark, tables, topic, startingTimestamp=published_ms).count() == 1
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)


@pytest.mark.usefixtures("adaptive")
def test_partitions_are_read_in_parallel_and_order_by_id_is_that_of_the_topic(spark, tables):
    topic = tables.create("spark-parts")
    written = tables.publish_many(topic, 3000)
    frame = load(spark, tables, topic, minPartitions=4)
    assert frame.rdd.getNumPartitions() >= 4
    assert [bytes(row.payload) for row in frame.orderBy("message_id").select("payload").collect()] == written
    inside = frame.select(sf.spark_partition_id().alias("part"), "message_id").collect()
    for part in {row.part for row in inside}:
        ids = [bytes(row.message_id) for row in inside if row.part == part]
        assert ids == sorted(ids)


def test_a_view_can_be_created_in_sql(spark, tables):
    topic = tables.create("spark-sql")
    tables.publish(topic, '{"n": 1}', '{"n": 2}')
    options = ", ".join(f"`{name}` '{value}'" for name, value in tables.options(subscribe=topic).items())
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW messages USING plainsong OPTIONS ({options})")
    query = "SELECT sum(get_json_object(decode(payload, 'UTF-8'), '$.n')) AS n FROM messages WHERE topic = 'spark-sql'"
    assert spark.sql(query).collect()[0].n == 3
    spark.catalog.dropTempView("messages")


def test_each_query_of_a_loaded_table_or_a_view_has_the_messages_published_by_then(spark, tables):
    topic = tables.create("spark-moves")
    tables.publish(topic, "a")
    options = ", ".join(f"`{name}` '{value}'" for name, value in tables.options(subscribe=topic).items())
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW moves USING plainsong OPTIONS ({options})")
    table = load(spark, tables, topic)
    assert (table.count(), spark.table("moves").count()) == (1, 1)
    tables.publish(topic, "b")
    assert (table.count(), spark.table("moves").count()) == (2, 2)
    assert table.join(spark.table("moves"), "message_id").count() == 2
    spark.catalog.dropTempView("moves")


def test_the_table_side_of_a_stream_join_has_the_messages_published_by_each_micro_batch(spark, tables, tmp_path):
    keys, events = tables.create("spark-keys"), tables.create("spark-events")
    table = load(spark, tables, keys).selectExpr("payload AS key")
    found = []

    def keep(rows, batch):
        found.append(sorted(bytes(row.key) for row in rows.collect()))

    def join():
        stream = spark.readStream.format("plainsong").options(**tables.options(subscribe=events)).load()
        joined = stream.selectExpr("payload AS key").join(table, "key").writeStream.foreachBatch(keep)
        started = joined.option("checkpointLocation", str(tmp_path / "join")).trigger(availableNow=True).start()
        started.awaitTermination()

    tables.publish(keys, "a")
    tables.publish(events, "a", "b")
    join()
    tables.publish(keys, "b")
    tables.publish(events, "a", "b")
    join()
    assert found == [[b"a"], [b"a", b"b"]]


def test_a_table_without_messages_is_empty(spark, tables):
    topic = tables.create("spark-empty")
    assert load(spark, tables, topic).count() == 0
    assert load(spark, tables, None, subscribePattern="nothing-.*").collect() == []


def test_errors_are_raised_in_the_query(spark, tables):
    topic = tables.create("spark-wrong")
    options = tables.options(subscribe=topic)
    assert "did you mean subscribe?" in refusal(lambda: load(spark, tables, topic, subscribed="x"))
    assert "did you mean subscribe?" in refusal(load(spark, tables, topic, "payload binary", subscribed="x").collect)
    assert "did you mean payload" in refusal(load(spark, tables, topic, "paiload binary").collect)
    assert "binary, not string" in refusal(load(spark, tables, topic, "payload string").collect)
    assert "topic demo:spark-nowhere does not exist" in refusal(load(spark, tables, "spark-nowhere").collect)
    del options["namespace"]
    # Without the option, the namespace is ``default``, as everywhere.
    found = refusal(spark.read.format("plainsong").options(**options).load().collect)
    assert f"topic default:{topic} does not exist" in found


def test_a_dead_daemon_is_named(spark, tmp_path):
    with Daemon(tmp_path / "data") as daemon:
        tables = Tables("http://{}:{}".format(*daemon.address))
    text = refusal(load(spark, tables, "any", numRetries=1).collect)
    assert f"no answer from {tables.url}" in text
    assert "check that the daemon runs, and the option url" in text


def test_a_truncated_body_is_read_again(spark, tables):
    topic = tables.create("spark-broken")
    written = tables.publish_many(topic, 2000)
    with Proxy(("127.0.0.1", int(tables.url.rpartition(":")[2]))) as proxy:
        proxy.after[b"/poll"] = "cut"
        behind = Tables(proxy.url)
        found = load(spark, behind, topic, "payload binary", fetchSize=500).collect()
        assert proxy.lost == 1
    assert [bytes(row.payload) for row in found] == written


def test_a_task_that_is_tried_again_reads_the_same_rows(spark, tables, tmp_path):
    topic = tables.create("spark-again")
    written = tables.publish_many(topic, 1000)
    once = str(tmp_path / "once")

    def fail_once(rows):
        for number, row in enumerate(rows):
            if number == 500 and not os.path.exists(once):
                Path(once).touch()
                raise RuntimeError("the first attempt ends here")
            yield bytes(row.payload)

    frame = load(spark, tables, topic, "payload binary", fetchSize=100)
    assert frame.rdd.mapPartitions(fail_once).collect() == written
    assert os.path.exists(once)


def test_expiry_and_recreation_stop_a_query_with_their_own_errors(spark, tables):
    topic = tables.create("spark-lost")
    tables.publish(topic, "x")
    offsets = json.dumps({"v": 1, "topics": {f"{NAMESPACE}:{topic}": {"gen": 7, "next": "0" * 40}}})
    text = refusal(load(spark, tables, topic, startingOffsets=offsets).collect)
    assert "created again (generation 7 before, 1 now)" in text
    assert load(spark, tables, topic, startingOffsets=offsets, failOnDataLoss="false").count() == 1


def test_no_reader_takes_filters():
    """Spark 4.3 returns wrong results if a reader accepts filters: see docs/spark.md."""
    assert BatchReader.pushFilters is DataSourceReader.pushFilters
    assert not hasattr(StreamReader, "pushFilters")
