"""Fixtures of the command line's tests: a daemon, a namespace for each test, and the program in two forms."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from plainsong.cli.main import program, run
from tests.daemon.harness import PLAINSONG, Daemon, clean_environ

_numbers = count()


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that no test disturbs."""
    with Daemon(tmp_path_factory.mktemp("cli") / "data") as daemon:
        yield daemon


def url_of(daemon: Daemon) -> str:
    return f"http://{daemon.address[0]}:{daemon.address[1]}"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment without a daemon's address, with a settings directory of its own."""
    for name in list(os.environ):
        if name.startswith("PLAINSONG_") or name in ("LD_PRELOAD", "COLUMNS"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@dataclass
class Said:
    """The program's output and exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def rows(self) -> list[Any]:
        """The output, parsed as NDJSON."""
        return [json.loads(line) for line in self.lines]


@pytest.fixture
def alone(home: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Run the program in this process, without a daemon's address."""

    def call(*arguments: str, code: int | None = None) -> Said:
        said = Said(run(program, arguments, "plainsong"), *capsys.readouterr())
        assert code is None or said.code == code, said
        return said

    return call


@pytest.fixture
def cli(alone: Callable[..., Said], running: Daemon, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:
    """Run the program here against the shared daemon, in a new namespace; check the exit code (default 0)."""
    monkeypatch.setenv("PLAINSONG_URL", url_of(running))
    monkeypatch.setenv("PLAINSONG_NAMESPACE", f"test_{next(_numbers)}")

    def call(*arguments: str, code: int | None = 0) -> Said:
        return alone(*arguments, code=code)

    return call


@pytest.fixture
def spawn(cli: Callable[..., Said]) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start the installed program with the same daemon and namespace; end it after the test."""
    started = []

    def start(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        environ = {
            **clean_environ(),
            **{key: value for key, value in os.environ.items() if key.startswith("PLAINSONG_")},
        }
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen([PLAINSONG, *arguments], **{"env": environ, **pipes, **options})
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
