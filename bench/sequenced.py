"""A load generator for producers: requests with growing sequence ids, over persistent connections, one at a time each.

    python -m bench.sequenced --port 7420 --topic t --connections 16 --messages 1 --seconds 0.6 --first 20000000000

Each connection has its own producers, ``--producers`` of them in all (0: none, the same requests without one). The
differing part of each request is built before the first is sent: encoded sequence ids have equal length. It runs as its
own process, and prints one JSON object: ``requests``, ``seconds``, ``requests_per_s``, ``received_bytes``. It ends
after ``--requests`` or ``--seconds``, whichever comes first.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench import bodies
from bench.load import RECEIVE_BYTES, Answers, post
from plainsong.protocol.codec import AVRO_2
from plainsong.protocol.requests import PublishRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

#: From here up to 128 times this value an encoded sequence id takes six bytes.
FIRST_ID = 1 << 34
SIZE = 100


@dataclass(slots=True)
class Kind:
    """Requests of one producer, or without one: only the end differs between them."""

    name: str | None
    messages: int
    atomic: bool
    beginning: bytes = b""
    tail: int = 0
    """Length of the part, at the end, that contains the sequence ids."""

    def __post_init__(self) -> None:
        whole = self._encode(bodies.payloads(self.messages, SIZE), FIRST_ID)
        bare = self._encode([], FIRST_ID)
        pairs = zip(reversed(whole), reversed(bare), strict=False)
        self.tail = next((at for at, (one, other) in enumerate(pairs) if one != other), len(bare))
        head = [f"Content-Type: {AVRO_2.content_type}"]
        self.beginning = post(bodies.path("{topic}", "publish"), whole, head)[: -self.tail]

    def _encode(self, messages: list[bytes], first: int) -> bytes:
        ids = None if self.name is None else range(first, first + self.messages)
        return AVRO_2.encode_publish(PublishRequest(messages, producer=self.name, sequence_ids=ids, atomic=self.atomic))

    def end(self, first: int) -> bytes:
        """Return the end of the request whose first message has this sequence id."""
        return self._encode([], first)[-self.tail :]


class Connection:
    """One persistent connection and its requests."""

    def __init__(self, port: int, topic: str, kinds: list[Kind], requests: int, first: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.answers = Answers(self.sock)
        self.requests = self._made(topic, kinds, requests, first)

    @staticmethod
    def _made(topic: str, kinds: list[Kind], requests: int, first: int) -> Iterator[tuple[bytes, bytes]]:
        beginnings = [kind.beginning.replace(b"{topic}", topic.encode(), 1) for kind in kinds]
        made = []
        for number in range(requests):
            round_number, at = divmod(number, len(kinds))
            made.append((beginnings[at], kinds[at].end(first + round_number * kinds[at].messages)))
        return iter(made)

    def send_next(self) -> bool:
        """Send the next request; return False if there is none."""
        request = next(self.requests, None)
        if request is None:
            return False
        sent = self.sock.sendmsg(request)
        whole = len(request[0]) + len(request[1])
        if sent < whole:
            self.sock.sendall(b"".join(request)[sent:])
        return True


def run(connections: list[Connection], seconds: float) -> dict[str, float]:
    """Send until no requests remain or the time is over (0: no limit)."""
    poll = select.epoll()
    by_fd = {each.sock.fileno(): each for each in connections}
    for fd in by_fd:
        poll.register(fd, select.EPOLLIN)
    begun = time.perf_counter()
    until_s = begun + seconds if seconds else float("inf")
    outstanding = sum(each.send_next() for each in connections)
    requests = received = 0
    while outstanding:
        for fd, _ in poll.poll():
            connection = by_fd[fd]
            answer = connection.answers.take(connection.sock.recv(RECEIVE_BYTES))
            if answer is None:
                continue
            if answer[0] != 200:
                raise RuntimeError(f"a publish was answered {answer[0]}")
            requests += 1
            received += answer[1]
            if time.perf_counter() >= until_s or not connection.send_next():
                outstanding -= 1
    took = time.perf_counter() - begun
    return {"requests": requests, "seconds": took, "requests_per_s": requests / took, "received_bytes": received}


def main() -> None:
    parser = argparse.ArgumentParser(description="Publishes with growing sequence ids; prints one JSON object.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--topic", default="t")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--producers", type=int, default=16, help="of all connections together; 0: none")
    parser.add_argument("--messages", type=int, default=1, help="in a request")
    parser.add_argument("--atomic", action="store_true")
    parser.add_argument("--requests", type=int, default=10_000, help="of all connections together")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--first", type=int, default=FIRST_ID, help="the first sequence id")
    args = parser.parse_args()
    each, producers = args.requests // args.connections, args.producers // args.connections
    connections = []
    for number in range(args.connections):
        names = [f"p{number}-{other}" for other in range(producers)] if producers else [None]
        kinds = [Kind(name, args.messages, args.atomic) for name in names]
        connections.append(Connection(args.port, args.topic, kinds, each, args.first))
    json.dump(run(connections, args.seconds), sys.stdout)
    print()


if __name__ == "__main__":
    main()
