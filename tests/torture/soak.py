"""A long run: ``python -m tests.torture.soak --minutes 60``.

A daemon gets half of its maximum load (``--load`` sets another fraction) from publishers and transactions. Its messages
live for twenty seconds; readers follow, or repeatedly read everything; a backup is made every few minutes; the daemon is
stopped after a quarter of the time, killed after half of it, and restarted. Its resource usage and the latency of
publishes are measured throughout. From the last start on, after a warm-up, all measurements must be flat, and every
reader that follows must have seen every acknowledged message once and in order.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import quantiles
from typing import Any

import trio

from plainsong.protocol.requests import PollRequest
from tests.daemon.harness import PLAINSONG, Daemon, clean_environ
from tests.daemon.talk import ConnectionLost, NotConnected, Talk, create, json_body, poll_call, publish_call, topic_path
from tests.torture.__main__ import ROOT, commit
from tests.torture.slope import Limit, growth, is_flat

REPORT = ROOT / "build/torture"
TTL_S = 20
TOPICS = ("orders", "payments", "clicks")
SETTINGS = (
    *("storage.min_free_bytes=0", "storage.write_buffer_bytes=1048576", "storage.volume_bytes=3670016"),
    *("retention.interval_s=1", "transactions.timeout_s=10", "transactions.max_outcomes=1000"),
    "cache.max_bytes=4194304",
)
SAMPLE_S = 1.0
#: Number of publishers; while the maximum load is measured, each sends one request after another.
PUBLISHERS = 6
BATCH = 20
#: Fraction of the last life to leave out, at least until messages expire: caches fill, and the number of volumes levels
#: off.
WARM = 0.3
#: Maximum points in a plot: an hour's measurements would make a file of two megabytes.
MOST_POINTS = 300
LIMITS = {
    "RssAnon MB": Limit(0.05, 3),
    "open files": Limit(0.05, 6),
    "threads": Limit(0, 1),
    "disk MB": Limit(0.1, 5),
    "publish p50 ms": Limit(0.25, 1),
    "publish p99 ms": Limit(0.35, 10),
}


@dataclass(slots=True)
class Soak:
    """Running processes, expectations and measurements."""

    daemon: Daemon
    up: trio.Event = field(default_factory=trio.Event)
    over: bool = False
    pause_s: float = 0.0
    """Pause between two requests of a publisher."""
    load: float = 0.5
    """Fraction of the daemon's maximum load."""
    acknowledged: int = 0
    unknown: int = 0
    read: int = 0
    committed: int = 0
    backups: int = 0
    restarts: list[float] = field(default_factory=list)
    waits_ms: list[float] = field(default_factory=list)
    """Latencies of publishes since the last sample."""
    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seen: dict[tuple[str, str], int] = field(default_factory=dict)
    """The last number of each publisher that a reader saw, by reader."""
    doubtful: set[tuple[str, int]] = field(default_factory=set)
    """Numbers of messages with unknown outcome."""
    begun_s: float = field(default_factory=time.monotonic)

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.begun_s

    async def start(self) -> None:
        await trio.to_thread.run_sync(self.daemon.start)
        self.up.set()


# --- the work --------------------------------------------------------------------------------------


async def publisher(soak: Soak, topic: str, name: str) -> None:
    """Publish batches of numbered messages, evenly over time; numbers with unknown outcome are not sent again."""
    number = 0
    while not soak.over:
        await soak.up.wait()
        with suppress(ConnectionLost, NotConnected, OSError):
            async with await Talk.to(soak.daemon.address) as talk:
                while not soak.over:
                    numbers = range(number, number + (1 if number % 3 == 0 else BATCH))
                    number = numbers.stop
                    messages = [b"%s %d %s" % (name.encode(), each, b"x" * 150) for each in numbers]
                    # Until the response arrives the outcome is unknown, even if the connection breaks here.
                    soak.doubtful |= {(name, each) for each in numbers}
                    soak.unknown += 1
                    began_s = time.monotonic()
                    answer = await talk.ask(*publish_call(topic, messages))
                    if answer.status != 200:
                        break
                    soak.unknown -= 1
                    soak.doubtful -= {(name, each) for each in numbers}
                    soak.waits_ms.append((time.monotonic() - began_s) * 1000)
                    soak.acknowledged += len(numbers)
                    await trio.sleep(max(0.0, soak.pause_s - (time.monotonic() - began_s)))
        await trio.sleep(0.05)


