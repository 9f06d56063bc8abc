"""Daemons and other programs, forked from a process that has imported their modules, which saves the import time.

A test run starts hundreds of daemons, each of which would import the same six hundred modules, 0.4 s of a core. Here a
server process imports them once and forks: the child becomes the daemon, in its own session, with its own arguments,
environment, directory, output and exit code, and shares nothing with its siblings. Tests of the program's start itself
run the program. A Python file runs in the same way, as ``__main__``, once the server has imported the modules that the
caller lists.

python -m tests.daemon.forked DESCRIPTOR     serves at one end of a socket pair until the other end is closed
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
#: The modules that a daemon imports before it serves; the web framework, which a daemon loads at the first request other
#: than a publish or poll, and which takes half as long again; and the modules of the commands that move its data.
IMPORTED = (
    *("broker.command.serve", "broker.main", "storage.leveldb.store", "storage.memory"),
    *("broker.http.quart_app", "broker.http.http2.server", "encodings.idna", "encodings.ascii", "fastavro"),
    *("broker.command.backup", "broker.command.copy", "broker.command.maintain.command", "plainsong._sync.client"),
    *("broker.command.token", "plainsong.cli.main"),
)
#: Further modules that a process with an argument that begins like this imports; the server imports them for the first
#: such process.
IMPORTED_FOR = {
    "storage.kind=hbase": "storage.hbase.store",
    "cluster.zookeeper=": "kazoo.client",
    **dict.fromkeys(("replication.to=", "replica", "s3:"), "storage.replication.object_store"),
    "doctor": "plainsong.cli.doctor",
}
#: Prefixes of variables that no module reads at import. pyspark sets some of its own.
READ_LATER = ("PLAINSONG_", "PYTEST_", "AWS_", "SPARK_", "PYSPARK_", "XDG_CONFIG_HOME", "PYTHONWARNINGS")
#: Size limit of a request, which has arguments and an environment.
MOST_BYTES = 1 << 17
#: Generous and never reached: importing takes a second.
PATIENCE_S = 300.0


# --- the test's side -------------------------------------------------------------------------------


class Forked:
    """A child of the server, with the interface of ``subprocess.Popen``."""

    def __init__(
        self, stdin: IO[bytes] | None = None, stdout: IO[bytes] | None = None, stderr: IO[bytes] | None = None
    ) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr
        self.started = threading.Event()
        self.ended = threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> int:
        """Return the exit code, negative for a signal. Raises subprocess.TimeoutExpired."""
        if not self.ended.wait(timeout_s):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s or 0.0)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout_s: float | None = None) -> tuple[bytes, bytes]:
        """Wait for the process to end; return the output of its pipes. Raises subprocess.TimeoutExpired."""
        said = [b"", b""]

        def read(at: int, pipe: IO[bytes]) -> None:
            with pipe:
                said[at] = pipe.read()

        pipes = [(at, pipe) for at, pipe in enumerate((self.stdout, self.stderr)) if pipe is not None]
        threads = [threading.Thread(target=read, args=each, daemon=True) for each in pipes]
        if self.stdin is not None:
            self.stdin.close()
        for thread in threads:
            thread.start()
        self.wait(timeout_s)
        for thread in threads:
            thread.join(timeout_s)
        return said[0], said[1]

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process is known to have ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _pipe(theirs: ExitStack, *, theirs_reads: bool) -> tuple[int, IO[bytes]]:
    """Return the child's end of a new pipe, which closes with ``theirs``, and our end."""
    read, write = os.pipe()
    end, ours = (read, os.fdopen(write, "wb", 0)) if theirs_reads else (write, os.fdopen(read, "rb"))
    theirs.callback(os.close, end)
    return end, ours


