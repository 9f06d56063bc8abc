"""Extreme values survive a restart, through every client function that takes them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from plainsong import Outgoing
from plainsong.protocol.requests import MAX_ATTRIBUTE_BYTES, MAX_TTL_S
from tests.client.client_under_test import Client
from tests.client.conftest import url_of
from tests.daemon.harness import Daemon

pytestmark = pytest.mark.usefixtures("both_clients")

#: With the default of ``http.max_body_bytes``, this payload and its attributes fit in every encoding.
LARGE = 4 << 20
ATTRIBUTES: list[dict[str, str]] = [
    {},
    {"k": ""},
    {"k": "v" * (MAX_ATTRIBUTE_BYTES - 1)},
    {"a" * MAX_ATTRIBUTE_BYTES: ""},
    {"é": "\U0001f600"},
]
VALUES = [
    Outgoing(b"x" * size, ttl_s=ttl_s, attributes=attributes)
    for size in (0, 1)
    for ttl_s in (1 << 20, MAX_TTL_S)
    for attributes in ATTRIBUTES
]
#: Values by the topic's name: a large payload goes through the same code under either name.
TOPICS = {"t": [*VALUES, Outgoing(bytes(range(256)) * (LARGE // 256), ttl_s=MAX_TTL_S)], "t" * 255: VALUES}


def publish(client: Any, topic: str, values: list[Outgoing]) -> None:
    for value in values:
        client.publish(topic, value)


def publish_atomic(client: Any, topic: str, values: list[Outgoing]) -> None:
    client.publish_atomic(topic, "r", values)


def transaction(client: Any, topic: str, values: list[Outgoing]) -> None:
    with client.transaction():
        for value in values:
            client.publish(topic, value)


def publisher(client: Any, topic: str, values: list[Outgoing]) -> None:
    with client.publisher(topic) as sender:
        for value in values:
            sender.send(value)


def producer(client: Any, topic: str, values: list[Outgoing]) -> None:
    with client.producer(topic, "p" * 255) as sender:
        for value in values:
            sender.send(value)


def stream(client: Any, topic: str, values: list[Outgoing]) -> None:
    with client.stream(topic) as sender:
        for value in values:
            sender.publish(value)


DOORS = [publish, publish_atomic, transaction, publisher, producer, stream]


def test_data_sent_by_the_client_is_readable_after_a_restart(daemon: Callable[..., Daemon]):
    first = daemon()
    for door, (topic, values) in product(DOORS, TOPICS.items()):
        with Client(url_of(first), namespace=door.__name__) as client:
            client.create_topic(topic, deduplication="enabled")
            door(client, topic, values)
    first.stop()
    second = daemon()
    for door, (topic, values) in product(DOORS, TOPICS.items()):
        with (
            Client(url_of(second), namespace=door.__name__) as client,
            client.read(topic, isolation="committed") as reader,
        ):
            found = [(message.payload, dict(message.attributes)) for message in reader]
        for _, attributes in found:
            attributes.pop("routingKey", None)
        sent = [(value.value, dict(value.attributes or {})) for value in values]
        assert found == sent, (door.__name__, len(topic))
