"""A hundred clients that request whole pages and stop reading: the daemon serves others, in bounded memory."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from plainsong.protocol.requests import PollRequest
from tests.daemon.harness import Daemon, eventually
from tests.daemon.talk import ask, create, metric, poll_call, publish, read_all, topic_path

MIB = 1 << 20
READERS = 100
BOUND = 32 * MIB
#: One page, which the daemon holds for a client that stops reading.
PAGE = [b"x" * MIB] * 15
#: Without a bound, 1.5 GB and more would be held; an idle daemon takes a tenth of this.
MOST_MIB = 600


def resident_mib(daemon: Daemon) -> float:
    """Return the memory of all processes of a daemon, in MiB."""
    found = 0
    for pid in (daemon.pid, *daemon.children()):
        lines = Path(f"/proc/{pid}/status").read_text()
        found += int(re.search(r"VmRSS:\s+(\d+)", lines)[1])  # type: ignore[index]
    return found / 1024


@pytest.fixture
def readers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def stalled(address: tuple[str, int]) -> socket.socket:
    """A client that has requested a page and reads nothing of it."""
    method, path, body, headers = poll_call("t", PollRequest())
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(address)
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    sock.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
    return sock


@pytest.mark.parametrize("listener", ["http.processes=1", "http.processes=2"])
def test_readers_that_stop_reading_do_not_fill_the_daemon(
    daemon: Callable[..., Daemon], readers: ExitStack, listener: str
) -> None:
    one = daemon(listener, f"http.max_answer_bytes={BOUND}", "http.send_timeout_s=30")
    create(one.address, "t")
    publish(one.address, "t", *PAGE)
    for _ in range(READERS):
        readers.enter_context(stalled(one.address))
    eventually("some hold their answers", lambda: metric(one.address, "plainsong_held_answer_bytes") > 0)
    # Other clients are served, with shorter pages if necessary.
    for number in range(20):
        publish(one.address, "t", b"%d" % number)
        assert metric(one.address, "plainsong_held_answer_bytes") <= BOUND
        assert resident_mib(one) < MOST_MIB
    assert ask(one.address, "GET", topic_path("t")).status == 200
    readers.close()
    eventually("all memory is released", lambda: metric(one.address, "plainsong_held_answer_bytes") == 0)
    assert len(read_all(one.address, "t")) == len(PAGE) + 20
