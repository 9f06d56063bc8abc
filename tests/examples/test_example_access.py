"""Dataset accesses: trail, registry and lineage agree with the topic, even after kills."""

from __future__ import annotations

import json
import random
import sqlite3
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from plainsong import JSON, Client
from tests.examples.programs import Program, eventually, kill_now_and_then, lasting_daemon, mortal, run
from tests.patience import PATIENCE_S


def query(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path, timeout=PATIENCE_S)) as database:
        return database.execute(sql).fetchall()


def check(client: Client, directory: Path) -> int:
    """Compare the three results with the topic's messages; return the number of messages."""
    accesses = list(client.read("dataset-access", serializer=JSON))
    trail = [json.loads(line) for line in (directory / "audit.jsonl").read_text().splitlines()]
    assert [line.pop("id") for line in trail] == [str(each.id) for each in accesses]
    assert [line.pop("time") for line in trail] == [each.publish_time.isoformat() for each in accesses]
    values = [each.value for each in accesses]
    assert trail == values

    used = Counter((each["dataset"], each["program"]) for each in values)
    assert {(d, p): n for d, p, n in query(directory / "usage.db", "SELECT dataset, program, times FROM usage")} == used

    by_run: dict[str, list[dict[str, str]]] = {}
    for each in values:
        by_run.setdefault(each["run"], []).append(each)
    edges = {
        (source["dataset"], source["program"], target["dataset"])
        for accesses_of_run in by_run.values()
        for source in accesses_of_run
        for target in accesses_of_run
        if (source["access"], target["access"]) == ("read", "write")
    }
    assert set(query(directory / "lineage.db", "SELECT source, program, target FROM edges")) == edges
    return len(values)


def test_trail_registry_and_lineage_agree_with_the_topic(url: str, namespace: str, tmp_path: Path):
    for seed in ("4", "5"):  # the second run continues from the first
        said = run("access_events", url, "--namespace", namespace, "--directory", tmp_path, "--seed", seed)
    assert "orders-feed -- import-orders --> orders" in said
    with Client(url, namespace=namespace) as client:
        assert check(client, tmp_path) > 50


def test_a_line_torn_by_a_crash_is_written_again(url: str, namespace: str, tmp_path: Path):
    words = ("--namespace", namespace, "--directory", tmp_path)
    run("access_events", url, *words)
    trail = tmp_path / "audit.jsonl"
    trail.write_bytes(trail.read_bytes()[:-30])
    run("access_events", url, *words, "audit")
    with Client(url, namespace=namespace) as client:
        check(client, tmp_path)


def test_every_access_counts_once_although_consumers_and_daemon_are_killed(tmp_path: Path):
    with lasting_daemon(tmp_path) as (daemon, url), Client(url, namespace="access") as client:
        client.create_topic("dataset-access")
        words = ("--directory", tmp_path, "--follow")
        consumers = [
            Program(tmp_path / f"{each}.log", "access_events", url, *words, each)
            for each in ("audit", "usage", "lineage")
        ]
        publisher = Program(tmp_path / "log", "access_events", url, "--runs", "1500", "publish")
        with mortal(*consumers, publisher):
            kill_now_and_then(random.Random(11), 3, *consumers, daemon)
            assert publisher.wait() == 0
            published = client.admin.stats("dataset-access")["messages"]
            eventually("usage is complete", lambda: number(tmp_path, "usage.db", "sum(times) FROM usage") == published)
            eventually(
                "lineage is complete", lambda: number(tmp_path, "lineage.db", "count(*) FROM accesses") == published
            )
            eventually("the trail is complete", lambda: lines(tmp_path / "audit.jsonl") == published)
        assert not any("Traceback" in each.said() for each in consumers)
        assert check(client, tmp_path) == published


def lines(trail: Path) -> int | None:
    """Return the number of lines; None before the consumer has created the file."""
    with suppress(FileNotFoundError):
        return trail.read_bytes().count(b"\n")
    return None


def number(directory: Path, database: str, what: str) -> int | None:
    """Return a number from the database; None before the consumer has created its tables."""
    with suppress(sqlite3.OperationalError):
        found: int = query(directory / database, f"SELECT {what}")[0][0]
        return found
    return None
