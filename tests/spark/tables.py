"""Runs the connector's readers without Spark, against a real daemon whose topics hold messages of every kind."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import StructField, StructType
from topics import NAMESPACE, Topics

from pyspark_plainsong.columns import COLUMNS, read_schema
from pyspark_plainsong.options import ReadOptions
from pyspark_plainsong.readers import BatchReader, StreamReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql.streaming.datasource import ReadLimit

    from pyspark_plainsong.partitions import TopicRange

READ = f"/v1/namespaces/{NAMESPACE}/topics"


class Tables(Topics):
    """Topics of a real daemon, and the connector's readers of them."""

    def publish(self, topic: str, *payloads: str, **fields: Any) -> None:
        self.ask("POST", f"{READ}/{topic}/publish", {"messages": list(payloads), **fields})

    def publish_many(self, topic: str, count: int, first: int = 0) -> list[bytes]:
        """Publish ``count`` messages, each a number; return their payloads."""
        texts = [f"{number:06d}" for number in range(first, first + count)]
        for at in range(0, count, 1000):
            self.publish(topic, *texts[at : at + 1000])
        return [text.encode() for text in texts]

    def begin(self) -> int:
        return int(self.ask("POST", "/v1/transactions")["id"])

    def decide(self, transaction: int, verb: str) -> None:
        self.ask("POST", f"/v1/transactions/{transaction}/{verb}")

    def delete(self, topic: str) -> None:
        self.ask("DELETE", f"{READ}/{topic}")

    def let_expire(self, topic: str, message_id: bytes) -> None:
        """Expire all messages up to this one, by shortening the topic's time to live for a moment.

        Messages published afterwards stay. Expired messages do not return when the time to live is extended again.
        """
        self.ask("PUT", f"{READ}/{topic}/properties", {"ttl": 1})
        wait_until_later_than(int.from_bytes(message_id[:8], "big") + 1100)
        self.ask("PUT", f"{READ}/{topic}/properties", {"ttl": 3600})

    def store(self, topic: str, pointer: int, *payloads: str) -> None:
        self.ask("POST", f"{READ}/{topic}/store", {"transactionWritePointer": pointer, "messages": list(payloads)})

    # --- reading -------------------------------------------------------------------------------

    def read_options(self, topic: str | None, *, streaming: bool = False, **given: Any) -> ReadOptions:
        options = {**self.options(subscribe=topic, pollTimeoutMs=0), **{k: str(v) for k, v in given.items()}}
        return ReadOptions.parse({name.lower(): value for name, value in options.items()}, streaming=streaming)

    def batch(self, topic: str | None, *columns: str, **given: Any) -> BatchReader:
        return BatchReader(self.read_options(topic, **given), schema_of(columns))

    def stream(self, topic: str | None, **given: Any) -> StreamReader:
        return StreamReader(self.read_options(topic, streaming=True, **given), schema_of(("payload",)))

    def rows(self, topic: str | None, *columns: str, **given: Any) -> list[dict[str, Any]]:
        """Return the rows of all partitions, in order."""
        reader = self.batch(topic, *columns, **given)
        return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]

    def read(self, topic: str | None, **given: Any) -> list[bytes]:
        return [row["payload"] for row in self.rows(topic, "payload", **given)]


def schema_of(columns: Sequence[str]) -> StructType:
    """Return a schema of the given columns, or of all columns if none are given."""
    if not columns:
        return read_schema(include_transaction=False)
    return StructType([StructField(name, COLUMNS[name]) for name in columns])


def sizes(reader: BatchReader | StreamReader, parts: Sequence[TopicRange]) -> list[int]:
    """Return the number of rows in each partition."""
    return [sum(batch.num_rows for batch in reader.read(part)) for part in parts]


def payloads(reader: BatchReader | StreamReader, parts: Sequence[TopicRange]) -> list[bytes]:
    return [value.as_py() for part in parts for batch in reader.read(part) for value in batch.column("payload")]


def wait_until_later_than(milliseconds: int) -> None:
    """Wait until the system clock, which the daemon uses too, is past this time."""
    while time.time() * 1000 <= milliseconds:
        time.sleep(0.005)


def batches(
    reader: StreamReader, start: dict[str, Any], limit: ReadLimit | None = None, most: int = 50
) -> tuple[list[list[bytes]], dict[str, Any]]:
    """Read micro-batches until there is nothing new. Return the payloads of each, and the last offset."""
    found: list[list[bytes]] = []
    limit = limit or reader.getDefaultReadLimit()
    for _ in range(most):
        end = reader.latestOffset(start, limit)
        if end == start:
            return found, start
        found.append(payloads(reader, reader.partitions(start, end)))
        start = json.loads(json.dumps(end))
    raise AssertionError(f"still something new after {most} batches")
