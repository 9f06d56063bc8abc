"""Hints use the terms of the interface where they are read: HTTP, Python, or the command line."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from plainsong.cli.command import failure_of
from plainsong.errors import Unauthenticated, problem_error
from plainsong.hints import HINTS, in_command, in_python

ROOT = Path(__file__).parents[2]
#: Terms used only in HTTP.
OF_HTTP = re.compile(r"\b(PUT|POST|DELETE|GET)\b|\?[a-z]+[A-Z]?\w*=|\bheader\b|\b[a-z]+[A-Z]\w+|Plainsong-")
#: Names in other software.
NAMES = ("getSnapshot", "TransactionCodec", "ZooKeeper")
#: Read only by programs that speak HTTP or WebSocket.
OF_PROTOCOLS = ("Sec-WebSocket-Version: 13",)


def hints_of_the_daemon():
    """Return every hint in the daemon's source code."""
    for floor in ("plainsong/protocol", "broker/api", "broker/security", "broker/http", "actors"):
        for path in (ROOT / floor).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.keyword) and node.arg == "hint":
                    for each in ast.walk(node.value):
                        if isinstance(each, ast.Constant) and isinstance(each.value, str):
                            yield each.value
    for path in (ROOT / "plainsong/protocol/topic/upkeep.py", ROOT / "plainsong/protocol/requests.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "ifNotExists=true to" in node.value:
                yield node.value


def test_every_hint_of_the_daemon_about_http_has_words_for_the_other_interfaces():
    found = {hint for hint in hints_of_the_daemon() if OF_HTTP.search(re.sub("|".join(NAMES), "", hint))}
    assert {each.http for each in HINTS} >= found - set(OF_PROTOCOLS)


@pytest.mark.parametrize("hint", HINTS, ids=lambda hint: hint.http)
def test_the_words_of_one_interface_are_not_those_of_another(hint):
    written = "\n".join(
        path.read_text(encoding="utf-8") for path in ROOT.glob("[pba]*/**/*.py") if path.name != "hints.py"
    )
    assert hint.http in written, "the daemon no longer says this"
    for other in (hint.python, hint.command):
        assert not OF_HTTP.search(other)
    assert "client" not in hint.command
    assert in_python(hint.http) == hint.python
    assert in_command(hint.http) == in_command(hint.python) == hint.command


def test_an_answer_is_an_error_with_a_hint_for_python_and_an_unknown_hint_stays():
    problem = {"code": "unauthenticated", "status": 401, "detail": "no", "hint": HINTS[2].http}
    error = problem_error(problem)
    assert isinstance(error, Unauthenticated)
    assert error.hint == "give the client token= or token_file=; plainsong token create makes a token"
    assert failure_of(error).hint.startswith("give --token-file FILE")
    assert problem_error({**problem, "hint": "wait a little"}).hint == "wait a little"
