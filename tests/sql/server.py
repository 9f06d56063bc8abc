"""A PostgreSQL server of our own as processes: made, started on a free port, killed whole, started again."""

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

#: Whom the server runs as when the tests run as root, whom it refuses: the first that there is.
UNPRIVILEGED = ("postgres", "nobody")
MAX_PREPARED = 64


class NoServer(Exception):
    """This machine has no PostgreSQL, or cannot run it; the text says what is missing."""


class Postgres:
    """One server with a cluster of its own, fsync on, trusting everybody on this machine.

    Raises:
      NoServer: there is no server program, or it cannot be run here.
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
        """Of a database, for SQLAlchemy."""
        return f"postgresql+psycopg://plainsong@127.0.0.1:{self.port}/{database}"

    def emptied(self, database: str, metadata: MetaData) -> str:
        """Make a database if it is not there, with these tables and nothing in them; its URL.

        One for many tests: making one is hundreds of files, which a killed server syncs when it starts again.
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
        """Roll back what is still prepared in a database."""
        with self._connected(database) as connection:
            query = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
            for (gid,) in connection.execute(query).fetchall():
                connection.execute(f"ROLLBACK PREPARED '{gid}'")

    def _connected(self, database: str = "postgres") -> psycopg.Connection[Any]:
        address = f"host=127.0.0.1 port={self.port} user=plainsong dbname={database} connect_timeout=5"
        return psycopg.connect(address, autocommit=True)

    # --- its life ------------------------------------------------------------------------------

    def start(self, max_prepared: int = MAX_PREPARED) -> Postgres:
        """Spawn it, and wait until it takes connections; recovers first what it must."""
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
        """SIGKILL to the server and every process of it at once: as a machine that stops."""
        assert self._process is not None
        self._process.kill()
        eventually("all of PostgreSQL is gone", self._is_gone)
        self._process.wait()
        self._process = None

    def _is_gone(self) -> bool:
        """Whether none of its processes is left; kills those that are.

        One that it had just begun, or whose server somebody else has killed before, is nobody's child by now. It ends by
        itself a little later, and until then no other server may start.
        """
        left = _working_in(self.home / "data")
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    def stop(self) -> None:
        """Let it end in good order, whoever is connected."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        self._process.wait(PATIENCE_S)
        self._process = None

    def restart(self) -> None:
        """Killed, and started again."""
        self.kill()
        self.start()

    @property
    def runs(self) -> bool:
        """Whether it was started and not ended by us."""
        return self._process is not None

    @property
    def pids(self) -> list[int]:
        """Of the server, and of every process of it."""
        assert self._process is not None
        return [self._process.pid, *_children(self._process.pid)]

    def remove(self) -> None:
        """Nothing of it is left, running or on the disk."""
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
    """Where the server's programs are: on the path, or where Debian puts them, the newest first."""
    on_path = shutil.which("postgres")
    if on_path is not None:
        return Path(on_path).parent
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: float(path.parts[-3]))
    if not found:
        raise NoServer("there is no PostgreSQL server here: etc/tools fetches it on Debian, as root")
    return found[-1].parent


def _somebody() -> pwd.struct_passwd | None:
    """Whom to run it as; None: as ourselves."""
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
    """The processes whose working directory a folder is: all of a server's have that of its data."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is somebody else's
            if (process / "cwd").readlink() == folder:
                found.append(int(process.name))
    return found
