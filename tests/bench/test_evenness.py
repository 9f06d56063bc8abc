"""The open loop measures waits from when requests were due, and the sections built on it report correct values."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from types import SimpleNamespace

import pytest

from bench import generator
from bench.backup import _Backups
from bench.evenness import _Copies
from bench.load import post
from bench.profiles import QUICK
from tests.daemon.harness import eventually

STALL_S = 0.4
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


@pytest.fixture(params=["C", "Python"])
def either(request, monkeypatch):
    """Each of the two load generators."""
    generator.compiled.cache_clear()
    if request.param == "Python":
        monkeypatch.setenv("BENCH_PURE", "1")
    elif generator.compiled() is None:
        pytest.skip("there is no C compiler")
    yield request.param
    generator.compiled.cache_clear()


@pytest.fixture
def compiled():
    if generator.compiled() is None:
        pytest.skip("there is no C compiler")


class Scripted(threading.Thread):
    """A server with one connection: reads requests of a known length, and answers each with the next scripted answer.

    The last answer is repeated. Each answer is sent in pieces of ``piece`` bytes; ``heard`` lists the requests.
    """

    def __init__(self, request_bytes: int, answers: list[bytes], *, piece: int = 1 << 20, stall_s: float = 0.0) -> None:
        super().__init__(daemon=True)
        self.heard: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._bytes, self._answers, self._piece, self._stall_s = request_bytes, answers, piece, stall_s
        self.start()

    def run(self) -> None:
        connection, _ = self._listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection, self._listener:
            while len(request := connection.recv(self._bytes, socket.MSG_WAITALL)) == self._bytes:
                if not self.heard:
                    time.sleep(self._stall_s)
                self.heard.append(request)
                answer = self._answers[min(len(self.heard), len(self._answers)) - 1]
                for at in range(0, len(answer), self._piece):
                    connection.sendall(answer[at : at + self._piece])


def test_a_stall_counts_for_all_requests_due_during_it(either):
    request = post("/publish", b"x", [])
    server = Scripted(len(request), [OK], stall_s=STALL_S)
    result = generator.run_everywhere(server.port, 1, [request], STALL_S * 1.25, rate=200)
    assert result["requests"] == 100
    assert result["max_ms"] >= STALL_S * 1e3
    # Four fifths of the requests were due during the stall, and half of all waited at least 30 % of its length.
    assert result["p50_ms"] >= STALL_S * 1e3 * 0.3
    assert result["unsent"] == 0


def test_each_connection_sends_all_requests_in_turn(either):
    requests = [post(f"/{name}", b"x", []) for name in "abc"]
    server = Scripted(len(requests[0]), [OK])
    assert generator.run_everywhere(server.port, 1, requests, number=6)["requests"] == 6
    assert [request[6:7] for request in server.heard] == [b"a", b"b", b"c"] * 2


def test_an_answer_in_pieces_and_chunks_is_one_answer(either):
    request = post("/poll", b"x", [])
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n10\r\n" + b"d" * 16 + b"\r\n0\r\n\r\n"
    server = Scripted(len(request), [chunked], piece=1)
    result = generator.run_everywhere(server.port, 1, [request], number=3)
    assert result["statuses"] == {"200": 3}
    assert result["received_bytes"] == 3 * len(chunked)


def test_an_unsuccessful_answer_is_detected(either):
    request = post("/publish", b"x", [])
    server = Scripted(len(request), [b"HTTP/1.1 503 Busy\r\nContent-Length: 2\r\n\r\nno"])
    with pytest.raises(RuntimeError, match="503"):
        generator.run_everywhere(server.port, 1, [request], number=1)


def _avro(ids: list[bytes]) -> bytes:
    body = b""
    if ids:
        body = bytes([2 * len(ids)]) + b"".join(b"\x28" + each + b"\x06abc" for each in ids)
    body += b"\0"
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


def _entries(ids: list[bytes]) -> bytes:
    entry = b"*2\r\n$%d\r\n%s\r\n*2\r\n$1\r\np\r\n$3\r\na\r\n\r\n"
    return b"*%d\r\n" % len(ids) + b"".join(entry % (len(each), each) for each in ids)


def _rows(ids: list[int]) -> bytes:
    rows = (struct.pack("!HIqI3s", 2, 8, each, 3, b"abc") for each in ids)
    return b"".join(b"D" + struct.pack("!I", 4 + len(row)) + row for row in rows) + b"Z\0\0\0\5I"


def _batches(spans: list[tuple[int, int]]) -> bytes:
    """Return record batches, each with a first offset and a number of records."""
    records = b""
    for first, count in spans:
        head = struct.pack("!IbIhIqqqhII", 0, 2, 0, 0, count - 1, 0, 0, -1, -1, 0, count)
        records += struct.pack("!qI", first, len(head)) + head
    body = (
        struct.pack("!IIIh1sIIhqqI", 7, 0, 1, 1, b"t", 1, 0, 0, 99, 99, 0) + struct.pack("!I", len(records)) + records
    )
    return struct.pack("!I", len(body)) + body


WALKS = {
    "http": (20, _avro([b"a" * 20, b"b" * 20]), _avro([]), b"b" * 20),
    "redis": (32, _entries([b"7-0", b"1700000000000-12"]), _entries([]), b"(001700000000000-000000000000012"),
    "postgres": (8, _rows([1, 258]), _rows([]), struct.pack("!q", 258)),
    "kafka": (8, _batches([(0, 300), (300, 5)]), _batches([]), struct.pack("!q", 305)),
}


@pytest.mark.parametrize("piece", [7, 1 << 20])
@pytest.mark.parametrize("protocol", WALKS)
def test_a_walk_continues_where_the_page_ended_and_ends_with_the_topic(compiled, protocol, piece):
    width, page, nothing, position = WALKS[protocol]
    request = b"read " + b"0" * width + b" please"
    server = Scripted(len(request), [page, nothing], piece=piece)
    options = ["--protocol", protocol, "--walk", "5", "--connections", "1"]
    with generator.started([request], [server.port], *options) as running:
        result = running.end()
    assert result["messages"] == (305 if protocol == "kafka" else 2)
    assert server.heard == [request, b"read " + position + b" please"]


@pytest.mark.parametrize("piece", [7, 1 << 20])
def test_a_page_of_nats_ends_with_its_messages_or_when_there_are_none_left(compiled, piece):
    message, over = b"MSG in.0000 1 3\r\nabc\r\n", b"HMSG in.0000 1 28 28\r\nNATS/1.0 404 No Messages\r\n\r\n\r\n"
    request = b"PUB next in.@@@@ 0\r\n\r\n"
    server = Scripted(len(request), [message * 3, message + over, over], piece=piece)
    options = ["--protocol", "nats", "--walk", "0", "--replies", "3", "--number", "--connections", "1"]
    with generator.started([request], [server.port], *options) as running:
        assert running.end()["messages"] == 4
    assert server.heard == [request.replace(b"@@@@", b"0000")] * 3


def test_a_copy_that_fails_during_a_measurement_is_an_error(tmp_path):
    copies = _Copies(tmp_path / "no-store", tmp_path / "copies")
    copies.start()
    copies.join()
    with pytest.raises(RuntimeError, match="no-store"):
        copies.stop()


def test_a_backup_that_fails_during_a_measurement_is_an_error(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and no daemon listens there
        backups = _Backups(SimpleNamespace(port=free.getsockname()[1]), tmp_path)
        with pytest.raises(RuntimeError, match="backup 1 ended with"), backups, backups.working():
            eventually(
                "the backup has ended", lambda: backups._process is not None and backups._process.poll() is not None
            )


def test_evenness_covers_every_load_condition_and_rate(report):
    rows = report.results["sections"]["evenness"]["rows"]
    cells = [tuple(row["what"].values()) for row in rows]
    shares = ("1/4", "1/2", "3/4")
    assert cells == [
        (kind, beside, each) for kind in ("singles", "batches") for beside in QUICK.beside for each in shares
    ]
    for row in rows:
        at = {name: value["median"] for name, value in row["values"].items()}
        assert at["p50 ms"] <= at["p99 ms"] <= at["p99.9 ms"] <= at["max ms"]
        assert {"late p99 ms", "generator %", "unsent"} <= at.keys()
        assert ("beside it" in at) == (row["what"]["beside"] != "alone")


def test_growth_is_measured_at_the_requested_sizes(report):
    rows = report.results["sections"]["growth"]["rows"]
    assert [tuple(row["what"].values()) for row in rows] == [("messages", 3000), ("messages", 50_000), ("topics", 5)]
    for row in rows:
        assert {"a second", "anon MB", "mapped MB", "disk MB", "start s", "poll p50 ms"} <= row["values"].keys()


def test_the_report_says_how_it_was_measured(report):
    assert {"load generator", "date", "load before", "cores"} <= report.results["facts"].keys()
    assert json.loads((report.directory / "results.json").read_text(encoding="utf-8")) == report.results
