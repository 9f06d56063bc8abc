"""Logs: the content of lines, and failures of the output, none of which reaches the code that logs."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.config.sections import LogConfig
from broker.logs import JsonLines, LineWriter, LogCounters, TextLines, counters, request_id, setup_logs
from tests.patience import PATIENCE_S

logger = logging.getLogger("actors.topic")


@contextmanager
def logs_into(path, **config):
    with open(path, "w", encoding="utf-8") as stream:
        logs = setup_logs(LogConfig(**config), stream)
        try:
            yield logs
        finally:
            logs.close(10)


@pytest.fixture
def in_a_request():
    token = request_id.set("4f1c")
    yield
    request_id.reset(token)


def record_of(message: str, **extra: object) -> logging.LogRecord:
    return logger.makeRecord(logger.name, logging.INFO, "x.py", 1, message, (), None, extra=extra)


def test_a_text_line_has_time_level_logger_event_fields_and_request(tmp_path, in_a_request):
    with logs_into(tmp_path / "log"):
        logger.info("topic opened", extra={"topic": "orders:paid", "why": "first use"})
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO    actors\.topic: topic opened  "
        r'topic=orders:paid  why="first use"  request=4f1c\n',
        (tmp_path / "log").read_text(),
    )


def test_a_json_line_is_one_object_with_the_same(tmp_path, in_a_request):
    with logs_into(tmp_path / "log", format="json"):
        logger.warning("topic %s", "opened", extra={"topic": "a:b", "rows": 3, "level": "mine"})
    line = json.loads((tmp_path / "log").read_text())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("ts"))
    assert line == {
        "level": "warning",
        "logger": "actors.topic",
        "event": "topic opened",
        "request_id": "4f1c",
        "topic": "a:b",
        "rows": 3,
        "level_": "mine",
    }


@pytest.mark.parametrize("lines", [TextLines(), JsonLines()])
def test_a_line_outside_of_a_request_names_none(lines):
    assert "request" not in lines.format(record_of("started"))


def test_a_traceback_is_included(tmp_path):
    for kind in ("text", "json"):
        with logs_into(tmp_path / kind, format=kind):
            try:
                raise ValueError("no\x1b[31m")
            except ValueError:
                logger.exception("it fell")
    text = (tmp_path / "text").read_text()
    assert "    Traceback" in text
    assert "\x1b" not in text
    assert "ValueError" in json.loads((tmp_path / "json").read_text())["traceback"]


@given(st.text(), st.text())
def test_no_input_can_forge_a_second_line(message, value):
    line = TextLines().format(record_of(message.replace("%", ""), field=value))
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", line)
    assert len(JsonLines().format(record_of(message.replace("%", ""), field=value)).split("\n")) == 1


def test_lines_below_the_level_are_not_made(tmp_path):
    with logs_into(tmp_path / "log", level="warning"):
        logger.info("unimportant")
        logging.getLogger("hypercorn.error").info("chatter")
        logger.error("important")
    assert [line.split(": ")[1] for line in (tmp_path / "log").read_text().splitlines()] == ["important"]


def test_messages_for_people_are_log_lines_for_programs(tmp_path):
    for kind in ("text", "json"):
        with logs_into(tmp_path / kind, format=kind) as logs:
            logs.announce("two\nlines", "serving", port=7420)
    assert (tmp_path / "text").read_text() == "two\nlines\n"
    line = json.loads((tmp_path / "json").read_text())
    assert (line["event"], line["port"]) == ("serving", 7420)


def test_a_line_that_cannot_be_made_is_counted_and_breaks_nothing(tmp_path):
    class Unspeakable:
        def __str__(self):
            raise RuntimeError("no words")

    with logs_into(tmp_path / "log") as logs:
        logger.info("unspeakable", extra={"it": Unspeakable()})
        assert logs.counters() == LogCounters(failed=1)
        assert counters() == LogCounters(failed=1)


def test_closing_leaves_the_root_logger_as_it_was(tmp_path):
    before = (list(logging.getLogger().handlers), logging.getLogger().level)
    with logs_into(tmp_path / "log", level="error"):
        pass
    assert (list(logging.getLogger().handlers), logging.getLogger().level) == before


def test_a_full_pipe_drops_and_counts_lines_and_blocks_nothing():
    reader, writer = os.pipe()
    lines = LineWriter(writer, max_lines=10, gap=lambda missed: f"missed {missed}")
    line = "x" * 4096
    for _ in range(200):  # far more than the pipe, one batch and the queue hold
        lines.put(line)
    assert lines.dropped > 100
    lines.close(0.05)
    assert lines.failed == 0
    # Once the pipe is read again, every line that was not dropped arrives, and one line reports the number of dropped
    # lines.
    received = bytearray()
    os.set_blocking(reader, True)
    while b"missed" not in received:
        received += os.read(reader, 1 << 20)
    lines._thread.join(PATIENCE_S)
    assert not lines._thread.is_alive()
    os.close(writer)
    os.close(reader)


def test_a_pipe_set_to_non_blocking_loses_nothing():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    received = bytearray()

    def read():
        while chunk := os.read(reader, 65536):
            received.extend(chunk)

    lines = LineWriter(writer, max_lines=10_000, gap=str)
    for number in range(1000):
        lines.put(f"{number} " + "x" * 400)
    end = threading.Thread(target=read)
    end.start()
    lines.close(10)
    os.close(writer)
    end.join(PATIENCE_S)
    os.close(reader)
    assert [int(line.split()[0]) for line in received.decode().splitlines()] == list(range(1000))
    assert (lines.dropped, lines.failed) == (0, 0)


def test_a_closed_pipe_fails_lines_and_nothing_else():
    reader, writer = os.pipe()
    os.close(reader)
    lines = LineWriter(writer, max_lines=100, gap=str)
    for _ in range(50):
        lines.put("x")
    lines.close(10)
    assert (lines.dropped, lines.failed) == (0, 50)
    os.close(writer)


def test_a_full_disk_fails_lines_and_nothing_else():
    with open("/dev/full", "w") as full:
        lines = LineWriter(full.fileno(), max_lines=100, gap=str)
        for _ in range(50):
            lines.put("x")
        lines.close(10)
    assert (lines.dropped, lines.failed) == (0, 50)


def test_no_output_at_all_fails_lines_and_nothing_else():
    logs = setup_logs(LogConfig(), None)
    logger.info("to nobody")
    logs.close(10)
    assert logs.counters() == LogCounters(failed=1)


def test_a_line_after_the_end_is_dropped_and_counted(tmp_path):
    with open(tmp_path / "log", "w") as stream:
        lines = LineWriter(stream.fileno(), max_lines=10, gap=str)
        lines.close(10)
        lines.put("late")
        lines.close(10)
    assert lines.dropped == 1


#: Logs more than the queue holds, and ends within the given number of seconds.
SPEAKER = """
import logging, sys
from broker.config.sections import LogConfig
from broker.logs import setup_logs
logs = setup_logs(LogConfig(queue_lines=16), sys.stdout)
for _ in range(1000):
    logging.getLogger("x").info("y" * 1000)
