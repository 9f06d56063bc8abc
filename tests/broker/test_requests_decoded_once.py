"""A body is decoded once, whether forwarding or the handler needs it first."""

from __future__ import annotations

import pytest

from broker.api.messages.poll import decode_poll, poll_wait_ms
from broker.api.topics.stats import offsets_wait_ms
from broker.http.messages import Request
from plainsong.protocol.codec import JSON
from plainsong.protocol.errors import MalformedBody

PATH = {"namespace": "ns", "topic": "t"}
HEADERS = {"content-type": "application/json"}


def test_a_handler_reads_the_poll_that_forwarding_has_decoded():
    request = Request(PATH, "", HEADERS, b'{"waitMs": 250}')
    assert poll_wait_ms(request) == 250
    decoded = request.decoded
    request.body = b"no longer read"
    assert decode_poll(request, JSON) is decoded


def test_a_record_is_read_from_the_body_decoded_before():
    request = Request(PATH, "", HEADERS, b'{"waitMs": 20, "start": null}')
    assert offsets_wait_ms(request) == 20
    decoded = request.json()
    assert request.json() is decoded
    assert request.fields({name: (name, lambda value, _: value) for name in decoded}) == decoded


@pytest.mark.parametrize("body", [b"[", b"[1]", b'{"waitMs": "soon"}', b"\xff"])
def test_an_unreadable_body_does_not_wait_and_is_refused_by_its_handler(body):
    poll, offsets = Request(PATH, "", HEADERS, body), Request(PATH, "", HEADERS, body)
    assert poll_wait_ms(poll) == offsets_wait_ms(offsets) == 0
    with pytest.raises(MalformedBody):
        decode_poll(poll, JSON)


def test_a_wait_in_the_query_counts():
    assert poll_wait_ms(Request(PATH, "wait_ms=70", HEADERS, b"")) == 70
    assert poll_wait_ms(Request(PATH, "wait_ms=soon", HEADERS, b"{}")) == 0
