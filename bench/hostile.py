"""Publish latencies of ordinary clients while hostile or merely unusual ones are active.

The hostile clients run in their own process, ``python -m bench.hostile KIND PORT COUNT``, to keep them out of the
measuring process.
"""

from __future__ import annotations

import gzip
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from bench import bodies
from bench.daemon import Daemon, daemon
from bench.generator import run_everywhere, run_load
from bench.load import post
from bench.raw import TOPIC
from bench.rounds import Row, Section, Spread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from bench.profiles import Profile

    Once = Callable[[int, Callable[[], object]], Awaitable[None]]

CONNECTIONS = 16
SIZE = 100
#: Fraction of the highest rate, low enough that waits are due to the daemon and not to queueing.
SHARE = 0.25
MIB = 1 << 20
LARGE = "large"
#: Messages in the topic whose pages are requested and never read.
LARGE_MESSAGES = 64
ROOT = Path(__file__).parents[1]
SAYS = """Waits of single durable publishes of 100 B over 16 connections in an open loop, at a quarter of the rate of a
closed one, during attacks; *quiet* is the same daemon before and after. *announced*: connections that announce a body
of 64 MiB and send one byte. *unread*: connections that request pages of 16 MiB and do not read them. *chunks*: repeated
bodies of two megabytes in chunks of one byte. *members*: bodies of 4 MB of empty gzip members. *bombs*: bodies of 64
KiB that decompress to 64 MiB."""


async def announced(port: int, sent: Callable[[], object]) -> None:
    """Announce a large body, send one byte of it, and wait for the refusal."""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    async with stream:
        head = post(bodies.path(TOPIC, "publish"), b"", [bodies.AVRO_TYPE])
        await stream.send_all(head.replace(b"Content-Length: 0", b"Content-Length: 67108864") + b"x")
        sent()
        await stream.receive_some(1 << 16)


async def unread(port: int, sent: Callable[[], object]) -> None:
    """Request large pages and read nothing until the connection is cut."""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(bodies.held_poll(LARGE, 0) * 3)
        sent()
        await trio.sleep_forever()


def _again(body: bytes, *headers: str) -> Once:
    async def send(port: int, sent: Callable[[], object]) -> None:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            request = post(
                bodies.path(TOPIC, "publish"), b"" if headers[0].startswith("Transfer") else body, [*headers]
            )
            if headers[0].startswith("Transfer"):
                request = request.replace(b"Content-Length: 0\r\n", b"") + body
            await stream.send_all(request)
            sent()
            await stream.receive_some(1 << 16)

    return send


def kinds() -> dict[str, Once]:
    """Return the client kinds: a function that does its work once, on one connection."""
    packed = gzip.compress(b"", mtime=0)
    return {
        "announced": announced,
        "unread": unread,
        "chunks": _again(b"1\r\nx\r\n" * (2 * MIB // 6) + b"0\r\n\r\n", "Transfer-Encoding: chunked", bodies.AVRO_TYPE),
        "members": _again(packed * (4_000_000 // len(packed)), "Content-Encoding: gzip", bodies.AVRO_TYPE),
        "bombs": _again(gzip.compress(bytes(64 * MIB)), "Content-Encoding: gzip", bodies.AVRO_TYPE),
    }


#: Connections per kind.
COUNTS = {"announced": 1000, "unread": 100, "chunks": 4, "members": 4, "bombs": 4}


async def _torment(port: int, count: int, once: Once) -> None:
    all_sent = trio.Event()
    sent: set[int] = set()

    async def again(number: int) -> None:
        def has_sent() -> None:
            sent.add(number)
            if len(sent) == count:
                all_sent.set()

        while True:
            try:
                await once(port, has_sent)
            except (OSError, trio.BrokenResourceError):
                await trio.sleep(0.1)

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(again, number)
        await all_sent.wait()
        print("ready", flush=True)


@contextmanager
def tormented(kind: str, port: int) -> Iterator[None]:
    """Run hostile clients of this kind in the block."""
    command = [sys.executable, "-m", "bench.hostile", kind, str(port), str(COUNTS[kind])]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None  # it was started with a pipe
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.communicate()


def measure_hostile(profile: Profile, scratch: Path, say: Callable[[str], None]) -> Section:
    """Measure a row for each kind of client."""
    section = Section("hostile", "Beside hostile clients", SAYS)
    with daemon(scratch / "hostile") as ours:
        ours.create(TOPIC)
        ours.create(LARGE)
        for _ in range(LARGE_MESSAGES):
            ours.ask("POST", bodies.path(LARGE, "publish"), {"messages": ["x" * (MIB - 1000)]})
        rate = (
            SHARE * run_load(ours.port, CONNECTIONS, bodies.publish(TOPIC, 1, SIZE), profile.seconds)["requests_per_s"]
        )
        for kind in COUNTS:
            row = _measured(ours, kind, rate, profile)
            section.rows.append(row)
            values = row.values
            say(
                f"beside {row.what['connections']} {kind}: p99 {values['p99 ms'].median:.2f} ms, "
                f"quiet {values['quiet p99 ms'].median:.2f} ms"
            )
    return section


def _measured(ours: Daemon, kind: str, rate: float, profile: Profile) -> Row:
    quiet, beside = [], []
    seconds = max(profile.seconds, profile.quiet_s)
    requests = [bodies.publish(TOPIC, 1, SIZE)]
    for _ in range(profile.rounds):
        quiet.append(run_everywhere(ours.port, CONNECTIONS, requests, seconds, rate=rate))
        with tormented(kind, ours.port):
            beside.append(run_everywhere(ours.port, CONNECTIONS, requests, seconds, rate=rate))
    values = {
        f"{where}{percentile} ms": Spread.of([each[f"{key}_ms"] for each in results])
        for where, results in (("quiet ", quiet), ("", beside))
        for percentile, key in (("p50", "p50"), ("p99", "p99"), ("max", "max"))
    }
    values["÷ quiet p99"] = Spread.ratio([each["p99_ms"] for each in beside], [each["p99_ms"] for each in quiet])
    values["rate"] = Spread.of([rate])
    return Row({"clients": kind, "connections": COUNTS[kind]}, values)


def main() -> None:
    """Run the hostile clients' process."""
    kind, port, count = sys.argv[1:]
    trio.run(_torment, int(port), int(count), kinds()[kind])


if __name__ == "__main__":
    main()
