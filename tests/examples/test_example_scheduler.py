"""The scheduler: each trigger causes exactly one run, whichever process is killed."""

from __future__ import annotations

import random
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from plainsong import JSON, Client
from tests.examples.programs import Program, eventually, lasting_daemon, mortal, run
from tests.patience import PATIENCE_S

Values = Callable[..., list[Any]]


def test_data_another_program_and_external_events_start_programs(
    url: str, namespace: str, tmp_path: Path, values: Values
):
    said = run("scheduler", url, "--namespace", namespace, "--database", tmp_path / "scheduler.db")
    assert [said.count(f"{each} is started by") for each in ("daily-report", "billing", "reload-prices")] == [1, 1, 1]
    states = Counter((each["program"], each["state"]) for each in values(url, namespace, "programs"))
    programs = ("daily-report", "billing", "reload-prices")
    assert states == {(program, state): 1 for program in programs for state in ("started", "completed")}


def test_an_event_without_a_waiting_program_starts_nothing(url: str, namespace: str, tmp_path: Path, values: Values):
    words = ("--namespace", namespace, "--database", tmp_path / "scheduler.db")
    run("scheduler", url, *words, "event", "data", "dataset=purchases", "partition=1")
    run("scheduler", url, *words, "event", "outside", "event=rain")
    with Client(url, namespace=namespace) as client:
        client.publish("outside", [b"no JSON", b"[1]"])
    assert run("scheduler", url, *words, "--messages", "4", "serve") == ""
    assert values(url, namespace, "programs") == []


def test_every_trigger_has_one_run_although_scheduler_and_daemon_are_killed(tmp_path: Path):
    chance = random.Random(7)
    with lasting_daemon(tmp_path) as (daemon, url), Client(url, namespace="scheduler") as client:
        for topic in ("data", "programs", "outside"):
            client.create_topic(topic)
        database = tmp_path / "scheduler.db"
        scheduler = Program(tmp_path / "log", "scheduler", url, "--database", database, "serve")
        with client.producer("data", "feed", serializer=JSON) as data:
            data.publish([{"dataset": "purchases", "partition": str(day)} for day in range(10)])
        with client.producer("outside", "world", serializer=JSON) as outside:
            outside.publish([{"event": "prices-changed"}, {"event": "rain"}, {"event": "prices-changed"}])
        with mortal(scheduler):
            for number in range(1, 3 + 3 + 2 + 1):  # kill a process during or soon after the start of each run
                eventually(f"run {number} is triggered", lambda number=number: runs(database) >= number)
                time.sleep(chance.uniform(0, 0.6))
                victim = chance.choice([scheduler, scheduler, daemon])
                victim.kill()
                victim.start()
            eventually("all has ended", lambda: runs(database, "WHERE ended") == 3 + 3 + 2)
        said = scheduler.said()
        assert "Traceback" not in said, said[said.index("Traceback") :]

        events = {topic: list(client.read(topic, serializer=JSON)) for topic in ("data", "programs", "outside")}
    reports = [f"daily-report-{each.id}" for each in events["data"][2::3]]
    completed = {each.value["run"]: each.id for each in events["programs"] if each.value["state"] == "completed"}
    billings = [f"billing-{completed[report]}" for report in reports]
    reloads = [f"reload-prices-{each.id}" for each in events["outside"] if each.value["event"] == "prices-changed"]
    assert (len(reports), len(billings), len(reloads)) == (3, 3, 2)
    told = Counter((each.value["run"], each.value["state"]) for each in events["programs"])
    assert told == {(run, state): 1 for run in [*reports, *billings, *reloads] for state in ("started", "completed")}


def runs(database: Path, which: str = "") -> int:
    """Return the number of runs in the scheduler's database."""
    with closing(sqlite3.connect(database, timeout=PATIENCE_S)) as connection:
        known = connection.execute("SELECT name FROM sqlite_master WHERE name = 'runs'").fetchone()
        return connection.execute(f"SELECT count(*) FROM runs {which}").fetchone()[0] if known else 0
