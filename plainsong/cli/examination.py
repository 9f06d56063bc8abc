"""The examination of `doctor`: its checks of the daemons and of this machine, and its report."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from plainsong import __version__, calls
from plainsong.cli import ping
from plainsong.cli.command import CommandFailed, one_line
from plainsong.cli.connection import run_call
from plainsong.cli.machine import (
    Finding,
    directory_of_daemon,
    look_at_clock,
    look_at_disk,
    look_at_limits,
    nearest_directory,
    survives,
)
from plainsong.cli.options import show_length
from plainsong.cli.output import coloured, counted, echo_json, echo_lines, show_seconds
from plainsong.positions import now_ms
from plainsong.protocol.errors import NotFound, PlainsongError

if TYPE_CHECKING:
    from plainsong.cli.connection import Where
    from plainsong.cli.machine import Trust
    from plainsong.cli.ping import ProbeResult

#: The daemon's variable for storage.data_dir.
DATA_DIR = "PLAINSONG_STORAGE__DATA_DIR"
_LOCAL = ("127.", "localhost", "[::1]")
_MARKS = {"ok": "ok  ", "warning": "WARN", "bad": "BAD "}
#: Largest acceptable difference between our clock and the daemon's.
SKEW_MS = 2_000
#: Maximum number of topics whose newest message is compared with the clock.
MAX_TOPICS = 50


@dataclass(frozen=True, slots=True)
class Examination:
    """The findings, and what an acknowledged message survives."""

    findings: list[Finding]
    survives: str
    store: str
    """The kind of the daemon's store; empty when no daemon answers."""
    syncs: Trust | None
    """The verdict on the syncs of the daemon's disk; None if they were not measured."""

    def as_json(self) -> dict[str, Any]:
        checks = [{"what": f.what, "state": f.state, "says": f.says, "hint": f.hint} for f in self.findings]
        return {"checks": checks, "survives": self.survives, "store": self.store or None, "syncs": self.syncs}


def examine(where: Where, data_dir: str | None, *, no_daemon: bool) -> Examination:
    """Examines the daemons and this machine. Raises InvalidParameter: a URL or the token file is invalid.

    Args:
      data_dir: the daemon's data directory; None: that of a local daemon, else ``./data``.
      no_daemon: examine this machine only.
    """
    found = [] if no_daemon else ping.ask(where)
    findings = [finding for each in found for finding in look_at_daemon(each)]
    if any(each.answers for each in found):
        findings += look_at_times(where)
        findings += look_at_attention(where)
        findings += look_at_copy(where)
    store = next((each.store for each in found if each.answers), "")
    directory = None
    trust: Trust | None = None
    # HBase keeps no data on the daemon's disk.
    if data_dir is not None or no_daemon or (_is_local(where) and store != "hbase"):
        told = data_dir or os.environ.get(DATA_DIR)
        running = None if told or no_daemon else directory_of_daemon(where.urls)
        directory = nearest_directory(Path(told or running or "data"))
        guessed = not told and running is None and directory.name != "data"
        if guessed:
            findings.append(_elsewhere(directory))
        of_disk, of_syncs = look_at_disk(directory)
        # The sentence is about the daemon's disk, not about the current directory's.
        trust = None if guessed else of_syncs
        findings += of_disk
    if directory is not None or _is_local(where):
        findings += look_at_limits()
    findings += look_at_clock()
    return Examination(findings, survives(store, trust, directory), store, trust)


def report(
    found: Examination,
    where: Where,
    bundle: str | None,
    *,
    config: str | None,
    log: str | None,
    hides_names: bool,
    as_json: bool,
) -> None:
    """Prints the findings, and writes the bundle if ``bundle`` names a file. Raises CommandFailed if a check failed."""
    contents: list[str] = []
    held: dict[str, Any] = {}
    if bundle is not None:
        from plainsong.cli.bundle import gather  # here, since nothing else of this verb needs it

        made = gather(where, found.as_json(), config=config, log=log, hides_names=hides_names)
        made.write(Path(bundle))
        contents = [f"\n{bundle} holds:", *(f"  {line}" for line in made.contents())]
        held = {"bundle": {"file": bundle, "holds": list(made.files)}}
    if as_json:
        echo_json(found.as_json() | held)
    else:
        _print(found.findings, found.survives)
        echo_lines(contents)
    bad = [finding.what for finding in found.findings if finding.state == "bad"]
    if bad:
        raise CommandFailed(f"checks failed: {', '.join(bad)}", hint="the lines marked BAD say what to do")


def _is_local(where: Where) -> bool:
    """True if the daemon may run on this machine, so that its disk is here."""
    return any(url.split("://", 1)[-1].startswith(_LOCAL) for url in where.urls)


def _elsewhere(directory: Path) -> Finding:
    says = f"no ./data here; checking {directory} instead"
    return Finding("directory", "warning", says, "give the daemon's data directory with --data-dir")


