"""``plainsong doctor``: examines disk, clock, limits and daemon, and says what an acknowledged message survives."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from plainsong.cli import daemons, health
from plainsong.cli.disk import nearest_directory
from plainsong.cli.exits import CommandFailed
from plainsong.cli.say import echo_json
from plainsong.cli.verb import Verb, json_option
from plainsong.cli.where import where_options

if TYPE_CHECKING:
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
    found = [] if no_daemon else daemons.ask(where)
    findings = [finding for each in found for finding in health.look_at_daemon(each)]
    if any(each.answers for each in found):
        findings += health.look_at_times(where)
    store = next((each.store for each in found if each.answers), "")
    directory = None
    trust: health.State | None = None
    # What is kept in HBase is on no disk of the daemon's.
    if data_dir is not None or no_daemon or (_is_local(where) and store != "hbase"):
        directory = nearest_directory(Path(data_dir or os.environ.get(DATA_DIR) or "data"))
        guessed = data_dir is None and DATA_DIR not in os.environ and directory.name != "data"
        if guessed:
            findings.append(_elsewhere(directory))
        of_disk, of_syncs = health.look_at_disk(directory)
        # The sentence is about the daemon's disk, not about the one we happen to stand on.
        trust = None if guessed else of_syncs
        findings += of_disk
    if directory is not None or _is_local(where):
        findings += health.look_at_limits()
    findings += health.look_at_clock()
    sentence = health.survives(store, trust, directory)
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


def _elsewhere(directory: Path) -> health.Finding:
    says = f"there is no ./data here; what follows is about {directory}"
    return health.Finding("directory", "warning", says, "--data-dir says where the daemon keeps its messages")


def _print(findings: list[health.Finding], sentence: str) -> None:
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        click.echo(f"{_MARKS[finding.state]}  {finding.what:<{width}}  {finding.says}")
        if finding.hint:
            click.echo(f"      {'':<{width}}  {finding.hint}")
    click.echo(f"\n{sentence}")
