"""The README's first minute with Plainsong: three lines, a kill, and the third line again."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from tests.daemon.harness import Daemon
from tests.documents import DOCUMENTS, shell_block
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="NOT TESTED: the README's lines need curl")


def pasted(line: str, running: Daemon) -> str:
    """Return the output of ``line`` in a shell, with the daemon's real port in place of the usual one."""
    assert "127.0.0.1:7420" in line
    line = line.replace("127.0.0.1:7420", "{}:{}".format(*running.address))
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    return done.stdout


def test_the_three_lines_of_the_readme_work_and_survive_a_kill(daemon):
    running = daemon()
    create, publish, poll = shell_block(DOCUMENTS["README.md"], "In a second terminal:")
    assert (pasted(create, running), pasted(publish, running)) == ("", "")
    first = json.loads(pasted(poll, running))
    assert [message["payload"] for message in first] == ["hello", "world"]
    running.kill()
    running.start()
    assert json.loads(pasted(poll, running)) == first


def test_the_first_line_pasted_twice_reports_that_the_topic_exists(daemon):
    running = daemon()
    create, publish, _ = shell_block(DOCUMENTS["README.md"], "In a second terminal:")
    assert pasted(create, running) == ""
    assert json.loads(pasted(create, running))["code"] == "topic_exists"
    assert pasted(publish, running) == ""
