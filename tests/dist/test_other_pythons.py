"""The client and the daemon on every supported version of Python that is installed on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from itertools import count
from pathlib import Path

import pytest

from plainsong import Client
from tests.daemon.harness import Daemon
from tests.dist.environments import environment, is_compiled, pip_install, required, run
from tests.spark.installed import environ_of

#: Versions that client and daemon support. 3.12.0 to 3.12.2 cannot start a thread once the main thread has ended.
NAMED = ("3.11", "3.12", "3.13")
OTHERS = [each for each in NAMED if each != f"{sys.version_info.major}.{sys.version_info.minor}"]
_numbers = count()


@cache
def interpreter(version: str) -> str | None:
    """Return an interpreter of this version, from PATH or pyenv, that can create environments; None if there is none."""
    folders = [Path(each) for each in os.environ["PATH"].split(os.pathsep)]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    folders += sorted(pyenv.glob(f"{version}.*/bin"))
    look = f"import sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
    for folder in folders:
        program = folder / f"python{version}"
        if program.exists() and not subprocess.run([program, "-c", look], capture_output=True, check=False).returncode:
            return str(program)
    return None


@pytest.fixture(scope="module", params=OTHERS)
def python(request, wheels, tmp_path_factory):
    """An environment of another Python with only the client."""
    base = interpreter(request.param)
    if base is None:
        pytest.skip(f"NOT TESTED with Python {request.param}: no such interpreter is installed")
    return environment(tmp_path_factory.mktemp("other") / "env", [wheels["client"]], base)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("daemon") / "data") as daemon:
        yield "http://{}:{}".format(*daemon.address)


@pytest.fixture
def topic(url):
    with Client(url) as client:
        yield client.create_topic(f"topic-{next(_numbers)}").name


EVERYTHING = """
import asyncio, sys
from plainsong import AsyncClient, Client
url, topic = sys.argv[1:]
with Client(url) as client:
    client.publish(topic, [b"plain"], attributes={"a": "1"})
    with client.publisher(topic) as publisher:
        publisher.send(b"publisher").result()
    with client.producer(topic, "p") as producer:
        producer.send(b"producer").result()
    with client.stream(topic) as stream:
        stream.publish(b"stream")
    with client.transaction() as transaction:
        transaction.publish(topic, b"transaction")

async def main():
    async with AsyncClient(url) as client:
        await client.publish(topic, b"async")
        async with client.stream(topic) as stream:
            await stream.publish(b"async stream")
        return [message.payload.decode() async for message in client.read(topic)]

print(*asyncio.run(main()), sep="|")
"""


def test_each_way_to_publish_and_to_read_works_without_a_warning(python, url, topic):
    done = run(python, "python", "-W", "error", "-c", EVERYTHING, url, topic)
    assert done.stdout == "plain|publisher|producer|stream|transaction|async|async stream\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    "sender",
    ["publisher(topic, linger_ms=60_000).send", "producer(topic, 'p', linger_ms=60_000).send", "stream(topic).publish"],
)
def test_a_program_that_ends_without_closing_sends_its_messages(python, url, topic, sender):
    text = f"""
import sys
from plainsong import Client
url, topic = sys.argv[1:]
send = Client(url).{sender}
for n in range(1000):
    send(b"%d" % n)
"""
    done = run(python, "python", "-c", text, url, topic)
    assert (done.stdout, done.stderr) == ("", "")
    with Client(url) as client:
        assert [int(message.payload) for message in client.read(topic)] == list(range(1000))


def test_the_command_line_publishes_and_polls(python, url, topic):
    run(python, "plainsong", "--url", url, "publish", topic, "hello")
    assert "hello" in run(python, "plainsong", "--url", url, "poll", topic).stdout


# --- the daemon --------------------------------------------------------------------------------------


def has_leveldb() -> bool:
    """True if a C++ compiler finds LevelDB's headers, as ``etc/venv`` checks it."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    command = [compiler or "false", "-E", "-x", "c++", "-"]
    return not subprocess.run(command, input=b"#include <leveldb/db.h>\n", capture_output=True, check=False).returncode


@pytest.fixture(scope="module", params=OTHERS)
def python_with_server(request, wheels, tmp_path_factory):
    """An environment of another Python with client and server, and extension modules from the package index."""
    base = interpreter(request.param)
    if base is None:
        pytest.skip(f"NOT TESTED: the daemon with Python {request.param}: no such interpreter is installed")
    uninstallable = f"NOT TESTED: the daemon with Python {request.param}: its requirements cannot be installed"
    # plyvel has wheels for Python up to 3.12. For later versions pip would work for seconds before it fails.
    if int(request.param.partition(".")[2]) > 12 and not has_leveldb():
        pytest.skip(f"{uninstallable}: plyvel needs a C++ compiler and LevelDB's headers")
    kinds = [wheels["client"], wheels["server"]]
    compiled = {
        name: package.version for kind in kinds for name, package in required(kind).items() if is_compiled(package)
    }
    python = environment(tmp_path_factory.mktemp("server") / "env", kinds, base, without=compiled)
    pinned = [f"{name}=={version}" for name, version in compiled.items()]
    done = pip_install(base, python, "--no-input", "--retries", "1", "--timeout", "20", *pinned)
    if done.returncode:
        why = (done.stderr.strip() or "pip failed").splitlines()[-1]
        pytest.skip(f"{uninstallable}: {why}")
    return python


def test_the_daemon_and_the_client_work_and_the_next_start_reads_what_was_stored(python_with_server, tmp_path):
    daemon = Daemon(
        tmp_path / "data", forked=False, environ={**environ_of(python_with_server), "PYTHONWARNINGS": "error"}
    )
    program = daemon.command.index("serve") - 1
    daemon.command[program] = str(python_with_server.with_name("plainsong"))
    expected = "plain|publisher|producer|stream|transaction|async|async stream\n"
    with daemon:
        assert f"{sys.version_info.major}.{sys.version_info.minor}" not in os.readlink(f"/proc/{daemon.pid}/exe")
        url = "http://{}:{}".format(*daemon.address)
        run(python_with_server, "plainsong", "--url", url, "topic", "create", "t")
        done = run(python_with_server, "python", "-W", "error", "-c", EVERYTHING, url, "t")
        assert (done.stdout, done.stderr) == (expected, "")
        assert daemon.stop() == 0
        daemon.start()
        url = "http://{}:{}".format(*daemon.address)
        with Client(url) as client:
            found = "|".join(message.payload.decode() for message in client.read("t"))
        assert found + "\n" == expected
        assert daemon.stop() == 0
        assert not [line for line in daemon.lines if '"level": "error"' in line or '"traceback"' in line], daemon.lines
    assert daemon.errors == ""