class ForkServer:
    """The server, and the thread that receives its reports on the children."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        #: The environment in which the modules were imported. Each child adds the filters of its own PYTHONWARNINGS.
        self.environ = {name: value for name, value in environ.items() if name != "PYTHONWARNINGS"}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MOST_BYTES)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                cwd=ROOT,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C must reach only the tests, which end their daemons
            )
        self._socket = ours
        self._lock = threading.Lock()
        self._processes: dict[int, Forked] = {}
        self._count = 0
        self._pid = os.getpid()
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self.close)

    def fits(self, environ: Mapping[str, str]) -> bool:
        """True if a process with this environment would import the same modules, because only settings differ."""
        differs = {name for name, _ in environ.items() ^ self.environ.items()}
        return all(name.startswith(READ_LATER) for name in differs)

    def start(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        environ: Mapping[str, str],
        imports: Sequence[str] = (),
        stdin: bool = False,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> Forked:
        """Start a process with these arguments, the first of which is the program ``plainsong`` or a Python file.

        Args:
          imports: modules that the server imports before it forks, for this process and all later ones.
          stdin: True if its standard input is a pipe; otherwise it is empty.
          stdout: a descriptor of the caller's to use instead of a pipe; ``stderr`` likewise.
        """
        with ExitStack() as theirs:
            silent = theirs.enter_context(open(os.devnull, "rb")).fileno()
            pipes: list[IO[bytes] | None] = []
            standard = []
            for given, theirs_reads in ((None if stdin else silent, True), (stdout, False), (stderr, False)):
                end, ours = (given, None) if given is not None else _pipe(theirs, theirs_reads=theirs_reads)
                standard.append(end)
                pipes.append(ours)
            forked = Forked(*pipes)
            with self._lock:
                self._count += 1
                number = self._count
                self._processes[number] = forked
                asked = {"number": number, "arguments": [*arguments], "cwd": str(cwd), "environ": dict(environ)}
                socket.send_fds(self._socket, [json.dumps(asked | {"imports": [*imports]}).encode()], standard)
        if not forked.started.wait(PATIENCE_S) or not forked.pid:
            raise RuntimeError("the server that forks daemons does not answer")
        return forked

    def close(self) -> None:
        """End the server; daemons that still run become orphans."""
        if os.getpid() != self._pid:  # in a forked copy of the tests the server belongs to the parent
            return
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait()

    def _listen(self) -> None:
        with self._socket:
            while said := self._socket.recv(MOST_BYTES):
                event = json.loads(said)
                forked = self._processes[event["number"]]
                if "pid" in event:
                    forked.pid = event["pid"]
                    forked.started.set()
                else:
                    del self._processes[event["number"]]
                    forked.returncode = event["code"]
                    forked.ended.set()
        for forked in self._processes.values():  # the server has ended, so there are no more reports
            forked.returncode = -signal.SIGKILL
            forked.started.set()
            forked.ended.set()


_server: list[ForkServer] = []
_starting = threading.Lock()


def fork_server(environ: Mapping[str, str]) -> ForkServer | None:
    """Return this process's server, started on first use; None if it cannot fork a process with this environment."""
    if not hasattr(os, "pidfd_open"):
        return None
    with _starting:
        if not _server:
            if "LD_PRELOAD" in environ:
                return None  # a preloaded library was initialized for the server, not for the child's own files
            _server.append(ForkServer(environ))
    return _server[0] if _server[0].fits(environ) else None


# --- the server's side -----------------------------------------------------------------------------


def serve(asks: socket.socket) -> list[str] | None:
    """Fork for each request and report each end; return the arguments in a child, None in the server after the last."""
    selector = selectors.DefaultSelector()
    selector.register(asks, selectors.EVENT_READ)
    running: dict[int, tuple[int, int]] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is asks:
                said, descriptors, _, _ = socket.recv_fds(asks, MOST_BYTES, 3)
                if not said:
                    return None
                asked = json.loads(said)
                for setting, module in IMPORTED_FOR.items():
                    if any(each.startswith(setting) for each in asked["arguments"]):
                        import_module(module)
                for module in asked["imports"]:
                    import_module(module)
                gc.freeze()
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    return become(asked, asks, descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                watch = os.pidfd_open(pid)
                running[watch] = pid, asked["number"]
                selector.register(watch, selectors.EVENT_READ)
            else:
                watch = key.fd
                selector.unregister(watch)
                os.close(watch)
                pid, number = running.pop(watch)
                _, status = os.waitpid(pid, 0)
                code = os.waitstatus_to_exitcode(status)
                with suppress(OSError):  # the tests have ended
                    asks.send(json.dumps({"number": number, "code": code}).encode())


def become(asked: dict[str, object], asks: socket.socket, descriptors: Sequence[int]) -> list[str]:
    """Become a separate process: set everything that a process owns, and redraw random values that imports drew."""
    os.setsid()
    asks.send(json.dumps({"number": asked["number"], "pid": os.getpid()}).encode())
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
    asks.detach()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    environ, arguments = asked["environ"], asked["arguments"]
    assert isinstance(environ, dict)
    assert isinstance(arguments, list)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(str(asked["cwd"]))
    warnings._processoptions(filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")))  # type: ignore[attr-defined]
    from trio._core import _run

    from broker.http import messages

    _run._r.seed()
    messages._process = secrets.token_hex(5)
    return arguments


def main() -> None:
    """Import, serve, and run the requested program in a child."""
    gc.disable()
    for name in IMPORTED:
        import_module(name)
    arguments = serve(socket.socket(fileno=int(sys.argv[1])))
    if arguments is None:
        return
    gc.enable()
    sys.argv = arguments
    if arguments[0].endswith(".py"):
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        from plainsong.cli.main import main as plainsong

        plainsong()


if __name__ == "__main__":
    main()
