"""What ``doctor`` looks at: one function for each subject, each giving findings."""

from __future__ import annotations

import ctypes
import os
import resource
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from plainsong import __version__
from plainsong.cli import disk
from plainsong.cli.tables import show_bytes, show_count, show_seconds
from plainsong.cli.times import show_length
from plainsong.cli.verb import one_line
from protocol.errors import PlainsongError

if TYPE_CHECKING:
    from pathlib import Path

    from plainsong.cli.daemons import Found
    from plainsong.cli.where import Where

State: TypeAlias = disk.Trust

#: The daemon refuses publishes below 256 MiB, unless it is told otherwise.
LOW_BYTES = 256 << 20
ROOMY_BYTES = 2 << 30
#: A commit waits for a sync; beyond this, people notice.
SLOW_SYNC_S = 0.02
#: What a daemon with some hundred connections needs, and with the ten thousand it allows by default.
FEW_FILES, MANY_FILES = 1_024, 10_600
#: 2024-01-01, in seconds: no clock that is right says less.
EARLIEST_S = 1_704_067_200
#: A clock that is further from the daemon's than this.
SKEW_MS = 2_000
_CLOCK_UNSYNCHRONIZED = 5
#: Topics whose newest message is compared with the clock.
MAX_TOPICS = 50


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    state: State
    says: str
    hint: str = ""


def look_at_disk(directory: Path) -> tuple[list[Finding], State | None]:
    """Sync time, honesty and free space; and how far syncs can be believed (None: not measured)."""
    findings = look_at_space(directory)
    try:
        times = disk.measure_sync(directory)
    except OSError as error:
        says = f"{directory} cannot be written to: {error.strerror}"
        return [Finding("disk", "bad", says, "give --data-dir, or run as the daemon's user"), *findings], None
    mount = disk.mount_of(directory)
    trust, why = disk.judged(
        times, mount, rotating=disk.is_rotating(directory), preload=os.environ.get("LD_PRELOAD", "")
    )
    said = f"{show_seconds(times.median_s)} each (p99 {show_seconds(times.p99_s)}), on {directory}"
    slow = times.median_s > SLOW_SYNC_S
    hint = "publishes wait for it: expect no more commits a second than it allows" if slow else ""
    syncs = Finding("sync time", "warning" if slow else "ok", said, hint)
    return [syncs, Finding("honesty", trust, why), *findings], trust


def look_at_space(directory: Path) -> list[Finding]:
    """Free bytes and free inodes."""
    found = os.statvfs(directory)
    free = found.f_bavail * found.f_frsize
    state: State = "bad" if free < LOW_BYTES else "warning" if free < ROOMY_BYTES else "ok"
    hint = "" if state == "ok" else f"below {show_bytes(LOW_BYTES)} the daemon refuses publishes (low_space)"
    findings = [
        Finding("free space", state, f"{show_bytes(free)} of {show_bytes(found.f_blocks * found.f_frsize)}", hint)
    ]
    if found.f_files and found.f_favail < 10_000:
        findings.append(
            Finding("free inodes", "warning", show_count(found.f_favail), "each table of the store is a file")
        )
    return findings


def look_at_limits() -> list[Finding]:
    """Open files, and the size of files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    findings = []
    if hard == resource.RLIM_INFINITY or hard >= MANY_FILES:
        findings.append(Finding("open files", "ok", "enough may be open"))
    else:
        state: State = "bad" if hard < FEW_FILES else "warning"
        hint = "raise the hard limit (ulimit -Hn, LimitNOFILE=), or lower http.max_connections"
        says = f"{show_count(hard)} may be open; the daemon wants {show_count(MANY_FILES)} for all its connections"
        findings.append(Finding("open files", state, says, hint))
    largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if largest != resource.RLIM_INFINITY:
        says = f"files may not be larger than {show_bytes(largest)}"
        findings.append(Finding("file size", "warning", says, "ulimit -f unlimited"))
    return findings


def look_at_clock() -> list[Finding]:
    """This computer's clock: plausible, steady, and kept right by somebody."""
    now_s = time.time()
    if now_s < EARLIEST_S:
        hint = "set it before anything is published: publish times never go back"
        return [Finding("clock", "bad", f"it says {time.strftime('%Y-%m-%d', time.gmtime(now_s))}", hint)]
    wall, steady = time.time_ns(), time.monotonic_ns()
    time.sleep(0.05)
    drift_ms = abs((time.time_ns() - wall) - (time.monotonic_ns() - steady)) / 1e6
    if drift_ms > 10:
        return [Finding("clock", "bad", f"it jumped by {show_length(drift_ms)} while it was looked at")]
    if _is_unsynchronized():
        hint = "run an NTP client; order survives any clock, but times and expiry follow it"
        return [Finding("clock", "warning", "nobody keeps it right (the kernel says: unsynchronized)", hint)]
    return [Finding("clock", "ok", "plausible and steady")]


