"""``plainsong serve`` around a daemon: its messages at startup, and its exit if the daemon cannot run.

The daemon is a stub here; ``tests/daemon`` runs the real one.
"""

from __future__ import annotations

import errno
import json
import resource
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import trio

from broker.command.serve import allow_open_files, failure_of
from broker.config import Config
from broker.config.sections import TransactionsConfig
from broker.http.sockets import BindFailed, listen_on
from broker.main import Running, banner
from plainsong.cli.command import Exit
from plainsong.cli.main import program, run
from storage.base import StoreDamaged, StoreInUse

RUNNING = Running("0.2.0", ["http://127.0.0.1:7420"], Path("/srv/data"), "leveldb", "Acknowledged is synced.", "it all")


@pytest.fixture
def serving(capfd, monkeypatch, tmp_path):
    """Run ``serve`` around a coroutine function in the daemon's place; return exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PORT", raising=False)

    def call(run_daemon, *arguments: str) -> tuple[int, str, str]:
        stand_in = ModuleType("broker.main")
        stand_in.run_daemon = run_daemon  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "broker.main", stand_in)
        # Call the whole program, as users do: a command keeps the help options of the first context that asks for them.
        code = run(program, ("serve", *arguments), "plainsong")
        return code, *capfd.readouterr()

    return call


def test_the_banner_shows_address_store_and_durability_with_a_line_to_paste():
    assert banner(RUNNING).splitlines() == [
        "plainsong 0.2.0 listens on http://127.0.0.1:7420",
        "  data        /srv/data (leveldb)",
        "  durability  Acknowledged is synced.",
        "  decides     it all",
        "  console     http://127.0.0.1:7420/console",
        "  try         curl -X PUT http://127.0.0.1:7420/v1/namespaces/demo/topics/greetings",
    ]
    in_memory = Running(
        "0.2.0", ["http://[::1]:1", "http://127.0.0.1:1"], None, "memory", "Nothing.", "it all", ["127.0.0.1:15165"]
    )
    assert banner(in_memory).splitlines()[:2] == [
        "plainsong 0.2.0 listens on http://[::1]:1, http://127.0.0.1:1",
        "  data        in memory (memory)",
    ]
    assert "  decides     it all, also for Tephra's clients at 127.0.0.1:15165" in banner(in_memory).splitlines()


def test_serve_hands_the_settings_over_and_prints_one_banner(serving):
    seen = []

    async def daemon(config, *, announce):
        seen.append(config)
        announce(RUNNING)

    code, out, error = serving(daemon, "--bind", "127.0.0.1:0", "--data-dir", "there", "--set", "log.access=on")
    assert (code, out, error) == (Exit.OK, banner(RUNNING) + "\n", "")
    (config,) = seen
    assert (config.http.bind, config.storage.data_dir, config.log.access) == ("127.0.0.1:0", Path("there"), True)


def test_the_banner_is_one_object_with_json_logs(serving):
    async def daemon(config, *, announce):
        announce(RUNNING)

    _, out, _ = serving(daemon, "--set", "log.format=json")
    line = json.loads(out)
    assert (line["event"], line["addresses"], line["data_dir"]) == ("serving", RUNNING.addresses, "/srv/data")


def test_invalid_settings_start_nothing(serving):
    async def daemon(config, *, announce):
        raise AssertionError

    code, out, error = serving(daemon, "--set", "log.access=perhaps")
    assert (code, out, error) == (Exit.USAGE, "", "error: flag: log.access: 'perhaps' is not true or false\n")


@pytest.mark.parametrize("kind", [StoreInUse, StoreDamaged])
def test_a_store_that_cannot_be_opened_is_one_line_and_exit_code_3(serving, kind):
    async def daemon(config, *, announce):
        async with trio.open_nursery():
            raise kind("data is held by process 12", hint="stop it first")

    code, out, error = serving(daemon)
    assert (code, out, error) == (Exit.STORE, "", "error: data is held by process 12\nhint: stop it first\n")


def test_an_address_in_use_is_one_line_and_exit_code_1(serving):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        async def daemon(config, *, announce):
            async with trio.open_nursery():
                listen_on(config.http.bind)

        code, _, error = serving(daemon, "--bind", f"127.0.0.1:{port}")
    assert code == Exit.FAILED
    assert error.startswith(f"error: http.bind 127.0.0.1:{port} is in use\nhint: ")


def test_a_bug_leaves_its_traceback_in_the_log_and_one_line_for_people(serving):
    async def daemon(config, *, announce):
        raise ZeroDivisionError("by nought")

    code, out, error = serving(daemon)
    assert code == Exit.FAILED
    assert "CRITICAL" in out
    assert "Traceback" in out
    assert error.splitlines()[0] == "error: the daemon failed: ZeroDivisionError: by nought"


def test_an_interrupt_is_not_a_failure(serving):
    async def daemon(config, *, announce):
        raise BaseExceptionGroup("nursery", [KeyboardInterrupt()])

    code, out, error = serving(daemon)
    assert (code, out, error.strip()) == (Exit.INTERRUPTED, "", "")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (BindFailed(errno.EADDRNOTAVAIL, "x", "127.0.0.1:7420"), "is not an address of this machine"),
        (BindFailed(errno.EACCES, "x", "127.0.0.1:7420"), "permission denied"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
    ],
)
def test_other_unusable_addresses_are_refused_with_the_reason(error, says):
    failure = failure_of(ExceptionGroup("nursery", [error]), Config())
    assert failure is not None
    assert failure.message.startswith("http.bind 127.0.0.1:7420")
    assert says in failure.message


def test_an_address_for_tephras_clients_that_is_in_use_is_named():
    config = Config(transactions=TransactionsConfig(thrift="127.0.0.1:15165"))
    error = BindFailed(errno.EADDRINUSE, "127.0.0.1:15165 is in use by another process", "127.0.0.1:15165")
    failure = failure_of(ExceptionGroup("nursery", [error]), config)
    assert failure is not None
    assert failure.message == "transactions.thrift 127.0.0.1:15165 is in use"
    assert "choose a port for it" in failure.hint


@pytest.mark.parametrize("number", [errno.EADDRINUSE, errno.EADDRNOTAVAIL])
def test_an_error_of_another_socket_is_not_blamed_on_the_address(number):
    assert failure_of(OSError(number, "no port is left to connect from"), Config()) is None


def test_an_error_about_a_file_is_not_blamed_on_the_address():
    assert failure_of(PermissionError(errno.EACCES, "denied", "data/LOG"), Config()) is None


def test_python_m_broker_is_serve():
    done = subprocess.run([sys.executable, "-m", "broker", "--help"], capture_output=True, text=True, check=True)
    assert "Run the daemon until SIGTERM or Ctrl-C." in done.stdout


def test_the_limit_on_open_files_is_raised_as_far_as_allowed():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = min(256, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
        assert allow_open_files(low - 1) == low - 1
        assert allow_open_files(low + 10) == min(low + 10, hard)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(low + 10, hard)
        assert allow_open_files(hard + 1) == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
