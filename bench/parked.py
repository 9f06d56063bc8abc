"""Parked long polls, and how soon a publish wakes them; its own process, on raw sockets.

    python -m bench.parked --port 7420 --path /v1/namespaces/bench/topics/t --polls 1000 --wakes 10
    python -m bench.parked --port 7420 --path /v1/namespaces/bench/topics/t --polls 1000 --hold

Prints one JSON object: ``p50_ms``, ``p99_ms`` and ``max_ms`` from the publish's response to a poll's, over all polls
and wakes, and ``all_ms``, the median time until the last poll was answered. With ``--hold`` it publishes nothing more,
prints ``parked`` and keeps the polls waiting until its standard input ends.
"""

from __future__ import annotations

import argparse
import json
import re
import select
import socket
import sys
import time
from statistics import median

from bench.load import Answers, post

#: The longest wait that docs/http.md allows.
WAIT_MS = 60_000
_JSON = "Content-Type: application/json"
_PARKED = re.compile(rb"^plainsong_parked_polls ([0-9.e+]+)$", re.MULTILINE)


class Parked:
    """``polls`` connections that poll one topic, and one that publishes to it."""

    def __init__(self, port: int, path: str, polls: int) -> None:
        self._port = port
        self._path = path
        self._publisher = self._connect()
        self._pollers = [self._connect() for _ in range(polls)]
        self._by_fd = {sock.fileno(): Answers(sock) for sock in self._pollers}
        self._epoll = select.epoll()
        for sock in self._pollers:
            self._epoll.register(sock, select.EPOLLIN)

    def _connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self._port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def publish(self) -> tuple[str, float]:
        """Publish a message; return its id and the time at which the response was complete."""
        body = json.dumps({"messages": ["wake up"]}).encode()
        self._publisher.sendall(post(f"{self._path}/publish", body, [_JSON, "Prefer: return=representation"]))
        answer, whole = b"", Answers(self._publisher)
        taken = None
        while taken is None:
            data = self._publisher.recv(1 << 16)
            answer += data
            taken = whole.take(data)
        answered_s = time.perf_counter()
        if taken[0] != 200:
            raise RuntimeError(f"publish: {answer[:300]!r}")
        last_id: str = json.loads(answer.partition(b"\r\n\r\n")[2])["lastId"]
        return last_id, answered_s

    def park(self, last_id: str) -> None:
        """Poll on every connection for messages after ``last_id``; return when all polls are parked."""
        body = json.dumps({"startFrom": last_id, "inclusive": False, "waitMs": WAIT_MS}).encode()
        request = post(f"{self._path}/poll", body, [_JSON])
        for sock in self._pollers:
            sock.sendall(request)
        while self._waiting() < len(self._pollers):
            time.sleep(0.005)

    def wake(self) -> tuple[str, list[float]]:
        """Publish; return the message's id, and for each poll the seconds until its response."""
        last_id, published_s = self.publish()
        answered: list[float] = []
        while len(answered) < len(self._pollers):
            for fd, _ in self._epoll.poll():
                poll = self._by_fd[fd]
                taken = poll.take(poll.sock.recv(1 << 16))
                if taken is None:
                    continue
                answered.append(max(0.0, time.perf_counter() - published_s))
                if taken[0] != 200:
                    raise RuntimeError(f"a parked poll was answered {taken[0]}")
        return last_id, answered

    def _waiting(self) -> int:
        with self._connect() as sock:
            sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            parts = []
            while data := sock.recv(1 << 16):
                parts.append(data)
        found = _PARKED.search(b"".join(parts))
        return 0 if found is None else int(float(found.group(1)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Long polls that wait, and how soon a publish wakes them.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--polls", type=int, default=1000)
    parser.add_argument("--wakes", type=int, default=10)
    parser.add_argument("--hold", action="store_true")
    args = parser.parse_args()
    parked = Parked(args.port, args.path, args.polls)
    last_id, _ = parked.publish()
    if args.hold:
        parked.park(last_id)
        print("parked", flush=True)
        sys.stdin.read()
        return
    waits: list[float] = []
    lasts: list[float] = []
    for _ in range(args.wakes):
        parked.park(last_id)
        last_id, answered = parked.wake()
        waits += answered
        lasts.append(max(answered))
    waits.sort()
    found = {f"p{share}_ms": waits[len(waits) * share // 100] * 1e3 for share in (50, 99)}
    print(json.dumps({**found, "max_ms": waits[-1] * 1e3, "all_ms": median(lasts) * 1e3}))


if __name__ == "__main__":
    main()
