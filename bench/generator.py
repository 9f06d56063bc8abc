"""Starting the load generator: one run of ``bench/load.py`` in its own process, with its answers checked."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    with NamedTemporaryFile(prefix="request-") as file:
        file.write(request)
        file.flush()
        command = [sys.executable, str(LOAD), "--port", str(port), "--connections", str(connections)]
        command += ["--requests", str(_REQUESTS), "--warm-up", str(warm_up), "--seconds", str(seconds)]
        command += ["--request-file", file.name]
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
