"""Measures how long topics are unavailable when their owner leaves or dies.

There is one client per topic, connected to the remaining instance. When its topic is released, it publishes repeatedly
until that instance answers without forwarding (a forwarded response names the owner); the time until then is the
topic's *silence*. The client detects the release by a long poll at the leaving owner, which ends with the release. So
detection is not delayed by a polling interval, and the clients cause no load before. A dying owner releases all topics
at once.
"""

from __future__ import annotations

from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING

import trio

from bench import bodies

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.daemon import Daemon

_RETRY_S = 0.02
_FORWARDED = b"\r\nplainsong-owner:"
#: Longer than any silence in a valid run.
PATIENCE_S = 120.0
#: How long a poll waits while its topic is not released; longer than any hand-over.
HELD_MS = 60_000


class _Closed(RuntimeError):
    """The instance closed the connection; if it is the remaining instance, the run fails."""


def silences(
    port: int, topics: list[str], end_owner: Callable[[], None], *, leaving: Daemon | None = None
) -> list[float]:
    """Call ``end_owner``; return each topic's silence in seconds, shortest first. Raises trio.TooSlowError.

    Args:
      port: the port of the remaining instance.
      leaving: the owner, if it releases its topics; None if it dies.
    """
    return sorted(trio.run(_silences, port, topics, end_owner, leaving))


async def _silences(port: int, topics: list[str], end_owner: Callable[[], None], leaving: Daemon | None) -> list[float]:
    found: list[float] = []
    streams = [await trio.open_tcp_stream("127.0.0.1", port) for _ in topics]
    polls = [] if leaving is None else [await trio.open_tcp_stream("127.0.0.1", leaving.port) for _ in topics]
    ended = trio.Event()

    async def ask(stream: trio.SocketStream, poll: trio.SocketStream | None, topic: str) -> None:
        request = bodies.publish(topic, 1, 100)
        if poll is None:
            await ended.wait()
        else:
            with suppress(_Closed):  # the owner ended before all its polls were answered
                await _ask(poll, bodies.held_poll(topic, HELD_MS))
        begun_s = perf_counter()
        while True:
            head = await _ask(stream, request)
            if head.startswith(b"HTTP/1.1 200") and _FORWARDED not in head.lower():
                found.append(perf_counter() - begun_s)
                return
            await trio.sleep(_RETRY_S)

    waiting: Sequence[trio.SocketStream | None] = polls or [None] * len(topics)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for stream, poll, topic in zip(streams, waiting, topics, strict=True):
                nursery.start_soon(ask, stream, poll, topic)
            if leaving is not None:
                await _all_held(leaving, len(topics))
            end_owner()
            ended.set()
    for stream in (*streams, *polls):
        await trio.aclose_forcefully(stream)
    return found


async def _all_held(leaving: Daemon, polls: int) -> None:
    while await trio.to_thread.run_sync(leaving.metric, "plainsong_parked_polls") < polls:  # noqa: ASYNC110 - it sends no notification
        await trio.sleep(_RETRY_S)


async def _ask(stream: trio.SocketStream, request: bytes) -> bytes:
    """Send the request, read the short response, and return its head."""
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
        raise _Closed("an instance closed a connection")
    return bytes(received)
