"""Ids, starts, serializers and settings, as users write them and as the client parses them."""

from __future__ import annotations

import pickle
import subprocess
import sys
import traceback
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from itertools import pairwise
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

import plainsong
from plainsong import BYTES, JSON, TEXT, Client, Held, Message, MessageId, Page, Undecodable, errors
from plainsong.errors import NotEncodable
from plainsong.messages import Origin, nth_id
from plainsong.positions import checked_as_of, is_inclusive, parse_start
from plainsong.protocol.errors import InvalidMessageId, InvalidName, InvalidParameter
from plainsong.protocol.ids import SEQUENCES_PER_MS, pack_id
from plainsong.protocol.topic.state import PositionSequence
from plainsong.serializers import encoded, serializer_for

NOW_MS = 1_700_000_000_000
HEX = "0000018bcfe56800000200000000000000000000"


@dataclass
class Order:
    number: int
    item: str = ""


class Colour(Enum):
    RED = "red"


@dataclass
class Shipment:
    order: Order
    at: datetime
    colour: Colour
    key: UUID
    price: Decimal
    parts: list[Order] = field(default_factory=list)


SHIPMENT = Shipment(
    Order(1, "x"), datetime(2026, 1, 31, 12, tzinfo=UTC), Colour.RED, UUID(int=5), Decimal("1.50"), [Order(2, "y")]
)
SHIPMENT_JSON = (
    b'{"order":{"number":1,"item":"x"},"at":"2026-01-31T12:00:00Z","colour":"red",'
    b'"key":"00000000-0000-0000-0000-000000000005","price":"1.50","parts":[{"number":2,"item":"y"}]}'
)


def test_a_message_id_is_bytes_and_shown_as_hex():
    one = MessageId(HEX)
    assert one == bytes.fromhex(HEX) == MessageId(bytes.fromhex(HEX))
    assert str(one) == f"{one}" == HEX
    assert repr(one) == f"MessageId('{HEX}')"
    assert one.publish_time_ms == NOW_MS
    assert one.publish_time == datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    assert one < MessageId(pack_id(NOW_MS, 3))


@pytest.mark.parametrize("wrong", ["", "12", "zz" * 20, b"", b"x" * 19])
def test_an_invalid_message_id_is_refused(wrong):
    with pytest.raises(InvalidMessageId):
        MessageId(wrong)