async def transactions(soak: Soak) -> None:
    """Run consecutive transactions over two topics; roll back every third one."""
    number = 0
    while not soak.over:
        await soak.up.wait()
        with suppress(ConnectionLost, NotConnected, OSError):
            async with await Talk.to(soak.daemon.address) as talk:
                while not soak.over:
                    number += 1
                    begun = (await talk.ask("POST", "/v1/transactions", json_body({"timeoutSeconds": 10}))).json()
                    for topic in TOPICS[:2]:
                        body = json_body({"transactionWritePointer": begun.get("writePointer"), "messages": ["tx"]})
                        await talk.ask(
                            "POST", topic_path(topic, "/publish"), body, {"Content-Type": "application/json"}
                        )
                    verb = "abort" if number % 3 == 0 else "commit"
                    answer = await talk.ask("POST", f"/v1/transactions/{begun.get('id')}/{verb}")
                    soak.committed += answer.status == 200 and verb == "commit"
                    await trio.sleep(0.2)
        await trio.sleep(0.05)


async def follower(soak: Soak, topic: str, name: str) -> None:
    """Follow with long polls across restarts; messages must arrive in order, without gaps."""
    position: bytes | None = None
    while not soak.over:
        await soak.up.wait()
        with suppress(ConnectionLost, NotConnected, OSError):
            async with await Talk.to(soak.daemon.address) as talk:
                while not soak.over:
                    request = PollRequest(position, position is None, 5_000)
                    answer = await talk.ask(*poll_call(topic, request, "frames", 1_000))
                    if answer.status != 200:
                        break
                    for message_id, payload in answer.messages():
                        look(soak, name, position, message_id, payload)
                        position = message_id
        await trio.sleep(0.05)


def look(soak: Soak, reader: str, before: bytes | None, message_id: bytes, payload: bytes) -> None:
    """Check one message against those before it."""
    soak.read += 1
    if before is not None and message_id <= before:
        soak.wrong.append(f"{reader} saw {message_id.hex()} after {before.hex()}")
    if payload == b"tx":
        return
    publisher_name, number_text, _ = payload.decode().split(" ", 2)
    number, last = int(number_text), soak.seen.get((reader, publisher_name), -1)
    if number <= last:
        soak.wrong.append(f"{reader} saw {publisher_name} {number} after {last}")
    missing = [each for each in range(last + 1, number) if (publisher_name, each) not in soak.doubtful]
    if missing:
        soak.wrong.append(f"{reader} saw no {publisher_name} {missing[0]}, of {len(missing)} before {number}")
    soak.seen[reader, publisher_name] = number


async def rereader(soak: Soak, topic: str) -> None:
    """Read all committed messages page by page, repeatedly."""
    while not soak.over:
        await soak.up.wait()
        with suppress(ConnectionLost, NotConnected, OSError):
            async with await Talk.to(soak.daemon.address) as talk:
                position: bytes | None = None
                for _ in range(20):
                    method, path, body, headers = poll_call(
                        topic, PollRequest(position, position is None, 1_000), "frames"
                    )
                    answer = await talk.ask(method, path + "?isolation=committed", body, headers)
                    messages = answer.messages() if answer.status == 200 else []
                    soak.read += len(messages)
                    if not messages:
                        break
                    position = messages[-1][0]
        await trio.sleep(2)


