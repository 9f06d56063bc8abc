"""Forked daemons: each behaves like a daemon started by the program, but needs no time for imports."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from plainsong.cli.command import Exit
from tests.daemon.harness import PLAINSONG, Daemon, DaemonEnded, eventually, run_python, start_python
from tests.daemon.talk import ask, create
from tests.patience import PATIENCE_S


def test_a_forked_daemon_is_a_process_of_its_own_and_ends_like_one(daemon, tmp_path):
    one, other = daemon(data_dir=tmp_path / "one"), daemon(data_dir=tmp_path / "other")
    for each in (one, other):
        assert is_forked(each)
        assert os.getsid(each.pid) == os.getpgid(each.pid) == each.pid
        assert Path(f"/proc/{each.pid}/cwd").resolve() == tmp_path
        create(each.address, "t")
    assert one.stop() == Exit.OK
    assert one.errors == ""
    assert not Path(f"/proc/{one.pid}").exists()
    other.kill()
    assert other.returncode == -signal.SIGKILL
    assert not Path(f"/proc/{other.pid}").exists()


def test_random_values_drawn_during_imports_differ_between_forked_daemons(daemon, tmp_path):
    both = [daemon(data_dir=tmp_path / name) for name in ("one", "other")]
    assert all(map(is_forked, both))
    ids = [ask(each.address, "GET", "/ping").headers["x-request-id"] for each in both]
    assert len({each.partition("-")[0] for each in ids}) == 2


def test_a_forked_daemon_has_no_descriptor_of_the_server_or_of_a_sibling(daemon, tmp_path):
    both = [daemon(data_dir=tmp_path / name) for name in ("one", "other")]
    assert all(map(is_forked, both))
    opened = [descriptors_of(each) for each in both]
    assert {each for each in opened[0] & opened[1] if not each.startswith("anon_inode:")} == {"/dev/null"}


def test_settings_in_the_environment_reach_a_forked_daemon(tmp_path):
    with Daemon(tmp_path / "data", environ={"PLAINSONG_STORAGE__KIND": "memory"}) as running:
        assert is_forked(running)
        assert running.serving["store"] == "memory"


def test_warning_filters_in_the_environment_apply_in_a_forked_program(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import warnings\nprint(open('/proc/self/cmdline').read())\nwarnings.warn('it warns')\n")
    done = [run_python(program, environ={"PYTHONWARNINGS": filters}) for filters in ("", "ignore", "error")]
    assert all("tests.daemon.forked" in each.stdout for each in done)
    assert [each.returncode for each in done] == [0, 0, 1]
    assert ["it warns" in each.stderr for each in done] == [True, False, True]


def test_no_import_of_a_daemon_that_is_not_forked_warns(tmp_path):
    with Daemon(tmp_path / "data", forked=False, environ={"PYTHONWARNINGS": "error"}) as running:
        assert not is_forked(running)
        assert running.stop() == Exit.OK
        assert running.errors == ""


def test_a_forked_daemon_that_cannot_start_ends_with_the_code_and_the_words_of_the_program(daemon, tmp_path):
    said = []
    for forked in (True, False):
        refused = Daemon(tmp_path / "data", bind="nowhere", forked=forked)
        with pytest.raises(DaemonEnded) as ended:
            refused.start()
        said.append(str(ended.value))
    assert said[0] == said[1]
    assert said[0].startswith(f"ended with {int(Exit.USAGE)}: error: ")


@pytest.mark.parametrize("options", [{"environ": {"LC_TIME": "C"}}, {"wrapper": ["env"]}, {"forked": False}])
def test_tests_that_depend_on_the_start_of_a_process_run_in_a_process_of_their_own(daemon, tmp_path, options):
    assert is_forked(daemon(data_dir=tmp_path / "forked"))
    running = daemon(data_dir=tmp_path / "alone", **options)
    assert not is_forked(running)
    assert str(PLAINSONG).encode() in cmdline(running)


def test_a_python_file_runs_as_the_main_program_with_the_requested_modules_imported(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nloaded = 'sqlite3.dump' in sys.modules\n"
        "if __name__ == '__main__':\n print(sys.argv, loaded, input(), flush=True)\n sys.exit('the end')\n"
    )
    running = start_python(program, "one", imports=["sqlite3.dump"], stdin=True)
    try:
        assert b"tests.daemon.forked" in Path(f"/proc/{running.pid}/cmdline").read_bytes()
        running.stdin.write(b"two\n")
        assert running.stdout.read().decode() == f"['{program}', 'one'] True two\n"
        assert running.wait(PATIENCE_S) == 1
        assert running.stderr.read() == b"the end\n"
    finally:
        running.kill()
        running.wait(PATIENCE_S)
        for pipe in (running.stdin, running.stdout, running.stderr):
            pipe.close()


def test_a_killed_program_has_the_exit_code_of_the_signal_and_writes_to_the_given_output(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import time\nprint('here', flush=True)\ntime.sleep(3600)\n")
    with (tmp_path / "said").open("wb") as said:
        running = start_python(program, imports=[], stdout=said.fileno(), stderr=said.fileno())
    eventually("the program has written its line", lambda: (tmp_path / "said").read_bytes().endswith(b"\n"))
    running.kill()
    assert running.wait(PATIENCE_S) == -signal.SIGKILL
    assert (tmp_path / "said").read_bytes() == b"here\n"
    assert (running.stdin, running.stdout, running.stderr) == (None, None, None)


def descriptors_of(running):
    """Return the targets of the daemon's descriptors, except those that it closes during the call."""
    found = set()
    for path in Path(f"/proc/{running.pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(os.readlink(path))
    return found


def is_forked(running):
    return b"tests.daemon.forked" in cmdline(running)


def cmdline(running):
    return Path(f"/proc/{running.pid}/cmdline").read_bytes()
