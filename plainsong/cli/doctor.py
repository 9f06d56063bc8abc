"""The verb `doctor`: examines disk, clock, limits and daemon, and says what an acknowledged message survives.

With `--check`, `--ready`, `--live` or `--attention` it asks the daemons one question instead.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from plainsong.cli import check as monitoring
from plainsong.cli.command import CommandFailed, Verb, json_option
from plainsong.cli.connection import where_options
from plainsong.cli.options import Length

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plainsong.cli.connection import Where

#: Questions to daemons, each instead of the whole examination.
QUESTIONS = ("check", "ready", "live", "attention")
#: The options of the whole examination, and of each question and of --bundle.
_OPTIONS_OF = {
    "": ("data_dir", "no_daemon", "bundle"),
    "bundle": ("config", "log", "no_names"),
    "check": ("lags", "transaction_s", "certificate_days", "backup_s"),
    "ready": ("count",),
}


class Examining(Verb):
    """Refuses options of another question. With ``--check`` a wrong command line is UNKNOWN, as plugins answer."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_check = "--check" in takewhile(lambda each: each != "--", args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if is_check:
                monitoring.end_unknown(ctx, error.format_message())
            raise

    def invoke(self, ctx: click.Context) -> Any:
        try:
            self._refuse_others(ctx)
            return super().invoke(ctx)
        except (click.UsageError, CommandFailed) as error:
            if ctx.params["check"]:
                monitoring.end_unknown(
                    ctx, error.format_message() if isinstance(error, click.UsageError) else error.message
                )
            raise

    def _refuse_others(self, ctx: click.Context) -> None:
        """Raise UsageError if there are options that the chosen question does not take."""
        questions = [each for each in QUESTIONS if ctx.params[each]]
        if len(questions) > 1 and questions != ["ready", "live"]:
            raise click.UsageError(" and ".join(f"--{each}" for each in questions) + " exclude each other")
        for owner, names in _OPTIONS_OF.items():
            is_right = ctx.params[owner] not in (None, False) if owner else not questions
            given = [name for name in names if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
            if given and not is_right:
                flags = [param.opts[0] for param in self.params if param.name in names]
                listed = ", ".join(flags[:-1]) + " and " + flags[-1] if len(flags) > 1 else flags[0]
                verb = "are" if len(flags) > 1 else "is"
                where = f"{verb} only for --{owner}" if owner else f"{verb} not for --{questions[0]}"
                raise click.UsageError(f"{listed} {where}")


@click.command(
    cls=Examining,
    examples=[
        "plainsong doctor",
        "plainsong doctor --data-dir /srv/plainsong",
        "plainsong doctor --no-daemon --json",
        "plainsong doctor --bundle facts.tar.gz --no-names",
        "plainsong doctor --ready --url http://a.example:7420,http://b.example:7420",
        "plainsong doctor --live --url unix:/run/plainsong/plainsong.sock",
        "plainsong doctor --check --max-lag shop:orders/billing=1000",
        "plainsong doctor --attention",
    ],
)
@click.option("--ready", is_flag=True, help="Check only whether a daemon is ready; exit with 5 if none is.")
@click.option(
    "--count", type=click.IntRange(1, 1000), default=5, metavar="N", help="With --ready: pings to each; default: 5."
)
@click.option("--live", is_flag=True, help="Check only whether a daemon is alive, ready or not.")
@click.option("--attention", is_flag=True, help="Show only what needs attention, worst first.")
@click.option("--check", is_flag=True, help="Print one line for a monitoring system, and use its exit codes.")
@click.option(
    "--max-lag",
    "lags",
    type=monitoring.Lag(),
    multiple=True,
    metavar="NS:TOPIC/READER=N",
    help="With --check: warn when a reader is more than N messages behind. Repeatable.",
)
@click.option(
    "--max-transaction-age",
    "transaction_s",
    type=Length(),
    default="10m",
    metavar="TIME",
    help="With --check: warn when a transaction has been open for longer than this; default: 10m.",
)
@click.option(
    "--certificate-days",
    type=click.IntRange(0, 10_000),
    default=14,
    metavar="N",
    help="With --check: warn when the certificate expires within N days; default: 14.",
)
@click.option(
    "--backup-age",
    "backup_s",
    type=Length(),
    metavar="TIME",
    help="With --check: warn when the last backup is older than this (default: 26h), or missing.",
)
@click.option(
    "--data-dir", metavar="DIR", help="The daemon's data directory; default: that of a local daemon, else ./data."
)
@click.option("--no-daemon", is_flag=True, help="Check this machine only.")
@click.option(
    "--bundle", metavar="FILE.tar.gz", help="Also write the findings, without secrets, to a file that you can share."
)
@click.option("--config", metavar="FILE", help="With --bundle: the daemon's settings file.")
@click.option("--log", metavar="FILE", help="With --bundle: the daemon's log; default: the journal of its unit.")
@click.option("--no-names", is_flag=True, help="With --bundle: replace the names of topics by hashes.")
@json_option
@where_options
def doctor(
    ready: bool,
    count: int,
    live: bool,
    attention: bool,
    check: bool,
    lags: Sequence[tuple[str, str, str, int]],
    transaction_s: int,
    certificate_days: int,
    backup_s: int | None,
    data_dir: str | None,
    no_daemon: bool,
    bundle: str | None,
    config: str | None,
    log: str | None,
    no_names: bool,
    as_json: bool,
    where: Where,
) -> int | None:
    """Check disk, clock, limits and daemon.

    Measures how long the data disk takes to sync (with a small file of its own,
    for a second at most), checks whether that is plausible, and states what an
    acknowledged message survives, and what of the daemon needs attention. Exits
    with 1 if a check fails.

    --bundle writes a tar file with these findings, versions, settings, metrics,
    instances, what needs attention, open transactions and the end of the log,
    and lists what it holds. No payload, attribute, token or key is in it.

    --ready asks each URL, and exits with 0 when at least one daemon is ready.
    With --live a daemon counts even when it is not ready (its disk is full, or
    it is recovering): a restart would not help. --attention lists held readers,
    old transactions and full disks, at all instances of a cluster.

    --check prints one line in the format of Nagios plugins, with performance
    data after a bar, and exits with their codes, not with those of other
    commands: 0 OK; 1 warning; 2 critical, also if a daemon is not ready or
    refuses the connection; 3 unknown: wrong arguments, no answer in time, or a
    name that may not inspect the service.
    """
    # Imported here, so that a health check loads only what it needs.
    if check:
        limits = monitoring.Limits(lags, transaction_s, certificate_days, backup_s)
        return monitoring.check_daemons(where, limits, as_json=as_json)
    if ready or live:
        from plainsong.cli.ping import show_probes

        show_probes(where, count=count, live=live, as_json=as_json)
    elif attention:
        from plainsong.cli.attention import show_attention

        show_attention(where, as_json=as_json)
    else:
        from plainsong.cli.examination import examine, report

        examined = examine(where, data_dir, no_daemon=no_daemon)
        report(examined, where, bundle, config=config, log=log, hides_names=no_names, as_json=as_json)
    return None
