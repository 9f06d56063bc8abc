"""Programs access datasets; three consumers build an audit trail, a usage registry and a lineage graph (use case 1).

The dataset service publishes every access. Three consumers read the same messages in the same order, each at its own
pace. Each counts every message once, and each in a different way:

* the audit trail is a file, and its last line contains the position;
* the usage registry is a table of counts, and the position is committed with them;
* the lineage is a set: adding an edge twice changes nothing, so a position stored by the daemon is enough, although it
  may lag slightly after a crash.

    access_events.py                                  publish some runs, and print all three results
    access_events.py publish --runs 1000              publish more runs
    access_events.py audit|usage|lineage --follow     run one consumer; kill and restart it
"""

import argparse
import json
import os
import random
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from plainsong import JSON, Client, Page
from plainsong.positions import Start

TOPIC = "dataset-access"
#: By program: the datasets it reads, and those it writes.
PROGRAMS = {
    "import-orders": (["orders-feed"], ["orders"]),
    "import-customers": (["crm-export"], ["customers"]),
    "join": (["orders", "customers"], ["sales"]),
    "report": (["sales"], ["monthly-report"]),
}


def publish(client: Client, runs: int, seed: int) -> None:
    """Publish the accesses of some runs. A producer batches the messages of a loop, and each is stored once."""
    choose = random.Random(seed)
    with client.producer(TOPIC, serializer=JSON) as producer:
        for number in range(runs):
            program, user = choose.choice(list(PROGRAMS)), choose.choice(["ada", "grace", "nightly"])
            for access, datasets in zip(("read", "write"), PROGRAMS[program], strict=True):
                for dataset in datasets:
                    run = f"{producer.name}-{number}"
                    producer.send({"user": user, "program": program, "run": run, "dataset": dataset, "access": access})
    print(f"published {producer.counts.delivered} accesses of {runs} runs")


def pages(client: Client, start: Start, *, follow: bool) -> Iterator[Page]:
    """Yield pages to the end of the topic, or forever; a page of messages needs only one sync."""
    while (page := client.poll(TOPIC, start, wait_ms=30_000 if follow else 0, serializer=JSON)) or follow:
        if page:
            yield page
        start = page.last_id or start


def audit(client: Client, directory: Path, *, follow: bool) -> None:
    """A file with a line for each access, synced page by page."""
    with (directory / "audit.jsonl").open("a+b") as trail:
        for page in pages(client, last_line(trail), follow=follow):
            for message in page:
                line = {"id": str(message.id), "time": message.publish_time.isoformat(), **message.value}
                trail.write(json.dumps(line).encode() + b"\n")
            trail.flush()
            os.fsync(trail.fileno())


def last_line(trail: BinaryIO) -> str:
    """Return the id in the last complete line; remove a partial line that a crash left."""
    trail.seek(0)
    last_id, whole = "oldest", 0
    for line in trail:
        if line.endswith(b"\n"):
            last_id, whole = json.loads(line)["id"], whole + len(line)
    trail.truncate(whole)
    return last_id


def usage(client: Client, directory: Path, *, follow: bool) -> None:
    """Counts how often each program uses each dataset, with the first and the last time."""
    database = sqlite3.connect(directory / "usage.db")
    database.executescript(
        "CREATE TABLE IF NOT EXISTS position (one INTEGER PRIMARY KEY CHECK (one = 1), id TEXT);"
        "CREATE TABLE IF NOT EXISTS usage (dataset TEXT, program TEXT, times INTEGER, first TEXT, last TEXT,"
        " PRIMARY KEY (dataset, program));"
    )
    [position] = database.execute("SELECT id FROM position").fetchone() or ["oldest"]
    for page in pages(client, position, follow=follow):
        with database:  # counts and position: one commit
            for message in page:
                used, when = message.value, message.publish_time.isoformat()
                database.execute(
                    "INSERT INTO usage VALUES (?, ?, 1, ?, ?)"
                    " ON CONFLICT DO UPDATE SET times = times + 1, last = excluded.last",
                    (used["dataset"], used["program"], when, when),
                )
            database.execute("REPLACE INTO position VALUES (1, ?)", (str(page[-1].id),))


def lineage(client: Client, directory: Path, *, follow: bool) -> None:
    """Records which datasets each run read and wrote."""
    database = sqlite3.connect(directory / "lineage.db")
    database.executescript(
        "CREATE TABLE IF NOT EXISTS accesses (run TEXT, program TEXT, access TEXT, dataset TEXT,"
        " PRIMARY KEY (run, access, dataset));"
        "CREATE VIEW IF NOT EXISTS edges AS SELECT DISTINCT source.dataset AS source, program, target.dataset AS target"
        " FROM accesses AS source JOIN accesses AS target USING (run, program)"
        " WHERE source.access = 'read' AND target.access = 'write';"
    )
    kept = {reader["name"]: reader["position"] for reader in client.admin.readers(TOPIC)}
    for page in pages(client, kept.get("lineage", "oldest"), follow=follow):
        with database:
            rows = [message.value for message in page]
            database.executemany("INSERT OR IGNORE INTO accesses VALUES (:run, :program, :access, :dataset)", rows)
        client.admin.set_reader(TOPIC, "lineage", page[-1].id)


def show(directory: Path) -> None:
    """Print the results of the three consumers."""
    print("audit trail, the last lines:")
    for line in (directory / "audit.jsonl").read_text().splitlines()[-2:]:
        print("   {time} {user} {program} {access} {dataset}".format(**json.loads(line)))
    print("usage registry:")
    for row in sqlite3.connect(directory / "usage.db").execute(
        "SELECT dataset, program, times FROM usage ORDER BY 1, 2"
    ):
        print("   {:<16}{:<18}{:>4} times".format(*row))
    print("where monthly-report came from:")
    ancestors = (
        "WITH RECURSIVE up (source, program, target, depth) AS (SELECT *, 1 FROM edges WHERE target = 'monthly-report'"
        " UNION SELECT edges.*, depth + 1 FROM edges JOIN up ON edges.target = up.source WHERE depth < 9)"
        " SELECT depth, source, program, target FROM up ORDER BY 1, 2"
    )
    for depth, *edge in sqlite3.connect(directory / "lineage.db").execute(ancestors):
        print("   " * depth + "{} -- {} --> {}".format(*edge))


CONSUMERS = {"audit": audit, "usage": usage, "lineage": lineage}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:7420", help="URL of the daemon (default: %(default)s)")
    parser.add_argument("--namespace", default="access", help="namespace of the topic (default: %(default)s)")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "plainsong-access")
    parser.add_argument("--runs", type=int, default=20, help="publish: number of runs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=4, help="publish: seed of the random choice")
    parser.add_argument("--follow", action="store_true", help="wait for new messages")
    parser.add_argument("what", nargs="?", choices=["demo", "publish", *CONSUMERS, "show"], default="demo")
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    with Client(args.url, namespace=args.namespace, wait_for_daemon_s=60) as client:
        client.create_topic(TOPIC, if_not_exists=True)
        if args.what in ("demo", "publish"):
            publish(client, args.runs, args.seed)
        for name, consume in CONSUMERS.items():
            if args.what in ("demo", name):
                consume(client, args.directory, follow=args.follow)
    if args.what in ("demo", "show"):
        show(args.directory)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
