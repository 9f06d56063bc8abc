"""Pauses of the daemon by Python's garbage collector, with many open topics.

    python -m bench.collecting [--topics 100000] [--listings 20] [--stream-s 20]

A daemon runs in this process and opens the topics, each with one message. While a connection publishes, ``GET
/v1/topics`` is requested repeatedly; then one stream of ``/v1/events`` for a single topic is open. It prints the
longest collections, as reported to ``gc.callbacks``, the slowest publishes, and the cost of one open topic: memory of
the process, and containers that a collection would visit.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import trio

from bench import bodies
from broker.config.load import load_config
from broker.main import run_daemon

if TYPE_CHECKING:
    from collections.abc import Callable

_JSON = {"Content-Type": "application/json"}
_LOAD = """
import sys, time
from http.client import HTTPConnection
connection, slowest = HTTPConnection("127.0.0.1", int(sys.argv[1])), []
end_s = time.monotonic() + float(sys.argv[2])
while (begun_s := time.monotonic()) < end_s:
    connection.request("POST", sys.argv[3], '{"messages": ["x"]}', {"Content-Type": "application/json"})
    connection.getresponse().read()
    slowest.append(time.monotonic() - begun_s)
    time.sleep(0.002)
print(*(f"{each * 1000:.0f}" for each in sorted(slowest)[-5:]), f"of {len(slowest)}")
"""


class Pauses:
    """Records the processor time of this process's collections, which the load of other programs does not change."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._begun_s = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """Called by ``gc.callbacks``."""
        del info
        now_s = time.thread_time()
        if phase == "start":
            self._begun_s = now_s
        else:
            self.seconds.append(now_s - self._begun_s)

    def take(self) -> str:
        """Describe the longest collections since the last call."""
        taken, self.seconds = self.seconds, []
        longest = " ".join(f"{each * 1000:.0f}" for each in sorted(taken)[-5:])
        return f"{len(taken)} collections, {sum(taken):.2f} s, longest ms of processor time: {longest}"


def _taken() -> tuple[int, int]:
    """Return this process's own memory in KiB, and the number of its containers."""
    with open("/proc/self/status", encoding="ascii") as status:
        own_kib = next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
    return own_kib, len(gc.get_objects()) + gc.get_freeze_count()


def measure(port: int, args: argparse.Namespace, pauses: Pauses) -> None:
    """Send the requests and print the measurements."""
    connection = HTTPConnection("127.0.0.1", port)

    def ask(method: str, path: str, body: str | None = None) -> None:
        connection.request(method, path, body, _JSON)
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{method} {path}: {answer.status} {content[:300]!r}")

    def during(what: str, seconds: float, work: Callable[[], None]) -> None:
        pauses.take()
        cpu_s, begun_s = time.process_time(), time.monotonic()
        command = [sys.executable, "-c", _LOAD, str(port), str(seconds), bodies.path("t0", "publish")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as load:
            work()
            said = load.communicate()[0].strip()
        busy = (time.process_time() - cpu_s) / (time.monotonic() - begun_s)
        print(f"{what}: {pauses.take()}; slowest publishes ms: {said}; busy {busy:.2f}", flush=True)

    before = _taken()
    for number in range(args.topics):
        ask("PUT", bodies.path(f"t{number}"))
        ask("POST", bodies.path(f"t{number}", "publish"), '{"messages": ["x"]}')
    print(f"opening {args.topics} topics: {pauses.take()}", flush=True)
    kib, containers = (after - earlier for after, earlier in zip(_taken(), before, strict=True))
    print(f"a topic takes {kib / args.topics:.2f} KiB and {containers / args.topics:.1f} containers", flush=True)
    during("alone", args.stream_s, lambda: None)

    def list_all() -> None:
        took = []
        for _ in range(args.listings):
            begun_s = time.monotonic()
            ask("GET", "/v1/topics?sort=bytes&order=desc")
            took.append(time.monotonic() - begun_s)
        print(f"a listing takes ms: {' '.join(f'{each * 1000:.0f}' for each in sorted(took))}", flush=True)

    during("while listing", args.stream_s, list_all)

    def follow() -> None:
        stream = HTTPConnection("127.0.0.1", port)
        stream.request("GET", f"/v1/events?topics={bodies.NAMESPACE}:t1")
        time.sleep(args.stream_s)
        stream.close()

    during("with one stream of events", args.stream_s, follow)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.collecting", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--topics", type=int, default=100_000)
    parser.add_argument("--listings", type=int, default=20)
    parser.add_argument("--stream-s", type=float, default=20.0)
    args = parser.parse_args()
    pauses, failed = Pauses(), []

    def requests(url: str) -> None:
        try:
            measure(int(url.rpartition(":")[2]), args, pauses)
        except BaseException as error:  # noqa: BLE001 - raised again where the daemon has ended
            failed.append(error)
        os.kill(os.getpid(), signal.SIGTERM)

    with TemporaryDirectory() as data_dir:
        flags = {"http.bind": "127.0.0.1:0", "storage.data_dir": data_dir, "topic.max_open": str(args.topics + 10)}
        flags["topic.idle_s"] = "86400"  # none is closed, however long this takes
        config = load_config(None, {}, flags).config
        gc.callbacks.append(pauses)

        async def daemon() -> None:
            await run_daemon(
                config,
                announce=lambda running: threading.Thread(target=requests, args=(running.addresses[0],)).start(),
            )

        trio.run(daemon)
    if failed:
        raise failed[0]


if __name__ == "__main__":
    main()
