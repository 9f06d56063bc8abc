"""Messages of publish streams: golden bytes, both directions, and hostile input."""

from __future__ import annotations

import contextlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plainsong.protocol.codec import stream
from plainsong.protocol.codec.stream import Refused, RequestReader, Singles, Whole
from plainsong.protocol.errors import MalformedBody, UnknownField
from plainsong.protocol.ids import pack_id
from plainsong.protocol.requests import PublishRequest, PublishResponse, Receipt

FIRST = pack_id(1_700_000_000_000, 0)
SINGLE = "920781a86d6573736167657391c4026d30"
RECEIPT = "9307ccc882a766697273744964c4140000018bcfe56800000000000000000000000000aa67656e65726174696f6e01"


def read(message: bytes):
    return RequestReader().read(message)


def flat(parts):
    """Return each request's number and content."""
    found = []
    for part in parts:
        if isinstance(part, Singles):
            found += zip(part.numbers, [[payload] for payload in part.payloads], strict=True)
        else:
            found.append((part.number, part.request.messages if isinstance(part, Whole) else part.error.code))
    return found


def test_a_single_has_the_documented_bytes_in_both_directions():
    assert stream.encode_single(7, b"m0").hex() == SINGLE
    assert read(bytes.fromhex(SINGLE)) == ([Singles([7], [b"m0"])], None)


def _map(*pairs):
    """Return a msgpack map, which may have duplicate keys."""
    return bytes([0x80 | len(pairs)]) + b"".join(msgpack.packb(key) + value for key, value in pairs)


MESSAGES = "messages", msgpack.packb([b"m"])
TTL = "ttlSeconds", msgpack.packb(5)


@pytest.mark.parametrize(
    "fields",
    [
        _map(MESSAGES, MESSAGES),
        _map(MESSAGES, TTL, TTL),
        _map(MESSAGES, ("attributes", b"\x91" + _map(("a", msgpack.packb("1")), ("a", msgpack.packb("2"))))),
    ],
    ids=["messages", "field", "attribute"],
)
@pytest.mark.parametrize(
    "before", [b"", stream.encode_single(1, b"x"), stream.encode_request(1, PublishRequest([b"x"], ttl_s=5))]
)
def test_a_duplicate_key_is_refused_and_the_parts_before_it_are_read(fields, before):
    parts, fault = read(before + b"\x92\x07" + fields)
    assert fault.detail == "a key of a map occurs twice"
    assert flat(parts) == ([(1, [b"x"])] if before else [])


def test_one_reader_reads_singles_and_larger_requests_in_any_order():
    single, whole = stream.encode_single(1, b"x"), stream.encode_request(2, PublishRequest([b"y", b"z"], ttl_s=5))
    reader = RequestReader()
    for message in (single, single + whole + single, whole, single * 3, whole + single):
        parts, fault = reader.read(message)
        assert fault is None
        assert flat(parts) == flat(read(message)[0])
        assert len(flat(parts)) == message.count(single) + message.count(whole)


def test_a_receipt_has_the_same_bytes_however_it_is_made():
    receipt = Receipt(FIRST, FIRST, 1)
    assert stream.encode_receipt(7, receipt).hex() == RECEIPT
    assert stream.encode_receipts([7], receipt).hex() == RECEIPT
    assert stream.decode_answers(bytes.fromhex(RECEIPT)) == [(7, 200, {"firstId": FIRST, "generation": 1})]


def test_answers_of_a_run_have_ids_that_follow_each_other_over_the_end_of_a_millisecond():
    receipt = Receipt(pack_id(5, 65_534), pack_id(6, 1), 3)
    answers = stream.decode_answers(stream.encode_receipts([4, 9, 2, 2**40], receipt))
    ids = [pack_id(5, 65_534), pack_id(5, 65_535), pack_id(6, 0), pack_id(6, 1)]
    assert answers == [
        (number, 200, {"firstId": each, "generation": 3}) for number, each in zip([4, 9, 2, 2**40], ids, strict=True)
    ]


def test_a_receipt_leaves_out_only_fields_at_their_defaults():
    whole = Receipt(FIRST, pack_id(1_700_000_000_000, 4), 2, True, True, 9, [8, 9], [])
    fields = {
        "firstId": FIRST,
        "lastId": whole.last_id,
        "generation": 2,
        "duplicate": True,
        "deduplicated": True,
        "lastSequenceId": 9,
        "stored": [8, 9],
        "dropped": [],
    }
    assert stream.decode_answers(stream.encode_receipt(1, whole)) == [(1, 200, fields)]
    nobody_knows = stream.decode_answers(stream.encode_receipt(1, Receipt(None, None, 2)))
    assert nobody_knows == [(1, 200, {"firstId": None, "generation": 2})]


def test_a_publish_response_has_its_fields_by_the_names_of_the_contract():
    fields = {
        "transactionWritePointer": 1 << 60,
        "startTimestamp": 5,
        "startSequenceId": 1,
        "endTimestamp": 6,
        "endSequenceId": 2,
    }
    assert stream.decode_answers(stream.encode_response(1, PublishResponse(1 << 60, 5, 1, 6, 2))) == [(1, 200, fields)]
    again = stream.encode_response(1, PublishResponse(1 << 60, 5, 1, 6, 2, duplicate=True))
    assert stream.decode_answers(again) == [(1, 200, {**fields, "duplicate": True})]


