"""A scheduler starts programs when data is there, when another program has ended, when the outside says so (use case 3).

Each trigger has one run, although scheduler, programs and daemon may be killed at any moment:

* What an event triggers and how far events were read is one commit of the scheduler's database. A crash undoes both.
* Each run that has not ended is started again after a crash. A run is a *producer* with two messages, ``started`` and
  ``completed``: whoever starts it anew takes the name over, and what the topic has is not stored a second time.

    scheduler.py                                                           a few events, and what they start
    scheduler.py serve                                                     run on; kill it, and start it again
    scheduler.py event data dataset=purchases partition=2026-01-31         tell that data is there
    scheduler.py event outside event=prices-changed                        tell of anything
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
    """Start ``program`` at every n-th event of a topic that says what it should."""

    program: str
    topic: str
    says: Mapping[str, str]
    every: int = 1

    def matches(self, event: Message) -> bool:
        """Whether it counts. What is no JSON object counts nowhere."""
        return event.topic == self.topic and isinstance(event.value, dict) and self.says.items() <= event.value.items()


TRIGGERS = (
    Trigger("daily-report", DATA, {"dataset": "purchases"}, every=3),
    Trigger("billing", PROGRAMS, {"program": "daily-report", "state": "completed"}),
    Trigger("reload-prices", OUTSIDE, {"event": "prices-changed"}),
)


class DatabasePosition:
    """Where the reader is, in the database of what it does: saved in the same commit, or not at all."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self.database = database

    def load(self, daemon: object, topics: Iterable[str]) -> dict[str, bytes]:
        """The positions that are known."""
        return dict(self.database.execute("SELECT topic, id FROM positions"))

    def save(self, daemon: object, positions: Mapping[str, bytes]) -> None:
        """Into the transaction that is open."""
        self.database.executemany("REPLACE INTO positions VALUES (?, ?)", positions.items())


def open_database(path: Path) -> sqlite3.Connection:
    """The scheduler's database; a connection for each thread."""
    database = sqlite3.connect(path, timeout=30)
    database.executescript(TABLES)
    return database


def serve(client: Client, path: Path, url: str, limit: int | None) -> None:
    """Start what events trigger, until ``limit`` events were read, or forever."""
    database = open_database(path)
    pool = ThreadPoolExecutor(max_workers=2)

    def start(program: str, run: str) -> None:
        pool.submit(
            carry_out, path, [sys.executable, __file__, f"--url={url}", f"--namespace={client.namespace}"], program, run
        )

    for program, run in database.execute("SELECT program, run FROM runs WHERE NOT ended").fetchall():
        start(program, run)  # of an earlier life
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
                print(f"{program} is started by {event.id} in {event.topic}", flush=True)
                start(program, run)
    pool.shutdown()


def is_pulled(database: sqlite3.Connection, trigger: Trigger, event: Message) -> bool:
    """Count the event if it matches; whether it completes the trigger's number."""
    if not trigger.matches(event):
        return False
    [events] = database.execute(
        "INSERT INTO seen VALUES (?, 1) ON CONFLICT DO UPDATE SET events = events + 1 RETURNING events",
        (trigger.program,),
    ).fetchone()
    return bool(events % trigger.every == 0)


def carry_out(path: Path, command: list[str], program: str, run: str) -> None:
    """Start the program, again if need be, until it has ended well."""
    while subprocess.run([*command, "program", program, run], check=False).returncode != 0:  # noqa: S603 - our own
        time.sleep(1)
    with closing(open_database(path)) as database, database:
        database.execute("UPDATE runs SET ended = TRUE WHERE run = ?", (run,))


def be_program(client: Client, program: str, run: str) -> None:
    """One run of a program; a second process of the same run ends the first one's right to speak for it."""
    try:
        with client.producer(PROGRAMS, run, serializer=JSON) as producer:
            for number, state in enumerate(["started", "completed"]):
                message = {"program": program, "run": run, "state": state}
                if not producer.publish(message, sequence_ids=[number]).duplicate:
                    print(f"  {program} {state}", flush=True)
                # Between the two is the work.
    except ProducerFenced:
        sys.exit(f"  {program}: another process goes on with run {run}")
    except OutcomeUnknown:
        # The daemon died, and another process of the run has come as far meanwhile: that one's word counts.
        sys.exit(f"  {program}: another process may go on with run {run}")


def tell(client: Client, topic: str, fields: list[str]) -> None:
    """Publish one event."""
    client.publish(topic, dict(field.split("=", 1) for field in fields), serializer=JSON)


def play(client: Client, path: Path, url: str) -> None:
    """Four events from outside, which make three runs, which are six events more."""
    for day in ("2026-01-29", "2026-01-30", "2026-01-31"):
        tell(client, DATA, ["dataset=purchases", f"partition={day}"])
    tell(client, OUTSIDE, ["event=prices-changed"])
    serve(client, path, url, limit=10)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:7420", help="of the daemon (default: %(default)s)")
    parser.add_argument("--namespace", default="scheduler", help="of the topics (default: %(default)s)")
    parser.add_argument("--database", type=Path, default=Path(tempfile.gettempdir()) / "plainsong-scheduler.db")
    parser.add_argument("--messages", type=int, help="serve: end after so many events")
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
