"""The job `archive`: its commands and their output."""

from __future__ import annotations

from typing import Any

import click

from plainsong.cli import output
from plainsong.cli.command import CommandFailed, Exit, VerbGroup
from plainsong.cli.options import Length, Place
from pyspark_plainsong.pipeline.job import Run, job_options

_root = click.option(
    "--root", required=True, metavar="PATH|URL", help=("Folder of the archive; it can hold several topics.")
)
_compression = click.option(
    "--compression", default="zstd", type=click.Choice(["zstd", "snappy", "lz4_raw", "gzip", "none"]), show_default=True
)
_isolation = click.option(
    "--isolation",
    type=click.Choice(["committed", "uncommitted"]),
    help=("Isolation of reading; default: the connector's."),
)


class Keep(click.ParamType[int]):
    """A length of time in milliseconds, or 0."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Milliseconds."""
        if isinstance(value, int) or str(value) in ("0", "0s"):
            return int(str(value).removesuffix("s"))
        return Length(0.001).convert(value, param, ctx)


@click.group(cls=VerbGroup)
def archive() -> None:
    """Keep topics as Delta tables, beyond their expiry.

    Each topic is a Delta table that any engine reads, partitioned by day (UTC).
    Each message is in it once, even if a run is killed.
    """


@archive.command(
    examples=[
        "plainsong pipeline run archive append orders --root archive",
        "plainsong pipeline run archive append 'orders-*' --root archive --follow",
    ]
)
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC|PATTERN...")
@_root
@click.option(
    "--follow", is_flag=True, help=("Continue until interrupted, instead of stopping when everything is archived.")
)
@click.option("--every", default="10s", metavar="TIME", type=Length(), help="Interval of --follow; default: 10s.")
@click.option(
    "--batch-rows", default=500_000, type=click.IntRange(1), show_default=True, help="Maximum rows of one batch."
)
@click.option(
    "--batch-bytes", default=256 << 20, type=click.IntRange(1), show_default=True, help="Maximum bytes of one batch."
)
@_compression
@_isolation
@click.option(
    "--may-lose", is_flag=True, help=("Skip messages that expired before they were archived, instead of failing.")
)
@click.option(
    "--warn-at",
    default=0.5,
    type=click.FloatRange(0, 1),
    show_default=True,
    help=("Fraction of the ttl after which a message is late."),
)
@click.option("--fail-when-behind", is_flag=True, help="End with exit code 1 after such a warning.")
@job_options("archive")
def append(run: Run, topics: tuple[str, ...], root: str, **options: Any) -> None:
    """Bring the archive up to date with topics.

    Archived messages are not read again. Several topics are archived one after
    another; with --follow all at the same time.
    """
    from pyspark_plainsong.pipeline.archive import archiving  # here, so that help needs no pyspark

    every, follow, fail = options.pop("every"), options.pop("follow"), options.pop("fail_when_behind")
    behind = archiving.append(run, topics, root, every=f"{every} seconds" if follow else None, **options)
    if behind and fail:
        raise CommandFailed(
            f"the archive was behind for {', '.join(behind)}", hint="it has caught up, unless the warning is repeated"
        )


@archive.command(examples=["plainsong pipeline run archive compact --root archive"])
@click.argument("topics", nargs=-1, metavar="[TOPIC|PATTERN]...")
@_root
@_compression
@click.option("--today", is_flag=True, help="Also compact the day that is not complete in the archive.")
@click.option(
    "--keep",
    default="7d",
    metavar="TIME",
    type=Keep(),
    help="Keep replaced files this long, for time travel and running queries; default: 7d.",
)
@job_options("archive")
def compact(run: Run, topics: tuple[str, ...], root: str, compression: str, today: bool, keep: int) -> None:
    """Merge the files of each complete day, and vacuum the tables.

    The rows are compared with their checksums before and after. Can be killed at
    any point and run again; readers see each message once throughout.
    """
    from pyspark_plainsong.pipeline.archive import archiving

    archiving.compact(run, topics, root, compression=compression, today=today, keep_ms=keep)


