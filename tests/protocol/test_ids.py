"""Message ids: 20 bytes in the topic's sort order, and bounds derived from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plainsong.protocol.errors import InvalidMessageId, InvalidParameter
from plainsong.protocol.ids import (
    FIRST_BOUND,
    ID_BYTES,
    LAST_BOUND,
    MAX_TIMESTAMP_MS,
    MessageId,
    after,
    before,
    behind_position,
    bound_at,
    checked_id,
    consecutive_ids,
    pack_id,
    pack_position,
    parse_id,
    unpack_id,
    unpack_position,
)
from plainsong.protocol.requests import bound_of

times = st.integers(0, MAX_TIMESTAMP_MS)
sequences = st.integers(0, 0xFFFF)
numbers = st.tuples(times, sequences, times, sequences)
raw_ids = st.binary(min_size=ID_BYTES, max_size=ID_BYTES)


def test_an_id_has_the_bytes_of_the_documentation():
    message_id = pack_id(1_700_000_000_000, 2)
    assert message_id.hex() == "0000018bcfe5680000020000000000000000000000"[:40]
    assert parse_id(message_id.hex()) == message_id
    assert unpack_id(message_id) == MessageId(1_700_000_000_000, 2, 0, 0)


@given(numbers)
def test_packing_and_unpacking_agree(parts):
    message_id = pack_id(*parts)
    assert len(message_id) == ID_BYTES
    assert tuple(unpack_id(message_id)) == parts
    assert unpack_position(pack_position(*parts[:2])) == parts[:2]
    assert message_id.startswith(pack_position(*parts[:2]))
    assert parse_id(message_id.hex().upper()) == message_id


@given(numbers, numbers)
def test_byte_order_is_the_order_of_the_numbers(one, other):
    assert (pack_id(*one) < pack_id(*other)) == (one < other)


@given(raw_ids, raw_ids)
def test_the_bound_after_an_id_excludes_exactly_that_id(one, other):
    bound = after(one)
    if one < LAST_BOUND:
        assert (other >= bound) == (other > one)
        assert before(bound) == one
    else:
        assert bound == LAST_BOUND


def test_there_is_no_bound_after_the_last_id():
    assert after(LAST_BOUND) == LAST_BOUND
    assert bound_at(MAX_TIMESTAMP_MS + 1) == LAST_BOUND
    assert bound_at(MAX_TIMESTAMP_MS) == pack_id(MAX_TIMESTAMP_MS, 0)


def test_there_is_nothing_before_the_first_bound():
    assert before(FIRST_BOUND) is None


@given(times, sequences, sequences, sequences)
def test_the_bound_after_a_position_excludes_every_id_of_it_and_nothing_later(time_ms, sequence, payload_ms, payload):
    position = pack_position(time_ms, sequence)
    behind = parse_id(behind_position(position))
    assert pack_id(time_ms, sequence, payload_ms, payload) < behind
    if position != b"\xff" * len(position):
        assert behind == after(position + b"\xff" * (ID_BYTES - len(position)))
    assert behind_position(None) is None


def test_the_ids_of_a_request_continue_in_the_next_millisecond_when_one_is_full():
    first = pack_id(1_700_000_000_000, 0xFFFE)
    assert [unpack_id(each)[:2] for each in consecutive_ids(first, 3)] == [
        (1_700_000_000_000, 0xFFFE),
        (1_700_000_000_000, 0xFFFF),
        (1_700_000_000_001, 0),
    ]


@given(st.integers(-5, MAX_TIMESTAMP_MS + 5), numbers)
def test_a_time_bound_is_before_all_messages_of_its_millisecond_and_after_all_earlier_ones(time_ms, parts):
    assert (pack_id(*parts) >= bound_at(time_ms)) == (parts[0] >= time_ms)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        "0" * 39,
        "0" * 41,
        "g" * 40,
        " " + "0" * 39,
        "0 " * 20,
        "0x" + "0" * 38,
        "-" + "0" * 39,
        "٣" * 40,
        "\0" * 40,
    ],
)
def test_text_that_is_not_an_id_is_refused(text):
    with pytest.raises(InvalidMessageId):
        parse_id(text)


def test_a_very_long_text_is_not_repeated_in_the_error():
    with pytest.raises(InvalidMessageId) as caught:
        parse_id("0" * 1_000_000)
    assert len(caught.value.detail) < 200
    assert repr("0" * 57 + "...") in caught.value.detail


@given(st.binary(max_size=40).filter(lambda raw: len(raw) != ID_BYTES))
def test_an_id_of_another_length_is_refused(raw):
    with pytest.raises(InvalidMessageId):
        checked_id(raw)
    with pytest.raises(InvalidMessageId):
        bound_of(raw, inclusive=True)


@given(raw_ids, st.booleans())
def test_a_start_position_becomes_one_inclusive_bound(raw, inclusive):
    assert bound_of(raw, inclusive=inclusive) == (raw if inclusive else after(raw))
    assert bound_of(None, inclusive=inclusive) == FIRST_BOUND


@given(st.integers(0, 1 << 70), st.booleans(), numbers)
def test_a_start_time_excludes_its_whole_millisecond_when_exclusive(time_ms, inclusive, parts):
    bound = bound_of(time_ms, inclusive=inclusive)
    assert (pack_id(*parts) >= bound) == (parts[0] >= time_ms if inclusive else parts[0] > time_ms)


def test_a_start_time_below_zero_is_refused():
    with pytest.raises(InvalidParameter):
        bound_of(-1, inclusive=True)


@pytest.mark.parametrize(("length", "shown"), [(60, "x" * 60), (61, "x" * 57 + "...")])
def test_an_error_shows_the_beginning_of_a_long_text_that_is_not_an_id(length, shown):
    with pytest.raises(InvalidMessageId) as refused:
        parse_id("x" * length)
    assert refused.value.detail == f"{shown!r} is not 40 hex digits"
