"""The verb `maintain`: asks the daemon about its topics, shows what waits to be cleaned, and cleans tables in HBase."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from broker.command.failures import reported
from broker.command.maintain.plan import plan_topic
from plainsong.cli import output
from plainsong.cli.command import CommandFailed, Exit, Verb
from plainsong.cli.job import JobRun, job_options
from plainsong.cli.maintenance import store_kind
from plainsong.cli.options import chosen, show_length, show_time
from plainsong.cli.output import counted, show_count
from plainsong.protocol.errors import GenerationChanged, TopicNotFound, TransactionsUnavailable

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping

    from broker.command.maintain.plan import TopicPlan
    from plainsong import Client

#: Stores that only their daemon's process can open, and that it cleans itself.
STANDALONE = {"leveldb": "a directory that no other process may open", "memory": "its memory"}
HEADINGS = ("TOPIC", ">GEN", "EXPIRED BEFORE", ">EXPIRED ROWS", ">OLDER GENS", ">INVALID", ">PARTS")
PLAN_HEADINGS = ("TOPIC", "TABLE", "WHY", "FROM", "TO")
#: Accepted without effect: this job once ran on Spark, and schedulers still pass these options.
_OF_SPARK = {
    "master": click.option("--master", hidden=True, help="Without effect."),
    "conf": click.option("--conf", multiple=True, hidden=True, help="Without effect."),
}


def _run(*, master: str | None, conf: tuple[str, ...], **fields: Any) -> JobRun:
    del master, conf
    return JobRun("maintain", **fields)


@click.command(
    cls=Verb,
    examples=[
        "plainsong maintain",
        "plainsong maintain --dry-run 'orders-*'",
        "plainsong maintain --dry-run --parts 8 --json orders",
        "plainsong maintain --thrift hbase:9090 --parts 16",
    ],
)
@click.argument("topics", nargs=-1, metavar="[TOPIC|PATTERN]...")
@click.option(
    "--parts",
    type=click.IntRange(1, 1000),
    default=2,
    show_default=True,
    help="Number of parts to split expired ranges into, by time.",
)
@click.option(
    "--thrift", metavar="HOST:PORT", help=("HBase's Thrift gateways, comma-separated; like storage.hbase.thrift.")
)
@click.option("--thrift-ca", metavar="FILE", help="CA file for TLS to them; like storage.hbase.tls_ca.")
@click.option("--thrift-certificate", metavar="FILE", help="Like storage.hbase.tls_certificate.")
@click.option("--thrift-key", metavar="FILE", help="Like storage.hbase.tls_key.")
@click.option("--table-prefix", default="plainsong_", show_default=True, help="Like storage.hbase.table_prefix.")
@job_options(_run, _OF_SPARK)
def maintain(
    run: JobRun,
    topics: tuple[str, ...],
    parts: int,
    thrift: str | None,
    thrift_ca: str | None,
    thrift_certificate: str | None,
    thrift_key: str | None,
    table_prefix: str,
) -> None:
    """Show rows that wait to be cleaned, and clean tables in HBase.

    A daemon with an embedded store cleans by itself, and no other process can
    open that store: the command then only shows what is waiting. In HBase it
    cleans while the daemons run, many key ranges at a time. With --dry-run it
    only shows which ranges can be removed, and why. First it makes the daemon
    save each topic's time.
    """
    with run.client() as client:
        kind = store_kind(client)
        if kind not in STANDALONE and kind != "hbase":
            raise CommandFailed(
                f"the daemon's store is {kind!r}, which this version cannot clean from outside",
                hint="use the daemon's version",
                code=Exit.USAGE,
            )
        cleans = kind == "hbase" and not run.dry_run
        # Ranges to clean are cut later, at the borders of HBase's rows.
        plans = _plans(run, client, chosen(client.topics(), topics), 1 if cleans else parts)
        _show(run, plans, _pruning(client))
        if cleans:
            tls = _tls(thrift_ca, thrift_certificate, thrift_key)
            _clean(run, client, plans, parts, thrift, tls, table_prefix)
            return
    waiting = sum(each.waiting.expired for each in plans)
    if kind == "hbase":
        run.progress.result("Nothing was done (--dry-run).", "dry-run", store=kind, expiredRows=waiting, done=False)
        return
    run.progress.result(
        f"The daemon keeps its tables in {STANDALONE[kind]} ({kind}), and its janitor removes these rows: nothing was "
        "done.",
        "standalone",
        store=kind,
        expiredRows=waiting,
        done=False,
    )


def _plans(run: JobRun, client: Client, topics: list[str], parts: int) -> list[TopicPlan]:
    plans: list[TopicPlan] = []
    for number, topic in enumerate(topics, 1):
        try:
            plans.append(plan_topic(client, topic, parts))
        except (GenerationChanged, TopicNotFound) as error:
            run.warn(f"skipped {topic}: {error.detail}", "generation_changed", topic=topic)
            continue
        run.progress.step(number, of=len(topics), what=topic, last=number == len(topics))
    return plans


def _tls(ca: str | None, certificate: str | None, key: str | None) -> Callable[[], ssl.SSLContext] | None:
    if bool(certificate) != bool(key) or (certificate and not ca):
        raise CommandFailed(
            "--thrift-certificate, --thrift-key and --thrift-ca must be given together", code=Exit.USAGE
        )
    if not ca:
        return None
    from broker.stores import gateway_tls

    with reported():
        return gateway_tls(ca, certificate or "", key or "", named="--thrift-{}")


def _clean(
    run: JobRun,
    client: Client,
    plans: list[TopicPlan],
    parts: int,
    thrift: str | None,
    tls: Callable[[], ssl.SSLContext] | None,
    table_prefix: str,
) -> None:
    from broker.command.maintain.hbase import clean, gateways  # here, since the store takes a moment to load

    if thrift is None:
        raise CommandFailed(
            "the daemons keep their tables in HBase, and --thrift is missing",
            hint="give --thrift HOST:PORT, the daemons' storage.hbase.thrift; or --dry-run to see the plan",
        )
    totals = clean(run, client, gateways(thrift), table_prefix, plans, parts, tls=tls)
    removed, before, after = (sum(each) for each in zip(*totals.values(), strict=True)) if totals else (0, 0, 0)
    run.progress.result(
        f"Removed {counted(removed, 'row')}. HBase had {counted(before, 'row')} in these ranges, and has {after}.",
        "cleaned",
        store="hbase",
        removedRows=removed,
        hbaseRowsBefore=before,
        hbaseRowsAfter=after,
        done=True,
    )


# --- output ------------------------------------------------------------------------------------------


def _show(run: JobRun, plans: list[TopicPlan], pruning: Mapping[str, Any]) -> None:
    if run.as_json:
        for each in plans:
            run.progress.event("topic", **plan_json(each))
        run.progress.event("pruning", **pruning)
        return
    output.echo_lines(
        output.table(HEADINGS, [_topic_row(each) for each in plans]) if plans else ["There are no topics."]
    )
    if run.dry_run and any(each.parts for each in plans):
        rows = [row for each in plans for row in _part_rows(each)]
        output.echo_lines(["", *output.table(PLAN_HEADINGS, rows, columns=200)])
    output.echo_lines(["", *output.facts(_pruning_facts(pruning)), ""])


def _topic_row(plan: TopicPlan) -> tuple[str, ...]:
    limits = plan.limits
    return (
        limits.name.topic,
        str(limits.generation),
        show_time(limits.expired_before_ms),
        show_count(plan.waiting.expired) + ("+" if plan.waiting.estimated else ""),
        show_count(limits.generation - 1),
        "?" if limits.invalid is None else show_count(len(limits.invalid)),
        show_count(len(plan.parts)),
    )


def _part_rows(plan: TopicPlan) -> list[tuple[str, ...]]:
    """Return a line for each range, its keys in hex and without the topic's own bytes."""
    skip = len(str(plan.limits.name)) + 1
    return [
        (plan.limits.name.topic, part.table.name.lower(), part.why, part.start[skip:].hex(), part.stop[skip:].hex())
        for part in plan.parts
    ]


