"""docs/http.md is complete, and its examples work as described."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pkgutil import iter_modules
from typing import get_args, is_typeddict

import pytest
import trio
from broker_in_process import in_process

from broker.api.description.problems import WHAT_TO_DO
from broker.api.routes import ROUTES
from broker.api.schemas import status_of_code
from plainsong.protocol import answers
from plainsong.protocol.answers.messages import MessageState
from plainsong.protocol.answers.service import FindingKind, ReplicationState
from plainsong.protocol.answers.topics import TopicStats
from plainsong.protocol.errors import BY_CODE, Internal
from tests.documents import DOCUMENTS, shell_lines

GUIDE = DOCUMENTS["docs/http.md"]
REPLICATION = DOCUMENTS["docs/replication.md"]
ROWS = re.findall(r"^\| (\d{3}) \| `(\w+)` \| ([\w-]+) \| \S", GUIDE, re.MULTILINE)
LINES = [line for line in shell_lines(GUIDE) if line]


def test_the_guide_names_every_route_and_no_other():
    named = re.findall(r"`(GET|PUT|POST|DELETE) (/[^`…]*)`", GUIDE)
    assert sorted(named) == sorted((route.method, route.path) for route in ROUTES)


def test_the_guide_names_every_code_once_with_its_status_and_its_outcome():
    assert len(ROWS) == len({code for _, code, _ in ROWS})
    assert {code for _, code, _ in ROWS} == set(BY_CODE)
    for status, code, outcome in ROWS:
        assert int(status) == status_of_code(code), code
        assert outcome == (Internal if code == "internal" else BY_CODE[code]).outcome, code


def test_each_error_is_explained_as_in_the_guide():
    rows = re.findall(r"^\| \d{3} \| `(\w+)` \| [\w-]+ \| (\S.*?) \|$", GUIDE, re.MULTILINE)
    assert {code: re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", says) for code, says in rows} == WHAT_TO_DO  # without links


def test_answers_in_the_description_are_in_the_table():
    answered = {code for route in ROUTES for code in route.errors}
    assert answered <= {code for _, code, _ in ROWS}


def declared():
    """Return the declared types of answers."""
    modules = [import_module(f"{answers.__name__}.{each.name}") for each in iter_modules(answers.__path__)]
    return [shape for each in modules for shape in vars(each).values() if is_typeddict(shape)]


def test_the_guide_names_every_field_of_every_answer():
    for shape in declared():
        for field in shape.__annotations__:
            assert re.search(rf'`{field}`|"{field}"', GUIDE + REPLICATION), (shape.__name__, field)


def table(heading, document=GUIDE):
    """Return the names in the first column of a table."""
    rows = re.search(rf"^\| {re.escape(heading)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", document, re.MULTILINE)[1]
    return [name for row in rows.splitlines() for name in re.findall(r"`(\w[\w-]*)`", row.split(" | ")[0])]


def test_the_tables_of_answers_are_those_of_their_types():
    assert sorted(table("field of `stats`")) == sorted(TopicStats.__annotations__)
    assert table("field", REPLICATION) == [*ReplicationState.__annotations__]
    assert sorted(table("kind")) == sorted(get_args(FindingKind))
    assert {*table("`state`"), "damaged", "set-aside"} == {*get_args(MessageState)}


def test_the_guide_names_every_query_parameter():
    for route in ROUTES:
        for name in route.parameters:
            assert re.search(rf"[?&]{name}=|`{name}`|`{name}=", GUIDE), name


async def test_every_example_works_as_described():
    assert len(LINES) > 25
    variables = {}
    async with in_process() as daemon:
        for line in LINES:
            if assigned := re.fullmatch(r"(\w+)=(http\S+)", line):
                variables["$" + assigned[1]] = assigned[2]
                continue
            for name, value in sorted(variables.items(), reverse=True):
                line = line.replace(name, value)
            if taken := re.fullmatch(r"(\w+)=\$\((curl .*) \| (sed .*)\)", line):
                method, url, headers, body = parsed(taken[2])
                answer = await daemon.call(method, url, headers=headers, content=body)
                done = await trio.run_process(shlex.split(taken[3]), stdin=answer.content, capture_stdout=True)
                variables["$" + taken[1]] = done.stdout.decode().strip()
                assert variables["$" + taken[1]].isdigit()
                continue
            command, _, said = line.partition("  # ")
            status, code = said.split() if said else ("200", None)
            method, url, headers, body = parsed(command)
            await daemon.call(method, url, status=int(status), code=code, headers=headers, content=body)


def parsed(command):
    """Return the request that curl would send for a command line."""
    words = iter(shlex.split(command))
    assert next(words) == "curl"
    method, url, headers, body = None, None, {}, None
    for word in words:
        if word == "-X":
            method = next(words)
        elif word == "-d":
            body = next(words).encode()
            headers.setdefault("Content-Type", "application/x-www-form-urlencoded")
        elif word in ("-s", "-N"):
            pass
        elif word == "-H":
            name, _, value = next(words).partition(": ")
            headers[name] = value
        else:
            assert url is None, word
            url = word
    return method or ("GET" if body is None else "POST"), url.removeprefix("http://127.0.0.1:7420"), headers, body


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("curl")])
def test_every_example_can_be_pasted(line):
    assert "…" not in line
    assert shlex.split(line)
