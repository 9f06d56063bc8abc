"""The second copy: the rate in each mode compared with no copy, and the unavailability during a take-over.

All of it takes about seven minutes: ``nice -n -19 python -m bench copied``. The object store is a real S3 server,
versitygw, on the same machine; a proxy in front of it adds a latency to each answer.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import trio

from bench import bodies
from bench.daemon import daemon
from bench.generator import run_everywhere, run_load
from bench.rounds import Row, Section, Spread, in_turns
from bench.servers import server
from tests.ports import free_ports
from tests.storage.replication.s3_server import BUCKET, s3_program, s3_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from multiprocessing.connection import Connection
    from pathlib import Path

    from bench.daemon import Daemon
    from bench.profiles import Profile

SAYS = """Single publishes of 100 B a second, each acknowledged after it was synced: *none* without a second copy, *async*
and *sync* with one in an S3 server on the same machine. *Put ms* is a latency that is added to each of its answers. The
daemons of a row are measured in turn. *p50* and *p99* are the waits of *sync* in ms. A *take-over* kills the primary; a
*switch* hands over. *Silent s* is the time until a client that knows both URLs publishes again."""

TOPIC = "copied"
MODES = ("none", "async", "sync")
MESSAGE_BYTES = 100
#: Longer than any interruption in a valid run.
PATIENCE_S = 180.0
_RETRY_S = 0.02
#: Topics that one load generator fills.
_FILLED_AT_ONCE = 100


def measure_copied(profile: Profile, scratch: Path, say: Callable[[str], None]) -> Section:
    """Measure each latency with each number of connections, then a take-over and a switch."""
    section = Section("copied", "Second copy", SAYS)
    if s3_program() is None:
        say("copied: skipped, versitygw is not installed (etc/tools fetches it)")
        return section
    for put_ms in profile.put_ms:
        home = (scratch / f"put-{put_ms}").resolve()
        home.mkdir()
        with s3_server(home) as direct, _delayed(direct, put_ms) as environ, ExitStack() as daemons:
            ours = {mode: daemons.enter_context(_daemon(home, mode, environ)) for mode in MODES}
            for running in ours.values():
                running.create(TOPIC)
            for connections in profile.copied_connections:
                row = _Cell(profile, connections).measure(ours)
                section.rows.append(Row({"what": "single", "put ms": put_ms, "connections": connections}, row))
                shown = "  ".join(f"{name} {value.median:,.2f}" for name, value in row.items())
                say(f"copied, {put_ms} ms, {connections} connections: {shown}")
    for what in ("take-over", "switch"):
        home = (scratch / what).resolve()
        home.mkdir()
        with s3_server(home) as environ:
            values = _change_hands(profile, home, environ, what, say)
        section.rows.append(Row({"what": what, "messages": profile.taken_over[0]}, values))
        say(f"copied, {what}: " + "  ".join(f"{name} {value.median:.2f}" for name, value in values.items()))
    return section


@contextmanager
def _daemon(home: Path, mode: str, environ: Mapping[str, str]) -> Iterator[Daemon]:
    """Run a daemon; if it has a second copy, yield once all its commits can be restored from the copy."""
    settings = {} if mode == "none" else {"replication_to": f"s3://{BUCKET}/{mode}", "replication_mode": mode}
    with daemon(home / mode, ("broker",), environ, **settings) as running:
        if settings:
            _wait("every commit counts", lambda: _all_counts(running))
        yield running


class _Cell:
    """Measures the rates with one number of connections."""

    def __init__(self, profile: Profile, connections: int) -> None:
        self._profile, self._connections = profile, connections
        self._request = bodies.publish(TOPIC, 1, MESSAGE_BYTES)
        self._waits_ms: dict[str, list[float]] = {"p50 ms": [], "p99 ms": []}

    def measure(self, ours: Mapping[str, Daemon]) -> dict[str, Spread]:
        sides = {mode: partial(self._rate, running, mode) for mode, running in ours.items()}
        found = in_turns(sides, self._profile.rounds)
        values = {mode: Spread.of(rates) for mode, rates in found.items()}
        for mode in MODES[1:]:
            values[f"{mode} ÷ none"] = Spread.ratio(found[mode], found["none"])
        return values | {name: Spread.of(waits) for name, waits in self._waits_ms.items()}

    def _rate(self, running: Daemon, mode: str) -> float:
        result = run_load(running.port, self._connections, self._request, self._profile.copied_s)
        if mode == "sync":
            self._waits_ms["p50 ms"].append(result["p50_ms"])
            self._waits_ms["p99 ms"].append(result["p99_ms"])
        return float(result["requests_per_s"])


# --- slower object stores ------------------------------------------------------------------------------


@contextmanager
def _delayed(environ: Mapping[str, str], delay_ms: int) -> Iterator[Mapping[str, str]]:
    """Yield an environment in which requests go through a proxy with this delay; unchanged if it is 0."""
    if not delay_ms:
        yield environ
        return
    port = urlsplit(environ["AWS_ENDPOINT"]).port or 80
    with server(partial(serve_delayed, port, delay_ms / 1000)) as proxy:
        yield {**environ, "AWS_ENDPOINT": f"http://127.0.0.1:{proxy.port}"}


def serve_delayed(target: int, delay_s: float, reports: Connection) -> None:
    """Forward connections to a port, and delay each answer by ``delay_s``; send the port that it listens on."""

    async def forward(client: trio.SocketStream) -> None:
        try:
            async with (
                client,
                await trio.open_tcp_stream("127.0.0.1", target) as upstream,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(_pass_later, upstream, client, delay_s)
                async for data in client:
                    await upstream.send_all(data)
                nursery.cancel_scope.cancel()
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    async def main() -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        reports.send(listener.socket.getsockname()[1])
        await trio.serve_listeners(forward, [listener])

    trio.run(main)


async def _pass_later(source: trio.SocketStream, sink: trio.SocketStream, delay_s: float) -> None:
    send, receive = trio.open_memory_channel[tuple[float, bytes | bytearray]](1024)

    async def read() -> None:
        async with send:
            async for data in source:
                await send.send((trio.current_time() + delay_s, data))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        async for due_s, data in receive:
            await trio.sleep_until(due_s)
            await sink.send_all(data)


# --- take-over ------------------------------------------------------------------------------------------


def _change_hands(
    profile: Profile, home: Path, environ: Mapping[str, str], what: str, say: Callable[[str], None]
) -> dict[str, Spread]:
    """Fill a primary, let a standby follow it, and measure the interruption while the standby becomes the primary."""
    messages, topics = profile.taken_over
    settings = {
        "replication_to": f"s3://{BUCKET}/{what}",
        "replication_standby": "allowed",
        "replication_lease_s": profile.lease_s,
    }
    first_port, second_port = free_ports(2)
    with daemon(home / "first", ("broker",), environ, first_port, **settings) as first:
        for number in range(topics):
            first.create(f"{TOPIC}-{number}")
        _fill(first, messages, topics)
        _wait("every commit counts", lambda: _all_counts(first))
        second_settings = {**settings, "replication_role": "standby"}
        with daemon(home / "second", ("broker",), environ, second_port, **second_settings) as second:
            _wait("the standby follows", lambda: _copy(second)["countedCommit"] == _copy(first)["lastCommit"])
            _wait("the primary has noticed it", lambda: bool(_copy(first)["automatic"]))
            say(f"copied, {what}: {messages:,} messages, {topics:,} topics")
            begun_s = time.monotonic()
            if what == "switch":
                first.ask("POST", "/v1/replication/switch")
            else:
                first.process.kill()
            silent_s = _silence((first_port, second_port), begun_s)
    values = {"silent s": Spread.of([silent_s])}
    if what == "take-over":
        values["after the lease s"] = Spread.of([max(0.0, silent_s - profile.lease_s)])
    return values


def _fill(running: Daemon, messages: int, topics: int) -> None:
    requests = [bodies.publish(f"{TOPIC}-{number}", messages // topics, MESSAGE_BYTES) for number in range(topics)]
    for at in range(0, topics, _FILLED_AT_ONCE):
        some = requests[at : at + _FILLED_AT_ONCE]
        run_everywhere(running.port, 1, some, number=len(some))


def _silence(ports: tuple[int, int], begun_s: float) -> float:
    """Publish to both addresses in turn until a daemon accepts; return the seconds until then."""
    request = bodies.publish(f"{TOPIC}-0", 1, MESSAGE_BYTES)
    while time.monotonic() - begun_s < PATIENCE_S:
        for port in ports:
            if _status(port, request) == 200:
                return time.monotonic() - begun_s
        time.sleep(_RETRY_S)
    raise TimeoutError("no daemon has taken over")


def _status(port: int, request: bytes) -> int:
    head, _, body = request.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("POST", first.split()[1], body, headers)
        return connection.getresponse().status
    except (OSError, HTTPException):
        return 0
    finally:
        connection.close()


def _copy(running: Daemon) -> dict[str, object]:
    found: dict[str, object] = json.loads(running.ask("GET", "/v1/replication"))
    return found


def _all_counts(running: Daemon) -> bool:
    found = _copy(running)
    return found["countedCommit"] == found["lastCommit"]


def _wait(what: str, holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > until_s:
            raise TimeoutError(f"not within {PATIENCE_S} s: {what}")
        time.sleep(_RETRY_S)
