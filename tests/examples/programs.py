"""The examples as processes: run to their end, or started, killed and restarted.

They are forked from a process that has imported the client, except where a test runs the commands of the README.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.daemon import harness
from tests.daemon.forked import Forked
from tests.daemon.harness import ROOT, Daemon, clean_environ, free_port, run_python, start_python
from tests.patience import PATIENCE_S

EXAMPLES = ROOT / "examples"


def command(name: str, url: str, *words: str | Path) -> list[str]:
    return [sys.executable, str(EXAMPLES / f"{name}.py"), "--url", url, *map(str, words)]


def run(name: str, url: str, *words: str | Path) -> str:
    """Return an example's standard output; it must succeed with an empty standard error."""
    _, *line = command(name, url, *words)
    return _said(run_python(*line, cwd=ROOT.parent, timeout_s=PATIENCE_S))


def run_program(name: str, url: str, *words: str | Path, **environ: str) -> str:
    """Like ``run``, with an interpreter of its own, as a user runs it."""
    done = subprocess.run(
        command(name, url, *words),
        cwd=ROOT.parent,
        env={**clean_environ(), **environ},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return _said(done)


def _said(done: subprocess.CompletedProcess[str]) -> str:
    assert (done.returncode, done.stderr) == (0, ""), done.stderr + done.stdout
    return done.stdout


def eventually(what: str, holds: Callable[[], Any]) -> Any:
    """Like the harness's function, with a time limit that lets several processes start."""
    return harness.eventually(what, holds, PATIENCE_S)


class Program:
    """An example that is started, killed and restarted, and ends with its test. Its output goes to a file."""

    def __init__(self, log: Path, name: str, url: str, *words: str | Path) -> None:
        self.command = command(name, url, *words)
        self.log = log
        self._process: subprocess.Popen[bytes] | Forked | None = None

    def start(self) -> None:
        _, *line = self.command
        with self.log.open("ab") as log:
            self._process = start_python(*line, imports=(), stdout=log.fileno(), stderr=log.fileno())

    def kill(self) -> None:
        """Kill only the program; its children keep running, as in reality."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE_S)

    def wait(self) -> int:
        assert self._process is not None
        return self._process.wait(PATIENCE_S)

    @property
    def ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@contextmanager
def mortal(*programs: Program) -> Iterator[None]:
    """Start all programs, and kill them at the end of the block."""
    with ExitStack() as ends:
        for program in programs:
            ends.callback(program.kill)
            program.start()
        yield


@contextmanager
def lasting_daemon(tmp_path: Path) -> Iterator[tuple[Daemon, str]]:
    """A daemon that keeps its address when it is killed and restarted."""
    address = f"127.0.0.1:{free_port()}"
    with Daemon(tmp_path / "data", bind=address) as daemon:
        yield daemon, f"http://{address}"


def kill_now_and_then(chance: random.Random, times: int, *victims: Program | Daemon) -> None:
    """Kill and restart one of them, ``times`` times, at moments drawn by ``chance``."""
    for _ in range(times):
        time.sleep(chance.uniform(0.05, 0.6))
        victim = chance.choice(victims)
        victim.kill()
        victim.start()
