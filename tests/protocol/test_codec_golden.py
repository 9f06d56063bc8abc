"""Bytes of both Avro versions, decoded and encoded exactly, and compared with fastavro's."""

from __future__ import annotations

from io import BytesIO

import fastavro
import pytest
from codec_records import page_of

from plainsong.protocol.codec import AVRO_END, avro_block_pieces
from plainsong.protocol.ids import pack_id
from plainsong.protocol.page import Page
from plainsong.protocol.requests import PollRequest, PublishRequest, PublishResponse, Receipt
from tests import codecs
from tests.codecs import AVRO, AVRO_2

ID = pack_id(1700000000000, 2)
PUBLISHES = {
    "0204046d30046d3100": PublishRequest([b"m0", b"m1"]),
    "000202046d3200": PublishRequest([b"m2"], 1),
    "000200": PublishRequest([], 1),
}
POLLS = {
    "04010202": PollRequest(),
    "0280a0abfef962010202": PollRequest(1700000000000),
    "00280000018bcfe5680000020000000000000000000000001402": PollRequest(ID, inclusive=False, limit=10),
}
RESPONSE = "000280a0abfef9620480a0abfef96204"
PAGE = "02280000018bcfe56800000200000000000000000000046d3200"


@pytest.mark.parametrize("golden", PUBLISHES)
def test_publish_requests_have_the_bytes_of_the_contract(golden):
    assert AVRO.decode_publish(bytes.fromhex(golden)) == PUBLISHES[golden]
    assert AVRO.encode_publish(PUBLISHES[golden]).hex() == golden


@pytest.mark.parametrize("golden", POLLS)
def test_poll_requests_have_the_bytes_of_the_contract(golden):
    assert AVRO.decode_poll(bytes.fromhex(golden)) == POLLS[golden]
    assert AVRO.encode_poll(POLLS[golden]).hex() == golden


def test_a_publish_response_has_the_bytes_of_the_contract_and_is_accepted_by_a_rollback():
    response = PublishResponse(1, 1700000000000, 2, 1700000000000, 2)
    assert AVRO.encode_publish_response(response).hex() == RESPONSE
    assert AVRO.decode_rollback(bytes.fromhex(RESPONSE)) == response


def test_a_page_has_the_bytes_of_the_contract():
    assert AVRO.encode_page(page_of([(ID, b"m2")])).hex() == PAGE
    assert AVRO.decode_page(bytes.fromhex(PAGE)) == [(ID, b"m2", {})]


def test_an_empty_page_is_the_array_without_items_and_never_no_bytes():
    assert AVRO.encode_page(Page()) == AVRO_2.encode_page(Page()) == b"\x00"
    assert AVRO.decode_page(b"\x00") == AVRO_2.decode_page(b"\x00") == []


def test_a_streamed_answer_is_blocks_and_the_end():
    page = page_of([(ID, b"m2")])
    streamed = b"".join(piece for each in (page, Page(), page) for piece in avro_block_pieces(each)) + AVRO_END
    assert AVRO.decode_page(streamed) == [(ID, b"m2", {})] * 2


def test_version_2_appends_its_fields_null_first():
    assert AVRO_2.encode_publish(PublishRequest([b"m2"], 1)).hex() == "000202046d3200" + "00" * 11
    assert AVRO_2.encode_poll(PollRequest()).hex() == "04010202" + "00" * 4
    assert AVRO_2.encode_publish_response(PublishResponse(1, 1700000000000, 2, 1700000000000, 2, True)).hex() == (
        RESPONSE + "01"
    )
    full = PublishRequest([b"m"], None, 5, "p", 1, 2, [7], True, "k", "s", ["a"], [None], [{"k": "v"}])
    golden = "0202026d00" + "020a" + "020270" + "0202" + "0204" + "02020e00" + "01" + "02026b" + "020273"
    golden += "0202026100" + "02020000" + "020202026b02760000"
    assert AVRO_2.encode_publish(full).hex() == golden
    assert AVRO_2.decode_publish(bytes.fromhex(golden)) == full


def test_a_page_of_version_2_has_a_map_after_every_payload():
    page = page_of([(ID, b"m2"), (ID, b"m3")])
    page.attributes = {1: {"a": "b"}}
    with_maps = "04" + "28" + ID.hex() + "046d3200" + "28" + ID.hex() + "046d33" + "0202610262" + "00" + "00"
    assert AVRO_2.encode_page(page).hex() == with_maps


@pytest.mark.parametrize("codec", [AVRO, AVRO_2])
def test_a_receipt_is_the_same_record_under_both_versions(codec):
    receipt = Receipt(ID, None, 3, True, False, 9, [1], None)
    golden = "0228" + ID.hex() + "00" + "01" + "00" + "0212" + "06" + "02020200" + "00"
    assert codec.encode_receipt(receipt).hex() == golden
    assert codec.decode_receipt(bytes.fromhex(golden)) == receipt


@pytest.mark.parametrize("size", [0, 60, 100, 9000])
def test_ten_thousand_messages_are_encoded_as_fastavro_would(size):
    messages = [(pack_id(1700000000000, n), b"x" * (size + n % 3)) for n in range(10_000)]
    out = BytesIO()
    rows = [{"id": message_id, "payload": payload} for message_id, payload in messages]
    fastavro.schemaless_writer(out, codecs.PAGE, rows)
    # fastavro also writes all items as one block, so the bytes can be compared.
    assert AVRO.encode_page(page_of(messages)) == out.getvalue()


@pytest.mark.parametrize("size", [0, 1, 63, 64, 100, 8191, 8192, 20_000])
@pytest.mark.parametrize("spread", [1, 2, 7])
@pytest.mark.parametrize("count", [15, 16, 49, 50, 51, 130])
def test_payloads_of_all_lengths_alike_and_different_are_decoded(size, spread, count):
    messages = [bytes([n]) * (size + n % spread) for n in range(count)]
    assert AVRO.decode_publish(AVRO.encode_publish(PublishRequest(messages))).messages == messages


@pytest.mark.parametrize("item", [b"\x02a", b"\x00", b"\xc8\x01" + b"x" * 100, b"\x80\x80\x01" + b"y" * 8192])
@pytest.mark.parametrize("count", [1, 20])
def test_blocks_may_say_their_size_in_bytes(item, count):
    sized = fastavro_long(-count) + fastavro_long(count * len(item)) + item * count
    plain = fastavro_long(count) + item * count
    mixed = AVRO.decode_publish(b"\x02" + sized + plain + b"\x00")
    assert mixed == AVRO.decode_publish(b"\x02" + plain + plain + b"\x00")
    assert len(mixed.messages) == 2 * count


def fastavro_long(number: int) -> bytes:
    out = BytesIO()
    fastavro.schemaless_writer(out, "long", number)
    return out.getvalue()
