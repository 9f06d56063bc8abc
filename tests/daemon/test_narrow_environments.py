"""The daemon in narrow environments: few file descriptors, few threads, no locale, no environment variables at all."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from plainsong import Client, Outgoing
from plainsong.cli.command import Exit
from tests.daemon.harness import PLAINSONG, Daemon, DaemonEnded, eventually
from tests.patience import PATIENCE_S

#: The id of a user who has no other processes.
LONELY_USER = 64_321
TEXT = "Grüße, 東京 \U0001f375"


def url_of(daemon: Daemon) -> str:
    return f"http://{daemon.address[0]}:{daemon.address[1]}"


def course(url: str) -> None:
    """Use features that need files or threads: topics, large bodies, transactions, streams, waits, figures, backups."""
    with Client(url, deadline_s=PATIENCE_S) as client:
        client.create_topic("narrow")
        client.publish("narrow", [b"tea", bytes(4 << 20), Outgoing(TEXT.encode(), attributes={"é": TEXT})])
        with client.transaction() as tx:
            tx.publish("narrow", b"together")
        with client.stream("narrow") as stream:
            stream.publish(b"streamed").result(PATIENCE_S)
        found = list(client.read("narrow", isolation="committed"))
        assert [len(message.payload) for message in found] == [3, 4 << 20, len(TEXT.encode()), 8, 8]
        assert found[2].attributes == {"é": TEXT}
        assert not list(client.poll("narrow", start=found[-1].id, wait_ms=1, isolation="committed"))
        assert client.admin.stats("narrow")["messages"] == 5


def test_a_daemon_with_64_descriptors_serves_and_refuses_connections_beyond_them(daemon):
    running = daemon(wrapper=["sh", "-c", 'ulimit -n 64; exec "$@"', "sh"])
    assert running.wait_for_line("few open files are allowed")
    course(url_of(running))
    with ExitStack() as stack:
        # A quarter of the descriptors are for connections; of the connections beyond that, the first ones get an
        # answer.
        idle = [stack.enter_context(socket.create_connection(running.address, PATIENCE_S)) for _ in range(64)]
        answers = [connection.makefile("rb").read() for connection in idle[16:]]
    assert any(answer.startswith(b"HTTP/1.1 503 ") and b'"overloaded"' in answer for answer in answers)

    def serves() -> bool:
        # The daemon may not have noticed yet that the others disconnected.
        with suppress(OSError), closing(http.client.HTTPConnection(*running.address, timeout=PATIENCE_S)) as connection:
            connection.request("GET", "/livez")
            return connection.getresponse().status == 200
        return False

    eventually("it serves again", serves)
    assert running.stop() == Exit.OK


def as_lonely_user(*command: str) -> list[str]:
    """Return the command line that runs ``command`` as a user without other processes: thread limits are per user."""
    return ["setpriv", f"--reuid={LONELY_USER}", f"--regid={LONELY_USER}", "--clear-groups", *command]


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory of the lonely user."""
    lacking = [name for name in ("setpriv", "prlimit") if shutil.which(name) is None]
    if os.geteuid() != 0 or lacking:
        pytest.skip("NOT TESTED: a daemon with few threads, since this needs root, setpriv and prlimit")
    if subprocess.run(as_lonely_user(str(PLAINSONG), "--version"), capture_output=True, check=False).returncode:
        pytest.skip("NOT TESTED: a daemon with few threads, since another user cannot run this program")
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, LONELY_USER, LONELY_USER)
        yield Path(folder)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_daemon_that_the_system_allows_too_few_threads_does_not_start_and_says_why(home: Path, threads: int):
    limited = as_lonely_user("prlimit", f"--nproc={threads}:{threads}")
    running = Daemon(home / "data", "log.format=text", wrapper=limited)
    with pytest.raises(DaemonEnded):
        running.start()
    assert "threads" in running.errors or "thread cannot start" in running.errors
    assert "hint: raise the limit on threads" in running.errors
    assert "Traceback" not in running.errors
    assert "bug" not in running.errors


def test_a_running_daemon_that_may_start_no_more_threads_writes_its_tables(home: Path):
    """LevelDB needs a thread for its first table, and aborts its process if it cannot start one."""
    with Daemon(home / "data", "storage.write_buffer_bytes=64KiB", wrapper=as_lonely_user()) as running:

        def allow(threads: int) -> None:
            command = as_lonely_user("prlimit", "--pid", str(running.pid), f"--nproc={threads}:")
            subprocess.run(command, check=True)

        with Client(url_of(running), deadline_s=PATIENCE_S) as client:
            client.create_topic("narrow")
            allow(1)
            for number in range(60):
                client.publish("narrow", [b"%d" % number + bytes(1000)] * 5)
            allow(10_000)
            assert len(list(client.read("narrow"))) == 300
        assert list((home / "data" / "volumes").glob("*/*.ldb")), "no table was written"
        assert running.stop() == Exit.OK


def test_a_copy_that_the_system_allows_too_few_threads_ends_and_says_why(home: Path):
    with Daemon(home / "data", wrapper=as_lonely_user()) as running:
        with Client(url_of(running), deadline_s=PATIENCE_S) as client:
            client.create_topic("narrow")
            client.publish("narrow", [b"tea"] * 100)
        assert running.stop() == Exit.OK
    copy = ["copy", "--from", f"leveldb:{home / 'data'}", "--to", f"leveldb:{home / 'copy'}"]
    for threads in range(1, 20):
        command = as_lonely_user("prlimit", f"--nproc={threads}:{threads}", str(PLAINSONG), *copy)
        done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        if done.returncode == Exit.OK:
            break
        assert done.returncode in (Exit.STORE, Exit.UNAVAILABLE), (threads, done.returncode, done.stderr)
        assert "hint: raise the limit on threads" in done.stderr
        assert "Traceback" not in done.stderr
    assert threads > 1
    assert done.returncode == Exit.OK, done.stderr


@pytest.mark.parametrize(
    "locale", [{}, {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, {"LC_ALL": "xx_YY"}]
)
def test_without_an_environment_or_a_locale_the_daemon_and_the_commands_work(daemon, tmp_path: Path, locale):
    bare = ["env", "-i", *(f"{name}={value}" for name, value in locale.items())]
    running = daemon(wrapper=bare)
    course(url_of(running))

    def plainsong(*words: str) -> subprocess.CompletedProcess[bytes]:
        command = [*bare, str(PLAINSONG), *words, "--url", url_of(running)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=PATIENCE_S, check=False)

    for words, expected in (
        (["topic", "create", "bare"], b"bare"),
        (["publish", "bare", TEXT], b"1"),
        (["poll", "bare"], b""),
        (["peek", "bare"], b""),
        (["tx", "ls"], b""),
        (["doctor"], b""),
    ):
        done = plainsong(*words)
        assert (done.returncode, b"Traceback" in done.stderr) == (0, False), (words, done)
        assert expected in done.stdout + done.stderr
    assert running.stop() == Exit.OK
