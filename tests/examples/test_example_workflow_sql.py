"""The workflow on PostgreSQL: rows and messages agree, even after a death at the worst moment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import MetaData

from tests.daemon.harness import clean_environ
from tests.examples.programs import EXAMPLES, command, run
from tests.patience import PATIENCE_S
from tests.sql.server import NoServer, Postgres

Values = Callable[..., list[Any]]
#: Exits when the second step's rows are prepared but undecided, or just after the decision.
DYING = """
import os, sys
sys.path.insert(0, sys.argv.pop(1))
import workflow_states_sql as example
method, calls = sys.argv.pop(1), []
whole = getattr(example.SqlParticipant, method)
def dies(participant):
    calls.append(participant)
    if len(calls) < 2:
        return whole(participant)
    if method == "commit_tx":
        whole(participant)
    os._exit(9)
setattr(example.SqlParticipant, method, dies)
sys.argv[0] = example.__file__
example.main()
"""


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """The URL of an empty database."""
    try:
        server = Postgres()
    except NoServer as error:
        pytest.skip(f"NOT TESTED, the example with PostgreSQL: {error}")
    try:
        yield server.start().emptied("examples", MetaData())
    finally:
        server.remove()


@pytest.mark.parametrize("method", ["commit_tx", "post_tx_commit"])
def test_a_crash_around_the_decision_is_repaired_by_recovery(
    postgres: str, method: str, url: str, namespace: str, values: Values
):
    words = ("--namespace", namespace, "--database", postgres, "--run", method)
    args = [sys.executable, "-c", DYING, str(EXAMPLES), method, *command("workflow_states_sql", url, *words)[2:]]
    died = subprocess.run(args, env=clean_environ(), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert died.returncode == 9, died.stderr
    said = run("workflow_states_sql", url, *words)
    assert ("clean is done" in said) == (method == "commit_tx")
    check(postgres, values, url, namespace, method)


def check(postgres: str, values: Values, url: str, namespace: str, name: str) -> None:
    """Check that the run's row and both topics agree, and that no prepared transaction is left."""
    states, tokens = (values(url, namespace, topic, isolation="committed") for topic in ("states", "tokens"))
    with psycopg.connect(postgres.replace("+psycopg", "")) as connection:
        row = connection.execute("SELECT step, token FROM workflow_runs WHERE name = %s", [name]).fetchone()
        prepared = connection.execute("SELECT count(*) FROM pg_prepared_xacts").fetchone()
    assert [(each["step"], each["state"]) for each in states] == [
        ("fetch", "running"),
        ("clean", "running"),
        ("count", "completed"),
    ]
    assert [each["step"] for each in tokens] == ["fetch", "clean", "count"]
    token = {key: value for each in tokens for key, value in each["changed"].items()}
    assert token == {"rows": 987, "dropped": 13, "customers": 329}
    assert row == ("count", token)
    assert prepared == (0,)
