"""A load generator on raw sockets: fixed request bytes over kept connections, one request at a time on each.

    python bench/load.py --port 7420 --connections 16 --requests 20000 --request-file request.bin
    python bench/load.py --port 7420 --connections 16 --requests 20000 --path /v1/... --body-size 100 --header 'Content-Type: …'

Several ``--port`` and ``--request-file``, as many of one as of the other, are dealt to the connections in turn.
It needs nothing but the standard library, runs as a process of its own, and prints one JSON object: ``requests``,
``seconds``, ``requests_per_s``, ``p50_ms``, ``p90_ms``, ``p99_ms``, ``p999_ms``, ``max_ms``, ``received_bytes``,
``statuses`` (how often each), ``cpu_s`` (its own: near ``seconds`` means that it, and not the server, is the limit).
It ends after ``--requests``, after ``--seconds``, or at SIGTERM, whichever comes first.
"""

from __future__ import annotations

import argparse
import json
import math
import select
import signal
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

RECEIVE_BYTES = 1 << 20


class Answers:
    """One connection: sends a request, and says when its answer is complete."""

    __slots__ = ("_need", "_parts", "_size", "_tail", "request", "sent_at", "sock")

    def __init__(self, sock: socket.socket, request: bytes = b"") -> None:
        self.sock = sock
        self.request = request
        self.sent_at = 0.0
        self._reset()

    def _reset(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        #: Bytes of the whole answer, -1 when it is chunked, 0 while its head is incomplete.
        self._need = 0
        self._tail = b""

    def take(self, data: bytes) -> tuple[int, int] | None:
        """``(status, bytes)`` when ``data`` completes the answer, else None."""
        if not data:
            raise ConnectionError("the server closed the connection")
        self._parts.append(data)
        self._size += len(data)
        if self._need == 0:
            self._need = self._measure(b"".join(self._parts))
        if self._need == -1:
            self._tail = (self._tail + data)[-5:]
            done = self._tail.endswith(b"0\r\n\r\n")
        else:
            done = 0 < self._need <= self._size
        if not done:
            return None
        status, size = int(self._parts[0][9:12]), self._size
        self._reset()
        return status, size

    @staticmethod
    def _measure(data: bytes) -> int:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            return 0
        head = data[: end + 2].lower()
        at = head.find(b"\r\ncontent-length:")
        if at < 0:
            return -1
        return end + 4 + int(head[at + 17 : head.find(b"\r\n", at + 17)])


def run(
    host: str,
    targets: Sequence[tuple[int, bytes]],
    connections: int,
    requests: int,
    *,
    warm_up: int = 0,
    seconds: float = 0,
) -> dict[str, Any]:
    """Sends ``requests`` requests over ``connections`` connections, after ``warm_up`` unmeasured ones.

    ``targets``: port and request, dealt to the connections in turn. ``seconds``: send no more after so long; 0: as long
    as it takes.
    """
    poll = select.epoll()
    by_fd: dict[int, Answers] = {}
    for number in range(connections):
        port, request = targets[number % len(targets)]
        sock = socket.create_connection((host, port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        by_fd[sock.fileno()] = Answers(sock, request)
        poll.register(sock, select.EPOLLIN)
    if warm_up:
        _drive(poll, by_fd, warm_up, math.inf)
    cpu = time.process_time()
    started = time.perf_counter()
    latencies, statuses, received = _drive(poll, by_fd, requests, started + (seconds or math.inf))
    took = time.perf_counter() - started
    cpu = time.process_time() - cpu
    for connection in by_fd.values():
        connection.sock.close()
    poll.close()
    latencies.sort()
    at = {f"p{name}_ms": latencies[int(len(latencies) * share)] * 1e3 for name, share in _SHARES}
    return {
        "connections": connections,
        "requests": len(latencies),
        "seconds": round(took, 4),
        "requests_per_s": round(len(latencies) / took, 1),
        **{name: round(value, 4) for name, value in at.items()},
        "max_ms": round(latencies[-1] * 1e3, 4),
        "received_bytes": received,
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "cpu_s": round(cpu, 4),
    }


_SHARES = (("50", 0.50), ("90", 0.90), ("99", 0.99), ("999", 0.999))


class _Told:
    """Whether somebody has said that it is enough."""

    enough = False


def _drive(
    poll: select.epoll, by_fd: dict[int, Answers], requests: int, until_s: float
) -> tuple[list[float], Counter[int], int]:
    clock = time.perf_counter
    latencies: list[float] = []
    statuses: Counter[int] = Counter()
    received = 0
    to_send = requests
    outstanding = 0
    for connection in by_fd.values():
        if to_send:
            to_send -= 1
            outstanding += 1
            connection.sent_at = clock()
            connection.sock.sendall(connection.request)
    while outstanding:
        for fd, _ in poll.poll():
            connection = by_fd[fd]
            answer = connection.take(connection.sock.recv(RECEIVE_BYTES))
            if answer is None:
                continue
            now = clock()
            latencies.append(now - connection.sent_at)
            statuses[answer[0]] += 1
            received += answer[1]
            if to_send and now < until_s and not _Told.enough:
                to_send -= 1
                connection.sent_at = now
                connection.sock.sendall(connection.request)
            else:
                outstanding -= 1
    return latencies, statuses, received


def post(path: str, body: bytes, headers: list[str]) -> bytes:
    """The bytes of a POST."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", *headers, f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Load over raw sockets; prints one JSON object.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True, action="append")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--warm-up", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0, help="send no more after so long")
    parser.add_argument("--request-file", type=Path, action="append", default=[], help="the bytes of one whole request")
    parser.add_argument("--path", default="/v1/namespaces/bench/topics/empty/publish")
    parser.add_argument("--header", action="append", default=[])
    parser.add_argument("--body-file", type=Path)
    parser.add_argument("--body-size", type=int, default=0, help="a body of so many zero bytes")
    args = parser.parse_args()
    body = args.body_file.read_bytes() if args.body_file else bytes(args.body_size)
    requests = [file.read_bytes() for file in args.request_file] or [post(args.path, body, args.header)] * len(
        args.port
    )
    targets = list(zip(args.port, requests, strict=True))
    signal.signal(signal.SIGTERM, lambda *_: setattr(_Told, "enough", True))
    measured = run(args.host, targets, args.connections, args.requests, warm_up=args.warm_up, seconds=args.seconds)
    json.dump(measured, sys.stdout)
    print()


if __name__ == "__main__":
    main()