@archive.command(examples=["plainsong pipeline run archive prune orders --root archive --older-than 365d"])
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC|PATTERN...")
@_root
@click.option("--older-than", required=True, metavar="TIME", type=Length(0.001), help="Age of the days that go.")
@job_options("archive")
def prune(run: Run, topics: tuple[str, ...], root: str, older_than: int) -> None:
    """Remove days that ended longer ago than a time.

    The days are out of the tables at once. `compact` deletes their files later,
    so until then an earlier version of the table still has them.
    """
    from pyspark_plainsong.pipeline.archive import archiving

    archiving.prune(run, topics, root, older_than_ms=older_than)


@archive.command(examples=["plainsong pipeline run archive migrate --root archive"])
@click.argument("topics", nargs=-1, metavar="[TOPIC|PATTERN]...")
@_root
@_compression
@click.option("--may-lose", is_flag=True, help="Continue after ranges that the archive lacks, instead of failing.")
@job_options("archive")
def migrate(run: Run, topics: tuple[str, ...], root: str, compression: str, may_lose: bool) -> None:
    """Make Delta tables of an archive that an earlier version wrote.

    Copies it entry by entry, and removes the old folders at the end. Can be
    killed at any point and run again.
    """
    from pyspark_plainsong.pipeline.archive import archiving

    archiving.migrate(run, topics, root, compression=compression, may_lose=may_lose)


@archive.command(
    examples=[
        "plainsong pipeline run archive verify orders --root archive",
        "plainsong pipeline run archive verify orders --root archive --from -2d --to -1d",
    ]
)
@click.argument("topic")
@_root
@click.option(
    "--from",
    "start",
    type=Place(now="ms"),
    default="oldest",
    metavar="PLACE",
    help=("Start here; default: the beginning."),
)
@click.option(
    "--to", "end", type=Place(now="ms"), default="now", metavar="PLACE", help=("Stop before this; default: now.")
)
@_isolation
@click.option(
    "--generation",
    type=click.IntRange(1),
    help=("Check only the files of this generation, for a topic that was deleted or created again."),
)
@job_options("archive", dry_run=False)
def verify(
    run: Run,
    topic: str,
    root: str,
    start: Any,
    end: Any,
    isolation: str | None,
    generation: int | None,
) -> None:
    """Compare the archive with the topic, message by message.

    Also compares rows with their checksums, and days with the counts and digests
    in the table's log, which finds damage and gaps in messages that expired long
    ago. Exits with 1 if anything is missing, different or damaged.
    """
    from pyspark_plainsong.pipeline.archive import archiving

    first = bytes(20) if start == "oldest" else _bound(start)
    last = _bound(end)
    if generation is None:
        findings = archiving.verify(run, topic, root, first, last, isolation)
    else:
        findings = archiving.verify_files(run, topic, generation, root, first, last)
    run.progress.result("\n".join(_lines_of(findings)), "verified", topic=topic, **findings.as_json())
    if not findings.is_good:
        bad = ("missing", "different", "twice")
        wrong = [f"{output.show_messages(findings.counts[name])} {name}" for name in bad if findings.counts.get(name)]
        wrong += [f"damaged files or days: {len(findings.damaged)}"] if findings.damaged else []
        raise CommandFailed(f"the archive does not match the topic: {', '.join(wrong)}", code=Exit.FAILED)


def _bound(place: str | bytes | int) -> bytes:
    from plainsong.positions import as_bound

    assert not isinstance(place, str), place
    return as_bound(place)


def _lines_of(findings: Any) -> list[str]:
    from pyspark_plainsong.pipeline.archive.verification import VERDICTS

    wanted = [(name, says) for name, (says, _) in VERDICTS.items() if name in findings.counts]
    counts = [(name, f"{output.show_count(findings.counts[name]):>12}  {says}") for name, says in wanted]
    lines = output.facts([*counts, ("damaged", f"{len(findings.damaged):>12}  files or days whose rows changed")])
    lines += [f"{folder}: {why}" for folder, why in findings.damaged.items()]
    return lines + [f"{name}: {each}" for name, ids in findings.examples.items() for each in ids]
