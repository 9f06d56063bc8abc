"""Configuration: programs receive each change once and in order, including those made while no daemon ran."""

from __future__ import annotations

import random
import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.examples.programs import Program, eventually, lasting_daemon, mortal, run
from tests.patience import PATIENCE_S

Values = Callable[..., list[Any]]


def test_programs_start_with_a_snapshot_and_continue_with_changes(url: str, namespace: str, tmp_path: Path):
    words = ("--namespace", namespace, "--database", tmp_path / "configuration.db")
    for first in (1, 9):
        said = run("configuration", url, *words)
        assert revisions(said, "join", "starts") == [first + 1]
        assert revisions(said, "report", "starts") == [first + 3]
        assert revisions(said, "join", "continues") == [first + 4, first + 6]
        assert revisions(said, "report", "continues") == [first + 5, first + 7]
    assert "join continues with {'memory': '4g', 'stop': 'yes'}" in said


def revisions(said: str, program: str, verb: str) -> list[int]:
    return [int(found) for found in re.findall(rf"^{program} {verb} with .* revision (\d+)$", said, re.MULTILINE)]


def test_changes_made_while_the_daemon_is_unavailable_are_sent_later(tmp_path: Path, values: Values):
    database = tmp_path / "configuration.db"
    with lasting_daemon(tmp_path) as (daemon, url):
        words = ("--database", database)
        program = Program(tmp_path / "log", "configuration", url, *words, "program", "join")
        with mortal(program):
            eventually("the program runs", lambda: "starts with {}" in program.said())
            run("configuration", url, *words, "set", "join", "memory", "1g")
            daemon.kill()
            assert "the next relay will publish it" in run("configuration", url, *words, "set", "join", "memory", "2g")
            assert waiting(database) == [2]
            daemon.start()
            run("configuration", url, *words, "relay")
            run("configuration", url, *words, "set", "join", "stop", "yes")
            assert program.wait() == 0
        assert revisions(program.said(), "join", "continues") == [1, 2, 3]
        assert waiting(database) == []
        assert [each["revision"] for each in values(url, "configuration", "configuration")] == [1, 2, 3]


def test_each_change_is_delivered_once_although_its_writers_are_killed(
    url: str, namespace: str, tmp_path: Path, values: Values
):
    chance, database = random.Random(2), tmp_path / "configuration.db"
    words = ("--namespace", namespace, "--database", database)
    run("configuration", url, *words, "relay")
    for number in range(1, 7):
        change = Program(tmp_path / "log", "configuration", url, *words, "set", "join", "n", str(number))
        with mortal(change):  # killed when the change is made: before, while or after it is published
            eventually("it is changed", lambda number=number: made(database) == number)
            time.sleep(chance.uniform(0, 0.02))
    run("configuration", url, *words, "relay")
    told = values(url, namespace, "configuration")
    assert [(each["revision"], each["value"]) for each in told] == [(number, str(number)) for number in range(1, 7)]
    assert waiting(database) == []


def made(database: Path) -> int:
    """Return the number of the last change."""
    with closing(sqlite3.connect(database, timeout=PATIENCE_S)) as connection:
        [revision] = connection.execute("SELECT coalesce(max(revision), 0) FROM configuration").fetchone()
    return int(revision)


def waiting(database: Path) -> list[int]:
    with closing(sqlite3.connect(database)) as connection:
        return [revision for (revision,) in connection.execute("SELECT revision FROM outbox")]
