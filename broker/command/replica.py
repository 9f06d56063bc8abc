"""``plainsong replica``: shows, verifies, restores and gives up the second copy in an object store; moves its primary."""

from __future__ import annotations

import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click
import trio

from actors.copy_start import is_deposed, leave_copy
from actors.restoring_copy import compare_bases, refuse_late_clock, restore_copy
from actors.settling import settle_alone
from broker.command.failures import reported
from broker.command.options import load_settings, setting_options, time_ms, until_ctrl_c
from broker.replication import open_objects
from plainsong.cli import replicas
from plainsong.cli.command import CommandFailed, Exit, Verb, VerbGroup, json_option
from plainsong.cli.connection import where_options
from plainsong.cli.options import show_time
from plainsong.cli.output import counted, echo_json, note, show_bytes
from storage.base import StoreUnusable
from storage.clock import now_ms
from storage.directory import DataDirectory, opening_failed, sync_directory
from storage.leveldb import LevelDBOptions, LevelDBStore
from storage.replication.carry import ObjectStoreUnavailable
from storage.replication.notices import LEASE, decode_lease
from storage.replication.protocol import ROOT
from storage.replication.reading import bases_of, check_store, read, store_of
from storage.replication.reading import verify as verify_copy
from storage.replication.record import read_record, remove_record
from storage.replication.record import rejoin as make_standby
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from actors.restoring_copy import ComparedBases
    from plainsong.cli.connection import Where
    from storage.replication.carry import Objects
    from storage.replication.notices import Lease
    from storage.replication.record import Record

_URL = click.argument("url", metavar="URL")
_TIMEOUT = click.option(
    "--timeout", "timeout_s", type=click.FloatRange(0.1), default=30.0, show_default=True, help="Seconds per request."
)
#: Contents of the scratch folder of an interrupted restore.
_SCRATCH = {"replayed", "backup", "store"}


@click.group(cls=VerbGroup)
def replica() -> None:
    """Check and restore the second copy in an object store, and let a standby take over.

    URL is that of replication.to: s3://bucket/prefix, gs://bucket/prefix,
    az://container/prefix or file:/path. Credentials, region and endpoint come
    from the environment (for S3 AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
    AWS_REGION, AWS_ENDPOINT; or GOOGLE_…, AZURE_STORAGE_…). Only `leave` and
    `rejoin` need the daemon to be stopped.
    """


# --- status ----------------------------------------------------------------------------------------


@replica.command(cls=Verb, examples=["plainsong replica status s3://bucket/plainsong"])
@_URL
@_TIMEOUT
@json_option
def status(url: str, timeout_s: float, as_json: bool) -> None:
    """Show the bases of a copy, its primary and its standbys, without reading its log.

    Exits with 1 if there is no base, since then nothing can be restored. The
    metrics of the daemon and `GET /v1/replication` show how far its log reaches.
    """
    show_bases(url, timeout_s, as_json=as_json)


def show_bases(url: str, timeout_s: float, *, as_json: bool) -> None:
    """Print the bases of a copy. Raises Exit if there is none."""

    async def look(objects: Objects) -> None:
        store, bases = await store_of(objects), await bases_of(objects)
        found = await read(objects, LEASE)
        lease = None if found is None else decode_lease(found.data)
        shown = [
            {"epoch": base.place.epoch, "commit": base.until, "timeMs": base.until_ms, "bytes": base.size}
            for base in bases
        ]
        if as_json:
            echo_json({"store": store, "bases": shown, **_shown_lease(lease)})
        else:
            click.echo(f"copy of store {store}: {counted(len(bases), 'complete base')}")
            for base in bases:
                click.echo(f"  {show_time(base.until_ms)}  commit {base.until}  {show_bytes(base.size)}")
            for line in _lines_of(lease):
                click.echo(line)
        if not bases:
            raise click.exceptions.Exit(Exit.FAILED)

    _run(url, timeout_s, look)


