"""A real daemon for tests, which can be killed, made to fail, and moved in time.

    from plainsong.testing import broker

    def test_orders():
        with broker() as b, b.client() as client:
            client.create_topic("orders")
            b.faults.next_publish("unknown")
            ...

It needs ``plainsong-server``, in this environment or any other. With pytest the fixtures ``plainsong_broker`` and
``plainsong_client`` are available without an import. Where no daemon is installed, tests are skipped, as pytest's first
lines report; with ``PLAINSONG_TESTING_REQUIRED=1``, or pytest's ``--plainsong-required``, they fail.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import unittest
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Self

if TYPE_CHECKING:
    from collections.abc import Iterator

    from plainsong import Client
    from plainsong.transactions import Transaction

__all__ = ["Broker", "Clock", "DaemonFailed", "DaemonNotInstalled", "Faults", "broker", "command"]

#: The variable with the command that runs the program ``plainsong``.
COMMAND = "PLAINSONG_COMMAND"
#: The variable that makes tests without a daemon fail instead of skip: ``1`` or ``true``.
REQUIRED = "PLAINSONG_TESTING_REQUIRED"
#: How long the daemon may take to start and to leave.
START_S = 30.0
LEAVE_S = 30.0


class DaemonNotInstalled(unittest.SkipTest):
    """No program with the verb ``serve`` was found. The text says how to install one; pytest and unittest skip the test."""


class DaemonFailed(Exception):
    """The daemon ended, refused a command of the test, or is required and not installed. The text is what it said."""


def command() -> list[str]:
    """Return the command of the daemon: ``PLAINSONG_COMMAND``, the program next to the interpreter, or the one on the path.

    Raises:
      DaemonNotInstalled: there is none.
      DaemonFailed: there is none, and ``PLAINSONG_TESTING_REQUIRED`` is set.
    """
    if given := os.environ.get(COMMAND):
        return shlex.split(given)
    beside = Path(sys.executable).with_name("plainsong-server")
    if beside.exists():
        return [str(beside)]
    if found := shutil.which("plainsong-server"):
        return [found]
    missing = (
        "plainsong-server is not installed: pip install plainsong-server into an environment of its own, and let "
        f"{COMMAND} name its program"
    )
    if os.environ.get(REQUIRED, "").lower() in ("1", "true", "yes"):
        raise DaemonFailed(missing)
    raise DaemonNotInstalled(missing)


@contextmanager
def broker(data_dir: str | os.PathLike[str] | None = None, **settings: object) -> Iterator[Broker]:
    """A daemon for the block, on a free port of 127.0.0.1; killed at its end.

    Args:
      data_dir: a new directory for LevelDB, which survives ``restart`` and ``kill``; None: a store in memory, which
        does not.
      settings: the daemon's settings, with two underscores for a dot: ``http__max_body_bytes=1000``.
    Raises:
      DaemonNotInstalled, DaemonFailed.
    """
    with Broker(data_dir, settings) as started:
        yield started


class Broker:
    """A running daemon; made by ``broker``."""

    def __init__(self, data_dir: str | os.PathLike[str] | None, settings: dict[str, object]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="plainsong-")
        self._socket = Path(self._folder.name) / "testing"
        self._data_dir = None if data_dir is None else Path(data_dir)
        self._settings = {name.replace("__", "."): value for name, value in settings.items()}
        self._process: subprocess.Popen[str] | None = None
        self._output: list[str] = []
        self._clients: list[Client] = []
        self._port = _free_port()
        #: Its URL, which stays the same after ``restart``.
        self.url = ""
        #: Its time of day.
        self.clock = Clock(self)
        #: Makes the daemon fail once.
        self.faults = Faults(self)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Broker at {self.url}>"

    def client(self, **options: Any) -> Client:
        """A client of this daemon, with the options of ``Client``; closed at the end of the block of ``broker`` at the latest."""
        from plainsong import Client

        client = Client(self.url, **options)
        self._clients.append(client)
        return client

    # --- its life ------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts it again after ``kill`` or ``stop``. Raises DaemonFailed."""
        words = [*command(), "serve", "--bind", f"127.0.0.1:{self._port}", "--testing", str(self._socket)]
        settings = {"log.format": "json", **self._settings}
        if self._data_dir is None:
            settings.setdefault("storage.kind", "memory")
        else:
            words += ["--data-dir", str(self._data_dir)]
        for name, value in settings.items():
            text = str(value).lower() if isinstance(value, bool) else str(value)
            words += ["--set", f"{name}={text}"]
        self._output = []
        self._socket.unlink(missing_ok=True)  # a killed daemon leaves it
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the command is the caller's own
                words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        except OSError as error:
            raise DaemonFailed(f"{words[0]} cannot be run: {error.strerror}; check {COMMAND}") from error
        assert self._process.stdout is not None
        said = _Reading(self._process.stdout, self._output)
        serving = said.serving(START_S)
        if serving is None:
            self.kill()
            text = "".join(self._output[-20:]).strip()
            if "not installed" in text:
                raise DaemonNotInstalled(text)
            raise DaemonFailed(f"the daemon did not start: {text}")
        self.url = str(serving["addresses"][0])
        self._port = int(self.url.rpartition(":")[2])
        if self.clock.ahead_ms:
            self.tell(advance_ms=self.clock.ahead_ms)

    def restart(self) -> None:
        """Stops the daemon cleanly and starts it again at the same address. A store in memory is then empty."""
        self.stop()
        self.start()

    def stop(self) -> None:
        """Sends SIGTERM, and waits until the daemon has ended. Idempotent."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(LEAVE_S)
        self.kill()

    def kill(self) -> None:
        """Sends SIGKILL, and waits until the daemon has ended. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Closes its clients and kills the daemon. Idempotent."""
        for client in self._clients:
            with suppress(Exception):
                client.close()
        self.kill()
        self._folder.cleanup()

    def tell(self, **one: object) -> None:
        """Sends a command of ``serve --testing``. Raises DaemonFailed."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as near:
                near.settimeout(START_S)
                near.connect(str(self._socket))
                near.sendall(json.dumps(one).encode() + b"\n")
                answer = json.loads(near.makefile("rb").readline())
        except (OSError, ValueError) as error:
            raise DaemonFailed(f"the daemon takes no commands: {error}") from error
        if not answer["ok"]:
            raise DaemonFailed(answer["error"])


