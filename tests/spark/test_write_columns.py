"""Columns that a DataFrame needs in order to be written, and the division of its batches into chunks of messages."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DoubleType,
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from pyspark_plainsong.columns import MAX_CHUNK_BYTES, WriteColumns
from pyspark_plainsong.publishing import MixedGenerations, Stored, TaskStored, winners

HEADERS = MapType(StringType(), StringType())
OF_KAFKA = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))


def schema(**columns: object) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])  # type: ignore[arg-type]


def batch(**columns: object) -> pa.RecordBatch:
    return pa.record_batch(list(columns.values()), names=list(columns))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, r"no column payload \(BINARY or STRING\) among none"),
        ({"topic": StringType()}, "no column payload"),
        ({"payload": IntegerType()}, "payload is INT; it must be BINARY or STRING"),
        ({"payload": BinaryType(), "ttl_seconds": DoubleType()}, "ttl_seconds is DOUBLE; it must be INT"),
        ({"payload": BinaryType(), "routing_key": BinaryType()}, "routing_key is BINARY; it must be STRING"),
        ({"payload": BinaryType(), "headers": MapType(StringType(), BinaryType())}, "headers is MAP<STRING,BINARY>"),
        ({"payload": BinaryType(), "headers": OF_KAFKA}, r"STRUCT<KEY:STRING,VALUE:BINARY>>; .* converts Kafka's"),
        ({"payload": BinaryType(), "message_id": BinaryType()}, "message_id cannot be written: a message has payload"),
        ({"payload": BinaryType(), "PAYLOAD": BinaryType()}, "PAYLOAD occurs twice"),
    ],
)
def test_columns_that_cannot_be_written_are_named(given: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        WriteColumns.of(schema(**given))


def test_columns_are_found_in_any_order_and_case() -> None:
    columns = WriteColumns.of(schema(Headers=HEADERS, ttl_seconds=IntegerType(), Payload=StringType()))
    assert (columns.headers, columns.ttl_seconds, columns.payload, columns.payload_is_text) == (0, 1, 2, True)


def test_chunks_are_bounded_in_rows_and_keep_the_order() -> None:
    columns = WriteColumns.of(schema(payload=BinaryType()))
    payloads = [b"%d" % number for number in range(10)]
    chunks = list(columns.chunks(batch(payload=payloads), "t", 4))
    assert [list(chunk.payloads) for chunk in chunks] == [payloads[:4], payloads[4:8], payloads[8:]]
    assert all(chunk.topic == "t" and chunk.ttls_s is None and chunk.attributes is None for chunk in chunks)


def test_large_payloads_make_small_chunks_and_one_beyond_the_bound_its_own() -> None:
    columns = WriteColumns.of(schema(payload=BinaryType()))
    large = b"x" * (MAX_CHUNK_BYTES // 2)
    payloads = [large, large, b"a", large + large + b"!", b"b"]
    chunks = list(columns.chunks(batch(payload=payloads), "t", 1000))
    assert [list(map(len, chunk.payloads)) for chunk in chunks] == [
        [len(large)] * 2,
        [1],
        [2 * len(large) + 1],
        [1],
    ]


def test_large_headers_make_small_chunks_too() -> None:
    columns = WriteColumns.of(schema(payload=BinaryType(), headers=MapType(StringType(), StringType())))
    headers = [[("h", "x" * (MAX_CHUNK_BYTES // 2 - 2))]] * 5
    rows = pa.record_batch(
        [pa.array([b"a"] * 5), pa.array(headers, pa.map_(pa.string(), pa.string()))], names=["payload", "headers"]
    )
    assert [len(chunk.payloads) for chunk in columns.chunks(rows, "t", 1000)] == [2, 2, 1]


def test_rows_go_to_the_topics_they_name_each_in_order() -> None:
    columns = WriteColumns.of(schema(payload=StringType(), topic=StringType(), ttl_seconds=IntegerType()))
    rows = batch(payload=["1", "2", "3"], topic=["a", "b", "a"], ttl_seconds=[7, None, None])
    chunks = list(columns.chunks(rows, None, 1000))
    assert [(chunk.topic, list(chunk.payloads), chunk.ttls_s) for chunk in chunks] == [
        ("a", [b"1", b"3"], [7, None]),
        ("b", [b"2"], [None]),
    ]


def test_routing_keys_and_headers_become_attributes() -> None:
    columns = WriteColumns.of(schema(payload=BinaryType(), routing_key=StringType(), headers=HEADERS))
    headers = pa.array([[("h", "1")], None, []], type=pa.map_(pa.string(), pa.string()))
    rows = batch(payload=[b"1", b"2", b"3"], routing_key=["k", None, ""], headers=headers)
    (chunk,) = columns.chunks(rows, "t", 1000)
    assert chunk.attributes == [{"h": "1", "routingKey": "k"}, {}, {"routingKey": ""}]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"payload": [b"", None]}, "payload is null"),
        ({"payload": [b"", b""], "topic": ["t", None]}, "topic is null"),
        ({"payload": [b"", b""], "headers": [None, [("h", None)]]}, "header h is null"),
        ({"payload": [b"", b""], "headers": [None, [("routingKey", "k")]]}, "a column of its own, routing_key"),
    ],
)
def test_values_that_no_message_can_have_are_refused_by_column(columns: dict[str, list[object]], words: str) -> None:
    kinds = {"payload": BinaryType(), "topic": StringType(), "headers": HEADERS}
    arrow = {"payload": pa.binary(), "topic": pa.string(), "headers": pa.map_(pa.string(), pa.string())}
    rows = batch(**{name: pa.array(values, type=arrow[name]) for name, values in columns.items()})
    found = WriteColumns.of(schema(**{name: kinds[name] for name in columns}))
    with pytest.raises(ValueError, match=words):
        list(found.chunks(rows, None if "topic" in columns else "t", 1000))


def test_winners_are_listed_in_the_order_of_their_partitions() -> None:
    tasks = [
        TaskStored(1, "second", {"t": Stored(3, 1)}),
        TaskStored(0, "first", {"t": Stored(2, 1), "other": Stored(1, 4)}),
        TaskStored(2, "empty", {}),
    ]
    other, topic = winners(tasks)
    assert (topic.segments, topic.rows, topic.generation) == (("first", "second"), 5, 1)
    assert (other.topic, other.segments, other.generation) == ("other", ("first",), 4)


def test_rows_of_two_generations_of_a_topic_are_not_published_together() -> None:
    with pytest.raises(MixedGenerations, match="created again"):
        winners([TaskStored(0, "a", {"t": Stored(1, 1)}), TaskStored(1, "b", {"t": Stored(1, 2)})])


def test_a_payload_is_any_bytes_and_any_other_string_that_is_not_utf_8_is_refused_by_its_column():
    broken = pa.array([b"\xff\xfe"]).cast(pa.binary()).view(pa.string())
    columns = WriteColumns.of(schema(payload=StringType(), routing_key=StringType()))
    (chunk,) = columns.chunks(batch(payload=broken, routing_key=pa.array(["k"])), "orders", 10)
    assert chunk.payloads == [b"\xff\xfe"]
    with pytest.raises(ValueError, match="column routing_key has a value that is not UTF-8"):
        list(columns.chunks(batch(payload=pa.array(["x"]), routing_key=broken), "orders", 10))
