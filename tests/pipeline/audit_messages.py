"""Audit messages as the connector gives them, and the tables as the reference keeps them: for the tests of the audit."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from pyspark_plainsong.pipeline.audit.keeping import TABLE
from pyspark_plainsong.pipeline.audit.reading import arrow
from tests.pipeline.audit_reference import Message, Tables, change_of

COLUMNS = "namespace string, topic string, message_id binary, publish_timestamp timestamp, payload binary"
PUBLISHED_MS = 1_740_000_000_000


def message_id(number: int) -> bytes:
    return (PUBLISHED_MS + number).to_bytes(8, "big") + bytes(12)


def messages_of(payloads: list[bytes], first: int = 0, topic: str = "default:audit") -> list[Message]:
    """Return messages with these payloads, published one per millisecond."""
    return [(topic, message_id(first + n), PUBLISHED_MS + first + n, each) for n, each in enumerate(payloads)]


def frame_of(spark: SparkSession, messages: list[Message]) -> DataFrame:
    rows = [
        (*topic.split(":"), bytearray(each), moment(published_ms), bytearray(payload))
        for topic, each, published_ms, payload in messages
    ]
    return spark.createDataFrame(rows, COLUMNS)


def moment(timestamp_ms: int) -> datetime:
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC)


def ms(time: datetime) -> int:
    return round(time.timestamp() * 1000)


def tables_in(root: Path) -> Tables:
    """Read the tables of a folder in the form of the reference; duplicates fail."""
    found = Tables()
    names = ("type", "namespace", "user", "entity", "program", "run", "access")
    for row in arrow(root, TABLE["trail"]).to_pylist():
        changes = [None if row["added"] is None else change(row[part]) for part in ("previous", "added", "removed")]
        key = row["topic"], row["message_id"]
        assert key not in found.trail
        found.trail[key] = (ms(row["time"]), *(row[each] for each in names), *changes, ms(row["published"]))
    for row in arrow(root, TABLE["dead_letters"]).to_pylist():
        key = row["topic"], row["message_id"]
        assert key not in found.dead
        assert key not in found.trail
        found.dead[key] = (row["reason"], row["detail"], row["payload"])
    for name, kept, keys, counts in (
        ("usage", found.usage, ("namespace", "program", "dataset"), ("reads", "writes", "unknowns")),
        ("edges", found.edges, ("namespace", "program", "run", "dataset", "access"), ("accesses",)),
    ):
        for row in arrow(root, TABLE[name]).to_pylist():
            key = tuple(row[each] for each in keys)
            assert key not in kept
            kept[key] = [ms(row["first_seen"]), ms(row["last_seen"]), *(row[each] for each in counts)]
    return found


def change(value: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    return change_of({"properties": dict(value["properties"]), "tags": list(value["tags"])})


def check_equal(found: Tables, expected: Tables) -> None:
    """All four tables, row by row."""
    assert found.trail == expected.trail
    assert found.usage == expected.usage
    assert found.edges == expected.edges
    assert {key: (row[0], row[2]) for key, row in found.dead.items()} == {
        key: (row[0], row[2]) for key, row in expected.dead.items()
    }
    details = {key: row[1] for key, row in expected.dead.items() if row[1] is not ...}
    assert {key: found.dead[key][1] for key in details} == details
