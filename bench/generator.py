"""Run the load generator in its own process and check its responses.

It is ``bench/loadgen``, in C, if there is a compiler: on few cores a generator in Python takes processor time from the
server under test. Otherwise it is ``bench/load.py``, which does the same for HTTP at two to three times the cost.
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
#: Folder of the compiled generator, ignored by git. The file name contains a hash of the sources, so it is never stale.
BUILT = Path(__file__).parents[1] / ".cache" / "bench"
#: Higher than any run reaches: the run ends by time.
_REQUESTS = 1 << 30


@cache
def compiled() -> Path | None:
    """Return the generator in C, compiling it if necessary; None without a compiler, or if ``BENCH_PURE`` is set."""
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
    """Return the generator's language, for the report."""
    return "C" if compiled() else "Python"


class Load:
    """A running load generator; ``result`` is set once it has ended."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.result: dict[str, Any] = {}

    def end(self) -> dict[str, Any]:
        """Wait until it ends; return its result. Raises RuntimeError if it failed or a status was not 200."""
        out, _ = self._process.communicate()
        if self._process.returncode:
            raise RuntimeError("the load generator failed")
        self.result = json.loads(out)
        if set(self.result["statuses"]) - {"200"}:
            raise RuntimeError(f"statuses other than 200: {self.result['statuses']}")
        return self.result

    def enough(self) -> dict[str, Any]:
        """Stop it now; return its result."""
        self._process.send_signal(signal.SIGTERM)
        return self.end()


@contextmanager
def started(
    requests: Sequence[bytes], ports: Sequence[int], *options: str, hello: bytes = b"", pure: bool = False
) -> Iterator[Load]:
    """Start a load generator. ``hello`` is sent by the compiled one only; ``pure``: use the one in Python."""
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
    """Send ``request`` for ``seconds`` (0: until ``Load.enough``).

    Args:
      pure: use the generator in Python, which TLS always does.
      authority: CA file of the server's certificate; None: no TLS.
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
    """Like ``load``, for several ports and requests, assigned to the connections round-robin."""
    options = [*_options(connections, seconds), "--warm-up", str(warm_up)]
    with started([request for _, request in targets], [port for port, _ in targets], *options) as running:
        yield running


@contextmanager
def loads_everywhere(
    port: int, connections: int, requests: Sequence[bytes], seconds: float = 0, *, rate: float = 0, number: int = 0
) -> Iterator[Load]:
    """Start a load generator in which each connection sends all requests in turn.

    ``rate``: an open loop, see ``bench/load.py``. ``number``: end after this many requests; 0: end by time.
    """
    options = [*_options(connections, seconds, number), "--everywhere"]
    if rate:
        options += ["--rate", str(rate)]
    with started(requests, [port], *options) as running:
        yield running


def _options(connections: int, seconds: float, number: int = 0) -> list[str]:
    return ["--connections", str(connections), "--requests", str(number or _REQUESTS), "--seconds", str(seconds)]


def run_load(port: int, connections: int, request: bytes, seconds: float) -> dict[str, Any]:
    """Do a whole run after a short warm-up; ``bench/load.py`` documents the result."""
    with load(port, connections, request, seconds, warm_up=2 * connections) as running:
        return running.end()


def run_loads(targets: Sequence[tuple[int, bytes]], connections: int, seconds: float) -> dict[str, Any]:
    """Like ``run_load``, for several ports and requests."""
    with loads(targets, connections, seconds, warm_up=2 * connections) as running:
        return running.end()


def run_everywhere(
    port: int, connections: int, requests: Sequence[bytes], seconds: float = 0, *, rate: float = 0, number: int = 0
) -> dict[str, Any]:
    """Do a whole run of ``loads_everywhere``."""
    with loads_everywhere(port, connections, requests, seconds, rate=rate, number=number) as running:
        return running.end()
