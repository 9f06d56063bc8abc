"""Attributes as readers get them: by poll, read and messages, from one topic and from many, blocking or not."""

from __future__ import annotations

import json
from urllib.request import Request, urlopen

import pytest
from test_async import on_both_loops

from plainsong import AsyncClient, Client
from tests.patience import PATIENCE_S

STRINGS = [{"traceparent": "00-1", "é": "ü"}, {}, {"routingKey": "k"}]


@pytest.fixture
def attributed(shared_url: str, topic: str) -> str:
    """A topic with three messages that were published without the client, by a producer's atomic request."""
    items = [{"payload": f"m{index}", "attributes": each} for index, each in enumerate(STRINGS)]
    body = {"messages": items, "producer": "p", "sequenceIds": [5, 6, 9], "atomic": True}
    url = f"{shared_url}/v1/namespaces/default/topics/{topic}/publish"
    urlopen(Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"}), timeout=PATIENCE_S).close()
    return topic


def test_a_poll_a_read_and_a_read_of_many_topics_have_them(client: Client, attributed: str):
    other = client.create_topic(attributed + "-other").name
    client.publish(other, b"plain")
    assert [dict(each.attributes) for each in client.poll(attributed)] == STRINGS
    assert [dict(each.attributes) for each in client.poll(attributed, limit=2)] == STRINGS[:2]
    assert [dict(each.attributes) for each in client.read(attributed)] == STRINGS
    both = client.read([attributed, other])
    assert {each.payload: dict(each.attributes) for each in both} == {
        b"plain": {},
        **{b"m%d" % index: each for index, each in enumerate(STRINGS)},
    }


def test_peek_shows_producer_sequence_id_and_place_in_the_batch_too(client: Client, attributed: str):
    seen = client.admin.messages(attributed)
    assert [dict(each.attributes) for each in seen] == STRINGS
    assert [(each.producer, each.sequence_id) for each in seen] == [("p", 5), ("p", 6), ("p", 9)]
    places = [each.batch for each in seen if each.batch is not None]
    assert [(each.index, each.count) for each in places] == [(0, 3), (1, 3), (2, 3)]
    client.publish(attributed, b"plain")
    plain = client.admin.messages(attributed, seen[-1].id)[-1]
    assert (plain.producer, plain.sequence_id, plain.batch, dict(plain.attributes)) == (None, None, None, {})


@on_both_loops
async def test_an_async_client_has_them_as_well(shared_url: str, attributed: str):
    async with AsyncClient(shared_url) as client:
        assert [dict(each.attributes) for each in await client.poll(attributed)] == STRINGS
        assert [dict(each.attributes) async for each in client.read(attributed)] == STRINGS
