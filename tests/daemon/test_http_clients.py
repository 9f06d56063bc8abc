"""Users' HTTP clients with default settings and the real daemon: each creates, publishes and polls."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.harness import Daemon

PROGRAMS = Path(__file__).with_name("clients")
#: Enough for the Java compiler on a busy machine.
TIMEOUT_S = 600.0
CURL = """
set -e
for call in 'PUT|' 'POST|/publish|{"messages": ["one"]}' 'POST|/publish|{"messages": ["two"]}' 'POST|/poll|{}'; do
  method=${call%%|*}; rest=${call#*|}; path=${rest%%|*}; body=${rest#*|}; [ "$body" = "$rest" ] && body=
  curl -sS --http2 -X "$method" -H 'Content-Type: application/json' --data-binary "$body" -w '%{http_code} ' -o "$2/body" "$1$path"
  cat "$2/body"; echo
done
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a running daemon."""
    with Daemon(tmp_path_factory.mktemp("clients") / "data") as running:
        yield f"http://{running.address[0]}:{running.address[1]}"
        assert running.stop() == 0
        assert not [line for line in running.lines if '"traceback"' in line or '"error"' in line], running.lines


@pytest.fixture(scope="module")
def go_client(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The Go client, compiled once; Go's cache keeps the standard library (half a minute to compile) for later runs."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("NOT TESTED: the default HTTP client of go, which is not installed")
    program = tmp_path_factory.mktemp("go") / "course"
    environ = {**os.environ, "GOTOOLCHAIN": "local", "GO111MODULE": "off"}
    source = PROGRAMS / "course.go"
    built = subprocess.run(
        [go, "build", "-o", program, source], env=environ, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    return [str(program)]


@pytest.mark.parametrize("client", ["java", "curl", "go", "node", "python"])
def test_a_client_at_its_defaults_creates_a_topic_publishes_and_polls(
    client: str, address: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    program = sys.executable if client == "python" else shutil.which(client)
    if program is None:
        pytest.skip(f"NOT TESTED: the default HTTP client of {client}, which is not installed")
    command: list[str] = {
        # The program ends before optimized code would pay off.
        "java": lambda: [program, "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", str(PROGRAMS / "Course.java")],
        "curl": lambda: ["sh", "-c", CURL, "sh"],
        "go": lambda: request.getfixturevalue("go_client"),
        "node": lambda: [program, str(PROGRAMS / "course.mjs")],
        "python": lambda: [program, str(PROGRAMS / "course.py")],
    }[client]()
    topic = f"{address}/v1/namespaces/clients/topics/{client}"
    ran = subprocess.run(
        [*command, topic, str(tmp_path)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert ran.returncode == 0, ran.stderr
    *before, polled = ran.stdout.strip().splitlines()
    assert [line.strip() for line in before] == ["200", "200", "200"], ran.stdout
    status, _, body = polled.partition(" ")
    assert status == "200"
    assert [message["payload"] for message in json.loads(body)] == ["one", "two"]
