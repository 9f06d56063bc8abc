"""``plainsong backup``: backups of a running deployment, and stores restored from them."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import trio

from actors.restoring import RestoredStore, RestoreRequest, RestoreRun
from broker.command.copy import CopyReport
from broker.command.failures import CONTINUES, reported
from broker.command.options import load_settings, parse_topic, time_ms, until_ctrl_c
from broker.command.replica import check_copy, restore_from, show_bases
from broker.replication import open_for_backups
from broker.stores import StoreUrl, open_named
from plainsong.cli import output
from plainsong.cli.backups import HeldCut
from plainsong.cli.command import CommandFailed, Exit, Verb, VerbGroup, json_option
from plainsong.cli.connection import where_options
from plainsong.cli.options import Length, show_time
from plainsong.cli.output import counted, echo_json, note, show_bytes, show_count
from plainsong.protocol.errors import InvalidName, NotFound, PlainsongError
from plainsong.protocol.names import TopicName
from plainsong.protocol.paging import pages
from storage.backup.files import LocalFiles, StoredFiles
from storage.backup.folder import BackupFolder, DamagedManifest, HoldsCopy, Verified, objects_of
from storage.base import StoreUnusable
from storage.clock import now_ms
from storage.copy_parts import BACKUP_ORIGIN, copy_row
from storage.copying import CopyRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from plainsong.cli.connection import Where
    from storage.backup.files import BackupFiles
    from storage.hbase.settings import HBaseConfig

#: Default time limit of a request to an object store.
TIMEOUT_S = 30.0
_FOLDER = click.argument("folder", metavar="DIR")
_TIMEOUT = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0.1),
    default=TIMEOUT_S,
    show_default=True,
    help="Seconds per request to an object store.",
)
#: Prefixes of locations that are not folders on this machine.
_REMOTE = ("s3://", "gs://", "az://")
_FILE = "file:"
#: Attempts to read a page whose rows change while it is read, on a store without snapshots.
_LISTINGS = 20
#: Compression occupies a core that a daemon on the same machine may need.
NICE = 10


@click.group(cls=VerbGroup)
def backup() -> None:
    """Back up a running deployment; verify, restore and remove backups.

    DIR holds any number of backups, which share identical data. It is a folder,
    or a prefix of its own in an object store: s3://bucket/prefix, gs://…,
    az://container/prefix. Credentials come from the environment, as for
    `plainsong replica`. Where DIR holds the second copy of a daemon, `list`,
    `verify` and `restore` work like those of `replica`.

    Only `create` needs a daemon. A backup contains no tokens, grants or keys,
    but every message, so only its owner can read a folder.
    """


def _files(place: str, timeout_s: float) -> BackupFiles:
    """Return the files below a folder or URL. Raises StoreUnusable."""
    if place.startswith(_REMOTE):
        return StoredFiles(open_for_backups(place, timeout_s), place, on_wait=note)
    path = Path(place.removeprefix(_FILE))
    if place.startswith(_FILE) and not path.is_absolute():
        raise StoreUnusable(f"{place} is not file:/path", hint="give an absolute path, or a folder without file:")
    return LocalFiles(path)


def _open(place: str, timeout_s: float) -> BackupFolder | None:
    """Open a folder of backups; None if it holds a second copy. Raises CommandFailed."""
    with reported(CONTINUES):
        try:
            return BackupFolder.open(_files(place, timeout_s))
        except HoldsCopy:
            return None


def _copy_url(place: str) -> str:
    if place.startswith(_REMOTE):
        return place
    return f"{_FILE}{Path(place.removeprefix(_FILE)).absolute()}"


# --- create ----------------------------------------------------------------------------------------


@backup.command(
    cls=Verb,
    examples=[
        "plainsong backup create /backup/plainsong",
        "plainsong backup create --url http://h1:7420 /backup --json",
        "plainsong backup create s3://bucket/backups",
    ],
)
@_FOLDER
@click.option("--without-damaged", is_flag=True, help="Skip what cannot be read, and list it.")
@json_option
@where_options
def create(folder: str, without_damaged: bool, as_json: bool, where: Where) -> None:
    """Back up everything, while the daemon serves.

    The backup contains every publish acknowledged before it began. Only data
    that DIR does not have yet is transferred. After an interruption, run it
    again: it reuses what was written. It runs at low priority.

    It fails at damaged rows. With --without-damaged it backs up the rest, lists
    what it left out, and exits with 1 if it left anything out.
    """
    os.nice(NICE)
    with reported(CONTINUES):
        kept = BackupFolder.make(_files(folder, where.timeout_s or TIMEOUT_S))
        # One instance holds the cut.
        with kept.locked(), replace(where, urls=where.urls[:1]).client() as client:
            cut = HeldCut(client, without_damaged=without_damaged)
            complete = False
            try:
                making = Making(kept, cut, without_damaged=without_damaged)
                manifest = kept.put_manifest(making.manifest())
                complete = True
            finally:
                _end(cut, complete=complete)
    if as_json:
        shown = {name: manifest[name] for name in ("id", "cutMs", "sha256")}
        left_out = {} if making.left_out is None else {"leftOut": making.left_out}
        echo_json({**shown, "topics": len(manifest["topics"]), **making.figures(), **left_out})
    else:
        figures = making.figures()
        click.echo(
            f"backup {manifest['id']}: {counted(len(manifest['topics']), 'topic')}, "
            f"{show_count(figures['messages'])} messages, {show_bytes(figures['bytes'])}; "
            f"new {counted(figures['newObjects'], 'object')}, {show_bytes(figures['newBytes'])}"
        )
    if making.left_out:
        _warn_of_left_out(manifest)
        raise click.exceptions.Exit(Exit.FAILED)


def _warn_of_left_out(manifest: Mapping[str, Any]) -> None:
    """Warn about each range missing from a backup."""
    for each in manifest.get("leftOut", ()):
        whose = "" if each["topic"] is None else f"{each['topic']}: "
        whole = " (the whole topic is left out)" if each["topic"] is not None and each["table"] == "metadata" else ""
        place = f"{each['table']} from {each['from']} to {each['to']}"
        click.echo(f"warning: left out of backup {manifest['id']}: {whose}{place}{whole}: {each['why']}", err=True)


def _end(cut: HeldCut, *, complete: bool) -> None:
    try:
        cut.end(complete=complete)
    except PlainsongError:
        note("the daemon releases the cut by itself (backup.hold_s)")


class Making:
    """Reads a cut into a folder, topic by topic."""

    def __init__(self, folder: BackupFolder, cut: HeldCut, *, without_damaged: bool = False) -> None:
        self.left_out: list[dict[str, Any]] | None = [] if without_damaged else None
        """Unreadable ranges, by topic; None if none may be left out."""
        self._folder = folder
        self._cut = cut
        self._new_objects = self._new_bytes = self._messages = self._bytes = self._objects = 0
        #: Digests of stored objects, from the last backup; other objects are read and checked before they are reused.
        self._digests = _digests(folder)
        self._stored = folder.stored()

    def manifest(self) -> dict[str, Any]:
        """Write the objects, and return the manifest for the caller to write. Raises PlainsongError, OSError."""
        begun = {name: value for name, value in self._cut.begun.items() if name not in ("expiresMs", "leftOut")}
        self._leave_out(None, self._cut.begun)
        service = self._pages("service")[0]
        metadata = self._pages("metadata")[0]
        topics = [made for each in self._cut.begun["topics"] if (made := self._topic(each)) is not None]
        left_out = {} if self.left_out is None else {"leftOut": self.left_out}
        return {**begun, "topics": topics, "service": service, "metadata": metadata, **left_out}

    def _leave_out(self, topic: str | None, answer: Mapping[str, Any]) -> None:
        """Record the ranges missing from an answer; two pages may name the same range."""
        for each in answer.get("leftOut", ()):
            place = {"topic": topic, **each}
            if self.left_out is not None and place not in self.left_out:
                self.left_out.append(place)

    def _is_whole(self, topic: str) -> bool:
        """True if no metadata of the topic is left out."""
        return not any(each["topic"] == topic and each["table"] == "metadata" for each in self.left_out or ())

    def figures(self) -> dict[str, int]:
        """Return the totals: everything read, and the new part of it."""
        return {
            "messages": self._messages,
            "bytes": self._bytes,
            "objects": self._objects,
            "newObjects": self._new_objects,
            "newBytes": self._new_bytes,
        }

    def _topic(self, topic: Mapping[str, Any]) -> dict[str, Any] | None:
        """Read a topic, and return its entry for the manifest; None if the topic is left out."""
        name = f"{topic['namespace']}:{topic['topic']}"
        objects, line = self._pages(name)
        if not self._is_whole(name):
            return None
        messages = sum(each["rows"] for each in objects if each["table"] == "messages")
        size = sum(each["bytes"] for each in objects)
        self._messages += messages
        return {**topic, "line": line, "messages": messages, "bytes": size, "objects": objects}

    def _pages(self, about: str) -> tuple[list[dict[str, Any]], str | None]:
        """Read and return all objects of a topic, and its ``line`` from the last page."""
        found: list[dict[str, Any]] = []
        line: str | None = None
        for page in pages(partial(self._page, about)):
            found += page["objects"]
            line = page["line"]
            if page["next"] is not None:
                note(f"{about}: {counted(sum(each['rows'] for each in found), 'row')}")
        self._objects += len(found)
        self._bytes += sum(each["bytes"] for each in found)
        return found, line

    def _page(self, about: str, after: str | None) -> dict[str, Any]:
        for _ in range(_LISTINGS):
            page: dict[str, Any] = {**self._cut.page(about, after)}
            self._leave_out(about if ":" in about else None, page)
            fetched = [self._fetch(each) for each in page["objects"]]
            if all(fetched):
                return page
        raise CommandFailed(
            f"{about}: its rows change faster than the backup reads them", hint="try again later", code=Exit.UNAVAILABLE
        )

    def _fetch(self, entry: dict[str, Any]) -> bool:
        """Write an object unless it exists, and record its file's digest. False if its rows have changed since."""
        name = entry["sha256"]
        if name in self._stored:
            digest = self._digests.get(name) or self._folder.digest(name)
            if digest is not None:
                entry["kept"] = digest
                return True
        try:
            data = self._cut.object(name)
        except NotFound:
            return False
        entry["kept"] = self._digests[name] = self._folder.put(name, data)
        self._stored.add(name)
        self._new_objects += 1
        self._new_bytes += len(data)
        return True