class Clock:
    """The daemon's time of day."""

    def __init__(self, owner: Broker) -> None:
        self._owner = owner
        #: Milliseconds by which it was moved; a restart keeps them.
        self.ahead_ms = 0

    def advance(self, seconds: float) -> None:
        """Moves it forward: messages expire, publish times are later. Time-outs of transactions and polls are not moved."""
        by_ms = round(seconds * 1000)
        self._owner.tell(advance_ms=by_ms)
        self.ahead_ms += by_ms


class Faults:
    """The daemon's next fault, once."""

    def __init__(self, owner: Broker) -> None:
        self._owner = owner

    def next_publish(self, kind: Literal["unknown", "refused"]) -> None:
        """``unknown``: the publish takes effect, and the answer says that the outcome is unknown. ``refused``: nothing happens, as if the daemon were busy."""
        self._owner.tell(next_publish=kind)

    def next_commit(self, kind: Literal["lost"]) -> None:
        """``lost``: the commit takes effect, and its answer is lost."""
        self._owner.tell(next_commit=kind)

    @contextmanager
    def hold_transaction(
        self, topic: str, *, namespace: str = "default", payload: bytes = b"undecided"
    ) -> Iterator[Transaction]:
        """Publishes a message under a transaction that stays open for the block: committed readers stop at it."""
        from plainsong import Client

        with Client(self._owner.url, namespace=namespace) as client:
            transaction = client.transactions.begin(client_id="plainsong.testing")
            client.publish(topic, payload, transaction=transaction)
            try:
                yield transaction
            finally:
                client.transactions.abort(transaction)


def _free_port() -> int:
    """A port that outgoing connections do not take while the daemon is down."""
    for _ in range(100):
        port = random.randrange(10_000, 32_000)
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port
    return 0


class _Reading:
    """Reads the output of a process to its end, so that the process never blocks on a full pipe."""

    def __init__(self, output: IO[str], lines: list[str]) -> None:
        self._serving: dict[str, Any] | None = None
        self._news = threading.Event()
        self._lines = lines
        threading.Thread(target=self._run, args=(output,), daemon=True).start()

    def _run(self, output: IO[str]) -> None:
        with output:
            for line in output:
                self._lines.append(line)
                if '"event":"serving"' in line:
                    self._serving = json.loads(line)
                    self._news.set()
        self._news.set()

    def serving(self, timeout_s: float) -> dict[str, Any] | None:
        """The facts of the daemon once it serves; None: it ended, or took too long."""
        self._news.wait(timeout_s)
        return self._serving