def _shown_lease(lease: Lease | None) -> dict[str, object]:
    if lease is None:
        return {"primary": None, "standbys": [], "automatic": None}
    return {
        "primary": {"holder": lease.holder, "urls": list(lease.urls), "epoch": lease.epoch},
        "standbys": [{"holder": each.holder, "lastCommit": each.commit} for each in lease.standbys],
        "automatic": _is_automatic(lease),
    }


def _lines_of(lease: Lease | None) -> Iterator[str]:
    if lease is None:
        yield "no lease: standbys take over by hand"
        return
    at = f" at {', '.join(lease.urls)}" if lease.urls else ""
    yield f"primary {lease.holder or 'of an unknown machine'}{at}, epoch {lease.epoch}"
    for each in lease.standbys:
        yield f"standby {each.holder or 'on an unknown machine'}, commit {each.commit} or later"
    if not lease.allows_standby:
        yield "the primary allows no standby"
    elif not lease.standbys:
        yield "no standby is registered"
    elif not _is_automatic(lease):
        yield "standbys take over by hand"


def _is_automatic(lease: Lease) -> bool:
    return bool(lease.standbys) and lease.guarded and lease.period_ms > 0


# --- verify ----------------------------------------------------------------------------------------


@replica.command(
    cls=Verb,
    examples=["plainsong replica verify s3://bucket/plainsong", "plainsong replica verify file:/mnt/copy --deep"],
)
@_URL
@click.option("--deep", is_flag=True, help="Also compare each base with the replay from the one before.")
@click.option(
    "--scratch",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    metavar="DIR",
    help="With --deep: where to put two stores for its duration; default: the system's.",
)
@_TIMEOUT
@json_option
def verify(url: str, deep: bool, scratch: Path | None, timeout_s: float, as_json: bool) -> None:
    """Read every base and the log after the oldest, and check all of it.

    With --deep it also replays the log from each base to the next, and compares
    the rows. It needs free space for twice the store.

    Exits with 1 if something is missing or damaged, or if there is no base.
    """
    check_copy(url, timeout_s, deep=deep, scratch=scratch, as_json=as_json)


def check_copy(url: str, timeout_s: float, *, deep: bool, scratch: Path | None = None, as_json: bool) -> None:
    """Read a copy, and print the result. Raises Exit if it is damaged."""

    async def look(objects: Objects) -> None:
        found = await verify_copy(objects)
        compared: ComparedBases | None = None
        if deep and found.ok:
            with TemporaryDirectory(prefix="plainsong-verify-", dir=scratch) as folder:
                compared = await compare_bases(objects, Path(folder))
            found.problems += compared.problems
        last = None if found.end is None else found.end.commit
        if as_json:
            echo_json(
                {
                    "ok": found.ok,
                    "store": found.store,
                    "bases": [base.until for base in found.bases],
                    "segments": found.segments,
                    "commits": found.commits,
                    "last": last,
                    "gapsAfter": found.gaps,
                    "voidSegments": found.void,
                    "problems": found.problems,
                    **({} if compared is None else {"equalBases": compared.equal, "aloneBases": compared.alone}),
                }
            )
        else:
            for problem in found.problems:
                click.echo(f"damaged  {problem}")
            for gap in found.gaps:
                click.echo(f"gap      after commit {gap}; the log continues after a later base")
            if found.void:
                click.echo(f"void     {counted(found.void, 'segment')} of a clone of the primary")
            if compared is not None:
                same = counted(len(compared.equal), "base")
                click.echo(f"replayed the log; {same} compared and equal")
            read = f"{counted(len(found.bases), 'base')}, {counted(found.segments, 'segment')}"
            verdict = "complete and undamaged" if found.ok else "DAMAGED"
            verdict = verdict if found.bases else "NO complete base"
            reach = "" if last is None else f", up to commit {last}"
            click.echo(f"copy of store {found.store}: {read} with {counted(found.commits, 'commit')}{reach}: {verdict}")
        if not found.ok:
            raise click.exceptions.Exit(Exit.FAILED)

    _run(url, timeout_s, look)


