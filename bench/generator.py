"""Starting the load generator in a process of its own, with its answers checked.

It is ``bench/loadgen``, in C, where there is a compiler: on few cores a generator in Python takes from the server what
it is to measure. Without one it is ``bench/load.py``, which does the same for HTTP at two to three times the cost.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LOAD = Path(__file__).with_name("load.py")
SOURCES = Path(__file__).with_name("loadgen")
#: Where the compiled generator is kept, which git ignores; named by its sources, so that it is never an old one.
BUILT = Path(__file__).parents[1] / ".cache" / "bench"
#: More than any run reaches: the time ends it.
_REQUESTS = 1 << 30


@cache
def compiled() -> Path | None:
    """The generator in C, compiled if need be; None where there is no compiler, or ``BENCH_PURE`` is set."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or os.environ.get("BENCH_PURE"):
        return None
    files = sorted(SOURCES.glob("*.[ch]"))
    name = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]
    program = BUILT / f"loadgen-{name}"
    if not program.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        unfinished = BUILT / f"{program.name}.{os.getpid()}"
        command = [compiler, "-O2", "-Wall", "-o", str(unfinished), *(str(f) for f in files if f.suffix == ".c"), "-lm"]
        if subprocess.run(command, check=False).returncode:
            print("the load generator does not compile here; the one in Python is used", file=sys.stderr)
            return None
        unfinished.replace(program)
    return program


def generator() -> str:
    """Which generator is used, for the report."""
    return "C" if compiled() else "Python"


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
        if set(self.result["statuses"]) - {"200"}:
            raise RuntimeError(f"not only 200: {self.result['statuses']}")
        return self.result

    def enough(self) -> dict[str, Any]:
        """Let it end now."""
        self._process.send_signal(signal.SIGTERM)
        return self.end()


@contextmanager
def started(
    requests: Sequence[bytes], ports: Sequence[int], *options: str, hello: bytes = b"", pure: bool = False
) -> Iterator[Load]:
    """A load generator with these requests and options; ``hello`` only where it is compiled; ``pure``: in Python."""
    program = None if pure else compiled()
    with TemporaryDirectory(prefix="requests-") as directory:
        command = [str(program)] if program else [sys.executable, str(LOAD)]
        for port in ports:
            command += ["--port", str(port)]
        for number, request in enumerate(requests):
            file = Path(directory) / str(number)
            file.write_bytes(request)
            command += ["--request-file", str(file)]
        if hello:
            file = Path(directory) / "hello"
            file.write_bytes(hello)
            command += ["--hello-file", str(file)]
        process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
        try:
            yield Load(process)
        finally:
            process.kill()
            process.wait()


@contextmanager
def load(
    port: int,
    connections: int,
    request: bytes,
    seconds: float = 0,
    warm_up: int = 0,
    *,
    pure: bool = False,
    authority: Path | None = None,
) -> Iterator[Load]:
    """A load generator that sends ``request`` for so many seconds (0: until it is enough).

    Args:
      pure: the one in Python, as it is for TLS in any case.
      authority: the file of the authority of the server's certificate; None: no TLS.
    """
    options = [*_options(connections, seconds), "--warm-up", str(warm_up)]
    if authority is not None:
        options += ["--authority", str(authority)]
    with started([request], [port], *options, pure=pure or authority is not None) as running:
        yield running


@contextmanager
def loads(
    targets: Sequence[tuple[int, bytes]], connections: int, seconds: float = 0, warm_up: int = 0
) -> Iterator[Load]:
    """As ``load``, for several ports and requests, dealt to the connections in turn."""
    options = [*_options(connections, seconds), "--warm-up", str(warm_up)]
    with started([request for _, request in targets], [port for port, _ in targets], *options) as running:
        yield running


@contextmanager
def loads_everywhere(
    port: int, connections: int, requests: Sequence[bytes], seconds: float = 0, *, rate: float = 0, number: int = 0
) -> Iterator[Load]:
    """A load generator each of whose connections sends all requests in turn.

    ``rate``: an open loop, as ``bench/load.py`` explains. ``number``: end after so many requests; 0: the time ends it.
    """
    options = [*_options(connections, seconds, number), "--everywhere"]
    if rate:
        options += ["--rate", str(rate)]
    with started(requests, [port], *options) as running:
        yield running


def _options(connections: int, seconds: float, number: int = 0) -> list[str]:
    return ["--connections", str(connections), "--requests", str(number or _REQUESTS), "--seconds", str(seconds)]


def run_load(port: int, connections: int, request: bytes, seconds: float) -> dict[str, Any]:
    """A whole run, with a short warm-up; see ``bench/load.py`` for what it returns."""
    with load(port, connections, request, seconds, warm_up=2 * connections) as running:
        return running.end()


def run_loads(targets: Sequence[tuple[int, bytes]], connections: int, seconds: float) -> dict[str, Any]:
    """As ``run_load``, for several ports and requests."""
    with loads(targets, connections, seconds, warm_up=2 * connections) as running:
        return running.end()


def run_everywhere(
    port: int, connections: int, requests: Sequence[bytes], seconds: float = 0, *, rate: float = 0, number: int = 0
) -> dict[str, Any]:
    """A whole run of ``loads_everywhere``."""
    with loads_everywhere(port, connections, requests, seconds, rate=rate, number=number) as running:
        return running.end()
