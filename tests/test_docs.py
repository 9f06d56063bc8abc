"""The documents are correct: links have targets, names exist, commands parse, all metrics are described."""

from __future__ import annotations

import functools
import json
import pkgutil
import re
import shlex
from urllib.parse import urlsplit

import click
import pytest

import plainsong
from broker.api.schemas import status_of_code
from broker.audit import ACTIONS
from broker.config import every_setting
from broker.config.config import sections
from broker.config.load import RETIRED
from plainsong.cli.job_metrics import METRICS, PREFIX
from plainsong.cli.main import program
from plainsong.errors import NARROWEST
from plainsong.protocol.codec import codec_for
from plainsong.protocol.errors import BY_CODE
from plainsong.protocol.names import topic_name
from tests.documents import DOCUMENTS, ROOT, anchors, links, paths, prose, shell_block, shell_lines, spans
from tests.metric_names import metrics_of_the_daemon, metrics_of_topics

README = DOCUMENTS["README.md"]
OPERATIONS = DOCUMENTS["docs/operations.md"]
#: Names that begin like a metric's, but are not metrics.
NO_METRICS = {"plainsong_broker", "plainsong_client", "plainsong_", "plainsong_positions", "plainsong_outbox"}
#: Names that look like a module's, but are not modules.
NO_MODULES = {"plainsong.lock", "plainsong.message"}

every_document = pytest.mark.parametrize("name", DOCUMENTS)


@every_document
def test_links_between_documents_resolve(name: str):
    for link in links(DOCUMENTS[name]):
        if urlsplit(link).scheme:
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


@every_document
def test_files_and_folders_named_in_documents_exist(name: str):
    text = DOCUMENTS[name]
    assert not [path for path in paths(text) if not (ROOT / path).exists()]
    for line in prose(text).splitlines():
        folders = {(ROOT / path).parent for path in paths(line)} | {(ROOT / name).parent}
        for file in re.findall(r"`(\w+\.py)[`:]", line):
            # A test file may be named without its folder; any other file must be in the folder of one whose path is on
            # the same line.
            is_test = file.startswith("test_") and any((ROOT / "tests").rglob(file))
            assert is_test or any((folder / file).exists() for folder in folders), file


@every_document
def test_tests_named_in_documents_exist(name: str):
    named = {test for span in spans(DOCUMENTS[name]) for test in re.findall(r"\btest_\w+\b(?!\.py)", span)}
    assert named <= all_tests()


#: All actions that the audit records: those of routes, and the daemon's own.
RECORDED = frozenset(ACTIONS.values()) | {
    "backup.restore",
    "security.reload",
    "security.refused",
    "replication.takeover",
    "replication.rejoin",
}


@functools.cache
def all_tests() -> set[str]:
    files = (ROOT / "tests").rglob("*.py")
    return {
        test for file in files for test in re.findall(r"^ *(?:async )?def (test_\w+)", file.read_text("utf-8"), re.M)
    }


@every_document
def test_modules_named_in_documents_exist(name: str):
    for span in spans(DOCUMENTS[name]):
        if re.fullmatch(r"(?:actors|pyspark_plainsong|plainsong)(?:\.\w+)+", span) and span not in NO_MODULES:
            pkgutil.resolve_name(span)


def test_the_page_about_security_names_every_action_of_the_audit():
    assert {f"`{action}`" for action in RECORDED} <= set(re.findall(r"`[^`]+`", DOCUMENTS["docs/security.md"]))


@every_document
def test_settings_named_in_documents_exist(name: str):
    text = DOCUMENTS[name]
    longest_first = "|".join(map(re.escape, sorted(sections(), key=len, reverse=True)))
    for section, key in re.findall(rf"`({longest_first})\.(\w+)", text):
        is_section = f"{section}.{key}" in sections()
        folder = ROOT / section.replace(".", "/")
        is_module = (folder / f"{key}.py").exists() or (folder / key).is_dir()
        is_action = any(action.startswith(f"{section}.{key}") for action in RECORDED)
        assert is_section or is_module or is_action or f"{section}.{key}" in every_setting() | RETIRED, (
            f"{section}.{key}"
        )
    for variable in re.findall(r"PLAINSONG_([A-Z]+__[A-Z_]+)", text):
        assert variable.replace("__", ".").lower() in every_setting(), variable


@every_document
def test_error_codes_next_to_a_status_exist(name: str):
    for code in re.findall(r"\b[45]\d\d `([a-z_]+)`", DOCUMENTS[name]):
        assert code in BY_CODE, code


# --- metrics and log lines -------------------------------------------------------------------------


def test_every_metric_is_described_with_its_kind_and_no_other_is():
    rows = re.findall(r"^\| `((?:plainsong|process)_\w+)` \| (\w+) \|", OPERATIONS, re.MULTILINE)
    described = dict(rows)
    assert len(rows) == len(described), "each is described once"
    assert described == metrics_of_the_daemon() | metrics_of_topics()


@every_document
def test_metrics_named_in_documents_exist(name: str):
    named = set(re.findall(r"`(plainsong_\w*)`", DOCUMENTS[name]))
    of_jobs = {f"{PREFIX}{metric}" for metric in METRICS}
    assert named <= metrics_of_the_daemon().keys() | metrics_of_topics().keys() | of_jobs | NO_METRICS