logs.close(float(sys.argv[1]))
print(logs.counters(), file=sys.stderr)
"""


def test_a_process_with_blocked_output_still_ends():
    reader, writer = os.pipe()
    done = subprocess.run(
        [sys.executable, "-c", SPEAKER, "0.1"], stdout=writer, stderr=subprocess.PIPE, timeout=PATIENCE_S, check=False
    )
    os.close(writer)
    os.close(reader)
    assert done.returncode == 0
    assert re.search(rb"dropped=[1-9]", done.stderr)


@pytest.mark.parametrize("kind", ["closed", "full"])
def test_a_process_with_closed_output_still_ends(kind):
    if kind == "closed":
        reader, output = os.pipe()
        os.close(reader)
    else:
        output = os.open("/dev/full", os.O_WRONLY)
    # The program ends when every line has failed, not earlier.
    line = [sys.executable, "-c", SPEAKER, str(PATIENCE_S)]
    done = subprocess.run(line, stdout=output, stderr=subprocess.PIPE, timeout=2 * PATIENCE_S, check=False)
    os.close(output)
    assert done.returncode == 0
    assert re.search(rb"failed=[1-9]", done.stderr)


def test_the_output_stays_open_without_other_holders(tmp_path):
    logs = setup_logs(LogConfig(), open(tmp_path / "log", "w"))  # noqa: SIM115
    logger.info("still here")
    logs.close(10)
    assert "still here" in (tmp_path / "log").read_text()
    logs._stream.close()
