"""The rules for JSON bodies, as docs/http.md states them."""

from __future__ import annotations

import json

import pytest

from plainsong.protocol.codec import JSON, PageOptions, rolls_back_all
from plainsong.protocol.errors import (
    InvalidMessageId,
    InvalidParameter,
    InvalidSequenceIds,
    MalformedBody,
    UnknownField,
)
from plainsong.protocol.page import Page, item
from plainsong.protocol.requests import PollRequest, PublishResponse, Receipt

ID = bytes(range(20))


def publish(**fields):
    return JSON.decode_publish(json.dumps(fields).encode())


def poll(**fields):
    return JSON.decode_poll(json.dumps(fields).encode())


def answered(codec_bytes: bytes):
    return json.loads(codec_bytes)


def page_of(*payloads: bytes) -> Page:
    return Page([item(ID, payload) for payload in payloads], len(payloads))


# --- payloads ----------------------------------------------------------------------------------


def test_a_payload_is_text_or_base64_or_avros_iso_8859_1():
    request = publish(
        messages=["é", {"base64": "AP8="}, {"bytes": "é\u0000"}, {"payload": "p"}, {"payload": {"base64": ""}}]
    )
    assert list(request.messages) == [b"\xc3\xa9", b"\x00\xff", b"\xe9\x00", b"p", b""]
    assert request.message_ttls_s is request.sequence_ids is request.attributes is None


@pytest.mark.parametrize("wrong", ["A", "A===", "AA=", "A A=", "é===", "_-==", "AAAA=", "AA==AA=="])
def test_base64_is_strict(wrong):
    with pytest.raises(MalformedBody, match=r"messages\[1\] is not base64"):
        publish(messages=["", {"base64": wrong}])


def test_a_character_beyond_iso_8859_1_is_not_a_byte():
    with pytest.raises(MalformedBody, match=r"messages\[0\]: character 1 is not a byte"):
        publish(messages=[{"bytes": "a\u20ac"}])


def test_an_answer_is_text_where_it_is_utf_8_and_base64_otherwise():
    page = page_of('é"\\\n\x7f\u2028😀'.encode(), b"\xff", b"", b"\xed\xa0\x80")
    assert [message["payload"] for message in answered(JSON.encode_page(page))] == [
        'é"\\\n\x7f\u2028😀',
        {"base64": "/w=="},
        "",
        {"base64": "7aCA"},
    ]
    assert answered(JSON.encode_page(page))[0]["id"] == ID.hex()


def test_payloads_are_all_base64_on_request():
    assert answered(JSON.encode_page(page_of(b"m"), PageOptions(payload_base64=True)))[0]["payload"] == {
        "base64": "bQ=="
    }


def test_attributes_are_left_out_of_an_answer_when_there_are_none():
    page = page_of(b"a", b"b", b"c")
    page.attributes = {1: {"k": "é"}, 2: {}}
    first, second, third = answered(JSON.encode_page(page))
    assert second["attributes"] == {"k": "é"}
    assert first.keys() == third.keys() == {"id", "payload"}


def test_an_empty_page_is_an_empty_list():
    assert JSON.encode_page(Page()) == b"[]"


# --- items with further fields -----------------------------------------------------------------


def test_items_become_the_lists_of_the_request():
    request = publish(
        messages=[
            {"payload": "a", "ttlSeconds": 5, "sequenceId": 1, "attributes": {"k": "v"}},
            {"payload": "b", "ttlSeconds": None, "sequenceId": {"long": 2}},
        ]
    )
    assert request.message_ttls_s == [5, None]
    assert request.sequence_ids == [1, 2]
    assert request.attributes == [{"k": "v"}, {}]


def test_messages_without_items_take_part_in_the_lists():
    request = publish(messages=["a", {"payload": "b", "ttlSeconds": 7}])
    assert request.message_ttls_s == [None, 7]


@pytest.mark.parametrize("other", ["b", {"payload": "b"}, {"payload": "b", "sequenceId": None}])
def test_all_items_have_a_sequence_id_or_none(other):
    with pytest.raises(InvalidSequenceIds, match=r"messages\[1\] has no sequenceId"):
        publish(messages=[{"payload": "a", "sequenceId": 1}, other])


