"""Extreme values survive a restart, through every client function that takes them."""

from __future__ import annotations

from collections.abc import Callable
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
VALUES.append(Outgoing(bytes(range(256)) * (LARGE // 256), ttl_s=MAX_TTL_S))


def publish(client: Any, topic: str) -> None:
    for value in VALUES:
        client.publish(topic, value)


def publish_atomic(client: Any, topic: str) -> None:
    client.publish_atomic(topic, "r", VALUES)


def transaction(client: Any, topic: str) -> None:
    with client.transaction():
        for value in VALUES:
            client.publish(topic, value)


def publisher(client: Any, topic: str) -> None:
    with client.publisher(topic) as sender:
        for value in VALUES:
            sender.send(value)


def producer(client: Any, topic: str) -> None:
    with client.producer(topic, "p" * 255) as sender:
        for value in VALUES:
            sender.send(value)


def stream(client: Any, topic: str) -> None:
    with client.stream(topic) as sender:
        for value in VALUES:
            sender.publish(value)


DOORS = [publish, publish_atomic, transaction, publisher, producer, stream]


@pytest.mark.parametrize("name", ["t", "t" * 255])
@pytest.mark.parametrize("door", DOORS)
def test_data_sent_by_the_client_is_readable_after_a_restart(
    door: Callable[[Any, str], None], name: str, daemon: Callable[..., Daemon]
):
    first = daemon()
    with Client(url_of(first)) as client:
        client.create_topic(name, deduplication="enabled")
        door(client, name)
    first.stop()
    with Client(url_of(daemon())) as client, client.read(name, isolation="committed") as reader:
        found = [(message.payload, dict(message.attributes)) for message in reader]
    for _, attributes in found:
        attributes.pop("routingKey", None)
    assert found == [(value.value, dict(value.attributes or {})) for value in VALUES]