async def backups(soak: Soak, folder: Path, pause_s: float) -> None:
    """Make backups, and remove older ones after each."""
    while not soak.over:
        await trio.sleep(pause_s)
        await soak.up.wait()
        host, port = soak.daemon.address
        life = soak.up
        create_it = [str(PLAINSONG), "--url", f"http://{host}:{port}", "backup", "create", str(folder)]
        for command in (create_it, [str(PLAINSONG), "backup", "prune", str(folder), "--keep-last", "2"]):
            done = await trio.run_process(
                command, check=False, capture_stdout=True, capture_stderr=True, env=clean_environ()
            )
            if done.returncode and soak.up is life and not soak.over:  # a restart did not interrupt it
                soak.wrong.append(
                    f"{' '.join(command[3:])} ended with {done.returncode}: {done.stderr.decode()[-300:]}"
                )
        soak.backups += 1


# --- measuring -------------------------------------------------------------------------------------


async def measure(soak: Soak) -> None:
    """Record the daemon's resource usage every second while it is up."""
    while not soak.over:
        await trio.sleep(SAMPLE_S)
        waits, soak.waits_ms = soak.waits_ms, []
        if soak.up.is_set() and len(waits) > 1:
            cuts = quantiles(waits, n=100)
            with suppress(OSError):
                used = await trio.to_thread.run_sync(used_by, soak.daemon.pid, soak.daemon.data_dir)
                soak.samples.append((soak.now_s, {**used, "publish p50 ms": cuts[49], "publish p99 ms": cuts[98]}))


def used_by(pid: int, directory: Path) -> dict[str, float]:
    """Return memory, files, threads, and the directory's size on disk."""
    status = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        if ":" in line
    )
    taken = 0
    for path in directory.rglob("*"):
        with suppress(OSError):  # removed since the listing
            taken += path.stat().st_blocks * 512
    return {
        "RssAnon MB": int(status["RssAnon"].split()[0]) / 1024,
        "open files": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
        "disk MB": taken / 1e6,
    }


# --- the course ------------------------------------------------------------------------------------


async def soak_for(seconds: float, directory: Path, load: float) -> Soak:
    """Do the whole run, and stop the daemon."""
    soak = Soak(Daemon(directory / "data", *SETTINGS), load=load)
    try:
        await soak.start()
        for topic in TOPICS:
            create(soak.daemon.address, topic, ttl=TTL_S)
        async with trio.open_nursery() as nursery:
            for number in range(PUBLISHERS):
                nursery.start_soon(publisher, soak, TOPICS[number % len(TOPICS)], f"p{number}")
            soak.pause_s = await time_of_a_request(soak) / load
            nursery.start_soon(transactions, soak)
            for topic in TOPICS:
                nursery.start_soon(follower, soak, topic, f"a follower of {topic}")
            nursery.start_soon(rereader, soak, TOPICS[0])
            nursery.start_soon(measure, soak)
            nursery.start_soon(backups, soak, directory / "backups", max(10.0, seconds / 12))
            for part, leave in ((0.25, soak.daemon.stop), (0.5, soak.daemon.kill)):
                await trio.sleep(max(0.0, part * seconds - soak.now_s))
                await restart(soak, leave)
            await trio.sleep(max(0.0, seconds - soak.now_s))
            soak.over = True
            nursery.cancel_scope.deadline = trio.current_time() + 10
    finally:
        soak.daemon.end()
    return soak


async def time_of_a_request(soak: Soak, look_s: float = 5.0) -> float:
    """Measure the time per request while all publishers send at full speed, leaving out the first second."""
    await trio.sleep(1)
    before = len(soak.waits_ms)
    await trio.sleep(look_s)
    return PUBLISHERS * look_s / max(1, len(soak.waits_ms) - before)


async def restart(soak: Soak, leave: Callable[[], object]) -> None:
    """End the daemon and start it again."""
    soak.up = trio.Event()
    await trio.to_thread.run_sync(leave)
    await soak.start()
    soak.restarts.append(soak.now_s)


