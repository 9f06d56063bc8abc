"""The codec that a ``Content-Type`` selects, and the errors for unsupported ones."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plainsong.protocol.codec import AVRO, AVRO_2, JSON, codec_for
from plainsong.protocol.codec.json_values import parse_query_position
from plainsong.protocol.errors import InvalidMessageId, InvalidParameter, UnsupportedMediaType


@pytest.mark.parametrize(
    ("content_type", "codec"),
    [
        ("avro/binary", AVRO),
        ("AVRO/Binary", AVRO),
        ("avro/binary; charset=utf-8", AVRO),
        ("avro/binary;version=1", AVRO),
        ("avro/binary; version=2", AVRO_2),
        ('avro/binary; charset=binary; VERSION="2"', AVRO_2),
        ("application/json", JSON),
        (" Application/JSON ; Charset=UTF-8", JSON),
        ('application/json;charset="utf-8"', JSON),
        ("application/json; profile=x;;", JSON),
    ],
)
def test_the_type_chooses_the_codec_whatever_its_case_and_parameters(content_type, codec):
    assert codec_for(content_type) is codec


def test_answers_have_exactly_the_type_the_genuine_client_compares_with():
    assert [codec.content_type for codec in (AVRO, AVRO_2, JSON)] == [
        "avro/binary",
        "avro/binary; version=2",
        "application/json",
    ]


def test_only_version_1_is_streamed():
    assert [codec.bounded for codec in (AVRO, AVRO_2, JSON)] == [False, True, True]


@pytest.mark.parametrize(
    ("content_type", "detail", "hint"),
    [
        (None, "there is no Content-Type", "add the header Content-Type: application/json"),
        ("", "there is no Content-Type", "add the header"),
        ("  ", "there is no Content-Type", "add the header"),
        ("application/x-www-form-urlencoded", "is not accepted", "add -H 'Content-Type: application/json'"),
        ("text/plain", "'text/plain' is not accepted", "add the header"),
        ("avro/binary; version=3", "avro/binary has no version '3'", "versions 1 (the default) and 2"),
        ("avro/binary; version=", "avro/binary has no version ''", "versions 1"),
        ("application/json; charset=iso-8859-1", "JSON in 'iso-8859-1'", "send JSON in UTF-8"),
        ("application/json, avro/binary", "is not accepted", "add the header"),
    ],
)
def test_any_other_type_is_refused_naming_both_and_the_header_to_add(content_type, detail, hint):
    with pytest.raises(UnsupportedMediaType) as caught:
        codec_for(content_type)
    assert detail in caught.value.detail
    assert "avro/binary and application/json" in caught.value.detail
    assert hint in caught.value.hint


def test_codecs_are_cached_by_header_in_bounded_memory():
    for number in range(500):
        codec_for(f"application/json; x={number}")
    assert codec_for.cache_info().currsize <= 64


@given(st.text(st.characters(max_codepoint=255), max_size=60))
def test_any_content_type_is_read_or_refused(text):
    for header in (text, "application/json;" + text, "avro/binary" + text):
        with suppress(UnsupportedMediaType):
            codec_for(header)


# --- positions in a query string ---------------------------------------------------------------


def test_a_position_in_a_query_is_a_time_or_an_id():
    assert parse_query_position("1700000000000") == 1700000000000
    assert parse_query_position("0") == 0
    assert parse_query_position("1" * 40) == bytes.fromhex("1" * 40)
    assert parse_query_position("ab" * 20) == bytes.fromhex("ab" * 20)


@pytest.mark.parametrize("wrong", ["", "x", "1" * 20, "1" * 39, "ab" * 21, "1.5", "+5", "١", "0x10"])
def test_any_other_position_is_refused(wrong):
    with pytest.raises(InvalidMessageId):
        parse_query_position(wrong)


def test_a_time_below_0_is_refused():
    with pytest.raises(InvalidParameter, match="from: the time -5 is below 0"):
        parse_query_position("-5")
