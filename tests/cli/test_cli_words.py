"""The program's messages: results, singular and plural, refusals, and colours, which only terminals get."""

from __future__ import annotations

import pytest

from broker.finding import shown_bytes
from plainsong.cli import output
from plainsong.cli.command import Exit


def test_create_if_not_exists_says_whether_it_was_made(cli):
    assert cli("topic", "create", "orders", "--if-not-exists").out.startswith("created topic orders")
    assert cli("topic", "create", "orders", "--if-not-exists").out.startswith("topic orders exists")
    said = cli("topic", "create", "orders", "--if-not-exists", "--ttl", "1d", code=Exit.FAILED)
    assert "exists with other properties" in said.err


def test_the_first_context_is_reported_as_the_current_one(alone):
    said = alone("context", "add", "one", "--url", "http://a.example:1", code=0)
    assert said.err == "one is the first context, and therefore the current one: commands without --url use it\n"
    assert alone("context", "add", "two", "--url", "http://a.example:1", code=0).err == ""


def test_answering_no_reports_that_nothing_was_changed(cli, monkeypatch):
    cli("topic", "create", "orders")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("click.confirm", lambda *_, **__: False)
    said = cli("topic", "delete", "orders", code=Exit.FAILED)
    assert said.err.endswith("error: not confirmed: nothing was changed\n")
    assert cli("topic", "show", "orders").code == Exit.OK


@pytest.mark.parametrize(("count", "said"), [(1, "1 batch"), (2, "2 batches"), (0, "0 batches")])
def test_a_count_of_one_is_singular(count, said):
    assert output.counted(count, "batch") == said


@pytest.mark.parametrize(
    ("is_terminal", "no_color", "is_coloured"), [(True, "", True), (True, "1", False), (False, "", False)]
)
@pytest.mark.parametrize("word", output.COLOURS)
def test_important_words_have_a_colour_at_a_terminal_unless_no_color_is_set(
    monkeypatch, word, is_terminal, no_color, is_coloured
):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    for err in (False, True):
        said = output.coloured("text", word, err=err)
        assert said.startswith("\x1b[") is is_coloured
        assert "text" in said


def test_sizes_from_the_daemon_are_shown_for_people():
    said = [shown_bytes(count) for count in (0, 512, 1024, 245_477_376, 1 << 41)]
    assert said == ["0 B", "512 B", "1.0 KiB", "234.1 MiB", "2.0 TiB"]
