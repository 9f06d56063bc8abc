"""Starting the load generator: one run of ``bench/load.py`` in its own process, with its answers checked."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LOAD = Path(__file__).with_name("load.py")
#: More than any run reaches: the time ends it.
_REQUESTS = 1 << 30


class Load:
    """A load generator at work; ``result`` once it has ended."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.result: dict[str, Any] = {}

    def end(self) -> dict[str, Any]:
        """Wait for its end, after telling it that it is enough if it has no time of its own."""
        out, _ = self._process.communicate()
        if self._process.returncode:
            raise RuntimeError("the load generator failed")
        self.result = json.loads(out)
        if set(self.result["statuses"]) != {"200"}:
            raise RuntimeError(f"not only 200: {self.result['statuses']}")
        return self.result

    def enough(self) -> dict[str, Any]:
        """Let it end now."""
        self._process.send_signal(signal.SIGTERM)
        return self.end()


@contextmanager
def load(port: int, connections: int, request: bytes, seconds: float = 0, warm_up: int = 0) -> Iterator[Load]:
    """A load generator that sends ``request`` for so many seconds (0: until it is enough)."""
    with loads([(port, request)], connections, seconds, warm_up) as running:
        yield running


@contextmanager
def loads(
    targets: Sequence[tuple[int, bytes]], connections: int, seconds: float = 0, warm_up: int = 0
) -> Iterator[Load]:
    """As ``load``, for several ports and requests, dealt to the connections in turn."""
    with TemporaryDirectory(prefix="requests-") as directory:
        command = [sys.executable, str(LOAD), "--connections", str(connections), "--requests", str(_REQUESTS)]
        command += ["--warm-up", str(warm_up), "--seconds", str(seconds)]
        for number, (port, request) in enumerate(targets):
            file = Path(directory) / str(number)
            file.write_bytes(request)
            command += ["--port", str(port), "--request-file", str(file)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            yield Load(process)
        finally:
            process.kill()
            process.wait()


def run_load(port: int, connections: int, request: bytes, seconds: float) -> dict[str, Any]:
    """A whole run, with a short warm-up; see ``bench/load.py`` for what it returns."""
    with load(port, connections, request, seconds, warm_up=2 * connections) as running:
        return running.end()


def run_loads(targets: Sequence[tuple[int, bytes]], connections: int, seconds: float) -> dict[str, Any]:
    """As ``run_load``, for several ports and requests."""
    with loads(targets, connections, seconds, warm_up=2 * connections) as running:
        return running.end()
