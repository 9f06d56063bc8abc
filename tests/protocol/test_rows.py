"""Values of the message and payload tables, and of the metadata table: round trips and hostile bytes."""

from __future__ import annotations

import contextlib

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plainsong.protocol.keys import DamagedRow
from plainsong.protocol.page import Page, cut_rows, item, items_in, length_prefix, read_varint, varint
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.records import HighWater, Metadata, Reader
from plainsong.protocol.rows import (
    PLAIN_GAP,
    MessageRow,
    Stored,
    decode_row,
    encode_row,
    is_intact,
    own_ttl_s,
    plain_head,
)

payloads = st.binary(max_size=200)
ttls_s = st.integers(1, (1 << 31) - 1)
pointers = st.integers(-(1 << 63), (1 << 63) - 1)
extras = st.dictionaries(
    st.text(max_size=4), st.integers(0, 1 << 40) | st.binary(max_size=9) | st.text(max_size=4), max_size=3
)
rows = st.builds(MessageRow, st.none() | payloads, st.none() | pointers, st.none() | ttls_s, extras)
times = st.integers(0, (1 << 63) - 1)
properties = st.builds(
    TopicProperties,
    ttls_s,
    st.sampled_from(["optional", "required", "disabled"]),
    st.sampled_from(["inherit", "enabled", "disabled"]),
    st.none() | st.integers(1, (1 << 63) - 1),
)
metadatas = st.builds(
    Metadata, st.integers(1, (1 << 31) - 1), properties, times, times, st.none() | times, st.booleans(), times
)
buckets = st.lists(st.lists(times, min_size=5, max_size=5), max_size=4)
marks = st.builds(HighWater, times, times, st.integers(-1, 0xFFFF), buckets, closed_ms=times)
readers = st.builds(Reader, st.binary(min_size=20, max_size=20), times)
#: Anything that msgpack may contain under our keys, mostly of the wrong type.
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)


def test_a_plain_publish_costs_two_bytes_more_than_its_message():
    assert plain_head(2) == b"\x00\x04"
    assert encode_row(MessageRow(b"m0")) == b"\x00\x04m0"
    assert encode_row(MessageRow(b"m0", ttl_s=60)).hex() == "020000003c046d30"


@pytest.mark.parametrize("payload", [b"", b"m0", bytes(63), bytes(64), bytes(9000)])
def test_a_plain_row_is_intact_only_in_its_whole_length(payload):
    value = encode_row(MessageRow(payload))
    assert is_intact(value)
    assert not is_intact(value + b"\0")
    assert not any(is_intact(value[:end]) for end in range(min(len(value), 80)))
    assert not is_intact(value[:-1])


@given(rows)
def test_a_row_is_intact_when_it_can_be_decoded(row):
    value = encode_row(row)
    assert is_intact(value)
    assert not is_intact(value + b"\0")
    assert not is_intact(value[:-1])


def reference(**changed):
    fields = {"n": 2, "b": 8, "f": bytes(10), "l": bytes(9) + b"\1", **changed}
    return {key: value for key, value in fields.items() if value is not None}


@pytest.mark.parametrize("staged", [-1, -(1 << 63)])
def test_a_reference_to_staged_messages_names_a_pointer_below_0(staged):
    found = Stored.of(MessageRow(None, extras=reference(w=staged)))
    assert (found.messages, found.payload_bytes, found.staged) == (2, 8, staged)
    assert (found.first, found.last, found.segments) == (bytes(10), bytes(9) + b"\1", None)
    assert found.pointer_of_payloads(MessageRow(None, extras=reference(w=staged))) == staged
    assert found.extras() == reference(w=staged)


@pytest.mark.parametrize("staged", [None, 0, 1, -(1 << 63) - 1, True, "-1", -1.0])
def test_a_reference_without_a_pointer_of_its_own_or_of_its_row_is_damaged(staged):
    with pytest.raises(DamagedRow):
        Stored.of(MessageRow(None, extras=reference(w=staged)))


@pytest.mark.parametrize("pointer", [7, -7])
def test_a_reference_under_a_write_pointer_is_to_messages_stored_under_it_even_when_rolled_back(pointer):
    row = MessageRow(None, pointer, extras=reference(g=[3, 1]))
    found = Stored.of(row)
    assert found.pointer_of_payloads(row) == 7
    assert found.segments == {1, 3}
    assert found.extras() == reference(g=[1, 3])
    with pytest.raises(DamagedRow):
        Stored.of(MessageRow(None, pointer, extras=reference(w=-1)))
    with pytest.raises(DamagedRow):
        Stored.of(MessageRow(None, 0, extras=reference()))


@pytest.mark.parametrize(
    "changed", [{"n": -1}, {"b": None}, {"f": bytes(9)}, {"l": "0123456789"}, {"g": [-1]}, {"g": 3}, {"n": "2"}]
)
def test_a_reference_with_an_invalid_part_is_damaged(changed):
    with pytest.raises(DamagedRow):
        Stored.of(MessageRow(None, 7, extras=reference(**changed)))