def _digests(folder: BackupFolder) -> dict[str, str]:
    try:
        last = folder.manifest(folder.last_id())
    except StoreUnusable:
        return {}
    return {entry["sha256"]: entry["kept"] for _, entry in objects_of(last)}


# --- list, verify, prune ---------------------------------------------------------------------------


@backup.command(name="list", cls=Verb, examples=["plainsong backup list /backup/plainsong"])
@_FOLDER
@_TIMEOUT
@json_option
def list_backups(folder: str, timeout_s: float, as_json: bool) -> None:
    """Show the complete backups in DIR, oldest first.

    Exits with 1 if a manifest cannot be read.
    """
    kept = _open(folder, timeout_s)
    if kept is None:
        show_bases(_copy_url(folder), timeout_s, as_json=as_json)
        return
    with reported(CONTINUES):
        manifests, damaged = kept.manifests()
    if as_json:
        fields = ("id", "createdMs", "cutMs", "store", "version", "sha256")
        shown = [
            {
                **{name: each[name] for name in fields},
                "messages": _sum(each, "messages"),
                "bytes": _sum(each, "bytes"),
                "topics": [f"{topic['namespace']}:{topic['topic']}" for topic in each["topics"]],
                **({"leftOut": each["leftOut"]} if each.get("leftOut") else {}),
            }
            for each in manifests.values()
        ]
        broken = [{"id": backup_id, "damaged": why} for backup_id, why in damaged.items()]
        echo_json(sorted([*shown, *broken], key=lambda each: str(each["id"])))
    else:
        rows = [
            (
                each["id"],
                show_time(each["cutMs"]),
                each["store"],
                show_count(len(each["topics"])),
                show_count(_sum(each, "messages")),
                show_bytes(_sum(each, "bytes")),
            )
            for each in manifests.values()
        ]
        header = ("BACKUP", "AS OF", "STORE", ">TOPICS", ">MESSAGES", ">BYTES")
        output.echo_lines(output.table(header, rows, columns=200))
        for manifest in manifests.values():
            _warn_of_left_out(manifest)
        _warn_of_manifests(damaged)
    if damaged:
        raise click.exceptions.Exit(Exit.FAILED)


