"""One persistent connection on a raw socket, one request at a time: the minimal client."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

from bench.load import Answers, post

if TYPE_CHECKING:
    from types import TracebackType

JSON_TYPE = "Content-Type: application/json"


class Wire:
    """A connection to the daemon; a context manager."""

    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = Answers(self._sock)

    def __enter__(self) -> Wire:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sock.close()

    def send(self, request: bytes) -> tuple[bytes, bytes]:
        """Send a request; return head and body of its response, not chunked. Raises RuntimeError if the status is not
        200.
        """
        self._sock.sendall(request)
        received = b""
        taken = None
        while taken is None:
            data = self._sock.recv(1 << 20)
            received += data
            taken = self._answers.take(data)
        head, _, body = received.partition(b"\r\n\r\n")
        if taken[0] != 200:
            raise RuntimeError(f"{taken[0]}: {body.decode(errors='replace')[:500]}")
        return head, body

    def ask(self, path: str, body: object = None) -> Any:
        """Post JSON; return the response's JSON, None if it is empty."""
        content = b"" if body is None else json.dumps(body).encode()
        answer = self.send(post(path, content, [JSON_TYPE]))[1]
        return json.loads(answer) if answer else None


def begin(wire: Wire, kind: str = "short", client: str = "bench") -> int:
    """Begin a transaction; return its id, which is also its write pointer."""
    return int(wire.ask("/v1/transactions", {"type": kind, "clientId": client})["id"])


def decide(wire: Wire, transaction_id: int, verb: str) -> None:
    """Commit, abort or invalidate a transaction."""
    wire.ask(f"/v1/transactions/{transaction_id}/{verb}")
