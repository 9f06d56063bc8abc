"""The verb `doctor`: examines disk, clock, limits and daemon, and says what an acknowledged message survives.

``plainsong doctor``: examines disk, clock, limits and daemon, and says what an acknowledged message survives.
"""

from __future__ import annotations

import ctypes
import os
import resource
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import click

from plainsong import __version__
from plainsong.cli import ping
from plainsong.cli.options import show_length
from plainsong.cli.output import echo_json, show_bytes, show_count, show_seconds
from plainsong.cli.verb import CommandFailed, Verb, json_option, one_line
from plainsong.cli.where import where_options
from plainsong.protocol.errors import PlainsongError

if TYPE_CHECKING:
    from plainsong.cli.ping import ProbeResult
    from plainsong.cli.where import Where

#: The daemon's own variable for its storage.data_dir.
DATA_DIR = "PLAINSONG_STORAGE__DATA_DIR"
_LOCAL = ("127.", "localhost", "[::1]")
_MARKS = {"ok": "ok  ", "warning": "WARN", "bad": "BAD "}


@click.command(
    cls=Verb,
    examples=["plainsong doctor", "plainsong doctor --data-dir /srv/plainsong", "plainsong doctor --no-daemon --json"],
)
@click.option("--data-dir", metavar="DIR", help="The daemon's data directory; ./data by default, or where it would be.")
@click.option("--no-daemon", is_flag=True, help="Look at this machine only.")
@json_option
@where_options
def doctor(data_dir: str | None, no_daemon: bool, as_json: bool, where: Where) -> None:
    """Examine disk, clock, limits and daemon.

    Measures how long a sync of the data disk takes (with a small file of its
    own, for a second at most) and whether that can be true, and says in one
    sentence what an acknowledged message survives. Ends with 1 when something
    is bad.
    """
    found = [] if no_daemon else ping.ask(where)
    findings = [finding for each in found for finding in look_at_daemon(each)]
    if any(each.answers for each in found):
        findings += look_at_times(where)
    store = next((each.store for each in found if each.answers), "")
    directory = None
    trust: State | None = None
    # What is kept in HBase is on no disk of the daemon's.
    if data_dir is not None or no_daemon or (_is_local(where) and store != "hbase"):
        directory = nearest_directory(Path(data_dir or os.environ.get(DATA_DIR) or "data"))
        guessed = data_dir is None and DATA_DIR not in os.environ and directory.name != "data"
        if guessed:
            findings.append(_elsewhere(directory))
        of_disk, of_syncs = look_at_disk(directory)
        # The sentence is about the daemon's disk, not about the one we happen to stand on.
        trust = None if guessed else of_syncs
        findings += of_disk
    if directory is not None or _is_local(where):
        findings += look_at_limits()
    findings += look_at_clock()
    sentence = survives(store, trust, directory)
    if as_json:
        checks = [{"what": f.what, "state": f.state, "says": f.says, "hint": f.hint} for f in findings]
        echo_json({"checks": checks, "survives": sentence, "store": store or None, "syncs": trust})
    else:
        _print(findings, sentence)
    bad = [finding.what for finding in findings if finding.state == "bad"]
    if bad:
        raise CommandFailed(f"not well: {', '.join(bad)}", hint="the lines marked BAD say what to do")


def _is_local(where: Where) -> bool:
    """Whether the daemon may be on this machine: only then its disk is here."""
    return any(url.split("://", 1)[-1].startswith(_LOCAL) for url in where.urls)


def _elsewhere(directory: Path) -> Finding:
    says = f"there is no ./data here; what follows is about {directory}"
    return Finding("directory", "warning", says, "--data-dir says where the daemon keeps its messages")


def _print(findings: list[Finding], sentence: str) -> None:
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        click.echo(f"{_MARKS[finding.state]}  {finding.what:<{width}}  {finding.says}")
        if finding.hint:
            click.echo(f"      {'':<{width}}  {finding.hint}")
    click.echo(f"\n{sentence}")


# --- disk ------------------------------------------------------------------------------------------
#
# A disk as far as it can be judged from outside: how long a sync takes, and whether that can be true.


#: How far syncs can be believed.
Trust = Literal["ok", "warning", "bad"]


# --- health ----------------------------------------------------------------------------------------
#
# What ``doctor`` looks at: one function for each subject, each giving findings.


State: TypeAlias = Trust
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
        times = measure_sync(directory)
    except OSError as error:
        says = f"{directory} cannot be written to: {error.strerror}"
        return [Finding("disk", "bad", says, "give --data-dir, or run as the daemon's user"), *findings], None
    mount = mount_of(directory)
    trust, why = judged(times, mount, rotating=is_rotating(directory), preload=os.environ.get("LD_PRELOAD", ""))
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