def _warn_of_manifests(damaged: Mapping[str, str]) -> None:
    for why in damaged.values():
        click.echo(f"warning: {why}", err=True)


def _sum(manifest: Mapping[str, Any], field: str) -> int:
    return sum(topic[field] for topic in manifest["topics"])


@backup.command(cls=Verb, examples=["plainsong backup verify /backup/plainsong --deep"])
@_FOLDER
@click.option("--id", "backup_id", metavar="ID", help="Backup to use; default: the newest.")
@click.option("--deep", is_flag=True, help="Also parse every row.")
@_TIMEOUT
@json_option
def verify(folder: str, backup_id: str | None, deep: bool, timeout_s: float, as_json: bool) -> None:
    """Read every object of a backup, and list what is missing or damaged.

    Exits with 1 if it lists any.
    """
    kept = _open(folder, timeout_s)
    if kept is None:
        _refuse(folder, {"--id": backup_id})
        check_copy(_copy_url(folder), timeout_s, deep=deep, as_json=as_json)
        return
    with reported(CONTINUES):
        wanted = backup_id or kept.last_id()
        manifest: Mapping[str, Any] = {"id": wanted, "topics": (), "service": (), "metadata": ()}
        try:
            manifest = kept.manifest(wanted)
            found = kept.verify(manifest, deep=deep)
        except DamagedManifest as error:
            found = Verified(manifest=error.detail)
    if as_json:
        echo_json({"id": wanted, **found.shown()})
    else:
        output.echo_lines(list(_findings(manifest, found)))
    if not found.ok:
        raise click.exceptions.Exit(Exit.FAILED)


