"""``plainsong ping``: is the daemon there, is it ready, how far away is it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from plainsong.cli.daemons import Found, ask
from plainsong.cli.exits import CommandFailed, Exit
from plainsong.cli.say import echo_json
from plainsong.cli.tables import show_seconds
from plainsong.cli.verb import Verb, json_option, one_line
from plainsong.cli.where import where_options

if TYPE_CHECKING:
    from plainsong.cli.where import Where


@click.command(
    cls=Verb,
    examples=[
        "plainsong ping",
        "plainsong ping --url http://a.example:7420,http://b.example:7420",
        "plainsong ping --json",
    ],
)
@click.option("--count", type=click.IntRange(1, 1000), default=5, show_default=True, metavar="N", help="Pings to each.")
@json_option
@where_options
def ping(count: int, as_json: bool, where: Where) -> None:
    """Ask daemons whether they are there and ready.

    Each URL is asked. Ends with 0 when one of them is ready, with 5 when none
    is.
    """
    found = ask(where, count=count)
    if as_json:
        echo_json([each.as_json() for each in found])
    else:
        for each in found:
            click.echo(_line(each))
    if not any(each.ready for each in found):
        hint = "is it running there? plainsong serve starts one; plainsong doctor looks closer"
        raise CommandFailed("no daemon is ready", hint=hint, code=Exit.UNAVAILABLE)


def _line(found: Found) -> str:
    if not found.answers:
        return f"{found.url}  no answer: {one_line(found.detail)}"
    ready = "ready" if found.ready else "NOT READY: " + one_line("; ".join(found.reasons))
    return f"{found.url}  {show_seconds(min(found.seconds))}  plainsong {one_line(found.version)}  {ready}"