def test_sequence_ids_are_given_once():
    with pytest.raises(InvalidSequenceIds, match="sequenceIds is given both as a list and in the items"):
        publish(messages=[{"payload": "a", "sequenceId": 1}], sequenceIds=[1])
    with pytest.raises(MalformedBody, match="messageTtlsSeconds is given both as a list"):
        publish(messages=[{"payload": "a", "ttlSeconds": 1}], messageTtlsSeconds=[1])
    with pytest.raises(MalformedBody, match="attributes is given both as a list"):
        publish(messages=[{"payload": "a", "attributes": {"a": "b"}}], attributes=[{}])


@pytest.mark.parametrize(
    ("item_", "error", "detail", "hint"),
    [
        ({"payload": "a", "ttlSecond": 1}, UnknownField, "messages[0].'ttlSecond'", "did you mean 'ttlSeconds'?"),
        ({"paylod": "a"}, UnknownField, "messages[0].'paylod'", "did you mean 'payload'?"),
        ({"base46": "AA=="}, UnknownField, "messages[0].'base46'", "did you mean 'base64'?"),
        ({"ttlSeconds": 1}, MalformedBody, "messages[0] has no payload", "a string"),
        ({}, MalformedBody, "messages[0] has no payload", "a string"),
        ({"base64": "AA==", "x": 1}, MalformedBody, "messages[0] is an object, not a string", ""),
        (None, MalformedBody, "messages[0] is null", ""),
        ({"payload": "a", "attributes": {"k": 1}}, MalformedBody, "messages[0].attributes.'k' is a number 1", ""),
    ],
)
def test_an_entry_that_is_neither_form_is_refused_by_name(item_, error, detail, hint):
    with pytest.raises(error) as caught:
        publish(messages=[item_])
    assert detail in caught.value.detail
    assert hint in caught.value.hint


# --- fields ------------------------------------------------------------------------------------


def test_every_optional_field_may_be_left_out():
    assert publish(messages=["m"]) == publish(messages=["m"], transactionWritePointer=None, ttlSeconds=None)
    assert poll() == PollRequest()
    assert list(publish(transactionWritePointer=1).messages) == []


def test_an_empty_poll_body_asks_for_everything():
    assert JSON.decode_poll(b"") == PollRequest()


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("ttlSecond", "ttlSeconds"),
        ("ttl_seconds", "ttlSeconds"),
        ("message", "messages"),
        ("writePointer", "transactionWritePointer"),
    ],
)
def test_an_unknown_field_names_the_nearest(wrong, right):
    with pytest.raises(UnknownField) as caught:
        publish(**{wrong: 1})
    assert repr(wrong) in caught.value.detail
    assert repr(right) in caught.value.hint


def test_the_refusal_of_an_unknown_field_without_a_near_name_lists_all_names():
    with pytest.raises(UnknownField) as caught:
        poll(zzz=1)
    assert "startFrom" in caught.value.hint


def test_a_union_value_is_bare_or_tagged():
    bare = publish(
        transactionWritePointer=5,
        ttlSeconds=6,
        producer="p",
        sequenceIds=[1],
        segments=["a"],
        messageTtlsSeconds=[1, None],
    )
    tagged = publish(
        transactionWritePointer={"long": 5},
        ttlSeconds={"int": 6},
        producer={"string": "p"},
        sequenceIds={"array": [1]},
        segments={"array": ["a"]},
        messageTtlsSeconds={"array": [{"int": 1}, None]},
    )
    assert bare == tagged
    assert poll(limit={"int": 5}, isolation={"Isolation": "committed"}) == poll(limit=5, isolation="committed")
    with pytest.raises(MalformedBody, match="limit is an object"):
        poll(limit={"long": 5})


def test_a_write_pointer_may_be_written_as_digits_and_keeps_all_its_bits():
    big = (1 << 63) - 1
    assert publish(transactionWritePointer=str(big)).write_pointer == publish(transactionWritePointer=big).write_pointer
    assert publish(transactionWritePointer={"long": str(big)}).write_pointer == big
    for wrong in ("", "1.0", "0x1", "1 ", "١", "1e3"):
        with pytest.raises(MalformedBody, match="transactionWritePointer is a string"):
            publish(transactionWritePointer=wrong)


