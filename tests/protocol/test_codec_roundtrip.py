"""Every record survives a round trip in every encoding, and fastavro agrees on the Avro encodings."""

from __future__ import annotations

import codec_records as records
import pytest
from hypothesis import given

from plainsong.protocol.codec import PageOptions, avro
from tests.codecs import AVRO, AVRO_2, JSON, by_fastavro

VERSION_2 = pytest.mark.parametrize("codec", [AVRO_2, JSON])
EVERY = pytest.mark.parametrize("codec", [AVRO, AVRO_2, JSON])


@given(records.publishes_1)
def test_a_publish_round_trips_in_version_1(request_):
    body = AVRO.encode_publish(request_)
    assert AVRO.decode_publish(body) == request_
    assert by_fastavro(avro.PUBLISH_REQUEST.parsed, body)["messages"] == request_.messages


@VERSION_2
@given(request_=records.publishes)
def test_a_publish_round_trips(codec, request_):
    assert codec.decode_publish(codec.encode_publish(request_)) == request_


@given(records.publishes)
def test_fastavro_reads_the_attributes_we_write(request_):
    assert (
        by_fastavro(avro.PUBLISH_REQUEST_2.parsed, AVRO_2.encode_publish(request_))["attributes"] == request_.attributes
    )


@given(records.polls_1)
def test_a_poll_round_trips_in_version_1(request_):
    assert AVRO.decode_poll(AVRO.encode_poll(request_)) == request_


@VERSION_2
@given(request_=records.polls)
def test_a_poll_round_trips(codec, request_):
    assert codec.decode_poll(codec.encode_poll(request_)) == request_


@EVERY
@given(response=records.responses_1)
def test_a_publish_response_round_trips_and_rolls_back(codec, response):
    body = codec.encode_publish_response(response)
    assert codec.decode_publish_response(body) == codec.decode_rollback(body) == response


@VERSION_2
@given(response=records.responses)
def test_a_rollback_accepts_a_response_with_the_duplicate_flag(codec, response):
    assert codec.decode_rollback(codec.encode_publish_response(response)) == response


@given(records.responses)
def test_a_rollback_accepts_pointers_written_as_strings(response):
    assert JSON.decode_rollback(JSON.encode_publish_response(response, PageOptions(longs_as_strings=True))) == response


@EVERY
@given(receipt=records.receipts)
def test_a_receipt_round_trips(codec, receipt):
    assert codec.decode_receipt(codec.encode_receipt(receipt)) == receipt


@given(records.pages())
def test_a_page_round_trips_in_version_1_without_its_attributes(page):
    body = AVRO.encode_page(page)
    assert [message[:2] for message in AVRO.decode_page(body)] == list(page.messages())


@VERSION_2
@given(page=records.pages())
def test_a_page_round_trips_with_its_attributes(codec, page):
    expected = [(*message, page.attributes.get(index, {})) for index, message in enumerate(page.messages())]
    assert codec.decode_page(codec.encode_page(page)) == expected


@given(records.pages())
def test_a_page_round_trips_as_json_with_every_payload_in_base64(page):
    body = JSON.encode_page(page, PageOptions(payload_base64=True))
    assert body.count(b'"base64":"') >= page.count
    assert [message[:2] for message in JSON.decode_page(body)] == list(page.messages())


@pytest.mark.parametrize("spread", [1, 2, 70])
def test_long_parts_of_messages_alike_and_different_round_trip(spread):
    messages = [(n.to_bytes(20, "big"), b"x" * (100 + n % spread)) for n in range(500)]
    page = records.page_of(messages)
    page.parts = [b"".join(page.parts)]
    for codec in (AVRO, AVRO_2, JSON):
        assert [message[:2] for message in codec.decode_page(codec.encode_page(page))] == messages


@given(receipt=records.receipts)
def test_a_receipt_written_by_hand_matches_its_schema(receipt):
    names = ("first_id", "last_id", "duplicate", "deduplicated", "last_sequence_id", "generation", "stored", "dropped")
    values = by_fastavro(avro.RECEIPT.parsed, AVRO.encode_receipt(receipt)).values()
    assert dict(zip(names, values, strict=True)) == {name: getattr(receipt, name) for name in names}
