"""Forked daemons: each is a process as the program would have been, but for the work of importing it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from plainsong.cli.command import Exit
from tests.daemon.harness import PLAINSONG, Daemon, DaemonEnded
from tests.daemon.talk import ask, create


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


def test_what_a_daemon_draws_by_chance_as_it_is_imported_is_not_what_its_siblings_drew(daemon, tmp_path):
    both = [daemon(data_dir=tmp_path / name) for name in ("one", "other")]
    assert all(map(is_forked, both))
    ids = [ask(each.address, "GET", "/ping").headers["x-request-id"] for each in both]
    assert len({each.partition("-")[0] for each in ids}) == 2


def test_a_forked_daemon_has_no_descriptor_of_the_server_or_of_a_sibling(daemon, tmp_path):
    both = [daemon(data_dir=tmp_path / name) for name in ("one", "other")]
    assert all(map(is_forked, both))
    opened = [{os.readlink(path) for path in Path(f"/proc/{each.pid}/fd").iterdir()} for each in both]
    assert {each for each in opened[0] & opened[1] if not each.startswith("anon_inode:")} == {"/dev/null"}


def test_settings_in_the_environment_reach_a_forked_daemon(tmp_path):
    with Daemon(tmp_path / "data", environ={"PLAINSONG_STORAGE__KIND": "memory"}) as running:
        assert is_forked(running)
        assert running.serving["store"] == "memory"


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
def test_what_a_process_would_see_as_it_starts_has_a_process_of_its_own(daemon, options):
    running = daemon(**options)
    assert not is_forked(running)
    assert str(PLAINSONG).encode() in cmdline(running)


def is_forked(running):
    return b"tests.daemon.forked" in cmdline(running)


def cmdline(running):
    return Path(f"/proc/{running.pid}/cmdline").read_bytes()