# --- the report ------------------------------------------------------------------------------------


def series(soak: Soak, name: str) -> tuple[list[float], list[float]]:
    """Return the measurements to judge, which are those of the last life after its warm-up."""
    end = soak.samples[-1][0]
    first = soak.restarts[-1] + max(WARM * (end - soak.restarts[-1]), 1.5 * TTL_S)
    chosen = [(at, values[name]) for at, values in soak.samples if at >= first]
    return [at for at, _ in chosen], [value for _, value in chosen]


def table(soak: Soak) -> list[str]:
    """Format the measurements, and state whether each is flat."""
    lines = ["| | median | growth | may grow by | |", "|---|--:|--:|--:|---|"]
    for name, limit in LIMITS.items():
        times, values = series(soak, name)
        middle = sorted(values)[len(values) // 2]
        most = max(limit.share * middle, limit.at_least)
        flat = "flat" if is_flat(times, values, limit) else "**grows**"
        lines.append(f"| {name} | {middle:.1f} | {growth(times, values):+.2f} | {most:.1f} | {flat} |")
    return lines


def growing(soak: Soak) -> list[str]:
    """Return the names of measurements that grow."""
    return [name for name, limit in LIMITS.items() if not is_flat(*series(soak, name), limit)]


def draw(soak: Soak, path: Path) -> bool:
    """Plot all measurements over time; return False if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        return False
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "plainsong"  # reproducible: the same numbers give the same file
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(2, 3, figsize=(11, 5), sharex=True)
    for axes, name in zip(grid.flat, LIMITS, strict=True):
        shown = soak.samples[:: len(soak.samples) // MOST_POINTS + 1]
        axes.plot([at / 60 for at, _ in shown], [values[name] for _, values in shown], ".", markersize=2)
        for at in soak.restarts:
            axes.axvline(at / 60, color="grey", linewidth=0.7, linestyle=":")
        judged = series(soak, name)[0]
        if judged:
            axes.axvspan(judged[0] / 60, judged[-1] / 60, color="C1", alpha=0.08)
        axes.set_title(name, fontsize=9)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return True


def describe(soak: Soak) -> str:
    """Return the report."""
    minutes = soak.samples[-1][0] / 60
    said = [
        f"Commit {commit()}, {minutes:.0f} minutes on {os.cpu_count()} cores at {soak.load:.0%} of the load the daemon took at first: {soak.acknowledged:,} messages acknowledged, "
        f"{soak.unknown} requests of unknown outcome, {soak.read:,} messages read, {soak.committed:,} transactions "
        f"committed, {soak.backups} backups, {len(soak.restarts)} restarts. "
        f"Wrong: {len(soak.wrong)}.",
        "",
        *table(soak),
        *([""] if soak.wrong else []),
        *(f"* {each}" for each in soak.wrong[:20]),
    ]
    return "\n".join(said) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Return exit status 1 if a measurement grows or a reader saw an error."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--report", type=Path, default=REPORT, help="a directory (default: %(default)s)")
    parser.add_argument(
        "--load",
        type=float,
        default=0.5,
        metavar="PART",
        help="fraction of the daemon's maximum load (default: %(default)s)",
    )
    asked = parser.parse_args(arguments)
    if not 0 < asked.load <= 1:
        parser.error(f"--load {asked.load} is not above 0 and at most 1")
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        soak = trio.run(partial(soak_for, asked.minutes * 60, Path(directory), asked.load))
    asked.report.mkdir(parents=True, exist_ok=True)
    (asked.report / "soak.md").write_text(describe(soak), encoding="utf-8")
    samples: list[dict[str, Any]] = [{"at_s": at, **values} for at, values in soak.samples]
    (asked.report / "soak.json").write_text(json.dumps(samples), encoding="utf-8")
    draw(soak, asked.report / "soak.svg")
    print(describe(soak))
    return bool(soak.wrong or growing(soak))


if __name__ == "__main__":
    sys.exit(main())