def _findings(manifest: Mapping[str, Any], found: Verified) -> Iterator[str]:
    if found.manifest is not None:
        yield found.manifest
    entries = {entry["sha256"]: (topic, entry) for topic, entry in objects_of(manifest)}
    for name in found.missing:
        topic, entry = entries[name]
        messages = entry["rows"] if entry.get("table") == "messages" else 0
        yield f"missing  {name}  {_held(topic, messages, entry['fromMs'], entry['toMs'])}"
    for each in found.damaged:
        yield f"damaged  {each.sha256}  {_held(each.topic, each.messages, each.from_ms, each.to_ms)}: {each.why}"
    verdict = "complete and intact" if found.ok else "NOT whole"
    yield f"backup {manifest['id']}: {counted(found.objects, 'object')} read, {verdict}"


def _held(topic: str | None, messages: int, from_ms: int | None, to_ms: int | None) -> str:
    """Describe an object's content in words."""
    times = "" if from_ms is None else f" from {show_time(from_ms)} to {show_time(to_ms or 0)}"
    what = f"{counted(messages, 'message')}{times}" if messages else "rows of metadata or stored payloads"
    return f"{topic or 'no topic'}: {what}"


@backup.command(
    cls=Verb, examples=["plainsong backup prune /backup --keep 7d", "plainsong backup prune /backup --keep-last 10"]
)
@_FOLDER
@click.option("--keep", "keep_ms", type=Length(0.001), metavar="TIME", help="Keep backups younger than this, e.g. 7d.")
@click.option("--keep-last", type=click.IntRange(1), metavar="N", help="Keep this many of the newest.")
@_TIMEOUT
@json_option
def prune(folder: str, keep_ms: int | None, keep_last: int | None, timeout_s: float, as_json: bool) -> None:
    """Remove old backups, then the objects that no other backup uses.

    A backup stays if either option keeps it. The newest backup and the newest
    complete one always stay. If a manifest cannot be read, that backup and all
    objects stay, and the command exits with 1.
    """
    if keep_ms is None and keep_last is None:
        raise CommandFailed(
            "no rule says which backups to keep", hint="give --keep 7d, or --keep-last 10", code=Exit.USAGE
        )
    with reported(CONTINUES):
        kept = BackupFolder.open(_files(folder, timeout_s))
        with kept.locked():
            done = kept.prune(keep_last or 1, None if keep_ms is None else now_ms() - keep_ms)
    if as_json:
        echo_json(done.shown())
    else:
        removed = f"{counted(len(done.removed), 'backup')} and {counted(done.objects, 'object')}"
        click.echo(f"removed {removed}, {show_bytes(done.bytes)}")
        _warn_of_manifests(done.damaged)
    if done.damaged:
        raise CommandFailed(
            f"no object was removed, since {', '.join(done.damaged)} may need any of them",
            hint="to discard such a backup, remove its file in backups, and prune again",
        )


