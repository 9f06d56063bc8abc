"""Frames made into Arrow batches: the same messages as the plain decoder finds, whatever their lengths."""

from __future__ import annotations

import struct
from datetime import UTC, datetime, timedelta

import msgpack
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from plainsong.protocol.frames import BrokenFrames, decode_frames
from plainsong.protocol.ids import pack_id
from pyspark_plainsong.columns import read_schema
from pyspark_plainsong.range_reader import FrameBatches

ALL = read_schema(include_transaction=True)
#: Ids with times that Spark can hold in microseconds.
IDS = st.builds(pack_id, st.integers(0, 2**52), st.integers(0, 65535), st.integers(0, 2**52), st.integers(0, 65535))
ATTRIBUTES = st.dictionaries(st.sampled_from(["routingKey", "a", "ü", "k" * 40]), st.text(max_size=40), max_size=3)
MESSAGES = st.lists(
    st.tuples(IDS, st.binary(max_size=40), st.integers(-(2**62), 2**62), ATTRIBUTES), max_size=30
) | st.lists(st.tuples(IDS, st.binary(min_size=5, max_size=5), st.just(0), st.just({})), max_size=60)


def frames(messages, *, pointers=True, attributes=True) -> bytes:
    out = []
    for message_id, payload, pointer, named in messages:
        out.append(message_id + (struct.pack(">q", pointer) if pointers else b"") + struct.pack(">I", len(payload)))
        out.append(payload)
        packed = msgpack.packb(named)
        out.append(struct.pack(">I", len(packed)) + packed if attributes else b"")
    return b"".join(out) + b"\xff" * 20 + struct.pack(">I", len(messages))


def some(*names: str) -> StructType:
    return StructType([ALL[name] for name in names])


def moment(milliseconds: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=milliseconds)


def row(message_id: bytes, payload: bytes, pointer: int, named: dict[str, str]) -> dict[str, object]:
    ts, seq, wts, pseq = struct.unpack(">qHqH", message_id)
    headers = [(name, value) for name, value in named.items() if name != "routingKey"]
    return {
        "namespace": "demo", "topic": "orders", "message_id": message_id, "publish_timestamp": ts * 1000, "seq_id": seq,
        "write_timestamp": wts * 1000 or None, "payload_seq_id": pseq if wts or pseq else None, "payload": payload,
        "routing_key": named.get("routingKey"), "headers": headers or None, "transaction_write_pointer": pointer or None,
    }  # fmt: skip


def rows(batch: pa.RecordBatch) -> list[dict[str, object]]:
    """Return the rows unchanged, but with times as numbers: Python's have a smaller range than Spark's."""
    names = batch.schema.names
    columns = [column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names).to_pylist()


@given(MESSAGES)
def test_every_column_matches_the_message(messages):
    batch = FrameBatches(ALL, "demo", "orders").batch(frames(messages))
    assert rows(batch) == [row(*message) for message in messages]
    batch.validate(full=True)


@given(MESSAGES)
def test_without_pointers_and_attributes_the_plain_decoder_agrees(messages):
    body = frames(messages, pointers=False, attributes=False)
    batch = FrameBatches(some("payload", "message_id"), "demo", "orders").batch(body)
    found = [(each["message_id"], each["payload"]) for each in batch.to_pylist()]
    assert found == [(frame.message_id, frame.payload) for frame in decode_frames(body)]


@given(st.permutations(ALL.names), st.integers(1, len(ALL.names)))
def test_the_schema_is_that_of_spark_for_any_columns_in_any_order(names, count):
    schema = some(*names[:count])
    maker = FrameBatches(schema, "demo", "orders")
    message = (pack_id(1_700_000_000_000, 1), b"x", 7, {"a": "b"})
    batch = maker.batch(frames([message], pointers=maker.pointers, attributes=maker.attributes))
    assert batch.schema.equals(to_arrow_schema(schema, timezone="UTC"))
    assert rows(batch) == [{name: row(*message)[name] for name in names[:count]}]


@given(MESSAGES.filter(bool), st.data())
def test_a_truncated_body_is_an_error_and_never_a_shorter_page(messages, data):
    body = frames(messages)
    cut = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(BrokenFrames):
        FrameBatches(ALL, "demo", "orders").batch(body[:cut])
    with pytest.raises(BrokenFrames):  # a piece is missing, but the end is present
        FrameBatches(ALL, "demo", "orders").batch(body[: min(cut, len(body) - 25)] + body[-24:])


@given(st.binary(max_size=200))
def test_bytes_that_are_not_frames_are_refused(body):
    end = b"\xff" * 20 + struct.pack(">I", 1)
    with pytest.raises(BrokenFrames):
        FrameBatches(ALL, "demo", "orders").batch(body[:20] + end)


def test_times_are_utc_to_the_millisecond():
    body = frames([(pack_id(1_700_000_000_123, 0), b"", 0, {})], pointers=False, attributes=False)
    batch = FrameBatches(some("publish_timestamp"), "demo", "orders").batch(body)
    assert batch.to_pylist()[0]["publish_timestamp"] == moment(1_700_000_000_123)
