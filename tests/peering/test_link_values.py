"""Values return from a link unchanged; unknown types are not sent."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import sys
import typing
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plainsong.protocol.errors import (
    BY_CODE,
    Internal,
    MalformedBody,
    NoOwner,
    OutcomeUnknown,
    PlainsongError,
    QuotaExceeded,
    TopicNotFound,
)
from plainsong.protocol.link import MAX_DEPTH, VOCABULARY, Vocabulary
from plainsong.protocol.names import TopicName
from plainsong.protocol.page import Held, Page
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.requests import ProducerVerdict, PublishRequest, Receipt
from plainsong.protocol.topic.asks import ListPointers, Look, Publish, RollBackPointer, Span
from plainsong.protocol.transactions.asks import ChangeConflict
from plainsong.protocol.transactions.view import Verdict, View


def there_and_back(value):
    return VOCABULARY.unpack(VOCABULARY.pack(value))


_LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary()
)
_HASHABLE = st.recursive(
    st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary() | st.builds(TopicName, st.text(), st.text()),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)
_VALUES = st.recursive(
    _LEAVES | _HASHABLE | st.sets(_HASHABLE, max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner) | st.dictionaries(_HASHABLE, inner, max_size=3),
    max_leaves=12,
)


def same(one, other) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return one == other


@given(_VALUES)
def test_values_come_back_with_their_types(value):
    assert same(there_and_back(value), value)


@pytest.mark.parametrize(
    "value",
    [
        TopicName("orders", "paid"),
        Publish(PublishRequest([b"a", b"b"], write_pointer=7, sequence_ids=[1, 2]), 2),
        Look(b"\x00" * 20, None, 12.5),
        Span(1, b"p", b"a", b"b", 5, 4, None),
        Receipt(b"f", b"l", 3, verdict=ProducerVerdict("partial", 9)),
        RollBackPointer(77),
        ListPointers(),
        Page([b"items"], 1, 5, b"id", "held", {0: {"k": "v"}}, {0: -5}, Held(5, 1, 1000, hidden_more=True)),
        TopicProperties(),
    ],
)
def test_asks_and_answers_round_trip(value):
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)


def test_a_view_decides_remotely_as_it_does_locally():
    view = there_and_back(View(100, {50}, {60}, {70, 120}))
    verdicts = [view.verdict(pointer) for pointer in (10, 50, 60, 70, 101, 120, -10)]
    assert verdicts == [Verdict(each) for each in (0, 2, 1, 0, 2, 0, 1)]


def test_every_ask_of_the_protocol_is_known():
    from plainsong.protocol.effects import Ask

    def below(cls):
        for each in cls.__subclasses__():
            yield each
            yield from below(each)

    unknown = [cls for cls in below(Ask) if cls.__module__.startswith("protocol.") and cls not in VOCABULARY]
    assert unknown == []


def test_a_mapping_travels_as_a_dictionary():
    assert there_and_back(MappingProxyType({"a": 1})) == {"a": 1}


class Colour(enum.Enum):
    RED = object()


def test_enums_travel_by_their_names():
    words = Vocabulary()
    words.register(Colour)
    assert words.unpack(words.pack([Colour.RED])) == [Colour.RED]


@dataclass
class Old:
    kept: int


@dataclass
class New:
    kept: int
    added: str = "default"
    listed: list[int] = field(default_factory=list)


New.__name__ = "Old"


def test_a_class_may_gain_fields_while_old_and_new_run_side_by_side():
    old, new = Vocabulary(), Vocabulary()
    old.register(Old)
    new.register(New)
    assert new.unpack(old.pack(Old(1))) == New(1)
    assert "added" not in str(msgpack.unpackb(msgpack.unpackb(new.pack(New(1))).data))


# --- errors ----------------------------------------------------------------------------------------


def test_every_error_travels_with_its_class_and_outcome():
    def below(cls):
        yield cls
        for each in cls.__subclasses__():
            yield from below(each)

    for cls in {*below(PlainsongError)} - {ChangeConflict}:
        if not cls.__module__.startswith("protocol."):
            continue
        error = cls.__new__(cls)
        PlainsongError.__init__(error, "what", hint="how")
        back = there_and_back(error)
        assert type(back) is cls
        assert (back.code, back.detail, back.hint) == (error.code, "what", "how")
        assert (back.outcome, back.retry_after_s) == (error.outcome, error.retry_after_s)


def test_an_errors_own_outcome_and_fields_are_transferred():
    error = NoOwner("gone")
    error.outcome, error.retry_after_s, error.position = "unknown", 7, b"\x01\x02"
    back = there_and_back(error)
    assert (back.outcome, back.retry_after_s, back.position) == ("unknown", 7, b"\x01\x02")


def test_an_error_whose_constructor_needs_more_arguments_travels():
    back = there_and_back(ChangeConflict(5, b"key", "me"))
    assert isinstance(back, ChangeConflict)
    assert (back.transaction_id, back.client_id) == (5, "me")


def test_parts_of_an_error_that_cannot_be_encoded_are_left_out():
    error = TopicNotFound("x")
    error.cause = object()
    assert not hasattr(there_and_back(error), "cause")


def told(*parts):
    return msgpack.packb(msgpack.ExtType(6, msgpack.packb(list(parts))))


def test_an_error_of_an_unknown_class_keeps_its_code_and_outcome():
    back = VOCABULARY.unpack(told("Newer", "quota_exceeded", "d", "h", "applied", 4, {}))
    assert type(back) is BY_CODE["quota_exceeded"] is QuotaExceeded
    assert (back.outcome, back.retry_after_s) == ("applied", 4)


def test_an_unknown_error_is_internal_and_its_outcome_unknown_unless_it_says_so():
    back = VOCABULARY.unpack(told("Newer", "newer", "d", "h", "perhaps", None, {"__class__": 1, "code": "x"}))
    assert type(back) is Internal
    assert back.outcome == "unknown"
    assert VOCABULARY.unpack(told("OutcomeUnknown", "x", "d", "h", "unknown", 1, {})).code == OutcomeUnknown.code


# --- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [object(), 1 + 2j, [Colour.RED], 1 << 80, lambda: None])
def test_unregistered_values_do_not_travel(value):
    with pytest.raises((TypeError, ValueError, OverflowError)):
        VOCABULARY.pack(value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        b"\x01\x02",
        msgpack.packb(msgpack.ExtType(99, b"\x01")),
        msgpack.packb(msgpack.ExtType(4, msgpack.packb(["os.system", {"command": "true"}]))),
        msgpack.packb(msgpack.ExtType(4, msgpack.packb(["TopicName", {"namespace": "a"}]))),
        msgpack.packb(msgpack.ExtType(4, msgpack.packb(["TopicName", {"namespace": "a", "topic": "b", "x": 1}]))),
        msgpack.packb(msgpack.ExtType(4, msgpack.packb(7))),
        msgpack.packb(msgpack.ExtType(5, msgpack.packb(["TransactionType", "NONE"]))),
        msgpack.packb(msgpack.ExtType(5, msgpack.packb(["TopicName", "count"]))),
        msgpack.packb(msgpack.ExtType(6, msgpack.packb(["A"]))),
        msgpack.packb(msgpack.ExtType(2, msgpack.packb([[1]]))),
    ],
)
def test_meaningless_bytes_are_refused(data):
    with pytest.raises(MalformedBody):
        VOCABULARY.unpack(data)


def test_the_nesting_of_values_is_bounded():
    data = msgpack.packb(1)
    for _ in range(MAX_DEPTH):
        data = msgpack.packb(msgpack.ExtType(1, b"\x91" + data))
    assert VOCABULARY.unpack(data) is not None
    for _ in range(5000):
        data = msgpack.packb(msgpack.ExtType(1, b"\x91" + data))
    with pytest.raises(MalformedBody):
        VOCABULARY.unpack(data)
    assert VOCABULARY.unpack(VOCABULARY.pack((1,))) == (1,)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_refused(data):
    with suppress(MalformedBody):
        VOCABULARY.unpack(data)


def test_two_classes_of_one_name_cannot_both_be_registered():
    words = Vocabulary()
    words.register(Old)
    with pytest.raises(TypeError, match="two classes"):
        words.register(New)
    with pytest.raises(TypeError, match="is not a dataclass"):
        words.register(int)


def _classes_in(hint):
    """Return the classes in an annotation, at any depth."""
    if isinstance(hint, type) and not typing.get_args(hint):
        return {hint}
    return {cls for part in typing.get_args(hint) for cls in _classes_in(part)}


def test_fields_of_a_registered_class_are_transferred_too():
    """For example the records of a topic's row, which one instance requests from another."""
    names = {cls.__name__: cls for cls in VOCABULARY._names} | vars(typing) | vars(collections.abc)
    checked = 0
    for cls in VOCABULARY._names:
        if issubclass(cls, Enum):
            continue
        places = {**vars(sys.modules[cls.__module__]), **names}
        for hint in typing.get_type_hints(cls, places, places).values():
            for inner in _classes_in(hint):
                if dataclasses.is_dataclass(inner) or hasattr(inner, "_fields") or issubclass(inner, Enum):
                    assert inner in VOCABULARY, f"{inner.__name__} in {cls.__name__} does not travel"
                    checked += 1
    assert checked > 20