@pytest.mark.parametrize("count", [0, 1, 49, 50, 51, 99, 100, 101, 149])
def test_rows_of_one_length_are_cut_the_same_way_whatever_their_number(count):
    wanted = [bytes([number, 255 - number]) for number in range(count)]
    data = b"".join(b"__%b_" % each for each in wanted)
    assert cut_rows(data, "2x2s1x") == wanted
    assert cut_rows(memoryview(data), "2x2s1x") == wanted


@given(payloads)
def test_a_plain_value_is_the_end_of_its_wire_form(payload):
    position = bytes(range(10))
    assert b"\x28" + position + PLAIN_GAP + plain_head(len(payload)) + payload == item(position + bytes(10), payload)


@given(rows)
def test_a_row_round_trips(row):
    assert decode_row(encode_row(row)) == row
    assert own_ttl_s(encode_row(row)) == row.ttl_s


@given(rows, st.data())
def test_a_row_cut_short_or_followed_by_more_is_damaged(row, data):
    value = encode_row(row)
    cut = data.draw(st.integers(0, len(value) - 1))
    with pytest.raises(DamagedRow):
        decode_row(value[:cut])
    with pytest.raises(DamagedRow):
        decode_row(value + b"\x00")


@given(st.binary(max_size=40))
@example(b"")
@example(b"\x02")
@example(b"\x03\x00")
@example(b"\x04\xff\xff\xff\xff")
@example(b"\x00" + b"\xff" * 2000)
@example(b"\x80\x00")
def test_hostile_values_raise_damaged_row_and_nothing_else(value):
    own_ttl_s(value)
    try:
        row = decode_row(value)
    except DamagedRow:
        return
    assert encode_row(row)[:1] == value[:1]


@given(rows, st.integers(0, 300), st.integers(0, 255))
def test_a_changed_byte_raises_damaged_row_or_gives_another_row(row, at, byte):
    value = bytearray(encode_row(row))
    value[at % len(value)] = byte
    own_ttl_s(bytes(value))
    with contextlib.suppress(DamagedRow):
        decode_row(bytes(value))


def test_a_value_of_a_later_format_has_no_known_time_to_live():
    assert own_ttl_s(b"\x12\x00\x00\x00\x01") is None


@given(metadatas | marks | readers)
def test_a_record_round_trips(record):
    assert type(record).decode(record.encode()) == record


@pytest.mark.parametrize("record", [Metadata, HighWater, Reader])
@given(value=st.binary(max_size=60))
@example(value=b"")
@example(value=b"\x02\x80")
@example(value=b"\x01\x90")
@example(value=b"\x01\xc1")
@example(value=b"\x01" + b"\x91" * 5000)
def test_hostile_records_raise_damaged_row_and_nothing_else(record, value):
    for bytes_ in (value, b"\x01" + value):
        with contextlib.suppress(DamagedRow):
            record.decode(bytes_)


@pytest.mark.parametrize("record", [Metadata, HighWater, Reader])
@given(fields=st.dictionaries(st.sampled_from("gpcudkftsb"), anything))
@example(fields={"t": "soon", "s": [1, 2], "b": []})
@example(fields={"t": 1, "s": [1, "2"], "b": []})
@example(fields={"t": 1, "s": [1, 2], "b": [[1, 2, 3]]})
@example(fields={"t": 1, "s": [1, 70000], "b": []})
@example(fields={"p": None, "c": None})
@example(fields={"p": b"short", "c": 1})
@example(fields={"g": True, "p": {}, "c": 1, "u": 1})
@example(fields={"g": 1.5, "p": {}, "c": 1, "u": 1})
@example(fields={"g": 1, "p": {}, "c": "x", "u": 1})
@example(fields={"g": 1, "p": {}, "c": 1, "u": 1, "f": "x"})
@example(fields={"g": 0, "p": {}, "c": 1, "u": 1})
@example(fields={"g": 1 << 40, "p": {}, "c": 1, "u": 1})
def test_a_record_with_fields_of_wrong_types_is_damaged(record, fields):
    try:
        decoded = record.decode(b"\x01" + msgpack.packb(fields))
    except DamagedRow:
        return
    assert type(decoded).decode(decoded.encode()) == decoded
    for name in decoded.__slots__:
        value = getattr(decoded, name)
        if name.endswith("_ms") and value is not None:
            assert type(value) is int
    if isinstance(decoded, Reader):
        assert len(decoded.position) == 20
    if isinstance(decoded, HighWater):
        assert -1 <= decoded.last_sequence_id <= 0xFFFF
        assert all([type(number) for number in bucket] == [int] * 5 for bucket in decoded.buckets)
    if isinstance(decoded, Metadata):
        assert 1 <= decoded.generation < 1 << 31


@given(st.integers(0, 1 << 62))
def test_a_length_round_trips_as_a_varint(number):
    assert read_varint(varint(number) + b"rest", 0) == (number, len(varint(number)))
    assert length_prefix(number) == varint(number)


@given(st.lists(st.tuples(st.binary(min_size=20, max_size=20), payloads), max_size=8))
def test_items_round_trip(messages):
    items = [item(*message) for message in messages]
    assert list(items_in(b"".join(items))) == messages
    assert list(Page(parts=items).messages()) == messages
