"""The program in a shell: arguments, streams, directories, signals. Each error is a sentence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from plainsong.cli.command import Exit
from tests.daemon.harness import PLAINSONG
from tests.patience import PATIENCE_S

NOT_UTF8 = b"caf\xe9"


@pytest.fixture
def orders(cli):
    cli("topic", "create", "orders")
    cli("publish", "orders", "tea", "caf\u00e9")
    return "orders"


@pytest.fixture
def shell(cli):
    """Run a shell command line in which ``$plainsong`` is the program."""

    def run(line, **variables):
        environ = {**os.environ, "plainsong": str(PLAINSONG), "PYTHONWARNINGS": "error", **variables}
        done = subprocess.run(["bash", "-c", line], check=False, env=environ, capture_output=True, timeout=PATIENCE_S)
        assert b"Traceback" not in done.stderr, done.stderr.decode()
        assert b"Exception ignored" not in done.stderr, done.stderr.decode()
        return done.returncode, done.stdout, done.stderr.decode()

    return run


@pytest.mark.parametrize(
    "words",
    [
        ["--attribute", b"file=" + NOT_UTF8],
        ["--attribute", NOT_UTF8 + b"=x"],
        ["--routing-key", NOT_UTF8],
        ["--producer", NOT_UTF8],
        ["--namespace", NOT_UTF8],
        ["--atomic", "--routing-key", NOT_UTF8],
    ],
    ids=str,
)
def test_options_that_are_not_utf8_are_refused(alone, orders, words):
    said = alone("publish", orders, *map(os.fsdecode, words), "x")
    assert said.code == Exit.USAGE
    assert said.err.startswith("error: ")
    assert "udce9" in said.err or "xe9" in said.err or "\udce9" in said.err
    assert said.err.count("hint: ") == 1


def test_a_message_that_is_not_utf8_is_published_unchanged(shell, orders):
    assert shell("$plainsong publish orders $'caf\\xe9'")[0] == 0
    assert shell("$plainsong poll orders")[1].endswith(b"\ncaf\xe9\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("verb", ["poll orders", "peek orders", "topic list", "topic list --json", "version", "--help"])
def test_standard_output_that_is_full_or_closed_is_an_error(shell, orders, verb, unbuffered):
    code, _, err = shell(f"$plainsong {verb} > /dev/full", PYTHONUNBUFFERED=unbuffered)
    assert code == Exit.FAILED
    assert "standard output cannot be written: No space left on device" in err
    code, _, err = shell(f"$plainsong {verb} >&-", PYTHONUNBUFFERED=unbuffered)
    assert code == Exit.FAILED
    assert "standard output cannot be written: it is closed" in err


def test_standard_error_that_is_full_or_closed_changes_no_exit_code(shell, orders):
    for lost in ("2>/dev/full", "2>&-"):
        assert shell(f"$plainsong poll nowhere {lost}")[0] == Exit.NOT_FOUND
        assert shell(f"$plainsong poll orders -v {lost}")[:2] == (0, b"tea\ncaf\xc3\xa9\n")


def test_closed_standard_input_is_an_error_for_verbs_that_read_it(shell, orders):
    closed = "error: standard input cannot be read: it is closed; nothing published\n"
    assert shell("$plainsong publish orders <&-")[::2] == (Exit.USAGE, closed)
    assert shell("$plainsong publish orders x <&-")[0] == 0
    assert shell("$plainsong poll orders --limit 1 <&-")[:2] == (0, b"tea\n")
    for verb in ("publish orders --file -", "definitions import -"):
        code, _, err = shell(f"$plainsong {verb} <&-")
        assert code == Exit.USAGE
        assert err.startswith("error: ")


def test_verbs_run_with_all_streams_closed(shell, orders):
    assert shell("$plainsong publish orders -q x <&- >&- 2>&-")[0] == 0
    assert shell("$plainsong poll orders <&- >&- 2>&-")[0] == Exit.FAILED


def test_characters_that_the_encoding_lacks_are_escaped(cli, shell, orders):
    locale = {"PYTHONIOENCODING": "latin-1"}
    cli("publish", orders, "\u2713")
    code, out, err = shell("$plainsong peek orders", **locale)
    assert (code, err) == (0, "")
    assert b"\\u2713" in out
    code, out, err = shell("$plainsong peek orders --json", **locale)
    assert (code, err) == (0, "")
    assert b'"\\u2713"' in out


def test_a_directory_that_was_deleted_is_named(shell, tmp_path):
    code, _, err = shell("mkdir gone && cd gone && rmdir ../gone && $plainsong doctor --no-daemon")
    assert (code, err) == (Exit.FAILED, "error: the current directory was deleted\n")


def test_a_user_without_a_home_has_no_contexts(shell, orders, monkeypatch):
    line = "unset HOME XDG_CONFIG_HOME; exec setpriv --reuid=54321 --clear-groups $plainsong"
    if subprocess.run(
        ["setpriv", "--reuid=54321", "--clear-groups", str(PLAINSONG), "--version"], check=False
    ).returncode:
        pytest.skip("NOT TESTED: another user cannot run the program here")
    assert shell(f"{line} poll orders --limit 1")[:2] == (0, b"tea\n")
    code, _, err = shell(f"{line} context add here --url http://127.0.0.1:1")
    assert code == Exit.FAILED
    assert "cannot be written" in err


@pytest.mark.parametrize(
    "module", ["plainsong.cli.main", "click", "plainsong.cli.read", "plainsong._sync.client", "h11"]
)
def test_ctrl_c_while_modules_load_ends_the_command_in_silence(module):
    program = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

from plainsong.cli.start import main
sys.meta_path.insert(0, Finder())
finder = sys.argv.copy()
sys.argv[:] = [finder[0], *finder[2:]]
Finder.find_spec.__globals__["sys"] = type("Sys", (), {"argv": finder, "meta_path": sys.meta_path})
main()
"""
    words = ["-c", program, module, "poll", "orders", "--url", "http://127.0.0.1:1"]
    done = subprocess.run([sys.executable, *words], check=False, capture_output=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (Exit.INTERRUPTED, b"", b"")


def test_an_interrupt_that_the_parent_ignores_stays_ignored():
    program = "from plainsong.cli.start import main; main()"
    words = [sys.executable, "-c", program, "version"]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(words, stdout=subprocess.PIPE)
    finally:
        signal.signal(signal.SIGINT, before)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE_S)[0].startswith(b"plainsong")
    assert process.returncode == 0
