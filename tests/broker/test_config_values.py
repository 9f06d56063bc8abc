"""Single values: parsing, refusals and their messages, and that shown values parse again."""

from __future__ import annotations

import contextlib
import math
import tomllib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from broker.config import every_setting
from broker.config.values import Address, parse_address, read_value, show_value
from storage.settings import Kind, Meaning

BYTES = Meaning(Kind.BYTES, "", low=0, high=2**62)
COUNT = Meaning(Kind.COUNT, "", low=1, high=1000)
SECONDS = Meaning(Kind.SECONDS, "", low=0.5, high=60)
SWITCH = Meaning(Kind.SWITCH, "")
CHOICE = Meaning(Kind.CHOICE, "", choices=("text", "json"))
PATH = Meaning(Kind.PATH, "")


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (5, 5),
        ("5", 5),
        ("64 MiB", 64 << 20),
        ("64mib", 64 << 20),
        ("1_024 B", 1024),
        ("2 GiB", 2 << 30),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes_are_bytes_or_have_a_binary_unit(raw, value):
    assert read_value(BYTES, raw, text=False) == value


@pytest.mark.parametrize("raw", ["64 MB", "1.5 MiB", "-1", "MiB", "", "1 MiB 2", True, 1.5, None, [1]])
def test_other_sizes_are_refused(raw):
    with pytest.raises(ValueError, match="a number of bytes"):
        read_value(BYTES, raw, text=False)


def test_text_becomes_a_number_only_where_everything_is_text():
    assert read_value(COUNT, "12", text=True) == 12
    assert read_value(SECONDS, "0.5", text=True) == 0.5
    with pytest.raises(ValueError, match="'12' is not a whole number"):
        read_value(COUNT, "12", text=False)


@pytest.mark.parametrize("raw", [True, 1.5, "many", None])
def test_a_count_is_a_whole_number_and_true_is_not_one(raw):
    with pytest.raises(ValueError, match="is not a whole number"):
        read_value(COUNT, raw, text=False)


@pytest.mark.parametrize(("raw", "word"), [(0, "the minimum is 1"), (1001, "the maximum is 1000")])
def test_errors_name_the_bounds(raw, word):
    with pytest.raises(ValueError, match=word):
        read_value(COUNT, raw, text=False)


@pytest.mark.parametrize("raw", [math.nan, math.inf, -math.inf, "nan", "inf", 0.49, 60.1])
def test_seconds_out_of_bounds_or_not_a_number_are_refused(raw):
    with pytest.raises(ValueError, match="is too"):
        read_value(SECONDS, raw, text=True)


@pytest.mark.parametrize(("raw", "value"), [("true", True), ("ON", True), ("0", False), ("no", False), (True, True)])
def test_switches_understand_the_usual_words(raw, value):
    assert read_value(SWITCH, raw, text=True) is value


@pytest.mark.parametrize("raw", ["maybe", "", 1, "2"])
def test_switches_refuse_other_words(raw):
    with pytest.raises(ValueError, match="true or false"):
        read_value(SWITCH, raw, text=True)


def test_an_invalid_choice_is_refused_with_the_valid_ones():
    with pytest.raises(ValueError, match="'xml' is not one of text, json"):
        read_value(CHOICE, "xml", text=True)


@pytest.mark.parametrize("raw", ["", "  ", "a\0b", 3])
def test_a_path_is_text_that_can_be_one(raw):
    with pytest.raises(ValueError, match="a path"):
        read_value(PATH, raw, text=False)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:7420", Address("127.0.0.1", 7420)),
        ("localhost:0", Address("localhost", 0)),
        ("[::1]:80", Address("::1", 80)),
        ("0.0.0.0:65535", Address("0.0.0.0", 65535)),
    ],
)
def test_an_address_is_a_host_and_a_port(text, address):
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    ["", ":80", "host", "host:", "host:http", "::1:80", "host:65536", "host:-1", "[a]b:1", "ho st:1", "a/b:1", "h:²"],
)
def test_anything_else_is_refused_as_an_address(text):
    with pytest.raises(ValueError, match=r"address|65535"):
        parse_address(text)


@pytest.mark.parametrize("setting", every_setting().values(), ids=lambda setting: setting.name)
def test_every_default_is_allowed_and_round_trips(setting):
    shown = tomllib.loads("x = " + show_value(setting.meaning, setting.default))["x"]
    value = read_value(setting.meaning, shown, text=False)
    assert value == setting.default
    assert type(value) is type(setting.default)


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
@example('a\nb\t\x1f\x7f"\\c')
def test_every_text_is_shown_as_toml_of_one_line(text):
    shown = show_value(PATH, text)
    assert tomllib.loads("x = " + shown) == {"x": text}
    assert "\n" not in shown


def ends_of(meaning):
    """Return the extreme values of a setting's range; for a choice of words, all of them."""
    if meaning.kind is Kind.SWITCH:
        return [False, True]
    if meaning.low is None or meaning.kind is Kind.ADDRESS:
        return list(meaning.choices)
    number = float if meaning.kind is Kind.SECONDS else int
    return [number(meaning.low), number(meaning.high)]


@pytest.mark.parametrize("setting", every_setting().values(), ids=lambda setting: setting.name)
def test_every_setting_at_an_end_of_its_range_is_shown_and_read_again_from_a_file_and_as_text(setting):
    for end in ends_of(setting.meaning):
        shown = tomllib.loads("x = " + show_value(setting.meaning, end))["x"]
        for raw, is_text in ((shown, False), (str(shown), True)):
            value = read_value(setting.meaning, raw, text=is_text)
            assert (value, type(value)) == (end, type(end))


@given(st.integers(0, 2**62))
def test_every_size_round_trips(number):
    assert read_value(BYTES, tomllib.loads("x = " + show_value(BYTES, number))["x"], text=False) == number


@given(st.text())
def test_any_text_is_read_or_refused(text):
    for setting in every_setting().values():
        with contextlib.suppress(ValueError):
            read_value(setting.meaning, text, text=True)
