"""Times and durations, as typed and as shown."""

from __future__ import annotations

import time

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plainsong.cli.options import Length, Place, parse_length_s, show_length, show_time, show_ttl
from plainsong.positions import NEWEST, OLDEST, parse_start

ID = "0000018bcfe56805000100000000000000000000"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("oldest", OLDEST),
        ("now", NEWEST),
        ("newest", NEWEST),
        (ID, bytes.fromhex(ID)),
        ("1700000000000", 1_700_000_000_000),
        ("2023-11-14T22:13:20Z", 1_700_000_000_000),
        ("2023-11-14T23:13:20.005+01:00", 1_700_000_000_005),
    ],
)
def test_a_position_is_oldest_now_an_id_or_a_time(text, place):
    assert Place().convert(text, None, None) == place


@pytest.mark.parametrize(("text", "ago_ms"), [("-10m", 600_000), ("-1.5h", 5_400_000), ("-250ms", 250)])
def test_a_position_may_be_a_duration_ago(text, ago_ms):
    found = Place().convert(text, None, None)
    assert abs(time.time() * 1000 - ago_ms - found) < 60_000


def test_now_as_an_end_is_the_time_of_this_computer():
    assert abs(Place(now="ours").convert("now", None, None) - time.time() * 1000) < 60_000


@pytest.mark.parametrize("text", ["yesterday", "", "+10m", "10m", "0000", "-10y", ID[:-1], "9" * 30])
def test_an_invalid_position_or_time_is_refused(text):
    try:
        found = Place().convert(text, None, None)
    except click.BadParameter as error:
        assert "no place" in error.message or "range" in error.message or "hex" in error.message
    else:
        assert text == "0000"
        assert found == 0


@pytest.mark.parametrize(("text", "seconds"), [("30", 30), ("30s", 30), ("10m", 600), ("1.5h", 5400), ("7d", 604_800)])
def test_a_duration_has_a_unit_or_is_in_seconds(text, seconds):
    assert Length().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["0", "-1s", "1y", "", "1e9", "0.1s", "ten"])
def test_an_invalid_duration_is_refused(text):
    with pytest.raises(click.BadParameter, match="invalid duration"):
        Length().convert(text, None, None)


def test_a_duration_can_be_converted_to_milliseconds():
    assert Length(0.001).convert("1.5s", None, None) == 1500


@given(st.integers(0, 253_402_300_799_999))
def test_a_printed_time_is_valid_input(timestamp_ms):
    assert parse_start(show_time(timestamp_ms), 0) == timestamp_ms


@given(st.integers(1, 10**10))
def test_a_printed_ttl_is_valid_input(seconds):
    assert parse_length_s(show_ttl(seconds)) == seconds


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (None, "-"),
        (0, "0ms"),
        (999, "999ms"),
        (1000, "1s"),
        (61_000, "1m 1s"),
        (3_600_000, "1h"),
        (90_061_000, "1d 1h"),
    ],
)
def test_durations_are_shown_in_two_units_at_most(milliseconds, text):
    assert show_length(milliseconds) == text