requests = st.builds(
    PublishRequest,
    messages=st.lists(st.binary(max_size=300), max_size=4),
    write_pointer=st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
    ttl_s=st.none() | st.integers(-5, 2**31 - 1),
    producer=st.none() | st.text(max_size=9),
    producer_epoch=st.none() | st.integers(0, 2**63 - 1),
    generation=st.none() | st.integers(0, 2**31 - 1),
    sequence_ids=st.none() | st.lists(st.integers(0, 2**63 - 1), max_size=4),
    atomic=st.booleans(),
    routing_key=st.none() | st.text(max_size=9),
    segment=st.none() | st.text(max_size=9),
    segments=st.none() | st.lists(st.text(max_size=9), max_size=3),
    message_ttls_s=st.none() | st.lists(st.none() | st.integers(1, 99), max_size=4),
    attributes=st.none() | st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3), max_size=4),
)
numbers = st.integers(0, stream.MAX_NUMBER)


@given(st.lists(st.tuples(numbers, requests), max_size=8))
def test_requests_are_read_in_the_order_in_which_they_were_written(sent):
    parts, fault = read(b"".join(stream.encode_request(number, request) for number, request in sent))
    assert fault is None
    found = []
    for part in parts:
        if isinstance(part, Singles):
            alone = [PublishRequest([payload]) for payload in part.payloads]
            found += zip(part.numbers, alone, strict=True)
        else:
            assert isinstance(part, Whole)
            found.append((part.number, part.request))
    assert found == sent


@pytest.mark.parametrize("size", [0, 1, 255, 256, 65_535, 65_536, 200_000])
def test_a_single_is_the_same_request_at_every_size(size):
    payload = b"x" * size
    assert stream.encode_single(300, payload) == stream.encode_request(300, PublishRequest([payload]))
    assert read(stream.encode_single(300, payload)) == ([Singles([300], [payload])], None)


def test_a_run_longer_than_one_ask_is_cut_and_keeps_its_order():
    count = stream.MAX_RUN + 5
    parts, fault = read(b"".join(stream.encode_single(number, b"") for number in range(count)))
    assert fault is None
    assert max(len(part.numbers) for part in parts) <= stream.MAX_RUN
    assert flat(parts) == [(number, [b""]) for number in range(count)]


def test_only_the_request_with_unreadable_fields_is_refused():
    wrong = msgpack.packb([2, {"messages": [b"x"], "ttlSecond": 5}])
    parts, fault = read(stream.encode_single(1, b"a") + wrong + stream.encode_single(3, b"b"))
    assert fault is None
    assert flat(parts) == [(1, [b"a"]), (2, "unknown_field"), (3, [b"b"])]
    (refused,) = [part for part in parts if isinstance(part, Refused)]
    assert isinstance(refused.error, UnknownField)
    assert refused.error.hint == "did you mean 'ttlSeconds'?"


@pytest.mark.parametrize(
    "tail",
    [
        b"\xc0",
        b"\x01",
        b"\x91\x01",
        b"\x93\x01\x80\x80",
        b"\x92\xff\x80",  # a negative number
        b"\x92\xc3\x80",  # true is not a number
        b"\x92\xcf" + b"\xff" * 8 + b"\x80",  # 2^64 - 1
        b"\x92\x01\x90",
        b"\x92\x01\x81\x05\xc0",  # a field name that is not text
        b"\x92\x01\x81\xa1\xff\xc0",  # or not UTF-8
        b"\x92\x01",
        b"\x92",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc1",
        b"\x92\x01\x81\xa1x" + b"\x91" * 3000,
        b"\x92\x01\x81\xa1x\xd6\xff\x00\x00\x00\x00",  # a timestamp
    ],
)
def test_a_malformed_request_ends_the_message_and_earlier_ones_are_read(tail):
    parts, fault = read(stream.encode_single(1, b"a") + stream.encode_single(2, b"b") + tail)
    assert isinstance(fault, MalformedBody)
    assert flat(parts) == [(1, [b"a"]), (2, [b"b"])]


@given(st.lists(st.tuples(numbers, requests), min_size=1, max_size=3), st.data())
def test_a_message_cut_anywhere_is_read_up_to_its_last_whole_request(sent, data):
    pieces = [stream.encode_request(number, request) for number, request in sent]
    whole = b"".join(pieces)
    at = data.draw(st.integers(0, len(whole)))
    parts, fault = read(whole[:at])
    ends = [sum(map(len, pieces[: n + 1])) for n in range(len(pieces))]
    assert len(flat(parts)) == sum(end <= at for end in ends)
    assert (fault is None) == (at in (0, *ends))


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(message):
    reader = RequestReader()
    parts, fault = reader.read(message)
    assert fault is None or isinstance(fault, MalformedBody)
    assert all(isinstance(part, Singles | Whole | Refused) for part in parts)


@given(st.binary(max_size=200))
def test_any_bytes_are_answers_or_malformed(message):
    with contextlib.suppress(MalformedBody):
        stream.decode_answers(message)


def test_one_reader_reads_many_messages_small_and_large():
    reader = RequestReader()
    for size in (10, 300_000, 10, 131_000, 10):
        for number in range(3):
            assert reader.read(stream.encode_single(number, b"x" * size)) == ([Singles([number], [b"x" * size])], None)
