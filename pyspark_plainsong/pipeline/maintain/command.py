"""``plainsong pipeline run maintain``: shows what waits to be cleaned and the plan for it, and in HBase cleans.

``plainsong pipeline run maintain``: what waits to be cleaned, the plan for it, and in HBase the cleaning itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from plainsong.cli import output
from plainsong.cli.options import chosen, show_length, show_time
from plainsong.cli.output import show_count
from plainsong.cli.verb import CommandFailed, Exit, Verb
from plainsong.protocol.errors import GenerationChanged, TopicNotFound, TransactionsUnavailable
from pyspark_plainsong.pipeline.job import Run, job_options
from pyspark_plainsong.pipeline.maintain.plan import look_at, store_kind

if TYPE_CHECKING:
    from plainsong import Client
    from plainsong.transactions import Pruning
    from pyspark_plainsong.pipeline.maintain.plan import Look

#: Stores that belong to one daemon's process: nobody else may open them, and their daemon cleans by itself.
STANDALONE = {"leveldb": "a directory that no other process may open", "memory": "its memory"}


@click.command(
    cls=Verb,
    examples=[
        "plainsong pipeline run maintain",
        "plainsong pipeline run maintain --dry-run 'orders-*'",
        "plainsong pipeline run maintain --dry-run --parts 8 --json orders",
        "plainsong pipeline run maintain --thrift hbase:9090 --parts 16",
    ],
)
@click.argument("topics", nargs=-1, metavar="[TOPIC|PATTERN]...")
@click.option(
    "--parts", type=click.IntRange(1, 1000), default=2, show_default=True, help="To cut expired ranges into, by time."
)
@click.option("--thrift", metavar="HOST:PORT", help="HBase's Thrift gateways, with commas: storage.hbase.thrift.")
@click.option("--table-prefix", default="plainsong_", show_default=True, help="As storage.hbase.table_prefix.")
@job_options("maintain")
def maintain(run: Run, topics: tuple[str, ...], parts: int, thrift: str | None, table_prefix: str) -> None:
    """Say what waits to be cleaned, who cleans it, and the plan; in HBase, clean.

    A daemon with a store of its own cleans by itself, and no other process may
    open that store: so nothing is done here, and Spark is not started. What is
    in HBase is cleaned beside the daemons, in parallel. With --dry-run it only
    shows which ranges of keys may go, and why. Asking makes the daemon note
    each topic's time on disk.
    """
    with run.client() as client:
        kind = store_kind(client)
        if kind not in STANDALONE and kind != "hbase":
            raise CommandFailed(
                f"the daemon's store is {kind!r}, which this version does not clean from outside",
                hint="use the version of the daemon",
                code=Exit.USAGE,
            )
        outside = kind == "hbase" and not run.dry_run
        # In HBase parts are cut where its rows end, when the cleaning begins.
        looks = _looked(run, client, chosen(client.topics(), topics), 1 if outside else parts)
        _tell(run, looks, _pruning(client))
        if outside:
            _clean(run, client, looks, parts, thrift, table_prefix)
            return
    waiting = sum(look.waiting.expired for look in looks)
    if kind == "hbase":
        run.progress.result("Nothing was done.", "dry-run", store=kind, expiredRows=waiting, done=False)
        return
    run.progress.result(
        f"The daemon keeps its tables in {STANDALONE[kind]} ({kind}), and its janitor removes these rows. "
        "Nothing is left to do, and nothing was done.",
        "standalone",
        store=kind,
        expiredRows=waiting,
        done=False,
    )


def _clean(run: Run, client: Client, looks: list[Look], parts: int, thrift: str | None, table_prefix: str) -> None:
    from pyspark_plainsong.pipeline.maintain.hbase import carry_out, needed  # here: the store takes a moment

    totals = carry_out(run, client, needed(thrift, table_prefix), looks, parts)
    removed, before, after = (sum(each) for each in zip(*totals.values(), strict=True)) if totals else (0, 0, 0)
    run.progress.result(
        f"Removed {removed} rows. HBase had {before} rows in these ranges, and has {after}.",
        "cleaned",
        store="hbase",
        removedRows=removed,
        hbaseRowsBefore=before,
        hbaseRowsAfter=after,
        done=True,
    )


def _looked(run: Run, client: Client, names: list[str], parts: int) -> list[Look]:
    looks: list[Look] = []
    for number, name in enumerate(names, 1):
        try:
            looks.append(look_at(client, name, parts))
        except (GenerationChanged, TopicNotFound) as error:
            run.warn(f"{name} is left out: {error.detail}", "generation_changed", topic=name)
            continue
        run.progress.step(number, of=len(names), what=name, last=number == len(names))
    return looks


def _tell(run: Run, looks: list[Look], pruning: Pruning | str) -> None:
    if run.as_json:
        for look in looks:
            run.progress.event("topic", **as_json(look))
        run.progress.event("pruning", **pruning_json(pruning))
        return
    output.echo_lines(output.table(HEADINGS, [row_of(look) for look in looks]) if looks else ["There are no topics."])
    if run.dry_run and any(look.parts for look in looks):
        rows = [row for look in looks for row in plan_rows(look)]
        output.echo_lines(["", *output.table(PLAN_HEADINGS, rows, columns=200)])
    output.echo_lines(["", *output.facts(pruning_facts(pruning)), ""])


def _pruning(client: Client) -> Pruning | str:
    """The daemon's figures, or why there are none."""
    try:
        return client.transactions.pruning()
    except TransactionsUnavailable as error:
        return error.detail


