"""A scheduler starts programs when data arrives, another program ends, or an external event occurs (use case 3).

Each trigger causes exactly one run, even if the scheduler, a program or the daemon is killed at any moment:

* The runs that an event triggers, and the position after it, are committed together in the scheduler's database.
* After a crash, runs that have not ended are started again. A run is a *producer* of two messages, ``started`` and
  ``completed``: the new process takes over its name, and messages that the topic has are not stored again.

    scheduler.py                                                           publish a few events, and start programs
    scheduler.py serve                                                     run until stopped; kill and restart it
    scheduler.py event data dataset=purchases partition=2026-01-31         report that data has arrived
    scheduler.py event outside event=prices-changed                        report an external event
"""

import argparse
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from plainsong import JSON, Client, Message
from plainsong.errors import OutcomeUnknown, ProducerFenced

DATA, PROGRAMS, OUTSIDE = "data", "programs", "outside"
TABLES = """
CREATE TABLE IF NOT EXISTS positions (topic TEXT PRIMARY KEY, id BLOB);
CREATE TABLE IF NOT EXISTS seen (program TEXT PRIMARY KEY, events INTEGER);
CREATE TABLE IF NOT EXISTS runs (run TEXT PRIMARY KEY, program TEXT, ended BOOLEAN DEFAULT FALSE);
"""


@dataclass(frozen=True)
class Trigger:
    """Start ``program`` at every n-th matching event of a topic."""

    program: str
    topic: str
    says: Mapping[str, str]
    every: int = 1

    def matches(self, event: Message) -> bool:
        """Return True if the event matches. Its value may be any JSON, but only objects match."""
        return event.topic == self.topic and isinstance(event.value, dict) and self.says.items() <= event.value.items()


TRIGGERS = (
    Trigger("daily-report", DATA, {"dataset": "purchases"}, every=3),
    Trigger("billing", PROGRAMS, {"program": "daily-report", "state": "completed"}),
    Trigger("reload-prices", OUTSIDE, {"event": "prices-changed"}),
)


class DatabasePosition:
    """The reader's position, saved in the same commit as the effects."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self.database = database

    def load(self, daemon: object, topics: Iterable[str]) -> dict[str, bytes]:
        """Return all saved positions."""
        return dict(self.database.execute("SELECT topic, id FROM positions"))

    def save(self, daemon: object, positions: Mapping[str, bytes]) -> None:
        """Save within the open transaction."""
        self.database.executemany("REPLACE INTO positions VALUES (?, ?)", positions.items())


def open_database(path: Path) -> sqlite3.Connection:
    """Open the scheduler's database; each thread needs its own connection."""
    database = sqlite3.connect(path, timeout=30)
    database.executescript(TABLES)
    return database


def serve(client: Client, path: Path, url: str, limit: int | None) -> None:
    """Start triggered programs until ``limit`` events were read, or forever."""
    database = open_database(path)
    pool = ThreadPoolExecutor(max_workers=2)

    def start(program: str, run: str) -> None:
        pool.submit(
            carry_out, path, [sys.executable, __file__, f"--url={url}", f"--namespace={client.namespace}"], program, run
        )

    for program, run in database.execute("SELECT program, run FROM runs WHERE NOT ended").fetchall():
        start(program, run)  # runs before a restart
    with client.read(
        [DATA, PROGRAMS, OUTSIDE], follow=True, limit=limit, position=DatabasePosition(database), serializer=JSON
    ) as events:
        for event in events:
            with database:  # one commit
                pulled = [trigger for trigger in TRIGGERS if is_pulled(database, trigger, event)]
                runs = [(trigger.program, f"{trigger.program}-{event.id}") for trigger in pulled]
                database.executemany("INSERT INTO runs (program, run) VALUES (?, ?)", runs)
                events.save()
            for program, run in runs:
                say(f"{program} is started by {event.id} in {event.topic}")
                start(program, run)
    pool.shutdown()


def is_pulled(database: sqlite3.Connection, trigger: Trigger, event: Message) -> bool:
    """Count a matching event; return True if it is the n-th, which pulls the trigger."""
    if not trigger.matches(event):
        return False
    [events] = database.execute(
        "INSERT INTO seen VALUES (?, 1) ON CONFLICT DO UPDATE SET events = events + 1 RETURNING events",
        (trigger.program,),
    ).fetchone()
    return bool(events % trigger.every == 0)


def carry_out(path: Path, command: list[str], program: str, run: str) -> None:
    """Run the program, repeatedly if necessary, until it succeeds."""
    while subprocess.run([*command, "program", program, run], check=False).returncode != 0:  # noqa: S603 - our own
        time.sleep(1)
    with closing(open_database(path)) as database, database:
        database.execute("UPDATE runs SET ended = TRUE WHERE run = ?", (run,))


def be_program(client: Client, program: str, run: str) -> None:
    """Do one run of a program; a second process of the same run fences the first."""
    try:
        with client.producer(PROGRAMS, run, serializer=JSON) as producer:
            for number, state in enumerate(["started", "completed"]):
                message = {"program": program, "run": run, "state": state}
                if not producer.publish(message, sequence_ids=[number]).duplicate:
                    say(f"  {program} {state}")
                # The real work would be done here.
    except ProducerFenced:
        sys.exit(f"  {program}: another process continues run {run}")
    except OutcomeUnknown:
        # The daemon died, and another process of the run has published this in the meantime.
        sys.exit(f"  {program}: another process may continue run {run}")


def say(line: str) -> None:
    """Print one line, even if two programs print at the same time."""
    print(line + "\n", end="", flush=True)


def tell(client: Client, topic: str, fields: list[str]) -> None:
    """Publish one event."""
    client.publish(topic, dict(field.split("=", 1) for field in fields), serializer=JSON)


def play(client: Client, path: Path, url: str) -> None:
    """Publish four events, which cause three runs, which publish six more events."""
    for day in ("2026-01-29", "2026-01-30", "2026-01-31"):
        tell(client, DATA, ["dataset=purchases", f"partition={day}"])
    tell(client, OUTSIDE, ["event=prices-changed"])
    serve(client, path, url, limit=10)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:7420", help="URL of the daemon (default: %(default)s)")
    parser.add_argument("--namespace", default="scheduler", help="namespace of the topics (default: %(default)s)")
    parser.add_argument("--database", type=Path, default=Path(tempfile.gettempdir()) / "plainsong-scheduler.db")
    parser.add_argument("--messages", type=int, help="serve: number of events after which to end")
    parser.add_argument("what", nargs="?", choices=["demo", "serve", "event", "program"], default="demo")
    parser.add_argument("words", nargs="*", help="event: topic and fields; program: its name and run")
    args = parser.parse_args()
    with Client(args.url, namespace=args.namespace, wait_for_daemon_s=60) as client:
        for topic in (DATA, PROGRAMS, OUTSIDE):
            client.create_topic(topic, if_not_exists=True)
        match args.what:
            case "serve":
                serve(client, args.database, args.url, args.messages)
            case "event":
                tell(client, args.words[0], args.words[1:])
            case "program":
                be_program(client, *args.words)
            case _:
                play(client, args.database, args.url)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
