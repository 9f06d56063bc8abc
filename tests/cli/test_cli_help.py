"""Help fits a terminal, agrees with the listing, and shows examples that parse; and the program starts fast."""

from __future__ import annotations

import shlex
import subprocess
import sys

import click
import pytest

from plainsong.cli.command import Exit, Verb
from plainsong.cli.main import VERBS, program


def every_verb():
    """Return ``(words, command)`` for everything that has a help page."""

    def below(words, command):
        yield words, command
        if isinstance(command, click.Group):
            with click.Context(command) as ctx:
                for name in command.list_commands(ctx):
                    yield from below((*words, name), command.get_command(ctx, name))

    return list(below((), program))


ALL = every_verb()
OURS = [(words, command) for words, command in ALL if isinstance(command, Verb)]


@pytest.mark.parametrize("words", [words for words, _ in ALL], ids=" ".join)
def test_every_help_fits_eighty_columns(alone, words):
    said = alone(*words, "--help", code=0)
    assert max(map(len, said.lines)) <= 80
    assert said.err == ""


@pytest.mark.parametrize(("words", "command"), OURS, ids=lambda each: " ".join(each) if isinstance(each, tuple) else "")
def test_every_verb_has_json_and_examples_that_parse(words, command):
    assert command.examples
    assert words[0] in ("completion", "help") or any(param.name == "as_json" for param in command.params)
    lines = " ".join(command.examples).replace("\\ ", "") if any(map(ends_open, command.examples)) else None
    for line in [lines] if lines else command.examples:
        for part in line.split(" | "):
            said = shlex.split(part, comments=True)
            if said[:1] == ["plainsong"] and lines is None:
                parse(said[1 : said.index(">")] if ">" in said else said[1:])


def ends_open(line):
    return line.endswith("\\")


def parse(words):
    command, info_name = program, "plainsong"
    while isinstance(command, click.Group):
        ctx = click.Context(command, info_name=info_name)
        info_name, *words = words
        command = command.get_command(ctx, info_name)
    command.make_context(info_name, list(words))


@pytest.mark.parametrize(("words", "command"), OURS, ids=lambda each: " ".join(each) if isinstance(each, tuple) else "")
def test_every_option_says_what_it_does(words, command):
    for param in command.params:
        assert isinstance(param, click.Argument) or param.help or param.default is not None, param.name


@pytest.mark.parametrize("name", VERBS)
def test_the_listing_shows_the_summary_of_each_verb(name):
    ctx = click.Context(program)
    command = program.get_command(ctx, name)
    assert VERBS[name].says == command.help.split("\n\n")[0].replace("\n", " ")


def test_every_exit_code_is_in_the_help(alone):
    text = alone("--help").out
    assert all(f"{int(code)} " in text for code in Exit)


def test_help_and_completion_load_neither_http_nor_the_daemon():
    code = (
        "import sys; from plainsong.cli.main import program, run; run(program, ['--help'], 'plainsong');"
        "run(program, ['poll', '--help'], 'plainsong');"
        "print(sorted({'httpcore2', 'anyio', 'trio', 'fastavro', 'broker.config', 'quart'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_an_unknown_verb_exits_with_2_and_a_hint(alone):
    said = alone("pol", code=Exit.USAGE)
    assert said.err == "error: there is no command 'pol'; did you mean 'poll'?\nhint: try plainsong --help\n"
    assert alone("topic", "lits", code=Exit.USAGE).err.startswith(
        "error: there is no command 'lits'; did you mean 'list'?"
    )
    assert "did you mean" not in alone("xyzzy", code=Exit.USAGE).err


def test_a_group_without_a_verb_shows_its_help(alone):
    said = alone("reader", code=Exit.USAGE)
    assert said.err.startswith("Usage: plainsong reader")
    assert "error" not in said.err


def test_ls_and_list_are_one_verb_and_so_are_rm_and_delete(alone):
    for words in (("topic", "ls"), ("topic", "rm"), ("reader", "list"), ("reader", "delete"), ("context", "list")):
        assert alone(*words, "--help", code=0).out
