"""``plainsong copy`` of a real deployment, killed on the way: daemons serve the same content before and after it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from plainsong import Client
from plainsong.cli.command import Exit
from tests.daemon.deployment import (
    duplicates_are_reported,
    fill,
    is_all_there,
    new_messages_come_behind,
    open_transactions_can_be_committed,
)
from tests.daemon.forked import Forked
from tests.daemon.harness import Daemon, DaemonEnded, run_plainsong, start_python
from tests.patience import PATIENCE_S

DYING = Path(__file__).with_name("dying_program.py")


def copy(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = run_plainsong("copy", *words)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def killed_while(stage: str, *words: str, by: int = signal.SIGKILL) -> int:
    """Copy, and send a signal when ``stage`` reports a thousand of twenty thousand rows; return the exit code."""
    return ended_when("says", rf"{stage}: \d{{4,}} of", "copy", "--progress", *words, by=by)


def ended_when(event: str, pattern: str, *words: object, times: int = 1, by: int = signal.SIGKILL) -> int:
    """Run a command that sends itself a signal, as in ``dying_program``; return its exit code."""
    return started_until(event, pattern, *words, times=times, by=by).wait(PATIENCE_S)


def started_until(
    event: str, pattern: str, *words: object, times: int = 1, by: int = signal.SIGKILL
) -> subprocess.Popen[bytes] | Forked:
    """Start the same command without waiting for its end."""
    with open(os.devnull, "wb") as nowhere:
        said, line = nowhere.fileno(), map(str, (DYING, int(by), event, pattern, times, *words))
        return start_python(*line, imports=[], stdout=said, stderr=said)


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A stopped LevelDB store, and its content."""
    directory = tmp_path_factory.mktemp("moved") / "data"
    with Daemon(directory, "retention.interval_s=3600") as daemon:
        with Client("http://{}:{}".format(*daemon.address)) as client:
            made = fill(client)
        daemon.stop()
    return directory, made


def test_a_deployment_is_the_same_after_a_copy_that_was_killed_on_the_way(filled, tmp_path):
    directory, made = filled
    words = ("--from", f"leveldb:{directory}", "--to", f"leveldb:{tmp_path / 'other'}")
    assert killed_while("copying", *words) == -signal.SIGKILL
    with pytest.raises(DaemonEnded, match="not complete"), Daemon(tmp_path / "other"):
        pass
    assert killed_while("comparing", *words) == -signal.SIGKILL
    told = [json.loads(line) for line in copy(*words, "--json").stdout.splitlines()]
    assert told[-1] == told[-1] | {"event": "copied", "same": True}
    assert all(part["same"] for part in told[:-1])
    assert "is already done" in copy(*words).stdout
    assert "both sides are the same" in copy(*words, "--verify-only").stdout
    with Daemon(tmp_path / "other") as daemon, Client("http://{}:{}".format(*daemon.address)) as client:
        is_all_there(client, made)
        duplicates_are_reported(client, made)
        open_transactions_can_be_committed(client, made)
        new_messages_come_behind(client, made)
    assert "orders" in copy(*words, "--verify-only", code=1).stderr


def test_ctrl_c_ends_it_with_its_code_and_it_continues_later(filled, tmp_path):
    directory, _ = filled
    words = ("--from", f"leveldb:{directory}", "--to", f"leveldb:{tmp_path / 'other'}")
    assert killed_while("copying", *words, by=signal.SIGINT) == Exit.INTERRUPTED
    assert "both sides are the same" in copy(*words).stdout


def test_a_dry_run_reports_what_would_be_copied_and_creates_nothing(filled, tmp_path):
    directory, _ = filled
    done = copy("--from", f"leveldb:{directory}", "--to", f"leveldb:{tmp_path / 'none'}", "--dry-run")
    assert "default:orders" in done.stdout
    assert not (tmp_path / "none").exists()


def test_a_store_in_use_is_refused_with_its_process(tmp_path):
    with Daemon(tmp_path / "data"):
        done = copy("--from", f"leveldb:{tmp_path / 'data'}", "--to", f"leveldb:{tmp_path / 'new'}", code=3)
    assert "is in use by process" in done.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("source", "target", "says", "code"),
    [
        ("leveldb:nowhere", "leveldb:new", "is not a store", 3),
        ("redis:x", "leveldb:new", "is not of the form leveldb:PATH", 2),
        ("hbase:h:9090?prefiks=x", "leveldb:new", "is not prefix=NAME", 2),
        ("leveldb:same", "leveldb:same", "the same store", 2),
    ],
)
def test_unusable_stores_are_refused(source, target, says, code):
    assert says in copy("--from", source, "--to", target, code=code).stderr