# --- restore ---------------------------------------------------------------------------------------


@backup.command(
    cls=Verb,
    examples=[
        "plainsong backup restore /backup --to leveldb:/var/lib/plainsong",
        "plainsong backup restore /backup --to leveldb:new --at 2026-11-22T05:00Z",
        "plainsong backup restore /backup --to leveldb:new shop:orders --as shop:old",
    ],
)
@_FOLDER
@click.argument("topics", nargs=-1, metavar="[NS:TOPIC]...")
@click.option("--to", "target", required=True, metavar="STORE", help="leveldb:DIR or hbase:HOST:PORT[?prefix=NAME]")
@click.option("--id", "backup_id", metavar="ID", help="Backup to use; default: the newest.")
@click.option("--at", "at", metavar="TIME", help="Skip what was published later.")
@click.option("--now", "now", metavar="TIME", help="The current time, if this machine's clock is behind.")
@click.option("--as", "renamed", metavar="NS:TOPIC", help="New name of the one topic restored.")
@click.option("--config", "file", type=click.Path(path_type=Path), help="Read storage.hbase from this TOML file.")
@click.option("--progress/--no-progress", "shown", default=None, help="Show progress; default: on a terminal.")
@_TIMEOUT
@json_option
def restore(
    folder: str,
    topics: tuple[str, ...],
    target: str,
    backup_id: str | None,
    at: str | None,
    now: str | None,
    renamed: str | None,
    file: Path | None,
    shown: bool | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Restore a backup into a store that a daemon can serve.

    Verifies the backup first, refuses a store that has one of its topics, and
    compares at the end. After an interruption, run the same command again: it
    continues.

    Open transactions become invalid. Producers' sessions end: programs open
    them again, get the last stored sequence id, and send the rest. --at TIME
    (2026-11-22T05:00Z, or milliseconds since 1970) leaves out every
    transaction, batch and request with a message published later; publish time
    counts, not commit time.

    No id is assigned twice: new ids are above the current time. If this
    machine's clock is behind a backup in DIR, the command restores nothing
    until the clock is set or --now gives the time.
    """
    settings = load_settings(file, None, None, ()).config.storage.hbase
    try:
        url = StoreUrl.parse(target, settings.table_prefix)
        chosen = tuple(sorted({parse_topic(each) for each in topics})) or None
        name = None if renamed is None else parse_topic(renamed)
    except (ValueError, InvalidName) as error:
        raise CommandFailed(str(error), code=Exit.USAGE) from error
    if name is not None and len(chosen or ()) != 1:
        raise CommandFailed("--as needs exactly one topic", hint="give the topic to restore", code=Exit.USAGE)
    request = RestoreRequest(None if at is None else time_ms("--at", at), chosen, name)
    kept = _open(folder, timeout_s)
    if kept is None:
        _refuse(folder, {"the names of topics": topics, "--id": backup_id, "--as": renamed})
        restore_from(_copy_url(folder), target, at, None, now, timeout_s, as_json=as_json)
        return
    with reported(CONTINUES):
        manifest = kept.manifest(backup_id or kept.last_id())
        _refuse_damaged(manifest, kept, request)
        _warn_of_left_out(manifest)
        present_ms = _present_ms(kept, None if now is None else time_ms("--now", now))
        with CopyReport(as_json=as_json, shown=shown) as report:
            trio.run(until_ctrl_c, partial(_restore, kept, manifest, request, present_ms, url, settings, report))


async def _restore(
    kept: BackupFolder,
    manifest: Mapping[str, Any],
    request: RestoreRequest,
    present_ms: int,
    url: StoreUrl,
    settings: HBaseConfig,
    report: CopyReport,
) -> None:
    origin = f"{BACKUP_ORIGIN}{manifest['id']}"
    origin += "" if request.at_ms is None else f" at {request.at_ms}"
    origin += "" if request.renamed is None or request.topics is None else f" {request.topics[0]}"
    async with open_named(url, settings, make=True) as target:
        asked = CopyRequest(origin, request.wanted)
        # A resumed run produces the same rows as the first run, since it may have to compare them.
        before = await copy_row(target)
        begun_ms = before.begun_ms if before is not None and before.is_same(asked.row()) else present_ms
        source = await RestoredStore.open(kept, manifest, request, begun_ms)
        run = RestoreRun(source, target, asked, on_rows=report.step)
        done = await run.run(lambda: begun_ms)
    if done is None:
        report.done_before("restore", "")
    else:
        report.compared(done, "restored")


#: Tolerated difference between the clocks of two machines.
SKEW_MS = 60_000


def _present_ms(kept: BackupFolder, given_ms: int | None) -> int:
    """Return a time later than every id assigned so far, for new ids to start from. Raises CommandFailed.

    A clock that is behind the time of a backup says nothing about ids assigned after the backup. If it is behind by at
    most ``SKEW_MS``, its error is assumed to be no larger than that.
    """
    present_ms = now_ms() if given_ms is None else given_ms
    cuts, _ = kept.manifests()
    last = max(cuts, key=lambda each: int(cuts[each]["cutMs"]))
    cut_ms = int(cuts[last]["cutMs"])
    behind_ms = cut_ms - present_ms
    if behind_ms <= 0:
        return present_ms
    if given_ms is not None:
        raise CommandFailed(f"--now is before backup {last}", hint="give the current time", code=Exit.USAGE)
    if behind_ms <= SKEW_MS:
        return cut_ms + SKEW_MS
    raise CommandFailed(
        f"this machine's clock is earlier than backup {last}, so ids that were assigned since then could be assigned "
        "again",
        hint="set the clock, or give the time: --now TIME",
        code=Exit.FAILED,
    )


def _refuse_damaged(manifest: Mapping[str, Any], kept: BackupFolder, request: RestoreRequest) -> None:
    """Raise CommandFailed if an object that the restore needs is missing or damaged."""

    def needed(topic: Mapping[str, Any]) -> bool:
        # Messages of other topics decide which transactions are left out.
        is_chosen = request.topics is None or TopicName(topic["namespace"], topic["topic"]) in request.topics
        return is_chosen or request.at_ms is not None

    found = kept.verify(manifest, topics=needed)
    if not found.ok:
        lines = list(_findings(manifest, found))
        raise CommandFailed(
            "\n".join([f"backup {manifest['id']} is incomplete, and nothing was restored", *lines[:-1]]),
            hint="restore another backup, or its complete topics by name",
        )


# --- shared ----------------------------------------------------------------------------------------


def _refuse(folder: str, given: Mapping[str, object]) -> None:
    """Raise CommandFailed if there are options that do not apply to a second copy."""
    wrong = [name for name, value in given.items() if value]
    if wrong:
        raise CommandFailed(
            f"{folder} holds a second copy, which can only be read as a whole",
            hint=f"remove {' and '.join(wrong)}",
            code=Exit.USAGE,
        )
