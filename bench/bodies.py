"""The benchmark's requests as bytes, and the messages in them.

Payloads are barely compressible text, all different, and the same in every run.
"""

from __future__ import annotations

import base64
import random
from functools import lru_cache
from itertools import count as count_from
from typing import TYPE_CHECKING

from bench.load import post
from plainsong.protocol.codec import AVRO, JSON
from plainsong.protocol.ids import pack_id, unpack_id
from plainsong.protocol.names import TopicName
from plainsong.protocol.requests import PollRequest, PublishRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMESPACE = "bench"
#: Messages per millisecond in a topic filled by ``bench.seed``.
BATCH_ROWS = 10_000
AVRO_TYPE = "Content-Type: avro/binary"
JSON_TYPE = "Content-Type: application/json"
FRAMES = "Accept: application/vnd.plainsong.frames"

#: Request headers of a poll, by the encoding of its response.
ENCODINGS = {"avro": [AVRO_TYPE], "frames": [AVRO_TYPE, FRAMES], "json": [JSON_TYPE]}


def topic(name: str) -> TopicName:
    """Return a topic name in the benchmark's namespace."""
    return TopicName(NAMESPACE, name)


def path(name: str, verb: str = "") -> str:
    """Return the path of a topic, or of one of its verbs."""
    return f"/v1/namespaces/{NAMESPACE}/topics/{name}" + (f"/{verb}" if verb else "")


@lru_cache(maxsize=8)
def payloads(count: int, size: int) -> list[bytes]:
    """Return ``count`` messages of ``size`` bytes."""
    dice = random.Random(7)
    text = base64.b64encode(dice.randbytes(count * size))
    return [text[at : at + size] for at in range(0, count * size, size)]


def publish(name: str, count: int, size: int) -> bytes:
    """Return a publish of ``count`` messages of ``size`` bytes."""
    body = AVRO.encode_publish(PublishRequest(payloads(count, size)))
    return post(path(name, "publish"), body, [AVRO_TYPE])


def held_poll(name: str, wait_ms: int) -> bytes:
    """Return a poll from the start of the topic that waits while the topic is empty."""
    return post(path(name, "poll"), JSON.encode_poll(PollRequest(wait_ms=wait_ms)), [JSON_TYPE])


def poll(name: str, encoding: str, start_from: bytes, limit: int, *, inclusive: bool = True) -> bytes:
    """Return a poll of up to ``limit`` messages, starting at an id."""
    codec = JSON if encoding == "json" else AVRO
    body = codec.encode_poll(PollRequest(start_from, limit=limit, inclusive=inclusive))
    return post(path(name, "poll"), body, ENCODINGS[encoding])


#: More pages of 10 000 messages than a daemon can read from its store in a second.
MOST_PAGES = 600


class NewPages:
    """Poll requests of readers that walk through a topic, each page starting where the previous one ended.

    No page is requested twice: each walk uses a different limit.
    """

    def __init__(self, topic: str, firsts: Sequence[bytes], page: int) -> None:
        """``firsts``: the result of ``bench.seed.seed``; the messages of its last batch are not read."""
        if len(firsts) < 2:
            raise ValueError(f"the topic {topic} has too few messages")
        self._topic, self._firsts = topic, firsts
        self._limits = count_from(page, -1)

    def take(self, encoding: str, least: int) -> list[tuple[int, bytes]]:
        """Return at least ``least`` requests, each with the number of messages it asks for."""
        taken: list[tuple[int, bytes]] = []
        messages = (len(self._firsts) - 1) * BATCH_ROWS
        while len(taken) < least:
            limit = next(self._limits)
            taken.append((limit, poll(self._topic, encoding, self._id(0), limit)))
            for at in range(limit, messages - limit + 1, limit):
                request = poll(self._topic, encoding, self._id(at - 1), limit, inclusive=False)
                taken.append((limit, request))
        return taken

    def _id(self, number: int) -> bytes:
        """Return the id of the topic's message with this number, counted from 0."""
        batch, at = divmod(number, BATCH_ROWS)
        first = unpack_id(self._firsts[batch])
        return pack_id(first.publish_ts_ms, first.sequence_id + at)
