"""The real daemon as a process: started on a free port, observed, killed, and stopped with its test."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from tests.daemon.forked import Forked, fork_server
from tests.patience import PATIENCE_S
from tests.ports import free_port as free_port

ROOT = Path(__file__).parents[2]
PLAINSONG = Path(sys.executable).with_name("plainsong")


class DaemonEnded(Exception):
    """The daemon ended before it was ready."""


class Daemon:
    """One daemon in ``data_dir``, which a ``with`` block starts and ends.

    Args:
      sets: settings as ``section.key=value``.
      wrapper: a command that runs the daemon, such as strace with its options.
      stdout: where the daemon's output goes, instead of to ``lines``; needs a port in ``bind``.
      forked: True if the process may be forked from one that has imported everything, which saves most of a start. A
        daemon with a wrapper, a ``stdout``, or an environment that differs in more than settings is never forked.
    """

    def __init__(
        self,
        data_dir: Path,
        *sets: str,
        bind: str = "127.0.0.1:0",
        environ: Mapping[str, str] | None = None,
        wrapper: Sequence[str] = (),
        stdout: IO[bytes] | int | None = None,
        forked: bool = True,
    ) -> None:
        self.data_dir = data_dir
        self.command = [*wrapper, str(PLAINSONG), "serve", "--bind", bind, "--data-dir", str(data_dir)]
        for setting in ("log.format=json", *sets):
            self.command += ["--set", setting]
        self.environ = {**clean_environ(), **(environ or {})}
        #: ``(host, port)`` of the running daemon.
        port = bind.rpartition(":")[2]
        self.address = ("127.0.0.1", int(port) if port.isdecimal() else 0)
        self.lines: list[str] = []
        self.errors = ""
        self.start_s = 0.0
        self._stdout = stdout
        self._forked = forked and stdout is None
        self._serving: dict[str, Any] | None = None
        self._news = threading.Condition()
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Daemon:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.end()

    # --- life cycle ----------------------------------------------------------------------------

    def start(self) -> Daemon:
        """Start the process, and wait until it accepts connections.

        Raises:
          DaemonEnded: it ended before that; the message is its output.
        """
        begun = time.monotonic()
        self.spawn()
        try:
            if self._stdout is None:
                self.wait_ready()
            elif self.address[1]:
                eventually("it answers", self._answers)
        except BaseException:
            self.end()
            raise
        self.start_s = time.monotonic() - begun
        return self

    def spawn(self) -> None:
        """Start the process, in its own process group, without waiting."""
        self.lines, self.errors, self._serving = [], "", None
        server = fork_server(self.environ) if self._forked and self.command[0] == str(PLAINSONG) else None
        if server is not None:
            self._process = server.start(self.command, cwd=self.data_dir.parent, environ=self.environ)
        else:
            self._process = subprocess.Popen(
                self.command,
                cwd=self.data_dir.parent,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if self._stdout is None else self._stdout,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        self._threads = [threading.Thread(target=self._read_errors, args=(self._process,), daemon=True)]
        if self._stdout is None:
            self._threads.append(threading.Thread(target=self._read_lines, args=(self._process,), daemon=True))
        for thread in self._threads:
            thread.start()

    def wait_ready(self) -> None:
        """Wait for the line with the daemon's address.

        A start takes a few seconds of processor time, and longer on a busy machine, so the limits are on a period
        without work, and on the total work.
        """
        with self._news:
            spent_s = 0.0
            while not self._news.wait_for(lambda: self._serving or self.ended, PATIENCE_S):
                before_s, spent_s = spent_s, self.start_cpu_s()
                if spent_s - before_s < 0.01 or spent_s > PATIENCE_S:
                    raise DaemonEnded(f"not ready after {spent_s:.1f} s of processor time; it said {self.lines}")
        if self._serving is None:
            self.wait()
            raise DaemonEnded(f"ended with {self.returncode}: {self.errors}\n" + "\n".join(self.lines))
        for url in self._serving["addresses"]:
            if not url.startswith("unix:"):
                host, _, port = url.partition("://")[2].rpartition(":")
                self.address = (host.strip("[]"), int(port))
                return

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process has ended."""
        self._signal_group(signal.SIGKILL)
        self.wait()

    def signal(self, number: int) -> None:
        """Send a signal to the daemon itself."""
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for the process to end; return the exit code, negative for a signal."""
        assert self._process is not None
        code = self._process.wait(timeout_s)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        return code

    def stop(self) -> int:
        """Send SIGTERM; return the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def end(self) -> None:
        """Kill any of its processes that are still running."""
        if self._process is None:
            return
        self._signal_group(signal.SIGKILL)
        self.wait()
        self._process = None

    # --- observation ---------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    @property
    def returncode(self) -> int | None:
        return None if self._process is None else self._process.poll()

    @property
    def stdout(self) -> IO[bytes]:
        """The pipe of a daemon with ``stdout=subprocess.PIPE``."""
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def serving(self) -> dict[str, Any]:
        """The fields of the daemon's ready line."""
        assert self._serving is not None
        return self._serving

    def cpu_s(self) -> float:
        """Return the processor time used so far, in user and system mode."""
        return _cpu_s(self.pid)

    def start_cpu_s(self) -> float:
        """Return the processor time used so far, including the child processes, which are the front ends."""
        return self.cpu_s() + sum(map(_cpu_s, self.children()))

    def children(self) -> list[int]:
        """Return the pids of the child processes of all its threads."""
        found: list[int] = []
        for path in Path(f"/proc/{self.pid}/task").glob("*/children"):
            with suppress(OSError):  # the thread has ended
                found += map(int, path.read_text().split())
        return sorted(found)

    def open_sockets(self) -> int:
        """Return the number of sockets: connections, and a few of the daemon's own."""
        found = 0
        for descriptor in Path(f"/proc/{self.pid}/fd").iterdir():
            with suppress(OSError):  # closed by now
                found += os.readlink(descriptor).startswith("socket:")
        return found

    def wait_for_line(self, part: str) -> str:
        """Return the first line that contains ``part``, waiting for it if necessary."""
        with self._news:
            found = self._news.wait_for(lambda: next((line for line in self.lines if part in line), None), PATIENCE_S)
        assert found is not None, f"no line with {part!r} in {self.lines}"
        return found

    def _answers(self) -> bool:
        if self.ended:
            self.wait()
            raise DaemonEnded(f"ended with {self.returncode}: {self.errors}")
        with suppress(OSError), socket.create_connection(self.address):
            return True
        return False

    # --- reader threads ------------------------------------------------------------------------

    def _read_lines(self, process: subprocess.Popen[bytes] | Forked) -> None:
        assert process.stdout is not None
        for raw in process.stdout:
            line = raw.decode().rstrip("\n")
            with self._news:
                self.lines.append(line)
                if '"event":"serving"' in line:
                    self._serving = json.loads(line)
                self._news.notify_all()
        process.wait()
        with self._news:
            self._news.notify_all()

    def _read_errors(self, process: subprocess.Popen[bytes] | Forked) -> None:
        assert process.stderr is not None
        self.errors = process.stderr.read().decode()

    def _signal_group(self, number: int) -> None:
        if self.ended and Path(f"/proc/{self.pid}").exists():
            return  # the pid belongs to another process by now; the daemon's group is empty
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def _cpu_s(pid: int) -> float:
    with suppress(OSError):  # it has ended
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def start_python(
    *words: str | Path,
    imports: Sequence[str],
    stdin: bool = False,
    stdout: int | None = None,
    stderr: int | None = None,
) -> subprocess.Popen[bytes] | Forked:
    """Start ``plainsong``, or a Python file, with these arguments; forked if possible, like daemons.

    Args:
      imports: modules that are slow to import.
      stdin: True if its standard input is a pipe; otherwise it is empty.
      stdout: a descriptor to use instead of a pipe; ``stderr`` likewise.
    """
    line, environ = list(map(str, words)), clean_environ()
    server = fork_server(environ)
    if server is not None:
        return server.start(
            line, cwd=Path.cwd(), environ=environ, imports=imports, stdin=stdin, stdout=stdout, stderr=stderr
        )
    if line[0] != str(PLAINSONG):
        line.insert(0, sys.executable)
    return subprocess.Popen(
        line,
        env={**environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
        stdout=subprocess.PIPE if stdout is None else stdout,
        stderr=subprocess.PIPE if stderr is None else stderr,
        bufsize=0,
    )


def run_plainsong(
    *words: object, cwd: Path | None = None, environ: Mapping[str, str] | None = None, timeout_s: float = 5 * PATIENCE_S
) -> subprocess.CompletedProcess[str]:
    """Run a command of the program to completion; forked if possible, like daemons."""
    return run_python(PLAINSONG, *words, cwd=cwd, environ=environ, timeout_s=timeout_s)


def run_python(
    *words: object, cwd: Path | None = None, environ: Mapping[str, str] | None = None, timeout_s: float = 5 * PATIENCE_S
) -> subprocess.CompletedProcess[str]:
    """Run a Python file, the first argument, in the same way."""
    line, environ = list(map(str, words)), {**clean_environ(), **(environ or {})}
    server = fork_server(environ)
    if server is None:
        if line[0] != str(PLAINSONG):
            line.insert(0, sys.executable)
            environ["PYTHONPATH"] = str(ROOT)
        return subprocess.run(
            line, capture_output=True, text=True, cwd=cwd, env=environ, timeout=timeout_s, check=False
        )
    process = server.start(line, cwd=cwd or Path.cwd(), environ=environ)
    try:
        said, errors = process.communicate(timeout_s)
    finally:
        process.kill()
    return subprocess.CompletedProcess(line, process.wait(), said.decode(), errors.decode())


def clean_environ() -> dict[str, str]:
    """Return this environment without variables that configure the daemon."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PLAINSONG_", "NOTIFY_", "WATCHDOG_")) and name != "PORT"
    }


def eventually(what: str, holds: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """Poll ``holds`` and return its first true value; fail with ``what`` after ``patience_s``."""
    begun_s = time.monotonic()
    while True:
        value = holds()
        if value:
            return value
        waited_s = time.monotonic() - begun_s
        assert waited_s < patience_s, f"still not so after {patience_s} s: {what}"
        # Less often during a long wait: each look at a daemon costs milliseconds of a core, here and there.
        time.sleep(min(0.1, 0.02 + waited_s / 20))
