"""The command line: help that fits a terminal, one line for each error, and distinct exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from broker.config import every_setting
from plainsong import __version__
from plainsong.cli.command import Exit
from plainsong.cli.main import SETTINGS, Program, program, run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def plainsong(capsys, monkeypatch):
    for name in ("PORT", *(each for each in os.environ if each.startswith("PLAINSONG_"))):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(program, arguments, "plainsong")
        return code, *capsys.readouterr()

    return call


def test_the_installed_program_says_its_version():
    done = subprocess.run(
        [Path(sys.executable).with_name("plainsong"), "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"plainsong {__version__}\n"


@pytest.mark.parametrize("words", [[], ["serve"], ["config"], ["config", "check"], ["config", "show"]])
def test_help_fits_eighty_columns(plainsong, words):
    code, out, _ = plainsong(*words, "-h")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert (code, out) == plainsong(*words, "--help")[:2]


def test_help_lists_every_command(plainsong):
    _, out, _ = plainsong("--help")
    assert {"config", "serve", "store"} <= {line.split()[0] for line in out.splitlines() if line.strip()}


def test_a_command_that_cannot_be_loaded_fails_alone(capsys):
    def found():
        return [
            EntryPoint("broken", "broker.no_such_module:x", "plainsong.commands"),
            EntryPoint("empty", "broker.config:Config", "plainsong.commands"),
            EntryPoint("config", "broker.command.config:config", "plainsong.commands"),
        ]

    group = Program("plainsong", found=found, context_settings=SETTINGS)
    assert run(group, ["--help"], "plainsong") == 0
    assert "(not available:" in capsys.readouterr().out
    assert run(group, ["config", "check"], "plainsong") == 0
    for name in ("broken", "empty"):
        assert run(group, [name, "dump", "--all"], "plainsong") == Exit.FAILED
        error = capsys.readouterr().err
        assert error.startswith(f"error: the command {name!r} cannot be loaded: ")
        assert "\nhint: " in error


def test_a_wrong_command_line_is_an_error_with_a_hint(plainsong):
    code, out, error = plainsong("serve", "--bnid", "x")
    assert (code, out) == (Exit.USAGE, "")
    assert error.startswith("error: No such option")
    assert error.endswith("hint: try plainsong serve --help\n")
    assert plainsong("sevre")[0] == Exit.USAGE


def test_config_check_accepts_the_example(plainsong):
    assert plainsong("config", "check", "--config", str(ROOT / "etc/plainsong.toml"))[0] == Exit.OK


def test_config_check_prints_one_problem_on_one_line(plainsong):
    assert plainsong("config", "check", "--set", "http.bnid=1") == (
        Exit.USAGE,
        "",
        "error: flag: unknown setting 'http.bnid'\nhint: did you mean 'http.bind'?\n",
    )


def test_config_check_prints_every_problem(plainsong, tmp_path):
    file = tmp_path / "x.toml"
    file.write_text("[topic]\nidle_s = true\n[pol]\n")
    code, _, error = plainsong("config", "check", "--config", str(file), "--bind", "here")
    assert code == Exit.USAGE
    first, *others = error.splitlines()
    assert first == "error: 3 settings are invalid"
    assert len(others) == 3
    assert others[0] == f"  file {file}: topic.idle_s: True is not a number of seconds"


def test_config_check_refuses_files_that_serve_would_refuse(plainsong, tmp_path):
    file, tokens, grants = tmp_path / "x.toml", tmp_path / "tokens.json", tmp_path / "grants.toml"
    file.write_text(
        '[security]\nauthentication = "required"\ntokens_file = "tokens.json"\ngrants_file = "grants.toml"\n'
    )
    code, _, error = plainsong("config", "check", "--config", str(file))
    assert (code, error.splitlines()[0]) == (Exit.USAGE, "error: 2 files cannot be used")
    assert str(tokens) in error
    assert str(grants) in error
    tokens.write_text('{"format": 1, "tokens": []}')
    tokens.chmod(0o600)
    grants.write_text("format = 1\n")
    grants.chmod(0o664)
    code, _, error = plainsong("config", "check", "--config", str(file))
    assert code == Exit.USAGE
    assert "grants_file" in error
    assert "tokens_file" not in error
    grants.chmod(0o644)
    assert plainsong("config", "check", "--config", str(file))[0] == Exit.OK


def test_set_without_a_value_is_refused(plainsong):
    assert plainsong("config", "check", "--set", "log.access")[0] == Exit.USAGE


def test_config_show_prints_a_valid_settings_file(plainsong, tmp_path):
    _, out, _ = plainsong(
        "config", "show", "--set", 'storage.data_dir=a\\b"c', "--set", "topic.mailbox_bytes=100000000"
    )
    tables = tomllib.loads(out)
    assert tables["storage"]["data_dir"] == 'a\\b"c'
    file = tmp_path / "again.toml"
    file.write_text(out)
    assert plainsong("config", "show", "--config", str(file)) == (0, out, "")


def test_config_show_origin_prints_the_source_of_each_value(plainsong, monkeypatch):
    monkeypatch.setenv("PLAINSONG_LOG__ACCESS", "true")
    monkeypatch.setenv("PORT", "1234")
    _, out, _ = plainsong("config", "show", "--origin", "--data-dir", "there")
    origins = {line.split(" = ")[0]: line.rpartition("# ")[2] for line in out.splitlines()}
    assert set(origins) == set(every_setting())
    assert origins["log.access"] == "environment PLAINSONG_LOG__ACCESS"
    assert origins["http.bind"] == "environment PORT"
    assert origins["storage.data_dir"] == "flag"
    assert origins["log.level"] == "default"


def test_config_show_json_is_for_programs(plainsong):
    shown = json.loads(plainsong("config", "show", "--json")[1])
    assert shown["http.max_body_bytes"] == 64 << 20
    with_origin = json.loads(plainsong("config", "show", "--json", "--origin")[1])
    assert with_origin["storage.data_dir"] == {"value": "data", "origin": "default"}


def test_a_closed_pipe_ends_the_command_silently():
    reader, writer = os.pipe()
    os.close(reader)
    program = Path(sys.executable).with_name("plainsong")
    done = subprocess.run([program, "config", "show"], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (Exit.FAILED, b"")