# --- restore ---------------------------------------------------------------------------------------


@replica.command(
    cls=Verb,
    examples=[
        "plainsong replica restore s3://bucket/copy --to leveldb:/var/lib/plainsong",
        "plainsong replica restore file:/mnt/copy --to leveldb:new --commit 4711",
    ],
)
@_URL
@click.option("--to", "target", required=True, metavar="STORE", help="leveldb:DIR; DIR is new or empty.")
@click.option("--at", "at", metavar="TIME", help="Skip later commits.")
@click.option("--commit", "commit", type=click.IntRange(0), metavar="N", help="Skip commits after this one.")
@click.option("--now", "now", metavar="TIME", help="The current time, if this machine's clock is behind.")
@_TIMEOUT
@json_option
def restore(
    url: str, target: str, at: str | None, commit: int | None, now: str | None, timeout_s: float, as_json: bool
) -> None:
    """Restore a copy into a new directory that a daemon can serve.

    Takes the newest base before the point, and the commits after it. Clients
    then see the same as after `plainsong backup restore`: open transactions are
    invalid, producers open their sessions again, and no id is assigned twice.
    Needs free space for three times the store, next to DIR.
    After an interruption, run the same command again: it starts over.
    """
    restore_from(url, target, at, commit, now, timeout_s, as_json=as_json)


def restore_from(
    url: str, target: str, at: str | None, commit: int | None, now: str | None, timeout_s: float, *, as_json: bool
) -> None:
    """Restore a copy, and print the result. Raises CommandFailed."""
    kind, _, place = target.partition(":")
    if kind != "leveldb" or not place:
        raise CommandFailed(f"--to {target!r} is not leveldb:DIR", code=Exit.USAGE)
    directory = Path(place).absolute()
    to_ms = None if at is None else time_ms("--at", at)
    present_ms = now_ms() if now is None else time_ms("--now", now)

    async def work(objects: Objects) -> None:
        scratch = await in_thread(_scratch_of, directory)
        restored_ms = await refuse_late_clock(objects, present_ms, is_given=now is not None)
        done, compared = await restore_copy(
            objects, scratch / "store", scratch, restored_ms, to_commit=commit, to_ms=to_ms, report=note
        )
        await in_thread(_move, scratch, directory)
        rows = sum(each.target.rows for each in compared or ())
        if as_json:
            echo_json(
                {"store": done.store, "base": done.base.until, "commit": done.end.commit, "timeMs": done.end.time_ms}
            )
        else:
            when = "" if done.end.time_ms is None else f" of {show_time(done.end.time_ms)}"
            gap = ", where the log has a gap" if done.end.gap else ""
            click.echo(f"restored up to commit {done.end.commit}{when}{gap}: {counted(rows, 'row')}")

    _run(url, timeout_s, work)


def _scratch_of(directory: Path) -> Path:
    """Return an empty folder next to the directory to make. Raises StoreUnusable."""
    scratch = directory.with_name(directory.name + ".restoring")
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise StoreUnusable(f"{directory} is not empty", hint="name a new directory: nothing is overwritten")
        if scratch.exists():
            if {each.name for each in scratch.iterdir()} - _SCRATCH:
                raise StoreUnusable(f"{scratch} has files that are not from a restore", hint="move these files away")
            shutil.rmtree(scratch)
        scratch.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise opening_failed(error, directory) from error
    return scratch


def _move(scratch: Path, directory: Path) -> None:
    try:
        (scratch / "store").rename(directory)
        sync_directory(directory.parent)
        shutil.rmtree(scratch)
    except OSError as error:
        raise opening_failed(error, directory) from error


