"""A PostgreSQL server of our own as processes: created, started on a free port, killed as a whole, started again."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from tests.daemon.harness import eventually, free_port
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from sqlalchemy import MetaData

#: The first of these that exists runs the server if the tests run as root, which PostgreSQL refuses.
UNPRIVILEGED = ("postgres", "nobody")
MAX_PREPARED = 64


class NoServer(Exception):
    """This machine has no PostgreSQL, or cannot run it; the text says what is missing."""


class Postgres:
    """One server with its own data, with fsync, trusting every user of this machine.

    Raises:
      NoServer: there is no server program, or it cannot run here.
    """

    def __init__(self) -> None:
        self._bin = _programs()
        self._user = _somebody()
        self.home = Path(tempfile.mkdtemp(prefix="plainsong-postgres-"))
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
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
        """Create a database if it is missing, with these tables, all empty; return its URL.

        Tests share a database: creating one writes hundreds of files, which a killed server syncs when it starts again.
        """
        with self._connected() as connection:
            query = "SELECT FROM pg_database WHERE datname = %s"
            if connection.execute(query, [database]).fetchone() is None:
                connection.execute(f'CREATE DATABASE "{database}"')
        self.forget(database)
        with self._connected(database) as connection:
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")
        engine = create_engine(self.url(database), poolclass=NullPool)
        metadata.create_all(engine)
        return self.url(database)

    def forget(self, database: str) -> None:
        """Roll back the prepared transactions of a database."""
        with self._connected(database) as connection:
            query = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
            for (gid,) in connection.execute(query).fetchall():
                connection.execute(f"ROLLBACK PREPARED '{gid}'")

    def _connected(self, database: str = "postgres") -> psycopg.Connection[Any]:
        address = f"host=127.0.0.1 port={self.port} user=plainsong dbname={database} connect_timeout=5"
        return psycopg.connect(address, autocommit=True)

    # --- life cycle ----------------------------------------------------------------------------

    def start(self, max_prepared: int = MAX_PREPARED) -> Postgres:
        """Spawn it, and wait until it has recovered and accepts connections."""
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
            self._process = subprocess.Popen(
                command, cwd=self.home, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **self._as_somebody()
            )
        eventually("PostgreSQL takes connections", self._answers)
        return self

    def kill(self) -> None:
        """Kill the server and all its processes at once, like a machine that stops."""
        assert self._process is not None
        self._process.kill()
        eventually("all of PostgreSQL is gone", self._is_gone)
        self._process.wait()
        self._process = None

    def _is_gone(self) -> bool:
        """True if none of its processes is left; kills those that are.

        A process that the server has just started, or whose server was killed by another test, has lost its parent. It
        ends by itself a little later, and until then no other server can start.
        """
        left = _working_in(self.home / "data")
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    def stop(self) -> None:
        """Shut it down cleanly, even with clients connected."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        self._process.wait(PATIENCE_S)
        self._process = None

    def restart(self) -> None:
        """Kill it, and start it again."""
        self.kill()
        self.start()

    @property
    def runs(self) -> bool:
        """True if it was started and not ended by us."""
        return self._process is not None

    @property
    def pids(self) -> list[int]:
        """Pids of the server and its child processes."""
        assert self._process is not None
        return [self._process.pid, *_children(self._process.pid)]

    def remove(self) -> None:
        """End it, and remove its files."""
        if self.runs:
            self.kill()
        shutil.rmtree(self.home, ignore_errors=True)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.home / "log").read_text()
        with suppress(psycopg.OperationalError), self._connected():
            return True
        return False

    def _run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [self._bin / program, *arguments], cwd=self.home, capture_output=True, check=False, **self._as_somebody()
        )

    def _as_somebody(self) -> dict[str, Any]:
        if self._user is None:
            return {}
        return {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}


def _programs() -> Path:
    """Return the folder of the server's programs: on the path, or Debian's, the newest first."""
    on_path = shutil.which("postgres")
    if on_path is not None:
        return Path(on_path).parent
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: float(path.parts[-3]))
    if not found:
        raise NoServer("there is no PostgreSQL server here: etc/tools fetches it on Debian, as root")
    return found[-1].parent


def _somebody() -> pwd.struct_passwd | None:
    """Return the user to run it as; None for the current one."""
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
    """Return the processes with this working directory: all of a server's have its data directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            if (process / "cwd").readlink() == folder:
                found.append(int(process.name))
    return found
