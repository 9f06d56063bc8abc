"""Failing logs and metrics do not delay messages, and the exit is clean."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.daemon.harness import Daemon, eventually, free_port
from tests.daemon.talk import ask, create, metric, poll, publish, read_all
from tests.patience import PATIENCE_S

PUBLISHES = 300
#: A line for every request, and a short queue.
CHATTY = ("log.access=true", "log.queue_lines=16", "log.level=debug")
#: The smallest pipe the kernel makes.
PIPE_BYTES = 4096


@contextmanager
def unread_pipe() -> Iterator[int]:
    """The writing end of a small, full pipe that has no reader."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while os.write(writing, b"x" * 512):
            pass
    os.set_blocking(writing, True)
    try:
        yield writing
    finally:
        os.close(reading)
        os.close(writing)


@contextmanager
def pipe_closed_at_the_other_end() -> Iterator[int]:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        yield writing
    finally:
        os.close(writing)


@contextmanager
def device_without_room() -> Iterator[int]:
    writing = os.open("/dev/full", os.O_WRONLY)
    try:
        yield writing
    finally:
        os.close(writing)


@pytest.mark.parametrize(
    ("output", "lost"),
    [
        (unread_pipe, "plainsong_log_lines_dropped_total"),
        (pipe_closed_at_the_other_end, "plainsong_log_lines_failed_total"),
        (device_without_room, "plainsong_log_lines_failed_total"),
    ],
)
def test_a_blocked_output_costs_no_message(tmp_path, output, lost):
    with output() as stdout:
        bind = f"127.0.0.1:{free_port()}"
        with Daemon(tmp_path / "data", *CHATTY, "shutdown.drain_s=3600", bind=bind, stdout=stdout) as running:
            create(running.address, "t")
            for number in range(PUBLISHES):
                publish(running.address, "t", b"%d" % number)
            assert [payload for _, payload in poll(running.address, "t")] == [b"%d" % n for n in range(PUBLISHES)]
            eventually("lines are lost", lambda: metric(running.address, lost) > 0)
            begun = time.monotonic()
            running.signal(signal.SIGTERM)
            assert running.wait() == 0
            assert time.monotonic() - begun < PATIENCE_S  # it would take an hour if the exit waited


def test_an_output_pipe_closed_at_run_time_costs_no_message(tmp_path):
    reading, writing = os.pipe()
    bind = f"127.0.0.1:{free_port()}"
    with Daemon(tmp_path / "data", *CHATTY, bind=bind, stdout=writing) as running:
        os.close(writing)
        os.close(reading)
        create(running.address, "t")
        for number in range(50):
            publish(running.address, "t", b"%d" % number)
        assert len(poll(running.address, "t")) == 50
        assert running.stop() == 0


def test_scrapers_that_never_read_disturb_nothing_and_do_not_delay_the_exit(daemon):
    running = daemon("shutdown.drain_s=1")
    create(running.address, "t")
    request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with ExitStack() as scrapers:
        for _ in range(20):
            scraper = scrapers.enter_context(socket.socket())
            scraper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            scraper.connect(running.address)
            scraper.setblocking(False)
            scraper.send(request * 200)  # far more answers than the kernel buffers for a client that reads nothing
        for number in range(100):
            publish(running.address, "t", b"%d" % number)
        assert len(poll(running.address, "t")) == 100
        assert metric(running.address, "plainsong_published_messages_total") == 100
        assert running.stop() == 0


def scrape(running: Daemon) -> str:
    answer = ask(running.address, "GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return answer.body.decode()


def test_metrics_are_prometheus_text_with_base_units_and_bounded_labels(daemon):
    running = daemon()
    create(running.address, "t")
    publish(running.address, "t", b"x")
    read_all(running.address, "t")
    before = list(text_string_to_metric_families(scrape(running)))
    for number in range(30):
        ask(running.address, "GET", f"/v1/namespaces/n{number}/topics")
        ask(running.address, "POST", f"/v1/namespaces/ring/topics/missing{number}/publish")
        ask(running.address, "GET", f"/nothing/{number}")
        create(running.address, f"many{number}")
        publish(running.address, f"many{number}", b"x")
    after = list(text_string_to_metric_families(scrape(running)))
    labels = {str(value) for family in after for sample in family.samples for value in sample.labels.values()}
    assert not [value for value in labels if any(part in value for part in ("many", "missing", "nothing/", "n1"))]
    assert {family.name for family in before} == {family.name for family in after}
    for family in after:
        assert family.documentation, family.name
        assert family.name.startswith(("plainsong_", "process_"))
        assert not family.name.endswith(("_ms", "_milliseconds", "_kb"))
    messages = next(family for family in after if family.name == "plainsong_published_messages")
    assert [sample.value for sample in messages.samples if sample.name.endswith("_total")] == [31]


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="NOT TESTED: promtool is not installed (package prometheus)"
)
def test_promtool_accepts_the_metrics(daemon):
    running = daemon()
    create(running.address, "t")
    publish(running.address, "t", b"x")
    read_all(running.address, "t")
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=scrape(running), capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_every_line_of_the_json_log_is_an_object_with_its_request(daemon):
    running = daemon("log.access=true")
    create(running.address, "t")
    ask(running.address, "POST", "/v1/namespaces/ring/topics/t/publish", b"{", {"X-Request-Id": "mine-1"})
    assert '"request_id":"mine-1"' in running.wait_for_line("mine-1")
    assert running.stop() == 0
    assert all(line.startswith('{"ts":') and line.endswith("}") for line in running.lines)
