"""Single publishes in a loop in one Python program: over a stream, as single requests, and 1000 per request."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import anyio

from bench import bodies
from bench.daemon import daemon
from bench.rounds import Row, Section, Spread, in_turns
from plainsong import AsyncClient, Client

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.daemon import Daemon
    from bench.profiles import Profile

SAYS = """Messages of 100 B a second from one Python program, each acknowledged after it was synced. *Stream*: a loop of
single publishes over one WebSocket, from a thread (with an event loop in another thread) and on asyncio. *Singles*: one
HTTP request each, one after the other. *Thousands*: requests of 1000. The last columns are the processor time of daemon
and client per message, in microseconds."""
SIZE = 100
#: Publishes between two checks of the time.
BLOCK = 1000


def measure_streaming(profile: Profile, scratch: Path, say: Callable[[str], None]) -> Section:
    """Measure all sides in turn, against one daemon."""
    section = Section("stream", "Streams", SAYS)
    with (
        daemon(scratch / "stream") as ours,
        Client(f"http://127.0.0.1:{ours.port}", namespace=bodies.NAMESPACE) as client,
    ):
        sides = _Sides(ours, client, 3 * profile.seconds)
        rates = in_turns(
            {
                "stream": lambda: sides.rate("stream", sides.stream),
                "stream, asyncio": lambda: sides.rate("stream, asyncio", sides.stream_on_a_loop),
                "thousands": lambda: sides.rate("thousands", sides.thousands),
                "singles": lambda: sides.rate("singles", sides.singles),
            },
            profile.rounds,
        )
    for what, found in rates.items():
        values = {"messages/s": Spread.of(found)}
        for other in ("singles", "thousands"):
            values[f"÷ {other}"] = Spread.ratio(found, rates[other])
        values |= {name: Spread.of(costs) for name, costs in sides.costs[what].items()}
        section.rows.append(Row({"what": what}, values))
        say(f"stream, {what}: {values['messages/s'].median:,.0f}/s  ÷ singles {values['÷ singles'].median:.1f}")
    return section


class _Sides:
    """The ways to publish, each for a while and at least once, to a new topic each time."""

    def __init__(self, ours: Daemon, client: Client, seconds: float) -> None:
        self._ours = ours
        self._client = client
        self._seconds = seconds
        self._topics = 0
        (self._payload,) = bodies.payloads(1, SIZE)
        self.costs: dict[str, dict[str, list[float]]] = {}

    def rate(self, what: str, publish: Callable[[str, float], int]) -> float:
        """Return messages a second; record the processor time per message."""
        self._topics += 1
        topic = self._client.create_topic(f"t{self._topics}").name
        ours_s, mine_s, begun_s = self._ours.cpu_s(), time.process_time(), time.perf_counter()
        count = publish(topic, begun_s + self._seconds)
        took_s = time.perf_counter() - begun_s
        costs = self.costs.setdefault(what, {"daemon µs": [], "client µs": []})
        costs["daemon µs"].append((self._ours.cpu_s() - ours_s) / count * 1e6)
        costs["client µs"].append((time.process_time() - mine_s) / count * 1e6)
        stored = self._client.admin.stats(topic)["messages"]
        if stored != count:
            raise RuntimeError(f"{count} messages were acknowledged, {stored} are stored")
        self._client.admin.delete_topic(topic)
        return count / took_s

    def stream(self, topic: str, until_s: float) -> int:
        count, payload = 0, self._payload
        with self._client.stream(topic) as stream:
            publish = stream.publish
            while not count or time.perf_counter() < until_s:
                for _ in range(BLOCK):
                    publish(payload)
                count += BLOCK
        return count

    def stream_on_a_loop(self, topic: str, until_s: float) -> int:
        return anyio.run(self._stream_on_a_loop, topic, until_s)

    async def _stream_on_a_loop(self, topic: str, until_s: float) -> int:
        count, payload, url = 0, self._payload, f"http://127.0.0.1:{self._ours.port}"
        async with AsyncClient(url, namespace=bodies.NAMESPACE) as client, client.stream(topic) as stream:
            publish = stream.publish
            while not count or time.perf_counter() < until_s:
                for _ in range(BLOCK):
                    await publish(payload)
                count += BLOCK
        return count

    def thousands(self, topic: str, until_s: float) -> int:
        count, payloads = 0, bodies.payloads(BLOCK, SIZE)
        while not count or time.perf_counter() < until_s:
            self._client.publish(topic, payloads)
            count += BLOCK
        return count

    def singles(self, topic: str, until_s: float) -> int:
        count, payload = 0, self._payload
        while not count or time.perf_counter() < until_s:
            self._client.publish(topic, payload)
            count += 1
        return count
