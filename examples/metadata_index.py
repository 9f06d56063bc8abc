"""A search index receives each change of metadata once, and related changes together (use case 2).

An edit changes several properties and tags of one entity. It is published as a *lightweight transaction*: atomically,
with the entity as its routing key. The index is a full-text table in SQLite, and the position in the topic is in the
same database. So after a crash, index and position agree: no change is missing, and none is applied twice.

    metadata_index.py                                       publish some edits, index them, and search
    metadata_index.py edit dataset:orders owner=sales tag+=pii tag-=draft
    metadata_index.py index --follow                        run the indexer; kill and restart it
    metadata_index.py search sales
"""

import argparse
import json
import sqlite3
import tempfile
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from plainsong import JSON, Client

TOPIC = "metadata-changes"
TABLES = """
CREATE TABLE IF NOT EXISTS position (one INTEGER PRIMARY KEY CHECK (one = 1), id TEXT);
CREATE TABLE IF NOT EXISTS entities (number INTEGER PRIMARY KEY, entity TEXT UNIQUE, metadata TEXT, changes INTEGER);
CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5 (text);
"""


def edit(client: Client, entity: str, changes: list[str]) -> None:
    """Publish one edit: ``key=value`` sets a property, ``tag+=…`` adds a tag and ``tag-=…`` removes it."""
    messages = [{"entity": entity, "change": change} for change in changes]
    with client.producer(TOPIC, serializer=JSON) as producer:
        producer.publish_atomic(entity, messages)


def index(database: sqlite3.Connection, client: Client, *, follow: bool) -> None:
    """Apply changes page by page; the entities, their words and the position are committed together."""
    [position] = database.execute("SELECT id FROM position").fetchone() or ["oldest"]
    while (page := client.poll(TOPIC, position, wait_ms=30_000 if follow else 0, serializer=JSON)) or follow:
        if not page:
            continue
        with database:
            for message in page:
                apply(database, message.value["entity"], message.value["change"])
            position = str(page[-1].id)
            database.execute("REPLACE INTO position VALUES (1, ?)", (position,))
        print(f"indexed {len(page)} changes", flush=True)


def apply(database: sqlite3.Connection, entity: str, change: str) -> None:
    """Apply one change of an entity."""
    known = database.execute("SELECT number, metadata, changes FROM entities WHERE entity = ?", (entity,)).fetchone()
    number, text, changes = known or (None, '{"properties": {}, "tags": []}', 0)
    metadata: dict[str, Any] = json.loads(text)
    key, _, value = change.partition("=")
    if key in ("tag+", "tag-"):
        metadata["tags"] = [tag for tag in metadata["tags"] if tag != value] + [value] * (key == "tag+")
    else:
        metadata["properties"][key] = value
    [number] = database.execute(
        "REPLACE INTO entities VALUES (?, ?, ?, ?) RETURNING number",
        (number, entity, json.dumps(metadata), changes + 1),
    ).fetchone()
    words = " ".join([entity, *metadata["properties"].values(), *metadata["tags"]])
    database.execute("REPLACE INTO words (rowid, text) VALUES (?, ?)", (number, words))


def search(database: sqlite3.Connection, words: str) -> None:
    """Print the entities that contain these words (or match a query in FTS5's syntax), best match first."""
    found = database.execute(
        "SELECT entity, metadata, changes FROM words JOIN entities ON number = words.rowid WHERE text MATCH ? ORDER BY rank",
        (words,),
    )
    for entity, metadata, changes in found:
        print(f"{entity} {metadata} after {changes} changes")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:7420", help="URL of the daemon (default: %(default)s)")
    parser.add_argument("--namespace", default="metadata", help="namespace of the topic (default: %(default)s)")
    parser.add_argument("--database", type=Path, default=Path(tempfile.gettempdir()) / "plainsong-metadata.db")
    parser.add_argument("--follow", action="store_true", help="index: wait for new messages")
    parser.add_argument("what", nargs="?", choices=["demo", "edit", "index", "search"], default="demo")
    parser.add_argument("words", nargs="*", help="edit: the entity and changes; search: what to look for")
    args = parser.parse_args()
    with (
        closing(sqlite3.connect(args.database)) as database,
        Client(args.url, namespace=args.namespace, wait_for_daemon_s=60) as client,
    ):
        database.executescript(TABLES)
        client.create_topic(TOPIC, if_not_exists=True)
        if args.what == "demo":
            edit(client, "dataset:orders", ["owner=sales", "format=parquet", "tag+=draft"])
            edit(client, "dataset:customers", ["owner=sales", "tag+=pii"])
            edit(client, "dataset:orders", ["tag+=pii", "tag-=draft"])
            edit(client, "program:join", ["owner=analytics", "reads=orders"])
        if args.what == "edit":
            edit(client, args.words[0], args.words[1:])
        if args.what in ("demo", "index"):
            index(database, client, follow=args.follow)
        if args.what in ("demo", "search"):
            search(database, " ".join(args.words) or "pii")


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