# --- shown -----------------------------------------------------------------------------------------
#
# What was looked at, in tables for people and as JSON for programs.


#: Above the rows of a topic's look.
HEADINGS = ("TOPIC", ">GEN", "EXPIRED BEFORE", ">EXPIRED ROWS", ">OLDER GENS", ">INVALID", ">PARTS")
#: Above a plan's.
PLAN_HEADINGS = ("TOPIC", "TABLE", "WHY", "FROM", "TO")


def row_of(look: Look) -> tuple[str, ...]:
    """A look below ``HEADINGS``."""
    limits = look.limits
    return (
        limits.name.topic,
        str(limits.generation),
        show_time(limits.expired_before_ms),
        show_count(look.waiting.expired) + ("+" if look.waiting.estimated else ""),
        show_count(limits.generation - 1),
        "?" if limits.invalid is None else show_count(len(limits.invalid)),
        show_count(len(look.parts)),
    )


def plan_rows(look: Look) -> list[tuple[str, ...]]:
    """Its parts below ``PLAN_HEADINGS``; keys in hex, without the topic's own bytes."""
    skip = len(str(look.limits.name)) + 1
    return [
        (look.limits.name.topic, part.table.name.lower(), part.why, part.start[skip:].hex(), part.stop[skip:].hex())
        for part in look.parts
    ]


def as_json(look: Look) -> dict[str, Any]:
    """A look for programs; keys whole, in hex."""
    limits = look.limits
    return {
        "topic": str(limits.name),
        "generation": limits.generation,
        "createdMs": look.waiting.created_ms,
        "expiredBeforeMs": limits.expired_before_ms,
        "expiredRows": look.waiting.expired,
        "estimated": look.waiting.estimated,
        "invalid": None if limits.invalid is None else [str(pointer) for pointer in limits.invalid],
        "snapshotPosition": None if limits.snapshot_position is None else limits.snapshot_position.hex(),
        "parts": [
            {
                "table": part.table.name.lower(),
                "why": part.why,
                "start": part.start.hex(),
                "stop": part.stop.hex(),
                "pointers": [str(pointer) for pointer in part.pointers],
            }
            for part in look.parts
        ],
    }


def pruning_facts(told: Pruning | str) -> list[tuple[str, str]]:
    """How far the list of invalid transactions may be pruned, or why nobody can say."""
    if isinstance(told, str):
        return [("invalid transactions", f"nobody can say: {told}")]
    return [
        ("invalid transactions", show_count(told.invalid)),
        ("safe bound", "none yet" if told.safe_bound is None else str(told.safe_bound)),
        ("longest life", show_length(told.max_lifetime_ms) if told.max_lifetime_ms else "without end"),
        ("pruned by itself", f"no: {told.kept_because}" if told.kept_because else "yes, after each complete pass"),
    ]


def pruning_json(told: Pruning | str) -> dict[str, Any]:
    """The same for programs; pointers as strings."""
    if isinstance(told, str):
        return {"unavailable": told}
    return {
        "invalid": told.invalid,
        "safeBound": None if told.safe_bound is None else str(told.safe_bound),
        "maxLifetimeMs": told.max_lifetime_ms,
        "keptBecause": told.kept_because,
    }
