"""Hostile bodies: malformed ones are refused at once, with the position, and nothing else happens."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plainsong.protocol.codec import AVRO, AVRO_2, JSON, base, json_values
from plainsong.protocol.codec import avro_cursor as cursor_module
from plainsong.protocol.errors import BadRequest, MalformedBody, RequestTooLarge
from plainsong.protocol.requests import PublishRequest, PublishResponse, Receipt
from tests import codecs

ID = bytes(range(20))
FULL = PublishRequest([b"m", b"n"], 3, 5, "p", 1, 2, [7, 8], True, "k", "s", ["a"], [None, 3], [{"k": "v"}, {}])
GOLDEN = {
    "decode_publish": ["0204046d30046d3100", "000202046d3200", "000200", AVRO_2.encode_publish(FULL).hex()],
    "decode_poll": ["04010202", "0280a0abfef962010202", "00280000018bcfe5680000020000000000000000000000001402"],
    "decode_rollback": ["000280a0abfef9620480a0abfef96204", "000280a0abfef9620480a0abfef9620401"],
    "decode_receipt": [AVRO.encode_receipt(Receipt(ID, ID, 1, True, True, 4, [4], [5])).hex()],
}
JSON_BODIES = [
    codecs.JSON.encode_publish(FULL),
    b'{"messages":["a",{"base64":"AA=="},{"payload":{"bytes":"\xc3\xa9"},"ttlSeconds":{"int":3},"sequenceId":1}]}',
    b'{"startFrom":"000000000000000000000000000000000000000a","limit":{"int":5},"transaction":"AA==","waitMs":1}',
    JSON.encode_publish_response(PublishResponse(1, 2, 3, 4, 5)),
]
DECODERS = [
    *(
        (codec, method)
        for codec in (AVRO, AVRO_2, JSON)
        for method in ("decode_publish", "decode_poll", "decode_rollback")
    ),
    (AVRO_2, "decode_receipt"),
]


def decode_or_refuse(codec, method, body):
    try:
        getattr(codec, method)(body)
    except BadRequest as error:
        shown = (error.detail + error.hint).encode()
        if not error.detail or len(shown) > 1000:
            raise AssertionError(shown) from error


@pytest.mark.parametrize(("codec", "method"), DECODERS)
@given(body=st.binary(max_size=60))
@example(body=b"")
def test_any_bytes_are_decoded_or_refused(codec, method, body):
    decode_or_refuse(codec, method, body)


@pytest.mark.parametrize(("codec", "method"), [each for each in DECODERS if each[0] is not JSON])
@given(data=st.data())
def test_damaged_records_are_decoded_or_refused(codec, method, data):
    body = bytearray.fromhex(data.draw(st.sampled_from(GOLDEN[method])))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body)))
        body[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    decode_or_refuse(codec, method, bytes(body))


@pytest.mark.parametrize("method", ["decode_publish", "decode_poll", "decode_rollback"])
@given(data=st.data())
def test_damaged_json_is_decoded_or_refused(method, data):
    body = bytearray(data.draw(st.sampled_from(JSON_BODIES)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body)))
        body[at : at + data.draw(st.integers(0, 4))] = data.draw(
            st.binary(max_size=3)
            | st.sampled_from([b"null", b"NaN", b"1e9", b'"x"', b"{}", b"[]", b"-1", b'"\\ud800"'])
        )
    decode_or_refuse(JSON, method, bytes(body))


@given(
    body=st.dictionaries(
        st.sampled_from(
            ["messages", "startFrom", "limit", "transaction", "segments", "attributes", "atomic", "isolation"]
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["payload", "base64", "bytes", "long", "array", "x"]), inner, max_size=3
                )
            ),
            max_leaves=8,
        ),
    )
)
def test_any_values_in_known_fields_are_decoded_or_refused(body):
    for method in ("decode_publish", "decode_poll"):
        decode_or_refuse(JSON, method, json.dumps(body).encode())


@pytest.mark.parametrize("name", GOLDEN)
def test_a_body_cut_off_anywhere_is_refused(name):
    for golden in GOLDEN[name]:
        body = bytes.fromhex(golden)
        codec = next(each for each, method in DECODERS if method == name and decodes(each, name, body))
        for length in range(len(body)):
            with pytest.raises(MalformedBody, match="at byte"):
                getattr(codec, name)(body[:length])
        with pytest.raises(MalformedBody, match=f"1 bytes too many at byte {len(body)}"):
            getattr(codec, name)(body + b"\x00")


def decodes(codec, name, body) -> bool:
    try:
        getattr(codec, name)(body)
    except MalformedBody:
        return False
    return True


def long(number: int) -> bytes:
    raw = (number << 1) ^ (number >> 63)
    out = bytearray()
    while raw > 0x7F:
        out.append(raw & 0x7F | 0x80)
        raw >>= 7
    return bytes([*out, raw])


MANY = b"\x02a" * 20
HOSTILE = {
    "a number of eleven bytes": b"\x00" + b"\x80" * 10 + b"\x01",
    "a number beyond 64 bits": b"\x00" + b"\xff" * 9 + b"\x7f" + b"\x00",
    "a union branch that is not there": b"\x04\x00",
    "a negative union branch": b"\x01\x00",
    "2^62 items": b"\x02" + long(1 << 62),
    "-2^63 items": b"\x02" + long(-(1 << 63)) + long(1),
    "one item more than bytes": b"\x02" + long(len(MANY) + 2) + MANY + b"\x00",
    "a length of 2^40": b"\x02" + long(1) + long(1 << 40) + b"\x00",
    "a negative length": b"\x02" + long(1) + long(-1) + b"\x00\x00",
    "a long negative length": b"\x02" + long(1) + long(-9000) + b"\x00\x00",
    "a negative length among many": b"\x02" + long(20) + (b"\x03ab") * 20 + b"\x00",
    "a last message that is too long": b"\x02" + long(20) + MANY[:-2] + b"\x7eab" + b"\x00",
    "a block longer than it says": b"\x02" + long(-1) + long(1) + b"\x02a" + b"\x00",
    "a block shorter than it says": b"\x02" + long(-1) + long(3) + b"\x02a" + b"\x00",
    "a block of negative size": b"\x02" + long(-1) + long(-5) + b"\x02a" + b"\x00",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("codec", [AVRO, AVRO_2])
def test_hostile_numbers_are_refused_with_their_place_and_without_memory(codec, name):
    tracemalloc.start()
    with pytest.raises(MalformedBody, match=r"at byte [0-9]+"):
        codec.decode_publish(HOSTILE[name])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 200_000


def test_booleans_are_0_or_1_and_enums_have_two_symbols():
    with pytest.raises(MalformedBody, match="no boolean at byte 1"):
        AVRO.decode_poll(bytes.fromhex("04020202"))
    with pytest.raises(MalformedBody, match="branch 2 of 2 at byte 8"):
        AVRO_2.decode_poll(bytes.fromhex("04010202" + "000000" + "0204"))


def test_strings_are_utf_8_and_ints_have_32_bits():
    with pytest.raises(MalformedBody, match="invalid UTF-8 at byte 6"):
        AVRO_2.decode_publish(bytes.fromhex("0200" + "00" + "0204" + "61ff" + "00" * 9))
    with pytest.raises(MalformedBody, match="2147483648, where 32 bits are allowed, at byte 3"):
        AVRO.decode_poll(b"\x04\x01\x00" + long(1 << 31) + b"\x02")


def test_more_messages_than_a_request_may_have_are_too_large(monkeypatch):
    monkeypatch.setattr(cursor_module, "MAX_MESSAGES", 30)
    assert len(AVRO.decode_publish(b"\x02" + long(30) + b"\x00" * 31).messages) == 30
    with pytest.raises(RequestTooLarge, match="31 messages"):
        AVRO.decode_publish(b"\x02" + long(15) + b"\x00" * 15 + long(16) + b"\x00" * 17)


def test_a_million_empty_messages_are_the_most_and_they_are_counted_before_they_are_made():
    most = base.MAX_MESSAGES
    with pytest.raises(RequestTooLarge):
        AVRO.decode_publish(b"\x02" + long(most + 1) + bytes(most + 2))


def test_lists_and_maps_together_share_one_bound():
    body = AVRO_2.encode_publish(PublishRequest([b"m"], attributes=[{"a": "b", "c": "d"}]))
    reader = cursor_module.Cursor(body[-12:])
    reader.room = 2
    with pytest.raises(RequestTooLarge):
        reader.array(reader.strings)


def test_large_json_with_very_many_values_is_too_large_and_commas_in_text_do_not_count(monkeypatch):
    monkeypatch.setattr(json_values, "MAX_VALUES", 50)
    assert len(JSON.decode_publish(b'{"messages":["' + b"," * 60 + b'\\",[[["]}').messages[0]) == 65
    with pytest.raises(RequestTooLarge):
        JSON.decode_publish(b'{"messages":[' + b",".join([b'""'] * 50) + b"]}")


@given(texts=st.lists(st.text(st.sampled_from('a,[{"\\\n'), max_size=9), min_size=1), piece_bytes=st.integers(1, 9))
def test_values_are_counted_outside_of_strings_however_the_body_is_split(texts, piece_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_values, "_PIECE_BYTES", piece_bytes)
        assert json_values._values(json.dumps({"messages": texts}).encode()) == 1 + len(texts)


def test_a_string_that_never_ends_is_read_once(monkeypatch):
    # Searching for the string's end again from every quote would take hours.
    monkeypatch.setattr(json_values, "MAX_VALUES", 50)
    with pytest.raises(MalformedBody, match="Unterminated string"):
        JSON.decode_publish(b'{"messages":["' + b',\\"' * 1_000_000)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "invalid JSON at byte 0"),
        (b"\xef\xbb\xbf{}", "invalid JSON at byte 0: Unexpected byte order mark"),
        (b'{"messages":["\xff"]}', "invalid UTF-8 at byte 14"),
        ('{"messages":["é",]}'.encode(), "invalid JSON at byte 18"),
        (b'{"messages":["a"],"messages":[]}', "'messages' occurs twice"),
        (b'{"messages":NaN}', "NaN is not JSON"),
        (b'{"ttlSeconds":-Infinity}', "-Infinity is not JSON"),
        (b"[]", "the body is a list, not an object"),
        (b"null", "the body is null"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"messages":["\\ud800"]}', r"messages\[0\] has half a surrogate pair at character 0"),
        (b'{"producer":"a\\udfff"}', "producer has half a surrogate pair at character 1"),
        (b'{"attributes":[{"\\ud800":"x"}]}', "half a surrogate pair"),
        (
            b'{"transactionWritePointer":9223372036854775808}',
            "a number 9223372036854775808, not a whole number of 64 bits",
        ),
        (b'{"transactionWritePointer":"9223372036854775808"}', "not a whole number of 64 bits"),
        (b'{"ttlSeconds":2147483648}', "ttlSeconds is a number 2147483648, not a whole number of 32 bits"),
        (b'{"ttlSeconds":1.0}', "ttlSeconds is a fraction, not a whole number"),
        (b'{"ttlSeconds":true}', "ttlSeconds is a boolean"),
        (b'{"ttlSeconds":' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"atomic":null}', "atomic is null, not true or false"),
        (b'{"messages":null}', "messages is null, not a list"),
        (b'{"messages":[5]}', r"messages\[0\] is a number 5, not a string"),
    ],
)
def test_invalid_publishes_in_json_are_refused_with_their_place_or_field(body, why):
    with pytest.raises(MalformedBody, match=why):
        JSON.decode_publish(body)