# --- take-over, switch, rejoin ---------------------------------------------------------------------


@replica.command(cls=Verb, examples=["plainsong replica takeover --url http://standby:7420"])
@json_option
@where_options
def takeover(as_json: bool, where: Where) -> None:
    """Make a running standby the primary, whether or not the current one lives.

    The URL is the standby's. The current primary, if it is alive, ends at its next
    upload. If its copy is asynchronous, commits that it has not sent are lost:
    `plainsong replica switch` loses nothing.
    """
    done = replicas.take_over(where)
    if as_json:
        echo_json(done)
    else:
        click.echo(f"the standby has taken over: epoch {done['epoch']}")


@replica.command(cls=Verb, examples=["plainsong replica switch --url http://primary:7420"])
@json_option
@where_options
def switch(as_json: bool, where: Where) -> None:
    """Hand over from a running primary to its standby; nothing is lost.

    The URL is the primary's. It finishes all requests, sends every commit, ends
    the log cleanly and then follows as a standby. The other standby takes over at
    once; with replication.lease_s = 0, or in a folder (file:), only by
    `plainsong replica takeover`. Refused while the object store does not respond.
    """
    done = replicas.switch_primary(where)
    if as_json:
        echo_json(done)
        return
    says = f"the primary stops after commit {done['lastCommit']} or later; then it follows as a standby"
    # A daemon of an earlier version does not say it.
    if not done.get("automatic", True):
        says += "; no standby takes over by itself: then run plainsong replica takeover at the standby"
    click.echo(says)


@replica.command(cls=Verb, examples=["plainsong replica rejoin --config /etc/plainsong.toml"])
@setting_options
@click.option("--force", is_flag=True, help="Do it even if no other process is known to have taken over.")
@json_option
def rejoin(
    file: Path | None, data_dir: str | None, bind: str | None, sets: tuple[str, ...], force: bool, as_json: bool
) -> None:
    """Make the directory of a stopped, deposed primary a standby's.

    Moves its store to the folder deposed-TIME in the directory: it may have
    commits that never counted. The daemon then starts as a standby. After an
    interruption, run the same command again, or start the daemon: both continue.

    Refused, with exit code 1, if the log in the object store shows that no other
    process has taken over: start the daemon then, which sends what is missing.
    """
    config = load_settings(file, data_dir, bind, sets).config
    directory = config.storage.data_dir.absolute()
    with reported():
        home = DataDirectory.open(directory, address="plainsong replica rejoin")
        try:
            record = read_record(directory)
            if record is None:
                raise StoreUnusable(f"{directory} has no second copy", hint="name the daemon's data directory")
            if record.standby and not record.aside:
                raise StoreUnusable(f"{directory} is already a standby's", hint="start the daemon")
            if config.replication.to:
                objects = open_objects(config.replication.to, config.replication.timeout_s)
                # An interrupted run of this command has looked already.
                is_decided = force or record.standby
                look = (
                    partial(_check_store, objects, record.store)
                    if is_decided
                    else partial(_is_deposed, objects, record)
                )
                trio.run(until_ctrl_c, look)
            elif not (force or record.standby):
                raise StoreUnusable("replication.to is not set", hint="set it as before, or give --force")
            aside = directory / make_standby(directory, record, now_ms())
        finally:
            home.close()
    if as_json:
        echo_json({"store": record.store, "dataDir": str(directory), "aside": str(aside)})
    else:
        click.echo(f"{directory} is now a standby's; its former store is in {aside}")