@given(st.integers(0, 3), st.integers(-1, SEQUENCES_PER_MS - 1), st.integers(1, 200_000))
def test_each_message_of_a_receipt_has_the_id_the_daemon_gave_it(ahead_ms: int, last: int, count: int):
    runs = PositionSequence(NOW_MS, last).take(NOW_MS + ahead_ms, count)
    given_out = [pack_id(run.ts_ms, run.first + n) for run in runs for n in range(run.length)]
    some = range(0, count, max(1, count // 7))
    assert [nth_id(given_out[0], given_out[-1], n, count) for n in some] == [given_out[n] for n in some]


@pytest.mark.parametrize(
    ("start", "position"),
    [
        (None, None),
        ("oldest", None),
        (HEX, bytes.fromhex(HEX)),
        (MessageId(HEX), bytes.fromhex(HEX)),
        (bytes.fromhex(HEX), bytes.fromhex(HEX)),
        (12, 12),
        ("1700000000000", NOW_MS),
        ("-10m", NOW_MS - 600_000),
        ("-1.5h", NOW_MS - 5_400_000),
        ("- 250 ms", NOW_MS - 250),
        (timedelta(seconds=90), NOW_MS - 90_000),
        (timedelta(seconds=-90), NOW_MS - 90_000),
        (timedelta(days=100_000), 0),
        ("2023-11-14T22:13:20Z", NOW_MS),
        ("2023-11-14 23:13:20.5+01:00", NOW_MS + 500),
        (datetime(2023, 11, 14, 23, 13, 20, tzinfo=timezone(timedelta(hours=1))), NOW_MS),
    ],
)
def test_a_start_can_be_written_in_many_ways(start, position):
    assert parse_start(start, NOW_MS) == position


@pytest.mark.parametrize(
    "wrong", ["", "yesterday", "10m", "-10", "-10y", True, 1.5, -1, 1 << 63, datetime(2023, 1, 1), "1" * 40 + "g"]
)
def test_an_invalid_start_is_refused_with_examples(wrong):
    with pytest.raises((InvalidParameter, InvalidMessageId)) as caught:
        parse_start(wrong, NOW_MS)
    assert caught.value.outcome == "not-applied"


@pytest.mark.parametrize(
    ("word", "ours"), [("now", "newest"), ("Latest", "newest"), ("earliest", "oldest"), ("beginning", "oldest")]
)
def test_a_word_of_other_systems_for_a_start_is_refused_with_ours(word, ours):
    with pytest.raises(InvalidParameter) as caught:
        parse_start(word, NOW_MS)
    assert caught.value.hint == f"say {ours}"


def test_a_word_for_a_start_is_not_accepted_as_a_moment():
    with pytest.raises(InvalidParameter) as caught:
        checked_as_of("now", None, NOW_MS)
    assert "newest" not in (caught.value.hint or "")


def test_a_time_is_inclusive_and_an_id_exclusive_by_default():
    assert is_inclusive(5, None)
    assert is_inclusive(None, None)
    assert not is_inclusive(bytes(20), None)
    assert is_inclusive(bytes(20), True)


@pytest.mark.parametrize(
    ("given_as", "value", "payload"),
    [
        (None, b"\xff", b"\xff"),
        (bytes, bytearray(b"a"), b"a"),
        (BYTES, memoryview(b"a"), b"a"),
        (str, "ä", "ä".encode()),
        (TEXT, "ä", "ä".encode()),
        (JSON, {"a": [1, None]}, b'{"a":[1,null]}'),
        (Order, Order(1, "x"), b'{"number":1,"item":"x"}'),
        (Shipment, SHIPMENT, SHIPMENT_JSON),
        ((lambda n: b"%d" % n, int), 12, b"12"),
    ],
)
def test_serializers_round_trip(given_as, value, payload):
    serializer = serializer_for(given_as)
    assert encoded(serializer, value) == payload
    assert Message(Origin("t", serializer), bytes(20), payload).value == value


@pytest.mark.parametrize(
    ("given_as", "value"),
    [
        (None, "text"),
        (None, 5),
        (str, b"x"),
        (JSON, float("nan")),
        (Order, {}),
        (Order, Order("1", "x")),
        ((str, str), 1),
    ],
)
def test_a_value_that_cannot_be_written_raises_before_anything_happens(given_as, value):
    with pytest.raises(NotEncodable) as caught:
        encoded(serializer_for(given_as), value)
    assert caught.value.outcome == "not-applied"


@pytest.mark.parametrize(
    ("given_as", "payload"),
    [
        (str, b"\xff"),
        (JSON, b"{"),
        (Order, b"[1]"),
        (Order, b'{"item":"x"}'),
        (Order, b'{"n":1}'),
        (Order, b'{"number":"1","item":"x"}'),
        (Shipment, b'{"order":5}'),
    ],
)
def test_a_payload_that_does_not_decode_is_delivered_with_its_bytes_and_the_error(given_as, payload):
    value = Message(Origin("t", serializer_for(given_as)), bytes(20), payload).value
    assert isinstance(value, Undecodable)
    assert value.payload == payload
    assert isinstance(value.error, Exception)


def test_a_value_is_decoded_once_and_only_when_asked_for():
    calls = []
    message = Message(Origin("t", serializer_for((bytes, lambda b: calls.append(b) or b))), bytes(20), b"x")
    assert not calls
    assert message.value == message.value == b"x"
    assert len(calls) == 1


@pytest.mark.parametrize("wrong", [5, int, (str,), object()])
def test_an_invalid_serializer_is_refused(wrong):
    with pytest.raises(InvalidParameter):
        serializer_for(wrong)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"url": "ftp://x"}, InvalidParameter),
        ({"url": "localhost:7420"}, InvalidParameter),
        ({"url": "http://x:99999"}, InvalidParameter),
        ({"url": "http://user@x"}, InvalidParameter),
        ({"url": []}, InvalidParameter),
        ({"namespace": "a-b"}, InvalidName),
        ({"deadline_s": 0}, InvalidParameter),
        ({"request_timeout_s": float("nan")}, InvalidParameter),
        ({"max_connections": 0}, InvalidParameter),
        ({"token_file": "/nowhere/token"}, InvalidParameter),
    ],
)
def test_a_client_refuses_invalid_settings(options, error):
    with pytest.raises(error):
        Client(**options)


