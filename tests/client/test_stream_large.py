"""Stream requests that exceed the limit on pending bytes: each is sent alone, with the limits of a publish."""

from __future__ import annotations

from plainsong import AsyncClient, Client
from plainsong.protocol.errors import TransactionTooLarge
from plainsong.protocol.requests import PublishRequest


def test_a_request_larger_than_the_bound_is_sent_alone(client: Client, topic: str):
    with client.stream(topic, max_pending_bytes=10_000) as stream:
        stream.publish(b"before")
        large = stream.publish(b"x" * 20_000)
        assert len(stream._queue) <= 1
        after = stream.publish(b"after")
        assert large.done()
    assert large.result().first_id < after.result().first_id
    assert [len(message.payload) for message in client.read(topic)] == [6, 20_000, 5]


def test_the_largest_message_and_atomic_request_of_publish_go_through_a_stream(client: Client, topic: str):
    eight = bytes(8 << 20)
    with client.stream(topic) as stream:
        one = stream.publish(eight)
        both = stream.send(PublishRequest([eight, eight], atomic=True))
        over = stream.send(PublishRequest([eight, eight, b"x"], atomic=True))
        assert isinstance(over.exception(60), TransactionTooLarge)
    assert (one.result().count, both.result().count) == (1, 2)
    assert [len(message.payload) for message in client.read(topic)] == [8 << 20] * 3


async def test_the_largest_atomic_request_goes_through_a_stream_of_an_event_loop(shared_url: str, topic: str):
    eight = bytes(8 << 20)
    async with AsyncClient(shared_url) as own, own.stream(topic) as stream:
        small = await stream.publish(b"small")
        both = await stream.send(PublishRequest([eight, eight], atomic=True))
        after = await stream.publish(b"after")
    assert (await small).first_id < (await both).first_id < (await after).first_id