def test_log_events_that_are_described_are_written_somewhere():
    floors = [path for floor in ("storage", "actors", "broker") for path in (ROOT / floor).rglob("*.py")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in floors)
    rows = re.findall(r"^\| (`[^|]+`) \| (?:info|warning|error|critical) \|", OPERATIONS, re.MULTILINE)
    events = [event for row in rows for event in spans(row)]
    assert len(events) > 8
    # A log line may begin with its subject: "%s fell, …".
    ends = {event: [event.split(" ", words)[-1] for words in (1, 2)] for event in events}
    assert not [
        event for event in events if f'"{event}' not in code and not any(f'"%s {end}' in code for end in ends[event])
    ]


# --- command lines ---------------------------------------------------------------------------------


def commands(text: str) -> list[str]:
    """Return every command line that runs ``plainsong``, from code blocks and from the prose."""
    said = [
        line.removesuffix(" &") for line in [*shell_lines(text), *spans(text)] if re.match(r"(\S*/)?plainsong \w", line)
    ]
    return [re.split(r" [|<>] ", re.sub(r"^\S*plainsong ", "", line))[0] for line in said]


@every_document
def test_command_lines_in_documents_parse(name: str):
    for line in commands(DOCUMENTS[name]):
        context = click.Context(program, info_name="plainsong")
        first, command, words = program.resolve_command(context, shlex.split(line))
        assert command is not None, line
        while isinstance(command, click.Group) and words:
            command = command.get_command(context, words.pop(0))
            assert command is not None, line
        assert "not available" not in (command.short_help or ""), line
        if not isinstance(command, click.Group):
            command.make_context(first, words)


@every_document
def test_make_targets_in_documents_exist(name: str):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = DOCUMENTS[name]
    named = {match[1] for line in [*shell_lines(text), *spans(text)] if (match := re.match(r"make ([a-z-]+)", line))}
    assert named <= targets


def test_the_operations_page_shows_every_command():
    shown = {tuple(shlex.split(line)[:2]) for line in commands(OPERATIONS)}
    wanted = {("serve",), ("config", "check"), ("config", "show"), ("store", "dump"), ("store", "explain")}
    assert {words for words in wanted if not any(line[: len(words)] == words for line in shown)} == set()


# --- the first message -----------------------------------------------------------------------------


def test_the_readme_has_three_lines_for_a_second_terminal_that_create_publish_and_poll():
    create, publish, poll = (shlex.split(line) for line in shell_block(README, "In a second terminal:"))
    address = f"http://{every_setting()['http.bind'].default}"
    paths = [line[-1].removeprefix(f"{address}/v1/namespaces/") for line in (create, publish, poll)]
    namespace, _, topic = paths[0].split("/")
    topic_name(namespace, topic)
    assert paths == [paths[0], f"{paths[0]}/publish", f"{paths[0]}/poll"]
    assert create[:3] == ["curl", "-X", "PUT"]
    codec = codec_for(header_of(publish, "Content-Type"))
    assert codec.decode_publish(body_of(publish)).messages
    assert codec_for(header_of(poll, "Content-Type")).decode_poll(body_of(poll)).start_from is None


def header_of(words: list[str], name: str) -> str:
    key, _, value = words[words.index("-H") + 1].partition(": ")
    assert key == name
    return value


def body_of(words: list[str]) -> bytes:
    return words[words.index("-d") + 1].encode()


def test_the_answer_shown_in_the_readme_has_the_messages_that_were_published():
    _, publish, _ = (shlex.split(line) for line in shell_block(README, "In a second terminal:"))
    (shown,) = re.findall(r"^```json\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert [message["payload"] for message in json.loads(shown)] == json.loads(body_of(publish))["messages"]


def test_the_changelog_describes_the_current_version():
    version = re.search(r"^## \[(?!Unreleased)([^\]]+)\]", DOCUMENTS["CHANGELOG.md"], re.MULTILINE)
    assert version is not None
    assert version[1] == plainsong.__version__


def test_figures_of_other_brokers_in_the_readme_are_those_of_the_benchmarks():
    benchmarks = DOCUMENTS["docs/benchmarks.md"]
    part = README[README.index("## How fast") : README.index("## Quick start")]
    rows = [re.split(r" *\| *", line)[2:-1] for line in part.splitlines() if line.startswith("|")][2:]
    loads = ("single, 1 connection", "single, 16 connections", "single, 50 connections", "batch, 4 connections")
    assert len(rows) == len(loads)
    peers = ("plainsong", "original", "kafka", "nats", "postgres", "redis")
    for row, load in zip(rows, loads, strict=True):
        measured = re.search(rf"^\| {load} \| (.+) \|$", benchmarks, re.MULTILINE)
        assert measured is not None, load
        rate = dict(zip(peers, measured[1].split(" | "), strict=False))
        assert row == [rate[peer] for peer in ("plainsong", "kafka", "nats", "redis", "postgres")], load


# --- troubleshooting -------------------------------------------------------------------------------


def test_every_error_code_has_its_section_on_the_troubleshooting_page_and_no_other_has():
    page = DOCUMENTS["docs/troubleshooting.md"].partition("## By code")[2]
    parts = re.findall(r"^### (\w+)\n\n(\d+) · `plainsong\.errors\.(\w+)` · ([\w-]+)\n\n(?=\S)", page, re.MULTILINE)
    codes = [code for code, *_ in parts]
    assert codes == sorted(BY_CODE)
    for code, status, name, outcome in parts:
        error = plainsong.errors.Internal if code == "internal" else NARROWEST[code]
        assert (name, int(status), outcome) == (error.__name__, status_of_code(code), error.outcome), code