def test_only_write_pointers_may_be_written_as_digits():
    with pytest.raises(MalformedBody, match="ttlSeconds is a string"):
        publish(ttlSeconds="5")


def test_an_unknown_isolation_is_refused():
    with pytest.raises(MalformedBody, match="isolation is a string, not uncommitted or committed"):
        poll(isolation="serializable")


# --- positions, and bytes that are not text ----------------------------------------------------


def test_a_start_is_an_id_or_a_time():
    assert poll(startFrom=ID.hex()).start_from == ID
    assert poll(startFrom=1700000000000).start_from == 1700000000000
    assert poll(startFrom={"long": 17}).start_from == 17
    assert poll(startFrom={"base64": "AAECAwQFBgcICQoLDA0ODxAREhM="}).start_from == ID
    assert poll(startFrom={"bytes": ID.decode("latin-1")}).start_from == ID


def test_a_start_of_any_other_form_is_refused():
    with pytest.raises(InvalidMessageId) as caught:
        poll(startFrom="1700000000000")
    assert "without quotes" in caught.value.hint
    with pytest.raises(InvalidMessageId):
        poll(startFrom="00" * 19)
    with pytest.raises(InvalidParameter, match="below 0"):
        poll(startFrom=-1)
    for wrong in (True, 1.5, [], 1 << 63):
        with pytest.raises(MalformedBody, match="startFrom is not a position"):
            poll(startFrom=wrong)


def test_an_end_is_an_id_only():
    assert poll(endBefore=ID.hex()).end_before == ID
    with pytest.raises(MalformedBody, match="endBefore is a number 5"):
        poll(endBefore=5)
    with pytest.raises(InvalidMessageId):
        poll(endBefore="5")


def test_a_transaction_is_base64_never_text():
    assert poll(transaction="AP8=").transaction == b"\x00\xff"
    assert poll(transaction={"base64": "AP8="}).transaction == b"\x00\xff"
    assert poll(transaction={"bytes": "\u0000\u00ff"}).transaction == b"\x00\xff"
    with pytest.raises(MalformedBody, match="transaction is not base64"):
        poll(transaction="not base64!")


# --- answers, and one that is sent back --------------------------------------------------------


def test_write_pointers_are_strings_on_request():
    response = PublishResponse(1 << 60, 1, 2, 3, 4)
    assert answered(JSON.encode_publish_response(response))["transactionWritePointer"] == 1 << 60
    options = PageOptions(longs_as_strings=True)
    assert answered(JSON.encode_publish_response(response, options))["transactionWritePointer"] == str(1 << 60)


def test_a_publish_response_has_the_names_of_the_schema():
    assert answered(JSON.encode_publish_response(PublishResponse(1, 2, 3, 4, 5))) == {
        "transactionWritePointer": 1,
        "startTimestamp": 2,
        "startSequenceId": 3,
        "endTimestamp": 4,
        "endSequenceId": 5,
        "duplicate": False,
    }


def test_a_receipt_has_stored_and_dropped_only_for_a_straddling_request():
    plain = {
        "firstId": ID.hex(),
        "lastId": None,
        "duplicate": False,
        "deduplicated": True,
        "lastSequenceId": 7,
        "generation": 2,
    }
    assert answered(JSON.encode_receipt(Receipt(ID, None, 2, False, True, 7))) == plain
    both = answered(JSON.encode_receipt(Receipt(ID, None, 2, False, True, 7, [1], [2])))
    assert both == plain | {"stored": [1], "dropped": [2]}


def test_a_pointer_alone_rolls_back_all_it_has():
    response = JSON.decode_rollback(b'{"transactionWritePointer":"5"}')
    assert response.write_pointer == 5
    assert rolls_back_all(response)
    assert not rolls_back_all(JSON.decode_rollback(JSON.encode_publish_response(PublishResponse(5, 0, 0, 9, 9))))
    assert JSON.decode_rollback(b"{}").write_pointer is None


def test_half_a_range_is_refused():
    with pytest.raises(MalformedBody, match="endSequenceId is missing"):
        JSON.decode_rollback(b'{"transactionWritePointer":5,"startTimestamp":1,"startSequenceId":0,"endTimestamp":2}')