def _print(findings: list[Finding], sentence: str) -> None:
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        mark = _MARKS[finding.state]
        click.echo(f"{coloured(mark, mark.strip())}  {finding.what:<{width}}  {finding.says}")
        if finding.hint:
            click.echo(f"      {'':<{width}}  {finding.hint}")
    click.echo(f"\n{sentence}")


# --- daemons -----------------------------------------------------------------------------------------


def look_at_daemon(found: ProbeResult) -> list[Finding]:
    """Checks that one daemon answers, has our version, and is ready."""
    if not found.answers:
        hint = "start one with plainsong serve, or give its address with --url"
        return [Finding("daemon", "bad", f"{found.url}: {one_line(found.detail)}", hint)]
    fast = show_seconds(min(found.seconds))
    version = (
        f"version {one_line(found.version)}" if found.version else "it shows its version only to authenticated clients"
    )
    findings = [Finding("daemon", "ok", f"{found.url} answers in {fast}, {version}")]
    if found.version and found.version.split(".")[:2] != __version__.split(".")[:2]:
        says = f"the daemon is version {one_line(found.version)}, this program {__version__}"
        findings.append(Finding("version", "warning", says, "use the same version on both sides"))
    if not found.ready:
        says = one_line("; ".join(found.reasons)) or "no reason given"
        findings.append(Finding("ready", "bad", says, "its log has the reason"))
    for unreached in found.unreached:
        says = one_line(f"the daemon at {found.url} cannot reach the instance {unreached}")
        hint = "check that it is running, and that the others can reach its cluster.advertise address"
        findings.append(Finding("instances", "warning", says, hint))
    return findings


def look_at_times(where: Where) -> list[Finding]:
    """Compares the daemon's clock with ours and with its newest messages."""
    ahead: list[tuple[int, str]] = []
    skew_ms: int | None = None
    try:
        with where.client() as client:
            for name in client.topics()[:MAX_TOPICS]:
                before_ms = now_ms()
                stats = client.admin.stats(name)
                if stats["oldestId"] is None or stats["newestId"] is None or stats["oldestAgeMs"] is None:
                    continue
                # Their sum is the daemon's time, unless the oldest message is from the future itself.
                theirs_ms = int(stats["oldestId"][:16], 16) + stats["oldestAgeMs"]
                if stats["oldestAgeMs"]:
                    skew_ms = theirs_ms - before_ms
                ahead.append((int(stats["newestId"][:16], 16) - theirs_ms, name))
    except PlainsongError as error:
        return [Finding("topics", "bad", one_line(error.detail), one_line(error.hint))]
    findings = []
    if skew_ms is not None and abs(skew_ms) > SKEW_MS:
        says = f"the daemon's clock is {show_length(abs(skew_ms))} {'ahead of' if skew_ms > 0 else 'behind'} ours"
        findings.append(Finding("clocks", "warning", says, "relative times (--from -10m) use our clock"))
    if ahead and (most := max(ahead))[0] > SKEW_MS:
        says = f"the newest message of {most[1]} is {show_length(most[0])} ahead of the daemon's clock"
        hint = "its clock went back; ids keep rising, times do not advance until the clock has caught up"
        findings.append(Finding("clock history", "warning", says, hint))
    return findings


def look_at_copy(where: Where) -> list[Finding]:
    """Reports the lag of the store's second copy, and how long a write to its object store takes."""
    try:
        with where.client() as client:
            found = run_call(client, calls.replication())
    except NotFound:
        return []  # an earlier version
    except PlainsongError as error:
        return [Finding("second copy", "warning", one_line(error.detail), one_line(error.hint))]
    if found["role"] == "none":
        return []
    says = f"{found['to']}: epoch {found['epoch']}, {counted(found['lagCommits'] or 0, 'commit')} behind"
    half_ms, most_ms = found["putP50Ms"], found["putP99Ms"]
    if half_ms is not None and most_ms is not None:
        half, most = show_seconds(half_ms / 1000), show_seconds(most_ms / 1000)
        says += f"; a write takes {half} (p99 {most}, of {found['puts']}), and never replaces an object"
    return [Finding("second copy", "ok", one_line(says))]


def look_at_attention(where: Where) -> list[Finding]:
    """Returns what needs attention at any instance, as warnings; monitoring uses ``doctor --check`` instead."""
    try:
        with where.client() as client:
            found = run_call(client, calls.attention())
    except PlainsongError as error:
        return [Finding("attention", "warning", one_line(error.detail), one_line(error.hint))]
    findings = []
    for each in found:
        subject = f"{each['subject']}: " if each["subject"] else ""
        findings.append(Finding("attention", "warning", one_line(f"{each['severity']}: {subject}{each['text']}")))
    return findings
