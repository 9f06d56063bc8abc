"""docs/commands.md and the README's shell part: every line runs; every verb, option and exit code is documented."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import threading

import click
import pytest

from plainsong.cli.command import Exit, Verb, WhereOption
from plainsong.cli.main import VERBS, program, run
from tests.cli.conftest import url_of
from tests.daemon.harness import PLAINSONG, Daemon, clean_environ
from tests.documents import DOCUMENTS, shell_block, shell_lines
from tests.patience import PATIENCE_S

PAGE = DOCUMENTS["docs/commands.md"]
README = DOCUMENTS["README.md"]
SENTENCE = "which is `-n demo` here. With a daemon running:"
#: Commands that exit with 1 if they find problems on this machine, which this test ignores.
JUDGES = re.compile(r"plainsong doctor\b")
#: Commands that run until they are interrupted.
ENDLESS = re.compile(r"plainsong (tail (?!.*--limit)|top (?!.*--once))")


@pytest.fixture
def shell(tmp_path, monkeypatch, capfd):
    """Run a pasted line while a daemon runs, and return its output.

    A line that only calls the program runs in this process, which is faster than starting the program; one with a pipe,
    or one that must be interrupted, runs in bash.
    """
    (tmp_path / ".plainsong-token").write_text("token\n")
    for name in set(os.environ) - set(clean_environ()):
        monkeypatch.delenv(name)
    with Daemon(tmp_path / "data") as daemon:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
        monkeypatch.setenv("PATH", f"{PLAINSONG.parent}:{os.environ['PATH']}")
        monkeypatch.setenv("PLAINSONG_URL", url_of(daemon))
        monkeypatch.chdir(tmp_path)

        def run_line(line):
            if ENDLESS.search(line) or not re.fullmatch(r"plainsong [^|<>$~]*", line):
                return in_bash(line)
            code = run(program, shlex.split(line)[1:], "plainsong")
            out, err = capfd.readouterr()
            assert code in ((0, Exit.FAILED) if JUDGES.search(line) else (0,)), (line, code, out, err)
            return out

        yield run_line


def in_bash(line):
    process = subprocess.Popen(
        ["/bin/bash", "-c", f"set -o pipefail; {line}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    watch = threading.Timer(PATIENCE_S, os.killpg, (process.pid, signal.SIGKILL))
    watch.start()
    first = process.stdout.readline() if ENDLESS.search(line) else ""
    if first:
        os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate()
    watch.cancel()
    assert process.returncode in ((0, Exit.INTERRUPTED) if first else (0,)), (line, process.returncode, out, err)
    assert "Traceback" not in err
    return first + out


def test_every_line_of_the_command_reference_runs(shell, tmp_path):
    (toml,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "topics.toml").write_text(toml)
    lines = shell_lines(PAGE)
    assert len(lines) > 60
    for line in lines:
        shell(line)


def test_every_line_of_the_readmes_shell_part_runs(shell):
    create, publish, pipe, poll, tail = shell_block(README, SENTENCE)
    shell(create)
    shell(publish)
    shell(pipe)
    assert shell(poll).splitlines()[-3:] == ["1", "2", "3"]
    assert shell(tail)


# --- completeness ------------------------------------------------------------------------------------


def section(title):
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


CLIENT_VERBS = [
    (name, program.get_command(click.Context(program), name))
    for name, listed in VERBS.items()
    if listed.where.startswith("plainsong.")
]


@pytest.mark.parametrize(("name", "command"), CLIENT_VERBS)
def test_every_verb_has_a_section_that_names_each_of_its_options(name, command):
    text = section(name)
    parts = {name: command}
    if isinstance(command, click.Group):
        parts = {each: one for each, one in command.commands.items() if not one.hidden}
        assert all(f"plainsong {name} {each}" in text + PAGE for each in parts)
    for part, verb in parts.items():
        own = section(f"{name} {part}") if f"\n### {name} {part}\n" in PAGE else text
        assert isinstance(verb, Verb)
        for param in verb.params:
            shared = isinstance(param, WhereOption) or param.name in ("as_json", "verbose")
            if isinstance(param, click.Option) and not shared and not param.hidden:
                assert all(re.search(rf"(?<![\w-]){re.escape(option)}\b", own) for option in param.opts), param.opts


def test_the_section_on_choosing_a_daemon_names_each_option_and_its_variable():
    text = section("Which daemon")
    for param in program.get_command(click.Context(program), "poll").params:
        if isinstance(param, WhereOption):
            assert all(f"`{option}`" in text for option in param.opts)
            assert param.name in ("timeout_ms", "insecure") or f"`PLAINSONG_{param.name.upper()}`" in text
    assert "`-v`, `--verbose`" in text


def test_the_exit_codes_are_those_of_the_program_in_the_same_words():
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", section("What all verbs share"), re.MULTILINE)
    assert [int(code) for code, _ in rows] == [int(code) for code in Exit]
    said = re.findall(r"^ *(\d+) +(.+)$", Exit.__doc__, re.MULTILINE)
    assert rows == said


def test_every_field_of_a_format_is_described():
    from plainsong.cli.printing import _ESCAPES, _FIELDS

    text = section("poll")
    assert all(f"`%{field}`" in text for field in _FIELDS)
    assert all(f"`\\{escape}`" in text for escape in _ESCAPES)