def _is_unsynchronized() -> bool:
    """Whether the kernel knows of nobody who keeps the clock right; False where it does not tell."""
    try:
        # A struct timex full of zeros asks and changes nothing; it is smaller than this everywhere.
        state: int = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(1024))
        return state == _CLOCK_UNSYNCHRONIZED
    except (OSError, AttributeError):
        return False


def look_at_daemon(found: Found) -> list[Finding]:
    """One daemon: there, of our version, ready."""
    if not found.answers:
        hint = "plainsong serve starts one; --url says where it is"
        return [Finding("daemon", "bad", f"{found.url}: {one_line(found.detail)}", hint)]
    fast = show_seconds(min(found.seconds))
    findings = [Finding("daemon", "ok", f"{found.url} answers in {fast}, version {one_line(found.version)}")]
    if found.version.split(".")[:2] != __version__.split(".")[:2]:
        says = f"the daemon is {one_line(found.version)}, this program is {__version__}"
        findings.append(Finding("version", "warning", says, "use the same on both sides"))
    if not found.ready:
        says = one_line("; ".join(found.reasons)) or "it does not say why not"
        findings.append(Finding("ready", "bad", says, "docs/operations.md has what each reason means"))
    for unreached in found.unreached:
        says = one_line(f"the daemon at {found.url} cannot reach the instance {unreached}")
        hint = "is it there, and is its cluster.advertise an address that the others can go to?"
        findings.append(Finding("instances", "warning", says, hint))
    return findings


def look_at_times(where: Where) -> list[Finding]:
    """The daemon's clock beside ours and beside its own messages."""
    ahead: list[tuple[int, str]] = []
    skew_ms: int | None = None
    try:
        with where.client() as client:
            for name in client.topics()[:MAX_TOPICS]:
                before_ms = time.time_ns() // 1_000_000
                stats = client.stats(name)
                if stats["oldestId"] is None:
                    continue
                # Their sum is the daemon's time, unless the oldest message is itself from the future.
                theirs_ms = int(stats["oldestId"][:16], 16) + stats["oldestAgeMs"]
                if stats["oldestAgeMs"]:
                    skew_ms = theirs_ms - before_ms
                ahead.append((int(stats["newestId"][:16], 16) - theirs_ms, name))
    except PlainsongError as error:
        return [Finding("topics", "bad", one_line(error.detail), one_line(error.hint))]
    findings = []
    if skew_ms is not None and abs(skew_ms) > SKEW_MS:
        says = f"the daemon's clock is {show_length(abs(skew_ms))} {'ahead of' if skew_ms > 0 else 'behind'} ours"
        findings.append(Finding("clocks", "warning", says, "relative times (--from -10m) are taken from ours"))
    if ahead and (most := max(ahead))[0] > SKEW_MS:
        says = f"the newest message of {most[1]} is {show_length(most[0])} ahead of the daemon's clock"
        hint = "its clock has gone back; ids go on rising from there, times stand until it has caught up"
        findings.append(Finding("clock history", "warning", says, hint))
    return findings


def survives(store: str, trust: State | None, directory: Path | None) -> str:
    """What an acknowledged message survives, in one sentence.

    Args:
      store: what the daemon keeps messages in; empty when none answers.
      trust: how far the syncs of ``directory`` can be believed; None when they were not measured.
    """
    if store == "memory":
        return "An acknowledged message survives nothing: this daemon keeps its messages in memory only."
    if store == "hbase":
        return (
            "An acknowledged message survives the daemon and its machine: it is in HBase's write-ahead log,"
            " and survives what the file system below HBase survives."
        )
    if trust is None or directory is None:
        return "An acknowledged message survives kill -9; of a power cut nothing can be said without --data-dir."
    if trust != "bad":
        return (
            "An acknowledged message survives kill -9, a crash of the machine and a power cut,"
            f" as far as the disk under {directory} keeps what it says it has synced."
        )
    return (
        "An acknowledged message survives kill -9, and is lost in a power cut or a crash of the machine:"
        f" the disk under {directory} does not sync."
    )