async def _is_deposed(objects: Objects, record: Record) -> None:
    """Return if another process has continued the log of a primary's directory.

    Raises:
      CommandFailed: none has.
      Foreign: the prefix has the log of another store.
      StoreError, DamagedLog: that cannot be read.
    """
    try:
        if await is_deposed(objects, record):
            return
    except ObjectStoreUnavailable as error:
        raise ObjectStoreUnavailable(
            f"the log cannot be read: {error.detail}", hint="try again once the object store responds, or give --force"
        ) from error
    raise CommandFailed(
        "no other process has taken over the log of this directory, which is still the primary's",
        hint="start the daemon: it serves, and sends what the object store lacks; if it refuses to start, or if this "
        "directory is to become a standby's all the same, give --force: messages that were not sent are then only in "
        "the folder deposed-TIME",
    )


async def _check_store(objects: Objects, store: str) -> None:
    """Raise Foreign if a prefix has the log of another store; an object store that is away decides nothing."""
    with suppress(ObjectStoreUnavailable):
        await check_store(objects, store)


# --- leave -----------------------------------------------------------------------------------------


@replica.command(cls=Verb, examples=["plainsong replica leave --config /etc/plainsong.toml"])
@setting_options
@click.option("--without-seal", is_flag=True, help="Do not write to the object store, for example because it is lost.")
@json_option
def leave(
    file: Path | None,
    data_dir: str | None,
    bind: str | None,
    sets: tuple[str, ...],
    without_seal: bool,
    as_json: bool,
) -> None:
    """Give up the copy of a stopped daemon's directory.

    Ends the log in the object store, which can still be restored, and unlinks
    the directory from it. The daemon then starts without replication.to, or
    with a new prefix, where a new copy begins. Its standbys end: none takes over.
    If the object store stops responding, the command ends; run it again.

    On a standby's directory only with --without-seal, if both its primary and the
    object store are lost. What clients see then is as after a restore. It is
    refused before the standby has caught up with its base.
    """
    config = load_settings(file, data_dir, bind, sets).config
    directory = config.storage.data_dir.absolute()
    with reported():
        home = DataDirectory.open(directory, address="plainsong replica leave")
        try:
            record = None if home.is_new else read_record(directory)
            if record is None:
                raise StoreUnusable(f"{directory} has no second copy", hint="name the daemon's data directory")
            if record.standby and not without_seal:
                raise StoreUnusable(
                    f"{directory} is a standby's: leaving would end the log of its primary", hint="remove the directory"
                )
            if record.standby and record.place == ROOT:
                raise StoreUnusable(
                    f"{directory} has only an incomplete store of a standby",
                    hint="after plainsong replica rejoin, the store of the former primary is in its folder "
                    "deposed-TIME",
                )
            if not without_seal:
                if not config.replication.to:
                    raise StoreUnusable("replication.to is not set", hint="set it as before, or give --without-seal")
                objects = open_objects(config.replication.to, config.replication.timeout_s)
                trio.run(until_ctrl_c, partial(leave_copy, objects, directory, record))
            # Locked until the end: a daemon that started after the seal would continue the log.
            if record.standby or record.settle is not None:
                settle = partial(_settle, home, LevelDBOptions(config.storage), record, config.replication.lease_s)
                trio.run(until_ctrl_c, settle)
            else:
                remove_record(directory)
        finally:
            home.close()
    if as_json:
        echo_json({"store": record.store, "dataDir": str(directory), "sealed": not without_seal})
    else:
        click.echo(f"{directory} no longer has a second copy")


async def _settle(home: DataDirectory, options: LevelDBOptions, record: Record, lease_s: float) -> None:
    """Apply the rules of a restore to a store that continues without its log, and remove the directory's record of it.

    Releases the directory. Raises StoreUnusable, StoreError.
    """
    async with await LevelDBStore.open(home.path, options, follows=True, locked=home) as store:
        await settle_alone(store, record, now_ms, lease_s)
        await in_thread(remove_record, home.path)


# --- shared by all --------------------------------------------------------------------------------


def _run(url: str, timeout_s: float, work: Callable[[Objects], Awaitable[None]]) -> None:
    async def run() -> None:
        await work(open_objects(url, timeout_s))

    with reported():
        trio.run(until_ctrl_c, run)
