"""A daemon in its own process: start it, send requests, read its memory and processor time, stop it."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPSConnection
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any

from bench.bodies import path

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

START_TIMEOUT_S = 180.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Kinds of resident memory: all, the process's own, and its file mappings, which the kernel reclaims under pressure.
ALL, OWN, MAPPED = "VmRSS", "RssAnon", "RssFile"


class Daemon:
    """A running ``python -m broker``."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: Queue[dict[str, Any]] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        said = self.wait_for("serving", START_TIMEOUT_S)
        self.port = int(said["addresses"][0].rpartition(":")[2])

    def _read(self) -> None:
        assert self.process.stdout is not None  # a pipe was requested
        with self.process.stdout as output:
            for line in output:
                if line.startswith("{"):
                    self.lines.put(json.loads(line))
        self.lines.put({"event": "ended"})

    def ended(self) -> None:
        """Wait until all output of the terminated process has been read."""
        self._reader.join()

    def wait_for(self, event: str, timeout_s: float) -> dict[str, Any]:
        """Return the next log line with this event. Raises TimeoutError; RuntimeError if the daemon ends first."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                line = self.lines.get(timeout=max(0.01, deadline_s - time.monotonic()))
            except Empty:
                raise TimeoutError(f"the daemon did not log {event!r} within {timeout_s} s") from None
            if line["event"] == event:
                return line
            if line["event"] == "ended":
                raise RuntimeError("the daemon ended; its output is on standard error")

    def ask(
        self,
        method: str,
        target: str,
        body: object = None,
        *,
        headers: Mapping[str, str] | None = None,
        authority: Path | None = None,
    ) -> bytes:
        """Return a response's body; raise RuntimeError unless it succeeded. ``authority``: use TLS and trust this CA."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        if authority is not None:
            trusting = ssl.create_default_context(cafile=authority)
            connection = HTTPSConnection("127.0.0.1", self.port, timeout=60, context=trusting)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, target, payload, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if not 200 <= answer.status < 300:
            raise RuntimeError(f"{method} {target}: {answer.status} {content.decode(errors='replace')[:500]}")
        return content

    def create(self, topic: str, authorization: str | None = None, authority: Path | None = None) -> None:
        """Create a topic of the benchmark's namespace; ``authority``: the CA file of a daemon with TLS."""
        headers = {} if authorization is None else {"Authorization": authorization}
        self.ask("PUT", path(topic), headers=headers, authority=authority)

    def metric(self, name: str) -> float:
        """Return the value of a metric without labels; 0 if there is no such metric."""
        found = re.search(rf"^{name} (\S+)$", self.ask("GET", "/metrics").decode(), re.MULTILINE)
        return float(found.group(1)) if found else 0.0

    def resident_mb(self, kind: str = ALL) -> float:
        """Return resident memory of this kind, in MB."""
        return resident_mb(self.process.pid, kind)

    def cpu_s(self) -> float:
        """Return the processor time used so far."""
        return cpu_s(self.process.pid)


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used so far, user and system."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def resident_mb(pid: int, kind: str = ALL) -> float:
    """Return a process's resident memory in MB: ``ALL`` of it, its ``OWN``, or ``MAPPED`` from files."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        found = re.search(rf"{kind}:\s+(\d+) kB", file.read())
    assert found is not None  # every process has it
    return int(found.group(1)) * 1024 / 1e6


def end_on_sigterm() -> None:
    """Let SIGTERM end this program as an interrupt does, so that it ends all processes that it started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def start_process(program: Sequence[str], options: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a daemon's process, with a pipe for its standard output."""
    command = [sys.executable, "-m", *program, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(environ))


@contextmanager
def daemon(
    data_dir: Path,
    program: Sequence[str] = ("broker",),
    environ: Mapping[str, str] | None = None,
    port: int = 0,
    /,
    **settings: object,
) -> Iterator[Daemon]:
    """Run a daemon over ``data_dir``; stop it at the end.

    Args:
      program: the module to run, and its arguments before the daemon's options.
      environ: variables in addition to those of this process.
      port: 0: a free one.
      settings: ``retention_interval_s=5`` is ``--set retention.interval_s=5``: the text up to the first underscore is
        the section.
    """
    options = ["--bind", f"127.0.0.1:{port}", "--data-dir", str(data_dir)]
    chosen: dict[str, object] = {"log.format": "json"}
    chosen |= {name.replace("_", ".", 1): value for name, value in settings.items()}
    for name, value in chosen.items():
        options += ["--set", f"{name}={value}"]
    process = start_process(program, options, {**os.environ, **(environ or {})})
    running = None
    try:
        running = Daemon(process)
        yield running
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if running is not None:
            running.ended()