def plan_json(plan: TopicPlan) -> dict[str, Any]:
    """Return a plan for programs, with whole keys in hex."""
    limits = plan.limits
    return {
        "topic": str(limits.name),
        "generation": limits.generation,
        "createdMs": plan.waiting.created_ms,
        "expiredBeforeMs": limits.expired_before_ms,
        "expiredRows": plan.waiting.expired,
        "estimated": plan.waiting.estimated,
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
            for part in plan.parts
        ],
    }


def _pruning(client: Client) -> dict[str, Any]:
    """Return how far the list of invalid transactions may be pruned, or why that is unknown; for programs."""
    try:
        pruning = client.transactions.pruning()
    except TransactionsUnavailable as error:
        return {"unavailable": error.detail}
    return {
        "invalid": pruning.invalid,
        "safeBound": None if pruning.safe_bound is None else str(pruning.safe_bound),
        "maxLifetimeMs": pruning.max_lifetime_ms,
        "keptBecause": pruning.kept_because,
    }


def _pruning_facts(pruning: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the same for people."""
    if "unavailable" in pruning:
        return [("invalid transactions", f"unknown: {pruning['unavailable']}")]
    kept_because = pruning["keptBecause"]
    return [
        ("invalid transactions", show_count(pruning["invalid"])),
        ("safe bound", pruning["safeBound"] or "none yet"),
        ("longest life", show_length(pruning["maxLifetimeMs"]) if pruning["maxLifetimeMs"] else "unlimited"),
        ("pruned automatically", f"no: {kept_because}" if kept_because else "yes, after each complete pass"),
    ]
