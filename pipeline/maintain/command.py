"""``plainsong pipeline run maintain``: what waits to be cleaned, the plan for it, and in HBase the cleaning itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipeline.job import Run, job_options
from pipeline.maintain.asking import store_kind
from pipeline.maintain.looking import look_at
from pipeline.maintain.shown import HEADINGS, PLAN_HEADINGS, as_json, plan_rows, pruning_facts, pruning_json, row_of
from plainsong.cli import output
from plainsong.cli.options import chosen
from plainsong.cli.verb import CommandFailed, Exit, Verb
from protocol.errors import GenerationChanged, TopicNotFound, TransactionsUnavailable

if TYPE_CHECKING:
    from pipeline.maintain.looking import Look
    from plainsong import Client
    from plainsong.transactions.values import Pruning

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
    from pipeline.maintain.carrying import carry_out, needed  # here: the store takes a moment

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
