"""Topic properties: each rule, each default, and a hint with each refusal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plainsong.protocol.errors import InvalidProperty
from plainsong.protocol.properties import DEFAULT_TTL_S, TopicProperties, parse_properties

values = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.integers(), max_size=2)
)


@pytest.mark.parametrize("given_", [None, {}])
def test_missing_properties_have_their_defaults(given_):
    assert parse_properties(given_) == TopicProperties(DEFAULT_TTL_S, "optional", "inherit", None)
    assert DEFAULT_TTL_S == 604_800


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ({"ttl": 1}, TopicProperties(1)),
        ({"ttl": "3600"}, TopicProperties(3600)),
        ({"ttl": (1 << 31) - 1}, TopicProperties((1 << 31) - 1)),
        ({"transactional": "required"}, TopicProperties(transactional="required")),
        ({"deduplication": "enabled"}, TopicProperties(deduplication="enabled")),
        ({"max_bytes": "9223372036854775807"}, TopicProperties(max_bytes=(1 << 63) - 1)),
    ],
)
def test_each_property_is_accepted(given_, expected):
    assert parse_properties(given_) == expected


@pytest.mark.parametrize(
    ("given_", "hint"),
    [
        ([], '{"ttl": 3600}'),
        ("ttl", '{"ttl": 3600}'),
        ({"tll": 5}, "did you mean 'ttl'?"),
        ({"TTL": 5}, "known: "),
        ({"maxbytes": 5}, "did you mean 'max_bytes'?"),
        ({"": 5}, "known: "),
        ({"ttl": 0}, "1 to 2147483647"),
        ({"ttl": -1}, "1 to 2147483647"),
        ({"ttl": 1 << 31}, "1 to 2147483647"),
        ({"ttl": True}, "1 to"),
        ({"ttl": 5.0}, "1 to"),
        ({"ttl": None}, "1 to"),
        ({"ttl": ""}, "1 to"),
        ({"ttl": " 5"}, "1 to"),
        ({"ttl": "+5"}, "1 to"),
        ({"ttl": "٣"}, "1 to"),
        ({"ttl": "²"}, "1 to"),
        ({"ttl": "9" * 5000}, "1 to"),
        ({"max_bytes": 0}, "1 to 9223372036854775807"),
        ({"max_bytes": 1 << 63}, "1 to"),
        ({"transactional": "yes"}, "optional, required, disabled"),
        ({"transactional": None}, "optional, required, disabled"),
        ({"deduplication": ["enabled"]}, "inherit, enabled, disabled"),
    ],
)
def test_each_refusal_says_what_is_accepted(given_, hint):
    with pytest.raises(InvalidProperty) as caught:
        parse_properties(given_)
    assert hint in caught.value.hint
    assert len(caught.value.detail) < 200


def test_a_generation_may_be_sent_and_is_ignored():
    for sent in (3, "3", "03", None, 3.0, [3]):
        assert parse_properties({"generation": sent, "ttl": 5}) == TopicProperties(5)


def test_shown_properties_can_be_sent_back():
    properties = TopicProperties(60, "disabled", "enabled", 1000)
    shown = properties.shown(7)
    assert all(isinstance(value, str) for value in shown.values())
    assert parse_properties(shown) == properties
    assert "max_bytes" not in TopicProperties().shown(1)
    assert parse_properties(properties.stored()) == properties


@given(
    st.dictionaries(st.sampled_from(["ttl", "transactional", "deduplication", "max_bytes", "generation", "x"]), values)
)
def test_any_object_gives_properties_within_their_bounds_or_is_refused(given_):
    try:
        properties = parse_properties(given_)
    except InvalidProperty as error:
        assert error.hint
        return
    assert 1 <= properties.ttl_s < 1 << 31
    assert properties.max_bytes is None or 1 <= properties.max_bytes < 1 << 63


def deep(value):
    for _ in range(100_000):
        value = {"a": value}
    return value


@pytest.mark.parametrize("key", ["ttl", "max_bytes", "chain"])
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (deep(1), "an object"),
        ([deep(1)], "an array"),
        (16**6000, "a number with too many digits"),
        (-(16**6000), "a number with too many digits"),
        (1 << 63, "'9223372036854775808'"),
        (-1, "'-1'"),
        (1.5, "'1.5'"),
        (None, "'None'"),
        ("x" * 1000, repr("x" * 80)),
    ],
    ids=["deep", "array", "long", "negative", "large", "below", "fraction", "null", "text"],
)
def test_a_refused_value_is_shown_in_a_few_characters(key, value, shown):
    with pytest.raises(InvalidProperty) as refused:
        parse_properties({key: value})
    assert refused.value.detail == f"{key} is {shown}"
