"""How long topics are silent for their clients when their owner leaves or dies.

One client a topic, connected to an instance that stays. When the owner is told to go each client publishes, again and
again until an answer comes from the instance that stays itself (one that was forwarded names its owner). A topic's
silence is from the first request that the old owner did not answer to the first one that the new owner did.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import trio

from bench import bodies

if TYPE_CHECKING:
    from collections.abc import Callable

_RETRY_S = 0.02
_FORWARDED = b"\r\nplainsong-owner:"
#: Nobody is silent for longer in a run that makes sense.
PATIENCE_S = 120.0


def silences(port: int, topics: list[str], end_owner: Callable[[], None]) -> list[float]:
    """Seconds of silence of each topic, shortest first, when ``end_owner`` is called. Raises trio.TooSlowError."""
    return sorted(trio.run(_silences, port, topics, end_owner))


async def _silences(port: int, topics: list[str], end_owner: Callable[[], None]) -> list[float]:
    found: list[float] = []
    streams = [await trio.open_tcp_stream("127.0.0.1", port) for _ in topics]
    ended = trio.Event()

    async def ask(stream: trio.SocketStream, topic: str) -> None:
        request = bodies.publish(topic, 1, 100)
        await ended.wait()
        silent_since_s = perf_counter()
        while True:
            head = await _ask(stream, request)
            if head.startswith(b"HTTP/1.1 200") and _FORWARDED not in head.lower():
                found.append(perf_counter() - silent_since_s)
                return
            if head.startswith(b"HTTP/1.1 200"):
                silent_since_s = perf_counter()
            else:
                await trio.sleep(_RETRY_S)

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for stream, topic in zip(streams, topics, strict=True):
                nursery.start_soon(ask, stream, topic)
            end_owner()
            ended.set()
    for stream in streams:
        await trio.aclose_forcefully(stream)
    return found


async def _ask(stream: trio.SocketStream, request: bytes) -> bytes:
    """The head of the answer; its body is short."""
    await stream.send_all(request)
    received = b""
    while b"\r\n\r\n" not in received:
        received += await _some(stream)
    head, _, body = received.partition(b"\r\n\r\n")
    at = head.lower().find(b"content-length:")
    size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
    while len(body) < size:
        body += await _some(stream)
    return head


async def _some(stream: trio.SocketStream) -> bytes:
    received = await stream.receive_some(1 << 16)
    if not received:
        raise RuntimeError("the instance that stays closed a connection")
    return bytes(received)
