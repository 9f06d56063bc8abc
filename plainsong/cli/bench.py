"""The verb `bench`: measures a daemon for a few seconds in a separate topic, which is deleted afterwards."""

from __future__ import annotations

import os
import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from plainsong.cli import output
from plainsong.cli.command import Verb, json_option
from plainsong.cli.connection import where_options
from plainsong.cli.options import Length
from plainsong.cli.output import echo_json, note
from plainsong.protocol.errors import PlainsongError

if TYPE_CHECKING:
    from collections.abc import Callable

    from plainsong import Client
    from plainsong.cli.connection import Where

#: The topic's ttl, so that its messages expire even if its deletion fails.
TTL_S = 3600
PAGE_MESSAGES = 10_000


@dataclass(slots=True)
class Measured:
    """Timings of one kind of call."""

    what: str
    messages: int = 0
    took_s: float = 0.0
    calls_s: list[float] = field(default_factory=list)
    """Duration of each call."""

    @property
    def per_second(self) -> float:
        """Messages per second."""
        return self.messages / self.took_s if self.took_s else 0.0

    def quantile_s(self, share: float) -> float:
        """The quantile of the durations, e.g. 0.99."""
        ordered = sorted(self.calls_s)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        numbers = {"p50Seconds": self.quantile_s(0.5), "p99Seconds": self.quantile_s(0.99)}
        rounded = {name: round(value, 6) for name, value in numbers.items()}
        return {"what": self.what, "messages": self.messages, "perSecond": round(self.per_second, 1), **rounded}


@click.command(
    cls=Verb,
    examples=["plainsong bench", "plainsong bench --time 10s --size 1000 --threads 16", "plainsong bench --json"],
)
@click.option(
    "--time",
    "each_ms",
    type=Length(0.001),
    default="2s",
    show_default=True,
    metavar="TIME",
    help="Duration of each part.",
)
@click.option("--size", type=click.IntRange(1, 1 << 20), default=100, show_default=True, help="Bytes per message.")
@click.option("--batch", type=click.IntRange(1, 10_000), default=1000, show_default=True, help="Messages per request.")
@click.option(
    "--threads", type=click.IntRange(1, 64), default=4, show_default=True, help="Threads that publish at once."
)
@json_option
@where_options
def bench(each_ms: int, size: int, batch: int, threads: int, as_json: bool, where: Where) -> None:
    """Measure a daemon: rates and latencies.

    Publishes single messages from one thread and from several, then batches,
    and polls all messages, in a topic of its own, which it deletes at the end.
    The numbers depend on this client and this machine as much as on the daemon.
    """
    topic = f"plainsong-bench-{secrets.token_hex(6)}"
    one, each_s = os.urandom(size), each_ms / 1000
    with where.client(max_connections=threads + 1) as client:
        client.create_topic(topic, ttl_s=TTL_S)
        try:
            many = [one] * batch
            parts = [
                _repeat("publish one", lambda: _publish(client, topic, one), each_s, 1),
                _repeat(f"publish one, {threads} threads", lambda: _publish(client, topic, one), each_s, threads),
                _repeat(f"publish {batch} at once", lambda: _publish(client, topic, many), each_s, 1),
                _poll_all(client, topic, each_s),
            ]
        finally:
            _delete(client, topic)
    if as_json:
        echo_json({"messageBytes": size, "parts": [each.as_json() for each in parts]})
        return
    rows = [
        (
            each.what,
            output.show_count(each.messages),
            output.show_rate(each.per_second),
            output.show_seconds(each.quantile_s(0.5)),
            output.show_seconds(each.quantile_s(0.99)),
        )
        for each in parts
    ]
    output.echo_lines(output.table(("PART", ">MESSAGES", ">RATE", ">P50", ">P99"), rows))


def _publish(client: Client, topic: str, messages: bytes | list[bytes]) -> int:
    return client.publish(topic, messages).count


def _repeat(what: str, call: Callable[[], int], each_s: float, threads: int) -> Measured:
    """Repeats a call from several threads for ``each_s`` seconds. Raises the first error of a call."""
    note(f"{what} ...")
    measured, lock = Measured(what), threading.Lock()
    failures: list[BaseException] = []
    began = time.perf_counter()

    def work() -> None:
        calls_s, messages = [], 0
        try:
            while (now := time.perf_counter()) - began < each_s and not failures:
                messages += call()
                calls_s.append(time.perf_counter() - now)
        except PlainsongError as error:
            failures.append(error)
        with lock:
            measured.calls_s += calls_s
            measured.messages += messages

    workers = [threading.Thread(target=work, daemon=True) for _ in range(threads - 1)]
    for worker in workers:
        worker.start()
    work()
    for worker in workers:
        worker.join()
    measured.took_s = time.perf_counter() - began
    if failures:
        raise failures[0]
    return measured


def _poll_all(client: Client, topic: str, each_s: float) -> Measured:
    """Reads the topic from end to end, repeatedly."""
    last_id = None

    def one_page() -> int:
        nonlocal last_id
        page = client.poll(topic, last_id, limit=PAGE_MESSAGES)
        last_id = page.last_id if page.end == "more" else None
        return len(page)

    return _repeat("poll in pages", one_page, each_s, 1)


def _delete(client: Client, topic: str) -> None:
    try:
        client.admin.delete_topic(topic)
    except PlainsongError as error:
        click.echo(f"warning: topic {topic} could not be deleted: {error.detail}", err=True)