def look_at_daemon(found: ProbeResult) -> list[Finding]:
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


#: A sync faster than this has not been to any device: the fastest with a safe cache take about 10 µs.
IMPLAUSIBLE_S = 8e-6
#: A disk that turns cannot write twice within less than about this, unless something caches for it.
ROTATION_S = 2e-3
#: What one commit of a few messages writes.
WRITE_BYTES = 4096
MAX_ROUNDS = 400
MAX_MEASURE_S = 1.0
#: File systems that keep nothing.
IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
#: File systems whose sync is somebody else's promise.
REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "fuse", "ceph", "glusterfs", "vboxsf"})


@dataclass(frozen=True, slots=True)
class SyncTimes:
    """What a loop of small writes, each followed by ``fdatasync``, took."""

    rounds: int
    median_s: float
    p99_s: float
    write_s: float
    """The median of the writes alone, without their syncs."""


@dataclass(frozen=True, slots=True)
class Mount:
    """Where a directory lies."""

    point: str
    source: str
    kind: str
    options: tuple[str, ...]


def nearest_directory(path: Path) -> Path:
    """``path``, or the closest directory above it that is there."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def measure_sync(directory: Path) -> SyncTimes:
    """Write and sync for a second at most, in a file of its own that is gone afterwards.

    Raises:
      OSError: nothing can be written there.
    """
    block = os.urandom(WRITE_BYTES)
    writes: list[float] = []
    syncs: list[float] = []
    handle, name = tempfile.mkstemp(prefix=".plainsong-doctor-", dir=directory)
    try:
        over = time.perf_counter() + MAX_MEASURE_S
        while len(syncs) < MAX_ROUNDS and (len(syncs) < 5 or time.perf_counter() < over):
            began = time.perf_counter()
            os.write(handle, block)
            written = time.perf_counter()
            os.fdatasync(handle)
            writes.append(written - began)
            syncs.append(time.perf_counter() - written)
    finally:
        os.close(handle)
        with suppress(OSError):
            Path(name).unlink()
    syncs.sort()
    writes.sort()
    return SyncTimes(len(syncs), syncs[len(syncs) // 2], syncs[len(syncs) * 99 // 100], writes[len(writes) // 2])


def mount_of(directory: Path, mounts: str | None = None) -> Mount | None:
    """The mount that ``directory`` is on; None when the system does not tell.

    Args:
      mounts: the text of ``/proc/self/mounts``.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return None
    path, found = directory.resolve(), None
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 4:
            continue
        source, point, kind, options = (_unescaped(each) for each in fields[:4])
        # A later mount of the same place hides the earlier one.
        if path.is_relative_to(point) and (found is None or len(point) >= len(found.point)):
            found = Mount(point, source, kind, tuple(options.split(",")))
    return found


def _unescaped(text: str) -> str:
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")


def is_rotating(directory: Path) -> bool | None:
    """Whether the disk below turns; None when the system does not tell."""
    try:
        device = directory.stat().st_dev
        at = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve(strict=True)
    except OSError:
        return None
    for each in (at, at.parent):
        with suppress(OSError):
            return (each / "queue/rotational").read_text().strip() == "1"
    return None


def judged(times: SyncTimes, mount: Mount | None, *, rotating: bool | None, preload: str = "") -> tuple[Trust, str]:
    """Whether the syncs can be believed (``ok``), perhaps (``warning``) or not (``bad``), and why.

    Args:
      preload: ``LD_PRELOAD`` of this process.
    """
    kind = mount.kind if mount is not None else ""
    options = set(mount.options) if mount is not None else set()
    if "eatmydata" in preload:
        return "bad", "LD_PRELOAD names eatmydata, which swallows syncs"
    if kind in IN_MEMORY:
        return "bad", f"the file system is {kind}: memory, gone with a restart of the machine"
    if {"nobarrier", "barrier=0"} & options:
        return "bad", "the file system is mounted without barriers: the disk's own cache may lose what was synced"
    if kind == "overlay" and "volatile" in options:
        return "bad", "the file system is a volatile overlay, which swallows syncs"
    if times.median_s < IMPLAUSIBLE_S:
        return "bad", "no device syncs so fast: something between here and the disk only says that it did"
    if kind.split(".")[0] in REMOTE:
        return "warning", f"the file system is {kind}: whether a sync is one is up to the other side"
    if rotating and times.median_s < ROTATION_S:
        # Virtual disks are often called so; what is below them cannot be seen from here.
        return "warning", "the system calls it a disk that turns, which could not be so fast: a cache answers for it"
    return "ok", "a plausible time for a real disk"
