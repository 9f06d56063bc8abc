"""Running programs receive changes of their configuration, each once and in order (use case 5).

The configuration is in a database. A change and its message are written in one commit, the message into an *outbox*, so
neither exists without the other even if the daemon is unavailable. A relay publishes the waiting messages. The number
of a change is the sequence id of its message, and the topic stores each sequence id once: no change is lost or
duplicated.

A program reads a snapshot of the rows when it starts, and then follows the topic for newer changes.

    configuration.py                                     run two programs, and make changes
    configuration.py program join                        run one program, which prints its changes
    configuration.py set join memory 4g                  make one change
    configuration.py relay                               publish changes that are still in the outbox

For SQLAlchemy, ``plainsong.sql`` has an outbox and a relay that also support PostgreSQL and concurrent writers.
"""

import argparse
import sqlite3
import tempfile
import threading
from contextlib import closing, suppress
from pathlib import Path

from plainsong import JSON, Client, PlainsongError

TOPIC = "configuration"
TABLES = """
CREATE TABLE IF NOT EXISTS configuration (
    program TEXT, key TEXT, value TEXT, revision INTEGER, PRIMARY KEY (program, key));
CREATE TABLE IF NOT EXISTS outbox (revision INTEGER PRIMARY KEY AUTOINCREMENT, program TEXT, key TEXT, value TEXT);
"""


def open_database(path: Path) -> sqlite3.Connection:
    """The database with the configuration."""
    database = sqlite3.connect(path, timeout=30)
    database.executescript(TABLES)
    return database


def change(database: sqlite3.Connection, program: str, key: str, value: str) -> None:
    """Write the row and the message in one commit, without the daemon."""
    with database:
        added = database.execute("INSERT INTO outbox (program, key, value) VALUES (?, ?, ?)", (program, key, value))
        row = (program, key, value, added.lastrowid)
        database.execute("REPLACE INTO configuration VALUES (?, ?, ?, ?)", row)


def relay(client: Client, database: sqlite3.Connection) -> None:
    """Publish the messages in the outbox. The topic has recorded how far a killed relay got."""
    with client.producer(TOPIC, "configuration", serializer=JSON) as producer:
        forget(database, producer.last_sequence_id)
        for revision, program, key, value in database.execute("SELECT * FROM outbox ORDER BY revision").fetchall():
            message = {"revision": revision, "key": key, "value": value}
            producer.send(message, sequence_id=revision, routing_key=program)
        producer.flush()  # all messages are durable
        forget(database, producer.last_sequence_id)


def forget(database: sqlite3.Connection, sent: int) -> None:
    """Delete messages that the topic has stored."""
    with database:
        database.execute("DELETE FROM outbox WHERE revision <= ?", (sent,))


def be_program(client: Client, path: Path, name: str, ready: threading.Event | None = None) -> None:
    """Run a program: print its configuration at startup, then every change, until one says stop."""
    with closing(open_database(path)) as database:
        rows = database.execute("SELECT key, value, revision FROM configuration WHERE program = ?", (name,)).fetchall()
    configuration = {key: value for key, value, _ in rows}
    revision = max((revision for _, _, revision in rows), default=0)
    say(f"{name} starts with {configuration}, revision {revision}")
    if ready:
        ready.set()
    for message in client.read(TOPIC, follow=True, serializer=JSON):
        if message.attributes["routingKey"] != name or message.value["revision"] <= revision:
            continue  # another program's, or in the snapshot
        configuration[message.value["key"]] = message.value["value"]
        say(f"{name} continues with {configuration}, revision {message.value['revision']}")
        if configuration.get("stop") == "yes":
            break


def say(line: str) -> None:
    """Print one line, even if two programs print at the same time."""
    print(line + "\n", end="", flush=True)


def play(client: Client, path: Path, database: sqlite3.Connection) -> None:
    """Run two programs as threads, and change their configuration at the same time."""
    for name in ("join", "report"):
        change(database, name, "memory", "1g")
        change(database, name, "stop", "no")
    ready = [threading.Event(), threading.Event()]
    programs = [
        threading.Thread(target=be_program, args=(client, path, name, started))
        for name, started in zip(("join", "report"), ready, strict=True)
    ]
    for program, started in zip(programs, ready, strict=True):
        program.start()
        started.wait()
    for name, key, value in [
        ("join", "memory", "4g"),
        ("report", "format", "pdf"),
        ("join", "stop", "yes"),
        ("report", "stop", "yes"),
    ]:
        change(database, name, key, value)
    relay(client, database)
    for program in programs:
        program.join()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:7420", help="URL of the daemon (default: %(default)s)")
    parser.add_argument("--namespace", default="configuration", help="namespace of the topic (default: %(default)s)")
    parser.add_argument("--database", type=Path, default=Path(tempfile.gettempdir()) / "plainsong-configuration.db")
    parser.add_argument("what", nargs="?", choices=["demo", "program", "set", "relay"], default="demo")
    parser.add_argument("words", nargs="*", help="program: its name; set: program, key and value")
    args = parser.parse_args()
    deadline_s = 3 if args.what == "set" else 60
    with (
        closing(open_database(args.database)) as database,
        Client(args.url, namespace=args.namespace, deadline_s=deadline_s, wait_for_daemon_s=60) as client,
    ):
        if args.what == "set":
            change(database, *args.words)
            try:
                relay(client, database)
            except PlainsongError as error:
                print(f"changed; the next relay will publish it: {error.detail}")
            return
        client.create_topic(TOPIC, if_not_exists=True)
        match args.what:
            case "program":
                be_program(client, args.database, args.words[0])
            case "relay":
                relay(client, database)
            case _:
                play(client, args.database, database)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
