"""The content of a daemon's topics, as any reader sees it; for tests that write with Spark."""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Any

from plainsong.protocol.frames import Frame, decode_frames
from pyspark_plainsong.calls import Calls
from pyspark_plainsong.wire import Wire

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from pyspark_plainsong.calls import Isolation

NAMESPACE = "demo"
_FIRST, _BEYOND = bytes(20), b"\x7f" + b"\xff" * 19
_PAGE = 10_000


class Topics:
    """The topics of the daemon at ``url``."""

    def __init__(self, url: str) -> None:
        self.url = url

    def create(self, topic: str, **properties: Any) -> str:
        """Create a topic and return its name."""
        self.ask("PUT", f"/v1/namespaces/{NAMESPACE}/topics/{topic}", {k: str(v) for k, v in properties.items()})
        return topic

    def options(self, topic: str | None = None, **further: Any) -> dict[str, str]:
        """Return options for Spark, with short retries, since the daemon is local."""
        given = {"url": self.url, "namespace": NAMESPACE, "retryIntervalMs": 50, "topic": topic, **further}
        return {name: str(value) for name, value in given.items() if value is not None}

    def messages(self, topic: str, isolation: Isolation = "uncommitted") -> list[Frame]:
        """Return all messages that a reader gets, in order."""
        found: list[Frame] = []
        with closing(calls_of(self.url)) as calls:
            start = _FIRST
            while True:
                page = calls.poll_frames(
                    topic, start=start, end_before=_BEYOND, limit=_PAGE, isolation=isolation, attributes=True
                )
                frames = decode_frames(page.body, attributes=True)
                found += frames
                if page.end != "more" or not frames:
                    return found
                start = (int.from_bytes(frames[-1].message_id, "big") + 1).to_bytes(20, "big")

    def payloads(self, topic: str, isolation: Isolation = "uncommitted") -> list[bytes]:
        return [frame.payload for frame in self.messages(topic, isolation)]

    def counted(self, topic: str) -> Counter[bytes]:
        """Count each payload, and check that every isolation level reads the same."""
        found = self.payloads(topic)
        assert self.payloads(topic, "committed") == found
        return Counter(found)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Make any other request, and return the decoded answer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read() or b"null")


def calls_of(url: str) -> Calls:
    """Return the connector's own calls, without retries; the caller closes them."""
    return Calls(Wire((url,), retries=0), NAMESPACE)


def numbers(spark: SparkSession, count: int, partitions: int = 2, first: int = 0) -> DataFrame:
    """Return rows whose payloads are the numbers from ``first`` on."""
    return spark.range(first, first + count, 1, partitions).selectExpr("encode(cast(id as string), 'utf-8') as payload")


def wanted(count: int, first: int = 0) -> Counter[bytes]:
    """Return the payloads that ``numbers`` must give, each once."""
    return Counter(b"%d" % number for number in range(first, first + count))


def address(url: str) -> tuple[str, int]:
    """Return host and port."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)
