"""Server-sent events of a real daemon, with and without front ends: curl -N, readers that disconnect, shutdown."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from tests.daemon.harness import Daemon, eventually
from tests.daemon.talk import create, metric, publish, topic_path
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@pytest.fixture(params=["http.processes=1", "http.processes=2"])
def daemon(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path / "data", request.param) as running:
        create(running.address, "t")
        yield running


def curl(daemon: Daemon, query: str = "") -> subprocess.Popen[bytes]:
    host, port = daemon.address
    url = f"http://{host}:{port}" + topic_path("t", "/events") + query
    return subprocess.Popen(["curl", "-sN", "-m", str(PATIENCE_S), url], stdout=subprocess.PIPE)


def events(lines: IO[bytes]) -> Iterator[tuple[str, Any]]:
    """Yield kind and data of each event."""
    kind = ""
    for line in lines:
        field, _, value = line.decode().rstrip("\n").partition(": ")
        if field == "event":
            kind = value
        elif field == "data":
            yield kind, json.loads(value)


def test_curl_follows_a_topic_until_the_daemon_leaves(daemon: Daemon) -> None:
    publish(daemon.address, "t", b"one")
    with curl(daemon, "?from=0") as reader:
        assert reader.stdout is not None
        seen = events(reader.stdout)
        assert next(seen)[1]["payload"] == "one"
        for number in range(20):
            publish(daemon.address, "t", f"message {number}".encode())
            kind, data = next(seen)
            assert (kind, data["payload"]) == ("message", f"message {number}")
        assert daemon.stop() == 0
        assert [kind for kind, _ in seen] == ["end"]
    assert reader.returncode == 0, "the answer was complete"


def test_a_reader_that_leaves_frees_everything_it_held(daemon: Daemon) -> None:
    with curl(daemon) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        reader.kill()
    for name in ("plainsong_event_streams", "plainsong_parked_polls"):
        eventually(f"{name} is 0", lambda name=name: metric(daemon.address, name) == 0)
