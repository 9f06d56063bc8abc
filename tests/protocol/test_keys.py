"""Row keys: byte order is message order, and topics never mix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plainsong.protocol.ids import pack_position
from plainsong.protocol.keys import (
    HIGH_WATER,
    READER,
    SYSTEM,
    DamagedRow,
    generation_prefix,
    generations_range,
    metadata_key,
    namespace_key,
    namespace_of,
    namespace_range,
    parse_message_key,
    parse_payload_key,
    parse_pointer_key,
    parse_system_key,
    pointer_key,
    stop_after,
    system_key,
    topic_of,
    topic_prefix,
    topic_range,
)
from plainsong.protocol.names import TopicName

NAME = TopicName("default", "t1")
namespaces = st.from_regex(r"[a-zA-Z0-9_]{1,6}", fullmatch=True)
names = st.builds(TopicName, namespaces, st.from_regex(r"[a-zA-Z0-9_-]{1,6}", fullmatch=True))
generations = st.integers(1, (1 << 31) - 1)
positions = st.tuples(st.integers(0, (1 << 63) - 1), st.integers(0, 0xFFFF))


def message_key(name, generation, position):
    return generation_prefix(name, generation) + pack_position(*position)


def test_keys_have_the_bytes_of_the_documentation():
    assert metadata_key(NAME).hex() == "64656661756c743a74313a"
    key = message_key(NAME, 1, (1_700_000_000_000, 0xFFFF))
    assert key.hex() == "64656661756c743a74313a000000010000018bcfe56800ffff"
    payload = bytes.fromhex("64656661756c743a74313a0000000100000000000000070000018bcfe568000003")
    assert parse_payload_key(payload) == (NAME, 1, 7, 1_700_000_000_000, 3)
    assert system_key(HIGH_WATER, NAME, 1).hex() == "006864656661756c743a74313a00000001"
    assert system_key(READER, NAME, 1, b"me").hex() == "007264656661756c743a74313a000000016d65"


@given(names, generations, positions)
def test_a_message_key_round_trips(name, generation, position):
    assert parse_message_key(message_key(name, generation, position)) == (name, generation, *position)


@given(names, generations, st.binary(max_size=8))
def test_a_system_key_round_trips(name, generation, rest):
    assert parse_system_key(system_key(READER, name, generation, rest)) == (READER, name, generation, rest)


@given(names, st.tuples(generations, positions), st.tuples(generations, positions))
def test_byte_order_is_the_order_of_generations_and_positions(name, one, other):
    assert (message_key(name, *one) < message_key(name, *other)) == (one < other)


@given(names, names, generations, generations, positions)
def test_rows_of_different_topics_never_mix(one, other, generation, last, position):
    start, stop = generations_range(one, 1, last)
    inside = start <= message_key(other, generation, position) < stop
    assert inside == (one == other and generation <= last)


@given(names, generations, generations, positions)
def test_a_generation_range_includes_both_its_ends(name, first, generation, position):
    start, stop = generations_range(name, first, max(first, generation))
    assert start <= message_key(name, max(first, generation), position) < stop
    assert start <= message_key(name, first, (0, 0)) < stop


@given(names, generations, positions)
def test_the_prefix_of_a_topic_begins_its_keys_and_is_empty_for_other_keys(name, generation, position):
    assert topic_prefix(message_key(name, generation, position)) == metadata_key(name)
    assert topic_prefix(system_key(READER, name, generation)) == b""


@given(names, namespaces)
def test_a_namespace_range_holds_its_own_topics_only(name, namespace):
    start, stop = namespace_range(namespace)
    assert (start <= metadata_key(name) < stop) == (name.namespace == namespace)


@given(names, generations)
def test_system_rows_are_not_topics(name, generation):
    start, stop = topic_range()
    assert start <= metadata_key(name) < stop
    assert not start <= system_key(HIGH_WATER, name, generation) < stop


@given(names, generations, st.binary(max_size=8))
def test_readers_of_neighbouring_generations_are_one_range(name, generation, rest):
    key = system_key(READER, name, generation, rest)
    assert system_key(READER, name, 1) <= key < stop_after(system_key(READER, name, generation))


@given(st.binary(min_size=1, max_size=6).filter(lambda prefix: prefix.strip(b"\xff")), st.binary(max_size=4))
def test_no_key_with_a_prefix_sorts_after_its_stop(prefix, rest):
    assert prefix <= prefix + rest < stop_after(prefix)


@given(st.binary(max_size=60))
def test_bytes_that_are_not_a_key_raise_damaged_row_and_nothing_else(raw):
    for parse in (topic_of, parse_message_key, parse_payload_key, parse_system_key):
        try:
            parse(raw)
        except DamagedRow as error:
            assert raw.hex() in error.detail or raw[2:].hex() in error.detail


@pytest.mark.parametrize(
    "key", [b"", b"default", b"default:t1", b":t1:", b"default::", b"::", b"d\xff:t1:", b"default:\xff:"]
)
def test_a_key_without_a_namespace_and_a_topic_and_their_colons_names_no_topic(key):
    with pytest.raises(DamagedRow):
        topic_of(key)
    with pytest.raises(DamagedRow):
        parse_system_key(SYSTEM + READER + key + bytes(4))


def test_a_key_without_the_first_byte_of_system_rows_or_a_generation_is_not_a_system_key():
    key = system_key(READER, NAME, 1)
    for wrong in (b"\x01" + key[1:], key[1:], key[:1], b"", key[:-1]):
        with pytest.raises(DamagedRow):
            parse_system_key(wrong)


@given(names, generations, st.integers(1, (1 << 63) - 1))
def test_the_key_of_a_pointer_round_trips_and_no_other_key_parses_as_one(name, generation, pointer):
    key = pointer_key(name, generation, pointer)
    assert parse_pointer_key(key) == (name, generation, pointer)
    for wrong in (key[:-1], key + b"\0", system_key(READER, name, generation, key[-8:])):
        with pytest.raises(DamagedRow):
            parse_pointer_key(wrong)


@given(namespaces)
def test_the_key_of_a_namespace_round_trips_and_no_other_key_parses_as_one(namespace):
    key = namespace_key(namespace)
    assert namespace_of(key) == namespace
    for wrong in (key[1:], key[:-1], key[:2] + b":", key[:2] + b"\xff:", SYSTEM + READER + key[2:], b"\x01" + key[1:]):
        with pytest.raises(DamagedRow):
            namespace_of(wrong)


@given(st.binary(max_size=40))
def test_a_key_with_a_wrong_tail_raises_damaged_row(tail):
    key = metadata_key(NAME) + tail
    for parse, length in ((parse_message_key, 14), (parse_payload_key, 22)):
        if len(tail) != length:
            with pytest.raises(DamagedRow):
                parse(key)
