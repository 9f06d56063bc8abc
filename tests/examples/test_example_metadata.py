"""The metadata index: the result of edits, each of which counts once even if the indexer is killed."""

from __future__ import annotations

import json
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from plainsong import JSON, Client
from tests.examples.programs import Program, eventually, kill_now_and_then, lasting_daemon, mortal, run
from tests.patience import PATIENCE_S


def test_edits_are_found_by_the_entities_they_changed(url: str, namespace: str, tmp_path: Path):
    words = ("--namespace", namespace, "--database", tmp_path / "index.db")
    said = run("metadata_index", url, *words)
    assert "dataset:orders" in said
    assert "dataset:customers" in said
    assert run("metadata_index", url, *words, "search", "draft") == ""  # the tag was removed again
    run("metadata_index", url, *words, "edit", "dataset:orders", "owner=finance", "tag+=gold")
    assert run("metadata_index", url, *words, "index") == "indexed 2 changes\n"
    assert run("metadata_index", url, *words, "search", "gold") == (
        'dataset:orders {"properties": {"owner": "finance", "format": "parquet"}, "tags": ["pii", "gold"]} after 7 changes\n'
    )
    with Client(url, namespace=namespace) as client:  # an edit is complete, and has the entity as its routing key
        keys = [message.attributes["routingKey"] for message in client.read("metadata-changes", serializer=JSON)]
        assert (
            keys
            == ["dataset:orders"] * 3
            + ["dataset:customers"] * 2
            + ["dataset:orders"] * 2
            + ["program:join"] * 2
            + ["dataset:orders"] * 2
        )


def test_every_change_is_applied_once_even_if_indexer_and_daemon_are_killed(tmp_path: Path):
    chance = random.Random(5)
    with lasting_daemon(tmp_path) as (daemon, url), Client(url, namespace="metadata") as client:
        client.create_topic("metadata-changes")
        indexer = Program(
            tmp_path / "log", "metadata_index", url, "--database", tmp_path / "index.db", "--follow", "index"
        )
        with mortal(indexer), client.producer("metadata-changes", "editor", serializer=JSON) as producer:
            for _ in range(4):
                for _ in range(100):
                    entity = f"dataset:{chance.randrange(20)}"
                    tag = f"tag{chance.choice('+-')}={chance.choice('abc')}"
                    changes = [tag, f"owner={chance.randrange(9)}"]
                    producer.publish_atomic(entity, [{"entity": entity, "change": change} for change in changes])
                kill_now_and_then(chance, 1, indexer, indexer, daemon)
            expected = folded(client)
            eventually(
                "all changes are indexed", lambda: sum(entity[2] for entity in indexed(tmp_path).values()) >= 800
            )
        assert indexed(tmp_path) == expected


def folded(client: Client) -> dict[str, tuple[dict[str, str], list[str], int]]:
    """Return each entity's properties, tags and number of changes, computed from the topic."""
    entities: dict[str, tuple[dict[str, str], list[str], int]] = {}
    for message in client.read("metadata-changes", serializer=JSON):
        properties, tags, changes = entities.get(message.value["entity"], ({}, [], 0))
        key, value = message.value["change"].split("=")
        if key == "owner":
            properties = {**properties, key: value}
        else:
            tags = [tag for tag in tags if tag != value] + ([value] if key == "tag+" else [])
        entities[message.value["entity"]] = (properties, tags, changes + 1)
    return entities


def indexed(directory: Path) -> dict[str, Any]:
    """Return the index's content; empty before the indexer has created its tables."""
    with closing(sqlite3.connect(directory / "index.db", timeout=PATIENCE_S)) as database:
        database.execute("BEGIN")  # read both tables at one moment, since the indexer is running
        if not database.execute("SELECT name FROM sqlite_master WHERE name = 'words'").fetchone():
            return {}
        rows = database.execute("SELECT entity, metadata, changes FROM entities").fetchall()
        assert database.execute("SELECT count(*) FROM words").fetchone()[0] == len(rows)
    told = {entity: (json.loads(metadata), changes) for entity, metadata, changes in rows}
    return {entity: (each["properties"], each["tags"], changes) for entity, (each, changes) in told.items()}
