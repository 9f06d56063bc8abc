"""The requests of the benchmark, byte for byte, and the messages in them.

Payloads are text that hardly compresses, each different from the next, the same in every run.
"""

from __future__ import annotations

import base64
import random
from functools import lru_cache
from itertools import count as count_from
from typing import TYPE_CHECKING

from bench.load import post
from plainsong.protocol.codec import AVRO, JSON
from plainsong.protocol.names import TopicName
from plainsong.protocol.requests import PollRequest, PublishRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMESPACE = "bench"
AVRO_TYPE = "Content-Type: avro/binary"
JSON_TYPE = "Content-Type: application/json"
FRAMES = "Accept: application/vnd.plainsong.frames"

#: How polls are asked for, by the name of the encoding they are answered in.
ENCODINGS = {"avro": [AVRO_TYPE], "frames": [AVRO_TYPE, FRAMES], "json": [JSON_TYPE]}


def topic(name: str) -> TopicName:
    """A topic of the benchmark's namespace."""
    return TopicName(NAMESPACE, name)


def path(name: str, verb: str = "") -> str:
    """The path of a topic, or of one of its verbs."""
    return f"/v1/namespaces/{NAMESPACE}/topics/{name}" + (f"/{verb}" if verb else "")


@lru_cache(maxsize=8)
def payloads(count: int, size: int) -> list[bytes]:
    """``count`` messages of ``size`` bytes."""
    dice = random.Random(7)
    text = base64.b64encode(dice.randbytes(count * size))
    return [text[at : at + size] for at in range(0, count * size, size)]


def publish(name: str, count: int, size: int) -> bytes:
    """A publish of ``count`` messages of ``size`` bytes."""
    body = AVRO.encode_publish(PublishRequest(payloads(count, size)))
    return post(path(name, "publish"), body, [AVRO_TYPE])


def held_poll(name: str, wait_ms: int) -> bytes:
    """A poll of everything, held while there is nothing."""
    return post(path(name, "poll"), JSON.encode_poll(PollRequest(wait_ms=wait_ms)), [JSON_TYPE])


def poll(name: str, encoding: str, start_from: bytes, limit: int) -> bytes:
    """A poll of ``limit`` messages from an id on, inclusive."""
    codec = JSON if encoding == "json" else AVRO
    body = codec.encode_poll(PollRequest(start_from, limit=limit))
    return post(path(name, "poll"), body, ENCODINGS[encoding])


#: More pages of 10 000 messages than a daemon reads from its store in a second.
MOST_PAGES = 600


class NewPages:
    """Requests for pages of a topic that nobody has asked for before: each round through the topic has its own limit."""

    def __init__(self, topic: str, starts: Sequence[bytes], page: int) -> None:
        if not starts:
            raise ValueError(f"the topic {topic} has too few messages")
        self._topic, self._starts = topic, starts
        self._limits = count_from(page, -1)

    def take(self, encoding: str, least: int) -> list[tuple[int, bytes]]:
        """So many of them, or a few more: how many messages each asks for, and its request."""
        taken: list[tuple[int, bytes]] = []
        while len(taken) < least:
            limit = next(self._limits)
            taken += [(limit, poll(self._topic, encoding, start, limit)) for start in self._starts]
        return taken
