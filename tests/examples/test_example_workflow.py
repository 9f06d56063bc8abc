"""The workflow: followers see each state and token once, whichever process is killed."""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from plainsong import Client
from tests.daemon.harness import clean_environ
from tests.examples.programs import EXAMPLES, Program, command, lasting_daemon, mortal, run
from tests.patience import PATIENCE_S

Values = Callable[..., list[Any]]
STEPS = ["fetch", "clean", "count", "report"]
TOKEN = {
    "source": "purchases",
    "rows": 987,
    "dropped": 13,
    "customers": 329,
    "report": "329 customers, 13 rows dropped",
}
#: Exits as if killed, at one moment of the second step.
DYING = """
import os, runpy, sys
sys.path.insert(0, sys.argv.pop(1))
import workflow_states
moment, method = sys.argv.pop(1), sys.argv.pop(1)
whole = getattr(workflow_states.Runs, method)
def dies(runs):
    if runs.changes[0][1] != "clean":
        return whole(runs)
    if moment == "after":
        whole(runs)
    os._exit(9)
setattr(workflow_states.Runs, method, dies)
sys.argv[0] = workflow_states.__file__
workflow_states.main()
"""


def rows(database: Path, run: str) -> list[tuple[str, Any]]:
    """Return the steps of a run according to its own database."""
    with closing(sqlite3.connect(database)) as connection:
        found = connection.execute(
            "SELECT step, token, committed FROM steps WHERE run = ? ORDER BY tx", (run,)
        ).fetchall()
    assert all(committed for _, _, committed in found)
    return [(step, json.loads(token)) for step, token, _ in found]


def test_followers_see_each_state_with_its_token(url: str, namespace: str, tmp_path: Path, values: Values):
    database = tmp_path / "workflow.db"
    said = run("workflow_states", url, "--namespace", namespace, "--database", database, "--run", "r1")
    assert said.count("is done") == 4
    assert '"state": "completed"' in said
    assert rows(database, "r1")[-1] == ("report", TOKEN)
    check_reported(values, url, namespace, "r1")


def check_reported(values: Values, url: str, namespace: str, run: str) -> None:
    """Check that both topics have every step once, in order, and that the changes add up to the token."""
    states, tokens = (
        [each for each in values(url, namespace, topic, isolation="committed") if each["run"] == run]
        for topic in ("states", "tokens")
    )
    assert [(each["step"], each["state"]) for each in states] == [
        (step, "completed" if step == "report" else "running") for step in STEPS
    ]
    assert [each["step"] for each in tokens] == STEPS
    token: dict[str, Any] = {}
    for each in tokens:
        token |= each["changed"]
    assert token == TOKEN


@pytest.mark.parametrize(
    ("moment", "method", "outcome"),
    [
        ("before", "commit_tx", None),
        ("after", "commit_tx", "aborted"),
        ("before", "post_tx_commit", "committed"),
        ("after", "post_tx_commit", None),
    ],
)
def test_a_crash_around_the_decision_is_repaired(
    moment: str, method: str, outcome: str | None, url: str, namespace: str, tmp_path: Path, values: Values
):
    words = ("--namespace", namespace, "--database", tmp_path / "workflow.db", "--run", "r1", "run")
    args = [sys.executable, "-c", DYING, str(EXAMPLES), moment, method, *command("workflow_states", url, *words)[2:]]
    died = subprocess.run(args, env=clean_environ(), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert died.returncode == 9, died.stderr
    said = run("workflow_states", url, *words)
    assert ("interrupted: " + outcome if outcome else "") in said
    assert ("interrupted" in said) == (outcome is not None)
    assert ("clean is done" in said) == (method == "commit_tx")
    assert [step for step, _ in rows(tmp_path / "workflow.db", "r1")] == STEPS
    check_reported(values, url, namespace, "r1")


def test_states_and_rows_agree_although_workflow_and_daemon_are_killed(tmp_path: Path, values: Values):
    chance, database = random.Random(3), tmp_path / "workflow.db"
    with lasting_daemon(tmp_path) as (daemon, url):
        words = ("--database", database, "--run", "r1", "--pause-s", "0.1", "run")
        workflow = Program(tmp_path / "log", "workflow_states", url, *words)
        with mortal(workflow):
            for victim in (workflow, daemon, workflow, workflow):
                time.sleep(chance.uniform(0.35, 0.8))
                victim.kill()
                victim.start()
            while workflow.wait() != 0:
                workflow.start()  # the daemon's death rolled back its transaction; it reports that and continues
        assert [step for step, _ in rows(database, "r1")] == STEPS
        assert rows(database, "r1")[-1][1] == TOKEN
        check_reported(values, url, "workflow", "r1")
        with Client(url, namespace="workflow") as client:
            left = client.transactions.list(state="in_progress")  # begun by killed processes
        assert not any(each.topics for each in left)  # so they block no reader
