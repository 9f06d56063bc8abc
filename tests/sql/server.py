"""A private PostgreSQL server: created, started on a free port, killed with all its processes, and restarted."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from tests.daemon.harness import eventually, free_port
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from sqlalchemy import MetaData

#: The first of these users that exists runs the server if the tests run as root, which PostgreSQL refuses.
UNPRIVILEGED = ("postgres", "nobody")
MAX_PREPARED = 64
#: Messages that PostgreSQL logs if a start fails because its last processes have not released everything: the kernel
#: frees a killed process's memory and sockets after it has removed the process's working directory, and a reader of its
#: files under /proc delays that further. PostgreSQL itself advises starting again.
IN_USE = ("is still in use", "Address already in use")
#: Maximum number of the log's characters in an error.
MOST_LOG_CHARS = 4_000


class NoServer(Exception):
    """This machine has no PostgreSQL, or cannot run it; the error's text says what is missing."""


class ServerEnded(Exception):
    """The server is not running, although no test stopped it, or cannot be started; the error's text has the log."""


class Postgres:
    """A server with its own data and with fsync, which trusts every user of this machine.

    Raises:
      NoServer: there is no server program, or it cannot run here.
    """

    def __init__(self) -> None:
        self._bin = _programs()
        self._user = _somebody()
        self.home = Path(tempfile.mkdtemp(prefix="plainsong-postgres-"))
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        if self._user is not None:
            os.chown(self.home, self._user.pw_uid, self._user.pw_gid)
        done = self._run(
            "initdb", "-D", "data", "-U", "plainsong", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"
        )
        if done.returncode:
            self.remove()
            raise NoServer(f"initdb failed: {done.stderr.decode().strip()}")

    def url(self, database: str = "postgres") -> str:
        """Return the URL of a database, for SQLAlchemy."""
        return f"postgresql+psycopg://plainsong@127.0.0.1:{self.port}/{database}"

    def emptied(self, database: str, metadata: MetaData) -> str:
        """Create a database if it is missing, with these tables, all of them empty; return its URL.

        Tests share a database, because creating one writes hundreds of files, which a killed server syncs at its next
        start.
        """
        if not self.runs:
            self.start()
        with self._connected() as connection:
            query = "SELECT FROM pg_database WHERE datname = %s"
            if connection.execute(query, [database]).fetchone() is None:
                connection.execute(f'CREATE DATABASE "{database}"')
        self.forget()
        with self._connected(database) as connection:
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")
        engine = create_engine(self.url(database), poolclass=NullPool)
        metadata.create_all(engine)
        return self.url(database)

    def forget(self) -> None:
        """Roll back the prepared transactions of all databases."""
        with self._connected() as connection:
            found = connection.execute("SELECT database, gid FROM pg_prepared_xacts").fetchall()
        for database, gid in found:
            with self._connected(database) as connection:
                connection.execute(f"ROLLBACK PREPARED '{gid}'")

    def _connected(self, database: str = "postgres") -> psycopg.Connection[Any]:
        address = f"host=127.0.0.1 port={self.port} user=plainsong dbname={database} connect_timeout=5"
        return psycopg.connect(address, autocommit=True)

    # --- life cycle ----------------------------------------------------------------------------

    def start(self, max_prepared: int = MAX_PREPARED) -> Postgres:
        """Start the server, and wait until it has recovered and accepts connections.

        Raises:
          ServerEnded: the server ended, or does not answer.
        """
        assert not self.runs
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            self.kill()
            self._spawn(max_prepared)
            while self.runs and time.monotonic() < deadline_s:
                if self._answers():
                    return self
                time.sleep(0.02)
            log = self.log()
            if self.runs or time.monotonic() > deadline_s or not any(reason in log for reason in IN_USE):
                self.kill()
                raise ServerEnded(f"PostgreSQL does not start:\n{log}")

    def _spawn(self, max_prepared: int) -> None:
        settings = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": self.home,
            "max_prepared_transactions": max_prepared,
            "max_connections": 60,
            "shared_buffers": "16MB",
            "fsync": "on",
            "recovery_init_sync_method": "syncfs",
        }
        command = [str(self._bin / "postgres"), "-D", "data"]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        with (self.home / "log").open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                command,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # signals to the tests' process group must not reach it
                **self.identity,
            )

    def kill(self) -> None:
        """Kill the server and all its processes at once, as if the machine stopped; do nothing the second time.

        Also remove its lock files, as a boot does: the pid in them may be another process's by the next start.
        """
        if self._process is None:
            return
        self._process.kill()
        eventually("all of PostgreSQL is gone", self._is_gone)
        self._process.wait()
        self._process = None
        for lock in ("data/postmaster.pid", f".s.PGSQL.{self.port}", f".s.PGSQL.{self.port}.lock"):
            (self.home / lock).unlink(missing_ok=True)

    def _is_gone(self) -> bool:
        """Return True if none of the server's processes is left. Kill the remaining ones.

        A process that the server has just started, or whose server another test has killed, has lost its parent. It
        ends by itself a little later, and until then no other server can start.
        """
        left = _working_in(self.home / "data")
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    def stop(self) -> None:
        """Shut down the server cleanly, even if clients are connected."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise ServerEnded(f"PostgreSQL does not shut down:\n{self.log()}") from None
        self._process = None

    def restart(self) -> None:
        """Kill the server, and restart it."""
        self.kill()
        self.start()

    @contextmanager
    def without_prepared(self) -> Iterator[None]:
        """Run the server without prepared transactions during the block; it would not start if it had any."""
        self.forget()
        self.stop()
        try:
            self.start(max_prepared=0)
            yield
        finally:
            if self.runs:
                self.stop()
            self.start()

    def check(self) -> None:
        """Start the server if it is not running.

        Raises:
          ServerEnded: it had ended, and not by ``kill`` or ``stop``; it runs again.
        """
        if self.runs:
            return
        code, log = self._process and self._process.returncode, self.log()
        self.start()
        if code is not None:
            raise ServerEnded(f"PostgreSQL ended by itself with {code}, and was started again:\n{log}")

    @property
    def runs(self) -> bool:
        """True if the server's process is running."""
        return self._process is not None and self._process.poll() is None

    @property
    def pids(self) -> list[int]:
        """The pids of the server and its child processes."""
        assert self._process is not None
        return [self._process.pid, *_children(self._process.pid)]

    def log(self) -> str:
        """Return the server's log since its latest start, at most the last ``MOST_LOG_CHARS``."""
        text = (self.home / "log").read_bytes()[self._log_start :].decode(errors="replace")
        return text[-MOST_LOG_CHARS:]

    def remove(self) -> None:
        """End the server, and remove its files."""
        if self.runs:
            self._quit()
        self.kill()
        shutil.rmtree(self.home, ignore_errors=True)

    def _quit(self) -> None:
        """Shut down immediately: the server then removes its shared memory, which a kill leaves to the next start."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE_S)

    def _answers(self) -> bool:
        with suppress(psycopg.OperationalError), self._connected():
            return True
        return False

    def _run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [self._bin / program, *arguments], cwd=self.home, capture_output=True, check=False, **self.identity
        )

    @property
    def identity(self) -> dict[str, Any]:
        """Arguments of ``Popen`` for a process of the same user."""
        if self._user is None:
            return {}
        return {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}


def _programs() -> Path:
    """Return the folder of the server's programs: from the path, or Debian's newest."""
    on_path = shutil.which("postgres")
    if on_path is not None:
        return Path(on_path).parent
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: float(path.parts[-3]))
    if not found:
        raise NoServer("there is no PostgreSQL server here: etc/tools fetches it on Debian, as root")
    return found[-1].parent


def _somebody() -> pwd.struct_passwd | None:
    """Return the user as whom to run the server; None for the current user."""
    if os.getuid():
        return None
    for name in UNPRIVILEGED:
        with suppress(KeyError):
            return pwd.getpwnam(name)
    raise NoServer(f"PostgreSQL refuses to run as root, and there is no user {' or '.join(UNPRIVILEGED)}")


def _children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _working_in(folder: Path) -> list[int]:
    """Return the processes with this working directory; all of a server's processes work in its data directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            if (process / "cwd").readlink() == folder:
                found.append(int(process.name))
    return found
