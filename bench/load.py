"""A load generator on raw sockets: fixed request bytes over persistent connections, one request at a time on each.

    python bench/load.py --port 7420 --connections 16 --requests 20000 --request-file request.bin
    python bench/load.py --port 7420 --connections 16 --requests 20000 --path /v1/... --body-size 100 --header 'Content-Type: …'

Several ``--port`` and ``--request-file`` options, in equal numbers, are assigned to the connections round-robin; with
``--everywhere`` each connection sends all requests in turn, to one port. It needs only the standard library, runs as its own process,
and prints one JSON object: ``requests``, ``seconds``, ``requests_per_s``, ``p50_ms``, ``p90_ms``, ``p99_ms``,
``p999_ms``, ``max_ms``, ``received_bytes``, ``statuses`` (with their counts), ``cpu_s`` (its own: near ``seconds``
means that the generator is the limit, not the server). It ends after ``--requests``, after ``--seconds``, or at
SIGTERM, whichever comes first.

``--rate`` makes the loop open: a request is due every ``1 / rate`` seconds, is sent by a free connection, or by the
first to become free, and its latency counts from the due time. A pause of a second then shows in all requests due in
that second, not only in the few in flight. The result also contains ``unsent`` (requests without a response ten seconds
after the end; their waits so far are included), and ``late_p99_ms`` and ``late_max_ms``: how late requests left
although a connection was free, which is the generator's own share of each latency.

Where there is a C compiler, ``bench/generator.py`` starts ``bench/loadgen`` instead, which takes the same options.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import select
import signal
import socket
import ssl
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

RECEIVE_BYTES = 1 << 20
#: Length of the response up to the end of the status code.
_STATUS_END = 12
#: Responses without a body, and so without a Content-Length.
_BODILESS = (b"204", b"304")


class Answers:
    """One connection: sends a request, and reports when its response is complete."""

    __slots__ = ("_need", "_parts", "_requests", "_size", "_tail", "sent_at", "sock")

    def __init__(self, sock: socket.socket, requests: Iterable[bytes] = ()) -> None:
        self.sock = sock
        self._requests = itertools.cycle(requests)
        self.sent_at = 0.0
        self._reset()

    def send(self, at_s: float) -> None:
        """Send the next request; its latency counts from ``at_s``."""
        self.sent_at = at_s
        self.sock.sendall(next(self._requests))

    def _reset(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        #: Bytes of the whole response; -1 if it is chunked, 0 while its head is incomplete.
        self._need = 0
        self._tail = b""

    def take(self, data: bytes) -> tuple[int, int] | None:
        """Return ``(status, bytes)`` if ``data`` completes the response, else None."""
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
        first = self._parts[0] if len(self._parts[0]) >= _STATUS_END else b"".join(self._parts)
        status, size = int(first[9:_STATUS_END]), self._size
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
            return end + 4 if data[9:_STATUS_END] in _BODILESS else -1
        return end + 4 + int(head[at + 17 : head.find(b"\r\n", at + 17)])


def received(sock: socket.socket) -> bytes:
    """Read available bytes; with TLS, all decrypted records, which epoll does not see."""
    data = sock.recv(RECEIVE_BYTES)
    while isinstance(sock, ssl.SSLSocket) and sock.pending():
        data += sock.recv(RECEIVE_BYTES)
    return data


@dataclass(slots=True)
class _Found:
    """Measurements of one run."""

    latencies: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    received: int = 0
    unsent: int = 0


def run(
    host: str,
    targets: Sequence[tuple[int, bytes]],
    connections: int,
    requests: int,
    *,
    warm_up: int = 0,
    seconds: float = 0,
    rate: float = 0,
    everywhere: bool = False,
    tls: ssl.SSLContext | None = None,
) -> dict[str, Any]:
    """Send ``requests`` requests over ``connections`` connections, after ``warm_up`` unmeasured ones.

    ``targets``: port and request, assigned to the connections round-robin, or (``everywhere``) all sent by each.
    ``seconds``: send no more after this time; 0: no limit. ``rate``: requests due per second, however long responses
    take; 0: each connection sends its next request when it has its response. ``tls``: the connections' context; None:
    plain TCP.
    """
    poll = select.epoll()
    by_fd: dict[int, Answers] = {}
    for number in range(connections):
        port, request = targets[number % len(targets)]
        shift = number % len(targets) if everywhere else 0
        mine = [each for _, each in (*targets[shift:], *targets[:shift])] if everywhere else [request]
        sock = socket.create_connection((host, port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            sock = tls.wrap_socket(sock, server_hostname=host)
        by_fd[sock.fileno()] = Answers(sock, mine)
        poll.register(sock, select.EPOLLIN)
    if warm_up:
        _drive(poll, by_fd, warm_up, math.inf)
    cpu = time.process_time()
    started = time.perf_counter()
    if rate:
        found = _drive_open(poll, by_fd, rate, seconds)
    else:
        found = _drive(poll, by_fd, requests, started + (seconds or math.inf))
    took = time.perf_counter() - started
    cpu = time.process_time() - cpu
    for connection in by_fd.values():
        connection.sock.close()
    poll.close()
    answered = sum(found.statuses.values())
    latencies = sorted(found.latencies)
    at = {f"p{name}_ms": latencies[int(len(latencies) * share)] * 1e3 for name, share in _SHARES}
    result = {
        "connections": connections,
        "requests": answered,
        "seconds": round(took, 4),
        "requests_per_s": round(answered / took, 1),
        **{name: round(value, 4) for name, value in at.items()},
        "max_ms": round(latencies[-1] * 1e3, 4),
        "received_bytes": found.received,
        "statuses": {str(status): count for status, count in sorted(found.statuses.items())},
        "cpu_s": round(cpu, 4),
    }
    if rate:
        late = sorted(found.late) or [0.0]
        result |= {"rate": rate, "unsent": found.unsent, "late_p99_ms": round(late[int(len(late) * 0.99)] * 1e3, 4)}
        result["late_max_ms"] = round(late[-1] * 1e3, 4)
    return result


_SHARES = (("50", 0.50), ("90", 0.90), ("99", 0.99), ("999", 0.999))
#: How long an open loop waits for answers after its last request was due.
_DRAIN_S = 10.0


class _Told:
    """``enough`` is set on SIGTERM: stop sending."""

    enough = False


def _drive(poll: select.epoll, by_fd: dict[int, Answers], requests: int, until_s: float) -> _Found:
    clock = time.perf_counter
    found = _Found()
    to_send = requests
    outstanding = 0
    for connection in by_fd.values():
        if to_send:
            to_send -= 1
            outstanding += 1
            connection.send(clock())
    while outstanding:
        for fd, _ in poll.poll():
            connection = by_fd[fd]
            answer = connection.take(received(connection.sock))
            if answer is None:
                continue
            now = clock()
            found.latencies.append(now - connection.sent_at)
            found.statuses[answer[0]] += 1
            found.received += answer[1]
            if to_send and now < until_s and not _Told.enough:
                to_send -= 1
                connection.send(now)
            else:
                outstanding -= 1
    return found


def _drive_open(poll: select.epoll, by_fd: dict[int, Answers], rate: float, seconds: float) -> _Found:
    clock = time.perf_counter
    found = _Found()
    idle = list(by_fd.values())
    busy: set[int] = set()
    start = free_since = clock()
    total = math.ceil(seconds * rate)
    arrivals = 0
    while True:
        now = clock()
        while idle and arrivals < total and (due := start + arrivals / rate) <= now and not _Told.enough:
            connection = idle.pop()
            busy.add(connection.sock.fileno())
            # It was due while a connection was free: the delay is the generator's own.
            if due >= free_since:
                found.late.append(now - due)
            connection.send(due)
            arrivals += 1
        over = _Told.enough or arrivals >= total
        if over and not busy:
            return found
        if now > start + seconds + _DRAIN_S:
            # The server cannot keep up: count the waits so far.
            waiting = [start + number / rate for number in range(arrivals, total)]
            waiting += [by_fd[fd].sent_at for fd in busy]
            found.latencies += [now - due for due in waiting]
            found.unsent = len(waiting)
            return found
        timeout = max(0.0, start + arrivals / rate - now) if idle and not over else _DRAIN_S
        for fd, _ in poll.poll(timeout):
            connection = by_fd[fd]
            answer = connection.take(received(connection.sock))
            if answer is None:
                continue
            now = clock()
            found.latencies.append(now - connection.sent_at)
            found.statuses[answer[0]] += 1
            found.received += answer[1]
            if not idle:
                free_since = now
            idle.append(connection)
            busy.discard(fd)


def post(path: str, body: bytes, headers: list[str]) -> bytes:
    """Return the bytes of a POST."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", *headers, f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def main() -> None:
    parser = argparse.ArgumentParser(description="Load over raw sockets; prints one JSON object.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True, action="append")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--warm-up", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0, help="stop sending after this many seconds")
    parser.add_argument("--rate", type=float, default=0, help="open loop: number of requests due in a second")
    parser.add_argument("--everywhere", action="store_true", help="each connection sends all requests in turn")
    parser.add_argument("--request-file", type=Path, action="append", default=[], help="the bytes of one whole request")
    parser.add_argument("--path", default="/v1/namespaces/bench/topics/empty/publish")
    parser.add_argument("--header", action="append", default=[])
    parser.add_argument("--body-file", type=Path)
    parser.add_argument("--body-size", type=int, default=0, help="a body of this many zero bytes")
    parser.add_argument(
        "--authority", type=Path, help="speak TLS: the file of the authority of the server's certificate"
    )
    args = parser.parse_args()
    body = args.body_file.read_bytes() if args.body_file else bytes(args.body_size)
    requests = [file.read_bytes() for file in args.request_file] or [post(args.path, body, args.header)]
    ports = args.port * len(requests) if args.everywhere else args.port
    targets = list(zip(ports, requests * len(ports) if len(requests) == 1 else requests, strict=True))
    signal.signal(signal.SIGTERM, lambda *_: setattr(_Told, "enough", True))
    measured = run(
        args.host,
        targets,
        args.connections,
        args.requests,
        warm_up=args.warm_up,
        seconds=args.seconds,
        rate=args.rate,
        everywhere=args.everywhere,
        tls=ssl.create_default_context(cafile=args.authority) if args.authority else None,
    )
    json.dump(measured, sys.stdout)
    print()


if __name__ == "__main__":
    main()