def test_a_client_is_set_up_from_the_environment_and_arguments_win(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PLAINSONG_URL", "http://a:1,http://b:2/")
    monkeypatch.setenv("PLAINSONG_NAMESPACE", "shop")
    client = Client.from_environment()
    assert client._settings.urls == ("http://a:1", "http://b:2")
    assert client.namespace == "shop"
    assert Client.from_environment(namespace="other").namespace == "other"
    monkeypatch.delenv("PLAINSONG_URL")
    assert Client.from_environment()._settings.urls == ("http://127.0.0.1:7420",)


def test_a_token_is_read_from_its_file(tmp_path: Path):
    file = tmp_path / "token"
    file.write_text("secret\n")
    assert Client(token_file=file)._settings.credentials.token == "secret"
    file.write_text("two\nlines")
    with pytest.raises(InvalidParameter):
        Client(token_file=file)


def test_every_public_name_exists_and_is_documented():
    for name in plainsong.__all__:
        assert getattr(plainsong, name).__doc__, name
    with pytest.raises(AttributeError):
        plainsong.nothing_of_this_name  # noqa: B018


def test_the_public_names_are_listed_in_order():
    assert all(a < b for a, b in pairwise(sorted(plainsong.__all__)))
    assert set(plainsong.__all__) == set(plainsong._HOMES)


def test_values_that_cannot_be_written_are_reported_in_the_words_of_the_caller():
    for serializer, value, says in (
        (None, "text", "payload must be bytes, got str"),
        (None, {b"a"}, "payload must be bytes, got set"),
        (str, b"x", "payload must be str, got bytes"),
        (Order, 5, "expected Order, got int"),
    ):
        with pytest.raises(NotEncodable) as caught:
            encoded(serializer_for(serializer), value)
        assert caught.value.detail == says


def test_messages_are_equal_by_content_sort_by_their_ids_and_are_hashable():
    one = Message(Origin("t", JSON), pack_id(5, 0), b"1")
    assert one == Message(Origin("t"), pack_id(5, 0), b"1")
    later = Message(Origin("t"), pack_id(5, 1), b"1")
    others = [later, Message(Origin("u"), pack_id(5, 0), b"1"), Message(Origin("t"), pack_id(5, 0), b"2")]
    assert one not in others
    assert one != b"1"
    assert sorted([later, one]) == [one, later]
    assert len({one, Message(Origin("t"), pack_id(5, 0), b"1"), later}) == 2


def test_messages_pages_and_errors_can_be_pickled():
    order = Message(
        Origin("t", serializer_for(Order)), pack_id(5, 0), b'{"number":1,"item":"x"}', attributes={"a": "b"}
    )
    plain = Message(Origin("t", serializer_for((bytes, lambda payload: payload[::-1]))), pack_id(5, 1), b"ab")
    page = pickle.loads(pickle.dumps(Page([order, plain], MessageId(pack_id(5, 1)), "held", Held(7, 5, 1000))))
    assert list(page) == [order, plain]
    assert [message.value for message in page] == [Order(1, "x"), b"ba"]
    assert (page[0].attributes, page.last_id, page.held) == ({"a": "b"}, pack_id(5, 1), Held(7, 5, 1000))
    missing = errors.TopicNotFound("topic t does not exist", hint="create it")
    for error in (missing, errors.NotSent(2, 1, [missing]), errors.TransactionInDoubt("why", transaction_id=9)):
        error.outcome = "unknown"
        back = pickle.loads(pickle.dumps(error))
        assert (type(back), str(back), back.hint, back.outcome) == (type(error), str(error), error.hint, "unknown")
        assert {**vars(back), "causes": 0} == {**vars(error), "causes": 0}


def test_errors_are_called_as_they_are_imported_and_say_what_to_do():
    error = errors.TopicNotFound("topic t does not exist", hint="plainsong topic create t")
    assert str(error) == "topic t does not exist (hint: plainsong topic create t)"
    assert traceback.format_exception_only(error)[0].startswith("plainsong.errors.TopicNotFound: topic t")
    assert {getattr(errors, name).__module__ for name in errors.__all__ if name != "Outcome"} == {"plainsong.errors"}
    script = "import plainsong; print(plainsong.errors.ConnectFailed.__name__)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout == b"ConnectFailed\n"


@pytest.mark.parametrize(
    ("unsent", "unknown", "says"),
    [
        (1, 0, "1 message not sent: topic nope does not exist"),
        (2, 0, "2 messages not sent: topic nope does not exist"),
        (0, 3, "3 messages may not have been sent: topic nope does not exist"),
        (2, 1, "2 messages not sent, and 1 that may have been: topic nope does not exist"),
    ],
)
def test_unsent_messages_are_reported_with_their_count_by_outcome_and_the_cause(unsent, unknown, says):
    cause = errors.TopicNotFound("topic nope does not exist", hint="create it")
    error = errors.NotSent(unsent, unknown, [cause, errors.TopicNotFound("topic nope does not exist")])
    assert (error.detail, error.hint, error.__cause__) == (says, "create it", cause)
    more = errors.NotSent(unsent, unknown, [cause, errors.Overloaded("busy"), errors.Overloaded("full")])
    assert more.detail == says + ", and 2 other errors"
