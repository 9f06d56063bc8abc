"""Publish latencies while millions of expired rows are removed."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from bench import bodies
from bench.daemon import Daemon, daemon
from bench.generator import load, run_load
from bench.raw import TOPIC
from bench.rounds import Row, Section, Spread
from bench.seed import seed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.profiles import Profile

SIZE = 100
OLD = "old"
INTERVAL_S = 0.5
#: Time to live of the day-old messages until the benchmark shortens it.
LONG_TTL_S = 7 * 86_400
CLEANING_TIMEOUT_S = 60.0
SAYS = """Single durable publishes of 100 B to one topic while another topic's rows, expired all at once by a shorter
time to live, are removed and their space is reclaimed. *Quiet* is measured in the same daemon, before and after."""
#: More rows than this fill several volumes of the default size.
MANY_ROWS = 1_000_000
SMALL_VOLUMES = {"storage_volume_bytes": 1 << 20, "storage_write_buffer_bytes": 1 << 18}


def measure_cleaning(profile: Profile, scratch: Path, say: Callable[[str], None]) -> Section:
    """Measure a cleaning for each number of publishing connections."""
    section = Section("cleaning", "Publishing during cleaning", SAYS)
    for connections in profile.cleaning_connections:
        home = scratch / f"cleaning-{connections}"
        seed(home, OLD, profile.expired_rows, SIZE, int(time.time() * 1000) - 86_400_000, LONG_TTL_S)
        # The volume being written keeps its space: use small volumes where all rows would fit into one.
        sizes = {} if profile.expired_rows > MANY_ROWS else SMALL_VOLUMES
        with daemon(home, retention_interval_s=INTERVAL_S, **sizes) as ours:
            ours.create(TOPIC)
            row = _clean(ours, home, connections, profile)
        section.rows.append(row)
        values = row.values
        say(
            f"cleaning {profile.expired_rows:,} rows, {connections} connections: p99 {values['cleaning p99 ms'].median:.2f}"
            f" ms, quiet {values['quiet p99 ms'].median:.2f} ms, {values['rows cleaned/s'].median:,.0f} rows/s"
        )
    return section


def _clean(ours: Daemon, home: Path, connections: int, profile: Profile) -> Row:
    request = bodies.publish(TOPIC, 1, SIZE)
    before_mb = size_mb(home)
    quiet = [run_load(ours.port, connections, request, profile.quiet_s)]
    with load(ours.port, connections, request, warm_up=connections) as running:
        begun_s = time.monotonic()
        ours.ask("PUT", bodies.path(OLD, "properties"), {"ttl": 1})
        cleaned = _wait_for_cleaning(ours, profile.expired_rows)
        took_s = time.monotonic() - begun_s
        after_mb = _wait_for_space(home, before_mb)
        busy = running.enough()
    quiet.append(run_load(ours.port, connections, request, profile.quiet_s))
    return Row(
        {"connections": connections, "rows": cleaned}, _values(quiet, busy, cleaned / took_s, before_mb, after_mb)
    )


def _values(
    quiet: list[dict[str, Any]], busy: dict[str, Any], rows_per_s: float, before_mb: float, after_mb: float
) -> dict[str, Spread]:
    quiet_p99 = [result["p99_ms"] for result in quiet]
    return {
        "quiet p99 ms": Spread.of(quiet_p99),
        "cleaning p99 ms": Spread.of([busy["p99_ms"]]),
        "÷ quiet p99": Spread.ratio([busy["p99_ms"]] * len(quiet), quiet_p99),
        "quiet p50 ms": Spread.of([result["p50_ms"] for result in quiet]),
        "cleaning p50 ms": Spread.of([busy["p50_ms"]]),
        "cleaning max ms": Spread.of([busy["max_ms"]]),
        "rows cleaned/s": Spread.of([rows_per_s]),
        "disk before MB": Spread.of([before_mb]),
        "disk after MB": Spread.of([after_mb]),
    }


def _wait_for_cleaning(ours: Daemon, rows: int) -> int:
    """Return the rows removed; the janitor also logs a topic when its space is released, so lines are summed up."""
    removed = 0
    while removed < rows:
        line = ours.wait_for("topic cleaned", CLEANING_TIMEOUT_S)
        if line["topic"].endswith(OLD):
            removed += int(line["expired"])
    return removed


def _wait_for_space(home: Path, before_mb: float) -> float:
    """Return the disk usage once it has shrunk; a volume with live rows is rewritten first."""
    until_s = time.monotonic() + CLEANING_TIMEOUT_S
    while (now_mb := size_mb(home)) >= before_mb and time.monotonic() < until_s:
        time.sleep(INTERVAL_S / 10)
    return now_mb


def size_mb(directory: Path) -> float:
    """Return the disk space that a directory's files occupy."""
    blocks = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                blocks += os.stat(os.path.join(parent, name)).st_blocks
            except FileNotFoundError:
                continue  # removed by a compaction since it was listed
    return blocks * 512 / 1e6
