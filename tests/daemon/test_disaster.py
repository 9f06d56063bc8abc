"""The worked disaster of docs/replication.md: its commands run unchanged, with a real S3 server."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.daemon.harness import PLAINSONG, clean_environ
from tests.documents import DOCUMENTS, blocks
from tests.patience import PATIENCE_S
from tests.ports import free_port
from tests.storage.replication.s3_server import s3_server

PAGE = DOCUMENTS["docs/replication.md"]
#: A command that waits until the daemon is up, as a reader of the page would.
UNTIL_ALIVE = "until plainsong doctor --live >/dev/null 2>&1; do sleep 0.1; done"
LOOK = "curl -s "


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3")) as environment:
        yield environment


def script():
    begin, end = PAGE.index("## A worked disaster"), PAGE.index("## A standby")
    for block in blocks(PAGE[begin:end]):
        if block.info != "sh":
            continue
        for line in block.body.splitlines():
            if line.startswith(LOOK):
                found = """grep -q '"lagCommits":0.*"baseMs":[0-9]'"""
                yield f"until {line} | tr -d ' ' | {found}; do sleep 0.1; done"
            else:
                yield line
            if line.endswith("&"):
                yield UNTIL_ALIVE


def test_the_commands_of_the_worked_disaster_bring_back_what_the_machine_lost(s3, tmp_path):
    port = free_port()
    lines = [line.replace("127.0.0.1:7420", f"127.0.0.1:{port}") for line in script()]
    assert sum("kill -9" in line for line in lines) == 1
    ends = "trap 'kill -9 $(jobs -p) 2>/dev/null' EXIT"
    environ = {
        **clean_environ(),
        **s3,
        "PATH": f"{PLAINSONG.parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "PLAINSONG_URL": f"http://127.0.0.1:{port}",
        "PLAINSONG_HTTP__BIND": f"127.0.0.1:{port}",
    }
    done = subprocess.run(
        ["/bin/bash", "-ec", "\n".join([ends, *lines])],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=5 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "complete and undamaged" in done.stdout
    assert done.stdout.splitlines()[-3:] == ["one", "two", "three"]
