"""The Python client compared with raw requests of the same kind, in the same run, from threads, trio and asyncio.

    python -m bench.client [--rounds 5] [--messages 300000] [--calls 2000]

*Raw* is the client's own HTTP library sending a prepared request and discarding the response.
Prints a line for each measurement (median of the rounds, lowest and highest), then each target and its verdict.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import anyio
import httpcore2

from bench.daemon import daemon
from bench.rounds import Spread
from plainsong import AsyncClient, Client, calls
from plainsong.calls import Send
from plainsong.messages import Origin
from plainsong.protocol.requests import PollRequest, PublishRequest
from plainsong.transport.async_http import http_request

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from plainsong.calls import Call

PAYLOAD = b"x" * 100
PAGE = 10_000
Rates = dict[str, list[float]]


def raw_request(url: str, call: Call[Any]) -> httpcore2.Request:
    return http_request(Send(url, call.request, 5, 30), 30)


def publish_call(topic: str, messages: int) -> Call[Any]:
    return calls.publish("default", topic, PublishRequest([PAYLOAD] * messages))


def timed(count: int, work: Callable[[], object]) -> float:
    """Run ``work``; return ``count`` per second."""
    begun_s = time.perf_counter()
    work()
    return count / (time.perf_counter() - begun_s)


# --- from a thread -------------------------------------------------------------------------------


def repeat(times: int, work: Callable[[], object]) -> None:
    for _ in range(times):
        work()


def raw_ask(pool: httpcore2.ConnectionPool, request: httpcore2.Request) -> httpcore2.Response:
    response = pool.handle_request(request)
    response.read()
    response.close()
    return response


def gathered(client: Client, topic: str, messages: int, linger_ms: float) -> None:
    with client.publisher(topic, linger_ms=linger_ms) as publisher:
        send = publisher.send
        for _ in range(messages):
            send(PAYLOAD)


def read_raw(pool: httpcore2.ConnectionPool, url: str, topic: str) -> None:
    start: bytes | None = None
    while True:
        request = PollRequest(start, start is None, PAGE)
        response = raw_ask(pool, raw_request(url, calls.poll("default", Origin(topic), request)))
        headers = {name.lower(): value for name, value in response.headers}
        if headers[b"plainsong-end"] == b"end":
            return
        start = bytes.fromhex(headers[b"plainsong-last-id"].decode())


def read_all(client: Client, topic: str, messages: int, *, follow: bool) -> None:
    for message in client.read(topic, follow=follow, limit=messages, page_messages=PAGE):
        message.payload  # noqa: B018 - the least that a loop does


def from_a_thread(url: str, topic: str, args: argparse.Namespace, rates: Rates) -> None:
    with Client(url) as client, httpcore2.ConnectionPool() as pool:
        one = raw_request(url, publish_call(topic, 1))
        many = raw_request(url, publish_call(topic, PAGE))
        for name, count, work in (
            ("one at a time, raw", args.calls, lambda: repeat(args.calls, partial(raw_ask, pool, one))),
            ("one at a time, client", args.calls, lambda: repeat(args.calls, lambda: client.publish(topic, PAYLOAD))),
            (
                "10 000 a request, raw",
                args.messages,
                lambda: repeat(args.messages // PAGE, partial(raw_ask, pool, many)),
            ),
            ("gathered, linger 0", args.messages, lambda: gathered(client, topic, args.messages, 0)),
            ("gathered, linger 5 ms", args.messages, lambda: gathered(client, topic, args.messages, 5)),
            ("pages, raw", args.messages, lambda: read_raw(pool, url, "read")),
            ("read", args.messages, lambda: read_all(client, "read", args.messages, follow=False)),
            ("read, following", args.messages, lambda: read_all(client, "read", args.messages, follow=True)),
        ):
            rates.setdefault(f"thread: {name}", []).append(timed(count, work))


# --- from an event loop --------------------------------------------------------------------------


async def timed_async(count: int, work: Callable[[], Awaitable[object]]) -> float:
    begun_s = time.perf_counter()
    await work()
    return count / (time.perf_counter() - begun_s)


async def from_a_loop(loop: str, url: str, topic: str, args: argparse.Namespace, rates: Rates) -> None:
    async with AsyncClient(url) as client, httpcore2.AsyncConnectionPool() as pool:
        one = raw_request(url, publish_call(topic, 1))

        async def raw() -> None:
            for _ in range(args.calls):
                response = await pool.handle_async_request(one)
                await response.aread()
                await response.aclose()

        async def one_at_a_time() -> None:
            for _ in range(args.calls):
                await client.publish(topic, PAYLOAD)

        async def gather(linger_ms: float) -> None:
            async with client.publisher(topic, linger_ms=linger_ms) as publisher:
                for _ in range(args.messages):
                    await publisher.send(PAYLOAD)

        async def read() -> None:
            async for message in client.read("read", limit=args.messages, page_messages=PAGE):
                message.payload  # noqa: B018

        for name, count, work in (
            ("one at a time, raw", args.calls, raw),
            ("one at a time, client", args.calls, one_at_a_time),
            ("gathered, linger 0", args.messages, partial(gather, 0)),
            ("gathered, linger 5 ms", args.messages, partial(gather, 5)),
            ("read", args.messages, read),
        ):
            rates.setdefault(f"{loop}: {name}", []).append(await timed_async(count, work))


def verdicts(rates: Rates) -> list[tuple[str, float, float]]:
    """Return the targets: name, measured value, minimum."""
    found = []
    for side in ("thread", "asyncio", "trio"):
        cost = Spread.ratio(rates[f"{side}: one at a time, client"], rates[f"{side}: one at a time, raw"])
        found.append((f"{side}: a call's rate over the raw request's", cost.median, 1 / 1.3))
        found.append((f"{side}: gathered messages/s", Spread.of(rates[f"{side}: gathered, linger 0"]).median, 100_000))
        found.append((f"{side}: read messages/s", Spread.of(rates[f"{side}: read"]).median, 500_000))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=300_000)
    parser.add_argument("--calls", type=int, default=2_000)
    args = parser.parse_args()
    rates: Rates = {}
    with TemporaryDirectory(prefix="client-") as scratch, daemon(Path(scratch) / "data") as running:
        url = f"http://127.0.0.1:{running.port}"
        with Client(url) as client:
            client.create_topic("read")
            gathered(client, "read", args.messages, 0)
            for n in range(args.rounds):
                topic = client.create_topic(f"written-{n}").name
                from_a_thread(url, topic, args, rates)
                for loop in ("asyncio", "trio"):
                    anyio.run(from_a_loop, loop, url, topic, args, rates, backend=loop)
                client.admin.delete_topic(topic)
    for name, values in rates.items():
        spread = Spread.of(values)
        print(f"{name:36} {spread.median:12,.0f} /s   ({spread.low:,.0f} to {spread.high:,.0f})")
    print()
    for name, reached, least in verdicts(rates):
        print(f"{'reached' if reached >= least else 'MISSED ':8} {name:44} {reached:12,.2f}   at least {least:,.2f}")


if __name__ == "__main__":
    main()
